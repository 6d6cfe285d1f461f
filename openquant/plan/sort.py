"""Sort a checkpoint's tensors: weights that may be quantized, tensors that are kept, and stacked experts.

Here the registry's patterns are matched with a checkpoint's names. A tensor that no pattern matches, or more than one,
stops the plan; the error names all such tensors.

Stored finds tensors by name template, and says under which prefixes the tensors of a class are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..patterns import MAX_DIGITS, collapse, compile_pattern, template
from ..registry.architecture import (
    MTP_LAYER,
    NEVER_QUANTIZED,
    Architecture,
    ExpertLayout,
    StackedExperts,
    absolute_patterns,
)
from ..registry.class_tensors import ClassTensors
from ..registry.rules import ModuleRule, ModuleRules
from ..weights.weight import Weight
from .architecture import text_config
from .decisions import FEW_AXES, Item, PassthroughTensor, StackedTensor

SOURCE_DTYPES = ("BF16", "F16", "F32")
# How many names an error lists for each problem.
_MOST_NAMED = 100
# What torch puts before all names of a model that DistributedDataParallel or torch.compile wraps.
_WRAPPERS = ("module.", "_orig_mod.")
# Of a model that peft has wrapped.
_PEFT = re.compile(r"\.(?:lora_\w+|base_layer|original_module|modules_to_save)\.")


def sort_tensors(
    checkpoint: Checkpoint,
    quantized: dict[str, Weight],
    entry: ModuleRules,
    is_ignored: Callable[[str], bool],
    in_scheme: bool,
) -> tuple[dict[str, list[Item]], dict[str, Weight]]:
    """Sort all tensors of a checkpoint.

    Args:
        checkpoint: the opened source, with quantized weights as the tensors that they decode to.
        quantized: the source's quantized weights, by the full name of that tensor: "model.layers.0.mlp.up_proj.weight".
        entry: what the registry says of each module of the architecture.
        is_ignored: says of a full module name that no pattern of the entry matches whether --ignore keeps it.
        in_scheme: whether the source is in the plan's scheme already. Then what it has quantized stays so, whatever
            the entry says.

    Returns:
        All tensors by file name of the shard, and the weights among them that may be quantized by full module name.

    Raises:
        PlanError: a tensor matches no pattern, or several, or its dtype or shape is not what the entry expects; or all
            names have the prefix of a wrapper.
    """
    is_mtp_layer = mtp_layer_finder(entry.model, text_config(checkpoint, entry.model))

    # Neighbours have the same parent, so this is asked once for each parent.
    parent = None
    in_mtp_layer = False

    items: dict[str, list[Item]] = {shard: [] for shard in checkpoint.shards}
    layers: dict[str, Weight] = {}
    stacks: list[StackedTensor] = []
    shape_errors: dict[str, str] = {}

    for info in checkpoint.tensors.values():
        module = info.module
        path = module.rpartition(".")[0]
        if path != parent:
            parent = path
            in_mtp_layer = is_mtp_layer(module)

        rule = entry.rule(module)
        if in_mtp_layer:
            rule = rule._replace(patterns=1, compress=False, stack=None, keep=MTP_LAYER)
        elif rule.patterns == 0 and is_ignored(module):
            rule = rule._replace(patterns=1, keep="--ignore")
        elif rule.patterns == 0 and entry.model.rest:
            rule = rule._replace(patterns=1, keep=entry.model.rest)

        item = _sort(info, module, rule, quantized.get(info.name), in_scheme)
        if isinstance(item, str):
            shape_errors[info.name] = item
            continue
        items[checkpoint.where[info.name].shard].append(item)

        if isinstance(item, Weight):
            layers[item.module] = item
        elif isinstance(item, StackedTensor):
            stacks.append(item)

    for weight in (weight for stack in stacks for weight in stack.layers):
        if f"{weight.module}.weight" in checkpoint.tensors:
            shape_errors[f"{weight.module}.weight"] = "is also in the stack of experts"
        layers[weight.module] = weight

    shape_errors |= _wrongly_stacked(stacks)
    if shape_errors:
        _refuse_wrapped(checkpoint.tensors)
        _raise_misfits(entry.model, shape_errors)

    return items, layers


def _sort(info: TensorInfo, module: str, rule: ModuleRule, stored: Weight | None, in_scheme: bool) -> Item | str:
    """Sort one tensor; a text says what is wrong with it, such as "matches no pattern"."""
    axes = len(info.shape)

    if in_scheme and stored is not None and axes == 2 and rule.keep not in NEVER_QUANTIZED:
        return stored._replace(name_template=rule.name_template)

    if axes < 2 and not (rule.compress and info.name != module) and rule.stack is None:
        return PassthroughTensor(info, template(info.name) if stored else info.name, FEW_AXES, stored)

    if rule.patterns != 1:
        return "matches more than one pattern" if rule.patterns else "matches no pattern"

    if rule.keep is not None:
        return PassthroughTensor(info, rule.name_template, rule.keep, stored)

    if info.dtype not in SOURCE_DTYPES:
        return f"is {info.dtype}, not one of {', '.join(SOURCE_DTYPES)}"

    if rule.compress and (axes != 2 or info.name == module):
        return f"is not a 2-D weight but {list(info.shape)}"

    if rule.compress and stored is not None:
        return stored._replace(name_template=rule.name_template)
    if rule.compress:
        return Weight(module, rule.name_template, info, (info.shape[0], info.shape[1]))

    if stored is not None and (stored.decodes_transposed or stored.codes.shape != info.shape):
        return f"is stored as {stored.parts[0].dtype} {list(stored.parts[0].shape)}, which cannot be read"
    if rule.stack is None or not _is_stack(info, rule.stack[1]):
        return f"is not a stack of experts but {list(info.shape)}"

    layers = _unstack(info, *rule.stack)
    if stored is not None and stored.format is not None:
        down, along = stored.format.group
        form = replace(stored.format, group=(along, down)) if layers[0].transposed else stored.format
        if len(rule.stack[1].parts) > 1 and layers[0].shape[0] % (form.group[0] or 1):
            return f"has blocks that span {' and '.join(rule.stack[1].parts)}"
        layers = [layer._replace(format=form, parts=stored.parts, input_scale=stored.input_scale) for layer in layers]

    return StackedTensor(info, tuple(layers))


def _refuse_wrapped(names: Iterable[str]) -> None:
    """Refuse a checkpoint whose tensors all have the prefix of a wrapper."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in names):
            raise PlanError(
                f"all names begin with {prefix}: the wrapped model was saved",
                "save what it wraps, or rename the tensors (docs/how-to/check-a-checkpoint.md)",
            )


def _refuse_unmerged(names: Iterable[str]) -> None:
    """Refuse a model that peft has wrapped, or that still holds an adapter."""
    found = next(filter(_PEFT.search, names), None)
    if found is not None:
        raise PlanError(
            f"{found} is of an adapter (peft), which engines do not know in a model",
            "merge it first (merge_and_unload), then save_pretrained; if it is merged, save without these tensors",
        )


def _raise_misfits(model: Architecture, shape_errors: dict[str, str]) -> None:
    _refuse_unmerged(shape_errors)

    problems = []
    for problem in dict.fromkeys(shape_errors.values()):
        names = collapse(name for name, text in shape_errors.items() if text == problem)
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        problems.append(f"{', '.join(names)} {problem} of {model.name}" if problem.startswith("matches")
                        else f"{', '.join(names)} {problem}")  # fmt: skip

    named = any(problem.startswith("matches") for problem in shape_errors.values())

    raise PlanError(
        "; ".join(problems),
        f"it is no part of {model.name}: the checkpoint is damaged, merged wrongly or of another class (if it belongs "
        "there, leave it as it is with --ignore)"
        if named
        else "save the model again with these weights as other checkpoints of this architecture have them",
    )


def mtp_layer_finder(model: Architecture, config: dict[str, Any]) -> Callable[[str], bool]:
    """Return a function that says whether a module is in an MTP layer that is numbered on from the decoder layers.

    Args:
        model: the registry's entry of the architecture.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        A function of a full module name, "model.layers.61.mlp.up_proj". It returns False for all modules if the entry
        or config.json has no such layers.
    """
    first = config.get(model.draft_layers) if model.draft_layers else None
    if not isinstance(first, int):
        return lambda _: False
    pattern = compile_pattern(f"{model.layers}.**")

    def is_mtp_layer(module: str) -> bool:
        match = pattern.fullmatch(module)
        # int() refuses thousands of digits.
        return match is not None and match[1].isdecimal() and (len(match[1]) > MAX_DIGITS or int(match[1]) >= first)

    return is_mtp_layer


def _wrongly_stacked(stacks: Iterable[StackedTensor]) -> dict[str, str]:
    """Find stacks where down has not the transposed shape of gate and of up: the problems, by tensor name."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    shape_errors: dict[str, str] = {}
    for name, first in ((stack.tensor.name, stack.layers[0]) for stack in stacks):
        (path, part) = first.module.rsplit(".", 1)
        shape = first.shape
        if part == "down_proj":
            shape = shape[::-1]
        elif part == "gate_up_proj":
            shape = shape[0] // 2, *shape[1:]
        other, other_shape = shapes.setdefault(path, (name, shape))
        if shape != other_shape:
            shape_errors[name] = f"does not fit {other}: are the experts transposed?"
    return shape_errors


def _is_stack(info: TensorInfo, stacked: StackedExperts) -> bool:
    if len(info.shape) != 3 or not info.shape[0]:
        return False
    return info.shape[-1 if stacked.transposed else 1] % len(stacked.parts) == 0


def _unstack(info: TensorInfo, layout: ExpertLayout, stacked: StackedExperts) -> list[Weight]:
    """One weight for each expert and part of a tensor [experts, in, parts*out] or [experts, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    if layout.beside:
        path += "." + layout.path.rsplit(".", 1)[1]
    return [
        Weight(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked.transposed)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]


_NUMBER = re.compile(rf"(?<=\.)\d{{1,{MAX_DIGITS}}}(?=\.|$)")
_PLACE = re.compile(r"(?<=\.)(?:\*|\d+)(?=\.|$)")


class Stored:
    """The tensors of a checkpoint by name template, without those of MTP layers after the decoder layers.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        text: the language model's part of config.json, as text_config returns it.
    """

    def __init__(self, entry: ModuleRules, tensors: Iterable[TensorInfo], text: Mapping[str, Any]) -> None:
        is_mtp_layer = mtp_layer_finder(entry.model, dict(text))
        # For each name template, the tensors by the numbers in their names.
        self.by_template: dict[str, dict[tuple[str, ...], TensorInfo]] = {}
        self._found: dict[str, list[tuple[tuple[str, ...], TensorInfo]]] = {}
        for info in tensors:
            numbers = tuple(_NUMBER.findall(info.name))
            if numbers and is_mtp_layer(info.module):
                continue
            self.by_template.setdefault(template(info.name), {})[numbers] = info
        for layout in entry.model.experts:
            for stacked in layout.stacked:
                self._stack(entry.model, layout, stacked)

    def _stack(self, model: Architecture, layout: ExpertLayout, stacked: StackedExperts) -> None:
        """Add the stacks of experts that a conversion has split, as the class has them."""
        paths = absolute_patterns(model, [f"{layout.path}.*.{part}.weight" for part in stacked.parts])
        of_parts = [compile_pattern(path) for path in paths]

        for first in [name for name in self.by_template if of_parts[0].fullmatch(name)]:
            path = first.removesuffix(f".*.{stacked.parts[0]}.weight")
            place = path.rpartition(".")[0] if layout.beside else path
            names = [f"{place}.{stacked.name}", f"{place}.{stacked.name}.weight"]
            parts = [self.by_template.get(f"{path}.*.{part}.weight", {}) for part in stacked.parts]

            if any(name in self.by_template for name in names):
                continue

            experts: dict[tuple[str, ...], int] = {}
            for numbers in parts[0]:
                # An expert is there if all its projections are.
                if all(numbers in part for part in parts):
                    experts[numbers[:-1]] = experts.get(numbers[:-1], 0) + 1

            for layer, count in experts.items():
                info = next(info for numbers, info in parts[0].items() if numbers[:-1] == layer)
                rows = len(parts) * info.shape[0]
                cols = info.shape[1]
                shape = (count, cols, rows) if stacked.transposed else (count, rows, cols)
                for name in names:
                    self.by_template.setdefault(name, {})[layer] = info._replace(
                        name=_fill_template(name, layer), shape=shape
                    )

    @cached_property
    def prefixes(self) -> set[str]:
        """What stands before the first number of names: "model.layers"."""
        return {name.partition(".*")[0] for name in self.by_template if ".*" in name}

    def has(self, name: str) -> bool:
        """Whether there is a tensor with this name, or one below a list of layers with this prefix."""
        return template(name) in self.by_template or name in self.prefixes

    def has_below(self, prefix: str) -> bool:
        """Whether there is a tensor below a module."""
        return any(name.startswith(f"{prefix}.") for name in self.by_template)

    def find(self, pattern: str) -> list[tuple[tuple[str, ...], TensorInfo]]:
        """Find tensors by a name with `*` for some of its numbers; gives the numbers in these places."""
        if pattern not in self._found:
            self._found[pattern] = list(self._find(pattern))
        return self._found[pattern]

    def _find(self, pattern: str) -> Iterator[tuple[tuple[str, ...], TensorInfo]]:
        named = self.by_template.get(pattern)
        if named is not None:
            yield from named.items()
            return
        # Some of its places are numbers.
        places = _PLACE.findall(pattern)
        for numbers, info in self.by_template.get(template(pattern), {}).items():
            if all(place in ("*", number) for place, number in zip(places, numbers, strict=True)):
                yield tuple(number for place, number in zip(places, numbers, strict=True) if place == "*"), info


def _fill_template(name: str, numbers: Iterable[str]) -> str:
    """Put numbers in place of the stars of a name template."""
    for number in numbers:
        name = name.replace("*", number, 1)
    return name


def under_stored_names(known: ClassTensors, entry: ModuleRules, stored: Stored) -> ClassTensors:
    """Return a class's tensors under the names of a checkpoint, which may have other prefixes.

    Published files have the language model of one class as "language_model.model" or "model.language_model", say.

    Args:
        known: the tensors of the class.
        entry: what the registry says of each module of the architecture.
        stored: the tensors of the checkpoint.
    """
    lacked = ("model.", ""), (entry.model.lacks, "")
    pairs = [
        (prefix, other)
        for group in (*entry.model.spellings, *lacked, *_decoder_prefixes(known, entry, stored))
        for prefix, other in itertools.permutations(group, 2)
    ]
    names: dict[str, str] = {}
    for name in (*known.outside, *known.lists):
        is_here = stored.has(name)
        names[name] = name if is_here else next(filter(stored.has, _other_names(name, pairs)), name)

    # What is lost is named like what is stored beside it.
    moved = [_different_starts(name, other) for name, other in names.items() if name != other]
    for name, other in names.items():
        start, stored_start = next((pair for pair in moved if name.startswith(pair[0])), ("", ""))
        if name == other and not stored.has(name):
            names[name] = stored_start + name.removeprefix(start)
    lists = {names[prefix]: layers for prefix, layers in known.lists.items()}
    return known._replace(outside={names[name]: rule for name, rule in known.outside.items()}, lists=lists)


def _different_starts(name: str, other: str) -> tuple[str, str]:
    """Take away the parts that two names end with alike; what is left ends with a dot, or is empty."""
    parts = name.split(".")
    other_parts = other.split(".")
    while parts and other_parts and parts[-1] == other_parts[-1]:
        parts.pop()
        other_parts.pop()
    return "".join(f"{part}." for part in parts), "".join(f"{part}." for part in other_parts)


def _decoder_prefixes(known: ClassTensors, entry: ModuleRules, stored: Stored) -> Iterator[tuple[str, str]]:
    """What stands before the decoder layers in the class, and what does in the checkpoint, where that is another."""
    is_decoder = compile_pattern(entry.model.layers)
    of_class = [prefix for prefix in known.lists if is_decoder.fullmatch(f"{prefix.removeprefix(entry.model.lacks)}.0")]
    of_files = [prefix for prefix in stored.prefixes if is_decoder.fullmatch(f"{prefix}.0")]
    for prefix, other in zip(of_class[:1], of_files[:1], strict=False):
        yield _different_starts(prefix, other)


def _other_names(name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Replace what a name begins with, by one pair of prefixes or several."""
    names = [name]
    for prefix, other in pairs:
        names += [other + one.removeprefix(prefix) for one in names if one.startswith(prefix) and prefix != other]
    yield from names[1:]

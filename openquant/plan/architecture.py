"""The registry's entry for a plan, what config.json says of the architecture, and tensor-parallel sizes.

The entry is that of the class, one that the user names, or a generic one.

    find_architecture(checkpoint).name             # "Qwen3ForCausalLM"
    find_architecture(unknown, "auto").name        # "generic"

Not every tensor-parallel size can serve a plan: the layer that prevents a size is named.

A checkpoint's tensors are sorted by the entry's patterns: weights that may be quantized, tensors that are kept, and
stacked experts. A tensor that no pattern matches, or more than one,
stops the plan; the error names all such tensors.

Stored finds tensors by name template, and says under which prefixes the tensors of a class are.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.model_files import short_repr
from ..files.shardfile import TensorInfo
from ..formats.format import Format, Group
from ..models import GENERIC, MODELS, config_value, find_body, find_entry, fit_prefix
from ..patterns import MAX_DIGITS, collapse, compile_pattern, template
from ..registry.architecture import (
    MTP_LAYER,
    NEVER_QUANTIZED,
    Architecture,
    ClassTensors,
    ExpertLayout,
    ModuleRule,
    ModuleRules,
    ParallelSplit,
    StackedExperts,
)
from ..weights.weight import Weight
from .decisions import FEW_AXES, Item, PassthroughTensor, StackedTensor

# More layers are nonsense, and would each cost a name.
MOST_LAYERS = 10_000
# The class's own entry if there is one, else the generic one.
AUTO = "auto"


def find_architecture(checkpoint: Checkpoint, requested: str | Architecture | None = None) -> Architecture:
    """Return the entry by which a checkpoint is planned.

    Args:
        checkpoint: the opened source.
        requested: a class that has an entry ("Qwen3ForCausalLM"), "auto" or "generic"; None for the checkpoint's own
            class. An Architecture is returned as it is.

    Returns:
        The registry's entry: patterns that say which modules are quantized, kept, fused and divided among ranks. For
        "auto" that of the checkpoint's class, or the generic entry if the class has none.

    Raises:
        PlanError: there is no such entry.
    """
    if isinstance(requested, Architecture):
        return requested
    modules = [info.module for info in checkpoint.tensors.values()]
    if requested in MODELS:
        return with_layer_counts(fit_prefix(MODELS[requested], modules), checkpoint)
    known = known_architecture(checkpoint)
    if requested == GENERIC.name or (requested == AUTO and known is None):
        return GENERIC
    if known is None or requested not in (None, AUTO):
        raise _unknown(requested or checkpoint.architecture, checkpoint)
    return with_layer_counts(known, checkpoint)


def known_architecture(checkpoint: Checkpoint) -> Architecture | None:
    """Return the registry's entry of a checkpoint's class, or of the class whose body it has; None if there is none.

    Args:
        checkpoint: an opened checkpoint, quantized or not.
    """
    modules = [info.module for info in checkpoint.tensors.values()]
    return find_entry(checkpoint.architecture, checkpoint.config, modules)


def _unknown(name: str, checkpoint: Checkpoint) -> PlanError:
    """The error for a class without an entry."""
    body = find_body(name, checkpoint.config)[0]
    if body is not None:
        return PlanError(
            f"{name} is not a known architecture; its body is that of {body.name}, and its head is not known",
            f"--architecture {body.name} plans the body; leave the head as it is with --ignore",
        )

    nearest = "none has a name like it"
    if near := difflib.get_close_matches(name, MODELS):
        nearest = f"the nearest are {', '.join(near)}"
    return PlanError(
        f"{name} is not a known architecture; of {len(MODELS)} that are, {nearest}",
        "if it is one of them by another name, say which with --architecture; --architecture auto goes "
        "by names and shapes alone; or add an entry to openquant/registry (docs/adding-an-architecture.md)",
    )


def with_layer_counts(model: Architecture, checkpoint: Checkpoint) -> Architecture:
    """Return the entry with engine names that depend on config.json's layer count.

    Args:
        model: the registry's entry of the architecture.
        checkpoint: the opened source, whose config.json has num_hidden_layers.

    Returns:
        The entry with those names filled in; the same entry if it has none, or the count is nonsense.
    """
    if not model.beyond:
        return model

    layers = config_value(text_config(checkpoint, model), "num_hidden_layers")
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        return model
    return model.with_layer_count(layers)


TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


def text_config(checkpoint: Checkpoint, model: Architecture) -> dict[str, Any]:
    """Return the language model's part of config.json, with other spellings of its keys under their usual names too.

    Older files have all keys at the top level.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture, which names that part ("text_config").

    Returns:
        Its keys and values: {"num_hidden_layers": 28, ...}.
    """
    inner = config_value(checkpoint.config, model.text_config)
    config = inner if isinstance(inner, dict) else checkpoint.config
    return {usual: config[key] for key, usual in _USUAL_KEYS.items() if key in config} | config


# Keys that transformers or engines read in place of the usual ones.
_USUAL_KEYS = {
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
}


def fused_parts(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any]
) -> list[tuple[int, str | None]]:
    """Return the parts that a tensor holds one below the other, such as q, k and v in a fused qkv.

    Args:
        shape: shape of the tensor, [out, in].
        split: how tensor-parallel ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        For each part its row count, 0 if config.json does not say, and the config key that counts its heads, None if it
        has none: [(4096, "num_attention_heads"), (1024, "num_key_value_heads"), ...]. A tensor without parts is one.
    """
    if split is None:
        return [(shape[0], None)]
    if not split.parts:
        return [(shape[0], split.heads)]

    keys, counts = _part_proportions(split, config)
    if not all(counts) or shape[0] % sum(counts):
        return [(0, key) for key in keys]
    return [(shape[0] // sum(counts) * count, key) for count, key in zip(counts, keys, strict=True)]


def _part_proportions(split: ParallelSplit, config: dict[str, Any]) -> tuple[tuple[str | None, ...], list[int]]:
    """The config keys of a tensor's parts, and the numbers their rows are proportional to; 0 for an unusable value."""
    keys = next((parts for key, parts in split.where if config.get(key) is True), split.parts)
    shares = [1 if key is None else config.get(key) for key in keys]
    return keys, [share if isinstance(share, int) and share > 0 else 0 for share in shares]


def why_not_reordered(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], form: Format
) -> str | None:
    """Say why a weight's scales cannot follow its rows when an engine sorts interleaved heads.

    Args:
        shape: shape of the weight, [out, in].
        split: how tensor-parallel ranks divide it, and whether its heads are interleaved; None if ranks copy it.
        config: the language model's part of config.json, as text_config returns it.
        form: the format that it would get.

    Returns:
        The reason; None if they can.
    """
    if split is None or not split.interleaved:
        return None

    if split.interleaved_rows:
        name = next((info.name.lstrip(".") for info in form.parts("", shape) if info.shape[:1] != shape[:1]), None)
        return name and f"{_SORTED}, and fails on its {name}, which has fewer rows"

    heads = sum(_part_proportions(split, config)[1])
    if not heads or shape[0] % heads:
        if form.height > 1 or split.interleaved_all:
            return "config.json does not say how many rows each of its parts has"
        return None

    rows = shape[0] // heads
    if rows % form.height:
        return f"{_SORTED}, and the {rows} rows of a head are not whole groups of {form.height}"

    if split.interleaved_all:
        for info in form.parts("", shape):
            if not info.shape or info.shape[0] % heads:
                return f"{_SORTED}, and fails on its {info.name.lstrip('.')}, which has no rows for each head"

    return None


_SORTED = "an engine sorts its rows by heads"


def check_parallel_sizes(
    checkpoint: Checkpoint, entry: ModuleRules, layers: Iterable[tuple[Weight, Format | None]], extra_size: int | None
) -> dict[int, str | None]:
    """Check which tensor-parallel sizes divide all layers.

    Args:
        checkpoint: the opened source.
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, each with its format; None if it is not quantized, and divides
            anywhere.
        extra_size: a size to check besides the usual ones; None for no other.

    Returns:
        The sizes in ascending order, each with why the first layer that does not divide does not; None if all divide.
    """
    config = text_config(checkpoint, entry.model)
    kinds: dict[tuple[str, tuple[int, int], Group], ParallelSplit | None] = {}

    for weight, form in layers:
        group = form.indivisible if form else (1, 1)
        key = (weight.name_template, weight.shape, group)
        if key not in kinds:
            kinds[key] = entry.rule(weight.module).split

    problems: dict[int, str | None] = {}
    for size in sorted({*TENSOR_PARALLEL_SIZES, extra_size or 1}):
        of_kinds = (
            (name, why_indivisible(shape, split, config, group, size)) for (name, shape, group), split in kinds.items()
        )
        problems[size] = next((f"{name}: {problem}" for name, problem in of_kinds if problem), None)
    return problems


def why_indivisible(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], group: Group, size: int
) -> str | None:
    """Say why a weight cannot be divided among tensor-parallel ranks.

    Args:
        shape: shape of the weight, [out, in].
        split: how ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.
        group: rows and columns that ranks must not split (Format.indivisible); None for an axis that they may split
            anywhere.
        size: the number of ranks.

    Returns:
        The reason, "28 heads do not divide by 8"; None if it can.
    """
    if split is None:
        return None
    if split.axis == "out":
        parts = fused_parts(shape, split, config)
        multiple = group[0] or 1
    else:
        parts = [(shape[1], split.heads)]
        multiple = group[1] or 1
    problems = (_indivisible_length(length, heads, split, config, multiple, size) for length, heads in parts)
    return next((problem for problem in problems if problem), None)


def _indivisible_length(
    length: int, key: str | None, split: ParallelSplit, config: dict[str, Any], multiple: int, size: int
) -> str | None:
    parts = size
    heads = config.get(key or "")

    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{short_repr(heads)} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{short_repr(heads)} heads do not divide by {size}"

    if length % parts:
        return f"{length} does not divide by {parts}"

    # A layer that is not divided needs no check: quantized here it fits, and otherwise it is as its maker stored it.
    if parts > 1 and length // parts % multiple:
        return f"{length} / {parts} = {length // parts} is not a multiple of {multiple}"

    return None


SOURCE_DTYPES = ("BF16", "F16", "F32")
# How many names an error lists for each problem.
_MOST_NAMED = 100


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
            layers |= {weight.module: weight for weight in item.layers}
            names = (f"{weight.module}.weight" for weight in item.layers)
            shape_errors |= {name: "is also in the stack of experts" for name in names if name in checkpoint.tensors}

    shape_errors |= _wrongly_stacked(stacks)
    if shape_errors:
        _raise_misfits(entry.model, shape_errors)

    return items, layers


def _sort(info: TensorInfo, module: str, rule: ModuleRule, stored: Weight | None, in_scheme: bool) -> Item | str:
    """Sort one tensor; a text says what is wrong with it, such as "matches no pattern"."""
    axes = len(info.shape)

    if in_scheme and stored is not None and axes == 2 and rule.keep not in NEVER_QUANTIZED:
        return stored._replace(name_template=rule.name_template)

    if axes < 2 and not (rule.compress and info.name != module) and rule.stack is None:
        return PassthroughTensor(info, template(info.name) if stored else info.name, FEW_AXES, stored)

    if rule.patterns == 0:
        return "matches no pattern"
    if rule.patterns > 1:
        return "matches more than one pattern"

    if rule.keep is not None:
        return PassthroughTensor(info, rule.name_template, rule.keep, stored)

    if info.dtype not in SOURCE_DTYPES:
        return f"is {info.dtype}, {_UNREAD}"

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
        form = stored.format
        if layers[0].transposed:
            form = replace(form, group=form.group[::-1])
        if len(rule.stack[1].parts) > 1 and layers[0].shape[0] % (form.group[0] or 1):
            return f"has blocks that span {' and '.join(rule.stack[1].parts)}"
        layers = [layer._replace(format=form, parts=stored.parts, input_scale=stored.input_scale) for layer in layers]

    return StackedTensor(info, tuple(layers))


# Of weights in a dtype that is not read.
_UNREAD = f"not one of {', '.join(SOURCE_DTYPES)}"


# What to do about names that a wrapper such as FSDP, DDP or torch.compile, or peft, puts into a model. The last counts.
_HINTS = {
    r"^(module|_orig_mod|base_model\.model)\.|(^|\.)_(fsdp|checkpoint)_wrapped_module\.": (
        "the wrapped model was saved: save what it wraps, or rename the tensors (docs/how-to/check-a-checkpoint.md)"
    ),
    r"\.(lora_\w+|base_layer|original_module|modules_to_save)\.": (
        "merge the adapter first (merge_and_unload), then save_pretrained; if it is merged, save without these tensors"
    ),
}


def _raise_misfits(model: Architecture, shape_errors: dict[str, str]) -> None:
    problems = []
    hint = "save the model again with these weights as other checkpoints of this architecture have them"
    for problem in dict.fromkeys(shape_errors.values()):
        names = collapse(name for name, text in shape_errors.items() if text == problem)
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"]
        text = f"{', '.join(names)} {problem}"
        if problem.startswith("matches"):
            text += f" of {model.name}"
            hint = (
                f"it is no part of {model.name}: the checkpoint is damaged, merged wrongly or of another class (if it "
                "belongs there, leave it as it is with --ignore)"
            )
        problems.append(text)

    for pattern, advice in _HINTS.items():
        if any(re.search(pattern, name) for name in shape_errors):
            hint = advice

    if all(problem.endswith(_UNREAD) for problem in shape_errors.values()):
        hint = "save the model again in bfloat16"
    raise PlanError("; ".join(problems), hint)


def mtp_layer_finder(model: Architecture, config: dict[str, Any]) -> Callable[[str], bool]:
    """Return a function that says whether a module is in an MTP layer that is numbered on from the decoder layers.

    Args:
        model: the registry's entry of the architecture.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        A function of a full module name, "model.layers.61.mlp.up_proj". It returns False for all modules if the entry
        or config.json has no such layers.
    """
    first = config.get(model.draft_layers or "")
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


_NUMBER = re.compile(rf"(?<=\.)(\d{{1,{MAX_DIGITS}}})(?=\.|$)")
_PLACE = re.compile(r"(?<=\.)(?:\*|\d+)(?=\.|$)")


class Stored:
    """The tensors of a checkpoint by name template, without those of MTP layers after the decoder layers.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        text: the language model's part of config.json, as text_config returns it.
    """

    def __init__(self, entry: ModuleRules, tensors: Iterable[TensorInfo], text: Mapping[str, Any]) -> None:
        # For each name template, the tensors by the numbers in their names.
        self.by_template: dict[str, dict[tuple[str, ...], TensorInfo]] = {}
        self._found: dict[str, list[tuple[tuple[str, ...], TensorInfo]]] = {}

        is_mtp_layer = mtp_layer_finder(entry.model, dict(text))
        for info in tensors:
            if is_mtp_layer(info.module):
                continue
            texts = _NUMBER.split(info.name)
            self.by_template.setdefault("*".join(texts[::2]), {})[tuple(texts[1::2])] = info

        for layout in entry.model.experts:
            for stacked in layout.stacked:
                self._stack(entry.model, layout, stacked)

    def _stack(self, model: Architecture, layout: ExpertLayout, stacked: StackedExperts) -> None:
        """Add the stacks of experts that a conversion has split, as the class has them."""
        is_first = model.compile(f"{layout.path}.*.{stacked.parts[0]}.weight").fullmatch
        for first in filter(is_first, list(self.by_template)):
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
        names[name] = next(filter(stored.has, (name, *_other_names(name, pairs))), name)

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

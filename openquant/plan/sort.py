"""Sort a checkpoint's tensors: which could be quantized, which are kept and why, which are stacks of experts.

Here the registry's patterns meet the names of a checkpoint. A tensor that no pattern covers, or more than one, stops
the plan; all such are named together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..patterns import MAX_DIGITS, collapse, compile_pattern, template
from ..registry.architecture import DRAFT, NEVER_QUANTIZED, Architecture, ExpertLayout, StackedExperts
from ..registry.rules import ModuleRule, ModuleRules
from ..weights.weight import Weight
from .decisions import FEW_AXES, Item, PassthroughTensor, StackedTensor
from .tensor_parallel import text_config

SOURCE_DTYPES = ("BF16", "F16", "F32")
# Misfits of each kind in a message: few if all are real.
_MOST_NAMED = 100


def sort_tensors(
    checkpoint: Checkpoint, stored: dict[str, Weight], entry: ModuleRules, stays: Callable[[str], bool], settled: bool
) -> tuple[dict[str, list[Item]], dict[str, Weight]]:
    """All tensors by the shard they lie in, and the weights among them that could be quantized, by module.

    Args:
        checkpoint: the opened source.
        stored: what of it is quantized there, by name.
        entry: the registry's.
        stays: whether a module that the entry does not know is to be kept.
        settled: whether what the source has quantized stays so, whatever the entry says of it.

    Raises:
        PlanError: tensors that no pattern covers, or that are not as the entry has them.
    """
    drafted = mtp_layer_finder(entry.model, text_config(checkpoint, entry.model))
    # Neighbours have the same parent, which is looked at once.
    parent, draft = None, False
    items: dict[str, list[Item]] = {shard: [] for shard in checkpoint.shards}
    layers: dict[str, Weight] = {}
    stacks: list[StackedTensor] = []
    shape_errors: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        module = info.module
        path = module.rpartition(".")[0]
        if path != parent:
            parent, draft = path, drafted(module)
        rule = entry.rule(module)
        if draft:
            rule = rule._replace(patterns=1, compress=False, stack=None, keep=DRAFT)
        elif rule.patterns == 0 and stays(module):
            rule = rule._replace(patterns=1, keep="--ignore")
        elif rule.patterns == 0 and entry.model.rest:
            rule = rule._replace(patterns=1, keep=entry.model.rest)
        item = _sort(info, module, rule, stored.get(info.name), settled)
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
            shape_errors[f"{weight.module}.weight"] = "is in the stack of experts too"
        layers[weight.module] = weight
    shape_errors |= _wrongly_stacked(stacks)
    if shape_errors:
        _raise_misfits(entry.model, shape_errors)
    return items, layers


def _sort(info: TensorInfo, module: str, rule: ModuleRule, stored: Weight | None, settled: bool) -> Item | str:
    """What is made from a tensor; or a text that says what is wrong with it, "matches no pattern"."""
    axes = len(info.shape)
    if settled and stored is not None and axes == 2 and rule.keep not in NEVER_QUANTIZED:
        return stored._replace(alike=rule.alike)
    if axes < 2 and not (rule.compress and info.name != module) and rule.stack is None:
        return PassthroughTensor(info, info.name, FEW_AXES)
    if rule.patterns != 1:
        return "matches more than one pattern" if rule.patterns else "matches no pattern"
    if rule.keep is not None:
        return PassthroughTensor(info, rule.alike, rule.keep, stored)
    if info.dtype not in SOURCE_DTYPES:
        return f"is {info.dtype}, not one of {', '.join(SOURCE_DTYPES)}"
    if rule.compress and (axes != 2 or info.name == module):
        return f"is not a 2-D weight but {list(info.shape)}"
    if rule.compress and stored is not None:
        return stored._replace(alike=rule.alike)
    if rule.compress:
        return Weight(module, rule.alike, info, (info.shape[0], info.shape[1]))
    if stored is not None and (stored.turned or stored.codes.shape != info.shape):
        return f"is stored as {stored.parts[0].dtype} {list(stored.parts[0].shape)}, which is not read"
    if rule.stack is None or not _is_stack(info, rule.stack[1]):
        return f"is not a stack of experts but {list(info.shape)}"
    layers = _unstack(info, *rule.stack)
    if stored is not None and stored.format is not None:
        down, along = stored.format.group
        form = replace(stored.format, group=(along, down)) if layers[0].transposed else stored.format
        if len(rule.stack[1].parts) > 1 and layers[0].shape[0] % (form.group[0] or 1):
            return f"has blocks that reach over {' and '.join(rule.stack[1].parts)}"
        layers = [layer._replace(format=form, parts=stored.parts, input_scale=stored.input_scale) for layer in layers]
    return StackedTensor(info, tuple(layers))


def _raise_misfits(model: Architecture, shape_errors: dict[str, str]) -> None:
    problems = []
    for problem in dict.fromkeys(shape_errors.values()):
        names = collapse(name for name, found in shape_errors.items() if found == problem)
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        problems.append(f"{', '.join(names)} {problem} of {model.name}" if problem.startswith("matches")
                        else f"{', '.join(names)} {problem}")  # fmt: skip
    named = any(problem.startswith("matches") for problem in shape_errors.values())
    raise PlanError(
        "; ".join(problems),
        "list it under compress or keep in openquant/architectures, or leave it as it is with --ignore"
        if named
        else "save the model again with these weights as other checkpoints of this architecture have them",
    )


def mtp_layer_finder(model: Architecture, config: dict[str, Any]) -> Callable[[str], bool]:
    """A function that says whether a module belongs to a draft layer."""
    first = config.get(model.draft_layers) if model.draft_layers else None
    if not isinstance(first, int):
        return lambda _: False
    pattern = compile_pattern(f"{model.layers}.**")

    def drafted(module: str) -> bool:
        found = pattern.fullmatch(module)
        # Python converts no number of thousands of digits.
        return found is not None and found[1].isdecimal() and (len(found[1]) > MAX_DIGITS or int(found[1]) >= first)

    return drafted


def _wrongly_stacked(stacks: Iterable[StackedTensor]) -> dict[str, str]:
    """What is wrong, by name, with stacks of experts that do not fit together: down leads back from gate and up.

    A file with its stacks the other way around, as some tools write them, has the names of the right one.
    """
    widths: dict[str, tuple[str, tuple[int, ...]]] = {}
    shape_errors: dict[str, str] = {}
    for name, first in ((stack.tensor.name, stack.layers[0]) for stack in stacks):
        (path, part), widths_here = first.module.rsplit(".", 1), first.shape
        if part == "down_proj":
            widths_here = widths_here[::-1]
        elif part == "gate_up_proj":
            widths_here = widths_here[0] // 2, *widths_here[1:]
        other, widths_there = widths.setdefault(path, (name, widths_here))
        if widths_here != widths_there:
            shape_errors[name] = f"does not fit {other}: are the experts stacked the other way around?"
    return shape_errors


def _is_stack(info: TensorInfo, stacked: StackedExperts) -> bool:
    if len(info.shape) != 3 or not info.shape[0]:
        return False
    return info.shape[-1 if stacked.transposed else 1] % len(stacked.parts) == 0


def _unstack(info: TensorInfo, experts_at: ExpertLayout, stacked: StackedExperts) -> list[Weight]:
    """One weight for each expert and part of a stacked tensor [E, in, parts*out] or [E, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    if experts_at.beside:
        path += "." + experts_at.path.rsplit(".", 1)[1]
    return [
        Weight(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked.transposed)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]

"""Sort a checkpoint's tensors: which can be quantized, which are kept and why, what must share its status.

Here the registry's patterns meet the names of a checkpoint, and --ignore and the scheme's shapes have their say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checkpoint import DTYPE_BITS, Checkpoint, Location, TensorInfo
from .errors import PlanError, UsageError
from .models import Model, Stacked
from .patterns import collapse, compile_any, compile_pattern, template
from .schemes import Scheme

SOURCE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical weight [out, in] inside one source tensor.

    Attributes:
        label: for messages: the tensor's name, and the expert's number where it is a slice.
        shard: source file name.
        offset: bytes from the start of the file to element [0, 0].
        dtype: one of SOURCE_DTYPES.
        shape: (out, in).
        pitch: bytes from one stored row to the next.
        transposed: stored rows are columns of the matrix.
    """

    label: str
    shard: str
    offset: int
    dtype: str
    shape: tuple[int, int]
    pitch: int
    transposed: bool

    @property
    def nbytes(self) -> int:
        """Size of its elements in the source, in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.dtype] // 8


class Layer(NamedTuple):
    """A weight that could be quantized: a tensor of the source, or one expert's part of a stacked one."""

    module: str
    alike: str
    source: TensorInfo
    shape: tuple[int, int]
    expert: int = -1
    part: int = 0
    stacked: Stacked | None = None

    @property
    def nbytes(self) -> int:
        """Size of its elements in the source, in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.source.dtype] // 8

    def matrix(self, where: dict[str, Location]) -> Matrix:
        """Where its elements lie."""
        place, info = where[self.source.name], self.source
        itemsize = DTYPE_BITS[info.dtype] // 8
        pitch = info.shape[-1] * itemsize
        if self.stacked is None:
            return Matrix(info.name, place.shard, place.offset, info.dtype, self.shape, pitch, transposed=False)
        along = itemsize if self.stacked.transposed else pitch
        start = place.offset + self.expert * info.shape[1] * pitch + self.part * self.shape[0] * along
        label = f"{info.name}[{self.expert}]"
        return Matrix(label, place.shard, start, info.dtype, self.shape, pitch, self.stacked.transposed)


class Kept(NamedTuple):
    """A tensor of two or more axes that is copied, and why."""

    tensor: TensorInfo
    alike: str
    why: str


@dataclass(frozen=True)
class Fates:
    """What becomes of each tensor.

    Attributes:
        layers: weights that could be quantized, by module.
        unstacked: those made from a stacked tensor, by its name.
        kept: other tensors of two or more axes.
        copied: tensors of fewer.
        sets: the whole set of each layer that is joined with others, itself included.
        reasons: why the layers that stay unquantized do.
    """

    layers: dict[str, Layer]
    unstacked: dict[str, list[Layer]]
    kept: list[Kept]
    copied: list[TensorInfo]
    sets: dict[str, tuple[str, ...]]
    reasons: dict[str, str]


def decide(
    checkpoint: Checkpoint, model: Model, scheme: Scheme, ignore: Sequence[str]
) -> tuple[Fates, list[str], list[str]]:
    """What becomes of each tensor, what must be listed as ignored, and notes for the user.

    Raises:
        PlanError: tensors no pattern covers, or experts that engines do not load in this scheme.
        UsageError: an ignore pattern that matches nothing.
    """
    layers, unstacked, kept, copied = _sort_tensors(checkpoint, model, ignore)
    sets = _joined_sets(model, layers)
    reasons, notes = _unquantized(model, scheme, layers, sets, ignore, [*(keep.tensor for keep in kept), *copied])
    if not scheme.experts:
        _refuse_experts(model, scheme, [module for module in layers if module not in reasons])
    ignored = _ignored_names(model, layers, reasons, kept)
    return Fates(layers, unstacked, kept, copied, sets, reasons), ignored, notes


def absolute(model: Model, patterns: Iterable[str]) -> list[str]:
    """Patterns of an entry with those that begin with a dot continued from its `layers`."""
    return [model.layers + pattern if pattern.startswith(".") else pattern for pattern in patterns]


def _sort_tensors(
    checkpoint: Checkpoint, model: Model, ignore: Sequence[str]
) -> tuple[dict[str, Layer], dict[str, list[Layer]], list[Kept], list[TensorInfo]]:
    """Every tensor into one of: layers (by module), unstacked layers, kept with a reason, copied (fewer axes)."""
    compress = compile_any(absolute(model, model.compress))
    keeps = [(compile_any(absolute(model, [keep.pattern])), keep.why) for keep in model.keep]
    stacks = [
        (compile_any(absolute(model, [f"{experts.path}.{stacked.name}"])), stacked)
        for experts in model.experts
        for stacked in experts.stacked
    ]
    ignored = compile_any(text.removesuffix(".weight") for text in ignore)
    # Names alike but for numbers have the same fate.
    fates: dict[str, tuple[bool, Any, list[str]]] = {}
    layers: dict[str, Layer] = {}
    unstacked: dict[str, list[Layer]] = {}
    kept: list[Kept] = []
    copied: list[TensorInfo] = []
    misfits: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        module, axes = info.module, len(info.shape)
        alike = template(module)
        if alike not in fates:
            stacks_found = [stacked for pattern, stacked in stacks if pattern.fullmatch(module)]
            reasons = [why for pattern, why in keeps if pattern.fullmatch(module)]
            fates[alike] = (bool(compress.fullmatch(module)), stacks_found, reasons)
        is_layer, stacks_found, reasons = fates[alike]
        matches = is_layer + len(stacks_found) + len(reasons)
        if axes < 2 and not (is_layer and info.name != module) and not stacks_found:
            copied.append(info)
        elif matches == 0 and ignored.fullmatch(module):
            kept.append(Kept(info, alike, "--ignore"))
        elif matches == 0:
            misfits[info.name] = "matches no pattern"
        elif matches > 1:
            misfits[info.name] = "matches more than one pattern"
        elif reasons:
            kept.append(Kept(info, alike, reasons[0]))
        elif info.dtype not in SOURCE_DTYPES:
            misfits[info.name] = f"is {info.dtype}, not one of {', '.join(SOURCE_DTYPES)}"
        elif is_layer and (axes != 2 or info.name == module):
            misfits[info.name] = f"is not a 2-D weight but {list(info.shape)}"
        elif is_layer:
            layers[module] = Layer(module, alike, info, (info.shape[0], info.shape[1]))
        elif axes != 3 or info.shape[-1 if stacks_found[0].transposed else 1] % len(stacks_found[0].parts):
            misfits[info.name] = f"is not a stack of experts but {list(info.shape)}"
        else:
            unstacked[info.name] = _unstack(info, stacks_found[0])
    for layer in itertools.chain.from_iterable(unstacked.values()):
        if f"{layer.module}.weight" in checkpoint.tensors:
            misfits[f"{layer.module}.weight"] = "is in the stack of experts too"
        layers[layer.module] = layer
    if misfits:
        _raise_misfits(checkpoint, misfits)
    return layers, unstacked, kept, copied


def _raise_misfits(checkpoint: Checkpoint, misfits: dict[str, str]) -> None:
    problems = []
    for problem in dict.fromkeys(misfits.values()):
        names = collapse(name for name, found in misfits.items() if found == problem)
        problems.append(f"{', '.join(names)} {problem} of {checkpoint.architecture}" if problem.startswith("matches")
                        else f"{', '.join(names)} {problem}")  # fmt: skip
    raise PlanError(
        "; ".join(problems),
        "list it under compress or keep in openquant/models.py, or leave it as it is with --ignore",
    )


def _unstack(info: TensorInfo, stacked: Stacked) -> list[Layer]:
    """One layer for each expert and part of a stacked tensor [E, in, parts*out] or [E, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    return [
        Layer(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]


def _joined_sets(model: Model, layers: dict[str, Layer]) -> dict[str, tuple[str, ...]]:
    """For every joined module its whole set, itself included, in the order of the checkpoint."""
    patterns = [compile_pattern(pattern) for pattern in absolute(model, [joined.pattern for joined in model.joined])]
    found: dict[str, int | None] = {}
    members: dict[tuple[int, str], list[str]] = {}
    for module, layer in layers.items():
        alike = layer.alike
        if alike not in found:
            numbers = [number for number, pattern in enumerate(patterns) if pattern.fullmatch(module)]
            found[alike] = numbers[0] if numbers else None
        number = found[alike]
        if number is not None:
            members.setdefault((number, module.rsplit(".", 1)[0]), []).append(module)
    sets: dict[str, tuple[str, ...]] = {}
    for joined in members.values():
        together = tuple(joined)
        for module in joined:
            sets[module] = together
    return sets


def _experts_finder(model: Model) -> Callable[[str], str | None]:
    """A function from a module to the path of the experts it belongs to, or None."""
    patterns = [compile_pattern(pattern) for pattern in absolute(model, [experts.path for experts in model.experts])]

    def find(module: str) -> str | None:
        path = module if patterns else ""
        while "." in path:
            path = path.rsplit(".", 1)[0]
            if any(pattern.fullmatch(path) for pattern in patterns):
                return path
        return None

    return find


def _unquantized(
    model: Model,
    scheme: Scheme,
    layers: dict[str, Layer],
    sets: dict[str, tuple[str, ...]],
    ignore: Sequence[str],
    others: Iterable[TensorInfo],
) -> tuple[dict[str, str], list[str]]:
    """Modules that stay unquantized with the reason, widened to all that must share their status; and notes."""
    problems = {shape: scheme.misfit(shape) for shape in {layer.shape for layer in layers.values()}}
    reorders = bool(model.reordered) and not scheme.follows_rows
    if not ignore and not reorders and not any(problems.values()):
        return {}, [] if layers else ["nothing is quantized"]
    find_experts = _experts_finder(model)
    together: dict[str, list[str]] = {}
    for module in layers:
        together.setdefault(find_experts(module) or sets.get(module, (module,))[0], []).append(module)
    known = [other.module for other in others] if ignore else []
    notes: list[str] = []
    asked: dict[str, str] = {}
    for text in ignore:
        pattern = compile_pattern(text.removesuffix(".weight"))
        matched = [
            layer.module
            for layer in layers.values()
            if pattern.fullmatch(layer.module) or pattern.fullmatch(layer.source.module)
        ]
        if not matched and not any(pattern.fullmatch(module) for module in known):
            raise UsageError(
                f"--ignore {text} matches no module",
                "module names are tensor names without .weight; --dry-run lists them",
            )
        asked.update((module, f"--ignore {text}") for module in matched if module not in asked)
    reordered = compile_any(absolute(model, model.reordered) if reorders else ())
    misfits = {
        module: "engines reorder its rows but not its scales" if reordered.fullmatch(module) else problems[layer.shape]
        for module, layer in layers.items()
    }
    reasons: dict[str, str] = {}
    widened: dict[str, list[str]] = {}
    for modules in together.values():
        own = {module: asked.get(module) or misfits[module] for module in modules}
        if not any(own.values()):
            continue
        first = next(module for module in modules if own[module])
        for module in modules:
            reason = own[module]
            if reason is None:
                reason = f"shares its status with {first.rsplit('.', 1)[1]} ({own[first]})"
                if first in asked:
                    widened.setdefault(asked[first], []).append(module)
            reasons[module] = reason
    for option, modules in widened.items():
        notes.append(f"{option} widened to what engines join with it: {', '.join(collapse(modules))}")
    if len(reasons) == len(layers):
        notes.append("nothing is quantized")
    if any(problems[layers[module].shape] for module in reasons):
        notes.append("some layers do not divide into blocks; --scheme tensor or channel quantizes them too")
    return reasons, notes


def _refuse_experts(model: Model, scheme: Scheme, quantized: list[str]) -> None:
    find_experts = _experts_finder(model)
    found = list(dict.fromkeys(filter(None, map(find_experts, quantized))))
    if found:
        raise PlanError(
            f"{', '.join(collapse(found))}: engines load no experts with {scheme.title} in the {scheme.format} format",
            "use --scheme channel or --format fp8, or leave the experts as they are with --ignore",
        )


def _ignored_names(
    model: Model,
    layers: dict[str, Layer],
    reasons: dict[str, str],
    kept: list[Kept],
) -> list[str]:
    """What must be listed as ignored: checkpoint names without .weight, and the engines' other names for them.

    vLLM 0.32.0 compares for equality (layers/quantization/utils/quant_utils.py:617-691, for compressed-tensors
    utils/config_utils.py:226-293); experts match by the path that holds them all, for compressed-tensors by the names
    of the first. lm_head is always listed: transformers would quantize one tied to the embedding.
    """
    find_experts = _experts_finder(model)
    listed_as = [
        (compile_pattern(pattern), joined.listed_as)
        for joined, pattern in zip(model.joined, absolute(model, [j.pattern for j in model.joined]), strict=True)
        if joined.listed_as
    ]
    names: dict[str, None] = {"lm_head": None}
    for keep in kept:
        if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight"):
            names[keep.tensor.module] = None
    for module in layers:
        if module not in reasons:
            continue
        experts = find_experts(module)
        if experts:
            names[experts] = None
        names[module] = None
        for pattern, fused in listed_as:
            if pattern.fullmatch(module):
                names[f"{module.rsplit('.', 1)[0]}.{fused}"] = None
    for name in list(names):
        for group in model.spellings:
            prefix = next((prefix for prefix in group if name.startswith(prefix)), None)
            if prefix is not None:
                for other in group:
                    names[other + name.removeprefix(prefix)] = None
    return list(names)

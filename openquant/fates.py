"""Sort a checkpoint's tensors: which can be quantized, which are kept and why, what must share its status.

Here the registry's patterns meet the names of a checkpoint, and --ignore and the scheme's shapes have their say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checkpoint import DTYPE_BITS, Checkpoint, Location, TensorInfo
from .encoded import Coding, Encoded
from .errors import PlanError, UsageError
from .models import NOT_LINEAR, Experts, Model, Split, Stacked
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
        dtype: one of SOURCE_DTYPES; F32 for codes, which are decoded to that.
        shape: (out, in).
        pitch: bytes from one stored row to the next.
        transposed: stored rows are columns of the matrix; of decoded codes, that rows become columns where the weight
            is written unquantized.
        coding: how codes are decoded; None for plain weights.
    """

    label: str
    shard: str
    offset: int
    dtype: str
    shape: tuple[int, int]
    pitch: int
    transposed: bool
    coding: Coding | None = None


class Layer(NamedTuple):
    """A weight that could be quantized: a tensor of the source, or one expert's part of a stacked one.

    `passes` says that the source has it as the scheme would store it.
    """

    module: str
    alike: str
    source: TensorInfo
    shape: tuple[int, int]
    expert: int = -1
    part: int = 0
    stacked: Stacked | None = None
    encoded: Encoded | None = None
    passes: bool = False

    @property
    def nbytes(self) -> int:
        """Size of its elements unquantized, in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.source.dtype] // 8

    @property
    def stored(self) -> int:
        """Size of what the source holds for it, in bytes."""
        return self.encoded.nbytes if self.encoded else self.nbytes

    def matrix(self, where: dict[str, Location]) -> Matrix:
        """Where its elements lie."""
        if self.encoded is not None:
            return encoded_matrices(self.encoded, where)[0]
        place, info = where[self.source.name], self.source
        itemsize = DTYPE_BITS[info.dtype] // 8
        pitch = info.shape[-1] * itemsize
        if self.stacked is None:
            return Matrix(info.name, place.shard, place.offset, info.dtype, self.shape, pitch, transposed=False)
        along = itemsize if self.stacked.transposed else pitch
        start = place.offset + self.expert * info.shape[1] * pitch + self.part * self.shape[0] * along
        label = f"{info.name}[{self.expert}]"
        return Matrix(label, place.shard, start, info.dtype, self.shape, pitch, self.stacked.transposed)


def encoded_matrices(encoded: Encoded, where: dict[str, Location]) -> list[Matrix]:
    """Where the codes of a weight lie: of each expert where it is a stack."""
    place, (rows, cols) = where[encoded.codes.name], encoded.shape[-2:]
    found = []
    for number in range(encoded.shape[0] if len(encoded.shape) == 3 else 1):
        coding = encoded.coding(where, number)
        label = f"{encoded.codes.name}[{number}]" if len(encoded.shape) == 3 else encoded.codes.name
        start = place.offset + number * rows * coding.pitch
        found.append(Matrix(label, place.shard, start, "F32", (rows, cols), coding.pitch, encoded.turned, coding))
    return found


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
    checkpoint: Checkpoint, encoded: dict[str, Encoded], model: Model, scheme: Scheme, ignore: Sequence[str]
) -> tuple[Fates, list[str], list[str]]:
    """What becomes of each tensor, what must be listed as ignored, and notes for the user.

    A source that is quantized in the scheme already keeps its choice of layers, whatever the registry says, but for
    embeddings and output heads.

    Raises:
        PlanError: tensors no pattern covers, or experts that engines do not load in this scheme.
        UsageError: an ignore pattern that matches nothing.
    """
    passing = {name for name, stored in encoded.items() if stored.passes(scheme)}
    settled = bool(encoded) and len(passing) == len(encoded)
    layers, unstacked, kept, copied = _sort_tensors(checkpoint, model, ignore, encoded, passing, settled)
    left = {module for module, layer in layers.items() if settled and not layer.passes}
    sets = joined_sets(model, layers)
    problems = _problems(model, scheme, layers, text_config(checkpoint, model))
    reasons, notes = _unquantized(
        model, scheme, layers, problems, sets, ignore, left, [*(keep.tensor for keep in kept), *copied]
    )
    if not scheme.experts:
        _refuse_experts(model, scheme, [module for module in layers if module not in reasons])
    ignored = _ignored_names(model, layers, reasons, kept)
    return Fates(layers, unstacked, kept, copied, sets, reasons), ignored, notes


def absolute(model: Model, patterns: Iterable[str]) -> list[str]:
    """Patterns of an entry with those that begin with a dot continued from its `layers`."""
    return [model.layers + pattern if pattern.startswith(".") else pattern for pattern in patterns]


def text_config(checkpoint: Checkpoint, model: Model) -> dict[str, Any]:
    """The part of config.json with the language model's sizes; older files have them all at the top."""
    inner = checkpoint.config.get(model.text_config) if model.text_config else None
    return inner if isinstance(inner, dict) else checkpoint.config


def split_finder(model: Model) -> Callable[[str], Split | None]:
    """A function from a module to how tensor parallelism divides it, or None."""
    patterns = [compile_pattern(pattern) for pattern in absolute(model, [split.pattern for split in model.splits])]
    splits = list(zip(patterns, model.splits, strict=True))
    return lambda module: next((split for pattern, split in splits if pattern.fullmatch(module)), None)


def parts_of(shape: tuple[int, int], split: Split | None, config: dict[str, Any]) -> list[tuple[int, str | None]]:
    """Rows of each layer that a tensor holds one below the other, and the config key that counts its heads.

    A row count is 0 where config.json does not tell.
    """
    if split is None or not split.parts:
        return [(shape[0], split.heads if split else None)]
    shares = [1 if key is None else config.get(key) for key in split.parts]
    counts = [share if isinstance(share, int) and share > 0 else 0 for share in shares]
    whole = all(counts) and shape[0] % sum(counts) == 0
    return [
        (shape[0] // sum(counts) * count if whole else 0, key) for count, key in zip(counts, split.parts, strict=True)
    ]


def _sort_tensors(
    checkpoint: Checkpoint,
    model: Model,
    ignore: Sequence[str],
    encoded: dict[str, Encoded],
    passing: set[str],
    settled: bool,
) -> tuple[dict[str, Layer], dict[str, list[Layer]], list[Kept], list[TensorInfo]]:
    """Every tensor into one of: layers (by module), unstacked layers, kept with a reason, copied (fewer axes)."""
    compress = compile_any(absolute(model, model.compress))
    keeps = [(compile_any(absolute(model, [keep.pattern])), keep.why) for keep in model.keep]
    stacks = [
        (compile_any(absolute(model, [f"{_place(experts)}.{stacked.name}"])), (experts, stacked))
        for experts in model.experts
        for stacked in experts.stacked
    ]
    drafted = _draft_finder(model, text_config(checkpoint, model))
    ignored = compile_any(text.removesuffix(".weight") for text in ignore)
    # Names alike but for numbers have the same fate. Neighbours have the same parent, which is looked at once.
    fates: dict[tuple[str, str, bool], tuple[str, bool, list[tuple[Experts, Stacked]], list[str]]] = {}
    parent, parents_alike, draft = None, "", False
    layers: dict[str, Layer] = {}
    unstacked: dict[str, list[Layer]] = {}
    kept: list[Kept] = []
    copied: list[TensorInfo] = []
    misfits: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        module, axes = info.module, len(info.shape)
        path, _, last = module.rpartition(".")
        if path != parent:
            parent, parents_alike, draft = path, template(path), drafted(module)
        key = (parents_alike, "*" if last.isdecimal() else last, draft)
        if key not in fates and draft:
            fates[key] = (template(module), False, [], ["draft layer"])
        elif key not in fates:
            stacks_found = [stacked for pattern, stacked in stacks if pattern.fullmatch(module)]
            reasons = [why for pattern, why in keeps if pattern.fullmatch(module)]
            fates[key] = (template(module), bool(compress.fullmatch(module)), stacks_found, reasons)
        alike, is_layer, stacks_found, reasons = fates[key]
        matches = is_layer + len(stacks_found) + len(reasons)
        stored, passes = encoded.get(info.name), info.name in passing
        if passes and settled and not any(why in NOT_LINEAR for why in reasons):
            layers[module] = Layer(module, alike, info, (info.shape[0], info.shape[1]), encoded=stored, passes=True)
        elif axes < 2 and not (is_layer and info.name != module) and not stacks_found:
            copied.append(info)
        elif matches == 0 and ignored.fullmatch(module):
            kept.append(Kept(info, alike, "--ignore"))
        elif matches == 0 and model.rest:
            kept.append(Kept(info, alike, model.rest))
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
            layers[module] = Layer(module, alike, info, (info.shape[0], info.shape[1]), encoded=stored, passes=passes)
        elif stored is not None:
            misfits[info.name] = (
                f"is stored as {stored.codes.dtype} {list(stored.codes.shape)}, a stack that is not read"
            )
        elif axes != 3 or info.shape[-1 if stacks_found[0][1].transposed else 1] % len(stacks_found[0][1].parts):
            misfits[info.name] = f"is not a stack of experts but {list(info.shape)}"
        else:
            unstacked[info.name] = _unstack(info, *stacks_found[0])
    for layer in itertools.chain.from_iterable(unstacked.values()):
        if f"{layer.module}.weight" in checkpoint.tensors:
            misfits[f"{layer.module}.weight"] = "is in the stack of experts too"
        layers[layer.module] = layer
    misfits |= _wrongly_stacked(unstacked)
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


def _draft_finder(model: Model, config: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a module belongs to a draft layer."""
    first = config.get(model.draft_layers) if model.draft_layers else None
    if not isinstance(first, int):
        return lambda _: False
    pattern = compile_pattern(f"{model.layers}.**")

    def drafted(module: str) -> bool:
        found = pattern.fullmatch(module)
        return found is not None and found[1].isdecimal() and int(found[1]) >= first

    return drafted


def _place(experts: Experts) -> str:
    """The module that holds the stacked tensors."""
    return experts.path.rsplit(".", 1)[0] if experts.beside else experts.path


def _wrongly_stacked(unstacked: dict[str, list[Layer]]) -> dict[str, str]:
    """Stacks whose experts do not fit together: down leads back from where gate and up lead to.

    A file with its stacks the other way around, as some tools write them, has the names of the right one.
    """
    widths: dict[str, tuple[str, tuple[int, ...]]] = {}
    misfits: dict[str, str] = {}
    for name, made in unstacked.items():
        path, widths_here = made[0].module.rsplit(".", 1)[0], made[0].shape
        if made[0].stacked and len(made[0].stacked.parts) == 1:
            widths_here = widths_here[::-1]
        other, widths_there = widths.setdefault(path, (name, widths_here))
        if widths_here != widths_there:
            misfits[name] = f"does not fit {other}: are the experts stacked the other way around?"
    return misfits


def _unstack(info: TensorInfo, experts_at: Experts, stacked: Stacked) -> list[Layer]:
    """One layer for each expert and part of a stacked tensor [E, in, parts*out] or [E, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    if experts_at.beside:
        path += "." + experts_at.path.rsplit(".", 1)[1]
    return [
        Layer(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]


def joined_sets(model: Model, layers: dict[str, Layer]) -> dict[str, tuple[str, ...]]:
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


def experts_finder(model: Model) -> Callable[[str], str | None]:
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


def _problems(
    model: Model, scheme: Scheme, layers: dict[str, Layer], config: dict[str, Any]
) -> dict[tuple[str, tuple[int, int], bool], str | None]:
    """Why the scheme cannot store layers of a name and shape, which pass or do not; None if it can."""
    problems: dict[tuple[str, tuple[int, int], bool], str | None] = {}
    find_split = split_finder(model)
    for module, layer in layers.items():
        key = layer.alike, layer.shape, layer.passes
        if layer.passes:
            problems[key] = None
        elif key not in problems:
            problem = scheme.misfit(layer.shape)
            for rows, _ in parts_of(layer.shape, find_split(module), config):
                problem = problem or scheme.misfit((rows, layer.shape[1]))
                if not rows and scheme.group[0] not in (1, None):
                    problem = problem or "config.json does not tell the sizes of what it holds"
            problems[key] = problem
    return problems


def _unquantized(
    model: Model,
    scheme: Scheme,
    layers: dict[str, Layer],
    problems: dict[tuple[str, tuple[int, int], bool], str | None],
    sets: dict[str, tuple[str, ...]],
    ignore: Sequence[str],
    left: set[str],
    others: Iterable[TensorInfo],
) -> tuple[dict[str, str], list[str]]:
    """Modules that stay unquantized with the reason, widened to all that must share their status; and notes."""
    reorders = bool(model.reordered) and not scheme.follows_rows
    if not ignore and not reorders and not left and not any(problems.values()):
        return {}, [] if layers else ["nothing is quantized"]
    find_experts = experts_finder(model)
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
    shapes = {module: problems[layer.alike, layer.shape, layer.passes] for module, layer in layers.items()}
    misfits = {
        module: "engines reorder its rows but not its scales" if reordered.fullmatch(module) else problem
        for module, problem in shapes.items()
    } | dict.fromkeys(left, "the source has it unquantized")
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
    if any(shapes[module] for module in reasons):
        notes.append("some layers do not divide into blocks; --scheme tensor or channel quantizes them too")
    return reasons, notes


def _refuse_experts(model: Model, scheme: Scheme, quantized: list[str]) -> None:
    find_experts = experts_finder(model)
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
    find_experts = experts_finder(model)
    listed_as = [
        (compile_pattern(pattern), joined.listed_as)
        for joined, pattern in zip(model.joined, absolute(model, [j.pattern for j in model.joined]), strict=True)
        if joined.listed_as
    ]
    names: dict[str, None] = {"lm_head": None}
    modules = [
        keep.tensor.module for keep in kept if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight")
    ]
    for module in (*modules, *(module for module in layers if module in reasons)):
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
        for part, other in model.renames:
            names[name.replace(part, other)] = None
    return list(names)

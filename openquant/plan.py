"""Plan a conversion from names, shapes and dtypes alone: every output tensor, its shard and its offset.

All decisions are made here. `--dry-run` prints the plan, the conversion carries it out, a resumed run continues
it. Output shards correspond to source shards one to one and keep their names, so a finished shard never depends
on another one's output.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from . import __version__
from .checkpoint import DTYPE_BITS, Checkpoint, Location, TensorInfo
from .errors import PlanError, UsageError
from .models import MODELS, Model, Split, Stacked
from .patterns import collapse, compile_any, compile_pattern, template
from .schemes import Scheme

SOURCE_DTYPES = ("BF16", "F16", "F32")
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


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


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of the source that go to the output as they are: file range -> offset in the output shard."""

    label: str
    shard: str
    offset: int
    nbytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix to be written at `target`; quantized, with its scale at `scale_target`, unless that is None."""

    matrix: Matrix
    target: int
    scale_target: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """The unit of work: matrices of one output shard, and everything that shares their scale.

    Attributes:
        pieces: what this job writes.
        joined: the whole joined set, members in other shards included; empty unless a scale is shared.
    """

    pieces: tuple[Piece, ...]
    joined: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its name, the source shard's own, and the size of its tensors in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """What an output file is made of.

    Attributes:
        name: file name.
        header: everything before the first tensor.
        size: size of the file in bytes.
        jobs: what fills it.
        tensors: every tensor, in file order.
    """

    name: str
    header: bytes
    size: int
    jobs: tuple[Copy | Job, ...]
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Group:
    """Tensors alike in name, shape and fate: a line of the printed plan."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    quantized: bool
    why: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ParallelSize:
    """Whether a tensor-parallel size can serve the result, and if not, what forbids it."""

    size: int
    problem: str | None


class _Layer(NamedTuple):
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


class _Kept(NamedTuple):
    """A tensor of two or more axes that is copied, and why."""

    tensor: TensorInfo
    alike: str
    why: str


@dataclass(frozen=True)
class _Fates:
    """What becomes of each tensor.

    Attributes:
        layers: weights that could be quantized, by module.
        unstacked: those made from a stacked tensor, by its name.
        kept: other tensors of two or more axes.
        copied: tensors of fewer.
        sets: the whole set of each layer that is joined with others, itself included.
        reasons: why the layers that stay unquantized do.
    """

    layers: dict[str, _Layer]
    unstacked: dict[str, list[_Layer]]
    kept: list[_Kept]
    copied: list[TensorInfo]
    sets: dict[str, tuple[str, ...]]
    reasons: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What a run will do; see the module's text. A shard is laid out when its turn comes."""

    architecture: str
    scheme: Scheme
    model: Model
    shards: tuple[Shard, ...]
    indexed: bool
    quantization_config: dict[str, Any]
    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    parallel: tuple[ParallelSize, ...]
    files: dict[str, int]
    left_out: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    source_weight_bytes_quantized: int
    quantized_tensors: int
    digest: str
    _where: dict[str, Location]
    _by_shard: dict[str, list[TensorInfo]]
    _fates: _Fates

    @property
    def ignored_layers(self) -> list[str]:
        """Modules left unquantized, in every name the engines look them up under."""
        return list(self.quantization_config["ignored_layers"])

    @property
    def parallel_sizes(self) -> list[int]:
        """The tensor-parallel sizes that can serve the result."""
        return [entry.size for entry in self.parallel if entry.problem is None]

    def outputs(self, shard: str) -> list[TensorInfo]:
        """The tensors of an output file, in file order."""
        fates, outputs = self._fates, []
        for info in self._by_shard[shard]:
            made = fates.unstacked.get(info.name)
            if made is None:
                layer = fates.layers.get(info.module)
                made = [layer] if layer is not None and layer.source is info else None
            if made is None:
                outputs.append(info)
                continue
            for layer in made:
                if layer.module in fates.reasons:
                    outputs.append(TensorInfo(f"{layer.module}.weight", info.dtype, layer.shape))
                else:
                    outputs.extend(self.scheme.outputs(layer.module, layer.shape))
        # Wide dtypes first, as the safetensors library writes them: every tensor is aligned to its element.
        return sorted(outputs, key=lambda info: -DTYPE_BITS[info.dtype])

    def lay_out(self, shard: str) -> Layout:
        """Offsets and jobs of an output file."""
        fates = self._fates
        outputs = self.outputs(shard)
        header, start = _header(outputs)
        places: dict[str, int] = {}
        for info in outputs:
            places[info.name] = start
            start += info.nbytes
        jobs: list[Copy | Job] = []
        done: set[str] = set()
        for info in self._by_shard[shard]:
            layer = fates.layers.get(info.module)
            if info.name in fates.unstacked:
                made = fates.unstacked[info.name]
            elif layer is not None and layer.source is info:
                made = [layer]
            else:
                jobs.append(Copy(info.name, shard, self._where[info.name].offset, info.nbytes, places[info.name]))
                continue
            for layer in made:
                if layer.module not in done:
                    job = self._job(layer, shard, places)
                    jobs.append(job)
                    done.update(fates.sets.get(layer.module, ()))
        return Layout(shard, header, start, tuple(jobs), tuple(outputs))

    def _job(self, layer: _Layer, shard: str, places: dict[str, int]) -> Job:
        """The part of a layer's joined set that lies in this shard."""
        fates = self._fates
        quantized = layer.module not in fates.reasons
        joined = [fates.layers[module] for module in fates.sets.get(layer.module, (layer.module,))]
        pieces = tuple(
            Piece(
                member.matrix(self._where),
                places[f"{member.module}.weight"],
                places[f"{member.module}.{self.scheme.scale_name}"] if quantized else None,
            )
            for member in joined
            if self._where[member.source.name].shard == shard
        )
        shares = quantized and self.scheme.block is None
        return Job(pieces, tuple(member.matrix(self._where) for member in joined) if shares else ())


def make_plan(checkpoint: Checkpoint, scheme: Scheme, ignore: Sequence[str] = (), identity: str = "") -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: the opened source.
        scheme: the number format.
        ignore: patterns over module names that stay unquantized.
        identity: what tells this source from another with the same headers; it goes into the plan's digest.

    Raises:
        SourceError: the source is already quantized.
        PlanError: an unknown architecture, or tensors no rule covers.
        UsageError: an ignore pattern that matches nothing or is malformed.
    """
    model = _find_model(checkpoint.architecture)
    _refuse_quantized(checkpoint)
    for pattern in ignore:
        compile_pattern(pattern)
    layers, unstacked, kept, copied = _sort_tensors(checkpoint, model, ignore)
    sets = _joined_sets(model, layers)
    reasons, notes = _unquantized(model, scheme, layers, sets, ignore, [*(keep.tensor for keep in kept), *copied])
    fates = _Fates(layers, unstacked, kept, copied, sets, reasons)
    quantization_config = scheme.config(_ignored_names(model, layers, reasons, kept))
    by_shard: dict[str, list[TensorInfo]] = {shard: [] for shard in checkpoint.shards}
    saved = dict.fromkeys(checkpoint.shards, 0)
    for info in checkpoint.tensors.values():
        by_shard[checkpoint.where[info.name].shard].append(info)
    costs: dict[tuple[str, tuple[int, int]], int] = {}
    quantized = [layer for layer in layers.values() if layer.module not in reasons]
    for layer in quantized:
        key = (layer.source.dtype, layer.shape)
        if key not in costs:
            costs[key] = layer.nbytes - sum(info.nbytes for info in scheme.outputs("", layer.shape))
        saved[checkpoint.where[layer.source.name].shard] += costs[key]
    source_sizes = {shard: sum(info.nbytes for info in infos) for shard, infos in by_shard.items()}
    shards = tuple(Shard(shard, size - saved[shard]) for shard, size in source_sizes.items())
    return Plan(
        architecture=checkpoint.architecture,
        scheme=scheme,
        model=model,
        shards=shards,
        indexed=checkpoint.indexed,
        quantization_config=quantization_config,
        groups=_groups(scheme, fates),
        notes=tuple(notes),
        parallel=_parallel(checkpoint, model, scheme, quantized),
        files=checkpoint.files,
        left_out=checkpoint.left_out,
        source_bytes=sum(source_sizes.values()),
        output_bytes=sum(shard.nbytes for shard in shards),
        source_weight_bytes_quantized=sum(layer.nbytes for layer in quantized),
        quantized_tensors=len(quantized),
        digest=_digest(checkpoint, scheme, quantization_config, identity),
        _where=checkpoint.where,
        _by_shard=by_shard,
        _fates=fates,
    )


def _find_model(architecture: str) -> Model:
    if architecture not in MODELS:
        raise PlanError(
            f"{architecture} is not a known architecture; known are {', '.join(sorted(MODELS))}",
            "add an entry to openquant/models.py (README: Adding an architecture)",
        )
    return MODELS[architecture]


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if place.get(key) is not None:
                found = place[key]
                method = found.get("quant_method", "unknown method") if isinstance(found, dict) else found
                raise PlanError(f"the source is already quantized ({method})", "start from the unquantized model")
    for info in checkpoint.tensors.values():
        if info.name.endswith((".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed", ".weight.absmax")):
            raise PlanError(
                f"the source is already quantized: it holds {info.name}", "start from the unquantized model"
            )
        if info.dtype.startswith(("F8_", "F4", "F6_")):
            raise PlanError(
                f"the source is already quantized: {info.name} is {info.dtype}", "start from the unquantized model"
            )


def _relative(model: Model, patterns: Iterable[str]) -> list[str]:
    return [model.layers + pattern if pattern.startswith(".") else pattern for pattern in patterns]


def _sort_tensors(
    checkpoint: Checkpoint, model: Model, ignore: Sequence[str]
) -> tuple[dict[str, _Layer], dict[str, list[_Layer]], list[_Kept], list[TensorInfo]]:
    """Every tensor into one of: layers (by module), unstacked layers, kept with a reason, copied (fewer axes)."""
    compress = compile_any(_relative(model, model.compress))
    keeps = [(compile_any(_relative(model, [keep.pattern])), keep.why) for keep in model.keep]
    stacks = [
        (compile_any(_relative(model, [f"{experts.path}.{stacked.name}"])), stacked)
        for experts in model.experts
        for stacked in experts.stacked
    ]
    ignored = compile_any(text.removesuffix(".weight") for text in ignore)
    # Names alike but for numbers have the same fate.
    fates: dict[str, tuple[bool, Any, list[str]]] = {}
    layers: dict[str, _Layer] = {}
    unstacked: dict[str, list[_Layer]] = {}
    kept: list[_Kept] = []
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
            kept.append(_Kept(info, alike, "--ignore"))
        elif matches == 0:
            misfits[info.name] = "matches no pattern"
        elif matches > 1:
            misfits[info.name] = "matches more than one pattern"
        elif reasons:
            kept.append(_Kept(info, alike, reasons[0]))
        elif info.dtype not in SOURCE_DTYPES:
            misfits[info.name] = f"is {info.dtype}, not one of {', '.join(SOURCE_DTYPES)}"
        elif is_layer and (axes != 2 or info.name == module):
            misfits[info.name] = f"is not a 2-D weight but {list(info.shape)}"
        elif is_layer:
            layers[module] = _Layer(module, alike, info, (info.shape[0], info.shape[1]))
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


def _unstack(info: TensorInfo, stacked: Stacked) -> list[_Layer]:
    """One layer for each expert and part of a stacked tensor [E, in, parts*out] or [E, parts*out, in]."""
    experts, rows, cols = info.shape
    count = len(stacked.parts)
    shape = (cols // count, rows) if stacked.transposed else (rows // count, cols)
    path = info.module.rsplit(".", 1)[0]
    return [
        _Layer(f"{path}.{expert}.{part}", template(f"{path}.0.{part}"), info, shape, expert, number, stacked)
        for expert in range(experts)
        for number, part in enumerate(stacked.parts)
    ]


def _joined_sets(model: Model, layers: dict[str, _Layer]) -> dict[str, tuple[str, ...]]:
    """For every joined module its whole set, itself included, in the order of the checkpoint."""
    patterns = [compile_pattern(pattern) for pattern in _relative(model, [joined.pattern for joined in model.joined])]
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
    patterns = [compile_pattern(pattern) for pattern in _relative(model, [experts.path for experts in model.experts])]

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
    layers: dict[str, _Layer],
    sets: dict[str, tuple[str, ...]],
    ignore: Sequence[str],
    others: Iterable[TensorInfo],
) -> tuple[dict[str, str], list[str]]:
    """Modules that stay unquantized with the reason, widened to all that must share their status; and notes."""
    problems = {shape: scheme.misfit(shape) for shape in {layer.shape for layer in layers.values()}}
    if not ignore and not any(problems.values()):
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
    misfits = {module: problems[layer.shape] for module, layer in layers.items()}
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
    if any(misfits[module] for module in reasons):
        notes.append(
            f"some layers do not divide into {scheme.block} x {scheme.block} blocks; --scheme tensor quantizes them too"
        )
    return reasons, notes


def _ignored_names(
    model: Model,
    layers: dict[str, _Layer],
    reasons: dict[str, str],
    kept: list[_Kept],
) -> list[str]:
    """What ignored_layers must hold: checkpoint names without .weight, and the engines' other names for them.

    vLLM 0.32.0 compares for equality (layers/quantization/utils/quant_utils.py:617-691); experts match by the
    path that holds them all. lm_head is always listed: transformers would quantize one tied to the embedding.
    """
    find_experts = _experts_finder(model)
    listed_as = [
        (compile_pattern(pattern), joined.listed_as)
        for joined, pattern in zip(model.joined, _relative(model, [j.pattern for j in model.joined]), strict=True)
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


def _header(tensors: list[TensorInfo]) -> tuple[bytes, int]:
    """The bytes before the first tensor, and how many they are; padded to 8 as the format asks."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in tensors:
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text)


def _digest(checkpoint: Checkpoint, scheme: Scheme, quantization_config: dict[str, Any], identity: str) -> str:
    """What guards a resumed run: equal for the same source and options under the same version, and only then."""
    facts = [
        __version__,
        asdict(scheme),
        checkpoint.config,
        quantization_config,
        checkpoint.files,
        checkpoint.shards,
        checkpoint.headers,
        identity,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _groups(scheme: Scheme, fates: _Fates) -> tuple[Group, ...]:
    names: dict[tuple[str, tuple[int, ...], bool, str], list[str]] = {}
    sizes: dict[tuple[str, tuple[int, ...], bool, str], tuple[int, int]] = {}

    def add(name: str, alike: str, shape: tuple[int, ...], quantized: bool, why: str, info: TensorInfo) -> None:
        key = (f"{alike} {info.dtype}", shape, quantized, why)
        if key not in names:
            names[key] = []
            before = TensorInfo("", info.dtype, shape).nbytes
            after = sum(out.nbytes for out in scheme.outputs("", (shape[0], shape[1]))) if quantized else before
            sizes[key] = before, after
        names[key].append(name)

    for layer in fates.layers.values():
        why = fates.reasons.get(layer.module)
        add(layer.module, layer.alike, layer.shape, why is None, why or "", layer.source)
    for keep in fates.kept:
        add(keep.tensor.module, keep.alike, keep.tensor.shape, False, keep.why, keep.tensor)
    for info in fates.copied:
        add(info.name, info.name, info.shape, False, "fewer than two axes", info)
    return tuple(
        Group(tuple(found), key[1], key[2], key[3], len(found) * sizes[key][0], len(found) * sizes[key][1])
        for key, found in names.items()
    )


def _parallel(
    checkpoint: Checkpoint, model: Model, scheme: Scheme, quantized: list[_Layer]
) -> tuple[ParallelSize, ...]:
    """For each tensor-parallel size whether the quantized layers divide, and the first one that does not."""
    config = checkpoint.config.get(model.text_config) if model.text_config else checkpoint.config
    config = config if isinstance(config, dict) else {}
    splits = [(compile_pattern(pattern), split) for split, pattern in
              zip(model.splits, _relative(model, [split.pattern for split in model.splits]), strict=True)]  # fmt: skip
    kinds: dict[tuple[str, tuple[int, int]], Split | None] = {}
    for layer in quantized:
        key = (layer.alike, layer.shape)
        if key not in kinds:
            kinds[key] = next((split for pattern, split in splits if pattern.fullmatch(layer.module)), None)
    result = []
    for size in TENSOR_PARALLEL_SIZES:
        problem = None
        for (name, shape), split in kinds.items():
            problem = _indivisible(name, shape, split, config, scheme, size) if split else None
            if problem:
                break
        result.append(ParallelSize(size, problem))
    return tuple(result)


def _indivisible(
    name: str, shape: tuple[int, int], split: Split, config: dict[str, Any], scheme: Scheme, size: int
) -> str | None:
    length = shape[0] if split.axis == "out" else shape[1]
    parts = size
    heads = config.get(split.heads) if split.heads else None
    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{name}: {heads} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{name}: {heads} heads do not divide by {size}"
    if length % parts:
        return f"{name}: {length} does not divide by {parts}"
    if scheme.block is not None and length // parts % scheme.block:
        return f"{name}: {length} / {parts} = {length // parts} is not a multiple of {scheme.block}"
    return None

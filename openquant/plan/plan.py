"""Plan a conversion from names, shapes and dtypes alone: every output tensor, its shard and its offset.

All decisions are made here. `--dry-run` prints the plan, the conversion carries it out, a resumed run continues
it. Output shards correspond to source shards one to one and keep their names, so a finished shard never depends
on another one's output.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import PlanError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.tensors import DTYPE_BITS, Location, TensorInfo, make_header
from ..formats.format import INPUT_SCALE
from ..formats.quantization import find_quantization
from ..formats.schemes import PLAIN, Scheme
from ..models import GENERIC, MODELS, SGLANG, Model, Refusal
from ..patterns import collapse, compile_pattern, template
from ..version import __version__
from ..weights.encoded import DECODED_DTYPE, Encoded, decoded_view, leftovers, without_cache_scales
from ..weights.layers import Layer, Matrix, encoded_matrices
from .fates import Fates, Kept, Options, decide, unread_by_sglang
from .parallel import ParallelSize, parallel_sizes, text_config
from .roles import Entry, is_head


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of the source that go to the output as they are: file range -> offset in the output shard.

    `scale` is the dtype of a scale of activations, one number that is written as float32; None for all else.
    """

    label: str
    shard: str
    offset: int
    nbytes: int
    target: int
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix to be written at `target`; quantized, with its scale at `scale_target`, unless that is None.

    `passes` says that its codes are those of the scheme already, and go to the output as they are.
    """

    matrix: Matrix
    target: int
    scale_target: int | None
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The unit of work: matrices of one output shard, and everything that shares their scale.

    Attributes:
        scheme: what quantized pieces are stored as.
        pieces: what this job writes.
        joined: the whole joined set, members in other shards included; empty unless a scale is shared.
    """

    scheme: Scheme
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
    """Tensors alike in name, shape and fate: a line of the printed plan.

    `decoded` says that they are quantized in the source, but not in the output; `why` they are not quantized, or not
    as most are.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    quantized: bool
    decoded: bool
    why: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """What a run will do; see the module's text. A shard is laid out when its turn comes.

    `architecture` is the registry's entry it was made by, `scheme` that of all layers which have no other, `schemes`
    how many layers each has, `parallel` what each tensor-parallel size meets, `config` the output's config.json,
    `source_shards` the source's files; the output has all of the same name that hold a weight.
    """

    architecture: str
    scheme: Scheme
    schemes: dict[Scheme, int]
    entry: Entry
    shards: tuple[Shard, ...]
    source_shards: tuple[str, ...]
    indexed: bool
    config: dict[str, Any]
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
    decoded_tensors: int
    digest: str
    _where: dict[str, Location]
    _by_shard: dict[str, list[TensorInfo]]
    _encoded: dict[str, Encoded]
    _fates: Fates

    @property
    def model(self) -> Model:
        """What the registry holds of the architecture."""
        return self.entry.model

    @property
    def title(self) -> str:
        """What shares a scale: "one scale per tensor, 16 of 28 layers one scale per output row"."""
        if not self.quantization_config:
            return "bfloat16 weights"
        most, *others = self.schemes
        total = self.quantized_tensors
        return ", ".join([most.title, *(f"{self.schemes[other]} of {total} layers {other.title}" for other in others)])

    @property
    def description(self) -> str:
        """What the weights are: "float8_e4m3fn, one scale per tensor"."""
        return f"{self.scheme.format.number.name}, {self.title}" if self.quantization_config else self.title

    @property
    def unread_by_sglang(self) -> Refusal | None:
        """Why SGLang does not load the output, and what it loads instead; None if it does."""
        return unread_by_sglang(self.entry, self._fates)

    @property
    def engines(self) -> tuple[str, ...]:
        """Who serves the output."""
        return ("vLLM", "SGLang") if self.unread_by_sglang is None else ("vLLM",)

    @property
    def expert_schemes(self) -> dict[str, Scheme]:
        """The schemes that quantized experts are stored in, by name."""
        return {scheme.name: scheme for layer, scheme in self._fates.quantized if self.entry.experts(layer.module)}

    @property
    def ignored_layers(self) -> list[str]:
        """Modules left unquantized, in every name the engines look them up under."""
        return list(self.quantization_config[self.scheme.ignored_keys[0]]) if self.scheme.ignored_keys else []

    @property
    def parallel_sizes(self) -> list[int]:
        """The tensor-parallel sizes that can serve the result."""
        return [entry.size for entry in self.parallel if entry.problem is None]

    @property
    def layers(self) -> dict[str, Layer]:
        """The weights that could be quantized, by module; each knows where it lies in the source."""
        return self._fates.layers

    def sources(self, shard: str) -> set[str]:
        """The source shards that an output file is made from: its own, those with scales of its codes, and those with
        members of its joined sets.
        """
        fates, names = self._fates, [info.name for info in self._by_shard[shard]]
        if any(scheme.format.shared for scheme in self.schemes):
            for info in self._by_shard[shard]:
                if fates.scheme_of(info.module).format.shared:
                    names += [fates.layers[module].source.name for module in fates.sets.get(info.module, ())]
        names += [self._encoded[name].scale.name for name in names if name in self._encoded]
        names += [scale.name for _, scale in self._input_scales(shard)]
        return {shard, *(self._where[name].shard for name in names)}

    def _input_scales(self, shard: str) -> list[tuple[str, TensorInfo]]:
        """The modules of an output file that keep the scale of their activations, each with that of the source."""
        if not self.scheme.format.static:
            return []
        layers = [self._fates.layers.get(info.module) for info in self._by_shard[shard]]
        return [
            (layer.module, layer.input_scale)
            for layer in layers
            if layer and layer.input_scale and layer.module not in self._fates.reasons
        ]

    @property
    def decodes(self) -> bool:
        """Whether any weight is quantized in the source."""
        return bool(self._encoded)

    @property
    def matrix_kinds(self) -> list[Matrix]:
        """One of each dtype, shape and way of storing, of all that is handled as a matrix."""
        kinds: dict[tuple[Any, ...], Matrix] = {}
        for layer in self._fates.layers.values():
            turned = layer.stacked is not None and layer.stacked.transposed
            key = layer.source.dtype, layer.shape, turned, layer.encoded and layer.encoded.form
            if key not in kinds:
                kinds[key] = layer.matrix(self._where)
        for stored in self._encoded.values():
            kind = stored.codes.dtype, stored.shape, stored.turned, stored.form
            if kind not in kinds:
                kinds[kind] = encoded_matrices(stored, self._where)[0]
        return list(kinds.values())

    def consumed(self, shard: str) -> int:
        """Bytes of the source that an output file is made from, whichever shard they lie in."""
        stored = (self._encoded.get(info.name, info) for info in self._by_shard[shard])
        return sum(entry.nbytes for entry in (*stored, *(scale for _, scale in self._input_scales(shard))))

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
                    outputs.extend(fates.scheme_of(layer.module).format.parts(layer.module, layer.shape))
        # Wide dtypes first, as the safetensors library writes them: every tensor is aligned to its element.
        return sorted(outputs, key=lambda info: -DTYPE_BITS[info.dtype])

    def lay_out(self, shard: str) -> Layout:
        """Offsets and jobs of an output file."""
        fates = self._fates
        outputs = self.outputs(shard)
        header, start = make_header(outputs)
        places: dict[str, int] = {}
        for info in outputs:
            places[info.name] = start
            start += info.nbytes
        jobs: list[Copy | Job] = []
        done: set[str] = set()
        for info in self._by_shard[shard]:
            layer, stored = fates.layers.get(info.module), self._encoded.get(info.name)
            if info.name in fates.unstacked:
                made = fates.unstacked[info.name]
            elif layer is not None and layer.source is info:
                made = [layer]
            elif stored is not None:
                jobs += self._decoded(stored, places[info.name])
                continue
            else:
                jobs.append(Copy(info.name, shard, self._where[info.name].offset, info.nbytes, places[info.name]))
                continue
            for layer in made:
                if layer.module not in done:
                    job = self._job(layer, shard, places)
                    jobs.append(job)
                    done.update(fates.sets.get(layer.module, ()))
        for module, scale in self._input_scales(shard):
            place = self._where[scale.name]
            target = places[f"{module}.{INPUT_SCALE}"]
            jobs.append(Copy(scale.name, place.shard, place.offset, scale.nbytes, target, scale.dtype))
        return Layout(shard, header, start, tuple(jobs), tuple(outputs))

    def _job(self, layer: Layer, shard: str, places: dict[str, int]) -> Job:
        """The part of a layer's joined set that lies in this shard."""
        fates, scheme = self._fates, self._fates.scheme_of(layer.module)
        quantized = layer.module not in fates.reasons
        joined = [fates.layers[module] for module in fates.sets.get(layer.module, (layer.module,))]
        pieces = tuple(
            Piece(
                member.matrix(self._where),
                places[f"{member.module}.weight"],
                places[f"{member.module}.{scheme.format.scale.name}"] if quantized else None,
                quantized and member.passes(scheme),
            )
            for member in joined
            if self._where[member.source.name].shard == shard
        )
        shares = quantized and scheme.format.shared
        return Job(scheme, pieces, tuple(member.matrix(self._where) for member in joined) if shares else ())

    def _decoded(self, stored: Encoded, target: int) -> list[Job]:
        """What writes a weight unquantized that is not in the source, each matrix of a stack by itself."""
        matrices = encoded_matrices(stored, self._where)
        nbytes = TensorInfo("", DECODED_DTYPE, stored.shape[-2:]).nbytes
        return [
            Job(self.scheme, (Piece(matrix, target + number * nbytes, None),), ())
            for number, matrix in enumerate(matrices)
        ]


def make_plan(
    checkpoint: Checkpoint,
    scheme: Scheme,
    options: Options | None = None,
    identity: str = "",
    architecture: str | None = None,
) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: the opened source.
        scheme: the number format of all layers that have no other.
        options: what the user asks for beside it; nothing if None.
        identity: what tells this source from another with the same headers; it goes into the plan's digest.
        architecture: the registry's entry to go by, or "generic"; the one of the checkpoint's own name if None.

    Raises:
        SourceError: the source is quantized, and its scales do not belong to its codes.
        PlanError: it is quantized in an unknown way, an unknown architecture, tensors no rule covers, or what engines
            cannot load.
        UsageError: a pattern that matches nothing or is malformed, or a size that is none.
    """
    options = options or Options()
    model = _find_model(architecture or checkpoint.architecture)
    for asked in (scheme, *(other for _, other in options.scheme_for)):
        refusal = model.refusal(asked.name, asked.method)
        if refusal is not None:
            raise PlanError(f"{model.name} cannot be served with {asked.title}: {refusal.why}", refusal.hint)
    seen, encoded = decoded_view(checkpoint)
    for pattern in (*options.ignore, *(pattern for pattern, _ in options.scheme_for)):
        compile_pattern(pattern)
    if options.tp is not None and options.tp < 1:
        raise UsageError(f"--tp {options.tp} is no number of ranks", "give --tp 1 or more")
    if options.head:
        _refuse_head(seen, model, scheme)
        model = model.with_head()
    if scheme.format.static and not any(stored.input_scale for stored in encoded.values()):
        raise PlanError(
            "static activations are the input_scale tensors of a quantized source, and this one has none",
            "leave --activation-scheme out: engines scale activations as they run",
        )
    entry = Entry(model)
    fates, quantization_config, notes = decide(seen, encoded, entry, scheme, options)
    unread = unread_by_sglang(entry, fates)
    if unread is not None:
        notes.append(f"{SGLANG} does not load this output: {unread.why}; {unread.hint}")
    if encoded and (find_quantization(checkpoint.config) or {}).get("kv_cache_scheme"):
        notes.append("kv_cache_scheme is left out; its scales stay, and engines use them with --kv-cache-dtype fp8")
    notes += _left_behind(checkpoint, encoded)
    if model.rest:
        notes.insert(0, "decided from names and shapes alone: look at the plan, and at what the engine makes of it")
    parallel = parallel_sizes(seen, entry, fates.groups, options.tp)
    return _assemble(checkpoint, seen, encoded, entry, fates, quantization_config, notes, parallel, identity)


def make_plain_plan(checkpoint: Checkpoint, identity: str = "") -> Plan:
    """Decide to decode whatever is quantized and to leave all else as it is; the registry has no say in that.

    Args:
        checkpoint: the opened source.
        identity: as for make_plan.

    Raises:
        SourceError: its scales do not belong to its codes.
        PlanError: nothing is quantized, or in an unknown way.
    """
    seen, encoded = decoded_view(checkpoint)
    if not encoded:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "there is nothing to dequantize")
    seen = without_cache_scales(seen)
    matrices = [info for info in seen.tensors.values() if len(info.shape) > 1]
    kept = [Kept(info, template(info.module), "" if info.name in encoded else "not quantized") for info in matrices]
    copied = [info for info in seen.tensors.values() if len(info.shape) < 2]
    fates = Fates(PLAIN, {}, {}, kept, copied, {}, {}, {})
    entry = Entry(MODELS.get(checkpoint.architecture, replace(GENERIC, name=checkpoint.architecture)))
    return _assemble(checkpoint, seen, encoded, entry, fates, {}, _left_behind(checkpoint, encoded), (), identity)


def _assemble(
    original: Checkpoint,
    checkpoint: Checkpoint,
    encoded: dict[str, Encoded],
    entry: Entry,
    fates: Fates,
    quantization_config: dict[str, Any],
    notes: list[str],
    parallel: tuple[ParallelSize, ...],
    identity: str,
) -> Plan:
    """The plan that follows from the fate of each tensor; `checkpoint` is the decoded view of the original."""
    by_shard: dict[str, list[TensorInfo]] = {shard: [] for shard in checkpoint.shards}
    saved = dict.fromkeys(checkpoint.shards, 0)
    for info in checkpoint.tensors.values():
        by_shard[checkpoint.where[info.name].shard].append(info)
    costs: dict[tuple[str, tuple[int, int], str], int] = {}
    counts: dict[str, int] = {}
    quantized = fates.quantized
    for layer, chosen in quantized:
        counts[chosen.name] = counts.get(chosen.name, 0) + 1
        key = (layer.source.dtype, layer.shape, chosen.name)
        if key not in costs:
            costs[key] = layer.nbytes - sum(info.nbytes for info in chosen.format.parts("", layer.shape))
        saved[checkpoint.where[layer.source.name].shard] += costs[key]
    sizes = {shard: sum(info.nbytes for info in infos) for shard, infos in by_shard.items()}
    # A shard that holds nothing but scales has no part in the output.
    shards = tuple(Shard(shard, size - saved[shard]) for shard, size in sizes.items() if by_shard[shard])
    return Plan(
        architecture=entry.model.name,
        scheme=fates.scheme,
        schemes={chosen: counts.get(chosen.name, 0) for chosen in _used(fates)},
        entry=entry,
        shards=shards,
        source_shards=tuple(checkpoint.shards),
        indexed=checkpoint.indexed,
        config={**checkpoint.config, **({"quantization_config": quantization_config} if quantization_config else {})},
        quantization_config=quantization_config,
        groups=_groups(fates, encoded),
        notes=tuple(notes),
        parallel=parallel,
        files=checkpoint.files,
        left_out=checkpoint.left_out,
        source_bytes=sum(info.nbytes for info in original.tensors.values()),
        output_bytes=sum(shard.nbytes for shard in shards),
        source_weight_bytes_quantized=sum(layer.stored for layer, _ in quantized),
        quantized_tensors=len(quantized),
        decoded_tensors=len(encoded) - sum(layer.encoded is not None for layer, _ in quantized),
        digest=_digest(original, entry.model, fates, quantization_config, identity),
        _where=checkpoint.where,
        _by_shard=by_shard,
        _encoded=encoded,
        _fates=fates,
    )


def _left_behind(checkpoint: Checkpoint, encoded: dict[str, Encoded]) -> list[str]:
    """A note of the tensors that no output gets."""
    found = leftovers(checkpoint.tensors, (stored.codes.name for stored in encoded.values()))
    return [f"left out, as engines refuse them: {', '.join(collapse(found))}"] if found else []


def _find_model(architecture: str) -> Model:
    if architecture == GENERIC.name:
        return GENERIC
    if architecture not in MODELS:
        raise PlanError(
            f"{architecture} is not a known architecture; known are {', '.join(sorted(MODELS))}",
            "if it is one of them by another name, say which with --architecture; --architecture generic goes by "
            "names and shapes alone; or add an entry to openquant/models.py (README: Adding an architecture)",
        )
    return MODELS[architecture]


def _refuse_head(checkpoint: Checkpoint, model: Model, scheme: Scheme) -> None:
    if scheme.method == "fp8":
        raise PlanError(
            "engines load no quantized output head in the fp8 format",
            "use --scheme channel or --format compressed-tensors",
        )
    if model.head_refused is not None:
        raise PlanError(f"{model.name}: its output head stays as it is: {model.head_refused}", _NO_HEAD)
    tied = any(
        place.get("tie_word_embeddings") is True for place in (checkpoint.config, text_config(checkpoint, model))
    )
    if tied:
        raise PlanError("the output head is the embedding (tie_word_embeddings), which stays as it is", _NO_HEAD)
    if not any(is_head(info.module) for info in checkpoint.tensors.values()):
        raise PlanError("the source has no lm_head.weight: its output head is the embedding", _NO_HEAD)


_NO_HEAD = "leave --quantize-lm-head out"


def _used(fates: Fates) -> list[Scheme]:
    """The schemes of a plan, its own first."""
    return list(dict.fromkeys([fates.scheme, *(other.scheme for other in fates.others.values())]))


def _digest(
    checkpoint: Checkpoint, model: Model, fates: Fates, quantization_config: dict[str, Any], identity: str
) -> str:
    """What guards a resumed run: equal for the same source, options, version and registry's entry, and only then."""
    facts = [
        __version__,
        repr(model),
        [asdict(scheme) for scheme in _used(fates)],
        # The model card says them.
        sorted({*fates.reasons.values(), *(other.why for other in fates.others.values())}),
        checkpoint.config,
        quantization_config,
        checkpoint.files,
        checkpoint.shards,
        checkpoint.headers,
        identity,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _groups(fates: Fates, encoded: dict[str, Encoded]) -> tuple[Group, ...]:
    names: dict[tuple[str, tuple[int, ...], bool, str], list[str]] = {}
    sizes: dict[tuple[str, tuple[int, ...], bool, str], tuple[int, int]] = {}
    decoded: dict[tuple[str, tuple[int, ...], bool, str], bool] = {}

    def add(name: str, alike: str, shape: tuple[int, ...], scheme: Scheme | None, why: str, info: TensorInfo) -> None:
        stored = encoded.get(info.name)
        key = (f"{alike} {stored.codes.dtype if stored else info.dtype}", shape, scheme is not None, why)
        if key not in names:
            names[key] = []
            plain = TensorInfo("", info.dtype, shape).nbytes
            after = sum(out.nbytes for out in scheme.format.parts("", (shape[0], shape[1]))) if scheme else plain
            sizes[key] = stored.nbytes if stored else plain, after
            decoded[key] = stored is not None and scheme is None
        names[key].append(name)

    for layer in fates.layers.values():
        why, other = fates.reasons.get(layer.module), fates.others.get(layer.module)
        scheme = fates.scheme_of(layer.module) if why is None else None
        why = why or (f"{other.scheme.name}: {other.why}" if other else "")
        add(layer.module, layer.alike, layer.shape, scheme, why, layer.source)
    for keep in fates.kept:
        add(keep.tensor.module, keep.alike, keep.tensor.shape, None, keep.why, keep.tensor)
    for info in fates.copied:
        add(info.name, info.name, info.shape, None, "fewer than two axes", info)
    return tuple(
        Group(tuple(found), key[1], key[2], decoded[key], key[3], *(len(found) * size for size in sizes[key]))
        for key, found in names.items()
    )

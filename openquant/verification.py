"""`openquant verify`: hold an FP8 directory against itself, and against its source.

Names, shapes, dtypes and the config are checked first, from headers alone; then the tensors are read (contents.py).
What engines would load wrongly is a problem; what another tool may do otherwise than
this one, and engines accept, is a note.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .checkpoint import INDEX_FILE, Checkpoint, TensorInfo, open_checkpoint, read_config, readable
from .contents import LayerError, Progress, Task, Weight, read_contents
from .encoded import decoded_view
from .errors import PlanError, SourceError, UsageError
from .fates import Options, experts_finder, is_head, joined_sets
from .formats import FLOATS, Quantization, read_quantization
from .kernels import BITS_TYPE
from .layers import Layer, Matrix
from .machine import available_cpus
from .models import MODELS, NOT_LINEAR, ROUTER, Model, absolute
from .output import read_journal
from .patterns import collapse, compile_any, compile_pattern, template
from .plan import Plan, make_plan
from .schemes import CODE_DTYPE, MIXED, TENSOR, Group, Scheme, recognise


@dataclass(frozen=True)
class Report:
    """What verify() found.

    Attributes:
        directory: as it was asked for.
        source: likewise; None without one.
        architecture: the model's class; None if the directory could not be opened.
        format: quant_method and what shares a scale.
        problems: what is off, one line each; empty if nothing is.
        notes: what is worth knowing, and what was not checked.
        shards: number of weight files.
        tensors: number of tensors in them.
        nbytes: their size.
        quantized: number of weights stored as float8_e4m3fn.
        equal_tensors: number of tensors found equal to the source's, byte for byte.
        equal_files: number of other files found equal to the source's.
        errors: of each layer that was decoded, in the order of the checkpoint.
        seconds: wall time.
    """

    directory: str
    source: str | None
    architecture: str | None
    format: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    shards: int = 0
    tensors: int = 0
    nbytes: int = 0
    quantized: int = 0
    equal_tensors: int = 0
    equal_files: int = 0
    errors: tuple[LayerError, ...] = ()
    seconds: float = 0.0

    @property
    def worst(self) -> list[LayerError]:
        """The ten layers that are relatively farthest from the source, the worst first."""
        return sorted(self.errors, key=lambda error: -error.relative)[:10]

    def to_json(self) -> dict[str, Any]:
        """The same as a dictionary, with the worst layers only."""
        found = asdict(self)
        del found["errors"]
        relative = [error.relative for error in self.errors]
        found["decoded"] = {
            "layers": len(relative),
            "relative_mean": sum(relative) / len(relative) if relative else None,
            "worst": [asdict(error) for error in self.worst],
        }
        return found


def verify(
    directory: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    full: bool = False,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check an FP8 directory, made by this tool or another.

    Args:
        directory: what to check.
        source: the checkpoint it was made from.
        full: also decode every quantized layer and compare it with the source.
        workers: number of threads; the CPUs this process may use if None.
        progress: told the bytes read so far and in all, never from two threads at once.

    Returns:
        What was found; `problems` is empty if nothing is off.

    Raises:
        OpenQuantError: there is nothing to check: no such directory, or no quantized checkpoint of a known kind.
    """
    begin = time.monotonic()
    if full and source is None:
        raise UsageError("--full compares with the source, and none is given", "give --source DIR")
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers cannot work", "give --workers 1 or more")
    root = Path(directory)
    with readable():
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", "check the path")
        quantization = read_quantization(read_config(root))
    if not quantization.checkable:
        raise UsageError(
            f"config.json has {quantization.method} with {quantization.title}",
            "only fp8 and compressed-tensors with FP8 weights are checked",
        )
    journal = read_journal(root)
    if journal is not None and not journal["done"]:
        raise UsageError(f"{root} is not finished", "run the command that makes it again")
    origin = None if source is None else open_checkpoint(Path(source))
    if origin is not None:
        _refuse_quantized(origin)
    told = None if source is None else os.fspath(source)
    form = f"{quantization.method}, {quantization.title}"
    try:
        checkpoint = open_checkpoint(root)
    except SourceError as error:
        notes = ("nothing else was checked",)
        return Report(os.fspath(directory), told, None, form, (error.message,), notes, seconds=_since(begin))
    written = set(journal["files"]) if journal else set()
    model = MODELS.get(checkpoint.architecture)
    work = _Verification(checkpoint, quantization, model, origin, full, written)
    work.run(workers or available_cpus(), progress)
    return Report(
        directory=os.fspath(directory),
        source=told,
        architecture=checkpoint.architecture,
        format=form,
        problems=tuple(work.problems),
        notes=tuple(work.notes),
        shards=len(checkpoint.shards),
        tensors=len(checkpoint.tensors),
        nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        quantized=len(work.codes),
        equal_tensors=work.equal_tensors,
        equal_files=work.equal_files,
        errors=tuple(work.errors),
        seconds=_since(begin),
    )


def check_finished(root: Path, plan: Plan) -> None:
    """Reopen what a plan has written, as the last step of writing it: headers, index and config.

    Scales were read, and codes checked, as each shard was finished (written.py).

    Raises:
        RuntimeError: it is not what was planned, or engines would refuse it, which is a fault of this program.
    """
    checkpoint = open_checkpoint(root)
    planned = {info.name: (info, shard.name) for shard in plan.shards for info in plan.outputs(shard.name)}
    found = {name: (info, checkpoint.where[name].shard) for name, info in checkpoint.tensors.items()}
    problems = [f"{name} is not what was planned" for name in planned if planned[name] != found.get(name)]
    problems += [f"{name} was not planned" for name in found.keys() - planned.keys()]
    problems += [f"config.json: {message}" for message in _differences(checkpoint.config, plan.config, "")]
    if plan.quantization_config and not problems:
        # What goes by names and shapes alone knows nothing of engines.
        model = None if plan.model.rest else plan.model
        work = _Verification(checkpoint, read_quantization(checkpoint.config), model, None, False, set(plan.files))
        work.check_headers()
        problems = work.problems
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RuntimeError(f"{root} was written wrongly: {'; '.join(problems[:3])}{more}")


def _refuse_quantized(source: Checkpoint) -> None:
    _, encoded = decoded_view(source)
    if encoded:
        raise UsageError(
            f"{source.root}: the source is already quantized, and codes are held against plain weights only",
            "give the unquantized model, or leave --source out",
        )


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 3)


@dataclass(frozen=True)
class _Kind:
    """What the registry says of all modules named alike."""

    layer: bool
    stack: bool
    keep: str | None
    fused: str | None


class _Registry:
    """The registry's entry for an architecture, asked about modules of a checkpoint."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.find_experts = experts_finder(model)
        self._compress = compile_any(absolute(model, model.compress))
        stacks = (f"{experts.path}.{stacked.name}" for experts in model.experts for stacked in experts.stacked)
        self._stacks = compile_any(absolute(model, stacks))
        self._keeps = [(compile_any(absolute(model, [keep.pattern])), keep.why) for keep in model.keep]
        patterns = absolute(model, [joined.pattern for joined in model.joined])
        self._fused = [
            (compile_pattern(pattern), joined.listed_as)
            for joined, pattern in zip(model.joined, patterns, strict=True)
            if joined.listed_as
        ]
        self._kinds: dict[str, _Kind] = {}

    def kind(self, module: str) -> _Kind:
        alike = template(module)
        if alike not in self._kinds:
            self._kinds[alike] = _Kind(
                bool(self._compress.fullmatch(module)),
                bool(self._stacks.fullmatch(module)),
                next((why for pattern, why in self._keeps if pattern.fullmatch(module)), None),
                next((fused for pattern, fused in self._fused if pattern.fullmatch(module)), None),
            )
        return self._kinds[alike]

    def spellings(self, name: str) -> Iterator[str]:
        """A name, and the others that engines know it by."""
        yield name
        for group in self.model.spellings:
            prefix = next((prefix for prefix in group if name.startswith(prefix)), None)
            if prefix is not None:
                yield from (other + name.removeprefix(prefix) for other in group if other != prefix)

    def fused(self, module: str) -> str | None:
        """The merged layer that engines look up instead of a module; None where they look up the module itself."""
        fused = self.kind(module).fused
        return None if fused is None else f"{module.rsplit('.', 1)[0]}.{fused}"


class _Verification:
    """One check. Methods append to problems and notes; `run` says in which order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization,
        model: Model | None,
        source: Checkpoint | None,
        full: bool,
        written: set[str],
    ) -> None:
        self.checkpoint = checkpoint
        self.quantization = quantization
        self.source = source
        self.full = full
        self.written = written
        # Other tools write one list of unquantized modules, or other settings.
        self.scheme = recognise(quantization.settings)
        # A head that is quantized is one more layer.
        self.head = quantization.method != "fp8" and any(
            info.dtype == CODE_DTYPE and is_head(info.module) for info in checkpoint.tensors.values()
        )
        if model and self.head and model.head_refused is None:
            model = model.with_head()
        self.registry = _Registry(model) if model else None
        self.problems: list[str] = list(quantization.problems)
        self.notes: list[str] = []
        self.codes: dict[str, Weight] = {}
        self.scales: set[str] = set()
        self.unlisted: set[str] = set()
        self.values: dict[str, float] = {}
        self.plan: Plan | None = None
        self.matrices: dict[str, Matrix] = {}
        self.equal_tensors = 0
        self.equal_files = 0
        self.errors: list[LayerError] = []

    def check_headers(self) -> None:
        """What needs no tensor to be read."""
        self._sort_tensors()
        self._check_strays()
        if self.registry is None:
            self.notes.append(
                f"{self.checkpoint.architecture} is not a known architecture: not checked are which unquantized layers "
                "must be listed, and which must share their status or scale"
            )
        self._check_listed()
        if self.registry is not None:
            self._check_unlisted(self.registry)
            self._check_together(self.registry)
        self._check_head()
        self._check_index()
        self._check_written()

    def run(self, workers: int, progress: Progress | None) -> None:
        """All checks, those of headers first."""
        self.check_headers()
        pairs: list[tuple[TensorInfo, Matrix | None]] = []
        if self.source is not None:
            self._compare_config(self.source)
            self._compare_files(self.source)
            self._make_plan(self.source)
            pairs = self._pair(self.source)
            self._compare_plan()
        self._read(pairs, workers, progress)
        if self.registry is not None:
            self._check_shared_scales(self.registry)

    def _place(self, name: str) -> str:
        """A tensor for a message: its file and its name."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def _differs(self, message: str) -> None:
        """Something that this tool never does, and another may."""
        (self.notes if self.scheme is None else self.problems).append(message)

    # What the headers say.

    def _sort_tensors(self) -> None:
        """Find the quantized weights and their scales."""
        respelled = 0
        tensors = self.checkpoint.tensors
        for info in tensors.values():
            if not info.dtype.startswith("F8_E") or info.dtype == "F8_E8M0":
                continue
            if info.dtype != CODE_DTYPE or len(info.shape) < 2:
                self.problems.append(f"{self._place(info.name)} is {_kind(info)}, not a matrix of {CODE_DTYPE}")
                continue
            form = self.quantization.format_of(info.module)
            if form is None:
                self.problems.append(f"{self._place(info.name)} is {CODE_DTYPE}, but no config group targets it")
                self.codes[info.name] = Weight(info, None, None, None)
                continue
            scale = tensors.get(info.name + form.suffix)
            shapes = form.scale_shapes(info.shape)
            if scale is None and form.strategy == "tensor":
                scale = tensors.get(f"{info.name}_scale_inv")
                respelled += scale is not None
            if scale is None:
                self.problems.append(f"{self._place(info.name)} has no scale: {info.name + form.suffix} is missing")
            else:
                self.scales.add(scale.name)
                scale = self._sound(scale, form.scale_dtypes, shapes, info)
            self.codes[info.name] = Weight(info, form, scale, self._input_scale(info) if form.static else None)
        if respelled:
            self.notes.append(
                f"{respelled} scales are called weight_scale_inv although they are one per tensor; "
                "vLLM 0.32.0 reads that for Mistral 3 models only"
            )
        if not self.codes:
            self.notes.append("nothing is quantized")

    def _input_scale(self, info: TensorInfo) -> TensorInfo | None:
        """The scale of a layer's activations, if it is there and has the right shape and dtype."""
        name = f"{info.module}.input_scale"
        found = self.checkpoint.tensors.get(name)
        if found is None:
            self.problems.append(f"{self._place(info.name)} has no {name}, but its activations are static")
            return None
        self.scales.add(name)
        return self._sound(found, FLOATS, ((), (1,)), info)

    def _sound(
        self, scale: TensorInfo, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], info: TensorInfo
    ) -> TensorInfo | None:
        """The scale, if its dtype and shape are right."""
        if self.scheme is not None:
            dtypes = dtypes[:1]
        if scale.dtype in dtypes and scale.shape in shapes:
            return scale
        wanted = f"{_either(dtypes)} {_either([str(list(shape)) for shape in shapes])}"
        self.problems.append(f"{self._place(scale.name)} is {_kind(scale)}, for {_kind(info)} it must be {wanted}")
        return None

    def _check_strays(self) -> None:
        """Scales that belong to no quantized weight."""
        unread = 0
        for info in self.checkpoint.tensors.values():
            owner = self._owner(info.name)
            if owner is None or info.name in self.scales:
                continue
            weight = self.checkpoint.tensors.get(owner)
            if weight is None:
                self.problems.append(f"{self._place(info.name)} has no weight: {owner} is missing")
            elif owner not in self.codes:
                self.problems.append(f"{self._place(info.name)} is the scale of {owner}, which is {weight.dtype}")
            elif info.name.endswith(".input_scale"):
                unread += 1
            elif (form := self.codes[owner].form) is not None:
                self.problems.append(
                    f"{self._place(info.name)} is not the scale of {owner}: the config asks for {owner}{form.suffix}"
                )
        if unread:
            self.notes.append(f"{unread} input_scale tensors are there, but the config says activations are dynamic")

    def _owner(self, name: str) -> str | None:
        """The weight that a tensor is the scale of; None if it is no scale."""
        if name.endswith(".input_scale"):
            return f"{name.removesuffix('.input_scale')}.weight"
        for suffix in ("_scale_inv", "_scale"):
            owner = name.removesuffix(suffix)
            if owner != name and (owner.endswith(".weight") or owner in self.checkpoint.tensors):
                return owner
        return None

    def _check_listed(self) -> None:
        """No quantized module may be listed."""
        ignored = self.quantization.ignored
        for name, weight in self.codes.items():
            module = weight.info.module
            names: list[str] = [module]
            if self.registry is not None:
                fused = self.registry.fused(module)
                names = [n for known in (module, fused) if known for n in self.registry.spellings(known)]
            entry = ignored.find(names)
            if entry is not None:
                self.problems.append(f"{self._place(name)} is {CODE_DTYPE}, but {ignored.key} lists {entry}")

    def _check_unlisted(self, registry: _Registry) -> None:
        """Every unquantized module that an engine would build as FP8 must be listed; and what may not be FP8."""
        ignored, unlisted = self.quantization.ignored, []
        for info in self.checkpoint.tensors.values():
            kind = registry.kind(info.module)
            if info.name in self.codes:
                # Other layers than the registry's are FP8 where the source had them so.
                message = f"{self._place(info.name)} is {CODE_DTYPE}, but it is kept: {kind.keep}"
                if kind.keep in NOT_LINEAR:
                    self.problems.append(message)
                elif kind.keep == ROUTER:
                    # Some engines build some routers with quantization.
                    self._differs(message)
                continue
            matrix = len(info.shape) == 2 and info.name.endswith(".weight")
            linear = kind.layer or (kind.keep is not None and kind.keep not in NOT_LINEAR)
            if not (kind.stack or (matrix and linear)) or self.quantization.format_of(info.module) is None:
                continue
            wanted = registry.fused(info.module) or info.module
            if ignored.find(registry.spellings(wanted)) is not None:
                continue
            if kind.keep is None or self.scheme is not None:
                self.unlisted.add(wanted)
                self.problems.append(
                    f"{self._place(info.name)} is {info.dtype}, but {ignored.key} does not list {wanted}"
                )
            else:
                unlisted.append(info.module)
        if unlisted:
            more = f" and {len(unlisted) - 1} more modules that are" if len(unlisted) > 1 else ", which is"
            them = "them" if len(unlisted) > 1 else "it"
            self.notes.append(
                f"{ignored.key} does not list {unlisted[0]}{more} unquantized: right only if the engine never builds "
                f"{them} as FP8"
            )

    def _layers(self, registry: _Registry) -> dict[str, Layer]:
        """The stored matrices that the registry lets quantize."""
        return {
            info.module: Layer(info.module, template(info.module), info, (info.shape[0], info.shape[1]))
            for info in self.checkpoint.tensors.values()
            if len(info.shape) == 2 and info.name.endswith(".weight") and registry.kind(info.module).layer
        }

    def _check_head(self) -> None:
        """An output head is no Linear to vLLM."""
        for name, weight in self.codes.items():
            if self.head and is_head(weight.info.module) and not self.quantization.names(weight.info.module):
                self.problems.append(
                    f"{self._place(name)} is {CODE_DTYPE}, but no config group names it: engines find it by name only"
                )

    def _check_together(self, registry: _Registry) -> None:
        """What an engine merges must be quantized together, and so must all experts of a layer."""
        layers = self._layers(registry)
        groups: dict[str, list[str]] = {}
        for module in layers:
            experts = registry.find_experts(module)
            if experts is not None:
                groups.setdefault(experts, []).append(module)
        for members in set(joined_sets(registry.model, layers).values()):
            # Experts are held together already.
            if registry.find_experts(members[0]) is None:
                groups[members[0]] = list(members)
        for name in sorted(groups):
            one = {f"{module}.weight" in self.codes: module for module in reversed(groups[name])}
            forms = {
                weight.form: weight.info.name
                for module in reversed(groups[name])
                if (weight := self.codes.get(f"{module}.weight")) and weight.form
            }
            if len(one) == 2:
                other = f"{one[False]}.weight"
                self.problems.append(
                    f"{self._place(f'{one[True]}.weight')} is {CODE_DTYPE} and {other} is "
                    f"{self.checkpoint.tensors[other].dtype}, but engines take both in one format"
                )
            elif len(forms) > 1:
                (form, first), (another, second), *_ = list(forms.items())[::-1]
                self.problems.append(
                    f"{self._place(first)} has {form.title} and {second} {another.title}, "
                    "but engines take both in one format"
                )

    def _check_index(self) -> None:
        """The size that the index tells."""
        if not self.checkpoint.indexed:
            return
        index = json.loads((self.checkpoint.root / INDEX_FILE).read_bytes())
        metadata = index.get("metadata")
        told = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(info.nbytes for info in self.checkpoint.tensors.values())
        if told is not None and told != total:
            self._differs(f"{INDEX_FILE}: total_size is {told}, the tensors take {total} bytes")

    def _check_written(self) -> None:
        """The files that the run which made the directory wrote down."""
        for name in sorted(self.written):
            if not (self.checkpoint.root / name).is_file():
                self.problems.append(f"{name} is missing: the run that made this directory wrote it")

    # The source.

    def _compare_config(self, source: Checkpoint) -> None:
        ours, theirs = dict(self.checkpoint.config), dict(source.config)
        for config in (ours, theirs):
            config.pop("quantization_config", None)
            config.pop("compression_config", None)
        for message in _differences(ours, theirs, ""):
            self._differs(f"config.json: {message}")

    def _compare_files(self, source: Checkpoint) -> None:
        # The card is written anew; the config was compared by its contents.
        for name in sorted(source.files.keys() - {"config.json", "README.md"}):
            if name not in self.checkpoint.files:
                if name not in self.written:
                    self._differs(f"{name} is missing: the source has it")
            elif _same(self.checkpoint.root / name, source.root / name):
                self.equal_files += 1
            else:
                self._differs(f"{name} differs from the source's")

    def _make_plan(self, source: Checkpoint) -> None:
        """The plan that would leave unquantized what is; without one, tensors are compared by name alone."""
        if source.architecture not in MODELS:
            return
        try:
            options = Options(tuple(self._ignore_patterns(source)), tuple(self._schemes_for()), head=self.head)
            self.plan = make_plan(source, self.scheme or TENSOR, options)
        except (PlanError, UsageError) as error:
            self.notes.append(f"no plan can be made of the source, tensors were compared by name: {error.message}")
            return
        for module, layer in self.plan.layers.items():
            self.matrices[module] = layer.matrix(source.where)

    def _ignore_patterns(self, source: Checkpoint) -> list[str]:
        """--ignore options for what is unquantized, as few as say it: each is held against every layer."""
        quantized = {template(weight.info.module) for weight in self.codes.values()}
        patterns: dict[str, None] = {}
        for info in self.checkpoint.tensors.values():
            if len(info.shape) < 2 or info.name in self.codes or self._owner(info.name) is not None:
                continue
            experts = self.registry.find_experts(info.module) if self.registry else None
            alike = template(info.module)
            if alike not in quantized:
                patterns[alike] = None
            elif experts is not None:
                patterns[f"{experts}.**"] = None
            elif info.name in source.tensors:
                patterns[info.module] = None
        return list(patterns)

    def _schemes_for(self) -> Iterator[tuple[str, Scheme]]:
        """--scheme-for options for what is stored in another scheme than most."""
        if self.scheme is None or self.registry is None:
            return
        alike: dict[str, set[Group]] = {}
        for weight in self.codes.values():
            if weight.form is not None:
                alike.setdefault(template(weight.info.module), set()).add(weight.form.group)
        others: dict[str, Scheme] = {}
        for weight in self.codes.values():
            if weight.form is not None and weight.form.group != self.scheme.group:
                name = template(weight.info.module)
                if len(alike[name]) > 1:
                    # Each pattern is held against every layer, and experts are many.
                    experts = self.registry.find_experts(weight.info.module)
                    name = f"{experts}.**" if experts else weight.info.module
                others[name] = next(other for other in MIXED if other.group == weight.form.group)
        yield from others.items()

    def _pair(self, source: Checkpoint) -> list[tuple[TensorInfo, Matrix | None]]:
        """Unquantized tensors, with the matrix each must equal, None for the source's tensor of that name."""
        pairs: list[tuple[TensorInfo, Matrix | None]] = []
        foreign: list[str] = []
        recast: list[str] = []
        for info in self.checkpoint.tensors.values():
            original, matrix = source.tensors.get(info.name), self.matrices.get(info.module)
            if original is None and matrix is not None and info.name != f"{info.module}.weight":
                matrix = None
            if original is None and matrix is None:
                if self._owner(info.name) is None:
                    foreign.append(info.name)
                continue
            dtype, shape = (original.dtype, original.shape) if original else (matrix.dtype, matrix.shape)  # type: ignore[union-attr]
            if info.name in self.codes:
                if info.shape != shape:
                    self._mismatch(info, dtype, shape)
                elif matrix is None and original is not None and len(shape) == 2 and dtype in BITS_TYPE:
                    place, pitch = source.where[info.name], original.nbytes // shape[0]
                    self.matrices[info.module] = Matrix(
                        info.name, place.shard, place.offset, dtype, (shape[0], shape[1]), pitch, transposed=False
                    )
            elif (info.dtype, info.shape) == (dtype, shape):
                pairs.append((info, None if original else matrix))
            elif info.shape == shape and self.scheme is None:
                recast.append(info.name)
            else:
                self._mismatch(info, dtype, shape)
        if self.scheme is not None:
            self.problems += [f"{self._place(name)} is not in the source" for name in foreign]
        elif foreign:
            self.notes.append(f"not in the source: {', '.join(collapse(foreign))}")
        if recast:
            self.notes.append(f"not compared, since the source has another dtype: {', '.join(collapse(recast))}")
        self._check_accounted(source)
        return pairs

    def _mismatch(self, info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> None:
        self.problems.append(f"{self._place(info.name)} is {_kind(info)}, the source has {dtype} {list(shape)}")

    def _check_accounted(self, source: Checkpoint) -> None:
        """Every tensor of the source is there, itself or split into experts."""
        tensors = self.checkpoint.tensors
        parts: dict[str, list[str]] = {}
        for layer in self.plan.layers.values() if self.plan else ():
            if layer.stacked is not None:
                parts.setdefault(layer.source.name, []).append(f"{layer.module}.weight")
        for name in source.tensors:
            if name in tensors:
                continue
            for missing in [part for part in parts.get(name, [name]) if part not in tensors]:
                self.problems.append(f"{missing} is missing: the source has {name} in {source.where[name].shard}")

    def _compare_plan(self) -> None:
        """What this tool made is where its plan puts it, and lists what its plan lists."""
        if self.plan is None or self.scheme is None:
            return
        key = self.quantization.ignored.key
        listed = set(self.quantization.ignored.entries)
        for name in self.plan.ignored_layers:
            if name not in listed and name not in self.unlisted:
                self.problems.append(f"config.json: {key} does not list {name}")
        if self.problems:
            return
        for shard in self.plan.shards:
            for planned in self.plan.outputs(shard.name):
                found, where = self.checkpoint.tensors[planned.name], self.checkpoint.where[planned.name]
                if (found != planned and found.name not in self.scales) or where.shard != shard.name:
                    self.problems.append(
                        f"{self._place(found.name)} is {_kind(found)}, the plan has {_kind(planned)} in {shard.name}"
                    )

    # The tensors' contents.

    def _read(self, pairs: list[tuple[TensorInfo, Matrix | None]], workers: int, progress: Progress | None) -> None:
        tasks = [Task(info, matrix=matrix) for info, matrix in pairs]
        for weight in self.codes.values():
            matrix = self.matrices.get(weight.info.module) if self.full else None
            tasks.append(Task(weight.info, weight, matrix if matrix and matrix.shape == weight.info.shape else None))
        # In the order of the files, which is how disks like it.
        tasks.sort(key=lambda task: self.checkpoint.where[task.info.name])
        contents = read_contents(self.checkpoint, self.source, tasks, workers, progress)
        self.problems += contents.problems
        self.errors = contents.errors
        self.values = contents.scales
        self.equal_tensors = contents.equal
        if self.full:
            skipped = sum(weight.info.module not in self.matrices for weight in self.codes.values())
            if skipped:
                self.notes.append(f"{skipped} quantized tensors were not decoded: the source has no matrix for them")

    def _check_shared_scales(self, registry: _Registry) -> None:
        """Layers that engines merge have one scale, or vLLM rounds them a second time at load."""
        layers, several, ragged = self._layers(registry), 0, 0
        for members in sorted(set(joined_sets(registry.model, layers).values())):
            weights = [self.codes[f"{module}.weight"] for module in members if f"{module}.weight" in self.codes]
            forms = {weight.form for weight in weights}
            form = forms.pop() if len(forms) == 1 else None
            if form is None:
                continue
            if form.block is not None:
                ragged += any(weight.info.shape[0] % form.block[0] for weight in weights[:-1])
                continue
            scales = [weight.scale.name for weight in weights if weight.scale and weight.scale.name in self.values]
            values = [self.values[name] for name in scales]
            if form.strategy != "tensor" or len(set(values)) < 2:
                continue
            if self.scheme is None:
                several += 1
                continue
            number = next(number for number, value in enumerate(values) if value != values[0])
            self.problems.append(
                f"{self._place(scales[0])} is {values[0]:g} and {scales[number]} is {values[number]:g}, "
                "but engines merge their layers under one scale"
            )
        if several:
            self.notes.append(
                f"{several} sets of layers that engines merge have different scales: vLLM rounds them again at load"
            )
        if ragged:
            self.notes.append(
                f"{ragged} sets of layers that engines merge do not divide into blocks: "
                "vLLM 0.32.0 misplaces their scales"
            )


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Where two values from JSON differ, by key."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            below = f"{path}.{key}" if path else key
            if key not in ours:
                yield f"{below} is missing, the source has {json.dumps(theirs[key])}"
            elif key not in theirs:
                yield f"{below} is {json.dumps(ours[key])}, the source has none"
            else:
                yield from _differences(ours[key], theirs[key], below)
    # As text, since NaN is not equal to itself.
    elif json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True):
        yield f"{path} is {json.dumps(ours)}, the source has {json.dumps(theirs)}"


def _same(one: Path, other: Path) -> bool:
    """Whether two files have the same contents."""
    with readable(), one.open("rb") as left, other.open("rb") as right:
        while True:
            piece = left.read(1 << 20)
            if piece != right.read(1 << 20):
                return False
            if not piece:
                return True

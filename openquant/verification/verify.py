"""`openquant verify`: hold a quantized directory against itself, and against its source.

Names, shapes, dtypes and the config are checked first (headers.py), then held against the source's; then the tensors
are read (contents.py).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import PlanError, SourceError, UsageError
from ..files.cards import QUANTIZED, card_of, is_rounded_by_gptq, says_folds, says_weighed, source_of
from ..files.checkpoint import Checkpoint, open_checkpoint, read_config, readable
from ..files.evaluation import find_evaluation
from ..files.journal import read_journal
from ..files.small_files import open_regular
from ..files.tensors import TensorInfo
from ..formats.finite import can_be_non_finite
from ..formats.format import Format
from ..formats.kernels import BITS_TYPE
from ..formats.quantization import read_quantization
from ..formats.scales import choose_shared_scale
from ..formats.schemes import CHANNEL, MIXED, SCHEMES, TENSOR, Scheme
from ..machine import available_cpus
from ..models import MODELS
from ..options import Check, documented
from ..patterns import collapse, template
from ..plan.config import ignored_layers
from ..plan.decisions import PlanOptions, StoredLayout
from ..plan.gptq import gptq_weights
from ..plan.plan import Plan, make_plan
from ..plan.unchanged import make_unchanged_plan
from ..registry.rules import ModuleRules
from ..version import VLLM
from ..weights.find import decoded_view, own_file, with_own_file
from ..weights.quant_error import LayerError
from ..weights.transform import WeightTransforms
from ..weights.weight import Weight
from .cache_checks import cache_tensors, cached_in_fp8
from .checks import check_headers
from .configs import config_differences, judge_config, unsaid_keys, without_quantization
from .contents import Progress, TensorFindings, TensorTask, read_contents
from .extras import extra_files, extra_weights
from .find_smoothing import recognize_smoothing
from .headers import Findings, Headers, described
from .outcome import Report

# A tensor that is not quantized, and what it must equal.
Pair = tuple[TensorInfo, Weight | bytes | None]


@documented(Check)
def verify(
    directory: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    full: bool = False,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check an FP8, INT8, INT4 or FP4 directory, made by this tool or another.

    Args:
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
        config = read_config(root)
        quantization = read_quantization(with_own_file(config, root))
    if not quantization.checkable:
        *numbers, last = dict.fromkeys(scheme.format.number.title for scheme in SCHEMES.values())
        raise UsageError(
            f"{own_file(config, root) or 'config.json'} has {quantization.method} with {quantization.title}",
            f"only fp8, awq, gptq and compressed-tensors with {', '.join(numbers)} or {last} weights are checked",
        )
    journal = read_journal(root)
    if journal is not None and not journal["done"]:
        raise UsageError(f"{root} is not finished", "run the command that makes it again")
    origin = None if source is None else open_checkpoint(Path(source))
    told = None if source is None else os.fspath(source)
    form = f"{quantization.method}, {quantization.title}"
    try:
        checkpoint = open_checkpoint(root)
    except SourceError as error:
        notes = ("nothing else was checked",)
        return Report(os.fspath(directory), told, None, form, (error.message,), notes, seconds=_since(begin))
    written = set(journal["files"]) if journal else set()
    model = MODELS.get(checkpoint.architecture)
    text = card_of(checkpoint)
    card = source_of(text)
    ours = journal is not None or card is not None
    headers, findings = check_headers(checkpoint, quantization, model, written, ours)
    remakes = ours and QUANTIZED not in (card or "")
    work = _Verification(headers, findings, written, origin, full, remakes, text)
    work.run(workers or available_cpus(), progress)
    return Report(
        directory=os.fspath(directory),
        source=told,
        architecture=checkpoint.architecture,
        format=form,
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
        shards=len(checkpoint.shards),
        tensors=len(checkpoint.tensors),
        nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        quantized=len(headers.codes),
        equal_tensors=work.equal_tensors,
        equal_files=work.equal_files,
        errors=tuple(work.errors),
        compared_codes=work.compared,
        equal_codes=work.same,
        recomputed=work.remakes,
        seconds=_since(begin),
    )


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 3)


class _Verification:
    """One check against a source and of the contents, once the headers are checked; `run` says in which order.

    What it finds goes where the headers' problems and notes are.
    """

    def __init__(
        self,
        headers: Headers,
        findings: Findings,
        files: set[str],
        source: Checkpoint | None,
        full: bool,
        remakes: bool,
        card: str,
    ) -> None:
        self.headers = headers
        self.findings = findings
        # What the run that made the directory wrote, if that is known.
        self.files = files
        self.folded, self.weighed = says_folds(card), says_weighed(card)
        # Whether GPTQ rounded what it can: no codes of these are made again.
        self.gptq_rounded = is_rounded_by_gptq(card)
        self.checkpoint = headers.checkpoint
        self.origin = source
        # With the weights that are quantized there as what they stand for, and these.
        self.source: Checkpoint | None = None
        self.decoded: dict[str, Weight] = {}
        if source is not None:
            self.source, self.decoded = decoded_view(source)
        self.full = full
        self.ours = findings.ours
        self.remakes = full and remakes and headers.scheme is not None
        self.problems, self.notes = findings.problems, findings.notes
        self.codes, self.scheme, self._place = headers.codes, headers.scheme, headers.place
        self.cached = cached_in_fp8(headers)
        self.cache = cache_tensors(headers)
        entry, scheme = headers.entry, headers.scheme
        # Other tools' outputs hold projections as their config says.
        config = self.checkpoint.config if self.ours else {}
        self.written = entry.model.written(scheme.name if scheme else None, config) if entry else {}
        self.values: dict[str, float] = {}
        self.plan: Plan | None = None
        self.transforms = WeightTransforms()
        self.originals: dict[str, Weight] = {}
        self.equal_tensors = 0
        self.equal_files = 0
        self.errors: list[LayerError] = []
        self.absmax: dict[str, float] = {}
        self.compared = 0
        self.same = 0

    def run(self, workers: int, progress: Progress | None) -> None:
        """Find all that is off: files, config, source, tensors, then what is shared between layers."""
        pairs: list[Pair] = []
        self._require_readable()
        self._open_with_library()
        self._check_extra_files()
        self.problems += unsaid_keys(self.checkpoint.config, self.written)
        if self.source is not None:
            self._compare_config(self.source)
            self._compare_files(self.source)
            self._make_plan(self.source, self.origin or self.source)
            pairs = self._pair(self.source)
            self._compare_plan()
        self._read(pairs, workers, progress)
        if self.headers.entry is not None:
            self._check_shared_scales(self.headers.entry)
        self._check_remade_scales(self.headers.entry)

    def _require_readable(self) -> None:
        """Report what keeps the weights from being decoded, if nothing else is off."""
        if not self.problems:
            # What is stored in a way that is not read here may be read by engines.
            with suppress(PlanError):
                try:
                    decoded_view(self.checkpoint)
                except SourceError as error:
                    self.problems.append(error.message)

    def _open_with_library(self) -> None:
        """Each shard must open with the safetensors library, which engines use, and hold the same tensors to it."""
        names: dict[str, set[str]] = {shard: set() for shard in self.checkpoint.shards}
        for name, place in self.checkpoint.where.items():
            names[place.shard].add(name)
        for shard, wanted in names.items():
            try:
                with safe_open(self.checkpoint.root / shard, framework="np") as file:
                    if set(file.keys()) != wanted:
                        self.problems.append(f"{shard} holds other tensors to the safetensors library")
            except (SafetensorError, OSError) as error:
                self.problems.append(f"{shard} cannot be opened with the safetensors library: {error}")

    def _check_extra_files(self) -> None:
        """Note files that the run which made the directory, or the source, does not have."""
        expected, where = self.files or None, "not of the run that made it" if self.files else "beside the model"
        if self.source is not None:
            expected, where = {*self.source.files, "README.md", "config.json"}, "not in the source"
        problems, notes = extra_files(self.checkpoint, expected, where, self.ours)
        self.problems += [*extra_weights(self.checkpoint), *problems]
        self.notes += notes
        try:
            find_evaluation(self.checkpoint)
        except SourceError as error:
            self.notes.append(error.message)

    # The source.

    def _compare_config(self, source: Checkpoint) -> None:
        ours, theirs = (
            without_quantization(config, self.written) for config in (self.checkpoint.config, source.config)
        )
        if self.ours:
            for difference in config_differences(ours, theirs):
                self.problems.append(f"config.json: {difference.text('the source has')}")
            return
        for difference, computed in judge_config(ours, theirs):
            message = f"config.json: {difference.text('the source has')}"
            (self.problems if computed else self.notes).append(message)

    def _compare_files(self, source: Checkpoint) -> None:
        # The card is written anew; the config was compared by its contents.
        for name in sorted(source.files.keys() - {"config.json", "README.md"}):
            if name not in self.checkpoint.files:
                if name not in self.files:
                    self.findings.differs(f"{name} is missing: the source has it")
            elif _same(self.checkpoint.root / name, source.root / name):
                self.equal_files += 1
            else:
                self.findings.differs(f"{name} differs from the source's")

    def _make_plan(self, source: Checkpoint, origin: Checkpoint) -> None:
        """The plan that would leave unquantized what is; without one, tensors are compared by name alone."""
        if source.architecture not in MODELS:
            return
        try:
            if not self.headers.quantization.groups:
                self.plan = make_unchanged_plan(origin, PlanOptions())
                return
            # Of another tool's layers only the names count, which any scheme of the format has.
            fp8 = self.headers.quantization.method == "fp8"
            scheme = self.scheme or (TENSOR if fp8 else CHANNEL)
            options, found = PlanOptions(head=self.headers.head, cached=self.cached), self._found()
            self.plan = make_plan(origin, scheme, options, found=found)
            if self.ours:
                self._unfold(self.plan)
                self.plan = make_plan(origin, scheme, replace(options, transforms=self.transforms), found=found)
        except (PlanError, UsageError) as error:
            self.notes.append(f"no plan can be made of the source, tensors were compared by name: {error.message}")
            return
        for module, layer in self.plan.layers.items():
            self.originals[module] = layer

    def _unfold(self, plan: Plan) -> None:
        """By what inputs of layers are divided in the norms and projections before them."""
        try:
            found = recognize_smoothing(plan, self.checkpoint, self.codes, self.folded)
        except SourceError as error:
            self.problems.append(error.message)
            return
        self.problems += found.problems
        self.transforms = found.transforms
        if found.transforms.weights:
            self.notes.append(
                f"inputs of layers are folded: {len(found.transforms.tensors)} norms and biases and "
                f"{len(found.transforms.weights)} matrices were held against what that makes of the source's"
            )

    def _found(self) -> StoredLayout:
        """What is unquantized, and what is stored in another scheme than most."""
        alike: dict[str, set[Scheme | None]] = {}
        for weight in self.codes.values():
            alike.setdefault(template(weight.module), set()).add(self._scheme_of(weight))
        unquantized: set[str] = set()
        stored = self.headers.stored
        for info in self.checkpoint.tensors.values():
            if len(info.shape) > 1 and info.name not in stored and self.headers.owner(info.name) is None:
                name = template(info.module)
                unquantized.add(info.module if name in alike else name)
        schemes: dict[str, Scheme] = {}
        for weight in self.codes.values():
            other = self._scheme_of(weight)
            if other is not None and other != self.scheme:
                name = template(weight.module)
                schemes[weight.module if len(alike[name]) > 1 else name] = other
        return StoredLayout(unquantized, schemes)

    def _pair(self, source: Checkpoint) -> list[Pair]:
        """Unquantized tensors, with the weight or bytes each must equal, None for the source's tensor of that name."""
        pairs: list[Pair] = []
        changed = {kept.tensor.name: kept.changed for kept in self.plan.decisions.kept} if self.plan else {}
        foreign: list[str] = []
        recast: list[str] = []
        added = {info.name for info in self.cache} if self.cached else set()
        for found in self.checkpoint.tensors.values():
            if found.name in added:
                continue
            info = self.headers.stored[found.name].source if found.name in self.headers.stored else found
            original, weight = source.tensors.get(info.name), self.originals.get(info.module)
            if original is None and weight is not None and info.name != f"{info.module}.weight":
                weight = None
            stored = original or (weight and weight.source)
            if stored is None:
                if self.headers.owner(info.name) is None:
                    foreign.append(info.name)
                continue
            dtype, shape = stored.dtype, weight.shape if original is None and weight else stored.shape
            if found.name in self.headers.stored:
                if info.shape != shape:
                    self._mismatch(found, dtype, shape)
                elif weight is None and original is not None and len(shape) == 2 and dtype in BITS_TYPE:
                    matrix = Weight(info.module, info.module, original, (shape[0], shape[1]))
                    self.originals[info.module] = self.decoded.get(info.name, matrix)
            elif (info.dtype, info.shape) == (dtype, shape):
                plain = self.decoded.get(info.name) if original else weight
                pairs.append((info, changed.get(info.name) or plain))
            elif info.shape == shape and not self.ours:
                recast.append(info.name)
            else:
                self._mismatch(info, dtype, shape)
        if self.ours:
            self.problems += [f"{self._place(name)} is not in the source" for name in foreign]
        elif foreign:
            self.notes.append(f"not in the source: {', '.join(collapse(foreign))}")
        if recast:
            self.notes.append(f"not compared, since the source has another dtype: {', '.join(collapse(recast))}")
        self._check_accounted(source)
        return pairs

    def _mismatch(self, info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> None:
        self.problems.append(f"{self._place(info.name)} is {described(info)}, the source has {dtype} {list(shape)}")

    def _check_accounted(self, source: Checkpoint) -> None:
        """Every tensor of the source must be there, itself or split into experts."""
        tensors = self.checkpoint.tensors
        parts: dict[str, list[str]] = {}
        for layer in self.plan.layers.values() if self.plan else ():
            if layer.expert >= 0:
                parts.setdefault(layer.source.name, []).append(f"{layer.module}.weight")
        for name in source.tensors:
            if name in tensors or name in self.codes:
                continue
            for missing in [part for part in parts.get(name, [name]) if part not in tensors and part not in self.codes]:
                self.problems.append(f"{missing} is missing: the source has {name} in {source.where[name].shard}")

    def _compare_plan(self) -> None:
        """What this tool made must have its tensors where its plan puts them, and list what its plan lists."""
        if self.plan is None or not self.ours:
            return
        key = self.headers.quantization.ignored.key
        listed = set(self.headers.quantization.ignored.entries)
        for name in ignored_layers(self.plan):
            if name not in listed and name not in self.findings.unlisted:
                self.problems.append(f"config.json: {key} does not list {name}")
        # Engines may take a name for the beginning, or a part, of others.
        more = sorted(listed.difference(ignored_layers(self.plan)))
        self.problems += [f"config.json: {key} lists {name}, the plan does not" for name in more]
        if self.problems:
            return
        for shard in self.plan.layout.shards:
            for planned in self.plan.layout.outputs(shard.name):
                found, where = self.checkpoint.tensors[planned.name], self.checkpoint.where[planned.name]
                if (found != planned and found.name not in self.headers.scales) or where.shard != shard.name:
                    self.problems.append(
                        f"{self._place(found.name)} is {described(found)}, "
                        f"the plan has {described(planned)} in {shard.name}"
                    )

    # The tensors' contents.

    def _read(self, pairs: list[Pair], workers: int, progress: Progress | None) -> None:
        tasks = [TensorTask(info, original=original) for info, original in pairs]
        gptq_rounded = self._carried()
        for weight in self.codes.values():
            original = self.originals.get(weight.module) if self.full else None
            original = original if original and original.shape == weight.source.shape else None
            scheme = self._scheme_of(weight) if self.remakes else None
            tasks.append(
                TensorTask(weight.codes, weight, original, scheme, self.weighed, weight.module in gptq_rounded)
            )
        tasks += [TensorTask(info, scale=True) for info in self.cache]
        looked_at = {task.info.name for task in tasks} | self.headers.scales
        tasks += [
            TensorTask(info, alone=True)
            for info in self.checkpoint.tensors.values()
            if can_be_non_finite(info.dtype) and info.name not in looked_at
        ]
        # In the order of the files, which is how disks like it.
        tasks.sort(key=lambda task: self.checkpoint.where[task.info.name])
        contents = read_contents(self.checkpoint, self.source, tasks, workers, progress)
        self.problems += contents.problems
        self._report_not_finite(contents)
        self.errors = contents.errors
        self.values = contents.scales
        self.equal_tensors = contents.equal
        self.absmax = contents.absmax
        self.compared, self.same = contents.compared, contents.same
        if self.codes and self.ours and self.full and not self.remakes:
            self.notes.append(
                "codes and scales were not made again, since the source was quantized already: errors were held "
                "against what rounding explains"
            )
        if self.full and gptq_rounded:
            self.notes.append(f"{len(gptq_rounded)} layers were rounded by GPTQ, whose codes are not made again")
        if self.full:
            skipped = sum(weight.module not in self.originals for weight in self.codes.values())
            if skipped:
                self.notes.append(f"{skipped} quantized tensors were not decoded: the source has no matrix for them")

    def _report_not_finite(self, contents: TensorFindings) -> None:
        """NaN is a problem anywhere, and infinity in a weight; a mask or a bound may be infinite."""
        for name, found in sorted(contents.not_finite.items()):
            source = ", as the source has it" if name in contents.equal_names else ""
            message = f"{self._place(name)} holds {found.text}{source}"
            if found.nan or name.endswith(".weight"):
                self.problems.append(f"{message}: the model answers NaN where it is used")
            else:
                self.notes.append(f"{message}: right in a mask or a bound only")

    def _carried(self) -> set[str]:
        """The modules that GPTQ rounded; all, where it did and no plan says which."""
        if not self.gptq_rounded:
            return set()
        if self.plan is None:
            return {weight.module for weight in self.codes.values()}
        return {weight.module for weight, _ in gptq_weights(self.plan.decisions)}

    def _check_shared_scales(self, entry: ModuleRules) -> None:
        """Layers that engines merge must have one scale, or vLLM rounds them a second time at load."""
        layers, several, ragged = self.headers.layers(entry), 0, 0
        for members in sorted(set(entry.fused_groups(layers).values())):
            weights = [self.codes[f"{module}.weight"] for module in members if f"{module}.weight" in self.codes]
            forms = {weight.format for weight in weights}
            form = forms.pop() if len(forms) == 1 else None
            if form is None:
                continue
            if form.group[1] is not None:
                ragged += any(weight.codes.shape[0] % (form.group[0] or 1) for weight in weights[:-1])
            tied = (weight.tied_scale.name for weight in weights if weight.tied_scale)
            scales = [name for name in tied if name in self.values]
            values = [self.values[name] for name in scales]
            if len(set(values)) < 2:
                continue
            # Global scales it does not even out: it takes one for all.
            if not self.ours and form.shared:
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
                f"{ragged} sets of layers that engines merge do not divide into blocks: {VLLM} misplaces their scales"
            )

    def _scheme_of(self, weight: Weight) -> Scheme | None:
        """What a weight of ours is stored in; None if that is no scheme of one config with most."""
        if weight.format is None or self.scheme is None:
            return self.scheme
        kind = _kind(weight.format)
        return next((other for other in (self.scheme, *MIXED) if _kind(other.format) == kind), None)

    def _check_remade_scales(self, entry: ModuleRules | None) -> None:
        """A scale that several layers share must be that of the largest weight in any of them."""
        sets = entry.fused_groups(self.headers.layers(entry)) if entry else {}
        together: dict[object, list[str]] = {}
        for module in self.absmax:
            scale = self.codes[f"{module}.weight"].tied_scale
            if scale is not None and scale.name in self.values:
                # Which are joined is not known of every model; those of one scale may be.
                key = sets.get(module, (module,)) if entry else self.values[scale.name]
                together.setdefault(key, []).append(module)
        for modules in together.values():
            scheme = self._scheme_of(self.codes[f"{modules[0]}.weight"])
            assert scheme is not None
            largest = np.float32(max(self.absmax[module] for module in modules))
            made = float(choose_shared_scale(scheme.format, np.asarray(largest)))
            for module in modules:
                scale = self.codes[f"{module}.weight"].tied_scale
                if scale is not None and self.values[scale.name] != made:
                    self.problems.append(
                        f"{self._place(scale.name)} is {self.values[scale.name]:.9g}, the source makes it {made:.9g}"
                    )


def _kind(form: Format) -> tuple[object, ...]:
    """What tells schemes of one config apart."""
    return form.number, form.group, form.zero_point


def _same(one: Path, other: Path) -> bool:
    """Whether two files have the same contents."""
    with readable(), open_regular(one, str(one)) as left, open_regular(other, str(other)) as right:
        while True:
            piece = left.read(1 << 20)
            if piece != right.read(1 << 20):
                return False
            if not piece:
                return True

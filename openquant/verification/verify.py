"""`openquant verify`: checks a quantized directory for consistency, and against its source.

Names, shapes, dtypes and the config are checked first (checks.py), then compared with the source's. Tensors are read
last (contents.py).
"""

from __future__ import annotations

import filecmp
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration.smoothing import repeat_smoothing
from ..errors import PlanError, SourceError, UsageError
from ..fields import verb
from ..files.checkpoint import Checkpoint, open_checkpoint, read_config, readable
from ..files.destination import WeightFacts, read_journal
from ..files.model_files import damaged_json
from ..files.shardfile import TensorInfo
from ..formats.format import Format
from ..formats.kernels import BITS_TYPE, choose_shared_scale
from ..formats.numbers import cache_scales, can_be_non_finite
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..formats.schemes import CHANNEL, KEPT_SCHEMES, TENSOR, Scheme
from ..hub.source import find_whole
from ..machine import available_cpus
from ..models import GENERIC
from ..options import Check
from ..patterns import collapse, group_pairs
from ..plan.architecture import find_architecture, known_architecture, text_config
from ..plan.assign import DirectoryChoice
from ..plan.completeness import check_layer_count, compare_with_class, token_misfits
from ..plan.decisions import PlanOptions, gptq_weights
from ..plan.plan import Plan, ignored_layers, make_plan, make_unchanged_plan
from ..registry.architecture import Architecture, ModuleRules
from ..result import Reporter, default_reporter, lost_notes, zero_notes
from ..version import VLLM
from ..weights.find import decoded_view, with_tool_config, without_quantization
from ..weights.weight import Weight, WeightTransforms
from . import checks
from .contents import Progress, Reading, TensorFindings, TensorTask
from .headers import Findings, Headers, Report, describe
from .weight_checks import cache_tensors, cached_in_fp8, check_static_scales

# An unquantized tensor, and what it must equal: see TensorTask.original.
Pair = tuple[TensorInfo, Weight | bytes | None]


@verb(Check, positional=("directory", "source", "full"))
def verify(options: Check, reporter: Reporter | None = None) -> Report:
    """Check a quantized directory, made by this tool or another. A Hub repository is downloaded first.

    Args:
        reporter: receives a line about what is downloaded, and the progress in bytes; nothing is reported if None.

    Returns:
        A Report; its `problems` are empty if nothing is wrong.

    Raises:
        OpenQuantError: the directory does not exist, or is no finished quantized checkpoint in a supported format; the
            source cannot be opened; or an option does not make sense.
    """
    start = time.monotonic()
    reporter = reporter or default_reporter()
    if options.full and options.source is None:
        raise UsageError("--full compares with the source, and none is given", "give --source DIR")
    directory = os.fspath(options.directory)
    checked = find_whole(directory, reporter.on_note)
    root = checked.root
    quantization = _read_quantization(root)
    journal = read_journal(root) or {}
    if not journal.get("done", True):
        raise UsageError(f"{root} is not finished", "run the command that makes it again")

    # What --copy named belongs to both.
    copy = tuple(journal.get("copy", ()))
    origin = source_name = None
    if options.source is not None:
        source_name = os.fspath(options.source)
        # Kept until the end, since the directory of a GGUF file goes with it.
        named = find_whole(source_name, reporter.on_note)
        origin = named.open(copy)

    format_title = f"{quantization.method}, {quantization.title}"
    report = Report(directory, source_name, None, format_title, (), (), description=quantization.description)

    try:
        checkpoint = open_checkpoint(root, copy=copy)
    except SourceError as error:
        notes = ("nothing else was checked",)
        return replace(report, problems=(error.message,), notes=notes, seconds=_since(start))

    requested = None
    if options.architecture is not None:
        requested = find_architecture(checkpoint, options.architecture)
    model = requested or known_architecture(checkpoint)
    if model == GENERIC:
        # The generic entry says nothing of engines.
        model = None

    files = journal.get("files", ())
    headers, findings = checks.check_headers(checkpoint, quantization, model, files, ours=bool(journal))
    verification = _Verification(headers, findings, journal, origin, options.full, requested)
    verification.run(options.workers or available_cpus(), partial(reporter.on_progress, unit="bytes"))

    return replace(
        report,
        architecture=checkpoint.architecture,
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
        shards=len(checkpoint.shards),
        tensors=len(checkpoint.tensors),
        nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        quantized=len(headers.codes),
        equal_tensors=verification.contents.equal_tensors,
        equal_files=verification.equal_files,
        errors=tuple(verification.contents.errors),
        compared_codes=verification.contents.compared_codes,
        equal_codes=verification.contents.equal_codes,
        recomputed=verification.recomputes,
        seconds=_since(start),
    )


def _read_quantization(root: Path) -> Quantization:
    """What config.json says of the quantization of a directory, which must have one."""
    with readable():
        config = with_tool_config(read_config(root), root)
        if not quantization_places(config):
            raise UsageError(
                f"{root} is not quantized: its config.json has no quantization_config",
                "give a quantized directory, and with --source the model that it was made from; openquant diagnose "
                "MODEL checks unquantized weights, and openquant eval A --source B compares the answers of two models",
            )
        return read_quantization(config)


def _since(start: float) -> float:
    return round(time.monotonic() - start, 3)


@dataclass(eq=False)
class _Verification:
    """The checks of `verify` that follow those of the headers: files, source, contents.

    They add to the problems and notes of the headers' checks.

    Attributes:
        journal: what the run that made an output of ours recorded; empty for other directories.
        origin: the source as it is; None without one.
        architecture: the entry that --architecture names; None for that of the class.
        source: the source as if its quantized weights were bfloat16.
        decoded: these weights, by tensor name.
        originals: the source's weights by module.
    """

    headers: Headers
    findings: Findings
    journal: Mapping[str, Any]
    origin: Checkpoint | None
    full: bool
    architecture: Architecture | None

    source: Checkpoint | None = None
    decoded: dict[str, Weight] = field(default_factory=dict)
    originals: dict[str, Weight] = field(default_factory=dict)
    plan: Plan | None = None
    equal_files: int = 0
    contents: TensorFindings = field(default_factory=TensorFindings)

    def __post_init__(self) -> None:
        self.files = set(self.journal.get("files", ()))
        self.facts = WeightFacts(**self.journal.get("weights", {}))
        self.smoothing: Mapping[str, str] = self.journal.get("smoothing", {})

        headers = self.headers
        self.checkpoint = headers.checkpoint
        self.codes = headers.codes
        self.scheme = headers.scheme
        self._place = headers.place
        self.as_engines_load = headers.quantization.checked_as_engines_load
        self.fp8_cache = cached_in_fp8(headers)
        self.cache_scales = cache_tensors(headers)

        self.problems = self.findings.problems
        self.notes = self.findings.notes
        self.ours = self.findings.ours
        self.recomputable = self.ours and not self.facts.from_quantized
        # Whether quantizing the source again must give the same codes and scales.
        self.recomputes = self.full and self.recomputable and self.scheme is not None
        if self.origin is not None:
            self.source, self.decoded = decoded_view(self.origin)

        # Keys that the config needs beside its quantization_config. Other tools may store projections unfused.
        self.required_keys: Mapping[str, str] = {}
        if headers.entry:
            config = self.checkpoint.config if self.ours else {}
            self.required_keys = headers.entry.model.extra_config(self.scheme and self.scheme.name, config)

    def run(self, workers: int, progress: Progress | None) -> None:
        """Run all checks: files, config, source, tensors, then scales that layers share."""
        pairs: list[Pair] = []
        self._require_readable()

        self._check_extra_files()
        self.problems += checks.missing_keys(self.checkpoint.config, self.required_keys)
        self.problems += self._incomplete()

        if self.source is not None:
            self._compare_config(self.source)
            self._compare_files(self.source)
            self._make_plan(self.source, self.origin or self.source)
            pairs = self._pair(self.source)
            self._compare_plan()

        self._read(pairs, workers, progress)
        self._report_lost_weights()
        if self.headers.entry is not None:
            self._check_shared_scales(self.headers.entry)
        self._check_recomputed_shared_scales(self.headers.entry)

        cache = [info.name for info in self.cache_scales]
        self.problems += check_static_scales(self.headers, self.contents.scales, cache, self.facts.static_scales)

    def _report_lost_weights(self) -> None:
        """Report layers whose weights became zero, as far as codes or the source show it."""
        self.notes += lost_notes(sorted(self.contents.lost_layers))
        zero = collapse(sorted(self.contents.zero_layers))
        if zero:
            self.notes.append(f"nearly all weights are 0: {', '.join(zero)}")
        self.notes += zero_notes(sorted(self.contents.unquantized.zero_layers))

    def _require_readable(self) -> None:
        """Report why the weights cannot be decoded, if there are no other problems."""
        if not self.problems:
            try:
                decoded_view(self.checkpoint)
            except SourceError as error:
                self.problems.append(error.message)
            except PlanError as error:
                # Engines may read a layout that openquant does not read.
                if not self.as_engines_load:
                    raise UsageError(error.message, error.hint) from None

    def _check_extra_files(self) -> None:
        """Report files that neither the run nor the source explains."""
        expected = self.files or None
        where = "beside the model"
        if self.files:
            where = "not of the run that made it"
        if self.source is not None:
            expected = {*self.source.files, "README.md", "config.json"}
            where = "not in the source"

        problems, notes = checks.extra_files(self.checkpoint, expected, where)
        self.problems += [*checks.extra_weights(self.checkpoint), *problems, *damaged_json(self.checkpoint.root)]
        self.notes += notes

    def _incomplete(self) -> list[str]:
        """Find what the model lacks, and sizes in config.json that its tensors do not have."""
        entry = self.headers.entry

        # Of other methods, and of a directory with problems, the modules are not known for sure.
        if entry is None or self.problems or not self.as_engines_load:
            return []

        # What the output lacks beyond that is found by comparing the two.
        if self.source is not None:
            return model_problems(entry, self.source.tensors.values(), self.source)

        tensors = [
            self.headers.as_unquantized(info)
            for name, info in self.checkpoint.tensors.items()
            if not self.headers.belongs_to_codes(name)
        ]

        return model_problems(entry, tensors, self.checkpoint)

    # Comparison with the source.

    def _compare_config(self, source: Checkpoint) -> None:
        output_config, source_config = (
            without_quantization(config, self.required_keys) for config in (self.checkpoint.config, source.config)
        )
        if self.ours:
            for difference in checks.config_differences(output_config, source_config):
                self.problems.append(f"config.json: {difference.text('the source has')}")
            return
        for difference, changes_model in checks.judge_config(output_config, source_config):
            found = self.problems if changes_model else self.notes
            found.append(f"config.json: {difference.text('the source has')}")

    def _compare_files(self, source: Checkpoint) -> None:
        # The model card is rewritten, and _compare_config compares the config key by key.
        for name in sorted(source.files.keys() - {"config.json", "README.md"}):
            if name not in self.checkpoint.files:
                if name not in self.files:
                    self.findings.add_difference(f"{name} is missing: the source has it")
            elif filecmp.cmp(self.checkpoint.root / name, source.root / name, shallow=False):
                self.equal_files += 1
            else:
                self.findings.add_difference(f"{name} differs from the source's")

    def _make_plan(self, source: Checkpoint, origin: Checkpoint) -> None:
        """Plan what the directory has quantized, from the source as if unquantized and as it is (`origin`)."""
        entry = self.architecture

        if entry is None and known_architecture(source) is None:
            return
        try:
            if not self.headers.quantization.groups:
                self.plan = make_unchanged_plan(origin, PlanOptions(), architecture=entry)
                return

            # For another tool's output the plan only gives names, which all schemes of a method share.
            scheme = self.scheme or (TENSOR if self.headers.quantization.method == "fp8" else CHANNEL)
            headers = self.headers
            options = PlanOptions(head=headers.head, embedding=headers.embedding, fp8_kv_cache=self.fp8_cache)
            choice = self._choice_of_output(options)
            self.plan = make_plan(origin, scheme, options, architecture=entry, choice=choice)

            if self.smoothing:
                options = replace(options, transforms=self._repeat_smoothing(self.plan))
                self.plan = make_plan(origin, scheme, options, architecture=entry, choice=choice)
        except (PlanError, UsageError) as error:
            self.notes.append(f"no plan can be made of the source, tensors were compared by name: {error.message}")
            return

        self.originals.update(self.plan.layers)

    def _repeat_smoothing(self, plan: Plan) -> WeightTransforms:
        """Smooth the source as the run did that made the output."""
        transforms = repeat_smoothing(self.smoothing, plan)
        self.notes.append(
            f"inputs of layers are smoothed: {len(transforms.tensors)} norms and biases and "
            f"{len(transforms.weights)} matrices were compared with the smoothed source"
        )
        return transforms

    def _choice_of_output(self, options: PlanOptions) -> DirectoryChoice:
        """Which modules are unquantized, and which are stored in another scheme than most."""
        stored = self.headers.stored
        unquantized = {
            info.module
            for info in self.checkpoint.tensors.values()
            if len(info.shape) > 1 and info.name not in stored and not self.headers.belongs_to_codes(info.name)
        }

        schemes = {weight.module: self._scheme_of(weight) for weight in self.codes.values()}
        others = {module: scheme for module, scheme in schemes.items() if scheme is not None and scheme != self.scheme}

        return DirectoryChoice(options, unquantized, others)

    def _pair(self, source: Checkpoint) -> list[Pair]:
        """Match the output's tensors with the source's, report misfits, and return the unquantized ones with theirs."""
        pairs: list[Pair] = []
        foreign: list[str] = []
        recast: list[str] = []
        smoothed = {}
        if self.plan:
            smoothed = {kept.tensor.name: kept.smoothed for kept in self.plan.decisions.passthrough}
        added = set()
        if self.fp8_cache:
            added = {info.name for info in self.cache_scales}

        for tensor in self.checkpoint.tensors.values():
            if tensor.name in added:
                continue

            # As it would be unquantized.
            info = self.headers.as_unquantized(tensor)
            original = source.tensors.get(info.name)
            weight = self.originals.get(info.module)
            if original is None and weight is not None and info.name != f"{info.module}.weight":
                weight = None

            source_info = original or (weight and weight.source)
            if source_info is None:
                if not self.headers.belongs_to_codes(info.name):
                    foreign.append(info.name)
                continue

            dtype = source_info.dtype
            shape: tuple[int, ...] = source_info.shape
            if original is None and weight:
                shape = weight.shape
            if tensor.name in self.headers.stored:
                if info.shape != shape:
                    self._report_mismatch(tensor, dtype, shape)
                elif weight is None and original is not None and len(shape) == 2 and dtype in BITS_TYPE:
                    matrix = Weight(info.module, info.module, original, (shape[0], shape[1]))
                    self.originals[info.module] = self.decoded.get(info.name, matrix)
            elif (info.dtype, info.shape) == (dtype, shape):
                if original:
                    weight = self.decoded.get(info.name)
                pairs.append((info, smoothed.get(info.name) or weight))
            elif info.shape == shape and not self.ours:
                recast.append(info.name)
            else:
                self._report_mismatch(info, dtype, shape)

        if self.ours:
            self.problems += [f"{self._place(name)} is not in the source" for name in foreign]
        elif foreign:
            self.notes.append(f"not in the source: {', '.join(collapse(foreign))}")
        if recast:
            self.notes.append(f"not compared, since the source has another dtype: {', '.join(collapse(recast))}")

        self._check_complete(source)
        return pairs

    def _report_mismatch(self, info: TensorInfo, dtype: str, shape: tuple[int, ...]) -> None:
        self.problems.append(f"{self._place(info.name)} is {describe(info)}, the source has {dtype} {list(shape)}")

    def _check_complete(self, source: Checkpoint) -> None:
        """Check that every tensor of the source is there, whole or split into experts."""
        tensors = self.checkpoint.tensors
        experts = group_pairs(
            (layer.source.name, f"{layer.module}.weight") for layer in self.originals.values() if layer.expert >= 0
        )

        # Scales of the cache have other names in some sources.
        renamed = set()
        if self.fp8_cache:
            renamed = {name for pair in cache_scales(source.tensors).values() for name in pair}

        for name in source.tensors:
            if name in tensors or name in self.codes or name in renamed:
                continue
            for expected in experts.get(name, [name]):
                if expected not in tensors and expected not in self.codes:
                    self.problems.append(f"{expected} is missing: the source has {name} in {source.where[name].shard}")

    def _compare_plan(self) -> None:
        """Check that an output of ours has the ignore list of its plan."""
        if self.plan is None or not self.ours:
            return

        key = self.headers.quantization.ignored.key
        listed = set(self.headers.quantization.ignored.entries)
        for name in ignored_layers(self.plan):
            if name not in listed and name not in self.findings.unlisted:
                self.problems.append(f"config.json: {key} does not list {name}")

        # Engines may match an entry as a prefix or a part of other names.
        surplus = sorted(listed.difference(ignored_layers(self.plan)))
        self.problems += [f"config.json: {key} lists {name}, the plan does not" for name in surplus]

    # Contents of tensors.

    def _read(self, pairs: list[Pair], workers: int, progress: Progress | None) -> None:
        """Read all tensors, and report what is wrong with their contents."""
        gptq_rounded = self._gptq_modules()
        tasks = [TensorTask(info, original=original) for info, original in pairs]
        tasks += [self._weight_task(weight, gptq_rounded) for weight in self.codes.values()]
        tasks += [TensorTask(info, kv_cache_scale=True) for info in self.cache_scales]
        read_names = {task.info.name for task in tasks} | self.headers.scales
        tasks += [
            TensorTask(info, finite_only=True)
            for info in self.checkpoint.tensors.values()
            if can_be_non_finite(info.dtype) and info.name not in read_names
        ]

        # Disks read fastest in the order of the files.
        tasks.sort(key=lambda task: self.checkpoint.where[task.info.name])
        self.contents = Reading(self.checkpoint, self.source, tasks, progress).run(workers)
        self.problems += self.contents.problems
        self._report_non_finite()
        self._add_contents_notes(len(gptq_rounded))

    def _weight_task(self, weight: Weight, gptq_rounded: Collection[str]) -> TensorTask:
        """The task that reads the codes of a weight."""
        original = self.originals.get(weight.module)
        if original and (not self.full or original.shape != weight.source.shape):
            original = None

        # The source whose codes are kept, or the one that those codes were made from, by any method.
        keeps = self.facts.keeps_codes
        kept = keeps and original is not None and original.format is not None
        by_gptq = weight.module in gptq_rounded or (keeps and not kept)

        scheme = None
        if self.recomputes:
            scheme = self._scheme_of(weight)
        if scheme and by_gptq and self.facts.tuned and not scheme.format.shared:
            scheme = None

        return TensorTask(
            weight.codes,
            weight,
            original,
            scheme=scheme,
            # GPTQ's search is weighted by the Hessian.
            weighted_search=self.facts.weighed or by_gptq,
            gptq_rounded=by_gptq,
            foreign=not self.ours,
            kept=kept,
            by_decoding=not self.as_engines_load or (weight.format is not None and weight.format.columns is not None),
        )

    def _add_contents_notes(self, gptq_rounded: int) -> None:
        """Say how the contents were compared."""
        if self.full and gptq_rounded:
            self.notes.append(
                f"{gptq_rounded} layers were rounded by GPTQ, whose codes are not recomputed; their weight errors "
                "are larger on purpose, and openquant eval measures what the model loses"
            )

        skipped = sum(weight.module not in self.originals for weight in self.codes.values())
        if self.full and skipped:
            self.notes.append(f"{skipped} quantized tensors were not decoded: the source has no matrix for them")

    def _report_non_finite(self) -> None:
        """Report NaN as a problem, and infinity too unless the tensor may be a mask or a bound."""
        for name, count in sorted(self.contents.unquantized.not_finite.items()):
            message = f"{self._place(name)} holds {count.text}"
            if name in self.contents.as_in_source:
                message += ", as the source has it"
            if count.nan or name.endswith(".weight"):
                self.problems.append(f"{message}: the model answers NaN where it is used")
            else:
                self.notes.append(f"{message}: right in a mask or a bound only")

    def _gptq_modules(self) -> set[str]:
        """The modules that GPTQ rounded; without a plan, all quantized ones."""
        if not self.facts.gptq:
            return set()
        if self.plan is None:
            return {weight.module for weight in self.codes.values()}
        return {weight.module for weight, _ in gptq_weights(self.plan.decisions)}

    def _check_shared_scales(self, entry: ModuleRules) -> None:
        """Check that fused layers share a scale. vLLM otherwise requantizes them at load, or uses one of the scales."""
        ragged = 0

        for members in sorted(set(entry.fused_groups(self.headers.layers(entry)).values())):
            weights = [self.codes[f"{module}.weight"] for module in members if f"{module}.weight" in self.codes]
            formats = {weight.format for weight in weights}
            fmt = next(iter(formats), None)
            if fmt is None or len(formats) > 1:
                continue

            if fmt.group[1] is not None:
                ragged += any(weight.codes.shape[0] % (fmt.group[0] or 1) for weight in weights[:-1])

            tied = (weight.shared_scale.name for weight in weights if weight.shared_scale)
            names = [name for name in tied if name in self.contents.scales]
            scales = [self.contents.scales[name] for name in names]
            if len(set(scales)) < 2:
                continue

            # vLLM requantizes layers with one scale per tensor, but takes one global scale for all. An output of ours
            # has several such scales if it keeps those of the source.
            if fmt.shared and not self.recomputable:
                continue

            index = next(index for index, scale in enumerate(scales) if scale != scales[0])
            self.problems.append(
                f"{self._place(names[0])} is {scales[0]:g} and {names[index]} is {scales[index]:g}, "
                "but engines fuse their layers under one scale"
            )

        if ragged:
            self.notes.append(
                f"{ragged} groups of fused layers do not divide into blocks: {VLLM} misplaces their scales"
            )

    def _scheme_of(self, weight: Weight) -> Scheme | None:
        """The scheme that a weight is stored in: the directory's, or one that it may be mixed with; None for others."""
        if weight.format is None or self.scheme is None:
            return self.scheme
        alike = [one for one in (self.scheme, *KEPT_SCHEMES) if _layout(one.format) == _layout(weight.format)]
        # Some differ in how activations are quantized alone.
        same = [scheme for scheme in alike if scheme.format == weight.format]
        return next(iter(same + alike), None)

    def _check_recomputed_shared_scales(self, entry: ModuleRules | None) -> None:
        """Check that a scale which fused layers share is that of the largest weight in any of them."""
        stored = self.contents.scales
        fused_groups = {}
        if entry:
            fused_groups = entry.fused_groups(self.headers.layers(entry))
        groups: dict[object, list[str]] = {}

        for module in self.contents.absmax:
            scale = self.codes[f"{module}.weight"].shared_scale
            if scale is not None and scale.name in stored:
                # Without an entry the fused layers are not known; layers with equal scales may be fused.
                key = fused_groups.get(module, (module,)) if entry else stored[scale.name]
                groups.setdefault(key, []).append(module)

        for modules in groups.values():
            scheme = self._scheme_of(self.codes[f"{modules[0]}.weight"])
            assert scheme is not None
            absmax = np.float32(max(self.contents.absmax[module] for module in modules))
            recomputed = float(choose_shared_scale(scheme.format, np.asarray(absmax)))

            for module in modules:
                scale = self.codes[f"{module}.weight"].shared_scale
                if scale is not None and stored[scale.name] != recomputed:
                    self.problems.append(
                        f"{self._place(scale.name)} is {stored[scale.name]:.9g}, the source makes it {recomputed:.9g}"
                    )


def model_problems(entry: ModuleRules, tensors: Collection[TensorInfo], checkpoint: Checkpoint) -> list[str]:
    """Find what a model lacks, and sizes in config.json that its tensors do not have.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        checkpoint: the opened directory, whose config.json counts.

    Returns:
        A sentence for each problem.
    """
    config = text_config(checkpoint, entry.model)
    try:
        check_layer_count(config)
    except SourceError as error:
        return [error.message]
    comparison = compare_with_class(entry, tensors, checkpoint.config, config)
    if comparison is None:
        return []
    return [
        *(f"the shards lack {text}" for text in comparison.lost),
        *(f"config.json does not fit the tensors: {text}" for text in comparison.misfits),
        *token_misfits(checkpoint.root, entry, tensors),
    ]


def _layout(fmt: Format) -> tuple[object, ...]:
    """The properties of a format in which the schemes that one config can mix differ."""
    return fmt.number, fmt.group, fmt.zero_point

"""`openquant fit`: every scheme of a model in one table, from its headers alone.

A plan is made for each scheme, and no weight is read. Rows that fit the GPUs come first, those of the least KL
divergence before others.

    fit_table("Qwen/Qwen3-32B", "5090", context="16k").best     # "nvfp4"

A row says what is left of the GPUs that hold it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, cast

from ..diagnosis.result import MODEL, Measurement, activations, advise, least_loss, measured_kl
from ..errors import OpenQuantError, PlanError, UsageError
from ..fields import options_of, verb, words_of
from ..files.checkpoint import Checkpoint
from ..formats.hardware import ENGINES_FOR, Kernel, SchemeName, find_kernel
from ..formats.numbers import says_fp8_cache
from ..formats.quantization import find_quantization
from ..formats.schemes import INT8_W8A16, MIXED, SCHEMES, Scheme
from ..options import CompareSchemes, Search
from ..plan import serving, summary
from ..plan.decisions import PlanOptions
from ..plan.engines import sglang_refusal
from ..plan.plan import Plan, Planner
from ..registry.architecture import is_head
from ..weights.find import with_tool_config
from .budget import Budget, allowed_context, read_gpus

# Memory of the GPUs in a table for no GPU.
COMMON = (24 * 10**9, 48 * 10**9, 80 * 10**9)
# A mixture is worth while if the best scheme leaves more than this share of the weights' memory unused.
UNUSED = 0.05


@verb(CompareSchemes, positional=("model", "gpu"))
def fit_table(request: CompareSchemes) -> FitTable:
    """Say of each scheme whether a model fits GPUs in it, and how much context is left. Only headers are read.

    Args:
        model: Model directory, GGUF file, or Hub org/name[@rev].

    Returns:
        A row for each scheme, the best first, and the command for the best.

    Raises:
        OpenQuantError: no scheme can be used for this model, there is no such GPU, or something else that the caller
            can fix.
    """
    # It imports the conversion, which a table has no use for.
    from ..job import open_model, without_collector

    if request.gpu is not None:
        read_gpus(request.gpu)

    source, checkpoint = open_model(request.model, request.revision, stream=False)
    with without_collector():
        return table_of(request, checkpoint, source.identity, source.revision)


def table_of(request: CompareSchemes, checkpoint: Checkpoint, identity: str, revision: str | None) -> FitTable:
    """Make the table of an opened checkpoint. Nothing else is read.

    Args:
        request: the options; `model` is the name in the commands of the table.
        checkpoint: the checkpoint.
        identity: text that tells this source from another with the same headers.
        revision: the commit on the Hub; None for a local directory.

    Returns:
        A row for each scheme, the best first.

    Raises:
        OpenQuantError: as `fit_table`.
    """
    budget = None if request.gpu is None else read_gpus(request.gpu)
    planner = Planner(checkpoint, identity, request.architecture)
    if request.kv_cache == "auto" and _says_fp8_cache(checkpoint):
        with_fp8 = replace(request, kv_cache="fp8")
        return replace(_Table(with_fp8, budget, planner).make(revision), cache_in_config=True)
    return _Table(request, budget, planner).make(revision)


def _can_calibrate(plan: Plan) -> bool:
    """Return whether a calibration, GPTQ's too, can make the outputs of a model closer."""
    return not summary.has_quantized_source(plan) and not plan.model.repeats


class _Table:
    """Makes a table.

    Args:
        request: the options.
        budget: the GPUs; None without any.
        planner: makes plans of the source.
    """

    def __init__(self, request: CompareSchemes, budget: Budget | None, planner: Planner) -> None:
        self.request = request
        self.planner = planner
        self.fp8 = request.kv_cache == "fp8"
        # The engines that must load it; empty if any may.
        self.wanted = ENGINES_FOR[request.engines] if request.engines else ()

        self.hardware: str | None = None
        self.count = 1
        self.targets = tuple(Target(None, nbytes, None, 1) for nbytes in COMMON)
        if budget is not None:
            name = None
            if budget.gpu is not None:
                name = budget.gpu.name
                self.hardware = budget.gpu.hardware
            self.count = budget.gpus
            self.targets = (Target(name, int(budget.value) or None, self.hardware, self.count),)

        self.refused: dict[str, str] = {}
        # By scheme, what --scheme-for says of the output head.
        self.head_schemes: dict[str, str] = {}
        # Numbers of GPUs that can share the model in some scheme.
        self.able: set[int] = set()

    def make(self, revision: str | None, instead: bool = True) -> FitTable:
        """Return the table.

        Args:
            revision: the commit on the Hub; None for a local directory.
            instead: whether to look for options with which something fits, if nothing does.

        Raises:
            PlanError: no scheme can be used, the context is longer than the model allows, or the layers do not divide
                among so many GPUs.
        """
        rows, first = self._plan_schemes()
        source = self._source_row(first)
        stored = summary.has_quantized_source(first)
        rows = sorted([source, *rows], key=self._rank)
        self._require_shared()

        source_fits: bool | None = None
        if self.request.gpu is not None and self.targets[0].memory_bytes is not None:
            source_fits = self._fits(source)

        # What is quantized already and fits is served as it is.
        ready = stored and bool(source_fits)
        fitting = {row.scheme: row for row in rows if row.scheme and self._fits(row)}
        able = {name: row.numbers for name, row in fitting.items()}
        fastest, closest = advise(able, calibrate=_can_calibrate(first))
        _, uncalibrated = advise(able, calibrate=False)

        table = FitTable(
            model=os.fspath(self.request.model),
            revision=revision,
            architecture=first.model.name,
            context=self.context,
            longest_context=self.longest,
            kv_cache=self.request.kv_cache,
            cache_in_config=False,
            engines=self.request.engines,
            unknown=self.unknown,
            targets=self.targets,
            measured_on=MODEL,
            notes=list(self.planner.notes_on_source()),
            schemes=tuple(rows),
            refused=self.refused,
            quantized_source=stored,
            source_fits=source_fits,
            quantize_lm_head=self.request.quantize_lm_head,
            head_schemes={row.scheme: self.head_schemes[row.scheme] for row in rows if row.scheme in self.head_schemes},
        )

        if closest is not None and not ready:
            return replace(
                table,
                best=cast(SchemeName, closest.scheme.name),
                uncalibrated=uncalibrated and cast(SchemeName, uncalibrated.scheme.name),
                command=self._command_of(closest),
                fastest=fastest and cast(SchemeName, fastest.scheme.name),
                fastest_command=fastest and self._command_of(fastest),
                mixture=self._mixture(fitting[closest.scheme.name], closest, rows, first),
            )
        if instead and not ready:
            return replace(table, instead=self._instead())
        return table

    def _plan_schemes(self) -> tuple[list[SchemeFit], Plan]:
        """Make the rows of all schemes that can be used, and the plan of the first one."""
        rows: list[SchemeFit] = []
        first: Plan | None = None
        problem: PlanError | UsageError | None = None
        for scheme in SCHEMES.values():
            try:
                plan = self._plan(scheme)
            except (PlanError, UsageError) as error:
                problem = problem or error
                self.refused[scheme.name] = error.message
                continue
            if first is None:
                first = plan
                self._open(plan)
            row = self._row(scheme, plan)
            if row is not None:
                rows.append(row)

        if first is None:
            assert problem is not None
            raise problem
        if not rows:
            name, reason = next(iter(self.refused.items()))
            raise PlanError(f"no scheme is left, such as {name}: {reason}", "name another engine or GPU")
        return rows, first

    def _instead(self) -> str | None:
        """The command for the best scheme that fits with an FP8 KV cache, or with a quantized output head too."""
        if self.targets[0].memory_bytes is None or len(self.targets) > 1:
            return None

        commands: dict[float, str] = {}
        requests = [replace(self.request, kv_cache="fp8"), replace(self.request, kv_cache="fp8", quantize_lm_head=True)]

        for request in requests:
            if request == self.request:
                continue

            try:
                found = _Table(request, read_gpus(str(request.gpu)), self.planner).make(None, instead=False)
            except OpenQuantError:
                continue

            best = next((row for row in found.schemes if row.scheme == found.best), None)
            if best is not None and best.least is not None and found.command is not None:
                commands.setdefault(best.least, found.command)

        if not commands:
            return None
        return commands[min(commands)]

    def _plan(self, scheme: Scheme) -> Plan:
        request = self.request
        options = PlanOptions(
            tuple(request.ignore),
            head=request.quantize_lm_head,
            embedding=request.quantize_embeddings,
            fp8_kv_cache=self.fp8,
            # What compress would calibrate with, which no size depends on.
            texts={"documents": 1, "length": 2},
        )

        plan = self.planner.make(scheme, options, with_notes=False)

        head = next((weight.module for weight, kind in plan.decisions.kinds if is_head(weight.module)), None)
        if head is None or not self._improves(scheme):
            return plan

        self.head_schemes[scheme.name] = f"{head}={INT8_W8A16.name}"
        options = replace(options, scheme_for=((head, INT8_W8A16),))
        return self.planner.make(scheme, options, with_notes=False)

    def _improves(self, scheme: Scheme) -> bool:
        """Whether a head in INT8 loses less than in the scheme, and engines can have both on the GPU."""
        if scheme not in MIXED or scheme.format.number.bits >= INT8_W8A16.format.number.bits:
            return False
        hardware = self.hardware
        if hardware is None:
            return True
        return all(
            find_kernel(engine, INT8_W8A16.name, hardware, False)
            for engine in self.wanted or scheme.engines
            if find_kernel(engine, scheme.name, hardware, False)
        )

    def _command_of(self, measured: Measurement) -> str:
        """The command of compress for a row, with the calibration that it was measured with."""
        words = measured.options.split()
        if measured.scheme.name in self.head_schemes:
            words += ["--scheme-for", self.head_schemes[measured.scheme.name]]
        return self._command(*words)

    def _open(self, plan: Plan) -> None:
        """Compute what all plans share: the KV cache, and the length of a sequence."""
        self.cache: serving.SequenceMemory | None = None
        self.unknown: str | None = None
        try:
            self.cache = serving.find_cache(plan)
        except serving.UnknownCache as problem:
            self.unknown = str(problem)
        self.parallel = plan.parallel
        self.longest = None if self.cache is None else self.cache.length
        self.context = allowed_context(self.request.context, self.longest)

    def _row(self, scheme: Scheme, plan: Plan) -> SchemeFit | None:
        """The row of a scheme; None if no engine that is asked for loads it, which `refused` then says."""
        # Layers that do not suit the scheme may have another one. The scheme itself comes first.
        used = {(kind.name, bool(plan.entry.experts(weight.module))) for weight, kind in plan.decisions.kinds}
        kinds = sorted(used, key=lambda kind: (kind[0] != scheme.name, kind))
        if not kinds:
            self.refused[scheme.name] = "it quantizes nothing"
            return None

        # Why engines cannot load or compute it.
        reasons: dict[str, str] = {}
        refusal = sglang_refusal(plan.entry, plan.decisions)
        if refusal is not None:
            reasons["SGLang"] = "SGLang does not load it"
            if "SGLang" in scheme.engines:
                reasons["SGLang"] = f"SGLang: {refusal.why}"

        kernels: dict[str, dict[tuple[str, bool], Kernel | None]] = {}
        for engine in ENGINES_FOR["both"]:
            if engine not in reasons and self.hardware is not None:
                kernels[engine] = {
                    (name, experts): find_kernel(engine, name, self.hardware, experts) for name, experts in kinds
                }
                if None in kernels[engine].values():
                    reasons[engine] = f"{engine} has no kernel for it on {self.targets[0].name}"

        engines = tuple(engine for engine in ENGINES_FOR["both"] if engine not in reasons)
        if not engines or not set(self.wanted) <= set(engines):
            missing = [reasons[engine] for engine in self.wanted if engine in reasons]
            self.refused[scheme.name] = "; ".join(missing) or f"no engine has a kernel for it on {self.targets[0].name}"
            return None

        first = kernels.get((*self.wanted, *engines)[0], {})
        present = list(first.values())
        if self.hardware is None:
            # A GPU that is named by its memory is taken for one of NVIDIA's.
            present = [find_kernel("vLLM", name, "Ampere", experts) for name, experts in kinds]

        measured = least_loss(scheme, calibrate=_can_calibrate(plan))

        quantized = [line for line in plan.lines if line.quantized]
        elements = sum(len(line.names) * prod(line.shape) for line in quantized)

        return SchemeFit(
            scheme=scheme.name,
            bits=8 * sum(line.bytes_after for line in quantized) / elements,
            bytes=sum(line.bytes_after for line in plan.lines),
            engines=engines,
            arithmetic=_arithmetic(first, experts=False),
            expert_arithmetic=_arithmetic(first, experts=True),
            needs=tuple(dict.fromkeys(kernel.needs for kernel in present if kernel and kernel.needs)),
            kl=measured_kl(scheme),
            least=measured and measured.kl,
            calibrated=measured.options if measured and measured.readings else None,
            holds=self._holds(serving.loaded_weights(plan, output=True), plan.parallel),
        )

    def _source_row(self, plan: Plan) -> SchemeFit:
        """The row of the source as it is."""
        stored = summary.has_quantized_source(plan)
        return SchemeFit(
            bytes=summary.source_bytes(plan),
            arithmetic=None if stored or self.hardware is None else "16 bits",
            kl=0.0,
            least=0.0,
            holds=self._holds(serving.loaded_weights(plan, output=False), summary.source_parallel(plan)),
        )

    def _holds(self, weights: serving.LoadedWeights, parallel: Mapping[int, str | None]) -> tuple[Held, ...]:
        able = {size for size, problem in parallel.items() if problem is None}
        self.able |= able
        sizes = [size for size in (self.count, *(gpus for gpus in serving.GPUS if gpus > self.count)) if size in able]
        return tuple(
            self._compute_held(target.memory_bytes, sizes, weights)
            for target in self.targets
            if target.memory_bytes is not None
        )

    def _compute_held(self, memory: int, sizes: Iterable[int], weights: serving.LoadedWeights) -> Held:
        cache = self.cache
        left: int | None = None
        for gpus in sizes:
            room = max(0, weights.room(memory, gpus))
            if cache is None or not cache.divides(gpus):
                if room:
                    return Held(gpus, None, None, None)
                continue

            longest = cache.longest(room, self.fp8, gpus)
            if gpus == self.count:
                left = longest
            if room and longest >= self.context:
                sequence = cache.sequence(self.context, self.fp8, gpus)
                return Held(gpus, longest, room // sequence if sequence else None, left)
        return Held(None, None, None, left)

    def _require_shared(self) -> None:
        """Refuse a number of GPUs that can serve the model in no scheme."""
        if self.count not in self.able and self.targets[0].memory_bytes is not None:
            problem = self.parallel.get(self.count, "they do not divide it")
            possible = ", ".join(map(str, sorted(self.able)))
            raise PlanError(f"{self.count} GPUs cannot share this model: {problem}", f"name one of {possible} GPUs")

    def _fits(self, row: SchemeFit) -> bool:
        """Whether it fits as many GPUs as there are. Nothing is known of a CPU's memory."""
        return self.request.gpu is not None and all(held.gpus == self.count for held in row.holds)

    def _rank(self, row: SchemeFit) -> tuple[Any, ...]:
        """What rows are ordered by: whether they fit, how many GPUs they need if not, and what they lose.

        If that is not known, those of more bytes come first.
        """
        gpus: int | None = 0
        if row.holds and not self._fits(row) and self.request.gpu is not None:
            gpus = row.holds[0].gpus
        by_gpus = (gpus is None, gpus or 0)
        if row.least is None:
            return (*by_gpus, 1, 0.0, -row.bytes)
        return (*by_gpus, 0, row.least, row.bytes)

    def _wants_mixture(self, best: SchemeFit, rows: Sequence[SchemeFit], plan: Plan) -> bool:
        """Whether schemes of weights alone fit and do not fill the GPUs, and the largest of them does not fit."""
        memory = self.targets[0].memory_bytes
        cache = self.cache
        able = [row for row in rows if row.scheme is None or _is_mixed(SCHEMES[row.scheme])]
        sizes = sorted({row.bytes for row in able if self._fits(row)})
        largest = max((row for row in able if row.scheme is not None), key=lambda row: row.bytes, default=None)
        if memory is None or cache is None or plan.model.repeats or not sizes or largest is None or self._fits(largest):
            return False
        cached = cache.sequence(self.context, self.fp8, self.count)
        weights = serving.LoadedWeights(0, 0).room(memory, self.count) - cached
        return best.bytes < (1 - UNUSED) * weights * self.count

    def _mixture(self, best: SchemeFit, measured: Measurement, rows: Sequence[SchemeFit], plan: Plan) -> str | None:
        """The command of compress for a mixture, of the schemes of one engine if only that one loads the best."""
        if not self._wants_mixture(best, rows, plan):
            return None

        request = self.request
        words = ["--fit", str(request.gpu)]
        if request.context != options_of(CompareSchemes)["context"].default:
            thousands, rest = divmod(self.context, 1024)
            words += ["--context", str(self.context) if rest else f"{thousands}k"]

        engines = request.engines
        if not engines and len(best.engines) == 1:
            engines = best.engines[0].lower()
        if engines:
            words += ["--for", engines]
        if "--gptq" in measured.options:
            words.append("--gptq")
        return self._command(*words)

    def _command(self, *words: str) -> str:
        """The command of compress with these options, and with those that were given here."""
        given = ("kv_cache", "quantize_lm_head", "quantize_embeddings", "architecture", "revision", "ignore")
        model = os.fspath(self.request.model)
        return shlex.join(["openquant", "compress", "-m", model, *words, *words_of_options(vars(self.request), given)])


def words_of_options(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the words of a command line for options of a search that differ from their defaults.

    Args:
        values: values of options by name, others among them.
        names: names of options, in the order of the words.
    """
    known = options_of(Search)
    changed = {name: values[name] for name in names if values[name] and values[name] != known[name].default}
    if "candidates" in changed:
        changed["candidates"] = ",".join(changed["candidates"])
    return words_of(known, changed)


def _says_fp8_cache(checkpoint: Checkpoint) -> bool:
    """Whether the config asks for an FP8 KV cache; False if it asks for a cache of another numeric format."""
    try:
        return says_fp8_cache(find_quantization(with_tool_config(checkpoint.config, checkpoint.root)) or {})
    except UsageError:
        return False


def _arithmetic(kernels: Mapping[tuple[str, bool], Kernel | None], experts: bool) -> str | None:
    """The numbers that are multiplied in experts, or in other layers, by the first kernel that is for these."""
    return next((kernel.arithmetic for (_, kind), kernel in kernels.items() if kernel and kind is experts), None)


def _is_mixed(scheme: Scheme) -> bool:
    """Whether a mixture can have the scheme: only weights are quantized, and what it loses was measured."""
    return scheme in MIXED and activations(scheme) == "16 bits" and measured_kl(scheme) is not None


@dataclass(frozen=True)
class Target:
    """GPUs that a table is for.

    Attributes:
        name: name of the GPU; None if only its memory was given.
        memory_bytes: memory of each; None for the CPU.
        hardware: what engines have kernels for, one of HARDWARE in formats/hardware.py; None without a name.
        count: how many of them there are.
    """

    name: str | None
    memory_bytes: int | None
    hardware: str | None
    count: int


@dataclass(frozen=True)
class Held:
    """What GPUs of one kind hold of a model.

    Attributes:
        gpus: the number of GPUs: as many as there are, or if those are too few, the fewest of 1, 2, 4 and 8 that hold
            the weights and the context; None if none does.
        longest: tokens of the longest sequence that fits and that the model allows; None if that is not known.
        sequences: how many sequences of the context's length fit at once; None if that is not known.
        left: tokens of the longest sequence on as many GPUs as there are, even if that is less than the context; 0 if
            the weights alone do not fit; None if it is not known, or so many GPUs cannot share the model.
    """

    gpus: int | None
    longest: int | None
    sequences: int | None
    left: int | None


@dataclass(frozen=True, kw_only=True)
class SchemeFit:
    """A row of the table.

    Attributes:
        scheme: name of the scheme; None for the source as it is.
        bits: bits of a quantized weight with its scales, on average over the model; None for the source.
        bytes: size of all tensors.
        engines: engines that load it, and have kernels for it on the GPU if one is named.
        arithmetic: the numbers that the first of these engines multiplies there in layers that are no experts; None
            without a named GPU, or if there are no such layers.
        expert_arithmetic: likewise in routed experts.
        needs: packages or CPU features that the engine needs for it.
        kl: KL divergence from the source that was measured on another model, in nats; None if it was not.
        least: the least that was measured, with a calibration if there is one.
        calibrated: the options with which that was: "--scheme nvfp4 --gptq"; None without a calibration.
        holds: what each target of the table holds.
    """

    scheme: str | None = None
    bits: float | None = None
    bytes: int
    engines: tuple[str, ...] = ()
    arithmetic: str | None = None
    expert_arithmetic: str | None = None
    needs: tuple[str, ...] = ()
    kl: float | None
    least: float | None
    calibrated: str | None = None
    holds: tuple[Held, ...]

    @property
    def numbers(self) -> set[str]:
        """The numbers that are multiplied; none if they are not known."""
        return {numbers for numbers in (self.arithmetic, self.expert_arithmetic) if numbers}


@dataclass(frozen=True)
class FitTable:
    """The result of fit_table().

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        context: tokens of each sequence.
        longest_context: the longest sequence that config.json allows; None if it does not say.
        kv_cache: "fp8", or "auto" for a KV cache in bfloat16.
        cache_in_config: whether `kv_cache` is "fp8" because config.json asks for that, and not by an option.
        engines: the engines that were asked for: "vllm", "sglang" or "both"; None for any.
        unknown: why the size of the KV cache is not known; None if it is.
        targets: the GPUs that the rows' `holds` are about; none for the CPU alone.
        measured_on: the model on which `kl` was measured.
        notes: what the source lacks, and what does not fit in it.
        schemes: the rows, the best first: those that fit, and of these the least KL.
        refused: schemes that this model or GPU cannot have, with the reason.
        quantized_source: whether weights of the source are quantized already. KL divergences are then from that source.
        source_fits: whether the source fits the GPU as it is; None without the memory of a GPU.
        quantize_lm_head: whether the output head is quantized too. Its loss is in no `kl`.
        best: the scheme that fits the named GPU and lost least; None if there is none, or if a quantized source fits as
            it is.
        command: the command that makes it, with its calibration.
        uncalibrated: the scheme that fits and lost least without a calibration; None if there is none.
        fastest: the scheme that fits and that the GPU multiplies in eight bits (diagnosis/result.py), or None.
        fastest_command: the command that makes that.
        head_schemes: by scheme, the --scheme-for of its row: "lm_head=int8-weights". A quantized output head has eight
            bits in schemes of fewer, if engines have a kernel for that.
        mixture: the command for a mixture of schemes, if that fits and fills the GPU better than the best scheme.
        instead: if nothing fits, the command for the best scheme that does with an FP8 KV cache or a quantized output
            head too; None if there is none.
    """

    model: str
    revision: str | None
    architecture: str
    context: int
    longest_context: int | None
    kv_cache: str
    cache_in_config: bool
    engines: str | None
    unknown: str | None
    targets: tuple[Target, ...]
    measured_on: str
    notes: list[str]
    schemes: tuple[SchemeFit, ...]
    refused: Mapping[str, str]
    quantized_source: bool
    source_fits: bool | None
    quantize_lm_head: bool
    best: SchemeName | None = None
    command: str | None = None
    uncalibrated: SchemeName | None = None
    fastest: SchemeName | None = None
    fastest_command: str | None = None
    head_schemes: Mapping[str, str] = field(default_factory=dict)
    mixture: str | None = None
    instead: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self) | {"refused": dict(self.refused), "head_schemes": dict(self.head_schemes)}


@dataclass(frozen=True)
class Point:
    """Size and KL divergence of a mixture or a single scheme.

    Attributes:
        name: the scheme, "5.5bits", "fits 4090", or "--fit 4090".
        scheme: the scheme that all layers have, as far as they can; None for a mixture.
        bytes: size of all tensors of the output.
        bits: bits of a weight that may be quantized, with its scales, on average.
        predicted: the sum of the scores of its units, in nats.
        kl: KL divergence from the source, mean over positions, in nats.
        interval: its 95 % interval over documents; None if there are too few, or it was not measured.
        measured: whether `kl` was measured. Else it is `predicted` times the ratio of the two for what was measured.
        shares: by scheme, or "unquantized", its share of the weights that may be quantized.
        fits: whether it fits the GPUs; None if none are named.
        written: whether it is the output of this run.
        command: the command that makes it.
    """

    name: str
    scheme: str | None
    bytes: int
    bits: float
    predicted: float
    kl: float
    interval: list[float] | None
    measured: bool
    shares: Mapping[str, float]
    fits: bool | None
    written: bool
    command: str


@dataclass(frozen=True)
class SearchResult:
    """The result of search_mixtures(); and what compress() chose from with `fit`.

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        source_bytes: size of all tensors of the source.
        texts: texts that mixtures were measured on: the number of documents, their tokens, and where they are from.
        texts_sha256: SHA-256 of their tokens.
        engines: "vllm", "sglang" or "both".
        gpu: the GPUs as they were named; None if none were.
        context: tokens of the sequence that they are to hold.
        limit: bytes of weights that fit them; None if none were named.
        points: mixtures of all sizes and the single schemes, the smallest first.
    """

    model: str
    revision: str | None
    architecture: str
    source_bytes: int
    texts: str
    texts_sha256: str
    engines: str
    gpu: str | None
    context: int
    limit: int | None
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self)

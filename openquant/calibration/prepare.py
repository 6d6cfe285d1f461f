"""Calibration in a run of compress(): finds what the plan lacks, so that the plan can be made again with it.

Input statistics come from running texts through the model. The scales of SmoothQuant and AWQ come from these and from
the weights. GPTQ's Hessians come later, while layers are rounded (run.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed import Ranks
from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.destination import Needs, require_space
from ..formats.numbers import Floats
from ..hub.source import Source, supply_shards
from ..job import Prepared, calibration_needs, in_all_ranks
from ..machine import resident
from ..options import CalibrationTexts, Recipe, Run
from ..patterns import collapse
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.plan import Plan
from ..result import Reporter
from ..streaming.memory import MemoryStep, calibration_steps, gptq_steps, memory_left
from ..streaming.session import BUDGET, ShardProvider, hidden_bytes, work_as_shards_arrive
from ..weights.reading import Reader
from ..weights.statistics import Calibration
from ..weights.weight import WeightTransforms
from .run import calibration_path, find_calibration, read_texts
from .smoothing import (
    MappingTransforms,
    SmoothingMapping,
    apply_smoothing,
    awq_scale,
    combine_transforms,
    mapping_shards,
    search_memory,
    smoothquant_scale,
    usable_mappings,
    with_importance,
)

if TYPE_CHECKING:
    from ..data.corpus import Corpus

# Chooses the scale of a mapping, float32 [channels], or says why there is none; called from several threads.
ChooseScale = Callable[[SmoothingMapping, Reader], Floats | str]


def texts_steps(
    run: Run, length: int, source: Source, checkpoint: Checkpoint, plan: Plan, target: Path
) -> list[MemoryStep]:
    """Estimate the memory of each step of the calibration that a plan needs.

    Args:
        run: options of the run; with `overwrite` an earlier calibration file is not reused.
        length: tokens of each text.
        source: where the model comes from: a directory or a repository on the Hub.
        checkpoint: the model's config, files and headers.
        plan: the plan; what it lacks (statistics, rounded layers) says which steps there are.
        target: the output directory.

    Returns:
        Name and bytes of memory of each step, in order; empty if the plan lacks nothing.
    """
    steps: list[MemoryStep] = []
    if "activations" in plan.lacks:
        reused = calibration_path(source, target).exists() and not run.overwrite
        steps += [MemoryStep("reading texts", 0)] if reused else calibration_steps(checkpoint, length)
    if "Hessians" in plan.lacks:
        steps += gptq_steps(checkpoint, plan, length)
    if "smoothing" in plan.lacks:
        steps.append(MemoryStep("choosing smoothing scales", search_memory(plan), models=bool(steps)))
    return steps


def run_texts(
    prepared: Prepared, recipe: Recipe, texts: CalibrationTexts, options: PlanOptions, ranks: Ranks, reporter: Reporter
) -> tuple[PlanOptions, Corpus | None]:
    """Run texts through the model to find what a plan lacks.

    Args:
        prepared: options of the run, source checkpoint, plan and output directory.
        recipe: options that say how the output is quantized.
        texts: options that say which texts, how many and how long.
        options: the options that the plan was made with.
        ranks: the processes of this run, all of which call this together.
        reporter: receives notes and progress.

    Returns:
        The options with what the plan lacked (calibration, description of GPTQ's texts, transforms), to make the final
        plan with; and the texts for GPTQ, None unless the plan lacks Hessians. They are the same in all ranks.

    Raises:
        OutputError: the output, hidden states or shards cannot be written, or another rank has failed.
        SourceError: the model, a weight or a text cannot be read, or ranks read different ones.
        PlanError: SmoothQuant was requested for a quantized source.
        UsageError: the file beside the output is no calibration, or one of another model or with other texts; options
            of the texts do not make sense; or memory or the disk for streamed shards is too small.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    lacks = prepared.plan.lacks
    _require_room(prepared, texts, ranks)
    corpus = None
    if "activations" in lacks:
        options = replace(options, calibration=find_calibration(prepared, texts, ranks, reporter))
    if "Hessians" in lacks:
        corpus = read_texts(prepared.source, prepared.checkpoint, texts, ranks)
        options = replace(options, gptq=corpus.account)
    if "smoothing" in lacks:
        assert options.calibration is not None
        transforms = choose_transforms(prepared, recipe, options.calibration, ranks, reporter)
        options = replace(options, transforms=transforms)
    return options, corpus


def texts_needs(prepared: Prepared, texts: CalibrationTexts, ranks: Ranks) -> list[Needs]:
    """Return the disk space that a run needs whose plan lacks something; see `calibration_needs`.

    Args:
        prepared: options of the run, source checkpoint, plan and output directory.
        texts: options that say how many texts, and how long.
        ranks: the processes of this run.

    Raises:
        OutputError: openquant did not write the output directory, or with other options, or it cannot be written to.
    """
    run, checkpoint, plan = prepared.run, prepared.checkpoint, prepared.plan
    hidden = hidden_bytes(checkpoint, texts.samples * texts.length)
    steps = texts_steps(run, texts.length, prepared.source, checkpoint, plan, prepared.target)
    free = memory_left(run.max_memory, steps, refuse=False)
    # The pass checkpoint has all hidden states; those that do not fit in memory are also in the offload file.
    in_memory = BUDGET if free is None else free // 2
    if hidden > in_memory:
        return calibration_needs(prepared, ranks, 2 * hidden)
    return calibration_needs(prepared, ranks, hidden)


def _require_room(prepared: Prepared, texts: CalibrationTexts, ranks: Ranks) -> None:
    """Refuse an output that does not fit on its disk, before texts run for hours."""

    def require() -> None:
        for needs in texts_needs(prepared, texts, ranks) if ranks.first else []:
            require_space(needs)

    in_all_ranks(ranks, require)


def choose_transforms(
    prepared: Prepared, recipe: Recipe, calibration: Calibration, ranks: Ranks, reporter: Reporter
) -> WeightTransforms:
    """Choose AWQ's or SmoothQuant's scales for a model; for AWQ also how the search for scales weighs errors.

    Args:
        prepared: options of the run, source checkpoint, output directory, and a plan without smoothing.
        recipe: options of the output, with `awq` or `smooth`.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.
        ranks: the processes of this run, all of which call this together and get the same.
        reporter: receives notes and progress.

    Returns:
        Factors of rows and columns and importance of columns of weights by full module name, new bytes of norms and
        biases by tensor name, and notes.

    Raises:
        PlanError: SmoothQuant was requested for a quantized source.
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
        OutputError: shards cannot be written, or another rank has failed.
        UsageError: the disk has too little space for shards that are streamed.
    """
    plan = prepared.plan
    if recipe.awq:
        choose: ChooseScale = partial(awq_scale, plan=plan, calibration=calibration)
        return with_importance(smoothing_transforms(prepared, "AWQ", choose, ranks, reporter), plan, calibration)

    exponent = recipe.smooth
    assert exponent is not None
    if summary.has_quantized_source(plan):
        raise PlanError(
            f"{prepared.source.name} is quantized already: smoothing cannot undo the errors of its rounding",
            "start from the unquantized model, or leave --smooth out",
        )
    choose = partial(smoothquant_scale, plan=plan, calibration=calibration, exponent=exponent)
    return smoothing_transforms(prepared, f"SmoothQuant {exponent:g}", choose, ranks, reporter)


def smoothing_transforms(
    prepared: Prepared, name: str, choose: ChooseScale, ranks: Ranks, reporter: Reporter
) -> WeightTransforms:
    """Choose a scale for each usable smoothing mapping of a plan, in threads.

    Args:
        prepared: options of the run, source checkpoint, output directory, and a plan without smoothing.
        name: name of the method, for notes and the model card, such as "SmoothQuant 0.5".
        choose: called with a mapping and a reader of the source, from several threads at once; returns the
            mapping's scale, float32 [channels], or a text that says why there is none.
        ranks: the processes of this run, all of which call this together and get the same.
        reporter: receives notes and progress.

    Returns:
        Factors of rows and columns of weights by full module name, new bytes of norms and biases by tensor name, notes
        that say which mappings are not used and why, and a title for the model card, "" if none is used.

    Raises:
        SourceError: a shard cannot be downloaded, or a norm or bias cannot be read.
        OutputError: shards cannot be written, or another rank has failed.
        UsageError: the disk has too little space for shards that are streamed.
        BaseException: what `choose` raises.
    """
    plan = prepared.plan
    usable = usable_mappings(plan)
    if usable.mappings:
        reporter.on_note(f"{name}: choosing scales for {len(usable.mappings)} smoothing mappings")

    outcomes = _ScaleSearch(prepared, usable.mappings, choose, reporter).run(ranks)
    parts = [outcome for outcome in outcomes if isinstance(outcome, MappingTransforms)]

    unused = {reason: list(smooth_layers) for reason, smooth_layers in usable.unused.items()}
    for mapping, outcome in zip(usable.mappings, outcomes, strict=True):
        if isinstance(outcome, str):
            unused.setdefault(outcome, []).append(mapping.smooth_layer)

    total = len(outcomes) + sum(map(len, usable.unused.values()))
    if not total:
        notes = [f"{name} changes nothing: no smoothing mappings of {plan.model.name} are known"]
    else:
        notes = [f"{name}: inputs are divided by powers of two in {len(parts)} of {total} smoothing mappings"]
    notes += [f"no smoothing at {', '.join(collapse(layers))}: {reason}" for reason, layers in unused.items()]

    transforms = combine_transforms(parts, plan)
    title = f"{name}: inputs divided by powers of two in {len(parts)} norms and projections" if parts else ""
    return WeightTransforms(transforms.weights, transforms.tensors, tuple(notes), title)


class _ScaleSearch:
    """One call of `smoothing_transforms`: what was chosen so far, for each mapping by its number."""

    def __init__(
        self, prepared: Prepared, mappings: Sequence[SmoothingMapping], choose: ChooseScale, reporter: Reporter
    ) -> None:
        self.prepared = prepared
        self.mappings = mappings
        self.choose = choose
        self.reporter = reporter
        self.outcomes: dict[int, MappingTransforms | str] = {}

        layers = prepared.plan.layers
        self.layer_counts = [
            sum(name in layers for name in (mapping.smooth_layer, *mapping.balance_layers)) for mapping in mappings
        ]
        self.done = 0
        self.lock = threading.Lock()

    def run(self, ranks: Ranks) -> list[MappingTransforms | str]:
        """For each mapping what it changes, or why it is not used."""
        run = self.prepared.run
        source = self.prepared.source
        directory = self.prepared.target.absolute().parent

        tasks = [(str(number), number) for number in range(len(self.mappings))]
        needs: dict[str, list[str]] = {}
        if source.remote:
            needs = {what: mapping_shards(self.mappings[number], self.prepared.plan) for what, number in tasks}
        if needs and run.stream:
            directory.mkdir(parents=True, exist_ok=True)

        with supply_shards([(source, needs)], run.stream, directory, times=ranks.local_size) as [supply]:
            begin = partial(self._begin, supply)
            work_as_shards_arrive(tasks, supply, begin, self._workers(), threading.Event(), ranks)
        return [self.outcomes[number] for _, number in tasks]

    def _workers(self) -> int:
        """How many threads memory allows."""
        workers, limit = self.prepared.workers, self.prepared.run.max_memory
        per_thread = search_memory(self.prepared.plan)
        if limit is None or not per_thread:
            return workers
        return max(1, min(workers, (limit - resident()) // per_thread))

    def _begin(self, supply: ShardProvider) -> Callable[[int], None]:
        return partial(self._choose_scale, Reader(self.prepared.plan.decoded.where, supply.path))

    def _choose_scale(self, reader: Reader, number: int) -> None:
        plan = self.prepared.plan
        mapping = self.mappings[number]
        scale = self.choose(mapping, reader)
        self.outcomes[number] = scale if isinstance(scale, str) else apply_smoothing(mapping, scale, plan, reader)
        with self.lock:
            self.done += self.layer_counts[number]
            self.reporter.on_progress(self.done, sum(self.layer_counts), "layers")

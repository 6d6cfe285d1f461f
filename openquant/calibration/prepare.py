"""Calibration in a run of compress(): finds what the plan lacks, so that the plan can be made again with it.

Input statistics come from running texts through the model. The scales of SmoothQuant and AWQ come from these and from
the weights. GPTQ's Hessians come later, while layers are rounded (run.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..files.destination import Needs, require_space
from ..formats.numbers import Floats
from ..hub.source import supply_shards
from ..job import Job, Opened, calibration_needs
from ..machine import resident
from ..options import CalibrationTexts, Recipe
from ..patterns import collapse
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.plan import Plan
from ..recipes import Request
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


def texts_steps(opened: Opened, plan: Plan, length: int) -> list[MemoryStep]:
    """Estimate the memory of each step of the calibration that a plan needs.

    Args:
        opened: the opened source.
        plan: the plan; what it lacks (statistics, rounded layers) says which steps there are.
        length: tokens of each text.

    Returns:
        Name and bytes of memory of each step, in order; empty if the plan lacks nothing.
    """
    steps: list[MemoryStep] = []
    if "activations" in plan.lacks:
        path = calibration_path(opened.source, opened.output_directory(summary.suffix(plan)))
        if path.exists() and not opened.run.overwrite:
            steps.append(MemoryStep("reading texts", 0))
        else:
            steps += calibration_steps(opened.checkpoint, length)
    if "Hessians" in plan.lacks:
        steps += gptq_steps(opened.checkpoint, plan, length)
    if "smoothing" in plan.lacks:
        steps.append(MemoryStep("choosing smoothing scales", search_memory(plan), models=bool(steps)))
    return steps


def run_texts(job: Job, request: Request) -> tuple[PlanOptions, Corpus | None]:
    """Run texts through the model to find what a plan lacks. All ranks call this together.

    Args:
        job: the run.
        request: the options that the plan was made with.

    Returns:
        The plan's options with what the plan lacked (calibration, description of GPTQ's texts, transforms), to make
        the final plan with; and the texts for GPTQ, None unless the plan lacks Hessians. All ranks get the same.

    Raises:
        OutputError: the output, hidden states or shards cannot be written, or another rank has failed.
        SourceError: the model, a weight or a text cannot be read, or ranks read different ones.
        PlanError: SmoothQuant was requested for a quantized source.
        UsageError: the file beside the output is no calibration, or one of another model or with other texts; options
            of the texts do not make sense; or memory or the disk for streamed shards is too small.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    lacks = job.plan.lacks
    options = request.options
    corpus = None

    _require_room(job, request.texts)
    if "activations" in lacks:
        options = replace(options, calibration=find_calibration(job, request.texts))
    if "Hessians" in lacks:
        corpus = read_texts(job.source, job.checkpoint, request.texts, job.ranks)
        options = replace(options, gptq=corpus.account)
    if "smoothing" in lacks:
        assert options.calibration is not None
        options = replace(options, transforms=choose_transforms(job, request.recipe, options.calibration))
    return options, corpus


def texts_needs(job: Job, texts: CalibrationTexts) -> list[Needs]:
    """Return the disk space that a run needs whose plan lacks something; see `calibration_needs`.

    Args:
        job: the run.
        texts: options that say how many texts, and how long.

    Raises:
        OutputError: openquant did not write the output directory, or with other options, or it cannot be written to.
    """
    hidden = hidden_bytes(job.checkpoint, texts.samples * texts.length)
    free = memory_left(job.run.max_memory, texts_steps(job, job.plan, texts.length), refuse=False)
    # The pass checkpoint has all hidden states; those that do not fit in memory are also in the offload file.
    in_memory = BUDGET if free is None else free // 2
    if hidden > in_memory:
        return calibration_needs(job, 2 * hidden)
    return calibration_needs(job, hidden)


def _require_room(job: Job, texts: CalibrationTexts) -> None:
    """Refuse an output that does not fit on its disk, before texts run for hours."""

    def require() -> None:
        for needs in texts_needs(job, texts):
            require_space(needs)

    job.ranks.first_does(require)


def choose_transforms(job: Job, recipe: Recipe, calibration: Calibration) -> WeightTransforms:
    """Choose AWQ's or SmoothQuant's scales for a model; for AWQ also how the search for scales weighs errors.

    All ranks call this together and get the same.

    Args:
        job: the run, with a plan without smoothing.
        recipe: options of the output, with `awq` or `smooth`.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.

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
    plan = job.plan
    if recipe.awq:
        choose: ChooseScale = partial(awq_scale, plan=plan, calibration=calibration)
        return with_importance(smoothing_transforms(job, "AWQ", choose), plan, calibration)

    exponent = recipe.smooth
    assert exponent is not None
    if summary.has_quantized_source(plan):
        raise PlanError(
            f"{job.source.name} is quantized already: smoothing cannot undo the errors of its rounding",
            "start from the unquantized model, or leave --smooth out",
        )
    choose = partial(smoothquant_scale, plan=plan, calibration=calibration, exponent=exponent)
    return smoothing_transforms(job, f"SmoothQuant {exponent:g}", choose)


def smoothing_transforms(job: Job, name: str, choose: ChooseScale) -> WeightTransforms:
    """Choose a scale for each usable smoothing mapping of a plan, in threads.

    All ranks call this together and get the same.

    Args:
        job: the run, with a plan without smoothing.
        name: name of the method, for notes and the model card, such as "SmoothQuant 0.5".
        choose: called with a mapping and a reader of the source, from several threads at once; returns the
            mapping's scale, float32 [channels], or a text that says why there is none.

    Returns:
        Factors of rows and columns of weights by full module name, new bytes of norms and biases by tensor name, notes
        that say which mappings are not used and why, and a title for the model card, "" if none is used.

    Raises:
        SourceError: a shard cannot be downloaded, or a norm or bias cannot be read.
        OutputError: shards cannot be written, or another rank has failed.
        UsageError: the disk has too little space for shards that are streamed.
        BaseException: what `choose` raises.
    """
    plan = job.plan
    usable = usable_mappings(plan)
    if usable.mappings:
        job.reporter.on_note(f"{name}: choosing scales for {len(usable.mappings)} smoothing mappings")

    outcomes = _ScaleSearch(job, usable.mappings, choose).run()
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

    def __init__(self, job: Job, mappings: Sequence[SmoothingMapping], choose: ChooseScale) -> None:
        self.job = job
        self.mappings = mappings
        self.choose = choose
        self.outcomes: dict[int, MappingTransforms | str] = {}

        layers = job.plan.layers
        self.layer_counts = [
            sum(name in layers for name in (mapping.smooth_layer, *mapping.balance_layers)) for mapping in mappings
        ]
        self.done = 0
        self.lock = threading.Lock()

    def run(self) -> list[MappingTransforms | str]:
        """For each mapping what it changes, or why it is not used."""
        stream = self.job.run.stream
        ranks = self.job.ranks
        source = self.job.source
        directory = self.job.target.absolute().parent

        tasks = [(str(number), number) for number in range(len(self.mappings))]
        needs: dict[str, list[str]] = {}
        if source.remote:
            needs = {what: mapping_shards(self.mappings[number], self.job.plan) for what, number in tasks}
        if needs and stream:
            directory.mkdir(parents=True, exist_ok=True)

        with supply_shards([(source, needs)], stream, directory, times=ranks.local_size) as [supply]:
            begin = partial(self._begin, supply)
            work_as_shards_arrive(tasks, supply, begin, self._workers(), threading.Event(), ranks)
        return [self.outcomes[number] for _, number in tasks]

    def _workers(self) -> int:
        """How many threads memory allows."""
        workers = self.job.workers
        limit = self.job.run.max_memory
        per_thread = search_memory(self.job.plan)
        if limit is None or not per_thread:
            return workers
        return max(1, min(workers, (limit - resident()) // per_thread))

    def _begin(self, supply: ShardProvider) -> Callable[[int], None]:
        return partial(self._choose_scale, Reader(self.job.plan.decoded.where, supply.path))

    def _choose_scale(self, reader: Reader, number: int) -> None:
        plan = self.job.plan
        mapping = self.mappings[number]
        scale = self.choose(mapping, reader)
        self.outcomes[number] = scale if isinstance(scale, str) else apply_smoothing(mapping, scale, plan, reader)
        with self.lock:
            self.done += self.layer_counts[number]
            self.job.reporter.on_progress(self.done, sum(self.layer_counts), "layers")

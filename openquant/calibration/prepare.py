"""What compress() finds by running texts, where a plan lacks it; the plan is then made again with that.

Statistics of activations come from running the model, scales of SmoothQuant and AWQ from these and the weights. GPTQ's
Hessians come later, as layers are rounded (gptq_run.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..distributed import Ranks, attempt
from ..errors import PlanError
from ..files.atomic import make_directory
from ..files.checkpoint import Checkpoint
from ..formats.numbers import Floats
from ..hub.shards import supply_shards
from ..hub.source import Source
from ..job import Prepared, in_all_ranks, require_output
from ..machine import resident
from ..options import Calibrate, CalibrationTexts, Recipe, Run
from ..patterns import collapse
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.plan import Plan
from ..reporter import Reporter
from ..streaming.forecast import Forecast
from ..streaming.memory import MemoryStep, calibration_steps, gptq_steps, memory_left
from ..streaming.session import BUDGET, hidden_bytes
from ..threads import in_threads
from ..weights.reading import Reader
from ..weights.statistics import SUFFIX, Calibration
from ..weights.transform import WeightTransforms
from .awq import awq_scale, search_memory, with_importance
from .mappings import SmoothingMapping
from .run import agreed_texts, calibration_destination, find_calibration
from .smoothing import (
    MappingTransforms,
    SmoothingPlaces,
    apply_smoothing,
    combine_transforms,
    mapping_shards,
    usable_mappings,
)
from .smoothquant import smoothquant_scale

if TYPE_CHECKING:
    from ..data.corpus import Corpus

# Chooses the scale of a fold, or says why there is none.
Choose = Callable[[SmoothingMapping, Plan, Reader], Floats | str]


def calibration_path(source: Source, output: Path) -> Path:
    """Where a run of compress() has the calibration that it makes: beside the output."""
    return output.parent / f"{source.name}{SUFFIX}"


def texts_steps(
    run: Run, length: int, source: Source, checkpoint: Checkpoint, plan: Plan, target: Path
) -> list[MemoryStep]:
    """List what finding all that a plan lacks takes of memory, step by step.

    Args:
        run: what was asked for.
        length: tokens of each text.
        source: where the model comes from.
        checkpoint: its config, files and headers.
        plan: of it.
        target: the output directory.
    """
    steps: list[MemoryStep] = []
    if "activations" in plan.lacks:
        known = calibration_path(source, target).exists() and not run.overwrite
        steps += [MemoryStep("reading texts", 0)] if known else calibration_steps(checkpoint, length)
    if "Hessians" in plan.lacks:
        steps += gptq_steps(checkpoint, plan, length)
    if "smoothing" in plan.lacks:
        steps.append(MemoryStep("dividing inputs of layers", search_memory(plan), models=bool(steps)))
    return steps


def run_texts(
    prepared: Prepared, recipe: Recipe, texts: CalibrationTexts, options: PlanOptions, ranks: Ranks, reporter: Reporter
) -> tuple[PlanOptions, Corpus | None]:
    """Run texts through the model for what a plan lacks.

    Args:
        prepared: the run, with that plan.
        recipe: what is made.
        texts: which texts.
        options: what the plan was made with.
        ranks: this process among several, each of which finds the same.
        reporter: is told of it.

    Returns:
        The options with what was found, for the plan that is carried out; and the texts by which GPTQ then rounds, if
        it does.

    Raises:
        OutputError: a disk has no room for the output, or for hidden states.
        SourceError: the model, a weight or a text cannot be read.
        PlanError: SmoothQuant is asked for of a quantized source.
        UsageError: there is a calibration of another model, or with other texts.
    """
    lacks = prepared.plan.lacks
    _require_room(prepared, texts, ranks)
    corpus = None
    if "activations" in lacks:
        options = replace(options, calibration=_calibrate(prepared, texts, ranks, reporter))
    if "Hessians" in lacks:
        corpus = agreed_texts(prepared.source, prepared.checkpoint, texts, ranks)
        options = replace(options, gptq=corpus.account)
    if "smoothing" in lacks:
        assert options.calibration is not None
        if recipe.awq:
            transforms = awq_transforms(prepared, options.calibration, ranks, reporter)
        else:
            assert recipe.smooth is not None
            transforms = smoothquant_transforms(prepared, options.calibration, recipe.smooth, ranks, reporter)
        options = replace(options, transforms=transforms)
    return options, corpus


def _require_room(prepared: Prepared, texts: CalibrationTexts, ranks: Ranks) -> None:
    """Refuse an output that its disk will not hold, before texts are run for hours."""
    run, checkpoint, plan = prepared.run, prepared.checkpoint, prepared.plan
    hidden = hidden_bytes(checkpoint, texts.samples * texts.length)
    steps = texts_steps(run, texts.length, prepared.source, checkpoint, plan, prepared.target)
    left = memory_left(run.max_memory, steps, refuse=False)
    # Passes that are kept are there twice while they are written anew, without what waits beside them.
    passing = hidden + (hidden if hidden > (BUDGET if left is None else left // 2) else 0)
    in_all_ranks(ranks, lambda: require_output(prepared, ranks, passing) if ranks.first else None)


def _calibrate(prepared: Prepared, texts: CalibrationTexts, ranks: Ranks, reporter: Reporter) -> Calibration:
    """Find statistics of activations, or read those that an earlier run has found with the same texts."""
    run, source, checkpoint = prepared.run, prepared.source, prepared.checkpoint
    how = Calibrate(
        run.model, stream=run.stream, overwrite=run.overwrite, device=prepared.device, max_memory=run.max_memory
    )
    path, elsewhere = calibration_path(source, prepared.target), "name another output with -o"
    target = calibration_destination(path, "", elsewhere, source, checkpoint, how, texts, (prepared.target,))
    return find_calibration(source, checkpoint, target, how, texts, ranks, reporter)


def smoothquant_transforms(
    prepared: Prepared, calibration: Calibration, exponent: float, ranks: Ranks, reporter: Reporter
) -> WeightTransforms:
    """What SmoothQuant changes about a model.

    Args:
        prepared: the run, with a plan that folds nothing.
        calibration: what goes into the layers.
        exponent: how much of the difficulty goes from activations to weights.
        ranks: this process among several, each of which finds the same.
        reporter: is told of it.

    Raises:
        PlanError: the source is quantized.
        SourceError: a weight cannot be read, or the calibration is not of these layers.
    """
    plan = prepared.plan
    if summary.has_quantized_source(plan):
        raise PlanError(
            f"{prepared.source.name} is quantized already: what its rounding lost no factor brings back",
            "start from the unquantized model, or leave --smooth out",
        )

    def choose(mapping: SmoothingMapping, plan: Plan, reader: Reader) -> Floats | str:
        return smoothquant_scale(mapping, plan, reader, calibration, exponent)

    return smoothing_transforms(prepared, f"SmoothQuant {exponent:g}", choose, ranks, reporter)


def awq_transforms(prepared: Prepared, calibration: Calibration, ranks: Ranks, reporter: Reporter) -> WeightTransforms:
    """What AWQ changes about a model: folds, and what the search for scales weighs errors by.

    Args:
        prepared: the run, with a plan that folds nothing.
        calibration: what goes into the layers.
        ranks: this process among several, each of which finds the same.
        reporter: is told of it.

    Raises:
        SourceError: a weight cannot be read, or the calibration is not of these layers.
    """

    def choose(mapping: SmoothingMapping, plan: Plan, reader: Reader) -> Floats | str:
        return awq_scale(mapping, plan, reader, calibration)

    return with_importance(smoothing_transforms(prepared, "AWQ", choose, ranks, reporter), prepared.plan, calibration)


def smoothing_transforms(
    prepared: Prepared, name: str, choose: Choose, ranks: Ranks, reporter: Reporter
) -> WeightTransforms:
    """What dividing inputs of layers by chosen scales changes about a model, with notes of what was left out, and why.

    Args:
        prepared: the run, with a plan that folds nothing.
        name: of the method, such as "SmoothQuant 0.5".
        choose: chooses each fold's scale; from several threads at once.
        ranks: this process among several.
        reporter: is told of it.
    """
    plan = prepared.plan
    places = usable_mappings(plan)
    if places.mappings:
        reporter.calibrating(f"{name}: by how much inputs are divided is chosen at {len(places.mappings)} places")
    found = _Choosing(prepared, places, choose, ranks, reporter).run()
    parts = [each for each in found if isinstance(each, MappingTransforms)]
    left = {why: list(sources) for why, sources in places.left.items()}
    for mapping, each in zip(places.mappings, found, strict=True):
        if isinstance(each, str):
            left.setdefault(each, []).append(mapping.source)
    known = len(found) + sum(map(len, places.left.values()))
    if not known:
        notes = [f"{name} changes nothing: where inputs of {plan.model.name} can be divided is not known"]
    else:
        notes = [f"{name}: inputs of layers are divided by powers of two at {len(parts)} of {known} places"]
    notes += [f"not folded into {', '.join(collapse(sources))}: {why}" for why, sources in left.items()]
    transforms = combine_transforms(parts, plan)
    title = f"{name}: inputs divided by powers of two in {len(parts)} norms and projections" if parts else ""
    return WeightTransforms(transforms.weights, transforms.tensors, tuple(notes), title)


class _Choosing:
    """One call of `smoothing_transforms`: the folds still to look at, and what was chosen so far."""

    def __init__(
        self, prepared: Prepared, places: SmoothingPlaces, choose: Choose, ranks: Ranks, reporter: Reporter
    ) -> None:
        self.prepared, self.mappings, self.choose, self.ranks = prepared, places.mappings, choose, ranks
        self.reporter = reporter
        self.found: dict[int, MappingTransforms | str] = {}
        layers = prepared.plan.layers
        members = [[layers[name] for name in (each.source, *each.readers) if name in layers] for each in self.mappings]
        self.layers = [len(found) for found in members]
        self.forecast = Forecast(
            {str(number): float(sum(weight.nbytes for weight in found)) for number, found in enumerate(members)}
        )
        self.done = 0
        self.needs = {str(number): mapping_shards(each, prepared.plan) for number, each in enumerate(places.mappings)}
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    def run(self) -> list[MappingTransforms | str]:
        """What was chosen for each fold."""
        run, source = self.prepared.run, self.prepared.source
        with ExitStack() as stack:
            place = self.prepared.target.absolute().parent
            needs = self.needs if source.remote else {}
            if needs and run.stream:
                make_directory(place)
            supplies = supply_shards([(source, needs)], run.stream, place, times=self.ranks.local_size)
            [self.supply] = stack.enter_context(supplies)
            self.tasks = self._tasks()
            in_threads(self._work, self._workers(), self.stopped)
        return [self.found[number] for number in range(len(self.mappings))]

    def _workers(self) -> int:
        """How many threads memory allows."""
        workers, limit = self.prepared.workers, self.prepared.run.max_memory
        each = search_memory(self.prepared.plan)
        return workers if limit is None or not each else max(1, min(workers, (limit - resident()) // each))

    def _tasks(self) -> Iterator[int]:
        for number in range(len(self.mappings)):
            self.supply.wait_for(str(number), lambda: self.stopped.is_set() or attempt(self.ranks.check)[1] is not None)
            self.ranks.check()
            if self.stopped.is_set():
                return
            yield number

    def _work(self) -> None:
        plan = self.prepared.plan
        reader = Reader(plan.seen.where, self.supply.path, lambda nbytes: np.empty(nbytes, np.uint8))
        while True:
            with self.lock:
                number = next(self.tasks, None)
            if number is None:
                return
            mapping = self.mappings[number]
            chosen = self.choose(mapping, plan, reader)
            self.found[number] = chosen if isinstance(chosen, str) else apply_smoothing(mapping, chosen, plan, reader)
            self.supply.finished(str(number))
            with self.lock:
                self.done += self.layers[number]
                self.forecast.done(str(number))
                self.reporter.calibrated(self.done, sum(self.layers), "layers")
                if (left := self.forecast.remaining()) is not None:
                    self.reporter.remaining(left)

"""Between planning and writing: a plan that needs a calibration gets it; what that changes about weights is decided.

That takes reading them. The plan is then made again, and carries it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..distributed import Ranks, attempt
from ..errors import PlanError, UsageError
from ..files.atomic import make_directory
from ..files.checkpoint import Checkpoint
from ..files.fingerprint import Fingerprint
from ..formats.numbers import Floats
from ..hub.shards import supply_shards
from ..hub.source import Source
from ..job import Prepared, require_output
from ..machine import resident
from ..options import Calibrate, CalibrationTexts, Recipe, Run
from ..patterns import collapse
from ..plan.input_scales import UncalibratedError
from ..plan.plan import Plan
from ..reporter import Reporter
from ..streaming.forecast import Forecast
from ..streaming.memory import MemoryStep, calibration_steps, gptq_steps, memory_left
from ..streaming.session import BUDGET, hidden_bytes
from ..threads import in_threads
from ..weights.find import decoded_view
from ..weights.reading import Reader
from ..weights.statistics import SUFFIX, Calibration, placeholder_calibration, read_calibration
from ..weights.transform import WeightTransforms
from .awq import awq_scale, search_memory, with_importance
from .gptq_run import Gptq
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

_UNDECIDED = "which inputs are divided, and by how much, is decided once the weights are read: not in a dry run"

# Chooses the scale of a fold, or says why there is none.
Choose = Callable[[SmoothingMapping, Plan, Reader], Floats | str]
# Decides what a calibration changes about weights.
Tune = Callable[[Prepared, Calibration, Ranks, Reporter], WeightTransforms]


def _tuning(recipe: Recipe) -> Tune | None:
    """What a calibration changes about weights; None if nothing."""
    exponent = recipe.smooth
    if recipe.awq:
        return awq_transforms
    if exponent is None:
        return None
    return lambda prepared, calibration, ranks, reporter: smoothquant_transforms(
        prepared, calibration, exponent, ranks, reporter
    )


def calibration_path(source: Source, output: Path) -> Path:
    """Where a run of compress() has the calibration that it makes: beside the output."""
    return output.parent / f"{source.name}{SUFFIX}"


class Calibrated:
    """Makes the plans of a run of compress(), which may need to know how large activations are.

    Args:
        run: what was asked for.
        recipe: what is made.
        texts: for a calibration.
        plan: makes a plan with one, or with none, with what that changes about weights, and with the texts by which
            GPTQ rounds, if it does.
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        texts: CalibrationTexts,
        plan: Callable[
            [Source, Checkpoint, Calibration | None, WeightTransforms | None, Mapping[str, Any] | None], Plan
        ],
    ) -> None:
        self._run, self._recipe, self._texts, self._plan = run, recipe, texts, plan
        tune = self._tune = _tuning(recipe)
        self._wanted = recipe.calibrate or (tune is not None and recipe.calibration is None)
        self._seen = read_calibration(Path(recipe.calibration)) if recipe.calibration is not None else None
        self._tunings = None if tune is None else WeightTransforms(notes=(_UNDECIDED,))
        self._tuned = tune is None
        # What GPTQ reads, as soon as that is known.
        self._corpus: Corpus | None = None

    def make(self, source: Source, checkpoint: Checkpoint) -> Plan:
        """The plan; where a calibration is still to be made, as it will be but for the scales themselves."""
        seen = self._seen
        fingerprint = Fingerprint(checkpoint, source.remote, source.identity)
        if seen is not None and not fingerprint.matches(seen.model, seen.stamp):
            raise UsageError(
                f"{self._recipe.calibration} is a calibration of another model than {self._run.model}",
                "make one of this model: openquant calibrate MODEL -o FILE",
            )
        if seen is not None or not self._wanted:
            try:
                plan = self._plan(source, checkpoint, seen, self._tunings, self._read)
            except UncalibratedError:
                self._wanted = True
            else:
                if not self._wanted and not self._recipe.gptq and self._texts != CalibrationTexts():
                    raise UsageError(
                        "texts are given, and nothing is calibrated", "give --calibrate too, or leave them out"
                    )
                return plan
        known = placeholder_calibration(decoded_view(checkpoint)[0].tensors, self._asked)
        return self._plan(source, checkpoint, known, self._tunings, self._read)

    @property
    def _asked(self) -> dict[str, Any]:
        return {"documents": self._texts.samples, "length": self._texts.length}

    @property
    def _read(self) -> Mapping[str, Any] | None:
        """The texts by which GPTQ rounds; how many are asked for, before they are read."""
        if not self._recipe.gptq:
            return None
        return self._asked if self._corpus is None else self._corpus.account

    def rounding(self) -> Gptq | None:
        """What rounds layers before they are converted."""
        return None if self._corpus is None else Gptq(self._corpus)

    def steps(self, source: Source, checkpoint: Checkpoint, plan: Plan, target: Path) -> list[MemoryStep]:
        """The steps before the conversion, with the memory that each needs."""
        length, found = self._texts.length, []
        if self._seen is None and self._wanted:
            known = calibration_path(source, target).exists() and not self._run.overwrite
            found += [MemoryStep("reading texts", 0)] if known else calibration_steps(checkpoint, length)
        if self._recipe.gptq:
            found += gptq_steps(checkpoint, plan, length)
        if self._tune is not None:
            found.append(MemoryStep("dividing inputs of layers", search_memory(plan), models=bool(found)))
        return found

    def calibrate(self, prepared: Prepared, ranks: Ranks, reporter: Reporter) -> bool:
        """Run the texts and decide what they change, if a plan needs it; whether that is to be made again."""
        made = self._seen is None and self._wanted
        if made or self._recipe.gptq or not self._tuned:
            tokens = self._texts.samples * self._texts.length
            hidden = hidden_bytes(prepared.checkpoint, tokens)
            # Passes that are kept are there twice while they are written anew, without what waits beside them.
            left = memory_left(
                self._run.max_memory,
                self.steps(prepared.source, prepared.checkpoint, prepared.plan, prepared.target),
                refuse=False,
            )
            passing = hidden + (hidden if hidden > (BUDGET if left is None else left // 2) else 0)
            _, error = attempt(lambda: require_output(prepared, ranks, passing) if ranks.first else None)
            ranks.agree(error)
        if made:
            self._find(prepared, ranks, reporter)
        if self._recipe.gptq and self._corpus is None:
            self._corpus = agreed_texts(prepared.source, prepared.checkpoint, self._texts, ranks)
            made = True
        if self._tune is None or self._tuned:
            return made
        assert self._seen is not None
        self._tunings, self._tuned = self._tune(prepared, self._seen, ranks, reporter), True
        return True

    def _find(self, prepared: Prepared, ranks: Ranks, reporter: Reporter) -> None:
        """Run the texts."""
        run, source, checkpoint = self._run, prepared.source, prepared.checkpoint
        how = Calibrate(
            run.model,
            stream=run.stream,
            overwrite=run.overwrite,
            device=prepared.device,
            max_memory=run.max_memory,
        )
        path, elsewhere = calibration_path(source, prepared.target), "name another output with -o"
        target = calibration_destination(path, "", elsewhere, source, checkpoint, how, self._texts, (prepared.target,))
        self._seen = find_calibration(source, checkpoint, target, how, self._texts, ranks, reporter)


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
    if plan.decodes:
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

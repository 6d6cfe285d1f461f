"""How long scores and checks will take here: products, rounded weights and logits are counted, and short trials timed.

trials = Trials(model, units, loops)
trials.seconds(count_work(model, units, documents=3, length=96, mixtures=mixtures, changes=changes))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ..convert.devices import loops
from ..evaluation.kl import ModelNames, compare_logits
from ..files.checkpoint import Checkpoint
from ..formats.kernels import Bits, Loops, from_float32
from ..formats.schemes import Scheme
from ..streaming import transformers_internals
from ..streaming.forecast import spoken
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
from ..streaming.progress import products
from ..streaming.torch_threads import limited_threads, threads_for
from ..weights.reading import Reader
from ..weights.weight import Weight
from .rounding import rounded_rows
from .scores import places_of, repeats_source
from .units import UNQUANTIZED, Mixture, Unit

# Most weights of a trial's product and rounding, and most tokens of its vocabulary.
MULTIPLIED, ROUNDED, VOCABULARY = 1 << 24, 1 << 20, 1 << 14
# Seconds of a call of a layer besides its products: Python, norms and rotations of 96 tokens.
CALL = 0.001


@dataclass(frozen=True)
class Work:
    """What passes over texts compute.

    Attributes:
        products: products of a weight and a token, by the number of tokens that a weight is multiplied with at once.
        rounded: weights that are rounded, by scheme.
        logits: logits that are compared with the source's.
        calls: calls of a layer.
    """

    products: Mapping[int, float]
    rounded: Mapping[str, float]
    logits: float
    calls: float

    def times(self, count: float) -> Work:
        """The same work so many times."""
        return Work(
            {at_once: count * number for at_once, number in self.products.items()},
            {name: count * number for name, number in self.rounded.items()},
            count * self.logits,
            count * self.calls,
        )


def count_work(
    model: StreamedModel,
    units: Sequence[Unit],
    documents: int,
    length: int,
    mixtures: Sequence[Mixture],
    changes: Mapping[int, Sequence[str]] | None = None,
) -> Work:
    """Count what `measure_mixtures` computes.

    Args:
        model: the source's model; only shapes are used.
        units: its units.
        documents: the number of texts.
        length: tokens of each.
        mixtures: the choice of each unit, by its number.
        changes: units whose layer also runs with each of these choices.
    """
    changes = changes or {}
    places, tokens = places_of(model, units), documents * length
    order = {name: number for number, name in enumerate(model.units)}
    repeats = repeats_source(model)
    # The number of the first layer that each pass computes; its own is computed for its change, if that is measured.
    first = [0, *(_first(mixture, order, places, changes) if repeats else 0 for mixture in mixtures)]
    counts: dict[int, float] = {}
    calls = 0.0
    for layer in model.layers:
        runs = sum(number <= order[layer] for number in first)
        runs += sum(len(names) for number, names in changes.items() if places[number] == layer)
        calls += runs * documents
        for at_once, number in products(model, layer, length).items():
            counts[at_once] = counts.get(at_once, 0.0) + runs * tokens * number
    head = transformers_internals.output_head(model.model)
    logits = 0.0
    if head is not None:
        vocabulary, width = head.weight.shape  # type: ignore[misc]
        counts[length] = counts.get(length, 0.0) + float((1 + len(mixtures)) * tokens * vocabulary * width)
        logits = float(len(mixtures) * tokens * vocabulary)
    in_passes = {choice for mixture in mixtures for choice in mixture.items() if choice[1] != UNQUANTIZED}
    in_changes = {(number, name) for number, names in changes.items() for name in names}
    chosen = [*in_changes, *(in_passes - in_changes if repeats else in_passes)]
    rounded: dict[str, float] = {}
    for number, name in chosen:
        rounded[name] = rounded.get(name, 0.0) + units[number].elements
    return Work(counts, rounded, logits, calls)


def _first(
    mixture: Mixture, order: Mapping[str, int], places: Sequence[str], changes: Mapping[int, Sequence[str]]
) -> int:
    """Number of the first layer that a mixture's pass computes. Where its change is measured, its output is too."""
    numbers = [number for number, name in mixture.items() if name != UNQUANTIZED]
    return min((order[places[number]] + (number in changes) for number in numbers), default=len(order))


def count_calibration(model: StreamedModel, documents: int, length: int) -> Work:
    """Count what GPTQ computes: texts through all layers, and as much again for Hessians and rounding."""
    counts: dict[int, float] = {}
    for layer in model.layers:
        for at_once, number in products(model, layer, length).items():
            counts[at_once] = counts.get(at_once, 0.0) + 2.0 * documents * length * number
    return Work(counts, {}, 0.0, documents * float(len(model.layers)))


def gptq_forecast(checkpoint: Checkpoint, device: str, documents: int, length: int) -> str:
    """Say how long GPTQ will take here.

    Args:
        checkpoint: the opened source.
        device: where the model runs, "cpu" or "cuda:0".
        documents: the number of texts.
        length: tokens of each.

    Returns:
        "GPTQ: about 5 minutes, without reading the model from disk (1.2e+13 products)".

    Raises:
        SourceError: transformers cannot build the model.
    """
    model = StreamedModel(checkpoint, device=device)
    work = count_calibration(model, documents, length)
    seconds = Trials(model, (), loops(False)).seconds(work)
    return (
        f"GPTQ: about {spoken(seconds)}, without reading the model from disk "
        f"({sum(work.products.values()):.2g} products)"
    )


class Trials:
    """Times small parts of the work on this machine.

    Args:
        model: the source's model; only shapes are used.
        units: its units, whose schemes are tried.
        loops: kernels that choose scales.
    """

    def __init__(self, model: StreamedModel, units: Sequence[Unit], loops: Loops) -> None:
        self.model, self.units, self.loops = model, units, loops
        self.largest = max(
            (sum(weight.numel() for weight in model.units[layer].parameters()) for layer in model.layers), default=1
        )
        self.width = int(model.model.get_input_embeddings().weight.shape[1])
        self._timed: dict[object, float] = {}

    def seconds(self, work: Work) -> float:
        """Estimate the seconds that work takes, of which nothing is read from disk or downloaded."""
        return (
            sum(count * self._once(at_once, self._per_product, at_once) for at_once, count in work.products.items())
            + sum(count * self._once(name, self._per_weight, name) for name, count in work.rounded.items())
            + (work.logits * self._once("logits", self._per_logit) if work.logits else 0.0)
            + work.calls * CALL
        )

    def _once(self, key: object, measured: Callable[..., float], *args: object) -> float:
        if key not in self._timed:
            self._timed[key] = measured(*args)
        return self._timed[key]

    def _per_product(self, tokens: int) -> float:
        model = self.model
        rows = max(1, min(MULTIPLIED, self.largest) // self.width)
        weight = torch.ones(rows, self.width, dtype=model.dtype, device=model.device)
        states = torch.ones(tokens, self.width, dtype=model.dtype, device=model.device)

        def multiply() -> None:
            # Reading a number waits for the device.
            float(functional.linear(states, weight)[0, 0])

        with torch.inference_mode(), limited_threads(threads_for(model, tokens)), products_in_float32(model.device):
            return _seconds(multiply) / (tokens * rows * self.width)

    def _per_weight(self, name: str) -> float:
        weight, scheme = next(
            (unit.weights[module], scheme)
            for unit in self.units
            if name in unit.choices
            for module, scheme in unit.choices[name].schemes.items()
            if scheme is not None
        )
        cols = weight.shape[1]
        height = scheme.format.height
        rows = max(1, min(ROUNDED, weight.shape[0] * cols) // cols // height) * height
        noise = np.random.default_rng(0).standard_normal((rows, cols), np.float32)
        reader = _Noise(from_float32(noise, weight.dtype), self.loops)
        return _seconds(lambda: _round(weight, scheme, np.abs(noise).max().reshape(1, 1), reader)) / noise.size

    def _per_logit(self) -> float:
        head = transformers_internals.output_head(self.model.model)
        assert head is not None
        vocabulary = min(VOCABULARY, len(head.weight))  # type: ignore[arg-type]
        logits = torch.ones(64, vocabulary, dtype=self.model.dtype, device=self.model.device)
        ids, names = torch.zeros(64, dtype=torch.int64), ModelNames("the source", "a mixture")
        with torch.inference_mode():
            return _seconds(lambda: compare_logits(logits, logits, ids, "", "", names)) / logits.numel()


class _Noise(Reader):
    """Gives random weights in place of stored ones."""

    def __init__(self, bits: Bits, loops: Loops) -> None:
        self.bits, self.loops, self.where = bits, loops, {}

    def rows(self, weight: Weight, multiple: int) -> Iterator[Bits]:
        del weight, multiple
        yield self.bits


def _round(weight: Weight, scheme: Scheme, absmax: np.ndarray, reader: Reader) -> None:
    for _ in rounded_rows(weight, scheme, absmax, reader):
        pass


def _seconds(work: Callable[[], object]) -> float:
    """Time work the second time, as the first may be slower."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

"""SmoothQuant: factors by which inputs of layers are divided, so that rounding them to INT8 loses less.

A channel's factor is max|x|^a / max|w|^(1 - a), x what goes into the layers, w the columns that read it (Xiao et al.,
SmoothQuant, equation 4), rounded to a power of two. Inputs are rounded by tokens: a few that are far larger than all
others leave these a coarse grid.

    found = smooth(folding, plan, reader, calibration, 0.5)     # float32 [channels], or why there is none
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..formats.kernels import absmax, to_float32
from ..formats.numbers import Floats
from ..plan.plan import Plan
from ..weights.reading import Reader
from ..weights.statistics import Calibration, InputStatistics
from ..weights.transform import WeightTransform
from ..weights.weight import Weight
from .mappings import SmoothingMapping
from .smoothing import nearest_powers_of_two, statistics_of, without_zero_rows


class _Layer(NamedTuple):
    """One reader of a fold.

    Attributes:
        weight: its weight.
        inputs: what the calibration has seen of it.
        largest: float32 [in], the largest magnitude of each column.
        energy: float64 [in], the sum of squares of each column.
        steps: the sum of squares of the largest magnitude of each row.
    """

    weight: Weight
    inputs: InputStatistics
    largest: Floats
    energy: np.ndarray[tuple[int], np.dtype[np.float64]]
    steps: float

    def error(self, by: Floats, steps: float) -> float:
        """An estimate of the squared error of the layer's outputs for a token, times 12 and 127 squared.

        Each weight is off by up to half a step of its row, the largest weight of it over 127; each input by up to half
        a step of its token, taken to be the largest of all inputs over 127.

        Args:
            by: what columns are multiplied by, and inputs divided, [in].
            steps: as above, of the columns multiplied so.
        """
        assert self.inputs.square is not None
        squares = np.square(by, dtype=np.float64)
        largest = float((self.inputs.absmax / by).max())
        return steps * float((self.inputs.square / squares).sum()) + largest**2 * float((self.energy * squares).sum())


def smoothquant_scale(
    mapping: SmoothingMapping, plan: Plan, reader: Reader, calibration: Calibration, exponent: float
) -> Floats | str:
    """The scale of a fold, float32 [channels] of powers of two; why there is none, for a note, where there is not.

    Args:
        mapping: where inputs are divided.
        plan: what becomes of the layers.
        reader: reads the source.
        calibration: what goes into the layers.
        exponent: how much of the difficulty goes from activations to weights, 0 to 1.

    Raises:
        SourceError: a weight cannot be read, or the calibration is not of these layers.
    """
    layers = []
    for module in mapping.readers:
        # What stays unquantized, such as a router, loses nothing.
        if (weight := plan.layers.get(module)) is None:
            continue
        inputs = statistics_of(weight, calibration)
        scheme = plan.decisions.of(module).scheme
        if scheme is None or scheme.name != "int8":
            return "a layer is stored in another scheme"
        if inputs is None:
            return "the calibration has seen nothing of a layer"
        layers.append(_layer(weight, inputs, reader))
    if not layers:
        return "no layer that reads them is quantized"
    inputs_most = mapping.largest(np.max([layer.inputs.absmax for layer in layers], axis=0))
    weights_most = mapping.largest(np.max([layer.largest for layer in layers], axis=0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ideal = inputs_most**exponent / weights_most ** (1 - exponent)
    ideal[(inputs_most == 0) | (weights_most == 0)] = 0
    scale = without_zero_rows(mapping, nearest_powers_of_two(ideal), plan, reader)
    if (scale == 1).all():
        return "all their factors would be 1"
    columns = mapping.columns(scale)
    before = sum(layer.error(np.ones_like(columns), layer.steps) for layer in layers)
    after = sum(layer.error(columns, _steps(layer.weight, columns, reader)) for layer in layers)
    # False for NaN too.
    return scale if after < before else "the layers' estimated error would not be lower"


def _layer(weight: Weight, inputs: InputStatistics, reader: Reader) -> _Layer:
    largest, energy, steps = np.zeros(weight.shape[1], np.float32), np.zeros(weight.shape[1], np.float64), 0.0
    for bits in reader.rows(weight, 1):
        values = np.abs(to_float32(bits, weight.dtype))
        np.maximum(largest, values.max(axis=0), out=largest)
        steps += float(np.square(values.max(axis=1), dtype=np.float64).sum())
        # Too large a weight is one for the conversion to refuse.
        with np.errstate(over="ignore"):
            energy += np.square(values, out=values).sum(axis=0)
    return _Layer(weight, inputs, largest, energy, steps)


def _steps(weight: Weight, columns: Floats, reader: Reader) -> float:
    """The sum of squares of the largest magnitude of each row, of the columns multiplied."""
    steps = 0.0
    for bits in reader.rows(weight._replace(transform=WeightTransform(columns=columns)), 1):
        largest = absmax(bits, "F32", (1, None))
        steps += float(np.square(largest, dtype=np.float64).sum())
    return steps

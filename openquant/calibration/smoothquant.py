"""SmoothQuant: scales that move outliers from INT8 activations into weights.

INT8 activations have a scale per token, so a few inputs that are far larger than the others leave these a coarse grid.
A channel's scale is max|x|^a / max|w|^(1 - a), where x are the inputs of the balance_layers and w the columns that read
the channel (Xiao et al., SmoothQuant, equation 4), rounded to a power of two.

    scale = smoothquant_scale(mapping, plan, reader, calibration, 0.5)     # float32 [channels], or why there is none
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..formats.kernels import absmax, to_float32
from ..formats.numbers import Floats
from ..plan.plan import Plan
from ..weights.reading import Reader
from ..weights.statistics import Calibration, InputStatistics
from ..weights.weight import Weight, WeightTransform
from .mappings import SmoothingMapping
from .smoothing import nearest_powers_of_two, statistics_of, without_zero_rows


class _BalanceLayer(NamedTuple):
    """One balance_layer of a mapping.

    Attributes:
        weight: its weight [out, in].
        inputs: its input statistics.
        column_absmax: float32 [in], largest magnitude of each column.
        column_energy: float64 [in], sum of squares of each column.
        row_absmax_squares: sum of squares of the largest magnitudes of all rows.
    """

    weight: Weight
    inputs: InputStatistics
    column_absmax: Floats
    column_energy: np.ndarray[tuple[int], np.dtype[np.float64]]
    row_absmax_squares: float

    def error(self, factors: Floats, row_absmax_squares: float) -> float:
        """Estimate the squared error of the layer's outputs for one token, times 12 and 127 squared.

        A weight is off by up to half a step of its row, which is the row's absmax / 127; an input by up to half a step
        of its token, which is taken to be the absmax of all inputs / 127.

        Args:
            factors: float32 [in], by which columns are multiplied and inputs divided.
            row_absmax_squares: as the attribute, once columns are multiplied.
        """
        assert self.inputs.square is not None
        squares = np.square(factors, dtype=np.float64)
        absmax = float((self.inputs.absmax / factors).max())
        weight_error = row_absmax_squares * float((self.inputs.square / squares).sum())
        return weight_error + absmax**2 * float((self.column_energy * squares).sum())


def smoothquant_scale(
    mapping: SmoothingMapping, plan: Plan, reader: Reader, calibration: Calibration, exponent: float
) -> Floats | str:
    """Choose SmoothQuant's scale for a mapping.

    Args:
        mapping: one of `usable_mappings(plan)`.
        plan: what becomes of each tensor, without smoothing.
        reader: reads weights and tensors of the source checkpoint.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.
        exponent: migration strength, 0 to 1: how much of the difficulty moves from activations to weights.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; or a text for a note
        that says why the mapping is not used.

    Raises:
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
    """
    layers = []
    for module in mapping.balance_layers:
        # Unquantized ones, such as a router, lose nothing.
        if (weight := plan.layers.get(module)) is None:
            continue
        inputs = statistics_of(weight, calibration)
        scheme = plan.decisions.of(module).scheme
        if scheme is None or scheme.name != "int8":
            return "a layer is stored in another scheme"
        if inputs is None:
            return "the calibration has no inputs of a layer"
        layers.append(_read_layer(weight, inputs, reader))
    if not layers:
        return "no balance layer is quantized"
    input_absmax = mapping.channel_max(np.max([layer.inputs.absmax for layer in layers], axis=0))
    weight_absmax = mapping.channel_max(np.max([layer.column_absmax for layer in layers], axis=0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ideal = input_absmax**exponent / weight_absmax ** (1 - exponent)
    ideal[(input_absmax == 0) | (weight_absmax == 0)] = 0
    scale = without_zero_rows(mapping, nearest_powers_of_two(ideal), plan, reader)
    if (scale == 1).all():
        return "all scales would be 1"
    factors = mapping.column_factors(scale)
    before = sum(layer.error(np.ones_like(factors), layer.row_absmax_squares) for layer in layers)
    after = sum(layer.error(factors, _row_absmax_squares(layer.weight, factors, reader)) for layer in layers)
    # False for NaN too.
    return scale if after < before else "the layers' estimated error would not be lower"


def _read_layer(weight: Weight, inputs: InputStatistics, reader: Reader) -> _BalanceLayer:
    column_absmax, column_energy = np.zeros(weight.shape[1], np.float32), np.zeros(weight.shape[1], np.float64)
    row_absmax_squares = 0.0
    for bits in reader.rows(weight, 1):
        magnitudes = np.abs(to_float32(bits, weight.dtype))
        np.maximum(column_absmax, magnitudes.max(axis=0), out=column_absmax)
        row_absmax_squares += float(np.square(magnitudes.max(axis=1), dtype=np.float64).sum())
        # The conversion refuses weights that are too large.
        with np.errstate(over="ignore"):
            column_energy += np.square(magnitudes, out=magnitudes).sum(axis=0)
    return _BalanceLayer(weight, inputs, column_absmax, column_energy, row_absmax_squares)


def _row_absmax_squares(weight: Weight, factors: Floats, reader: Reader) -> float:
    """The sum of squares of the rows' largest magnitudes, once columns are multiplied by factors [in]."""
    total = 0.0
    for bits in reader.rows(weight._replace(transform=WeightTransform(columns=factors)), 1):
        row_absmax = absmax(bits, "F32", (1, None))
        total += float(np.square(row_absmax, dtype=np.float64).sum())
    return total

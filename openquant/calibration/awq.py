"""AWQ: scales that give finer steps to the weights of the most important input channels.

A column that is multiplied by a scale has finer steps than the others of its group (Lin et al., "AWQ: Activation-aware
Weight Quantization", arXiv 2306.00978). Scales grow with the mean magnitude of the inputs and shrink with that of the
weights, as in AutoAWQ (quantize/quantizer.py:399-408). Of twenty exponents the one with the lowest estimated error is
chosen. Scales are powers of two here, which costs nothing on twins of examples/tiny-qwen3 with outliers of 11.3 and 16
times.

    scale = awq_scale(mapping, plan, reader, calibration)     # float32 [channels], or why there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..formats.kernels import choose_scales, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..patterns import compile_any
from ..plan.plan import Plan
from ..registry.architecture import absolute_patterns
from ..weights.reading import Reader, memory_of
from ..weights.statistics import Calibration
from ..weights.weight import Weight, WeightTransform, WeightTransforms
from .smoothing import SmoothingMapping, nearest_powers_of_two, statistics_of, usable_mappings, without_zero_rows

# Of the inputs in a scale: with 0 it is made of the weights alone, with 1 it would be of the inputs alone.
EXPONENTS = tuple(number / 20 for number in range(20))
# Rows that are sampled of a layer, and of all balance_layers of a mapping, such as a hundred experts. On
# examples/tiny-qwen3 all rows choose the same scales as these; with 64 rows answers are 1 % farther off.
ROWS, ALL_ROWS = 256, 4096


@dataclass(frozen=True)
class SampledRows:
    """Rows that represent a balance_layer.

    Attributes:
        rows: float32 [n, in].
        square: float32 [in], mean square of each input.
        scheme: an integer scheme in groups along rows, in which the layer is stored.
        share: number of the layer's rows that each of these stands for.
    """

    rows: Floats
    square: Floats
    scheme: Scheme
    share: float

    @property
    def group_size(self) -> int:
        """How many columns share a scale."""
        return self.scheme.format.group[1] or self.rows.shape[1]

    def output_error(self, factors: Floats) -> float:
        """Estimate the squared error of the layer's outputs, as if its inputs were uncorrelated.

        Args:
            factors: float32 [in], by which columns are multiplied and inputs divided.

        Returns:
            The sum over all outputs of the layer, mean over tokens. Infinite or NaN if a weight is, or becomes so.
        """
        rows = self.rows * factors
        scale, zero_point = choose_scales(self.scheme.unsearched, rows.view(np.uint32), "F32")
        groups = rows.reshape(-1, self.group_size)
        groups /= scale.reshape(-1, 1)
        if zero_point is not None:
            groups += zero_point.reshape(-1, 1)
        groups -= self.scheme.format.number.nearest(groups)
        groups *= scale.reshape(-1, 1)
        noise = np.square(groups, out=groups).reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return self.share * float(noise @ (self.square / np.square(factors, dtype=np.float64)))

    def relative_magnitudes(self) -> npt.NDArray[np.float64]:
        """Sum |w| / absmax of its group over the rows of the layer, for each column, float64 [in]."""
        groups = np.abs(self.rows).reshape(-1, self.group_size)
        # The smallest normal number keeps groups of zeros at 0.
        groups /= np.maximum(groups.max(axis=1, keepdims=True), np.float32(2.0**-126))
        sums: npt.NDArray[np.float64] = groups.reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return sums * self.share


def awq_scale(mapping: SmoothingMapping, plan: Plan, reader: Reader, calibration: Calibration) -> Floats | str:
    """Choose AWQ's scale for a mapping.

    Args:
        mapping: one of `usable_mappings(plan)`.
        plan: what becomes of each tensor, without smoothing.
        reader: reads weights and tensors of the source checkpoint.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; or a text for a note
        that says why the mapping is not used.

    Raises:
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
    """
    weights = [plan.layers[module] for module in mapping.balance_layers if module in plan.layers]
    if not weights:
        return "no balance layer is quantized"
    max_rows = rows_per_layer(len(weights))
    samples, means = [], []
    for weight in weights:
        scheme, inputs = plan.decisions.of(weight.module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.group_size is None:
            return "a layer is stored in another scheme"
        if inputs is None or inputs.square is None:
            return "the calibration has no inputs of a layer"
        rows = sample_rows(weight, reader, max_rows)
        samples.append(SampledRows(rows, inputs.square, scheme, weight.shape[0] / len(rows)))
        means.append(inputs.mean)
    # Weights that are, or become, infinite or NaN have no lower error, so that no scale is chosen for them.
    with np.errstate(over="ignore", invalid="ignore"):
        scale = search_scale(mapping, samples, np.mean(means, axis=0))
    if scale is None:
        return "the layers' estimated error would not be lower"
    return without_zero_rows(mapping, scale, plan, reader)


def rows_per_layer(layers: int) -> int:
    """Return the largest number of rows to sample of each of a mapping's balance_layers.

    Args:
        layers: number of balance_layers.
    """
    return max(16, min(ROWS, ALL_ROWS // max(1, layers)))


def search_memory(plan: Plan) -> int:
    """Estimate the bytes that one thread needs to choose AWQ's scale for the largest usable mapping.

    Args:
        plan: what becomes of each tensor, without smoothing.

    Returns:
        The most bytes at a time; 0 if no mapping is usable.
    """
    largest = 0
    for mapping in usable_mappings(plan).mappings:
        weights = [plan.layers[module] for module in mapping.balance_layers if module in plan.layers]
        sizes = [4 * min(weight.shape[0], rows_per_layer(len(weights))) * weight.shape[1] for weight in weights]
        # The samples of all layers, six arrays for one while scales are tried, and what is read of a weight at a time.
        read = max((sum(memory_of(weight, 1)) for weight in weights), default=0)
        largest = max(largest, sum(sizes) + 6 * max(sizes, default=0) + 4 * read)
    return largest


def sample_rows(weight: Weight, reader: Reader, max_rows: int) -> Floats:
    """Read evenly spaced rows of a weight.

    Args:
        weight: the weight [out, in].
        reader: reads it from the source checkpoint.
        max_rows: largest number of rows to return; all rows if the weight has no more.

    Returns:
        float32 [n, in], decoded if the weight is quantized, and smoothed if it has a transform.

    Raises:
        SourceError: it cannot be read.
    """
    rows, cols = weight.shape
    indices = np.arange(min(rows, max_rows)) * rows // min(rows, max_rows)
    sample, low = np.empty((len(indices), cols), np.float32), 0
    for bits in reader.rows(weight, 1):
        in_piece = (indices >= low) & (indices < low + len(bits))
        sample[in_piece] = to_float32(np.ascontiguousarray(bits[indices[in_piece] - low]), weight.dtype)
        low += len(bits)
    return sample


def search_scale(mapping: SmoothingMapping, samples: Sequence[SampledRows], mean: Floats) -> Floats | None:
    """Search the exponent of AWQ whose scale has the lowest estimated error of the outputs of balance_layers.

    Args:
        mapping: a smooth_layer and its balance_layers.
        samples: for each balance_layer that is quantized: sampled rows float32 [n, in], mean squares of inputs, and
            scheme.
        mean: float32 [in], mean magnitude of each input of the balance_layers.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; None if no scale is
        better than none.
    """

    def channel_means(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = values.reshape(-1, mapping.repeats, mapping.head_dim).mean(
            axis=1, dtype=np.float64
        )
        return means.reshape(-1)

    rows = sum(len(sample.rows) * sample.share for sample in samples)
    inputs = channel_means(mean)
    weights = channel_means(np.sum([sample.relative_magnitudes() for sample in samples], axis=0) / rows)
    best, least_error = None, sum(sample.output_error(np.ones_like(mean)) for sample in samples)
    tried = {np.ones(mapping.channels, np.float32).tobytes()}
    for exponent in EXPONENTS:
        ideal = inputs**exponent / (weights ** (1 - exponent) + 1e-4)
        # Channels that were zero in all texts stay as they are.
        scale = nearest_powers_of_two(np.where(inputs > 0, ideal, 0).astype(np.float32))
        if scale.tobytes() not in tried:
            tried.add(scale.tobytes())
            error = sum(sample.output_error(mapping.column_factors(scale)) for sample in samples)
            best, least_error = (scale, error) if error < least_error else (best, least_error)
    return best


def with_importance(transforms: WeightTransforms, plan: Plan, calibration: Calibration) -> WeightTransforms:
    """Add the importance of columns, which weighs errors in the search for scales, to the transforms of integer layers.

    It is the mean square of the column's inputs after smoothing. Queries and keys that are fused with a smooth_layer of
    values are left out, as in AWQ's clipping: attention multiplies their outputs with each other.

    Args:
        transforms: what smoothing changes, with the column factors of each layer.
        plan: what becomes of each tensor; its layers of integers in groups are given an importance.
        calibration: statistics of the inputs of layers, with mean squares.

    Returns:
        A copy of `transforms` with `importance`, float32 [in], for those of these layers that tokens went into, and one
        more note.

    Raises:
        SourceError: the calibration has no mean squares of a layer's inputs, or another number of inputs.
    """
    excluded, weights = _queries_and_keys(plan), dict(transforms.weights)
    for module, weight in plan.layers.items():
        scheme, inputs = plan.decisions.of(module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.group_size is None or module in excluded:
            continue
        if inputs is None or inputs.square is None:
            continue
        transform = weights.get(module, WeightTransform())
        factors = np.ones(1) if transform.columns is None else transform.columns.astype(np.float64)
        square = np.minimum(inputs.square / factors**2, np.finfo(np.float32).max)
        weights[module] = replace(transform, importance=square.astype(np.float32))
    weighed = replace(transforms, weights=weights)
    note = f"the search for scales of {weighed.weighed} layers weighs errors by the mean squares of inputs"
    return replace(weighed, notes=(*transforms.notes, note))


def _queries_and_keys(plan: Plan) -> set[str]:
    """Modules that are fused with values: the smooth_layers whose rule says how many heads they have."""
    values = compile_any(
        absolute_patterns(plan.model, [rule.smooth_layer for rule in plan.model.smoothing if rule.heads])
    )
    fused_groups = plan.entry.fused_groups(plan.layers)
    return {
        module
        for value in plan.layers
        if values.fullmatch(value)
        for module in fused_groups.get(value, ())
        if module != value
    }

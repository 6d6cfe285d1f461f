"""AWQ: by how much to divide the inputs of layers, so that weights that count for most are rounded least.

Lin et al., "AWQ: Activation-aware Weight Quantization" (arXiv 2306.00978). A column that is multiplied has finer steps
than the others of its group. Factors grow with the mean magnitude of the inputs and fall with that of the weights, as
AutoAWQ has them (quantize/quantizer.py:399-408), and are powers of two here: on twins of examples/tiny-qwen3 with
outliers of 11.3 and 16 times that costs nothing. Of twenty exponents the one is taken with which least is lost.

    found = awq(folding, plan, reader, calibration)     # float32 [channels], or why there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..formats.kernels import to_float32
from ..formats.numbers import Floats
from ..formats.scales import choose_scales
from ..formats.schemes import Scheme
from ..patterns import compile_any
from ..plan.plan import Plan
from ..registry.architecture import absolute_patterns
from ..weights.reading import Reader, memory_of
from ..weights.statistics import Calibration
from ..weights.transform import WeightTransform, WeightTransforms
from ..weights.weight import Weight
from .mappings import SmoothingMapping
from .smoothing import nearest_powers_of_two, statistics_of, usable_mappings, without_zero_rows

# Each makes factors: 0 of the weights alone, 1 of the inputs alone.
EXPONENTS = tuple(number / 20 for number in range(20))
# Rows that are looked at of each layer, and of all that have one input, such as a hundred experts: all rows make the
# same answers of examples/tiny-qwen3 as these do, 64 answers that are 1 % farther off.
ROWS, ALL_ROWS = 256, 4096


@dataclass(frozen=True)
class SampledRows:
    """Rows that stand for a layer.

    Attributes:
        rows: float32 [n, in].
        square: float32 [in], the mean square of what goes in.
        scheme: how the layer is stored: in groups of integers.
        share: how many rows of the layer each stands for.
    """

    rows: Floats
    square: Floats
    scheme: Scheme
    share: float

    @property
    def width(self) -> int:
        """How many columns share a scale."""
        return self.scheme.format.group[1] or self.rows.shape[1]

    def lost(self, columns: Floats) -> float:
        """Estimate the squared error of the layer's outputs, where its columns are multiplied by factors and its inputs
        divided; as if inputs had nothing to do with each other, which changes little.

        Args:
            columns: the factors, float32 [in].
        """
        rows = self.rows * columns
        scale, zero = choose_scales(self.scheme.unsearched, rows.view(np.uint32), "F32")
        groups = rows.reshape(-1, self.width)
        groups /= scale.reshape(-1, 1)
        if zero is not None:
            groups += zero.reshape(-1, 1)
        groups -= self.scheme.format.number.nearest(groups)
        groups *= scale.reshape(-1, 1)
        off = np.square(groups, out=groups).reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return self.share * float(off @ (self.square / np.square(columns, dtype=np.float64)))

    def spread(self) -> npt.NDArray[np.float64]:
        """The sum of the absolute weights of each column, each divided by the absmax of its group, float64 [in]."""
        groups = np.abs(self.rows).reshape(-1, self.width)
        # Groups of zeros stay that.
        groups /= np.maximum(groups.max(axis=1, keepdims=True), np.float32(2.0**-126))
        sums: npt.NDArray[np.float64] = groups.reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return sums * self.share


def awq_scale(mapping: SmoothingMapping, plan: Plan, reader: Reader, calibration: Calibration) -> Floats | str:
    """The scale of a fold, float32 [channels] of powers of two; why there is none, for a note, where there is not.

    Args:
        mapping: where inputs are divided.
        plan: what becomes of the layers.
        reader: reads the source.
        calibration: what goes into the layers.

    Raises:
        SourceError: a weight cannot be read, or the calibration is not of these layers.
    """
    weights = [plan.layers[module] for module in mapping.readers if module in plan.layers]
    if not weights:
        return "no layer that reads them is quantized"
    most = rows_per_layer(len(weights))
    sampled, means = [], []
    for weight in weights:
        scheme, inputs = plan.decisions.of(weight.module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.name != "int4":
            return "a layer is stored in another scheme"
        if inputs is None or inputs.square is None:
            return "the calibration has seen nothing of a layer"
        rows = sample_rows(weight, reader, most)
        sampled.append(SampledRows(rows, inputs.square, scheme, weight.shape[0] / len(rows)))
        means.append(inputs.mean)
    # Weights that are not finite, and so large that they become that, lose nothing that is less.
    with np.errstate(over="ignore", invalid="ignore"):
        found = search_scale(mapping, sampled, np.mean(means, axis=0))
    if found is None:
        return "the layers' estimated error would not be lower"
    return without_zero_rows(mapping, found, plan, reader)


def rows_per_layer(layers: int) -> int:
    """How many rows are looked at of each of so many layers that have one input, at most."""
    return max(16, min(ROWS, ALL_ROWS // max(1, layers)))


def search_memory(plan: Plan) -> int:
    """Bytes that one thread takes as it chooses by how much to divide inputs of layers at one place."""
    most = 0
    for mapping in usable_mappings(plan).mappings:
        weights = [plan.layers[module] for module in mapping.readers if module in plan.layers]
        sizes = [4 * min(weight.shape[0], rows_per_layer(len(weights))) * weight.shape[1] for weight in weights]
        # The rows of all, and what is tried with those of one; and what is read of each weight, as float32 too.
        read = max((sum(memory_of(weight, 1)) for weight in weights), default=0)
        most = max(most, sum(sizes) + 6 * max(sizes, default=0) + 4 * read)
    return most


def sample_rows(weight: Weight, reader: Reader, most: int) -> Floats:
    """Up to so many rows of a weight, spread evenly over it, float32 [n, in].

    Raises:
        SourceError: it cannot be read.
    """
    rows, cols = weight.shape
    taken = np.arange(min(rows, most)) * rows // min(rows, most)
    found, low = np.empty((len(taken), cols), np.float32), 0
    for bits in reader.rows(weight, 1):
        here = (taken >= low) & (taken < low + len(bits))
        found[here] = to_float32(np.ascontiguousarray(bits[taken[here] - low]), weight.dtype)
        low += len(bits)
    return found


def search_scale(mapping: SmoothingMapping, readers: Sequence[SampledRows], mean: Floats) -> Floats | None:
    """The factors of the exponent with which least is lost, float32 [channels]; None where that is not less than is
    lost without factors.

    Args:
        mapping: where inputs are divided.
        readers: the layers that read them.
        mean: float32 [in], the mean magnitude of what goes in.
    """

    def of_channels(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = values.reshape(-1, mapping.repeats, mapping.head).mean(
            axis=1, dtype=np.float64
        )
        return means.reshape(-1)

    rows = sum(len(each.rows) * each.share for each in readers)
    inputs, weights = of_channels(mean), of_channels(np.sum([each.spread() for each in readers], axis=0) / rows)
    found, least = None, sum(each.lost(np.ones_like(mean)) for each in readers)
    tried = {np.ones(mapping.channels, np.float32).tobytes()}
    for exponent in EXPONENTS:
        ideal = inputs**exponent / (weights ** (1 - exponent) + 1e-4)
        # Of what texts have not shown nothing is known.
        scale = nearest_powers_of_two(np.where(inputs > 0, ideal, 0).astype(np.float32))
        if scale.tobytes() not in tried:
            tried.add(scale.tobytes())
            lost = sum(each.lost(mapping.columns(scale)) for each in readers)
            found, least = (scale, lost) if lost < least else (found, least)
    return found


def with_importance(transforms: WeightTransforms, plan: Plan, calibration: Calibration) -> WeightTransforms:
    """The same with what goes into each layer of INT4, by which the search for its scales weighs errors.

    Not of queries and keys, whose products' errors are others: as in AWQ, whose clipping leaves both out.

    Raises:
        SourceError: the calibration is not of these layers.
    """
    left, found = _queries_and_keys(plan), dict(transforms.weights)
    for module, weight in plan.layers.items():
        scheme, inputs = plan.decisions.of(module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.name != "int4" or module in left or inputs is None or inputs.square is None:
            continue
        transform = found.get(module, WeightTransform())
        by = np.ones(1) if transform.columns is None else transform.columns.astype(np.float64)
        square = np.minimum(inputs.square / by**2, np.finfo(np.float32).max)
        found[module] = replace(transform, importance=square.astype(np.float32))
    made = replace(transforms, weights=found)
    note = f"the search for scales of {made.weighed} layers weighs errors by what goes into each column"
    return replace(made, notes=(*transforms.notes, note))


def _queries_and_keys(plan: Plan) -> set[str]:
    """What is joined with values, where it is known which these are: what heads are folded in."""
    values = compile_any(absolute_patterns(plan.model, [fold.source for fold in plan.model.folds if fold.heads]))
    sets = plan.entry.fused_groups(plan.layers)
    return {
        module
        for source in plan.layers
        if values.fullmatch(source)
        for module in sets.get(source, ())
        if module != source
    }

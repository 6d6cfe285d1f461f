"""Statistics of one layer, summed over pieces of it: over all weights, and over sampled rows that represent others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.format import Format, Group
from ..formats.kernels import BITS_TYPE, CHUNK, Bits, Loops, to_float32
from ..formats.numbers import Floats
from ..formats.scales import Scales, choose_scales, choose_shared_scale
from ..formats.schemes import SCHEMES, Scheme
from ..weights.quant_error import energy, relative_error, row_energies
from ..weights.weight import Weight
from .result import DYNAMIC_RANGE, OUTLIER_RATIO, SMALL_STD, LayerDiagnosis

Energies = npt.NDArray[np.float64]


class RowSample(NamedTuple):
    """Sampled rows of a layer.

    Attributes:
        indices: int64 [n], indices of the rows.
        bits: bits of their weights, uint16 or uint32 [n, in].
        share: number of the layer's rows that each of them stands for.
        first_is_outlier: whether the first stands for itself only.
    """

    indices: npt.NDArray[np.intp]
    bits: Bits
    share: float = 1.0
    first_is_outlier: bool = False

    def estimate_count(self, flags: npt.NDArray[np.bool_]) -> float:
        """Estimate how many weights of the layer are flagged, from flags of these, bool [n, in]."""
        count = self.share * np.count_nonzero(flags)
        return count - (self.share - 1) * np.count_nonzero(flags[0]) if self.first_is_outlier else count

    def estimate_sum(self, of_rows: Energies) -> float:
        """Estimate the sum of a value over all rows, from its values for these, float64 [n]."""
        total = self.share * float(of_rows.sum())
        return total - (self.share - 1) * float(of_rows[0]) if self.first_is_outlier else total


class WeightTotals:
    """Statistics over all weights of a layer.

    Args:
        weight: the layer's weight.
        loops: the kernels that go over every weight.

    Attributes:
        weight: the layer's weight.
        schemes: the schemes whose groups divide its shape.
        absmax: float32 [1, 1], largest magnitude.
        absmax_row: the row that has it.
        total: sum of the weights.
        magnitudes: sum of their magnitudes.
        squares: sum of their squares.
    """

    def __init__(self, weight: Weight, loops: Loops) -> None:
        self.weight, self._loops = weight, loops
        self.schemes = [
            scheme
            for scheme in SCHEMES.values()
            if weight.is_stored_as(scheme.format) or scheme.format.shape_error(weight.shape) is None
        ]
        self.absmax: Floats = np.zeros((1, 1), np.float32)
        self.absmax_row = RowSample(np.zeros(1, np.intp), np.zeros((1, weight.shape[1]), BITS_TYPE[weight.dtype]))
        self.total = self.magnitudes = self.squares = 0.0
        # By format, the absmax of groups of several rows, piece by piece: sampled rows alone do not have it.
        self._grids: dict[Format, list[Floats]] = {
            scheme.format: []
            for scheme in self.schemes
            if (scheme.format.group[0] or 1) > 1 and not weight.is_stored_as(scheme.format)
        }

    @property
    def height(self) -> int:
        """The number of rows of each piece but the last must be a multiple of this."""
        return math.lcm(*(fmt.group[0] or 1 for fmt in self._grids))

    def add(self, low: int, bits: Bits) -> bool:
        """Add the next piece of the layer; pieces come in the order of the rows.

        Args:
            low: index of its first row.
            bits: bits of its weights, uint16 or uint32 [n, in]; n is a multiple of `height`, except in the last piece.

        Returns:
            Whether all weights are finite. If not, the totals are incomplete and must not be used.
        """
        dtype = self.weight.dtype
        for fmt, grid in self._grids.items():
            grid.append(self._loops.absmax(bits, dtype, fmt.group))
        grids = [grid[-1] for grid in self._grids.values()] or [self._loops.absmax(bits, dtype, (None, None))]
        largest = grids[0].max(keepdims=True)
        if not np.isfinite(largest).all():
            return False
        if largest > self.absmax:
            self.absmax = largest
            row = int(self._loops.absmax(bits, dtype, (1, None)).argmax())
            self.absmax_row = RowSample(np.array([low + row]), bits[row : row + 1].copy())
        step = max(1, CHUNK // self.weight.shape[1])
        for start in range(0, len(bits), step):
            values = to_float32(bits[start : start + step], dtype)
            self.total += _sum(values)
            self.magnitudes += _sum(np.abs(values))
            self.squares += energy(values)
        return True

    def scales(self, scheme: Scheme, rows: RowSample, shared_absmax: Floats) -> tuple[Group, Scales]:
        """Choose the scales of some rows, once all pieces are added.

        Args:
            scheme: one of `schemes`, in which the layer is not stored already.
            rows: the rows.
            shared_absmax: float32 [1, 1], absmax of all fused layers, for schemes with a per-tensor or global scale.

        Returns:
            Height and width of a group among these rows, (1, 128) for blocks of 128 x 128; and the scales and zero
            points, float32 [n / height, in / width], [1, 1] for a scale per tensor. Zero points are None for symmetric
            formats.
        """
        fmt = scheme.format
        height, width = fmt.group
        group: Group = fmt.group
        if fmt.shared:
            absmax = shared_absmax
        elif fmt in self._grids:
            if len(self._grids[fmt]) > 1:
                self._grids[fmt] = [np.concatenate(self._grids[fmt])]
            group, absmax = (1, width), self._grids[fmt][0][rows.indices // (height or 1)]
        else:
            absmax = self._loops.absmax(rows.bits, self.weight.dtype, fmt.group)
        global_scale = choose_shared_scale(fmt, shared_absmax) if fmt.global_scale is not None else None
        return group, choose_scales(scheme, rows.bits, self.weight.dtype, absmax, global_scale, loops=self._loops)


class SchemeLoss:
    """The loss of a layer in one scheme, estimated from sampled rows.

    Attributes:
        noise: sum of squares of the weights' errors.
        row_noise: sum over rows of the row's noise divided by its energy.
        zeros: number of codes that stand for zero.
        subnormals: number of subnormal codes.
    """

    def __init__(self) -> None:
        self.noise = self.row_noise = self.zeros = self.subnormals = 0.0

    def add(
        self, scheme: Scheme, rows: RowSample, values: Floats, energies: Energies, group: Group, scales: Scales
    ) -> None:
        """Add the loss of some rows.

        Args:
            scheme: the scheme.
            rows: the rows.
            values: float32 [n, in], their weights.
            energies: float64 [n], sum of squares of each row.
            group: height and width of a group among these rows.
            scales: the scales and zero points, float32 [n / height, in / width]; `WeightTotals.scales` returns both.
        """
        number = scheme.format.number
        scale, zero_point = (None if grid is None else _widen(grid, group[1]) for grid in scales)
        assert scale is not None
        # Values of codes, not the codes themselves, which take longer to look up.
        if zero_point is None:
            quantized = number.nearest(values / scale)
        else:
            quantized = number.nearest(values / scale + zero_point)
            quantized -= zero_point
        zeros = rows.estimate_count(quantized == 0)
        self.zeros += zeros
        if number.normal:
            self.subnormals += rows.estimate_count(np.abs(quantized) < np.float32(number.normal)) - zeros
        quantized *= scale
        quantized -= values
        noise = row_energies(quantized)
        self.noise += rows.estimate_sum(noise)
        # A row of zeros has no noise.
        self.row_noise += rows.estimate_sum(noise / np.where(energies > 0, energies, 1))


class RowSums:
    """Statistics of a layer's weights before quantization, estimated from sampled rows.

    Attributes:
        rows: number of sampled rows.
        count: number of weights that these stand for.
        zeros: number of zeros among them.
        energy: sum of their squares.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.count = self.zeros = self.energy = 0.0
        # Counts of magnitudes by the upper half of their float32 bits: with bfloat16 weights, of each value.
        self._magnitudes = np.zeros(1 << 15)
        self._low, self._high = 1 << 15, 0

    def add(self, rows: RowSample, values: Floats, energies: Energies) -> None:
        """Add some rows.

        Args:
            rows: the rows.
            values: float32 [n, in], their weights.
            energies: float64 [n], sum of squares of each row.
        """
        self.rows += len(values)
        self.energy += rows.estimate_sum(energies)
        self.count += values.shape[1] * (rows.share * len(values) - (rows.share - 1) * rows.first_is_outlier)
        self.zeros += rows.estimate_count(values == 0)
        upper = (values.view(np.uint32) >> 16).astype(np.intp) & 0x7FFF
        self._count_magnitudes(upper.reshape(-1), rows.share)
        if rows.first_is_outlier:
            self._count_magnitudes(upper[0], 1 - rows.share)

    def _count_magnitudes(self, upper: npt.NDArray[np.intp], share: float) -> None:
        # Only from the smallest to the largest: a small layer has few of all possible values.
        low = int(upper.min())
        counts = np.bincount(upper - low)
        self._magnitudes[low : low + len(counts)] += share * counts
        self._low, self._high = min(low, self._low), max(low + len(counts), self._high)

    def percentile(self) -> float:
        """Return the first percentile of the nonzero magnitudes: 1 % are as small or smaller; 0 if there are none."""
        low = max(1, self._low)
        cumulative = np.cumsum(self._magnitudes[low : self._high])
        upper = low + int(np.searchsorted(cumulative, cumulative[-1] / 100)) if cumulative.any() else 0
        return float(np.uint32(upper << 16).view(np.float32))


def layer_diagnosis(
    totals: WeightTotals, sums: RowSums, losses: Mapping[str, SchemeLoss], requested: Scheme
) -> LayerDiagnosis:
    """Make the diagnosis of a layer from its sums.

    Args:
        totals: statistics over all weights: sums and the largest magnitude.
        sums: statistics before quantization, estimated from sampled rows.
        losses: for each scheme that can store the layer, by the scheme's name ("nvfp4"): sums of squares of errors, and
            numbers of zero and subnormal codes.
        requested: the scheme in which the layer is to be stored, which decides about the flag "large".

    Returns:
        Means and ratios, flags, and the relative errors in each scheme, None in those that `losses` lacks.
    """
    weight, largest = totals.weight, float(totals.absmax.item())
    count = weight.shape[0] * weight.shape[1]
    mean = totals.magnitudes / count
    std = math.sqrt(max(0.0, totals.squares / count - (totals.total / count) ** 2))
    ratio = largest / mean if largest else 0.0
    # All sampled weights may be zero although another weight is not.
    dynamic_range = largest / (sums.percentile() or largest) if largest else 0.0
    flags = {
        "outliers": ratio > OUTLIER_RATIO,
        "range": dynamic_range > DYNAMIC_RANGE,
        "small": largest > 0 and std < SMALL_STD,
        "zero": not largest,
        "large": requested in totals.schemes and requested.name not in losses,
    }
    return LayerDiagnosis(
        module=weight.module,
        shape=weight.shape,
        rows=sums.rows,
        max=largest,
        mean=mean,
        std=std,
        outlier_ratio=ratio,
        dynamic_range=dynamic_range,
        flags=tuple(flag for flag, raised in flags.items() if raised),
        errors=_by_scheme({name: relative_error(sums.energy, loss.noise) for name, loss in losses.items()}),
        row_errors=_by_scheme(
            {name: math.sqrt(loss.row_noise * weight.shape[1] / sums.count) for name, loss in losses.items()}
        ),
        zero_shares=_by_scheme({name: max(0.0, loss.zeros - sums.zeros) / sums.count for name, loss in losses.items()}),
        subnormal_shares=_by_scheme({name: loss.subnormals / sums.count for name, loss in losses.items()}),
    )


def _by_scheme(values: dict[str, float]) -> dict[str, float | None]:
    """The values in the order of SCHEMES, None for schemes that have none."""
    return {name: values.get(name) for name in SCHEMES}


def _widen(grid: Floats, width: int | None) -> Floats:
    """Repeat each entry of [n, groups] over the `width` columns of its group; not if a row has one group."""
    return grid if width is None else np.repeat(grid, width, axis=1)


def _sum(values: Floats) -> float:
    """The sum of float32 values; in float64 where float32 overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        # numpy adds along columns first, which is faster.
        total = float(values.sum(axis=0).sum(dtype=np.float64))
    return total if math.isfinite(total) else float(values.sum(dtype=np.float64))

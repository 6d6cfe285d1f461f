"""Errors of one layer, summed over pieces of it: scales come from all weights, errors from sampled rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.format import Format, Group
from ..formats.kernels import BITS_TYPE, Bits, Loops
from ..formats.numbers import Floats
from ..formats.scales import Scales, choose_scales, choose_shared_scale
from ..formats.schemes import SCHEMES, Scheme
from ..weights.quant_error import relative_error, row_energies
from ..weights.weight import Weight
from .result import LayerDiagnosis

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

    def estimate_sum(self, of_rows: Energies) -> float:
        """Estimate the sum of a value over all rows, from its values for these, float64 [n]."""
        total = self.share * float(of_rows.sum())
        return total - (self.share - 1) * float(of_rows[0]) if self.first_is_outlier else total


class WeightRanges:
    """The largest magnitudes of a layer, over all of its weights.

    Args:
        weight: the layer's weight.
        loops: the kernels that go over every weight.

    Attributes:
        weight: the layer's weight.
        schemes: in what each scheme stores it, by the scheme's name: itself, or its fallback where its groups do not
            divide the layer's shape. Schemes that cannot store it are missing.
        absmax: float32 [1, 1], largest magnitude.
        absmax_row: the row that has it.
    """

    def __init__(self, weight: Weight, loops: Loops) -> None:
        self.weight, self._loops = weight, loops
        stored = {name: _as_stored(scheme, weight) for name, scheme in SCHEMES.items()}
        self.schemes = {name: scheme for name, scheme in stored.items() if scheme is not None}
        self.absmax: Floats = np.zeros((1, 1), np.float32)
        self.absmax_row = RowSample(np.zeros(1, np.intp), np.zeros((1, weight.shape[1]), BITS_TYPE[weight.dtype]))
        # By format, the absmax of groups of several rows, piece by piece: sampled rows alone do not have it.
        self._grids: dict[Format, list[Floats]] = {
            scheme.format: []
            for scheme in self.schemes.values()
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
            Whether all weights are finite. If not, the ranges are incomplete and must not be used.
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
        return True

    def scales(self, scheme: Scheme, rows: RowSample, shared_absmax: Floats) -> tuple[Group, Scales]:
        """Choose the scales of some rows, once all pieces are added.

        Args:
            scheme: a value of `schemes`, in which the layer is not stored already.
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
    """

    def __init__(self) -> None:
        self.noise = self.row_noise = 0.0

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
            scales: the scales and zero points, float32 [n / height, in / width]; `WeightRanges.scales` returns both.
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
        quantized *= scale
        quantized -= values
        noise = row_energies(quantized)
        self.noise += rows.estimate_sum(noise)
        # A row of zeros has no noise.
        self.row_noise += rows.estimate_sum(noise / np.where(energies > 0, energies, 1))


class RowSums:
    """Sums over a layer's rows before quantization, estimated from sampled rows.

    Attributes:
        rows: number of sampled rows.
        energy: sum of squares of all weights.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.energy = 0.0

    def add(self, rows: RowSample, energies: Energies) -> None:
        """Add some rows, with the sums of squares of each, float64 [n]."""
        self.rows += len(energies)
        self.energy += rows.estimate_sum(energies)


def layer_diagnosis(weight: Weight, sums: RowSums, losses: Mapping[str, SchemeLoss]) -> LayerDiagnosis:
    """Make the diagnosis of a layer from its sums.

    Args:
        weight: the layer's weight.
        sums: sums over its rows before quantization.
        losses: for each scheme that can store the layer, by the scheme's name ("nvfp4"): sums of squares of errors.

    Returns:
        The relative errors in each scheme, None in those that `losses` lacks.
    """
    return LayerDiagnosis(
        module=weight.module,
        shape=weight.shape,
        rows=sums.rows,
        errors=_by_scheme({name: relative_error(sums.energy, loss.noise) for name, loss in losses.items()}),
        row_errors=_by_scheme({name: math.sqrt(loss.row_noise / weight.shape[0]) for name, loss in losses.items()}),
    )


@cache
def normal_row_error(scheme: Scheme) -> float:
    """Measure the row error of normally distributed weights in a scheme, such as 0.0262: 128 rows of 1024."""
    values = np.random.default_rng(0).standard_normal((128, 1024), np.float32)
    bits = values.view(np.uint32)
    loss, rows = SchemeLoss(), RowSample(np.arange(len(bits)), bits)
    loss.add(scheme, rows, values, row_energies(values), scheme.format.group, choose_scales(scheme, bits, "F32"))
    return math.sqrt(loss.row_noise / len(bits))


def _as_stored(scheme: Scheme, weight: Weight) -> Scheme | None:
    """The scheme in which `compress` stores a weight for which another is requested; None if it cannot."""
    if weight.is_stored_as(scheme.format) or scheme.format.shape_error(weight.shape) is None:
        return scheme
    return None if scheme.fallback is None else _as_stored(scheme.fallback, weight)


def _by_scheme(values: dict[str, float]) -> dict[str, float | None]:
    """The values in the order of SCHEMES, None for schemes that have none."""
    return {name: values.get(name) for name in SCHEMES}


def _widen(grid: Floats, width: int | None) -> Floats:
    """Repeat each entry of [n, groups] over the `width` columns of its group; not if a row has one group."""
    return grid if width is None else np.repeat(grid, width, axis=1)

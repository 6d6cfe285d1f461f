"""The figures of one layer, summed over pieces of it: of all its weights, and of rows that stand for others."""

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
from .result import DEVIATION, DYNAMIC_RANGE, OUTLIER_RATIO, LayerDiagnosis

Energies = npt.NDArray[np.float64]


class RowSample(NamedTuple):
    """Some rows of a layer.

    Attributes:
        numbers: of the rows.
        bits: their weights [n, in].
        times: how many rows of the layer each of them stands for.
        alone: whether the first stands for itself only.
    """

    numbers: npt.NDArray[np.intp]
    bits: Bits
    times: float = 1.0
    alone: bool = False

    def counted(self, flags: npt.NDArray[np.bool_]) -> float:
        """For how many weights of the layer those stand that are flagged, bool [n, in]."""
        found = self.times * np.count_nonzero(flags)
        return found - (self.times - 1) * np.count_nonzero(flags[0]) if self.alone else found

    def summed(self, of_rows: Energies) -> float:
        """What a figure of each row, float64 [n], comes to in all rows that these stand for."""
        found = self.times * float(of_rows.sum())
        return found - (self.times - 1) * float(of_rows[0]) if self.alone else found


class WeightTotals:
    """What all weights of a layer tell.

    Args:
        weight: the layer.
        loops: what looks at every weight.

    Attributes:
        weight: the layer.
        schemes: those whose groups divide it.
        largest: the largest magnitude, float32 [1, 1].
        top: the row that has it.
        total: sum of the weights.
        absolute: sum of their magnitudes.
        squares: sum of their squares.
    """

    def __init__(self, weight: Weight, loops: Loops) -> None:
        self.weight, self._loops = weight, loops
        self.schemes = [
            scheme
            for scheme in SCHEMES.values()
            if weight.is_held_by(scheme.format) or scheme.format.shape_error(weight.shape) is None
        ]
        self.largest: Floats = np.zeros((1, 1), np.float32)
        self.top = RowSample(np.zeros(1, np.intp), np.zeros((1, weight.shape[1]), BITS_TYPE[weight.dtype]))
        self.total = self.absolute = self.squares = 0.0
        # By format, the largest magnitudes of groups that are several rows high, piece by piece.
        self._grids: dict[Format, list[Floats]] = {
            scheme.format: []
            for scheme in self.schemes
            if (scheme.format.group[0] or 1) > 1 and not weight.is_held_by(scheme.format)
        }

    @property
    def height(self) -> int:
        """Pieces must be a multiple of so many rows."""
        return math.lcm(*(form.group[0] or 1 for form in self._grids))

    def add(self, low: int, bits: Bits) -> bool:
        """Add some rows, if all their weights are finite.

        Args:
            low: the number of the first.
            bits: their weights, uint16 or uint32 [n, in].

        Returns:
            Whether they are finite; nothing is added if not.
        """
        dtype = self.weight.dtype
        for form, grid in self._grids.items():
            grid.append(self._loops.absmax(bits, dtype, form.group))
        grids = [grid[-1] for grid in self._grids.values()] or [self._loops.absmax(bits, dtype, (None, None))]
        largest = grids[0].max(keepdims=True)
        if not np.isfinite(largest).all():
            return False
        if largest > self.largest:
            self.largest = largest
            row = int(self._loops.absmax(bits, dtype, (1, None)).argmax())
            self.top = RowSample(np.array([low + row]), bits[row : row + 1].copy())
        step = max(1, CHUNK // self.weight.shape[1])
        for start in range(0, len(bits), step):
            values = to_float32(bits[start : start + step], dtype)
            self.total += _sum(values)
            self.absolute += _sum(np.abs(values))
            self.squares += energy(values)
        return True

    def scales(self, scheme: Scheme, rows: RowSample, shared: Floats) -> tuple[Group, Scales]:
        """The scales of some rows, once all are added.

        Args:
            scheme: what they are stored in.
            rows: the rows.
            shared: float32 [1, 1], the largest absolute weight of all layers that share a scale where a format has one
                for a joined set.

        Returns:
            Height and width of what shares a scale among these rows, (1, 128) for blocks of 128 x 128; and the scales
            and zero points, float32 [n / height, in / width].
        """
        form = scheme.format
        height, width = form.group
        group: Group = form.group
        if form.shared:
            absmax = shared
        elif form in self._grids:
            if len(self._grids[form]) > 1:
                self._grids[form] = [np.concatenate(self._grids[form])]
            group, absmax = (1, width), self._grids[form][0][rows.numbers // (height or 1)]
        else:
            absmax = self._loops.absmax(rows.bits, self.weight.dtype, form.group)
        global_scale = choose_shared_scale(form, shared) if form.global_scale is not None else None
        return group, choose_scales(scheme, rows.bits, self.weight.dtype, absmax, global_scale, loops=self._loops)


class SchemeLoss:
    """What a scheme makes of the measured rows of a layer, each counted for the rows that it stands for.

    Attributes:
        noise: sum of squares of what the weights are off by.
        row_noise: sum of each row's noise over its own energy.
        zeros: codes that stand for zero.
        subnormals: codes that are subnormal.
    """

    def __init__(self) -> None:
        self.noise = self.row_noise = self.zeros = self.subnormals = 0.0

    def add(
        self, scheme: Scheme, rows: RowSample, values: Floats, energies: Energies, group: Group, scales: Scales
    ) -> None:
        """Add what a scheme makes of some rows.

        Args:
            scheme: the scheme.
            rows: the rows.
            values: their weights, float32 [n, in].
            energies: the sum of squares of each, float64 [n].
            group: height and width of what shares a scale.
            scales: the scales and zero points, float32 [n / height, in / width].
        """
        number = scheme.format.number
        scale, zero = (None if grid is None else _widen(grid, group[1]) for grid in scales)
        assert scale is not None
        # What codes stand for without the codes, which take longer to look up.
        if zero is None:
            made = number.nearest(values / scale)
        else:
            made = number.nearest(values / scale + zero)
            made -= zero
        zeros = rows.counted(made == 0)
        self.zeros += zeros
        if number.normal:
            self.subnormals += rows.counted(np.abs(made) < np.float32(number.normal)) - zeros
        made *= scale
        made -= values
        noise = row_energies(made)
        self.noise += rows.summed(noise)
        # A row of zeros has no noise.
        self.row_noise += rows.summed(noise / np.where(energies > 0, energies, 1))


class RowSums:
    """What the measured rows of a layer tell, each counted for the rows that it stands for.

    Attributes:
        rows: how many were measured.
        count: weights that these stand for.
        zeros: those of them that are zero.
        energy: the sum of their squares.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.count = self.zeros = self.energy = 0.0
        # How many magnitudes have each upper half of a float32: with bfloat16 weights, each value.
        self._magnitudes = np.zeros(1 << 15)
        self._low, self._high = 1 << 15, 0

    def add(self, rows: RowSample, values: Floats, energies: Energies) -> None:
        """Add some rows.

        Args:
            rows: the rows.
            values: their weights, float32 [n, in].
            energies: the sum of squares of each, float64 [n].
        """
        self.rows += len(values)
        self.energy += rows.summed(energies)
        self.count += values.shape[1] * (rows.times * len(values) - (rows.times - 1) * rows.alone)
        self.zeros += rows.counted(values == 0)
        upper = (values.view(np.uint32) >> 16).astype(np.intp) & 0x7FFF
        self._count_magnitudes(upper.reshape(-1), rows.times)
        if rows.alone:
            self._count_magnitudes(upper[0], 1 - rows.times)

    def _count_magnitudes(self, upper: npt.NDArray[np.intp], times: float) -> None:
        # From the smallest to the largest: of a small layer they are few of the values that there are.
        low = int(upper.min())
        counts = np.bincount(upper - low)
        self._magnitudes[low : low + len(counts)] += times * counts
        self._low, self._high = min(low, self._low), max(low + len(counts), self._high)

    def percentile(self) -> float:
        """The first percentile of the nonzero magnitudes: one in a hundred is as small, or smaller; 0 without any."""
        low = max(1, self._low)
        reached = np.cumsum(self._magnitudes[low : self._high])
        place = low + int(np.searchsorted(reached, reached[-1] / 100)) if reached.any() else 0
        return float(np.uint32(place << 16).view(np.float32))


def layer_figures(
    whole: WeightTotals, sums: RowSums, losses: Mapping[str, SchemeLoss], asked: Scheme
) -> LayerDiagnosis:
    """The figures of a layer.

    Args:
        whole: what all its weights tell.
        sums: what the measured rows tell.
        losses: by name, what each scheme makes of these that can store the layer.
        asked: the scheme that it is to be stored in.
    """
    weight, largest = whole.weight, float(whole.largest.item())
    count = weight.shape[0] * weight.shape[1]
    mean = whole.absolute / count
    std = math.sqrt(max(0.0, whole.squares / count - (whole.total / count) ** 2))
    ratio = largest / mean if largest else 0.0
    # Where all measured weights are zero and another is not.
    dynamic_range = largest / (sums.percentile() or largest) if largest else 0.0
    found = {
        "outliers": ratio > OUTLIER_RATIO,
        "range": dynamic_range > DYNAMIC_RANGE,
        "small": largest > 0 and std < DEVIATION,
        "zero": not largest,
        "large": asked in whole.schemes and asked.name not in losses,
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
        flags=tuple(flag for flag, raised in found.items() if raised),
        errors=_by_scheme({name: relative_error(sums.energy, loss.noise) for name, loss in losses.items()}),
        row_errors=_by_scheme(
            {name: math.sqrt(loss.row_noise * weight.shape[1] / sums.count) for name, loss in losses.items()}
        ),
        zero_shares=_by_scheme({name: max(0.0, loss.zeros - sums.zeros) / sums.count for name, loss in losses.items()}),
        subnormal_shares=_by_scheme({name: loss.subnormals / sums.count for name, loss in losses.items()}),
    )


def _by_scheme(found: dict[str, float]) -> dict[str, float | None]:
    return {name: found.get(name) for name in SCHEMES}


def _widen(grid: Floats, width: int | None) -> Floats:
    """A grid [n, groups] with each entry repeated over the columns of its group, if a row has several."""
    return grid if width is None else np.repeat(grid, width, axis=1)


def _sum(values: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        # Down the columns numpy adds several at once.
        found = float(values.sum(axis=0).sum(dtype=np.float64))
    return found if math.isfinite(found) else float(values.sum(dtype=np.float64))

"""The figures of one layer, summed over pieces of it: of all its weights, and of rows that stand for others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.format import Format, Group
from ..formats.kernels import BITS_TYPE, CHUNK, Bits, absmax, encode, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import SCHEMES, Scheme
from ..formats.search import searched
from ..weights.weight import Weight
from .diagnosis import DEVIATION, DYNAMIC_RANGE, OUTLIER_RATIO, LayerDiagnosis
from .error import energy, relative_error, row_energies

Energies = npt.NDArray[np.float64]


class Rows(NamedTuple):
    """Some rows of a layer.

    Attributes:
        numbers: of the rows.
        bits: their weights [n, in].
        times: how many rows of the layer each of them stands for.
    """

    numbers: npt.NDArray[np.intp]
    bits: Bits
    times: float = 1.0


class Whole:
    """What all weights of a layer tell.

    Attributes:
        weight: the layer.
        schemes: those whose groups divide it.
        largest: the largest magnitude, float32 [1, 1].
        top: the row that has it.
        total: sum of the weights.
        absolute: sum of their magnitudes.
        squares: sum of their squares.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.schemes = [
            scheme
            for scheme in SCHEMES.values()
            if weight.is_held_by(scheme.format) or scheme.format.misfit(weight.shape) is None
        ]
        self.largest: Floats = np.zeros((1, 1), np.float32)
        self.top = Rows(np.zeros(1, np.intp), np.zeros((1, weight.shape[1]), BITS_TYPE[weight.dtype]))
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
        """Add rows from `low` on; whether all their weights are finite, without which nothing is added."""
        dtype = self.weight.dtype
        for form, grid in self._grids.items():
            grid.append(absmax(bits, dtype, form.group))
        grids = [grid[-1] for grid in self._grids.values()] or [absmax(bits, dtype, (None, None))]
        largest = grids[0].max(keepdims=True)
        if not np.isfinite(largest).all():
            return False
        if largest > self.largest:
            self.largest = largest
            row = int(absmax(bits, dtype, (1, None)).argmax())
            self.top = Rows(np.array([low + row]), bits[row : row + 1].copy())
        step = max(1, CHUNK // self.weight.shape[1])
        for start in range(0, len(bits), step):
            values = to_float32(bits[start : start + step], dtype)
            self.total += _sum(values)
            self.absolute += _sum(np.abs(values))
            self.squares += energy(values)
        return True

    def scales(self, scheme: Scheme, rows: Rows, shared: Floats) -> tuple[Group, Floats]:
        """The scales of some rows, once all are added, and which part of these rows has one each: (1, 128) of blocks.

        Args:
            scheme: what they are stored in.
            rows: the rows.
            shared: the largest magnitude of all layers that share a scale where a format has one for a joined set.
        """
        form = scheme.format
        height, width = form.group
        if form.shared:
            return form.group, form.scales(shared)
        if form in self._grids:
            if len(self._grids[form]) > 1:
                self._grids[form] = [np.concatenate(self._grids[form])]
            return (1, width), form.scales(self._grids[form][0][rows.numbers // (height or 1)])
        largest = absmax(rows.bits, self.weight.dtype, form.group)
        divisor = form.divisor(shared)
        if scheme.ratios:
            return form.group, searched(rows.bits, self.weight.dtype, largest, form, scheme.ratios, divisor)
        return form.group, form.scales(largest, divisor)


class Sums:
    """What the measured rows of a layer tell, each counted for the rows that it stands for.

    Args:
        schemes: those that can store the layer.
    """

    def __init__(self, schemes: Sequence[Scheme]) -> None:
        self.rows = 0
        self.count = self.zeros = 0.0
        # How many magnitudes have each upper half of a float32: with bfloat16 weights, each value.
        self.magnitudes = np.zeros(1 << 15)
        self.noise = {scheme.name: 0.0 for scheme in schemes}
        # Of each row's noise over its own energy.
        self.row_noise = dict(self.noise)
        self.zero_codes = dict(self.noise)
        self.subnormal_codes = dict(self.noise)

    def add(self, values: Floats, times: float) -> None:
        """Add weights of some rows, each of which stands for `times`."""
        self.rows += len(values)
        self.count += times * values.size
        self.zeros += times * (values.size - int(np.count_nonzero(values)))
        upper = (values.view(np.uint32) >> 16).astype(np.intp) & 0x7FFF
        self.magnitudes += times * np.bincount(upper.reshape(-1), minlength=1 << 15)

    def add_scheme(
        self,
        scheme: Scheme,
        rows: Rows,
        dtype: str,
        values: Floats,
        energies: Energies,
        group: Group,
        scale: Floats,
        divisor: Floats | None,
    ) -> None:
        """Add what a scheme makes of some rows.

        Args:
            scheme: the scheme.
            rows: the rows.
            dtype: of their weights.
            values: these as float32.
            energies: of each row.
            group: height and width of what shares a scale.
            scale: the scales, [n/height, in/width].
            divisor: what these were divided by, if the scheme has that.
        """
        number, width = scheme.format.number, group[1]
        codes = np.empty(values.shape, np.uint8)
        encode(rows.bits, dtype, scale, group, codes, number, divisor)
        spread = scale if width is None else np.repeat(scale, width, axis=1)
        made = number.decode(codes)
        made *= spread
        zeros = made.size - int(np.count_nonzero(made))
        self.zero_codes[scheme.name] += rows.times * zeros
        if number.normal:
            below = int(np.count_nonzero(np.abs(made) < spread * np.float32(number.normal)))
            self.subnormal_codes[scheme.name] += rows.times * (below - zeros)
        made -= values
        noise = row_energies(made)
        self.noise[scheme.name] += rows.times * float(noise.sum())
        # A row of zeros has no noise.
        self.row_noise[scheme.name] += rows.times * float((noise / np.where(energies > 0, energies, 1)).sum())

    def percentile(self) -> float:
        """The first percentile of the nonzero magnitudes: one in a hundred is as small, or smaller; 0 without any."""
        reached = np.cumsum(np.where(np.arange(1 << 15) > 0, self.magnitudes, 0))
        place = int(np.searchsorted(reached, reached[-1] / 100)) if reached[-1] else 0
        return float(np.uint32(place << 16).view(np.float32))


def diagnosed(whole: Whole, sums: Sums, asked: Scheme) -> LayerDiagnosis:
    """The figures of a layer.

    Args:
        whole: what all its weights tell.
        sums: what the measured rows tell.
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
        "large": asked in whole.schemes and asked.name not in sums.noise,
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
        errors=_by_scheme({name: relative_error(whole.squares, noise) for name, noise in sums.noise.items()}),
        row_errors=_by_scheme(
            {name: math.sqrt(noise * weight.shape[1] / sums.count) for name, noise in sums.row_noise.items()}
        ),
        zero_shares=_by_scheme(
            {name: max(0.0, codes - sums.zeros) / sums.count for name, codes in sums.zero_codes.items()}
        ),
        subnormal_shares=_by_scheme({name: codes / sums.count for name, codes in sums.subnormal_codes.items()}),
    )


def _by_scheme(found: dict[str, float]) -> dict[str, float | None]:
    return {name: found.get(name) for name in SCHEMES}


def _sum(values: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(values.sum())
    return found if math.isfinite(found) else float(values.sum(dtype=np.float64))

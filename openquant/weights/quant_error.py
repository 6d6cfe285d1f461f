"""How far a quantized layer is from its source: the one place where that is summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..formats.format import Format, grid_of
from ..formats.kernels import CHUNK, Bits, absmax, encode, encode_float32, to_float32, unpack
from ..formats.numbers import Codes, Floats
from ..formats.scales import choose_scales
from ..formats.schemes import Scheme


@dataclass(frozen=True)
class LayerError:
    """How far a quantized layer is from its source.

    Attributes:
        module: the layer.
        shape: (out, in).
        relative: Frobenius norm of the difference over that of the source's weight.
        sqnr_db: `relative` as a signal-to-noise ratio, 31.6 for 0.0264; None where nothing differs.
        largest: largest absolute difference.
    """

    module: str
    shape: tuple[int, int]
    relative: float
    sqnr_db: float | None
    largest: float


class ErrorSum:
    """Energies of a layer's weights and of their error, and the largest error, summed over pieces of it."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.largest = 0.0

    def add(self, weights: Floats, error: Floats) -> None:
        """Add a piece of the layer.

        Args:
            weights: the source's weights, float32 [n, in].
            error: the absolute error of each, float32 [n, in].
        """
        self.signal += energy(weights)
        self.noise += energy(error)
        self.largest = max(self.largest, float(error.max()))

    def of(self, module: str, shape: tuple[int, int]) -> LayerError:
        """The error of the whole layer, of that name and shape (out, in)."""
        relative = relative_error(self.signal, self.noise)
        sqnr = -20 * math.log10(relative) if relative else None
        return LayerError(module, shape, relative, sqnr, self.largest)


class Comparison:
    """A quantized layer held against its source, piece by piece.

    A weight w under scale s becomes the code nearest to w / s, so that the difference is at most Number.bound. Where
    making the code again from the source gives the same one, that needs no looking at, unless the scale is too small
    for the weight. With a zero point z, it is the code nearest to w / s + z.

    Attributes:
        error: how far apart they are.
        grid: the scales, float32 [out / height, in / width].
        zeros: the zero points, the values of the codes that stand for zero, of the same shape; None where zero stands
            for itself.
        absmax: the largest absolute weight of each group, of the same shape.
        made: the scales that the source makes; where they are searched for, that which is there if it is one that the
            source can make: without a search, with it, or of any clip ratio if what errors counted is not known. NaN
            without a scheme.
        made_zeros: likewise the zero points; None where there are none.
        finite: whether all weights of the source are.
        differing: number of codes that are not what the source makes under these scales.
        first: the first of them: where it is, the code and the other.
        wrong: the first weight that is farther off than rounding explains, how far, how far it could be, and how many
            there are; None if none is.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        form: Format,
        scale: Floats,
        scale_dtype: str,
        scheme: Scheme | None = None,
        zeros: Floats | None = None,
        divisor: Floats | None = None,
        weighed: bool = False,
    ) -> None:
        self.shape = shape
        self.form, self.divisor = form, divisor
        # The schemes that may have chosen the scales, that which the source makes its scales with last.
        self.candidates: tuple[Scheme, ...] = () if scheme is None else (scheme,)
        if scheme is not None and scheme.searches_scales:
            clipped = [replace(scheme, clip_ratios=(ratio,)) for ratio in (scheme.clip_ratios if weighed else ())]
            self.candidates = (scheme.unsearched, *clipped, scheme)
        self.number = form.number
        height, width = form.group
        self.group = height, width if width is not None and width < shape[1] else None
        self.grid = scale.reshape(grid_of(self.group, shape))
        self.zeros = None if zeros is None else zeros.reshape(self.grid.shape)
        self.absmax = np.zeros(self.grid.shape, np.float32)
        self.made = np.full(self.grid.shape, np.nan, np.float32)
        self.made_zeros = None if zeros is None else np.full(self.grid.shape, np.nan, np.float32)
        # The scale may have been rounded once the codes were made; what float32 loses is nothing beside it.
        self.slack = 2.0**-8 if scale_dtype in ("BF16", "F16") else 2.0**-20
        self.error = ErrorSum()
        self.finite = True
        self.differing = 0
        self.first: tuple[tuple[int, int], int, int] | None = None
        self.wrong: tuple[tuple[int, int], float, float, int] | None = None

    def add(self, low: int, stored: Codes, bits: Bits, dtype: str) -> None:
        """Add some rows.

        Args:
            low: the number of the first.
            stored: their codes as they are stored, uint8 [n, in / codes in a byte].
            bits: the source's weights, uint16 or uint32 [n, in].
            dtype: the dtype of the source's weights: "BF16", "F16" or "F32".
        """
        step = max(1, CHUNK // self.shape[1])
        # Where each row has scales of its own, any number of rows go together; else those of one row of groups.
        height = self.shape[0] if self.group[0] == 1 else self.group[0] or self.shape[0]
        top = low
        while top < low + len(stored) and self.finite:
            end = min(top + step, low + len(stored), (top // height + 1) * height)
            codes = unpack(stored[top - low : end - low], self.number)
            with np.errstate(over="ignore"):
                self._add(top, codes, np.ascontiguousarray(bits[top - low : end - low]), dtype)
            top = end

    def _add(self, top: int, codes: Codes, bits: Bits, dtype: str) -> None:
        cols, width = self.shape[1], self.group[1]
        group = (1 if self.group[0] == 1 else None, width)
        first = top // (self.group[0] or self.shape[0])
        rows = slice(first, first + (len(codes) if group[0] else 1))
        if width is not None and cols % width:
            # What fills the last group up changes nothing.
            bits = np.pad(bits, ((0, 0), (0, -cols % width)))
        largest, scale = absmax(bits, dtype, group), self.grid[rows]
        if not np.isfinite(largest).all():
            self.finite = False
            return
        np.maximum(self.absmax[rows], largest, out=self.absmax[rows])
        self._remake(rows, bits, dtype)
        fits = bool((largest <= scale * np.float32(self.number.largest * (1 + 2.0**-20))).all())
        weight = to_float32(np.ascontiguousarray(bits[:, :cols]), dtype)
        spread = scale if width is None else np.repeat(scale, width, axis=1)[:, :cols]
        zero = None if self.zeros is None else self.zeros[rows]
        if zero is not None and width is not None:
            zero = np.repeat(zero, width, axis=1)[:, :cols]
        if fits and zero is None:
            made = np.empty(bits.shape, np.uint8)
            encode(bits, dtype, scale, group, made, self.number)
            made = made[:, :cols]
        else:
            # The kernel counts on scales that are large enough.
            made = encode_float32(weight, spread, self.number, zero)
        same = np.array_equal(made, codes)
        if not same:
            differs = made != codes
            self.differing += int(differs.sum())
            if self.first is None:
                row, col = (int(axis) for axis in np.unravel_index(int(differs.argmax()), differs.shape))
                self.first = (top + row, col), int(codes[row, col]), int(made[row, col])
        error = self.number.decode(codes)
        if zero is not None:
            error -= zero
        error *= spread
        error -= weight
        np.abs(error, out=error)
        self.error.add(weight, error)
        if not (same and fits):
            self._bound(top, weight if zero is None else weight + zero * spread, error, spread)

    def _remake(self, rows: slice, bits: Bits, dtype: str) -> None:
        """Choose the scales and zero points of some rows of groups again, from the source's weights."""
        scale, zero = self.grid[rows], None if self.zeros is None else self.zeros[rows]
        explained = np.zeros(scale.shape, np.bool_)
        for candidate in self.candidates:
            made = choose_scales(candidate, bits, dtype, self.absmax[rows], self.divisor)
            same = made.scale == scale
            if zero is not None and made.zero_point is not None:
                same &= made.zero_point == zero
            explained |= same
            self.made[rows] = np.where(explained, scale, made.scale)
            if self.made_zeros is not None and zero is not None and made.zero_point is not None:
                self.made_zeros[rows] = np.where(explained, zero, made.zero_point)
            if explained.all():
                break

    def _bound(self, top: int, weight: Floats, error: Floats, scale: Floats) -> None:
        """Look for weights that are farther off than rounding explains, these with their zero points added."""
        bound = self.number.bound(weight, scale, self.slack)
        off = ~(error <= bound)
        if off.any():
            row, col = (int(axis) for axis in np.unravel_index(int(off.argmax()), off.shape))
            first = ((top + row, col), float(error[row, col]), float(bound[row, col]), 0)
            place, by, bounded, count = self.wrong or first
            self.wrong = (place, by, bounded, count + int(off.sum()))


def relative_error(signal: float, noise: float) -> float:
    """How far weights are off, given their energy and that of their error: 0.0264; 1.0 where zeros are off at all."""
    return math.sqrt(noise / signal) if signal else float(noise > 0)


def energy(values: Floats) -> float:
    """Sum of squares of a float32 array [n, in]."""
    with np.errstate(over="ignore"):
        # Down the columns numpy adds several at once.
        found = float(np.einsum("ij,ij->j", values, values).sum(dtype=np.float64))
    if 1e-30 < found < math.inf:
        return found
    return float(np.square(values, dtype=np.float64).sum())


def row_energies(values: Floats) -> npt.NDArray[np.float64]:
    """Sum of squares of each row of a float32 array [n, in], as float64 [n]."""
    with np.errstate(over="ignore"):
        found: npt.NDArray[np.float64] = np.einsum("ij,ij->i", values, values).astype(np.float64)
    if not np.all((found > 1e-30) & (found < math.inf)):
        found = np.square(values, dtype=np.float64).sum(axis=1)
    return found

"""Quantization error of a layer: its sum over pieces, and the comparison of stored codes with the source."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..formats.format import Format, grid_of, widen
from ..formats.kernels import CHUNK, Bits, absmax, choose_scales, encode_float32, to_float32, unpack
from ..formats.numbers import Codes, Floats
from ..formats.schemes import Scheme

# Largest relative change from storing float32 or float16 as bfloat16.
ROUNDED = 2.0**-8
# GPTQ moves weights farther than rounding to nearest does, where inputs are alike by up to 5 times (the first layer of
# SmolLM2-135M). If the median layer's error is more than MOVED times its rounding error, such a method made it. Limits
# of a layer are then ERROR_MOVED, relative to its rounding error, and OTHER_WEIGHTS, relative to its weights: codes of
# zeros have 1, a layer of SmolLM2-135M in int2 by GPTQ has 0.957.
MOVED = 1.1
ERROR_MOVED = 8.0
OTHER_WEIGHTS = 0.98
# Of fewer weights GPTQ can turn round all.
FEW_WEIGHTS = 64
# A row is another than the source's if it is larger or smaller by this factor, measured as <source, output> / <source,
# source>: GPTQ made one of 576 in SmolLM2-135M 0.46 times as large in nvfp4, 0.18 times in int2.
WRONG_ROW = 10.0


@dataclass(frozen=True)
class LayerError:
    """Quantization error of one layer.

    Attributes:
        module: the layer's module.
        shape: (out, in).
        relative: Frobenius norm of the error divided by that of the source's weight.
        sqnr_db: signal-to-quantization-noise ratio in dB: 31.6 for a relative error of 0.0264; None without any error.
        largest: largest absolute error of a weight.
    """

    module: str
    shape: tuple[int, int]
    relative: float
    sqnr_db: float | None
    largest: float


class ErrorSum:
    """Sums of squares of a layer's weights (signal) and errors (noise), and its largest error, over pieces of rows.

    Attributes:
        rounding: the noise that rounding to the nearest codes would have.
        rows: number of rows so far.
        other_rows: number of rows that are not the source's (WRONG_ROW), where the nearest codes would be.
        first_other: index of the first of them, and its <source, output> / <source, source>; None if there is none.
    """

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.rounding = 0.0
        self.largest = 0.0
        self.rows = 0
        self.other_rows = 0
        self.first_other: tuple[int, float] | None = None

    def add(self, weights: Floats, error: Floats, nearest: Floats) -> None:
        """Add a piece of the layer.

        Args:
            weights: the source's weights, float32 [n, in].
            error: the output's weights minus these, float32 [n, in].
            nearest: the error that the nearest codes have, float32 [n, in]; `error` itself if those are stored.
        """
        noise = energy(error)
        self.signal += energy(weights)
        self.noise += noise
        self.rounding += noise if nearest is error else energy(nearest)
        self.largest = max(self.largest, float(error.max()), -float(error.min()))

        if nearest is not error and weights.shape[1] >= FEW_WEIGHTS:
            self._count_others(weights, error, nearest)
        self.rows += len(weights)

    def _count_others(self, weights: Floats, error: Floats, nearest: Floats) -> None:
        """Count rows of other weights."""
        signals = row_energies(weights)
        products = signals + _row_products(weights, error)
        others = _are_others(signals, products) & ~_are_others(signals, signals + _row_products(weights, nearest))
        self.other_rows += int(others.sum())
        if self.first_other is None and others.any():
            row = int(others.argmax())
            self.first_other = self.rows + row, float(products[row] / signals[row])

    @property
    def times_rounding(self) -> float:
        """The error relative to that of the nearest codes."""
        relative = relative_error(self.signal, self.noise)
        if relative == 0:
            return 1.0
        return relative / max(relative_error(self.signal, self.rounding), ROUNDED)

    @property
    def excess(self) -> str | None:
        """What is wrong with the weights even if a method such as GPTQ chose the codes; None if nothing is."""
        relative = relative_error(self.signal, self.noise)
        explained = ERROR_MOVED * max(relative_error(self.signal, self.rounding), ROUNDED)
        limit = min(OTHER_WEIGHTS, explained)
        if relative > limit:
            return f"has a relative error of {relative:.3g}, where GPTQ explains {limit:.3g}"
        if self.first_other is not None:
            row, factor = self.first_other
            return (
                f"holds other weights than the source's in row {row}, {factor:.3g} times as large along it "
                f"({self.other_rows} of {self.rows} rows are others)"
            )
        return None

    def of(self, module: str, shape: tuple[int, int]) -> LayerError:
        """Return the error of the layer, once all its pieces are added.

        Args:
            module: the layer's module.
            shape: (out, in).
        """
        relative = relative_error(self.signal, self.noise)
        sqnr = -20 * math.log10(relative) if relative else None
        return LayerError(module, shape, relative, sqnr, self.largest)


class Comparison:
    """Compares the codes and scales of a quantized layer with its source, in pieces of rows.

    Quantizing rounds w / scale (+ zero point) to the nearest code, so the error is at most Number.bound. Where the
    source quantizes to the stored code again, the error needs no check, unless the scale is too small for the weight.

    Args:
        shape: (out, in).
        fmt: format of the codes.
        scale: the stored scales, float32 with one value for each group, the global scale applied.
        scale_dtype: dtype that they are stored in.
        scheme: the scheme that made them; None if unknown.
        zeros: the zero points as `Reader.zero_points` gives them; None for symmetric formats.
        divisor: the global scale, float32 [1, 1]; None without one.
        weighed: whether the search for scales weighted errors by inputs that are not known here.

    Attributes:
        error: sum of the errors so far.
        scale: the stored scales, float32 [grid rows, grid columns].
        zeros: the stored zero points, of the same shape; None for symmetric formats.
        absmax: largest magnitude of each group in the source, of the same shape.
        expected_scale: the scales that the source has under the scheme, of the same shape. Where scales were searched,
            a stored scale counts as expected if the scheme has it with or without a search, or, if `weighed`, with any
            clip ratio. NaN without a scheme.
        expected_zeros: likewise the zero points; None for symmetric formats.
        finite: whether all weights of the source so far are finite. Once one is not, nothing more is compared.
        differing: number of codes that differ from those that the source has under the stored scales.
        first_difference: (row, column), stored code and expected code of the first of them; None if none differs.
        out_of_bound: (row, column), error and largest possible rounding error of the first weight whose error rounding
            cannot explain, and the number of such weights; None if there is none.
        first_run: (row, column) of the first of FEW_WEIGHTS codes that are all the same, and most of them not the
            nearest ones; None if there is none. A page of a file that was lost looks so.
        runs: how many of them there are.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        fmt: Format,
        scale: Floats,
        scale_dtype: str,
        scheme: Scheme | None = None,
        zeros: Floats | None = None,
        divisor: Floats | None = None,
        weighed: bool = False,
    ) -> None:
        self.shape = shape
        self.fmt = fmt
        self.divisor = divisor

        # Schemes that may have chosen the scales; the last one gives `expected_scale` if none of them did.
        self.candidates: list[Scheme] = []
        if scheme is not None and scheme.searches_scales:
            self.candidates.append(scheme.unsearched)
            if weighed:
                self.candidates += [replace(scheme, clip_ratios=(ratio,)) for ratio in scheme.clip_ratios]
        if scheme is not None:
            self.candidates.append(scheme)

        self.number = fmt.number
        height, width = fmt.group
        if width is not None and width >= shape[1]:
            width = None
        self.group = height, width
        self.scale = scale.reshape(grid_of(self.group, shape))
        self.zeros: Floats | None = None
        self.expected_zeros: Floats | None = None
        if zeros is not None:
            self.zeros = zeros.reshape(self.scale.shape)
            self.expected_zeros = np.full(self.scale.shape, np.nan, np.float32)

        self.absmax = np.zeros(self.scale.shape, np.float32)
        self.expected_scale = np.full(self.scale.shape, np.nan, np.float32)

        # Relative error of scales: some were rounded to 16 bits after the codes were made; else float32 rounding.
        self.slack = 2.0**-20
        if scale_dtype in ("BF16", "F16"):
            self.slack = 2.0**-8

        self.error = ErrorSum()
        self.finite = True
        self.differing = 0
        self.first_difference: tuple[tuple[int, int], int, int] | None = None
        self.out_of_bound: tuple[tuple[int, int], float, float, int] | None = None
        self.first_run: tuple[int, int] | None = None
        self.runs = 0

    @property
    def excess(self) -> str | None:
        """What is wrong with the codes even if a method such as GPTQ chose them; None if nothing is."""
        if self.error.excess is not None or self.first_run is None:
            return self.error.excess
        row, column = self.first_run
        return (
            f"has one code in all of columns {column} to {column + FEW_WEIGHTS - 1} of row {row}, where the source's "
            f"weights differ ({self.runs} such runs)"
        )

    def add(self, low: int, stored: Codes, bits: Bits, dtype: str) -> None:
        """Compare some rows.

        Args:
            low: index of the first row.
            stored: their codes as stored, uint8 [n, bytes of a row].
            bits: the same rows of the source, uint16 or uint32 [n, in].
            dtype: dtype of the source's weights: "BF16", "F16" or "F32".
        """
        step = max(1, CHUNK // self.shape[1])
        # With scales for each row, any rows can be compared at once; else those of one row of groups.
        height = self.shape[0] if self.group[0] == 1 else self.group[0] or self.shape[0]
        top = low
        while top < low + len(stored) and self.finite:
            end = min(top + step, low + len(stored), (top // height + 1) * height)
            codes = unpack(stored[top - low : end - low], self.number)
            with np.errstate(over="ignore"):
                self._add(top, codes, np.ascontiguousarray(bits[top - low : end - low]), dtype)
            top = end

    def _add(self, top: int, codes: Codes, bits: Bits, dtype: str) -> None:
        cols = self.shape[1]
        width = self.group[1]
        group = (1 if self.group[0] == 1 else None, width)
        first = top // (self.group[0] or self.shape[0])
        rows = slice(first, first + (len(codes) if group[0] else 1))

        if width is not None and cols % width:
            # Zeros that fill up the last group change no scale.
            bits = np.pad(bits, ((0, 0), (0, -cols % width)))

        group_absmax = absmax(bits, dtype, group)
        scale = self.scale[rows]
        if not np.isfinite(group_absmax).all():
            self.finite = False
            return

        np.maximum(self.absmax[rows], group_absmax, out=self.absmax[rows])
        self._update_expected(rows, bits, dtype)

        fits = bool((group_absmax <= np.abs(scale) * np.float32(self.number.largest * (1 + 2.0**-20))).all())
        weight = to_float32(np.ascontiguousarray(bits[:, :cols]), dtype)
        element_scale = widen(scale, width)[:, :cols]
        zero = None if self.zeros is None else widen(self.zeros[rows], width)[:, :cols]

        expected = encode_float32(weight, element_scale, self.number, zero)
        same = np.array_equal(expected, codes)
        if not same:
            differs = expected != codes
            self.differing += int(differs.sum())
            if self.first_difference is None:
                row, col = (int(axis) for axis in np.unravel_index(int(differs.argmax()), differs.shape))
                self.first_difference = (top + row, col), int(codes[row, col]), int(expected[row, col])
            self._count_runs(top, codes, expected)

        error = self._decode(codes, zero, element_scale) - weight
        nearest = error if same else self._decode(expected, zero, element_scale) - weight
        self.error.add(weight, error, nearest)

        if not (same and fits):
            np.abs(error, out=error)
            self._check_bound(top, weight if zero is None else weight + zero * element_scale, error, element_scale)

    def _count_runs(self, top: int, codes: Codes, expected: Codes) -> None:
        """Count runs of one code that are mostly not the nearest ones."""
        stored = _runs(codes)
        is_constant = (stored == stored[:, :, :1]).all(axis=2)
        differing = (stored != _runs(expected)).sum(axis=2)
        found = is_constant & (differing > FEW_WEIGHTS // 2)
        self.runs += int(found.sum())
        if self.first_run is None and found.any():
            row, run = (int(axis) for axis in np.unravel_index(int(found.argmax()), found.shape))
            self.first_run = top + row, run * FEW_WEIGHTS

    def _decode(self, codes: Codes, zero: Floats | None, element_scale: Floats) -> Floats:
        """Return the weights that codes stand for, float32 [n, in]."""
        values = self.number.decode(codes)
        if zero is not None:
            values -= zero
        values *= element_scale
        return values

    def _update_expected(self, rows: slice, bits: Bits, dtype: str) -> None:
        """Set the expected scales and zero points of some rows of groups, from the source's weights."""
        scale = self.scale[rows]
        zero = None if self.zeros is None else self.zeros[rows]
        explained = np.zeros(scale.shape, np.bool_)

        for candidate in self.candidates:
            chosen = choose_scales(candidate, bits, dtype, self.absmax[rows], self.divisor)
            same = chosen.scale == scale
            if zero is not None and chosen.zero_point is not None:
                same &= chosen.zero_point == zero
            explained |= same

            self.expected_scale[rows] = np.where(explained, scale, chosen.scale)
            if self.expected_zeros is not None and zero is not None and chosen.zero_point is not None:
                self.expected_zeros[rows] = np.where(explained, zero, chosen.zero_point)

            if explained.all():
                break

    def _check_bound(self, top: int, weight: Floats, error: Floats, scale: Floats) -> None:
        """Count weights whose error rounding cannot explain. `weight` has zero point * scale added."""
        bound = self.number.bound(weight, np.abs(scale), self.slack)
        outside = ~(error <= bound)
        if outside.any():
            row, col = (int(axis) for axis in np.unravel_index(int(outside.argmax()), outside.shape))
            first = (top + row, col), float(error[row, col]), float(bound[row, col]), 0
            place, distance, limit, count = self.out_of_bound or first
            self.out_of_bound = place, distance, limit, count + int(outside.sum())


def relative_error(signal: float, noise: float) -> float:
    """Return the relative error, such as 0.0264.

    Args:
        signal: sum of squares of the weights.
        noise: sum of squares of the errors.

    Returns:
        sqrt(noise / signal). If all weights are zero: 1.0 with any error, else 0.0.
    """
    if signal == 0:
        return float(noise > 0)
    return math.sqrt(noise / signal)


def _row_products(left: Floats, right: Floats) -> npt.NDArray[np.float64]:
    """Return the inner product of each row of two arrays, float32 [n, in], as float64 [n]."""
    products: npt.NDArray[np.float64] = np.einsum("ij,ij->i", left, right, dtype=np.float64)
    return products


def _are_others(signals: npt.NDArray[np.float64], products: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which rows are not the source's, given <source, source> and <source, output> of each."""
    others: npt.NDArray[np.bool_] = (products > WRONG_ROW * signals) | (products < signals / WRONG_ROW)
    return others


def _runs(codes: Codes) -> Codes:
    """Divide each row into runs of FEW_WEIGHTS codes, [n, runs, FEW_WEIGHTS], without what is left at its end."""
    count = codes.shape[1] // FEW_WEIGHTS
    return codes[:, : count * FEW_WEIGHTS].reshape(len(codes), count, FEW_WEIGHTS)


def energy(values: Floats) -> float:
    """Return the sum of squares of `values`, float32 [n, in]."""
    with np.errstate(over="ignore"):
        # numpy vectorizes sums over the rows.
        total = float(np.einsum("ij,ij->j", values, values).sum(dtype=np.float64))
    if 1e-30 < total < math.inf:
        return total
    return float(np.square(values, dtype=np.float64).sum())


def row_energies(values: Floats) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each row of `values`, float32 [n, in], as float64 [n]."""
    with np.errstate(over="ignore"):
        sums: npt.NDArray[np.float64] = np.einsum("ij,ij->i", values, values).astype(np.float64)
    if not np.all((sums > 1e-30) & (sums < math.inf)):
        sums = np.square(values, dtype=np.float64).sum(axis=1)
    return sums

"""Scales and zero points of groups, made from their least and their largest weights, or searched for without data.

A group whose weights are not spread evenly about zero has a finer grid where zero is not the middle code. As with one
scale alone (clip_search.py), both ends clipped a little may leave the others nearer to what their codes stand for.

    ranged(bits, "BF16", INT4_SHIFTED.format, (1.0, 0.9, 0.8))   # both float32 [rows, cols / 128]
"""

from __future__ import annotations

import numpy as np

from .clip_search import shares_of
from .format import Format
from .kernels import Bits, to_float32
from .numbers import Floats

# Weights looked at together, as in clip_search.py.
PIECE = 1 << 18


def ranged(
    bits: Bits, dtype: str, form: Format, ratios: tuple[float, ...] = (), importance: Floats | None = None
) -> tuple[Floats, Floats]:
    """The scale of each group, and the value of the code that stands for zero, float32 [rows, cols/width].

    The same on any CPU: each sum of squares adds in the order of the row.

    Args:
        bits: finite weights [rows, cols] of whole groups.
        dtype: their dtype.
        form: how they are stored; groups are parts of rows.
        ratios: shares of the least and largest weight that are tried, of two as good the first is taken; these
            themselves if there are none.
        importance: float32 [cols], what the squared errors of each column count; all alike if None.
    """
    width = form.group[1] or bits.shape[1]
    step = max(1, PIECE // bits.shape[1])
    shape = len(bits), bits.shape[1] // width
    scale, zero = np.empty(shape, np.float32), np.empty(shape, np.float32)
    shares = None if importance is None else shares_of(importance, width)
    for start in range(0, len(bits), step):
        part = to_float32(bits[start : start + step], dtype).reshape(-1, width)
        # A column for each group, as in clip_search.py.
        weighed = None if shares is None else np.tile(shares.T, (1, len(part) // shape[1]))
        found = _best(np.array(part.T, order="C"), form, ratios or (1.0,), weighed)
        for grid, values in zip((scale, zero), found, strict=True):
            grid[start : start + step] = values.reshape(-1, shape[1])
    return scale, zero


def _best(weights: Floats, form: Format, ratios: tuple[float, ...], weighed: Floats | None) -> tuple[Floats, Floats]:
    """The best scale and zero point of each column of weights [width, groups], which are changed."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    usual, best_zero = form.ranges(low, high)
    if ratios == (1.0,):
        return usual, best_zero
    # In units of the usual scale no square overflows, and none of a group that is not zero is lost.
    weights /= usual
    best, least = usual, np.full(usual.shape, np.inf, np.float32)
    quotients = np.empty_like(weights)
    for ratio in ratios:
        scale, zero = form.ranges(low * np.float32(ratio), high * np.float32(ratio))
        share = scale / usual
        np.multiply(weights, np.float32(1) / share, out=quotients)
        quotients += zero
        quotients -= form.number.nearest(quotients)
        quotients *= quotients
        if weighed is not None:
            quotients *= weighed
        error = quotients.sum(axis=0) * share * share
        best, best_zero = np.where(error < least, scale, best), np.where(error < least, zero, best_zero)
        least = np.minimum(error, least)
    return best, best_zero

"""The scale of each group by which its weights are nearest to what their codes stand for, found without data.

The largest weight of a group need not have the largest code: clipped a little, it leaves all others a finer grid.
Scales made of a few shares of the largest weight are tried, and that of the least squared error is taken.

    largest = kernels.absmax(bits, "BF16", (1, 128))
    searched(bits, "BF16", largest, INT4_W4A16.format, (1.0, 0.9, 0.8))   # float32 [rows, cols / 128]
"""

from __future__ import annotations

import numpy as np

from . import kernels
from .format import Format
from .kernels import Bits, Loops
from .numbers import Floats

# Groups looked at together: few calls into numpy, and what these make is still in the cache for the next.
PIECE = 1 << 16


def searched(
    bits: Bits,
    dtype: str,
    absmax: Floats,
    form: Format,
    ratios: tuple[float, ...],
    divisor: Floats | None = None,
    loops: Loops = kernels,
    importance: Floats | None = None,
) -> Floats:
    """The best scale of each group, float32 [rows, cols/width].

    The same on any CPU: each sum of squares adds in the order of the row.

    Args:
        bits: finite weights [rows, cols] of whole groups.
        dtype: their dtype.
        absmax: the largest absolute value of each group, [rows, cols/width].
        form: how they are stored; groups are parts of rows.
        ratios: shares of the largest weight that scales are made from, of two as good the first is taken.
        divisor: of the joined set, as for Format.scales; where a format has a global scale and None is given, that of
            these groups.
        loops: what looks at every weight.
        importance: float32 [cols], what the squared errors of each column count; all alike if None.
    """
    width = form.group[1] or bits.shape[1]
    step = max(1, PIECE // absmax.shape[1])
    found = np.empty(absmax.shape, np.float32)
    weighed = () if importance is None else (shares_of(importance, width),)
    above = (form.divisor(absmax.max(keepdims=True)) if divisor is None else divisor).reshape(1)
    for low in range(0, len(bits), step):
        part, largest = bits[low : low + step].reshape(-1, width), absmax[low : low + step].reshape(-1)
        with np.errstate(over="ignore"):
            # Scales in E4M3 are clamped to its largest.
            scales = np.stack([loops.scales(form, largest * np.float32(ratio), above) for ratio in ratios])
        best = loops.best(part, dtype, loops.scales(form, largest, above), scales, form.number, *weighed)
        found[low : low + step] = best.reshape(found[low : low + step].shape)
    return found


def shares_of(importance: Floats, width: int) -> Floats:
    """What squared errors count in each group of a row, at most 1, float32 [cols/width, width]; where nothing counts,
    all do alike.

    Example:
        shares_of(np.float32([8, 2, 0, 0]), 2)   # [[1, 0.25], [1, 1]]
    """
    groups = importance.reshape(-1, width)
    largest = groups.max(axis=1, keepdims=True)
    return np.where(largest > 0, groups / np.where(largest > 0, largest, np.float32(1)), np.float32(1))

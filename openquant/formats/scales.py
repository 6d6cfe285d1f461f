"""Choose the scales and zero points of weights: the one place that does, for every scheme.

A scale is made from the largest absolute weight of its group; with zero points, from the smallest and the largest
weight. The largest weight need not get the largest code: clipping it a little leaves all others a finer grid. A scheme
that searches tries a few clip ratios and takes the scale with the least squared error of the weights. Integers have one
code more below zero than above it, -8 to 7, so a search makes the scale negative if the largest weight is positive.

    choose_scales(INT4_W4A16, bits, "BF16").scale           # float32 [rows, cols / 128]
    choose_scales(INT4_SHIFTED, bits, "BF16").zero_point    # likewise
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import kernels
from .format import Format
from .kernels import Bits, Loops, to_float32
from .numbers import Floats
from .schemes import Scheme

# Groups whose scales, and weights whose zero points, are searched for together: few calls into numpy, and yet small
# enough for the cache.
GROUPS, WEIGHTS = 1 << 16, 1 << 18


class Scales(NamedTuple):
    """Scales and zero points of a weight: weight = (code value - zero point) * scale.

    Attributes:
        scale: scale of each group, float32 [rows / height, cols / width].
        zero_point: zero point of each group, float32 of the same shape; None if the format has none.
    """

    scale: Floats
    zero_point: Floats | None = None


def choose_scales(
    scheme: Scheme,
    bits: Bits,
    dtype: str,
    absmax: Floats | None = None,
    global_scale: Floats | None = None,
    importance: Floats | None = None,
    loops: Loops = kernels,
) -> Scales:
    """Choose the scale of each group of weights, and its zero point where the scheme has them.

    The result is the same on any CPU, since sums of squares add in the order of the row.

    Args:
        scheme: how the weights are stored.
        bits: bits of finite weights, uint16 (uint32 for F32) [rows, cols] of whole groups; only read if the scheme
            searches or has zero points, or `absmax` is None.
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        absmax: float32 [rows / height, cols / width], the largest absolute weight of each group, which may include
            rows outside `bits`. Computed from `bits` if None. Schemes with zero points ignore it.
        global_scale: float32 of one element, that of the fused layers, by which scales are multiplied before they are
            stored; computed from `absmax` if None. Schemes without a global scale ignore it.
        importance: float32 [cols], weights of the squared errors of each column; all are equal if None. Schemes that do
            not search ignore it.
        loops: the module that computes: formats.kernels (numpy) or formats.compiled (numba).

    Returns:
        `scale`, finite and not zero, and `zero_point`, each float32 [rows / height, cols / width]: weight = (code
        value - zero point) * scale. Only scales of integers that were searched for may be negative. With a global
        scale, `scale` is the stored scale divided by it. `zero_point` is None for schemes without zero points.
    """
    fmt = scheme.format
    clip_ratios = scheme.clip_ratios if scheme.searches_scales else (1.0,)
    if fmt.zero_point is not None:
        return _choose_with_zero_points(fmt, bits, dtype, clip_ratios, importance)
    if absmax is None:
        absmax = loops.absmax(bits, dtype, fmt.group)
    if global_scale is None and fmt.global_scale is not None:
        global_scale = choose_shared_scale(fmt, absmax.max(keepdims=True))
    if not scheme.searches_scales:
        return Scales(loops.scales(fmt, absmax, global_scale))
    return Scales(_search(fmt, bits, dtype, absmax, clip_ratios, global_scale, importance, loops))


def choose_shared_scale(fmt: Format, absmax: Floats) -> Floats:
    """Choose the scale that fused layers share: the only one of a per-tensor format, or else the global scale.

    Args:
        fmt: a per-tensor format, or one with a global scale.
        absmax: float32 of any shape, the largest absolute weight of the fused layers.

    Returns:
        float32 of the same shape: the per-tensor scale, with weight = code value * scale; or the global scale, by which
        the scales of groups are multiplied before they are stored.
    """
    return fmt.scales(absmax) if fmt.shared else fmt.choose_global_scale(absmax)


def _search(
    fmt: Format,
    bits: Bits,
    dtype: str,
    absmax: Floats,
    clip_ratios: tuple[float, ...],
    global_scale: Floats | None,
    importance: Floats | None,
    loops: Loops,
) -> Floats:
    """Return the scale of each group with the least squared error; of equal ones, that of the earlier clip ratio."""
    width = fmt.group[1] or bits.shape[1]
    step = max(1, GROUPS // absmax.shape[1])
    scale = np.empty(absmax.shape, np.float32)
    weighting = () if importance is None else (_relative_importance(importance, width),)
    # Groups are a single axis below, so the global scale must not have two.
    global_scale = None if global_scale is None else global_scale.reshape(1)
    for low in range(0, len(bits), step):
        groups, largest = bits[low : low + step].reshape(-1, width), absmax[low : low + step].reshape(-1)
        with np.errstate(over="ignore"):
            # A ratio above 1 may overflow; E4M3 clamps the scale.
            tried = np.stack([loops.scales(fmt, largest * np.float32(ratio), global_scale) for ratio in clip_ratios])
        unclipped = loops.scales(fmt, largest, global_scale)
        if fmt.number.span < fmt.number.largest:
            # The largest weight is to get the code of the largest magnitude, which is below zero.
            signs = loops.signs(groups)
            unclipped = unclipped * signs
            tried *= signs
        best = loops.best_scales(groups, dtype, unclipped, tried, fmt.number, *weighting)
        scale[low : low + step] = best.reshape(scale[low : low + step].shape)
    return scale


def _choose_with_zero_points(
    fmt: Format, bits: Bits, dtype: str, clip_ratios: tuple[float, ...], importance: Floats | None
) -> Scales:
    """Return the scale and zero point of each group; with several clip ratios, those of the least squared error."""
    width = fmt.group[1] or bits.shape[1]
    step = max(1, WEIGHTS // bits.shape[1])
    shape = len(bits), bits.shape[1] // width
    scale, zero_point = np.empty(shape, np.float32), np.empty(shape, np.float32)
    weighting = None if importance is None else _relative_importance(importance, width)
    for low in range(0, len(bits), step):
        groups = to_float32(bits[low : low + step], dtype).reshape(-1, width)
        if len(clip_ratios) == 1:
            ratio = np.float32(clip_ratios[0])
            best = fmt.ranges(groups.min(axis=1) * ratio, groups.max(axis=1) * ratio)
        else:
            # A column for each group, so that per-group arithmetic runs along memory. It is always a copy.
            weighed = None if weighting is None else np.tile(weighting.T, (1, len(groups) // shape[1]))
            best = _search_with_zero_points(fmt, np.array(groups.T, order="C"), clip_ratios, weighed)
        for grid, values in zip((scale, zero_point), best, strict=True):
            grid[low : low + step] = values.reshape(-1, shape[1])
    return Scales(scale, zero_point)


def _search_with_zero_points(
    fmt: Format, weights: Floats, clip_ratios: tuple[float, ...], weighting: Floats | None
) -> tuple[Floats, Floats]:
    """Return the best scale and zero point of each column of weights [width, groups], which is overwritten."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    unclipped, best_zero_point = fmt.ranges(low, high)
    # In units of the unclipped scale no square overflows or underflows.
    weights /= unclipped
    best, least = unclipped, np.full(unclipped.shape, np.inf, np.float32)
    quotients = np.empty_like(weights)
    for ratio in clip_ratios:
        scale, zero_point = fmt.ranges(low * np.float32(ratio), high * np.float32(ratio))
        relative = scale / unclipped
        np.multiply(weights, np.float32(1) / relative, out=quotients)
        quotients += zero_point
        quotients -= fmt.number.nearest(quotients)
        quotients *= quotients
        if weighting is not None:
            quotients *= weighting
        error = quotients.sum(axis=0) * relative * relative
        better = error < least
        best, best_zero_point = np.where(better, scale, best), np.where(better, zero_point, best_zero_point)
        least = np.minimum(error, least)
    return best, best_zero_point


def _relative_importance(importance: Floats, width: int) -> Floats:
    """Divide the importance [cols] by the largest of each group: float32 [cols / width, width]; 1 where all are zero.

    Example:
        _relative_importance(np.float32([8, 2, 0, 0]), 2)   # [[1, 0.25], [1, 1]]
    """
    groups = importance.reshape(-1, width)
    largest = groups.max(axis=1, keepdims=True)
    return np.where(largest > 0, groups / np.where(largest > 0, largest, np.float32(1)), np.float32(1))

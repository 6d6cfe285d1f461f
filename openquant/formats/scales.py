"""Scales and zero points: the one place that chooses them for a scheme and some weights.

A scale is made from the largest absolute weight of its group; with zero points, from the least and the largest weight.
The largest weight of a group need not have the largest code: clipped a little, it leaves all others a finer grid. A
scheme that searches tries a few clip ratios and takes, without data, the scale of the least squared error.

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

# Groups whose scales are searched for together, and weights whose zero points are: few calls into numpy, and what these
# make is still in the cache for the next.
GROUPS, WEIGHTS = 1 << 16, 1 << 18


class Scales(NamedTuple):
    """What the codes of a weight are made with.

    Attributes:
        scale: float32, one for each group: [rows / height, cols / width].
        zero_point: float32 of the same shape, the values of the codes that stand for zero; None where zero stands for
            itself in every group.
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

    The result is the same on any CPU: each sum of squares adds in the order of the row.

    Args:
        scheme: how the weights are stored. Where it searches or has zero points, groups are parts of rows.
        bits: the bits of finite weights, uint16 or uint32 [rows, cols] of whole groups; only looked at where the scheme
            searches, has zero points, or no absmax is given.
        dtype: their dtype: "BF16", "F16" or "F32".
        absmax: float32 [rows / height, cols / width], the largest absolute weight of each group: more rows than `bits`
            has may share a group. Computed from `bits` if None.
        global_scale: float32 of one element, what the scales of groups are divided by; that of these groups if None.
            Schemes without a global scale ignore it.
        importance: float32 [cols], what the squared errors of each column count; all alike if None.
        loops: the functions that look at every weight: kernels.py or compiled.py.

    Returns:
        The scale of each group, finite and above zero, and its zero point.
    """
    fmt = scheme.format
    clip_ratios = scheme.clip_ratios if scheme.searches_scales else (1.0,)
    if fmt.zero_point is not None:
        return _choose_with_zero_points(fmt, bits, dtype, clip_ratios, importance)
    if absmax is None:
        absmax = loops.absmax(bits, dtype, fmt.group)
    if global_scale is None and fmt.global_scale is not None:
        global_scale = choose_shared_scale(fmt, absmax.max(keepdims=True))
    if len(clip_ratios) == 1:
        return Scales(loops.scales(fmt, absmax * np.float32(clip_ratios[0]), global_scale))
    return Scales(_search(fmt, bits, dtype, absmax, clip_ratios, global_scale, importance, loops))


def choose_shared_scale(fmt: Format, absmax: Floats) -> Floats:
    """Choose the scale that fused layers share: the only one of a per-tensor format, or else the global scale.

    Args:
        fmt: how the layers are stored, in a format with such a scale.
        absmax: float32 of any shape, the largest absolute weight in any of them.

    Returns:
        The scale, float32 of the same shape.
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
    """The scale of each group with the least squared error; of two as good, that of the earlier clip ratio."""
    width = fmt.group[1] or bits.shape[1]
    step = max(1, GROUPS // absmax.shape[1])
    scale = np.empty(absmax.shape, np.float32)
    weighting = () if importance is None else (_relative_importance(importance, width),)
    # Groups are one axis here.
    global_scale = None if global_scale is None else global_scale.reshape(1)
    for low in range(0, len(bits), step):
        groups, largest = bits[low : low + step].reshape(-1, width), absmax[low : low + step].reshape(-1)
        with np.errstate(over="ignore"):
            # Scales in E4M3 are clamped to its largest.
            tried = np.stack([loops.scales(fmt, largest * np.float32(ratio), global_scale) for ratio in clip_ratios])
        unclipped = loops.scales(fmt, largest, global_scale)
        best = loops.best_scales(groups, dtype, unclipped, tried, fmt.number, *weighting)
        scale[low : low + step] = best.reshape(scale[low : low + step].shape)
    return scale


def _choose_with_zero_points(
    fmt: Format, bits: Bits, dtype: str, clip_ratios: tuple[float, ...], importance: Floats | None
) -> Scales:
    """The scale and zero point of each group: of several clip ratios those with the least squared error."""
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
            # A column for each group: what is computed for each of them runs along memory. It is always a copy.
            weighed = None if weighting is None else np.tile(weighting.T, (1, len(groups) // shape[1]))
            best = _search_with_zero_points(fmt, np.array(groups.T, order="C"), clip_ratios, weighed)
        for grid, values in zip((scale, zero_point), best, strict=True):
            grid[low : low + step] = values.reshape(-1, shape[1])
    return Scales(scale, zero_point)


def _search_with_zero_points(
    fmt: Format, weights: Floats, clip_ratios: tuple[float, ...], weighting: Floats | None
) -> tuple[Floats, Floats]:
    """The best scale and zero point of each column of weights [width, groups], which are changed."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    unclipped, best_zero_point = fmt.ranges(low, high)
    # In units of the unclipped scale no square overflows, and none of a group that is not zero is lost.
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
    """What squared errors count in each group of a row, at most 1, float32 [cols / width, width]; where nothing counts,
    all do alike.

    Example:
        _relative_importance(np.float32([8, 2, 0, 0]), 2)   # [[1, 0.25], [1, 1]]
    """
    groups = importance.reshape(-1, width)
    largest = groups.max(axis=1, keepdims=True)
    return np.where(largest > 0, groups / np.where(largest > 0, largest, np.float32(1)), np.float32(1))

"""Scales and zero points in torch, without a search, to compare those of openquant with."""

from __future__ import annotations

from torch import Tensor

from openquant.formats.format import Format, grid_of
from openquant.formats.reference import group_scale


def group_ranges(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Compute the scale and zero point of each group from its smallest and largest weight.

    Args:
        weight: [out, in] of whole groups, of any floating dtype.
        format: a format with zero points.

    Returns:
        Scales and zero points, both float32 [out / height, in / width]: weight = (code value - zero point) * scale.
    """
    down, along = grid_of(format.group, weight.shape)
    grouped = weight.float().reshape(down, weight.shape[0] // down, along, weight.shape[1] // along)
    low = grouped.amin((1, 3)).clamp(max=0)
    high = grouped.amax((1, 3)).clamp(min=0)
    half = (high - low) / 2
    exact = (half / half.new_tensor(format.number.span)).clamp(min=format.scale.floor)
    largest = format.number.largest
    zero_point = (-largest - low / exact).round().clamp(-largest, 2 * format.number.span - largest)
    return group_scale(half, format), zero_point

"""The arithmetic of kernels.py in a few lines of torch: the reference for tests, and what a GPU runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .format import Format, Group, grid_of
from .numbers import E2M1, E4M3, INT8, Number, lanes

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def group_absmax(weight: Tensor, group: Group) -> Tensor:
    """Compute the largest absolute weight of each group.

    Args:
        weight: [out, in] of whole groups, of any floating dtype.
        group: (height, width) of a group; None is the whole axis.

    Returns:
        float32 [out / height, in / width].
    """
    return _to_groups(weight.float().abs(), group).amax((1, 3))


def group_global_scale(largest: Tensor, format: Format) -> Tensor:
    """Compute the global scale of NVFP4, by which the scales of groups are multiplied before they are stored.

    Args:
        largest: float32 of any shape, the largest absolute weight of the fused layers.
        format: how the weights are stored.

    Returns:
        float32 of the same shape and on the same device: 2688 / largest for NVFP4, at most 2^125; 1 where all weights
        are zero or the format has no global scale.
    """
    return torch.from_numpy(format.choose_global_scale(largest.cpu().numpy())).to(largest.device)


def group_scale(absmax: Tensor, format: Format, global_scale: Tensor | None = None) -> Tensor:
    """Compute the scale of each group from its largest absolute weight.

    Args:
        absmax: float32 of any shape, the largest absolute weight of each group.
        format: how the weights are stored.
        global_scale: float32 of one element, by which scales are multiplied before they are stored; computed from
            `absmax` if None and the format has one. It must be None or 1 if the format has none.

    Returns:
        float32 of the shape of `absmax`: weight = code value * scale. Where there is a global scale, it is the stored
        scale divided by the global scale.
    """
    # The divisor is a tensor: on a GPU torch would multiply by the reciprocal of a number, which rounds differently.
    scale = absmax / absmax.new_tensor(format.scale.clip_limit or format.number.span)
    if format.scale.power_of_two:
        scale = ((scale.view(torch.int32) + format.carry) & ~0x7FFFFF).view(torch.float32)
    if format.global_scale is not None:
        if global_scale is None:
            global_scale = group_global_scale(absmax.amax(keepdim=True), format)
        scale = scale * global_scale
    scale = scale.clamp(min=format.scale.floor)

    # As it is stored.
    if format.scale.dtype == "BF16":
        scale = scale.bfloat16().float()
    if format.scale.dtype == "F8_E4M3":
        scale = scale.clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = torch.where(absmax == 0, torch.full_like(scale, format.scale.of_zeros), scale)
    if global_scale is None:
        return scale
    return scale / global_scale


def stored_scale(scale: Tensor, format: Format, shape: tuple[int, int], global_scale: Tensor | None = None) -> Tensor:
    """Encode scales as they are stored.

    Args:
        scale: float32 [out / height, in / width], not multiplied by the global scale, as `group_scale` returns them.
        format: how the weight is stored.
        shape: (out, in) of the weight.
        global_scale: float32 of one element, by which scales are multiplied before they are stored; None if the format
            has none.

    Returns:
        float32, bfloat16, float8_e4m3fn or uint8 (E8M0); [out / height, in / width], or [out / height] where the format
        stores scales with one axis, and one element [1] or [] per tensor.
    """
    scale = scale.reshape(format.scale_shape(shape))
    if format.scale.dtype == "F8_E4M3":
        assert global_scale is not None
        return (scale * global_scale).to(torch.float8_e4m3fn)
    if format.scale.dtype == "BF16":
        return scale.bfloat16()
    if format.scale.dtype == "U8":
        return (scale.view(torch.int32) >> 23).to(torch.uint8)
    return scale


def encode(weight: Tensor, scale: Tensor, format: Format, zero_point: Tensor | None = None) -> Tensor:
    """Quantize a weight: divide by the scale, add the zero point, clamp, round to nearest even.

    E2M1 with the scale 0.5 stores [-4.0, 0.0, 1.3, 9.0] as -6, 0, 3 and 6: the bytes [0x0f, 0x75].

    Args:
        weight: [out, in] of whole groups, of any floating dtype.
        scale: float32 [out / height, in / width]: weight = (code value - zero point) * scale, so any global scale is
            already divided out.
        format: how the weight is stored.
        zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.

    Returns:
        The codes as they are stored: float8_e4m3fn or int8 [out, in], uint8 pairs [out, in / 2] or int32 words
        [out, in * bits / 32].
    """
    quotient = _to_groups(weight.float(), format.group) / _spread(scale, weight, format.group)
    if zero_point is not None:
        quotient += _spread(zero_point, weight, format.group)
    largest = format.number.largest
    quotient = quotient.clamp(-largest, largest).reshape(weight.shape)
    number = format.number
    if number in _WRITTEN:
        return _WRITTEN[number](quotient)
    return _write_words(quotient, number)


def decode(codes: Tensor, scale: Tensor, format: Format, zero_point: Tensor | None = None) -> Tensor:
    """Dequantize codes: (value - zero point) * scale. E2M1 bytes [0x0f, 0x75] with the scale 0.5: [-3, 0, 1.5, 3].

    Args:
        codes: as `encode` returns them.
        scale: float32 [out / height, in / width], any global scale divided out; without a global scale also as stored.
        format: how the weight is stored.
        zero_point: float32 of the shape of `scale`; None if zero points are 0.

    Returns:
        float32 [out, in].
    """
    values = _READ[format.number](codes) if format.number in _READ else _read_words(codes, format.number)
    grouped = _to_groups(values, format.group)
    if zero_point is not None:
        grouped = grouped - _spread(zero_point, values, format.group)
    return (grouped * _spread(scale, values, format.group)).reshape(values.shape)


def round_values(weight: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Quantize and dequantize without codes, which takes less time, as torch reads float8 slowly.

    Args:
        weight: [out, in] of whole groups, of any floating dtype.
        scale: float32 [out / height, in / width], above zero.
        format: a format without zero points.

    Returns:
        float32 [out, in], equal to `decode(encode(weight, scale, format), scale, format)`.
    """
    spread = _spread(scale, weight, format.group)
    quotient = _to_groups(weight.float(), format.group) / spread
    return nearest(quotient, format.number).mul_(spread).reshape(weight.shape)


def read_zero_points(words: Tensor, number: Number) -> Tensor:
    """Unpack stored zero points, whose rows share words.

    Args:
        words: int32 [out * bits / 32, in / width].
        number: numeric format of the codes, integers in words.

    Returns:
        float32 [out, in / width]: the values of the codes that stand for zero.
    """
    return _read_words(words.T.contiguous(), number).T


def _to_groups(weight: Tensor, group: Group) -> Tensor:
    """[out, in] -> [out/height, height, in/width, width]."""
    down, along = grid_of(group, weight.shape)
    return weight.reshape(down, weight.shape[0] // down, along, weight.shape[1] // along)


def _spread(scale: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return a scale, computed or stored, as float32 in the shape that broadcasts over the grouped weight."""
    if scale.dtype == torch.uint8:
        scale = (scale.to(torch.int32) << 23).view(torch.float32)
    down, along = grid_of(group, weight.shape)
    return scale.float().reshape(down, 1, along, 1)


def nearest(quotient: Tensor, number: Number) -> Tensor:
    """Round finite values to the nearest values of codes, clamped, ties to even.

    Args:
        quotient: finite float32 of any shape, weights divided by their scales (plus zero points).
        number: numeric format of the codes.

    Returns:
        float32 of the same shape.
    """
    near = quotient.clamp(-number.largest, 2 * number.span - number.largest)
    if not number.normal:
        return near.round()
    binade = (near.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=number.normal)
    # Adding a large number leaves only whole steps of the quotient.
    beside = binade.mul_(1.5 * 2**23 * number.smallest / number.normal)
    return near.add_(beside).sub_(beside)


def _e2m1(quotient: Tensor) -> Tensor:
    """Round quotients to E2M1 codes, one per byte, ties to even."""
    size = quotient.abs()
    # Ties to even: 0.25 rounds down to 0, 0.75 up to 1, and so on.
    below = sum((size > middle).byte() for middle in (0.25, 1.25, 2.5, 5.0))
    reached = sum((size >= middle).byte() for middle in (0.75, 1.75, 3.5))
    return below + reached + 8 * quotient.signbit().byte()


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 [rows, cols], without gaps, the first in the lowest bits: uint8 [rows, cols * bits / 8]."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., ::2] | codes[..., 1::2] << 4
    packed = codes.contiguous().view(torch.int64)
    width = bits
    for lane in (8, 16, 32):
        low = lanes(width, 2 * lane)
        packed = packed & low | packed >> (lane - width) & low << width
        width *= 2
    of_eight: Tensor = packed.view(torch.uint8).reshape(len(codes), -1, 8)[..., :bits]
    return of_eight.flatten(1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes of codes as `_pack` returns them, to uint8 [rows, cols]."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    of_eight = packed.reshape(len(packed), -1, bits)
    spread = torch.nn.functional.pad(of_eight, (0, 8 - bits)).view(torch.int64).squeeze(-1)
    width = 4 * bits
    for lane in (32, 16, 8):
        low = lanes(width, 2 * lane)
        spread = spread & low | (spread & low << width) << (lane - width)
        width //= 2
    return spread.contiguous().view(torch.uint8)


def _write_words(quotient: Tensor, number: Number) -> Tensor:
    """Round quotients to integers, and pack them into int32 words."""
    middle = int(number.encode(np.zeros(1, np.float32)).item())
    codes = quotient.round().clamp(max=2 * number.span - number.largest) + middle
    return _pack(codes.to(torch.uint8), number.bits).contiguous().view(torch.int32)


def _read_words(words: Tensor, number: Number) -> Tensor:
    """Unpack int32 words of integers to their values, float32."""
    middle = int(number.encode(np.zeros(1, np.float32)).item())
    return _unpack(words.view(torch.uint8), number.bits).float() - middle


# By numeric format: quotients to stored codes, and stored codes to values, float32. All others are integers in words.
_WRITTEN: dict[Number, Callable[[Tensor], Tensor]] = {
    E4M3: lambda quotient: quotient.to(torch.float8_e4m3fn),
    INT8: lambda quotient: quotient.round().to(torch.int8),
    E2M1: lambda quotient: _pack(_e2m1(quotient), 4),
}
_READ: dict[Number, Callable[[Tensor], Tensor]] = {
    E4M3: lambda codes: codes.float(),
    INT8: lambda codes: codes.float(),
    E2M1: lambda codes: torch.from_numpy(E2M1.values()).to(codes.device)[_unpack(codes, 4).int()],
}

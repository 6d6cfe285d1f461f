"""The loops of kernels.py compiled by numba, for large models: the same bits, several times as fast.

numpy passes over a piece once for each step, while a compiled loop keeps a row in the cache through all steps.
Importing this module imports numba, which takes 110 MB and a third of a second; compiling takes 1 to 3 s unless an
earlier process left its cache.

Every inner loop runs along a contiguous array, and every integer is cast back to its width: only then does the compiler
vectorize the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core.caching import FunctionCache

from . import kernels
from .format import Format, Group, grid_of
from .kernels import Bits, ColumnRounding, to_float32
from .numbers import BITSANDBYTES, E2M1, E4M3, Codes, Floats, Number

u8 = np.uint8
u16 = np.uint16
u32 = np.uint32
u64 = np.uint64
i32 = np.int32
f32 = np.float32

# Adding and subtracting it rounds a float32 to an integer, ties to even: at this size the last bit is worth one.
_ROUNDS = 1.5 * 2.0**23

# The importance of squared errors where all count alike.
_NONE = np.empty((0, 0), f32)

# Rows that `_round_panel` takes at a time.
_STRIP = 256

# How `_scales` rounds, by dtype of the scales.
_ROUNDINGS = {"BF16": u32(1), "F8_E4M3": u32(2)}

_settings: Any = numba.config
if _settings.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: loops are not compiled")


class _SafeCache(FunctionCache):
    """A cache of compiled loops for later processes. A full disk or a damaged file only costs compiling again."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):
            return super().load_overload(sig, target_context)
        # The cache is damaged: start a new one.
        with suppress(Exception):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)


def _compile(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop that is compiled at its first call and runs without the interpreter lock."""
    compiled_loop: Any = numba.njit(nogil=True, error_model="numpy")(loop)
    # numba raises RuntimeError if neither this directory nor the user's cache can be written to.
    with suppress(RuntimeError):
        compiled_loop._cache = _SafeCache(loop)
    return compiled_loop  # type: ignore[no-any-return]


def absmax(bits: Bits, dtype: str, group: Group) -> Floats:
    """Compute the largest absolute weight of each group in compiled loops.

    Args:
        bits: bits of the weights, uint16 (uint32 for F32) [rows, cols] of whole groups.
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        group: (height, width) of a group; None is the whole axis.

    Returns:
        float32 [rows / height, cols / width]; NaN or infinity for a group that has one.
    """
    rows = len(bits)
    largest = np.zeros(grid_of(group, bits.shape), bits.dtype)
    mask = bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)
    _absmax(bits.reshape(rows, largest.shape[1], -1), mask, group[0] or rows, largest)
    return to_float32(largest, dtype)


def signs(bits: Bits) -> Floats:
    """Return the signs of scales that give each group's largest absolute weight a code below zero.

    Args:
        bits: bits of finite weights, uint16 (uint32 for F32) [groups, width].

    Returns:
        float32 [groups]: -1 if the largest is positive, 1 if it is negative or one of either sign is.
    """
    out = np.empty(len(bits), f32)
    _signs(bits, bits.view(bits.dtype.str.replace("u", "i")), out)
    return out


def scales(fmt: Format, absmax: Floats, global_scale: Floats | None = None) -> Floats:
    """Compute the scale of each group from its largest absolute weight in compiled loops.

    Args:
        fmt: how the weights are stored.
        absmax: float32 of any shape, the largest absolute weight of each group.
        global_scale: float32 of one element, by which scales are multiplied before they are stored; computed from
            `absmax` if None and the format has one.

    Returns:
        float32 of the shape of `absmax`: weight = code value * scale. Where there is a global scale, it is the stored
        scale divided by the global scale.
    """
    if fmt.global_scale is not None and global_scale is None:
        global_scale = fmt.choose_global_scale(absmax.max(keepdims=True))
    factor = f32(1) if global_scale is None or fmt.global_scale is None else global_scale.reshape(-1)[0]
    scale = fmt.scale
    out = np.empty(absmax.size, f32)
    # For powers of two: what is added to the bits of a quotient, and the mask of the bits that stay.
    power = (u32(fmt.carry), u32(0xFF800000)) if scale.power_of_two else (u32(0), u32(0xFFFFFFFF))
    rounding = _ROUNDINGS.get(scale.dtype, u32(0))
    span = f32(scale.clip_limit or fmt.number.span)
    _scales(absmax.reshape(-1), span, *power, factor, f32(scale.floor), f32(scale.of_zeros), rounding, out)
    return out.reshape(absmax.shape)


def encode_stored(
    bits: Bits, dtype: str, scale: Floats, fmt: Format, out: Codes, zero_point: Floats | None = None
) -> None:
    """Quantize weights and write their codes to `out` as they are stored, without gaps between them.

    Args:
        bits: bits of finite weights, uint16 (uint32 for F32) [rows, cols].
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        scale: float32 [rows / height, cols / width]: weight = (code value - zero point) * scale, so any global scale is
            already divided out.
        fmt: the format that the weights are stored in.
        out: uint8 [rows, cols * bits / 8], contiguous; is overwritten.
        zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.
    """
    rows, cols = bits.shape
    height = fmt.group[0] or rows
    width = fmt.group[1] or cols
    number = fmt.number

    arguments = bits, *_kind(dtype), scale, height, width, number.bits, out

    if number.normal == 0:
        middle = number.encode(np.zeros(1, f32)).item()
        if zero_point is None:
            zero_point = np.zeros_like(scale)
        _encode_integers(*arguments, *_range(number)[:2], u32(middle), zero_point)
    elif number == E2M1 and dtype == "BF16" and width % 2 == 0:
        _encode_pairs(np.ascontiguousarray(bits).view(u32), scale, height, width // 2, out)
    else:
        steps = u32(round(number.normal / number.smallest))
        _encode_floats(*arguments, *_range(number)[1:], steps, u32(1 << (number.bits - 1)))


def decode_rows(
    codes: Codes, number: Number, scale: Floats, group: Group, low: int, out: Floats, zero_point: Floats | None = None
) -> None:
    """Dequantize some rows of a matrix into `out`, from row `low` of the matrix on.

    Args:
        codes: uint8 [rows, cols * bits / 8].
        number: numeric format of the codes.
        scale: float32 [groups along these rows, ceil(cols / width)]: weight = (code value - zero point) * scale.
        group: (height, width) of a group, None for the whole axis; groups at the matrix's edges may be smaller.
        low: index in the matrix of the first of these rows, which tells where in a group it lies.
        out: float32 [rows, cols], contiguous; is overwritten.
        zero_point: float32 of the shape of `scale`; None if zero points are 0.
    """
    if number in BITSANDBYTES:
        kernels.decode_rows(codes, number, scale, group, low, out, zero_point)
        return

    rows, cols = out.shape
    height = group[0] or low + rows
    width = min(group[1] or cols, cols)
    if zero_point is None:
        zero_point = np.zeros_like(scale)
    zero_point = np.ascontiguousarray(zero_point)
    arguments = codes, scale, zero_point, height, width, low % height, out

    if number.normal:
        (_decode_e4m3 if number == E4M3 else _decode_e2m1)(*arguments)
    else:
        half = 1 << (number.bits - 1)
        _decode_integers(*arguments, u32(half - number.encode(np.zeros(1, f32)).item()), np.int32(half), number.bits)


def best_scales(
    bits: Bits,
    dtype: str,
    unclipped: Floats,
    scales: Floats,
    number: Number,
    importance: Floats | None = None,
    by_size: bool = False,
) -> Floats:
    """Choose the scale of each group with the least squared error; of equally good ones the first.

    Args:
        bits: bits of finite weights, uint16 (uint32 for F32) [groups, width].
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        unclipped: float32 [groups], the scales made from each group's largest weight: weight = code value * scale.
        scales: float32 [clip ratios, groups], the candidates, each of the sign of `unclipped`.
        number: numeric format of the codes.
        importance: float32 [n, width], at most 1: weights of the squared errors; group i uses row i modulo n. All are
            1 if None.
        by_size: whether the squared error of a weight counts as much as the weight is large. Then there is no
            `importance`.

    Returns:
        The chosen scales, float32 [groups].
    """
    chosen = unclipped.copy()
    by_input = _NONE
    if importance is not None:
        by_input = np.array(importance.T, order="C")
    _best(bits, *_kind(dtype), unclipped, scales, *_range(number), chosen, by_input, by_size)
    return chosen


def round_panel(weight: ColumnRounding, number: Number, low: int, high: int) -> None:
    """Round columns low to high, and add the error of each to the later ones of them.

    Args:
        weight: the columns, to which all errors of columns before `low` were propagated.
        number: numeric format of the codes.
        low: the first column.
        high: the column after the last.
    """
    *arrays, zero_points = weight
    _round_panel(*arrays, _NONE if zero_points is None else zero_points, low, high, *_range(number))


def move_panel(weight: Sequence[Any], number: Number, low: int, high: int) -> None:
    """Give each code in columns low to high the value of the least loss, while all other codes are held.

    What that changes is added to later columns.

    Args:
        weight: the columns, in which changes of all columns before `low` are weighed.
        number: numeric format of the codes.
        low: the first column.
        high: the column after the last.
    """
    _move_panel(*weight, low, high, *_range(number))


def move_groups(group: Sequence[Floats], number: Number) -> None:
    """Give each row the best of some scales for a group of columns, and its codes there; all other rows are held.

    Args:
        group: the values of codes [out, width] and scales [out], which are overwritten; zero points [out]; the scales
            that are tried [out, n]; how all errors pull at each weight [out, width], which is overwritten; the
            curvature over outputs [blocks, BLOCK, BLOCK]; the Hessian H of these columns, its inverse, and the lower
            triangular R with H = R'R, all [width, width].
        number: numeric format of the codes.
    """
    _move_groups(*group, *_range(number))


def to_bfloat16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """Round finite values to bfloat16, ties to even.

    Args:
        values: float32 [rows, cols].
        out: uint16 [rows, cols], overwritten with the bits.
    """
    _to_bfloat16(values.reshape(-1).view(u32), out.reshape(-1))


def _kind(dtype: str) -> tuple[bool, Any]:
    """Return whether weights are float16, and by how many bits to shift theirs left to make a float32."""
    return dtype == "F16", u32({"BF16": 16}.get(dtype, 0))


@cache
def _range(number: Number) -> tuple[Any, ...]:
    """Return a format's smallest and largest value, its lowest binade, and what times a binade rounds to its steps."""
    normal = number.normal or 256.0
    rounds = _ROUNDS * number.smallest / normal
    return f32(-number.largest), f32(np.nanmax(number.values())), f32(normal), f32(rounds)


@_compile
def _absmax(bits, mask, height, largest):
    for row in range(bits.shape[0]):
        into = largest[row // height]
        for group in range(into.size):
            part = bits[row, group]
            most = bits.dtype.type(0)
            for i in range(part.size):
                most = max(most, bits.dtype.type(part[i] & mask))
            into[group] = max(into[group], most)


@_compile
def _signs(bits, signed, out):
    for group in range(out.size):
        line = bits[group]
        same = signed[group]
        # A float that is the largest as a signed integer is the most positive; as an unsigned one, the most negative.
        lowest = bits.dtype.type(0)
        highest = signed.dtype.type(0)
        for i in range(line.size):
            lowest = max(lowest, line[i])
            highest = max(highest, same[i])
        top = u32(u32(lowest) << u32(32 - 8 * bits.itemsize))
        size = u32(top & u32(0x7FFFFFFF)) if top >> u32(31) else u32(0)
        out[group] = f32(-1) if u32(u32(highest) << u32(32 - 8 * bits.itemsize)) > size else f32(1)


@_compile
def _scales(largest, span, carry, kept, above, floor, zeros, rounding, out):
    for i in range(largest.size):
        bits = u32(u32(f32(largest[i] / span).view(u32) + carry) & kept)
        scale = max(f32(u32(bits).view(f32) * above), floor)
        if rounding == 1:
            bits = f32(scale).view(u32)
            even = u32(u32(bits >> u32(16)) & u32(1))
            scale = u32(u32(u32(bits + even) + u32(0x7FFF)) & u32(0xFFFF0000)).view(f32)
        elif rounding == 2:
            near = min(scale, f32(448))
            binade = max(u32(f32(near).view(u32) & u32(0x7F800000)), u32(121 << 23))
            beside = f32(u32(binade).view(f32) * f32(_ROUNDS / 8))
            scale = f32(f32(near + beside) - beside)
        out[i] = f32((zeros if largest[i] == 0 else scale) / above)


@_compile
def _load(line, half, below, values):
    """Convert the bits of a row to float32: from float16, or by shifting them left by `below`."""
    if half:
        for i in range(line.size):
            # This is exact for subnormal values too.
            size = f32(u32(u32(line[i] & 0x7FFF) << u32(13)).view(f32) * f32(2.0**112))
            values[i] = u32(f32(size).view(u32) | u32(u32(line[i] & 0x8000) << u32(16))).view(f32)
    else:
        for i in range(line.size):
            values[i] = u32(u32(line[i]) << below).view(f32)


@_compile
def _lanes(width, lane):
    """Return the mask of the low `width` bits in each lane of 64 bits; `lane` is a lane's bits."""
    mask = u64(0)
    start = u64(0)
    while start < u64(64):
        mask |= u64(u64(u64(1) << width) - u64(1)) << start
        start += lane
    return mask


@_compile
def _pack(codes, bits, out):
    """Pack the codes of a row, of less than 8 bits, without gaps, the first in the lowest bits."""
    if bits == 4:
        for i in range(out.size):
            out[i] = codes[2 * i] | u8(codes[2 * i + 1] << u8(4))
        return

    # Eight codes take as many bytes as a code has bits. They are brought together by pairs, pairs of pairs, and those.
    width = u64(bits)
    packed = codes.view(u64)
    first = _lanes(width, u64(16))
    second = _lanes(width * u64(2), u64(32))
    third = _lanes(width * u64(4), u64(64))
    gap = u64(8) - width
    eight = u64(8)

    for i in range(packed.size):
        together = packed[i]
        together = (together & first) | ((together >> gap) & (first << width))
        together = (together & second) | ((together >> (gap * u64(2))) & (second << (width * u64(2))))
        together = (together & third) | ((together >> (gap * u64(4))) & (third << (width * u64(4))))
        for byte in range(bits):
            out[i * bits + byte] = u8(together)
            together >>= eight


@_compile
def _unpack(packed, bits, codes):
    """Undo `_pack`."""
    if bits == 4:
        for i in range(packed.size):
            codes[2 * i] = packed[i] & u8(15)
            codes[2 * i + 1] = packed[i] >> u8(4)
        return

    width = u64(bits)
    spread = codes.view(u64)
    first = _lanes(width, u64(16))
    second = _lanes(width * u64(2), u64(32))
    third = _lanes(width * u64(4), u64(64))
    gap = u64(8) - width

    for i in range(spread.size):
        apart = u64(0)
        for byte in range(bits):
            apart |= u64(packed[i * bits + byte]) << u64(8 * byte)
        apart = (apart & third) | ((apart & (third << (width * u64(4)))) << (gap * u64(4)))
        apart = (apart & second) | ((apart & (second << (width * u64(2)))) << (gap * u64(2)))
        spread[i] = (apart & first) | ((apart & (first << width)) << gap)


@_compile
def _encode_integers(bits, half, below, scale, height, width, code_bits, out, least, most, middle, zero):
    values = np.empty(bits.shape[1], f32)
    codes = np.empty(bits.shape[1], u8)

    for row in range(bits.shape[0]):
        _load(bits[row], half, below, values)
        into = codes if code_bits < 8 else out[row]

        for group in range(scale.shape[1]):
            divisor = scale[row // height, group]
            shift = zero[row // height, group]
            part = values[group * width : (group + 1) * width]
            group_codes = into[group * width : (group + 1) * width]
            for i in range(part.size):
                quotient = f32(f32(part[i] / divisor) + shift)
                whole = f32(min(max(quotient, least), most) + f32(_ROUNDS))
                group_codes[i] = u8(u32(f32(whole).view(u32) + middle))
        if code_bits < 8:
            _pack(codes, code_bits, out[row])


@_compile
def _decode_integers(codes, scale, zero, height, width, low, out, turn, half, bits):
    values = np.empty(out.shape[1], f32)
    unpacked = np.empty(out.shape[1], u8)
    mask = u32(2 * half - 1)
    for row in range(out.shape[0]):
        line = codes[row]
        above = (low + row) // height
        if bits < 8:
            _unpack(line, bits, unpacked)
            line = unpacked
        for i in range(line.size):
            values[i] = f32(i32(u32(u32(line[i] + turn) & mask)) - half)
        _apply_scales(values, scale[above], zero[above], width, out[row])


@_compile
def _apply_scales(values, scale, zero, width, out):
    """Dequantize the values of a row's codes by its scales and zero points."""
    for group in range(scale.size):
        factor = scale[group]
        middle = zero[group]
        part = values[group * width : (group + 1) * width]
        into = out[group * width : (group + 1) * width]
        for i in range(into.size):
            into[i] = f32(part[i] - middle) * factor


@_compile
def _encode_floats(bits, half, below, scale, height, width, code_bits, out, largest, normal, rounds, steps, mark):
    values = np.empty(bits.shape[1], f32)
    codes = np.empty(bits.shape[1], u8)
    lowest = f32(normal).view(u32)

    for row in range(bits.shape[0]):
        _load(bits[row], half, below, values)
        into = codes if code_bits < 8 else out[row]

        for group in range(scale.shape[1]):
            divisor = scale[row // height, group]
            part = values[group * width : (group + 1) * width]
            group_codes = into[group * width : (group + 1) * width]
            for i in range(part.size):
                quotient = f32(part[i] / divisor)
                size = min(abs(quotient), largest)
                # Adding a large number leaves whole steps of the binade; below the lowest binade its steps apply.
                binade = max(u32(f32(size).view(u32) & u32(0x7F800000)), lowest)
                beside = f32(u32(binade).view(f32) * rounds)
                step = u32(f32(size + beside).view(u32) - f32(beside).view(u32))
                above = u32(u32(u32(binade - lowest) >> u32(23)) * steps)
                sign = u32(u32(f32(quotient).view(u32) >> u32(31)) * mark)
                group_codes[i] = u8(u32(u32(step + above) | sign))
        if code_bits < 8:
            _pack(codes, code_bits, out[row])


@_compile
def _decode_e4m3(codes, scale, zero, height, width, low, out):
    values = np.empty(out.shape[1], f32)
    for row in range(out.shape[0]):
        line = codes[row]
        above = (low + row) // height
        for i in range(line.size):
            size = u32(u32(line[i] & 0x7F) << u32(20))
            # For subnormal codes: 2^-6 with this mantissa, less 2^-6.
            least = f32(u32(size + u32(121 << 23)).view(f32) - f32(2.0**-6))
            magnitude = u32(f32(least).view(u32) if size < u32(1 << 23) else u32(size + u32(120 << 23)))
            magnitude = u32(0x7FC00000) if size == u32(0x7F << 20) else magnitude
            values[i] = u32(u32(magnitude) | u32(u32(line[i] & 0x80) << u32(24))).view(f32)
        _apply_scales(values, scale[above], zero[above], width, out[row])


@_compile
def _to_e2m1(quotient):
    """Return the E2M1 code of a quotient, in fewer steps than `_encode_floats` takes."""
    bits = f32(quotient).view(u32)
    size = min(u32(bits & u32(0x7FFFFFFF)), u32(0x40C00000))
    binade = max(u32(size & u32(0x7F800000)), u32(0x3F800000))
    beside = u32(binade + u32(22 << 23 | 1 << 22))
    step = u32(f32(u32(size).view(f32) + u32(beside).view(f32)).view(u32) - beside)
    above = u32(u32(binade - u32(0x3F800000)) >> u32(22))
    return u32(u32(step + above) | u32(u32(bits & u32(0x80000000)) >> u32(28)))


@_compile
def _encode_pairs(words, scale, height, width, out):
    """Quantize words of two bfloat16 weights, the first in the low half, to bytes of two E2M1 codes."""
    spread = np.empty((scale.shape[1], width), f32)
    divisors = spread.reshape(-1)

    for row in range(words.shape[0]):
        for group in range(scale.shape[1]):
            divisor = scale[row // height, group]
            part = spread[group]
            for i in range(part.size):
                part[i] = divisor

        line = words[row]
        into = out[row]
        for i in range(line.size):
            first = u32(u32(line[i]) << u32(16)).view(f32)
            second = u32(u32(line[i]) & u32(0xFFFF0000)).view(f32)
            low = _to_e2m1(f32(first / divisors[i]))
            high = _to_e2m1(f32(second / divisors[i]))
            into[i] = u8(u32(low) | u32(u32(high) << u32(4)))


@_compile
def _half_e2m1(code):
    """Return the value of an E2M1 code. The constant has twice the magnitudes of all eight, four bits each."""
    twice = u32(u32(u32(0xC8643210) >> u32(u32(code & 7) * 4)) & u32(15))
    size = f32(f32(i32(twice)) * f32(0.5))
    return u32(f32(size).view(u32) | u32(u32(code & 8) << u32(28))).view(f32)


@_compile
def _decode_e2m1(codes, scale, zero, height, width, low, out):
    values = np.empty(out.shape[1], f32)
    for row in range(out.shape[0]):
        line = codes[row]
        above = (low + row) // height
        for i in range(line.size):
            values[2 * i] = _half_e2m1(u32(line[i] & 15))
            values[2 * i + 1] = _half_e2m1(u32(line[i] >> 4))
        _apply_scales(values, scale[above], zero[above], width, out[row])


@_compile
def _to_bfloat16(bits, out):
    for i in range(bits.size):
        even = u32(u32(bits[i] >> u32(16)) & u32(1))
        out[i] = u16(u32(u32(bits[i] + even) + u32(0x7FFF)) >> u32(16))


@_compile
def _nearest(quotient, least, most, lowest, rounds):
    """Return the value of the code that is nearest to a quotient."""
    near = min(max(quotient, least), most)
    binade = max(u32(f32(near).view(u32) & u32(0x7F800000)), lowest)
    beside = f32(u32(binade).view(f32) * rounds)
    return f32(f32(near + beside) - beside)


@_compile
def _square(quotient, least, most, lowest, rounds):
    """Return the squared rounding error of a quotient."""
    off = f32(quotient - _nearest(quotient, least, most, lowest, rounds))
    return f32(off * off)


@_compile
def _best(bits, half, below, unclipped, scales, least, most, normal, rounds, out, importance, by_size):
    # Groups are columns, `together` at once, so that each sum adds in the order of the weights and still vectorizes.
    groups, width = bits.shape
    together = max(32, min(128, 8192 // width // 8 * 8))
    lowest = f32(normal).view(u32)
    # Four weights of each group are taken at a time; zeros, which have no rounding error, fill up.
    raw = np.zeros((width, together), bits.dtype)
    turned = np.zeros((-(-width // 4) * 4, together), f32)
    one = np.ones(together, f32)
    scale = np.ones(together, f32)
    chosen = np.zeros(together, u32)
    relative = np.ones(together, f32)
    unit = np.ones(together, f32)
    error = np.empty(together, f32)
    smallest = np.empty(together, f32)
    weighs = by_size or importance.size > 0
    weighed = np.zeros((turned.shape[0] if weighs else 0, together), f32)

    for first in range(0, groups, together):
        count = min(together, groups - first)
        one[:count] = unclipped[first : first + count]
        chosen[:] = u32(0)
        smallest[:] = f32(np.inf)
        _load_columns(bits[first : first + count], half, below, one, raw, turned)
        if weighs:
            _weigh_errors(importance, turned, first, count, weighed)

        for ratio in range(scales.shape[0]):
            scale[:count] = scales[ratio, first : first + count]
            for j in range(together):
                relative[j] = scale[j] / one[j]
                unit[j] = f32(1) / relative[j]
                error[j] = f32(0)

            for k in range(turned.shape[0] if weighs else 0):
                line = turned[k]
                counts = weighed[k]
                for j in range(together):
                    off = _square(f32(line[j] * unit[j]), least, most, lowest, rounds)
                    error[j] = f32(error[j] + f32(off * counts[j]))
            for k in range(0, 0 if weighs else turned.shape[0], 4):
                line = turned[k]
                second = turned[k + 1]
                third = turned[k + 2]
                fourth = turned[k + 3]
                for j in range(together):
                    by = unit[j]
                    total = f32(error[j] + _square(f32(line[j] * by), least, most, lowest, rounds))
                    total = f32(total + _square(f32(second[j] * by), least, most, lowest, rounds))
                    total = f32(total + _square(f32(third[j] * by), least, most, lowest, rounds))
                    error[j] = f32(total + _square(f32(fourth[j] * by), least, most, lowest, rounds))

            for j in range(together):
                total = f32(f32(error[j] * relative[j]) * relative[j])
                before = smallest[j]
                better = total < before
                smallest[j] = total if better else before
                # Computed without a branch, which the processor could not predict.
                chosen[j] = u32(chosen[j] + u32(better) * u32(u32(ratio + 1) - chosen[j]))
        for j in range(count):
            if chosen[j]:
                out[first + j] = scales[chosen[j] - 1, first + j]


@_compile
def _load_columns(part, half, below, divisor, raw, out):
    """Load groups, the rows of `part`, into the columns of `out`, divided by the divisor of each."""
    for k in range(raw.shape[0]):
        into = raw[k]
        for j in range(part.shape[0]):
            into[j] = part[j, k]
        line = out[k]
        _load(raw[k], half, below, line)
        for j in range(divisor.size):
            line[j] /= divisor[j]


@_compile
def _weigh_errors(importance, groups, first, count, out):
    """Put into columns of `out` how much the errors of groups count, from group `first` on; without an importance as
    much as their weights are large.
    """
    if importance.size == 0:
        for k in range(groups.shape[0]):
            line = groups[k]
            sizes = out[k]
            for j in range(line.size):
                sizes[j] = abs(line[j])
        return

    which = np.empty(count, i32)
    for j in range(count):
        which[j] = (first + j) % importance.shape[1]
    for k in range(importance.shape[0]):
        counts = out[k]
        row = importance[k]
        for j in range(count):
            counts[j] = row[which[j]]


@_compile
def _round_panel(columns, errors, coefficients, groups, scales, zeros, low, high, least, most, normal, rounds):
    lowest = f32(normal).view(u32)
    unshifted = np.zeros(_STRIP, f32)

    # A strip of rows of the weight at a time, which stays in the cache through all columns.
    for first in range(0, columns.shape[1], _STRIP):
        strip = slice(first, first + _STRIP)
        for column in range(low, high):
            line = columns[column, strip]
            error = errors[column, strip]
            scale = scales[groups[column], strip]
            zero = zeros[groups[column], strip] if zeros.size else unshifted
            for i in range(line.size):
                value = _nearest(f32(f32(line[i] / scale[i]) + zero[i]), least, most, lowest, rounds)
                line[i] = value
                error[i] -= f32(f32(value - zero[i]) * scale[i])

            for later in range(column + 1, high):
                into = columns[later, strip]
                coefficient = coefficients[column, later]
                for i in range(into.size):
                    into[i] += f32(coefficient * error[i])


@_compile
def _move_panel(quotients, weighed, changes, hessian, outputs, groups, scales, low, high, least, most, normal, rounds):
    lowest = f32(normal).view(u32)
    rows = outputs.shape[1]
    pull = np.empty(rows, f32)

    for block in range(outputs.shape[0]):
        strip = slice(block * rows, (block + 1) * rows)
        together = outputs[block]
        for column in range(low, high):
            line = quotients[column, strip]
            change = changes[column, strip]
            scale = scales[groups[column], strip]
            square = hessian[column, column]

            # How all errors pull at each code of this column.
            pull[:] = f32(0)
            for row in range(rows):
                value = weighed[column, block * rows + row]
                of_row = together[row]
                for i in range(rows):
                    pull[i] += f32(of_row[i] * value)

            for row in range(rows):
                best = f32(line[row] + f32(pull[row] / f32(f32(together[row, row] * square) * scale[row])))
                moved = _nearest(best, least, most, lowest, rounds)
                if moved == line[row]:
                    continue
                change[row] = f32(f32(line[row] - moved) * scale[row])
                line[row] = moved
                by = f32(change[row] * square)
                of_row = together[row]
                for i in range(rows):
                    pull[i] += f32(of_row[i] * by)

            for later in range(column + 1, high):
                into = weighed[later, strip]
                coefficient = hessian[column, later]
                for i in range(rows):
                    into[i] += f32(coefficient * change[i])


@_compile
def _move_groups(values, scales, zeros, tried, pulls, outputs, hessian, inverse, root, least, most, normal, rounds):
    lowest = f32(normal).view(u32)
    rows = outputs.shape[1]
    width = values.shape[1]
    target = np.empty(width, f32)
    codes = np.empty((width, tried.shape[1]), f32)
    errors = np.empty((width, tried.shape[1]), f32)
    carried = np.empty(tried.shape[1], f32)
    losses = np.empty(tried.shape[1], f32)

    for row in range(values.shape[0]):
        together = outputs[row // rows, row % rows]
        own = together[row % rows]
        line = values[row]
        near = tried[row]
        pull = pulls[row]
        scale = scales[row]
        zero = zeros[row]

        # What the weights were if they needed no codes, and what the codes lose beside that.
        target[:] = f32(0)
        for i in range(width):
            for j in range(width):
                target[j] += f32(inverse[i, j] * pull[i])
        loss = f32(0)
        for i in range(width):
            target[i] /= own
            loss += f32(target[i] * f32(pull[i] / own))
            target[i] += f32(f32(line[i] - zero) * scale)

        # Rounded to that as GPTQ rounds, with each of the scales.
        losses[:] = f32(0)
        for i in range(width):
            carried[:] = f32(0)
            for j in range(i):
                for k in range(carried.size):
                    carried[k] += f32(root[i, j] * errors[j, k])
            for k in range(carried.size):
                best = f32(target[i] - f32(carried[k] / root[i, i]))
                code = _nearest(f32(f32(best / near[k]) + zero), least, most, lowest, rounds)
                codes[i, k] = code
                errors[i, k] = f32(f32(code - zero) * near[k]) - target[i]
                off = f32(f32(root[i, i] * errors[i, k]) + carried[k])
                losses[k] += f32(off * off)

        best_of = np.argmin(losses)
        if not losses[best_of] < f32(loss * f32(0.99999)):
            continue
        for i in range(width):
            target[i] = f32(f32(line[i] - zero) * scale) - f32(f32(codes[i, best_of] - zero) * near[best_of])
            line[i] = codes[i, best_of]
        scales[row] = near[best_of]

        # Later rows of the block answer to the change.
        pull[:] = f32(0)
        for i in range(width):
            for j in range(width):
                pull[j] += f32(hessian[i, j] * target[i])
        for later in range(row + 1, (row // rows + 1) * rows):
            for i in range(width):
                pulls[later, i] += f32(together[later % rows] * pull[i])

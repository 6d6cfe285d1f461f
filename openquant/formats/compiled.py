"""The loops of kernels.py compiled by numba: the same bits, several times as fast. For large models only.

numpy passes over a piece once for each step, where a compiled loop keeps a row in the cache through all of them; and
codes that numpy looks up, a weight at a time, are computed here, eight at a time. Importing this imports numba, which
is 110 MB and a third of a second, and compiling takes 1 to 3 s where no earlier process has left what it compiled.

Every loop runs along an array of its own, and every integer is brought back to its width: that is what the compiler
needs to see to work on several weights at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from .format import Group, grid_of
from .kernels import Bits, bytes_of, to_float32
from .numbers import Codes, Floats, Number

u8, u16, u32, f32 = np.uint8, np.uint16, np.uint32, np.float32

# Beside it the last bit of a float32 is worth one: added and subtracted, it rounds to integers, to the even of two.
_ROUNDS = 1.5 * 2.0**23

_settings: Any = numba.config
if _settings.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: loops are not compiled")


def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """A loop that is compiled at its first call and runs without the interpreter lock."""
    found: Any = numba.njit(nogil=True, error_model="numpy")(loop)
    # Kept for other processes, beside this file or in the user's cache, unless neither can be written to.
    with suppress(RuntimeError):
        found.enable_caching()
    return found  # type: ignore[no-any-return]


def absmax(bits: Bits, dtype: str, group: Group) -> Floats:
    """As kernels.absmax."""
    rows, cols = bits.shape
    largest = np.zeros(grid_of(group, bits.shape), bits.dtype)
    mask = bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)
    _absmax(bits, mask, group[0] or rows, group[1] or cols, largest)
    return to_float32(largest, dtype)


def encode_stored(
    bits: Bits,
    dtype: str,
    scale: Floats,
    group: Group,
    out: Codes,
    number: Number,
    divisor: Floats | None = None,
    zero: Floats | None = None,
) -> None:
    """As kernels.encode_stored."""
    del divisor  # what tables are made for
    rows, cols = bits.shape
    place = bits, *_kind(dtype), scale, group[0] or rows, group[1] or cols, number.per_byte, out
    if number.normal == 0:
        middle = number.encode(np.zeros(1, f32)).item()
        _encode_integers(*place, *_range(number)[:2], u32(middle), np.zeros_like(scale) if zero is None else zero)
    else:
        steps = u32(round(number.normal / number.smallest))
        _encode_floats(*place, *_range(number)[1:], steps, u32(0x80 if number.per_byte == 1 else 8))


def decode_rows(
    codes: Codes, number: Number, scale: Floats, group: Group, low: int, out: Floats, zero: Floats | None = None
) -> None:
    """As kernels.decode_rows."""
    rows, cols = out.shape
    height, width = group[0] or low + rows, min(group[1] or cols, cols)
    values = bytes_of(number).view(f32).reshape(256, number.per_byte)
    zero = np.zeros_like(scale) if zero is None else np.ascontiguousarray(zero)
    (_decode if number.per_byte == 1 else _decode_pairs)(codes, values, scale, zero, height, width, low % height, out)


def best(bits: Bits, dtype: str, usual: Floats, scales: Floats, number: Number) -> Floats:
    """As kernels.best."""
    found = usual.copy()
    _best(bits, *_kind(dtype), usual, scales, *_range(number), found)
    return found


def to_bfloat16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """As kernels.to_bfloat16."""
    _to_bfloat16(values.reshape(-1).view(u32), out.reshape(-1))


def _kind(dtype: str) -> tuple[bool, Any]:
    """Whether weights are float16, and how far their bits lie below those of a float32."""
    return dtype == "F16", u32(16 if dtype == "BF16" else 0)


def _range(number: Number) -> tuple[Any, ...]:
    """The least and the largest value of a number, a power of two below which all steps are alike, and what that times
    must be added for float32 to round to these steps.
    """
    normal = number.normal or 256.0
    rounds = _ROUNDS * number.smallest / normal
    return f32(-number.largest), f32(np.nanmax(number.values())), f32(normal), f32(rounds)


@_compiled
def _absmax(bits: Any, mask: Any, height: Any, width: Any, largest: Any) -> None:
    for row in range(bits.shape[0]):
        into = largest[row // height]
        for group in range(into.size):
            part = bits[row, group * width : (group + 1) * width]
            most = bits.dtype.type(0)
            for i in range(part.size):
                most = max(most, bits.dtype.type(part[i] & mask))
            into[group] = max(into[group], most)


@_compiled
def _load(line: Any, half: Any, below: Any, values: Any) -> None:
    """The float32 values of bits, which are float16 or lie so far below those of a float32."""
    if half:
        for i in range(line.size):
            # Exact for subnormal ones too.
            size = f32(u32(u32(line[i] & 0x7FFF) << u32(13)).view(f32) * f32(2.0**112))
            values[i] = u32(f32(size).view(u32) | u32(u32(line[i] & 0x8000) << u32(16))).view(f32)
    else:
        for i in range(line.size):
            values[i] = u32(u32(line[i]) << below).view(f32)


@_compiled
def _pack(codes: Any, out: Any) -> None:
    """Two codes to a byte, the first in the low half."""
    for i in range(out.size):
        out[i] = codes[2 * i] | u8(codes[2 * i + 1] << u8(4))


@_compiled
def _encode_integers(
    bits: Any,
    half: Any,
    below: Any,
    scale: Any,
    height: Any,
    width: Any,
    per_byte: Any,
    out: Any,
    least: Any,
    most: Any,
    middle: Any,
    zero: Any,
) -> None:
    values, codes = np.empty(bits.shape[1], f32), np.empty(bits.shape[1], u8)
    for row in range(bits.shape[0]):
        _load(bits[row], half, below, values)
        into = codes if per_byte == 2 else out[row]
        for group in range(scale.shape[1]):
            divisor, shift = scale[row // height, group], zero[row // height, group]
            part = values[group * width : (group + 1) * width]
            found = into[group * width : (group + 1) * width]
            for i in range(part.size):
                quotient = f32(f32(part[i] / divisor) + shift)
                whole = f32(min(max(quotient, least), most) + f32(_ROUNDS))
                found[i] = u8(u32(f32(whole).view(u32) + middle))
        if per_byte == 2:
            _pack(codes, out[row])


@_compiled
def _encode_floats(
    bits: Any,
    half: Any,
    below: Any,
    scale: Any,
    height: Any,
    width: Any,
    per_byte: Any,
    out: Any,
    largest: Any,
    normal: Any,
    rounds: Any,
    steps: Any,
    mark: Any,
) -> None:
    values, codes = np.empty(bits.shape[1], f32), np.empty(bits.shape[1], u8)
    lowest = f32(normal).view(u32)
    for row in range(bits.shape[0]):
        _load(bits[row], half, below, values)
        into = codes if per_byte == 2 else out[row]
        for group in range(scale.shape[1]):
            divisor = scale[row // height, group]
            part = values[group * width : (group + 1) * width]
            found = into[group * width : (group + 1) * width]
            for i in range(part.size):
                quotient = f32(part[i] / divisor)
                size = min(abs(quotient), largest)
                # Beside so large a number only the steps of the binade are left, and those of the lowest below it.
                binade = max(u32(f32(size).view(u32) & u32(0x7F800000)), lowest)
                beside = f32(u32(binade).view(f32) * rounds)
                step = u32(f32(size + beside).view(u32) - f32(beside).view(u32))
                above = u32(u32(u32(binade - lowest) >> u32(23)) * steps)
                sign = u32(u32(f32(quotient).view(u32) >> u32(31)) * mark)
                found[i] = u8(u32(u32(step + above) | sign))
        if per_byte == 2:
            _pack(codes, out[row])


@_compiled
def _decode(codes: Any, values: Any, scale: Any, zero: Any, height: Any, width: Any, low: Any, out: Any) -> None:
    for row in range(out.shape[0]):
        for group in range(scale.shape[1]):
            factor, middle = scale[(low + row) // height, group], zero[(low + row) // height, group]
            part = codes[row, group * width : (group + 1) * width]
            into = out[row, group * width : (group + 1) * width]
            for i in range(into.size):
                into[i] = f32(values[part[i], 0] - middle) * factor


@_compiled
def _decode_pairs(codes: Any, values: Any, scale: Any, zero: Any, height: Any, width: Any, low: Any, out: Any) -> None:
    line = np.empty(out.shape[1], f32)
    for row in range(out.shape[0]):
        pairs = codes[row]
        for i in range(pairs.size):
            line[2 * i] = values[pairs[i], 0]
            line[2 * i + 1] = values[pairs[i], 1]
        for group in range(scale.shape[1]):
            factor, middle = scale[(low + row) // height, group], zero[(low + row) // height, group]
            part = line[group * width : (group + 1) * width]
            into = out[row, group * width : (group + 1) * width]
            for i in range(into.size):
                into[i] = f32(part[i] - middle) * factor


@_compiled
def _to_bfloat16(bits: Any, out: Any) -> None:
    for i in range(bits.size):
        even = u32(u32(bits[i] >> u32(16)) & u32(1))
        out[i] = u16(u32(u32(bits[i] + even) + u32(0x7FFF)) >> u32(16))


@_compiled
def _best(
    bits: Any,
    half: Any,
    below: Any,
    usual: Any,
    scales: Any,
    least: Any,
    most: Any,
    normal: Any,
    rounds: Any,
    found: Any,
) -> None:
    # A column for each of so many groups, which are worked on at once: each sum adds in the order of the weights.
    together = 32
    groups, width = bits.shape
    lowest = f32(normal).view(u32)
    values, turned = np.empty(width, f32), np.zeros((width, together), f32)
    one, scale, chosen = np.ones(together, f32), np.ones(together, f32), np.zeros(together, u32)
    share, unit = np.ones(together, f32), np.ones(together, f32)
    error, smallest = np.empty(together, f32), np.empty(together, f32)
    for first in range(0, groups, together):
        count = min(together, groups - first)
        one[:count] = usual[first : first + count]
        chosen[:] = u32(0)
        smallest[:] = f32(np.inf)
        for j in range(count):
            _load(bits[first + j], half, below, values)
            divisor = one[j]
            for k in range(width):
                values[k] /= divisor
            for k in range(width):
                turned[k, j] = values[k]
        for ratio in range(scales.shape[0]):
            scale[:count] = scales[ratio, first : first + count]
            for j in range(together):
                share[j] = scale[j] / one[j]
                unit[j] = f32(1) / share[j]
                error[j] = f32(0)
            for k in range(width):
                line = turned[k]
                for j in range(together):
                    quotient = f32(line[j] * unit[j])
                    near = min(max(quotient, least), most)
                    binade = max(u32(f32(near).view(u32) & u32(0x7F800000)), lowest)
                    beside = f32(u32(binade).view(f32) * rounds)
                    off = f32(quotient - f32(f32(near + beside) - beside))
                    error[j] += f32(off * off)
            for j in range(together):
                total = f32(f32(error[j] * share[j]) * share[j])
                before = smallest[j]
                better = total < before
                smallest[j] = total if better else before
                # Reckoned, since of two scales one would be chosen by a branch, which no processor foresees.
                chosen[j] = u32(chosen[j] + u32(better) * u32(u32(ratio + 1) - chosen[j]))
        for j in range(count):
            if chosen[j]:
                found[first + j] = scales[chosen[j] - 1, first + j]

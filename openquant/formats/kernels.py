"""CPU kernels: float bits in, float8_e4m3fn codes out, and back, with numpy alone.

Importing torch costs more than converting a small model, so the CPU path does without it. `packed.encode`
says the same in four lines of torch; the tests hold the two against each other bit by bit.

Weights come as unsigned integers that hold the float's bits ("bits" below), since numpy has no bfloat16 and
absolute values compare as integers do. A bfloat16 code follows from a table: dividing by the scale depends only
on the two mantissas and the difference of the exponents, so 128 tables (one per mantissa of the group's largest
weight, at the top exponent) serve every scale, once the weight's exponent is raised by what the group's largest
lacks to the top.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .quantization import INT4
from .schemes import CODE_DTYPE, CODE_MAX, Floats, Group, grid_of

Bits = npt.NDArray[np.unsignedinteger[Any]]
Codes = npt.NDArray[np.uint8]
Entry = TypeVar("Entry", bound=np.generic)

BITS_TYPE: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
    "F32": np.dtype(np.uint32),
}
"""Source dtypes that can be quantized, with the integer that holds their bits."""

# Elements handled at a time: few enough that what a step writes is still in the cache when the next one reads it,
# many enough that threads seldom wait for each other (every call into numpy takes the interpreter lock back).
CHUNK = 1 << 18

_TOP = 254  # the largest exponent field of a finite bfloat16
_SAFE = 64  # from this exponent field on, zero and subnormals stay below half the smallest code when raised to the top


def to_float32(bits: Bits, dtype: str) -> Floats:
    """The values of bits, as float32 (exact for every dtype of BITS_TYPE)."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return np.take(_f16_values(), bits, mode="clip")
    return bits.view(np.float32)


def scale_values(stored: Codes, dtype: str) -> Floats:
    """Stored scales as float32: of a dtype of BITS_TYPE, or bytes that are exponents (E8M0, of which 255 is NaN).

    Args:
        stored: their bytes.
        dtype: "F64", "F32", "BF16", "F16", "F8_E8M0" or "U8".
    """
    if dtype in BITS_TYPE:
        return to_float32(stored.view(BITS_TYPE[dtype]), dtype)
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return stored.view(np.float64).astype(np.float32)
    return np.take(_exponent_values(), stored, mode="clip")


@cache
def _exponent_values() -> Floats:
    """[256] the power of two that each byte is the exponent of."""
    values = np.exp2(np.arange(-127, 129, dtype=np.float64))
    values[255] = np.nan
    return values.astype(np.float32)


def absmax(bits: Bits, dtype: str, group: Group) -> Floats:
    """Largest absolute value of each group, as float32 [rows/height, cols/width].

    NaN or infinity if there is one. `bits` is [rows, cols], multiples of the group's height and width.
    """
    mask = bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)
    largest = np.zeros(grid_of(group, bits.shape), bits.dtype)
    for low, high, part in _chunks(group, bits.shape):
        magnitudes = bits[low:high] & mask
        if part.stop - part.start == 1:
            magnitudes = magnitudes.max(axis=0, keepdims=True)
        found = magnitudes.reshape(len(magnitudes), largest.shape[1], -1).max(axis=2)
        np.maximum(largest[part], found, out=largest[part])
    return to_float32(largest, dtype)


def encode(bits: Bits, dtype: str, scale: Floats, group: Group, out: Codes) -> None:
    """Write the codes [rows, cols] of weights [rows, cols] to `out`.

    Args:
        bits: the weights, finite.
        dtype: their dtype.
        scale: the scales, [rows/height, cols/width].
        group: height and width of what shares a scale.
        out: uint8 [rows, cols], contiguous.
    """
    if dtype == "BF16":
        # The largest weight that a scale was made from, or that it would have been made from if it was raised. It is
        # no bfloat16 where a joined set mixes dtypes.
        with np.errstate(over="ignore"):
            largest = (scale * CODE_MAX).view(np.uint32)
        top = (largest + np.uint32(0x8000)) >> 16
        exponent = top >> 7
        exact = (top << 16).view(np.float32) / CODE_MAX == scale
        if np.all(exact & (exponent >= _SAFE) & (exponent <= _TOP)):
            _encode_by_table(bits, top, group, out)
            return
    _encode_by_arithmetic(bits, dtype, scale, group, out)


def _chunks(group: Group, shape: tuple[int, ...]) -> Iterator[tuple[int, int, slice]]:
    """Rows [low, high) of about CHUNK elements, and the rows of the grid they belong to: one, or one for each."""
    rows, cols = shape
    height = group[0] or rows
    step = max(1, CHUNK // cols)
    span = height if height > 1 else step
    for start in range(0, rows, span):
        stop = min(start + span, rows)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            yield low, high, slice(low // height, (high - 1) // height + 1)


def decode(codes: Codes, scale: Floats, out: Floats, number: str = CODE_DTYPE) -> None:
    """Write the weights [rows, cols] that codes stand for to `out`; NaN for the FP8 codes 0x7f and 0xff, and
    infinity where float32 does not hold them.

    Args:
        codes: one byte for each weight, or for two of FP4 and INT4.
        scale: float32 of any shape that numpy repeats over [rows, cols].
        out: float32 [rows, cols], contiguous.
        number: what the codes are.
    """
    values = _code_values() if number == CODE_DTYPE else _pair_values(number)
    np.take(values, codes, out=out.view(values.dtype), mode="clip")
    with np.errstate(over="ignore"):
        out *= scale


def decode_rows(codes: Codes, number: str, scale: Floats, group: Group, low: int, out: Floats) -> None:
    """Write the weights [rows, cols] of rows from `low` on of a matrix.

    Args:
        codes: as for decode.
        number: what they are.
        scale: those rows of the grid of scales that the weights lie in.
        group: height and width of what shares a scale; the last of a row or column may be smaller.
        low: number of the first row.
        out: float32 [rows, cols], contiguous.
    """
    rows, cols = out.shape
    height, width = group[0] or low + rows, group[1]
    first, start = low // height, 0
    while start < rows:
        # Each row with scales of its own goes with others, a row within a block only with those of the block.
        end = start + max(1, CHUNK // cols)
        if height > 1:
            end = min(end, (low + start) // height * height + height - low)
        end = min(end, rows)
        part = scale[(low + start) // height - first : (low + end - 1) // height + 1 - first]
        decode(codes[start:end], _widen(part, width and min(width, cols))[:, :cols], out[start:end], number)
        start = end


def to_bfloat16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """Round finite float32 values to bfloat16, to the even one of two as near; `out` gets their bits."""
    for low, high, _ in _chunks((1, None), values.shape):
        bits = values[low:high].view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= 16
        out[low:high] = rounded


def has_nan(codes: Codes) -> bool:
    """Whether one of FP8 codes is NaN."""
    flat = codes.reshape(-1)
    return any((flat[i : i + CHUNK] & 0x7F).max() == 0x7F for i in range(0, flat.size, CHUNK))


@cache
def _code_values() -> Floats:
    """[256] the value of every code."""
    code = np.arange(127)
    values = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    magnitudes = np.append(values, np.nan)
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


@cache
def _pair_values(number: str) -> npt.NDArray[np.complex64]:
    """[256] the two values of every byte, that of the low half first."""
    code = np.arange(16)
    if number == INT4:
        values = code - 8.0
    else:
        # e2m1 (OCP Microscaling Formats 1.0, 5.3.3).
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=1).astype(np.float32)
    # A complex number is two of them to numpy, which takes it in one piece.
    return pairs.view(np.complex64).reshape(256)


@cache
def _f16_values() -> Floats:
    """[65536] the value of every float16; looking it up is twice as fast as numpy's conversion."""
    with np.errstate(invalid="ignore"):  # some of them are signalling NaNs
        return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


@cache
def _tables() -> Codes:
    """[128 * 65536] codes: entry [m, x] is bfloat16 x in a group whose largest weight is (1 + m/128) * 2^127."""
    magnitudes = np.zeros((128, 2, 32768), np.uint8)
    magnitudes[:, 1] = 0x80
    # 2^-10 of the smallest normal code is already zero: 448 is 2^8.8, so 24 exponents hold every nonzero code.
    start = (_TOP - 24) << 7
    values = to_float32(np.arange(start, (_TOP + 1) << 7, dtype=np.uint16), "BF16")
    for mantissa in range(128):
        largest = to_float32(np.array([(_TOP << 7) | mantissa], np.uint16), "BF16")
        codes = encode_float32(values, largest / CODE_MAX)
        magnitudes[mantissa, 0, start : start + codes.size] = codes
        magnitudes[mantissa, 1, start : start + codes.size] = codes | 0x80
    return magnitudes.reshape(-1)


def _encode_by_table(bits: Bits, top: npt.NDArray[np.integer[Any]], group: Group, out: Codes) -> None:
    tables = _tables()
    # Where a weight's code lies: its mantissa's table, and its own bits raised to the top exponent.
    offset = ((top & 127) << 16) + ((_TOP - (top >> 7)) << 7)
    if offset.size == 1:
        start = int(offset.item())
        table = tables[start : (start & ~0xFFFF) + 0x10000]
        flat, codes = bits.reshape(-1), out.reshape(-1)
        for i in range(0, flat.size, CHUNK):
            np.take(table, flat[i : i + CHUNK], out=codes[i : i + CHUNK], mode="clip")
        return
    rows, cols = bits.shape
    # Added as 32 bits, which the processor does several at a time, then widened to what take() asks for.
    narrow = np.empty((min(rows, max(1, CHUNK // cols)), cols), np.uint32)
    index = np.empty(narrow.shape, np.intp)
    for low, high, part in _chunks(group, bits.shape):
        shift = _widen(offset[part], group[1])
        np.copyto(index[: high - low], np.add(bits[low:high], shift, out=narrow[: high - low]))
        np.take(tables, index[: high - low], out=out[low:high], mode="clip")


def _encode_by_arithmetic(bits: Bits, dtype: str, scale: Floats, group: Group, out: Codes) -> None:
    for low, high, part in _chunks(group, bits.shape):
        out[low:high] = encode_float32(to_float32(bits[low:high], dtype), _widen(scale[part], group[1]))


def _widen(grid: npt.NDArray[Entry], width: int | None) -> npt.NDArray[Entry]:
    """Some rows of a grid with each entry repeated over its columns, if it has more than one column."""
    return grid if width is None else np.repeat(grid, width, axis=1)


def encode_float32(values: Floats, scale: Floats) -> Codes:
    """Codes of finite float32 values: divide, clamp to 448, round to nearest even."""
    quotient = np.divide(values, scale).view(np.uint32)
    # Rounded to odd, 16 of the 32 bits are enough to round once more to a code, as if there had been no first time:
    # the last bit kept says whether anything lies beyond it.
    odd = quotient & 0xFFFF
    odd += np.uint32(0xFFFF)
    odd |= quotient
    odd >>= 16
    return np.take(_nearest(), odd.astype(np.intp), mode="clip")


@cache
def _nearest() -> Codes:
    """[65536] the code nearest to every finite bfloat16, the even one of two as near; 448 for all beyond it."""
    values = _code_values()[:127].astype(np.float64)
    middle = (values[1:] + values[:-1]) / 2
    # The middle belongs to the smaller neighbour, unless that one is odd.
    middle[1::2] = np.nextafter(middle[1::2], 0)
    finite = to_float32(np.arange(0x7F80, dtype=np.uint16), "BF16")
    magnitudes = np.full(32768, 126, np.uint8)
    magnitudes[: finite.size] = np.searchsorted(middle, finite)
    return np.concatenate([magnitudes, magnitudes | 0x80])

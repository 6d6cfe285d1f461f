"""CPU kernels: float bits in, codes of any Number out, and back, with numpy alone.

Importing torch costs more than converting a small model, so the CPU path does without it. `reference.encode`
says the same in four lines of torch; the tests hold the two against each other bit by bit.

Weights come as unsigned integers that hold the float's bits ("bits" below), since numpy has no bfloat16 and
absolute values compare as integers do. A bfloat16 code follows from a table: dividing by the scale depends only
on the two mantissas and the difference of the exponents, so 128 tables (one per mantissa of the group's largest
weight, at the top exponent) serve every scale, once the weight's exponent is raised by what the group's largest
lacks to the top. Where scales are bfloat16 themselves, the mantissa of the scale takes that one's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .format import Format, Group, StoredScales, grid_of
from .numbers import E4M3, Codes, Floats, Number, nearest_bfloat16

Bits = npt.NDArray[np.unsignedinteger[Any]]
Entry = TypeVar("Entry", bound=np.generic)


class Loops(Protocol):
    """What a conversion does to many weights: this module, or compiled.py, which makes the same bits.

    The functions of this module of the same names say what each takes and returns.
    """

    def absmax(self, bits: Bits, dtype: str, group: Group, /) -> Floats:
        """The largest absolute weight of each group, float32 [rows / height, cols / width]."""

    def scales(self, fmt: Format, absmax: Floats, global_scale: Floats | None = None, /) -> Floats:
        """The scale of each group, float32 of the shape of `absmax`."""

    def stored(self, fmt: Format, scale: Floats, global_scale: Floats | None = None, /) -> StoredScales:
        """Scales as they are written, float32, uint16 or uint8 of the shape of `scale`."""

    def encode_stored(
        self,
        bits: Bits,
        dtype: str,
        scale: Floats,
        group: Group,
        out: Codes,
        number: Number,
        global_scale: Floats | None = None,
        zero_point: Floats | None = None,
        /,
    ) -> None:
        """Write the codes of weights [rows, cols] to `out`, uint8 [rows, cols / codes in a byte]."""

    def decode_rows(
        self,
        codes: Codes,
        number: Number,
        scale: Floats,
        group: Group,
        low: int,
        out: Floats,
        zero_point: Floats | None = None,
        /,
    ) -> None:
        """Write the weights that codes stand for to `out`, float32 [rows, cols]."""

    def first_unsound(self, codes: Codes, number: Number, /) -> int | None:
        """The place of the first of some codes, uint8 of any shape, that holds no value; None if all do."""

    def best_scales(
        self,
        bits: Bits,
        dtype: str,
        unclipped: Floats,
        scales: Floats,
        number: Number,
        importance: Floats | None = None,
        /,
    ) -> Floats:
        """The scale of each group with the least squared error, float32 [groups]."""

    def to_bfloat16(self, values: Floats, out: npt.NDArray[np.uint16], /) -> None:
        """Round float32 values [rows, cols] to bfloat16; `out` gets their bits, uint16 [rows, cols]."""


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
_TOP_SCALE = _TOP - 4  # where weights are up to 16 times their scale
_SAFE = 64  # from this exponent field on, zero and subnormals stay below half the smallest code when raised to the top


def to_float32(bits: Bits, dtype: str) -> Floats:
    """The values that bits hold, which float32 has exactly.

    Args:
        bits: uint16 or uint32 of any shape.
        dtype: their dtype, a key of BITS_TYPE.

    Returns:
        float32 of the same shape.
    """
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return np.take(_f16_values(), bits, mode="clip")
    return bits.view(np.float32)


def from_float32(values: Floats, dtype: str) -> Bits:
    """Round float32 values to another dtype, to the nearest; too large ones become infinity.

    Args:
        values: float32 of any shape.
        dtype: a key of BITS_TYPE.

    Returns:
        Their bits, uint16 or uint32 of the same shape.
    """
    if dtype == "BF16":
        return nearest_bfloat16(values).astype(np.uint16)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def scale_values(stored: Codes, dtype: str) -> Floats:
    """The values of stored scales.

    Args:
        stored: uint8 [bytes], their bytes.
        dtype: "F64", "F32", "BF16", "F16" or "F8_E4M3"; or "F8_E8M0" or "U8", exponents of which 255 is NaN.

    Returns:
        float32 [scales].
    """
    if dtype in BITS_TYPE:
        return to_float32(stored.view(BITS_TYPE[dtype]), dtype)
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return stored.view(np.float64).astype(np.float32)
    return E4M3.decode(stored) if dtype == "F8_E4M3" else np.take(_exponent_values(), stored, mode="clip")


@cache
def _exponent_values() -> Floats:
    """[256] the power of two that each byte is the exponent of."""
    values = np.exp2(np.arange(-127, 129, dtype=np.float64))
    values[255] = np.nan
    return values.astype(np.float32)


def absmax(bits: Bits, dtype: str, group: Group) -> Floats:
    """The largest absolute weight of each group.

    Args:
        bits: the weights, uint16 or uint32 [rows, cols], multiples of the group's height and width.
        dtype: their dtype, a key of BITS_TYPE.
        group: height and width of what shares a scale.

    Returns:
        float32 [rows / height, cols / width]; NaN or infinity for a group that holds one.
    """
    mask = bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)
    largest = np.zeros(grid_of(group, bits.shape), bits.dtype)
    for low, high, part in _chunks(group, bits.shape):
        magnitudes = bits[low:high] & mask
        if part.stop - part.start == 1:
            magnitudes = magnitudes.max(axis=0, keepdims=True)
        of_chunk = magnitudes.reshape(len(magnitudes), largest.shape[1], -1).max(axis=2)
        np.maximum(largest[part], of_chunk, out=largest[part])
    return to_float32(largest, dtype)


def scales(fmt: Format, absmax: Floats, global_scale: Floats | None = None) -> Floats:
    """The scale of each group from its largest absolute weight, as Format.scales.

    Args:
        fmt: how the weights are stored.
        absmax: float32 of any shape, the largest absolute weight of each group.
        global_scale: float32 of one element; that of these groups if None.

    Returns:
        float32 of the shape of `absmax`.
    """
    return fmt.scales(absmax, global_scale)


def stored(fmt: Format, scale: Floats, global_scale: Floats | None = None) -> StoredScales:
    """Scales as they are written, as Format.stored.

    Args:
        fmt: how the weights are stored.
        scale: float32 of any shape.
        global_scale: float32 of one element, where the format has one.

    Returns:
        float32, uint16 (the bits of bfloat16 or float16) or uint8 (E4M3 or E8M0) of the shape of `scale`.
    """
    return fmt.stored(scale, global_scale)


def encode(
    bits: Bits,
    dtype: str,
    scale: Floats,
    group: Group,
    out: Codes,
    number: Number,
    global_scale: Floats | None = None,
    zero_point: Floats | None = None,
) -> None:
    """Write the codes of weights to `out`, a byte each.

    Args:
        bits: the bits of finite weights, uint16 or uint32 [rows, cols].
        dtype: their dtype, a key of BITS_TYPE.
        scale: float32 [rows / height, cols / width].
        group: height and width of what shares a scale.
        out: uint8 [rows, cols], contiguous.
        number: what the codes are.
        global_scale: float32 [1, 1], what scales in E4M3 were divided by; None without one.
        zero_point: float32 of the shape of `scale`, the values of the codes that stand for zero; None where zero stands
            for itself.
    """
    if zero_point is not None:
        _encode_by_arithmetic(bits, dtype, scale, group, out, number, zero_point)
        return
    if dtype == "BF16" and global_scale is not None:
        exponent = scale.view(np.uint32) >> 23
        if np.all((exponent >= _SAFE) & (exponent <= _TOP_SCALE)):
            # Of a scale times what it was divided by three bits of mantissa are left.
            mantissa = ((scale * global_scale).view(np.uint32) + np.uint32(0x80000)) >> 20 & 7
            tables = _tables_of_global_scale(number, float(global_scale.item()))
            _encode_by_offset(bits, (mantissa << 16) + ((_TOP_SCALE - exponent) << 7), group, out, tables)
            return
    # A multiple of the scale that is a bfloat16: the largest weight that it was made from, or would have been made from
    # if it was raised, which is none where a joined set mixes dtypes; or any power of two times it, which alone will do
    # where weights may be beyond the largest that a scale was made from.
    multiples = (number.span, _beyond(number)) if number.span == number.largest else (_beyond(number),)
    for multiple in multiples if dtype == "BF16" and global_scale is None else ():
        with np.errstate(over="ignore"):
            largest = (scale * np.float32(multiple)).view(np.uint32)
        top = (largest + np.uint32(0x8000)) >> 16
        exponent = top >> 7
        exact = (top << 16).view(np.float32) / np.float32(multiple) == scale
        if np.all(exact & (exponent >= _SAFE) & (exponent <= _TOP)):
            _encode_by_table(bits, top, group, out, _tables(number, multiple))
            return
    _encode_by_arithmetic(bits, dtype, scale, group, out, number)


def encode_stored(
    bits: Bits,
    dtype: str,
    scale: Floats,
    group: Group,
    out: Codes,
    number: Number,
    global_scale: Floats | None = None,
    zero_point: Floats | None = None,
) -> None:
    """Write the codes of weights [rows, cols] to `out` as they are stored: two share a byte where a number has 16.

    Args:
        bits, dtype, scale, group, number, global_scale, zero_point: as for encode.
        out: uint8 [rows, cols / codes in a byte], contiguous.
    """
    if number.per_byte == 1:
        encode(bits, dtype, scale, group, out, number, global_scale, zero_point)
        return
    # All of them at once: what each chunk allocated anew would take twice as long.
    codes = np.empty(bits.shape, np.uint8)
    encode(bits, dtype, scale, group, codes, number, global_scale, zero_point)
    for low, high, _ in _chunks((1, None), bits.shape):
        pack(codes[low:high], out[low:high])


def pack(codes: Codes, out: Codes) -> None:
    """Write two codes to a byte, the first in the low half.

    Args:
        codes: uint8 [rows, cols], below 16.
        out: uint8 [rows, cols / 2].
    """
    pairs = codes.view("<u2")
    np.copyto(out, pairs | pairs >> 4, casting="unsafe")


def unpack(codes: Codes, number: Number) -> Codes:
    """Stored codes as a byte each.

    Args:
        codes: uint8 [rows, cols / codes in a byte].
        number: what they are.

    Returns:
        uint8 [rows, cols].
    """
    if number.per_byte == 1:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def unpack_words(words: npt.NDArray[np.uint32], number: Number) -> Codes:
    """The codes in words that hold those of several rows, the first lowest.

    Args:
        words: uint32 [rows / codes in a word, cols].
        number: what the codes are.

    Returns:
        The codes, uint8 [rows, cols], a byte each; of rows that filled the last word up too.
    """
    return unpack(np.ascontiguousarray(words.T).view(np.uint8), number).T


def pack_words(codes: Codes, number: Number) -> npt.NDArray[np.uint32]:
    """Pack codes in words that hold those of several rows, the first lowest; zeros fill the last up.

    Args:
        codes: uint8 [rows, cols], a byte each.
        number: what they are.

    Returns:
        The words, uint32 [rows / codes in a word, cols].
    """
    along = np.ascontiguousarray(np.pad(codes, ((0, -len(codes) % number.per_item), (0, 0))).T)
    if number.per_byte > 1:
        packed = np.empty((along.shape[0], along.shape[1] // number.per_byte), np.uint8)
        pack(along, packed)
        along = packed
    return np.ascontiguousarray(along.view(np.uint32).T)


def best_scales(
    bits: Bits, dtype: str, unclipped: Floats, scales: Floats, number: Number, importance: Floats | None = None
) -> Floats:
    """Choose the scale of each group with the least squared error; of two as good the first.

    Sums add in the order of the weights, whatever the CPU.

    Args:
        bits: the bits of finite weights, uint16 or uint32 [groups, width].
        dtype: their dtype, a key of BITS_TYPE.
        unclipped: float32 [groups], the scales that their largest weights make.
        scales: float32 [clip ratios, groups], those to choose from.
        number: what the codes are.
        importance: float32 [n, width], at most 1: what each square counts in the groups 0, n, 2n, .., in 1, n + 1, ..
            and so on; all alike if None.

    Returns:
        The chosen scales, float32 [groups].
    """
    chosen = np.empty_like(unclipped)
    step = max(1, CHUNK // bits.shape[1])
    for low in range(0, len(bits), step):
        part = slice(low, low + step)
        # A column for each group: what is computed for each of them runs along memory. It is always a copy.
        weights = np.array(to_float32(bits[part], dtype).T, order="C")
        groups = np.arange(low, low + weights.shape[1])
        weighting = None if importance is None else np.take(importance.T, groups % len(importance), axis=1)
        chosen[part] = _best(weights, unclipped[part], scales[:, part], number, weighting)
    return chosen


def _best(weights: Floats, unclipped: Floats, scales: Floats, number: Number, weighting: Floats | None) -> Floats:
    """The same for groups that are the columns of weights, which are changed."""
    # In units of the unclipped scale no square overflows, and none of a group that is not zero is lost.
    weights /= unclipped
    chosen, least = unclipped, np.full(unclipped.shape, np.inf, np.float32)
    quotients = np.empty_like(weights)
    for scale in scales:
        relative = scale / unclipped
        np.multiply(weights, np.float32(1) / relative, out=quotients)
        quotients -= number.nearest(quotients)
        quotients *= quotients
        if weighting is not None:
            quotients *= weighting
        # Where there is one column numpy adds halves to each other.
        total = quotients.sum(axis=0) if len(unclipped) > 1 else np.add.accumulate(quotients[:, 0])[-1:]
        error = total * relative * relative
        chosen = np.where(error < least, scale, chosen)
        least = np.minimum(error, least)
    return chosen


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


def decode(codes: Codes, scale: Floats, out: Floats, number: Number, zero_point: Floats | None = None) -> None:
    """Write the weights that codes stand for to `out`; NaN for codes that hold no value, and infinity where float32
    does not hold them.

    Args:
        codes: uint8 [rows, cols / codes in a byte].
        scale: float32 of any shape that numpy repeats over [rows, cols].
        out: float32 [rows, cols], contiguous.
        number: what the codes are.
        zero_point: float32 of the shape of `scale`, the values of the codes that stand for zero; 0 if None.
    """
    values = bytes_of(number)
    np.take(values, codes, out=out.view(values.dtype), mode="clip")
    if zero_point is not None:
        out -= zero_point
    with np.errstate(over="ignore"):
        out *= scale


def decode_rows(
    codes: Codes, number: Number, scale: Floats, group: Group, low: int, out: Floats, zero_point: Floats | None = None
) -> None:
    """Write the weights of some rows of a matrix, from row `low` on, to `out`.

    Args:
        codes: uint8 [rows, cols / codes in a byte].
        number: what they are.
        scale: float32 [rows of groups that the weights lie in, cols / width].
        group: height and width of what shares a scale; the last of a row or column may be smaller.
        low: the number of the first row.
        out: float32 [rows, cols], contiguous.
        zero_point: float32 of the shape of `scale`, the values of the codes that stand for zero; 0 if None.
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
        part = slice((low + start) // height - first, (low + end - 1) // height + 1 - first)
        spread = [
            None if grid is None else _widen(grid[part], width and min(width, cols))[:, :cols]
            for grid in (scale, zero_point)
        ]
        assert spread[0] is not None
        decode(codes[start:end], spread[0], out[start:end], number, spread[1])
        start = end


def to_bfloat16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """Round finite values to bfloat16, to the even one of two as near.

    Args:
        values: float32 [rows, cols].
        out: uint16 [rows, cols], gets the bits.
    """
    for low, high, _ in _chunks((1, None), values.shape):
        out[low:high] = nearest_bfloat16(values[low:high])


def first_unsound(codes: Codes, number: Number) -> int | None:
    """Find the first of some codes that holds no value, such as NaN.

    Args:
        codes: uint8 of any shape, as they are stored.
        number: what they are.

    Returns:
        Its place among the bytes in order; None if all hold values.
    """
    flat = codes.reshape(-1)
    for low in range(0, flat.size, CHUNK):
        wrong = number.unsound(flat[low : low + CHUNK])
        if wrong is not None:
            return low + int(wrong.argmax())
    return None


@cache
def bytes_of(number: Number) -> npt.NDArray[np.float32] | npt.NDArray[np.complex64]:
    """What every byte stands for.

    Returns:
        float32 [256]; or complex64 [256] where a byte holds two codes, that of the low half as the real part.
    """
    values = number.values()
    if number.per_byte == 1:
        return values
    byte = np.arange(256)
    # A complex number is two of them to numpy, which takes it in one piece.
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.complex64).reshape(256)


@cache
def _f16_values() -> Floats:
    """[65536] the value of every float16; looking it up is twice as fast as numpy's conversion."""
    with np.errstate(invalid="ignore"):  # some of them are signalling NaNs
        return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def _beyond(number: Number) -> float:
    """The least power of two that no code reaches."""
    return float(2.0 ** (np.floor(np.log2(number.largest)) + 1))


@cache
def _tables(number: Number, multiple: float) -> Codes:
    """[128 * 65536] codes: entry [m, x] is bfloat16 x where so many times the scale are (1 + m/128) * 2^127."""
    tables = np.empty((128, 2, 32768), np.uint8)
    tables[:] = number.encode(np.array([[0.0], [-0.0]], np.float32))
    # 2^-10 of the smallest normal code is already zero: 448 is 2^8.8, so 24 exponents hold every nonzero code.
    start = (_TOP - 24) << 7
    values = to_float32(np.arange(start, (_TOP + 1) << 7, dtype=np.uint16), "BF16")
    for mantissa in range(128):
        largest = to_float32(np.array([(_TOP << 7) | mantissa], np.uint16), "BF16")
        quotients = values / (largest / np.float32(multiple))
        tables[mantissa, 0, start : start + values.size] = number.encode(quotients)
        tables[mantissa, 1, start : start + values.size] = number.encode(-quotients)
    return tables.reshape(-1)


@lru_cache(maxsize=8)
def _tables_of_global_scale(number: Number, global_scale: float) -> Codes:
    """[8 * 65536] codes: entry [m, x] is bfloat16 x under (1 + m/8) / global_scale, times the power of two that gives
    it the exponent field _TOP_SCALE. For NVFP4, where weights are at most 10 times their scale.
    """
    tables = np.empty((8, 2, 32768), np.uint8)
    tables[:] = number.encode(np.array([[0.0], [-0.0]], np.float32))
    start = (_TOP - 24) << 7
    values = to_float32(np.arange(start, (_TOP + 1) << 7, dtype=np.uint16), "BF16")
    for mantissa in range(8):
        scale = np.array([1 + mantissa / 8], np.float32) / np.float32(global_scale)
        raised = ((scale.view(np.uint32) & 0x7FFFFF) | np.uint32(_TOP_SCALE << 23)).view(np.float32)
        quotients = values / raised
        tables[mantissa, 0, start : start + values.size] = number.encode(quotients)
        tables[mantissa, 1, start : start + values.size] = number.encode(-quotients)
    return tables.reshape(-1)


def _encode_by_table(bits: Bits, top: npt.NDArray[np.integer[Any]], group: Group, out: Codes, tables: Codes) -> None:
    _encode_by_offset(bits, ((top & 127) << 16) + ((_TOP - (top >> 7)) << 7), group, out, tables)


def _encode_by_offset(
    bits: Bits, offset: npt.NDArray[np.integer[Any]], group: Group, out: Codes, tables: Codes
) -> None:
    """Look codes up. Where a weight's lies: in its group's table, at its own bits raised to the top exponent."""
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


def _encode_by_arithmetic(
    bits: Bits, dtype: str, scale: Floats, group: Group, out: Codes, number: Number, zero_point: Floats | None = None
) -> None:
    for low, high, part in _chunks(group, bits.shape):
        spread = None if zero_point is None else _widen(zero_point[part], group[1])
        out[low:high] = encode_float32(to_float32(bits[low:high], dtype), _widen(scale[part], group[1]), number, spread)


def _widen(grid: npt.NDArray[Entry], width: int | None) -> npt.NDArray[Entry]:
    """Some rows of a grid with each entry repeated over its columns, if it has more than one column."""
    return grid if width is None else np.repeat(grid, width, axis=1)


def encode_float32(values: Floats, scale: Floats, number: Number, zero_point: Floats | None = None) -> Codes:
    """The codes of finite values: divide, add the zero point, clamp, round to nearest even.

    Args:
        values: float32 [rows, cols].
        scale: float32 of any shape that numpy repeats over [rows, cols].
        number: what the codes are.
        zero_point: float32 of the shape of `scale`, the values of the codes that stand for zero; 0 if None.

    Returns:
        The codes, uint8 [rows, cols], a byte each.
    """
    quotients = np.divide(values, scale)
    if zero_point is not None:
        quotients += zero_point
    return number.encode(quotients)

"""CPU kernels in numpy: the scales of weights, weights to codes of any numeric format, and back.

Importing torch costs more than converting a small model, so the CPU path does without it. `reference.encode` is the
same in four lines of torch; tests compare the two bit by bit.

Weights come as unsigned integers with the float's bits ("bits" below), since numpy has no bfloat16 and absolute values
compare as integers do. Where all weights have one scale, the codes of 16-bit weights come from a table of all of them.

Scales and zero points of every scheme are chosen here, by choose_scales. A scale is made from the largest absolute
weight of its group; with zero points, from the smallest and the largest weight. The largest weight need not get the
largest code: clipping it a little leaves all others a finer grid. A scheme that searches tries a few clip ratios and
takes the scale with the least squared error of the weights. Integers have one code more below zero than above it, -8 to
7, so a search makes the scale negative if the largest weight is positive.

    choose_scales(INT4_W4A16, bits, "BF16").scale           # float32 [rows, cols / 128]
    choose_scales(INT4_SHIFTED, bits, "BF16").zero_point    # likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from . import kernels
from .format import Format, Group, grid_of, widen
from .numbers import E4M3, Codes, Floats, Number, lanes, nearest_bfloat16
from .schemes import Scheme

Bits = npt.NDArray[np.unsignedinteger[Any]]


# What has the functions that look at every weight: this module, or compiled.py, where they return the same bits faster.
Loops: TypeAlias = ModuleType

BITS_TYPE: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.uint16),
    "F32": np.dtype(np.uint32),
}
"""Source dtypes that can be quantized, with the integer dtype of their bits."""

# Elements handled at a time: few enough that the next step finds them in the cache, many enough that threads seldom
# wait for each other (every call into numpy takes the interpreter lock back).
CHUNK = 1 << 18


def to_float32(bits: Bits, dtype: str) -> Floats:
    """Convert the bits of weights to float32, which is exact.

    Args:
        bits: uint16 (uint32 for F32) of any shape.
        dtype: dtype of the weights: "BF16", "F16" or "F32".

    Returns:
        float32 of the same shape; for F32 a view of `bits`.
    """
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return np.take(_f16_values(), bits, mode="clip")
    return bits.view(np.float32)


def from_float32(values: Floats, dtype: str) -> Bits:
    """Round float32 values to another dtype, ties to even; values out of range become infinity.

    Args:
        values: float32 of any shape.
        dtype: "BF16", "F16" or "F32".

    Returns:
        The bits of the rounded values, uint16 of the same shape; for F32 uint32, a view of `values`.
    """
    if dtype == "BF16":
        return nearest_bfloat16(values).astype(np.uint16)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return values.view(np.uint32)


def scale_values(stored: Codes, dtype: str) -> Floats:
    """Decode stored scales.

    Args:
        stored: uint8 [nbytes], the little-endian bytes of the scales.
        dtype: dtype of the stored scales: "F64", "F32", "BF16", "F16" or "F8_E4M3"; or "F8_E8M0" or "U8" for powers
            of two stored as exponent + 127, of which 255 is NaN.

    Returns:
        float32 [number of scales]; scales under a global scale are not divided by it.
    """
    if dtype in BITS_TYPE:
        return to_float32(stored.view(BITS_TYPE[dtype]), dtype)
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return stored.view(np.float64).astype(np.float32)
    if dtype == "F8_E4M3":
        return E4M3.decode(stored)
    return np.take(_exponent_values(), stored, mode="clip")


@cache
def _exponent_values() -> Floats:
    """Return the values of all E8M0 bytes, float32 [256]."""
    values = np.exp2(np.arange(-127, 129, dtype=np.float64))
    values[255] = np.nan
    return values.astype(np.float32)


def absmax(bits: Bits, dtype: str, group: Group) -> Floats:
    """Compute the largest absolute weight of each group.

    Args:
        bits: bits of the weights, uint16 (uint32 for F32) [rows, cols] of whole groups.
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        group: (height, width) of a group; None is the whole axis.

    Returns:
        float32 [rows / height, cols / width]; NaN or infinity for a group that has one.
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


def signs(bits: Bits) -> Floats:
    """Return the signs of scales that give each group's largest absolute weight a code below zero.

    Args:
        bits: bits of finite weights, uint16 (uint32 for F32) [groups, width].

    Returns:
        float32 [groups]: -1 if the largest is positive, 1 if it is negative or one of either sign is.
    """
    signed = bits.dtype.str.replace("u", "i")
    negative = np.empty(len(bits), np.bool_)
    step = max(1, CHUNK // bits.shape[1])
    for low in range(0, len(bits), step):
        part = bits[low : low + step]
        # A float that is the largest as a signed integer is the most positive; as an unsigned one, the most negative.
        highest = part.view(signed).max(axis=1)
        lowest = part.max(axis=1).view(signed)
        negative[low : low + step] = highest > np.where(lowest < 0, lowest & np.iinfo(signed).max, 0)
    return np.where(negative, np.float32(-1), np.float32(1))


def scales(fmt: Format, absmax: Floats, global_scale: Floats | None = None) -> Floats:
    """Compute the scale of each group from its largest absolute weight.

    Args:
        fmt: how the weights are stored.
        absmax: float32 of any shape, the largest absolute weight of each group.
        global_scale: float32 of one element, by which scales are multiplied before they are stored; computed from
            `absmax` if None and the format has one.

    Returns:
        float32 of the shape of `absmax`: weight = code value * scale. Where there is a global scale, it is the stored
        scale divided by the global scale.
    """
    return fmt.scales(absmax, global_scale)


def encode_stored(
    bits: Bits, dtype: str, scale: Floats, fmt: Format, out: Codes, zero_point: Floats | None = None
) -> None:
    """Quantize weights and write their codes to `out` as they are stored, without gaps between them.

    INT8 stores the value: with the scale 0.5, [-4.0, 0.0, 1.3, 90.0] has the codes [-8, 0, 3, 127]; 90.0 is out of
    range.

    Args:
        bits: bits of finite weights, uint16 (uint32 for F32) [rows, cols].
        dtype: dtype of the weights: "BF16", "F16" or "F32".
        scale: float32 [rows / height, cols / width]: weight = (code value - zero point) * scale, so any global scale is
            already divided out.
        fmt: the format that the weights are stored in.
        out: uint8 [rows, cols * bits / 8], contiguous; is overwritten.
        zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.
    """
    table = None
    if scale.size == 1 and zero_point is None and dtype != "F32":
        table = _codes_of_all(fmt.number, dtype, scale.item())

    for low, high, part in _chunks(fmt.group, bits.shape):
        if table is not None:
            codes = np.take(table, bits[low:high], mode="clip")
        else:
            values = to_float32(bits[low:high], dtype)
            spread = None if zero_point is None else widen(zero_point[part], fmt.group[1])
            codes = encode_float32(values, widen(scale[part], fmt.group[1]), fmt.number, spread)
        pack(codes, out[low:high], fmt.number)


def decode(codes: Codes, scale: Floats, out: Floats, number: Number, zero_point: Floats | None = None) -> None:
    """Dequantize codes into `out`: (value - zero point) * scale. NaN codes give NaN, overflow gives infinity.

    INT4 bytes [0x80, 0xfb] with the scale 0.5 are [-4.0, 0.0, 1.5, 3.5].

    Args:
        codes: uint8 [rows, cols * bits / 8].
        scale: float32 of any shape that broadcasts over [rows, cols], with any global scale divided out.
        out: float32 [rows, cols], contiguous; is overwritten.
        number: numeric format of the codes.
        zero_point: float32 of the shape of `scale`; None if zero points are 0.
    """
    if number.bits in (4, 8):
        values = bytes_of(number)
        np.take(values, codes, out=out.view(values.dtype), mode="clip")
    else:
        np.take(number.values(), unpack(codes, number), out=out, mode="clip")
    if zero_point is not None:
        out -= zero_point
    with np.errstate(over="ignore"):
        out *= scale


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
    rows, cols = out.shape
    height = group[0] or low + rows
    width = group[1]
    first = low // height
    start = 0

    while start < rows:
        # Rows with scales of their own are decoded together; rows of blocks only with those of the same block.
        end = start + max(1, CHUNK // cols)
        if height > 1:
            end = min(end, (low + start) // height * height + height - low)
        end = min(end, rows)

        part = slice((low + start) // height - first, (low + end - 1) // height + 1 - first)
        spread = [
            None if grid is None else widen(grid[part], width and min(width, cols))[:, :cols]
            for grid in (scale, zero_point)
        ]
        assert spread[0] is not None
        decode(codes[start:end], spread[0], out[start:end], number, spread[1])

        start = end


def encode_float32(values: Floats, scale: Floats, number: Number, zero_point: Floats | None = None) -> Codes:
    """Quantize finite values: divide by the scale, add the zero point, clamp, round to nearest even.

    Args:
        values: float32 [rows, cols].
        scale: float32 of any shape that broadcasts over [rows, cols]: weight = (code value - zero point) * scale.
        number: numeric format of the codes.
        zero_point: float32 of the shape of `scale`: value of the code that stands for zero; None if it is 0.

    Returns:
        uint8 [rows, cols], one code per byte.
    """
    quotients = np.divide(values, scale)
    if zero_point is not None:
        quotients += zero_point
    return number.encode(quotients)


def pack(codes: Codes, out: Codes, number: Number) -> None:
    """Pack codes without gaps, the first in the lowest bits.

    Codes [1, 2, 3, 4, 5, 6, 7, 0] are the bytes [0x21, 0x43, 0x65, 0x07] with 4 bits, [0xd1, 0x58, 0x1f] with 3.

    Args:
        codes: uint8 [rows, cols], each below 2^bits; contiguous, `cols` a multiple of `number.run`.
        out: uint8 [rows, cols * bits / 8], contiguous; is overwritten.
        number: numeric format of the codes.
    """
    if number.bits == 8:
        np.copyto(out, codes)
    elif number.bits == 4:
        pairs = codes.view("<u2")
        np.copyto(out, pairs | pairs >> 4, casting="unsafe")
    else:
        # Eight codes take as many bytes as a code has bits.
        packed = codes.reshape(-1).view("<u8")
        width = number.bits
        for lane in (8, 16, 32):
            low = np.uint64(lanes(width, 2 * lane))
            packed = packed & low | packed >> np.uint64(lane - width) & low << np.uint64(width)
            width *= 2

        of_eight = packed.view(np.uint8).reshape(-1, 8)
        into = out.reshape(-1, number.bits)
        for byte in range(number.bits):
            into[:, byte] = of_eight[:, byte]


def unpack(codes: Codes, number: Number) -> Codes:
    """Unpack stored codes: 3-bit codes in [0xd1, 0x58, 0x1f] are [1, 2, 3, 4, 5, 6, 7, 0].

    Args:
        codes: uint8 [rows, cols * bits / 8], contiguous; `cols` is a multiple of `number.run`.
        number: numeric format of the codes.

    Returns:
        uint8 [rows, cols], one code per byte; `codes` itself if it has that already.
    """
    if number.bits == 8:
        return codes
    if number.bits == 4:
        return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)

    of_eight = np.zeros((codes.size // number.bits, 8), np.uint8)
    packed = codes.reshape(-1, number.bits)
    for byte in range(number.bits):
        of_eight[:, byte] = packed[:, byte]

    spread = of_eight.reshape(-1).view("<u8")
    width = 4 * number.bits
    for lane in (32, 16, 8):
        low = np.uint64(lanes(width, 2 * lane))
        spread = spread & low | (spread & low << np.uint64(width)) << np.uint64(lane - width)
        width //= 2

    return spread.view(np.uint8).reshape(len(codes), -1)


def unpack_words(words: npt.NDArray[np.uint32], number: Number) -> Codes:
    """Unpack words that have the codes of several rows, the first row in the lowest bits: 0x87654321 is 1 to 8.

    Args:
        words: uint32 [ceil(rows * bits / 32), cols].
        number: numeric format of the codes.

    Returns:
        uint8 [rows, cols], one code per byte, including rows of padding in the last words.
    """
    whole = np.pad(words, ((0, -len(words) % number.items(number.run)), (0, 0)))
    return unpack(np.ascontiguousarray(whole.T).view(np.uint8), number).T


def pack_words(codes: Codes, number: Number) -> npt.NDArray[np.uint32]:
    """Pack the codes of several rows into words, the first row in the lowest bits; the last word is padded with zeros.

    A column of the 4-bit codes 1 to 8 is the word 0x87654321.

    Args:
        codes: uint8 [rows, cols], one code per byte.
        number: numeric format of the codes.

    Returns:
        uint32 [ceil(rows * bits / 32), cols].
    """
    along = np.ascontiguousarray(np.pad(codes, ((0, -len(codes) % number.run), (0, 0))).T)
    packed = np.empty((len(along), number.nbytes(along.shape[1])), np.uint8)
    pack(along, packed, number)
    return np.ascontiguousarray(packed.view(np.uint32).T[: number.items(len(codes))])


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

    Sums add in the order of the weights, so the result is the same on every CPU.

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
    chosen = np.empty_like(unclipped)
    step = max(1, CHUNK // bits.shape[1])
    for low in range(0, len(bits), step):
        part = slice(low, low + step)
        # A column for each group, so that per-group arithmetic runs along memory. It is always a copy.
        weights = np.array(to_float32(bits[part], dtype).T, order="C")
        groups = np.arange(low, low + weights.shape[1])
        weighting = None if importance is None else np.take(importance.T, groups % len(importance), axis=1)
        tried = ((scale, None) for scale in scales[:, part])
        chosen[part], _ = _best(weights, (unclipped[part], None), tried, number, weighting, by_size)
    return chosen


class ColumnRounding(NamedTuple):
    """The transposed columns of a weight while GPTQ rounds them one by one, in arrays or torch's tensors.

    Attributes:
        columns: float32 [in, out], weights plus propagated errors; once a column is rounded, its quotients.
        errors: float32 [in, out], rounding errors of columns that are rounded; weights of the others.
        coefficients: float32 [in, in], upper triangular: row k has what column k's error adds to each later column.
        groups: int64 [in], row of `scales` for each column.
        scales: float32 [groups, out]: weight = (code value - zero point) * scale.
        zero_points: float32 [groups, out]; None for symmetric formats.
    """

    columns: Any
    errors: Any
    coefficients: Any
    groups: Any
    scales: Any
    zero_points: Any


def round_panel(weight: ColumnRounding, number: Number, low: int, high: int, nearest: Any = None) -> None:
    """Round columns low to high, and add the error of each to the later ones of them.

    Products are rounded before they are added, so the result is the same on every CPU.

    Args:
        weight: the columns, to which all errors of columns before `low` were propagated.
        number: numeric format of the codes.
        low: the first column.
        high: the column after the last.
        nearest: rounds quotients to values of codes; number.nearest if None. The parts of `weight` are tensors of torch
            if it is for these.
    """
    columns, errors, coefficients, groups, scales, zero_points = weight
    for column in range(low, high):
        group = groups[column]
        quotients = columns[column] / scales[group]
        if zero_points is not None:
            quotients += zero_points[group]

        values = (nearest or number.nearest)(quotients)
        columns[column] = values
        if zero_points is not None:
            values -= zero_points[group]
        errors[column] -= values * scales[group]
        columns[column + 1 : high] += coefficients[column, column + 1 : high, None] * errors[column]


def _chunks(group: Group, shape: tuple[int, ...]) -> Iterator[tuple[int, int, slice]]:
    """Yield ranges of rows [low, high) of about CHUNK elements, and the rows of the grid of scales for them."""
    rows, cols = shape
    height = group[0] or rows
    step = max(1, CHUNK // cols)
    span = height if height > 1 else step
    for start in range(0, rows, span):
        stop = min(start + span, rows)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            yield low, high, slice(low // height, (high - 1) // height + 1)


def to_bfloat16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    """Round finite values to bfloat16, ties to even.

    Args:
        values: float32 [rows, cols].
        out: uint16 [rows, cols], overwritten with the bits.
    """
    for low, high, _ in _chunks((1, None), values.shape):
        out[low:high] = nearest_bfloat16(values[low:high])


def first_unsound(codes: Codes, number: Number) -> int | None:
    """Find the first code that is NaN, which only E4M3 has.

    Args:
        codes: stored bytes, uint8 of any shape.
        number: numeric format of the codes.

    Returns:
        The index of its byte in the flattened `codes`; None if no code is NaN.
    """
    if number != E4M3:
        return None
    flat = codes.reshape(-1)
    for low in range(0, flat.size, CHUNK):
        magnitudes = flat[low : low + CHUNK] & 0x7F
        if magnitudes.max() == 0x7F:
            return low + int(magnitudes.argmax())
    return None


@cache
def bytes_of(number: Number) -> npt.NDArray[np.float32] | npt.NDArray[np.complex64]:
    """Return the value of every stored byte.

    Args:
        number: numeric format of codes of 4 or 8 bits.

    Returns:
        float32 [256]; or complex64 [256] where a byte has two codes, with the first one's value as the real part.
    """
    values = number.values()
    if number.bits == 8:
        return values
    byte = np.arange(256)
    pair = [values[byte & 15], values[byte >> 4]]
    if number.high_first:
        pair.reverse()
    # numpy looks up a pair of float32 in one step if it is a complex number.
    return np.stack(pair, axis=1).view(np.complex64).reshape(256)


@cache
def _f16_values() -> Floats:
    """Return the value of every float16, float32 [65536]; a look-up is twice as fast as numpy's conversion."""
    with np.errstate(invalid="ignore"):  # some are signalling NaNs
        return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


@lru_cache(maxsize=8)
def _codes_of_all(number: Number, dtype: str, scale: float) -> Codes:
    """Return the code of every weight of 16 bits under a scale, uint8 [65536]; NaN and infinities have any."""
    with np.errstate(over="ignore", invalid="ignore"):
        return encode_float32(
            to_float32(np.arange(65536, dtype=np.uint16), dtype), np.array([scale], np.float32), number
        )


# Groups whose scales, and weights whose zero points, are searched for together: few calls into numpy, and yet small
# enough for the cache.
GROUPS = 1 << 16


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
        importance: float32 [cols], weights of the squared errors of each column; if None all are equal, or as large as
            the weights (`Scheme.weighs_by_size`). Schemes that do not search ignore it.
        loops: the module that computes: formats.kernels (numpy) or formats.compiled (numba).

    Returns:
        `scale`, finite and not zero, and `zero_point`, each float32 [rows / height, cols / width]: weight = (code
        value - zero point) * scale. Only scales of integers that were searched for may be negative. With a global
        scale, `scale` is the stored scale divided by it. `zero_point` is None for schemes without zero points.
    """
    fmt = scheme.format
    clip_ratios = scheme.clip_ratios if scheme.searches_scales else (1.0,)
    if fmt.zero_point is not None:
        return _choose_with_zero_points(scheme, bits, dtype, clip_ratios, importance)
    if absmax is None:
        absmax = loops.absmax(bits, dtype, fmt.group)
    if global_scale is None and fmt.global_scale is not None:
        global_scale = choose_shared_scale(fmt, absmax.max(keepdims=True))
    if not scheme.searches_scales:
        return Scales(loops.scales(fmt, absmax, global_scale))
    return Scales(_search(scheme, bits, dtype, absmax, global_scale, importance, loops))


def choose_shared_scale(fmt: Format, absmax: Floats) -> Floats:
    """Choose the scale that fused layers share: the only one of a per-tensor format, or else the global scale.

    Args:
        fmt: a per-tensor format, or one with a global scale.
        absmax: float32 of any shape, the largest absolute weight of the fused layers.

    Returns:
        float32 of the same shape: the per-tensor scale, with weight = code value * scale; or the global scale, by which
        the scales of groups are multiplied before they are stored.
    """
    if fmt.shared:
        return fmt.scales(absmax)
    return fmt.choose_global_scale(absmax)


def _search(
    scheme: Scheme,
    bits: Bits,
    dtype: str,
    absmax: Floats,
    global_scale: Floats | None,
    importance: Floats | None,
    loops: Loops,
) -> Floats:
    """Return the scale of each group with the least squared error; of equal ones, that of the earlier clip ratio."""
    fmt = scheme.format
    width = fmt.group[1] or bits.shape[1]
    step = max(1, GROUPS // absmax.shape[1])
    scale = np.empty(absmax.shape, np.float32)

    by_size = scheme.weighs_by_size and importance is None
    weighting = None if importance is None else _relative_importance(importance, width)
    # Groups are a single axis below, so the global scale must not have two.
    if global_scale is not None:
        global_scale = global_scale.reshape(1)

    for low in range(0, len(bits), step):
        groups = bits[low : low + step].reshape(-1, width)
        largest = absmax[low : low + step].reshape(-1)
        with np.errstate(over="ignore"):
            # A ratio above 1 may overflow; E4M3 clamps the scale.
            tried = np.stack(
                [loops.scales(fmt, largest * np.float32(ratio), global_scale) for ratio in scheme.clip_ratios]
            )

        unclipped = loops.scales(fmt, largest, global_scale)
        if fmt.number.span < fmt.number.largest:
            # The largest weight is to get the code of the largest magnitude, which is below zero.
            signs = loops.signs(groups)
            unclipped = unclipped * signs
            tried *= signs

        best = loops.best_scales(groups, dtype, unclipped, tried, fmt.number, weighting, by_size)
        scale[low : low + step] = best.reshape(scale[low : low + step].shape)

    return scale


def _choose_with_zero_points(
    scheme: Scheme, bits: Bits, dtype: str, clip_ratios: tuple[float, ...], importance: Floats | None
) -> Scales:
    """Return the scale and zero point of each group; with several clip ratios, those of the least squared error."""
    fmt = scheme.format
    width = fmt.group[1] or bits.shape[1]
    step = max(1, CHUNK // bits.shape[1])

    shape = len(bits), bits.shape[1] // width
    scale = np.empty(shape, np.float32)
    zero_point = np.empty(shape, np.float32)

    by_size = scheme.weighs_by_size and importance is None
    weighting = None if importance is None else _relative_importance(importance, width)

    for low in range(0, len(bits), step):
        groups = to_float32(bits[low : low + step], dtype).reshape(-1, width)
        if len(clip_ratios) == 1:
            ratio = np.float32(clip_ratios[0])
            best = fmt.ranges(groups.min(axis=1) * ratio, groups.max(axis=1) * ratio)
        else:
            # A column for each group, so that per-group arithmetic runs along memory. It is always a copy.
            weighed = None if weighting is None else np.tile(weighting.T, (1, len(groups) // shape[1]))
            columns = np.array(groups.T, order="C")
            least = columns.min(axis=0)
            most = columns.max(axis=0)
            tried = (fmt.ranges(least * np.float32(ratio), most * np.float32(ratio)) for ratio in clip_ratios)
            best = _best(columns, fmt.ranges(least, most), tried, fmt.number, weighed, by_size)

        for grid, values in zip((scale, zero_point), best, strict=True):
            grid[low : low + step] = values.reshape(-1, shape[1])

    return Scales(scale, zero_point)


def _best(
    weights: Floats,
    unclipped: tuple[Floats, Any],
    tried: Iterable[tuple[Floats, Any]],
    number: Number,
    weighting: Floats | None,
    by_size: bool,
) -> tuple[Floats, Any]:
    """Choose the scales and zero points, if any, of groups that are the columns of `weights`, which is overwritten."""
    best, best_zero_point = unclipped
    # In units of the unclipped scale no square overflows or underflows.
    weights /= best
    if by_size:
        weighting = np.abs(weights)

    least = np.full(best.shape, np.inf, np.float32)
    quotients = np.empty_like(weights)

    for scale, zero_point in tried:
        relative = scale / unclipped[0]
        np.multiply(weights, np.float32(1) / relative, out=quotients)
        if zero_point is not None:
            quotients += zero_point
        quotients -= number.nearest(quotients)
        quotients *= quotients
        if weighting is not None:
            quotients *= weighting

        total = quotients.sum(axis=0)
        # numpy sums a single column pairwise, and compiled loops add in the order of the weights.
        if zero_point is None and len(scale) == 1:
            total = np.add.accumulate(quotients[:, 0])[-1:]

        error = total * relative * relative
        better = error < least
        best = np.where(better, scale, best)
        if zero_point is not None:
            best_zero_point = np.where(better, zero_point, best_zero_point)
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

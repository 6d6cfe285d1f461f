"""Reads the weights of a source by rows, in pieces of bounded size, and decodes quantized ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import PlanError, SourceError
from ..files.shardfile import DTYPE_BITS, Bytes, Location, SourceFile, TensorInfo
from ..formats import kernels
from ..formats.format import LARGEST_GLOBAL_SCALE, Format, GgmlType, decode_blocks, grid_of
from ..formats.kernels import BITS_TYPE, Bits, Loops, unpack
from ..formats.numbers import BITSANDBYTES, CODES, E2M1, E4M3, INT2, INT3, Codes, Floats
from ..formats.schemes import Scheme
from .weight import SMALLEST_NESTED, STRIP, ColumnReader, Extent, Weight, bitsandbytes_scales, check_bitsandbytes

BUFFER = 4 << 20
# A transposed matrix is read in columns: longer pieces of each stored row make fewer system calls.
TRANSPOSED_BUFFER = 32 << 20
# The smallest scale that E8M0 has. No scale of an output is zero.
SMALLEST_SCALE = 2.0**-127
# The first float32 that rounds to infinity in bfloat16.
OVERFLOW = np.float32((2 - 2.0**-8) * 2.0**127)
# A hint. No option helps against NaN: a layer that holds it makes every answer NaN, quantized or not.
DAMAGED_WEIGHTS = "the weights are damaged: download or save them again"


def rows_at_once(weight: Weight, multiple: int) -> int:
    """Return how many rows a Reader gives at a time.

    They take about BUFFER bytes, twice that if codes become float32, and TRANSPOSED_BUFFER if they are stored as
    columns; more where `multiple` rows take more.

    Args:
        weight: the weight [out, in].
        multiple: the returned number of rows is a multiple of this, unless the weight has fewer rows.
    """
    rows, cols = weight.shape
    fmt = weight.format
    limit = 2 * BUFFER
    if fmt is None or fmt.blocks is not None:
        limit = BUFFER
    if weight.transposed:
        limit = TRANSPOSED_BUFFER
    if fmt is not None and fmt.columns is not None:
        # Several rows share a word of zero points, and in AutoAWQ's order a word of codes.
        multiple = math.lcm(multiple, fmt.number.run)
    if fmt is not None and fmt.blocks is not None:
        multiple = math.lcm(multiple, fmt.blocks.head_rows or 1)
    return min(rows, max(1, limit // (cols * BITS_TYPE[weight.dtype].itemsize) // multiple) * multiple)


def memory_of(weight: Weight, multiple: int) -> tuple[int, int]:
    """Return the memory that reading a weight takes.

    Args:
        weight: the weight [out, in].
        multiple: the number of rows read at a time is a multiple of this, as in `Reader.rows`.

    Returns:
        Bytes of the buffer that rows are read into, and bytes of the other arrays that exist meanwhile.
    """
    buffer = rows_at_once(weight, multiple) * weight.shape[1] * BITS_TYPE[weight.dtype].itemsize
    if weight.format is None:
        # A transposed copy; and float32 before and after smoothing.
        return buffer, buffer * (weight.transposed + 2 * weight.smoothed)
    if weight.format.blocks is not None:
        # Blocks, which are at most as large; and what the package gguf makes of them, with its own temporary arrays.
        return buffer, 3 * buffer

    # Codes take at most a quarter of the float32 values, and so do scales of groups of 32 or more.
    extra = buffer // 2
    if weight.transposed:
        extra += buffer // 4

    columns = weight.format.columns
    if columns is not None:
        # Steps of transposing a strip; with act-order also a scale and a zero point for each weight.
        extra += 4 * STRIP
        if columns.act_order:
            extra += 2 * buffer
    return buffer, extra


def allocate(nbytes: int) -> Bytes:
    """Allocate a buffer, uint8 [nbytes]."""
    return np.empty(nbytes, np.uint8)


@dataclass(eq=False)
class Reader:
    """Reads weights of a checkpoint into one buffer. Each thread has a Reader of its own.

    Args:
        where: shard file name and byte offset of each tensor, by full tensor name.
        path: returns the path of a shard.
        memory: allocates a buffer, uint8, of the given number of bytes; by default as numpy does.
        loops: the kernels that decode.
    """

    where: Mapping[str, Location]
    path: Callable[[str], Path]
    memory: Callable[[int], Bytes] = allocate
    loops: Loops = kernels

    def __post_init__(self) -> None:
        self._buffer = self.memory(BUFFER)
        self._columns = ColumnReader(self.where.__getitem__, self.open, self.read_part)

    def open(self, shard: str) -> SourceFile:
        """Open a shard of the source, for a `with` statement."""
        return SourceFile(self.path(shard), shard)

    def rows(self, weight: Weight, multiple: int) -> Iterator[Bits]:
        """Yield the weight in pieces of rows, decoded if it is quantized and smoothed if it has a transform.

        Args:
            weight: the weight [out, in]; of a stack of codes, one of its `matrices`.
            multiple: all pieces but the last have a multiple of so many rows.

        Yields:
            Bits of rows in `weight.dtype`, uint16 or uint32 [n, in], `rows_at_once`, overwritten by the next.

        Raises:
            SourceError: the weight cannot be read, a code is NaN, a scale is not valid, or codes decode to values that
                overflow bfloat16.
        """
        step = rows_at_once(weight, multiple)
        transform = weight.transform
        if transform is None or not transform.smooths:
            yield from self._read_stored(weight, step)
            return
        unsmoothed = weight._replace(transform=None)
        low = 0
        for bits in self._read_stored(unsmoothed, step):
            values = kernels.to_float32(bits, unsmoothed.dtype)
            transform.apply(values, low)
            low += len(values)
            yield values.view(np.uint32)

    def _read_stored(self, weight: Weight, step: int) -> Iterator[Bits]:
        """Yield the weight without its transform, `step` rows at a time."""
        rows, cols = weight.shape
        extent = weight.extent(self.where)

        kind = BITS_TYPE[weight.dtype]
        pitch = cols * kind.itemsize
        if self._buffer.nbytes < step * pitch:
            self._buffer = self.memory(step * pitch)

        # One buffer for all pieces, because the system clears newly allocated memory.
        code_buffer = np.empty(step * weight.row_bytes if weight.format is not None else 0, np.uint8)

        with self.open(extent.shard) as source:
            for low in range(0, rows, step):
                count = min(step, rows - low)
                buffer = self._buffer[: count * pitch]

                if weight.format is not None and weight.format.blocks is not None:
                    self._read_blocks(source, weight, low, code_buffer, buffer.view(np.float32).reshape(count, cols))
                elif weight.format is not None:
                    out = buffer.view(np.float32).reshape(count, cols)
                    done = 0
                    for matrix, first, size in weight.row_pieces(low, count):
                        codes = code_buffer[: size * weight.row_bytes].reshape(size, weight.row_bytes)
                        self.read_codes(source, matrix, first, codes.reshape(-1))
                        scale = self.scales(matrix, first, size)
                        zero = self.zero_points(matrix, first, size)
                        self._decode(matrix, codes, scale, zero, first, out[done : done + size])
                        done += size
                elif weight.transposed:
                    _read_columns(source, extent, low * kind.itemsize, buffer.reshape(cols, -1))
                    yield np.ascontiguousarray(buffer.view(kind).reshape(cols, count).T)
                    continue
                else:
                    source.read(buffer, extent.offset + low * extent.pitch, extent.label)

                yield buffer.view(kind).reshape(count, cols)

    def _read_blocks(self, source: SourceFile, weight: Weight, low: int, codes: Bytes, out: Floats) -> None:
        """Read rows of a GGUF file into `codes`, from row `low` on, and decode them to `out`, float32 [rows, in]."""
        fmt = weight.format
        extent = weight.extent(self.where)
        assert fmt is not None and fmt.blocks is not None and isinstance(fmt.number, GgmlType)
        codes = codes[: len(out) * weight.row_bytes]
        source.read(codes, extent.offset + low * extent.pitch, extent.label)
        decode_blocks(codes.reshape(len(out), -1), fmt.number, fmt.blocks, out)
        # A comparison with NaN is false.
        if not (np.abs(out) < OVERFLOW).all():
            raise SourceError(
                f"{extent.label} in {self.path(extent.shard).resolve().name} decodes to NaN, infinity or a value that "
                "overflows bfloat16",
                "the weights are damaged: download or copy the file again",
            )

    def check_codes(self, weight: Weight, low: int, codes: Bytes, scale: Floats, zero: Floats | None) -> None:
        """Refuse codes that decode to values which overflow bfloat16. They are decoded only if a scale is so large.

        Args:
            weight: the weight.
            low: the row that the codes start at.
            codes: uint8, the codes of whole rows.
            scale: the scales of these rows, float32 [grid rows, grid columns].
            zero: their zero points, of the same shape; None for symmetric formats.

        Raises:
            SourceError: a value overflows.
        """
        assert weight.format is not None
        if np.abs(scale).max() >= _overflowing_scale(weight.format):
            rows = codes.reshape(-1, weight.row_bytes)
            self._decode(weight, rows, scale, zero, low, np.empty((len(rows), weight.shape[1]), np.float32))

    def check_values(self, weight: Weight, scale: Floats) -> None:
        """Refuse a weight that decodes to values which overflow bfloat16. It is read only if a scale is so large.

        Args:
            weight: the weight.
            scale: its scales, float32 of any shape, the global scale applied.

        Raises:
            SourceError: a value overflows, or the weight cannot be read.
        """
        assert weight.format is not None
        if np.abs(scale).max() >= _overflowing_scale(weight.format):
            for matrix in weight.matrices:
                for _ in self.rows(matrix, 1):
                    pass

    def _decode(self, weight: Weight, codes: Bytes, scale: Floats, zero: Floats | None, low: int, out: Floats) -> None:
        fmt = weight.format
        assert fmt is not None

        if fmt.columns is not None and (index := self._columns.group_index(weight)) is not None:
            # With act-order the inputs of a group lie anywhere: give each input a scale of its own.
            fmt = replace(fmt, group=(1, 1))
            scale = scale[:, index]
            if zero is not None:
                zero = zero[:, index]

        self.loops.decode_rows(codes, fmt.number, scale, fmt.group, low, out, zero)

        largest = np.abs(scale).max()
        if largest >= _overflowing_scale(fmt) and (np.abs(out) >= OVERFLOW).any():
            extent = weight.extent(self.where)
            raise SourceError(
                f"{extent.label} in {extent.shard} decodes to weights that overflow bfloat16: "
                f"{weight.parts[1].name} reaches {largest:g}",
                "the scales are damaged: download or save them again",
            )

    def read_codes_unchecked(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> int | None:
        """Read the codes of whole rows, and look for NaN.

        Args:
            source: the open shard.
            weight: the weight.
            low: first row.
            into: uint8, filled with codes as formats of rows store them. Its size says how many rows.

        Returns:
            Index into `into` of the first code that is NaN; None if there is none, or the format has no NaN.

        Raises:
            SourceError: they cannot be read.
        """
        extent = weight.extent(self.where)
        if weight.format is not None and weight.format.columns is not None:
            self._columns.codes(source, weight, low, into)
            return None
        if weight.format is not None and weight.transposed:
            columns = np.empty((weight.row_bytes, into.size // weight.row_bytes), np.uint8)
            _read_columns(source, extent, low, columns)
            into.reshape(columns.shape[::-1])[:] = columns.T
        else:
            source.read(into, extent.offset + low * extent.pitch, extent.label)
        # `verify` also has codes whose format is unknown.
        number = weight.format.number if weight.format else CODES.get(weight.codes.dtype)
        return None if number is None else kernels.first_unsound(into, number)

    def read_codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> None:
        """Read the codes of whole rows, and refuse NaN.

        Args:
            source: the open shard.
            weight: the weight.
            low: first row.
            into: uint8, filled with codes as formats of rows store them. Its size says how many rows.

        Raises:
            SourceError: they cannot be read, or one is NaN.
        """
        if self.read_codes_unchecked(source, weight, low, into) is not None:
            extent = weight.extent(self.where)
            raise SourceError(f"{extent.label} in {extent.shard} holds NaN", DAMAGED_WEIGHTS)

    def read_bytes(self, info: TensorInfo) -> Bytes:
        """Read all bytes of a small tensor, as uint8 [nbytes].

        Raises:
            SourceError: it cannot be read.
        """
        return self.read_part(info, 0, info.nbytes)

    def read_part(self, info: TensorInfo, start: int, nbytes: int) -> Bytes:
        """Read some bytes of a tensor from its byte `start` on, as uint8 [nbytes].

        Raises:
            SourceError: they cannot be read.
        """
        place = self.where[info.name]
        raw = np.empty(nbytes, np.uint8)
        with self.open(place.shard) as source:
            source.read(raw, place.offset + start, info.name)
        return raw

    def pieces(self, info: TensorInfo) -> Iterator[Bytes]:
        """Yield all bytes of a tensor in pieces of one buffer, as uint8 [n].

        Raises:
            SourceError: they cannot be read.
        """
        place = self.where[info.name]
        with self.open(place.shard) as source:
            for low in range(0, info.nbytes, BUFFER):
                piece = self._buffer[: min(BUFFER, info.nbytes - low)]
                source.read(piece, place.offset + low, info.name)
                yield piece

    def read_scale(self, info: TensorInfo) -> Floats:
        """Read a tensor of scales, unchecked, as float32 in its stored shape.

        Raises:
            SourceError: it cannot be read.
        """
        return kernels.scale_values(self.read_bytes(info), info.dtype).reshape(info.shape)

    def scales(self, weight: Weight, low: int, count: int, least: float = 0.0, power_of_two: bool = False) -> Floats:
        """Read the scales of some rows.

        Args:
            weight: the weight.
            low: first row.
            count: number of rows.
            least: smallest scale allowed, before and after the division by the global scale; of scales that may be
                negative, the smallest magnitude.
            power_of_two: whether scales must be powers of two. Ignored for AWQ and GPTQ.

        Returns:
            float32 [grid rows, grid columns]: the scales of the groups that the rows lie in, divided by the global
            scale if the format has one.

        Raises:
            SourceError: a scale cannot be read, is not finite, too small, or not a power of two though it must be; or,
                with row 0, `weight_shape`, the group index or zero points contradict the weight.
        """
        assert weight.format is not None
        extent = weight.scale_extent(self.where)
        info = weight.parts[1]

        if weight.format.columns is not None:
            if low == 0:
                self._columns.check_zero_points(weight)
                self._columns.group_index(weight)
            scale = self._columns.scales(weight, low, count)
            check_scales(scale, extent.label, extent.shard, least, weight.format.signed_scales)
            return scale

        if weight.format.number in BITSANDBYTES:
            if low == 0:
                check_bitsandbytes(weight, self.read_part)
            scale = bitsandbytes_scales(weight, low, count, self.read_part)
            check_scales(scale, extent.label, extent.shard, least or SMALLEST_NESTED)
            return scale

        if low == 0:
            self._check_shape(weight)

        height = weight.format.group[0] or low + count
        first = low // height
        count = (low + count - 1) // height + 1 - first

        with self.open(extent.shard) as source:
            if weight.transposed:
                itemsize = DTYPE_BITS[info.dtype] // 8
                columns = np.empty((grid_of(weight.format.group, weight.shape)[1], count * itemsize), np.uint8)
                _read_columns(source, extent, first * itemsize, columns)
                scale = kernels.scale_values(columns.reshape(-1), info.dtype).reshape(-1, count).T
            else:
                raw = np.empty(count * extent.pitch, np.uint8)
                source.read(raw, extent.offset + first * extent.pitch, extent.label)
                scale = kernels.scale_values(raw, info.dtype).reshape(count, -1)

        if weight.format.scale.unit != 1:
            scale = scale * np.float32(weight.format.scale.unit)
        check_scales(scale, extent.label, extent.shard, least, weight.format.signed_scales)

        if weight.format.global_scale is not None:
            with np.errstate(over="ignore"):
                scale = scale / self.global_scale(weight)
            # The quotient of two sound scales may still overflow.
            check_scales(scale, extent.label, extent.shard, least)

        if power_of_two and (odd := np.frexp(scale)[0] != 0.5).any():
            raise SourceError(
                f"{extent.label} in {extent.shard} holds {scale[odd][0]:g}, not a power of two as config.json says",
                "the scales are damaged: download or save them again, or choose a scheme with float scales",
            )

        return scale

    def zero_points(self, weight: Weight, low: int, count: int) -> Floats | None:
        """Read the zero points of some rows.

        Args:
            weight: the weight.
            low: first row.
            count: number of rows.

        Returns:
            float32 of the shape that `scales` returns: the value of the code that decodes to zero, for each group. None
            for symmetric formats.

        Raises:
            SourceError: they cannot be read.
        """
        info = weight.zero_points
        fmt = weight.format
        if info is None or fmt is None:
            return None

        if fmt.columns is not None:
            return self._columns.zero_points(weight, low, count)

        # The zero points of `run` rows fill whole words.
        run = fmt.number.run
        first = low // run * run
        start = fmt.number.items(first)
        stop = min(fmt.number.items(low + count), info.shape[0])

        pitch = info.shape[1] * 4
        words = self.read_part(info, start * pitch, (stop - start) * pitch).view(np.uint32).reshape(-1, info.shape[1])
        return fmt.number.decode(kernels.unpack_words(words, fmt.number)[low - first :][:count])

    def _check_shape(self, weight: Weight) -> None:
        """Refuse rows whose last word is padded, and tiles: only `weight_shape` and `weight_format` say so."""
        for info in (part for part in weight.parts[2:] if part.name.endswith(".weight_format")):
            # bitsandbytes nn/modules.py, LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING.
            if self.read_bytes(info).any():
                raise SourceError(
                    f"{info.name} is not 0: codes do not lie in rows",
                    "save the model again with a newer bitsandbytes, or start from the unquantized model",
                )
        for info in (part for part in weight.parts[2:] if part.name.endswith(".weight_shape")):
            shape = self.read_bytes(info).view(np.int64 if info.dtype == "I64" else np.int32).tolist()
            if shape != list(weight.shape):
                raise SourceError(
                    f"{info.name} is {shape}, but {weight.codes.name} holds codes of {list(weight.shape)}",
                    "rows that do not fill their words are not supported: start from the unquantized model",
                )

    def global_scale(self, weight: Weight) -> Floats:
        """Read the global scale of a weight, in the convention that group scales are divided by it.

        Returns:
            float32 [1, 1]; 1.0 if the format has no global scale.

        Raises:
            SourceError: it cannot be read, is not finite, or is below SMALLEST_SCALE.
        """
        info = weight.global_scale
        fmt = weight.format
        if info is None or fmt is None or fmt.global_scale is None:
            return np.ones((1, 1), np.float32)
        scale = self.read_scale(info).reshape(1, 1)
        check_scales(scale, info.name, self.where[info.name].shard, SMALLEST_SCALE)
        if fmt.global_scale.divides:
            return scale
        return np.float32(1) / scale

    def exact_global_scale(self, fused: Sequence[Weight], scheme: Scheme) -> Floats | None:
        """Return the global scale under which codes in MXFP4 stay as they are in NVFP4, and no value changes.

        It is the power of two with which the largest scale becomes 2^8. The other scales must then be powers of two
        that E4M3 has, down to 2^-9.

        Args:
            fused: layers that share a global scale, such as q, k and v.
            scheme: their scheme.

        Returns:
            float32 [1, 1]; None if the layers are not in MXFP4, the scheme is not NVFP4, or their scales reach further.

        Raises:
            SourceError: codes or scales cannot be read, or a scale is invalid.
        """
        if not all(weight.divides_into(scheme.format) for weight in fused):
            return None

        largest = 0.0
        smallest = math.inf

        for weight in fused:
            step = max(1, BUFFER // weight.row_bytes)
            with self.open(weight.extent(self.where).shard) as source:
                for low in range(0, weight.shape[0], step):
                    count = min(step, weight.shape[0] - low)
                    codes = np.empty(count * weight.row_bytes, np.uint8)
                    self.read_codes(source, weight, low, codes)
                    scale = self.scales(weight, low, count, SMALLEST_SCALE, power_of_two=True)

                    used = divided_scales(scale, codes, scheme.format, 0.0)
                    largest = max(largest, float(used.max()))
                    smallest = min(smallest, float(np.where(used > 0, used, np.inf).min()))

        if largest == 0:
            return np.ones((1, 1), np.float32)

        # The limit is that of all global scales; a larger one could be infinite.
        global_scale = min(2.0**8 / largest, LARGEST_GLOBAL_SCALE)
        if smallest * global_scale < 2.0**-9:
            return None
        return np.full((1, 1), global_scale, np.float32)

    def keeps_shared_scale(self, fused: Sequence[Weight], scheme: Scheme) -> bool:
        """Return whether fused layers already have one scale in common that engines load under a scheme.

        Args:
            fused: layers that share a scale, such as q, k and v.
            scheme: a scheme whose format has a shared scale or a global scale.

        Raises:
            SourceError: a scale cannot be read or is invalid.
        """
        fmt = scheme.format
        if not all(
            weight.format is not None and not weight.smoothed and weight.format.group == fmt.group for weight in fused
        ):
            return False
        if fmt.global_scale is not None:
            if not all(weight.is_stored_as(fmt) for weight in fused):
                return False
            return len({self.global_scale(weight).item() for weight in fused}) == 1
        scales = {self.scales(weight, 0, 1).item() for weight in fused}
        scale = scales.pop()
        return not scales and scale >= fmt.scale.floor and scale * fmt.number.largest <= scheme.largest


def divided_scales(scale: Floats, codes: Bytes, fmt: Format, of_zeros: float) -> Floats:
    """Return the scales of FP4 codes for smaller groups.

    Args:
        scale: scales of the codes' own groups, float32 [rows, groups].
        codes: uint8, two codes in a byte, of the same rows.
        fmt: the format with the smaller groups, of which several make up one of the others.
        of_zeros: scale of a group whose codes are all zero.

    Returns:
        float32 [rows, smaller groups].
    """
    width = fmt.group[1]
    assert width is not None
    # The highest bit of a code is its sign.
    used = (codes.reshape(len(scale), -1, width // 2) & 0x77).any(axis=2)
    return np.where(used, np.repeat(scale, used.shape[1] // scale.shape[1], axis=1), np.float32(of_zeros))


def _read_columns(source: SourceFile, extent: Extent, at: int, into: Bytes) -> None:
    """Fill `into` [stored rows, bytes] with a piece of each stored row, from byte `at` of the row on."""
    for number, piece in enumerate(into):
        source.read(piece, extent.offset + number * extent.pitch + at, extent.label)


def _overflowing_scale(fmt: Format) -> np.float32:
    """Return the smallest magnitude of a scale at which the largest code overflows bfloat16."""
    largest = fmt.number.largest
    if fmt.zero_point is not None:
        largest *= 2
    return np.float32(OVERFLOW / np.float32(largest))


def check_scales(scale: Floats, name: str, shard: str, least: float, signed: bool = False) -> None:
    """Refuse scales that are not finite, or too small.

    Args:
        scale: float32 of any shape, decoded from a tensor of scales.
        name: full name of the tensor, for the message.
        shard: file name of its shard, for the message.
        least: smallest scale allowed; if `signed`, the smallest magnitude.
        signed: whether scales may be negative.

    Raises:
        SourceError: a scale is refused.
    """
    magnitude = scale
    if signed:
        magnitude = np.abs(scale)
    refused = ~(np.isfinite(scale) & (magnitude >= least))
    if refused.any():
        raise SourceError(
            f"{name} in {shard} holds {scale[refused][0]:g}, which is not a valid scale",
            "the scales are damaged: download or save them again",
        )


def require_in_range(weight: Weight, absmax: Floats, scheme: Scheme, where: Mapping[str, Location]) -> None:
    """Refuse a weight with values larger than engines load under a scheme.

    Args:
        weight: the weight, for the message.
        absmax: float32 of any shape, the largest absolute weight of each group; NaN or infinite if one is.
        scheme: the scheme that it is to be quantized with.
        where: shard file name and byte offset of each tensor, by full tensor name.

    Raises:
        SourceError: a value is NaN or infinite.
        PlanError: a value is too large.
    """
    # A comparison with NaN is false.
    if (absmax <= scheme.largest).all():
        return
    require_finite(weight, absmax, where)
    extent = weight.extent(where)
    raise PlanError(
        f"{extent.label} in {extent.shard}: a weight reaches {absmax.max():g}, engines load at most "
        f"{scheme.largest:g} with {scheme.title}",
        "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
    )


def require_finite(weight: Weight, absmax: Floats, where: Mapping[str, Location]) -> None:
    """Refuse a weight that holds NaN or infinity.

    Args:
        weight: the weight, for the message.
        absmax: float32 of any shape, the largest absolute weight of each group; NaN or infinite if one is.
        where: shard file name and byte offset of each tensor, by full tensor name.

    Raises:
        SourceError: a value is NaN or infinite.
    """
    if not np.isfinite(absmax).all():
        extent = weight.extent(where)
        raise SourceError(f"{extent.label} in {extent.shard} holds NaN or infinity", DAMAGED_WEIGHTS)


# Rows of a layer in which LostWeights looks for codes of zero; in a large one they are a prime number apart,
# so that no part of a head is left out.
LOOKED_AT = 32
STEP = 127
# A larger share of weights becomes zero only beside outliers. In SmolLM2-135M it is at most 0.0002 in FP8, 0.14 in FP4,
# 0.02 in int8, 0.25 in int4, 0.44 in int3 and 0.66 in int2, each by channel.
USUAL_ZEROS = {E4M3: 0.1, E2M1: 0.3, INT3: 0.75, INT2: 0.9}
USUAL_ZEROS_OF_OTHERS = 0.5
# The same where weights are not known, of which some are zero in a model that was pruned.
ZEROS_OF_UNKNOWN = 0.9
# A smaller share of codes of zero is usual in all formats, and in FP8 and INT8 nearly all layers have less.
FEW = 0.01


class LostWeights:
    """Finds out whether weights of a layer became zero as it was quantized, by looking at some of its rows.

    The largest of the weights that share a scale decides it. In FP8 all others of a layer become zero beside a weight
    of 60000; so do those of k_proj, under one scale with q_proj, if the weights of q_proj are 10^7 times as large.

    Args:
        format: the layer's format.
        rows: number of rows of the layer.

    Attributes:
        rows: the rows that are looked at.
    """

    def __init__(self, format: Format, rows: int) -> None:
        self.rows = range(0, rows, max(1, min(rows // LOOKED_AT, STEP)))
        self._format = format
        self._low = 0
        self._known = False
        self._weights = 0
        self._zero = 0
        self._lost = 0

    def look_at(self, codes: Codes, zero_point: Floats | None, bits: Bits | None) -> None:
        """Look at those of the next rows that are in `rows`.

        Args:
            codes: their codes, uint8 [rows, cols * bits / 8].
            zero_point: float32 [rows, groups of a row], the values of the codes that stand for zero; None if it is 0.
            bits: the bits of the weights, uint16 or uint32 [rows, cols]; None if they are not known.
        """
        rows = np.arange(-self._low % self.rows.step, len(codes), self.rows.step)
        self._low += len(codes)
        if rows.size:
            grid = None if zero_point is None else zero_point[rows]
            self.add(codes[rows], grid, None if bits is None else bits[rows])

    def add(self, codes: Codes, zero_point: Floats | None, bits: Bits | None) -> None:
        """Count the codes of all these rows. Arguments are those of `look_at`."""
        number = self._format.number
        single = unpack(codes, number)
        if zero_point is None:
            zero = (number.values() == 0)[single]
        else:
            zero = number.decode(single) == np.repeat(zero_point, single.shape[1] // zero_point.shape[1], axis=1)

        self._known = bits is not None
        if bits is None or np.count_nonzero(zero) < zero.size * FEW:
            # Whether so few weights were zero before makes no difference.
            self._weights += zero.size
        else:
            # Without the bit of the sign.
            weights = bits << 1 != 0
            self._weights += int(np.count_nonzero(weights))
            self._zero += weights.size - int(np.count_nonzero(weights))
            zero = zero[:, : bits.shape[1]] & weights
        self._lost += int(np.count_nonzero(zero))

    @property
    def nearly_zero(self) -> bool:
        """Whether nearly all weights of the source are zero; False where these are not known."""
        return self._zero > ZEROS_OF_UNKNOWN * (self._zero + self._weights)

    @property
    def unusual(self) -> bool:
        """Whether far more weights became zero than do in a layer without such large ones."""
        limit = USUAL_ZEROS.get(self._format.number, USUAL_ZEROS_OF_OTHERS)
        if not self._known:
            limit = max(limit, ZEROS_OF_UNKNOWN)
        return self._lost > self._weights * limit

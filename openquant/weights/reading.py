"""Weights of a source read by rows, a bounded piece at a time, decoded where the source has them quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import PlanError, SourceError
from ..files.shardfile import Bytes, SourceFile
from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats import kernels
from ..formats.format import Format, grid_of
from ..formats.kernels import BITS_TYPE, Bits, Loops
from ..formats.numbers import CODES, Floats
from ..formats.schemes import Scheme
from .packed_columns import ALIKE, STRIP, ColumnReader
from .weight import Extent, Weight

BUFFER = 4 << 20
# A transposed matrix is read in columns: longer pieces of each stored row make fewer system calls.
TRANSPOSED_BUFFER = 32 << 20
# The least that a byte can be the exponent of. In an output no scale is zero.
SMALLEST_SCALE = 2.0**-127
# The first float32 that rounds to infinity in bfloat16.
OVERFLOW = np.float32((2 - 2.0**-8) * 2.0**127)


def rows_at_once(weight: Weight, multiple: int) -> int:
    """How many rows are read at a time: about BUFFER bytes of them, twice as many where codes become float32; in
    multiples of `multiple`.
    """
    rows, cols = weight.shape
    form = weight.format
    limit = BUFFER if form is None else 2 * BUFFER
    if weight.transposed:
        limit = TRANSPOSED_BUFFER
    if form is not None and form.columns is not None:
        # Words may hold the codes, and do hold the zero points, of several rows.
        multiple = math.lcm(multiple, ALIKE)
    return min(rows, max(1, limit // (cols * BITS_TYPE[weight.dtype].itemsize) // multiple) * multiple)


def memory_of(weight: Weight, multiple: int) -> tuple[int, int]:
    """Bytes of the buffer that rows of a weight are read into, and of what is held beside it meanwhile."""
    piece = rows_at_once(weight, multiple) * weight.shape[1] * BITS_TYPE[weight.dtype].itemsize
    if weight.format is None:
        # As it is turned around; and as float32, before and after its exponents are in their place.
        return piece, piece * (weight.transposed + 2 * weight.folded)
    # Codes, a quarter of the weights that they become at most, and scales for as few as 32 of these.
    held, columns = piece // 2 + (piece // 4 if weight.transposed else 0), weight.format.columns
    if columns is not None:
        # What is turned around, before, between and after; and if need be a scale and a zero point for each weight.
        held += 4 * STRIP + (2 * piece if columns.act_order else 0)
    return piece, held


class Reader:
    """One thread's buffer, and the checkpoint it reads.

    Args:
        where: in which shard each tensor lies, and at which offset.
        path: where a shard lies.
        memory: makes a buffer of so many bytes.
        loops: what decodes.
    """

    def __init__(
        self,
        where: Mapping[str, Location],
        path: Callable[[str], Path],
        memory: Callable[[int], Bytes],
        loops: Loops = kernels,
    ) -> None:
        self.loops = loops
        self.where = where
        self.path = path
        self._memory = memory
        self._buffer = memory(BUFFER)
        self._columns = ColumnReader(where.__getitem__, self.open)

    def open(self, shard: str) -> SourceFile:
        """A source shard, to be used in a `with` statement."""
        return SourceFile(self.path(shard), shard)

    def rows(self, weight: Weight, multiple: int) -> Iterator[Bits]:
        """The weight in runs of rows [n, in], each a multiple of `multiple` rows and about a buffer long; folded, where
        its tuning says so.

        Raises:
            SourceError: it cannot be read, or a code or scale stands for no value.
        """
        step, transform = rows_at_once(weight, multiple), weight.transform
        if transform is None or not transform.folds:
            yield from self._stored(weight, step)
            return
        plain, low = weight._replace(transform=None), 0
        for bits in self._stored(plain, step):
            values = kernels.to_float32(bits, plain.dtype)
            transform.apply(values, low)
            low += len(values)
            yield values.view(np.uint32)

    def _stored(self, weight: Weight, step: int) -> Iterator[Bits]:
        """The weight without its tuning, so many rows at a time."""
        rows, cols = weight.shape
        extent, kind = weight.rows(self.where), BITS_TYPE[weight.dtype]
        pitch = cols * kind.itemsize
        if self._buffer.nbytes < step * pitch:
            self._buffer = self._memory(step * pitch)
        # Once for all pieces: the system clears memory that is new.
        held = np.empty(step * weight.row_bytes if weight.format is not None else 0, np.uint8)
        with self.open(extent.shard) as source:
            for low in range(0, rows, step):
                count = min(step, rows - low)
                part = self._buffer[: count * pitch]
                if weight.format is not None:
                    out, done = part.view(np.float32).reshape(count, cols), 0
                    for inner, at, some in weight.pieces(low, count):
                        codes = held[: some * weight.row_bytes].reshape(some, weight.row_bytes)
                        self.codes(source, inner, at, codes.reshape(-1))
                        scale, zero = self.scales(inner, at, some), self.zeros(inner, at, some)
                        self._decode(inner, codes, scale, zero, at, out[done : done + some])
                        done += some
                elif weight.transposed:
                    _read_columns(source, extent, low * kind.itemsize, part.reshape(cols, -1))
                    yield np.ascontiguousarray(part.view(kind).reshape(cols, count).T)
                    continue
                else:
                    source.read(part, extent.offset + low * extent.pitch, extent.label)
                yield part.view(kind).reshape(count, cols)

    def check_codes(self, weight: Weight, low: int, codes: Bytes, scale: Floats, zero: Floats | None) -> None:
        """Refuse codes of whole rows from `low` on that stand for weights beyond bfloat16.

        Raises:
            SourceError: one does.
        """
        assert weight.format is not None
        if scale.max() >= _beyond(weight.format):
            rows = codes.reshape(-1, weight.row_bytes)
            self._decode(weight, rows, scale, zero, low, np.empty((len(rows), weight.shape[1]), np.float32))

    def check_values(self, weight: Weight, scale: Floats) -> None:
        """Refuse a weight that stands for values beyond bfloat16; it is read only where a scale is so large.

        Args:
            weight: the weight.
            scale: its scales, of any shape, divided by the global scale where it has one.

        Raises:
            SourceError: it does, or cannot be read.
        """
        assert weight.format is not None
        if scale.max() >= _beyond(weight.format):
            for matrix in weight.matrices:
                for _ in self.rows(matrix, 1):
                    pass

    def _decode(self, weight: Weight, codes: Bytes, scale: Floats, zero: Floats | None, low: int, out: Floats) -> None:
        form = weight.format
        assert form is not None
        if form.columns is not None and (index := self._columns.index(weight)) is not None:
            # Each input has a group of its own.
            form, scale, zero = replace(form, group=(1, 1)), scale[:, index], None if zero is None else zero[:, index]
        self.loops.decode_rows(codes, form.number, scale, form.group, low, out, zero)
        # Looked for only where a code could be too large.
        if scale.max() >= _beyond(form) and (np.abs(out) >= OVERFLOW).any():
            extent = weight.rows(self.where)
            raise SourceError(
                f"{extent.label} in {extent.shard} stands for weights beyond what bfloat16 holds: "
                f"{weight.parts[1].name} reaches {scale.max():g}",
                "the scales are damaged: download or save them again",
            )

    def read_codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> int | None:
        """Read the codes of whole rows from `low` on into `into`, sound or not.

        Returns:
            where in it the first lies that stands for no value, such as NaN; None if all are sound.

        Raises:
            SourceError: they cannot be read.
        """
        extent = weight.rows(self.where)
        if weight.format is not None and weight.format.columns is not None:
            self._columns.codes(source, weight, low, into)
            return None
        if weight.format is not None and weight.transposed:
            columns = np.empty((weight.row_bytes, into.size // weight.row_bytes), np.uint8)
            _read_columns(source, extent, low, columns)
            into.reshape(columns.shape[::-1])[:] = columns.T
        else:
            source.read(into, extent.offset + low * extent.pitch, extent.label)
        # Checks have codes of no known format, too, which were found by their dtype.
        number = weight.format.number if weight.format else CODES.get(weight.codes.dtype)
        return None if number is None else self.loops.first_unsound(into, number)

    def codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> None:
        """Read the codes of whole rows from `low` on into `into`.

        Raises:
            SourceError: one is NaN.
        """
        if self.read_codes(source, weight, low, into) is not None:
            extent = weight.rows(self.where)
            raise SourceError(
                f"{extent.label} in {extent.shard} holds NaN",
                "the weights are damaged: download or save them again",
            )

    def whole(self, info: TensorInfo) -> Bytes:
        """All bytes of a small tensor.

        Raises:
            SourceError: it cannot be read.
        """
        place, raw = self.where[info.name], np.empty(info.nbytes, np.uint8)
        with self.open(place.shard) as source:
            source.read(raw, place.offset, info.name)
        return raw

    def values(self, info: TensorInfo) -> Floats:
        """All of a scale, in the shape that it is stored in, sound or not.

        Raises:
            SourceError: it cannot be read.
        """
        return kernels.scale_values(self.whole(info), info.dtype).reshape(info.shape)

    def scales(self, weight: Weight, low: int, count: int, least: float = 0.0, power_of_two: bool = False) -> Floats:
        """The scales of so many rows from `low` on: those rows of the grid, float32.

        Raises:
            SourceError: one is not finite, below `least`, or no power of two though it must be; or the codes of the
                weight are not of as many columns as its shape says.
        """
        assert weight.format is not None
        extent, info = weight.scales(self.where), weight.parts[1]
        if weight.format.columns is not None:
            if low == 0:
                self._columns.check_zeros(weight)
                self._columns.index(weight)
            scale = self._columns.scales(weight, low, count)
            check_scales(scale, extent.label, extent.shard, least)
            return scale
        if low == 0:
            self._check_shape(weight)
        height = weight.format.group[0] or low + count
        first, last = low // height, (low + count - 1) // height
        count = last + 1 - first
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
        check_scales(scale, extent.label, extent.shard, least)
        if weight.format.global_scale is not None:
            with np.errstate(over="ignore"):
                scale = scale / self.divisor(weight)
            # Of two sound ones.
            check_scales(scale, extent.label, extent.shard, least)
        if power_of_two and (odd := np.frexp(scale)[0] != 0.5).any():
            raise SourceError(
                f"{extent.label} in {extent.shard} holds {scale[odd][0]:g}, no power of two as config.json has it",
                "the scales are damaged: download or save them again, or choose a scheme with float scales",
            )
        return scale

    def zeros(self, weight: Weight, low: int, count: int) -> Floats | None:
        """The values of the codes that stand for zero, of so many rows from `low` on, shaped as `scales` has theirs;
        None where zero stands for itself.

        Raises:
            SourceError: they cannot be read.
        """
        info, form = weight.zero_points, weight.format
        if info is None or form is None:
            return None
        if form.columns is not None:
            return self._columns.zeros(weight, low, count)
        rows = form.number.per_item
        first, last, place = low // rows, (low + count - 1) // rows, self.where[info.name]
        raw = np.empty((last + 1 - first) * info.shape[1] * 4, np.uint8)
        with self.open(place.shard) as source:
            source.read(raw, place.offset + first * info.shape[1] * 4, info.name)
        codes = kernels.unpack_words(raw.view(np.uint32).reshape(last + 1 - first, -1), form.number)
        return form.number.decode(codes[low - first * rows :][:count])

    def _check_shape(self, weight: Weight) -> None:
        """Refuse words that hold more than the codes of a row: makers fill them up, and headers do not show it."""
        for info in (part for part in weight.parts[2:] if part.name.endswith(".weight_shape")):
            told = self.whole(info).view(np.int64 if info.dtype == "I64" else np.int32).tolist()
            if told != list(weight.shape):
                raise SourceError(
                    f"{info.name} is {told}, but {weight.codes.name} holds codes of {list(weight.shape)}",
                    "rows that do not fill their words are not read here: start from the unquantized model",
                )

    def divisor(self, weight: Weight) -> Floats:
        """What the scales of a weight's groups are divided by, float32 [1, 1]: one without a global scale.

        Raises:
            SourceError: it is not finite and above zero.
        """
        info, form = weight.global_scale, weight.format
        if info is None or form is None or form.global_scale is None:
            return np.ones((1, 1), np.float32)
        found = self.values(info).reshape(1, 1)
        shard = self.where[info.name].shard
        check_scales(found, info.name, shard, SMALLEST_SCALE)
        return found if form.global_scale.divides else np.float32(1) / found

    def keeps_scale(self, fused: Sequence[Weight], scheme: Scheme) -> bool:
        """Whether weights that share a scale in a scheme all have the same one already, and engines load it."""
        form = scheme.format
        if not all(
            weight.format is not None and not weight.folded and weight.format.group == form.group for weight in fused
        ):
            return False
        if form.global_scale is not None:
            held = all(weight.is_held_by(form) for weight in fused)
            return held and len({self.divisor(weight).item() for weight in fused}) == 1
        scales = {self.scales(weight, 0, 1).item() for weight in fused}
        scale = scales.pop()
        return not scales and scale >= form.scale.floor and scale * form.number.largest <= scheme.largest


def _read_columns(source: SourceFile, extent: Extent, at: int, into: Bytes) -> None:
    """Read a piece of each stored row, from byte `at` of it on: [stored rows, bytes]."""
    for number, piece in enumerate(into):
        source.read(piece, extent.offset + number * extent.pitch + at, extent.label)


def _beyond(form: Format) -> np.float32:
    """The least scale at which a code could stand for more than bfloat16 holds."""
    return np.float32(OVERFLOW / np.float32(form.number.largest * (1 if form.zero_point is None else 2)))


def check_scales(scale: Floats, name: str, shard: str, least: float) -> None:
    """Refuse scales that are not finite, or below `least`.

    Raises:
        SourceError: one is.
    """
    wrong = ~(np.isfinite(scale) & (scale >= least))
    if wrong.any():
        raise SourceError(
            f"{name} in {shard} holds {scale[wrong][0]:g}, which no scale can be",
            "the scales are damaged: download or save them again",
        )


def require_small(weight: Weight, largest: Floats, scheme: Scheme, where: Mapping[str, Location]) -> None:
    """Refuse weights that a scheme cannot hold, given the largest magnitudes of their groups.

    Raises:
        SourceError: one is NaN or infinite.
        PlanError: one is too large.
    """
    # False for NaN too.
    if (largest <= scheme.largest).all():
        return
    require_finite(weight, largest, where)
    extent = weight.rows(where)
    raise PlanError(
        f"{extent.label} in {extent.shard}: a weight reaches {largest.max():g}, engines load at most "
        f"{scheme.largest:g} with {scheme.title}",
        "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
    )


def require_finite(weight: Weight, largest: Floats, where: Mapping[str, Location]) -> None:
    """Refuse NaN and infinity, given the largest magnitudes of groups.

    Raises:
        SourceError: there is one.
    """
    if not np.isfinite(largest).all():
        extent = weight.rows(where)
        raise SourceError(
            f"{extent.label} in {extent.shard} holds NaN or infinity",
            "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
        )


def row_bytes(weight: Weight, rows: int) -> int:
    """Bytes of the source that `rows` rows take, without their scales."""
    if weight.format is None:
        return rows * weight.shape[1] * BITS_TYPE[weight.source.dtype].itemsize
    return rows * (weight.shape[1] // weight.format.number.per_byte)

"""Codes that lie in columns (AutoAWQ, GPTQ): found, checked, and read some rows of the weight at a time.

X.qweight  AutoAWQ int32 [in, out / 8], eight outputs in a word in an order of their own; GPTQ int32 [in / 8, out],
           eight inputs in a word, the first lowest
X.qzeros   int32 [groups, out / 8], in the same order; of GPTQ's first format each one below what it is
X.scales   float16 [groups, out]
X.g_idx    int32 [in], which group each input is of (GPTQ); without it they are in order
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from ..files.shardfile import Bytes, SourceFile
from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats import kernels
from ..formats.format import FLOATS, Format, grid_of
from ..formats.numbers import Codes, Floats, Number
from .weight import Weight

# Codes that are turned around together: the more, the fewer and longer the pieces in which they are read.
STRIP = 8 << 20
# Rows of which codes or zero points may share a word.
ALIKE = 8

_DAMAGED = "the checkpoint is damaged or incomplete: download or save it again"


def packed_columns(
    module: str, codes: TensorInfo, form: Format, find: Callable[[str], TensorInfo | None]
) -> tuple[tuple[int, int], tuple[TensorInfo, ...]]:
    """Shape (out, in) of a weight, and its tensors: codes, scales, zero points and perhaps which group inputs are of.

    Args:
        module: the module that owns it.
        codes: its qweight.
        form: how it is stored.
        find: a tensor by its name.

    Raises:
        SourceError: one is missing, or has another shape or dtype than it must.
    """
    columns, words = form.columns, form.number.per_item
    assert columns is not None
    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise SourceError(f"{_described(codes)}, not a matrix of I32", _DAMAGED)
    high, wide = codes.shape
    shape = (wide, high * words) if columns.order is None else (wide * words, high)
    for size, what in zip(shape, ("outputs", "inputs"), strict=True):
        if size % words:
            raise SourceError(f"{codes.name} has {size} {what}, which do not fill words of {words}", _DAMAGED)
    _, groups = grid_of(form.group, shape)
    parts = [codes]
    wanted: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
        (form.scale.name, FLOATS, (groups, shape[0])),
        (columns.zeros, ("I32",), (groups, shape[0] // words)),
    ]
    index = columns.index and find(f"{module}.{columns.index}")
    if columns.index is not None and (index or columns.act_order):
        wanted.append((columns.index, ("I32", "I64"), (shape[1],)))
    for last, dtypes, sizes in wanted:
        info = find(f"{module}.{last}")
        if info is None:
            raise SourceError(f"{codes.name} has no {last}: {module}.{last} is missing", _DAMAGED)
        if info.dtype not in dtypes or info.shape != sizes:
            raise SourceError(
                f"{_described(info)}, for {codes.name} {list(codes.shape)} with {form.label} it must be "
                f"{' or '.join(dtypes)} {list(sizes)}",
                _DAMAGED,
            )
        parts.append(info)
    return shape, tuple(parts)


class ColumnReader:
    """Reads such a weight as if it lay in rows.

    Args:
        where: in which shard each tensor lies, and at which offset.
        open_shard: opens one, for a `with` statement.
    """

    def __init__(self, where: Callable[[str], Location], open_shard: Callable[[str], SourceFile]) -> None:
        self._where = where
        self._open = open_shard
        # Of which weight, from which row on, codes as formats of rows have them.
        self._held: tuple[str, int, Codes] = "", 0, np.empty((0, 0), np.uint8)

    def codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> None:
        """Read the codes of whole rows from `low` on into `into`, as formats of rows have them.

        Raises:
            SourceError: they cannot be read.
        """
        assert weight.format is not None
        pitch = weight.shape[1] // weight.format.number.per_byte
        name, first, held = self._held
        if name != weight.codes.name or not first <= low <= low + into.size // pitch <= first + len(held):
            count = max(into.size // pitch, STRIP // pitch // ALIKE * ALIKE)
            held = np.empty((min(count, weight.shape[0] - low), pitch), np.uint8)
            self._turn(source, weight, low, held)
            first = low
            self._held = weight.codes.name, first, held
        into[:] = held[low - first :].reshape(-1)[: into.size]

    def _turn(self, source: SourceFile, weight: Weight, low: int, into: Codes) -> None:
        """Read the codes of rows from `low` on into `into`, [rows, bytes]."""
        form = weight.format
        assert form is not None
        order = form.columns.order if form.columns else None
        if order is None:
            raw = self._strip(source, weight.codes, low, len(into), 1)
            into[:] = np.ascontiguousarray(raw.view(np.uint32).T).view(np.uint8)
            return
        words = self._strip(source, weight.codes, low, len(into), form.number.per_item).view(np.uint32)
        found = into.reshape(words.shape[1], len(order), -1)
        # A byte holds the codes of two inputs: of eight outputs four go in each word, every other one.
        mask = np.uint32(0x0F0F0F0F)
        first, second = words[::2], words[1::2]
        for odd, pairs in enumerate(
            [first & mask | (second & mask) << np.uint32(4), first >> np.uint32(4) & mask | second & ~mask]
        ):
            each = pairs.view(np.uint8).reshape(*pairs.shape, 4)
            for place in range(4):
                found[:, order.index(2 * place + odd)] = each[:, :, place].T

    def scales(self, weight: Weight, low: int, count: int) -> Floats:
        """The scales of so many rows from `low` on, sound or not, [rows, groups].

        Raises:
            SourceError: they cannot be read.
        """
        info = weight.parts[1]
        with self._open(self._where(info.name).shard) as source:
            raw = self._strip(source, info, low, count, 1)
        return np.ascontiguousarray(kernels.scale_values(raw, info.dtype).T)

    def zeros(self, weight: Weight, low: int, count: int) -> Floats:
        """The values of the codes that stand for zero, likewise.

        Raises:
            SourceError: they cannot be read.
        """
        form, info = weight.format, weight.parts[2]
        assert form is not None
        with self._open(self._where(info.name).shard) as source:
            raw = self._strip(source, info, low, count, form.number.per_item)
        return form.number.decode(np.ascontiguousarray(self._zeros(raw, form).T))

    def index(self, weight: Weight) -> npt.NDArray[np.int64] | None:
        """Which group each input is of, where that is not in order.

        Raises:
            SourceError: it cannot be read, or is of no group.
        """
        form, groups = weight.format, weight.parts[1].shape[0]
        if form is None or form.columns is None or len(weight.parts) < 4:
            return None
        info = weight.parts[3]
        found = self._whole(info).view(np.int32 if info.dtype == "I32" else np.int64).astype(np.int64)
        wrong = (found < 0) | (found >= groups)
        if wrong.any():
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} holds {found[wrong][0]}, but there are {groups} groups",
                _DAMAGED,
            )
        if form.columns.act_order:
            return found
        if not np.array_equal(found, np.arange(len(found)) // (form.group[1] or len(found))):
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} is not in order, but config.json has no desc_act",
                "if groups are meant to be so, say desc_act: true there: weights are then decoded and quantized again",
            )
        return None

    def check_zeros(self, weight: Weight) -> None:
        """Refuse zero points other than the middle code of a weight that is symmetric.

        Raises:
            SourceError: one is, or they cannot be read.
        """
        form, info = weight.format, weight.parts[2]
        if form is None or form.zero_point is not None:
            return
        zeros = self._zeros(self._whole(info).reshape(info.shape[0], -1), form)
        middle = int(form.number.encode(np.zeros(1, np.float32))[0])
        if (zeros != middle).any():
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} holds the zero point {zeros[zeros != middle][0]}, but "
                f"config.json says sym: all are {middle}",
                "mend sym or checkpoint_format in config.json, whichever is wrong",
            )

    def _zeros(self, raw: Bytes, form: Format) -> Codes:
        columns = form.columns
        assert columns is not None
        order = columns.order or tuple(range(form.number.per_item))
        codes = _ordered(raw, form.number, order)
        mask = (1 << 8 // form.number.per_byte) - 1
        return (codes + np.uint8(columns.zero_point_offset)) & np.uint8(mask)

    def _whole(self, info: TensorInfo) -> Bytes:
        place, raw = self._where(info.name), np.empty(info.nbytes, np.uint8)
        with self._open(place.shard) as source:
            source.read(raw, place.offset, info.name)
        return raw

    def _strip(self, source: SourceFile, info: TensorInfo, low: int, count: int, per_item: int) -> Bytes:
        """Some columns of a tensor, as bytes [rows, ...]: from `low` on, of which so many share an element."""
        assert low % per_item == count % per_item == 0
        itemsize, offset = DTYPE_BITS[info.dtype] // 8, self._where(info.name).offset
        rows, pitch = info.shape[0], info.shape[1] * itemsize
        width = count // per_item * itemsize
        raw = np.empty((rows, width), np.uint8)
        if width == pitch:
            source.read(raw.reshape(-1), offset, info.name)
            return raw
        offset += low // per_item * itemsize
        for row in range(rows):
            source.read(raw[row], offset + row * pitch, info.name)
        return raw


def _ordered(raw: Bytes, number: Number, order: tuple[int, ...]) -> Codes:
    """Codes, a byte each, of words [rows, ...]: in which order each word has them."""
    codes = kernels.unpack(raw, number).reshape(len(raw), -1, number.per_item)
    return codes[:, :, list(order)].reshape(len(raw), -1)


def _described(info: TensorInfo) -> str:
    return f"{info.name} is {info.dtype} {list(info.shape)}"

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

_DAMAGED = "the checkpoint is damaged or incomplete: download or save it again"


def columns_of(
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
    if shape[0] % words:
        raise SourceError(f"{codes.name} has {shape[0]} outputs, which do not fill words of {words}", _DAMAGED)
    _, groups = grid_of(form.group, shape)
    parts = [codes]
    wanted: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
        (form.scale.name, FLOATS, (groups, shape[0])),
        (columns.zeros, ("I32",), (groups, shape[0] // words)),
    ]
    index = columns.index and find(f"{module}.{columns.index}")
    if columns.index is not None and (index or columns.scattered):
        wanted.append((columns.index, ("I32", "I64"), (shape[1],)))
    for last, dtypes, size in wanted:
        info = find(f"{module}.{last}")
        if info is None:
            raise SourceError(f"{codes.name} has no {last}: {module}.{last} is missing", _DAMAGED)
        if info.dtype not in dtypes or info.shape != size:
            raise SourceError(
                f"{_described(info)}, for {codes.name} {list(codes.shape)} with {form.label} it must be "
                f"{' or '.join(dtypes)} {list(size)}",
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

    def codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> None:
        """Read the codes of whole rows from `low` on into `into`, as formats of rows have them.

        Raises:
            SourceError: they cannot be read.
        """
        form = weight.format
        assert form is not None
        count = into.size * form.number.per_byte // weight.shape[1]
        order = form.columns.order if form.columns else None
        if order is None:
            raw = self._strip(source, weight.codes, low, count, 1)
            into[:] = np.ascontiguousarray(raw.view(np.uint32).T).view(np.uint8).reshape(-1)
            return
        raw = self._strip(source, weight.codes, low, count, form.number.per_item)
        codes = np.ascontiguousarray(_ordered(raw, form.number, order).T)
        kernels.pack(codes, into.reshape(count, -1))

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
        if form.columns.scattered:
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
        return (codes + np.uint8(columns.below)) & np.uint8(mask)

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

"""Weight: one matrix of a checkpoint, be it a tensor of its own, an expert's part of a stack, or codes with scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats.format import Format, grid_of
from .transform import WeightTransform


class Extent(NamedTuple):
    """Where the rows of a weight lie.

    Attributes:
        label: for messages: the tensor's name, and the expert's number where it is a slice.
        shard: source file name.
        offset: bytes from the start of the file to the first row.
        pitch: bytes from one stored row to the next.
    """

    label: str
    shard: str
    offset: int
    pitch: int


class Weight(NamedTuple):
    """One matrix [out, in] of a checkpoint, to be read and perhaps quantized.

    Attributes:
        module: its name without `.weight`, where it is an expert of a stack as if it were not:
            "model.layers.0.mlp.experts.7.up_proj".
        alike: its module with `*` for numbers, the same for weights of a kind: "model.layers.*.mlp.up_proj".
        source: the tensor it is or is a part of, as it would be unquantized; that need not be in the checkpoint.
        shape: (out, in).
        expert: its number in a stack; -1 outside of one, and for a stack of codes as a whole.
        part: which of several projections side by side in a stack.
        transposed: its rows are stored as columns.
        turned: rows of codes become columns where they are written unquantized.
        format: how it is stored; None for plain elements.
        parts: the codes, their scales, the global scale or the zero points if the format has them, and of codes in
            words perhaps a tensor that holds [out, in]; () for plain elements. Checks have fewer where scales are
            missing.
        input_scale: the scale of its activations, if the checkpoint has one.
        transform: what a calibration changes about it as it is read; None if nothing.
        within: the first of its rows in each part of a tensor that lies in parts for ranks, and the one after its
            last; codes and scales are then [parts, ..., ...]. None if its rows are all there are.
    """

    module: str
    alike: str
    source: TensorInfo
    shape: tuple[int, int]
    expert: int = -1
    part: int = 0
    transposed: bool = False
    turned: bool = False
    format: Format | None = None
    parts: tuple[TensorInfo, ...] = ()
    input_scale: TensorInfo | None = None
    transform: WeightTransform | None = None
    within: tuple[int, int] | None = None

    @property
    def folded(self) -> bool:
        """Whether its rows or columns are multiplied as they are read."""
        return self.transform is not None and self.transform.folds

    @property
    def dtype(self) -> str:
        """What its rows are read as: the dtype they are stored in, or "F32" for what is computed: decoded or folded."""
        return self.source.dtype if self.format is None and not self.folded else "F32"

    @property
    def nbytes(self) -> int:
        """Size of its elements unquantized, in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.source.dtype] // 8

    @property
    def stored(self) -> int:
        """Size of what the checkpoint holds for it, in bytes."""
        if self.format is None:
            return self.nbytes
        if self.within is not None:
            rows = self.parts[0].shape[1]
            first, last = ([part.nbytes * row // rows for part in self.parts] for row in self.within)
            return sum(last) - sum(first)
        if self.expert < 0:
            return sum(part.nbytes for part in self.parts)
        (down, along), scale = grid_of(self.format.group, self.shape), self.parts[1]
        return (
            self.shape[0] * self.shape[1] // self.format.number.per_byte + down * along * DTYPE_BITS[scale.dtype] // 8
        )

    @property
    def row_bytes(self) -> int:
        """Bytes that the codes of one row take."""
        assert self.format is not None
        return self.shape[1] // self.format.number.per_byte

    @property
    def codes(self) -> TensorInfo:
        """The stored codes."""
        return self.parts[0]

    @property
    def scale(self) -> TensorInfo | None:
        """The scales of the codes."""
        return self.parts[1] if len(self.parts) > 1 else None

    @property
    def global_scale(self) -> TensorInfo | None:
        """The scale of the scales."""
        return self.parts[2] if self.format and self.format.global_scale and len(self.parts) > 2 else None

    @property
    def zero_points(self) -> TensorInfo | None:
        """The codes that stand for zero."""
        return self.parts[2] if self.format and self.format.zero_point and len(self.parts) > 2 else None

    @property
    def tied_scale(self) -> TensorInfo | None:
        """The scale that it shares with what it is joined with, if it is there."""
        if self.format is None or not self.format.shares_scale:
            return None
        return self.scale if self.format.shared else self.global_scale

    @property
    def kind(self) -> tuple[object, ...]:
        """How it is read: equal for two weights of one dtype, shape and format."""
        return self.source.dtype, self.shape, self.transposed, self.turned, self.format, self.folded

    def is_held_by(self, form: Format) -> bool:
        """Whether it is stored as a format stores it, so that codes need no change."""
        return self.format is not None and not self.folded and self.within is None and form.holds(self.format)

    def input_scale_for(self, form: Format) -> TensorInfo | None:
        """The scale of its activations, if a format stores one and means the same by it."""
        alike = self.format is not None and (self.format.input_global_scale is None) == (
            form.input_global_scale is None
        )
        return self.input_scale if form.input_scale is not None and alike else None

    @property
    def matrices(self) -> list[Weight]:
        """The matrices of a stack of codes, by expert; of any other weight itself alone."""
        if self.format is None or len(self.source.shape) < 3 or self.expert >= 0:
            return [self]
        return [self._replace(expert=number) for number in range(self.source.shape[0])]

    def pieces(self, low: int, count: int) -> Iterator[tuple[Weight, int, int]]:
        """Where so many rows from `low` on lie: weights, the first row in each and how many."""
        if self.within is None:
            yield self, low, count
            return
        first, last = self.within
        whole = self._replace(within=None, shape=(self.parts[0].shape[1], self.shape[1]))
        while count:
            part, at = divmod(low, last - first)
            rows = min(count, last - first - at)
            yield whole._replace(expert=part), first + at, rows
            low, count = low + rows, count - rows

    def rows(self, where: Mapping[str, Location]) -> Extent:
        """Where its elements lie, or its codes."""
        info, rows = self.parts[0] if self.format else self.source, self.shape[0]
        place = where[info.name]
        label = f"{info.name}[{self.expert}]" if self.expert >= 0 else info.name
        stack = self.expert * (info.nbytes // info.shape[0]) if self.expert >= 0 else 0
        itemsize = DTYPE_BITS[info.dtype] // 8
        in_rows = self.format is not None and not self.transposed
        pitch = self.row_bytes if in_rows else info.shape[-1] * itemsize
        along = itemsize if self.transposed else pitch
        return Extent(label, place.shard, place.offset + stack + self.part * rows * along, pitch)

    def scales(self, where: Mapping[str, Location]) -> Extent:
        """Where its scales lie, a row for each row of groups; of a stack, a column where its rows are columns."""
        assert self.format is not None
        info = self.parts[1]
        place, (down, along), itemsize = (
            where[info.name],
            grid_of(self.format.group, self.shape),
            DTYPE_BITS[info.dtype] // 8,
        )
        if self.expert < 0 or math.prod(info.shape) == 1:
            return Extent(info.name, place.shard, place.offset, along * itemsize)
        # Projections side by side may share theirs.
        stack = info.nbytes // info.shape[0]
        sides = stack // (down * along * itemsize)
        pitch = down * sides * itemsize if self.transposed else along * itemsize
        beside = self.part % sides * down * (itemsize if self.transposed else pitch)
        return Extent(info.name, place.shard, place.offset + self.expert * stack + beside, pitch)

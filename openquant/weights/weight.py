"""Weight: one matrix of a checkpoint, be it a tensor of its own, one expert of a stack, or codes with scales.

A WeightTransform is what a calibration changes about a weight before it is quantized. SmoothQuant and AWQ divide the
inputs of a layer by factors where they are made (the smooth_layer: a norm, or the rows of a projection) and multiply
the layer's columns by them. The model computes the same, and quantization may lose less. calibration/smoothing.py says
which layers. Factors are powers of two, so norms, biases and routers in bfloat16 stay exact, and `verify` can read the
factors off the source and the output.

    WeightTransform(columns=np.array([4, 1, 0.5], np.float32)).apply(values, 0)    # float32 [n, 3]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats.format import Format, grid_of
from ..formats.numbers import Floats
from ..formats.schemes import MXFP4, NVFP4


class Extent(NamedTuple):
    """Where the rows of a weight, or of its scales, lie in a shard.

    Attributes:
        label: the tensor's name for messages, with the expert's number for one expert of a stack.
        shard: file name of the source's shard.
        offset: bytes from the start of the file to the first row.
        pitch: bytes from one stored row to the next.
    """

    label: str
    shard: str
    offset: int
    pitch: int


class Weight(NamedTuple):
    """One matrix [out, in] of a checkpoint.

    Attributes:
        module: name of the module that owns it: the tensor's name without `.weight`. An expert of a stack has the name
            that it would have as a module of its own: "model.layers.0.mlp.experts.7.up_proj".
        name_template: the module with `*` for numbers, equal in all layers: "model.layers.*.mlp.up_proj".
        source: the unquantized tensor that it is, or is a slice of. Where the checkpoint stores codes, the BF16 tensor
            they decode to, which the checkpoint does not have.
        shape: (out, in).
        expert: index in a stack of experts; -1 for a weight of its own, and for a whole stack of codes.
        part: index of the projection where a stack fuses several, such as 1 for `up` in `gate_up_proj`.
        transposed: whether it is stored as [in, out].
        decodes_transposed: whether its unquantized tensor is [in, out] although its codes are [out, in].
        format: the format of its codes; None for plain elements.
        parts: stored tensors: codes, scales, then the global scale or zero points if the format has them, and for
            packed codes perhaps `weight_shape`. Empty for plain elements. `verify` also makes weights whose scales are
            missing.
        input_scale: the static activation scale, if the checkpoint has one.
        transform: what a calibration changes about it as it is read; None for nothing.
        rank_rows: row range (first, end) of this projection in each tensor-parallel shard, where one tensor stores
            several projections per rank; codes and scales are then [ranks, rows, columns]. None for all others.
    """

    module: str
    name_template: str
    source: TensorInfo
    shape: tuple[int, int]
    expert: int = -1
    part: int = 0
    transposed: bool = False
    decodes_transposed: bool = False
    format: Format | None = None
    parts: tuple[TensorInfo, ...] = ()
    input_scale: TensorInfo | None = None
    transform: WeightTransform | None = None
    rank_rows: tuple[int, int] | None = None

    @property
    def smoothed(self) -> bool:
        """Whether its rows or columns are multiplied by smoothing factors as they are read."""
        return self.transform is not None and self.transform.smooths

    @property
    def dtype(self) -> str:
        """Dtype of the rows that a Reader gives: the stored one, or "F32" if they are decoded or smoothed."""
        return self.source.dtype if self.format is None and not self.smoothed else "F32"

    @property
    def nbytes(self) -> int:
        """Size of the unquantized matrix in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.source.dtype] // 8

    @property
    def stored_nbytes(self) -> int:
        """Size in bytes of what the checkpoint stores for it, scales included."""
        if self.format is None:
            return self.nbytes
        if self.rank_rows is not None:
            shard_rows = self.parts[0].shape[1]
            first, end = ([part.nbytes * row // shard_rows for part in self.parts] for row in self.rank_rows)
            return sum(end) - sum(first)
        if self.expert < 0:
            return sum(part.nbytes for part in self.parts)
        grid = grid_of(self.format.group, self.shape)
        return self.shape[0] * self.row_bytes + math.prod(grid) * DTYPE_BITS[self.parts[1].dtype] // 8

    @property
    def row_bytes(self) -> int:
        """Bytes that the codes of one row take."""
        assert self.format is not None
        return self.format.number.nbytes(self.shape[1])

    @property
    def codes(self) -> TensorInfo:
        """The tensor of codes."""
        return self.parts[0]

    @property
    def scale(self) -> TensorInfo | None:
        """The tensor of scales; None if it is missing."""
        return self.parts[1] if len(self.parts) > 1 else None

    @property
    def global_scale(self) -> TensorInfo | None:
        """The tensor of the global scale; None if the format has none."""
        return self.parts[2] if self.format and self.format.global_scale and len(self.parts) > 2 else None

    @property
    def zero_points(self) -> TensorInfo | None:
        """The tensor of zero points; None for symmetric formats."""
        return self.parts[2] if self.format and self.format.zero_point and len(self.parts) > 2 else None

    @property
    def shared_scale(self) -> TensorInfo | None:
        """The scale that all layers fused with this one share; None if the format has none or it is missing."""
        if self.format is None or not self.format.shares_scale:
            return None
        return self.scale if self.format.shared else self.global_scale

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for two weights of the same dtype, shape and format, which take the same memory to read."""
        return self.source.dtype, self.shape, self.transposed, self.decodes_transposed, self.format, self.smoothed

    def is_stored_as(self, fmt: Format) -> bool:
        """Return whether a format can keep its codes: `Format.holds` theirs, and smoothing does not change them."""
        return self.format is not None and not self.smoothed and self.rank_rows is None and fmt.holds(self.format)

    def divides_into(self, fmt: Format) -> bool:
        """Return whether it is in MXFP4 and a format is NVFP4: two groups of 16 inputs then take the place of one of
        32, with the same codes (see `Reader.exact_global_scale`).
        """
        own = self.format
        return own is not None and not self.smoothed and MXFP4.format.holds(own) and fmt.weights_only == NVFP4.format

    def input_scale_for(self, fmt: Format) -> TensorInfo | None:
        """Return its static activation scale if a format stores one with the same meaning, else None."""
        same_meaning = self.format is not None and (self.format.input_global_scale is None) == (
            fmt.input_global_scale is None
        )
        return self.input_scale if fmt.input_scale is not None and same_meaning else None

    @property
    def matrices(self) -> list[Weight]:
        """Its matrices: one for each expert of a stack of codes, else the weight itself alone."""
        if self.format is None or len(self.source.shape) < 3 or self.expert >= 0:
            return [self]
        return [self._replace(expert=number) for number in range(self.source.shape[0])]

    def row_pieces(self, low: int, count: int) -> Iterator[tuple[Weight, int, int]]:
        """Yield where rows lie: in the weight itself, or in several tensor-parallel shards one after the other.

        Args:
            low: first row.
            count: number of rows.

        Yields:
            A weight without `rank_rows`, the first row in it, and the number of rows.
        """
        if self.rank_rows is None:
            yield self, low, count
            return
        first, end = self.rank_rows
        shards = self._replace(rank_rows=None, shape=(self.parts[0].shape[1], self.shape[1]))
        while count:
            rank, row = divmod(low, end - first)
            rows = min(count, end - first - row)
            yield shards._replace(expert=rank), first + row, rows
            low = low + rows
            count = count - rows

    def extent(self, where: Mapping[str, Location]) -> Extent:
        """Return where its elements, or its codes, lie. With `rank_rows` that is where its tensor begins.

        Args:
            where: shard file name and byte offset of each tensor, by full tensor name.
        """
        info = self.parts[0] if self.format else self.source
        rows = self.shape[0]
        location = where[info.name]
        label = f"{info.name}[{self.expert}]" if self.expert >= 0 else info.name
        expert_offset = self.expert * (info.nbytes // info.shape[0]) if self.expert >= 0 else 0
        itemsize = DTYPE_BITS[info.dtype] // 8
        in_rows = self.format is not None and not self.transposed
        pitch = self.row_bytes if in_rows else info.shape[-1] * itemsize
        step = itemsize if self.transposed else pitch
        return Extent(label, location.shard, location.offset + expert_offset + self.part * rows * step, pitch)

    def scale_extent(self, where: Mapping[str, Location]) -> Extent:
        """Return where its scales lie. One row of scales belongs to one row of groups; transposed weights store it as a
        column. The weight must be quantized and have no `rank_rows` (see `row_pieces`).

        Args:
            where: shard file name and byte offset of each tensor, by full tensor name.
        """
        assert self.format is not None
        info = self.parts[1]
        location = where[info.name]
        itemsize = DTYPE_BITS[info.dtype] // 8
        grid_rows, grid_cols = grid_of(self.format.group, self.shape)
        if self.expert < 0 or math.prod(info.shape) == 1:
            return Extent(info.name, location.shard, location.offset, grid_cols * itemsize)
        # Projections that a stack fuses have scales of their own, or share one.
        expert_nbytes = info.nbytes // info.shape[0]
        projections = expert_nbytes // (grid_rows * grid_cols * itemsize)
        pitch = grid_rows * projections * itemsize if self.transposed else grid_cols * itemsize
        part_offset = self.part % projections * grid_rows * (itemsize if self.transposed else pitch)
        return Extent(info.name, location.shard, location.offset + self.expert * expert_nbytes + part_offset, pitch)


@dataclass(frozen=True, eq=False)
class WeightTransform:
    """What is changed about one weight [out, in].

    Attributes:
        rows: float32 [out], each row is divided by it; None for ones.
        columns: float32 [in], each column is multiplied by it; None for ones.
        importance: float32 [in], mean square of the smoothed inputs, by which a search for scales weights errors; None
            if all columns count the same.
    """

    rows: Floats | None = None
    columns: Floats | None = None
    importance: Floats | None = None

    @property
    def smooths(self) -> bool:
        """Whether it changes the weight itself, not only the search for its scales."""
        return self.rows is not None or self.columns is not None

    def apply(self, values: Floats, low: int) -> None:
        """Multiply columns and divide rows of a piece of the weight, in place.

        Args:
            values: float32 [n, in], rows of the weight.
            low: index of the first of these rows.
        """
        # Values that overflow are refused when they are quantized.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.columns is not None:
                values *= self.columns
            if self.rows is not None:
                values /= self.rows[low : low + len(values), None]


@dataclass(frozen=True, eq=False)
class WeightTransforms:
    """What a calibration changes about a model.

    Attributes:
        weights: transform of each changed matrix, by module; routers and other unquantized matrices included.
        tensors: new bytes of norms and biases, by tensor name; dtype and shape stay.
        notes: lines for the user.
        title: what the model card says of the smoothing; empty without any.
    """

    weights: Mapping[str, WeightTransform] = field(default_factory=dict)
    tensors: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def weighed(self) -> int:
        """Number of weights whose search for scales weights errors by the inputs."""
        return sum(transform.importance is not None for transform in self.weights.values())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all changes, hexadecimal."""
        digest = hashlib.sha256()
        for module, transform in sorted(self.weights.items()):
            vectors = {"rows": transform.rows, "columns": transform.columns, "importance": transform.importance}
            for name, vector in vectors.items():
                if vector is not None:
                    digest.update(f"{module}\0{name}\0{len(vector)}\0".encode())
                    digest.update(vector.tobytes())
        for tensor, data in sorted(self.tensors.items()):
            digest.update(f"{tensor}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()


UNDECIDED = WeightTransforms(notes=("smoothing factors are chosen when the weights are read, not in a dry run",))
"""The transforms of a plan that comes before its calibration."""

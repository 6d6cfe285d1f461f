"""Weight: one matrix of a checkpoint, be it a tensor of its own, one expert of a stack, or codes with scales.

A WeightTransform is what a calibration changes about a weight before it is quantized. SmoothQuant and AWQ divide the
inputs of a layer by factors where they are made (the smooth_layer: a norm, or the rows of a projection) and multiply
the layer's columns by them. The model computes the same, and quantization may lose less. calibration/smoothing.py says
which layers. Factors are powers of two, so norms, biases and routers in bfloat16 stay exact, and `verify` can repeat
them.

    WeightTransform(columns=np.array([4, 1, 0.5], np.float32)).apply(values, 0)    # float32 [n, 3]

Weights in layouts of other tools than compressed-tensors: checks their tensors and reads them by rows.

Stored transposed (AutoAWQ, GPTQ, auto-round, Quark):
    X.qweight  AutoAWQ: int32 [in, out / 8], a word holds eight outputs in AutoAWQ's own order
               Quark: the same as X.weight, in AutoAWQ's order or the first lowest; its scales are X.weight_scale, its
               zero points X.weight_zero_point
               GPTQ, auto-round: int32 [in / 8, out], a word holds eight inputs, the first in the lowest bits; with
               another number of bits than 4, [in * bits / 32, out], codes follow one another without gaps
    X.qzeros   int32 [groups, out / 8], zero points in the order of AutoAWQ or the first lowest; GPTQ's first format
               stores each less one
    X.scales   float16 [groups, out]
    X.g_idx    int32 [in], the group of each input (GPTQ with act-order); without it, groups are in order

Several projections in one tensor, stored per tensor-parallel rank, as MiMo V2.5 has q, k and v in FP8: the queries,
keys and values of rank 0, then those of rank 1, and so on. Blocks of scales begin anew at each rank: where a rank's
rows are no whole number of blocks, the tensor has more scales than blocks.

bitsandbytes in 4 bits (functional.py, QuantState.as_dict and dequantize_4bit):
    X.weight                   uint8 [out * in / 2, 1], two codes in a byte, the first highest; rows follow one another
    X.weight.quant_state.bitsandbytes__nf4 (or fp4)  uint8, JSON with `shape`, `blocksize` and others
    X.weight.quant_map         float32 [16], the value of each code
    X.weight.absmax            float32, the scale of each block; or with double quantization:
    X.weight.absmax            uint8, positions in nested_quant_map
    X.weight.nested_quant_map  float32 [256]; a value times the nested_absmax of its block, plus nested_offset, is a
                               scale
    X.weight.nested_absmax     float32, one for each `nested_blocksize` scales
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PlanError, SourceError
from ..files.shardfile import DTYPE_BITS, Bytes, Location, SourceFile, TensorInfo
from ..formats import kernels
from ..formats.format import FLOATS, Format, grid_of
from ..formats.numbers import Codes, Floats, Number
from ..formats.schemes import MXFP4, NVFP4
from ..patterns import template
from ..registry.architecture import PerRankTensor


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
        if self.format or self.smoothed:
            return "F32"
        return self.source.dtype

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
        if len(self.parts) < 2:
            return None
        return self.parts[1]

    @property
    def global_scale(self) -> TensorInfo | None:
        """The tensor of the global scale; None if the format has none."""
        if not self.format or not self.format.global_scale or len(self.parts) < 3:
            return None
        return self.parts[2]

    @property
    def zero_points(self) -> TensorInfo | None:
        """The tensor of zero points; None for symmetric formats."""
        if not self.format or not self.format.zero_point or len(self.parts) < 3:
            return None
        return self.parts[2]

    @property
    def shared_scale(self) -> TensorInfo | None:
        """The scale that all layers fused with this one share; None if the format has none or it is missing."""
        if self.format is None or not self.format.shares_scale:
            return None
        if self.format.shared:
            return self.scale
        return self.global_scale

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
        if fmt.input_scale is None or not same_meaning:
            return None
        return self.input_scale

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
        info = self.source
        if self.format:
            info = self.parts[0]
        rows = self.shape[0]
        location = where[info.name]
        label = info.name
        offset = location.offset
        if self.expert >= 0:
            label += f"[{self.expert}]"
            offset += self.expert * (info.nbytes // info.shape[0])

        itemsize = DTYPE_BITS[info.dtype] // 8
        in_rows = self.format is not None and not self.transposed
        pitch = self.row_bytes if in_rows else info.shape[-1] * itemsize
        step = itemsize if self.transposed else pitch
        return Extent(label, location.shard, offset + self.part * rows * step, pitch)

    def scale_extent(self, where: Mapping[str, Location]) -> Extent:
        """Return where its scales lie. One row of scales belongs to one row of groups, or one column if transposed.

        The weight must be quantized and have no `rank_rows` (see `row_pieces`).

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
        step = pitch = grid_cols * itemsize
        if self.transposed:
            step, pitch = itemsize, grid_rows * projections * itemsize

        of_expert = location.offset + self.expert * expert_nbytes
        of_part = self.part % projections * grid_rows * step
        return Extent(info.name, location.shard, of_expert + of_part, pitch)


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
        scales: what was chosen for each smooth_layer, for the journal (calibration/smoothing.py, scale_text).
    """

    weights: Mapping[str, WeightTransform] = field(default_factory=dict)
    tensors: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = ""
    scales: Mapping[str, str] = field(default_factory=dict)

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


# Bytes of codes that are transposed at a time. Larger strips are read in fewer and longer pieces.
STRIP = 8 << 20
DAMAGED = "the checkpoint is damaged or incomplete: download or save it again"


def name_and_type(info: TensorInfo) -> str:
    """Return a tensor's name, dtype and shape for a message: "lm_head.qweight is I32 [64, 32]".

    Args:
        info: name, dtype and shape of the tensor.
    """
    return f"{info.name} is {info.dtype} {list(info.shape)}"


def find_part(
    tensors: Mapping[str, TensorInfo], codes: TensorInfo, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> TensorInfo:
    """Find a tensor that belongs to codes, and must have one of these dtypes and this shape."""
    info = tensors.get(name)
    if info is None:
        raise SourceError(f"{codes.name} has no {name.rpartition('.')[2]}: {name} is missing", DAMAGED)
    if info.dtype not in dtypes or info.shape != shape:
        must = f"for {codes.name} {list(codes.shape)} it must be {' or '.join(dtypes)} {list(shape)}"
        raise SourceError(f"{name_and_type(info)}, {must}", DAMAGED)
    return info


def packed_columns(
    module: str, codes: TensorInfo, fmt: Format, tensors: Mapping[str, TensorInfo]
) -> tuple[tuple[int, int], tuple[TensorInfo, ...]]:
    """Find and check the tensors of a weight that AutoAWQ or GPTQ stored transposed.

    Args:
        module: full name of the module that owns it: "model.layers.0.mlp.up_proj".
        codes: name, dtype and shape of its qweight.
        fmt: its format, with `columns`.
        tensors: name, dtype and shape of all tensors, by name.

    Returns:
        The shape (out, in); and the tensors: codes, scales [groups, out], zero points [groups, out / codes per word]
        and perhaps the group index [in].

    Raises:
        SourceError: one is missing, or has another shape or dtype than it must.
    """
    columns = fmt.columns
    number = fmt.number
    assert columns is not None

    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise SourceError(f"{name_and_type(codes)}, not a matrix of I32", DAMAGED)
    high, wide = codes.shape
    shape = (wide, number.count(high)) if columns.order is None else (number.count(wide), high)

    for size, axis in zip(shape, ("outputs", "inputs"), strict=True):
        if size % number.run:
            raise SourceError(f"{codes.name} has {size} {axis}, which do not fill words of {number.run}", DAMAGED)

    _, groups = grid_of(fmt.group, shape)
    parts = [
        codes,
        find_part(tensors, codes, f"{module}.{fmt.scale.name}", FLOATS, (groups, shape[0])),
        find_part(tensors, codes, f"{module}.{columns.zeros}", ("I32",), (groups, number.items(shape[0]))),
    ]
    index = columns.index and f"{module}.{columns.index}"
    if index and (index in tensors or columns.act_order):
        parts.append(find_part(tensors, codes, index, ("I32", "I64"), (shape[1],)))
    return shape, tuple(parts)


class ColumnReader:
    """Reads a weight that is stored transposed as if it lay in rows.

    Args:
        where: returns shard and offset of a tensor by its name.
        open_shard: opens a shard by its file name, for a `with` statement.
        read: reads some bytes of a tensor.
    """

    def __init__(
        self, where: Callable[[str], Location], open_shard: Callable[[str], SourceFile], read: ReadPart
    ) -> None:
        self._where = where
        self._open = open_shard
        self._read = read
        # The last strip: name of its codes, first row, and codes as row formats store them, [rows, bytes].
        self._strip: tuple[str, int, Codes] = "", 0, np.empty((0, 0), np.uint8)

    def codes(self, source: SourceFile, weight: Weight, low: int, into: Bytes) -> None:
        """Read the codes of whole rows.

        Args:
            source: the open shard.
            weight: the weight.
            low: first row; with the order of AutoAWQ a multiple of 8, as is the number of rows.
            into: uint8, filled with codes as row formats store them. Its size says how many rows.

        Raises:
            SourceError: they cannot be read.
        """
        assert weight.format is not None
        pitch = weight.row_bytes
        count = into.size // pitch
        name, first, strip = self._strip
        if name != weight.codes.name or not first <= low <= low + count <= first + len(strip):
            run = weight.format.number.run
            strip_rows = max(count, STRIP // pitch // run * run)
            first = low
            strip = np.empty((min(strip_rows, weight.shape[0] - low), pitch), np.uint8)
            self._transpose(source, weight, low, strip)
            self._strip = weight.codes.name, first, strip
        into[:] = strip[low - first :].reshape(-1)[: into.size]

    def _transpose(self, source: SourceFile, weight: Weight, low: int, into: Codes) -> None:
        """Read the codes of rows from `low` on into `into` [rows, bytes], as row formats store them."""
        fmt = weight.format
        assert fmt is not None
        order = fmt.columns and fmt.columns.order
        if order is None:
            raw = self._read_strip(source, weight.codes, low, len(into))
            into[:] = np.ascontiguousarray(raw.view(np.uint32).T).view(np.uint8)
            return

        words = self._read_strip(source, weight.codes, low, len(into), fmt.number).view(np.uint32)
        outputs = into.reshape(words.shape[1], len(order), -1)

        # A byte of `into` holds the codes of two inputs, which are two rows of words. Split each pair of rows into the
        # even and the odd codes of its words; then each byte of a word is such a pair, for one of eight outputs.
        mask = np.uint32(0x0F0F0F0F)
        first = words[::2]
        second = words[1::2]
        even = first & mask | (second & mask) << np.uint32(4)
        odd = first >> np.uint32(4) & mask | second & ~mask

        for parity, pairs in enumerate([even, odd]):
            pair_bytes = pairs.view(np.uint8).reshape(*pairs.shape, 4)
            for place in range(4):
                outputs[:, order.index(2 * place + parity)] = pair_bytes[:, :, place].T

        if fmt.columns and fmt.columns.signed:
            into ^= 0x88

    def scales(self, weight: Weight, low: int, count: int) -> Floats:
        """Read the scales of `count` rows from row `low` on, unchecked.

        Returns:
            float32 [count, groups].

        Raises:
            SourceError: they cannot be read.
        """
        info = weight.parts[1]
        with self._open(self._where(info.name).shard) as source:
            raw = self._read_strip(source, info, low, count)
        return np.ascontiguousarray(kernels.scale_values(raw, info.dtype).T)

    def zero_points(self, weight: Weight, low: int, count: int) -> Floats:
        """Read the zero points of `count` rows from row `low` on, both multiples of the zero points in a word.

        Returns:
            float32 [count, groups], the values of the codes that decode to zero.

        Raises:
            SourceError: they cannot be read.
        """
        fmt = weight.format
        info = weight.parts[2]
        assert fmt is not None
        with self._open(self._where(info.name).shard) as source:
            raw = self._read_strip(source, info, low, count, fmt.number)
        return fmt.number.decode(np.ascontiguousarray(self._zero_codes(raw, fmt).T))

    def group_index(self, weight: Weight) -> npt.NDArray[np.int64] | None:
        """Read the group of each input.

        Returns:
            int64 [in], the group of each input, for act-order; None where groups are in order.

        Raises:
            SourceError: it cannot be read, names a group that is not there, or is out of order without act-order.
        """
        fmt = weight.format
        groups = weight.parts[1].shape[0]
        if fmt is None or fmt.columns is None or len(weight.parts) < 4:
            return None

        info = weight.parts[3]
        index = self._read(info, 0, info.nbytes).view(np.int32 if info.dtype == "I32" else np.int64).astype(np.int64)
        outside = (index < 0) | (index >= groups)

        if outside.any():
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} holds {index[outside][0]}, but there are "
                f"{groups} groups",
                DAMAGED,
            )

        if fmt.columns.act_order:
            return index

        if not np.array_equal(index, np.arange(len(index)) // (fmt.group[1] or len(index))):
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} is not in order, but config.json has no desc_act",
                "if it was quantized with act-order, set desc_act: true there: its weights are then quantized again",
            )
        return None

    def check_zero_points(self, weight: Weight) -> None:
        """Refuse a symmetric weight whose zero points are not all the middle code.

        Raises:
            SourceError: one is not, or they cannot be read.
        """
        fmt = weight.format
        info = weight.parts[2]
        if fmt is None or fmt.zero_point is not None:
            return
        zeros = self._zero_codes(self._read(info, 0, info.nbytes).reshape(info.shape[0], -1), fmt)
        middle = int(fmt.number.encode(np.zeros(1, np.float32))[0])
        if (zeros != middle).any():
            raise SourceError(
                f"{info.name} in {self._where(info.name).shard} holds the zero point {zeros[zeros != middle][0]}, but "
                f"config.json says sym: all are {middle}",
                "correct sym or checkpoint_format in config.json, whichever is wrong",
            )

    def _zero_codes(self, raw: Bytes, fmt: Format) -> Codes:
        """Unpack the words of zero points [rows, bytes] to codes, one a byte [rows, outputs]."""
        columns = fmt.columns
        assert columns is not None
        codes = kernels.unpack(raw, fmt.number)
        if columns.order is not None:
            # The place of each code in its word.
            codes = codes.reshape(len(raw), -1, fmt.number.run)[:, :, list(columns.order)].reshape(len(raw), -1)
        return (codes + np.uint8(columns.zero_point_offset)) & np.uint8((1 << fmt.number.bits) - 1)

    def _read_strip(
        self, source: SourceFile, info: TensorInfo, low: int, count: int, packed: Number | None = None
    ) -> Bytes:
        """Read the columns with `count` outputs from `low` on, uint8 [rows, bytes]; codes of `packed` share words."""
        if packed is not None:
            assert low % packed.run == count % packed.run == 0
            low = packed.items(low)
            count = packed.items(count)

        itemsize = DTYPE_BITS[info.dtype] // 8
        offset = self._where(info.name).offset
        rows = info.shape[0]
        pitch = info.shape[1] * itemsize
        width = count * itemsize
        raw = np.empty((rows, width), np.uint8)
        if width == pitch:
            source.read(raw.reshape(-1), offset, info.name)
            return raw
        offset += low * itemsize
        for row in range(rows):
            source.read(raw[row], offset + row * pitch, info.name)
        return raw


def per_rank_projections(
    module: str, codes: TensorInfo, scale: TensorInfo, fmt: Format, tensor: PerRankTensor, config: Mapping[str, Any]
) -> list[Weight]:
    """Split a tensor that is stored per rank into its projections.

    Args:
        module: module of the tensor, such as "model.layers.0.self_attn.qkv_proj".
        codes: name, dtype and shape of the codes, FP8 [ranks * rows, in].
        scale: name, dtype and shape of the scales, [ranks * rows of blocks, columns of blocks].
        fmt: the format of the codes.
        tensor: the registry's description of the tensor: its projections, and where config.json has their sizes.
        config: the parsed config.json, which holds numbers and sizes of heads.

    Returns:
        One weight for each projection, with `rank_rows`.

    Raises:
        SourceError: the sizes of config.json do not account for the rows, or the scales have another shape.
    """
    ranks = _positive(config, tensor.ranks)
    candidates = [[_rows(config, ranks, *keys) for keys in sizes] for sizes in tensor.sizes]

    fitting = [sizes for sizes in candidates if all(sizes) and sum(sizes) * ranks == codes.shape[0]]
    if not fitting or any(sizes != fitting[0] for sizes in fitting):
        raise SourceError(
            f"{codes.name} is {list(codes.shape)}, and config.json has no heads that give so many rows, in a part for "
            f"each of {tensor.ranks}",
            "put back the config.json that belongs to these weights",
        )

    rows = sum(fitting[0])
    cols = codes.shape[1]
    grid_rows, grid_cols = grid_of(fmt.group, (rows, cols))

    # The same number of columns whether blocks begin anew at each rank or not.
    if scale.shape != (ranks * grid_rows, grid_cols):
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {ranks} parts of {[rows, cols]} with {fmt.label} it must be "
            f"{[ranks * grid_rows, grid_cols]}",
            "download it again: it is damaged or incomplete",
        )

    parts = codes._replace(shape=(ranks, rows, cols)), scale._replace(shape=(ranks, grid_rows, grid_cols))
    weights = []
    first = 0

    for name, size in zip(tensor.members, fitting[0], strict=True):
        projection = f"{module.rpartition('.')[0]}.{name}"
        shape = (ranks * size, cols)
        end = first + size
        source = TensorInfo(f"{projection}.weight", "BF16", shape)
        weights.append(
            Weight(projection, template(projection), source, shape, format=fmt, parts=parts, rank_rows=(first, end))
        )
        first = end

    return weights


def _rows(config: Mapping[str, Any], ranks: int, heads: str, size: str) -> int:
    """Return the rows of one rank: its heads times the rows of a head; 0 if config.json does not say."""
    count = _positive(config, heads)
    if ranks == 0 or count % ranks:
        return 0
    return count // ranks * _positive(config, size)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        return 0
    return max(0, value)


# Scales of double quantization may be a little below zero. Codes are at most 1, so that none this small overflows.
SMALLEST_NESTED = -(2.0**64)
# What Reader.read_part does: some bytes of a tensor, from an offset on.
ReadPart = Callable[[TensorInfo, int, int], Bytes]


def four_bits(
    codes: TensorInfo, fmt: Format, tensors: Mapping[str, TensorInfo], states: Mapping[str, bytes]
) -> tuple[tuple[int, int], int, tuple[TensorInfo, ...]]:
    """Find and check the tensors of a weight of 4 bits.

    Args:
        codes: name, dtype and shape of its codes.
        fmt: its format, whose number names the quant_state.
        tensors: all tensors of the checkpoint, by name.
        states: the bytes of quant_states, by tensor name.

    Returns:
        The shape (out, in); how many weights share a scale; and the tensors: codes, absmax, quant_map and quant_state,
        with double quantization also nested_absmax and nested_quant_map.

    Raises:
        SourceError: one is missing, or has another shape or dtype than it must.
        PlanError: blocks do not divide rows.
    """
    state_name = f"{codes.name}.quant_state.bitsandbytes__{fmt.number.name}"
    if state_name not in states:
        raise SourceError(f"{codes.name} has no quant_state: {state_name} is missing", DAMAGED)
    state = _parse(states[state_name], state_name)

    shape = state.get("shape")
    size = state.get("blocksize")
    is_matrix = isinstance(shape, list) and len(shape) == 2 and all(type(side) is int and side > 0 for side in shape)
    if not (isinstance(shape, list) and is_matrix and type(size) is int and 0 < size <= 1 << 16):
        raise SourceError(
            f"{state_name} has the shape {json.dumps(shape)[:100]} and the blocksize {json.dumps(size)[:100]}, which "
            "are not those of a matrix", DAMAGED
        )  # fmt: skip

    count = math.prod(shape)
    if codes.dtype != "U8" or 2 * math.prod(codes.shape) != count:
        raise SourceError(f"{name_and_type(codes)}, but its quant_state says {shape[0]} x {shape[1]}", DAMAGED)
    if shape[1] % size:
        raise PlanError(
            f"{codes.name} has rows of {shape[1]}, which do not divide into blocks of {size}",
            "start from the unquantized model",
        )

    absmax = find_part(tensors, codes, f"{codes.name}.absmax", ("F32", "U8"), (count // size,))
    values = find_part(tensors, codes, f"{codes.name}.quant_map", ("F32",), (16,))
    parts = [codes, absmax, values, tensors[state_name]]

    if absmax.dtype == "U8":
        nested_size, _ = _read_nested(state, state_name)
        nested = (-(-absmax.shape[0] // nested_size),)
        parts.append(find_part(tensors, codes, f"{codes.name}.nested_absmax", ("F32",), nested))
        parts.append(find_part(tensors, codes, f"{codes.name}.nested_quant_map", ("F32",), (256,)))

    return (shape[0], shape[1]), size, tuple(parts)


def _parse(data: bytes, name: str) -> dict[str, Any]:
    """Parse a quant_state, the bytes of the tensor `name`."""
    try:
        state = json.loads(data.decode())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise SourceError(f"{name} is not a JSON object", DAMAGED)
    return state


def _read_nested(state: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return how many scales share a nested_absmax, and the nested_offset that is added to all scales."""
    size = state.get("nested_blocksize")
    offset = state.get("nested_offset")
    # A comparison with NaN is false.
    if type(size) is not int or not 0 < size <= 1 << 16 or not isinstance(offset, float) or not abs(offset) < 2.0**64:
        raise SourceError(f"{name} has no valid nested_blocksize and nested_offset", DAMAGED)
    return size, offset


def check_bitsandbytes(weight: Weight, read: ReadPart) -> None:
    """Refuse a weight of 4 bits whose codes stand for other values than its format's.

    Raises:
        SourceError: they do, or the values cannot be read.
    """
    assert weight.format is not None
    info = weight.parts[2]
    if not np.array_equal(read(info, 0, info.nbytes).view(np.float32), weight.format.number.values()):
        raise SourceError(f"{info.name} has other values than {weight.format.number.title}", DAMAGED)


def bitsandbytes_scales(weight: Weight, low: int, count: int, read: ReadPart) -> Floats:
    """Compute the scales of `count` rows of a weight of 4 bits from row `low` on, unchecked.

    Returns:
        float32 [count, blocks of a row].

    Raises:
        SourceError: they cannot be read.
    """
    assert weight.format is not None and weight.format.group[1] is not None
    per_row = weight.shape[1] // weight.format.group[1]
    absmax = weight.parts[1]
    first = low * per_row
    number = count * per_row

    if absmax.dtype == "F32":
        return read(absmax, first * 4, number * 4).view(np.float32).reshape(count, per_row)

    _, _, _, state_info, nested_absmax, nested_map = weight.parts
    state = _parse(read(state_info, 0, state_info.nbytes).tobytes(), state_info.name)
    size, offset = _read_nested(state, state_info.name)

    outer_first = first // size
    outer_last = (first + number - 1) // size
    outer = read(nested_absmax, outer_first * 4, (outer_last + 1 - outer_first) * 4).view(np.float32)
    values = read(nested_map, 0, nested_map.nbytes).view(np.float32)[read(absmax, first, number)]
    with np.errstate(over="ignore", invalid="ignore"):
        scale = values * outer[(first + np.arange(number)) // size - outer_first] + np.float32(offset)

    return scale.reshape(count, per_row)

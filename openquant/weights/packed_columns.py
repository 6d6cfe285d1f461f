"""Weights in layouts of other tools than compressed-tensors: checks their tensors and reads them by rows.

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

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PlanError, SourceError
from ..files.shardfile import Bytes, SourceFile
from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats import kernels
from ..formats.format import FLOATS, Format, grid_of
from ..formats.numbers import Codes, Floats, Number
from ..patterns import template
from ..registry.architecture import PerRankTensor
from .weight import Weight

# Bytes of codes that are transposed at a time. Larger strips are read in fewer and longer pieces.
STRIP = 8 << 20
DAMAGED = "the checkpoint is damaged or incomplete: download or save it again"


def name_and_type(info: TensorInfo) -> str:
    """Return a tensor's name, dtype and shape for a message: "lm_head.qweight is I32 [64, 32]".

    Args:
        info: name, dtype and shape of the tensor.
    """
    return f"{info.name} is {info.dtype} {list(info.shape)}"


def packed_columns(
    module: str, codes: TensorInfo, fmt: Format, find: Callable[[str], TensorInfo | None]
) -> tuple[tuple[int, int], tuple[TensorInfo, ...]]:
    """Find and check the tensors of a weight that AutoAWQ or GPTQ stored transposed.

    Args:
        module: full name of the module that owns it: "model.layers.0.mlp.up_proj".
        codes: name, dtype and shape of its qweight.
        fmt: its format, with `columns`.
        find: returns name, dtype and shape of the tensor with a full name; None if the checkpoint has none.

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
    parts = [codes]
    expected: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
        (fmt.scale.name, FLOATS, (groups, shape[0])),
        (columns.zeros, ("I32",), (groups, number.items(shape[0]))),
    ]

    index = columns.index and find(f"{module}.{columns.index}")
    if columns.index is not None and (index or columns.act_order):
        expected.append((columns.index, ("I32", "I64"), (shape[1],)))

    for suffix, dtypes, sizes in expected:
        info = find(f"{module}.{suffix}")
        if info is None:
            raise SourceError(f"{codes.name} has no {suffix}: {module}.{suffix} is missing", DAMAGED)
        if info.dtype not in dtypes or info.shape != sizes:
            raise SourceError(
                f"{name_and_type(info)}, for {codes.name} {list(codes.shape)} with {fmt.label} it must be "
                f"{' or '.join(dtypes)} {list(sizes)}",
                DAMAGED,
            )
        parts.append(info)

    return shape, tuple(parts)


class ColumnReader:
    """Reads a weight that is stored transposed as if it lay in rows.

    Args:
        where: returns shard and offset of a tensor by its name.
        open_shard: opens a shard by its file name, for a `with` statement.
    """

    def __init__(self, where: Callable[[str], Location], open_shard: Callable[[str], SourceFile]) -> None:
        self._where = where
        self._open = open_shard
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
        order = fmt.columns.order if fmt.columns else None
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
        index = self._read_bytes(info).view(np.int32 if info.dtype == "I32" else np.int64).astype(np.int64)
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
        zeros = self._zero_codes(self._read_bytes(info).reshape(info.shape[0], -1), fmt)
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
        order = columns.order or tuple(range(fmt.number.run))
        codes = _unpack_in_order(raw, fmt.number, order)
        return (codes + np.uint8(columns.zero_point_offset)) & np.uint8((1 << fmt.number.bits) - 1)

    def _read_bytes(self, info: TensorInfo) -> Bytes:
        place = self._where(info.name)
        raw = np.empty(info.nbytes, np.uint8)
        with self._open(place.shard) as source:
            source.read(raw, place.offset, info.name)
        return raw

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


def _unpack_in_order(raw: Bytes, number: Number, order: tuple[int, ...]) -> Codes:
    """Unpack words [rows, bytes] to codes, one a byte [rows, codes]; `order` is the place of each code in its word."""
    codes = kernels.unpack(raw, number).reshape(len(raw), -1, number.run)
    return codes[:, :, list(order)].reshape(len(raw), -1)


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
    return count // ranks * _positive(config, size) if ranks and count % ranks == 0 else 0


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


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
    parts = [codes]

    def require(name: str, dtypes: tuple[str, ...], length: int) -> TensorInfo:
        info = tensors.get(f"{codes.name}.{name}")
        if info is None:
            raise SourceError(f"{codes.name} has no {name}: {codes.name}.{name} is missing", DAMAGED)
        if info.dtype not in dtypes or info.shape != (length,):
            raise SourceError(f"{name_and_type(info)}, it must be {' or '.join(dtypes)} [{length}]", DAMAGED)
        parts.append(info)
        return info

    absmax = require("absmax", ("F32", "U8"), count // size)
    require("quant_map", ("F32",), 16)
    parts.append(tensors[state_name])
    if absmax.dtype == "U8":
        nested_size, _ = _read_nested(state, state_name)
        require("nested_absmax", ("F32",), -(-absmax.shape[0] // nested_size))
        require("nested_quant_map", ("F32",), 256)
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

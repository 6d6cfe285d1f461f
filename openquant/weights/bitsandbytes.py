"""Weights of 4 bits as bitsandbytes stores them: checks their tensors and computes the scales of blocks.

X.weight                   uint8 [out * in / 2, 1], two codes in a byte, the first highest; rows follow one another
X.weight.quant_state.bitsandbytes__nf4 (or fp4)  uint8, JSON with `shape`, `blocksize` and others
X.weight.quant_map         float32 [16], the value of each code
X.weight.absmax            float32, the scale of each block; or with double quantization:
X.weight.absmax            uint8, positions in nested_quant_map
X.weight.nested_quant_map  float32 [256]; a value times the nested_absmax of its block, plus nested_offset, is a scale
X.weight.nested_absmax     float32, one for each `nested_blocksize` scales

bitsandbytes functional.py, QuantState.as_dict and dequantize_4bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import PlanError, SourceError
from ..files.shardfile import Bytes
from ..files.tensors import TensorInfo
from ..formats.format import Format
from ..formats.numbers import Floats
from .packed_columns import DAMAGED, name_and_type
from .weight import Weight

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
    shape, size = state.get("shape"), state.get("blocksize")
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
        nested_size, _ = _nested(state, state_name)
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


def _nested(state: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return how many scales share a nested_absmax, and what is added to all."""
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    # A comparison with NaN is false.
    if type(size) is not int or not 0 < size <= 1 << 16 or not isinstance(offset, float) or not abs(offset) < 2.0**64:
        raise SourceError(f"{name} has no valid nested_blocksize and nested_offset", DAMAGED)
    return size, offset


def check_values(weight: Weight, read: ReadPart) -> None:
    """Refuse a weight of 4 bits whose codes stand for other values than its format's.

    Raises:
        SourceError: they do, or the values cannot be read.
    """
    assert weight.format is not None
    info = weight.parts[2]
    if not np.array_equal(read(info, 0, info.nbytes).view(np.float32), weight.format.number.values()):
        raise SourceError(f"{info.name} has other values than {weight.format.number.title}", DAMAGED)


def scales(weight: Weight, low: int, count: int, read: ReadPart) -> Floats:
    """Compute the scales of `count` rows of a weight of 4 bits from row `low` on, unchecked.

    Returns:
        float32 [count, blocks of a row].

    Raises:
        SourceError: they cannot be read.
    """
    assert weight.format is not None and weight.format.group[1] is not None
    per_row, absmax = weight.shape[1] // weight.format.group[1], weight.parts[1]
    first, number = low * per_row, count * per_row
    if absmax.dtype == "F32":
        return read(absmax, first * 4, number * 4).view(np.float32).reshape(count, per_row)
    _, _, _, state_info, nested_absmax, nested_map = weight.parts
    state = _parse(read(state_info, 0, state_info.nbytes).tobytes(), state_info.name)
    size, offset = _nested(state, state_info.name)
    outer_first, outer_last = first // size, (first + number - 1) // size
    outer = read(nested_absmax, outer_first * 4, (outer_last + 1 - outer_first) * 4).view(np.float32)
    values = read(nested_map, 0, nested_map.nbytes).view(np.float32)[read(absmax, first, number)]
    with np.errstate(over="ignore", invalid="ignore"):
        scale = values * outer[(first + np.arange(number)) // size - outer_first] + np.float32(offset)
    return scale.reshape(count, per_row)

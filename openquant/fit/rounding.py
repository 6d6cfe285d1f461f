"""Weights as a scheme rounds them, for a model that runs: the values that its codes stand for.

make = replaced_tensors(unit.weights, choice.schemes, fused, make_reader)
make["model.layers.0.mlp.up_proj.weight"]()     # bfloat16 [out, in]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ..formats import kernels
from ..formats.kernels import encode_float32, to_float32
from ..formats.numbers import Floats
from ..formats.scales import choose_scales, choose_shared_scale
from ..formats.schemes import Scheme
from ..weights.reading import Reader, require_in_range
from ..weights.weight import Weight


def replaced_tensors(
    weights: Mapping[str, Weight],
    schemes: Mapping[str, Scheme | None],
    fused: Mapping[str, tuple[str, ...]],
    make_reader: Callable[[], Reader],
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what makes each tensor of a unit as its schemes round it.

    Args:
        weights: the layers of the unit, by module.
        schemes: the scheme of each; None for those that stay as they are.
        fused: for each module that engines fuse with others, all members of its group, which share some scales.
        make_reader: makes a reader of the source's weights, for each call, since transformers loads in threads.

    Returns:
        By name of the source's unquantized tensor, a function that returns it, bfloat16, rounded to what its codes
        stand for. A stack of experts has all of its experts rounded.
    """
    tensors: dict[str, list[_Rounded]] = {}
    shared: dict[str, Floats] = {}
    for module, weight in weights.items():
        scheme, group = schemes[module], fused.get(module, (module,))
        if scheme is not None:
            if group[0] not in shared:
                members = [weights[member] for member in group]
                shared[group[0]] = _shared_absmax(members, scheme, make_reader())
            tensors.setdefault(weight.source.name, []).append(_Rounded(weight, scheme, shared[group[0]]))
    return {name: partial(_rounded_tensor, rounded, make_reader) for name, rounded in tensors.items()}


class _Rounded(NamedTuple):
    """A weight, its scheme, and the largest absolute weight of all that share its per-tensor or global scale."""

    weight: Weight
    scheme: Scheme
    absmax: Floats


def _rounded_tensor(weights: list[_Rounded], make_reader: Callable[[], Reader]) -> torch.Tensor:
    reader = make_reader()
    tensor = torch.empty(weights[0].weight.source.shape, dtype=torch.bfloat16)
    flat = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    for weight, scheme, absmax in weights:
        target, low = _rows_of(weight, flat), 0
        for values in rounded_rows(weight, scheme, absmax, reader):
            rounded = np.empty(values.shape, np.uint16)
            kernels.to_bfloat16(values, rounded)
            target[low : low + len(rounded)] = rounded
            low += len(rounded)
    return tensor


def _rows_of(
    weight: Weight, flat: np.ndarray[tuple[int], np.dtype[np.uint16]]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    """The part of its tensor that a weight is, as a view [out, in]."""
    shape, itemsize = weight.shape, flat.itemsize
    if weight.expert < 0:
        matrix = flat.reshape(weight.source.shape[0], weight.source.shape[1])
        return matrix.T if weight.transposed or weight.decodes_transposed else matrix
    per_expert = flat.size // weight.source.shape[0]
    transposed = weight.transposed or weight.decodes_transposed
    step = 1 if transposed else shape[1]
    part = flat[weight.expert * per_expert + weight.part * shape[0] * step :]
    pitch = weight.source.shape[-1]
    strides = (itemsize, pitch * itemsize) if transposed else (pitch * itemsize, itemsize)
    return as_strided(part, shape, strides)


def rounded_rows(weight: Weight, scheme: Scheme, absmax: Floats, reader: Reader) -> Iterator[Floats]:
    """Yield the rows of a weight as a scheme rounds them to the nearest code, with the scales that it chooses.

    Args:
        weight: the weight [out, in].
        scheme: its scheme.
        absmax: float32 [1, 1], the largest absolute weight of all that share a per-tensor or global scale.
        reader: reads the weight.

    Yields:
        float32 [n, in], the values that codes and scales stand for.

    Raises:
        SourceError: the weight cannot be read, or holds NaN or infinity.
        PlanError: a weight is too large for the scheme.
    """
    fmt, cols = scheme.format, weight.shape[1]
    global_scale = choose_shared_scale(fmt, absmax) if fmt.global_scale is not None else None
    for bits in reader.rows(weight, fmt.height):
        group_absmax = absmax
        if not fmt.shared:
            group_absmax = reader.loops.absmax(bits, weight.dtype, fmt.group)
            require_in_range(weight, group_absmax, scheme, reader.where)
        chosen = choose_scales(scheme, bits, weight.dtype, group_absmax, global_scale, None, reader.loops)
        height, width = fmt.group[0] or len(bits), fmt.group[1] or cols

        def spread(grid: Floats, rows: int = len(bits), height: int = height, width: int = width) -> Floats:
            return np.repeat(np.repeat(grid, height, 0)[:rows], width, 1)[:, :cols]

        scale = spread(chosen.scale)
        zero_point = None if chosen.zero_point is None else spread(chosen.zero_point)
        codes = encode_float32(to_float32(bits, weight.dtype), scale, fmt.number, zero_point)
        values = fmt.number.decode(codes)
        if zero_point is not None:
            values -= zero_point
        values *= scale
        yield values


def _shared_absmax(weights: Iterable[Weight], scheme: Scheme, reader: Reader) -> Floats:
    """float32 [1, 1], the largest absolute value of weights that share a scale; 0 if they share none."""
    largest = np.zeros((1, 1), np.float32)
    for weight in weights if scheme.format.shares_scale else ():
        for bits in reader.rows(weight, 1):
            absmax = reader.loops.absmax(bits, weight.dtype, (None, None))
            require_in_range(weight, absmax, scheme, reader.where)
            largest = np.maximum(largest, absmax)
    return largest

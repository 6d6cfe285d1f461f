"""Tensor parallelism: which sizes can serve a plan, and which layer forbids the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .fates import Layer, parts_of, split_finder, text_config
from .models import Model, Split
from .schemes import Scheme

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ParallelSize:
    """Whether a tensor-parallel size can serve the result, and if not, what forbids it."""

    size: int
    problem: str | None


def parallel_sizes(
    checkpoint: Checkpoint, model: Model, scheme: Scheme, quantized: list[Layer]
) -> tuple[ParallelSize, ...]:
    """For each tensor-parallel size whether the quantized layers divide, and the first one that does not."""
    config = text_config(checkpoint, model)
    find_split = split_finder(model)
    kinds: dict[tuple[str, tuple[int, int]], Split | None] = {}
    for layer in quantized:
        key = (layer.alike, layer.shape)
        if key not in kinds:
            kinds[key] = find_split(layer.module)
    result = []
    for size in TENSOR_PARALLEL_SIZES:
        problem = None
        for (name, shape), split in kinds.items():
            problem = _indivisible(name, shape, split, config, scheme, size) if split else None
            if problem:
                break
        result.append(ParallelSize(size, problem))
    return tuple(result)


def _indivisible(
    name: str, shape: tuple[int, int], split: Split, config: dict[str, Any], scheme: Scheme, size: int
) -> str | None:
    parts = parts_of(shape, split, config) if split.axis == "out" else [(shape[1], split.heads)]
    multiple = scheme.group[0 if split.axis == "out" else 1] or 1
    problems = (_indivisible_length(name, length, heads, split, config, multiple, size) for length, heads in parts)
    return next((problem for problem in problems if problem), None)


def _indivisible_length(
    name: str, length: int, key: str | None, split: Split, config: dict[str, Any], multiple: int, size: int
) -> str | None:
    parts = size
    heads = config.get(key) if key else None
    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{name}: {heads} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{name}: {heads} heads do not divide by {size}"
    if length % parts:
        return f"{name}: {length} does not divide by {parts}"
    # A whole layer was either quantized here, then it divides, or it is served as its maker stored it.
    if parts > 1 and length // parts % multiple:
        return f"{name}: {length} / {parts} = {length // parts} is not a multiple of {multiple}"
    return None

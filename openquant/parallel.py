"""Tensor parallelism: which sizes can serve a plan, and which layer forbids the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .fates import Layer, absolute
from .models import Model, Split
from .patterns import compile_pattern
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
    config = checkpoint.config.get(model.text_config) if model.text_config else checkpoint.config
    config = config if isinstance(config, dict) else {}
    splits = [(compile_pattern(pattern), split) for split, pattern in
              zip(model.splits, absolute(model, [split.pattern for split in model.splits]), strict=True)]  # fmt: skip
    kinds: dict[tuple[str, tuple[int, int]], Split | None] = {}
    for layer in quantized:
        key = (layer.alike, layer.shape)
        if key not in kinds:
            kinds[key] = next((split for pattern, split in splits if pattern.fullmatch(layer.module)), None)
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
    axis = 0 if split.axis == "out" else 1
    length, multiple = shape[axis], scheme.group[axis] or 1
    parts = size
    heads = config.get(split.heads) if split.heads else None
    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{name}: {heads} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{name}: {heads} heads do not divide by {size}"
    if length % parts:
        return f"{name}: {length} does not divide by {parts}"
    if length // parts % multiple:
        return f"{name}: {length} / {parts} = {length // parts} is not a multiple of {multiple}"
    return None

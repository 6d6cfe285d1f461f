"""Tensor parallelism: which sizes can serve a plan, and which layer forbids the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..files.checkpoint import Checkpoint
from ..files.small_files import short_repr
from ..formats.format import Format, Group
from ..registry.architecture import Architecture, ParallelSplit
from ..registry.rules import ModuleRules
from ..weights.weight import Weight

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ParallelSize:
    """A tensor-parallel size, and why it cannot serve the result, "28 heads do not divide by 8"; None if it can."""

    size: int
    problem: str | None


def text_config(checkpoint: Checkpoint, model: Architecture) -> dict[str, Any]:
    """The part of config.json with the language model's sizes, by the usual names; older files have all at the top."""
    inner = config_value(checkpoint.config, model.text_config)
    found = inner if isinstance(inner, dict) else checkpoint.config
    return {usual: found[key] for key, usual in _OTHERWISE.items() if key in found} | found


# Names of configurations that transformers reads, or engines, by the usual ones.
_OTHERWISE = {
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
}


def config_value(config: Mapping[str, Any], key: str | None) -> Any:
    """What config.json says under a key, or under several joined by dots; None if nothing."""
    inner: Any = config
    for part in key.split(".") if key else ():
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if key else None


def fused_parts(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any]
) -> list[tuple[int, str | None]]:
    """Rows of each part that a tensor holds one below the other, as q, k and v in a fused qkv, with the config key that
    counts its heads: [(4096, "num_attention_heads"), (1024, "num_key_value_heads"), ...].

    A row count is 0 where config.json does not tell.
    """
    if split is None or not split.parts:
        return [(shape[0], split.heads if split else None)]
    keys, counts = _counted(split, config)
    whole = all(counts) and shape[0] % sum(counts) == 0
    return [(shape[0] // sum(counts) * count if whole else 0, key) for count, key in zip(counts, keys, strict=True)]


def _counted(split: ParallelSplit, config: dict[str, Any]) -> tuple[tuple[str | None, ...], list[int]]:
    """The config keys of a tensor's parts, and what they say; 0 where they say no number."""
    keys = next((parts for key, parts in split.where if config.get(key) is True), split.parts)
    shares = [1 if key is None else config.get(key) for key in keys]
    return keys, [share if isinstance(share, int) and share > 0 else 0 for share in shares]


def why_not_reordered(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], form: Format
) -> str | None:
    """Why a weight [out, in] in a format does not follow as an engine sorts its rows, "an engine puts the rows of its
    heads in another order, and 64 of them are not whole groups of 128"; None if it does, or its rows stay as they are.
    """
    if split is None or not split.turns:
        return None
    if split.turns_rows:
        short = (info.name.lstrip(".") for info in form.parts("", shape) if info.shape[:1] != shape[:1])
        name = next(short, None)
        return f"{_SORTED}, and fails on its {name}, which has not all of them" if name else None
    heads = sum(_counted(split, config)[1])
    if not heads or shape[0] % heads:
        return "config.json does not tell the sizes of what it holds" if form.height > 1 or split.turns_all else None
    if shape[0] // heads % form.height:
        return f"{_SORTED}, and {shape[0] // heads} of them are not whole groups of {form.height}"
    if split.turns_all:
        for info in form.parts("", shape):
            if not info.shape or info.shape[0] % heads:
                return f"{_SORTED}, and fails on its {info.name.lstrip('.')}, which has no row for each"
    return None


_SORTED = "an engine puts the rows of its heads in another order"


def parallel_sizes(
    checkpoint: Checkpoint, entry: ModuleRules, layers: Iterable[tuple[Weight, Group]], asked: int | None
) -> tuple[ParallelSize, ...]:
    """For each tensor-parallel size whether the layers divide, and the first one that does not.

    Args:
        checkpoint: the opened source.
        entry: its entry.
        layers: what could be quantized, with what shares a scale in it; 1 x 1 where it stays unquantized.
        asked: one more size to look at.
    """
    config = text_config(checkpoint, entry.model)
    kinds: dict[tuple[str, tuple[int, int], Group], ParallelSplit | None] = {}
    for weight, group in layers:
        key = (weight.alike, weight.shape, group)
        if key not in kinds:
            kinds[key] = entry.rule(weight.module).split
    result = []
    for size in sorted({*TENSOR_PARALLEL_SIZES, *([asked] if asked else [])}):
        problem = None
        for (name, shape, group), split in kinds.items():
            problem = why_indivisible(shape, split, config, group, size)
            if problem:
                problem = f"{name}: {problem}"
                break
        result.append(ParallelSize(size, problem))
    return tuple(result)


def why_indivisible(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], group: Group, size: int
) -> str | None:
    """Why a weight [out, in] with scales for groups of that size does not divide by so many ranks; None if it does."""
    if split is None:
        return None
    parts = fused_parts(shape, split, config) if split.axis == "out" else [(shape[1], split.heads)]
    multiple = group[0 if split.axis == "out" else 1] or 1
    problems = (_indivisible_length(length, heads, split, config, multiple, size) for length, heads in parts)
    return next((problem for problem in problems if problem), None)


def _indivisible_length(
    length: int, key: str | None, split: ParallelSplit, config: dict[str, Any], multiple: int, size: int
) -> str | None:
    parts = size
    heads = config.get(key) if key else None
    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{short_repr(heads)} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{short_repr(heads)} heads do not divide by {size}"
    if length % parts:
        return f"{length} does not divide by {parts}"
    # A whole layer was either quantized here, then it divides, or it is served as its maker stored it.
    if parts > 1 and length // parts % multiple:
        return f"{length} / {parts} = {length // parts} is not a multiple of {multiple}"
    return None

"""Tensor parallelism: which sizes can serve a plan, and which layer prevents the others."""

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
    """A tensor-parallel size, with the reason for which it cannot serve the output, "28 heads do not divide by 8".

    The problem is None if it can.
    """

    size: int
    problem: str | None


def text_config(checkpoint: Checkpoint, model: Architecture) -> dict[str, Any]:
    """Return the language model's part of config.json, with other spellings of its keys under their usual names too.

    Older files have all keys at the top level.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture, which names that part ("text_config").

    Returns:
        Its keys and values: {"num_hidden_layers": 28, ...}.
    """
    inner = config_value(checkpoint.config, model.text_config)
    config = inner if isinstance(inner, dict) else checkpoint.config
    return {usual: config[key] for key, usual in _USUAL_KEYS.items() if key in config} | config


# Keys that transformers or engines read in place of the usual ones.
_USUAL_KEYS = {
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
}


def config_value(config: Mapping[str, Any], key: str | None) -> Any:
    """Return the value of a key of config.json.

    Args:
        config: the content of config.json, or a part of it.
        key: a key, or nested keys joined by dots: "text_config.hidden_size"; None for no key.

    Returns:
        The value; None if there is none.
    """
    inner: Any = config
    for part in key.split(".") if key else ():
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if key else None


def fused_parts(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any]
) -> list[tuple[int, str | None]]:
    """Return the parts that a tensor holds one below the other, such as q, k and v in a fused qkv.

    Args:
        shape: shape of the tensor, [out, in].
        split: how tensor-parallel ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        For each part its row count, 0 if config.json does not say, and the config key that counts its heads, None if it
        has none: [(4096, "num_attention_heads"), (1024, "num_key_value_heads"), ...]. A tensor without parts is one.
    """
    if split is None or not split.parts:
        return [(shape[0], split.heads if split else None)]
    keys, counts = _part_proportions(split, config)
    whole = all(counts) and shape[0] % sum(counts) == 0
    return [(shape[0] // sum(counts) * count if whole else 0, key) for count, key in zip(counts, keys, strict=True)]


def _part_proportions(split: ParallelSplit, config: dict[str, Any]) -> tuple[tuple[str | None, ...], list[int]]:
    """The config keys of a tensor's parts, and the numbers their rows are proportional to; 0 for an unusable value."""
    keys = next((parts for key, parts in split.where if config.get(key) is True), split.parts)
    shares = [1 if key is None else config.get(key) for key in keys]
    return keys, [share if isinstance(share, int) and share > 0 else 0 for share in shares]


def why_not_reordered(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], form: Format
) -> str | None:
    """Say why a weight's scales cannot follow its rows when an engine sorts interleaved heads.

    Args:
        shape: shape of the weight, [out, in].
        split: how tensor-parallel ranks divide it, and whether its heads are interleaved; None if ranks copy it.
        config: the language model's part of config.json, as text_config returns it.
        form: the format that it would get.

    Returns:
        The reason; None if they can.
    """
    if split is None or not split.interleaved:
        return None
    if split.interleaved_rows:
        short = (info.name.lstrip(".") for info in form.parts("", shape) if info.shape[:1] != shape[:1])
        name = next(short, None)
        return f"{_SORTED}, and fails on its {name}, which has fewer rows" if name else None
    heads = sum(_part_proportions(split, config)[1])
    if not heads or shape[0] % heads:
        if form.height > 1 or split.interleaved_all:
            return "config.json does not say how many rows each of its parts has"
        return None
    rows = shape[0] // heads
    if rows % form.height:
        return f"{_SORTED}, and the {rows} rows of a head are not whole groups of {form.height}"
    if split.interleaved_all:
        for info in form.parts("", shape):
            if not info.shape or info.shape[0] % heads:
                return f"{_SORTED}, and fails on its {info.name.lstrip('.')}, which has no rows for each head"
    return None


_SORTED = "an engine sorts its rows by heads"


def check_parallel_sizes(
    checkpoint: Checkpoint, entry: ModuleRules, layers: Iterable[tuple[Weight, Format | None]], extra_size: int | None
) -> tuple[ParallelSize, ...]:
    """Check which tensor-parallel sizes divide all layers.

    Args:
        checkpoint: the opened source.
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, each with its format; None if it is not quantized, and divides
            anywhere.
        extra_size: a size to check besides the usual ones; None for no other.

    Returns:
        The sizes in ascending order, each with why the first layer that does not divide does not; None if all divide.
    """
    config = text_config(checkpoint, entry.model)
    kinds: dict[tuple[str, tuple[int, int], Group], ParallelSplit | None] = {}
    for weight, form in layers:
        group = form.indivisible if form else (1, 1)
        key = (weight.name_template, weight.shape, group)
        if key not in kinds:
            kinds[key] = entry.rule(weight.module).split
    result = []
    for size in sorted({*TENSOR_PARALLEL_SIZES, *([extra_size] if extra_size else [])}):
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
    """Say why a weight cannot be divided among tensor-parallel ranks.

    Args:
        shape: shape of the weight, [out, in].
        split: how ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.
        group: rows and columns that ranks must not split (Format.indivisible); None for an axis that they may split
            anywhere.
        size: the number of ranks.

    Returns:
        The reason, "28 heads do not divide by 8"; None if it can.
    """
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
    # A layer that is not divided needs no check: quantized here it fits, and otherwise it is as its maker stored it.
    if parts > 1 and length // parts % multiple:
        return f"{length} / {parts} = {length // parts} is not a multiple of {multiple}"
    return None

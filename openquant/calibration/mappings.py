"""Where the inputs of a checkpoint's layers can be made smaller, and the layers' columns as much larger.

Rounding has an easier task where a few inputs are no longer far larger than all others; the model computes the same.

    [first, *_] = foldings(MODELS["Qwen3ForCausalLM"], {info.module: info.shape, ..}, text_config)
    first.source, first.readers     # "model.layers.0.input_layernorm", ("model.layers.0.self_attn.q_proj", ..)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats.numbers import Floats
from ..patterns import compile_any, compile_pattern
from ..registry.architecture import Architecture, ParallelSplit, SmoothingRule, absolute_patterns


@dataclass(frozen=True)
class SmoothingMapping:
    """The inputs that one module makes, and all that read them.

    Attributes:
        source: the module: a norm, or a projection.
        readers: the modules whose columns they are multiplied with.
        channels: how many there are.
        first: the row of the projection, or the number of the norm's weight, that makes the first of them.
        offset: what is added to the norm's weight before it multiplies.
        head: how many of them are a head's; all where none is read by several.
        repeats: how many heads of readers read a head.
    """

    source: str
    readers: tuple[str, ...]
    channels: int
    first: int
    offset: float
    head: int
    repeats: int

    def columns(self, scale: Floats) -> Floats:
        """What the columns of readers are multiplied by, [in], where channels are divided by a scale [channels]."""
        return np.repeat(scale.reshape(-1, self.head), self.repeats, axis=0).reshape(-1)

    def largest(self, values: Floats) -> Floats:
        """The largest of the values [in] of those columns that read a channel, [channels]."""
        found: Floats = values.reshape(-1, self.repeats, self.head).max(axis=1).reshape(-1)
        return found


def find_smoothing_mappings(
    model: Architecture, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> tuple[SmoothingMapping, ...]:
    """All foldings of a checkpoint; none where a module is missing or has another shape than the entry lets expect.

    Args:
        model: the entry of its architecture.
        shapes: of the weights of all its modules, embeddings and norms included.
        config: the part of config.json with the language model's sizes.
    """
    found = []
    for fold in model.folds:
        [pattern] = absolute_patterns(model, [fold.source])
        source = compile_pattern(pattern)
        readers: dict[tuple[str, ...], list[str]] = {}
        expressions = [compile_pattern(each) for each in absolute_patterns(model, fold.readers)]
        for module in shapes:
            for expression in expressions:
                if match := expression.fullmatch(module):
                    # By as many of its numbers as the source has.
                    readers.setdefault(match.groups()[: source.groups], []).append(module)
        for module in shapes:
            match = source.fullmatch(module)
            if match and (read := readers.get(match.groups())):
                mapping = _folding(model, fold, module, tuple(read), shapes, config)
                found += [mapping] if mapping else []
    return tuple(found)


def _folding(
    model: Architecture,
    fold: SmoothingRule,
    source: str,
    readers: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> SmoothingMapping | None:
    rows, width = shapes[source][0], shapes[readers[0]][-1]
    if any(len(shapes[reader]) != 2 or shapes[reader][1] != width for reader in readers):
        return None
    channels = rows
    if fold.last:
        splits = (
            split for split in model.splits if compile_any(absolute_patterns(model, [split.pattern])).fullmatch(source)
        )
        share = _last(next(splits), config)
        if share is None or rows % share[1]:
            return None
        channels = rows // share[1] * share[0]
    head, repeats = channels, 1
    if fold.heads is not None:
        count = config.get(fold.heads) or config.get("num_attention_heads")
        if type(count) is not int or count < 1 or channels % count or width % channels:
            return None
        head, repeats = channels // count, width // channels
    if channels * repeats != width:
        return None
    return SmoothingMapping(source, readers, channels, rows - channels, fold.offset, head, repeats)


def _last(split: ParallelSplit, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows of the last part of a tensor that holds several, out of how many; None if config.json does not say."""
    sizes = [1 if part is None else config.get(part) for part in split.parts]
    if any(type(size) is not int or size < 1 for size in sizes):
        return None
    known = [size for size in sizes if size is not None]
    return known[-1], sum(known)

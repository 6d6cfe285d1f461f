"""Smoothing mappings of a checkpoint: where inputs of layers can be divided, and the layers' columns multiplied.

The output activations of a smooth_layer are the input activations of its balance_layers. Dividing the former by a scale
and multiplying the columns of the latter by it leaves the model's output as it is, while rounding loses less when no
input is far larger than the others.

    [mapping, *_] = find_smoothing_mappings(MODELS["Qwen3ForCausalLM"], {tensor.module: tensor.shape, ..}, text_config)
    mapping.smooth_layer        # "model.layers.0.input_layernorm"
    mapping.balance_layers      # ("model.layers.0.self_attn.q_proj", ..)
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
    """A smooth_layer, and all layers whose inputs are its outputs.

    Attributes:
        smooth_layer: module name of a norm, or of a projection.
        balance_layers: module names of the layers that read its outputs; their columns are multiplied.
        channels: number of outputs that a scale divides.
        first_row: row of the projection, or element of the norm, that makes the first channel.
        offset: what the model adds to the norm's weight before it multiplies by it.
        head_dim: channels of a head; all channels if balance_layers read each channel once.
        repeats: how many heads of the balance_layers' inputs are copies of each head (grouped-query attention).
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    channels: int
    first_row: int
    offset: float
    head_dim: int
    repeats: int

    def column_factors(self, scale: Floats) -> Floats:
        """Return the factors [in] of the balance_layers' columns for a scale [channels]."""
        return np.repeat(scale.reshape(-1, self.head_dim), self.repeats, axis=0).reshape(-1)

    def channel_max(self, values: Floats) -> Floats:
        """Return the largest of the balance_layers' column values [in] for each channel, [channels]."""
        largest: Floats = values.reshape(-1, self.repeats, self.head_dim).max(axis=1).reshape(-1)
        return largest


def find_smoothing_mappings(
    model: Architecture, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> tuple[SmoothingMapping, ...]:
    """Find all smoothing mappings of a checkpoint, except those whose modules are missing or have unexpected shapes.

    Args:
        model: the architecture's entry in the registry, which has the rules.
        shapes: shape of each module's weight by full module name, embeddings and norms included.
        config: the language model's part of the parsed config.json.

    Returns:
        Each smooth_layer with its balance_layers, by full module name, and number of channels.
    """
    mappings = []
    for rule in model.smoothing:
        [pattern] = absolute_patterns(model, [rule.smooth_layer])
        smooth_layer = compile_pattern(pattern)
        # By the parts of a name that `*` stands for, as many as the smooth_layer's pattern has.
        balance_layers: dict[tuple[str, ...], list[str]] = {}
        expressions = [compile_pattern(pattern) for pattern in absolute_patterns(model, rule.balance_layers)]
        for module in shapes:
            for expression in expressions:
                if match := expression.fullmatch(module):
                    balance_layers.setdefault(match.groups()[: smooth_layer.groups], []).append(module)
        for module in shapes:
            match = smooth_layer.fullmatch(module)
            if match and (readers := balance_layers.get(match.groups())):
                mapping = _make_mapping(model, rule, module, tuple(readers), shapes, config)
                mappings += [mapping] if mapping else []
    return tuple(mappings)


def _make_mapping(
    model: Architecture,
    rule: SmoothingRule,
    smooth_layer: str,
    balance_layers: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> SmoothingMapping | None:
    """The mapping of a rule's modules; None if their shapes do not fit."""
    rows, width = shapes[smooth_layer][0], shapes[balance_layers[0]][-1]
    if any(len(shapes[layer]) != 2 or shapes[layer][1] != width for layer in balance_layers):
        return None
    channels = rows
    if rule.last:
        splits = (
            split
            for split in model.splits
            if compile_any(absolute_patterns(model, [split.pattern])).fullmatch(smooth_layer)
        )
        share = _last_part(next(splits), config)
        if share is None or rows % share[1]:
            return None
        channels = rows // share[1] * share[0]
    head_dim, repeats = channels, 1
    if rule.heads is not None:
        heads = config.get(rule.heads) or config.get("num_attention_heads")
        if type(heads) is not int or heads < 1 or channels % heads or width % channels:
            return None
        head_dim, repeats = channels // heads, width // channels
    if channels * repeats != width:
        return None
    return SmoothingMapping(smooth_layer, balance_layers, channels, rows - channels, rule.offset, head_dim, repeats)


def _last_part(split: ParallelSplit, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Relative rows of the last part of a fused tensor, and of all its parts; None if config.json does not say."""
    sizes = [1 if part is None else config.get(part) for part in split.parts]
    if any(type(size) is not int or size < 1 for size in sizes):
        return None
    parts = [size for size in sizes if size is not None]
    return parts[-1], sum(parts)

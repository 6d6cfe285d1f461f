"""The FP8 KV cache: which layers have a cache of their own, and the scales that an output has for it.

An output has scales for all of these layers, because transformers leaves missing ones uninitialized
(compressed-tensors).

    find_cached_attentions(["model.layers.0.self_attn.k_proj"], entry, config)    # {0: "model.layers.0.self_attn"}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS
from ..formats.numbers import E4M3, FLAG, SCALES, cache_scales, scale_for
from ..patterns import MAX_DIGITS, compile_pattern, template
from ..registry.architecture import Architecture, absolute_patterns
from ..registry.rules import ModuleRules
from ..version import SGLANG
from ..weights.statistics import Calibration, PlaceholderCalibration
from .decisions import Decisions, Item, PassthroughTensor
from .serving import layers_with_cache
from .sort import mtp_layer_finder

# Why a plan has such a scale, as it prints it.
CACHED = "FP8 KV cache"
_NO_CACHE = "leave --kv-cache out"


def find_cached_attentions(modules: Iterable[str], entry: ModuleRules, config: dict[str, Any]) -> dict[int, str]:
    """Find the attention modules that have a KV cache of their own.

    Args:
        modules: full names of all modules of a checkpoint: "model.layers.0.self_attn.k_proj".
        entry: what the registry says of each module of the architecture.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        The full name of each such decoder layer's attention module, by layer number:
        {0: "model.layers.0.self_attn"}.

    Raises:
        PlanError: engines load no scales for this architecture, its cache does not hold keys and values, or it is not
            known which layers have a cache.
    """
    model = entry.model
    if model.cache_refused is not None:
        raise PlanError(f"{model.name}: no engine loads scales of the KV cache: {model.cache_refused}", _NO_CACHE)
    patterns = [(compile_pattern(absolute_patterns(model, [rows.pattern])[0]), rows) for rows in model.cached]
    layer_pattern, is_mtp_layer = compile_pattern(f"{model.layers}.**"), mtp_layer_finder(model, config)
    count = layers_with_cache(config)
    attentions: dict[int, str] = {}
    for module in modules:
        rows = next((rows for pattern, rows in patterns if pattern.fullmatch(module)), None)
        if rows is None or is_mtp_layer(module):
            continue
        if rows.heads is None:
            raise PlanError(
                f"{model.name} has multi-head latent attention (MLA), whose cache has no scales for keys and values",
                _NO_CACHE,
            )
        match = layer_pattern.fullmatch(module)
        if match is None or not match[1].isdecimal() or len(match[1]) > MAX_DIGITS:
            raise PlanError(
                f"it is not known which layer {module} belongs to, nor whether it has a KV cache", _NO_CACHE
            )
        if count is None or int(match[1]) < count:
            attentions[int(match[1])] = module.rpartition(".")[0]
    if not attentions or (model.rest and len(attentions) != count):
        raise PlanError(f"it is not known which layers of {model.name} have a KV cache", _NO_CACHE)
    return dict(sorted(attentions.items()))


def add_scales(
    items: dict[str, list[Item]], source: Checkpoint, attentions: Mapping[int, str], calibration: Calibration | None
) -> list[str]:
    """Add KV-cache scales to the shards that hold the layers' projections, in place of the source's scales.

    Args:
        items: all tensors, by file name of the shard; changed in place.
        source: the opened source.
        attentions: full names of attention modules, by number of the decoder layer.
        calibration: ranges of keys and values; None to keep the source's scales, and use 1 where it has none.

    Returns:
        Notes for the user that say where the scales come from.

    Raises:
        PlanError: the calibration lacks a layer, or a scale of the source is not a single number.
    """
    source_scales = cache_scales(source.tensors)
    replaced = {name for pair in source_scales.values() for name in pair if name is not None}
    for shard, tensors in items.items():
        items[shard] = [
            item for item in tensors if not (isinstance(item, PassthroughTensor) and item.tensor.name in replaced)
        ]
    paths, shard_of = set(attentions.values()), dict[str, str]()
    for info in source.tensors.values():
        path = info.module.rpartition(".")[0]
        if path in paths and info.name not in replaced:
            shard_of.setdefault(path, source.where[info.name].shard)
    for number, path in attentions.items():
        absmax = _absmax(calibration, number) if calibration is not None else None
        for place, last in enumerate(SCALES):
            name, source_name = f"{path}.{last}", source_scales.get(number, (None, None))[place]
            value: float | TensorInfo = 1.0
            if absmax is not None:
                value = scale_for(absmax[place])
            elif source_name is not None:
                value = _require_scalar(source.tensors[source_name])
            items[shard_of[path]].append(
                PassthroughTensor(TensorInfo(name, "F32", (1,)), template(name), CACHED, value=value)
            )
    if calibration is not None:
        return [_calibration_note(calibration, attentions)]
    count = sum(name is not None for number in attentions for name in source_scales.get(number, (None, None)))
    if count:
        return [f"{count} of {2 * len(attentions)} scales of the KV cache are the source's, all others 1"]
    return [
        f"scales of the KV cache are 1 in all of {len(attentions)} layers, which fits magnitudes up to "
        f"{E4M3.largest:g} and is precise for those above {2.0**-6:g}, as in nearly every model"
    ]


def _absmax(calibration: Calibration, number: int) -> tuple[float, float]:
    """The largest magnitudes of a layer's keys and values."""
    absmax = calibration.cached.get(number)
    if absmax is None:
        raise PlanError(
            f"the calibration did not observe keys and values of layer {number}",
            "make it again: openquant calibrate MODEL -o FILE; or leave --calibration out for scales of 1",
        )
    return absmax


def _require_scalar(info: TensorInfo) -> TensorInfo:
    if info.dtype not in FLOATS or math.prod(info.shape) != 1:
        raise PlanError(
            f"{info.name} is {info.dtype} {list(info.shape)}, not a single scale of the KV cache",
            "give --calibration FILE to replace the scales, or leave --kv-cache out",
        )
    return info


def _calibration_note(calibration: Calibration, attentions: Mapping[int, str]) -> str:
    """A note that says for which layers the calibration's scales are needed."""
    needed = [
        f"{path} (keys up to {keys:.4g}, values up to {values:.4g})"
        for number, path in attentions.items()
        for keys, values in (calibration.cached[number],)
        if not all(1 <= absmax <= E4M3.largest for absmax in (keys, values))
    ]
    text = f"scales of the KV cache are powers of two, from a calibration with {calibration.described}"
    if isinstance(calibration, PlaceholderCalibration):
        return text
    text += ": "
    if not needed:
        return f"{text}1 would do in all of {len(attentions)} layers"
    more = f" and {len(needed) - 3} more" if len(needed) > 3 else ""
    enough = len(attentions) - len(needed)
    return f"{text}1 would do in {enough} of {len(attentions)} layers, but not in {', '.join(needed[:3])}{more}"


def serving_notes(model: Architecture, decisions: Decisions) -> list[str]:
    """Return notes on how engines use an FP8 KV cache.

    Args:
        model: the registry's entry of the architecture.
        decisions: the plan's scheme, and the tensors that are not quantized, cache scales among them.

    Returns:
        One sentence each: options that engines need, and scales that they ignore.
    """
    notes = []
    if decisions.scheme is not None and decisions.scheme.method == "fp8":
        notes.append(
            f"vLLM does not take an FP8 KV cache from a config in this format: serve with {FLAG}; fp8_e5m2 is refused"
        )
    if model.sglang.ignores_cache_scales and any(kept.value not in (None, 1.0) for kept in decisions.passthrough):
        notes.append(f"{SGLANG} silently uses 1 in place of these scales of the KV cache")
    return notes

"""Scales that do not follow from weights: of the FP8 KV cache, and of activations as a calibration observed them.

Which layers have a cache of their own follows from the registry. An output has scales for all of these layers, because
transformers leaves missing ones uninitialized (compressed-tensors).

    find_cached_attentions(["model.layers.0.self_attn.k_proj"], entry, config)    # {0: "model.layers.0.self_attn"}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import PlanError, SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import TensorInfo
from ..formats.format import FLOATS
from ..formats.numbers import E4M3, FLAG, SCALES, cache_scales, scale_for
from ..formats.schemes import Scheme
from ..patterns import MAX_DIGITS, compile_pattern, template
from ..registry.architecture import Architecture, ModuleRules, absolute_patterns
from ..version import SGLANG
from ..weights.statistics import Calibration, PlaceholderCalibration, placeholder_calibration
from ..weights.weight import Weight
from .architecture import mtp_layer_finder
from .decisions import Decisions, Item, PassthroughTensor, PlanOptions
from .serving import layers_with_cache

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
    layer_pattern = compile_pattern(f"{model.layers}.**")
    is_mtp_layer = mtp_layer_finder(model, config)
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

    paths = set(attentions.values())
    shard_of = dict[str, str]()
    for info in source.tensors.values():
        path = info.module.rpartition(".")[0]
        if path in paths and info.name not in replaced:
            shard_of.setdefault(path, source.where[info.name].shard)

    for number, path in attentions.items():
        absmax = _absmax(calibration, number) if calibration is not None else None

        for place, last in enumerate(SCALES):
            name = f"{path}.{last}"
            source_name = source_scales.get(number, (None, None))[place]

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


# How many layers a note names experts of.
_MOST_NAMED = 4


def expect_calibration(options: PlanOptions, tensors: Iterable[str], required: bool) -> PlanOptions:
    """Put a placeholder into the options if a calibration is needed and still to be made.

    Args:
        options: what the user asks for.
        tensors: full names of the source's tensors; the placeholder has statistics for all of them.
        required: whether the scheme has static activation scales and the source has none.

    Returns:
        The options, with the placeholder as `calibration` if one is needed: it is `required`, or the options ask for
        it, and they have none yet.

    Raises:
        PlanError: a calibration is needed, and there are no texts to make it with.
    """
    if options.calibration is not None or not (required or options.calibrate):
        return options
    if options.texts is None:
        raise PlanError(
            "static activation scales need a calibration, or the input_scale tensors of a quantized source, of which "
            "this one has none",
            "make one with openquant calibrate and give --calibration FILE, or leave --activation-scheme out for "
            "dynamic activation scales",
        )
    return replace(options, calibration=placeholder_calibration(tensors, options.texts))


def require_widths(calibration: Calibration, layers: Iterable[Weight]) -> None:
    """Refuse a calibration whose input statistics have another width than a layer.

    Args:
        calibration: statistics of the inputs of layers; a placeholder is accepted.
        layers: the weights [out, in] that may be quantized.

    Raises:
        SourceError: of the layers that share some statistics, none has their width; the message names the calibration
            file and the first of these layers.
    """
    by_name = {weight.source.name: weight for weight in layers} if calibration.model else {}
    for statistics in calibration.inputs:
        weights = [by_name[name] for name in statistics.tensors if name in by_name]
        # One matching expert is enough: in Ernie 4.5 VL the experts for images are narrower, and transformers' module
        # does not tell them from the others.
        if statistics.tokens and weights and all(statistics.absmax.shape != (weight.shape[1],) for weight in weights):
            raise SourceError(
                f"{calibration.file}: {weights[0].source.name} has {weights[0].shape[1]} inputs, and the calibration "
                f"{len(statistics.absmax)}",
                "make it again: openquant calibrate MODEL -o FILE",
            )


def find_input_absmax(
    schemes: Iterable[Scheme],
    calibration: Calibration | None,
    entry: ModuleRules,
    layers: Mapping[str, Weight],
    fused: Mapping[str, tuple[str, ...]],
) -> dict[str, float]:
    """Find the largest magnitude of each layer's input activations, shared where engines share a scale.

    Engines use one scale, the largest, for fused layers and for all experts of a layer (vLLM
    layers/quantization/fp8.py:403-405, :739; fused_moe/routed_experts.py:823-833 refuses gate and up that differ). So
    an expert that no token was routed to gets the value of the others.

    Args:
        schemes: all schemes of the plan.
        calibration: statistics of the inputs of layers; None without.
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        fused: for each module that engines fuse with others, the full names of all members, itself included.

    Returns:
        The largest absolute input, by full module name; layers that the calibration did not observe are absent. Empty
        without a calibration, or if no scheme stores activation scales.
    """
    if calibration is None or not any(scheme.format.input_scale for scheme in schemes):
        return {}
    shared_absmax: dict[tuple[str, ...], float] = {}
    keys = scale_sharing_keys(entry, layers, fused)
    for module, weight in layers.items():
        statistics = calibration.of(weight.source.name)
        if statistics is not None:
            shared_absmax[keys[module]] = max(statistics.largest, shared_absmax.get(keys[module], 0.0))
    return {module: shared_absmax[key] for module, key in keys.items() if key in shared_absmax}


def scale_sharing_keys(
    entry: ModuleRules, modules: Iterable[str], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return a key for each module, the same for those whose inputs engines scale by one number.

    Args:
        entry: what the registry says of each module of the architecture.
        modules: full names of modules.
        fused: for each module that engines fuse with others, the full names of all members, itself included.
    """
    keys: dict[str, tuple[str, ...]] = {}
    for module in modules:
        experts = entry.experts(module)
        members = fused.get(module, (module,))
        # Experts of a layer share a key: their path and the last segments of the fused projections.
        keys[module] = (experts, *(name.rpartition(".")[2] for name in members)) if experts else members
    return keys


def chosen_scales(decisions: Decisions, entry: ModuleRules) -> dict[str, float]:
    """Return the static scales of activations and of the KV cache that a plan has not from its source.

    Args:
        decisions: what becomes of each tensor.
        entry: what the registry says of each module of the architecture.

    Returns:
        Values by tensor name; of layers that share one, only the first.
    """
    scales = {kept.tensor.name: kept.value for kept in decisions.passthrough if isinstance(kept.value, float)}
    keys = scale_sharing_keys(entry, decisions.layers, decisions.fused)
    seen: set[tuple[str, ...]] = set()
    for weight, scheme in decisions.quantized:
        absmax = decisions.input_absmax.get(weight.module)
        key = keys[weight.module]
        of_source = absmax is None and weight.input_scale_for(scheme.format) is not None
        if scheme.format.input_scale is not None and not of_source and key not in seen:
            seen.add(key)
            # As it is stored.
            scales[f"{weight.module}.{scheme.format.input_scale}"] = float(np.float32(scheme.input_scale(absmax)))
    return scales


def unrouted_note(
    calibration: Calibration, entry: ModuleRules, modules: Iterable[str], layers: Mapping[str, Weight]
) -> list[str]:
    """Return a note about experts that no token was routed to, which use their layer's scale.

    Args:
        calibration: statistics of the inputs of layers, with the tokens routed to each expert.
        entry: what the registry says of each module of the architecture.
        modules: full names of the modules with a static activation scale.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".

    Returns:
        A list of one sentence; empty if there are no such experts.
    """
    unrouted: dict[str, set[int]] = {}

    for module in modules:
        experts = entry.experts(module)
        statistics = calibration.of(layers[module].source.name)
        if experts and statistics is not None and statistics.routed is not None:
            number = module.removeprefix(f"{experts}.").partition(".")[0]
            if number.isdecimal() and statistics.routed[int(number) : int(number) + 1] == (0,):
                unrouted.setdefault(experts, set()).add(int(number))

    if not unrouted:
        return []

    names = [
        f"{experts}.{{{','.join(map(str, sorted(numbers)))}}}"
        for experts, numbers in list(unrouted.items())[:_MOST_NAMED]
    ]
    more = f" and in {len(unrouted) - _MOST_NAMED} more layers" if len(unrouted) > _MOST_NAMED else ""

    return [
        f"no token was routed to {sum(map(len, unrouted.values()))} experts, which use the scale of the others of "
        f"their layer: {', '.join(names)}{more}; more texts (--samples) would reach them"
    ]

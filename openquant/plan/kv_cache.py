"""An FP8 cache of keys and values: which layers have one of their own, and the scales that an output has for it.

Always those of all layers: transformers fills the ones that a checkpoint lacks with anything (compressed-tensors).

    cache_layers(["model.layers.0.self_attn.k_proj"], entry, config)    # {0: "model.layers.0.self_attn"}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS
from ..formats.kv_cache import FLAG, SCALES, cache_scales, scale_for
from ..formats.numbers import E4M3
from ..patterns import MAX_DIGITS, compile_pattern, template
from ..registry.architecture import Architecture, absolute_patterns
from ..registry.rules import ModuleRules
from ..version import SGLANG
from ..weights.statistics import Calibration, StandIn
from .decisions import Decisions, Item, PassthroughTensor
from .serving import own_layers
from .sort import mtp_layer_finder

# Why a plan has such a scale.
CACHED = "keys and values in FP8"
_NO_CACHE = "leave --kv-cache out"


def cache_layers(modules: Iterable[str], entry: ModuleRules, config: dict[str, Any]) -> dict[int, str]:
    """The attention of each decoder layer that has a cache of keys and values of its own, by the layer's number.

    Args:
        modules: of a checkpoint.
        entry: the registry's.
        config: the part of config.json with the language model's sizes.

    Raises:
        PlanError: what is cached are no keys and values, or which layers do is not known.
    """
    model = entry.model
    if model.cache_refused is not None:
        raise PlanError(f"{model.name}: no engine loads scales of keys and values: {model.cache_refused}", _NO_CACHE)
    patterns = [(compile_pattern(absolute_patterns(model, [what.pattern])[0]), what) for what in model.cached]
    layer_of, drafted, own = compile_pattern(f"{model.layers}.**"), mtp_layer_finder(model, config), own_layers(config)
    found: dict[int, str] = {}
    for module in modules:
        what = next((what for pattern, what in patterns if pattern.fullmatch(module)), None)
        if what is None or drafted(module):
            continue
        if what.heads is None:
            raise PlanError(
                f"{model.name} has multi-head latent attention (MLA), whose cache has no scales of keys and values",
                _NO_CACHE,
            )
        match = layer_of.fullmatch(module)
        if match is None or not match[1].isdecimal() or len(match[1]) > MAX_DIGITS:
            raise PlanError(f"which layer {module} belongs to is not known, nor whether it has a cache", _NO_CACHE)
        if own is None or int(match[1]) < own:
            found[int(match[1])] = module.rpartition(".")[0]
    if not found or (model.rest and len(found) != own):
        raise PlanError(f"which layers of {model.name} cache keys and values is not known", _NO_CACHE)
    return dict(sorted(found.items()))


def add_scales(
    items: dict[str, list[Item]], seen: Checkpoint, layers: Mapping[int, str], calibration: Calibration | None
) -> list[str]:
    """Put the scales of all layers in the shards of their projections, in place of the source's, and say of what kind
    they are.

    Args:
        items: all tensors by shard, changed.
        seen: the source.
        layers: as cache_layers gives them.
        calibration: has the ranges of keys and values; None for the source's own scales, or 1.

    Raises:
        PlanError: the calibration has no range of a layer, or the source a scale that is not a single number.
    """
    known = cache_scales(seen.tensors)
    replaced = {name for both in known.values() for name in both if name is not None}
    for shard, held in items.items():
        items[shard] = [
            item for item in held if not (isinstance(item, PassthroughTensor) and item.tensor.name in replaced)
        ]
    paths, shard_of = set(layers.values()), dict[str, str]()
    for info in seen.tensors.values():
        path = info.module.rpartition(".")[0]
        if path in paths and info.name not in replaced:
            shard_of.setdefault(path, seen.where[info.name].shard)
    for number, path in layers.items():
        largest = _range(calibration, number) if calibration is not None else None
        for place, last in enumerate(SCALES):
            name, kept = f"{path}.{last}", known.get(number, (None, None))[place]
            made: float | TensorInfo = 1.0
            if largest is not None:
                made = scale_for(largest[place])
            elif kept is not None:
                made = _single(seen.tensors[kept])
            items[shard_of[path]].append(
                PassthroughTensor(TensorInfo(name, "F32", (1,)), template(name), CACHED, made=made)
            )
    if calibration is not None:
        return [_calibrated(calibration, layers)]
    count = sum(name is not None for number in layers for name in known.get(number, (None, None)))
    if count:
        return [f"{count} of {2 * len(layers)} scales of keys and values are the source's, all others 1"]
    return [
        f"scales of keys and values are 1 in all of {len(layers)} layers, which fits magnitudes of up to "
        f"{E4M3.largest:g} and loses nothing where most are above {2.0**-6:g}: those of nearly every model"
    ]


def _range(calibration: Calibration, number: int) -> tuple[float, float]:
    found = calibration.cached.get(number)
    if found is None:
        raise PlanError(
            f"the calibration has not seen keys and values of layer {number}",
            "make it again: openquant calibrate MODEL -o FILE; or leave --calibration out for scales of 1",
        )
    return found


def _single(info: TensorInfo) -> TensorInfo:
    if info.dtype not in FLOATS or math.prod(info.shape) != 1:
        raise PlanError(
            f"{info.name} is {info.dtype} {list(info.shape)}, not a single scale of keys or values",
            "give --calibration FILE for scales in its place, or leave --kv-cache out",
        )
    return info


def _calibrated(calibration: Calibration, layers: Mapping[int, str]) -> str:
    """Where the scales of a calibration are needed."""
    needed = [
        f"{path} (keys up to {keys:.4g}, values up to {values:.4g})"
        for number, path in layers.items()
        for keys, values in (calibration.cached[number],)
        if not all(1 <= largest <= E4M3.largest for largest in (keys, values))
    ]
    text = f"scales of keys and values are those of a calibration with {calibration.described}, as powers of two"
    if isinstance(calibration, StandIn):
        return text
    text += ": "
    if not needed:
        return f"{text}1 would have done in all of {len(layers)} layers"
    more = f" and {len(needed) - 3} more" if len(needed) > 3 else ""
    return f"{text}1 would have done in {len(layers) - len(needed)} of {len(layers)} layers, not in " + (
        f"{', '.join(needed[:3])}{more}"
    )


def serving_notes(model: Architecture, decisions: Decisions) -> list[str]:
    """What engines have to be told of a cache in FP8 beside the config, and who does not use its scales."""
    notes = []
    if decisions.scheme is not None and decisions.scheme.method == "fp8":
        notes.append(f"vLLM reads no cache in FP8 off this format: serve with {FLAG}")
    if model.sglang.ones and any(kept.made not in (None, 1.0) for kept in decisions.kept):
        notes.append(f"{SGLANG} takes 1 in place of these scales of keys and values, without a word")
    return notes

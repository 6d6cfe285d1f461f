"""The `quantization_config` of an output, and the names that it lists as engines look them up: what is ignored, what
has a scheme of its own.
"""

from __future__ import annotations

import re
from typing import Any

from ..formats.kv_cache import with_fp8_cache
from ..formats.schemes import Scheme
from ..registry.rules import ModuleRules, is_head
from .decisions import Decisions


def quantization_config(entry: ModuleRules, decisions: Decisions, cached: bool) -> dict[str, Any]:
    """What config.json says of a plan that has a scheme.

    Args:
        entry: the registry's.
        decisions: what becomes of each tensor.
        cached: whether keys and values are cached in FP8.
    """
    assert decisions.scheme is not None
    settings = decisions.scheme.config(ignored_names(entry, decisions), targets(entry, decisions))
    return with_fp8_cache(settings) if cached else settings


def ignored_names(entry: ModuleRules, decisions: Decisions) -> list[str]:
    """What must be listed as ignored: checkpoint names without .weight, and the engines' other names for them.

    SGLang has towers' modules under names that no rule tells, and takes whole subtrees: those it lists by a name
    in the fp8 format (layers/quantization/utils.py:51-64) and by an expression in the other.

    vLLM compares for equality (layers/quantization/utils/quant_utils.py:617-691, for compressed-tensors
    utils/config_utils.py:226-293); experts match by the path that holds them all, for compressed-tensors by the names
    of the first. lm_head is listed unless it is quantized: transformers would quantize one tied to the embedding.
    """
    quantized = [weight.module for weight, _ in decisions.kinds]
    names: dict[str, None] = {} if any(map(is_head, quantized)) else {"lm_head": None}
    modules = [
        keep.tensor.module
        for keep in decisions.kept
        if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight")
    ]
    for module in (*modules, *decisions.unquantized):
        experts = entry.experts(module)
        if experts:
            names[experts] = None
            # SGLang asks by these, whatever the projections are called (compressed_tensors.py:883).
            names |= {f"{experts}.0.{part}_proj": None for part in ("gate", "up", "down")}
        names[module] = None
    towers = [
        tower
        for tower in entry.model.towers
        if any(tower in module.split(".") for module in names)
        and not any(tower in module.split(".") for module in quantized)
    ]
    if decisions.scheme is not None and decisions.scheme.method == "compressed-tensors":
        towers = [f"re:(.*[.])?{tower}[.].*" for tower in towers]
    return [*entry.engine_names(names), *towers]


def targets(entry: ModuleRules, decisions: Decisions) -> dict[Scheme, list[str]]:
    """The names under which engines find the layers that have another scheme, by scheme; and the output head's.

    vLLM (quantization/compressed_tensors/utils.py:73-119) and compressed-tensors (utils/match.py:116-151)
    look for a layer's name before its class, so the group for all Linear layers does not get these. An output head
    is no Linear to vLLM, and is found by name only. Experts have one entry for each layer of them: they are many, and
    transformers takes an expression that says "experts" for theirs. vLLM renames no expression, so it begins at
    the number of the layer.
    """
    found: dict[Scheme, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    heads_too = any(is_head(weight.module) for weight, _ in decisions.kinds)
    for module in decisions.layers:
        head = heads_too and is_head(module)
        scheme = decisions.of(module).scheme if head or module in decisions.others else None
        if scheme is not None:
            modules, experts, heads = found.setdefault(scheme, ({}, {}, {}))
            path = entry.experts(module)
            if head:
                heads[f"re:(.*[.])?{module.rsplit('.', 1)[-1]}"] = None
            elif path:
                experts[path] = None
            else:
                modules[module] = None
    return {
        scheme: [
            *entry.engine_names(modules),
            *dict.fromkeys(_expression(path) for path in entry.engine_names(experts)),
            *heads,
        ]
        for scheme, (modules, experts, heads) in found.items()
    }


def _expression(path: str) -> str:
    """What matches all experts below a path, whatever an engine puts before the layer's number."""
    parts = path.split(".")
    number = next(number for number, part in enumerate(parts) if part.isdecimal())
    return "re:(.*[.])?" + "[.]".join([*map(re.escape, parts[number - 1 :]), ".*"])

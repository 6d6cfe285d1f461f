"""The output's `quantization_config`, with the names by which engines look up modules: the ignore list, and the targets
of schemes that only some layers have.
"""

from __future__ import annotations

import re
from typing import Any

from ..formats.numbers import with_fp8_cache
from ..formats.schemes import Scheme
from ..registry.rules import ModuleRules, is_embedding, is_head, is_table
from .decisions import Decisions


def quantization_config(entry: ModuleRules, decisions: Decisions, fp8_kv_cache: bool) -> dict[str, Any]:
    """Make the quantization_config of a plan that has a scheme.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.
        fp8_kv_cache: whether the output has scales for an FP8 KV cache.

    Returns:
        The value of the key `quantization_config` in config.json.
    """
    assert decisions.scheme is not None
    settings = decisions.scheme.config(ignored_names(entry, decisions), target_names(entry, decisions))
    return with_fp8_cache(settings) if fp8_kv_cache else settings


def ignored_names(entry: ModuleRules, decisions: Decisions) -> list[str]:
    """Return the ignore list: module names as in the checkpoint, and the engines' other names for them.

    vLLM compares names for equality (layers/quantization/utils/quant_utils.py:617-691, for compressed-tensors
    utils/config_utils.py:226-293). It looks up experts by the path that holds them all, in the compressed-tensors
    format by the names of the first expert.

    SGLang matches whole subtrees, by a name in the fp8 format (layers/quantization/utils.py:51-64) and by a regular
    expression in the other. Towers are listed so, because the engine renames the modules inside.

    lm_head is listed unless it is quantized, since transformers would quantize one that is tied to the embedding.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        Full module names, and for towers in the compressed-tensors format regular expressions that begin with "re:".
    """
    quantized = [weight.module for weight, _ in decisions.kinds]
    names: dict[str, None] = {} if any(map(is_head, quantized)) else {"lm_head": None}
    modules = [
        keep.tensor.module
        for keep in decisions.passthrough
        if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight")
    ]
    for module in (*modules, *decisions.unquantized):
        experts = entry.experts(module)
        if experts:
            names[experts] = None
            # SGLang looks up these names, whatever the projections are called (compressed_tensors.py:883).
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


def target_names(entry: ModuleRules, decisions: Decisions) -> dict[Scheme, list[str]]:
    """Return, for each scheme, the `targets` of layers that do not have the plan's own, of output head and embedding.

    vLLM (quantization/compressed_tensors/utils.py:73-119) and compressed-tensors (utils/match.py:116-151) look for a
    layer's name before its class, so these layers do not fall into the config group of all Linear layers. To vLLM an
    output head is not a Linear; it is found by name only. So is an embedding, or by its class if vLLM builds it without
    a name: "Embedding" is a part of VocabParallelEmbedding (quantization/utils/config_utils.py:392-411).

    There is one regular expression for all experts of a layer, because they are many and transformers recognizes
    experts by an expression that has "experts". vLLM does not rename modules in expressions, so each begins at the
    layer's number.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight.

    Returns:
        By scheme: full module names, and regular expressions that begin with "re:". Empty if all layers have the plan's
        scheme, and head and embedding are unquantized.
    """
    targets: dict[Scheme, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    has_tables = any(is_table(weight.module) for weight, _ in decisions.kinds)
    for module in decisions.layers:
        table = has_tables and is_table(module)
        scheme = decisions.of(module).scheme if table or module in decisions.overrides else None
        if scheme is not None:
            modules, experts, tables = targets.setdefault(scheme, ({}, {}, {}))
            path = entry.experts(module)
            if table and is_head(module):
                tables[f"re:(.*[.])?{module.rsplit('.', 1)[-1]}"] = None
            elif path:
                experts[path] = None
            else:
                modules[module] = None
            if is_embedding(module) and entry.model.embedding == "class":
                tables["Embedding"] = None
    return {
        scheme: [
            *entry.engine_names(modules),
            *dict.fromkeys(_experts_expression(path) for path in entry.engine_names(experts)),
            *tables,
        ]
        for scheme, (modules, experts, tables) in targets.items()
    }


def _experts_expression(path: str) -> str:
    """A regular expression for all experts below a path, with any prefix before the layer's number."""
    parts = path.split(".")
    number = next(number for number, part in enumerate(parts) if part.isdecimal())
    return "re:(.*[.])?" + "[.]".join([*map(re.escape, parts[number - 1 :]), ".*"])

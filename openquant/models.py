"""The registry: the entry of each architecture (registry/), by its class in config.json.

find_entry("Qwen3Model", config, modules).name      # "Qwen3ForCausalLM", of which it is the base class
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .patterns import compile_pattern
from .registry import dense, experts, hybrid, multimodal
from .registry.architecture import Architecture, FusedLayers
from .registry.parts import (
    ATTENTION,
    EMBEDDINGS,
    GATE_UP_TENSOR,
    IGNORED_CACHE_SCALES,
    MLP,
    NO_CLASS,
    UNREAD_BY_TRANSFORMERS,
    LayerPart,
    gated_mlp,
    model,
    routed_experts,
)

MODELS: dict[str, Architecture] = {
    entry.name: replace(
        entry,
        embedding=EMBEDDINGS.get(entry.name),
        transformers_reads_blocks=entry.name not in UNREAD_BY_TRANSFORMERS,
        sglang=replace(
            entry.sglang,
            refused=(*NO_CLASS.get(entry.name, ()), *entry.sglang.refused),
            ignores_cache_scales=entry.name in IGNORED_CACHE_SCALES,
        ),
    )
    for kind in (dense, experts, hybrid, multimodal)
    for entry in kind.ENTRIES
}

_MODELS = (
    *("model", "language_model.model", "model.language_model", "model.text_model", "thinker.model"),
    *("llm.model", "text_model.model"),
    *("model.decoder", "language_model.model.decoder", "transformer", "backbone", "gpt_neox"),
)
_EXPERTS = "{mlp,block_sparse_moe,feed_forward}.experts"
GENERIC = model(
    "generic",
    ATTENTION,
    LayerPart(
        (".{self_attn,attn,attention,self_attention}.{qkv_proj,out_proj,query_key_value,dense,wq,wk,wv,wo}",),
        fused=(FusedLayers(".{attn,attention}.{wq,wk,wv}"), FusedLayers(".{attn,attention}.{q,k,v}_proj")),
    ),
    LayerPart((".{attn,attention}.{q,k,v,o}_proj",)),
    MLP,
    GATE_UP_TENSOR,
    gated_mlp(".feed_forward"),
    gated_mlp(".{mlp,feed_forward}", "w1", "w3", "w2"),
    LayerPart((".mlp.{fc1,fc2,fc_in,fc_out,dense_h_to_4h,dense_4h_to_h}",)),
    gated_mlp(".{mlp,block_sparse_moe,feed_forward}.{shared_expert,shared_experts,shared_mlp}"),
    replace(routed_experts(f".{_EXPERTS}"), keep=()),
    replace(routed_experts(f".{_EXPERTS}", "w1", "w3", "w2"), keep=(), experts=()),
    layers=f"{{{','.join(_MODELS)}}}.{{layers,h,blocks}}.*",
    text_config="text_config",
    draft_layers="num_hidden_layers",
    rest="not known to be a projection of attention or MLP",
    decided="decided from names and shapes alone: look at the plan, and at what the engine makes of it",
)
"""For classes without an entry, if the user asks for it: projections with usual names are quantized, nothing else."""


# What the names of a base class, and of classes for tasks, have after the body's. They are those of transformers, vLLM
# (config/model.py:2322-2339) and SGLang (configs/model_config.py:2366-2385).
_BASE = ("Model", "EmbeddingModel", "ForTextEncoding")
_TASKS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForClassification", "ClassificationModel"),
    *("RewardModel", "ForRewardModel", "ForRewardModeling", "ForProcessRewardModel"),
    "ForSequenceClassificationWithNormal_Weights",
)
_ENDINGS = ("ForConditionalGeneration", "ForBlockDiffusion", "ForCausalLM")
# Bodies that transformers names otherwise than the class.
_IRREGULAR = {"MiniMaxM3VL": "MiniMaxM3SparseForConditionalGeneration"}
_OTHER_CLASS = re.compile(r"(\w+?)(Text|Bidirectional)?((?:For[A-Z]|(?:Embedding|Classification|Reward)?Model$)\w*)")


def find_entry(name: str, config: Mapping[str, Any], modules: Collection[str]) -> Architecture | None:
    """Find the entry of a class: its own, or that of the class whose body it has, as base classes and those for tasks.

    Args:
        name: the class in config.json's `architectures`: "Qwen3ForCausalLM", "Qwen3Model".
        config: config.json.
        modules: the modules of all tensors. If their names lack a prefix, so do the entry's patterns.

    Returns:
        The entry; None if no entry has the body, or if it is not known which head the class has.
    """
    if name in MODELS:
        return fit_prefix(MODELS[name], modules)
    model, suffix = find_body(name, config)
    if model is None or suffix not in (*_BASE, *_TASKS):
        return None
    if suffix in _BASE:
        return fit_prefix(replace(model, has_head=False), modules)
    return fit_prefix(model.with_task_head(), modules)


def find_body(name: str, config: Mapping[str, Any]) -> tuple[Architecture | None, str]:
    """Find the entry whose body a class has, by their names: that of Qwen3ForCausalLM for "Qwen3ForMyTask".

    Args:
        name: the class in config.json's `architectures`.
        config: config.json, which tells whether the body is a language model or a multimodal one.

    Returns:
        The entry, None if there is none; and what follows the body's name: "ForMyTask".
    """
    match = _OTHER_CLASS.fullmatch(name)
    if match is None:
        return None, ""
    body, infix, suffix = match.groups(default="")
    for stem in (body + infix, body):
        names = [stem + ending for ending in _ENDINGS]
        entries = [MODELS[name] for name in (*names, _IRREGULAR.get(stem)) if name in MODELS]
        nested = [entry for entry in entries if config_value(config, entry.text_config) is not None]
        flat = [entry for entry in entries if entry.text_config is None]
        if entries:
            return (nested or flat or entries[-1:])[0], suffix
    return None, suffix


def config_value(config: Mapping[str, Any], key: str | None) -> Any:
    """Return the value of a key of config.json.

    Args:
        config: the content of config.json, or a part of it.
        key: a key, or nested keys joined by dots: "text_config.hidden_size"; None for no key.

    Returns:
        The value; None if there is none.
    """
    if not key:
        return None

    inner: Any = config
    for part in key.split("."):
        if not isinstance(inner, Mapping):
            return None
        inner = inner.get(part)
    return inner


def fit_prefix(model: Architecture, modules: Collection[str]) -> Architecture:
    """Return an entry for the names of a checkpoint, which may lack a prefix, such as "model.", of the entry's names.

    Args:
        model: the entry.
        modules: the modules of all tensors.
    """
    is_layer = compile_pattern(f"{model.layers}.**").fullmatch
    if any(map(is_layer, modules)):
        return model
    for prefix in _prefixes(model.layers):
        if any(is_layer(prefix + module) for module in modules):
            return replace(model.without_prefix(prefix), has_head=False)
    return model


def _prefixes(layers: str) -> Iterator[str]:
    """What the names of decoder layers begin with: "model.", then "model.language_model."."""
    starts = layers[1:].partition("}")[0].split(",") if layers.startswith("{") else [re.split("[*{]", layers)[0]]
    for start in starts:
        parts = start.removesuffix(".").split(".")
        yield from (".".join(parts[:length]) + "." for length in range(1, len(parts) + 1))

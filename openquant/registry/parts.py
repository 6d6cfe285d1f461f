"""What entries are put together from: pieces of decoder layers, and facts of engines that several share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..version import VLLM
from .architecture import (
    EMBEDDING,
    HEAD,
    ROUTER,
    Architecture,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    RecurrentState,
    Refusal,
    SGLangLimits,
    SlidingWindows,
)


@dataclass(frozen=True)
class LayerPart:
    """A piece of a decoder layer that many architectures have; entries are put together from these.

    Attributes: as of Model.
    """

    compress: tuple[str, ...]
    fused: tuple[FusedLayers, ...] = ()
    splits: tuple[ParallelSplit, ...] = ()
    experts: tuple[ExpertLayout, ...] = ()
    keep: tuple[Keep, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    states: tuple[RecurrentState, ...] = ()


def gated(
    path: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    listed_as: str | None = None,
    sglang: str | None = "gate_up_proj",
) -> LayerPart:
    """Gate, up and down below `path`, the first two of which engines join."""
    return LayerPart(
        compress=(f"{path}.{{{gate},{up},{down}}}",),
        fused=(FusedLayers(f"{path}.{{{gate},{up}}}", listed_as, sglang),),
        splits=(ParallelSplit(f"{path}.{{{gate},{up}}}", "out"), ParallelSplit(f"{path}.{down}", "in")),
    )


def plain(path: str, up: str = "up_proj", down: str = "down_proj") -> LayerPart:
    """An MLP without a gate."""
    return LayerPart(
        (f"{path}.{{{up},{down}}}",), (), (ParallelSplit(f"{path}.{up}", "out"), ParallelSplit(f"{path}.{down}", "in"))
    )


def routed(
    path: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    experts: ExpertLayout | None = None,
) -> LayerPart:
    """The experts below `path`, one module each, and the router in its usual place beside them."""
    each = gated(f"{path}.*", gate, up, down, sglang=None)
    router = Keep(f"{path.rsplit('.', 1)[0]}.gate", ROUTER)
    return replace(each, experts=(experts or ExpertLayout(path),), keep=(router,))


def model(
    name: str, *parts: LayerPart, layers: str = "model.layers.*", keep: tuple[Keep, ...] = (), **more: Any
) -> Architecture:
    """An entry of these parts; embedding and output head are kept wherever a wrapper puts them."""
    return Architecture(
        name,
        layers=layers,
        compress=tuple(pattern for part in parts for pattern in part.compress),
        keep=(EMBEDDING, HEAD, *(found for part in parts for found in part.keep), *keep),
        fused=tuple(found for part in parts for found in part.fused),
        splits=tuple(found for part in parts for found in part.splits),
        experts=tuple(found for part in parts for found in part.experts),
        cached=tuple(found for part in parts for found in part.cached),
        states=tuple(found for part in parts for found in part.states),
        **more,
    )


# Where a wrapper has its language model: as the Hub's older files say it, and transformers 4.52 and later.
WRAPPED = "{language_model.model,model.language_model}.layers.*"

HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"

# What layers are connected by that have more than one stream of hidden states.
STREAMS = "mixes streams of hidden states"


def attention(out: str = "o_proj", listed_as: str | None = None, path: str = ".self_attn") -> LayerPart:
    """q, k and v below `path`, which engines join, and the projection after them."""
    return LayerPart(
        compress=(f"{path}.{{q_proj,k_proj,v_proj,{out}}}",),
        fused=(FusedLayers(f"{path}.{{q,k,v}}_proj", listed_as, "qkv_proj"),),
        splits=(
            ParallelSplit(f"{path}.q_proj", "out", HEADS),
            ParallelSplit(f"{path}.{{k,v}}_proj", "out", KV_HEADS, replicated=True),
            ParallelSplit(f"{path}.{out}", "in", HEADS),
        ),
        cached=(CachedRows(f"{path}.{{k,v}}_proj", KV_HEADS),),
    )


ATTENTION, MLP = attention(), gated(".mlp")
IF_ASKED = SlidingWindows(asked="use_sliding_window")
PATTERN = "sliding_window_pattern"

# Facts of SGLang, each from running its loader (tests/serve/test_sglang.py).
# models/llama.py:723 and llama4's renames every weight_scale_inv to weight_scale, which no block has.
SCALES_LOST = SGLangLimits(
    (Refusal("block", "fp8", "it drops the scales of blocks without a word", "--format compressed-tensors loads"),)
)
HEAD_IN_BFLOAT16 = "it builds the output head in bfloat16 whatever is stored"
# Why vLLM loads no scales of keys and values (tests/serve/test_serve_cache_scales.py asks it about all entries).
# models/lfm2.py:193
NAMELESS_CACHE = f"{VLLM} builds its attention without quantization"
SEVERAL_CACHES = f"{VLLM} has several caches of each layer, and looks their scales up by the name of one"
ONES_TAKEN = f"{VLLM} takes 1 in their place, without a word"
# Their load_weights look for a parameter of every name.
NO_CACHE = "it has no place for scales of keys and values"
NO_SCALES = SGLangLimits(cache=NO_CACHE)
# Their attention is built without such scales (RadixAttention without quant_config), or load_weights skips them.
SGLANG_ONES = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
    *("Glm4ForCausalLM", "Glm4MoeForCausalLM", "Starcoder2ForCausalLM", "PhiForCausalLM", "GraniteMoeForCausalLM"),
    *("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "ExaoneMoeForCausalLM", "AfmoeForCausalLM"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
)
# models/olmo.py and stablelm.py give no quantization to their attention.
PLAIN_ATTENTION = SGLangLimits(plain=(".self_attn.*",), head=HEAD_IN_BFLOAT16, cache=NO_CACHE)
# Run on its Transformers backend, whose names it prefixes, "Linear" among them.
NO_GROUPS = SGLangLimits(
    (
        Refusal(
            None,
            "compressed-tensors",
            "it finds no group of the compressed-tensors format for these layers",
            "--scheme tensor and -w 128 load",
        ),
    ),
    cache=NO_CACHE,
)
# Layers are built without their names.
FORMATS = ("fp8", "compressed-tensors")
NAMELESS = SGLangLimits(alike=FORMATS)
# models/qwen2_vl.py:446 and its like rename what config.json lists, to what they then do not look for.
RENAMED = SGLangLimits(alike=FORMATS[1:])
# Gate and up as one tensor: an engine that cuts it apart for its ranks does so in the middle.
GATE_UP_TENSOR = LayerPart(
    (".mlp.{gate_up_proj,down_proj}",),
    splits=(ParallelSplit(".mlp.gate_up_proj", "out", parts=(None, None)), ParallelSplit(".mlp.down_proj", "in")),
)

# SGLang layers/quantization/utils.py:57-61 asks for the members of what these files hold as one.
FUSED_NAMES = (
    *((".qkv_proj", f".{member}_proj") for member in "qkv"),
    *((".gate_up_proj", f".{member}_proj") for member in ("gate", "up")),
)


def wrapped(text: Architecture, name: str, *towers: str, layers: str = WRAPPED, **more: Any) -> Architecture:
    """An entry of a language model inside a wrapper, all of whose other modules stay as they are."""
    kept = tuple(Keep(f"{{{tower},model.{tower}}}.**", "vision or audio") for tower in towers)
    more = {"text_config": "text_config", "towers": towers, **more}
    more = {"sglang": SGLangLimits(), **more}
    return replace(text, name=name, layers=layers, keep=(*text.keep, *kept), **more)

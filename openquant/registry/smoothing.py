"""Smoothing rules that entries have. tests/calibration/test_mappings.py checks them in transformers' models."""

from __future__ import annotations

from dataclasses import replace

from .architecture import SmoothingRule
from .parts import KV_HEADS

V_TO_O = SmoothingRule(".self_attn.v_proj", (".self_attn.o_proj",), heads=KV_HEADS)
UP_TO_DOWN = SmoothingRule(".mlp.up_proj", (".mlp.down_proj",))
NORM_TO_QKV = SmoothingRule(".input_layernorm", (".self_attn.{q,k,v}_proj",))
DENSE = (NORM_TO_QKV, SmoothingRule(".post_attention_layernorm", (".mlp.{gate,up}_proj",)), V_TO_O, UP_TO_DOWN)
# Gemma's norms multiply by 1 + w.
GEMMA = (*(replace(rule, offset=1) for rule in DENSE[:2]), *DENSE[2:])
GEMMA2_MLP = SmoothingRule(".pre_feedforward_layernorm", (".mlp.{gate,up}_proj",), offset=1)
GEMMA2 = (replace(NORM_TO_QKV, offset=1), GEMMA2_MLP, V_TO_O, UP_TO_DOWN)
# Without q, k and v: smoothing them is less accurate than rounding to nearest (llm-compressor issue 2522).
GEMMA3 = (GEMMA2_MLP, V_TO_O, UP_TO_DOWN)
# Gate and up in one tensor, of which up is the last part.
FUSED_MLP = (
    SmoothingRule(".post_attention_layernorm", (".mlp.gate_up_proj",)),
    SmoothingRule(".mlp.gate_up_proj", (".mlp.down_proj",), last=True),
)
GLM = (NORM_TO_QKV, V_TO_O, *FUSED_MLP)
PHI3 = (
    SmoothingRule(".input_layernorm", (".self_attn.qkv_proj",)),
    SmoothingRule(".self_attn.qkv_proj", (".self_attn.o_proj",), heads=KV_HEADS, last=True),
    *FUSED_MLP,
)


def expert_smoothing_rules(mlp: str, gate: str, up: str, down: str, *siblings: str) -> tuple[SmoothingRule, ...]:
    """Return the rules of a decoder layer with routed experts.

    Args:
        mlp: pattern of the MoE module, relative to the decoder layer: ".mlp". Below it are a router named "gate" and
            the module "experts".
        gate: last segment of the name of an expert's gate projection.
        up: last segment of the name of an expert's up projection.
        down: last segment of the name of an expert's down projection.
        siblings: patterns of other modules that read the same norm, such as shared experts.

    Returns:
        Pairs of smooth_layer and balance_layers: norm to q, k, v; norm to router, experts and siblings; v to o; up to
        down.
    """
    balance_layers = (f"{mlp}.gate", f"{mlp}.experts.*.{{{gate},{up}}}", *siblings)
    return (
        NORM_TO_QKV,
        SmoothingRule(".post_attention_layernorm", balance_layers),
        V_TO_O,
        SmoothingRule(f"{mlp}.experts.*.{up}", (f"{mlp}.experts.*.{down}",)),
    )


MIXTRAL = expert_smoothing_rules(".block_sparse_moe", "w1", "w3", "w2")
_QWEN_EXPERTS = (".mlp", "gate_proj", "up_proj", "down_proj", ".mlp.{gate,up}_proj")
QWEN3_MOE = (*expert_smoothing_rules(*_QWEN_EXPERTS), UP_TO_DOWN)
QWEN2_MOE = (
    *expert_smoothing_rules(*_QWEN_EXPERTS, ".mlp.shared_expert_gate", ".mlp.shared_expert.{gate,up}_proj"),
    UP_TO_DOWN,
    SmoothingRule(".mlp.shared_expert.up_proj", (".mlp.shared_expert.down_proj",)),
)

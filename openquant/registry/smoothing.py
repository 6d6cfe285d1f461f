"""Smoothing rules by architecture. tests/calibration/test_mappings.py checks them in transformers' models."""

from __future__ import annotations

from dataclasses import replace

from .architecture import SmoothingRule
from .parts import KV_HEADS

# There are no rules for architectures whose norms follow the layers (OLMo 2, Exaone 4) or whose attention and MLP read
# the same norm (Cohere), nor for v where it has a norm (Gemma 4).
V_TO_O = SmoothingRule(".self_attn.v_proj", (".self_attn.o_proj",), heads=KV_HEADS)
UP_TO_DOWN = SmoothingRule(".mlp.up_proj", (".mlp.down_proj",))
NORM_TO_QKV = SmoothingRule(".input_layernorm", (".self_attn.{q,k,v}_proj",))
DENSE = (NORM_TO_QKV, SmoothingRule(".post_attention_layernorm", (".mlp.{gate,up}_proj",)), V_TO_O, UP_TO_DOWN)
# Gemma's norms multiply by 1 + w.
GEMMA2_MLP = SmoothingRule(".pre_feedforward_layernorm", (".mlp.{gate,up}_proj",), offset=1)
# Gate and up in one tensor, of which up is the last part.
FUSED_MLP = (
    SmoothingRule(".post_attention_layernorm", (".mlp.gate_up_proj",)),
    SmoothingRule(".mlp.gate_up_proj", (".mlp.down_proj",), last=True),
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


QWEN_EXPERTS = (".mlp", "gate_proj", "up_proj", "down_proj", ".mlp.{gate,up}_proj")
SMOOTHING_RULES: dict[str, tuple[SmoothingRule, ...]] = {
    **{
        f"{name}ForCausalLM": DENSE
        for name in (
            *("Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3", "Granite", "SmolLM3", "SeedOss", "Cwm", "Ernie4_5"),
            *("HunYuanDenseV1", "MiMo"),
        )
    },
    "GemmaForCausalLM": tuple(replace(rule, offset=1) for rule in DENSE[:2]) + DENSE[2:],
    "Gemma2ForCausalLM": (replace(NORM_TO_QKV, offset=1), GEMMA2_MLP, V_TO_O, UP_TO_DOWN),
    # Without q, k and v: smoothing them is less accurate than rounding to nearest (llm-compressor issue 2522).
    "Gemma3ForCausalLM": (GEMMA2_MLP, V_TO_O, UP_TO_DOWN),
    "Phi3ForCausalLM": (
        SmoothingRule(".input_layernorm", (".self_attn.qkv_proj",)),
        SmoothingRule(".self_attn.qkv_proj", (".self_attn.o_proj",), heads=KV_HEADS, last=True),
        *FUSED_MLP,
    ),
    "Glm4ForCausalLM": (NORM_TO_QKV, V_TO_O, *FUSED_MLP),
    "GlmForCausalLM": (NORM_TO_QKV, V_TO_O, *FUSED_MLP),
    "Qwen3MoeForCausalLM": (*expert_smoothing_rules(*QWEN_EXPERTS), UP_TO_DOWN),
    "Qwen2MoeForCausalLM": (
        *expert_smoothing_rules(*QWEN_EXPERTS, ".mlp.shared_expert_gate", ".mlp.shared_expert.{gate,up}_proj"),
        UP_TO_DOWN,
        SmoothingRule(".mlp.shared_expert.up_proj", (".mlp.shared_expert.down_proj",)),
    ),
    "MixtralForCausalLM": expert_smoothing_rules(".block_sparse_moe", "w1", "w3", "w2"),
}

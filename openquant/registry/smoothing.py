"""Where layers have their inputs from, by architecture. tests/plan/test_folding.py holds it in transformers' models."""

from __future__ import annotations

from dataclasses import replace

from .architecture import SmoothingRule
from .parts import KV_HEADS

# None where norms come after layers (OLMo 2, Exaone 4) or one is read by attention and MLP (Cohere), nor of v where it
# has a norm (Gemma 4).
OUT_FOLD = SmoothingRule(".self_attn.v_proj", (".self_attn.o_proj",), heads=KV_HEADS)
DOWN_FOLD = SmoothingRule(".mlp.up_proj", (".mlp.down_proj",))
QKV_FOLD = SmoothingRule(".input_layernorm", (".self_attn.{q,k,v}_proj",))
DENSE_FOLDS = (QKV_FOLD, SmoothingRule(".post_attention_layernorm", (".mlp.{gate,up}_proj",)), OUT_FOLD, DOWN_FOLD)
# Gemma's norms multiply by 1 + w.
GEMMA2_MLP_FOLD = SmoothingRule(".pre_feedforward_layernorm", (".mlp.{gate,up}_proj",), offset=1)
# Gate and up as one, whose upper rows are the gate's.
FUSED_FOLDS = (
    SmoothingRule(".post_attention_layernorm", (".mlp.gate_up_proj",)),
    SmoothingRule(".mlp.gate_up_proj", (".mlp.down_proj",), last=True),
)


def expert_smoothing_rules(mlp: str, gate: str, up: str, down: str, *beside: str) -> tuple[SmoothingRule, ...]:
    """Foldings around experts below a module, which its router and other modules beside read with them."""
    readers = (f"{mlp}.gate", f"{mlp}.experts.*.{{{gate},{up}}}", *beside)
    return (
        QKV_FOLD,
        SmoothingRule(".post_attention_layernorm", readers),
        OUT_FOLD,
        SmoothingRule(f"{mlp}.experts.*.{up}", (f"{mlp}.experts.*.{down}",)),
    )


QWEN_EXPERTS = (".mlp", "gate_proj", "up_proj", "down_proj", ".mlp.{gate,up}_proj")
FOLDS: dict[str, tuple[SmoothingRule, ...]] = {
    **{
        f"{name}ForCausalLM": DENSE_FOLDS
        for name in (
            *("Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3", "Granite", "SmolLM3", "SeedOss", "Cwm", "Ernie4_5"),
            *("HunYuanDenseV1", "MiMo"),
        )
    },
    "GemmaForCausalLM": tuple(replace(fold, offset=1) for fold in DENSE_FOLDS[:2]) + DENSE_FOLDS[2:],
    "Gemma2ForCausalLM": (replace(QKV_FOLD, offset=1), GEMMA2_MLP_FOLD, OUT_FOLD, DOWN_FOLD),
    # Not into q, k and v: accuracy fell below that of rounding to nearest (llm-compressor issue 2522).
    "Gemma3ForCausalLM": (GEMMA2_MLP_FOLD, OUT_FOLD, DOWN_FOLD),
    "Phi3ForCausalLM": (
        SmoothingRule(".input_layernorm", (".self_attn.qkv_proj",)),
        SmoothingRule(".self_attn.qkv_proj", (".self_attn.o_proj",), heads=KV_HEADS, last=True),
        *FUSED_FOLDS,
    ),
    "Glm4ForCausalLM": (QKV_FOLD, OUT_FOLD, *FUSED_FOLDS),
    "GlmForCausalLM": (QKV_FOLD, OUT_FOLD, *FUSED_FOLDS),
    "Qwen3MoeForCausalLM": (*expert_smoothing_rules(*QWEN_EXPERTS), DOWN_FOLD),
    "Qwen2MoeForCausalLM": (
        *expert_smoothing_rules(*QWEN_EXPERTS, ".mlp.shared_expert_gate", ".mlp.shared_expert.{gate,up}_proj"),
        DOWN_FOLD,
        SmoothingRule(".mlp.shared_expert.up_proj", (".mlp.shared_expert.down_proj",)),
    ),
    "MixtralForCausalLM": expert_smoothing_rules(".block_sparse_moe", "w1", "w3", "w2"),
}

"""Latent attention (MLA), with experts: DeepSeek V3 and what was made after it."""

from __future__ import annotations

from dataclasses import replace

from .entry import Cached, Joined, Keep, Refusal, SGLang, Split
from .experts import DRAFTED_MLPS, ROUTED
from .parts import HEADS, Part, model

# Latent attention. vLLM 0.32.0 multiplies kv_b_proj out as it loads (layers/quantization/utils/quant_utils.py:511):
# in FP8 it would cost accuracy and save nothing.
LATENT = Part(
    (".self_attn.{q_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj}",),
    # models/deepseek_v2.py:1051; SGLang 0.5.23 models/deepseek_v2.py
    joined=(
        Joined(".self_attn.{q_a_proj,kv_a_proj_with_mqa}", "fused_qkv_a_proj", sglang="fused_qkv_a_proj_with_mqa"),
    ),
    splits=(Split(".self_attn.{q_proj,q_b_proj}", "out", HEADS), Split(".self_attn.o_proj", "in", HEADS)),
    keep=(Keep(".self_attn.kv_b_proj", "engines decode it when they load it", divided=True),),
    cached=(Cached(".self_attn.kv_a_proj_with_mqa", None),),
)
# SGLang puts one of these behind the other whatever it is: shapes and global scales too.
LATENT_UNPACKED = (".self_attn.q_a_proj",)
DEEPSEEK_V3 = model(
    "DeepseekV3ForCausalLM",
    LATENT,
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    sglang=SGLang(unpacked=LATENT_UNPACKED),
)

# The projections of one layer's index over the tokens; small, and vLLM 0.32.0 (vllm/models/deepseek_v32) reads
# two of the three unquantized.
INDEXER = Keep(".self_attn.indexer.{wq_b,wk,weights_proj}", "chooses the tokens attended to")
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepseekV32ForCausalLM",
    keep=(*DEEPSEEK_V3.keep, INDEXER),
    # vLLM 0.32.0 model_executor/layers/attention/mla_attention.py:1365: 512 codes, 4 scales, 64 numbers in bfloat16;
    # of the index 128 codes and a scale, whatever the rest is in (vllm/models/deepseek_v32/common).
    cached=(
        Cached(".self_attn.kv_a_proj_with_mqa", None, fp8=656),
        Cached(".self_attn.indexer.wk", None, fp8=132, bf16=132),
    ),
)

ENTRIES = (
    replace(DEEPSEEK_V3, name="DeepseekV2ForCausalLM"),
    DEEPSEEK_V3,
    replace(
        DEEPSEEK_V3,
        name="Glm4MoeLiteForCausalLM",
        sglang=SGLang(
            (Refusal("tensor", "fp8", "it joins scales as if they had rows", "--scheme channel and -w 128 load"),),
            unpacked=LATENT_UNPACKED,
        ),
    ),
    DEEPSEEK_V32,
    replace(DEEPSEEK_V32, name="GlmMoeDsaForCausalLM"),
)

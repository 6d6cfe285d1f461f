"""Latent attention (MLA), with experts: DeepSeek V3 and what was made after it."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import (
    EMBEDDING,
    HEAD,
    MTP_LAYER,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    Refusal,
    SGLangLimits,
)
from .experts import DRAFTED_MLPS, ROUTED, STACKED_EXPERTS
from .parts import BUILT_UNQUANTIZED, HEADS, MLP, STREAMS, LayerPart, gated_mlp, model, routed_experts


# Latent attention (MLA). vLLM dequantizes kv_b_proj at load (layers/quantization/utils/quant_utils.py:511), so
# quantizing it would cost accuracy and save nothing.
def latent(path: str, out: str = "o_proj") -> LayerPart:
    """Return latent attention (MLA): its projections below `path`.

    Args:
        path: pattern of the attention module, relative to the decoder layer: ".self_attn".
        out: last segment of the output projection's name.

    Returns:
        Patterns of the quantized and kept projections, and how engines fuse, divide and cache them.
    """
    return LayerPart(
        (f"{path}.{{q_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,{out}}}",),
        # models/deepseek_v2.py:1051; SGLang models/deepseek_v2.py
        fused=(
            FusedLayers(
                f"{path}.{{q_a_proj,kv_a_proj_with_mqa}}", "fused_qkv_a_proj", sglang="fused_qkv_a_proj_with_mqa"
            ),
        ),
        splits=(
            ParallelSplit(f"{path}.{{q_proj,q_b_proj}}", "out", HEADS),
            ParallelSplit(f"{path}.{out}", "in", HEADS),
        ),
        keep=(Keep(f"{path}.kv_b_proj", "engines decode it when they load it", divided=True),),
        cached=(CachedRows(f"{path}.kv_a_proj_with_mqa", None),),
    )


LATENT = latent(".self_attn")
# SGLang concatenates all tensors of these two, shapes and global scales too.
LATENT_UNPACKED = (".self_attn.q_a_proj",)
DEEPSEEK_V3 = model(
    "DeepseekV3ForCausalLM",
    LATENT,
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    sglang=SGLangLimits(unpacked=LATENT_UNPACKED),
)

# The indexer of sparse attention: small projections, of which vLLM (vllm/models/deepseek_v32) reads two of three
# unquantized.
INDEXER = Keep(".self_attn.indexer.{wq_b,wk,weights_proj}", "chooses the tokens attended to")
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepseekV32ForCausalLM",
    keep=(*DEEPSEEK_V3.keep, INDEXER),
    # vLLM model_executor/layers/attention/mla_attention.py:1365: 512 codes, 4 scales, 64 bfloat16 values. The indexer
    # has 128 codes and a scale, whatever the cache's dtype (vllm/models/deepseek_v32/common).
    cached=(
        CachedRows(".self_attn.kv_a_proj_with_mqa", None, fp8=656),
        CachedRows(".self_attn.indexer.wk", None, fp8=132, bf16=132),
    ),
)

# One KV head whose keys are values too, low-rank queries and outputs; vLLM models/deepseek_v4.
SHARED_KEYS = LayerPart(
    (".attn.{wq_a,wkv,wq_b,wo_a,wo_b}", ".attn.indexer.wq_b"),
    fused=(FusedLayers(".attn.{wq_a,wkv}"),),
    splits=(
        ParallelSplit(".attn.wq_b", "out", HEADS),
        ParallelSplit(".attn.wo_a", "out", "o_groups"),
        ParallelSplit(".attn.wo_b", "in", "o_groups"),
    ),
    keep=(
        # models/deepseek_v4/compressor.py:276 and models/deepseek_v4/attention.py:986: built without quantization.
        Keep(".attn{,.indexer}.compressor.{wkv,wgate,ape}", "compresses keys and values"),
        Keep(".attn.indexer.weights_proj", "chooses the tokens attended to"),
    ),
)
# nvidia/mtp.py, which has no packed_modules_mapping.
V4_DRAFTS = LayerPart(
    (),
    fused=(
        FusedLayers("mtp.*.attn.{wq_a,wkv}", "fused_wqa_wkv"),
        FusedLayers("mtp.*.ffn.shared_experts.{w1,w3}", "gate_up_proj"),
    ),
    experts=(ExpertLayout("mtp.*.ffn.experts"),),
    keep=(Keep("mtp.**", MTP_LAYER),),
)
DEEPSEEK_V4 = model(
    "DeepseekV4ForCausalLM",
    SHARED_KEYS,
    V4_DRAFTS,
    gated_mlp(".ffn.shared_experts", "w1", "w3", "w2"),
    routed_experts(".ffn.experts", "w1", "w3", "w2", router=".ffn.gate{,.tid2eid}"),
    layers="layers.*",
    keep=(
        Keep("embed", EMBEDDING.why, divided=True),
        Keep("head", HEAD.why, divided=True),
        Keep("hc_head_fn", "mixes residual streams"),
        Keep(".hc_{attn,ffn}_fn", "mixes residual streams"),
    ),
    beyond=(
        ("mtp.*.ffn.shared_experts.w2", "model.layers.{}.ffn.shared_experts.down_proj"),
        ("mtp.*.", "model.layers.{}."),
    ),
    spellings=(("layers.", "model.layers."),),
    renames=((".shared_experts.w2", ".shared_experts.down_proj"),),
    # models/deepseek_v4/nvidia/model.py:1831 builds it without a quantization.
    head_refused=BUILT_UNQUANTIZED,
    transformers_reads_blocks=False,
    # models/deepseek_v4/attention.py:93
    cache_refused=f"{VLLM} has scales of its own in its cache, which is in FP8 as it is",
    refused=(
        # models/deepseek_v4/nvidia/ops/o_proj.py:83 multiplies codes with block scales. For other formats the CPU
        # loader looks for names that they do not have (models/deepseek_v4/cpu/model.py:810).
        Refusal("tensor", "fp8", f"{VLLM} multiplies by its wo_a in 128x128 blocks", "-w 128 loads"),
        Refusal(
            None, "compressed-tensors", f"{VLLM} looks for scales of the fp8 format", "-w 128 in that format loads"
        ),
    ),
    # models/deepseek_v4/quant_config.py:66: experts are MXFP4 unless config.json says otherwise.
    writes=(("block", "expert_dtype", "fp8"),),
)

# An output gate of attention, and several streams of hidden states.
HY_V4_DRAFT = "model.mtp_layers.*"
HY_V4 = model(
    "HYV4ForCausalLM",
    replace(LATENT, cached=DEEPSEEK_V32.cached),
    LayerPart((".self_attn.linear_gate",), splits=(ParallelSplit(".self_attn.linear_gate", "out", HEADS),)),
    *DRAFTED_MLPS,
    STACKED_EXPERTS,
    keep=(
        INDEXER,
        # vLLM models/hy_v4/nvidia/hc.py:63 builds them without a quantization.
        Keep(".hc_{attn,mlp}_layer.hc_pre.hc_fn", STREAMS),
        Keep("model.hc_head.hc_head_fn", STREAMS),
        Keep(f"{HY_V4_DRAFT}.**", MTP_LAYER),
    ),
    # models/hy_v4/nvidia/mtp.py:267 renames the ignore list of one of the formats so; all published models have 78
    # layers.
    renames=(("model.mtp_layers.0.", "model.layers.78."),),
    # SGLang models/hunyuan_v4.py:799
    sglang=SGLangLimits(
        tuple(
            Refusal(scheme, format, "it takes every scale for one of blocks in the fp8 format", "-w 128 loads")
            for scheme, format in (("tensor", "fp8"), (None, "compressed-tensors"))
        )
    ),
    transformers_reads_blocks=False,
)

# Each layer has two numbered attentions and MLPs. Some experts are identities, without weights.
LONGCAT_DRAFT = "model.mtp.layers.0."
LONGCAT = model(
    "LongcatFlashForCausalLM",
    latent(".self_attn.*"),
    gated_mlp(".mlps.*"),
    routed_experts(".mlp.experts", router=".mlp.router.classifier"),
    # vLLM models/longcat_flash_mtp.py, which has no packed_modules_mapping.
    LayerPart(
        (),
        fused=(
            FusedLayers(f"{LONGCAT_DRAFT}self_attn.{{q_a_proj,kv_a_proj_with_mqa}}", "fused_qkv_a_proj"),
            FusedLayers(f"{LONGCAT_DRAFT}transformer_layer.mlp.{{gate,up}}_proj", "gate_up_proj"),
        ),
        keep=(Keep("model.mtp.**", MTP_LAYER),),
    ),
    # :85 counts on from attentions, not layers; all published models have 28 layers of two each. :45 has no prefix of
    # it.
    renames=(
        (f"{LONGCAT_DRAFT}transformer_layer.", "model.layers.56."),
        (LONGCAT_DRAFT, "model.layers.56."),
        (f"{LONGCAT_DRAFT}eh_proj", "eh_proj"),
    ),
    # transformers modeling_longcat_flash.py:170 requires rows of gate and up for the identity experts too.
    transformers_reads_blocks=False,
)

# vLLM models/minicpm3.py:88 fuses nothing, builds q_a_proj without a name, and caches keys and values of every head:
# keys as wide as queries, and values padded to that. SGLang decodes kv_b_proj (models/minicpm3.py:505).
MINICPM3 = model(
    "MiniCPM3ForCausalLM",
    replace(LATENT, fused=(), cached=(CachedRows(".self_attn.q_b_proj", HEADS, equal_parts=1),)),
    MLP,
    nameless=(".self_attn.q_a_proj",),
)

ENTRIES = (
    LONGCAT,
    replace(DEEPSEEK_V3, name="DeepseekV2ForCausalLM", draft_layers=None),
    DEEPSEEK_V3,
    # It has one more norm, after the experts.
    replace(DEEPSEEK_V3, name="AXK1ForCausalLM", draft_layers=None),
    MINICPM3,
    replace(
        DEEPSEEK_V3,
        name="Glm4MoeLiteForCausalLM",
        sglang=SGLangLimits(
            (Refusal("tensor", "fp8", "it concatenates scales that have no rows", "--scheme channel and -w 128 load"),),
            unpacked=LATENT_UNPACKED,
        ),
    ),
    DEEPSEEK_V32,
    replace(DEEPSEEK_V32, name="GlmMoeDsaForCausalLM"),
    DEEPSEEK_V4,
    HY_V4,
)

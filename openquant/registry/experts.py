"""Mixtures of experts, with ordinary or latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import (
    EMBEDDING,
    HEAD,
    MTP_LAYER,
    ROUTER,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    Refusal,
    SGLangLimits,
    SlidingWindows,
)
from .parts import (
    ATTENTION,
    BUILT_UNQUANTIZED,
    FORMATS,
    GATE_UP,
    HEAD_IN_BFLOAT16,
    HEADS,
    IF_ENABLED,
    MIXTRAL_SMOOTHING,
    MLP,
    NAMELESS_CACHE,
    NO_CACHE,
    NO_SCALES,
    PATTERN,
    QKV,
    QWEN2_MOE_SMOOTHING,
    QWEN3_MOE_SMOOTHING,
    SCALES_LOST,
    STREAMS,
    LayerPart,
    attention,
    gated_mlp,
    joined_attention,
    model,
    plain,
    routed_experts,
    sglang_refuses,
    stacked_experts,
)

MIXTRAL = model(
    "MixtralForCausalLM",
    ATTENTION,
    routed_experts(".block_sparse_moe.experts", "w1", "w3", "w2"),
    # SGLang models/mixtral.py:303.
    spellings=(("model.layers.", "layers."),),
    sglang=SGLangLimits(head=HEAD_IN_BFLOAT16),
    smoothing=MIXTRAL_SMOOTHING,
)

# vLLM models/phimoe.py; SGLang models/phimoe.py.
PHI_MOE = replace(
    MIXTRAL,
    name="PhiMoEForCausalLM",
    spellings=(),
    # models/phimoe.py:511
    head_refused=BUILT_UNQUANTIZED,
    sglang=SGLangLimits(),
)

SHARED_EXPERT = replace(gated_mlp(".mlp.shared_expert"), keep=(Keep(".mlp.shared_expert_gate", ROUTER),))
SHARED_EXPERTS = gated_mlp(".mlp.shared_experts")
ROUTED = routed_experts(".mlp.experts")

QWEN2_MOE = model(
    "Qwen2MoeForCausalLM", ATTENTION, MLP, SHARED_EXPERT, ROUTED, windows=IF_ENABLED, smoothing=QWEN2_MOE_SMOOTHING
)

QWEN3_MOE = model(
    "Qwen3MoeForCausalLM",
    ATTENTION,
    # qwen3_moe.py:575 is meant to map gate_up_proj to its members if mlp_only_layers is not empty, but the built
    # engine's quant_config never has that entry.
    gated_mlp(".mlp", listed_as="gate_up_proj"),
    # vLLM models/qwen3_moe.py:170 builds the router with quant_config, so the router must be in the ignore list.
    ROUTED,
    windows=IF_ENABLED,
    smoothing=QWEN3_MOE_SMOOTHING,
)

# Stacked experts [E, 2I, H] and [E, H, I] are siblings of the module in which vLLM has them; split ones have the usual
# names in it (vLLM models/granitemoehybrid.py:409, models/granitemoe.py:305).
GRANITE_EXPERTS = routed_experts(
    ".block_sparse_moe.experts",
    experts=stacked_experts(".block_sparse_moe.experts", "input_linear", "output_linear", beside=True),
    router=".block_sparse_moe.router.layer",
)
# The shared expert has gate and up in one tensor too.
GRANITE_SHARED = plain(".shared_mlp", "input_linear", "output_linear", GATE_UP)
# The same with experts as in transformers 5: gate and up in one stack.
GRANITE_MOE_SWA = model(
    "GraniteMoeSWAForCausalLM",
    ATTENTION,
    routed_experts(
        ".block_sparse_moe.experts",
        experts=stacked_experts(".block_sparse_moe.experts"),
        router=".block_sparse_moe.router",
    ),
    GRANITE_SHARED,
    windows=SlidingWindows(4, first=True),
)

# The router is `gate.wg`, which vLLM's Transformers backend quantizes unless it is in the ignore list.
HUNYUAN_MOE = model(
    "HunYuanMoEV1ForCausalLM",
    ATTENTION,
    MLP,
    gated_mlp(".mlp.shared_mlp"),
    routed_experts(".mlp.experts", router=".mlp.gate.wg"),
    # Not as close as the others.
    sglang=SGLangLimits(head=HEAD_IN_BFLOAT16, uniform_formats=FORMATS),
)

# The first DeepSeek MoE, with ordinary attention; transformers has no such class.
DEEPSEEK = model(
    "DeepseekForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERTS,
    ROUTED,
    # vLLM models/deepseek_v2.py:187-203.
    nameless=(".self_attn.*",),
    # SGLang models/deepseek.py:166 packs the codes of all experts into one tensor and passes no scale on (:215).
    # Its load_weights requires a parameter for every name (:515).
    sglang=SGLangLimits(plain=(".mlp.experts.**",), cache=NO_CACHE),
)

ERNIE_MOE = model(
    "Ernie4_5_MoeForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERTS,
    ROUTED,
    keep=(
        Keep(".mlp.moe_statics.**", ROUTER),
        Keep("model.mtp_{block,emb_norm,hidden_norm,linear_proj}.**", MTP_LAYER),
    ),
    sglang=NO_SCALES,
)

# vLLM models/glm4_moe_mtp.py and deepseek_mtp.py, which build the MTP layers, have no packed_modules_mapping.
DRAFTED_MLPS = tuple(gated_mlp(path, listed_as="gate_up_proj") for path in (".mlp", ".mlp.shared_experts"))
GLM4_MOE = model(
    "Glm4MoeForCausalLM",
    attention(listed_as="qkv_proj"),
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    # SGLang models/glm4_moe.py:501
    sglang=SGLangLimits(unpacked=(".mlp.shared_experts.**",)),
)

# vLLM models/hy_v3_mtp.py has no packed_modules_mapping either.
HY_V3 = model(
    "HYV3ForCausalLM",
    attention(listed_as="qkv_proj"),
    *(gated_mlp(path, listed_as="gate_up_proj") for path in (".mlp", ".mlp.shared_mlp")),
    routed_experts(".mlp.experts", router=".mlp.router.gate"),
    draft_layers="num_hidden_layers",
)

NAMELESS_HEAD = f"{VLLM} builds it without a name to find its scheme by"
# The router is `router.gate`.
AFMOE = model(
    "AfmoeForCausalLM",
    ATTENTION,
    LayerPart((".self_attn.gate_proj",), splits=(ParallelSplit(".self_attn.gate_proj", "out", HEADS),)),
    MLP,
    SHARED_EXPERTS,
    routed_experts(".mlp.experts", router=".mlp.router.gate"),
    # models/afmoe.py:513
    head_refused=NAMELESS_HEAD,
    # SGLang models/afmoe.py:285 computes with the experts' codes and passes no scale on.
    sglang=SGLangLimits(plain=(".mlp.experts.**",)),
    windows=SlidingWindows(4, "global_attn_every_n_layers"),
)

MTP = Keep("mtp.**", MTP_LAYER)
EXAONE_MOE = model(
    "ExaoneMoeForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERTS,
    ROUTED,
    keep=(MTP,),
    # models/exaone_moe.py:510
    head_refused=NAMELESS_HEAD,
    windows=SlidingWindows(4, PATTERN),
)

# Layers with full attention have fewer query heads. vLLM models/laguna.py:86 keeps gate and up separate, SGLang fuses
# them.
LAGUNA = model(
    "LagunaForCausalLM",
    ATTENTION,
    MLP,
    gated_mlp(".mlp.shared_expert"),
    ROUTED,
    keep=(Keep(".self_attn.g_proj", "a gate for each head", divided=True),),
)

NO_EXPERTS = f"{VLLM} reads its experts as MXFP4 and its attention is a thirtieth of it"
GPT_OSS = model(
    "GptOssForCausalLM",
    attention(),
    keep=(Keep(".mlp.router", ROUTER), Keep(".mlp.experts.**", "served as MXFP4")),
    # vLLM models/gpt_oss.py:825-1060.
    refused=(Refusal(None, None, NO_EXPERTS, "serve it as it is: the MXFP4 original, or a fine-tune in bfloat16"),),
    windows=SlidingWindows(2),
)

# The Hub's files have stacks [E, 2I, H] and [E, H, I]; transformers saves a module for each expert.
STACKED_EXPERTS = routed_experts(".mlp.experts", experts=stacked_experts(".mlp.experts"))

# [E, H, 2I] and [E, I, H] (vLLM models/llama4.py:398). A checkpoint may not mix stacked and split
# experts (llama4.py:583), so they are split wherever they appear.
LLAMA4 = model(
    "Llama4ForCausalLM",
    ATTENTION,
    gated_mlp(".feed_forward"),
    gated_mlp(".feed_forward.shared_expert"),
    routed_experts(
        ".feed_forward.experts",
        experts=stacked_experts(".feed_forward.experts", transposed=True),
        router=".feed_forward.router",
    ),
    # transformers 5.19 does not find split experts and initializes new ones.
    # vLLM models/llama4.py:805-844, for its rotary embedding.
    reordered=(".self_attn.{q,k}_proj",),
    sglang=SCALES_LOST,
    windows=SlidingWindows(4, "no_rope_layer_interval", flags="no_rope_layers", size="attention_chunk_size"),
)

# Dense layers first, then experts. vLLM models/bailing_moe.py.
BAILING_MOE_V2 = model(
    "BailingMoeV2ForCausalLM",
    joined_attention(".attention", "query_key_value", "dense", replicated=True, parts=QKV),
    gated_mlp(".mlp"),
    SHARED_EXPERTS,
    ROUTED,
    keep=(Keep("model.word_embeddings", "embedding", divided=True),),
    draft_layers="num_hidden_layers",
    # models/bailing_moe.py:147
    cache_refused=NAMELESS_CACHE,
    # :560
    head_refused="engines divide its columns by their length where config.json has norm_head",
)


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
        Keep("model.mtp_layers.*.**", MTP_LAYER),
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
    MIXTRAL,
    # vLLM models/minimax_m2.py calls the module mlp.
    replace(MIXTRAL, name="MiniMaxM2ForCausalLM", spellings=(), renames=((".block_sparse_moe.", ".mlp."),)),
    PHI_MOE,
    QWEN2_MOE,
    QWEN3_MOE,
    model("OlmoeForCausalLM", ATTENTION, ROUTED, sglang=NO_SCALES),
    # OLMoE with OLMo 2's norms, on vLLM's Transformers backend.
    model("FlexOlmoForCausalLM", ATTENTION, ROUTED),
    model("Cohere2MoeForCausalLM", ATTENTION, MLP, SHARED_EXPERTS, ROUTED, windows=SlidingWindows(4, PATTERN)),
    DEEPSEEK,
    # transformers loads stacked experts only.
    model("GraniteMoeForCausalLM", ATTENTION, GRANITE_EXPERTS),
    model("GraniteMoeSharedForCausalLM", ATTENTION, GRANITE_EXPERTS, GRANITE_SHARED),
    GRANITE_MOE_SWA,
    HUNYUAN_MOE,
    ERNIE_MOE,
    EXAONE_MOE,
    replace(EXAONE_MOE, name="ExaoneMoEForCausalLM"),
    AFMOE,
    LAGUNA,
    # On vLLM's Transformers backend.
    model("MellumForCausalLM", ATTENTION, MLP, ROUTED, keep=(MTP,)),
    GLM4_MOE,
    HY_V3,
    GPT_OSS,
    LLAMA4,
    BAILING_MOE_V2,
    replace(BAILING_MOE_V2, name="BailingMoeForCausalLM"),
    LONGCAT,
    replace(DEEPSEEK_V3, name="DeepseekV2ForCausalLM", draft_layers=None),
    DEEPSEEK_V3,
    # It has one more norm, after the experts.
    replace(DEEPSEEK_V3, name="AXK1ForCausalLM", draft_layers=None),
    MINICPM3,
    replace(
        DEEPSEEK_V3,
        name="Glm4MoeLiteForCausalLM",
        sglang=sglang_refuses(
            *("it concatenates scales that have no rows", "--scheme channel and -w 128 load"),
            scheme="tensor",
            format="fp8",
            unpacked=LATENT_UNPACKED,
        ),
    ),
    DEEPSEEK_V32,
    replace(DEEPSEEK_V32, name="GlmMoeDsaForCausalLM"),
    DEEPSEEK_V4,
    HY_V4,
)

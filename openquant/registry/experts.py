"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import (
    MTP_LAYER,
    ROUTER,
    ExpertLayout,
    Keep,
    ParallelSplit,
    Refusal,
    SGLangLimits,
    SlidingWindows,
    StackedExperts,
)
from .parts import (
    ATTENTION,
    BUILT_UNQUANTIZED,
    FORMATS,
    HEAD_IN_BFLOAT16,
    HEADS,
    IF_ENABLED,
    MIXTRAL_SMOOTHING,
    MLP,
    NO_CACHE,
    NO_SCALES,
    PATTERN,
    QWEN2_MOE_SMOOTHING,
    QWEN3_MOE_SMOOTHING,
    SCALES_LOST,
    LayerPart,
    attention,
    gated_mlp,
    model,
    routed_experts,
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
    "Qwen2MoeForCausalLM",
    ATTENTION,
    MLP,
    SHARED_EXPERT,
    ROUTED,
    windows=IF_ENABLED,
    smoothing=QWEN2_MOE_SMOOTHING,
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
    experts=ExpertLayout(
        ".block_sparse_moe.experts",
        stacked=(
            StackedExperts("input_linear", ("gate_proj", "up_proj")),
            StackedExperts("output_linear", ("down_proj",)),
        ),
        beside=True,
    ),
    router=".block_sparse_moe.router.layer",
)
# transformers loads stacked experts only.
GRANITE_MOE = model("GraniteMoeForCausalLM", ATTENTION, GRANITE_EXPERTS, transformers_reads_blocks=False)
# The shared expert has gate and up in one tensor too.
GRANITE_SHARED = LayerPart(
    (".shared_mlp.{input_linear,output_linear}",),
    splits=(
        ParallelSplit(".shared_mlp.input_linear", "out", parts=(None, None)),
        ParallelSplit(".shared_mlp.output_linear", "in"),
    ),
)
GRANITE_MOE_SHARED = model(
    "GraniteMoeSharedForCausalLM", ATTENTION, GRANITE_EXPERTS, GRANITE_SHARED, transformers_reads_blocks=False
)
# The same with experts as in transformers 5: gate and up in one stack.
GRANITE_MOE_SWA = model(
    "GraniteMoeSWAForCausalLM",
    ATTENTION,
    routed_experts(
        ".block_sparse_moe.experts",
        experts=ExpertLayout(
            ".block_sparse_moe.experts",
            stacked=(
                StackedExperts("gate_up_proj", ("gate_proj", "up_proj")),
                StackedExperts("down_proj", ("down_proj",)),
            ),
        ),
        router=".block_sparse_moe.router",
    ),
    GRANITE_SHARED,
    transformers_reads_blocks=False,
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
    transformers_reads_blocks=False,
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
    transformers_reads_blocks=False,
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
STACKED_EXPERTS = routed_experts(
    ".mlp.experts",
    experts=ExpertLayout(
        ".mlp.experts",
        stacked=(
            StackedExperts("gate_up_proj", ("gate_proj", "up_proj")),
            StackedExperts("down_proj", ("down_proj",)),
        ),
    ),
)

# [E, H, 2I] and [E, I, H] (vLLM models/llama4.py:398). A checkpoint may not mix stacked and split
# experts (llama4.py:583), so they are split wherever they appear.
LLAMA4 = model(
    "Llama4ForCausalLM",
    ATTENTION,
    gated_mlp(".feed_forward"),
    gated_mlp(".feed_forward.shared_expert"),
    routed_experts(
        ".feed_forward.experts",
        experts=ExpertLayout(
            ".feed_forward.experts",
            stacked=(
                StackedExperts("gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
                StackedExperts("down_proj", ("down_proj",), transposed=True),
            ),
        ),
        router=".feed_forward.router",
    ),
    # transformers 5.19 does not find split experts and initializes new ones.
    transformers_reads_blocks=False,
    # vLLM models/llama4.py:805-844, for its rotary embedding.
    reordered=(".self_attn.{q,k}_proj",),
    sglang=SCALES_LOST,
    windows=SlidingWindows(4, "no_rope_layer_interval", flags="no_rope_layers", size="attention_chunk_size"),
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
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
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
)

"""Architectures whose published files are of several formats, or whose layers are of two kinds and sizes."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import (
    MTP_LAYER,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    PerRankTensor,
    Refusal,
    SlidingWindows,
    StackedExperts,
)
from .experts import ROUTED
from .hybrid import EITHER
from .latent import DEEPSEEK_V3
from .parts import KV_HEADS, MLP, attention, gated_mlp, model, routed_experts, wrap

# Layers with a window have another number of KV heads (vLLM models/mimo_v2.py:345-395).
MIMO_V2_FLASH = model(
    "MiMoV2FlashForCausalLM",
    replace(attention(), cached=(CachedRows(".self_attn.{k,v}_proj", "swa_num_key_value_heads", full_heads=KV_HEADS),)),
    MLP,
    ROUTED,
    # models/mimo_v2_mtp.py
    keep=(Keep("model.mtp.**", MTP_LAYER),),
    windows=SlidingWindows(flags="hybrid_layer_pattern", size="sliding_window_size"),
)
# Published with q, k and v in one tensor, which the engine reads in FP8 blocks only (models/mimo_v2.py:886); it reads
# separate ones in all formats. Its packed_modules_mapping has only the former.
MIMO_V2 = replace(
    MIMO_V2_FLASH,
    name="MiMoV2ForCausalLM",
    fused=tuple(
        replace(fused, listed_as="qkv_proj") if "q,k,v" in fused.pattern else fused for fused in MIMO_V2_FLASH.fused
    ),
    # models/mimo_v2.py:527-617
    per_rank=PerRankTensor(
        "model.{layers,mtp.layers}.*.self_attn.qkv_proj",
        ("q_proj", "k_proj", "v_proj"),
        KV_HEADS,
        tuple(
            (
                (f"{kind}num_attention_heads", f"{kind}head_dim"),
                (f"{kind}{KV_HEADS}", f"{kind}head_dim"),
                (f"{kind}{KV_HEADS}", f"{kind}v_head_dim"),
            )
            for kind in ("", "swa_")
        ),
        # vLLM 0.33.0 models/mimo_v2.py:389 takes no projection by itself in FP8 blocks if config.json says "fused_qkv",
        # and SGLang configs/model_config.py:125 only so many ranks.
        layout=("attention_projection_layout", "split"),
    ),
)

# Stacks [E, out, in] of one projection each, siblings of the router. vLLM (models/step3p5.py:683) also reads separate
# experts, below `moe.experts`.
STEP_EXPERTS = routed_experts(
    ".moe.experts",
    experts=ExpertLayout(
        ".moe.experts",
        stacked=tuple(StackedExperts(name, (name,)) for name in ("gate_proj", "up_proj", "down_proj")),
        beside=True,
    ),
)
GROUPS = "num_attention_groups"
STEP3P5 = model(
    "Step3p5ForCausalLM",
    replace(attention(), cached=(CachedRows(".self_attn.{k,v}_proj", GROUPS),)),
    MLP,
    gated_mlp(".share_expert"),
    STEP_EXPERTS,
    keep=(Keep(".self_attn.g_proj", "a gate for each head", divided=True),),
    draft_layers="num_hidden_layers",
    # models/step3p5.py:890
    renames=((".share_expert.", ".moe.share_expert."),),
    transformers_reads_blocks=False,
)
# Files use one of two spellings for all names. vLLM builds the tower with quant_config, under other names
# (models/step3p7.py:34), and before the language model defines the members of qkv_proj.
STEP3P7 = wrap(
    STEP3P5,
    "Step3p7ForConditionalGeneration",
    "vision_model",
    "vit_large_projector",
    layers=EITHER,
    renames=(
        *STEP3P5.renames,
        # Files have in_proj_weight, which is no module that a list can name; it is kept if its sibling is.
        (".attn.out_proj", ".attn.qkv_proj"),
        (".mlp.c_fc", ".mlp.fc1"),
        (".mlp.c_proj", ".mlp.fc2"),
    ),
)

# vLLM models/kimi_k25.py:311.
KIMI_K25 = wrap(
    DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration",
    "vision_tower",
    "mm_projector",
    layers="language_model.model.layers.*",
    renames=(("mm_projector.proj.0", "mm_projector.linear_1"), ("mm_projector.proj.2", "mm_projector.linear_2")),
    # SGLang models/kimi_k25.py:693
    sglang=DEEPSEEK_V3.sglang,
)

# vLLM builds everything around the language model without quantization (models/kimi_vl.py:325-334).
KIMI_VL = wrap(
    DEEPSEEK_V3,
    "KimiVLForConditionalGeneration",
    "vision_tower",
    "multi_modal_projector",
    layers="language_model.model.layers.*",
    # transformers has no such class.
    transformers_reads_blocks=False,
    # SGLang models/kimi_vl.py:168
    sglang=DEEPSEEK_V3.sglang,
)

# The indexer of sparse attention is fused with q, k and v (vLLM model_executor/layers/linear.py:1352).
INDEXED = ".self_attn.{q_proj,k_proj,v_proj,index_q_proj,index_k_proj}"
M3_ATTENTION = replace(
    attention(),
    compress=(INDEXED, ".self_attn.o_proj"),
    fused=(FusedLayers(INDEXED, "qkv_proj", "qkv_proj"),),
    splits=(*attention().splits, ParallelSplit(".self_attn.index_q_proj", "out", KV_HEADS, replicated=True)),
    cached=(*attention().cached, CachedRows(".self_attn.index_k_proj", None)),
)
# It is published inside its wrapper only.
MINIMAX_M3 = model(
    "",
    M3_ATTENTION,
    MLP,
    gated_mlp(".block_sparse_moe.shared_experts"),
    routed_experts(".block_sparse_moe.experts", "w1", "w3", "w2"),
    refused=(
        # models/minimax_m3/nvidia/model.py:975
        Refusal(
            "block",
            "fp8",
            f"{VLLM} renames its block scales",
            "use --scheme channel, or --format compressed-tensors",
        ),
        # model_executor/parameter.py:115
        Refusal(
            None,
            None,
            f"{VLLM} has no place for a single scale of its index",
            "use --scheme channel",
            scales="single",
        ),
    ),
    transformers_reads_blocks=False,
    # models/minimax_m3/nvidia/model.py:401 registers its cache itself.
    cache_refused=f"{VLLM} gives its sparse attention none",
)

ENTRIES = (
    MIMO_V2_FLASH,
    MIMO_V2,
    STEP3P5,
    STEP3P7,
    KIMI_K25,
    KIMI_VL,
    wrap(
        MINIMAX_M3,
        "MiniMaxM3SparseForConditionalGeneration",
        "vision_tower",
        "multi_modal_projector",
        "patch_merge_mlp",
        layers="language_model.model.layers.*",
        # models/minimax_m3/nvidia/model.py:1129
        spellings=(
            ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
            ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
        ),
        renames=((".mlp.fc1", ".fc1"), (".mlp.fc2", ".fc2")),
    ),
)

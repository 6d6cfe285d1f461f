"""Linear attention, state spaces and convolutions beside attention; layers of two kinds and sizes."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import (
    MTP_LAYER,
    ROUTER,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    PerRankTensor,
    RecurrentState,
    Refusal,
    SGLangLimits,
    SlidingWindows,
    StackedExperts,
)
from .experts import (
    DEEPSEEK_V3,
    DRAFTED_MLPS,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    INDEXER,
    LATENT,
    MTP,
    ROUTED,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    latent,
)
from .parts import (
    ATTENTION,
    BUILT_UNQUANTIZED,
    HEADS,
    KV_HEADS,
    MLP,
    NAMELESS_CACHE,
    NO_CACHE,
    STREAMS,
    LayerPart,
    attention,
    gated_mlp,
    model,
    plain,
    routed_experts,
    sglang_refuses,
    wrap,
)

CONVOLUTION = "convolution"
KEY_HEADS = "linear_num_key_heads"
VALUE_HEADS = "linear_num_value_heads"
# vLLM models/config.py:856 and 717 read a state's dtype for Qwen3.5 and Nemotron-H.
DELTA_STATE = RecurrentState(
    ".linear_attn.conv1d", (VALUE_HEADS, "linear_value_head_dim", "linear_key_head_dim"), "mamba_ssm_dtype"
)
# vLLM layers/mamba/gdn/qwen_gdn_linear_attn.py:524: ba_proj, of a few rows, cannot be in FP8 blocks.
GATED_DELTA = LayerPart(
    (".linear_attn.{in_proj_qkvz,out_proj}",),
    splits=(
        ParallelSplit(".linear_attn.in_proj_qkvz", "out", KEY_HEADS),
        ParallelSplit(".linear_attn.out_proj", "in", VALUE_HEADS),
    ),
    keep=(Keep(".linear_attn.in_proj_ba", "gates of a row per head"), Keep(".linear_attn.conv1d", CONVOLUTION)),
    states=(DELTA_STATE,),
)
QWEN3_NEXT = model(
    "Qwen3NextForCausalLM",
    ATTENTION,
    GATED_DELTA,
    MLP,
    SHARED_EXPERT,
    ROUTED,
    keep=(MTP,),
    # models/qwen3_next.py:851
    head_refused=BUILT_UNQUANTIZED,
    sglang=SGLangLimits(
        (Refusal("tensor", "fp8", "it asks in_proj_qkvz for four scales", "--scheme channel and -w 128 load"),),
        # SGLang models/qwen3_next.py:311
        unpacked=(".linear_attn.in_proj_qkvz",),
        # models/qwen3_next.py:1266
        cache="it accepts no scales of the KV cache but 1",
        cache_of_ones=True,
    ),
)

# The same with separate projections: engines fuse qkv and z, and qkv holds three of the four fused parts (:664).
GATED_DELTA_PIECES = LayerPart(
    (".linear_attn.{in_proj_qkv,in_proj_z,out_proj}",),
    fused=(FusedLayers(".linear_attn.{in_proj_qkv,in_proj_z}", sglang="in_proj_qkvz"),),
    splits=(
        ParallelSplit(".linear_attn.in_proj_qkv", "out", parts=(KEY_HEADS, KEY_HEADS, VALUE_HEADS)),
        ParallelSplit(".linear_attn.in_proj_z", "out", VALUE_HEADS),
        ParallelSplit(".linear_attn.out_proj", "in", VALUE_HEADS),
    ),
    keep=(Keep(".linear_attn.in_proj_{a,b}", "gates of a row per head"), Keep(".linear_attn.conv1d", CONVOLUTION)),
    states=(DELTA_STATE,),
)
# The same with separate q, k, v, each with a convolution, and a separate gate (vLLM
# layers/mamba/gdn/olmo_gdn_linear_attn.py:94).
OLMO_DELTA = LayerPart(
    (".linear_attn.{q_proj,k_proj,v_proj,g_proj,o_proj}",),
    fused=(FusedLayers(".linear_attn.{q,k,v,g}_proj"),),
    splits=(
        ParallelSplit(".linear_attn.{q,k}_proj", "out", KEY_HEADS),
        ParallelSplit(".linear_attn.{v,g}_proj", "out", VALUE_HEADS),
        ParallelSplit(".linear_attn.o_proj", "in", VALUE_HEADS),
    ),
    keep=(
        Keep(".linear_attn.{a,b}_proj", "gates of a row per head", divided=True),
        Keep(".linear_attn.{q,k,v}_conv1d", CONVOLUTION),
    ),
    states=(replace(DELTA_STATE, pattern=".linear_attn.q_conv1d"), RecurrentState(".linear_attn.{k,v}_conv1d")),
)

# Saved without its vision tower, it keeps the wrapper's names.
EITHER = "{model,model.language_model}.layers.*"
HEAD_SCALE_LOST = SGLangLimits(head="it silently drops the scale of the output head")
QWEN3_5 = model(
    "Qwen3_5ForCausalLM", ATTENTION, GATED_DELTA_PIECES, MLP, layers=EITHER, keep=(MTP,), sglang=HEAD_SCALE_LOST
)
QWEN3_5_MOE = model(
    "Qwen3_5MoeForCausalLM",
    ATTENTION,
    GATED_DELTA_PIECES,
    MLP,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    layers=EITHER,
    keep=(MTP,),
    sglang=HEAD_SCALE_LOST,
)

# Several streams of hidden states, n-gram tables, and an indexer of sparse attention. vLLM fuses the indexer with q, k
# and v, and every rank holds all of it (models/qwen4_exp/nvidia/qsa.py:67); SGLang keeps it separate.
QSA = ".self_attn.{q_proj,k_proj,v_proj,indexer.index_qk_proj}"
QWEN4_EXP = model(
    "Qwen4ExpForCausalLM",
    replace(
        ATTENTION,
        compress=(QSA, ".self_attn.o_proj"),
        fused=(FusedLayers(QSA, sglang="qkv_proj"),),
        # models/qwen4_exp/common/qsa_cache.py:870: a bfloat16 key of 128 values for four tokens.
        cached=(*ATTENTION.cached, CachedRows(".self_attn.indexer.index_qk_proj", None, fp8=64, bf16=64)),
    ),
    GATED_DELTA_PIECES,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    layers=EITHER,
    keep=(
        MTP,
        Keep(".ple.**", "tables of n-grams"),
        # models/qwen4_exp/nvidia/hyperconnection.py:106 builds them without a quantization.
        Keep(".{attn,mlp}_hyper_connection.*", STREAMS),
        Keep("{model,model.language_model}.hyper_connection_mixer.*", STREAMS),
    ),
    # models/qwen4_exp/nvidia/model.py:751
    head_refused=BUILT_UNQUANTIZED,
    # models/qwen4_exp/nvidia/qsa.py:365, for a config with a kv_cache_scheme.
    cache_refused=f"{VLLM} refuses a config that says so",
    # SGLang models/qwen4_exp.py:1826
    renames=((".self_attn.indexer.", ".indexer."),),
)

# vLLM layers/mamba/gdn/kimi_gdn_linear_attn.py fuses all projections of the layer's input but g_a_proj; every rank
# holds all of f_a_proj. Both kinds of attention have 32 heads.
KIMI_DELTA = LayerPart(
    (".self_attn.{k_proj,v_proj,b_proj,f_a_proj,f_b_proj,g_a_proj,g_b_proj}",),
    fused=(FusedLayers(".self_attn.{q,k,v,b,f_a}_proj", sglang="qkv_proj"),),
    splits=(ParallelSplit(".self_attn.{k_proj,v_proj,b_proj,f_b_proj,g_b_proj}", "out", HEADS),),
    keep=(Keep(".self_attn.{q,k,v}_conv1d", CONVOLUTION), Keep(".self_attn.A_log", "decay of a state")),
    states=(
        RecurrentState(
            ".self_attn.q_conv1d",
            tuple(f"linear_attn_config.{key}" for key in ("num_heads", "head_dim", "head_dim")),
            default_dtype="float32",
        ),
        RecurrentState(".self_attn.{k,v}_conv1d"),
    ),
)
KIMI_LINEAR = model(
    "KimiLinearForCausalLM",
    LATENT,
    KIMI_DELTA,
    MLP,
    gated_mlp(".block_sparse_moe.shared_experts"),
    routed_experts(".block_sparse_moe.experts", "w1", "w3", "w2"),
)

# vLLM models/glm5next/common/model.py:397 and models/glm5next/common/kda.py:211 build all attention without
# quantization, whatever the files have.
GLM5_NEXT = model(
    "Glm5NextForCausalLM",
    LayerPart(
        (),
        # SGLang models/glm5_next.py:457 builds them with quantization.
        fused=(
            FusedLayers(".self_attn.{q,k,v}_proj", sglang="qkv_proj"),
            FusedLayers(".self_attn.{q_a_proj,kv_a_proj_with_mqa}", sglang="fused_qkv_a_proj_with_mqa"),
        ),
        keep=(
            Keep(
                ".self_attn.{q_proj,k_proj,v_proj,b_proj,f_b_proj,g_b_proj,q_b_proj,kv_b_proj,o_proj}",
                BUILT_UNQUANTIZED,
                divided=True,
            ),
            Keep(".self_attn.{f_a_proj,g_a_proj,q_a_proj,kv_a_proj_with_mqa}", BUILT_UNQUANTIZED),
            Keep(".self_attn.{q,k,v}_conv1d", CONVOLUTION),
            Keep(
                ".self_attn.indexer.{wq_b,wk,weights_proj,index_kpool_compress_ape,index_kpool_compress_gate}",
                INDEXER.why,
            ),
            Keep(".hc_{attn,ffn}_fn", STREAMS),
        ),
        # models/glm5next/common/attention.py:117: 128 codes and a scale of the indexer for every four tokens.
        cached=(
            CachedRows(".self_attn.kv_a_proj_with_mqa", None),
            CachedRows(".self_attn.indexer.wk", None, fp8=33, bf16=33),
        ),
        states=KIMI_DELTA.states,
    ),
    *DRAFTED_MLPS,
    ROUTED,
    draft_layers="num_hidden_layers",
    # transformers has only the wrapper, whose logits are not as close as those of others.
)

# in_proj holds five parts, each of which vLLM divides by its own rule (layers/mamba/mamba_mixer2.py).
STATE_SPACE = "state space inputs, of several kinds"


def mamba2(path: str, *sizes: str) -> LayerPart:
    """Return a state space (Mamba 2) below a path; `sizes` are config keys of the sizes of its state, heads first."""
    return LayerPart(
        (f"{path}.out_proj",),
        splits=(ParallelSplit(f"{path}.out_proj", "in", sizes[0]),),
        keep=(Keep(f"{path}.in_proj", STATE_SPACE, divided=True), Keep(f"{path}.conv1d", CONVOLUTION)),
        states=(RecurrentState(f"{path}.conv1d", sizes),),
    )


MAMBA2 = mamba2(".mamba", "mamba_n_heads", "mamba_d_head", "mamba_d_state")
GRANITE_HYBRID = model(
    "GraniteMoeHybridForCausalLM",
    ATTENTION,
    MAMBA2,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    # vLLM models/granitemoehybrid.py looks up its linears by this name.
    renames=((".mamba.", ".mixer."),),
    sglang=SGLangLimits(
        (Refusal(None, "fp8", "its loader of this architecture fails on the fp8 format", "--scheme channel loads"),),
        # SGLang models/granitemoehybrid.py:644 passes an argument that no loader of experts takes.
        experts="its loader of this architecture fails on experts that are not stacked",
        cache=NO_CACHE,
    ),
)

# State spaces only.
MAMBA2_ALONE = model(
    "Mamba2ForCausalLM",
    mamba2(".mixer", "num_heads", "head_dim", "state_size"),
    layers="backbone.layers.*",
    keep=(Keep("backbone.embeddings", "embedding", divided=True),),
    # models/mamba2.py:202
    head_refused=BUILT_UNQUANTIZED,
    cache_refused="it keeps states alone",
)

# State spaces, which vLLM builds without quantization (layers/mamba/mamba_mixer.py:98), and attention, which it names
# after the layer itself and builds without scales of the KV cache (models/jamba.py:233-259).
JAMBA = model(
    "JambaForCausalLM",
    ATTENTION,
    LayerPart(
        (),
        keep=(
            Keep(".mamba.{in_proj,x_proj,dt_proj,out_proj}", BUILT_UNQUANTIZED, divided=True),
            Keep(".mamba.conv1d", CONVOLUTION),
            Keep(".mamba.A_log", "decay of a state"),
        ),
        states=(RecurrentState(".mamba.conv1d", ("mamba_expand", "hidden_size", "mamba_d_state")),),
    ),
    gated_mlp(".feed_forward"),
    routed_experts(".feed_forward.experts", router=".feed_forward.router"),
    renames=((".self_attn.", "."),),
    # models/jamba.py:426
    head_refused=BUILT_UNQUANTIZED,
    cache_refused=NAMELESS_CACHE,
)

# Attention and a state space side by side. vLLM models/falcon_h1.py:133, 263 and 346 names attention after the layer
# itself, and state spaces as layers after the last. SGLang: .mixer, .mlp.
FALCON_H1 = model(
    "FalconH1ForCausalLM",
    ATTENTION,
    MAMBA2,
    gated_mlp(".feed_forward"),
    renames=((".self_attn.", "."), (".mamba.", ".mixer."), (".feed_forward.", ".mlp.")),
    beyond=((".mamba.", "model.{}.mixer."),),
    # models/falcon_h1.py:597
    head_refused=BUILT_UNQUANTIZED,
)

LFM2_MIXERS = (
    attention("out_proj"),
    LayerPart(
        (".conv.out_proj",),
        splits=(ParallelSplit(".conv.out_proj", "in"),),
        keep=(Keep(".conv.in_proj", "three inputs of a convolution", divided=True), Keep(".conv.conv", CONVOLUTION)),
        states=(RecurrentState(".conv.conv"),),
    ),
)
LFM2 = model(
    "Lfm2ForCausalLM", *LFM2_MIXERS, gated_mlp(".feed_forward", "w1", "w3", "w2"), cache_refused=NAMELESS_CACHE
)
LFM2_MOE = model(
    "Lfm2MoeForCausalLM",
    *LFM2_MIXERS,
    gated_mlp(".feed_forward", "w1", "w3", "w2"),
    # vLLM models/lfm2_moe.py builds the router with quant_config.
    routed_experts(".feed_forward.experts", "w1", "w3", "w2"),
    cache_refused=NAMELESS_CACHE,
    # SGLang models/lfm2_moe.py.
    renames=tuple(
        (f".feed_forward.{one}", f".feed_forward.{other}_proj")
        for one, other in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    ),
)

# SGLang makes room for a gate in experts that have none: compressed_tensors_w8a8_fp8_moe.py:123,
# compressed_tensors_wNa16_moe.py:119 and compressed_tensors_w4a4_nvfp4_moe.py:74, but not
# compressed_tensors_w4a16_nvfp4_moe.py:74 (all of layers/quantization/compressed_tensors/schemes), nor fp8.py:1569.
UNGATED = SGLangLimits(
    tuple(
        Refusal(
            scheme,
            "compressed-tensors",
            f"in the compressed-tensors format it loads no experts without a gate in {scheme}",
            "--scheme tensor, -w 128 in the fp8 format, and --scheme-for '**.experts.**=nvfp4' load",
            experts=True,
        )
        for scheme in ("channel", "block", "int8-weights", "int4", "nvfp4-w4a4")
    )
)
# Each layer is one of attention, state space, MLP, or experts without a gate projection.
NEMOTRON_H = model(
    "NemotronHForCausalLM",
    LayerPart(
        (".mixer.{q,k,v,o}_proj", ".mixer.out_proj"),
        fused=(FusedLayers(".mixer.{q,k,v}_proj", sglang="qkv_proj"),),
        splits=(
            ParallelSplit(".mixer.q_proj", "out", HEADS),
            ParallelSplit(".mixer.{k,v}_proj", "out", KV_HEADS, replicated=True),
            ParallelSplit(".mixer.o_proj", "in", HEADS),
            ParallelSplit(".mixer.out_proj", "in", "mamba_num_heads"),
        ),
        keep=(Keep(".mixer.in_proj", STATE_SPACE, divided=True), Keep(".mixer.conv1d", CONVOLUTION)),
        cached=(CachedRows(".mixer.{k,v}_proj", KV_HEADS),),
        states=(
            RecurrentState(
                ".mixer.conv1d",
                ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
                "mamba_ssm_cache_dtype",
                default_dtype="float32",
            ),
        ),
    ),
    plain(".mixer"),
    plain(".mixer.shared_experts"),
    replace(
        plain(".mixer.experts.*"),
        experts=(ExpertLayout(".mixer.experts"),),
        keep=(
            Keep(".mixer.gate", ROUTER),
            Keep(".mixer.fc{1,2}_latent_proj", "to and from the experts' narrower space"),
        ),
    ),
    layers="backbone.layers.*",
    keep=(Keep("backbone.embeddings", "embedding"), MTP),
    # transformers 5 names it model.
    spellings=(("backbone.", "model."),),
    sglang=UNGATED,
)

# Layers of Lightning attention (linear, with a decay for each head) and of latent attention. vLLM
# models/bailing_moe_linear.py.
LIGHTNING = LayerPart(
    (".attention.{query_key_value,g_proj}",),
    splits=(
        ParallelSplit(".attention.query_key_value", "out", parts=(HEADS, HEADS, HEADS)),
        # layers/mamba/linear/bailing_linear_attn.py:461: at most as many ranks as its norm has groups.
        ParallelSplit(".attention.g_proj", "out", "group_norm_size"),
    ),
    states=(RecurrentState(".attention.g_proj", (HEADS, "head_dim", "head_dim"), has_convolution=False),),
)
BAILING_MOE_LINEAR = model(
    "BailingMoeV2_5ForCausalLM",
    latent(".attention", "dense"),
    LIGHTNING,
    *DRAFTED_MLPS,
    ROUTED,
    keep=(Keep("model.word_embeddings", "embedding", divided=True),),
    draft_layers="num_hidden_layers",
    # models/bailing_moe_linear.py:590-605. SGLang models/bailing_moe_linear.py:459-481 uses three other names in layers
    # of linear attention.
    renames=(
        (".attention.", ".self_attn."),
        (".attention.dense", ".self_attn.o_proj"),
        (".attention.dense", ".attention.o_proj"),
        (".attention.dense", ".attention.out_proj"),
        (".attention.query_key_value", ".attention.qkv_proj"),
        (".attention.g_proj", ".attention.output_gate"),
    ),
    sglang=SGLangLimits(
        # SGLang models/bailing_moe_linear.py:1533 concatenates all tensors of q_a_proj and kv_a_proj_with_mqa.
        (Refusal("tensor", None, "it puts the single scales of two projections end to end", "--scheme channel loads"),),
        unpacked=(".attention.q_a_proj",),
    ),
)

# Ling 3.0: layers of Kimi's delta attention, with full-rank gates, and of gated latent attention. vLLM
# models/bailing_moe_v3.py:667 fuses b_proj with q, k and v, unless it is in the ignore list of a block scheme.
KIMI_DELTA_WHOLE = LayerPart(
    (".attention.{k_proj,v_proj,b_proj,f_proj,g_proj,o_proj}",),
    fused=(FusedLayers(".attention.{q,k,v,b}_proj"),),
    splits=(
        ParallelSplit(".attention.{k_proj,v_proj,b_proj,f_proj,g_proj}", "out", HEADS),
        ParallelSplit(".attention.o_proj", "in", HEADS),
    ),
    keep=(Keep(".attention.{q,k,v}_conv1d", CONVOLUTION),),
    states=(
        RecurrentState(".attention.q_conv1d", (HEADS, "head_dim", "head_dim"), default_dtype="float32"),
        RecurrentState(".attention.{k,v}_conv1d"),
    ),
)
BAILING_MOE_V3 = model(
    "BailingMoeV3ForCausalLM",
    latent(".attention", "dense"),
    KIMI_DELTA_WHOLE,
    *DRAFTED_MLPS,
    ROUTED,
    keep=(Keep("model.word_embeddings", "embedding", divided=True),),
    draft_layers="num_hidden_layers",
    renames=((".attention.", ".self_attn."),),
    # models/kimi_linear.py:294
    sglang=sglang_refuses("it builds b_proj without quantization, which vLLM fuses with q, k, v"),
)


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
            "block", "fp8", f"{VLLM} renames its block scales", "use --scheme channel, or --format compressed-tensors"
        ),
        # model_executor/parameter.py:115
        Refusal(
            None, None, f"{VLLM} has no place for a single scale of its index", "use --scheme channel", scales="single"
        ),
    ),
    # models/minimax_m3/nvidia/model.py:401 registers its cache itself.
    cache_refused=f"{VLLM} gives its sparse attention none",
)

ENTRIES = (
    QWEN3_NEXT,
    model("OlmoHybridForCausalLM", ATTENTION, OLMO_DELTA, MLP),
    MAMBA2_ALONE,
    JAMBA,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN4_EXP,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    GLM5_NEXT,
    FALCON_H1,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    # Its layers have different sizes; only its own code reads its config.json.
    replace(NEMOTRON_H, name="NemotronHPuzzleForCausalLM"),
    BAILING_MOE_LINEAR,
    BAILING_MOE_V3,
    MIMO_V2_FLASH,
    MIMO_V2,
    STEP3P5,
    STEP3P7,
    # vLLM models/kimi_k25.py:311.
    wrap(
        DEEPSEEK_V3,
        "KimiK25ForConditionalGeneration",
        "vision_tower",
        "mm_projector",
        layers="language_model.model.layers.*",
        renames=(("mm_projector.proj.0", "mm_projector.linear_1"), ("mm_projector.proj.2", "mm_projector.linear_2")),
        # SGLang models/kimi_k25.py:693
        sglang=DEEPSEEK_V3.sglang,
    ),
    # vLLM builds everything around the language model without quantization (models/kimi_vl.py:325-334).
    wrap(
        DEEPSEEK_V3,
        "KimiVLForConditionalGeneration",
        "vision_tower",
        "multi_modal_projector",
        layers="language_model.model.layers.*",
        # transformers has no such class.
        # SGLang models/kimi_vl.py:168
        sglang=DEEPSEEK_V3.sglang,
    ),
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

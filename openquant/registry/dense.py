"""Dense decoders: attention and an MLP in every layer. The files of some hold q, k and v of a layer as one tensor."""

from __future__ import annotations

from dataclasses import replace

from .architecture import (
    MTP_LAYER,
    ROUTER,
    TOWER,
    CachedRows,
    FusedLayers,
    Keep,
    ParallelSplit,
    SGLangLimits,
    SlidingWindows,
)
from .parts import (
    ATTENTION,
    BUILT_UNQUANTIZED,
    COMPRESSED_LOADS,
    DENSE_SMOOTHING,
    FORMATS,
    FUSED_NAMES,
    GATE_UP,
    GATE_UP_TENSOR,
    GEMMA2_SMOOTHING,
    GEMMA3_SMOOTHING,
    GEMMA_SMOOTHING,
    GLM_SMOOTHING,
    HEAD_IN_BFLOAT16,
    HEADS,
    IF_ENABLED,
    KV_HEADS,
    MLP,
    NAMELESS,
    NO_GROUPS,
    NO_SCALES,
    ONES_TAKEN,
    PATTERN,
    PHI3_SMOOTHING,
    PLAIN_ATTENTION,
    QKV,
    SCALES_LOST,
    SEVERAL_CACHES,
    STREAMS,
    LayerPart,
    attention,
    gated_mlp,
    joined_attention,
    model,
    plain,
    sglang_refuses,
    stacked_experts,
)

WINDOWS = {
    "Cohere2": SlidingWindows(4, PATTERN),
    "Cwm": SlidingWindows(4, first=True),
    "Exaone4": SlidingWindows(4, PATTERN),
    "Gemma2": SlidingWindows(2),
    "Gemma3": SlidingWindows(6, PATTERN),
    "GraniteSWA": SlidingWindows(4, first=True),
    "Olmo3": SlidingWindows(4),
    "Rnj1": SlidingWindows(6, PATTERN),
    "VaultGemma": SlidingWindows(2),
    "Qwen2": IF_ENABLED,
    "Qwen3": IF_ENABLED,
    "SmolLM3": IF_ENABLED,
}

# Where they are not those of Llama.
SMOOTHING = {
    "Gemma": GEMMA_SMOOTHING,
    "Gemma2": GEMMA2_SMOOTHING,
    "Gemma3": GEMMA3_SMOOTHING,
    # Norms follow the layers, or attention and MLP read the same norm.
    **dict.fromkeys(("Exaone4", "Olmo2", "Olmo3", "PanguEmbedded", "Rnj1", "VaultGemma", "Cohere", "Cohere2"), ()),
    # It clips queries, keys and values.
    "Olmo": (),
}

LLAMA = model("LlamaForCausalLM", ATTENTION, MLP, sglang=SCALES_LOST, smoothing=DENSE_SMOOTHING)
DENSE = replace(LLAMA, sglang=SGLangLimits())

# Qwen2 with an MTP layer under a name of its own. vLLM models/mimo_mtp.py:115 builds it as the layer after the last,
# without packed_modules_mapping; all published models have 36 layers. SGLang models/mimo_mtp.py:98 builds it without a
# name, so no ignore list can name it for speculative decoding.
MIMO_DRAFT = "model.mtp_layers.*"
MIMO = replace(
    DENSE,
    name="MiMoForCausalLM",
    windows=IF_ENABLED,
    keep=(*DENSE.keep, Keep(f"{MIMO_DRAFT}.**", MTP_LAYER)),
    fused=(
        *DENSE.fused,
        FusedLayers(f"{MIMO_DRAFT}.self_attn.{{q,k,v}}_proj", "qkv_proj"),
        FusedLayers(f"{MIMO_DRAFT}.mlp.{{gate,up}}_proj", "gate_up_proj"),
    ),
    renames=(("model.mtp_layers.0.", "model.layers.36."),),
    sglang=NO_SCALES,
)

# Fused in the files as in vLLM (models/phi3.py); each of the fused parts must divide.
PHI3 = model(
    "Phi3ForCausalLM",
    joined_attention(".self_attn", "qkv_proj", "o_proj", replicated=True, parts=QKV),
    GATE_UP_TENSOR,
    renames=FUSED_NAMES,
    sglang=SCALES_LOST,
    smoothing=PHI3_SMOOTHING,
)

GLM4 = model("Glm4ForCausalLM", ATTENTION, GATE_UP_TENSOR, renames=FUSED_NAMES[3:], smoothing=GLM_SMOOTHING)

ARCEE = model("ArceeForCausalLM", ATTENTION, plain(".mlp"))

# vLLM models/stablelm.py has no packed_modules_mapping.
STABLELM = model(
    "StableLmForCausalLM",
    attention(listed_as="qkv_proj"),
    gated_mlp(".mlp", listed_as="gate_up_proj"),
    sglang=PLAIN_ATTENTION,
)


# Each layer has a second input, per-layer embeddings. Layers with full attention have other heads, and in the larger
# models no value projection. One model has experts beside its MLP, [E, 2I, H] and [E, H, I].
GEMMA4 = model(
    "Gemma4ForCausalLM",
    replace(
        ATTENTION,
        cached=(
            replace(ATTENTION.cached[0], full_heads="num_global_key_value_heads", keys_as_values="attention_k_eq_v"),
        ),
    ),
    MLP,
    replace(
        gated_mlp(".experts.*", sglang=None),
        experts=(stacked_experts(".experts", transformers=False),),
        keep=(Keep(".router.proj", ROUTER),),
    ),
    keep=(
        Keep("{model,model.language_model}.embed_tokens_per_layer", "embedding"),
        Keep("{model,model.language_model}.per_layer_model_projection", "embedding"),
        Keep(".{per_layer_input_gate,per_layer_projection}", "embedding"),
    ),
    windows=SlidingWindows(6),
)

# Several streams of hidden states (AltUp), and per-layer embeddings as in Gemma 4. The last layers read the KV cache of
# earlier ones, so vLLM (models/gemma3n.py:316, 813) builds only q_proj there and drops k_proj and v_proj.
_GEMMA3N = "{model,model.language_model}"
GEMMA3N = model(
    "Gemma3nForCausalLM",
    ATTENTION,
    MLP,
    keep=(
        *GEMMA4.keep[2:],
        # These have four or sixteen rows or columns.
        Keep(".altup.{correction_coefs,prediction_coefs,modality_router}", STREAMS),
        Keep(f"{_GEMMA3N}.{{altup_projections,altup_unembed_projections}}.*", STREAMS),
        Keep(".laurel.{linear_left,linear_right}", "of a low rank"),
    ),
    # models/gemma3n.py:577 has these in a module `self_decoder`.
    spellings=tuple(
        (f"model.{name}", f"model.self_decoder.{name}") for name in ("per_layer_model_projection", "altup_projections.")
    ),
    windows=SlidingWindows(5),
)

# Llama's layers, of several sizes and some without attention or MLP, as block_configs says (vLLM
# models/nemotron_nas.py:133). transformers has no such class.
DECILM = model(
    "DeciLMForCausalLM",
    ATTENTION,
    MLP,
    # models/nemotron_nas.py:416 reads an attribute that only the compressed-tensors config has.
    sglang=sglang_refuses("it fails on any file in it", COMPRESSED_LOADS, format="fp8"),
)

# Names of classes by what SGLang cannot load.
DENSE_NAMES = {
    SCALES_LOST: ("Llama", "Mistral", "Ministral3", "InternLM3", "IQuestCoder", "TeleFLM"),
    SGLangLimits(): (
        *("Qwen2", "Qwen3", "Gemma3", "Exaone4", "Cohere", "Cohere2", "LLaMA", "TeleChat3", "PanguEmbedded", "Rnj1"),
    ),
    NO_SCALES: ("Gemma", "Olmo2", "Olmo3", "Granite", "GraniteSWA", "MiniCPM"),
    PLAIN_ATTENTION: ("Olmo",),
    NO_GROUPS: ("SmolLM3", "SeedOss", "Cwm", "Ernie4_5", "HyperCLOVAX", "VaultGemma"),
    NAMELESS: ("Gemma2",),
    SGLangLimits(head=HEAD_IN_BFLOAT16, uniform_formats=FORMATS): ("HunYuanDenseV1",),
    # SGLang models/solar.py:407 has pairs where packed_modules_mapping must have names.
    sglang_refuses("its table of fused layers is broken"): ("Solar",),
}
# vLLM models/opt.py: the MLP has no module of its own. Files from before transformers 4.23 have no prefix. If
# embeddings are narrower than layers, two projections connect them.
OPT = model(
    "OPTForCausalLM",
    attention("out_proj"),
    plain("", "fc1", "fc2"),
    layers="{model.decoder,decoder}.layers.*",
    keep=(
        Keep("{model.decoder,decoder}.embed_tokens", "embedding", divided=True),
        Keep("{model.decoder,decoder}.{embed_positions,project_in,project_out}", "embedding"),
    ),
    spellings=(("model.decoder.", "decoder."),),
    # models/opt.py:376
    head_refused=BUILT_UNQUANTIZED,
)
# vLLM models/gpt_j.py; older files also hold the attention mask.
GPT_J = model(
    "GPTJForCausalLM",
    attention("out_proj", "qkv_proj", ".attn"),
    plain(".mlp", "fc_in", "fc_out"),
    layers="transformer.h.*",
    keep=(Keep("transformer.wte", "embedding", divided=True), Keep(".attn.bias", "causal mask")),
    cache_refused=ONES_TAKEN,
    # models/gpt_j.py:290
    sglang=sglang_refuses(
        "it asks the format for scales of the KV cache, which this format does not support",
        COMPRESSED_LOADS,
        format="fp8",
    ),
)
# vLLM models/exaone.py:403 calls the decoder "model"; SGLang models/exaone.py:205 calls attention self_attn.
# transformers has no such class; from 5.24 on it loads these files as Llama.
EXAONE = model(
    "ExaoneForCausalLM",
    attention("out_proj", path=".attn.attention"),
    gated_mlp(".mlp", "c_fc_0", "c_fc_1", "c_proj"),
    layers="transformer.h.*",
    keep=(Keep("transformer.wte", "embedding", divided=True),),
    spellings=(("transformer.", "model."),),
    renames=((".attn.attention.", ".self_attn."),),
)

# Two stacks of layers, each of which a token runs through several times (vLLM models/hrm_text.py:160-187). A gate, q, k
# and v are one tensor.
HRM_STACKS = (("H", ("H_cycles",)), ("L", ("H_cycles", "L_cycles")))
HRM_TEXT = model(
    "HrmTextForCausalLM",
    LayerPart(
        (".attn.{gqkv_proj,o_proj}",),
        splits=(
            ParallelSplit(".attn.gqkv_proj", "out", HEADS, parts=(None,) * 4),
            ParallelSplit(".attn.o_proj", "in", HEADS),
        ),
        cached=tuple(
            CachedRows(f"model.{stack}_module.layers.*.attn.gqkv_proj", HEADS, passes=times)
            for stack, times in HRM_STACKS
        ),
    ),
    GATE_UP_TENSOR,
    layers="model.{H,L}_module.layers.*",
    # models/hrm_text.py:217
    cache_refused=SEVERAL_CACHES,
    # models/hrm_text.py:470
    renames=((".attn.", ".self_attn."),),
    # transformers splits both fused tensors, which it refuses if anything is quantized.
)

# A token runs through all layers twice. The second pass has a sliding window beside the first pass's cache, and a gate
# with a row for each head mixes both. vLLM models/iquest_loopcoder.py.
IQUEST_LOOP = model(
    "IQuestLoopCoderForCausalLM",
    replace(
        attention(listed_as="qkv_proj"),
        cached=(CachedRows(".self_attn.{k,v}_proj", KV_HEADS, passes=("loop_num",), later_window="loop_window_size"),),
    ),
    gated_mlp(".mlp", listed_as="gate_up_proj"),
    keep=(Keep("model.gate_projections.*", "gates of a row per head", divided=True),),
    # :311
    spellings=(("model.gate_projections.*", "model.gate_projections.*.gate_proj"),),
    # :154
    cache_refused=SEVERAL_CACHES,
)

# A gate for each head's output, which has another name in vLLM models/muse_glimmer.py:1430. Three of four layers have
# windows; the last layer has none.
MUSE_GLIMMER = model(
    "MuseGlimmerForCausalLM",
    ATTENTION,
    LayerPart((".self_attn.gate_proj",), splits=(ParallelSplit(".self_attn.gate_proj", "out", HEADS),)),
    MLP,
    renames=((".self_attn.gate_proj", ".self_attn.output_gate_proj"),),
    windows=SlidingWindows(4),
    # transformers has only the wrapper.
)


H_TO_4H = plain(".mlp", "dense_h_to_4h", "dense_4h_to_h")
FALCON_KV = "num_kv_heads"
EQUAL_HEADS = (HEADS, HEADS, HEADS)
# A flag that counts the one KV head too.
MULTI_QUERY = ("multi_query", (HEADS, "multi_query", "multi_query"))

# vLLM models/falcon.py:407-436 sorts every tensor that has an output axis. Its rows are, for each KV head, that of its
# query heads, then its key and its value. Older models have one KV head (multi_query is the key that counts it), or as
# many as query heads.
FALCON = model(
    "FalconForCausalLM",
    joined_attention(
        *(".self_attention", "query_key_value", "dense", FALCON_KV),
        replicated=True,
        parts=EQUAL_HEADS,
        where=(("new_decoder_architecture", (HEADS, FALCON_KV, FALCON_KV)), MULTI_QUERY),
        interleaved=True,
    ),
    H_TO_4H,
    layers="transformer.h.*",
    keep=(Keep("transformer.word_embeddings", "embedding", divided=True),),
)

# vLLM models/bloom.py:316-328 sorts every tensor with that name, scales too. Files from before transformers 4.50 have
# no prefix.
BLOOM = model(
    "BloomForCausalLM",
    joined_attention(
        *(".self_attention", "query_key_value", "dense", HEADS),
        parts=EQUAL_HEADS,
        interleaved=True,
        interleaved_all=True,
    ),
    H_TO_4H,
    layers="{transformer.h,h}.*",
    keep=(Keep("{transformer.word_embeddings,word_embeddings}", "embedding", divided=True),),
    spellings=(("transformer.h.", "h."),),
    head_refused=BUILT_UNQUANTIZED,
)

# Run by the engines' Transformers backends, which leave the interleaved heads as they are.
GPT_NEOX = model(
    "GPTNeoXForCausalLM",
    joined_attention(".attention", "query_key_value", "dense", HEADS, equal_parts=3, heads=HEADS),
    H_TO_4H,
    layers="gpt_neox.layers.*",
    keep=(
        Keep("gpt_neox.embed_in", "embedding", divided=True),
        Keep("embed_out", "output head", divided=True),
        Keep(".attention.bias", "causal mask"),
    ),
    head_refused="it is called embed_out",
    sglang=NO_GROUPS,
)

# Interleaved: for each KV head its query heads, then its key and its value. vLLM models/internlm2.py:158 leaves the
# rows and sorts the outputs. It gathers as many as there are heads, so KV heads cannot be copied to ranks. transformers
# has no such class, nor those of ChatGLM and Ling.
INTERNLM2 = model(
    "InternLM2ForCausalLM",
    joined_attention(".attention", "wqkv", "wo", parts=QKV),
    gated_mlp(".feed_forward", "w1", "w3", "w2"),
    keep=(Keep("model.tok_embeddings", "embedding", divided=True), Keep("output", "output head", divided=True)),
    head_refused="it is called output",
    # models/internlm2.py:337-356 sorts every tensor whose name has "wqkv", and fails on those with fewer rows.
    sglang=sglang_refuses(
        "it fails on scales that are not by row, as it sorts them", "--scheme channel loads", scales="not by row"
    ),
)

# q, k and v follow one another. Files of GLM-4V have the same class names; only their vision_config tells them apart.
# For them vLLM (models/chatglm.py:441) needs GLM4VForCausalLM.
CHATGLM = model(
    "ChatGLMModel",
    joined_attention(
        *(".self_attention", "query_key_value", "dense"),
        replicated=True,
        parts=EQUAL_HEADS,
        where=(("multi_query_attention", QKV),),
    ),
    plain(".mlp", "dense_h_to_4h", "dense_4h_to_h", GATE_UP),
    layers="transformer.encoder.layers.*",
    keep=(
        Keep("transformer.embedding.word_embeddings", "embedding", divided=True),
        Keep("transformer.output_layer", "output head", divided=True),
        Keep("transformer.vision.**", TOWER),
    ),
    head_refused="it is called output_layer",
)

# Run by vLLM's Transformers backend, which divides its attention, but not its MLP, for which it has no tensor-parallel
# plan (models/transformers/base.py:480). Most models have one KV head, counted by the flag multi_query.
GPT_BIGCODE = model(
    "GPTBigCodeForCausalLM",
    joined_attention(
        *(".attn", "c_attn", "c_proj", "multi_query"), replicated=True, parts=EQUAL_HEADS, where=(MULTI_QUERY,)
    ),
    LayerPart((".mlp.{c_fc,c_proj}",)),
    layers="transformer.h.*",
    keep=(Keep("transformer.wte", "embedding", divided=True), Keep("transformer.wpe", "embedding")),
    cache_refused=ONES_TAKEN,
    # models/gpt_bigcode.py:295 loads all scales of c_attn for each of q, k and v.
    sglang=sglang_refuses("it takes one scale for what c_attn holds", "--scheme tensor loads", scales="several"),
)

# Interleaved: for each head its key, then its value. vLLM models/telechat2.py:64-86 splits every tensor of that name by
# row counts, and looks up all but the fused layers by other names. transformers has no such class.
TELECHAT2 = model(
    "TeleChat2ForCausalLM",
    LayerPart(
        (".self_attention.{query,key_value,dense}",),
        (FusedLayers(".self_attention.{query,key_value}", "qkv_proj"),),
        (
            ParallelSplit(".self_attention.query", "out", HEADS),
            ParallelSplit(
                ".self_attention.key_value", "out", parts=(None, None), interleaved=True, interleaved_rows=True
            ),
            ParallelSplit(".self_attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".self_attention.key_value", KV_HEADS),),
    ),
    gated_mlp(".mlp"),
    layers="transformer.h.*",
    keep=(Keep("transformer.word_embeddings", "embedding", divided=True),),
    renames=((".self_attention.dense", ".self_attention.o_proj"),),
)

ENTRIES = (
    *(
        replace(
            DENSE,
            name=f"{name}ForCausalLM",
            sglang=sglang,
            windows=WINDOWS.get(name, SlidingWindows()),
            smoothing=SMOOTHING.get(name, DENSE.smoothing),
        )
        for sglang, names in DENSE_NAMES.items()
        for name in names
    ),
    DECILM,
    MIMO,
    PHI3,
    GLM4,
    model("GlmForCausalLM", ATTENTION, GATE_UP_TENSOR, smoothing=GLM_SMOOTHING),
    ARCEE,
    replace(ARCEE, name="ApertusForCausalLM"),
    *(replace(ARCEE, name=f"{name}ForCausalLM", sglang=NO_GROUPS) for name in ("Nemotron", "Jais2")),
    model("Starcoder2ForCausalLM", ATTENTION, plain(".mlp", "c_fc", "c_proj")),
    model(
        "PhiForCausalLM",
        attention("dense"),
        plain(".mlp", "fc1", "fc2"),
        sglang=SGLangLimits(head=HEAD_IN_BFLOAT16, uniform_formats=FORMATS),
    ),
    HRM_TEXT,
    IQUEST_LOOP,
    MUSE_GLIMMER,
    OPT,
    GPT_J,
    EXAONE,
    STABLELM,
    # models/orion.py has no packed_modules_mapping either; transformers has no such class.
    replace(STABLELM, name="OrionForCausalLM", sglang=NO_SCALES),
    GEMMA4,
    GEMMA3N,
    FALCON,
    BLOOM,
    GPT_NEOX,
    INTERNLM2,
    CHATGLM,
    replace(CHATGLM, name="ChatGLMForConditionalGeneration"),
    replace(CHATGLM, name="GLM4VForCausalLM"),
    GPT_BIGCODE,
    TELECHAT2,
)

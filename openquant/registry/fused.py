"""Decoders whose files hold q, k and v of a layer as one tensor: one after another, or head by head."""

from __future__ import annotations

from dataclasses import replace

from .architecture import TOWER, CachedRows, FusedLayers, Keep, ParallelSplit, Refusal, SGLangLimits
from .experts import ROUTED, SHARED_EXPERTS
from .parts import (
    BUILT_UNQUANTIZED,
    HEADS,
    KV_HEADS,
    NAMELESS_CACHE,
    NO_GROUPS,
    ONES_TAKEN,
    LayerPart,
    gated_mlp,
    model,
)

MLP = LayerPart(
    (".mlp.{dense_h_to_4h,dense_4h_to_h}",),
    splits=(ParallelSplit(".mlp.dense_h_to_4h", "out"), ParallelSplit(".mlp.dense_4h_to_h", "in")),
)
FALCON_KV = "num_kv_heads"

# vLLM models/falcon.py:407-436 sorts every tensor that has an output axis. Its rows are, for each KV head, that of its
# query heads, then its key and its value. Older models have one KV head (multi_query is the key that counts it), or as
# many as query heads.
FALCON = model(
    "FalconForCausalLM",
    LayerPart(
        (".self_attention.{query_key_value,dense}",),
        splits=(
            ParallelSplit(
                ".self_attention.query_key_value",
                "out",
                replicated=True,
                parts=(HEADS, HEADS, HEADS),
                where=(
                    ("new_decoder_architecture", (HEADS, FALCON_KV, FALCON_KV)),
                    ("multi_query", (HEADS, "multi_query", "multi_query")),
                ),
                interleaved=True,
            ),
            ParallelSplit(".self_attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".self_attention.query_key_value", FALCON_KV),),
    ),
    MLP,
    layers="transformer.h.*",
    keep=(Keep("transformer.word_embeddings", "embedding", divided=True),),
)

# vLLM models/bloom.py:316-328 sorts every tensor with that name, scales too. Files from before transformers 4.50 have
# no prefix.
BLOOM_HEADS = (HEADS, HEADS, HEADS)
BLOOM = model(
    "BloomForCausalLM",
    LayerPart(
        (".self_attention.{query_key_value,dense}",),
        splits=(
            ParallelSplit(
                ".self_attention.query_key_value", "out", parts=BLOOM_HEADS, interleaved=True, interleaved_all=True
            ),
            ParallelSplit(".self_attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".self_attention.query_key_value", HEADS),),
    ),
    MLP,
    layers="{transformer.h,h}.*",
    keep=(Keep("{transformer.word_embeddings,word_embeddings}", "embedding", divided=True),),
    spellings=(("transformer.h.", "h."),),
    head_refused=BUILT_UNQUANTIZED,
)

# Run by the engines' Transformers backends, which leave the interleaved heads as they are.
GPT_NEOX = model(
    "GPTNeoXForCausalLM",
    LayerPart(
        (".attention.{query_key_value,dense}",),
        splits=(
            ParallelSplit(".attention.query_key_value", "out", HEADS),
            ParallelSplit(".attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".attention.query_key_value", HEADS, equal_parts=3),),
    ),
    MLP,
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
QKV = (HEADS, KV_HEADS, KV_HEADS)
INTERNLM2 = model(
    "InternLM2ForCausalLM",
    LayerPart(
        (".attention.{wqkv,wo}",),
        splits=(ParallelSplit(".attention.wqkv", "out", parts=QKV), ParallelSplit(".attention.wo", "in", HEADS)),
        cached=(CachedRows(".attention.wqkv", KV_HEADS),),
    ),
    gated_mlp(".feed_forward", "w1", "w3", "w2"),
    keep=(
        Keep("model.tok_embeddings", "embedding", divided=True),
        Keep("output", "output head", divided=True),
    ),
    head_refused="it is called output",
    # models/internlm2.py:337-356 sorts every tensor whose name has "wqkv", and fails on those with fewer rows.
    sglang=SGLangLimits(
        (
            Refusal(
                None,
                None,
                "it fails on scales that are not by row, as it sorts them",
                "--scheme channel loads",
                scales="not by row",
            ),
        )
    ),
    transformers_reads_blocks=False,
)

# q, k and v follow one another. Files of GLM-4V have the same class names; only their vision_config tells them apart.
# For them vLLM (models/chatglm.py:441) needs GLM4VForCausalLM.
CHATGLM = model(
    "ChatGLMModel",
    LayerPart(
        (".self_attention.{query_key_value,dense}",),
        splits=(
            ParallelSplit(
                ".self_attention.query_key_value",
                "out",
                replicated=True,
                parts=(HEADS, HEADS, HEADS),
                where=(("multi_query_attention", QKV),),
            ),
            ParallelSplit(".self_attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".self_attention.query_key_value", KV_HEADS),),
    ),
    LayerPart(
        (".mlp.{dense_h_to_4h,dense_4h_to_h}",),
        splits=(
            ParallelSplit(".mlp.dense_h_to_4h", "out", parts=(None, None)),
            ParallelSplit(".mlp.dense_4h_to_h", "in"),
        ),
    ),
    layers="transformer.encoder.layers.*",
    keep=(
        Keep("transformer.embedding.word_embeddings", "embedding", divided=True),
        Keep("transformer.output_layer", "output head", divided=True),
        Keep("transformer.vision.**", TOWER),
    ),
    head_refused="it is called output_layer",
    transformers_reads_blocks=False,
)

# Dense layers first, then experts. vLLM models/bailing_moe.py.
BAILING_MOE_V2 = model(
    "BailingMoeV2ForCausalLM",
    LayerPart(
        (".attention.{query_key_value,dense}",),
        splits=(
            ParallelSplit(".attention.query_key_value", "out", replicated=True, parts=QKV),
            ParallelSplit(".attention.dense", "in", HEADS),
        ),
        cached=(CachedRows(".attention.query_key_value", KV_HEADS),),
    ),
    gated_mlp(".mlp"),
    SHARED_EXPERTS,
    ROUTED,
    keep=(Keep("model.word_embeddings", "embedding", divided=True),),
    draft_layers="num_hidden_layers",
    # models/bailing_moe.py:147
    cache_refused=NAMELESS_CACHE,
    # :560
    head_refused="engines divide its columns by their length where config.json has norm_head",
    transformers_reads_blocks=False,
)

# Run by vLLM's Transformers backend, which divides its attention, but not its MLP, for which it has no tensor-parallel
# plan (models/transformers/base.py:480). Most models have one KV head, counted by the flag multi_query.
GPT_BIGCODE = model(
    "GPTBigCodeForCausalLM",
    LayerPart(
        (".attn.{c_attn,c_proj}", ".mlp.{c_fc,c_proj}"),
        splits=(
            ParallelSplit(
                ".attn.c_attn",
                "out",
                replicated=True,
                parts=(HEADS, HEADS, HEADS),
                where=(("multi_query", (HEADS, "multi_query", "multi_query")),),
            ),
            ParallelSplit(".attn.c_proj", "in", HEADS),
        ),
        cached=(CachedRows(".attn.c_attn", "multi_query"),),
    ),
    layers="transformer.h.*",
    keep=(
        Keep("transformer.wte", "embedding", divided=True),
        Keep("transformer.wpe", "embedding"),
    ),
    cache_refused=ONES_TAKEN,
    # models/gpt_bigcode.py:295 loads all scales of c_attn for each of q, k and v.
    sglang=SGLangLimits(
        (Refusal(None, None, "it takes one scale for what c_attn holds", "--scheme tensor loads", scales="several"),)
    ),
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
    transformers_reads_blocks=False,
)

ENTRIES = (
    FALCON,
    BLOOM,
    GPT_NEOX,
    INTERNLM2,
    CHATGLM,
    replace(CHATGLM, name="ChatGLMForConditionalGeneration"),
    replace(CHATGLM, name="GLM4VForCausalLM"),
    GPT_BIGCODE,
    TELECHAT2,
    BAILING_MOE_V2,
    replace(BAILING_MOE_V2, name="BailingMoeForCausalLM"),
)

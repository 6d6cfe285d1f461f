"""Decoders whose files hold q, k and v of a layer as one tensor: one after another, or head by head."""

from __future__ import annotations

from dataclasses import replace

from ..version import VLLM
from .architecture import CachedRows, FusedLayers, Keep, ParallelSplit, Refusal, SGLangLimits
from .experts import ROUTED, SHARED_EXPERTS
from .parts import HEADS, KV_HEADS, NAMELESS_CACHE, NO_GROUPS, ONES_TAKEN, LayerPart, gated, model

MLP = LayerPart(
    (".mlp.{dense_h_to_4h,dense_4h_to_h}",),
    splits=(ParallelSplit(".mlp.dense_h_to_4h", "out"), ParallelSplit(".mlp.dense_4h_to_h", "in")),
)
FALCON_KV = "num_kv_heads"

# vLLM models/falcon.py:407-436 sorts what has an axis of outputs: for each key its queries, then it and its
# value. Older ones have one key for all (multi_query, which counts it), or one for each query.
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

# vLLM models/bloom.py:316-328 sorts every tensor by that name, whatever it is. Files of before transformers 4.50
# have no prefix.
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
    head_refused=f"{VLLM} builds it without a quantization",
)

# On the engines' Transformers backends, which leave its rows, heads by turns, where they are.
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

# For each key its queries, then it and its value: vLLM models/internlm2.py:158 leaves rows as they lie and sorts
# what they make. It gathers as many as there are heads, so none can be copied to ranks. transformers has no such
# class, nor those of ChatGLM and Ling.
QKV = (HEADS, KV_HEADS, KV_HEADS)
INTERNLM2 = model(
    "InternLM2ForCausalLM",
    LayerPart(
        (".attention.{wqkv,wo}",),
        splits=(ParallelSplit(".attention.wqkv", "out", parts=QKV), ParallelSplit(".attention.wo", "in", HEADS)),
        cached=(CachedRows(".attention.wqkv", KV_HEADS),),
    ),
    gated(".feed_forward", "w1", "w3", "w2"),
    keep=(
        Keep("model.tok_embeddings", "embedding", divided=True),
        Keep("output", "output head", divided=True),
    ),
    head_refused="it is called output",
    # models/internlm2.py:337-356 sorts every tensor whose name has "wqkv", and fails on those that have no row for each
    # of the weight's.
    sglang=SGLangLimits(
        tuple(
            Refusal(scheme, None, "it fails on scales that are not by row, as it sorts them", "--scheme channel loads")
            for scheme in ("tensor", "block", "int8-weights", "int4", "nvfp4", "nvfp4-w4a4")
        )
    ),
    transformers_reads_blocks=False,
)

# One after another. Files of GLM-4V say either name too, and only its vision_config tells them apart; vLLM
# (models/chatglm.py:441) is told GLM4VForCausalLM for them.
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
        Keep("transformer.vision.**", "vision or audio"),
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
    gated(".mlp"),
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

# On vLLM's Transformers backend, which divides its attention as it finds it, and not its MLP, of which no plan tells
# (models/transformers/base.py:480). Most have one key for all heads, which is counted by the flag that says so.
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
    # models/gpt_bigcode.py:295 loads the scales of c_attn whole, for each of queries, key and value.
    sglang=SGLangLimits(
        tuple(
            Refusal(scheme, None, "it takes one scale for what c_attn holds", "--scheme tensor loads")
            for scheme in ("channel", "block", "mxfp8", "int8", "int8-weights", "int4", "mxfp4", "nvfp4", "nvfp4-w4a4")
        )
    ),
)

# For each head its key, then its value, which vLLM models/telechat2.py:64-86 cuts apart in every tensor of that
# name, by counts of rows. It gives all but the joined layers the names that they are built under. transformers has
# no such class.
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
    gated(".mlp"),
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

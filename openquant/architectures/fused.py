"""Decoders whose files hold q, k and v of a layer as one tensor: one after another, or head by head."""

from __future__ import annotations

from .entry import Cached, Keep, Split
from .parts import HEADS, NO_GROUPS, Part, model

MLP = Part(
    (".mlp.{dense_h_to_4h,dense_4h_to_h}",),
    splits=(Split(".mlp.dense_h_to_4h", "out"), Split(".mlp.dense_4h_to_h", "in")),
)
FALCON_KV = "num_kv_heads"

# vLLM 0.32.0 models/falcon.py:407-436 sorts what has an axis of outputs: for each key its queries, then it and its
# value. Older ones have one key for all (multi_query, which counts it), or one for each query.
FALCON = model(
    "FalconForCausalLM",
    Part(
        (".self_attention.{query_key_value,dense}",),
        splits=(
            Split(
                ".self_attention.query_key_value",
                "out",
                replicated=True,
                parts=(HEADS, HEADS, HEADS),
                where=(
                    ("new_decoder_architecture", (HEADS, FALCON_KV, FALCON_KV)),
                    ("multi_query", (HEADS, "multi_query", "multi_query")),
                ),
                turns=True,
            ),
            Split(".self_attention.dense", "in", HEADS),
        ),
        cached=(Cached(".self_attention.query_key_value", FALCON_KV),),
    ),
    MLP,
    layers="transformer.h.*",
    keep=(Keep("transformer.word_embeddings", "embedding", divided=True),),
)

# vLLM 0.32.0 models/bloom.py:316-328 sorts every tensor by that name, whatever it is. Files of before transformers 4.50
# have no prefix.
BLOOM_HEADS = (HEADS, HEADS, HEADS)
BLOOM = model(
    "BloomForCausalLM",
    Part(
        (".self_attention.{query_key_value,dense}",),
        splits=(
            Split(".self_attention.query_key_value", "out", parts=BLOOM_HEADS, turns=True, turns_all=True),
            Split(".self_attention.dense", "in", HEADS),
        ),
        cached=(Cached(".self_attention.query_key_value", HEADS),),
    ),
    MLP,
    layers="{transformer.h,h}.*",
    keep=(Keep("{transformer.word_embeddings,word_embeddings}", "embedding", divided=True),),
    spellings=(("transformer.h.", "h."),),
    head_refused="vLLM 0.32.0 builds it without a quantization",
)

# On the engines' Transformers backends, which leave its rows, heads by turns, where they are.
GPT_NEOX = model(
    "GPTNeoXForCausalLM",
    Part(
        (".attention.{query_key_value,dense}",),
        splits=(Split(".attention.query_key_value", "out", HEADS), Split(".attention.dense", "in", HEADS)),
        cached=(Cached(".attention.query_key_value", HEADS, two_of=3),),
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

ENTRIES = (FALCON, BLOOM, GPT_NEOX)

"""Small models of the architectures that transformers can make, as data: their names and shapes are what it saves.

A few lines each: config.json beyond small_checkpoints.COMMON, and what published files hold that transformers does not.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from safetensors import safe_open

from support.tiny_architecture import (
    COHERE,
    DEEPSEEK_MOE,
    DRAFT,
    GATED_DELTA,
    GEMMA,
    GEMMA4,
    GLM5_NEXT,
    GLM5_NEXT_VISION,
    INDEXER,
    LOCAL_MOE,
    MAMBA,
    MLA,
    MOE,
    MTP,
    NEMOTRON_H,
    QWEN3_5,
    QWEN4_EXP,
    QWEN_MOE,
    ROPE,
    SLIDING,
    Shape,
    Small,
    stacks,
)
from support.tiny_mixed_architectures import MIXED
from support.tiny_multimodal_architectures import WRAPPERS

LLAMA_ALIAS = Small("llama", made_as=("LlamaForCausalLM", "llama"))
LLAMA_LIKE = replace(LLAMA_ALIAS, streamed=False)
EXAONE_MOE = Small(
    "exaone_moe",
    {
        **MOE,
        **SLIDING,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "is_moe_layer": [False, True],
        "n_group": 1,
        "topk_group": 1,
    },
)
CHATGLM = replace(
    LLAMA_LIKE,
    model_type="chatglm",
    config={
        "ffn_hidden_size": 512,
        "kv_channels": 64,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-05,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "seq_length": 2048,
    },
    without=("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps", "attention_bias"),
    also={"num_layers": "num_hidden_layers", "padded_vocab_size": "vocab_size"},
    renames={
        r"model\.embed_tokens": "transformer.embedding.word_embeddings",
        "lm_head": "transformer.output_layer",
        r"model\.norm": "transformer.encoder.final_layernorm",
        r"model\.(layers\.\d+)\.self_attn\.o_proj": r"transformer.encoder.\1.self_attention.dense",
        r"model\.(layers\.\d+)\.mlp\.down_proj": r"transformer.encoder.\1.mlp.dense_4h_to_h",
        r"model\.layers": "transformer.encoder.layers",
    },
    drop=r".*\.(([qkv]|gate|up)_proj|dense_4h_to_h)\.weight",
    extra={
        "transformer.rotary_pos_emb.inv_freq": (16,),
        **{
            f"transformer.encoder.layers.{n}.{name}": shape
            for n in (0, 1)
            for name, shape in {
                "self_attention.query_key_value.weight": (512, 256),
                "self_attention.query_key_value.bias": (512,),
                "mlp.dense_h_to_4h.weight": (1024, 256),
                "mlp.dense_4h_to_h.weight": (256, 512),
            }.items()
        },
    },
)
# Engines read their configuration with the repository's own code alone; GLM-4.5's adds nothing to it.
BAILING = {
    "num_experts": 4,
    "num_shared_experts": 1,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "norm_head": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
BAILING_MOE_V2 = Small(
    "glm4_moe",
    {**DEEPSEEK_MOE, **BAILING, "num_nextn_predict_layers": 0},
    made_as=("Glm4MoeForCausalLM", "glm4_moe"),
    renames={
        r"model\.embed_tokens": "model.word_embeddings",
        r"(.*)\.self_attn\.o_proj": r"\1.attention.dense",
        r"(.*)\.self_attn\.q_norm": r"\1.attention.query_layernorm",
        r"(.*)\.self_attn\.k_norm": r"\1.attention.key_layernorm",
        r"(.*)\.e_score_correction_bias": r"\1.expert_bias",
    },
    drop=r".*\.[qkv]_proj\.weight",
    extra={f"model.layers.{n}.attention.query_key_value.weight": (512, 256) for n in (0, 1)},
    streamed=False,
)
EVA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-06,
    "in_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "num_positions": 17,
    "dropout_prob": 0.0,
    "scaling_factor": 8,
}
EVA_LAYER = "transformer.vision.transformer.layers.0"
ZOO = {
    "Ministral3ForCausalLM": Small(
        "ministral3",
        {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 2048}},
    ),
    "Qwen2ForCausalLM": Small("qwen2"),
    # Only its own code reads its model_type, mimo, which adds nothing to this one.
    "MiMoForCausalLM": Small(
        "qwen2",
        {"num_nextn_predict_layers": 1},
        made_as=("Qwen2ForCausalLM", "qwen2"),
        copies={"model.layers.1.": "model.mtp_layers.0."},
        extra={
            "model.mtp_layers.0.input_proj.weight": (256, 512),
            "model.mtp_layers.0.token_layernorm.weight": (256,),
            "model.mtp_layers.0.hidden_layernorm.weight": (256,),
            "model.mtp_layers.0.final_layernorm.weight": (256,),
        },
    ),
    # Only their own code reads their model types, or none does any more.
    "LLaMAForCausalLM": LLAMA_ALIAS,
    "InternLM3ForCausalLM": LLAMA_ALIAS,
    "IQuestCoderForCausalLM": LLAMA_ALIAS,
    "IQuestLoopCoderForCausalLM": replace(
        LLAMA_LIKE,
        config={"loop_num": 2, "loop_window_size": 64},
        extra={
            f"model.gate_projections.{n}.{name}": shape
            for n in (0, 1)
            for name, shape in (("weight", (4, 64)), ("bias", (4,)))
        },
    ),
    "TeleChat3ForCausalLM": LLAMA_ALIAS,
    "SolarForCausalLM": replace(
        LLAMA_LIKE, config={"bskcn_1": [], "bskcn_2": [], "bskcn_3": [], "bskcn_4": [], "bskcn_tv": [0.9, 0.8]}
    ),
    # As published ones, it has layers without attention, and MLPs of several sizes.
    "DeciLMForCausalLM": replace(
        LLAMA_LIKE,
        model_type="nemotron-nas",
        config={
            "block_configs": [
                {
                    "attention": {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False},
                    "ffn": {"ffn_mult": times, "no_op": False, "replace_with_linear": False},
                }
                for group, times in ((2, 3.0), (None, 1.5))
            ]
        },
        drop=r"model\.layers\.1\.(self_attn|input_layernorm|mlp)\..*",
        extra={
            "model.layers.1.mlp.gate_proj.weight": (256, 256),
            "model.layers.1.mlp.up_proj.weight": (256, 256),
            "model.layers.1.mlp.down_proj.weight": (256, 256),
        },
    ),
    "TeleFLMForCausalLM": replace(
        LLAMA_LIKE, config={"use_mup": True, "mup_scale_factor": 2.0, "output_mult": 2.0, "input_mult": 1.0}
    ),
    "MiniCPMForCausalLM": replace(LLAMA_LIKE, config={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 128}),
    "OrionForCausalLM": replace(
        LLAMA_LIKE,
        extra={
            "model.norm.bias": (256,),
            **{f"model.layers.{n}.{at}_layernorm.bias": (256,) for n in (0, 1) for at in ("input", "post_attention")},
        },
    ),
    # Its own layout: for each head of keys its queries, it and its value lie together.
    "InternLM2ForCausalLM": replace(
        LLAMA_LIKE,
        renames={
            r"model\.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            r"(.*)\.self_attn\.o_proj": r"\1.attention.wo",
            r"(.*)\.mlp\.gate_proj": r"\1.feed_forward.w1",
            r"(.*)\.mlp\.down_proj": r"\1.feed_forward.w2",
            r"(.*)\.mlp\.up_proj": r"\1.feed_forward.w3",
            r"(.*)\.input_layernorm": r"\1.attention_norm",
            r"(.*)\.post_attention_layernorm": r"\1.ffn_norm",
        },
        drop=r".*\.[qkv]_proj\.weight",
        extra={f"model.layers.{n}.attention.wqkv.weight": (512, 256) for n in (0, 1)},
    ),
    "ChatGLMModel": CHATGLM,
    "ChatGLMForConditionalGeneration": CHATGLM,
    # Its files say one of the other two names, and a tower.
    "GLM4VForCausalLM": replace(
        CHATGLM,
        config={
            **CHATGLM.config,
            "vision_config": EVA,
            "boi_token_id": 5,
            "eoi_token_id": 6,
        },
        extra={
            **CHATGLM.extra,
            "transformer.vision.patch_embedding.proj.weight": (128, 3, 14, 14),
            "transformer.vision.patch_embedding.proj.bias": (128,),
            "transformer.vision.patch_embedding.cls_embedding": (1, 128),
            "transformer.vision.patch_embedding.position_embedding.weight": (17, 128),
            **{
                f"{EVA_LAYER}.{norm}_layernorm.{name}": (128,)
                for norm in ("input", "post_attention")
                for name in ("weight", "bias")
            },
            f"{EVA_LAYER}.attention.query_key_value.weight": (384, 128),
            f"{EVA_LAYER}.attention.query_key_value.bias": (384,),
            f"{EVA_LAYER}.attention.dense.weight": (128, 128),
            f"{EVA_LAYER}.attention.dense.bias": (128,),
            f"{EVA_LAYER}.mlp.fc1.weight": (256, 128),
            f"{EVA_LAYER}.mlp.fc1.bias": (256,),
            f"{EVA_LAYER}.mlp.fc2.weight": (128, 256),
            f"{EVA_LAYER}.mlp.fc2.bias": (128,),
            "transformer.vision.linear_proj.linear_proj.weight": (256, 256),
            "transformer.vision.linear_proj.norm1.weight": (256,),
            "transformer.vision.linear_proj.norm1.bias": (256,),
            "transformer.vision.linear_proj.gate_proj.weight": (512, 256),
            "transformer.vision.linear_proj.dense_h_to_4h.weight": (512, 256),
            "transformer.vision.linear_proj.dense_4h_to_h.weight": (256, 512),
            "transformer.vision.conv.weight": (256, 128, 2, 2),
            "transformer.vision.conv.bias": (256,),
            "transformer.vision.boi": (1, 1, 256),
            "transformer.vision.eoi": (1, 1, 256),
        },
    ),
    "PanguEmbeddedForCausalLM": replace(LLAMA_LIKE, config={"attention_bias": True}),
    "GemmaForCausalLM": Small("gemma", GEMMA, zero_norms=True),
    "Gemma2ForCausalLM": Small(
        "gemma2", {**GEMMA, "query_pre_attn_scalar": 64, "sliding_window": 512}, zero_norms=True
    ),
    # SGLang builds as many heads of keys as of queries (models/olmo.py:86), as all that is published has.
    "OlmoForCausalLM": Small("olmo", {"num_key_value_heads": 4}),
    "Olmo2ForCausalLM": Small("olmo2"),
    "Olmo3ForCausalLM": Small("olmo3", SLIDING),
    "GraniteForCausalLM": Small("granite"),
    "GraniteSWAForCausalLM": Small("granite_swa", {**SLIDING, "attention_sinks": True}),
    "SmolLM3ForCausalLM": Small("smollm3", {"no_rope_layers": [1, 0]}),
    "Exaone4ForCausalLM": Small("exaone4", {**SLIDING, "sliding_window_pattern": "LG"}),
    "CohereForCausalLM": Small("cohere", COHERE),
    "Cohere2ForCausalLM": Small("cohere2", {**COHERE, **SLIDING}),
    "SeedOssForCausalLM": Small("seed_oss"),
    "CwmForCausalLM": Small("cwm"),
    "Ernie4_5ForCausalLM": Small("ernie4_5", {"use_bias": False}),
    "HunYuanDenseV1ForCausalLM": Small("hunyuan_v1_dense", {"use_qk_norm": True}),
    "Phi3ForCausalLM": Small("phi3"),
    "Glm4ForCausalLM": Small("glm4"),
    "GlmForCausalLM": Small("glm"),
    "ArceeForCausalLM": Small("arcee", {"hidden_act": "relu2"}),
    "ApertusForCausalLM": Small("apertus", {"hidden_act": "xielu"}),
    "NemotronForCausalLM": Small("nemotron", {"hidden_act": "relu2", "norm_eps": 1e-05, "partial_rotary_factor": 0.5}),
    "Jais2ForCausalLM": Small("jais2", {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "HyperCLOVAXForCausalLM": Small("hyperclovax", {"attention_multiplier": 0.125}),
    "Rnj1ForCausalLM": Small(
        "gemma3_text",
        {
            **GEMMA,
            **SLIDING,
            "rope_parameters": GEMMA4["rope_parameters"],
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
        },
        made_as=("Gemma3ForCausalLM", "gemma3_text"),
        zero_norms=True,
        streamed=False,
    ),
    "VaultGemmaForCausalLM": Small("vaultgemma", {**GEMMA, **SLIDING, "query_pre_attn_scalar": 64}, zero_norms=True),
    "Starcoder2ForCausalLM": Small(
        "starcoder2",
        {"use_bias": True, "norm_epsilon": 1e-05, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    ),
    "PhiForCausalLM": Small(
        "phi",
        {
            # SGLang knows no others.
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
            "layer_norm_eps": 1e-05,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
    ),
    # Heads of 128: its one key is a whole block.
    "GPTBigCodeForCausalLM": Small(
        "gpt_bigcode",
        {
            "num_attention_heads": 2,
            "n_inner": 512,
            "multi_query": True,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        without=("num_key_value_heads", "intermediate_size", "head_dim", "hidden_act", "rope_parameters"),
    ),
    "GPTJForCausalLM": Small(
        "gptj",
        {"n_inner": 512, "rotary_dim": 32, "activation_function": "gelu_new"},
        without=("num_key_value_heads", "intermediate_size", "head_dim", "hidden_act"),
    ),
    "ExaoneForCausalLM": replace(
        LLAMA_LIKE,
        config={"activation_function": "silu", "layer_norm_epsilon": 1e-05},
        renames={
            r"model\.embed_tokens": "transformer.wte",
            r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            r"(.*)\.input_layernorm": r"\1.ln_1",
            r"(.*)\.post_attention_layernorm": r"\1.ln_2",
            r"(.*)\.self_attn\.o_proj": r"\1.attn.attention.out_proj",
            r"(.*)\.self_attn": r"\1.attn.attention",
            r"(.*)\.gate_proj": r"\1.c_fc_0",
            r"(.*)\.up_proj": r"\1.c_fc_1",
            r"(.*)\.down_proj": r"\1.c_proj",
        },
    ),
    "TeleChat2ForCausalLM": replace(
        LLAMA_LIKE,
        config={"num_key_value_heads": 4},
        also={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        renames={
            r"model\.embed_tokens": "transformer.word_embeddings",
            r"model\.norm": "transformer.ln_f",
            r"model\.layers": "transformer.h",
            r"(.*)\.self_attn\.o_proj": r"\1.self_attention.dense",
            r"(.*)\.self_attn\.q_proj": r"\1.self_attention.query",
        },
        drop=r".*\.[kv]_proj\.weight",
        extra={
            f"transformer.h.{n}.{name}": shape
            for n in (0, 1)
            for name, shape in {
                "self_attention.key_value.weight": (512, 256),
                "self_attention.dense.bias": (256,),
                "mlp.down_proj.bias": (256,),
            }.items()
        },
    ),
    "OPTForCausalLM": Small(
        "opt",
        {"ffn_dim": 512, "activation_function": "relu", "tie_word_embeddings": True},
        without=("num_key_value_heads", "intermediate_size", "head_dim", "hidden_act"),
    ),
    "StableLmForCausalLM": Small("stablelm", {"layer_norm_eps": 1e-05, "use_qkv_bias": False}),
    "FalconForCausalLM": Small("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, without=("head_dim",)),
    # Heads of 128, whole blocks; vLLM finds no head of its own.
    "BloomForCausalLM": Small("bloom", {"num_attention_heads": 2, "tie_word_embeddings": True}),
    "GPTNeoXForCausalLM": Small("gpt_neox", {"attention_bias": True, "hidden_act": "gelu"}),
    "MixtralForCausalLM": Small("mixtral", LOCAL_MOE),
    "MiniMaxM2ForCausalLM": Small(
        "minimax_m2",
        {
            **LOCAL_MOE,
            "intermediate_size": 128,
            "rotary_dim": 32,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
        },
    ),
    "PhiMoEForCausalLM": Small(
        "phimoe",
        {**LOCAL_MOE, "intermediate_size": 128, "attention_bias": True, "lm_head_bias": True},
        made_as=("PhimoeForCausalLM", "phimoe"),
    ),
    "Qwen2MoeForCausalLM": Small("qwen2_moe", QWEN_MOE),
    "OlmoeForCausalLM": Small("olmoe", {**MOE, "intermediate_size": 128, "num_key_value_heads": 4}),
    "FlexOlmoForCausalLM": Small("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "Cohere2MoeForCausalLM": Small(
        "cohere2_moe",
        {
            **COHERE,
            **SLIDING,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "average",
        },
    ),
    "BailingMoeV2ForCausalLM": BAILING_MOE_V2,
    # The older ones have no norms of queries and keys, and no bias of routers.
    "BailingMoeForCausalLM": replace(
        BAILING_MOE_V2,
        config={
            **{key: value for key, value in BAILING_MOE_V2.config.items() if key not in ("n_group", "topk_group")},
            "use_qk_norm": False,
            "norm_head": True,
            "score_function": "softmax",
            "moe_router_enable_expert_bias": False,
        },
        drop=rf"{BAILING_MOE_V2.drop}|.*\.expert_bias",
    ),
    # Lightning attention, then latent attention.
    "BailingMoeV2_5ForCausalLM": Small(
        "deepseek_v3",
        {
            **MLA,
            **BAILING,
            "n_group": 1,
            "topk_group": 1,
            "layer_group_size": 2,
            "group_norm_size": 4,
            "partial_rotary_factor": 0.5,
            "rope_interleave": True,
        },
        made_as=("DeepseekV3ForCausalLM", "deepseek_v3"),
        renames={
            r"model\.embed_tokens": "model.word_embeddings",
            r"(.*)\.self_attn\.o_proj": r"\1.attention.dense",
            r"(.*)\.self_attn": r"\1.attention",
            r"(.*)\.e_score_correction_bias": r"\1.expert_bias",
        },
        drop=r"model\.layers\.0\.attention\.(q|kv)_.*",
        copies=DRAFT["copies"],
        extra={
            "model.layers.0.attention.query_key_value.weight": (768, 256),
            "model.layers.0.attention.g_proj.weight": (256, 256),
            "model.layers.0.attention.g_norm.weight": (256,),
            "model.layers.0.attention.query_layernorm.weight": (64,),
            "model.layers.0.attention.key_layernorm.weight": (64,),
            **{f"model.layers.2.{name}.weight": (256,) for name in ("enorm", "hnorm", "final_layernorm")},
            "model.layers.2.eh_proj.weight": (256, 512),
        },
        streamed=False,
    ),
    # Delta attention, then gated latent attention.
    "BailingMoeV3ForCausalLM": Small(
        "deepseek_v3",
        {
            **MLA,
            **BAILING,
            # vLLM's kernels of a CPU take int4 in 32 rows, of which b_proj has one for each head.
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "layer_group_size": 2,
            "short_conv_kernel_size": 4,
            "no_kda_lora": True,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "moe_shared_expert_intermediate_size": 128,
            "gated_attention_proj_granularity_type": "head_wise",
        },
        made_as=("DeepseekV3ForCausalLM", "deepseek_v3"),
        renames={
            r"model\.embed_tokens": "model.word_embeddings",
            r"(.*)\.self_attn\.o_proj": r"\1.attention.dense",
            r"(.*)\.self_attn": r"\1.attention",
            r"(.*)\.e_score_correction_bias": r"\1.expert_bias",
        },
        drop=r"model\.layers\.0\.attention\.(q|kv|dense).*",
        copies=DRAFT["copies"],
        extra={
            **{f"model.layers.2.{name}.weight": (256,) for name in ("enorm", "hnorm", "final_layernorm")},
            "model.layers.2.eh_proj.weight": (256, 512),
            **{f"model.layers.0.attention.{name}_proj.weight": (2048, 256) for name in "qkvfg"},
            **{f"model.layers.0.attention.{name}_conv1d.weight": (2048, 1, 4) for name in "qkv"},
            "model.layers.0.attention.o_proj.weight": (256, 2048),
            "model.layers.0.attention.b_proj.weight": (32, 256),
            "model.layers.0.attention.A_log": (32,),
            "model.layers.0.attention.dt_bias": (2048,),
            "model.layers.0.attention.o_norm.weight": (64,),
            "model.layers.1.attention.g_proj.weight": (32, 256),
        },
        streamed=False,
    ),
    "GraniteMoeForCausalLM": Small("granitemoe", LOCAL_MOE),
    "GraniteMoeSharedForCausalLM": Small("granitemoeshared", {**LOCAL_MOE, "shared_intermediate_size": 256}),
    "GraniteMoeSWAForCausalLM": Small(
        "granitemoe_swa", {**LOCAL_MOE, **SLIDING, "shared_intermediate_size": 256, "attention_sinks": True}
    ),
    "HunYuanMoEV1ForCausalLM": Small(
        "hunyuan_v1_moe",
        {
            "num_experts": 4,
            "moe_topk": 2,
            "moe_intermediate_size": 512,
            "use_qk_norm": True,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
        },
    ),
    "Ernie4_5_MoeForCausalLM": Small(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 128,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 1,
            "use_bias": False,
        },
    ),
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "ExaoneMoEForCausalLM": replace(EXAONE_MOE, made_as=("ExaoneMoeForCausalLM", "exaone_moe")),
    "AfmoeForCausalLM": Small(
        "afmoe",
        {
            **MOE,
            **SLIDING,
            "num_dense_layers": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 1,
            "route_scale": 1.0,
            "mup_enabled": False,
        },
    ),
    "LagunaForCausalLM": Small(
        "laguna",
        {
            **MOE,
            **SLIDING,
            # As published, twice as many where layers have a window.
            "num_attention_heads_per_layer": [8, 4],
            "shared_expert_intermediate_size": 128,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_routed_scaling_factor": 1.0,
            "gating": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "MellumForCausalLM": Small(
        "mellum",
        {
            **MOE,
            **SLIDING,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": GEMMA4["rope_parameters"],
        },
    ),
    "Glm4MoeForCausalLM": Small("glm4_moe", {**DEEPSEEK_MOE, "use_qk_norm": True}, **DRAFT),
    # Only its own code reads its model type. With sizes of latent attention missing, vLLM builds heads.
    "DeepseekForCausalLM": Small(
        "glm4_moe",
        {**DEEPSEEK_MOE, "num_nextn_predict_layers": 0, "moe_layer_freq": 1, "scoring_func": "softmax"},
        made_as=("Glm4MoeForCausalLM", "glm4_moe"),
        drop=r".*\.e_score_correction_bias",
        streamed=False,
    ),
    "DeepseekV2ForCausalLM": Small(
        "deepseek_v2", {**MLA, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "DeepseekV3ForCausalLM": Small("deepseek_v3", MLA, **DRAFT),
    "AXK1ForCausalLM": Small(
        "axk1",
        {
            **{key: value for key, value in MLA.items() if key not in ("first_k_dense_replace", "moe_layer_freq")},
            "mlp_layer_types": ["dense", "sparse"],
        },
        # Of dense layers too, which do not use it.
        extra={"model.layers.0.post_mlp_layernorm.weight": (256,)},
    ),
    "MiniCPM3ForCausalLM": Small(
        "minicpm3",
        {
            **{key: MLA[key] for key in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            "kv_lora_rank": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 128,
        },
        without=("head_dim",),
    ),
    "Glm4MoeLiteForCausalLM": Small("glm4_moe_lite", MLA, **DRAFT),
    "DeepseekV32ForCausalLM": Small("deepseek_v32", {**MLA, **INDEXER}, **DRAFT),
    "GlmMoeDsaForCausalLM": Small("glm_moe_dsa", {**MLA, **INDEXER}, **DRAFT),
    # Published under other names than transformers saves; `compress_ratios` is what engines read.
    "DeepseekV4ForCausalLM": Small(
        "deepseek_v4",
        {
            **{key: DEEPSEEK_MOE[key] for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
            "n_shared_experts": 1,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 128,
            "o_lora_rank": 128,
            "o_groups": 2,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "num_hash_layers": 1,
            "compress_ratios": [0, 4],
            "sliding_window": 128,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "num_nextn_predict_layers": 1,
        },
        without=("intermediate_size", "rope_parameters"),
        # transformers 5.16 fails on it in bfloat16.
        newer=True,
        indices={".tid2eid": 4},
        renames={
            r"model\.embed_tokens": "embed",
            r"model\.hc_head\.hc_": "hc_head_",
            r"model\.(layers\.\d+\.attn)\.norm": r"\1.kv_norm",
            r"model\.": "",
        },
        copies={"layers.1.": "mtp.0."},
        extra={
            "mtp.0.e_proj.weight": (256, 256),
            "mtp.0.h_proj.weight": (256, 256),
            "mtp.0.enorm.weight": (256,),
            "mtp.0.hnorm.weight": (256,),
            "mtp.0.norm.weight": (256,),
            "mtp.0.hc_head_base": (4,),
            "mtp.0.hc_head_fn": (4, 1024),
            "mtp.0.hc_head_scale": (1,),
        },
    ),
    "Qwen3NextForCausalLM": Small(
        "qwen3_next",
        {**QWEN_MOE, **GATED_DELTA},
        copies={"model.layers.1.": "mtp.layers.0."},
        extra=MTP,
        zero_norms=True,
    ),
    "Qwen3_5ForCausalLM": Small("qwen3_5_text", QWEN3_5, zero_norms=True),
    "Qwen3_5MoeForCausalLM": Small(
        "qwen3_5_moe_text",
        {**QWEN3_5, **QWEN_MOE},
        drop=r".*\.experts\..*",
        extra=stacks("model.layers"),
        zero_norms=True,
    ),
    "Qwen4ExpForCausalLM": Small(
        "qwen4_exp_text",
        QWEN4_EXP,
        drop=r".*\.experts\..*",
        extra=stacks("model.layers"),
        zero_norms=True,
        newer=True,
    ),
    # transformers has the wrapper alone.
    "Glm5NextForCausalLM": Small(
        "glm5_next_text",
        {**GLM5_NEXT, "vision_config": GLM5_NEXT_VISION},
        made_as=("Glm5NextForConditionalGeneration", "glm5_next"),
        renames={r"model\.language_model\.": "model."},
        drop=r"model\.visual\..*",
        streamed=False,
        **DRAFT,
    ),
    "KimiLinearForCausalLM": Small(
        "kimi_linear",
        {
            # As published: vLLM counts heads and layers in linear_attn_config, from 1.
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1],
                "head_dim": 64,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 128,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "num_expert_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "mla_use_nope": True,
        },
        # transformers saves the dense layer by the name of the others.
        renames={"model.layers.0.block_sparse_moe.": "model.layers.0.mlp."},
        newer=True,
    ),
    "OlmoHybridForCausalLM": Small(
        "olmo_hybrid",
        # transformers saves its convolutions in three equal parts.
        {
            **{key: GATED_DELTA[key] for key in ("layer_types", "linear_key_head_dim", "linear_value_head_dim")},
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        # As its converter has them, and vLLM.
        renames={
            r"(model\.layers\.\d+)\.attention_layer_norm": r"\1.input_layernorm",
            r"(model\.layers\.\d+)\.feedforward_layer_norm": r"\1.post_attention_layernorm",
        },
        without=("head_dim",),
    ),
    "Mamba2ForCausalLM": Small(
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 64,
            "state_size": 64,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 256,
            "layer_norm_epsilon": 1e-05,
            "rms_norm": True,
            "use_bias": False,
            "use_conv_bias": True,
        },
        without=("num_attention_heads", "num_key_value_heads", "intermediate_size", "rope_parameters"),
    ),
    "JambaForCausalLM": Small(
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 16,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "use_mamba_kernels": False,
        },
        without=("head_dim", "rope_parameters"),
    ),
    "FalconH1ForCausalLM": Small(
        "falcon_h1",
        {
            **MAMBA,
            "mamba_d_ssm": 512,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "key_multiplier": 0.5,
            "lm_head_multiplier": 0.25,
            "mlp_multipliers": [0.5, 0.5],
            "ssm_multipliers": [0.5, 0.25, 0.25, 0.5, 0.5],
        },
    ),
    "GraniteMoeHybridForCausalLM": Small(
        "granitemoehybrid",
        {
            # As the small ones: where vLLM loads split experts, it does not count them as loaded.
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            **MAMBA,
            "shared_intermediate_size": 256,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
    "Lfm2ForCausalLM": Small(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "conv_dim": 256,
            "block_dim": 256,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_ff_dim": 512,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-05,
        },
    ),
    "Lfm2MoeForCausalLM": Small(
        "lfm2_moe",
        {
            **MOE,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "conv_L_cache": 3,
            "norm_eps": 1e-05,
            "use_expert_bias": True,
        },
    ),
    "NemotronHForCausalLM": Small("nemotron_h", NEMOTRON_H),
    "NemotronHPuzzleForCausalLM": Small(
        "nemotron_h", NEMOTRON_H, made_as=("NemotronHForCausalLM", "nemotron_h"), streamed=False
    ),
    "Gemma4ForCausalLM": Small("gemma4_text", GEMMA4),
    **MIXED,
    **WRAPPERS,
}


def config(architecture: str, common: dict[str, Any]) -> dict[str, Any]:
    """config.json of a small model."""
    small = ZOO[architecture]
    top: dict[str, Any] = {"architectures": [architecture], "model_type": small.model_type}
    text = {key: value for key, value in {**common, **small.config}.items() if key not in small.without}
    text |= {key: text[other] for key, other in small.also.items()}
    if small.vision is None and not small.beside:
        return {**top, **text}
    towers = {"vision_config": dict(small.vision)} if small.vision else {}
    rest = {key: text[key] for key in ("dtype", "tie_word_embeddings")}
    found = {small.text: text, **towers, **rest}
    if small.inside:
        found = {small.inside: {**found, **small.beside[small.inside]}}
    return {**top, **small.beside, **found}


@cache
def saved(architecture: str, config: str) -> dict[str, tuple[Shape, torch.Tensor | None]]:
    """Every tensor of a small model: what transformers saves, as changed by its entry; whole numbers with their values."""
    import transformers

    small = ZOO[architecture]
    made_as, model_type = small.made_as or (architecture, small.model_type)
    known = json.loads(config)[small.text] if small.alone else json.loads(config)
    if small.known_as:
        known[small.known_as] = known.pop(small.text)
    if small.inside and small.outside:
        known |= known.pop(small.inside)
    known.pop("model_type")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        model = getattr(transformers, made_as)(transformers.AutoConfig.for_model(model_type, **known))
        model.save_pretrained(root)
        found: dict[str, tuple[Shape, torch.Tensor | None]] = {}
        with safe_open(f"{root}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = tuple(part.get_shape()), file.get_tensor(name) if part.get_dtype() == "I64" else None
    for prefix, other in small.renames.items():
        found = {re.sub(f"^{prefix}", other, name): each for name, each in found.items()}
    for prefix, other in small.copies.items():
        found |= {other + name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
    kept = {name: each for name, each in found.items() if not small.drop or not re.fullmatch(small.drop, name)}
    return {**kept, **{name: (shape, None) for name, shape in small.extra.items()}}


def shapes(architecture: str, config: str) -> dict[str, Shape]:
    """The shapes of every tensor of a small model."""
    return {name: shape for name, (shape, _) in saved(architecture, config).items()}


def constants(architecture: str, config: str) -> dict[str, torch.Tensor]:
    """What a small model holds of whole numbers, which are the same in all of its kind."""
    return {name: value for name, (_, value) in saved(architecture, config).items() if value is not None}

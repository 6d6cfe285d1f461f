"""Small models of the architectures that transformers can make, as data: their names and shapes are what it saves.

A few lines each: config.json beyond tiny.COMMON, and what published files hold that transformers does not.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from safetensors import safe_open

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """A small model.

    Attributes:
        model_type: as in config.json.
        config: what config.json says beside or instead of tiny.COMMON; where it has a text_config, that does.
        vision: its vision_config, for wrappers.
        made_as: the architecture and model type that transformers makes it as, where it knows it by another name.
        drop: expression of names that published files do not hold.
        copies: prefixes of tensors and of their likes that files hold as well (draft layers).
        extra: other tensors.
        zero_norms: norms add one to their weight.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    made_as: tuple[str, str] | None = None
    drop: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Shape] = field(default_factory=dict)
    zero_norms: bool = False


HYBRID = ["linear_attention", "full_attention"]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {**MOE, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}
MLA = {
    **DEEPSEEK_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
DRAFT = {
    "copies": {"model.layers.1.": "model.layers.2."},
    "extra": {
        "model.layers.2.eh_proj.weight": (256, 512),
        "model.layers.2.enorm.weight": (256,),
        "model.layers.2.hnorm.weight": (256,),
        "model.layers.2.shared_head.norm.weight": (256,),
    },
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
GATED_DELTA = {
    "layer_types": HYBRID,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
}
MTP = {
    "mtp.fc.weight": (256, 512),
    "mtp.norm.weight": (256,),
    "mtp.pre_fc_norm_embedding.weight": (256,),
    "mtp.pre_fc_norm_hidden.weight": (256,),
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]}}
MROPE_PARTIAL = {
    "rope_parameters": {
        **ROPE,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 128,
    "num_heads": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "intermediate_size": 256,
    "out_hidden_size": 256,
    "hidden_act": "silu",
}
QWEN3_VISION = {
    **QWEN_VISION,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN3_5_VISION = {**QWEN3_VISION, "deepstack_visual_indexes": []}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 64,
    "image_size": 56,
    "patch_size": 14,
}
GEMMA = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4 = {
    **GEMMA,
    **SLIDING,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 64,
    "pooling_kernel_size": 1,
}
COHERE = {"tie_word_embeddings": True, "layer_norm_eps": 1e-05, "logit_scale": 0.0625}
QWEN3_5 = {**GATED_DELTA, **MROPE_PARTIAL}
QWEN3_5_DRAFT = {"model.language_model.layers.1.": "mtp.layers.0."}


def stacks(path: str, transposed: bool = False) -> dict[str, Shape]:
    """Gate and up, and down, of four experts in each of two layers."""
    shapes = {"gate_up_proj": (4, 256, 256), "down_proj": (4, 128, 256) if transposed else (4, 256, 128)}
    return {f"{path}.{layer}.mlp.experts.{name}": shape for layer in (0, 1) for name, shape in shapes.items()}


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
    "GemmaForCausalLM": Small("gemma", GEMMA, zero_norms=True),
    "Gemma2ForCausalLM": Small(
        "gemma2", {**GEMMA, "query_pre_attn_scalar": 64, "sliding_window": 512}, zero_norms=True
    ),
    "OlmoForCausalLM": Small("olmo"),
    "Olmo2ForCausalLM": Small("olmo2"),
    "Olmo3ForCausalLM": Small("olmo3", SLIDING),
    "GraniteForCausalLM": Small("granite"),
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
    "Starcoder2ForCausalLM": Small(
        "starcoder2",
        {"use_bias": True, "norm_epsilon": 1e-05, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    ),
    "PhiForCausalLM": Small(
        "phi",
        {
            # SGLang 0.5.23 knows no others.
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
            "layer_norm_eps": 1e-05,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
    ),
    "StableLmForCausalLM": Small("stablelm", {"layer_norm_eps": 1e-05, "use_qkv_bias": False}),
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
    "GraniteMoeForCausalLM": Small("granitemoe", LOCAL_MOE),
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
    "ExaoneMoeForCausalLM": Small(
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
    ),
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
    "Glm4MoeForCausalLM": Small("glm4_moe", {**DEEPSEEK_MOE, "use_qk_norm": True}, **DRAFT),
    "DeepseekV2ForCausalLM": Small(
        "deepseek_v2", {**MLA, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "DeepseekV3ForCausalLM": Small("deepseek_v3", MLA, **DRAFT),
    "Glm4MoeLiteForCausalLM": Small("glm4_moe_lite", MLA, **DRAFT),
    "DeepseekV32ForCausalLM": Small("deepseek_v32", {**MLA, **INDEXER}, **DRAFT),
    "GlmMoeDsaForCausalLM": Small("glm_moe_dsa", {**MLA, **INDEXER}, **DRAFT),
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
    "GraniteMoeHybridForCausalLM": Small(
        "granitemoehybrid",
        {
            # As the small ones: where vLLM 0.32.0 loads split experts, it does not count them as loaded.
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
    "NemotronHForCausalLM": Small(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 128,
            "n_shared_experts": 1,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-05,
        },
    ),
    "Gemma4ForCausalLM": Small("gemma4_text", GEMMA4),
    "Gemma4ForConditionalGeneration": Small(
        "gemma4", {**GEMMA4, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}, vision=GEMMA4_VISION
    ),
    "Mistral3ForConditionalGeneration": Small(
        "mistral3", {"model_type": "mistral", "sliding_window": None}, vision=PIXTRAL
    ),
    "Qwen2VLForConditionalGeneration": Small(
        "qwen2_vl",
        {"model_type": "qwen2_vl_text", **MROPE},
        vision={
            "depth": 1,
            "embed_dim": 128,
            "hidden_size": 256,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "in_chans": 3,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": Small(
        "qwen2_5_vl", {"model_type": "qwen2_5_vl_text", **MROPE}, vision=QWEN_VISION
    ),
    "Qwen3VLForConditionalGeneration": Small("qwen3_vl", {"model_type": "qwen3_vl_text", **MROPE}, vision=QWEN3_VISION),
    "Qwen3VLMoeForConditionalGeneration": Small(
        "qwen3_vl_moe",
        {**MOE, "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", **MROPE},
        vision=QWEN3_VISION,
        # transformers 5 saves the stacks the other way around.
        drop=r".*\.experts\..*",
        extra=stacks("model.language_model.layers", transposed=True),
    ),
    "Qwen3_5ForConditionalGeneration": Small(
        "qwen3_5",
        {**QWEN3_5, "model_type": "qwen3_5_text"},
        vision=QWEN3_5_VISION,
        copies=QWEN3_5_DRAFT,
        extra=MTP,
        zero_norms=True,
    ),
    "Qwen3_5MoeForConditionalGeneration": Small(
        "qwen3_5_moe",
        {**QWEN3_5, **QWEN_MOE, "model_type": "qwen3_5_moe_text"},
        vision=QWEN3_5_VISION,
        # The Hub's files stack the body's experts, not the draft's.
        copies=QWEN3_5_DRAFT,
        drop=r"model\..*\.experts\..*",
        extra={**MTP, **stacks("model.language_model.layers")},
        zero_norms=True,
    ),
}


def config(architecture: str, common: dict[str, Any]) -> dict[str, Any]:
    """config.json of a small model."""
    small = ZOO[architecture]
    top: dict[str, Any] = {"architectures": [architecture], "model_type": small.model_type}
    if small.vision is None:
        return {**top, **common, **small.config}
    text = {**common, **small.config}
    rest = {key: text[key] for key in ("dtype", "tie_word_embeddings")}
    return {**top, "text_config": text, "vision_config": dict(small.vision), **rest}


@cache
def shapes(architecture: str, config: str) -> dict[str, Shape]:
    """Every tensor of a small model: what transformers saves, as changed by its entry."""
    import transformers

    small = ZOO[architecture]
    made_as, model_type = small.made_as or (architecture, small.model_type)
    known = json.loads(config)
    known.pop("model_type")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as root:
        warnings.simplefilter("ignore")
        model = getattr(transformers, made_as)(transformers.AutoConfig.for_model(model_type, **known))
        model.save_pretrained(root)
        with safe_open(f"{root}/model.safetensors", "pt") as file:
            found: dict[str, Shape] = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for prefix, other in small.copies.items():
        found |= {other + name.removeprefix(prefix): shape for name, shape in found.items() if name.startswith(prefix)}
    kept = {name: shape for name, shape in found.items() if not small.drop or not re.fullmatch(small.drop, name)}
    return kept | small.extra

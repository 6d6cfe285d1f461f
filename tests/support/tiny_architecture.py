"""The type of an entry in tiny_architectures.py, and sizes that several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """A small model.

    Attributes:
        model_type: as in config.json.
        config: what config.json says beside or instead of small_checkpoints.COMMON; where it has a text_config, that does.
        without: what of small_checkpoints.COMMON it does not say.
        also: keys that say what another does.
        vision: its vision_config, for wrappers.
        beside: what config.json of a wrapper says beside these two, such as an audio_config.
        inside: the key of config.json under which these are, where that is not its top.
        outside: whether transformers has at its top what is inside.
        text: the key that the language model's config has there.
        known_as: the key that transformers has for it, where that is another.
        made_as: the architecture and model type that transformers makes it as, where it knows it by another name.
        alone: whether it is the language model alone that transformers makes, of a wrapper.
        renames: prefixes that transformers saves, as published files have them.
        drop: expression of names that published files do not hold.
        copies: prefixes of tensors and of their likes that files hold as well (draft layers).
        extra: other tensors.
        zero_norms: norms add one to their weight.
        streamed: whether transformers computes with it under its own name.
        newer: whether the oldest transformers that models are run with has it not, or does not compute it.
        indices: ends of names of tensors whose rows hold different whole numbers, and the number that all are below.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    inside: str | None = None
    outside: bool = False
    text: str = "text_config"
    known_as: str | None = None
    made_as: tuple[str, str] | None = None
    alone: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    drop: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Shape] = field(default_factory=dict)
    zero_norms: bool = False
    streamed: bool = True
    newer: bool = False
    indices: Mapping[str, int] = field(default_factory=dict)


HYBRID = ["linear_attention", "full_attention"]
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
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
DRAFT: dict[str, Any] = {
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
MROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]}}
GLM_MROPE = {"rope_parameters": {**ROPE, "mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}}
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
# Tables of n-grams in the linear layer, an index over the tokens in the other.
QWEN4_EXP = {
    **QWEN3_5,
    **QWEN_MOE,
    "hc_count": 2,
    "hc_lowrank": 64,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 61,
    "make_ngram_vocab_size_divisible_by": 64,
    "split_ngram_parts": 2,
    "indexer_n_heads": 1,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    # SGLang knows no less.
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
GLM5_NEXT = {
    **{key: value for key, value in MLA.items() if key not in ("first_k_dense_replace", "moe_layer_freq")},
    **INDEXER,
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "hc_mult": 2,
    # As published.
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [0],
        "full_attn_layers": [1],
    },
}
NEMOTRON_H = {
    "hybrid_override_pattern": "M*-",
    "num_hidden_layers": 3,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    # As published: SGLang takes that for any (configs/nemotron_h.py:277).
    "n_groups": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "n_shared_experts": 1,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-05,
}
GLM5_NEXT_VISION = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 128,
    "num_heads": 2,
    "image_size": 56,
    "intermediate_size": 256,
    "out_hidden_size": 256,
    "projection_intermediate_size": 256,
    "swiglu_limit": 10.0,
}


def stacks(path: str, transposed: bool = False) -> dict[str, Shape]:
    """Gate and up, and down, of four experts in each of two layers."""
    shapes = {"gate_up_proj": (4, 256, 256), "down_proj": (4, 128, 256) if transposed else (4, 256, 128)}
    return {f"{path}.{layer}.mlp.experts.{name}": shape for layer in (0, 1) for name, shape in shapes.items()}


def linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    """A layer with a bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def normed(name: str, size: int) -> dict[str, Shape]:
    """A norm with a bias."""
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}

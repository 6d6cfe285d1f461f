"""What llama.cpp's converter writes for each architecture (convert_hf_to_gguf.py), as far as config.json needs it.

Names of tensors are not here: the package gguf maps them. Metadata keys that are neither here nor in config.py stop the
reading, since a config.json without what they say could be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys of most architectures, without the architecture's name before them, and the keys of config.json.
COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: `model_type` of its config.json.
        keys: metadata keys besides COMMON, and the keys of config.json.
        fixed: values of config.json that the class does not have by default and no metadata says.
        interleaved: whether rows of q and k are in llama.cpp's order of rotary halves.
        norms_plus_one: whether 1 was added to the weights of norms.
        scaled_by_width: numbers of layers of the models that scale queries by hidden_size / num_attention_heads instead
            of head_dim, which no metadata says.
        partial_rotary: whether only a part of a head may be rotated.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    norms_plus_one: bool = False
    scaled_by_width: tuple[int, ...] = ()
    partial_rotary: bool = False


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", interleaved=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe", _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    ),
    "qwen3": GgufArchitecture("qwen3"),
    # llama.cpp divides by the sum of the chosen experts' weights (src/models/qwen3moe.cpp), the class by default not.
    "qwen3moe": GgufArchitecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "gemma2": GgufArchitecture(
        "gemma2",
        _WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norms_plus_one=True,
        scaled_by_width=(46,),
    ),
    "gemma3": GgufArchitecture("gemma3_text", _WINDOW, norms_plus_one=True, scaled_by_width=(62,)),
    "phi3": GgufArchitecture(
        "phi3",
        _WINDOW | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        partial_rotary=True,
    ),
}

"""Small models of wrappers: a language model's config.json, and those of the towers around it."""

from __future__ import annotations

from small import (
    GEMMA4,
    GEMMA4_VISION,
    MOE,
    MROPE,
    MTP,
    PIXTRAL,
    QWEN3_5,
    QWEN3_5_DRAFT,
    QWEN3_5_VISION,
    QWEN3_VISION,
    QWEN_MOE,
    QWEN_VISION,
    Small,
    stacks,
)

WRAPPERS = {
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

"""Language models inside wrappers, whose towers stay as they are."""

from __future__ import annotations

from dataclasses import replace

from .dense import GEMMA4, LLAMA, WINDOWS
from .entry import Experts, Refusal, SGLang, Stacked
from .experts import LLAMA4, QWEN3_MOE
from .hybrid import EITHER, QWEN3_5, QWEN3_5_MOE
from .parts import IF_ASKED, NO_CACHE, RENAMED, wrapped

# vLLM 0.32.0 models/gemma3_mm.py builds the tower with quant_config as vision_tower.vision_model.encoder,
# models/siglip.py; transformers 5 leaves vision_model out.
GEMMA3_WRAPPED = wrapped(
    replace(LLAMA, windows=WINDOWS["Gemma3"]),
    "Gemma3ForConditionalGeneration",
    "vision_tower",
    "multi_modal_projector",
    spellings=(
        ("language_model.model.", "model.language_model."),
        (
            "vision_tower.vision_model.",
            "vision_tower.",
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
        ),
    ),
)
# vLLM 0.32.0 models/mistral3.py:431 renames every weight_scale_inv to weight_scale, which a block has not.
MISTRAL3_WRAPPED = wrapped(
    LLAMA,
    "Mistral3ForConditionalGeneration",
    "vision_tower",
    "multi_modal_projector",
    # SGLang 0.5.23 as if nothing were around it.
    spellings=(("language_model.model.layers.", "model.language_model.layers.", "model.layers."),),
    refused=(
        Refusal(
            "block",
            "fp8",
            "vLLM 0.32.0 does not find its block scales",
            "use --scheme tensor or channel, or --format compressed-tensors",
        ),
    ),
)
# Files say model. and visual., newer ones model.language_model. and model.visual.; vLLM's mapper takes both.
QWEN_VISION = "visual"
QWEN2_VL = wrapped(
    replace(LLAMA, windows=IF_ASKED),
    "Qwen2VLForConditionalGeneration",
    QWEN_VISION,
    layers=EITHER,
    # transformers 5 looks the tower up under its newer name only.
    spellings=(("visual.", "model.visual."),),
    sglang=replace(RENAMED, cache=NO_CACHE),
)
QWEN3_VL = wrapped(LLAMA, "Qwen3VLForConditionalGeneration", QWEN_VISION, sglang=RENAMED)
# Experts [E, H, 2I] and [E, I, H] (vLLM 0.32.0 models/qwen3_vl_moe.py:76).
QWEN3_VL_MOE = wrapped(
    replace(
        QWEN3_MOE,
        experts=(
            Experts(
                ".mlp.experts",
                stacked=(
                    Stacked("gate_up_proj", ("gate_proj", "up_proj"), transposed=True),
                    Stacked("down_proj", ("down_proj",), transposed=True),
                ),
            ),
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration",
    QWEN_VISION,
    sglang=RENAMED,
    transformers_reads_blocks=False,
)

# vLLM 0.32.0 models/mllama4.py has no name mapper: it loads these names only, and looks them up as they are.
LLAMA4_WRAPPED = wrapped(
    LLAMA4,
    "Llama4ForConditionalGeneration",
    "vision_model",
    "multi_modal_projector",
    layers="language_model.model.layers.*",
    # SGLang 0.5.23 models/mllama4.py:607.
    sglang=SGLang(
        (
            Refusal(
                "channel",
                None,
                "it reorders the rows of queries and keys, but not their scales",
                "--scheme tensor, and -w 128 in the fp8 format, load",
            ),
        ),
        # It does not reorder those at all.
        unpacked=(".self_attn.{q,k}_proj",),
    ),
)

ENTRIES = (
    GEMMA3_WRAPPED,
    MISTRAL3_WRAPPED,
    QWEN2_VL,
    replace(QWEN2_VL, name="Qwen2_5_VLForConditionalGeneration", sglang=RENAMED),
    QWEN3_VL,
    QWEN3_VL_MOE,
    wrapped(
        GEMMA4,
        "Gemma4ForConditionalGeneration",
        "vision_tower",
        "embed_vision",
        "audio_tower",
        "embed_audio",
    ),
    wrapped(QWEN3_5, "Qwen3_5ForConditionalGeneration", QWEN_VISION),
    wrapped(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", QWEN_VISION),
    LLAMA4_WRAPPED,
)

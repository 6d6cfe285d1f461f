"""Small models of wrappers: a language model's config.json, and those of the towers around it."""

from __future__ import annotations

from dataclasses import replace

from support.tiny_architecture import (
    COHERE,
    DEEPSEEK_MOE,
    DRAFT,
    GEMMA,
    GEMMA4,
    GEMMA4_VISION,
    GLM5_NEXT,
    GLM5_NEXT_VISION,
    GLM_MROPE,
    MOE,
    MROPE,
    MTP,
    NEMOTRON_H,
    PIXTRAL,
    QWEN3_5,
    QWEN3_5_DRAFT,
    QWEN3_5_VISION,
    QWEN3_VISION,
    QWEN4_EXP,
    QWEN_MOE,
    QWEN_VISION,
    ROPE,
    SLIDING,
    Shape,
    Small,
    linear,
    normed,
    stacks,
)

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
IDEFICS = {**CLIP, "model_type": "idefics3_vision"}
INTERNVL = {**CLIP, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]}
QIANFAN = {**CLIP, "model_type": "qianfan_ocr_vision"}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 128,
    "num_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "intermediate_size": 256,
    "out_hidden_size": 256,
}
TOKEN = {"image_token_id": 7}

AUDIO = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_mel_bins": 16,
    "max_source_positions": 16,
}
WHISPER = {
    "d_model": 128,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "num_mel_bins": 16,
    "max_source_positions": 16,
}

GRANITE_ENCODER = {
    "num_layers": 1,
    "hidden_dim": 128,
    "num_heads": 2,
    "dim_head": 64,
    "output_dim": 8,
    "input_dim": 32,
}
GRANITE_SPEECH = {
    "audio_token_index": 7,
    "has_lora_adapter": False,
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "encoder_hidden_size": 128,
    },
}

LANGUAGE_LAYERS = {"language_model.model.encoder.": "language_model.model."}
TALKER = {"talker.model.layers.0.self_attn.q_proj.weight": (128, 128)}
# transformers 5 leaves vision_model out as it saves.
VISION_MODEL = {"vision_tower.": "vision_tower.vision_model."}
MODEL_VISION_MODEL = {"model.vision_tower.": "model.vision_tower.vision_model."}


def sense_voice(layer: str, inputs: int) -> dict[str, Shape]:
    """A layer of SenseVoice's encoder."""
    return {
        **linear(f"{layer}.self_attn.linear_q_k_v", 1536, inputs),
        **linear(f"{layer}.self_attn.linear_out", 512, 512),
        f"{layer}.self_attn.fsmn_block.weight": (512, 1, 11),
        **linear(f"{layer}.feed_forward.w_1", 256, 512),
        **linear(f"{layer}.feed_forward.w_2", 512, 256),
        **normed(f"{layer}.norm1", inputs),
        **normed(f"{layer}.norm2", 512),
    }


def adaptor(layer: str) -> dict[str, Shape]:
    """A layer of what is between SenseVoice and the language model."""
    return {
        **{
            name: shape
            for part in ("q", "k", "v", "out")
            for name, shape in linear(f"{layer}.self_attn.linear_{part}", 1024, 1024).items()
        },
        **linear(f"{layer}.feed_forward.w_1", 256, 1024),
        **linear(f"{layer}.feed_forward.w_2", 1024, 256),
        **normed(f"{layer}.norm1", 1024),
        **normed(f"{layer}.norm2", 1024),
    }


# Of sizes that vLLM takes for granted (models/funasr.py:637).
SENSE_VOICE = {
    **sense_voice("audio_encoder.encoders0.0", 560),
    **sense_voice("audio_encoder.encoders.0", 512),
    **sense_voice("audio_encoder.tp_encoders.0", 512),
    **normed("audio_encoder.after_norm", 512),
    **normed("audio_encoder.tp_norm", 512),
    **linear("audio_adaptor.linear1", 2048, 512),
    **linear("audio_adaptor.linear2", 1024, 2048),
    **adaptor("audio_adaptor.blocks.0"),
    **adaptor("audio_adaptor.blocks.1"),
}
QWEN2_5_OMNI = Small(
    "qwen2_5_omni",
    {"model_type": "qwen2_5_omni_text", **MROPE},
    vision={**QWEN_VISION, "model_type": "qwen2_5_omni_vision_encoder"},
    beside={
        "enable_audio_output": False,
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "audio_config": {
                **WHISPER,
                "model_type": "qwen2_5_omni_audio_encoder",
                "output_dim": 256,
                "n_window": 8,
            },
        },
    },
    inside="thinker_config",
    extra=TALKER,
    streamed=False,
)

# Published ones say that they attend without latent vectors.
DEEPSEEK_OCR = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), None),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    "use_mla": False,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
SAM = {
    "hidden_size": 128,
    "output_channels": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_dim": 256,
    "image_size": 64,
    "window_size": 2,
    "global_attn_indexes": [0],
    "downsample_channels": [64, 128],
}
OCR_PROJECTOR = {
    "tile_tag": "2D",
    "global_view_pos": "head",
    "projector_config": {"projector_type": "linear", "input_dim": 256, "n_embed": 256},
}
UNLIMITED_OCR = Small(
    "deepseek_vl_v2",
    DEEPSEEK_OCR,
    vision={
        "model_type": "unlimited_ocr_vision",
        "sam_config": SAM,
        "encoder_config": {key: value for key, value in CLIP.items() if key != "model_type"},
    },
    beside=OCR_PROJECTOR,
    text="language_config",
    known_as="text_config",
    made_as=("UnlimitedOcrForConditionalGeneration", "unlimited_ocr"),
    streamed=False,
    newer=True,
)

QWEN3_ASR = Small(
    "qwen3_asr",
    {"model_type": "qwen3", **MROPE},
    beside={
        "thinker_config": {
            "model_type": "qwen3_asr_thinker",
            "audio_config": {
                **{key: value for key, value in WHISPER.items() if key != "max_source_positions"},
                "model_type": "qwen3_asr_encoder",
                "output_dim": 256,
                "downsample_hidden_size": 32,
            },
        },
    },
    inside="thinker_config",
    outside=True,
    made_as=("Qwen3ASRForConditionalGeneration", "qwen3_asr"),
    renames={
        "lm_head": "thinker.lm_head",
        r"model\.language_model": "thinker.model",
        r"model\.audio_tower": "thinker.audio_tower",
        r"model\.multi_modal_projector\.linear_": "thinker.audio_tower.proj",
    },
    streamed=False,
)

NEMOTRON_OMNI = Small(
    "nemotron_h_omni",
    {**NEMOTRON_H, "model_type": "nemotron_h"},
    vision={
        "model_type": "radio",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_img_size": 64,
        "video_temporal_patch_size": 2,
    },
    beside={
        "vision_hidden_size": 128,
        "projector_hidden_size": 256,
        "audio_config": {
            "model_type": "parakeet_encoder",
            "hidden_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 32,
            "projection_hidden_size": 256,
            "projection_bias": False,
        },
    },
    text="llm_config",
    newer=True,
)

WRAPPERS = {
    "Gemma4ForConditionalGeneration": Small(
        "gemma4", {**GEMMA4, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}, vision=GEMMA4_VISION
    ),
    "DiffusionGemmaForBlockDiffusion": Small(
        "diffusion_gemma",
        {
            **GEMMA4,
            "model_type": "diffusion_gemma_text",
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 2,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
        },
        vision=GEMMA4_VISION,
        streamed=False,
        newer=True,
    ),
    "Mistral3ForConditionalGeneration": Small(
        "mistral3", {"model_type": "mistral", "sliding_window": None}, vision=PIXTRAL
    ),
    "LightOnOCRForConditionalGeneration": Small(
        "lighton_ocr",
        {"model_type": "qwen3", "tie_word_embeddings": True},
        vision=PIXTRAL,
        beside={
            "image_token_id": 7,
            "image_token_index": 7,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
        made_as=("LightOnOcrForConditionalGeneration", "lighton_ocr"),
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
    "Qwen4ExpForConditionalGeneration": Small(
        "qwen4_exp",
        {**QWEN4_EXP, "model_type": "qwen4_exp_text"},
        vision=QWEN3_5_VISION,
        drop=r"model\..*\.experts\..*",
        extra=stacks("model.language_model.layers"),
        zero_norms=True,
        newer=True,
    ),
    "Glm5NextForConditionalGeneration": Small(
        "glm5_next",
        {**GLM5_NEXT, "model_type": "glm5_next_text"},
        vision=GLM5_NEXT_VISION,
        copies={"model.language_model.layers.1.": "model.language_model.layers.2."},
        extra={name.replace("model.", "model.language_model.", 1): shape for name, shape in DRAFT["extra"].items()},
        newer=True,
    ),
    "InternVLForConditionalGeneration": Small("internvl", {"model_type": "qwen2"}, vision=INTERNVL, beside=TOKEN),
    "Blip2ForConditionalGeneration": Small(
        "blip-2",
        {
            "model_type": "opt",
            "ffn_dim": 512,
            "activation_function": "relu",
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
        vision={**CLIP, "model_type": "blip_2_vision_model"},
        beside={
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "encoder_hidden_size": 128,
            },
            "num_query_tokens": 4,
            "image_token_index": 7,
        },
        # It computes nothing without an image.
        streamed=False,
    ),
    "LlavaForConditionalGeneration": Small(
        "llava", {"model_type": "llama"}, vision=CLIP, beside={"image_token_index": 7}, renames=VISION_MODEL
    ),
    "LlavaNextForConditionalGeneration": Small(
        "llava_next",
        {"model_type": "mistral"},
        vision=CLIP,
        beside={"image_token_index": 7, "image_grid_pinpoints": [[56, 112]]},
        renames=VISION_MODEL,
    ),
    "LlavaNextVideoForConditionalGeneration": Small(
        "llava_next_video",
        {"model_type": "llama"},
        vision=CLIP,
        beside={
            "image_token_index": 7,
            "video_token_index": 8,
            "image_grid_pinpoints": [[56, 112]],
            "spatial_pool_mode": "average",
            "spatial_pool_stride": 2,
        },
        renames=VISION_MODEL,
    ),
    "LlavaOnevisionForConditionalGeneration": Small(
        "llava_onevision",
        {"model_type": "qwen2"},
        vision=SIGLIP,
        beside={"image_token_index": 7, "video_token_index": 8, "image_grid_pinpoints": [[56, 112]]},
        renames=VISION_MODEL,
    ),
    "PaliGemmaForConditionalGeneration": Small(
        "paligemma",
        {**GEMMA, "model_type": "gemma"},
        vision=SIGLIP,
        beside={"image_token_index": 7, "projection_dim": 256, "hidden_size": 256},
        zero_norms=True,
        renames=VISION_MODEL,
    ),
    "Idefics3ForConditionalGeneration": Small(
        "idefics3", {"model_type": "llama"}, vision=IDEFICS, beside={"image_token_id": 7, "scale_factor": 2}
    ),
    "SmolVLMForConditionalGeneration": Small(
        "smolvlm",
        {"model_type": "llama"},
        vision={**IDEFICS, "model_type": "smolvlm_vision"},
        beside={"image_token_id": 7, "scale_factor": 2},
    ),
    "Cohere2VisionForConditionalGeneration": Small(
        "cohere2_vision",
        {**COHERE, **SLIDING, "model_type": "cohere2"},
        vision=SIGLIP,
        beside={"image_token_id": 7, "alignment_intermediate_size": 256},
        renames=MODEL_VISION_MODEL,
    ),
    "Lfm2VlForConditionalGeneration": Small(
        "lfm2_vl",
        {
            "model_type": "lfm2",
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
        vision={**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14},
        beside={"image_token_id": 7, "projector_hidden_size": 256},
        renames=MODEL_VISION_MODEL,
    ),
    "Qwen2AudioForConditionalGeneration": Small(
        "qwen2_audio",
        {"model_type": "qwen2"},
        beside={
            "audio_token_index": 7,
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 256,
                "d_model": 128,
                "max_source_positions": 16,
            },
        },
    ),
    "Glm4vForConditionalGeneration": Small(
        "glm4v",
        {"model_type": "glm4v_text", **GLM_MROPE},
        vision={**GLM_VISION, "model_type": "glm4v_vision"},
        beside=TOKEN,
    ),
    "Glm4vMoeForConditionalGeneration": Small(
        "glm4v_moe",
        {"model_type": "glm4v_moe_text", **DEEPSEEK_MOE, "use_qk_norm": False, **GLM_MROPE},
        vision={**GLM_VISION, "model_type": "glm4v_moe_vision"},
        beside=TOKEN,
    ),
    "GlmOcrForConditionalGeneration": Small(
        "glm_ocr",
        {"model_type": "glm_ocr_text", **GLM_MROPE},
        vision={**GLM_VISION, "model_type": "glm_ocr_vision"},
        beside=TOKEN,
    ),
    "Exaone4_5_ForConditionalGeneration": Small(
        "exaone4_5",
        {**SLIDING, "sliding_window_pattern": "LG", "model_type": "exaone4"},
        vision={**QWEN_VISION, "model_type": "exaone4_5_vision", "num_key_value_heads": 1},
        beside=TOKEN,
    ),
    "Gemma4UnifiedForConditionalGeneration": Small(
        "gemma4_unified",
        {**GEMMA4, "model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 0},
        vision={
            "model_type": "gemma4_unified_vision",
            "mm_embed_dim": 128,
            "mm_posemb_size": 64,
            "output_proj_dims": 128,
        },
        beside={"audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 64}},
    ),
    "AudioFlamingo3ForConditionalGeneration": Small(
        "audioflamingo3",
        {"model_type": "qwen2"},
        beside={"audio_token_id": 7, "audio_config": {**AUDIO, "model_type": "audioflamingo3_encoder"}},
        # transformers lists it among no language models.
        streamed=False,
    ),
    "GlmAsrForConditionalGeneration": Small(
        "glmasr",
        {"model_type": "llama"},
        beside={
            "audio_token_id": 7,
            "audio_config": {
                "model_type": "glmasr_encoder",
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_position_embeddings": 16,
            },
        },
    ),
    "GraniteSpeechForConditionalGeneration": Small(
        "granite_speech",
        {"model_type": "granite"},
        beside={**GRANITE_SPEECH, "encoder_config": {**GRANITE_ENCODER, "model_type": "granite_speech_encoder"}},
    ),
    "GraniteSpeechPlusForConditionalGeneration": Small(
        "granite_speech_plus",
        {"model_type": "granite"},
        beside={**GRANITE_SPEECH, "encoder_config": {**GRANITE_ENCODER, "model_type": "granite_speech_plus_encoder"}},
    ),
    "FunASRForConditionalGeneration": Small(
        "qwen3",
        {
            "audio_encoder_conf": {
                "output_size": 512,
                "attention_heads": 4,
                "linear_units": 256,
                "num_blocks": 2,
                "tp_blocks": 1,
                "kernel_size": 11,
                "sanm_shift": 0,
            },
        },
        made_as=("Qwen3ForCausalLM", "qwen3"),
        renames={"model.": "llm.model.", "lm_head.": "llm.lm_head."},
        extra=SENSE_VOICE,
        streamed=False,
    ),
    "NemotronH_Omni_Reasoning_V3": NEMOTRON_OMNI,
    **{
        f"NemotronH_{name}": replace(
            NEMOTRON_OMNI, made_as=("NemotronH_Omni_Reasoning_V3", "nemotron_h_omni"), streamed=False
        )
        for name in ("Nano_VL_V2", "Nano_Omni_Reasoning_V3", "Super_Omni_Reasoning_V3")
    },
    "Emu3ForConditionalGeneration": Small(
        "emu3",
        {"model_type": "emu3_text_model"},
        beside={
            "vocabulary_map": {"<image>": 7},
            "vq_config": {
                "model_type": "emu3_vqgan",
                "codebook_size": 64,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [1],
                "hidden_size": 32,
            },
        },
    ),
    "HunYuanVLForConditionalGeneration": Small(
        "hunyuan_vl",
        {"model_type": "hunyuan_vl_text", "rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]}},
        vision={
            **{
                key: CLIP[key]
                for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            },
            "model_type": "hunyuan_vl_vision",
            "out_hidden_size": 256,
            "text_hidden_size": 256,
            "max_image_size": 64,
            "min_image_size": 32,
            "max_vit_seq_len": 16,
            "img_max_token_num": 16,
        },
        beside=TOKEN,
    ),
    "VibeVoiceAsrForConditionalGeneration": Small(
        "vibevoice_asr",
        {"model_type": "qwen2"},
        beside={
            "audio_token_id": 7,
            **{
                f"{kind}_tokenizer_encoder_config": {
                    "model_type": "vibevoice_acoustic_tokenizer_encoder",
                    "hidden_size": 64,
                    "num_filters": 8,
                    "depths": [1, 1],
                    "downsampling_ratios": [2],
                }
                for kind in ("acoustic", "semantic")
            },
        },
    ),
    "PaddleOCRVLForConditionalGeneration": Small(
        "paddleocr_vl",
        {"model_type": "paddleocr_vl_text", **MROPE, "use_bias": False},
        vision={**CLIP, "model_type": "paddleocr_vl_vision"},
        beside=TOKEN,
    ),
    "QianfanOCRForConditionalGeneration": Small(
        "qianfan_ocr",
        {"model_type": "qwen3"},
        vision=QIANFAN,
        beside=TOKEN,
        renames=LANGUAGE_LAYERS,
    ),
    "MiniCPMV4_6ForConditionalGeneration": Small(
        "minicpmv4_6",
        {**QWEN3_5, "model_type": "qwen3_5_text"},
        vision={**SIGLIP, "model_type": "minicpmv4_6_vision", "insert_layer_id": 0},
        beside={"image_token_id": 7, "insert_layer_id": 0},
        zero_norms=True,
    ),
    "MiniCPMV4_7ForConditionalGeneration": Small(
        "minicpmv4_7",
        {**QWEN3_5, "model_type": "qwen3_5_text"},
        vision={**SIGLIP, "model_type": "minicpmv4_7_vision", "insert_layer_id": 0},
        beside={"image_token_id": 7, "insert_layer_id": 0},
        zero_norms=True,
        newer=True,
    ),
    "CohereCompassForConditionalGeneration": Small(
        "cohere_compass",
        {
            **COHERE,
            **SLIDING,
            "rope_parameters": dict.fromkeys(SLIDING["layer_types"], MROPE["rope_parameters"]),
            "model_type": "cohere_compass_text",
        },
        vision={**QWEN3_VISION, "model_type": "cohere_compass_vision"},
        beside=TOKEN,
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Small(
        "ernie4_5_vl_moe",
        {
            "model_type": "ernie4_5_vl_moe_text",
            "use_bias": False,
            "moe_intermediate_size": [256, 128],
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]},
        },
        vision={
            "model_type": "ernie4_5_vl_moe_vision",
            "embed_dim": 128,
            "in_chans": 3,
            "mlp_ratio": 2,
            "depth": 1,
            "hidden_size": 128,
            "num_heads": 2,
            "patch_size": 14,
            "intermediate_size": 256,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
        },
        beside={"image_token_id": 7},
    ),
    "Granite4VisionForConditionalGeneration": Small(
        "granite4_vision",
        {"model_type": "granite4_vision_text", "embedding_multiplier": 12.0},
        vision={**SIGLIP, "num_hidden_layers": 2},
        beside={
            "image_token_index": 7,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0]],
            "image_grid_pinpoints": [[56, 112]],
        },
        renames=MODEL_VISION_MODEL,
    ),
    "InternVLChatModel": Small(
        "qianfan_ocr",
        {"model_type": "qwen2"},
        vision=QIANFAN,
        beside={**TOKEN, "ps_version": "v2"},
        made_as=("QianfanOCRForConditionalGeneration", "qianfan_ocr"),
        renames=LANGUAGE_LAYERS,
        streamed=False,
    ),
    "Qwen2_5OmniForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen2_5OmniModel": replace(QWEN2_5_OMNI, made_as=("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni")),
    "Qwen3OmniMoeForConditionalGeneration": Small(
        "qwen3_omni_moe",
        {**MOE, "model_type": "qwen3_omni_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": [], **MROPE},
        vision={
            **QWEN3_VISION,
            "model_type": "qwen3_omni_moe_vision_encoder",
            "image_size": 64,
            "apply_vit_abs_pos_embed": True,
        },
        beside={
            "enable_audio_output": False,
            "thinker_config": {
                "model_type": "qwen3_omni_moe_thinker",
                "audio_config": {
                    **WHISPER,
                    "model_type": "qwen3_omni_moe_audio_encoder",
                    "output_dim": 256,
                    "downsample_hidden_size": 32,
                },
            },
        },
        inside="thinker_config",
        extra=TALKER,
        streamed=False,
    ),
    "Qwen3ASRForConditionalGeneration": QWEN3_ASR,
    "Qwen3ASRRealtimeGeneration": QWEN3_ASR,
    "MossTranscribeDiarizeForConditionalGeneration": Small(
        "moss_transcribe_diarize",
        {"model_type": "qwen3", "tie_word_embeddings": True},
        beside={
            "audio_config": {**WHISPER, "model_type": "moss_transcribe_diarize_audio"},
            "audio_merge_size": 4,
            "audio_token_id": 7,
        },
        renames={
            r"model\.audio_tower": "model.whisper_encoder",
            r"model\.multi_modal_projector\.linear_1": "model.vq_adaptor.layers.0",
            r"model\.multi_modal_projector\.linear_2": "model.vq_adaptor.layers.2",
            r"model\.multi_modal_projector\.norm": "model.vq_adaptor.layers.3",
        },
        streamed=False,
        newer=True,
    ),
    "Molmo2ForConditionalGeneration": Small(
        "molmo2",
        {
            "model_type": "molmo2_text",
            "additional_vocab_size": 128,
            "qk_norm_type": "qwen3",
            "rope_scaling_layers": [0, 1],
        },
        vision={
            "model_type": "molmo2_vision",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "image_size": [56, 56],
            "num_position_embeddings": 16,
        },
        beside={
            "adapter_config": {
                "model_type": "molmo2_adapter",
                "hidden_size": 128,
                "text_hidden_size": 256,
                "intermediate_size": 256,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "vision_feature_layer": [1, 0],
            },
            "image_patch_id": 7,
        },
        streamed=False,
        newer=True,
    ),
    "DeepseekOCRForCausalLM": UNLIMITED_OCR,
    "UnlimitedOCRForCausalLM": replace(UNLIMITED_OCR, model_type="unlimited-ocr"),
    "DeepseekOCR2ForCausalLM": replace(
        UNLIMITED_OCR,
        vision={
            "model_type": "deepseek_ocr2_vision",
            "sam_config": SAM,
            "encoder_config": {key: AUDIO[key] for key in AUDIO if key not in ("num_mel_bins", "max_source_positions")},
        },
        made_as=("DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2"),
    ),
    "HCXVisionV2ForCausalLM": Small(
        "hyperclovax_vision_v2",
        {"model_type": "hyperclovax", "attention_multiplier": 0.125},
        vision={**QWEN_VISION, "model_type": "qwen2_5_vl_vision"},
        beside={"image_token_id": 7, "video_token_id": 8},
        made_as=("HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax_vision_v2"),
        renames={
            r"model\.vision_projector": "model.mm_projector",
            r"model\.language_model\.(?!lm_head)": "model.language_model.model.",
        },
        streamed=False,
    ),
    "AriaForConditionalGeneration": Small(
        "aria",
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision=IDEFICS,
        beside={"image_token_index": 7, "projector_patch_to_query_dict": {"16": 4}},
    ),
}

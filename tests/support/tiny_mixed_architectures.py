"""Small models of architectures that are published in several formats, or whose layers are of two kinds."""

from __future__ import annotations

from dataclasses import replace

from support.tiny_architecture import DEEPSEEK_MOE, DRAFT, GEMMA4, INDEXER, MLA, Small, linear, normed

_KINDS = ("sliding_attention", "full_attention")
# The last two layers read keys and values of the first two.
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": [*_KINDS, *_KINDS],
    "intermediate_size": [512] * 4,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 512,
    "laurel_rank": 64,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": GEMMA4["rope_parameters"],
}
_STEP = {
    "num_attention_groups": 2,
    "use_moe": True,
    "moe_intermediate_size": 128,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_every_n_layer": 1,
    "moe_layers_enum": "1",
    "share_expert_dim": 128,
    "moe_router_activation": "sigmoid",
    "use_head_wise_attn_gate": True,
    "layer_types": list(_KINDS),
    "sliding_window": 512,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 64,
    },
    "rope_theta": 10000.0,
}
_M3 = {
    "intermediate_size": 128,
    "dense_intermediate_size": 512,
    "shared_intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
    "swiglu_limit": 7.0,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "rotary_dim": 32,
    "partial_rotary_factor": 0.5,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "moe_layer_freq": [0, 1],
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 64,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 64,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": [0, 1],
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1],
    },
}
MIMO_V2_FLASH = Small(
    "mimo_v2_flash",
    {
        **{
            key: value
            for key, value in DEEPSEEK_MOE.items()
            if key not in ("n_shared_experts", "first_k_dense_replace")
        },
        "layer_types": list(_KINDS),
        "hybrid_layer_pattern": [1, 0],
        "sliding_window": 513,
        "sliding_window_size": 512,
        "mlp_layer_types": ["dense", "sparse"],
        "moe_layer_freq": [0, 1],
        "v_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 64,
        "swa_v_head_dim": 64,
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": 1e-6,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _KINDS},
    },
)
MUSE_GLIMMER = {
    "model_type": "muse_glimmer_text",
    "hidden_activation": "silu",
    "layer_types": list(_KINDS),
    "layer_rope_theta": [10000.0, 0],
    "sliding_window": 512,
    "output_multiplier": 0.19611613513818404,
    "qk_scale_factor": 3.87,
    "final_logit_softcapping": 20.0,
}
MUSE_GLIMMER_VISION = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    # What SGLang reads.
    "rope_parameters": {"rope_theta": 10000.0},
    "layer_types": ["full_attention"],
    # What vLLM reads of the sizes beside it.
    "output_dim": 512,
    "adapter_dim": 256,
}
MUSE_GLIMMER_BESIDE = {"out_hidden_size": 512, "projector_hidden_size": 256, "image_token_id": 7, "video_token_id": 8}
MIXED = {
    # As released: sizes of all kinds at the top.
    "Dots3NoteForCausalLM": Small(
        "dots3_note",
        {
            **MLA,
            **{
                f"swa_{key}": MLA[key]
                for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
            },
            **INDEXER,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_v_head_dim": 64,
            "swa_head_dim": 128,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention", "sliding_attention"],
            "sliding_window": 512,
            "shared_experts_intermediate_size": 128,
            "vision_config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "moe_intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 14,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "mlp_layer_types": ["dense", "sparse"],
                "adapter_in_dim": 128,
                "adapter_out_dim": 256,
            },
            "audio_config": {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "downsample_hidden_size": 16,
                "adapter_input_size": 128,
                "adapter_out_dim": 256,
            },
        },
        made_as=("Dots3NoteForConditionalGeneration", "dots3_note"),
        **DRAFT,
        streamed=False,
    ),
    "HrmTextForCausalLM": Small(
        "hrm_text",
        {"H_cycles": 2, "L_cycles": 2, "num_layers_per_stack": 2, "num_hidden_layers": 12},
        without=("num_key_value_heads",),
        # streamed.py wants each layer asked for once; it goes through them several times.
        streamed=False,
    ),
    "Gemma3nForCausalLM": Small("gemma3n_text", _GEMMA3N),
    # Neither transformers nor vLLM builds its tower without timm: that is a tensor of each kind.
    "Gemma3nForConditionalGeneration": Small(
        "gemma3n",
        {**_GEMMA3N, "model_type": "gemma3n_text"},
        vision={
            "model_type": "gemma3n_vision",
            "architecture": "mobilenetv5_300m_enc",
            "hidden_size": 128,
            "vocab_size": 8,
            "vocab_offset": 496,
        },
        beside={
            "audio_config": {
                "model_type": "gemma3n_audio",
                "hidden_size": 128,
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 1,
                "vocab_size": 8,
                "vocab_offset": 504,
                "input_feat_size": 16,
            },
        },
        made_as=("Gemma3nForCausalLM", "gemma3n_text"),
        alone=True,
        renames={"model.": "model.language_model."},
        extra={
            **{
                f"model.vision_tower.timm_model.{name}": shape
                for name, shape in {
                    "conv_stem.conv.weight": (16, 3, 3, 3),
                    "conv_stem.conv.bias": (16,),
                    "conv_stem.bn.weight": (16,),
                    "blocks.0.0.conv_exp.weight": (64, 16, 3, 3),
                    "blocks.0.0.conv_pwl.weight": (128, 64, 1, 1),
                    "blocks.1.0.dw_start.conv.weight": (128, 1, 3, 3),
                    "blocks.1.0.pw_exp.conv.weight": (256, 128, 1, 1),
                    "blocks.1.0.pw_proj.conv.weight": (128, 256, 1, 1),
                    "blocks.1.0.layer_scale.gamma": (128,),
                    "blocks.1.1.attn.query.proj.weight": (128, 128, 1, 1),
                    "blocks.1.1.attn.key.proj.weight": (64, 128, 1, 1),
                    "blocks.1.1.attn.output.proj.weight": (128, 128, 1, 1),
                    "msfa.ffn.pw_proj.conv.weight": (128, 256, 1, 1),
                    "msfa.norm.weight": (128,),
                }.items()
            },
            **{
                f"model.audio_tower.{name}": shape
                for name, shape in {
                    "subsample_conv_projection.conv_0.conv.weight": (8, 1, 3, 3),
                    "subsample_conv_projection.input_proj_linear.weight": (128, 128),
                    "conformer.0.ffw_layer_start.ffw_layer_1.weight": (512, 128),
                    "conformer.0.ffw_layer_start.ffw_layer_2.weight": (128, 512),
                    "conformer.0.attention.attn.per_dim_scale": (64,),
                    **{f"conformer.0.attention.attn.{part}_proj.weight": (128, 128) for part in "qkv"},
                    "conformer.0.attention.post.weight": (128, 128),
                    "conformer.0.lconv1d.depthwise_conv1d.weight": (128, 1, 5),
                    "conformer.0.norm.weight": (128,),
                }.items()
            },
            **{
                f"model.embed_{kind}.{name}.weight": shape
                for kind in ("vision", "audio")
                for name, shape in {
                    "embedding": (8, 128),
                    "hard_embedding_norm": (128,),
                    "soft_embedding_norm": (128,),
                    "embedding_projection": (256, 128),
                }.items()
            },
        },
        streamed=False,
    ),
    # transformers has the wrapper alone.
    "MuseGlimmerForCausalLM": Small(
        "muse_glimmer_text",
        MUSE_GLIMMER,
        made_as=("MuseGlimmerTextModel", "muse_glimmer_text"),
        renames={"": "model."},
        copies={"model.embed_tokens.": "lm_head."},
        streamed=False,
    ),
    "MuseGlimmerForConditionalGeneration": Small(
        "muse_glimmer", MUSE_GLIMMER, vision=MUSE_GLIMMER_VISION, beside=MUSE_GLIMMER_BESIDE
    ),
    "LongcatFlashForCausalLM": Small(
        "longcat_flash",
        {
            "num_layers": 2,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 512,
            "expert_ffn_hidden_size": 128,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "zero_expert_type": "identity",
            "moe_topk": 2,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "routed_scaling_factor": 1.0,
        },
        without=("num_hidden_layers", "intermediate_size"),
        # transformers has rows of gate and up for experts that do nothing, which files do not hold.
        drop=r".*\.experts\.[45]\..*",
        copies={
            "model.embed_tokens.": "model.mtp.embed_tokens.",
            "model.layers.1.self_attn.1.": "model.mtp.layers.0.self_attn.",
            "model.layers.1.mlps.1.": "model.mtp.layers.0.transformer_layer.mlp.",
        },
        extra={
            "model.mtp.layers.0.eh_proj.weight": (256, 512),
            "model.mtp.norm.weight": (256,),
            **{
                f"model.mtp.layers.0.{name}.weight": (256,)
                for name in ("enorm.m", "hnorm.m", "input_layernorm", "post_attention_layernorm")
            },
        },
        streamed=False,
    ),
    "HYV4ForCausalLM": Small(
        "hy_v4",
        {
            **{key: value for key, value in MLA.items() if key not in ("first_k_dense_replace", "moe_layer_freq")},
            **INDEXER,
            "num_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "indexer_types": ["full", "shared"],
            "hc_mult": 2,
        },
        # transformers saves some under names that are not the published ones.
        renames={
            r"(model\.layers\.\d+\.)hc_pre\.(hc_(?:attn|mlp)_layer\.)": r"\1\2hc_pre.",
            r"model\.hc_pre\.hc_head\.": "model.hc_head.",
            r"(model\.layers\.\d+\.mlp\.(?:shared_experts\.)?)linear_gate": r"\1gate_proj",
        },
        copies={"model.layers.1.self_attn.": "model.mtp_layers.0.self_attn."},
        extra={"model.mtp_layers.0.eh_proj.weight": (256, 512)},
        newer=True,
    ),
    "HYV3ForCausalLM": Small(
        "hy_v3",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 128,
            "expert_hidden_dim": 128,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "qk_norm": True,
            "route_norm": True,
            "router_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
        },
        copies=DRAFT["copies"],
        extra={
            "model.layers.2.eh_proj.weight": (256, 512),
            **{f"model.layers.2.{name}.weight": (256,) for name in ("enorm", "hnorm", "final_layernorm")},
        },
    ),
    "MiMoV2FlashForCausalLM": MIMO_V2_FLASH,
    # Only its own code reads its model_type, mimo_v2; its files are Flash's but for what is stored as one in FP8.
    "MiMoV2ForCausalLM": replace(MIMO_V2_FLASH, made_as=("MiMoV2FlashForCausalLM", "mimo_v2_flash"), streamed=False),
    "Step3p5ForCausalLM": Small(
        "step3p5",
        _STEP,
        made_as=("LlamaForCausalLM", "llama"),
        streamed=False,
        drop=r"model\.layers\..*",
        extra={
            **{
                f"model.layers.{layer}.{name}.weight": shape
                for layer, heads in ((0, 6), (1, 4))
                for name, shape in {
                    "input_layernorm": (256,),
                    "post_attention_layernorm": (256,),
                    "self_attn.q_norm": (64,),
                    "self_attn.k_norm": (64,),
                    "self_attn.q_proj": (64 * heads, 256),
                    "self_attn.k_proj": (128, 256),
                    "self_attn.v_proj": (128, 256),
                    "self_attn.o_proj": (256, 64 * heads),
                    "self_attn.g_proj": (heads, 256),
                }.items()
            },
            **{
                f"model.layers.{path}.{name}.weight": (*number, *((256, rows) if name == "down_proj" else (rows, 256)))
                for path, number, rows in (("0.mlp", (), 512), ("1.share_expert", (), 128), ("1.moe", (4,), 128))
                for name in ("gate_proj", "up_proj", "down_proj")
            },
            "model.layers.1.moe.gate.weight": (4, 256),
            "model.layers.1.moe.router_bias": (4,),
        },
    ),
    "Step3p7ForConditionalGeneration": Small(
        "step3p7",
        {**_STEP, "model_type": "step3p5"},
        vision={
            "model_type": "perception_encoder",
            "width": 128,
            "layers": 1,
            "heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "ls_init_value": 0.1,
            "use_cls_token": False,
            "use_ln_pre": True,
            "use_ln_post": False,
            "use_abs_posemb": True,
            "use_rope2d": True,
            "output_dim": None,
            "hidden_act": "quick_gelu",
            "max_position_embeddings": 16,
        },
        beside={"projector_bias": False, "image_token_id": 7},
    ),
    "KimiK25ForConditionalGeneration": Small(
        "kimi_k25",
        {**MLA, "model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
        vision={
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "pos_emb_time": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 128,
            "intermediate_size": 256,
        },
        beside={"projection_hidden_size": 128, "image_token_id": 5, "video_token_id": 6},
        made_as=("Kimi_K25ForConditionalGeneration", "kimi_k25"),
        # transformers saves all layers as blocks, which only the tower's are, and puts two modules elsewhere.
        copies={
            "language_model.model.blocks.": "language_model.model.layers.",
            "model.mm_projector.": "mm_projector.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        },
        drop=r"language_model\.model\.blocks\..*|model\.mm_projector.*|vision_tower\.encoder\.patch_embed.*",
    ),
    # transformers has the language model alone.
    "KimiVLForConditionalGeneration": Small(
        "kimi_vl",
        {**MLA, "model_type": "deepseek_v3", "q_lora_rank": None, "num_nextn_predict_layers": 0},
        vision={
            "model_type": "moonvit",
            "patch_size": 14,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 128,
            "intermediate_size": 256,
            "merge_kernel_size": [2, 2],
        },
        beside={"media_placeholder_token_id": 7},
        made_as=("DeepseekV3ForCausalLM", "deepseek_v3"),
        alone=True,
        renames={"": "language_model."},
        extra={
            **linear("vision_tower.encoder.blocks.0.wqkv", 384, 128),
            **linear("vision_tower.encoder.blocks.0.wo", 128, 128),
            **linear("vision_tower.encoder.blocks.0.mlp.fc0", 256, 128),
            **linear("vision_tower.encoder.blocks.0.mlp.fc1", 128, 256),
            **normed("vision_tower.encoder.blocks.0.norm0", 128),
            **normed("vision_tower.encoder.blocks.0.norm1", 128),
            **normed("vision_tower.encoder.final_layernorm", 128),
            **normed("multi_modal_projector.pre_norm", 128),
            "vision_tower.patch_embed.pos_emb.weight": (4, 4, 128),
            "vision_tower.patch_embed.proj.weight": (128, 3, 14, 14),
            "vision_tower.patch_embed.proj.bias": (128,),
            **linear("multi_modal_projector.linear_1", 512, 512),
            **linear("multi_modal_projector.linear_2", 256, 512),
        },
        streamed=False,
    ),
    "MiniMaxM3SparseForConditionalGeneration": Small(
        "minimax_m3_vl",
        {**_M3, "model_type": "minimax_m3_vl_text"},
        vision={
            "model_type": "minimax_m3_vl_vision",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            # As published files say it.
            "num_channels": 3,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": 10000.0,
            "vision_segment_max_frames": 4,
            "img_token_compression_config": {
                "image_token_compression_method": "patch_merge",
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        beside={"image_token_index": 5, "video_token_index": 6, "projector_hidden_size": 256},
    ),
}

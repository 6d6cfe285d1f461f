"""Language models inside wrappers, whose towers stay as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..version import VLLM
from .architecture import (
    EMBEDDING,
    MTP_LAYER,
    ROUTER,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    Refusal,
    SGLangLimits,
    StackedExperts,
)
from .dense import GEMMA3N, GEMMA4, GLM4, LLAMA, MUSE_GLIMMER, OPT, WINDOWS
from .experts import DEEPSEEK_V32, ERNIE_MOE, GLM4_MOE, LLAMA4, MTP, NAMELESS_HEAD, QWEN3_MOE, ROUTED
from .hybrid import EITHER, GLM5_NEXT, LFM2, NEMOTRON_H, QWEN3_5, QWEN3_5_MOE, QWEN4_EXP
from .parts import (
    ATTENTION,
    COMPRESSED_LOADS,
    GATE_UP,
    HEADS,
    IF_ENABLED,
    KV_HEADS,
    NO_CACHE,
    NO_GROUPS,
    QKV,
    RENAMED,
    LayerPart,
    attention,
    gated_mlp,
    model,
    plain,
    sglang_refuses,
    stacked_experts,
    wrap,
)

# vLLM builds such a tower with quant_config, as vision_tower.vision_model.encoder (models/siglip.py, clip.py);
# transformers 5 omits vision_model.
TOWER = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
LANGUAGE_MODEL = ("language_model.model.", "model.language_model.")
PROJECTED = ("vision_tower", "multi_modal_projector")
GEMMA3_WRAPPED = wrap(
    replace(LLAMA, windows=WINDOWS["Gemma3"]),
    "Gemma3ForConditionalGeneration",
    *PROJECTED,
    spellings=(LANGUAGE_MODEL, TOWER),
)
# Encoder and decoder share all weights but a scalar, and vLLM builds their layers under one name
# (models/diffusion_gemma.py:156-164). It builds self-conditioning, which reads the previous step, without quantization
# (:80-92).
DIFFUSION_GEMMA = wrap(
    GEMMA4,
    "DiffusionGemmaForBlockDiffusion",
    "encoder.vision_tower",
    "encoder.embed_vision",
    layers="model.decoder.layers.*",
    spellings=(
        ("model.encoder.vision_tower.", "vision_tower."),
        ("model.encoder.embed_vision.", "embed_vision."),
        ("model.decoder.", "model."),
    ),
    towers=("vision_tower", "embed_vision"),
    # transformers loads stacked experts only, and so does SGLang (models/gemma4_diffusion.py:615).
    sglang=SGLangLimits(experts="it silently drops experts that are not stacked"),
)
DIFFUSION_GEMMA = replace(
    DIFFUSION_GEMMA,
    # Set always; config.json has no such key (models/diffusion_gemma.py:198).
    cached=(replace(GEMMA4.cached[0], keys_as_values="num_global_key_value_heads"),),
    keep=(
        *DIFFUSION_GEMMA.keep,
        Keep("model.decoder.embed_tokens", EMBEDDING.why, divided=True),
        Keep("model.decoder.self_conditioning.*", "reads the previous step's output"),
    ),
)
# Older files use model. and visual., newer ones model.language_model. and model.visual.; vLLM's mapper accepts both.
QWEN_VISION = "visual"
QWEN2_VL = wrap(
    replace(LLAMA, windows=IF_ENABLED),
    "Qwen2VLForConditionalGeneration",
    QWEN_VISION,
    layers=EITHER,
    # transformers 5 looks up the tower by its newer name only.
    spellings=(("visual.", "model.visual."),),
    sglang=replace(RENAMED, cache=NO_CACHE),
)

# vLLM models/mllama4.py has no name mapper: it loads and looks up these names only.
LLAMA4_WRAPPED = wrap(
    LLAMA4,
    "Llama4ForConditionalGeneration",
    "vision_model",
    "multi_modal_projector",
    layers="language_model.model.layers.*",
    # SGLang models/mllama4.py:607.
    sglang=sglang_refuses(
        "it reorders the rows of queries and keys, but not their scales",
        "--scheme tensor, and -w 128 in the fp8 format, load",
        scheme="channel",
        # SGLang does not reorder these rows.
        unpacked=(".self_attn.{q,k}_proj",),
    ),
)

# The language model may be any, dense or with experts: Qwen2, Qwen3, Llama (vLLM models/interns1.py:613).
INTERNVL = wrap(
    QWEN3_MOE, "InternVLForConditionalGeneration", *PROJECTED, spellings=(LANGUAGE_MODEL,), sglang=NO_GROUPS
)
# vLLM fuses these in such towers too; models/llava_onevision.py and lfm2_vl.py have no packed_modules_mapping.
TOWER_QKV = FusedLayers(
    f"{{{','.join(tower.rstrip('.') for tower in TOWER)}}}.encoder.layers.*.self_attn.{{q,k,v}}_proj", "qkv_proj"
)
CLIP = replace(LLAMA, fused=(*LLAMA.fused, TOWER_QKV))
LLAVA = wrap(CLIP, "LlavaForConditionalGeneration", *PROJECTED, spellings=(LANGUAGE_MODEL, TOWER), sglang=NO_GROUPS)
IDEFICS3 = wrap(
    LLAMA,
    "Idefics3ForConditionalGeneration",
    "vision_model",
    "connector",
    layers="model.text_model.layers.*",
    sglang=NO_GROUPS,
)
# vLLM has no members for gate_up_proj, which is one tensor in the language model (models/glm4_1v.py:1744), and uses
# attention's name for the tower's qkv (models/glm_ocr.py:129).
VISUAL = "{visual,model.visual}"
GLM4V = wrap(
    replace(
        GLM4,
        fused=(
            *GLM4.fused,
            FusedLayers(f"{VISUAL}.blocks.*.mlp.{{gate,up}}_proj", "gate_up_proj"),
            FusedLayers(f"{VISUAL}.merger.{{gate,up}}_proj", "gate_up_proj"),
        ),
    ),
    "Glm4vForConditionalGeneration",
    "visual",
    renames=(*GLM4.renames, (".attn.qkv", ".attn.qkv_proj")),
)

AUDIO = ("audio_tower", "multi_modal_projector")

QWEN2_AUDIO = wrap(LLAMA, "Qwen2AudioForConditionalGeneration", *AUDIO, spellings=(LANGUAGE_MODEL,))
PADDLE_OCR = wrap(
    replace(
        LLAMA,
        # vLLM models/paddleocr_vl.py has no packed_modules_mapping.
        fused=(*LLAMA.fused, FusedLayers("visual.vision_model.encoder.layers.*.self_attn.{q,k,v}_proj", "qkv_proj")),
    ),
    "PaddleOCRVLForConditionalGeneration",
    "visual",
    "mlp_AR",
    layers="model.layers.*",
)
# The language model may be any, dense or with experts, as in INTERNVL (vLLM models/internvl.py:615).
QIANFAN = wrap(
    QWEN3_MOE,
    "QianfanOCRForConditionalGeneration",
    "vision_model",
    "mlp1",
    layers="language_model.model.layers.*",
    # transformers splits the tower's qkv, which it refuses if anything is quantized.
)
# vLLM serves the thinker, without the talker (models/qwen3_omni_moe_thinker.py:1635), and builds the towers without
# "thinker.".
wrap_thinker = partial(wrap, layers="thinker.model.layers.*", text_config="thinker_config.text_config")
OMNI_TOWERS = ("visual", "audio_tower")
QWEN2_5_OMNI = wrap_thinker(
    replace(LLAMA, fused=(*LLAMA.fused, FusedLayers("thinker.visual.blocks.*.attn.{q,k,v}", "qkv"))),
    "Qwen2_5OmniForConditionalGeneration",
    *(f"thinker.{tower}" for tower in OMNI_TOWERS),
    "talker",
    "token2wav",
    towers=OMNI_TOWERS,
)
# Built as Qwen3 Omni's, without "thinker." (vLLM models/qwen3_asr.py:418-424).
# transformers uses the names of newer files, without "thinker.".
QWEN3_ASR = wrap_thinker(LLAMA, "Qwen3ASRForConditionalGeneration", "thinker.audio_tower", towers=("audio_tower",))
# vLLM builds the tower without "model." (models/moss_transcribe_diarize.py:584-594), and its Whisper layers one level
# deeper (models/whisper.py:524-538).
MOSS_TOWER = ("model.whisper_encoder.layers.*", "whisper_encoder.layers.*.layers")
MOSS = wrap(
    replace(LLAMA, fused=(*LLAMA.fused, FusedLayers(f"{MOSS_TOWER[0]}.self_attn.{{q,k,v}}_proj", "qkv_proj"))),
    "MossTranscribeDiarizeForConditionalGeneration",
    "whisper_encoder",
    "vq_adaptor",
    spellings=(
        LANGUAGE_MODEL,
        tuple(f"{layer}.self_attn." for layer in MOSS_TOWER),
        tuple(f"{layer}.{path}" for layer, path in zip(MOSS_TOWER, ("fc", "mlp.fc"), strict=True)),
    ),
    # transformers uses the names of newer files.
)
# q, k and v are one tensor, as are up and gate; vLLM gives them other names (models/molmo2.py:2305-2333). It builds all
# layers of the language model without names (models/molmo2.py:894-950, 1018-1034).
MOLMO2_TOWER = "model.vision_backbone"
MOLMO2 = wrap(
    model(
        "Molmo2ForConditionalGeneration",
        LayerPart(
            (".self_attn.{att_proj,attn_out}", ".mlp.{ff_proj,ff_out}"),
            (
                FusedLayers(f"{MOLMO2_TOWER}.image_vit.transformer.resblocks.*.attention.{{wq,wk,wv}}", "merged_qkv"),
                FusedLayers(f"{MOLMO2_TOWER}.image_pooling_2d.{{wk,wv}}", "merged_kv"),
                FusedLayers(f"{MOLMO2_TOWER}.image_projector.{{w1,w3}}", "merged_linear"),
            ),
            (
                ParallelSplit(".self_attn.att_proj", "out", replicated=True, parts=QKV),
                ParallelSplit(".self_attn.attn_out", "in", HEADS),
                ParallelSplit(".mlp.ff_proj", "out", parts=(None, None)),
                ParallelSplit(".mlp.ff_out", "in"),
            ),
            keep=(Keep("model.transformer.wte.{embedding,new_embedding}", EMBEDDING.why, divided=True),),
            cached=(CachedRows(".self_attn.att_proj", KV_HEADS),),
        ),
        nameless=(".self_attn.{att_proj,attn_out}", ".mlp.{ff_proj,ff_out}"),
        head_refused=NAMELESS_HEAD,
    ),
    "Molmo2ForConditionalGeneration",
    "vision_backbone",
    layers="model.transformer.blocks.*",
    spellings=(
        (f"{MOLMO2_TOWER}.", "vision_backbone."),
        *(
            (f"{MOLMO2_TOWER}.{name}", f"vision_backbone.{other}_proj")
            for name, other in {
                "image_pooling_2d.wq": "image_pooling_2d.q",
                "image_pooling_2d.wo": "image_pooling_2d.o",
                "image_projector.w2": "image_projector.down",
            }.items()
        ),
    ),
    # transformers splits these tensors, which it refuses if anything is quantized.
)
# DeepSeek V2 with ordinary attention, which vLLM builds without a name (models/deepseek_v2.py:187). Its wrapper has no
# packed_modules_mapping, and other names for the layers of its tower (models/deepencoder.py:820).
DEEPSEEK_OCR = wrap(
    model(
        "DeepseekOCRForCausalLM",
        attention(listed_as="qkv_proj"),
        gated_mlp(".mlp", listed_as="gate_up_proj"),
        gated_mlp(".mlp.shared_experts", listed_as="gate_up_proj"),
        ROUTED,
        nameless=(".self_attn.{q,k,v,o}_proj",),
    ),
    "DeepseekOCRForCausalLM",
    *("sam_model", "vision_model", "qwen2_model", "projector", "image_newline", "view_seperator"),
    layers="model.layers.*",
    text_config="language_config",
    spellings=(
        ("model.vision_model.transformer.", "vision_model.encoder."),
        ("model.", "language_model.model."),
        ("lm_head", "language_model.lm_head"),
    ),
    # transformers has the class under other names (unlimited_ocr, deepseek_ocr2), with stacked experts.
)
# Experts [E, H, 2I] and [E, I, H]. vLLM takes gate_up_proj as the name of gate and of up (models/llama.py:354) and
# halves each tensor of that name (layers/fused_moe/routed_experts.py:1053), so they stay one tensor, whose scales must
# have rows. It builds the shared experts without a name (models/aria.py:214).
ARIA_EXPERTS = replace(
    plain(".mlp.experts.*", "gate_up_proj", parts=GATE_UP),
    experts=(
        ExpertLayout(
            ".mlp.experts",
            stacked=(
                StackedExperts("fc1", ("gate_up_proj",), transposed=True),
                StackedExperts("fc2", ("down_proj",), transposed=True),
            ),
        ),
    ),
    keep=(Keep(".mlp.router", ROUTER),),
)
ARIA = wrap(
    model(
        "AriaForConditionalGeneration",
        ATTENTION,
        gated_mlp(".mlp.shared_experts"),
        ARIA_EXPERTS,
        nameless=(".mlp.shared_experts.*",),
        refused=(
            Refusal(
                None,
                None,
                f"{VLLM} cuts the scales of its experts in two, and fails on one that has no rows",
                "--scheme channel, -w 128, int4 and mxfp4 load",
                scales="single",
            ),
        ),
    ),
    "AriaForConditionalGeneration",
    *PROJECTED,
    spellings=(LANGUAGE_MODEL,),
)

# vLLM builds everything around the language model without quantization (models/nano_nemotron_vl.py:992-1034).
NEMOTRON_OMNI = wrap(
    replace(
        NEMOTRON_H,
        keep=(
            *(keep for keep in NEMOTRON_H.keep if not keep.pattern.startswith("backbone.")),
            Keep("language_model.backbone.embeddings", EMBEDDING.why, divided=True),
            Keep("language_model.mtp.**", MTP_LAYER),
        ),
    ),
    "NemotronH_Omni_Reasoning_V3",
    *("vision_model", "vision_projector", "mlp1", "sound_encoder", "sound_projection"),
    layers="language_model.backbone.layers.*",
    text_config="llm_config",
    spellings=(("language_model.backbone.", "language_model.model."),),
    # SGLang models/nano_nemotron_vl.py:86
    sglang=NEMOTRON_H.sglang,
)

BLIP2_TEXT = "language_model.model.decoder"
# vLLM models/blip2.py:532 builds the tower without a name.
BLIP2 = wrap(
    replace(
        OPT,
        keep=tuple(
            replace(keep, pattern=keep.pattern.replace("{model.decoder,decoder}", BLIP2_TEXT)) for keep in OPT.keep
        ),
    ),
    "Blip2ForConditionalGeneration",
    *("vision_model", "qformer", "language_projection", "query_tokens"),
    layers=f"{BLIP2_TEXT}.layers.*",
    spellings=(("vision_model.", "."),),
)

ENTRIES = (
    BLIP2,
    # vLLM vllm/models/dots3_note/nvidia/model.py: two kinds of latent attention, one with a window and a larger latent
    # vector; both caches have that size, in the layouts of several kernels. A gate with a row for each head, and towers
    # without quantization (models/dots3_note/nvidia/multimodal.py:133).
    wrap(
        replace(
            DEEPSEEK_V32,
            keep=(
                *DEEPSEEK_V32.keep,
                Keep(".self_attn.g_proj", "a gate for each head", divided=True),
                Keep("model.mtp.**", MTP_LAYER),
            ),
            cached=(),
        ),
        "Dots3NoteForCausalLM",
        "vision_encoder",
        "audio_encoder",
        layers="model.layers.*",
        text_config=None,
        spellings=(("model.", "language_model.model."),),
    ),
    LLAVA,
    *(
        replace(LLAVA, name=f"{name}ForConditionalGeneration")
        for name in ("LlavaNext", "LlavaNextVideo", "LlavaOnevision")
    ),
    replace(LLAVA, name="PaliGemmaForConditionalGeneration", attends_ahead=True),
    replace(LLAVA, name="Cohere2VisionForConditionalGeneration", windows=WINDOWS["Cohere2"], sglang=SGLangLimits()),
    INTERNVL,
    # vLLM models/lfm2_vl.py:716 names the language model so that its layers are language.model.layers.
    wrap(
        replace(LFM2, fused=(*LFM2.fused, TOWER_QKV)),
        "Lfm2VlForConditionalGeneration",
        *PROJECTED,
        spellings=((*LANGUAGE_MODEL, "language.model."), TOWER),
        # SGLang models/lfm2_vl.py:69.
        sglang=sglang_refuses("it builds the projector without a name, and quantizes it"),
    ),
    IDEFICS3,
    replace(IDEFICS3, name="SmolVLMForConditionalGeneration"),
    GLM4V,
    replace(GLM4V, name="GlmOcrForConditionalGeneration"),
    # Published ones have no MTP layers.
    wrap(replace(GLM4_MOE, draft_layers=None), "Glm4vMoeForConditionalGeneration", "visual", sglang=GLM4_MOE.sglang),
    wrap(
        replace(LLAMA, windows=WINDOWS["Exaone4"], keep=(*LLAMA.keep, MTP)),
        "Exaone4_5_ForConditionalGeneration",
        "visual",
        sglang=NO_GROUPS,
    ),
    wrap(GEMMA4, "Gemma4UnifiedForConditionalGeneration", "vision_embedder", "embed_vision", "embed_audio"),
    QWEN2_AUDIO,
    replace(QWEN2_AUDIO, name="GlmAsrForConditionalGeneration"),
    replace(QWEN2_AUDIO, name="AudioFlamingo3ForConditionalGeneration", sglang=NO_GROUPS),
    *(
        wrap(LLAMA, f"{name}ForConditionalGeneration", "encoder", "projector", sglang=NO_GROUPS)
        for name in ("GraniteSpeech", "GraniteSpeechPlus")
    ),
    wrap(
        CLIP,
        "Granite4VisionForConditionalGeneration",
        "vision_tower",
        "layerwise_projectors",
        "spatial_projectors",
        spellings=(LANGUAGE_MODEL, TOWER),
    ),
    *(wrap(QWEN3_5, f"MiniCPMV4_{number}ForConditionalGeneration", "vision_tower", "merger") for number in (6, 7)),
    # vLLM builds the tower without quantization (models/funasr.py), and has no packed_modules_mapping.
    wrap(
        replace(LLAMA, fused=tuple(replace(fused, listed_as=fused.sglang) for fused in LLAMA.fused)),
        "FunASRForConditionalGeneration",
        "audio_encoder",
        "audio_adaptor",
        layers="llm.model.layers.*",
        text_config=None,
        # transformers has the class under other names (fun_asr_nano).
    ),
    NEMOTRON_OMNI,
    *(
        replace(NEMOTRON_OMNI, name=f"NemotronH_{name}")
        for name in ("Nano_VL_V2", "Nano_Omni_Reasoning_V3", "Super_Omni_Reasoning_V3")
    ),
    wrap(LLAMA, "Emu3ForConditionalGeneration", "vqmodel", layers="text_model.model.layers.*", sglang=NO_GROUPS),
    wrap(LLAMA, "HunYuanVLForConditionalGeneration", "vit", "vision_tower", layers=EITHER, sglang=NO_GROUPS),
    wrap(
        LLAMA,
        "VibeVoiceAsrForConditionalGeneration",
        *("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
        sglang=NO_GROUPS,
    ),
    PADDLE_OCR,
    QIANFAN,
    replace(QIANFAN, name="InternVLChatModel", text_config="llm_config"),
    QWEN2_5_OMNI,
    # As it was first published.
    replace(QWEN2_5_OMNI, name="Qwen2_5OmniModel"),
    wrap_thinker(
        QWEN3_MOE,
        "Qwen3OmniMoeForConditionalGeneration",
        *(f"thinker.{tower}" for tower in OMNI_TOWERS),
        "talker",
        "code2wav",
        towers=OMNI_TOWERS,
        # models/qwen3_omni_moe_thinker.py:1152
        head_refused=NAMELESS_HEAD,
        sglang=sglang_refuses("it quantizes the towers, which it looks up by names not in the list"),
    ),
    QWEN3_ASR,
    # The same files, for vLLM's streaming audio input.
    replace(QWEN3_ASR, name="Qwen3ASRRealtimeGeneration"),
    ARIA,
    MOSS,
    # vLLM drops "model.", and has another name for the tower (models/hyperclovax_vision_v2.py:385-387).
    wrap(
        LLAMA,
        "HCXVisionV2ForCausalLM",
        *("vision_model", "mm_projector", "discrete_vision_model"),
        layers="model.language_model.model.layers.*",
        spellings=(("model.language_model.", "language_model."), ("model.vision_model.", "visual.")),
        # transformers has another name for the projector in files (conversion_mapping.py:1651).
    ),
    MOLMO2,
    *(replace(DEEPSEEK_OCR, name=f"{name}ForCausalLM") for name in ("DeepseekOCR", "DeepseekOCR2", "UnlimitedOCR")),
    wrap(
        replace(LLAMA, windows=WINDOWS["Cohere2"]), "CohereCompassForConditionalGeneration", "visual", sglang=NO_GROUPS
    ),
    # The first half of the experts is for text, the second half, of smaller ones, for images. Each half has its own
    # router, and in vLLM its own name (models/ernie45_vl_moe.py:243).
    wrap(
        replace(ERNIE_MOE, keep=(*ERNIE_MOE.keep, Keep(".mlp.gate.weight_1", ROUTER))),
        "Ernie4_5_VLMoeForConditionalGeneration",
        "vision_model",
        "resampler_model",
        layers="model.layers.*",
        renames=tuple(
            (f".mlp.{part}", f".mlp.{half}_experts{end}")
            for part, end in (("experts", ""), ("gate", "_gate"))
            for half in ("text", "vision")
        ),
    ),
    wrap(
        MUSE_GLIMMER,
        "MuseGlimmerForConditionalGeneration",
        *("vision_tower", "vision_adapter", "vision_projection"),
        layers="model.language_model.layers.*",
    ),
    GEMMA3_WRAPPED,
    # vLLM builds everything around the language model without quantization (models/gemma3n_mm.py:616-626).
    wrap(
        GEMMA3N,
        "Gemma3nForConditionalGeneration",
        *("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        layers="model.language_model.layers.*",
        spellings=tuple(
            tuple(name.replace("model.", "model.language_model.", 1) for name in group) for group in GEMMA3N.spellings
        ),
    ),
    # vLLM models/mistral3.py:431 renames every weight_scale_inv to weight_scale, which block layers do not have.
    wrap(
        LLAMA,
        "Mistral3ForConditionalGeneration",
        *PROJECTED,
        # SGLang names the language model as if it had no wrapper.
        spellings=(("language_model.model.layers.", "model.language_model.layers.", "model.layers."),),
        refused=(
            Refusal(
                "block",
                "fp8",
                f"{VLLM} does not find its block scales",
                "use --scheme tensor or channel, or --format compressed-tensors",
            ),
        ),
    ),
    # Mistral 3 under other names (vLLM models/lightonocr.py:133).
    wrap(
        LLAMA,
        "LightOnOCRForConditionalGeneration",
        "vision_encoder",
        "vision_projection",
        # SGLang names the language model as if it had no wrapper.
        spellings=(("model.language_model.layers.", "model.layers."),),
    ),
    QWEN2_VL,
    replace(QWEN2_VL, name="Qwen2_5_VLForConditionalGeneration", sglang=RENAMED),
    wrap(LLAMA, "Qwen3VLForConditionalGeneration", QWEN_VISION, sglang=RENAMED),
    # Experts [E, H, 2I] and [E, I, H] (vLLM models/qwen3_vl_moe.py:76).
    wrap(
        replace(QWEN3_MOE, experts=(stacked_experts(".mlp.experts", transposed=True),)),
        "Qwen3VLMoeForConditionalGeneration",
        QWEN_VISION,
        sglang=RENAMED,
    ),
    wrap(GEMMA4, "Gemma4ForConditionalGeneration", "vision_tower", "embed_vision", "audio_tower", "embed_audio"),
    DIFFUSION_GEMMA,
    wrap(QWEN3_5, "Qwen3_5ForConditionalGeneration", QWEN_VISION),
    wrap(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", QWEN_VISION),
    wrap(
        QWEN4_EXP,
        "Qwen4ExpForConditionalGeneration",
        QWEN_VISION,
        # SGLang models/qwen4_exp.py:124
        sglang=sglang_refuses("it reads the n-gram tables as FP8", COMPRESSED_LOADS, format="fp8"),
    ),
    wrap(GLM5_NEXT, "Glm5NextForConditionalGeneration", QWEN_VISION),
    LLAMA4_WRAPPED,
)

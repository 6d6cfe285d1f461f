"""Building blocks of entries: parts of decoder layers, smoothing rules, and facts about engines that entries share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..version import VLLM
from .architecture import (
    EMBEDDING,
    HEAD,
    ROUTER,
    TOWER,
    Architecture,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    RecurrentState,
    Refusal,
    SGLangLimits,
    SlidingWindows,
    SmoothingRule,
    StackedExperts,
)


@dataclass(frozen=True)
class LayerPart:
    """A part of a decoder layer that many architectures have; entries are put together from these.

    The fields are those of Architecture.
    """

    compress: tuple[str, ...]
    fused: tuple[FusedLayers, ...] = ()
    splits: tuple[ParallelSplit, ...] = ()
    experts: tuple[ExpertLayout, ...] = ()
    keep: tuple[Keep, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    states: tuple[RecurrentState, ...] = ()


def gated_mlp(
    path: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    listed_as: str | None = None,
    sglang: str | None = "gate_up_proj",
) -> LayerPart:
    """Return a gated MLP: gate, up and down below `path`; engines fuse the first two.

    Args:
        path: pattern of the MLP's module, relative to the decoder layer: ".mlp".
        gate: last segment of the gate projection's name.
        up: last segment of the up projection's name.
        down: last segment of the down projection's name.
        listed_as: last segment of vLLM's name for the fused layer, for the ignore list; None if vLLM derives it.
        sglang: last segment of SGLang's name for the fused layer; None if SGLang derives it.

    Returns:
        Patterns of the projections, and how engines fuse and divide them.
    """
    return LayerPart(
        compress=(f"{path}.{{{gate},{up},{down}}}",),
        fused=(FusedLayers(f"{path}.{{{gate},{up}}}", listed_as, sglang),),
        splits=(ParallelSplit(f"{path}.{{{gate},{up}}}", "out"), ParallelSplit(f"{path}.{down}", "in")),
    )


def plain(path: str, up: str = "up_proj", down: str = "down_proj", parts: tuple[None, ...] = ()) -> LayerPart:
    """Return an MLP without a gate, or with gate and up in one tensor.

    Args:
        path: pattern of the MLP's module, relative to the decoder layer: ".mlp".
        up: last segment of the up projection's name.
        down: last segment of the down projection's name.
        parts: None for each of the layers of equal size that the up projection holds; () if it is one layer.

    Returns:
        Patterns of the projections, and how ranks divide them.
    """
    splits = ParallelSplit(f"{path}.{up}", "out", parts=parts), ParallelSplit(f"{path}.{down}", "in")
    return LayerPart((f"{path}.{{{up},{down}}}",), splits=splits)


# Gate and up in one tensor: engines divide each half among ranks.
GATE_UP = (None, None)


def stacked_experts(
    path: str, gate_up: str = "gate_up_proj", down: str = "down_proj", transposed: bool = False, **more: Any
) -> ExpertLayout:
    """Return routed experts in two tensors: gate and up of all experts of a layer, and down.

    Args:
        path: pattern of the experts' module, relative to the decoder layer: ".mlp.experts".
        gate_up: name of the first tensor.
        down: name of the second.
        transposed: whether an expert's slices are [in, out].
        more: other fields of ExpertLayout.
    """
    first = StackedExperts(gate_up, ("gate_proj", "up_proj"), transposed)
    return ExpertLayout(path, (first, StackedExperts(down, ("down_proj",), transposed)), **more)


def routed_experts(
    path: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    experts: ExpertLayout | None = None,
    router: str | None = None,
) -> LayerPart:
    """Return routed experts below `path`, one gated MLP each, and the router.

    Args:
        path: pattern of the experts' module, relative to the decoder layer: ".mlp.experts".
        gate: last segment of the name of an expert's gate projection.
        up: last segment of the name of an expert's up projection.
        down: last segment of the name of an expert's down projection.
        experts: how the checkpoint stores them; separate tensors if None.
        router: pattern of the router's module; one named "gate" beside `path` if None.

    Returns:
        Patterns of the experts' projections and the router, and how engines fuse and divide them.
    """
    expert = gated_mlp(f"{path}.*", gate, up, down, sglang=None)
    kept = Keep(router or f"{path.rsplit('.', 1)[0]}.gate", ROUTER)
    return replace(expert, experts=(experts or ExpertLayout(path),), keep=(kept,))


def model(
    name: str, *parts: LayerPart, layers: str = "model.layers.*", keep: tuple[Keep, ...] = (), **more: Any
) -> Architecture:
    """Return an entry that is put together from parts; embedding and output head are kept.

    Args:
        name: the class in config.json's `architectures`.
        parts: parts of its decoder layers.
        layers: pattern of one decoder layer, which patterns that begin with a dot continue.
        keep: more modules that are not quantized.
        more: other fields of Architecture.

    Returns:
        The registry's entry of the architecture.
    """
    parts = (LayerPart((), keep=(EMBEDDING, HEAD)), *parts, LayerPart((), keep=keep))
    joined: dict[str, Any] = {
        field.name: tuple(one for part in parts for one in getattr(part, field.name)) for field in fields(LayerPart)
    }
    return Architecture(name, layers, **joined, **more)


# The language model inside a wrapper: in older files of the Hub, and in those of transformers 4.52 and later.
WRAPPED = "{language_model.model,model.language_model}.layers.*"

HEADS = "num_attention_heads"
KV_HEADS = "num_key_value_heads"

# Why the connections of layers with several streams of hidden states (hyper-connections) are kept.
STREAMS = "mixes streams of hidden states"


def attention(out: str = "o_proj", listed_as: str | None = None, path: str = ".self_attn") -> LayerPart:
    """Return attention: q, k and v below `path`, which engines fuse, and the output projection.

    Args:
        out: last segment of the output projection's name.
        listed_as: last segment of vLLM's name for fused q, k and v, for the ignore list; None if vLLM derives it.
        path: pattern of the attention module, relative to the decoder layer: ".self_attn".

    Returns:
        Patterns of the projections, and how engines fuse, divide and cache them.
    """
    return LayerPart(
        compress=(f"{path}.{{q_proj,k_proj,v_proj,{out}}}",),
        fused=(FusedLayers(f"{path}.{{q,k,v}}_proj", listed_as, "qkv_proj"),),
        splits=(
            ParallelSplit(f"{path}.q_proj", "out", HEADS),
            ParallelSplit(f"{path}.{{k,v}}_proj", "out", KV_HEADS, replicated=True),
            ParallelSplit(f"{path}.{out}", "in", HEADS),
        ),
        cached=(CachedRows(f"{path}.{{k,v}}_proj", KV_HEADS),),
    )


def joined_attention(
    path: str, joined: str, out: str, cached: str = KV_HEADS, equal_parts: int = 0, **split: Any
) -> LayerPart:
    """Return attention whose files have q, k and v as one tensor.

    Args:
        path: pattern of the attention module, relative to the decoder layer: ".self_attn".
        joined: last segment of that tensor's name.
        out: last segment of the output projection's name.
        cached: config key that counts the heads that are cached.
        equal_parts: that of CachedRows.
        split: how ranks divide the tensor: other fields of ParallelSplit.
    """
    return LayerPart(
        (f"{path}.{{{joined},{out}}}",),
        splits=(ParallelSplit(f"{path}.{joined}", "out", **split), ParallelSplit(f"{path}.{out}", "in", HEADS)),
        cached=(CachedRows(f"{path}.{joined}", cached, equal_parts=equal_parts),),
    )


ATTENTION = attention()
# Rows of q, k and v that follow one another.
QKV = (HEADS, KV_HEADS, KV_HEADS)
MLP = gated_mlp(".mlp")
IF_ENABLED = SlidingWindows(enabled_by="use_sliding_window")
PATTERN = "sliding_window_pattern"

# Why vLLM cannot load a quantized layer, mostly the output head.
BUILT_UNQUANTIZED = f"{VLLM} builds it without a quantization"


def sglang_refuses(
    why: str,
    hint: str = "vLLM loads it",
    *,
    scheme: str | None = None,
    format: str | None = None,
    scales: Literal["several", "not by row"] | None = None,
    **limits: Any,
) -> SGLangLimits:
    """Return that SGLang cannot load some schemes of an architecture: the fields of one Refusal, and other limits."""
    return SGLangLimits((Refusal(scheme, format, why, hint, scales),), **limits)


COMPRESSED_LOADS = "--format compressed-tensors loads"
# Facts about SGLang, each found by running its loader (tests/serve/test_sglang.py).
# models/llama.py:723 and llama4's rename every weight_scale_inv to weight_scale, which block layers do not have.
SCALES_LOST = sglang_refuses("it silently drops the scales of blocks", COMPRESSED_LOADS, scheme="block", format="fp8")
HEAD_IN_BFLOAT16 = "it builds the output head in bfloat16, whatever is stored"
# Why vLLM loads no scales of the KV cache (tests/serve/test_serve_cache.py asks it about all entries).
# models/lfm2.py:193
NAMELESS_CACHE = f"{VLLM} builds its attention without quantization"
SEVERAL_CACHES = f"{VLLM} has several KV caches for each layer, and looks up their scales by the name of one"
ONES_TAKEN = f"{VLLM} silently uses 1 in their place"
# Their load_weights require a parameter for every name.
NO_CACHE = "it has no parameter for scales of the KV cache"
NO_SCALES = SGLangLimits(cache=NO_CACHE)
# It has no class of these names, and its Transformers backend takes none of transformers'.
NO_CLASS = dict.fromkeys(
    (
        *("LLaMAForCausalLM", "TeleChat2ForCausalLM", "TeleChat3ForCausalLM", "PanguEmbeddedForCausalLM"),
        *("Rnj1ForCausalLM", "FalconForCausalLM", "BloomForCausalLM", "ChatGLMForConditionalGeneration"),
        *("GLM4VForCausalLM", "JambaForCausalLM", "OlmoHybridForCausalLM", "Glm5NextForCausalLM"),
        *("Qwen4ExpForCausalLM", "Qwen2_5OmniModel", "Qwen3ASRRealtimeGeneration", "FunASRForConditionalGeneration"),
        *("HCXVisionV2ForCausalLM", "NemotronH_Super_Omni_Reasoning_V3"),
    ),
    (Refusal(None, None, "it has no class of this name", "serve it with vLLM"),),
)
# Their attention is built without such scales (RadixAttention without quant_config), or load_weights skips them.
IGNORED_CACHE_SCALES = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"),
    *("Glm4ForCausalLM", "Glm4MoeForCausalLM", "Starcoder2ForCausalLM", "PhiForCausalLM", "GraniteMoeForCausalLM"),
    *("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "ExaoneMoeForCausalLM", "AfmoeForCausalLM"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
)
# models/olmo.py and stablelm.py build their attention without quantization.
PLAIN_ATTENTION = SGLangLimits(plain=(".self_attn.*",), head=HEAD_IN_BFLOAT16, cache=NO_CACHE)
# They run on its Transformers backend, which prefixes all names of the config, "Linear" too.
NO_GROUPS = sglang_refuses(
    "it finds no group of the compressed-tensors format for these layers",
    "--scheme tensor and -w 128 load",
    format="compressed-tensors",
    cache=NO_CACHE,
)
# SGLang builds these layers without names.
FORMATS = ("fp8", "compressed-tensors")
NAMELESS = SGLangLimits(uniform_formats=FORMATS)
# models/qwen2_vl.py:446 and similar ones rename the listed modules to names that they do not look up.
RENAMED = SGLangLimits(uniform_formats=FORMATS[1:])
GATE_UP_TENSOR = plain(".mlp", "gate_up_proj", parts=GATE_UP)

# SGLang layers/quantization/utils.py:57-61 looks up the members of layers that these files store fused.
FUSED_NAMES = (
    *((".qkv_proj", f".{member}_proj") for member in "qkv"),
    *((".gate_up_proj", f".{member}_proj") for member in ("gate", "up")),
)


def wrap(text: Architecture, name: str, *towers: str, layers: str = WRAPPED, **more: Any) -> Architecture:
    """Return the entry of a multimodal wrapper, of which only the language model is quantized.

    Args:
        text: entry of the language model.
        name: the wrapper's class in config.json's `architectures`.
        towers: names of its vision and audio modules, at the top or below "model": "visual".
        layers: pattern of one decoder layer.
        more: other fields of Architecture. Without `text_config` it is "text_config". Without `sglang` there are no
            limits, and without `smoothing` no rules, whatever the language model's entry says.

    Returns:
        The language model's entry with these names and fields, and with the towers kept.
    """
    kept = tuple(Keep(f"{{{tower},model.{tower}}}.**", TOWER) for tower in towers)
    more = {"text_config": "text_config", "towers": towers, **more}
    more = {"sglang": SGLangLimits(), "smoothing": (), **more}
    return replace(text, name=name, layers=layers, keep=(*text.keep, *kept), **more)


# Smoothing rules. tests/calibration/test_mappings.py checks them in transformers' models.
V_TO_O = SmoothingRule(".self_attn.v_proj", (".self_attn.o_proj",), heads=KV_HEADS)
UP_TO_DOWN = SmoothingRule(".mlp.up_proj", (".mlp.down_proj",))
NORM_TO_QKV = SmoothingRule(".input_layernorm", (".self_attn.{q,k,v}_proj",))
DENSE_SMOOTHING = (
    NORM_TO_QKV,
    SmoothingRule(".post_attention_layernorm", (".mlp.{gate,up}_proj",)),
    V_TO_O,
    UP_TO_DOWN,
)
# Gemma's norms multiply by 1 + w.
GEMMA_SMOOTHING = (*(replace(rule, offset=1) for rule in DENSE_SMOOTHING[:2]), *DENSE_SMOOTHING[2:])
GEMMA2_MLP = SmoothingRule(".pre_feedforward_layernorm", (".mlp.{gate,up}_proj",), offset=1)
GEMMA2_SMOOTHING = (replace(NORM_TO_QKV, offset=1), GEMMA2_MLP, V_TO_O, UP_TO_DOWN)
# Without q, k and v: smoothing them is less accurate than rounding to nearest (llm-compressor issue 2522).
GEMMA3_SMOOTHING = (GEMMA2_MLP, V_TO_O, UP_TO_DOWN)
# Gate and up in one tensor, of which up is the last part.
FUSED_MLP = (
    SmoothingRule(".post_attention_layernorm", (".mlp.gate_up_proj",)),
    SmoothingRule(".mlp.gate_up_proj", (".mlp.down_proj",), last=True),
)
GLM_SMOOTHING = (NORM_TO_QKV, V_TO_O, *FUSED_MLP)
PHI3_SMOOTHING = (
    SmoothingRule(".input_layernorm", (".self_attn.qkv_proj",)),
    SmoothingRule(".self_attn.qkv_proj", (".self_attn.o_proj",), heads=KV_HEADS, last=True),
    *FUSED_MLP,
)


def expert_smoothing_rules(mlp: str, gate: str, up: str, down: str, *siblings: str) -> tuple[SmoothingRule, ...]:
    """Return the rules of a decoder layer with routed experts.

    Args:
        mlp: pattern of the MoE module, relative to the decoder layer: ".mlp". Below it are a router named "gate" and
            the module "experts".
        gate: last segment of the name of an expert's gate projection.
        up: last segment of the name of an expert's up projection.
        down: last segment of the name of an expert's down projection.
        siblings: patterns of other modules that read the same norm, such as shared experts.

    Returns:
        Pairs of smooth_layer and balance_layers: norm to q, k, v; norm to router, experts and siblings; v to o; up to
        down.
    """
    balance_layers = (f"{mlp}.gate", f"{mlp}.experts.*.{{{gate},{up}}}", *siblings)
    return (
        NORM_TO_QKV,
        SmoothingRule(".post_attention_layernorm", balance_layers),
        V_TO_O,
        SmoothingRule(f"{mlp}.experts.*.{up}", (f"{mlp}.experts.*.{down}",)),
    )


MIXTRAL_SMOOTHING = expert_smoothing_rules(".block_sparse_moe", "w1", "w3", "w2")
_QWEN_EXPERTS = (".mlp", "gate_proj", "up_proj", "down_proj", ".mlp.{gate,up}_proj")
QWEN3_MOE_SMOOTHING = (*expert_smoothing_rules(*_QWEN_EXPERTS), UP_TO_DOWN)
QWEN2_MOE_SMOOTHING = (
    *expert_smoothing_rules(*_QWEN_EXPERTS, ".mlp.shared_expert_gate", ".mlp.shared_expert.{gate,up}_proj"),
    UP_TO_DOWN,
    SmoothingRule(".mlp.shared_expert.up_proj", (".mlp.shared_expert.down_proj",)),
)


def _classes(ending: str, bodies: str) -> list[str]:
    """Names of classes with the same ending."""
    return [body + ending for body in bodies.split()]


# transformers cannot load their 128x128 block outputs: it lacks the class, or uses other names.
UNREAD_BY_TRANSFORMERS = (
    *_classes(
        "ForCausalLM",
        "DeciLM HrmText IQuestLoopCoder MuseGlimmer Exaone Orion InternLM2 GLM4V TeleChat2 Deepseek GraniteMoe "
        "GraniteMoeShared GraniteMoeSWA HunYuanMoEV1 Llama4 BailingMoeV2 BailingMoe LongcatFlash DeepseekV4 HYV4 "
        "GraniteMoeHybrid Glm5Next NemotronHPuzzle BailingMoeV2_5 BailingMoeV3 Step3p5 HCXVisionV2 DeepseekOCR "
        "DeepseekOCR2 UnlimitedOCR",
    ),
    *_classes(
        "ForConditionalGeneration",
        "ChatGLM Step3p7 KimiVL MiniMaxM3Sparse FunASR QianfanOCR Qwen2_5Omni Qwen3OmniMoe Qwen3ASR Aria "
        "MossTranscribeDiarize Molmo2 Ernie4_5_VLMoe Qwen3VLMoe Glm5Next Llama4",
    ),
    *("ChatGLMModel", "InternVLChatModel", "Qwen2_5OmniModel", "Qwen3ASRRealtimeGeneration"),
    "DiffusionGemmaForBlockDiffusion",
)

# How vLLM finds the scheme of an input embedding. It builds those of all other classes without a quantization. Asked of
# vLLM itself.
BY_NAME = (
    *_classes(
        "ForCausalLM",
        "Qwen3 Qwen3Moe Gemma3 Qwen2 MiMo IQuestLoopCoder PanguEmbedded Olmo Olmo2 Olmo3 SmolLM3 SeedOss Cwm "
        "HunYuanDenseV1 Glm Arcee Jais2 VaultGemma Starcoder2 Phi StableLm MiniMaxM2 Qwen2Moe FlexOlmo HunYuanMoEV1 "
        "Ernie4_5_Moe Laguna Mellum Deepseek DeepseekV2 DeepseekV3 AXK1 Glm4MoeLite Gemma4 HrmText Gemma3n "
        "MiMoV2Flash MiMoV2",
    ),
    *_classes(
        "ForConditionalGeneration",
        "Gemma3 KimiK25 KimiVL MiniMaxM3Sparse Gemma4 LightOnOCR Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe InternVL "
        "LlavaOnevision Qwen2Audio Gemma4Unified AudioFlamingo3 FunASR Emu3 HunYuanVL VibeVoiceAsr QianfanOCR "
        "Qwen2_5Omni Qwen3OmniMoe Qwen3ASR MossTranscribeDiarize",
    ),
    "Qwen2_5OmniModel",
    "Qwen3ASRRealtimeGeneration",
)
# vLLM hands on a quantization there, but no name.
BY_CLASS = (
    *_classes(
        "ForCausalLM",
        "Llama Mistral Llama4 Ministral3 LLaMA InternLM3 IQuestCoder TeleChat3 TeleFLM Granite GraniteSWA Exaone4 "
        "Ernie4_5 Phi3 Glm4 Apertus HyperCLOVAX Olmoe GraniteMoeShared GraniteMoeSWA ExaoneMoe ExaoneMoE "
        "HCXVisionV2",
    ),
    *_classes(
        "ForConditionalGeneration",
        "Llama4 Mistral3 Llava LlavaNext LlavaNextVideo Idefics3 SmolVLM Glm4v GlmOcr Exaone4_5_ GlmAsr "
        "GraniteSpeech GraniteSpeechPlus PaddleOCRVL Granite4Vision Aria",
    ),
)

EMBEDDINGS: dict[str, Literal["name", "class"]] = {**dict.fromkeys(BY_NAME, "name"), **dict.fromkeys(BY_CLASS, "class")}

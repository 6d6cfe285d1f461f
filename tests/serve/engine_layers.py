"""Which modules an output stores quantized, and which of them vLLM builds so, in the same names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from engine_client import EngineError

from openquant.models import MODELS
from support import small_checkpoints

# vLLM's CPU build has no sparse attention.
UNBUILT = (
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    # Its moe_num_experts[0] is a number in transformers' configuration (models/ernie45_vl_moe.py:209).
    "Ernie4_5_VLMoeForConditionalGeneration",
    # config.vit_hidden_size, which transformers' configuration class calls otherwise (models/nano_nemotron_vl.py:1005).
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    # "'num_attention_heads' is a per-layer attribute", of transformers' configuration, which also calls
    # config.vision_config.width otherwise (models/step_vl.py:361).
    "Step3p7ForConditionalGeneration",
    # Its tower is timm's (models/gemma3n_mm.py:617).
    "Gemma3nForConditionalGeneration",
    # "You cannot pass text prompts when `skip_tokenizer_init=True`"; it is what Qianfan-OCR derives from, which is served.
    "InternVLChatModel",
    # They ask for their tokenizer as they are built (models/deepseek_ocr.py:400, models/deepseek_ocr2.py:267), and their
    # towers have one size.
    *("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "UnlimitedOCRForCausalLM"),
    # "Model Runner V1 does not support: diffusion models" (config/vllm.py:2994).
    "DiffusionGemmaForBlockDiffusion",
    # Neither vLLM nor its transformers has the configuration.
    "Molmo2ForConditionalGeneration",
    # Its attention asks for a chunk_lookback, which the CPU build's does not take (models/rnj1.py).
    "Rnj1ForCausalLM",
    # "vllm.vllm_flash_attn requires the CUDA flash attention extensions", of its towers.
    "Dots3NoteForCausalLM",
    # "module 'triton' has no attribute 'set_allocator'" (layers/mamba/gdn/olmo_gdn_linear_attn.py:169), and where it has,
    # its loader of convolutions fails (:518).
    "OlmoHybridForCausalLM",
    # "torch.cuda.Stream requires CUDA support" (vllm/models/kimi_k3/nvidia/model.py:1155).
    "KimiLinearForCausalLM",
    # "Sparse Attention is not supported on CPU" (platforms/cpu.py:150), once config.json has what vLLM asks of it and
    # transformers' configuration lacks: mhc and mla_use_nope (vllm/models/glm5next/common/model.py:369, :400) are two.
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    # "no pinned memory allocator is available on this system" (vllm/models/qwen4_exp/common/ngram_embedding.py:461).
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)

# What engine.py's `layers` says, by model.
Layers = Mapping[str, "dict[str, Any] | EngineError"]


def usual(module: str) -> str:
    """A name without what tells the engine's from the checkpoint's."""
    module = re.sub(
        r"^(thinker(\.model)?|(model\.)?language_model(\.model)?|llm(\.model)?|(model\.)?text_model(\.model)?|model\.decoder|model|backbone|gpt_neox|transformer)\.",
        "",
        module,
    )
    module = re.sub(r"^([HL]_module\..*)\.self_attn\.", r"\1.attn.", module)
    module = module.replace(".output_gate_proj", ".gate_proj")
    # TeleChat2, whose names vLLM makes Llama's.
    module = re.sub(r"^h\.(?=\d)", "layers.", module).replace(".self_attention.", ".self_attn.")
    module = re.sub(r"(?<=\.self_attn\.)query$", "q_proj", module)
    # Ling 2.5 has two kinds, whose last projection has one name in files.
    module = module.replace(".attention.", ".self_attn.").replace(".self_attn.dense", ".self_attn.o_proj")
    # Jamba's attention has no module of its own.
    module = re.sub(r"(?<=\d)\.(?=(qkv|o)_proj$)", ".self_attn.", module)
    module = module.replace(".short_conv.", ".conv.").replace(".mamba.mamba.", ".mamba.")
    return module.replace(".moe.share_expert.", ".share_expert.").replace(
        ".ffn.shared_experts.down_proj", ".ffn.shared_experts.w2"
    )


def built(answer: dict[str, Any] | EngineError, written: set[str]) -> set[str]:
    """What vLLM quantizes, in the names of what is `written`; the routed experts of a layer are one of them."""
    if isinstance(answer, EngineError):
        raise answer
    members = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    # Of LongCat-Flash, it says nothing of this one.
    members["fused_qkv_a_proj"] = ["q_a_proj", "kv_a_proj_with_mqa"]
    # MiMo V2 says a joined layer is itself.
    members |= {name: held for name, held in answer["packed"].items() if held != [name]}
    found = set()
    for path, quantized in answer["quantized"].items():
        module = usual(path)
        parent, dot, last = module.rpartition(".")
        if quantized and module in written:
            found.add(module)
        elif quantized:
            found.update(parent + dot + member for member in members.get(last, [last]))
    return found


def written(directory: Path) -> set[str]:
    """What an output stores as codes; the experts of a layer are one."""
    codes = {
        name.removesuffix("_packed").removesuffix(".weight")
        for name, tensor in small_checkpoints.read(directory).items()
        if name.endswith(".weight_packed") or (name.endswith(".weight") and tensor.dtype == torch.float8_e4m3fn)
    }
    modules = {re.sub(r"(\.experts)\.\d+\..*", r"\1", name) for name in codes}
    # vLLM goes by its own name for a layer's experts, and by the checkpoint's for its modules.
    for part, other in MODELS[json.loads((directory / "config.json").read_text())["architectures"][0]].renames:
        modules = {module.replace(part, other) if ".experts" in module else module for module in modules}
    # MiniMax M3's index over the tokens is a part of its qkv_proj, without a name of its own.
    found = {usual(module) for module in modules if not module.endswith((".index_q_proj", ".index_k_proj"))}
    # TeleChat2's keys and values are one tensor.
    both = {module for module in found if module.endswith(".key_value")}
    return found - both | {module.replace("key_value", f"{one}_proj") for module in both for one in "kv"}

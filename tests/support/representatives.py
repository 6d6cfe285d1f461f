"""Architectures and schemes that stand for all: each registry feature and each kind of layer that changes how a model runs is in one.

tests/registry/test_every_architecture.py walks all architectures once, by day one of those whose entries are alike. What tests
a mechanism (a continued pass, a pack, a Hessian) and not an entry runs on these; `.ci/nightly` sets OPENQUANT_ALL=1, and runs
it on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from conftest import everything
from openquant.formats.schemes import Scheme
from openquant.models import MODELS
from openquant.streaming.packing import Packing
from support import small_checkpoints

# Each by what it stands for.
REPRESENTATIVES = {
    "Qwen3ForCausalLM": "dense, a norm for queries and keys",
    "GemmaForCausalLM": "a tied head, norms that add one to their weight",
    "Phi3ForCausalLM": "layers that are fused on disk",
    "Qwen3MoeForCausalLM": "experts one by one",
    "Llama4ForCausalLM": "stacked and transposed experts, attention by chunks",
    "GraniteMoeHybridForCausalLM": "stacked experts beside their module, Mamba 2",
    "DeepseekV3ForCausalLM": "latent attention, an MTP layer",
    "DeepseekV4ForCausalLM": "several residual streams, an index over compressed tokens",
    "MiniMaxM3SparseForConditionalGeneration": "sparse attention, in a multimodal model",
    "Gemma3ForConditionalGeneration": "multimodal, sliding windows",
    "PaliGemmaForConditionalGeneration": "a prompt that attends to later tokens",
    "Qwen3NextForCausalLM": "linear attention beside full attention",
    "Lfm2ForCausalLM": "convolutions as layers",
    "Gemma3nForCausalLM": "keys and values shared among layers",
    "Gemma4ForCausalLM": "keys used as values, heads of two sizes",
    "Glm5NextForConditionalGeneration": "linear attention beside an index over tokens",
    "BloomForCausalLM": "rows grouped by head, biases by distance",
    "FalconForCausalLM": "parts of a fused layer that config.json chooses",
    "GPTNeoXForCausalLM": "equal parts of a fused layer, of which two are cached",
}
# One scale for all, for blocks, of groups by powers of two; integers, in bytes and in words; two scales.
_SCHEMES = ("tensor", "block", "mxfp8", "int8", "int5", "nvfp4")
# Registry features that are about names, engines or reasons, and change nothing that runs.
_DATA = ("name", "pattern", "why", "hint", "path", "layers", "key", "decided", "sglang", "refused", "cache_refused", "head_refused",
         "embedding", "windows", "spellings", "renames", "beyond", "towers", "rest", "nameless", "writes", "listed_as", "fp8",
         "bf16", "transformers_reads_blocks", "replicated", "default_dtype", "dtype", "sizes", "divided", "heads", "axis")  # fmt: skip
# Keys of config.json that change how a model runs.
_KEYS = (
    "tie_word_embeddings",
    "kv_lora_rank",
    "num_kv_shared_layers",
    "sliding_window",
    "index_topk",
    "hc_mult",
    "layer_types",
)


def representatives(among: Iterable[str] = small_checkpoints.RUNNABLE) -> list[str]:
    """Architectures to test a mechanism on, of those among which it can be: all of them at night."""
    return [name for name in among if everything() or name in REPRESENTATIVES]


def in_all_ways(schemes: Iterable[Scheme]) -> list[Scheme]:
    """Of schemes one for each way to store weights: all of them at night. What computes codes is tested on all by day."""
    return [scheme for scheme in schemes if everything() or scheme.name in _SCHEMES]


def features(architecture: str) -> set[str]:
    """What of its entry and its config.json changes how a model runs, such as `experts.stacked.transposed`."""
    config = small_checkpoints.config(architecture)
    text = next((value for key, value in config.items() if key == MODELS[architecture].text_config), config)
    found = {"multimodal"} if text is not config else set()
    for key in _KEYS:
        value = text.get(key)
        found |= {f"{key}={each}" for each in value} if isinstance(value, list) else {key} if value else set()
    return found | _of_entry(MODELS[architecture])


def _of_entry(value: Any, prefix: str = "") -> set[str]:
    found = set()
    for field in fields(value):
        part = getattr(value, field.name)
        if field.name in _DATA or part == field.default:
            continue
        found.add(prefix + field.name)
        for each in part if isinstance(part, tuple) else ():
            if is_dataclass(each):
                found |= _of_entry(each, f"{prefix}{field.name}.")
    return found


# Layers that keep a state, pick or compress tokens, or add biases by distance.
NOT_TREES = {
    *("BloomForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "FalconH1ForCausalLM"),
    *("Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM", "GraniteMoeHybridForCausalLM", "HYV4ForCausalLM"),
    *("JambaForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    *("Lfm2VlForConditionalGeneration", "Mamba2ForCausalLM", "MiniCPMV4_6ForConditionalGeneration"),
    *("MiniCPMV4_7ForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration", "NemotronHForCausalLM"),
    *("NemotronH_Omni_Reasoning_V3", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    *("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "VibeVoiceAsrForConditionalGeneration"),
}
ALONE = {"PaliGemmaForConditionalGeneration"}


def expected_packing(architecture: str) -> Packing:
    """How the choices of several requests are computed together."""
    return "batch" if architecture in NOT_TREES else "alone" if architecture in ALONE else "tree"

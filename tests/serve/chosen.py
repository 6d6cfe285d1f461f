"""Which architectures the tests here ask engines about.

In every run one of each kind, most of them in one scheme, in turn. With OPENQUANT_ALL=1 those in all schemes, and all
others in one. With OPENQUANT_ONLY=MiMoForCausalLM,PhiMoEForCausalLM these in all, which takes a minute each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from support import small_checkpoints

# What each stands for: some way of storing, naming, joining or computing that the others do not have.
KINDS = {
    "LlamaForCausalLM": "dense; SGLang drops scales of blocks",
    "MistralForCausalLM": "dense; served in four bits",
    "Qwen3ForCausalLM": "dense, q and k with norms; every scheme in SGLang",
    "Gemma3ForCausalLM": "norms of 1 + w, windows",
    "Phi3ForCausalLM": "q, k and v, gate and up joined on disk",
    "BloomForCausalLM": "q, k and v head by head on disk, which the engine sorts",
    "Olmo2ForCausalLM": "vLLM's Transformers backend",
    "StableLmForCausalLM": "merged layers that the engine cannot derive",
    "Qwen3MoeForCausalLM": "experts one by one, a router built quantized",
    "HunYuanMoEV1ForCausalLM": "experts in the Transformers backend, a router by another name",
    "MiniMaxM2ForCausalLM": "experts by another name in the engine",
    "DeepseekV3ForCausalLM": "latent attention, draft layers",
    "Llama4ForCausalLM": "rows that engines reorder, experts stacked and transposed",
    "Qwen3NextForCausalLM": "linear attention in one piece, shared experts",
    "Qwen3_5ForCausalLM": "linear attention in pieces",
    "GraniteMoeHybridForCausalLM": "state spaces, stacks beside the experts' module",
    "NemotronHForCausalLM": "a mixer of one kind in each layer",
    "Lfm2MoeForCausalLM": "convolutions",
    "Gemma3ForConditionalGeneration": "a wrapper whose tower is built quantized",
    "Mistral3ForConditionalGeneration": "a wrapper that loses scales of blocks",
    "Qwen2_5_VLForConditionalGeneration": "a wrapper's tower by several names",
    "Qwen3VLMoeForConditionalGeneration": "a wrapper with stacked experts",
}
EVERYTHING = os.environ.get("OPENQUANT_ALL") == "1"
NAMED = os.environ.get("OPENQUANT_ONLY", "")


def choose(only: str, everything: bool) -> tuple[str, ...]:
    """Architectures, in the registry's order: those named (with commas), else all, else one of each kind.

    An unknown name is a ValueError: a misspelled one would leave nothing to fail.
    """
    if only:
        named = only.split(",")
        if unknown := sorted({*named} - {*small_checkpoints.ARCHITECTURES}):
            raise ValueError(f"OPENQUANT_ONLY: tests/support/small_models.yaml has no {', '.join(unknown)}")
        return tuple(name for name in small_checkpoints.ARCHITECTURES if name in named)
    return tuple(name for name in small_checkpoints.ARCHITECTURES if everything or name in KINDS)


CHOSEN = choose(NAMED, EVERYTHING)


def in_all(name: str) -> bool:
    """Whether an architecture is asked for in each scheme."""
    return bool(NAMED) or (EVERYTHING and name in KINDS)


def in_turn(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Of architectures with schemes, each with one of its schemes, in turn, or with all (`in_all`)."""
    schemes: dict[str, list[str]] = {}
    for name, scheme in pairs:
        schemes.setdefault(name, []).append(scheme)
    return tuple(
        (name, scheme)
        for number, (name, found) in enumerate(schemes.items())
        for scheme in (found if in_all(name) else [found[number % len(found)]])
    )

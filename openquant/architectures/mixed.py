"""Architectures whose published files are of several formats, or whose layers are of two kinds and sizes."""

from __future__ import annotations

from dataclasses import replace

from .entry import DRAFT, ROUTER, Cached, Experts, Keep, Stacked, Windows
from .experts import ROUTED
from .latent import DEEPSEEK_V3
from .parts import KV_HEADS, MLP, attention, gated, model, routed, wrapped

# Layers with a window have other heads of keys and values (vLLM 0.32.0 models/mimo_v2.py:345-395).
MIMO_V2_FLASH = model(
    "MiMoV2FlashForCausalLM",
    replace(attention(), cached=(Cached(".self_attn.{k,v}_proj", "swa_num_key_value_heads", full_heads=KV_HEADS),)),
    MLP,
    ROUTED,
    # models/mimo_v2_mtp.py
    keep=(Keep("model.mtp.**", DRAFT),),
    windows=Windows(flags="hybrid_layer_pattern", size="sliding_window_size"),
)

# Stacks [E, out, in] of one projection each beside the router, which vLLM 0.32.0 (models/step3p5.py:683) also reads one
# by one below `moe.experts`.
STEP_EXPERTS = replace(
    routed(
        ".moe.experts",
        experts=Experts(
            ".moe.experts",
            stacked=tuple(Stacked(name, (name,)) for name in ("gate_proj", "up_proj", "down_proj")),
            beside=True,
        ),
    ),
    keep=(Keep(".moe.gate", ROUTER),),
)
GROUPS = "num_attention_groups"
STEP3P5 = model(
    "Step3p5ForCausalLM",
    replace(attention(), cached=(Cached(".self_attn.{k,v}_proj", GROUPS),)),
    MLP,
    gated(".share_expert"),
    STEP_EXPERTS,
    keep=(Keep(".self_attn.g_proj", "a gate for each head", divided=True),),
    draft_layers="num_hidden_layers",
    # models/step3p5.py:890
    renames=((".share_expert.", ".moe.share_expert."),),
    transformers_reads_blocks=False,
)

# vLLM 0.32.0 models/kimi_k25.py:311.
KIMI_K25 = wrapped(
    DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration",
    "vision_tower",
    "mm_projector",
    layers="language_model.model.layers.*",
    renames=(("mm_projector.proj.0", "mm_projector.linear_1"), ("mm_projector.proj.2", "mm_projector.linear_2")),
)

ENTRIES = (MIMO_V2_FLASH, STEP3P5, KIMI_K25)

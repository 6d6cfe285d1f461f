"""A small Qwen3 with experts as modelopt stores one in several formats (MIXED_PRECISION): attention in FP8 with static
scales, experts and the dense MLP in NVFP4, the router and one layer as they were, scales of an FP8 KV cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from conftest import change_json
from openquant.formats.reference import decode, encode, group_absmax, group_scale, stored_scale
from openquant.formats.schemes import NVFP4
from support import small_checkpoints
from support.quantized_checkpoints import Weights, is_layer

ARCHITECTURE = "Qwen3MoeForCausalLM"
EXPERTS = "model.layers.1.mlp.experts"
DENSE = "model.layers.0.mlp"
UNQUANTIZED = "model.layers.1.self_attn.o_proj"
KEY_SCALE, VALUE_SCALE = 0.0625, 0.125


def algorithm(module: str) -> str | None:
    """The quant_algo of a module; None if it is not quantized."""
    if module == UNQUANTIZED:
        return None
    if "self_attn" in module:
        return "FP8"
    return "W4A16_NVFP4" if module.startswith(DENSE) else "NVFP4"


def nvfp4(weight: torch.Tensor, largest: torch.Tensor) -> Weights:
    """As modelopt has it: the multiplier of the scales is that of the largest weight of fused layers."""
    multiplier = (largest / 2688).reshape(())
    divisor = (1 / multiplier).reshape(1, 1)
    scale = group_scale(group_absmax(weight, NVFP4.format.group), NVFP4.format, divisor)
    shape = (weight.shape[0], weight.shape[1])
    return {
        "weight": encode(weight, scale, NVFP4.format),
        "weight_scale": stored_scale(scale, NVFP4.format, shape, divisor),
        "weight_scale_2": multiplier,
    }


def fp8(weight: torch.Tensor) -> Weights:
    scale = weight.float().abs().max() / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def layers_of(weights: Weights) -> dict[str, dict[str, Any]]:
    """The quantized_layers of the config: dense layers by name, experts by the module that holds them all."""
    named = {}
    for name in filter(is_layer, weights):
        module = name.removesuffix(".weight")
        if (algo := algorithm(module)) is not None:
            group = {"group_size": 16} if "NVFP4" in algo else {}
            named[EXPERTS if module.startswith(EXPERTS) else module] = {"quant_algo": algo, **group}
    return named


def stored_mixed(plain: Weights) -> tuple[Weights, dict[str, Any]]:
    """Return the tensors and the quantization_config of a Qwen3 stored so.

    Args:
        plain: the unquantized model.
    """
    stored: Weights = {}
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        algo = algorithm(module) if is_layer(name) else None
        if algo is None:
            stored[name] = weight
            continue
        # Engines fuse gate and up, and take one scale for them.
        fused = [
            name.replace(part, other) for part in ("gate", "up") for other in ("gate", "up") if f".{part}_" in name
        ]
        largest = torch.stack([plain[other].float().abs().max() for other in fused or [name]]).max()
        parts = fp8(weight) if algo == "FP8" else nvfp4(weight, largest)
        if algo != "W4A16_NVFP4":
            parts["input_scale"] = torch.tensor(0.25 if algo == "FP8" else 0.01)
        stored |= {f"{module}.{last}": tensor for last, tensor in parts.items()}
        for part, scale in (("k", KEY_SCALE), ("v", VALUE_SCALE)):
            if module.endswith(f".{part}_proj"):
                stored[f"{module}.{part}_scale"] = torch.tensor(scale)
    return stored, {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "quantized_layers": layers_of(plain),
        "ignore": ["lm_head", UNQUANTIZED, "model.layers.1.mlp.gate"],
    }


def mixed_precision(root: Path, shards: int = 2, file: bool = False) -> Path:
    """Write a small model.

    Args:
        root: its directory.
        shards: number of shards.
        file: whether the config is in hf_quant_config.json, as of older versions of modelopt.
    """
    stored, config = stored_mixed(small_checkpoints.tensors(ARCHITECTURE))
    small_checkpoints.write(root, ARCHITECTURE, weights=stored, shards=shards)
    if file:
        quantization = {
            "quant_algo": config["quant_algo"],
            "kv_cache_quant_algo": "FP8",
            "quantized_layers": config["quantized_layers"],
            "exclude_modules": config["ignore"],
        }
        found = {"producer": {"name": "modelopt", "version": "0.44.0"}, "quantization": quantization}
        (root / "hf_quant_config.json").write_text(json.dumps(found))
    else:
        change_json(root / "config.json", lambda found: found.update(quantization_config=config))
    return root


def decoded(stored: Weights, module: str) -> torch.Tensor:
    """What the codes of a module stand for, float32."""
    codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].float()
    if codes.dtype != torch.uint8:
        return codes.float() * scale
    return decode(codes, scale / (1 / stored[f"{module}.weight_scale_2"]), NVFP4.format)

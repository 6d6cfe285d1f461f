"""A small Qwen3 quantized already, in each of the ways in which other tools store one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from conftest import change_json
from openquant.formats.format import Group
from support import small_checkpoints

FP8 = torch.float8_e4m3fn
Weights = dict[str, torch.Tensor]
# How a weight [out, in] is stored: what follows the module's name -> tensor.
Make = Callable[[torch.Tensor], Weights]
# Without zero points: with scales above zero, or of both signs.
Sym = bool | Literal["signed"]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_layer(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LAYERS


def store(root: Path, make: Make, config: dict[str, Any], weights: Weights | None = None, shards: int = 1) -> Path:
    """A Qwen3 with its layers stored as `make` has it: what follows the module's name -> tensor."""
    stored: Weights = {}
    for name, weight in (weights or small_checkpoints.tensors("Qwen3ForCausalLM")).items():
        if is_layer(name):
            stored |= {name.removesuffix("weight") + last: tensor for last, tensor in make(weight).items()}
        else:
            stored[name] = weight
    small_checkpoints.write(root, weights=stored, shards=shards)
    change_json(root / "config.json", lambda found: found.update(quantization_config=config))
    return root


def widened(scale: torch.Tensor, shape: torch.Size, height: int = 128, width: int = 128) -> torch.Tensor:
    return scale.float().repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def ragged_blocks(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of 128 x 128 blocks, smaller at the edges."""
    down, along = math.ceil(weight.shape[0] / 128), math.ceil(weight.shape[1] / 128)
    padded = torch.zeros(down * 128, along * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = (padded.view(down, 128, along, 128).abs().amax((1, 3)) / 448).clamp(min=1e-12).to(dtype)
    codes = (weight.float() / widened(scale, weight.shape)).clamp(-448, 448).to(FP8)
    return codes, scale


def by_blocks(dtype: torch.dtype = torch.float32, name: str = "weight_scale_inv") -> Make:
    def make(weight: torch.Tensor) -> Weights:
        codes, scale = ragged_blocks(weight, dtype)
        return {"weight": codes, name: scale}

    return make


def by_tensor(name: str = "weight_scale", shape: tuple[int, ...] = (), **others: torch.Tensor) -> Make:
    def make(weight: torch.Tensor) -> Weights:
        scale = weight.float().abs().max() / 448
        return {
            "weight": (weight.float() / scale).to(FP8),
            name: scale.reshape(shape),
            **{last: tensor.clone() for last, tensor in others.items()},
        }

    return make


def by_rows(shape: tuple[int, ...] = (-1, 1), dtype: torch.dtype = torch.float32) -> Make:
    def make(weight: torch.Tensor) -> Weights:
        scale = (weight.float().abs().amax(1, keepdim=True) / 448).to(dtype)
        return {
            "weight": (weight.float() / scale.float()).clamp(-448, 448).to(FP8),
            "weight_scale": scale.reshape(shape).contiguous(),
        }

    return make


def group(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def int4(weight: torch.Tensor, signed: bool = False) -> Weights:
    """In groups of 32; if `signed`, every third scale is negative."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    grouped = weight.float().view(weight.shape[0], -1, 32)
    scale = (grouped.abs().amax(2) / 7.5).bfloat16()
    if signed:
        scale.view(-1)[::3] *= -1
    codes = (grouped / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int8).view(weight.shape)
    return {
        "weight_packed": pack_to_int32(codes, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def asymmetric(bits: int = 4, size: int | None = 32) -> Make:
    """Integers with zero points, by compressed-tensors itself; one of each row's where there is no size."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="channel")

    def make(weight: torch.Tensor) -> Weights:
        grouped = weight.float().view(weight.shape[0], -1, size or weight.shape[1])
        scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
        scale = scale.bfloat16()
        codes = grouped / scale.float()[:, :, None] + zero[:, :, None]
        codes = codes.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8).view(weight.shape)
        return {
            "weight_packed": pack_to_int32(codes, bits),
            "weight_scale": scale,
            "weight_zero_point": pack_to_int32(zero.to(torch.int8), bits, packed_dim=0).contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }

    return make


def asymmetric_config(bits: int = 4, size: int | None = 32) -> dict[str, Any]:
    """The quantization_config of such weights."""
    sized = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return group(**sized, num_bits=bits, type="int", symmetric=False) | {"format": "pack-quantized"}


def shifted(
    weight: torch.Tensor, bits: int, size: int | None, sym: Sym, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on [out, in], float16 scales and zero points [out, groups]; `index` says which group inputs are of."""
    cols = weight.shape[1]
    order = (torch.arange(cols) // (size or cols) if index is None else index).argsort(stable=True)
    grouped = weight.float()[:, order].view(weight.shape[0], -1, size or cols)
    half = 2 ** (bits - 1)
    if sym:
        scale, zero = grouped.abs().amax(2) / (half - 1), torch.full(grouped.shape[:2], float(half))
        if sym == "signed":
            # As in auto-round: the weight that is farthest from zero gets the code 0.
            scale = torch.where(grouped.amax(2) > -grouped.amin(2), -grouped.amax(2), -grouped.amin(2)) / half
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = (high - low) / (2 * half - 1)
        zero = (-low / scale).round()
    scale = scale.half()
    codes = (grouped / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, 2 * half - 1).view(weight.shape)
    return codes[:, order.argsort()].int(), scale, zero.int()


def in_words(codes: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Codes [rows, cols] in words [rows, cols * bits / 32] without gaps, or each of eight columns at its place."""
    if order is not None:
        codes = codes.unflatten(1, (-1, len(order)))[:, :, torch.tensor(order).argsort()].flatten(1)
    single = (codes.long()[:, :, None] >> torch.arange(bits)) & 1
    words = (single.flatten(1).unflatten(1, (-1, 32)) << torch.arange(32)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def awq(size: int | None = 32, sym: Sym = False) -> Make:
    """As AutoAWQ's GEMM: columns 0 to 7 of a word at the places 0, 4, 1, 5, 2, 6, 3, 7."""

    def make(weight: torch.Tensor) -> Weights:
        codes, scale, zero = shifted(weight, 4, size, sym)
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        return {
            "qweight": in_words(codes.T, 4, order),
            "qzeros": in_words(zero.T, 4, order),
            "scales": scale.T.contiguous(),
        }

    return make


def awq_config(size: int | None = 32) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": size or -1, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def gptq(bits: int = 4, size: int | None = 32, sym: Sym = True, v2: bool = False, act: bool = False) -> Make:
    """As GPTQ stores weights, in its first format or its second; with groups of inputs in another order if asked."""

    def make(weight: torch.Tensor) -> Weights:
        index = torch.arange(weight.shape[1]) // (size or weight.shape[1])
        if act:
            index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(7))]
        codes, scale, zero = shifted(weight, bits, size, sym, index)
        return {
            "qweight": in_words(codes, bits).T.contiguous(),
            "qzeros": in_words((zero.T - (0 if v2 else 1)) % 2**bits, bits),
            "scales": scale.T.contiguous(),
            "g_idx": index.int(),
        }

    return make


def gptq_config(
    bits: int = 4, size: int | None = 32, sym: Sym = True, v2: bool = False, act: bool = False
) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": size or -1, "desc_act": act, "sym": bool(sym),
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "damp_percent": 0.01,
    }  # fmt: skip


def auto_round_config(packing: str, bits: int = 4, size: int | None = 32, sym: Sym = True) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "bits": bits, "group_size": size or -1, "sym": bool(sym), "data_type": "int",
        "packing_format": f"auto_round:{packing}", "block_name_to_quantize": "model.layers", "iters": 0,
    }  # fmt: skip


def decompressed(stored: Weights, module: str, config: dict[str, Any]) -> torch.Tensor:
    """By compressed-tensors itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(config)
    state = {name.removeprefix(f"{module}."): value for name, value in stored.items() if name.startswith(f"{module}.")}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    return torch.as_tensor(compressor.decompress(state, parsed.config_groups["group_0"])["weight"])


def float_groups(weight: torch.Tensor) -> Weights:
    """MXFP8, but for scales that are no powers of two."""
    grouped = weight.float().view(weight.shape[0], -1, 32)
    scale = grouped.abs().amax(2) / 448
    codes = (grouped / scale[:, :, None]).clamp(-448, 448).to(FP8).view(weight.shape)
    return {"weight": codes, "weight_scale": scale}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
STATIC = {"input_scale": torch.tensor(0.25)}
INT4 = group("group", num_bits=4, type="int", group_size=32) | {"format": "pack-quantized"}
# How it is stored, its quantization_config, what shares a scale.
SOURCES: dict[str, tuple[Make, dict[str, Any], Group]] = {
    "fp8 blocks": (by_blocks(), BLOCKS, (128, 128)),
    "fp8 blocks, bfloat16 scales": (by_blocks(torch.bfloat16), BLOCKS, (128, 128)),
    "fp8 per tensor": (by_tensor(**STATIC), PER_TENSOR, (None, None)),
    "Mistral's names": (
        by_tensor("weight_scale_inv", activation_scale=torch.tensor(0.25)), PER_TENSOR, (None, None)
    ),
    "compressed-tensors per tensor": (by_tensor(shape=(1,)), group("tensor"), (None, None)),
    "compressed-tensors per row": (by_rows(), group("channel"), (1, None)),
    "compressed-tensors per row, bfloat16 scales": (by_rows(dtype=torch.bfloat16), group("channel"), (1, None)),
    "compressed-tensors blocks": (
        by_blocks(name="weight_scale"), group("block", block_structure=[128, 128]), (128, 128)
    ),
    "modelopt per tensor": (by_tensor(**STATIC), {"quant_method": "modelopt", "quant_algo": "FP8"}, (None, None)),
    "modelopt per row": (
        by_rows((-1,)), {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1, None)
    ),
}  # fmt: skip


def weights_of(root: Path, group: Group) -> Weights:
    """What the layers of a stored source stand for, float32, by torch."""
    stored = small_checkpoints.read(root)
    found = {}
    for name, codes in stored.items():
        if codes.dtype == FP8:
            last = next(last for last in ("_scale", "_scale_inv") if name + last in stored)
            scale = stored[name + last].float()
            if group == (128, 128):
                found[name] = codes.float() * widened(scale, codes.shape)
            else:
                found[name] = codes.float() * (scale.reshape(-1, 1) if group[0] else scale.reshape(()))
    return found

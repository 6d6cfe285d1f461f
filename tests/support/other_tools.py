"""Layers as Quark, fbgemm and bitsandbytes store them, made here by hand, each with what it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from support.quantized_checkpoints import FP8, Make, Weights, in_words, ragged_blocks, widened

# bitsandbytes functional.py, get_4bit_type.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# What a layer's weight [out, in] is stored as, and what that stands for, float32.
Stored = tuple[Weights, torch.Tensor]


def stored_only(make: Callable[[torch.Tensor], Stored]) -> Make:
    """Without what it stands for."""
    return lambda weight: make(weight)[0]


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The positions in a table that are nearest to values."""
    return (values.unsqueeze(-1) - table).abs().argmin(-1)


def fp8_tensor(weight: torch.Tensor) -> Stored:
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}, codes.float() * scale


def fp8_rows(shape: tuple[int, ...]) -> Callable[[torch.Tensor], Stored]:
    def make(weight: torch.Tensor) -> Stored:
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        codes = (weight.float() / scale).clamp(-448, 448).to(FP8)
        return {"weight": codes, "weight_scale": scale.reshape(shape).clone()}, codes.float() * scale

    return make


def fp8_blocks(weight: torch.Tensor) -> Stored:
    codes, scale = ragged_blocks(weight)
    return {"weight": codes, "weight_scale": scale}, codes.float() * widened(scale, codes.shape)


def int8(weight: torch.Tensor) -> Stored:
    """By rows, with the zero points that Quark saves of symmetric weights too."""
    scale = weight.float().abs().amax(1) / 127
    codes = (weight.float() / scale[:, None]).round().to(torch.int8)
    zeros = torch.zeros(len(codes), dtype=torch.int8)
    return {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}, codes.float() * scale[:, None]


def int4(signed: bool, order: tuple[int, ...] | None) -> Callable[[torch.Tensor], Stored]:
    def make(weight: torch.Tensor) -> Stored:
        grouped = weight.float().view(len(weight), -1, 32)
        if signed:
            scale, zero = grouped.abs().amax(2) / 7, torch.zeros(grouped.shape[:2])
            codes = (grouped / scale[:, :, None]).round().clamp(-8, 7)
        else:
            low, high = grouped.amin(2), grouped.amax(2)
            scale = (high - low) / 15
            zero = (-low / scale).round()
            codes = (grouped / scale[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
        stands_for = (codes - zero[:, :, None]) * scale[:, :, None]
        bits = (codes.view(weight.shape).int() & 15).T
        return {
            "weight": in_words(bits, 4, order),
            "weight_scale": scale.T.contiguous(),
            "weight_zero_point": in_words(zero.int().T, 4, order),
        }, stands_for.view(weight.shape)

    return make


def _fp4(weight: torch.Tensor, scale: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of FP4, two in a byte, and what they stand for under one scale for `size` inputs."""
    wide = scale.repeat_interleave(size, 1)
    codes = nearest(weight.float() / wide, E2M1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes] * wide


def mxfp4(weight: torch.Tensor) -> Stored:
    exponents = (weight.float().view(len(weight), -1, 32).abs().amax(2) / 6).log2().ceil()
    codes, stands_for = _fp4(weight, exponents.exp2(), 32)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, stands_for


def mxfp8(weight: torch.Tensor) -> Stored:
    exponents = (weight.float().view(len(weight), -1, 32).abs().amax(2) / 448).log2().ceil()
    wide = exponents.exp2().repeat_interleave(32, 1)
    codes = (weight.float() / wide).to(FP8)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, codes.float() * wide


def nvfp4(weight: torch.Tensor) -> Stored:
    # A power of two, because a reciprocal of another number would round.
    outer = torch.tensor(2.0**-13)
    inner = (weight.float().view(len(weight), -1, 16).abs().amax(2) / 6 / outer).to(FP8)
    codes, stands_for = _fp4(weight, inner.float() * outer, 16)
    others = {"weight_scale_2": outer, "input_scale_2": torch.tensor(0.5)}
    return {"weight": codes, "weight_scale": inner, **others}, stands_for


def torchao(whole: bool) -> Callable[[torch.Tensor], Stored]:
    def make(weight: torch.Tensor) -> Stored:
        stored, stands_for = fp8_tensor(weight) if whole else fp8_rows((-1, 1))(weight)
        scale = stored["weight_scale"].reshape(-1, 1)
        return {"_weight_qdata": stored["weight"], "_weight_scale": scale}, stands_for

    return make


def torchao_config(granularity: str, weights: bool = True, **more: Any) -> dict[str, Any]:
    """As transformers' TorchAoConfig saves it."""
    part = {"_type": granularity, "_version": 1, "_data": {}}
    data = {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "granularity": part}
    kind = "Float8WeightOnlyConfig" if weights else "Float8DynamicActivationFloat8WeightConfig"
    data |= {} if weights else {"granularity": [part, part]}
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data | more}}}


def bnb_int8(weight: torch.Tensor) -> Stored:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes.float() * (largest * torch.tensor(1 / 127))[:, None]


def bnb_4bit(kind: str, nested: bool, size: int = 64) -> Callable[[torch.Tensor], Stored]:
    table = {"nf4": NF4, "fp4": FP4}[kind]

    def make(weight: torch.Tensor) -> Stored:
        blocks = weight.float().view(-1, size)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [*weight.shape]}
        stored = {"weight.absmax": scale, "weight.quant_map": table.clone()}
        if nested:
            values, offset = torch.linspace(-1, 1, 256), scale.mean()
            padded = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
            outer = padded.abs().amax(1)
            codes = nearest(padded / outer[:, None], values)
            scale = (values[codes] * outer[:, None]).view(-1)[: len(scale)] + offset
            stored["weight.absmax"] = codes.view(-1)[: len(scale)].to(torch.uint8)
            stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": values}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        chosen = nearest(blocks / scale[:, None], table)
        flat = chosen.view(-1)
        stored["weight"] = (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = text
        return stored, (table[chosen] * scale[:, None]).view(weight.shape)

    return make


def quark(weight: dict[str, Any] | list[dict[str, Any]], inputs: Any = None, **more: Any) -> dict[str, Any]:
    """A quantization_config of Quark."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
        "exclude": ["lm_head"], "layer_quant_config": {}, "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }  # fmt: skip


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    """The part of it that describes one tensor."""
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, **more}


def bnb(bits: int, **more: Any) -> dict[str, Any]:
    """A quantization_config of bitsandbytes."""
    return {"quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8, **more}


GROUP32 = {"ch_axis": -1, "group_size": 32}
IN_ORDER = {"export": {"pack_method": "order"}}
TOKENS = spec("fp8_e4m3", "per_channel", ch_axis=1) | {"is_dynamic": True}


class Kind(NamedTuple):
    """How layers are stored; the config that says so; and options of `compress` that leave codes as they are."""

    make: Callable[[torch.Tensor], Stored]
    config: dict[str, Any]
    same: dict[str, Any] | None


_E8M0 = {**GROUP32, "scale_format": "e8m0"}
KINDS: dict[str, Kind] = {
    "quark fp8": Kind(fp8_tensor, quark(spec("fp8_e4m3", "per_tensor"), spec("fp8_e4m3", "per_tensor")), None),
    "quark fp8 rows": Kind(
        fp8_rows((-1,)), quark(spec("fp8_e4m3", "per_channel", ch_axis=0), TOKENS), {"scheme": "channel"}
    ),
    "quark fp8 blocks": Kind(
        fp8_blocks, quark(spec("fp8_e4m3", "per_block", block_size=[128, 128])), {"scheme": "block"}
    ),
    "quark int8": Kind(int8, quark([spec("int8", "per_channel", ch_axis=0)]), {"scheme": "int8"}),
    "quark int4": Kind(
        int4(True, AWQ_ORDER), quark(spec("int4", "per_group", **GROUP32)), {"scheme": "int4", "group_size": "32"}
    ),
    "quark int4 in order": Kind(
        int4(True, None), quark(spec("int4", "per_group", **GROUP32), **IN_ORDER),
        {"scheme": "int4", "group_size": "32"},
    ),
    "quark uint4": Kind(
        int4(False, AWQ_ORDER), quark(spec("uint4", "per_group", **GROUP32) | {"symmetric": False}),
        {"scheme": "int4", "group_size": "32", "asymmetric": True},
    ),
    "quark mxfp4": Kind(mxfp4, quark(spec("fp4", "per_group", **_E8M0)), {"scheme": "mxfp4"}),
    "quark mxfp8": Kind(mxfp8, quark(spec("fp8_e4m3", "per_group", **_E8M0)), {"scheme": "mxfp8"}),
    "quark nvfp4": Kind(
        nvfp4, quark(
            [spec("fp4", "per_group", ch_axis=-1, group_size=16), spec("fp8_e4m3", "per_tensor")],
            [spec("fp4", "per_group", ch_axis=-1, group_size=16), spec("fp8_e4m3", "per_tensor")],
        ),
        {"scheme": "nvfp4"},
    ),
    "fbgemm": Kind(
        fp8_rows((-1, 1)),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        {"scheme": "channel"},
    ),
    "torchao by row": Kind(torchao(False), torchao_config("PerRow"), {"scheme": "channel"}),
    "torchao by tensor": Kind(torchao(True), torchao_config("PerTensor", weights=False), None),
    "bitsandbytes int8": Kind(bnb_int8, bnb(8), {"scheme": "int8"}),
    "bitsandbytes nf4": Kind(bnb_4bit("nf4", False), bnb(4, bnb_4bit_quant_type="nf4"), None),
    "bitsandbytes nf4, double": Kind(bnb_4bit("nf4", True), bnb(4, bnb_4bit_quant_type="nf4"), None),
    "bitsandbytes fp4, blocks of 32": Kind(bnb_4bit("fp4", False, 32), bnb(4), None),
}  # fmt: skip

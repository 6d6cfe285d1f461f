"""Makes the files beside it: one layer each, stored by the tool itself, and what the tool decodes it to.

pip install torch safetensors bitsandbytes==0.50.2 && python tests/weights/written/make.py bitsandbytes
pip install torch safetensors torchao==0.18.0 && python tests/weights/written/make.py torchao
pip install torch safetensors amd-quark==0.13 && python tests/weights/written/make.py quark
pip install torch safetensors auto-round==0.16.1 && python tests/weights/written/make.py auto_round
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    """A layer [16, 128] with a row of zeros and rows of very different sizes."""
    values = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 16)[:, None]
    values[3] = 0
    return values.bfloat16()


def save(name: str, stored: Tensors, decoded: torch.Tensor, config: dict[str, Any]) -> None:
    """Write one file: tensors below "layer.", what they decode to, and the quantization_config."""
    tensors = {f"layer.{last}": tensor.detach().clone().contiguous() for last, tensor in stored.items()}
    save_file(tensors | {"decoded": decoded.contiguous()}, HERE / f"{name}.safetensors", {"config": json.dumps(config)})


def bitsandbytes() -> None:
    from bitsandbytes import functional, nn  # type: ignore[import-not-found,unused-ignore]

    for kind in ("nf4", "fp4"):
        for double in (False, True):
            codes, state = functional.quantize_4bit(weight(), blocksize=64, quant_type=kind, compress_statistics=double)
            stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
            state.dtype = torch.float32
            config = {
                "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": "uint8",
            }  # fmt: skip
            decoded = functional.dequantize_4bit(codes, state)
            save(f"bitsandbytes-{kind}{'-double' if double else ''}", {"weight": codes} | stored, decoded, config)
    layer = nn.Linear8bitLt(128, 16, bias=False, has_fp16_weights=False)
    layer.weight = nn.Int8Params(weight().half(), requires_grad=False, has_fp16_weights=False)
    stored = layer.to("cpu").state_dict()
    decoded = functional.int8_vectorwise_dequant(stored["weight"], stored["SCB"])
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    save("bitsandbytes-int8", stored, decoded, config)


def torchao() -> None:
    from torchao.core.config import config_to_dict  # type: ignore[import-not-found,unused-ignore]
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(128, 12, bias=False))
    # It makes NaN of a row of zeros.
    model[0].weight = torch.nn.Parameter(weight()[4:])
    config = Float8WeightOnlyConfig()
    quantize_(model, config)
    stored, _ = flatten_tensor_state_dict(model.state_dict())
    decoded = model[0].weight.dequantize(torch.float32)
    kept = {name.removeprefix("0."): tensor for name, tensor in stored.items()}
    save("torchao-fp8", kept, decoded, {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}})


def quark() -> None:
    from quark.torch.export.constants import REVERSE_LOAD_MAP  # type: ignore[import-not-found,unused-ignore]
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    from quark.torch.quantization.config import config as specs
    from quark.torch.quantization.nn.modules.quantize_linear import QuantLinear

    whole = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
    grouped = {**whole, "ch_axis": -1, "group_size": 32}
    kinds = {
        "fp8": specs.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "fp8-rows": specs.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        "int8": specs.Int8PerTensorSpec(observer_method="min_max", symmetric=True, **whole),
        "int8-rows": specs.Int8PerChannelSpec(symmetric=True, ch_axis=0, **whole),
        "int4": specs.Int4PerGroupSpec(symmetric=True, **grouped),
        "int4-order": specs.Int4PerGroupSpec(symmetric=True, **grouped),
        "uint4": specs.Uint4PerGroupSpec(symmetric=False, **grouped),
        "uint4-order": specs.Uint4PerGroupSpec(symmetric=False, **grouped),
        "mxfp4": specs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    for name, spec in kinds.items():
        config = specs.QLayerConfig(weight=spec.to_quantization_spec())
        linear = torch.nn.Linear(128, 16, bias=False)
        linear.weight.data = weight().float()
        layer = QuantLinear.from_float(linear, config)
        layer.weight_quantizer.enable_observer()
        layer(torch.zeros(1, 128))
        method = "order" if name.endswith("-order") else "reorder"
        exported = QParamsLinear(layer, "quark", method)
        stored = {REVERSE_LOAD_MAP.get(key, key): value for key, value in exported.state_dict().items()}
        decoded = exported._get_qweight(exported.weight)
        whole_config = {
            "quant_method": "quark", "global_quant_config": config.to_dict(), "exclude": [], "layer_quant_config": {},
            "layer_type_quant_config": {}, "export": {"pack_method": method, "weight_format": "real_quantized"},
        }  # fmt: skip
        save(f"quark-{name}", stored, decoded.float(), whole_config)


def auto_round() -> None:
    from auto_round.export.export_to_autoround.export import (  # type: ignore[import-not-found,unused-ignore]
        dynamic_import_quant_linear_for_packing,
    )
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    linear = torch.nn.Linear(128, 32, bias=False)
    linear.weight.data = torch.cat([weight(), weight().flip(1)]).float()
    grouped = linear.weight.data.view(32, 4, 32)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    kinds = [("auto_gptq", bits, True) for bits in (2, 3, 4, 5, 8)]
    kinds += [("auto_gptq", 3, False), ("exllamav2", 2, False), ("auto_awq", 4, True), ("auto_awq", 4, False)]
    for packing, bits, sym in kinds:
        half, backend = 2 ** (bits - 1), f"auto_round:{packing}"
        scale = (torch.maximum(-low, high) / (half - 0.5) if sym else (high - low) / (2 * half - 1)).clamp(min=1e-5)
        scale = scale.half().float()
        zeros = half if sym else (-low / scale).round().clamp(1, 2 * half - 1)
        kind = dynamic_import_quant_linear_for_packing(backend, bits, 32, sym)
        if packing == "auto_awq":
            layer = kind.from_linear(linear, bits, 32, False, scale.T, zeros if sym else zeros.T)
            decoded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), bits, 32).T
        else:
            layer = kind(bits, 32, 128, 32, False)
            layer.device = "cpu"
            layer.pack(linear, scale, zeros)
            layer.scales = layer.scales.float()
            decoded = layer(torch.eye(128)).T
        stored = layer.state_dict()
        stored["scales"] = stored["scales"].half()
        config = {
            "quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": sym, "packing_format": backend,
            "autoround_version": "0.16.1", "block_name_to_quantize": "layer",
        }  # fmt: skip
        save(f"auto-round-{packing}-{bits}{'' if sym else '-asymmetric'}", stored, decoded, config)


if __name__ == "__main__":
    globals()[sys.argv[1]]()

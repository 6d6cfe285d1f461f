"""AMD Quark's quantization_config, and the layouts of weights that it stands for.

Read as vLLM reads it (layers/quantization/quark/quark.py). A weight's config says its dtype and what shares a scale:

    layers, inputs = read_quark({"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}})
    layers[0][1].label   # "one scale per tensor"
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from .awq_gptq import AWQ_ORDER
from .format import Columns, Format, GlobalScale, Scale
from .ignored import MEND
from .numbers import INT4
from .schemes import BLOCK_COMPRESSED, CHANNEL, INT8_W8A8, MXFP4, MXFP8, NVFP4, NVFP4_W4A4, TENSOR_COMPRESSED

_KNOWN = (
    "known are FP8 per_tensor, per_channel and per_block, symmetric int8 per_tensor and per_channel, symmetric int4 "
    "and asymmetric uint4 per_group, MXFP4, MXFP8 and NVFP4"
)
# By dtype and qscheme.
_PLAIN = {
    ("fp8_e4m3", "per_tensor"): TENSOR_COMPRESSED.format,
    ("fp8_e4m3", "per_channel"): CHANNEL.format,
    ("int8", "per_tensor"): replace(INT8_W8A8.format, group=(None, None)),
    ("int8", "per_channel"): INT8_W8A8.format,
}
_MX = {"fp4": replace(MXFP4.format, codes="weight"), "fp8_e4m3": MXFP8.format}
# vLLM layers/quantization/quark/schemes/quark_nvfp4.py: both global scales are multiplied.
_NVFP4 = replace(
    NVFP4.format,
    codes="weight",
    global_scale=GlobalScale("weight_scale_2", 0, divides=False),
    input_global_scale=GlobalScale("input_scale_2", 0, divides=False),
)
_ZEROS = "weight_zero_point"
# By pack_method, where in a word each of eight outputs lies (quark/torch/utils/pack.py, Pack_4_bits).
_ORDERS = {"reorder": AWQ_ORDER, "order": tuple(range(8))}

Layers = list[tuple[tuple[str, ...], Format]]
Inputs = list[Mapping[str, Any] | None]


def read_quark(config: dict[str, Any]) -> tuple[Layers, Inputs]:
    """Return the formats of layers from a quantization_config of the method "quark".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Targets (names, "re:" and an expression, or the class "Linear") and format of each group of layers, the first
        match counts; and for each how activations are quantized, as `input_activations` of compressed-tensors.

    Raises:
        UsageError: openquant does not know this layout, or the config is malformed.
    """
    export = _object(config, "export")
    stored, order = export.get("weight_format"), export.get("pack_method")
    if stored not in (None, "real_quantized"):
        raise UsageError(f"config.json has the weight_format {json.dumps(stored)[:100]}", "known is real_quantized")
    if order not in (None, *_ORDERS):
        raise UsageError(f"config.json has the pack_method {json.dumps(order)[:100]}", "known are reorder and order")
    of_types = _object(config, "layer_type_quant_config")
    named: list[tuple[str, str, Any]] = []
    for pattern, layer in _object(config, "layer_quant_config").items():
        # The first pattern that matches counts, so a name after an expression must be one too.
        in_turn = named and named[-1][1].startswith("re:")
        target = f"re:{fnmatch.translate(pattern)}" if in_turn or set(pattern) & set("*?[") else pattern
        named.append((pattern, target, layer))
    whole = "layer_type_quant_config" if "Linear" in of_types else "global_quant_config"
    named.append((whole, "Linear", of_types.get("Linear", config.get("global_quant_config"))))
    layers: Layers = []
    inputs: Inputs = []
    for name, target, layer in named:
        if not isinstance(layer, dict):
            raise UsageError(f"config.json: {name[:100]} of Quark is not an object", MEND)
        # Layers without it are not quantized, and stored as such.
        if layer.get("weight"):
            if layer.get("bias"):
                raise UsageError(f"config.json: {name[:100]} of Quark has a quantized bias", "known are weights")
            layers.append(((target,), _format(name, layer["weight"], str(order or "reorder"))))
            inputs.append(_inputs(layer.get("input_tensors")))
    if not layers:
        raise UsageError("config.json has no weights that Quark quantized", MEND)
    return layers, inputs


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise UsageError(f"config.json: {key} is not an object", MEND)
    return value


def _parts(config: object) -> list[dict[str, Any]]:
    """Return the configs of the levels of scales: one, or two for NVFP4."""
    parts: list[Any] = config if isinstance(config, list) else [config]
    return parts if all(isinstance(part, dict) for part in parts) else []


def _format(name: str, config: object, order: str) -> Format:
    parts = _parts(config)
    weight = parts[0] if parts else {}
    dtype, scheme, size, axis = (weight.get(key) for key in ("dtype", "qscheme", "group_size", "ch_axis"))
    axes: tuple[int | None, ...] = (None, 0) if scheme == "per_channel" else (None, 1, -1)
    fmt = None
    if len(parts) == 1 and not weight.get("is_dynamic") and (scheme in ("per_tensor", "per_block") or axis in axes):
        fmt = _PLAIN.get((str(dtype), str(scheme)))
        if dtype == "int8" and weight.get("symmetric") is not True:
            fmt = None
        elif scheme == "per_group" and size == 32 and weight.get("scale_format") == "e8m0":
            fmt = _MX.get(str(dtype))
        elif scheme == "per_group" and dtype in ("int4", "uint4"):
            fmt = _int4(weight, order)
        elif scheme == "per_block" and dtype == "fp8_e4m3":
            fmt = _blocks(weight)
    elif len(parts) == 2 and (dtype, scheme, size) == ("fp4", "per_group", 16) and axis in axes:
        second = parts[1].get("dtype"), parts[1].get("qscheme")
        fmt = _NVFP4 if second == ("fp8_e4m3", "per_tensor") else None
    if fmt is None:
        keys = ("dtype", "qscheme", "group_size", "symmetric", "scale_format", "is_dynamic", "ch_axis")
        said = [{key: part[key] for key in keys if part.get(key) is not None} for part in parts]
        raise UsageError(f"config.json: {name[:100]} of Quark has weights of {json.dumps(said)[:300]}", _KNOWN)
    return fmt


def _int4(weight: dict[str, Any], order: str) -> Format | None:
    """Return the format of integers that are stored transposed; None if it is not known."""
    size, signed = weight.get("group_size"), bool(weight.get("dtype") == "int4")
    if type(size) is not int or not 0 < size <= 1 << 16 or size % INT4.run:
        return None
    # vLLM takes uint4 with `symmetric` for int4, and Quark does not (layers/quantization/quark/utils.py).
    if weight.get("symmetric") is not signed or weight.get("zero_point_type") not in (None, "int32"):
        return None
    # The bits of a negative int4 are 16 more, and zero points are 0.
    columns = Columns(_ZEROS, order=_ORDERS[order], zero_point_offset=8 if signed else 0, signed=signed)
    return Format(INT4, (1, size), Scale("weight_scale"), zero_point=None if signed else _ZEROS, columns=columns)


def _blocks(weight: dict[str, Any]) -> Format | None:
    block, exponents = weight.get("block_size"), weight.get("scale_type") == "float8_e8m0fnu"
    if not (isinstance(block, list) and len(block) == 2 and all(type(side) is int for side in block)):
        return None
    if weight.get("symmetric") is not True or not all(0 < side <= 1 << 16 for side in block):
        return None
    scale = replace(BLOCK_COMPRESSED.format.scale, power_of_two=exponents)
    return replace(BLOCK_COMPRESSED.format, group=(block[0], block[1]), scale=scale)


_STRATEGIES = {"per_tensor": "tensor", "per_channel": "token", "per_group": "group"}


def _inputs(config: object) -> Mapping[str, Any] | None:
    """Return how activations are quantized, in the words of compressed-tensors; evaluations refuse what they lack."""
    parts = _parts(config)
    if config is None or not parts:
        return None
    first, dtype = parts[0], str(parts[0].get("dtype"))
    if len(parts) == 2 and (dtype, first.get("group_size")) == ("fp4", 16):
        inputs: Mapping[str, Any] = NVFP4_W4A4.group["input_activations"]
        return inputs
    return {
        "type": "int" if dtype == "int8" else "float",
        "num_bits": {"fp8_e4m3": 8, "int8": 8}.get(dtype, dtype),
        "strategy": _STRATEGIES.get(str(first.get("qscheme"))),
        "group_size": first.get("group_size"),
        "dynamic": bool(first.get("is_dynamic")),
        "symmetric": first.get("symmetric") is not False or dtype != "int8",
        "scale_dtype": "torch.uint8" if first.get("scale_format") == "e8m0" else None,
    }

"""Configs of AutoAWQ, GPTQ, auto-round and Quark: the layouts that they stand for.

The first three store integers in transposed words. A weight is (code - zero point of its group) * scale, as in
compressed-tensors, which packs words along rows. A config may store some layers otherwise: GPTQ's `dynamic`,
auto-round's `extra_config`. Quark's is read as vLLM reads it (layers/quantization/quark/quark.py).

    read_gptq({"bits": 4, "group_size": 128, "sym": True}).title   # "one scale per 128 inputs of a row"
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
from ..patterns import MEND, join_words, language_model_names
from .format import Columns, Format, GlobalScale, Group, Scale
from .numbers import INT2, INT3, INT4, INT5, INT6, INT7, INT8_WORDS, Number
from .schemes import BLOCK_COMPRESSED, CHANNEL, INT8_W8A8, MXFP4, MXFP8, NVFP4, NVFP4_W4A4, TENSOR_COMPRESSED

# The targets and the format of each group of layers; the first has all layers that others do not name.
Groups = list[tuple[tuple[str, ...], Format]]

ZEROS = "qzeros"
# Codes follow one another without gaps, the first lowest (auto-round 0.16.1, auto_round_extension/torch/
# qlinear_torch.py; GPTQModel 7.7.0 has the same for its 2, 3, 4 and 8 bits).
_BITS = {number.bits: number for number in (INT2, INT3, INT4, INT5, INT6, INT7, INT8_WORDS)}
# vLLM, layers/quantization/auto_awq.py:76: where in a word each of eight outputs lies.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# By checkpoint_format: what is added to stored zero points (GPTQModel, utils/model.py:750-827).
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Settings of a rule of `dynamic` that change how a layer is stored.
_LAYOUT_KEYS = ("bits", "group_size", "sym", "desc_act")
# Layouts by auto-round's packing_format (auto-round 0.16.1, export/export_to_autoround/export.py,
# dynamic_import_quant_linear_for_packing). Older versions call it backend and may append the name of a kernel.
_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round": "gptq_v2",
}
# Characters by which vLLM knows a regular expression among the names of an extra_config
# (layers/quantization/inc/config_parser.py:79).
_SPECIAL = frozenset("*+?^$()[]{}|\\")


def read_awq(config: dict[str, Any]) -> Format:
    """Return the format of the layers from a quantization_config of the method "awq".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, group, and tensor names and layout of every quantized layer.

    Raises:
        UsageError: openquant does not know this layout.
    """
    hint = "known is the GEMM layout of AutoAWQ, of 4 bits with zero points"
    _require(config, "version", ("gemm", "GEMM", None), hint)
    _require(config, "zero_point", (True, None), hint)
    # AutoAWQ's own quant_config.json has other names for both.
    number = _number(config.get("bits", config.get("w_bit")), (4,))
    group = _group(config.get("group_size", config.get("q_group_size")), number)
    # Quark writes the method "awq" too.
    _require(config, "pack_method", ("reorder", None), "known is reorder")
    return _format(number, group, Columns(ZEROS, order=AWQ_ORDER), ZEROS)


def read_gptq(config: dict[str, Any]) -> Format:
    """Return the format of the layers from a quantization_config of the method "gptq".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, group, and tensor names and layout of every quantized layer.

    Raises:
        UsageError: openquant does not know this layout.
    """
    stored = "format"
    if config.get("checkpoint_format") is not None:
        stored = "checkpoint_format"
    _require(config, stored, (*_ZERO_POINT_OFFSETS, None), "known are gptq and gptq_v2")
    _require(config, "pack_dtype", ("int32", "torch.int32", None), "known are words of 32 bits")
    _require(config, "is_marlin_format", (False, None), "known are gptq and gptq_v2")
    for key in ("sym", "desc_act"):
        _require(config, key, (True, False, None), "it must be true or false")

    number = _number(config.get("bits"), tuple(_BITS))
    columns = Columns(
        ZEROS,
        zero_point_offset=_ZERO_POINT_OFFSETS[config.get(stored) or "gptq"],
        index="g_idx",
        act_order=config.get("desc_act") is True,
    )

    return _format(
        number, _group(config.get("group_size"), number), columns, None if config.get("sym", True) else ZEROS
    )


def read_gptq_groups(config: dict[str, Any]) -> Groups:
    """Return the formats of a quantization_config of the method "gptq" whose `dynamic` may store some layers otherwise.

    Args:
        config: the quantization_config of config.json.

    Returns:
        The format of all layers, then that of each rule of `dynamic`, of which the first that matches the beginning of
        a module's name counts (vLLM layers/quantization/utils/gptq_utils.py:95-116). Rules that begin with "-:" leave
        layers out, which then have no codes; they are returned because later rules do not count there.

    Raises:
        UsageError: openquant does not know a layout, or `dynamic` is malformed.
    """
    groups: Groups = [(("Linear",), read_gptq(config))]
    for rule, changes in _entries(config, "dynamic"):
        expression = rule.removeprefix("-:").removeprefix("+:")
        # A rule may also name settings of the quantizing run.
        layout = {key: value for key, value in changes.items() if key in _LAYOUT_KEYS}
        groups.append(((f"re:{expression}",), read_gptq({**config, **layout})))
    return groups


def read_auto_round_groups(config: dict[str, Any]) -> Groups:
    """Return the formats of a quantization_config of the method "auto-round".

    Args:
        config: the quantization_config of config.json.

    Returns:
        The format of all layers, then that of each entry of `extra_config`: a module's name or its last part, or a
        regular expression that matches any part (vLLM layers/quantization/inc/config_parser.py:76-199). What
        `block_name_to_quantize` leaves out has no codes.

    Raises:
        UsageError: openquant does not know a layout, or `extra_config` is malformed.
    """
    groups: Groups = [(("Linear",), _read_auto_round(config))]
    for name, changes in _entries(config, "extra_config"):
        bits = changes.get("bits", config.get("bits"))
        if type(bits) is int and bits >= 16:
            continue
        groups.append((_targets(name), _read_auto_round({**config, **changes})))
    return groups


def _read_auto_round(config: dict[str, Any]) -> Format:
    """Return the format of layers with these settings of auto-round."""
    _require(config, "data_type", ("int", None), "known are integers")
    _require(config, "act_bits", (16, 32, None), "known are activations as they are")
    _require(config, "rotation_config", (None,), "known are weights that are not rotated")

    packing = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
    layout = _AUTO_ROUND.get(":".join(str(packing).split(":")[:2]))
    if layout is None:
        raise UsageError(
            f"config.json has the packing_format {json.dumps(packing)[:100]}",
            f"known are {join_words(list(_AUTO_ROUND), 'and')}",
        )

    if layout != "awq":
        plain = {key: config.get(key) for key in ("bits", "group_size")}
        return read_gptq({**plain, "sym": config.get("sym", True), "checkpoint_format": layout})

    fmt = read_awq({key: config.get(key) for key in ("bits", "group_size")})
    if config.get("sym") is False:
        return fmt
    return replace(fmt, zero_point=None)


def _targets(name: str) -> tuple[str, ...]:
    """Return the targets of an entry of auto-round's extra_config."""
    if _SPECIAL & set(name):
        return (f"re:.*(?:{name})",)
    # The output head may be in the language model of a multimodal one.
    if "." in name:
        return language_model_names(name)
    return (name, rf"re:.*\.{name}$")


def _entries(config: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings that a config has for some layers, by the names or expressions of these layers."""
    entries = config.get(key) or {}
    if not isinstance(entries, dict) or not all(isinstance(changes, dict) for changes in entries.values()):
        raise UsageError(f"config.json: {key} is not an object of settings by layer", MEND)
    return list(entries.items())


def _format(number: Number, group: Group, columns: Columns, zero_point: str | None) -> Format:
    return Format(number, group, Scale("scales", dtype="F16"), codes="qweight", zero_point=zero_point, columns=columns)


def _require(config: dict[str, Any], key: str, accepted: tuple[object, ...], hint: str) -> None:
    value = config.get(key)
    if not any(type(value) is type(choice) and value == choice for choice in accepted):
        raise UsageError(f"config.json has the {key} {json.dumps(value)[:100]}", hint)


def _number(bits: object, accepted: tuple[int, ...]) -> Number:
    if type(bits) is not int or bits not in accepted:
        raise UsageError(
            f"config.json has weights of {json.dumps(bits)[:100]} bits", f"known are {', '.join(map(str, accepted))}"
        )
    return _BITS[bits]


def _group(size: object, number: Number) -> Group:
    if type(size) is int and size == -1:
        return 1, None
    if type(size) is not int or not 0 < size <= 1 << 16 or size % number.run:
        raise UsageError(
            f"config.json has the group_size {json.dumps(size)[:100]}", f"known are -1 and multiples of {number.run}"
        )
    return 1, size


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

Inputs = list[Mapping[str, Any] | None]


def read_quark(config: dict[str, Any]) -> tuple[Groups, Inputs]:
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
    stored = export.get("weight_format")
    order = export.get("pack_method")

    if stored not in (None, "real_quantized"):
        raise UsageError(f"config.json has the weight_format {json.dumps(stored)[:100]}", "known is real_quantized")
    if order not in (None, *_ORDERS):
        raise UsageError(f"config.json has the pack_method {json.dumps(order)[:100]}", "known are reorder and order")

    of_types = _object(config, "layer_type_quant_config")
    named: list[tuple[str, str, Any]] = []

    for pattern, layer in _object(config, "layer_quant_config").items():
        # The first pattern that matches counts, so a name after an expression must be one too.
        in_turn = named and named[-1][1].startswith("re:")
        target = pattern
        if in_turn or set(pattern) & set("*?["):
            target = f"re:{fnmatch.translate(pattern)}"
        named.append((pattern, target, layer))

    if "Linear" in of_types:
        named.append(("layer_type_quant_config", "Linear", of_types["Linear"]))
    else:
        named.append(("global_quant_config", "Linear", config.get("global_quant_config")))

    layers: Groups = []
    inputs: Inputs = []
    for name, target, layer in named:
        if not isinstance(layer, dict):
            raise UsageError(f"config.json: {name[:100]} of Quark is not an object", MEND)
        # Layers without it are not quantized, and stored as such.
        if layer.get("weight"):
            if layer.get("bias"):
                raise UsageError(f"config.json: {name[:100]} of Quark has a quantized bias", "known are weights")
            layers.append(((target,), _quark_format(name, layer["weight"], str(order or "reorder"))))
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
    parts: list[Any] = [config]
    if isinstance(config, list):
        parts = config
    if not all(isinstance(part, dict) for part in parts):
        return []
    return parts


def _quark_format(name: str, config: object, order: str) -> Format:
    parts = _parts(config)
    weight = next(iter(parts), {})

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
    elif (
        len(parts) == 2
        and (dtype, scheme, size) == ("fp4", "per_group", 16)
        and axis in axes
        and (parts[1].get("dtype"), parts[1].get("qscheme")) == ("fp8_e4m3", "per_tensor")
    ):
        fmt = _NVFP4

    if fmt is None:
        keys = ("dtype", "qscheme", "group_size", "symmetric", "scale_format", "is_dynamic", "ch_axis")
        said = [{key: part[key] for key in keys if part.get(key) is not None} for part in parts]
        raise UsageError(f"config.json: {name[:100]} of Quark has weights of {json.dumps(said)[:300]}", _KNOWN)
    return fmt


def _int4(weight: dict[str, Any], order: str) -> Format | None:
    """Return the format of integers that are stored transposed; None if it is not known."""
    size = weight.get("group_size")
    signed = bool(weight.get("dtype") == "int4")
    if type(size) is not int or not 0 < size <= 1 << 16 or size % INT4.run:
        return None
    # vLLM takes uint4 with `symmetric` for int4, and Quark does not (layers/quantization/quark/utils.py).
    if weight.get("symmetric") is not signed or weight.get("zero_point_type") not in (None, "int32"):
        return None
    # The bits of a negative int4 are 16 more, and zero points are 0.
    columns = Columns(_ZEROS, order=_ORDERS[order], zero_point_offset=8 * signed, signed=signed)
    fmt = Format(INT4, (1, size), Scale("weight_scale"), zero_point=_ZEROS, columns=columns)
    if signed:
        return replace(fmt, zero_point=None)
    return fmt


def _blocks(weight: dict[str, Any]) -> Format | None:
    block = weight.get("block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(side) is int for side in block)):
        return None
    if weight.get("symmetric") is not True or not all(0 < side <= 1 << 16 for side in block):
        return None
    scale = replace(BLOCK_COMPRESSED.format.scale, power_of_two=weight.get("scale_type") == "float8_e8m0fnu")
    return replace(BLOCK_COMPRESSED.format, group=(block[0], block[1]), scale=scale)


_STRATEGIES = {"per_tensor": "tensor", "per_channel": "token", "per_group": "group"}


def _inputs(config: object) -> Mapping[str, Any] | None:
    """Return how activations are quantized, in the words of compressed-tensors; evaluations refuse what they lack."""
    parts = _parts(config)
    if config is None or not parts:
        return None

    first = parts[0]
    dtype = str(parts[0].get("dtype"))
    if len(parts) == 2 and (dtype, first.get("group_size")) == ("fp4", 16):
        inputs: Mapping[str, Any] = NVFP4_W4A4.group["input_activations"]
        return inputs

    return {
        "type": {"int8": "int"}.get(str(dtype), "float"),
        "num_bits": {"fp8_e4m3": 8, "int8": 8}.get(dtype, dtype),
        "strategy": _STRATEGIES.get(str(first.get("qscheme"))),
        "group_size": first.get("group_size"),
        "dynamic": bool(first.get("is_dynamic")),
        "symmetric": first.get("symmetric") is not False or dtype != "int8",
        "scale_dtype": {"e8m0": "torch.uint8"}.get(str(first.get("scale_format"))),
    }

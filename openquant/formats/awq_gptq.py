"""Integers as AutoAWQ, GPTQ and auto-round store them: transposed words, and configs of their own.

A weight is (code - zero point of its group) * scale, as in compressed-tensors, which packs words along rows. A config
may store some layers otherwise: GPTQ's `dynamic`, auto-round's `extra_config`.

    read_gptq({"bits": 4, "group_size": 128, "sym": True}).title   # "one scale per 128 inputs of a row"
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from .format import Columns, Format, Group, Scale
from .ignored import MEND, language_model_names
from .numbers import INT2, INT3, INT4, INT5, INT6, INT7, INT8_WORDS, Number

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
    stored = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
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
            f"known are {', '.join(list(_AUTO_ROUND)[:-1])} and {list(_AUTO_ROUND)[-1]}",
        )
    if layout != "awq":
        plain = {key: config.get(key) for key in ("bits", "group_size")}
        return read_gptq({**plain, "sym": config.get("sym", True), "checkpoint_format": layout})
    fmt = read_awq({key: config.get(key) for key in ("bits", "group_size")})
    return fmt if config.get("sym") is False else replace(fmt, zero_point=None)


def _targets(name: str) -> tuple[str, ...]:
    """Return the targets of an entry of auto-round's extra_config."""
    if _SPECIAL & set(name):
        return (f"re:.*(?:{name})",)
    # The output head may be in the language model of a multimodal one.
    return (name, rf"re:.*\.{name}$") if "." not in name else language_model_names(name)


def _entries(config: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings that a config has for some layers, by the names or expressions of these layers."""
    entries = config.get(key) or {}
    if not isinstance(entries, dict) or not all(isinstance(changes, dict) for changes in entries.values()):
        raise UsageError(f"config.json: {key} is not an object of settings by layer", MEND)
    return list(entries.items())


def _format(number: Number, group: Group, columns: Columns, zero_point: str | None) -> Format:
    scale = Scale("scales", dtype="F16")
    return Format(number, group, scale, codes="qweight", zero_point=zero_point, columns=columns)


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
            f"config.json has the group_size {json.dumps(size)[:100]}",
            f"known are -1 and multiples of {number.run}",
        )
    return 1, size

"""INT4 and INT8 as AutoAWQ and GPTQ store them: transposed words, and a config of their own.

A weight is (code - zero point of its group) * scale, as in compressed-tensors, which packs words along rows.

    read_gptq({"bits": 4, "group_size": 128, "sym": True}).title   # "one scale per 128 inputs of a row"
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import UsageError
from .format import Columns, Format, Group, Scale
from .numbers import INT4, INT8_WORDS, Number

ZEROS = "qzeros"
_BITS = {4: INT4, 8: INT8_WORDS}
# vLLM, layers/quantization/auto_awq.py:76: where in a word each of eight outputs lies.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# By checkpoint_format: what is added to stored zero points (GPTQModel, utils/model.py:750-827).
_ZERO_POINT_OFFSETS = {"gptq": 1, "gptq_v2": 0}


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
    dynamic = config.get("dynamic")
    if dynamic and not (isinstance(dynamic, dict) and all(str(key).startswith("-:") for key in dynamic)):
        raise UsageError("config.json has a dynamic, which stores some layers otherwise", "known is one way for all")
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
            f"config.json has weights of {json.dumps(bits)[:100]} bits", f"known are {' or '.join(map(str, accepted))}"
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

"""The quantization_config of torchao, which names the class of its own config.

A shard stores a tensor's parts under its name (torchao/prototype/safetensors/, Float8Tensor): X._weight_qdata and
X._weight_scale for X.weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from .format import Format, Scale
from .schemes import CHANNEL

QDATA = "_weight_qdata"
_ROWS = replace(CHANNEL.format, scale=Scale("_weight_scale"), codes=QDATA)
# By granularity, the format of weights and the strategy of activations.
_FORMATS = {"PerRow": (_ROWS, "token"), "PerTensor": (replace(_ROWS, group=(None, None)), "tensor")}
# By class, whether activations are quantized.
_CLASSES = {"Float8WeightOnlyConfig": False, "Float8DynamicActivationFloat8WeightConfig": True}
_KNOWN = f"known are {' and '.join(_CLASSES)} with float8_e4m3fn, by row or tensor"


def read_torchao(config: dict[str, Any]) -> tuple[Format, Mapping[str, Any] | None]:
    """Return the format of the layers from a quantization_config of the method "torchao".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, group and tensor names; and how activations are quantized, as `input_activations` of
        compressed-tensors.

    Raises:
        UsageError: openquant does not know this layout.
    """
    default = _inner(config.get("quant_type"), "default")
    kind, data = str(default.get("_type")), _inner(default, "_data")
    granularity = data.get("granularity")
    # One for activations and one for weights.
    parts = granularity if isinstance(granularity, list) else [granularity]
    names = {str(part.get("_type")) if isinstance(part, dict) else "" for part in parts}
    found = _FORMATS.get(names.pop()) if len(names) == 1 else None
    if kind not in _CLASSES:
        raise UsageError(f"config.json has torchao's {kind[:100]}", _KNOWN)
    if found is None or _inner(data, "weight_dtype").get("_data") != "float8_e4m3fn":
        raise UsageError(f"config.json has torchao's {kind} with {json.dumps(data)[:200]}", _KNOWN)
    fmt, strategy = found
    inputs = {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": True}
    return fmt, inputs if _CLASSES[kind] else None


def _inner(value: Any, key: str) -> dict[str, Any]:
    """Return the object under a key; {} if there is none."""
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}

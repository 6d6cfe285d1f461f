"""The quantization_config of bitsandbytes: which layout of 4 or 8 bits weights have.

read_bitsandbytes({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}).number.title   # "NF4"
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import UsageError
from .format import Format, Scale
from .numbers import BITSANDBYTES, INT8

# bitsandbytes nn/modules.py:593 (4 bits) and :1095 (8 bits). The number of weights that share an absmax is in each
# layer's quant_state; this is what transformers always takes.
_BLOCK = 64
_ABSMAX = Scale("weight.absmax", axes=1, of_zeros=0.0)
_FOUR_BITS = {number.name: Format(number, (1, _BLOCK), _ABSMAX) for number in BITSANDBYTES}
# bitsandbytes backends/default/ops.py, int8_vectorwise_dequant: 127 stands for the largest weight of a row, its SCB.
_INT8 = Format(INT8, (1, None), Scale("SCB", axes=1, unit=1 / 127, of_zeros=0.0))


def read_bitsandbytes(config: dict[str, Any]) -> Format:
    """Return the format of the layers from a quantization_config of the method "bitsandbytes".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, tensor names, and what usually shares a scale.

    Raises:
        UsageError: openquant does not know this layout.
    """
    if (config.get("load_in_8bit") or config.get("_load_in_8bit")) is True:
        return _INT8
    if (config.get("load_in_4bit") or config.get("_load_in_4bit")) is not True:
        raise UsageError("config.json has bitsandbytes with neither load_in_4bit nor load_in_8bit", "set one of them")
    kind, storage = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_quant_storage")
    if storage not in (None, "uint8"):
        raise UsageError(f"config.json has the bnb_4bit_quant_storage {json.dumps(storage)[:100]}", "known is uint8")
    fmt = _FOUR_BITS.get(str(kind))
    if fmt is None:
        raise UsageError(f"config.json has the bnb_4bit_quant_type {json.dumps(kind)[:100]}", "known are nf4 and fp4")
    return fmt

"""Inputs: how engines quantize the activations that go into a layer, as a config says it.

Configs of other kinds are put into the words of compressed-tensors first (quantization.py): one table reads all.

    read_inputs({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})   # Inputs(E4M3, (1, None))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .format import Group
from .numbers import E2M1, E4M3, INT8, Number

KNOWN = (
    "known are FP8 and symmetric INT8 by token, tensor or group, computed as they come, or by a stored input_scale, "
    "and NVFP4 under a stored input_global_scale"
)


@dataclass(frozen=True)
class ActivationQuantization:
    """How the inputs of a layer are quantized.

    Attributes:
        number: what they become.
        group: tokens and inputs that share a scale: (1, None) one for each token, (None, None) one for all of a batch,
            (1, 128) one for 128 inputs of a token.
        power_of_two: whether scales are rounded up to a power of two.
        static: whether the scale is stored, as input_scale, instead of taken from the inputs.
        local: whether a global scale is stored, under which those of groups are E4M3.
    """

    number: Number
    group: Group
    power_of_two: bool = False
    static: bool = False
    local: bool = False

    def largest(self, scale: float) -> float:
        """The largest value that is not clipped under a stored scale, which of local ones is a divisor."""
        return E4M3.largest * self.number.largest / scale if self.local else scale * self.number.largest


_NUMBERS: Mapping[tuple[Any, Any], Number] = {("float", 8): E4M3, ("int", 8): INT8}

# NVFP4's, but for what is not always said.
_LOCAL = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def read_activation_quantization(activations: Mapping[str, Any] | None) -> ActivationQuantization | None:
    """What the `input_activations` of a config group say; None where activations stay as they are.

    Raises:
        UsageError: they are quantized in a way that is not known here.
    """
    if not activations:
        return None
    if all(activations.get(key) == value for key, value in _LOCAL.items()):
        return ActivationQuantization(E2M1, (1, 16), local=True)
    number = _NUMBERS.get((activations.get("type"), activations.get("num_bits")))
    static, size = not activations.get("dynamic"), activations.get("group_size")
    groups: dict[Any, Group] = {"tensor": (None, None)}
    if not static:
        groups["token"] = (1, None)
        if type(size) is int and size > 0:
            groups["group"] = (1, size)
    strategy = activations.get("strategy")
    group = groups.get(strategy) if isinstance(strategy, str) else None
    if number is None or group is None or activations.get("symmetric") is False:
        text = json.dumps(activations)
        raise UsageError(f"config.json quantizes activations as {text[:200]}, which is not known here", KNOWN)
    return ActivationQuantization(
        number, group, str(activations.get("scale_dtype")).endswith("uint8") or activations.get("ue8m0") is True, static
    )

"""How engines quantize the input activations of a layer, read from a config.

quantization.py translates other configs into the words of compressed-tensors first, so one function reads all.

    read_activation_quantization({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})
    # ActivationQuantization(E4M3, (1, None))
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
    "known are FP8 and symmetric INT8 with dynamic scales by token, tensor or group, or with a static input_scale, "
    "and NVFP4 with a static input_global_scale"
)


@dataclass(frozen=True)
class ActivationQuantization:
    """How the inputs of a layer are quantized.

    Attributes:
        number: numeric format of the quantized activations.
        group: tokens and inputs that share a scale: (1, None) is one per token, (None, None) one per batch, (1, 128)
            one per 128 inputs of a token.
        power_of_two: whether scales are rounded up to powers of two.
        static: whether the scale is stored, as `input_scale`, instead of computed from the activations.
        has_global_scale: whether an `input_global_scale` is stored; the dynamic scales of groups under it are E4M3.
    """

    number: Number
    group: Group
    power_of_two: bool = False
    static: bool = False
    has_global_scale: bool = False

    def largest(self, scale: float) -> float:
        """Return the largest activation that is not clipped.

        Args:
            scale: the stored `input_scale`. With a global scale: `input_global_scale`, by which the scales of groups
                are multiplied before they are rounded to E4M3.
        """
        return E4M3.largest * self.number.largest / scale if self.has_global_scale else scale * self.number.largest


_NUMBERS: Mapping[tuple[Any, Any], Number] = {("float", 8): E4M3, ("int", 8): INT8}

# What configs always say of NVFP4 activations.
_NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def read_activation_quantization(activations: Mapping[str, Any] | None) -> ActivationQuantization | None:
    """Read the `input_activations` of a compressed-tensors config group.

    Args:
        activations: the parsed JSON object; None or empty if the group has none, which leaves activations unquantized.

    Returns:
        Numeric format and group of the activations, and which scales are stored; None if they are not quantized.

    Raises:
        UsageError: openquant does not know this way of quantizing activations.
    """
    if not activations:
        return None
    if all(activations.get(key) == value for key, value in _NVFP4.items()):
        return ActivationQuantization(E2M1, (1, 16), has_global_scale=True)
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

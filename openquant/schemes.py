"""Number formats: what a quantized layer is stored as, and how its scale follows from its largest weight.

A weight is stored as float8_e4m3fn codes and a float32 scale with `weight = code * scale`. e4m3fn has 4
exponent and 3 mantissa bits: 448 is its largest value, 2^-9 its smallest, and it has no infinity.
Nothing here knows of files, models or devices; numpy is all it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoint import TensorInfo

CODE_DTYPE = "F8_E4M3"
SCALE_DTYPE = "F32"
CODE_MAX = np.float32(448)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """One way to store quantized layers under `quant_method: fp8`.

    Tensor and key names are those of vLLM 0.32.0, layers/quantization/fp8.py:282-346.

    Attributes:
        name: what the user types.
        block: side of the square blocks that share a scale; None for one scale per joined set.
        scale_name: last part of the scale's tensor name.
        scale_floor: the smallest scale of anything that is not all zero.
        largest: the largest weight the engine can load; None without a limit.
        suffix: ending of the default output directory.
        title: how the plan and the model card call it.
    """

    name: str
    block: int | None
    scale_name: str
    scale_floor: float
    largest: float | None
    suffix: str
    title: str

    def outputs(self, module: str, shape: tuple[int, int]) -> tuple[TensorInfo, TensorInfo]:
        """The code tensor [out, in] and the scale tensor ([] or [out/block, in/block]) of one layer."""
        return (
            TensorInfo(f"{module}.weight", CODE_DTYPE, shape),
            TensorInfo(f"{module}.{self.scale_name}", SCALE_DTYPE, self.scale_shape(shape)),
        )

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the scale of a weight [out, in]."""
        return () if self.block is None else (shape[0] // self.block, shape[1] // self.block)

    def misfit(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot be stored; None if it can."""
        if self.block is None or all(size % self.block == 0 for size in shape):
            return None
        return f"{shape[0]} x {shape[1]} is not a multiple of {self.block} both ways"

    def scale(self, absmax: Floats) -> Floats:
        """float32 scale of each group, given its largest absolute weight; always finite and above zero."""
        scale = np.maximum(absmax / CODE_MAX, np.float32(self.scale_floor))
        return np.where(absmax == 0, np.float32(1), scale).astype(np.float32)

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        vLLM reads `ignored_layers`, transformers `modules_to_not_convert`, SGLang either.
        """
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": None if self.block is None else [self.block, self.block],
            "ignored_layers": ignored,
            "modules_to_not_convert": ignored,
        }


# vLLM 0.32.0 passes per-tensor weights through float16 at load (layers/quantization/utils/w8a8_utils.py:44-106):
# below a scale of 2^-15 its subnormals change small codes, above a weight of 65504 it overflows.
TENSOR = Scheme("tensor", None, "weight_scale", 2.0**-15, 65504.0, "-FP8", "one scale per tensor")
# A float32 scale below 2^-126 would be subnormal, and zero where those are flushed.
BLOCK = Scheme("block", 128, "weight_scale_inv", 2.0**-126, None, "-FP8-W128", "one scale per 128x128 block")

SCHEMES = {scheme.name: scheme for scheme in (TENSOR, BLOCK)}

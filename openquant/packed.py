"""PackedLinear: one quantized layer as a torch module, and the reference arithmetic in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .schemes import BLOCK, CODE_MAX, SCHEMES, TENSOR, Scheme


def group_absmax(weight: Tensor, block: int | None) -> Tensor:
    """Largest absolute weight of each group that shares a scale, float32: [] or [out/block, in/block]."""
    absolute = weight.float().abs()
    if block is None:
        return absolute.amax()
    rows, cols = weight.shape
    return absolute.reshape(rows // block, block, cols // block, block).amax((1, 3))


def group_scale(absmax: Tensor, scheme: Scheme) -> Tensor:
    """float32 scale of each group: absmax / 448, not below the scheme's floor, 1.0 for an all-zero group."""
    # Divided by a tensor: by a number, torch multiplies with its reciprocal on a GPU, which rounds otherwise.
    scale = (absmax / absmax.new_tensor(float(CODE_MAX))).clamp(min=scheme.scale_floor)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def expand(scale: Tensor, block: int | None) -> Tensor:
    """A scale repeated over its blocks: [out/block, in/block] -> [out, in]; a scalar stays one."""
    if block is None:
        return scale
    return scale.repeat_interleave(block, 0).repeat_interleave(block, 1)


def encode(weight: Tensor, scale: Tensor, block: int | None) -> Tensor:
    """float8_e4m3fn codes of a weight [out, in]: divide by the scale in float32, clamp, round to nearest even."""
    quotient = weight.float() / expand(scale, block)
    return quotient.clamp(-float(CODE_MAX), float(CODE_MAX)).to(torch.float8_e4m3fn)


def decode(codes: Tensor, scale: Tensor, block: int | None) -> Tensor:
    """The weights [out, in] that codes and scale stand for, float32."""
    return codes.float() * expand(scale, block)


class PackedLinear(nn.Module):
    """A Linear whose weight is float8_e4m3fn; its state dict is exactly what an output directory holds for it.

    Args:
        weight: float8_e4m3fn codes [out, in].
        scale: float32, [] for one scale per tensor or [out/128, in/128] for one per block.
        bias: [out] or None, as the source has it.

    Raises:
        ValueError: dtypes or shapes that do not belong together.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
            raise ValueError(f"weight must be a float8_e4m3fn matrix, not {weight.dtype} {list(weight.shape)}")
        self.scheme = TENSOR if scale.ndim == 0 else BLOCK
        expected = self.scheme.scale_shape((weight.shape[0], weight.shape[1]))
        if (
            scale.dtype != torch.float32
            or tuple(scale.shape) != expected
            or self.scheme.misfit((weight.shape[0], weight.shape[1]))
        ):
            raise ValueError(f"{scale.dtype} scale {list(scale.shape)} does not fit a weight {list(weight.shape)}")
        self.register_buffer("weight", weight)
        self.register_buffer(self.scheme.scale_name, scale)
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: str = "tensor") -> PackedLinear:
        """Quantize one Linear on its own, without the scale it would share with joined layers.

        Raises:
            ValueError: NaN or infinity in the weight, a weight too large, or sizes the scheme cannot store.
        """
        chosen = SCHEMES[scheme]
        weight = linear.weight.detach()
        problem = chosen.misfit((weight.shape[0], weight.shape[1]))
        if problem:
            raise ValueError(problem)
        absmax = group_absmax(weight, chosen.block)
        if not torch.isfinite(absmax).all():
            raise ValueError("the weight holds NaN or infinity")
        if chosen.largest is not None and absmax.item() > chosen.largest:
            raise ValueError(f"the weight reaches {absmax.item():g}, engines load at most {chosen.largest:g}")
        scale = group_scale(absmax, chosen)
        return cls(encode(weight, scale, chosen.block), scale, None if linear.bias is None else linear.bias.detach())

    @property
    def scale(self) -> Tensor:
        """The float32 scale, under whichever name it is stored."""
        return self.get_buffer(self.scheme.scale_name)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that this layer computes with."""
        return decode(self.get_buffer("weight"), self.scale, self.scheme.block).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def extra_repr(self) -> str:
        """What print() shows of the layer."""
        out_features, in_features = self.get_buffer("weight").shape
        return f"in_features={in_features}, out_features={out_features}, scheme={self.scheme.name}"

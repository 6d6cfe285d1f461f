"""PackedLinear: one quantized layer as a torch module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .formats.reference import decode, encode, group_absmax, group_scale, stored_scale
from .formats.schemes import VARIANTS, find_scheme

_SCALE_DTYPES = {"F32": torch.float32, "U8": torch.uint8}


class PackedLinear(nn.Module):
    """A Linear whose weight is float8_e4m3fn; its state dict is exactly what an output directory holds for it.

    Args:
        weight: float8_e4m3fn codes [out, in].
        scale: of the dtype and shape that one of the schemes stores for such a weight.
        bias: [out] or None, as the source has it.
        format: how it is serialized, where two formats differ only in the scale's name; the scheme's default if None.

    Raises:
        ValueError: dtypes or shapes that do not belong together.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, format: str | None = None) -> None:
        super().__init__()
        if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
            raise ValueError(f"weight must be a float8_e4m3fn matrix, not {weight.dtype} {list(weight.shape)}")
        shape = (weight.shape[0], weight.shape[1])
        fitting = [
            scheme
            for scheme in VARIANTS
            if scheme.format.misfit(shape) is None
            and scheme.format.scale_shape(shape) == scale.shape
            and scale.dtype == _SCALE_DTYPES[scheme.format.scale.dtype]
            and format in (None, scheme.method)
        ]
        if not fitting:
            raise ValueError(f"{scale.dtype} scale {list(scale.shape)} does not fit a weight {list(weight.shape)}")
        self.scheme = fitting[0]
        self.register_buffer("weight", weight)
        self.register_buffer(self.scheme.format.scale.name, scale)
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: str = "tensor", format: str | None = None, scale_format: str | None = None
    ) -> PackedLinear:
        """Quantize one Linear on its own, without the scale it would share with joined layers.

        Raises:
            ValueError: NaN or infinity in the weight, a weight too large, or sizes the scheme cannot store.
        """
        chosen = find_scheme(scheme, format, scale_format)
        weight = linear.weight.detach()
        shape = (weight.shape[0], weight.shape[1])
        problem = chosen.format.misfit(shape)
        if problem:
            raise ValueError(problem)
        absmax = group_absmax(weight, chosen.format.group)
        if not torch.isfinite(absmax).all():
            raise ValueError("the weight holds NaN or infinity")
        if absmax.max() > chosen.largest:
            raise ValueError(f"the weight reaches {absmax.max():g}, engines load at most {chosen.largest:g}")
        scale = group_scale(absmax, chosen.format)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(encode(weight, scale, chosen.format), stored_scale(scale, chosen.format, shape), bias, chosen.method)

    @property
    def scale(self) -> Tensor:
        """The scale as it is stored, under whichever name."""
        return self.get_buffer(self.scheme.format.scale.name)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that this layer computes with."""
        return decode(self.get_buffer("weight"), self.scale, self.scheme.format).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def extra_repr(self) -> str:
        """What print() shows of the layer."""
        out_features, in_features = self.get_buffer("weight").shape
        return f"in_features={in_features}, out_features={out_features}, scheme={self.scheme.name}"

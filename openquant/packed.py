"""PackedLinear: one quantized layer as a torch module, and the reference arithmetic in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .formats.schemes import CODE_MAX, VARIANTS, Group, Scheme, find_scheme, grid_of

_SCALE_DTYPES = {"F32": torch.float32, "U8": torch.uint8}


def group_absmax(weight: Tensor, group: Group) -> Tensor:
    """Largest absolute weight of each group that shares a scale, float32 [out/height, in/width]."""
    return _grouped(weight.float().abs(), group).amax((1, 3))


def group_scale(absmax: Tensor, scheme: Scheme) -> Tensor:
    """float32 scale of each group, as Scheme.scale."""
    # Divided by a tensor: by a number, torch multiplies with its reciprocal on a GPU, which rounds otherwise.
    scale = (absmax / absmax.new_tensor(float(CODE_MAX))).clamp(min=scheme.scale_floor)
    if scheme.power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def stored_scale(scale: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """The scales of a weight [out, in] as they are written, as Scheme.stored."""
    scale = scale.reshape(scheme.scale_shape(shape))
    return (scale.view(torch.int32) >> 23).to(torch.uint8) if scheme.scale_dtype == "U8" else scale


def encode(weight: Tensor, scale: Tensor, group: Group) -> Tensor:
    """float8_e4m3fn codes of a weight [out, in]: divide by the scale in float32, clamp, round to nearest even."""
    quotient = _grouped(weight.float(), group) / _beside(scale, weight, group)
    return quotient.clamp(-float(CODE_MAX), float(CODE_MAX)).to(torch.float8_e4m3fn).reshape(weight.shape)


def decode(codes: Tensor, scale: Tensor, group: Group) -> Tensor:
    """The weights [out, in] that codes and scale stand for, float32; the scale as computed or as stored."""
    return (_grouped(codes.float(), group) * _beside(scale, codes, group)).reshape(codes.shape)


def _grouped(weight: Tensor, group: Group) -> Tensor:
    """[out, in] -> [out/height, height, in/width, width]."""
    down, along = grid_of(group, weight.shape)
    return weight.reshape(down, weight.shape[0] // down, along, weight.shape[1] // along)


def _beside(scale: Tensor, weight: Tensor, group: Group) -> Tensor:
    """A scale, computed or stored, as float32 in the shape that broadcasts over the grouped weight."""
    if scale.dtype == torch.uint8:
        scale = (scale.to(torch.int32) << 23).view(torch.float32)
    down, along = grid_of(group, weight.shape)
    return scale.reshape(down, 1, along, 1)


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
            if scheme.misfit(shape) is None
            and scheme.scale_shape(shape) == scale.shape
            and scale.dtype == _SCALE_DTYPES[scheme.scale_dtype]
            and format in (None, scheme.format)
        ]
        if not fitting:
            raise ValueError(f"{scale.dtype} scale {list(scale.shape)} does not fit a weight {list(weight.shape)}")
        self.scheme = fitting[0]
        self.register_buffer("weight", weight)
        self.register_buffer(self.scheme.scale_name, scale)
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
        problem = chosen.misfit(shape)
        if problem:
            raise ValueError(problem)
        absmax = group_absmax(weight, chosen.group)
        if not torch.isfinite(absmax).all():
            raise ValueError("the weight holds NaN or infinity")
        if absmax.max() > chosen.largest:
            raise ValueError(f"the weight reaches {absmax.max():g}, engines load at most {chosen.largest:g}")
        scale = group_scale(absmax, chosen)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(encode(weight, scale, chosen.group), stored_scale(scale, chosen, shape), bias, chosen.format)

    @property
    def scale(self) -> Tensor:
        """The scale as it is stored, under whichever name."""
        return self.get_buffer(self.scheme.scale_name)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that this layer computes with."""
        return decode(self.get_buffer("weight"), self.scale, self.scheme.group).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def extra_repr(self) -> str:
        """What print() shows of the layer."""
        out_features, in_features = self.get_buffer("weight").shape
        return f"in_features={in_features}, out_features={out_features}, scheme={self.scheme.name}"

"""PackedLinear: one quantized layer as a torch module."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .formats.reference import decode, encode, group_absmax, stored_scale
from .formats.scales import choose_scales, choose_shared_scale
from .formats.schemes import VARIANTS, find_scheme

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}


class PackedLinear(nn.Module):
    """A Linear whose weight is quantized; its state dict is exactly what an output directory holds for it.

    Args:
        weight: codes as they are stored: float8_e4m3fn or int8 [out, in], or int32 words or uint8 pairs of them,
            [out, in / codes in an element].
        scale: of the dtype and shape that one of the schemes stores for such a weight: float32 [out, 1].
        bias: [out] or None, of the source's dtype.
        format: how it is serialized, where two formats differ only in the scale's name; the scheme's default if None.
        scheme: its name, which words of codes do not tell: "int8-weights" if None.
        global_scale: float32 [1], where the scheme has one above the scales of groups.

    Raises:
        ValueError: dtypes or shapes that do not belong together.
    """

    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        format: str | None = None,
        scheme: str | None = None,
        global_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        held = [
            each
            for each in VARIANTS
            if _DTYPES[each.format.number.dtype] == weight.dtype and scheme in (None, each.name)
        ]
        if not held or weight.ndim != 2:
            known = " or ".join([*dict.fromkeys(str(_DTYPES[each.format.number.dtype])[6:] for each in VARIANTS)][::-1])
            raise ValueError(f"weight must be codes: {known} matrix, not {weight.dtype} {list(weight.shape)}")
        shape = (weight.shape[0], weight.shape[1] * held[0].format.number.per_item)
        fitting = [
            each
            for each in held
            if each.format.number == held[0].format.number
            and each.format.shape_error(shape) is None
            and each.format.scale_shape(shape) == scale.shape
            and scale.dtype == _DTYPES[each.format.scale.dtype]
            and format in (None, each.method)
            and (each.format.global_scale is None) == (global_scale is None)
        ]
        if not fitting:
            raise ValueError(f"{scale.dtype} scale {list(scale.shape)} does not fit a weight {list(shape)}")
        self.scheme, self.shape = fitting[0], shape
        self.register_buffer(self.scheme.format.codes, weight)
        self.register_buffer(self.scheme.format.scale.name, scale)
        if self.scheme.format.global_scale is not None:
            self.register_buffer(self.scheme.format.global_scale.name, global_scale)
        for info, data in self.scheme.format.known("", shape):
            self.register_buffer(info.name[1:], torch.frombuffer(bytearray(data), dtype=torch.int64))
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: str = "tensor",
        format: str | None = None,
        scale_format: str | None = None,
        group_size: str | None = None,
    ) -> PackedLinear:
        """Quantize one Linear on its own, without the scale it would share with joined layers.

        Args:
            linear: its weight is [out, in], of any floating dtype.
            scheme: a name, as `openquant compress --scheme` takes it, and likewise the others.
            format: "fp8" or "compressed-tensors"; the scheme's default if None.
            scale_format: "float" or "ue8m0".
            group_size: "32", "64", "128" or "channel".

        Raises:
            ValueError: NaN or infinity in the weight, a weight too large, or sizes the scheme cannot store.
        """
        chosen = find_scheme(scheme, format, scale_format, group_size=group_size)
        weight = linear.weight.detach()
        shape = (weight.shape[0], weight.shape[1])
        problem = chosen.format.shape_error(shape)
        if problem:
            raise ValueError(problem)
        absmax = group_absmax(weight, chosen.format.group)
        if not torch.isfinite(absmax).all():
            raise ValueError("the weight holds NaN or infinity")
        if absmax.max() > chosen.largest:
            raise ValueError(f"the weight reaches {absmax.max():g}, engines load at most {chosen.largest:g}")
        form = chosen.format
        bits, largest = weight.float().cpu().contiguous().numpy().view(np.uint32), absmax.cpu().numpy()
        divisor = None
        if form.global_scale is not None:
            divisor = torch.from_numpy(choose_shared_scale(form, largest.max(keepdims=True))).to(weight.device)
        # No scheme of VARIANTS has zero points, which this layer could not hold.
        assert not chosen.asymmetric
        scale = torch.from_numpy(choose_scales(chosen, bits, "F32", largest).scale).to(weight.device)
        bias = None if linear.bias is None else linear.bias.detach()
        codes, stored = encode(weight, scale, form), stored_scale(scale, form, shape, divisor)
        return cls(codes, stored, bias, chosen.method, chosen.name, None if divisor is None else divisor.reshape(1))

    @property
    def scale(self) -> Tensor:
        """The scale as it is stored, under whichever name: float32 [out, 1] of one scale for each row."""
        return self.get_buffer(self.scheme.format.scale.name)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that this layer computes with, in a dtype."""
        form, scale = self.scheme.format, self.scale
        if form.global_scale is not None:
            scale = scale.float() / self.get_buffer(form.global_scale.name)
        return decode(self.get_buffer(form.codes), scale, form).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def extra_repr(self) -> str:
        """What print() shows of the layer."""
        out_features, in_features = self.shape
        return f"in_features={in_features}, out_features={out_features}, scheme={self.scheme.name}"

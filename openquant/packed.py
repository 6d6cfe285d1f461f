"""PackedLinear: one quantized layer as a torch module.

packed = PackedLinear.from_linear(nn.Linear(4096, 12288), "nvfp4")
packed.state_dict()     # weight_packed, weight_scale, weight_global_scale and bias, as an output directory has them
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from .formats import reference
from .formats.kernels import choose_scales, choose_shared_scale
from .formats.reference import TORCH_DTYPES
from .formats.schemes import ASYMMETRIC, VARIANTS, Scheme, find_scheme

# Tensors of a layer in an output directory. Engines scale activations by those of inputs, and we do not.
_NAMES = {
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_zero_point"),
    *("weight_shape", "bias", "input_scale", "input_global_scale"),
}


class PackedLinear(nn.Module):
    """A Linear whose weight is quantized. Its state dict has the names, dtypes and shapes of an output directory.

    The layer dequantizes its weight at every call: it shows what a scheme does to a layer, and is not fast.

    Args:
        weight: codes as they are stored: float8_e4m3fn or int8 [out, in]; int32 words [out, in * bits / 32] or
            uint8 pairs of codes [out, in / 2]. Tensors are not copied.
        scale: with the dtype and shape that the scheme stores, such as float32 [out, 1] for one scale per row.
        bias: [out], of any floating dtype; None without one.
        format: "fp8" or "compressed-tensors"; if None, that of the first scheme that fits.
        scheme: name of the scheme; if None, the first that fits. "int2" to "int7" must be given, since int32 words are
            otherwise those of "int8-weights".
        global_scale: float32 [1], for schemes that have a global scale ("nvfp4", "nvfp4-w4a4"); else None.
        zero_point: int32 words [out * bits / 32, in / group], of a layer that was made with `asymmetric=True`; else
            None. Codes and scales do not show that they need it, and without it such a layer gives wrong floats:
            `from_state_dict` takes all tensors of a layer by name.

    Raises:
        ValueError: the dtypes or shapes do not belong together, or do not fit `format` and `scheme`; or the layer
            cannot hold the scheme.
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
        zero_point: Tensor | None = None,
    ) -> None:
        super().__init__()
        candidates = _schemes_of_codes(weight, scheme, zero_point is not None)
        number = candidates[0].format.number
        shape = (weight.shape[0], number.count(weight.shape[1]))

        fitting = [
            variant
            for variant in candidates
            if variant.format.number == number
            and variant.format.shape_error(shape) is None
            and variant.format.scale_shape(shape) == scale.shape
            and scale.dtype == TORCH_DTYPES[variant.format.scale.dtype]
            and format in (None, variant.method)
            and (variant.format.global_scale is None) == (global_scale is None)
        ]
        if not fitting:
            guess = "" if scheme else f" of {candidates[0].name}: give scheme= if it is another"
            raise ValueError(f"{scale.dtype} scale {list(scale.shape)} does not fit a weight {list(shape)}{guess}")

        self.scheme = fitting[0]
        self.shape = shape
        fmt = self.scheme.format
        zeros = fmt.zero_points("", shape)
        if zeros and zero_point is not None and (zero_point.dtype, zero_point.shape) != (torch.int32, zeros.shape):
            raise ValueError(f"zero_point must be int32 {list(zeros.shape)}, not {_describe(zero_point)}")

        self.register_buffer(fmt.codes, weight)
        self.register_buffer(fmt.scale.name, scale)
        if fmt.global_scale is not None:
            self.register_buffer(fmt.global_scale.name, global_scale)
        if fmt.zero_point is not None:
            self.register_buffer(fmt.zero_point, zero_point)
        for info, data in fmt.constant_tensors("", shape):
            self.register_buffer(info.name[1:], torch.frombuffer(bytearray(data), dtype=torch.int64))
        self.register_buffer("bias", bias)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], scheme: str | None = None) -> PackedLinear:
        """Take the tensors of one layer of an output directory, under the names that they have there.

        Args:
            state: all tensors of the layer by the last part of their name: {"weight_packed": .., "weight_scale": ..}.
                Scales of activations are left out of the layer.
            scheme: name of the scheme, as for PackedLinear. It must be given for "int2" to "int7", whose codes have the
                dtype of others. `openquant.explain(OUTPUT, "**", "keep").layers` has the scheme of each layer.

        Raises:
            ValueError: codes or scales are missing, a name is not known, or a tensor does not fit the others.
        """
        codes = next((state[name] for name in ("weight_packed", "weight") if name in state), None)
        scale = next((state[name] for name in ("weight_scale", "weight_scale_inv") if name in state), None)
        if codes is None or scale is None:
            names = ", ".join(sorted(state)) or "no tensors"
            raise ValueError(f"there are no codes or no scales among {names}")
        if unknown := sorted(set(state) - _NAMES):
            raise ValueError(f"{', '.join(unknown)}: no scheme of PackedLinear has such a tensor")

        packed = cls(
            codes,
            scale,
            state.get("bias"),
            scheme=scheme,
            global_scale=state.get("weight_global_scale"),
            zero_point=state.get("weight_zero_point"),
        )

        if "weight_shape" in state and state["weight_shape"].tolist() != list(packed.shape):
            raise ValueError(
                f"weight_shape is {state['weight_shape'].tolist()}, and as {packed.scheme.name} the codes have "
                f"{list(packed.shape)}: give another scheme="
            )
        return packed

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: str = "tensor",
        format: str | None = None,
        scale_format: str | None = None,
        group_size: str | int | None = None,
    ) -> PackedLinear:
        """Quantize one Linear on its device, with scales of its own even where engines would fuse it with others.

        Args:
            linear: a layer with a weight [out, in] of any floating dtype. It is not changed.
            scheme: name of the scheme, as for `openquant compress --scheme`.
            format: "fp8" or "compressed-tensors"; the scheme's default if None.
            scale_format: "float" or "ue8m0" (powers of two); the scheme's default if None.
            group_size: inputs that share a scale, 32, 64, 128 or "channel"; if None, 128, or 32 where 128 does not
                divide the inputs.

        Returns:
            The quantized layer, which shares the bias with `linear`. Its codes are those of `openquant compress` for a
            layer that is not fused.

        Raises:
            UsageError: there is no such scheme, or it has no such format, scale format or group size.
            ValueError: the weight has NaN or infinity or is too large for the scheme, or its shape does not divide into
                the scheme's groups, or the layer cannot hold the scheme.
        """
        weight = linear.weight.detach()
        shape = (weight.shape[0], weight.shape[1])

        size = None if group_size is None else str(group_size)
        chosen = find_scheme(scheme, format, scale_format, group_size=size)
        smaller = chosen.fallback
        if size is None and smaller is not None and smaller.name == scheme and chosen.format.shape_error(shape):
            chosen = smaller

        fmt = chosen.format
        if problem := fmt.shape_error(shape):
            raise ValueError(problem)

        absmax = reference.group_absmax(weight, fmt.group)
        if not torch.isfinite(absmax).all():
            raise ValueError("the weight holds NaN or infinity")
        if absmax.max() > chosen.largest:
            raise ValueError(f"the weight reaches {absmax.max():g}, engines load at most {chosen.largest:g}")

        global_scale = None
        if fmt.global_scale is not None:
            largest = absmax.amax().reshape(1).cpu().numpy()
            global_scale = torch.from_numpy(choose_shared_scale(fmt, largest)).to(weight.device)

        # On the CPU whatever the device, so that all devices choose the same scales.
        bits = weight.float().cpu().contiguous().numpy().view(np.uint32)
        scale = torch.from_numpy(choose_scales(chosen, bits, "F32", absmax.cpu().numpy()).scale).to(weight.device)
        codes = reference.encode(weight, scale, fmt)
        stored = reference.stored_scale(scale, fmt, shape, global_scale)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(codes, stored, bias, chosen.method, chosen.name, global_scale)

    @property
    def scale(self) -> Tensor:
        """The stored scales, whichever name the scheme gives them: float32 [out, 1] for one scale per row."""
        return self.get_buffer(self.scheme.format.scale.name)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize the weight. Returns [out, in] of `dtype`, computed in float32 and rounded once."""
        fmt, scale = self.scheme.format, self.scale
        if fmt.global_scale is not None:
            scale = scale.float() / self.get_buffer(fmt.global_scale.name)
        zeros = None
        if fmt.zero_point is not None:
            zeros = reference.read_zero_points(self.get_buffer(fmt.zero_point), fmt.number)
        return reference.decode(self.get_buffer(fmt.codes), scale, fmt, zeros).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., in] times the dequantized weight, plus the bias. Returns [..., out] of x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def extra_repr(self) -> str:
        """Return what print() shows of the layer."""
        out_features, in_features = self.shape
        return f"in_features={in_features}, out_features={out_features}, scheme={self.scheme.name}"


def _schemes_of_codes(weight: Tensor, name: str | None, has_zero_point: bool) -> list[Scheme]:
    """Find the schemes that store such codes. `name`: the only one that may be found; None for any.

    Raises:
        ValueError: there is none.
    """
    named = [variant for variant in (*VARIANTS, *ASYMMETRIC) if name in (None, variant.name)]
    if not named:
        raise ValueError(f"{name} is not a scheme")

    with_zeros = [variant for variant in named if variant.asymmetric == has_zero_point]
    if not with_zeros:
        raise ValueError(f"scheme {name} {'has no' if has_zero_point else 'needs a'} zero_point")

    schemes = [variant for variant in with_zeros if TORCH_DTYPES[variant.format.number.dtype] == weight.dtype]
    if not schemes or weight.ndim != 2:
        dtypes = dict.fromkeys(_dtype_name(TORCH_DTYPES[variant.format.number.dtype]) for variant in with_zeros)
        wanted = " or ".join([*dtypes][::-1])
        of_scheme = f" of {name}" if name else ""
        raise ValueError(f"weight must be codes{of_scheme}: {wanted} matrix, not {_describe(weight)}")
    return schemes


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}"

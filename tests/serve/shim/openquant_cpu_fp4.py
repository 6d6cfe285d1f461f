"""A vLLM plugin with kernels for FP4 weights, for which vLLM's CPU build has none.

With this directory on PYTHONPATH, vLLM finds it by its entry point. Plain torch multiplies by the weights that codes and
scales stand for, activations as they are or rounded by vLLM's own emulation: names, shapes, the order in bytes and all
scales are tested, no kernel of a GPU is. What joined layers make of their global scales is vLLM's own doing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

# OCP Microscaling Formats 1.0, 5.3.3, by code.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def register() -> None:
    """Add the kernels; a second call changes nothing."""
    import vllm.model_executor.kernels.linear as linear
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as nvfp4
    from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    if not current_platform.is_cpu() or PlatformEnum.CPU in linear._POSSIBLE_MXFP4_KERNELS:
        return

    class _Supported:
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            del compute_capability
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            del config
            return True, None

        def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.decoded, bias)

    class MxKernel(_Supported, MxFp4LinearKernel):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scale = torch.exp2(layer.weight_scale.data.float() - 127)
            layer.decoded = decoded(layer.weight.data, scale, layer.params_dtype)

    class NvKernel(_Supported, NvFp4LinearKernel):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scale = layer.weight_scale.data.float() * layer.weight_global_scale.data
            layer.decoded = decoded(layer.weight.data, scale, layer.params_dtype)

    class RoundingKernel(NvKernel):
        def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            tokens = ref_nvfp4_quant_dequant(x.flatten(0, -2), layer.input_global_scale_inv, 16)
            return super().apply_weights(layer, tokens.reshape(x.shape), bias)

    linear._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CPU] = [MxKernel]

    def found(use_a16: bool) -> NvFp4LinearKernel:
        return (NvKernel if use_a16 else RoundingKernel)(linear.NvFp4LinearLayerConfig())

    # It knows by name which of its kernels leave activations as they are.
    nvfp4.init_nvfp4_linear_kernel = found


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [out, in] of codes [out, in / 2], the first in the low half of a byte, and scales [out, in / group]."""
    values = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    weights = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], dim=-1).flatten(1)
    return (weights.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1).to(dtype)

"""A vLLM plugin that serves experts in words or FP4, for which vLLM's CPU build has no kernel: of INT4 with AMX
alone, where it rounds activations to INT8 as well.

With this directory on PYTHONPATH, vLLM finds it by its entry point. vLLM's own methods make the parameters and fill
them; what these stand for then goes to its own kernel for unquantized experts, on every CPU: names, shapes, the order in
words and bytes and all scales are tested, no kernel of a GPU is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openquant_cpu_fp4 as fp4
import openquant_cpu_int8 as words
import torch
from torch import Tensor


def register() -> None:
    """Put the kernel for unquantized experts in place; a second call changes nothing."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_mxfp4 as mxfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or wna16.select_wna16_moe_backend.__module__ == __name__:
        return

    # What is chosen is not used, but for what follows from its name.
    def select_words(**options: Any) -> tuple[WNA16MoEBackend, None]:
        return WNA16MoEBackend.EMULATION, None

    def select_nvfp4(activation_key: Any, **options: Any) -> tuple[NvFp4MoeBackend, None]:
        if activation_key is not None:
            raise NotImplementedError("activations in FP4")
        return NvFp4MoeBackend.EMULATION, None

    create = nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod.create_weights

    def create_weights(self: Any, layer: Any, *sizes: Any, **more: Any) -> None:
        create(self, layer, *sizes, **more)
        # It makes room for scales of activations also where these stay as they are, and misses them in files then.
        del layer.w13_input_global_scale, layer.w2_input_global_scale

    nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod.create_weights = create_weights
    wna16.select_wna16_moe_backend = select_words
    nvfp4.select_nvfp4_moe_backend = select_nvfp4
    _decode_after_loading(wna16.CompressedTensorsWNA16MoEMethod, of_words)
    _decode_after_loading(nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod, of_nvfp4)
    _decode_after_loading(mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod, of_mxfp4)


def _decode_after_loading(method: Any, decode: Callable[[Any, Any, str], Tensor]) -> None:
    """Let a method of vLLM's end as that of unquantized experts."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        for part in ("w13", "w2"):
            weight = decode(self, layer, part).to(layer.moe_config.in_dtype)
            layer.register_parameter(f"{part}_weight", torch.nn.Parameter(weight, requires_grad=False))
            delattr(layer, f"{part}_weight_packed")
        plain = UnquantizedFusedMoEMethod(self.moe)
        plain.process_weights_after_loading(layer)
        self.moe_kernel, self.moe_quant_config = plain.moe_kernel, plain.moe_quant_config

    method.process_weights_after_loading = process_weights_after_loading
    method.apply = UnquantizedFusedMoEMethod.forward_native
    method.apply_monolithic = UnquantizedFusedMoEMethod.apply_monolithic


def of_words(method: Any, layer: Any, part: str) -> Tensor:
    """Weights [experts, out, in] of `w13` or `w2`, here of words that hold several."""
    packed, scales = getattr(layer, f"{part}_weight_packed"), getattr(layer, f"{part}_weight_scale")
    zeros = [None] * len(packed) if method.symmetric else getattr(layer, f"{part}_weight_zero_point")
    each = zip(packed, scales, zeros, strict=True)
    return torch.stack([words.decoded(codes, scale, method.num_bits, zero) for codes, scale, zero in each])


def of_nvfp4(method: Any, layer: Any, part: str) -> Tensor:
    """The same of FP4, with scales and one for each expert by which these are divided; vLLM takes that of gates for both."""
    over = getattr(layer, f"{part}_weight_global_scale").reshape(layer.num_experts, -1)[:, 0]
    scales = getattr(layer, f"{part}_weight_scale").float() / over[:, None, None]
    return _of_fp4(getattr(layer, f"{part}_weight_packed"), scales)


def of_mxfp4(method: Any, layer: Any, part: str) -> Tensor:
    """The same of FP4 with exponents as scales."""
    scales = torch.exp2(getattr(layer, f"{part}_weight_scale").float() - 127)
    return _of_fp4(getattr(layer, f"{part}_weight_packed"), scales)


def _of_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.stack([fp4.decoded(*each, torch.float32) for each in zip(codes, scales, strict=True)])

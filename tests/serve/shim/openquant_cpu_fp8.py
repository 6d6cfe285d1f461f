"""A vLLM plugin that lets the CPU engine serve FP8 weights with one scale per tensor, and any without AMX.

vLLM's CPU build has kernels for such layers, but not `scaled_fp8_quant`, which loading them calls
(its CPU extension registers the operators without a body), and its expert kernel takes 128x128 blocks only.
With this directory on PYTHONPATH, vLLM finds the plugin by its entry point and calls `register` in every engine
process. The 128x128 block scheme needs none of it on a CPU with AMX, but for layers with a bias; on others its kernels
do not exist, and plain torch takes their place here, with activations in bfloat16 as there: names, shapes, scales and what vLLM does with them
are then tested, and its kernels are not. Types of vLLM are left out where they say nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

LARGEST = 448.0


def register() -> None:
    """Put both replacements in place; a second call changes nothing."""
    import vllm._custom_ops
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and vllm._custom_ops.scaled_fp8_quant is not scaled_fp8_quant:
        vllm._custom_ops.scaled_fp8_quant = scaled_fp8_quant
        _spread_expert_scales()
        if torch.cpu._is_amx_tile_supported():
            _widen_biases()
        else:
            _do_without_amx()


def scaled_fp8_quant(input: Tensor, scale: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes of a matrix at one given scale, the only way that loading asks for.

    The arithmetic is that of csrc `scaled_fp8_conversion<is_scale_inverted=true>`: multiply by the reciprocal in
    float32, clamp, round to nearest even.
    """
    output = options.pop("output", None)
    if scale is None or scale.numel() != 1 or any(value is not None for value in options.values()):
        raise NotImplementedError(f"scaled_fp8_quant with scale {scale} and {options}")
    quotient = input.float() * scale.float().reciprocal()
    codes = quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes if output is None else output.copy_(codes)), scale


def _spread_expert_scales() -> None:
    """Give the block kernel each expert's one scale as a grid of equal ones, after vLLM's own requantization."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    select, setup = fp8.select_fp8_moe_backend, fp8.Fp8MoEMethod._setup_kernel

    def select_fp8_moe_backend(config: Any, weight_key: Any, activation_key: Any, **options: Any) -> Any:
        backend, experts = select(config=config, weight_key=weight_key, activation_key=activation_key, **options)
        if experts is None:
            return select(config=config, weight_key=kFp8Static128BlockSym, activation_key=kFp8Dynamic128Sym, **options)
        return backend, experts

    def setup_kernel(
        self: Any, layer: Any, w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor, *inputs: Any
    ) -> Any:
        if not self.block_quant and self.fp8_backend == Fp8MoeBackend.CPU:
            w13_scale, w2_scale = _grid(w13_scale, w13), _grid(w2_scale, w2)
            self.moe_block_shape = [128, 128]
            # The kernel leaves activations in bfloat16.
            layer.w13_input_scale = layer.w2_input_scale = None
            inputs = (None, None)
        return setup(self, layer, w13, w2, w13_scale, w2_scale, *inputs)

    fp8.select_fp8_moe_backend = select_fp8_moe_backend
    fp8.Fp8MoEMethod._setup_kernel = setup_kernel


def _grid(scale: Tensor, weight: Tensor) -> Tensor:
    rows, cols = (-(-size // 128) for size in weight.shape[1:])
    return scale.reshape(-1, 1, 1).expand(-1, rows, cols).float().contiguous()


def _widen_biases() -> None:
    """AMX's kernel takes a bias in float32 only, and vLLM gives it the model's."""
    multiply = torch.ops._C.fp8_scaled_mm_cpu

    def scaled_mm(
        input: Tensor, weight: Tensor, scale: Tensor, block: list[int], bias: Tensor | None, *more: Any
    ) -> Any:
        return multiply(input, weight, scale, block, None if bias is None else bias.float(), *more)

    torch.ops._C.fp8_scaled_mm_cpu = scaled_mm


def _do_without_amx() -> None:
    import vllm._custom_ops
    import vllm.model_executor.kernels.linear.scaled_mm.cpu
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    linear_kernels = vllm.model_executor.kernels.linear.scaled_mm.cpu.__file__

    def is_amx_tile_supported() -> bool:
        asking = sys._getframe(1).f_code
        return asking.co_filename == linear_kernels or asking.co_qualname.startswith("CPUExpertsFp8.")

    torch.cpu._is_amx_tile_supported = is_amx_tile_supported
    # Without AVX-512 the operator is not even declared, which was looked at when that module was imported.
    vllm._custom_ops._supports_cpu_fp8_w8a16 = True
    torch.ops._C.convert_weight_packed = Tensor.clone
    torch.ops._C.fp8_scaled_mm_cpu = _scaled_mm
    cpu_moe.fused_experts_cpu = _fused_experts


def _scaled_mm(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    block: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    packed: bool,
) -> Tensor:
    bias = None if bias is None else bias.to(input.dtype)
    return torch.nn.functional.linear(input, _decoded(weight, scale, block), bias).to(dtype)


def _fused_experts(
    out: Tensor,
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    chosen_weights: Tensor,
    chosen: Tensor,
    method: Any,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_zero: None,
    w2_zero: None,
    block: list[int],
    *options: Any,
) -> None:
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        share = (chosen_weights * (chosen == expert)).sum(1, keepdim=True)
        rows = (chosen == expert).any(1).nonzero()[:, 0]
        if rows.numel():
            both = torch.nn.functional.linear(hidden[rows], _decoded(w13[expert], w13_scale[expert], block))
            gate, up = both.float().chunk(2, -1)
            inner = (torch.nn.functional.silu(gate) * up).to(hidden.dtype)
            down = torch.nn.functional.linear(inner, _decoded(w2[expert], w2_scale[expert], block))
            total[rows] += down.float() * share[rows]
    out.copy_(total)


def _decoded(weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
    rows, cols = weight.shape
    grid = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return (weight.float() * grid).to(torch.bfloat16)

"""Stand-ins for what SGLang imports and a CPU does not have: import this before it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import torch

# Packages with kernels, and what only serving needs.
KERNELS = (
    *("sgl_kernel", "flashinfer", "deep_gemm", "sgl_deep_gemm", "deep_ep", "cutlass", "cuda", "tilelang", "quack"),
    *("humming", "mooncake", "torch_memory_saver", "timm", "decord"),
)


class StandIn(type):
    """A class all of whose attributes are itself: what is imported, subclassed or used as a decorator's argument."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=StandIn):
    """What stands in for everything in these packages."""

    def __init__(self, *arguments: object, **options: object) -> None:
        del arguments, options

    def __call__(self, *arguments: object, **options: object) -> Any:
        return Nothing(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class StandInModule(types.ModuleType):
    """A module that has whatever it is asked for; SGLang asks for the version of its kernels."""

    __version__ = "0.4.10"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of KERNELS, which are not there."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


# Operators of compiled halves that are looked up as modules are imported or built; none is called.
OPERATORS = {
    "torchvision": ("nms", "qnms"),
    "sgl_kernel": (
        "apply_multidimensional_rope_cpu", "apply_rotary_pos_emb_cpu", "causal_conv1d_weight_pack",
        "conv3d_embed_cpu", "conv3d_embed_weight_pack", "decode_attention_cpu", "extend_attention_cpu",
        "flash_attn_varlen_func", "fused_dual_residual_rmsnorm_cpu", "fused_gdn_gating_cpu", "fused_input_proj_cpu",
        "fused_moe_router_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_qkvzba_split_reshape_cat_cpu",
        "fused_sigmoid_gating_delta_rule_update_cpu", "fused_sigmoid_mul_cpu", "rmsnorm_cpu",
    ),
}  # fmt: skip
LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in OPERATORS}
for library, operators in OPERATORS.items():
    for operator in operators:
        LIBRARIES[library].define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
# A GPU of this kind computes with FP8.
torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
sys.meta_path.append(KernelFinder())
warnings.simplefilter("ignore")

"""Runs GPTQ's kernel by Triton's interpreter, or compiles it for a GPU. The engine's interpreter runs this."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from openquant.calibration.gptq import find_error_propagation, round_columns
from openquant.formats import kernels, on_gpu
from openquant.formats.schemes import find_scheme

SCHEMES = {
    "int4": find_scheme("int4", group_size="64"),
    "int4 with zero points": find_scheme("int4", group_size="64", asymmetric=True),
    "nvfp4": find_scheme("nvfp4"),
    "channel": find_scheme("channel"),
}


def interpret() -> None:
    """Print whether codes are those of numpy, for each scheme. Rows are no multiple of those that a program has."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 128, generator=random)
    weight = torch.randn(300, 128, generator=random).bfloat16()
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    propagation = find_error_propagation(inputs.T @ inputs)

    def round_panel(arrays: kernels.ColumnRounding, *rest: object) -> None:
        on_gpu.round_panel(
            kernels.ColumnRounding(*(None if part is None else torch.from_numpy(part) for part in arrays)), *rest
        )

    for name, scheme in SCHEMES.items():
        absmax = kernels.absmax(bits, "BF16", scheme.format.group)
        shared = None
        if scheme.format.global_scale is not None:
            shared = kernels.choose_shared_scale(scheme.format, absmax.max(keepdims=True))
        scale, zero_point = kernels.choose_scales(scheme, bits, "BF16", absmax, shared)
        scales, zeros = torch.from_numpy(scale), None if zero_point is None else torch.from_numpy(zero_point)

        expected, found = (
            round_columns(weight.float(), scales, propagation, scheme.format, zeros, loops)
            for loops in (kernels, SimpleNamespace(round_panel=round_panel))
        )
        print(name, torch.equal(expected, found))


def compile_kernel() -> None:
    """Compile the kernel for a Hopper GPU, with and without zero points."""
    of_type = dict.fromkeys(("columns", "errors", "coefficients", "scales", "zeros"), "*fp32")
    of_type |= {"groups": "*i64", "rows": "i32", "strides": ("i32", "i32"), "low": "i32", "high": "i32"}
    of_type |= {"limits": ("fp32",) * 4, "count": "constexpr"}
    for zeros, constants in (("*fp32", {}), ("constexpr", {"zeros": None})):
        source = ASTSource(on_gpu._round_panel, of_type | {"zeros": zeros}, {"count": 128} | constants)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(zeros, kernel.asm["cubin"][:4] == b"\x7fELF")


if os.environ["TRITON_INTERPRET"] == "1":
    interpret()
else:
    compile_kernel()

"""Throughput of the CPU kernels on one thread, numpy's and compiled, beside torch doing the same to the whole tensor.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --rows 1024 --scheme int4 --scheme int3
    python benchmarks/kernels.py --gptq

GB/s of source, absmax and codes both included, in seconds of this thread, best of five by turns, 64 MB of Gaussian
weights (with `--rows 16384`).

With `--gptq`, milliseconds of GPTQ's own work on weights of several shapes, in INT4 in groups of 64: Cholesky
decompositions in float64 and float32, `find_error_propagation`, one float32 product of as many operations as the
rounding has (the floor), and `round_columns` with each of its loops; and the squared error of the outputs, as a share
of that with coefficients from float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from openquant.calibration.gptq import ErrorPropagation, find_error_propagation, round_columns
from openquant.formats import compiled, kernels
from openquant.formats.format import Format
from openquant.formats.kernels import Loops, choose_scales, choose_shared_scale
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import SCHEMES, Scheme, find_scheme

LOOPS: tuple[Loops, ...] = (kernels, compiled)
# Of SmolLM2-135M and Qwen3-0.6B, and an expert's.
GPTQ_SHAPES = ((192, 576), (576, 576), (1536, 576), (576, 1536), (3072, 1024), (1024, 3072), (768, 2048))
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def best(calls: list[Callable[[], object]]) -> list[float]:
    """Seconds of the fastest of five turns of each call, after one that compiles what it needs."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(6):
        for call, taken in zip(calls, seconds, strict=True):
            begin = time.thread_time()
            call()
            taken.append(time.thread_time() - begin)
    return [min(taken[1:]) for taken in seconds]


def ours(loops: Loops, bits: np.ndarray, dtype: str, scheme: Scheme, out: np.ndarray) -> None:
    """What a conversion does to a piece, over all of them."""
    form = scheme.format
    rows = max(128, (4 << 20) // (bits.shape[1] * bits.itemsize) // 128 * 128)
    pieces = [slice(low, low + rows) for low in range(0, bits.shape[0], rows)]
    global_scale = None
    if form.shares_scale:
        absmax = np.stack([loops.absmax(bits[piece], dtype, (None, None)) for piece in pieces]).max(axis=0)
        global_scale = None if form.shared else choose_shared_scale(form, absmax)
    for piece in pieces:
        if not form.shared:
            absmax = loops.absmax(bits[piece], dtype, form.group)
        scale, zero = choose_scales(scheme, bits[piece], dtype, absmax, global_scale, loops=loops)
        loops.encode_stored(bits[piece], dtype, scale, form, out[piece], zero)


def theirs(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """The reference, eager."""
    return encode(weight, group_scale(group_absmax(weight, form.group), form), form)


def gptq(shapes: tuple[tuple[int, int], ...]) -> None:
    """Print milliseconds of GPTQ's parts by shape."""
    print(
        "| weight | Cholesky float64 | float32 | find_error_propagation | product | torch | numpy | compiled | loss |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    form = find_scheme("int4", group_size="64").format
    for rows, cols in shapes:
        inputs = torch.randn(2 * cols, cols) * torch.rand(cols).add(0.2)
        hessian = inputs.T @ inputs
        damped = hessian + torch.eye(cols)
        weight = torch.randn(rows, cols) * 0.02
        scale = group_scale(group_absmax(weight, form.group), form)
        propagation = find_error_propagation(hessian)
        exact = find_error_propagation(hessian.double())
        exact = ErrorPropagation(exact.order, exact.coefficients.float())
        losses = []
        for coefficients in (propagation, exact):
            quotients = round_columns(weight, scale, coefficients, form, None, compiled)
            error = (quotients * scale.repeat_interleave(64, 1) - weight).double()
            losses.append(float((error @ hessian.double() * error).sum()))

        # Each column's error goes to half of the columns.
        half = torch.randn(cols // 2, cols)
        rounds = [partial(round_columns, weight, scale, propagation, form, None, loops) for loops in (None, *LOOPS)]
        seconds = best(
            [
                partial(torch.linalg.cholesky, damped.double()),
                partial(torch.linalg.cholesky, damped),
                partial(find_error_propagation, hessian),
                partial(torch.matmul, half, weight.T),
                *rounds,
            ]
        )
        times = " | ".join(f"{taken * 1e3:.1f}" for taken in seconds)
        print(f"| {rows} x {cols} | {times} | {losses[0] / losses[1]:.5f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="of the weights")
    parser.add_argument("--scheme", action="append", default=[], help="one to measure, in BF16 only; default: all")
    parser.add_argument("--gptq", action="store_true", help="measure GPTQ instead")
    options = parser.parse_args()
    rows = options.rows
    torch.set_num_threads(1)
    if options.gptq:
        gptq(GPTQ_SHAPES)
        return
    print("| source | scheme | numpy | compiled | torch eager |\n|---|---|---|---|---|")
    unsearched = {
        f"{name} --no-search": scheme.unsearched for name, scheme in SCHEMES.items() if scheme.searches_scales
    }
    schemes = {name: scheme for name, scheme in {**SCHEMES, **unsearched}.items() if name in options.scheme}
    schemes = schemes or {**SCHEMES, **unsearched}
    for dtype, kind in list(DTYPES.items())[: 1 if options.scheme else None]:
        weight = (torch.randn(rows, 2048 if dtype != "F32" else 1024) * 0.02).to(kind)
        bits = weight.view(torch.int32 if dtype == "F32" else torch.int16).numpy().view(kernels.BITS_TYPE[dtype])
        for name, scheme in schemes.items():
            out = np.empty((len(bits), scheme.format.number.nbytes(bits.shape[1])), np.uint8)
            calls: list[Callable[[], object]] = [partial(ours, loops, bits, dtype, scheme, out) for loops in LOOPS]
            seconds = best([*calls, partial(theirs, weight, scheme.format)])
            rates = [f"{bits.nbytes / taken / 1e9:.2f}" for taken in seconds]
            print(f"| {dtype} | {name} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()

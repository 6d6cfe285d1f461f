"""Throughput of the CPU kernels on one thread, numpy's and compiled, beside torch doing the same to the whole tensor.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --rows 1024 --scheme int4 --scheme int3

GB/s of source, absmax and codes both included, in seconds of this thread, best of five by turns, 64 MB of Gaussian
weights (with `--rows 16384`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from openquant.formats import compiled, kernels
from openquant.formats.format import Format
from openquant.formats.kernels import Loops, choose_scales, choose_shared_scale
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import SCHEMES, Scheme

LOOPS: tuple[Loops, ...] = (kernels, compiled)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def best(calls: list[Callable[[], object]], nbytes: int) -> list[str]:
    """GB/s of the fastest of five turns of each call, after one that compiles what it needs."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(6):
        for call, taken in zip(calls, seconds, strict=True):
            begin = time.thread_time()
            call()
            taken.append(time.thread_time() - begin)
    return [f"{nbytes / min(taken[1:]) / 1e9:.2f}" for taken in seconds]


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
        loops.encode_stored(bits[piece], dtype, scale, form.group, out[piece], form.number, global_scale, zero)


def theirs(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """The reference, eager."""
    return encode(weight, group_scale(group_absmax(weight, form.group), form), form)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="of the weights")
    parser.add_argument("--scheme", action="append", default=[], help="one to measure, in BF16 only; default: all")
    options = parser.parse_args()
    rows = options.rows
    torch.set_num_threads(1)
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
            found = best([*calls, partial(theirs, weight, scheme.format)], bits.nbytes)
            print(f"| {dtype} | {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()

"""Throughput of the CPU kernels on one thread, beside torch doing the same to the whole tensor at once.

    python benchmarks/kernels.py

GB/s of source, absmax and codes both included, best of five, 64 MB of Gaussian weights (with `--rows 16384`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from openquant.formats import kernels
from openquant.formats.format import Format
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import SCHEMES, Scheme
from openquant.formats.search import searched

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def best(do: Callable[[], object], nbytes: int) -> float:
    """GB/s of the fastest of five calls."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds) / 1e9


def ours(bits: np.ndarray, dtype: str, scheme: Scheme, out: np.ndarray) -> None:
    """What a conversion does to a piece, over all of them."""
    form = scheme.format
    rows = max(128, (4 << 20) // (bits.shape[1] * bits.itemsize) // 128 * 128)
    pieces = [slice(low, low + rows) for low in range(0, bits.shape[0], rows)]
    divisor = None
    if form.tied:
        amax = np.stack([kernels.absmax(bits[piece], dtype, (None, None)) for piece in pieces]).max(axis=0)
        divisor = None if form.shared else form.divisor(amax)
    for piece in pieces:
        if not form.shared:
            amax = kernels.absmax(bits[piece], dtype, form.group)
        scale = form.scales(amax, divisor)
        if scheme.ratios:
            scale = searched(bits[piece], dtype, amax, form, scheme.ratios)
        kernels.encode_stored(bits[piece], dtype, scale, form.group, out[piece], form.number, divisor)


def theirs(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """The reference, eager."""
    return encode(weight, group_scale(group_absmax(weight, form.group), form), form)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="of the weights")
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    print("| source | scheme | openquant | torch eager |\n|---|---|---|---|")
    for dtype, kind in DTYPES.items():
        weight = (torch.randn(rows, 2048 if dtype != "F32" else 1024) * 0.02).to(kind)
        bits = weight.view(torch.int32 if dtype == "F32" else torch.int16).numpy().view(kernels.BITS_TYPE[dtype])
        for name, scheme in {**SCHEMES, "int4 --no-search": SCHEMES["int4"].unsearched}.items():
            out = np.empty((len(bits), bits.shape[1] // scheme.format.number.per_byte), np.uint8)
            mine = best(lambda b=bits, d=dtype, s=scheme, o=out: ours(b, d, s, o), bits.nbytes)
            reference = best(lambda w=weight, f=scheme.format: theirs(w, f), bits.nbytes)
            print(f"| {dtype} | {name} | {mine:.2f} | {reference:.2f} |")


if __name__ == "__main__":
    main()

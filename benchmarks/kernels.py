"""Throughput of the CPU kernels on one thread, beside torch doing the same to the whole tensor at once.

    python benchmarks/kernels.py

GB/s of source, absmax and codes both included, best of five, 64 MB of Gaussian weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from openquant.formats import kernels
from openquant.formats.schemes import SCHEMES, Scheme
from openquant.packed import encode, group_absmax, group_scale

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
    """What convert.py does to a piece, over all of them."""
    rows = max(128, (4 << 20) // (bits.shape[1] * bits.itemsize) // 128 * 128)
    pieces = [slice(low, low + rows) for low in range(0, bits.shape[0], rows)]
    if scheme.shared:
        amax = np.stack([kernels.absmax(bits[piece], dtype, scheme.group) for piece in pieces]).max(axis=0)
    for piece in pieces:
        if not scheme.shared:
            amax = kernels.absmax(bits[piece], dtype, scheme.group)
        kernels.encode(bits[piece], dtype, scheme.scale(amax), scheme.group, out[piece])


def theirs(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The reference, eager."""
    return encode(weight, group_scale(group_absmax(weight, scheme.group), scheme), scheme.group)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| source | scheme | openquant | torch eager |\n|---|---|---|---|")
    for dtype, kind in DTYPES.items():
        weight = (torch.randn(16384, 2048 if dtype != "F32" else 1024) * 0.02).to(kind)
        bits = weight.view(torch.int32 if dtype == "F32" else torch.int16).numpy().view(kernels.BITS_TYPE[dtype])
        out = np.empty(bits.shape, np.uint8)
        for scheme in SCHEMES.values():
            mine = best(lambda b=bits, d=dtype, s=scheme, o=out: ours(b, d, s, o), bits.nbytes)
            reference = best(lambda w=weight, s=scheme: theirs(w, s), bits.nbytes)
            print(f"| {dtype} | {scheme.name} | {mine:.2f} | {reference:.2f} |")


if __name__ == "__main__":
    main()

"""Core hours of `compress --scheme int4 --gptq` (128 texts of 512 tokens) for large models, from rates of this machine.

    python benchmarks/hours.py

Operations follow from the shapes: each product of the texts with a weight, the Hessians of inputs, their Cholesky
decompositions, and the rounding. Rates are those of one thread, in processor seconds, on weights of 4096 columns.
"Before" is the way of an earlier version, with rates of the same run: a Cholesky decomposition in float64, torch's
loops over columns, and all texts through a layer again for each 4 GB of Hessians of its experts. Attention itself,
reading and writing are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from openquant.calibration.gptq import find_error_propagation, round_columns
from openquant.formats import compiled
from openquant.formats.reference import group_absmax, group_scale
from openquant.formats.schemes import find_scheme

TOKENS = 128 * 512
# Bytes of Hessians and rounded experts that the earlier version kept.
KEPT = 4e9


class Model(NamedTuple):
    """Shapes of a decoder layer.

    Attributes:
        layers: how many there are.
        dense: for each input of Linears that all tokens take, its width and the rows of all Linears that read it.
        experts: how many there are.
        chosen: how many a token takes.
        sides: hidden size, and that of an expert.
    """

    layers: int
    dense: tuple[tuple[int, int], ...]
    experts: int = 0
    chosen: int = 0
    sides: tuple[int, int] = (0, 0)


MODELS = {
    "Qwen3-8B": Model(36, ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))),
    "Llama-3.3-70B": Model(80, ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))),
    "Qwen3-235B-A22B": Model(94, ((4096, 9216), (8192, 4096)), 128, 8, (4096, 1536)),
    "DeepSeek-V3": Model(
        58,
        ((7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (7168, 4096), (2048, 7168)),
        256,
        8,
        (7168, 2048),
    ),
}


class Rates(NamedTuple):
    """Operations a processor second; multiplications and additions count alike."""

    forward: float
    hessian: float
    cholesky: float
    rounding: float


def seconds_of(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest of three calls, after one that compiles what it needs."""
    taken = []
    for _ in range(4):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return min(taken[1:])


def measure() -> tuple[Rates, Rates]:
    """The rates of the earlier version, and today's."""
    rows, cols = 1024, 4096
    weight = torch.randn(rows, cols) * 0.02
    inputs = torch.randn(512, cols)
    hessian = torch.zeros(cols, cols)
    forward = 2 * 512 * rows * cols / seconds_of(lambda: inputs @ weight.T)
    products = 2 * 512 * cols * cols / seconds_of(lambda: hessian.addmm_(inputs.T, inputs))

    many = torch.randn(2 * cols, cols)
    hessian = many.T @ many
    fmt = find_scheme("int4", group_size="64").format
    scale = group_scale(group_absmax(weight, fmt.group), fmt)
    propagation = find_error_propagation(hessian)
    rates = []
    for dtype, loops in ((torch.float64, None), (torch.float32, compiled)):
        given = hessian.to(dtype)
        cholesky = cols**3 / 3 / seconds_of(partial(find_error_propagation, given))
        rounding = rows * cols**2 / seconds_of(partial(round_columns, weight, scale, propagation, fmt, None, loops))
        rates.append(Rates(forward, products, cholesky, rounding))
    return rates[0], rates[1]


def hours(model: Model, rates: Rates, again: bool) -> float:
    """Core hours of a model; `again`: texts run through a layer once for each part of its experts' Hessians."""
    hidden, narrow = model.sides
    forward: float = sum(2 * TOKENS * width * rows for width, rows in model.dense)
    products = sum(2 * TOKENS * width**2 for width, _ in model.dense)
    cholesky = sum(width**3 / 3 for width, _ in model.dense)
    rounding = sum(rows * width**2 for width, rows in model.dense)

    forward += 6 * TOKENS * model.chosen * hidden * narrow
    products += 2 * TOKENS * model.chosen * (hidden**2 + narrow**2)
    cholesky += model.experts * (hidden**3 + narrow**3) / 3
    rounding += model.experts * (2 * narrow * hidden**2 + hidden * narrow**2)
    if again:
        forward *= max(1, -(-model.experts * (4 * (hidden**2 + narrow**2) + 1.6 * hidden * narrow) // KEPT))

    seconds = forward / rates.forward + products / rates.hessian + cholesky / rates.cholesky + rounding / rates.rounding
    return model.layers * seconds / 3600


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    before, now = measure()
    print("| GPTQ of | core hours before | now |\n|---|---|---|")
    for name, model in MODELS.items():
        print(f"| {name} | {hours(model, before, True):.1f} | {hours(model, now, False):.1f} |")
    print("\n| billion operations a second | forward | Hessians | Cholesky | rounding |\n|---|---|---|---|---|")
    for name, rates in (("before", before), ("now", now)):
        print(f"| {name} | {' | '.join(f'{rate / 1e9:.1f}' for rate in rates)} |")


if __name__ == "__main__":
    main()

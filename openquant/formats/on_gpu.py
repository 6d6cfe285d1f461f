"""GPTQ's loop over columns as a kernel of Triton: a panel is one launch, where torch alone has a dozen for each column.

torch's builds for GPUs come with Triton. Its interpreter, which runs kernels on a CPU, gives the bits of kernels.py; a
GPU fuses products and sums, so that a few codes differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kernels import ColumnRounding
from .numbers import Number

# Rows that a program of the kernel has.
_ROWS = 128


def round_panel(weight: ColumnRounding, number: Number, low: int, high: int) -> None:
    """Round columns low to high, and add the error of each to the later ones of them.

    Args:
        weight: the columns, to which all errors of columns before `low` were propagated; all of it on the GPU.
        number: numeric format of the codes.
        low: the first column.
        high: the column after the last.
    """
    rows = weight.columns.shape[1]
    normal = number.normal or 256.0
    limits = -number.largest, 2 * number.span - number.largest, normal, 1.5 * 2**23 * number.smallest / normal
    # Triton launches on the current GPU.
    with torch.cuda.device_of(weight.columns):
        grid = (triton.cdiv(rows, _ROWS),)
        _round_panel[grid](*weight, rows, weight.coefficients.stride(), low, high, limits, count=_ROWS)


@triton.jit(do_not_specialize=["low", "high"])
def _round_panel(
    columns, errors, coefficients, groups, scales, zeros, rows, strides, low, high, limits, count: tl.constexpr
):
    least, most, normal, rounds = limits
    row = tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)
    inside = row < rows

    for column in range(low, high):
        value = tl.load(columns + column * rows + row, inside, 0.0)
        for earlier in range(low, column):
            error = tl.load(errors + earlier * rows + row, inside, 0.0)
            value += tl.load(coefficients + earlier * strides[0] + column * strides[1]) * error

        at = tl.load(groups + column) * rows + row
        scale = tl.load(scales + at, inside, 1.0)
        zero = 0.0
        if zeros is not None:
            zero = tl.load(zeros + at, inside, 0.0)

        # To the nearest code: adding a large number leaves only whole steps of the quotient.
        near = tl.minimum(tl.maximum(tl.div_rn(value, scale) + zero, least), most)
        binade = (near.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        beside = tl.maximum(binade, normal) * rounds
        code = (near + beside) - beside

        tl.store(columns + column * rows + row, code, inside)
        error = tl.load(errors + column * rows + row, inside, 0.0) - (code - zero) * scale
        tl.store(errors + column * rows + row, error, inside)
        # Later columns read these errors.
        tl.debug_barrier()

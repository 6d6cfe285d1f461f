"""GPTQ: rounds a weight column by column, and corrects later columns for the errors of earlier ones.

The squared error of a layer's outputs is the trace of E H E', where E [out, in] is the rounding error of the weight and
H = X'X is the layer's Hessian. With H = R R', R upper triangular, that trace is the sum of squares of E R. Column k of
E R is R[k, k] times E[k] plus what the errors of earlier columns add to it. So each term is smallest when the weight
plus these errors is rounded to the nearest code. Frantar et al. (arXiv 2210.17323) compute the same from the inverse of
H; this order of rounding needs no inverse (Chee et al., arXiv 2307.13304, theorem 6).

    propagation = find_error_propagation(hessian)
    quotients = round_columns(weight, scale, propagation, scheme.format)     # float32 [out, in]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ..formats import kernels
from ..formats.format import Format
from ..formats.kernels import ColumnRounding, Loops
from ..formats.reference import nearest

# Added to each element of the Hessian's diagonal, as a share of it; ten times as much after each failed Cholesky
# decomposition. The paper adds 1 % of the diagonal's mean, which a few very large inputs decide: on SmolLM2-135M that
# leaves 1.4 times the KL. Shares of 0.1, 0.2 and 0.4 gave 0.137, 0.133 and 0.135.
DAMPING, DAMPING_GROWTH = 0.2, 10.0
# Up to this many columns are a panel: each error goes to the next columns at once. Larger ranges are halved, and the
# errors of the first half go to the second in one matrix product. Panels of 32 or 64 take about as long.
PANEL = 16


@dataclass(frozen=True, eq=False)
class ErrorPropagation:
    """How rounding errors of earlier columns of a weight correct later ones.

    Attributes:
        order: int64 [in], the act-order: columns in the order in which they are rounded. Large inputs come first, since
            their errors weigh most and more columns are left to correct them.
        coefficients: [in, in], upper triangular, in act-order: row k has what column k's error adds to each later
            column.
    """

    order: Tensor
    coefficients: Tensor


def find_error_propagation(hessian: Tensor) -> ErrorPropagation:
    """Compute act-order and error coefficients from a Hessian, with damping.

    Inputs that are always zero neither give nor receive errors. Damping raises each element of the diagonal by a fifth,
    and more if rounding in the Hessian itself leaves it not positive definite.

    Args:
        hessian: X'X of the layer's inputs X [tokens, in], float32 or float64 [in, in], symmetric and finite.

    Returns:
        `order`, int64 [in], columns in the order in which they are rounded; and `coefficients` [in, in] of the
        Hessian's dtype, upper triangular in that order: row k has what the error of column k adds to each later column.
    """
    order = torch.argsort(hessian.diagonal().double(), descending=True, stable=True)

    # An upper triangular root in act-order is a lower triangular one, which torch computes, in reversed order.
    reversed_order = order.flip(0)
    damping = DAMPING
    failed = torch.ones((), dtype=torch.int32, device=hessian.device)
    while int(failed):
        root = hessian.index_select(0, reversed_order).index_select(1, reversed_order)
        damp(root, damping)
        # In place: the transpose has LAPACK's memory order, so that no copy is made. float32 suffices, since the error
        # does not depend on the sizes of inputs, and scaled to a diagonal of ones the condition is at most
        # 1 + in / damping. On SmolLM2-135M the loss is 0.9999 to 1.00002 of that with float64, in half the time or less
        # (benchmarks/kernels.py --gptq).
        torch.linalg.cholesky_ex(root.mT, out=(root.mT, failed))
        damping *= DAMPING_GROWTH

    lower = root.mT
    lower /= lower.diagonal().clone()
    return ErrorPropagation(order, lower.flip(0, 1))


def damp(hessian: Tensor, damping: float = DAMPING) -> None:
    """Raise each element of a Hessian's diagonal by a share of it, in place; inputs that are always zero get the mean.

    Args:
        hessian: float32 or float64 [in, in].
        damping: the share.
    """
    diagonal = hessian.diagonal()
    nonzero = diagonal > 0
    mean = float(diagonal[nonzero].double().mean()) if bool(nonzero.any()) else 1.0
    diagonal[~nonzero] = mean
    diagonal *= 1 + damping


def round_columns(
    weight: Tensor,
    scale: Tensor,
    propagation: ErrorPropagation,
    fmt: Format,
    zero_point: Tensor | None = None,
    loops: Loops | None = None,
) -> Tensor:
    """Run GPTQ on a weight with given scales.

    Args:
        weight: [out, in], float32 or float64 as the coefficients; the computation runs in that dtype.
        scale: float32 [out / group height, in / group width], rounded up; one row or column where a group has no limit.
            weight = (code value - zero_point) * scale: any global scale is applied already.
        propagation: act-order and coefficients, as `find_error_propagation` returns them for the layer's inputs.
        fmt: the format that the weight is stored in.
        zero_point: float32, shaped as `scale`; None for symmetric formats.
        loops: the module that rounds panels of a float32 weight on the CPU: formats.kernels (numpy) or formats.compiled
            (numba), with equal results. If None, and on a GPU, torch does; on a GPU with Triton formats.on_gpu.

    Returns:
        float32 [out, in], q = round(w / scale + zero_point) with errors propagated. `Number.encode` makes codes of it;
        (q - zero_point) * scale dequantizes it.
    """
    rows, cols = weight.shape
    order = propagation.order
    height = fmt.group[0] or rows

    def of_rows(values: Tensor) -> Tensor:
        """[rows / height, groups] -> [groups, rows]."""
        return values.to(weight.dtype).T.repeat_interleave(height, 1)[:, :rows].contiguous()

    # Transposed, so that each column is contiguous. Ordering them first would take three times as long.
    columns = weight.T.contiguous()[order]
    errors = columns.clone()
    groups = torch.div(order, fmt.group[1] or cols, rounding_mode="floor")
    zero_points = None if zero_point is None else of_rows(zero_point)
    tensors = ColumnRounding(columns, errors, propagation.coefficients, groups, of_rows(scale), zero_points)

    if weight.is_cuda and find_spec("triton") is not None:
        from ..formats import on_gpu

        round_panel = partial(on_gpu.round_panel, tensors, fmt.number)
    elif loops is None or weight.device.type != "cpu":
        round_panel = partial(
            kernels.round_panel, tensors, fmt.number, nearest=lambda quotients: nearest(quotients.float(), fmt.number)
        )
    else:
        arrays = ColumnRounding(*(part if part is None else part.numpy() for part in tensors))
        round_panel = partial(loops.round_panel, arrays, fmt.number)
    work_in_panels(columns, errors, propagation.coefficients, 0, cols, round_panel)

    # Errors are needed no more: their memory takes the columns in the weight's order.
    errors[order] = columns
    return errors.T.float().contiguous()


def work_in_panels(
    into: Tensor, errors: Tensor, coefficients: Tensor, low: int, high: int, work: Callable[[int, int], None]
) -> None:
    """Work on columns in panels, and add what the errors of each column are to all later ones.

    Args:
        into: [in, out], the columns.
        errors: [in, out], the errors of columns that are done.
        coefficients: [in, in]: row k has what column k's error adds to each later column.
        low: the first column.
        high: the column after the last.
        work: works on columns low to high, to which errors of all earlier columns were added, and adds their errors to
            each other.
    """
    if high - low <= PANEL:
        work(low, high)
        return

    middle = (low + high) // 2
    work_in_panels(into, errors, coefficients, low, middle, work)
    into[middle:high].addmm_(coefficients[low:middle, middle:high].T, errors[low:middle])
    work_in_panels(into, errors, coefficients, middle, high, work)

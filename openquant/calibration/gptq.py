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

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.format import Format
from ..formats.numbers import Number
from ..formats.reference import nearest

# Added to each element of the Hessian's diagonal, as a share of it; ten times as much after each failed Cholesky
# decomposition. The paper adds 1 % of the diagonal's mean, which a few very large inputs decide: on SmolLM2-135M that
# leaves 1.4 times the KL. Shares of 0.1, 0.2 and 0.4 gave 0.137, 0.133 and 0.135.
DAMPING, DAMPING_GROWTH = 0.2, 10.0
# Up to this many columns, each error goes to the next columns at once. Larger ranges are halved, and the errors of the
# first half go to the second in one matrix product.
MIN_RANGE = 16
# Rows of a matrix that are reversed at a time.
PANEL = 256


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


def find_error_propagation(hessian: Tensor, dtype: torch.dtype = torch.float32) -> ErrorPropagation:
    """Compute act-order and error coefficients from a Hessian, with damping.

    Inputs that are always zero neither give nor receive errors. Damping raises each element of the diagonal by a fifth,
    and more if rounding in the Hessian itself leaves it not positive definite.

    Args:
        hessian: X'X of the layer's inputs X [tokens, in], float32 or float64 [in, in], symmetric and finite.
        dtype: dtype of the coefficients.

    Returns:
        `order`, int64 [in], columns in the order in which they are rounded; and `coefficients` [in, in] of `dtype`,
        upper triangular in that order: row k has what the error of column k adds to each later column.
    """
    diagonal = hessian.diagonal().double()
    nonzero = diagonal > 0
    mean = float(diagonal[nonzero].mean()) if bool(nonzero.any()) else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)

    # An upper triangular root in act-order is a lower triangular one, which torch computes, in reversed order.
    reversed_order = order.flip(0)
    damping = DAMPING
    failed = torch.ones((), dtype=torch.int32, device=hessian.device)
    while int(failed):
        root = hessian[reversed_order[:, None], reversed_order].double()
        root.diagonal()[~nonzero[reversed_order]] = mean
        root.diagonal().mul_(1 + damping)
        # In place: the transpose has LAPACK's memory order, so that no copy is made.
        torch.linalg.cholesky_ex(root.mT, out=(root.mT, failed))
        damping *= DAMPING_GROWTH

    lower = root.mT
    lower /= lower.diagonal().clone()

    # A panel at a time, since root and coefficients are in memory together.
    size = len(hessian)
    coefficients = torch.empty_like(hessian, dtype=dtype)
    for low in range(0, size, PANEL):
        high = min(low + PANEL, size)
        coefficients[size - high : size - low] = lower[low:high].flip(0, 1)
    return ErrorPropagation(order, coefficients)


def round_columns(
    weight: Tensor, scale: Tensor, propagation: ErrorPropagation, fmt: Format, zero_point: Tensor | None = None
) -> Tensor:
    """Run GPTQ on a weight with given scales.

    Args:
        weight: [out, in], float32 or float64 as the coefficients; the computation runs in that dtype.
        scale: float32 [out / group height, in / group width], rounded up; one row or column where a group has no limit.
            weight = (code value - zero_point) * scale: any global scale is applied already.
        propagation: act-order and coefficients, as `find_error_propagation` returns them for the layer's inputs.
        fmt: the format that the weight is stored in.
        zero_point: float32, shaped as `scale`; None for symmetric formats.

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

    # Transposed, so that each column is contiguous.
    columns = weight.T[order].contiguous()
    rounding = _ColumnRounding(
        columns,
        columns.clone(),
        propagation.coefficients,
        fmt.number,
        torch.div(order, fmt.group[1] or cols, rounding_mode="floor").tolist(),
        of_rows(scale),
        None if zero_point is None else of_rows(zero_point),
    )
    rounding.round_range(0, cols)

    quotients = torch.empty(rows, cols, dtype=torch.float32, device=weight.device)
    quotients.T[order] = columns.float()
    return quotients


@dataclass(frozen=True, eq=False)
class _ColumnRounding:
    """The transposed columns of a weight in act-order while they are rounded.

    Attributes:
        columns: [in, out], weights plus propagated errors; once a column is rounded, its quotients.
        errors: [in, out], rounding errors of columns that are rounded; weights of the others.
        coefficients: see ErrorPropagation.
        number: the numeric format of the codes.
        groups: row of `scales` for each column.
        scales: [groups, out].
        zero_points: [groups, out]; None for symmetric formats.
    """

    columns: Tensor
    errors: Tensor
    coefficients: Tensor
    number: Number
    groups: list[int]
    scales: Tensor
    zero_points: Tensor | None

    def round_range(self, low: int, high: int) -> None:
        """Round columns low to high, to which all earlier errors were propagated."""
        if high - low > MIN_RANGE:
            middle = (low + high) // 2
            self.round_range(low, middle)
            self.columns[middle:high].addmm_(self.coefficients[low:middle, middle:high].T, self.errors[low:middle])
            self.round_range(middle, high)
            return
        for column in range(low, high):
            group = self.groups[column]
            scale = self.scales[group]
            quotients = self.columns[column] / scale
            if self.zero_points is not None:
                quotients += self.zero_points[group]
            rounded = nearest(quotients.float(), self.number)
            self.columns[column] = rounded
            values = rounded if self.zero_points is None else rounded - self.zero_points[group]
            self.errors[column] -= values * scale
            if column + 1 < high:
                self.columns[column + 1 : high].addr_(self.coefficients[column, column + 1 : high], self.errors[column])

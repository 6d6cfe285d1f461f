"""GPTQ: weights rounded one column after another, each with what the columns before it have made wrong put right.

How wrong a layer's outputs are is the trace of E H E', where E is what rounding does to the weights [out, in] and H the
Gram matrix X' X of the layer's inputs. With H = R R', R upper triangular, that is the sum of squares of E R, and in
column k of it stands R[k, k] times E[k] plus what the errors of earlier columns bring there: rounding the weight plus
that to the nearest code makes each as small as it can be. It is what Frantar et al. compute from the inverse of H
(arXiv 2210.17323), in an order that needs no inverse (Chee et al., arXiv 2307.13304, theorem 6).

    feedback = find_feedback(gram)
    quotients = carried(weight, scale, feedback, form)      # the values of codes, [out, in]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.format import Format
from ..formats.numbers import Number
from ..formats.reference import nearest

# Added to the diagonal, as a share of its mean, and how many times as much where that is not enough.
DAMPING, MORE = 0.01, 10.0
# Columns that are rounded one by one before others are told of them, all at once: larger parts by halves.
LEAST = 16
# Rows of a matrix that are turned around at once.
PANEL = 256


@dataclass(frozen=True, eq=False)
class ErrorPropagation:
    """What errors of some columns of a weight do to others.

    Attributes:
        order: int64 [in], the columns in the order in which they are rounded: those of large inputs first, as their
            errors count most and are put right by most others.
        shares: [in, in], upper triangular in that order: what a later column gets of an earlier one's error.
    """

    order: Tensor
    shares: Tensor


def find_error_propagation(hessian: Tensor, dtype: torch.dtype = torch.float32) -> ErrorPropagation:
    """What to carry from column to column for inputs with this Gram matrix.

    Inputs that are always zero have no part in it. The diagonal is raised by a hundredth of its mean, and by more where
    rounding in the matrix itself leaves it with no root.

    Args:
        hessian: [in, in], finite.
        dtype: of the shares.
    """
    diagonal = hessian.diagonal().double()
    live = diagonal > 0
    mean = float(diagonal[live].mean()) if bool(live.any()) else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    # Turned around, since torch finds lower triangular roots.
    turned = order.flip(0)
    damping, failed = DAMPING * mean, torch.ones((), dtype=torch.int32, device=hessian.device)
    while int(failed):
        root = hessian[turned[:, None], turned].double()
        root.diagonal()[~live[turned]] = mean
        root.diagonal().add_(damping)
        # In its own place: turned over it lies in memory as LAPACK has matrices.
        torch.linalg.cholesky_ex(root.mT, out=(root.mT, failed))
        damping *= MORE
    found = root.mT
    found /= found.diagonal().clone()
    # Some rows at a time, since both are there meanwhile.
    shares, size = torch.empty_like(hessian, dtype=dtype), len(hessian)
    for low in range(0, size, PANEL):
        high = min(low + PANEL, size)
        shares[size - high : size - low] = found[low:high].flip(0, 1)
    return ErrorPropagation(order, shares)


def round_columns(
    weight: Tensor, scale: Tensor, feedback: ErrorPropagation, form: Format, zero: Tensor | None = None
) -> Tensor:
    """The values of the codes [out, in] that weights are rounded to, without the scale and before zero points are
    taken away: float32, what `Number.encode` makes codes of.

    Args:
        weight: [out, in], in the dtype that is computed in.
        scale: float32 [out / height, in / width], that of each group.
        feedback: from inputs of as many columns.
        form: how they are stored.
        zero: the values of the codes that stand for zero, shaped as scale.
    """
    rows, cols = weight.shape
    order, height = feedback.order, form.group[0] or rows
    # Columns lie in rows, in their order.
    sums = weight.T[order].contiguous()
    columns = _Columns(
        sums,
        sums.clone(),
        feedback.shares,
        form.number,
        torch.div(order, form.group[1] or cols, rounding_mode="floor").tolist(),
        scale.T.repeat_interleave(height, 1)[:, :rows].contiguous(),
        None if zero is None else zero.T.repeat_interleave(height, 1)[:, :rows].contiguous(),
    )
    columns.settle(0, cols)
    found = torch.empty(rows, cols, dtype=torch.float32, device=weight.device)
    found.T[order] = sums.float()
    return found


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns of a weight as they are rounded, in their order, each a row.

    Attributes:
        sums: [in, out], weights with what earlier errors bring them; of columns that are done the values of codes.
        errors: [in, out], weights less what their codes stand for; weights where a column is not done.
        shares: see Feedback.
        number: what the codes are.
        group: of each column, the row of scales that it has.
        scales: [groups, out].
        zeros: likewise, the values of the codes that stand for zero; None where zero stands for itself.
    """

    sums: Tensor
    errors: Tensor
    shares: Tensor
    number: Number
    group: list[int]
    scales: Tensor
    zeros: Tensor | None

    def settle(self, low: int, high: int) -> None:
        """Round so many columns, which earlier ones have brought all that they bring."""
        if high - low > LEAST:
            middle = (low + high) // 2
            self.settle(low, middle)
            self.sums[middle:high].addmm_(self.shares[low:middle, middle:high].T, self.errors[low:middle])
            self.settle(middle, high)
            return
        for at in range(low, high):
            step = self.scales[self.group[at]]
            quotients = self.sums[at] / step
            if self.zeros is not None:
                quotients += self.zeros[self.group[at]]
            found = nearest(quotients.float(), self.number)
            self.sums[at] = found
            values = found if self.zeros is None else found - self.zeros[self.group[at]]
            self.errors[at] -= values * step
            if at + 1 < high:
                self.sums[at + 1 : high].addr_(self.shares[at, at + 1 : high], self.errors[at])

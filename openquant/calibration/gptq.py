"""GPTQ: rounds a weight column by column, and corrects later columns for the errors of earlier ones. --tune goes on.

The squared error of a layer's outputs is the trace of E H E', where E [out, in] is the rounding error of the weight and
H = X'X is the layer's Hessian. With H = R R', R upper triangular, that trace is the sum of squares of E R. Column k of
E R is R[k, k] times E[k] plus what the errors of earlier columns add to it. So each term is smallest when the weight
plus these errors is rounded to the nearest code. Frantar et al. (arXiv 2210.17323) compute the same from the inverse of
H; this order of rounding needs no inverse (Chee et al., arXiv 2307.13304, theorem 6).

    propagation = find_error_propagation(hessian)
    quotients = round_columns(weight, scale, propagation, scheme.format)     # float32 [out, in]

In that trace each output counts alike and by itself. The answers change by about trace(G E H E') / 2, where G is the
curvature of the KL divergence over the outputs (sensitivity.py): errors of several outputs cancel too. So with --tune,
six times, each scale in turn is set to the least squares of this, each group to the best of some scales with its codes
rounded anew, and each code to the one that makes it least while all others stay. On SmolLM2 in int4 weighed tokens
leave 0.82 of the KL of `--gptq`, and this 0.63; in nvfp4 it is 0.74 without the groups, and 0.69 with them
(docs/results.md).

    quotients, scale = Tuning(weight, quotients, scale, None, hessian, outputs, scheme.format).run()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from ..formats import kernels
from ..formats.format import Format
from ..formats.kernels import ColumnRounding, Loops, scale_values
from ..formats.numbers import Floats
from ..formats.reference import nearest
from ..streaming.memory import BLOCK

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


# Added to G's diagonal, as a share of its mean. A few texts say little of outputs that few tokens use, and errors of
# all others would be moved into these. On SmolLM2 with the default texts 0.3, 1 and 3 left 0.651, 0.644 and 0.654 of
# GPTQ's KL in int4, and 3, 6 and 12 rounds 0.644, 0.630 and 0.624.
RIDGE = 1.0
ROUNDS = 6
# Groups of more inputs than this move as a whole in the first two rounds alone, since that takes time. On SmolLM2 int4
# in groups of 64 has 0.628 of GPTQ's KL with two and 0.624 with six; nvfp4, of 16, 0.706 and 0.692.
NARROW = 32
WIDE_ROUNDS = 2
# Of conjugate gradients: on SmolLM2's first layers two leave as much of the loss as twelve.
STEPS = 2
# By which the scale of a group is multiplied for those that are tried, each with all codes of the group rounded anew:
# from a half to two, close together near one.
FACTORS = torch.exp2(torch.linspace(-1, 1, 32) * torch.linspace(-1, 1, 32).abs())
_TINY = 1e-30


def _steady(outputs: Tensor) -> Tensor:
    """Add the ridge to the diagonal of each block, and damp it as Hessians are damped.

    The mean of the diagonal was one before, so that no product overflows.
    """
    used = outputs.diagonal(dim1=1, dim2=2)
    used = used[used > 0]
    steady = outputs / used.mean() if len(used) else outputs.clone()
    diagonal = steady.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE
    diagonal *= 1 + DAMPING
    return steady


def stored_scales(fmt: Format, scale: Floats, global_scale: Floats | None) -> Floats:
    """Return the values that scales have once they are stored, float32 of their shape.

    Args:
        fmt: the format.
        scale: float32 of any shape.
        global_scale: float32 of one element; None if the format has none.
    """
    stored = fmt.encode_scales(scale, global_scale).view(np.uint8)
    values = scale_values(stored.reshape(-1), fmt.scale.dtype)
    return (values if global_scale is None else values / global_scale.reshape(-1)).reshape(scale.shape)


def _solve(multiply: Callable[[Tensor], Tensor], diagonal: Tensor, right: Tensor) -> Tensor:
    """Solve a positive definite system by conjugate gradients: with a ridge a few steps do.

    Args:
        multiply: multiplies a vector [blocks, rows] by the matrix of each block.
        diagonal: the diagonal of each matrix, above zero, [blocks, rows].
        right: the right side, [blocks, rows].
    """
    found = torch.zeros_like(right)
    rest = right
    step = rest / diagonal
    length = (rest * step).sum(-1, keepdim=True)

    for _ in range(STEPS):
        product = multiply(step)
        share = length / (step * product).sum(-1, keepdim=True).clamp_min(_TINY)
        found += share * step
        rest = rest - share * product

        direction = rest / diagonal
        before, length = length, (rest * direction).sum(-1, keepdim=True)
        step = direction + length / before.clamp_min(_TINY) * step
    return found


@dataclass(eq=False)
class Tuning:
    """Moves the scales and codes of a rounded weight.

    While it works all matrices are transposed, so that each column is contiguous, and filled up to blocks.

    Args:
        weight: float32 [out, in].
        quotients: float32 [out, in], what `round_columns` returned for it: weight = (quotient - zero_point) * scale.
        scale: float32 [out / group height, in / group width], as for `round_columns`.
        zero_point: float32, shaped as `scale`; None for symmetric formats.
        hessian: the Hessian of its inputs, float32 [in, in], damped (`gptq.damp`); divided by any number, so that
            products with it do not overflow.
        outputs: the curvature over its outputs, float32 [blocks, BLOCK, BLOCK].
        fmt: the format that the weight is stored in.
        global_scale: float32 of one element, by which scales are multiplied before they are stored; None without one.
    """

    weight: Tensor
    quotients: Tensor
    scale: Tensor
    zero_point: Tensor | None
    hessian: Tensor
    outputs: Tensor
    fmt: Format
    global_scale: Floats | None = None

    def __post_init__(self) -> None:
        assert len(self.outputs) == -(-len(self.weight) // BLOCK)
        self.outputs = _steady(self.outputs)
        self.shape = self.weight.shape
        self.height = self.fmt.group[0] or len(self.weight)
        self.width = self.fmt.group[1] or self.shape[1]

        self.weight = self._by_column(self.weight)
        self.quotients = self._by_column(self.quotients)
        self.scales = self._by_group(self.scale, 1.0)
        self.zeros = torch.zeros_like(self.scales)
        if self.zero_point is not None:
            self.zeros = self._by_group(self.zero_point, 0.0)

    def _by_column(self, values: Tensor, filled: float = 0.0) -> Tensor:
        """[out, in] -> [in, blocks * BLOCK]."""
        return nn.functional.pad(values.T, (0, -len(values) % BLOCK), value=filled).contiguous()

    def _by_group(self, values: Tensor, filled: float) -> Tensor:
        """[out / height, groups] -> [groups, blocks * BLOCK]."""
        return self._by_column(values.repeat_interleave(self.height, 0)[: self.shape[0]], filled)

    def _by_block(self, values: Tensor) -> Tensor:
        """[in, blocks * BLOCK] -> [blocks, BLOCK, in]."""
        return values.reshape(len(values), -1, BLOCK).permute(1, 2, 0)

    def _columns_of(self, group: int) -> slice:
        return slice(group * self.width, (group + 1) * self.width)

    def _weigh_errors(self) -> Tensor:
        """H E', [in, blocks * BLOCK]."""
        errors = self.weight.clone()
        for group, (scale, zero) in enumerate(zip(self.scales, self.zeros, strict=True)):
            columns = self._columns_of(group)
            errors[columns] -= (self.quotients[columns] - zero) * scale
        return self.hessian @ errors

    def refit_scales(self) -> None:
        """Set the scales of each group of columns in turn to the least squares, and round them."""
        if self.height != 1 or self.fmt.shared or self.fmt.scale.power_of_two:
            return

        weighed = self._weigh_errors()
        for group, (scale, zero) in enumerate(zip(self.scales, self.zeros, strict=True)):
            columns = self._columns_of(group)
            values = self.quotients[columns] - zero
            by_block = self._by_block(values)

            # The scales of a block count together as G o (Q H Q').
            of_inputs = by_block @ self.hessian[columns, columns]

            def multiply(step: Tensor, of_inputs: Tensor = of_inputs, by_block: Tensor = by_block) -> Tensor:
                return (self.outputs @ (step[..., None] * of_inputs) * by_block).sum(-1)

            diagonal = self.outputs.diagonal(dim1=1, dim2=2) * (of_inputs * by_block).sum(-1)
            gradient = (self.outputs @ self._by_block(weighed[columns]) * by_block).sum(-1)
            # Where all codes are zero the scale stays.
            refitted = scale + _solve(multiply, torch.where(diagonal > 0, diagonal, 1.0), gradient).reshape(-1)

            stored = self._stored(refitted, scale)
            later = slice(columns.stop, None)
            weighed[later].addmm_(self.hessian[later, columns], values * (scale - stored))
            self.scales[group] = stored

    def move_codes(self) -> None:
        """Move each code, column after column, to the value of the least loss, all others held."""
        # numba is optional; --tune is refused without it.
        from ..formats import compiled

        weighed = self._weigh_errors()
        changes = torch.zeros_like(weighed)
        descent = (
            self.quotients.numpy(),
            weighed.numpy(),
            changes.numpy(),
            self.hessian.numpy(),
            self.outputs.numpy(),
            np.arange(self.shape[1]) // self.width,
            self.scales.numpy(),
        )
        move_panel = partial(compiled.move_panel, descent, self.fmt.number)
        work_in_panels(weighed, changes, self.hessian, 0, self.shape[1], move_panel)

    def move_groups(self) -> None:
        """Move the scale of each group of a row to the best of some near it, each with its codes rounded anew."""
        # numba is optional; --tune is refused without it.
        from ..formats import compiled

        if self.height != 1 or self.width > BLOCK:
            return

        weighed = self._weigh_errors()
        for group, (scale, zero) in enumerate(zip(self.scales, self.zeros, strict=True)):
            columns = self._columns_of(group)
            hessian = self.hessian[columns, columns].contiguous()
            root = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1).T.contiguous()

            values = self.quotients[columns].T.contiguous()
            before = (values - zero[:, None]) * scale[:, None]
            tried = self._stored(torch.outer(FACTORS, scale), scale).T.contiguous()
            pulls = (self.outputs @ self._by_block(weighed[columns])).flatten(0, 1)
            tensors = (values, scale, zero, tried, pulls, self.outputs, hessian, torch.linalg.inv(hessian), root)
            compiled.move_groups([tensor.numpy() for tensor in tensors], self.fmt.number)

            self.quotients[columns] = values.T
            changes = before - (values - zero[:, None]) * scale[:, None]
            later = slice(columns.stop, None)
            weighed[later].addmm_(self.hessian[later, columns], changes.T)

    def _stored(self, scales: Tensor, otherwise: Tensor) -> Tensor:
        """The values of scales once they are stored; others where they would be none, or of another sign."""
        stored = torch.from_numpy(stored_scales(self.fmt, scales.numpy(), self.global_scale))
        return torch.where(torch.isfinite(stored) & (stored * otherwise > 0), stored, otherwise)

    def run(self) -> tuple[Tensor, Tensor]:
        """Move scales and codes.

        Returns:
            The quotients and scales, shaped as those given. Scales of whole rows, unless they are powers of two, and of
            groups of a row move; all of them can be stored.
        """
        for number in range(ROUNDS):
            self.refit_scales()
            if self.width <= NARROW or number < WIDE_ROUNDS:
                self.move_groups()
            self.move_codes()
        self.refit_scales()

        rows = self.shape[0]
        scale = self.scales[:, :rows].T[:: self.height]
        return self.quotients[:, :rows].T.contiguous(), scale.reshape(self.scale.shape).contiguous()

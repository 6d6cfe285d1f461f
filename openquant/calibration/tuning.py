"""Moves scales and codes that GPTQ has chosen to where errors cancel in the answers, not in each output by itself.

GPTQ makes trace(E H E') small, where E [out, in] is the rounding error of a weight and H the Hessian of its inputs:
each output counts alike and by itself. The answers change by about trace(G E H E') / 2, where G is the curvature of the
KL divergence over the outputs (sensitivity.py): errors of several outputs cancel too. So six times each scale in turn
is set to the least squares of that sum, each group to the best of some scales with its codes rounded anew, and each
code to the one that makes the sum least while all others stay. On SmolLM2 in int4 weighed tokens leave 0.82 of the KL
of `--gptq`, and this 0.62; in nvfp4 it is 0.74 without the groups, and 0.69 with them (docs/results.md).

    quotients, scale = Tuning(weight, quotients, scale, None, hessian, outputs, scheme.format).run()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..formats.format import Format
from ..formats.kernels import scale_values
from ..formats.numbers import Floats
from ..streaming.memory import BLOCK
from .gptq import DAMPING, work_in_panels

# Added to G's diagonal, as a share of its mean. A few texts say little of outputs that few tokens use, and errors of
# all others would be moved into these. On SmolLM2 with the default texts 0.3, 1 and 3 left 0.651, 0.644 and 0.654 of
# GPTQ's KL in int4, and 3, 6 and 12 rounds 0.644, 0.630 and 0.624.
RIDGE = 1.0
ROUNDS = 6
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
        for _ in range(ROUNDS):
            self.refit_scales()
            self.move_groups()
            self.move_codes()
        self.refit_scales()

        rows = self.shape[0]
        scale = self.scales[:, :rows].T[:: self.height]
        return self.quotients[:, :rows].T.contiguous(), scale.reshape(self.scale.shape).contiguous()

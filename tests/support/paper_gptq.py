"""GPTQ's loop as its paper has it, which the codes of openquant.calibration.gptq must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from openquant.calibration.gptq import DAMPING
from openquant.formats.format import Format


def spread(grid: Tensor, form: Format, shape: torch.Size) -> Tensor:
    """A grid over the weights it belongs to."""
    rows, cols = shape
    height, width = form.group[0] or rows, form.group[1] or cols
    return grid.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


def by_hand(weight: Tensor, scale: Tensor, hessian: Tensor, form: Format, zero: Tensor | None) -> Tensor:
    """As Frantar et al. have it: the inverse of the Hessian by its Cholesky root, column by column.

    Only the damping is ours: a share of each element of the diagonal, not of its mean.
    """
    cols = weight.shape[1]
    left, found = weight.double().clone(), torch.zeros_like(weight)
    scales = spread(scale, form, weight.shape)
    zeros = torch.zeros_like(scales) if zero is None else spread(zero, form, weight.shape)
    raised = hessian.double() + DAMPING * torch.diag(hessian.diagonal().double())
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    root = torch.linalg.cholesky(torch.linalg.inv(raised[order][:, order]), upper=True)
    left = left[:, order]
    for at in range(cols):
        column = int(order[at])
        quotients = left[:, at] / scales[:, column] + zeros[:, column]
        found[:, column] = torch.from_numpy(form.number.nearest(quotients.float().numpy()))
        error = left[:, at] - (found[:, column] - zeros[:, column]).double() * scales[:, column]
        left[:, at:] -= (error / root[at, at])[:, None] * root[at, at:]
    return found

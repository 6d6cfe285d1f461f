"""Scales and codes that move after GPTQ, against plain loops over one code or scale at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from openquant.calibration import gptq
from openquant.calibration.gptq import Tuning, damp, find_error_propagation, round_columns, stored_scales
from openquant.calibration.gptq_pass import scaled_outputs
from openquant.formats import kernels
from openquant.formats.schemes import Scheme, find_scheme
from support.rows import for_each

# Fewer outputs than a block has, so that two blocks are filled up.
ROWS, COLS = 300, 128


class Problem:
    """A random weight that GPTQ has rounded, with inputs and gradients that depend on each other."""

    def __init__(self, scheme: Scheme, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def samples(width: int) -> Tensor:
            mixed = torch.randn(4 * width, width, generator=random) @ torch.randn(width, width, generator=random)
            return mixed * torch.exp(torch.randn(width, generator=random))

        self.scheme, self.format = scheme, scheme.format
        self.weight = torch.randn(ROWS, COLS, generator=random).bfloat16().float()
        inputs, gradients = samples(COLS), samples(ROWS)
        self.hessian = inputs.T @ inputs
        self.outputs = torch.zeros(2, 256, 256)
        for number, block in enumerate(self.outputs):
            part = gradients[:, number * 256 :][:, :256]
            block[: part.shape[1], : part.shape[1]] = part.T @ part

        bits = self.weight.bfloat16().view(torch.int16).numpy().view(np.uint16)
        largest = kernels.absmax(bits, "BF16", self.format.group)
        if self.format.shared:
            largest = largest.max(keepdims=True)
        self.global_scale = None
        if self.format.global_scale is not None:
            self.global_scale = kernels.choose_shared_scale(self.format, largest.max(keepdims=True))
        scale, zero_point = kernels.choose_scales(scheme, bits, "BF16", largest, self.global_scale)
        self.scale = torch.from_numpy(scale)
        self.zero_point = None if zero_point is None else torch.from_numpy(zero_point)
        propagation = find_error_propagation(self.hessian)
        self.quotients = round_columns(self.weight, self.scale, propagation, self.format, self.zero_point)
        damp(self.hessian)

    def tuned(self) -> tuple[Tensor, Tensor]:
        return Tuning(
            *(self.weight, self.quotients, self.scale, self.zero_point, self.hessian, self.outputs),
            *(self.format, self.global_scale),
        ).run()

    def steady(self) -> Tensor:
        """The curvature with its ridge and damping, float64 [out, out]."""
        whole = torch.block_diag(*self.outputs)[:ROWS, :ROWS].double()
        whole /= whole.diagonal().mean()
        return whole + torch.diag(0.2 * whole.diagonal() + 1.2 * gptq.RIDGE)

    def wide(self, values: Tensor) -> Tensor:
        """[out / height, groups] -> [out, in]."""
        height, width = self.format.group
        return values.repeat_interleave(height or ROWS, 0)[:ROWS].repeat_interleave(width or COLS, 1).double()

    def errors(self, quotients: Tensor, scale: Tensor) -> Tensor:
        values = quotients.double()
        if self.zero_point is not None:
            values = values - self.wide(self.zero_point)
        return self.weight - values * self.wide(scale)

    def loss(self, quotients: Tensor, scale: Tensor) -> float:
        errors = self.errors(quotients, scale)
        return float((self.steady() @ errors @ self.hessian.double() * errors).sum())


SCHEMES = {
    "int4": find_scheme("int4", group_size="64"),
    "int4 with zero points": find_scheme("int4", group_size="64", asymmetric=True),
    "nvfp4": find_scheme("nvfp4"),
    "mxfp4": find_scheme("mxfp4"),
    "channel": find_scheme("channel"),
    "tensor": find_scheme("tensor"),
}


@for_each("name", SCHEMES)
def test_the_answers_lose_less(name: str) -> None:
    problem = Problem(SCHEMES[name])
    moves = name != "tensor"
    quotients, scale = problem.tuned()
    share = problem.loss(quotients, scale) / problem.loss(problem.quotients, problem.scale)
    assert share < (0.975 if moves else 0.995)

    # All of it can be stored.
    number = problem.format.number
    assert np.array_equal(number.decode(number.encode(quotients.numpy())), quotients.numpy())
    assert np.array_equal(stored_scales(problem.format, scale.numpy(), problem.global_scale), scale.numpy())
    assert torch.equal(scale, problem.scale) != moves
    assert torch.equal(scale.sign(), problem.scale.sign())


@pytest.mark.parametrize("name", ["int4", "int4 with zero points"])
def test_each_code_moves_to_the_best(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    problem = Problem(SCHEMES[name])
    monkeypatch.setattr(gptq, "ROUNDS", 1)
    monkeypatch.setattr(Tuning, "refit_scales", lambda _: None)
    monkeypatch.setattr(Tuning, "move_groups", lambda _: None)
    found, _ = problem.tuned()

    together, hessian, scale = problem.steady(), problem.hessian.double(), problem.wide(problem.scale)
    expected = problem.quotients.double()
    least, most = expected.min(), expected.max()
    pull = together @ problem.errors(expected, problem.scale) @ hessian
    for column in range(COLS):
        for row in range(ROWS):
            square = together[row, row] * hessian[column, column] * scale[row, column]
            best = (expected[row, column] + pull[row, column] / square).round().clamp(least, most)
            change = (expected[row, column] - best) * scale[row, column]
            expected[row, column] = best
            pull += change * together[:, row, None] * hessian[column]
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("name", ["int4", "int4 with zero points"])
def test_each_group_moves_to_the_best_scale(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    problem = Problem(SCHEMES[name])
    monkeypatch.setattr(gptq, "ROUNDS", 1)
    monkeypatch.setattr(Tuning, "refit_scales", lambda _: None)
    monkeypatch.setattr(Tuning, "move_codes", lambda _: None)
    found, found_scale = problem.tuned()

    together, hessian, width = problem.steady(), problem.hessian.double(), problem.format.group[1]
    expected, scales = problem.quotients.double(), problem.scale.double()
    zeros = torch.zeros_like(scales) if problem.zero_point is None else problem.zero_point.double()
    least, most = expected.min(), expected.max()
    pull = together @ problem.errors(expected, problem.scale) @ hessian
    for group in range(COLS // width):
        columns = slice(group * width, (group + 1) * width)
        within = hessian[columns, columns]
        root = torch.linalg.cholesky(within.flip(0, 1)).flip(0, 1).T
        near = [problem.scale[:, group] * factor for factor in gptq.FACTORS]
        tried = np.stack([stored_scales(problem.format, scale.numpy(), None) for scale in near])
        for row in range(ROWS):
            zero, weight = zeros[row, group], together[row, row]
            values = (expected[row, columns] - zero) * scales[row, group]
            target = values + torch.linalg.solve(within, pull[row, columns]) / weight
            near = torch.from_numpy(tried[:, row]).double()
            off = torch.zeros(len(near), width, dtype=torch.float64)
            codes = torch.zeros_like(off)
            for i in range(width):
                best = target[i] - off[:, :i] @ root[i, :i] / root[i, i]
                codes[:, i] = (best / near + zero).round().clamp(least, most)
                off[:, i] = (codes[:, i] - zero) * near - target[i]
            losses = (off @ within * off).sum(1)
            chosen = int(losses.argmin())
            if losses[chosen] < (target - values) @ within @ (target - values):
                expected[row, columns], scales[row, group] = codes[chosen], near[chosen]
                change = values - (codes[chosen] - zero) * near[chosen]
                pull += together[:, row, None] * (change @ hessian[columns])

    assert torch.equal(found_scale.double(), scales) and not torch.equal(found_scale, problem.scale)
    assert torch.equal(found.double(), expected)


def test_scales_are_the_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(SCHEMES["channel"])
    monkeypatch.setattr(gptq, "ROUNDS", 0)
    monkeypatch.setattr(gptq, "STEPS", 300)
    quotients, found = problem.tuned()
    assert torch.equal(quotients, problem.quotients)

    # d/ds of the loss is zero: G o (Q H Q') s = diag(G W H Q').
    values, hessian, together = quotients.double(), problem.hessian.double(), problem.steady()
    squares = together * (values @ hessian @ values.T)
    right = ((together @ problem.weight.double() @ hessian) * values).sum(1)
    expected = torch.linalg.solve(squares, right)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-4, atol=0)


def test_scales_keep_their_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of few codes would not, and engines read no E4M3 scales below zero."""
    problem = Problem(SCHEMES["nvfp4"])
    problem.quotients = -problem.quotients
    monkeypatch.setattr(gptq, "ROUNDS", 0)
    assert (problem.tuned()[1] > 0).all()


def test_outputs_that_are_multiplied_have_smaller_gradients() -> None:
    """As those of v that AWQ smooths."""
    gradients = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    factors = np.exp2(np.arange(300) % 5 - 2).astype(np.float32)
    plain, smaller = (
        torch.stack(
            [torch.nn.functional.pad(part.T @ part, (0, 256 - part.shape[1]) * 2) for part in rows.split(256, 1)]
        )
        for rows in (gradients, gradients / torch.from_numpy(factors))
    )
    torch.testing.assert_close(scaled_outputs(plain, factors), smaller, rtol=1e-5, atol=1e-3)


def test_outputs_that_nothing_depends_on_are_rounded_too() -> None:
    problem = Problem(SCHEMES["int4"])
    problem.outputs.zero_()
    quotients, scale = problem.tuned()
    assert torch.isfinite(quotients).all() and torch.isfinite(scale).all()

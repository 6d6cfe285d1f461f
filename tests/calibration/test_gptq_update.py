"""GPTQ's rounding against the textbook's loop, and what it is for: the error of a layer's outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from openquant.calibration.gptq import DAMPING, DAMPING_GROWTH, ErrorPropagation, find_error_propagation, round_columns
from openquant.formats import compiled, kernels
from openquant.formats.format import Format
from openquant.formats.kernels import choose_scales
from openquant.formats.numbers import E2M1, E4M3, INT4, INT8
from openquant.formats.reference import nearest
from openquant.formats.schemes import (
    BLOCK,
    CHANNEL,
    INT4_SHIFTED,
    INT4_W4A16,
    INT4_W4A16_CHANNEL,
    INT8_W8A16,
    INTEGER_GROUPS,
    NVFP4,
    Scheme,
)
from support.paper_gptq import by_hand, spread

SCHEMES = (INTEGER_GROUPS[3][0], INT4_W4A16, INT4_SHIFTED, INT4_W4A16_CHANNEL, INT8_W8A16, NVFP4, CHANNEL, BLOCK)


def correlated(tokens: int, cols: int, seed: int = 0) -> Tensor:
    """Inputs [tokens, cols] of which some are large, and all depend on each other."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.rand(cols, generator=made, dtype=torch.float64) * 4
    mix = torch.eye(cols, dtype=torch.float64) + torch.randn(cols, cols, generator=made, dtype=torch.float64) / 8
    return torch.randn(tokens, cols, generator=made, dtype=torch.float64) @ mix * sizes


def weights(rows: int, cols: int, seed: int = 1) -> Tensor:
    """float32 [rows, cols]."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) / 16


def grids(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales, and zero points if the scheme has them, from the largest weights."""
    scale, zero = choose_scales(scheme.unsearched, weight.numpy().view(np.uint32), "F32")
    return torch.from_numpy(scale), None if zero is None else torch.from_numpy(zero)


def loss(weight: Tensor, quotients: Tensor, scale: Tensor, hessian: Tensor, form: Format, zero: Tensor | None) -> float:
    """The trace of E H E'."""
    values = quotients if zero is None else quotients - spread(zero, form, weight.shape)
    error = (weight - values * spread(scale, form, weight.shape)).double()
    return float((error @ hessian * error).sum())


def test_codes_are_those_of_the_textbooks_loop_and_lower_the_output_error(subtests: pytest.Subtests) -> None:
    weight, inputs = weights(256, 384), correlated(2000, 384)
    hessian = inputs.T @ inputs
    exact, rounded = find_error_propagation(hessian), find_error_propagation(hessian.float())
    for scheme in SCHEMES:
        with subtests.test(scheme.suffix):
            form = scheme.format
            scale, zero = grids(weight, scheme)
            found = round_columns(weight.double(), scale, exact, form, zero)
            assert torch.equal(found, by_hand(weight, scale, hessian, form, zero))
            shifts = 0 if zero is None else spread(zero, form, weight.shape)
            plain = nearest(weight / spread(scale, form, weight.shape) + shifts, form.number)
            found = round_columns(weight, scale, rounded, form, zero)
            before, after = (loss(weight, each, scale, hessian, form, zero) for each in (plain, found))
            assert after < 0.8 * before


def test_inputs_that_are_zero_or_alike_are_rounded_too() -> None:
    weight, inputs = weights(32, 128), correlated(40, 128)
    inputs[:, [3, 70]] = 0
    inputs[:, 9] = inputs[:, 8]
    form, hessian = INT4_W4A16.format, inputs.T @ inputs
    scale, _ = grids(weight, INT4_W4A16)
    found = round_columns(weight, scale, find_error_propagation(hessian.float()), form)
    plain = nearest(weight / scale, form.number)
    assert torch.equal(found[:, [3, 70]], plain[:, [3, 70]])
    assert torch.isfinite(found).all() and not torch.equal(found, plain)


def test_panels_are_rounded_alike_in_torch_numpy_and_compiled_loops(subtests: pytest.Subtests) -> None:
    """On a GPU torch may add a product before it is rounded, so all products here are exact: by -1, 0 or 1."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randint(-1000, 1001, (300, 128), generator=made) / 1024
    coefficients = torch.randint(-1, 2, (128, 128), generator=made) * (torch.rand(128, 128, generator=made) < 0.1)
    propagation = ErrorPropagation(torch.randperm(128, generator=made), coefficients.float().triu(1))
    for scheme in SCHEMES:
        with subtests.test(scheme.suffix):
            scale, zero = grids(weight, scheme)
            scale = torch.exp2(torch.log2(scale).round())
            torchs, numpys, compileds = (
                round_columns(weight, scale, propagation, scheme.format, zero, loops)
                for loops in (None, kernels, compiled)
            )
            assert torch.equal(numpys, torchs)
            assert torch.equal(compileds, torchs)


def test_float32_decomposes_hessians_of_any_inputs(subtests: pytest.Subtests) -> None:
    """Of inputs whose sizes differ by 10^4, of fewer tokens than inputs, and of inputs that are nearly all alike."""
    inputs = correlated(2000, 256)
    sizes = torch.logspace(-2, 2, 256, dtype=torch.float64)
    for name, values in (("sizes", inputs * sizes), ("few", inputs[:20] * sizes), ("alike", inputs + 1e3 * sizes)):
        with subtests.test(name):
            hessian = values.T @ values
            exact, found = find_error_propagation(hessian), find_error_propagation(hessian.float())
            assert torch.equal(found.order, exact.order)
            error = torch.linalg.norm(found.coefficients - exact.coefficients)
            assert error < 1e-4 * torch.linalg.norm(exact.coefficients)


def expected_coefficients(hessian: Tensor, damping: float, order: Tensor) -> Tensor:
    """Of H = R R', R upper triangular in act-order, divided by its diagonal."""
    raised = hessian + damping * torch.diag(hessian.diagonal())
    turned = order.flip(0)
    root = torch.linalg.cholesky(raised[turned][:, turned]).flip(0, 1)
    return root / root.diagonal()


def test_coefficients_are_the_root_of_the_damped_hessian() -> None:
    inputs = correlated(700, 300)
    hessian = inputs.T @ inputs
    found = find_error_propagation(hessian)
    assert torch.equal(found.order, torch.argsort(hessian.diagonal(), descending=True, stable=True))
    assert torch.allclose(found.coefficients, expected_coefficients(hessian, DAMPING, found.order))


def test_a_hessian_that_is_not_positive_definite_is_damped_more() -> None:
    """As sums of rounded products can be: an eigenvalue below zero, beyond what the first damping makes up for."""
    hessian = torch.eye(8) + 0.2 * torch.ones(8, 8)
    hessian[0, 1] = hessian[1, 0] = 1.8
    damped = hessian + DAMPING * torch.diag(hessian.diagonal())
    assert float(torch.linalg.eigvalsh(damped)[0]) < 0
    found = find_error_propagation(hessian)
    assert torch.allclose(found.coefficients, expected_coefficients(hessian, DAMPING * DAMPING_GROWTH, found.order))


def test_nearest_codes_are_those_of_numpy(subtests: pytest.Subtests) -> None:
    for number in [E4M3, E2M1, INT8, INT4]:
        with subtests.test(number.name):
            values = number.values()
            values = np.sort(values[np.isfinite(values)])
            middles = (values[1:] + values[:-1]) / 2
            near = [np.nextafter(middles, np.float32(sign * 1e9), dtype=np.float32) for sign in (-1, 1)]
            every = np.concatenate([values, middles, *near, np.float32([1e30, -1e30, 1e-30])]).astype(np.float32)
            assert np.array_equal(nearest(torch.from_numpy(every), number).numpy(), number.nearest(every))

"""The noise that a floor is made of."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from openquant.evaluation.compare import RoundingNoise, stochastic_round


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_of_eight_values_in_bfloat16_one_goes_a_step_up_and_one_down() -> None:
    values = torch.full((100_000,), 1.5).bfloat16()
    made = stochastic_round(values, chance())
    assert made.dtype == torch.bfloat16
    steps = (made - values) / 2**-7
    assert set(steps.tolist()) == {-1, 0, 1}
    for step in (-1, 1):
        assert (steps == step).float().mean() == pytest.approx(1 / 8, abs=0.005)


def test_float32_values_go_to_either_neighbour_by_how_near_they_are() -> None:
    values = torch.full((100_000,), 1 + 0.3 * 2**-7)
    made = stochastic_round(values, chance())
    assert made.dtype == torch.float32
    assert set(made.tolist()) == {1, 1 + 2**-7}
    assert (made > 1).float().mean() == pytest.approx(0.3, abs=0.01)


def test_zero_stays_and_nothing_becomes_infinite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, largest, -largest]).repeat(1000).bfloat16()
    made = stochastic_round(values, chance())
    assert made.isfinite().all()
    assert (made.reshape(-1, 4)[:, :2] == 0).all()


def test_float16_does_not_become_infinite_and_nan_no_number() -> None:
    assert stochastic_round(torch.full((4096,), 65504.0).half(), chance()).isfinite().all()
    nan = torch.full((4096,), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    assert stochastic_round(nan, chance()).isnan().all()
    assert stochastic_round(torch.full((8,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32), chance()).isnan().all()


def test_modules_are_noisy_while_it_is_on_and_the_same_by_the_seed() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x, "beside"

    one, pair = nn.Identity(), Pair()
    noise = RoundingNoise([one, pair])
    x = torch.randn(1000, generator=chance()).bfloat16()
    assert torch.equal(one(x), x)

    def noisy(seed: int) -> list[torch.Tensor]:
        source = partial(noise.drawn_from, torch.Generator().manual_seed(seed))
        with source():
            first = one(x)
        # Something else is computed in between.
        with noise.drawn_from(torch.Generator().manual_seed(99)):
            one(x)
        with source():
            second, beside = pair(x)
        assert beside == "beside"
        return [first, second]

    first, second = noisy(1)
    assert not torch.equal(first, x)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(noisy(1), (first, second), strict=True))
    assert not torch.equal(noisy(2)[0], first)
    assert torch.equal(one(x), x)

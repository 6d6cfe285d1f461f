"""The frontier against all mixtures, tried one by one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from openquant.fit.menu import find_frontier


def made_up(seed: int, units: int, choices: int) -> list[list[tuple[int, float]]]:
    chance = random.Random(seed)
    return [[(chance.randint(1, 40), round(chance.random(), 3)) for _ in range(choices)] for _ in range(units)]


def test_it_is_what_trying_all_mixtures_finds(subtests: pytest.Subtests) -> None:
    for seed in range(8):
        with subtests.test(seed=seed):
            units = made_up(seed, 6, 4)
            mixtures = [
                (sum(size for size, _ in mixture), sum(kl for _, kl in mixture))
                for mixture in itertools.product(*units)
            ]
            frontier = find_frontier(units)
            for limit in range(0, 250, 7):
                fitting = [kl for size, kl in mixtures if size <= limit]
                index = frontier.within(limit)
                assert (index is None) == (not fitting)
                if index is not None:
                    chosen = [unit[choice] for unit, choice in zip(units, frontier.choices(index), strict=True)]
                    assert frontier.kl[index] == pytest.approx(min(fitting))
                    assert (sum(size for size, _ in chosen), sum(kl for _, kl in chosen)) == (
                        frontier.nbytes[index],
                        pytest.approx(frontier.kl[index]),
                    )
            for kl in (0.0, 0.5, 1.0, 2.0, 9.0):
                fitting = [size for size, loses in mixtures if loses <= kl]
                index = frontier.at_most(kl)
                assert (index is None) == (not fitting)
                if index is not None:
                    assert frontier.nbytes[index] == min(fitting)


def test_with_a_limit_it_is_nearly_as_good() -> None:
    units = made_up(3, 40, 5)
    exact, limited = find_frontier(units), find_frontier(units, most=200)
    assert len(limited.kl) <= 201 < len(exact.kl)
    for limit in range(int(limited.nbytes[0]), int(exact.nbytes[-1]), 50):
        best, found = exact.within(limit), limited.within(limit)
        assert best is not None and found is not None
        assert limited.kl[found] <= exact.kl[best] * 1.05 + 0.05


def test_hundreds_of_units_of_an_equal_size_are_exact() -> None:
    """As in a model whose layers have the same shapes: few sizes, so few mixtures are kept."""
    units = [[(64_000_000, 0.001 * (n % 7 + 1)), (120_000_000, 0.0001), (256_000_000, 0.0)] for n in range(400)]
    frontier = find_frontier(units)
    index = frontier.within(400 * 64_000_000 + 56_000_000 * 10)
    assert index is not None
    chosen = frontier.choices(index)
    assert [n % 7 for n, choice in enumerate(chosen) if choice] == [6] * 10
    assert np.all(np.diff(frontier.nbytes) > 0) and np.all(np.diff(frontier.kl) < 0)

"""Statistics of tasks, against values from textbooks and tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from openquant.evaluation.task_passes import (
    PairedScores,
    bootstrap_means,
    mcnemar,
    mean_scores,
    paired_p,
    smallest_loss,
)


def scores(*pairs: tuple[float, float, int]) -> PairedScores:
    """Scores of source and output, each with how often they occur."""
    return PairedScores(*(np.repeat([pair[side] for pair in pairs], [pair[2] for pair in pairs]) for side in (0, 1)))


def test_mcnemar_is_the_binomial_test_of_a_coin(subtests: pytest.Subtests) -> None:
    for lost, gained, p in [
        (10, 2, 0.0386),
        (2, 10, 0.0386),
        (5, 0, 0.0625),
        (0, 0, 1),
        (3, 3, 1),
        (600, 400, 2.728e-10),
        (9000, 9000, 1),
    ]:
        with subtests.test(lost=lost, gained=gained, p=p):
            assert mcnemar(lost, gained) == pytest.approx(p, rel=2e-3)


def test_the_paired_test_of_grades_weighs_them() -> None:
    generator = np.random.default_rng(0)
    both = PairedScores(generator.random(12), generator.random(12))
    differences = both.output - both.source
    sums = np.abs(np.array(list(itertools.product((-1, 1), repeat=12))) @ differences)
    exact = (sums >= abs(differences.sum()) - 1e-9).mean()
    assert paired_p(both, 0) == pytest.approx(exact, abs=0.02)
    assert paired_p(both, 0) == paired_p(both, 0) != paired_p(both, 1)
    # By signs alone many small losses would outweigh as many points of gains.
    uneven = scores((0.5, 0.49, 40), (0.1, 0.2, 4))
    assert paired_p(uneven, 0) == 1 > mcnemar(40, 4)
    assert paired_p(scores((0.5, 0.4, 40)), 0) == 1e-4


def test_intervals_are_paired() -> None:
    # The same questions are right but for 10 of 1,000: each alone varies by 3 points, the difference by 0.6.
    both = scores((1, 1, 490), (0, 0, 500), (1, 0, 10))
    means = bootstrap_means([both], 0)
    figures = mean_scores([both], 0)
    low, high = figures["difference_interval"]
    assert low == pytest.approx(-0.0165, abs=0.002)
    assert high == pytest.approx(-0.0045, abs=0.002)
    recovered = figures["recovery_interval"]
    assert recovered[0] < 0.98 < recovered[1] < 1
    assert (both.lost, both.gained) == (10, 0)
    assert np.array_equal(bootstrap_means([both], 0)[0], means[0])
    assert not np.array_equal(bootstrap_means([both], 1)[0], means[0])


def test_tasks_count_alike_whatever_their_number_of_questions() -> None:
    means = bootstrap_means([scores((1, 0, 4)), scores((0, 0, 1000))], 0)
    assert set(means[0].round(9)) == {0.5}
    assert set(means[1]) == {0}


def test_nothing_is_recovered_of_a_source_without_a_right_answer() -> None:
    for score in (0, 5e-324):
        figures = mean_scores([scores((score, 1, 3))], 0)
        assert (figures["recovery"], figures["recovery_interval"]) == (None, None)
    assert mean_scores([scores((0.8, 0.6, 3))], 0)["recovery"] == pytest.approx(0.75)


def test_the_smallest_loss_is_one_that_four_of_five_evaluations_show() -> None:
    questions, rate = 1000, 0.05
    loss = smallest_loss(int(rate * questions), questions)
    assert loss == pytest.approx(0.0198, abs=1e-4)
    generator = np.random.default_rng(0)
    shown = 0
    for _ in range(400):
        lost, gained, _ = generator.multinomial(questions, [(rate + loss) / 2, (rate - loss) / 2, 1 - rate])
        shown += mcnemar(int(lost), int(gained)) < 0.05
    assert 0.72 < shown / 400 < 0.88
    assert smallest_loss(0, 10) == smallest_loss(8, 10) == pytest.approx(0.792, abs=1e-3)

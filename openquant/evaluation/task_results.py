"""Builds the figures of tasks, as eval.json has them; docs/evaluation.md explains the keys.

    evaluate_tasks(task_requests, task_passes, seed=0)[0]["pooled"]["metrics"][0]["recovery"]      # 0.993

Its statistics are intervals, a paired test, and the smallest loss that shows. A score is a number from 0 to 1 for each
question, mostly one of the two. Intervals of differences are paired: each resample draws questions, with the scores of
both models.

    mcnemar(10, 2)      # 0.0386
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..data.tasks import Figures, TaskAnswers
from .task_passes import TaskPasses, TaskRequests
from .types import MeanMetric, TaskFigures, TaskMetric, TasksEvaluation, counted_questions

# Name of the figures over the questions of all tasks.
ALL = "all questions"


def evaluate_tasks(task_requests: TaskRequests, passes: TaskPasses, seed: int) -> list[TasksEvaluation]:
    """Compute the figures of each output.

    Args:
        task_requests: the questions.
        passes: their passes, after all are finished.
        seed: seed of the bootstrap.

    Returns:
        For each output what its eval.json has as `tasks`.
    """
    scores, tasks = passes.scores, task_requests.tasks
    source = tasks.answers(scores.loglikelihoods(0), scores.greedy(0))
    choice_tokens = np.array([len(request.choice) for request in task_requests.requests], np.float64)

    evaluations = []
    for model in range(1, passes.models):
        output = tasks.answers(scores.loglikelihoods(model), scores.greedy(model))
        kl = scores.kl(model)

        def mean_kl(answers: Sequence[TaskAnswers], kl: Figures = kl) -> float:
            requests = np.concatenate([of_task.requests for of_task in answers])
            return float(kl[requests].sum() / choice_tokens[requests].sum())

        of_tasks = [
            _figures(before.task, [before], [after], mean_kl([before]), seed)
            for before, after in zip(source, output, strict=True)
        ]
        pooled = _figures(ALL, source, output, mean_kl(source), seed)

        first = pooled["metrics"][0]
        changed = _join_scores(first["metric"], source, output).changed
        loss = smallest_loss(changed, pooled["questions"])

        evaluations.append(
            TasksEvaluation(
                named=list(task_requests.named),
                limit=task_requests.limit,
                sha256=task_requests.sha256,
                questions=pooled["questions"],
                requests=len(task_requests.requests),
                tokens=passes.tokens,
                packed=passes.packed,
                tasks=of_tasks,
                pooled=pooled,
                mean=_means(source, output, seed),
                smallest_loss=loss,
                reading=_reading(pooled, first, loss, graded=changed != first["lost"] + first["gained"]),
            )
        )

    return evaluations


def _figures(
    name: str, source: Sequence[TaskAnswers], output: Sequence[TaskAnswers], kl: float, seed: int
) -> TaskFigures:
    """Compute the figures of the questions of some tasks together, with the metrics that all of them have."""
    picked = [np.concatenate([answers.picked for answers in model]) for model in (source, output)]

    return {
        "task": name,
        "questions": len(picked[0]),
        "metrics": [
            _metric(metric, _join_scores(metric, source, output), seed)
            for metric in source[0].scores
            if all(metric in answers.scores for answers in source)
        ],
        "answered_otherwise": float((picked[0] != picked[1]).mean()),
        "kl": kl,
    }


def _join_scores(metric: str, source: Sequence[TaskAnswers], output: Sequence[TaskAnswers]) -> PairedScores:
    """Join the scores that all questions of several tasks have in one metric."""
    return PairedScores(*(np.concatenate([answers.scores[metric] for answers in model]) for model in (source, output)))


def _metric(metric: str, scores: PairedScores, seed: int) -> TaskMetric:
    before, after, questions = float(scores.source.mean()), float(scores.output.mean()), len(scores.source)
    means = bootstrap_means([scores], seed)

    return {
        "metric": metric,
        "source": before,
        "source_interval": wilson_interval(before, questions),
        "output": after,
        "output_interval": wilson_interval(after, questions),
        "difference": after - before,
        "difference_interval": difference_interval(*means),
        "p": paired_p(scores, seed),
        "recovery": recovery(before, after),
        "recovery_interval": recovery_interval(*means),
        "lost": scores.lost,
        "gained": scores.gained,
    }


def _means(source: Sequence[TaskAnswers], output: Sequence[TaskAnswers], seed: int) -> list[MeanMetric]:
    """Compute the mean of each metric over the tasks that have it."""
    means: list[MeanMetric] = []
    for metric in dict.fromkeys(metric for answers in source for metric in answers.scores):
        tasks = [
            PairedScores(before.scores[metric], after.scores[metric])
            for before, after in zip(source, output, strict=True)
            if metric in before.scores
        ]

        before, after = (
            float(np.mean([scores.mean() for scores in model]))
            for model in ([task.source for task in tasks], [task.output for task in tasks])
        )

        resampled = bootstrap_means(tasks, seed)

        means.append(
            {
                "metric": metric,
                "tasks": len(tasks),
                "source": before,
                "output": after,
                "difference": after - before,
                "difference_interval": difference_interval(*resampled),
                "recovery": recovery(before, after),
                "recovery_interval": recovery_interval(*resampled),
            }
        )

    return means


def _reading(pooled: TaskFigures, metric: TaskMetric, loss: float, graded: bool) -> str:
    """Say what the figures can tell at this number of questions."""
    changed = metric["lost"] + metric["gained"]
    count = f"{changed:,}" if changed else "none"
    flips = f"{count} got another score" if graded else f"{count} went from right to wrong or back"

    difference, p = 100 * metric["difference"], metric["p"]
    if p >= 0.05:
        found = f"the difference of {difference:+.1f} points is within chance (p = {p:.2g})"
    else:
        found = f"the difference of {difference:+.1f} points is more than chance (p = {p:.2g})"

    if mcnemar(pooled["questions"], 0) >= 0.05:
        power = "so few questions show no loss, not even of all right answers"
    else:
        power = (
            f"a loss of {100 * loss:.1f} points or more would show in 4 of 5 such evaluations, a smaller one mostly not"
        )

    return f"of {counted_questions(pooled['questions'])} {flips}; {power}; {found}"


# Resamples of the bootstrap, and how many are drawn at a time.
RESAMPLES, _AT_ONCE = 2000, 100
# Number of random sign changes of the permutation test.
PERMUTATIONS = 9999
# Quantiles of the normal distribution: for intervals of 95 %, and for finding a loss in 4 of 5 evaluations.
_INTERVAL, _POWER = 1.959964, 0.841621
# Fewest changed questions for which the smallest loss is not larger than all of them: (1.96 + 0.84)^2.
_FEWEST = 8
# Lower scores are none: grades of a file may be so small that a quotient is infinite.
_NONE_RIGHT = 1e-9


@dataclass(frozen=True)
class PairedScores:
    """Scores of the same questions of one task under two models.

    Attributes:
        source: the source's scores [questions].
        output: the output's scores [questions].
    """

    source: Figures
    output: Figures

    @property
    def lost(self) -> int:
        """The number of questions whose score is lower under the output."""
        return int((self.output < self.source).sum())

    @property
    def gained(self) -> int:
        """The number of questions whose score is higher under the output."""
        return int((self.output > self.source).sum())

    @property
    def changed(self) -> float:
        """The sum of the squared differences: the number of questions that changed, if all scores are 0 or 1."""
        return float(((self.output - self.source) ** 2).sum())


def wilson_interval(score: float, questions: int) -> list[float]:
    """Return the 95 % interval of a share, by Wilson's method, which holds near 0 and 1 too.

    Args:
        score: the mean score, from 0 to 1.
        questions: the number of questions, at least 1.
    """
    square = _INTERVAL**2 / questions
    middle = (score + square / 2) / (1 + square)
    half = _INTERVAL / (1 + square) * math.sqrt(score * (1 - score) / questions + square / (4 * questions))
    return [max(0.0, middle - half), min(1.0, middle + half)]


def mcnemar(lost: int, gained: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided.

    It is the probability that the questions that changed are so unequally divided, if both directions are equally
    likely.

    Args:
        lost: the number of questions that only the source answers rightly.
        gained: the number of questions that only the output answers rightly.
    """
    changed = lost + gained
    # Exact integers: the number of ways to choose so many of them, and their sum.
    term, tail = 1, 0
    for number in range(min(lost, gained) + 1):
        tail += term
        term = term * (changed - number) // (number + 1)
    return min(1.0, 2 * tail / (1 << changed))


def paired_p(scores: PairedScores, seed: int) -> float:
    """Return the p-value of a paired permutation test, two-sided.

    It is the probability of a difference as large as this one, if the sign of each question's difference is random. If
    all scores are 0 or 1, that is McNemar's exact test. Otherwise signs are drawn PERMUTATIONS times.

    Args:
        scores: the scores.
        seed: seed of the signs.
    """
    differences = scores.output - scores.source
    if np.isin(differences, (-1, 0, 1)).all():
        return mcnemar(scores.lost, scores.gained)
    generator, sums = np.random.default_rng(seed), np.zeros(PERMUTATIONS)
    # Signs of equal differences are drawn together: the number of positive ones is binomial.
    for size, count in zip(*np.unique(np.abs(differences), return_counts=True), strict=True):
        sums += size * (2 * generator.binomial(count, 0.5, PERMUTATIONS) - count)
    # Sums in another order differ by rounding.
    as_large = int((np.abs(sums) >= abs(differences.sum()) - 1e-9).sum())
    return (1 + as_large) / (1 + PERMUTATIONS)


def bootstrap_means(tasks: Sequence[PairedScores], seed: int) -> tuple[Figures, Figures]:
    """Resample the questions of each task, and return the mean over tasks of the mean scores.

    Args:
        tasks: the scores of each task; at least one task, each with at least one question.
        seed: seed of the bootstrap.

    Returns:
        The means of the source and of the output, each [RESAMPLES].
    """
    generator = np.random.default_rng(seed)
    sums = np.zeros((2, RESAMPLES))
    for task in tasks:
        # Only a few pairs of scores occur, mostly four, so how often each is drawn is enough.
        pairs, counts = np.unique(np.stack([task.source, task.output]), axis=1, return_counts=True)
        questions = len(task.source)
        for start in range(0, RESAMPLES, _AT_ONCE):
            drawn = generator.multinomial(questions, counts / questions, size=_AT_ONCE)
            sums[:, start : start + _AT_ONCE] += pairs @ drawn.T / questions
    source, output = sums / len(tasks)
    return source, output


def difference_interval(source: Figures, output: Figures) -> list[float]:
    """Return the 95 % interval of output - source, from `bootstrap_means`."""
    return _interval(output - source)


def recovery(source: float, output: float) -> float | None:
    """Return output / source; None if the source has none right."""
    return None if source < _NONE_RIGHT else output / source


def recovery_interval(source: Figures, output: Figures) -> list[float] | None:
    """Return the 95 % interval of output / source, from `bootstrap_means`; None if the source's is 0 in a resample."""
    return None if (source < _NONE_RIGHT).any() else _interval(output / source)


def _interval(values: Figures) -> list[float]:
    return [float(edge) for edge in np.quantile(values, [0.025, 0.975])]


def smallest_loss(changed: float, questions: int) -> float:
    """Return the smallest loss that an evaluation would show in 4 of 5 cases, at a level of 95 %.

    A difference varies by as much as there are questions that only one of the models answers rightly.

    Args:
        changed: the number of those questions, as `PairedScores.changed`. Eight are assumed at least: with fewer, a
            loss of all of them would be smaller than what shows.
        questions: the number of all questions.

    Returns:
        The loss as a fraction of 1.
    """
    return min(1.0, (_INTERVAL + _POWER) * math.sqrt(max(_FEWEST, changed)) / questions)

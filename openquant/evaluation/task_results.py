"""Builds the figures of tasks, as eval.json has them; docs/evaluation.md explains the keys.

evaluate_tasks(task_requests, task_passes, [[], []], seed=0)[0]["pooled"]["metrics"][0]["recovery"]      # 0.993
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.questions import Figures, TaskAnswers
from .task_passes import TaskPasses
from .task_requests import TaskRequests
from .task_statistics import (
    PairedScores,
    bootstrap_means,
    difference_interval,
    mcnemar,
    paired_p,
    recovery,
    recovery_interval,
    smallest_loss,
    wilson_interval,
)
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
        changed = _paired(first["metric"], source, output).changed
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
            _metric(metric, _paired(metric, source, output), seed)
            for metric in source[0].scores
            if all(metric in answers.scores for answers in source)
        ],
        "answered_otherwise": float((picked[0] != picked[1]).mean()),
        "kl": kl,
    }


def _paired(metric: str, source: Sequence[TaskAnswers], output: Sequence[TaskAnswers]) -> PairedScores:
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

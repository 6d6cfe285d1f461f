"""Types of the keys of eval.json that come from tasks. docs/evaluation.md says what each key means."""

from __future__ import annotations

from typing import TypedDict


class TaskMetric(TypedDict):
    """One metric of a task under source and output; scores are fractions of 1, `p` is that of a paired test."""

    metric: str
    source: float
    source_interval: list[float]
    output: float
    output_interval: list[float]
    difference: float
    difference_interval: list[float]
    p: float
    recovery: float | None
    recovery_interval: list[float] | None
    lost: int
    gained: int


class MeanMetric(TypedDict):
    """The mean of one metric over tasks."""

    metric: str
    tasks: int
    source: float
    output: float
    difference: float
    difference_interval: list[float]
    recovery: float | None
    recovery_interval: list[float] | None


class TaskFigures(TypedDict):
    """The figures of one task, or of the questions of all tasks; `kl` is None if all answers are generated texts."""

    task: str
    questions: int
    metrics: list[TaskMetric]
    answered_otherwise: float
    kl: float | None


class TasksEvaluation(TypedDict):
    """The figures of an output on tasks."""

    named: list[str]
    limit: int | None
    chat: bool
    sha256: str
    questions: int
    requests: int
    tokens: int
    packed: bool
    tasks: list[TaskFigures]
    pooled: TaskFigures
    mean: list[MeanMetric]
    smallest_loss: float
    reading: str


def counted_questions(count: int) -> str:
    """Return a number of questions in words: "1 question", "1,319 questions"."""
    return "1 question" if count == 1 else f"{count:,} questions"

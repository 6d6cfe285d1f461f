"""Types of the keys of eval.json, for callers' type checkers. docs/evaluation.md says what each key means.

Types of the keys of eval.json that come from tasks. docs/evaluation.md says what each key means.
"""

from __future__ import annotations

from typing import TypedDict

Divergence = TypedDict(
    "Divergence",
    {
        "mean": float,
        "interval": list[float] | None,
        "median": float,
        "p90": float,
        "p99": float,
        "p999": float,
        "max": float,
        "share_above_0.1": float,
    },
)
"""Statistics of the positions' KL divergence, in nats; `interval` is the 95 % interval of the mean."""

Bin = TypedDict("Bin", {"from": float, "to": float, "positions": int, "kl": float | None})
"""The mean KL in nats of the positions in one bin, `from` included and `to` not; None if it has none."""

Brief = TypedDict(
    "Brief",
    {
        "kl": float,
        "interval": list[float] | None,
        "median": float,
        "p90": float,
        "p99": float,
        "p999": float,
        "max": float,
        "share_above_0.1": float,
        "top1": float,
        "top5": float,
        "perplexity": float,
        "rms_dp": float,
    },
)
"""Figures of the noise floor, or of the output with rounded weights alone."""


class DomainFigures(TypedDict):
    """The mean KL in nats of the documents of one file or dataset subset."""

    domain: str
    positions: int
    kl: float
    interval: list[float] | None


class Histogram(TypedDict):
    """Share of positions in each bin of KL, of the output and of the noise floor; the edges are in nats."""

    edges: list[float]
    output: list[float]
    floor: list[float]


class Perplexity(TypedDict):
    """Perplexity of the texts under both models; `interval` is the 95 % interval of the ratio."""

    source: float
    output: float
    ratio: float
    interval: list[float] | None


class _Distance(TypedDict):
    layer: str
    distance: float
    floor: float | None


class LayerDistance(_Distance, total=False):
    """Relative distance of hidden states after a decoder layer; `routed_otherwise` only if it has experts."""

    routed_otherwise: float


class ModelSizes(TypedDict):
    """Sizes of all tensors, in bytes."""

    source: int
    output: int


class NamedModel(TypedDict):
    """A model: its name, the SHA-256 of its files, and a stamp by which unchanged files are recognized unread."""

    name: str
    digest: str
    stamp: str


class _Answer(TypedDict):
    prompt: str
    source: str
    output: str
    differs_at: int | None


class Answer(_Answer, total=False):
    """Both models' answers to a prompt, or with `text` and `along` their teacher-forced predictions along that text."""

    text: str
    along: bool


class _Read(TypedDict):
    sha256: str
    documents: int
    length: int
    positions: int


class TextRead(_Read, total=False):
    """The texts that were read, and where they come from."""

    builtin: str
    files: list[str]
    dataset: str | None


class _OutputEvaluation(TypedDict):
    kl: Divergence
    kl_by_confidence: list[Bin]
    kl_by_position: list[Bin]
    kl_by_domain: list[DomainFigures]
    kl_by_document: list[float]
    kl_histogram: Histogram
    top1: float
    top5: float
    perplexity: Perplexity
    rms_dp: float
    weights_only: Brief
    weight_error: float
    kv_cache: str
    layers: list[LayerDistance]
    verdict: str
    reasons: list[str]
    suspects: list[str]
    texts: list[Answer]
    sizes: ModelSizes
    text: TextRead
    versions: dict[str, str]
    seed: int
    device: str
    floor: Brief
    source: NamedModel
    output: NamedModel


class OutputEvaluation(_OutputEvaluation, total=False):
    """The evaluation of one output: the content of its eval.json. It has `tasks` only if tasks were named."""

    tasks: TasksEvaluation


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
    """The figures of one task, or of the questions of all tasks."""

    task: str
    questions: int
    metrics: list[TaskMetric]
    answered_otherwise: float
    kl: float


class TasksEvaluation(TypedDict):
    """The figures of an output on tasks."""

    named: list[str]
    limit: int | None
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

"""Types of the keys of eval.json, for callers' type checkers, and the word of the verdict, which the mean KL decides.

docs/evaluation.md says what each key means. Reports import this module, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
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


# "same": mean KL up to this many times the floor's, which another program's rounding could cause.
AT_FLOOR = 2.0
# "close", "similar" and "changed": mean KL up to these, in nats. On two models and in all schemes the share of tokens
# that differ was half the square root of the KL (docs/results.md): one token in 18, in 6 and in 3.
CLOSE, SIMILAR, CHANGED = 0.01, 0.1, 0.5
# The interval of fewer texts than this says next to nothing: there are too few to draw anew from.
ENOUGH_TEXTS = 8


def verdict_word(kl: float, floor: float) -> str:
    """Return the verdict on an output: "same", "close", "similar", "changed" or "broken".

    Args:
        kl: mean KL divergence of the output from the source, in nats.
        floor: mean KL divergence of the noise floor, the source with rounding noise, in nats.
    """
    if kl <= AT_FLOOR * floor:
        return "same"
    limits = {"close": CLOSE, "similar": SIMILAR, "changed": CHANGED}
    return next((word for word, limit in limits.items() if kl <= limit), "broken")


def kl_text(kl: float, floor: float) -> str:
    """Format a mean KL divergence with three digits, or as many as its verdict needs: "0.0123"; "0.1003" is "changed".

    Args:
        kl: mean KL divergence of the output from the source, in nats.
        floor: that of the noise floor.
    """
    return round_figure(kl, lambda figure: verdict_word(figure, floor))


def round_figure(figure: float, said: Callable[[float], object]) -> str:
    """Format a figure with three digits, or as many as it takes to say the same of it.

    Args:
        figure: a finite number.
        said: what is said of a figure, such as whether it is above a limit.
    """
    texts = (f"{figure:.{digits}g}" for digits in range(3, 18))
    return next(text for text in texts if said(float(text)) == said(figure))

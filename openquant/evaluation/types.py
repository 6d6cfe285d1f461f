"""The types of eval.json, for callers' type checkers: what each key holds; docs/evaluation.md says what it means."""

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
"""The KL divergence of positions, in nats."""

Bin = TypedDict("Bin", {"from": float, "to": float, "positions": int, "kl": float | None})
"""The mean KL of the positions between two edges."""

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
"""The figures of the floor, and of weights alone."""


class DomainFigures(TypedDict):
    """The mean KL of one file or subset."""

    domain: str
    positions: int
    kl: float
    interval: list[float] | None


class Histogram(TypedDict):
    """Shares of positions between edges."""

    edges: list[float]
    output: list[float]
    floor: list[float]


class Perplexity(TypedDict):
    """The perplexity of the text."""

    source: float
    output: float
    ratio: float
    interval: list[float] | None


class _Distance(TypedDict):
    layer: str
    distance: float
    floor: float | None


class LayerDistance(_Distance, total=False):
    """How far hidden states are after a layer; `routed_otherwise` of experts alone."""

    routed_otherwise: float


class ModelSizes(TypedDict):
    """Bytes of all tensors."""

    source: int
    output: int


class NamedModel(TypedDict):
    """A model; the digest of its weights and files, and the stamp, which is the same only where they are."""

    name: str
    digest: str
    stamp: str


class _Answer(TypedDict):
    prompt: str
    source: str
    output: str
    differs_at: int | None


class Answer(_Answer, total=False):
    """What both models answer; `text` where both go along one instead."""

    text: str


class _Read(TypedDict):
    sha256: str
    documents: int
    length: int
    positions: int


class TextRead(_Read, total=False):
    """What was read, and where it comes from."""

    builtin: str
    files: list[str]
    dataset: str | None


class OutputEvaluation(TypedDict):
    """What was found of one output: its eval.json."""

    kl: Divergence
    kl_by_confidence: list[Bin]
    kl_by_position: list[Bin]
    kl_by_domain: list[DomainFigures]
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

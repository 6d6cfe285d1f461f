"""How far a model's answers are from its source's: figures of two models' logits for the same texts.

`compare_logits` makes a `DocumentRecord` of each document, `summary` the figures of some of them. Records of several
processes are put together by concatenating them. docs/evaluation.md defines every figure.

    records = [compare(source, output, ids, "a.txt", "text", names) for ...]
    summary(records)["kl"]      # {"mean": 0.00129, "interval": [0.00121, 0.00137], "median": 0.0009, ...}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import SourceError

# Logits held in float32 at a time. With 152k tokens a pair of positions takes 3.1 ms of a CPU, with eight times as many
# 6.5: they no longer fit its caches.
CHUNK = 1 << 20
# Of the bootstrap.
RESAMPLES = 2000
# The source's largest probability, in five bins.
CONFIDENCE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# Where log-probabilities differ by more, exp of the difference is beyond float32, or the smaller probability is.
FAR = 40
# A position of more nats than this is told apart by eye.
LARGE = 0.1
# Edges of the histogram, four to a decade; what lies beyond counts for the outermost.
EDGES = tuple(float(f"{10 ** (quarter / 4):.4g}") for quarter in range(-32, 5))

Figures = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DocumentRecord:
    """What is known of each position of one document but the last, whose next token is not known.

    Attributes:
        domain: which texts it belongs to.
        name: the document.
        kl: KL(source||output) over the whole vocabulary, in nats.
        confidence: the source's largest probability.
        source_nll: negative log-probability of the next token by the source, in nats.
        output_nll: the same by the output.
        top1: whether both have the same most probable token.
        top5: whether the source's most probable token is among the output's five.
    """

    domain: str
    name: str
    kl: Figures
    confidence: Figures
    source_nll: Figures
    output_nll: Figures
    top1: Flags
    top5: Flags


@dataclass(frozen=True)
class ModelNames:
    """The two models, for messages."""

    source: str
    output: str


def compare_logits(
    source: Tensor, output: Tensor, ids: Tensor, domain: str, name: str, models: ModelNames
) -> DocumentRecord:
    """The record of one document.

    Args:
        source: logits [length, vocabulary] of the source, of any floating dtype.
        output: those of the output.
        ids: the document's tokens [length].
        domain: which texts it belongs to.
        name: what it is called.
        models: what the models are called.

    Raises:
        SourceError: a logit is NaN or infinite, or the vocabularies differ.
    """
    if source.shape != output.shape:
        raise SourceError(
            f"{models.source} has logits for {source.shape[-1]} tokens, {models.output} for {output.shape[-1]}",
            "compare models of one vocabulary",
        )
    parts = []
    following = ids[1:].to(source.device)
    step = max(1, CHUNK // source.shape[-1])
    for low in range(0, len(following), step):
        rows = slice(low, min(low + step, len(following)))
        p = _log_probabilities(source[rows], low, name, models.source)
        q = _log_probabilities(output[rows], low, name, models.output)
        parts.append(_figures(p, q, following[rows]))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    kl, confidence, source_nll, output_nll, top1, top5 = columns
    return DocumentRecord(domain, name, kl, confidence, source_nll, output_nll, top1, top5)


def _log_probabilities(logits: Tensor, low: int, name: str, model: str) -> Tensor:
    """float32 log-probabilities [n, vocabulary] of the positions from `low` on."""
    wide = logits.float()
    # Of all in one go: a sum is finite only where each is, unless finite ones overflow, which is as wrong.
    if not torch.isfinite(wide.sum()):
        bad = ~torch.isfinite(wide).all(-1)
        if bad.any():
            raise SourceError(
                f"{model} answers with NaN or infinity at position {low + int(bad.int().argmax())} of {name}",
                "its weights or scales are damaged, or its numbers overflow: openquant verify DIR --full looks at both",
            )
    return wide.log_softmax(-1)


def _figures(p: Tensor, q: Tensor, following: Tensor) -> tuple[Tensor, ...]:
    """The columns of a record, of log-probabilities [n, vocabulary] and the tokens that follow [n]."""
    source, gap = p.exp(), p - q
    # Each term is source * gap, less source and plus output: these sum to nothing over all tokens, and make each term
    # source * (gap + expm1(-gap)), of which none is negative and none lost to what float32 rounds off a probability.
    kl = (source * (gap + torch.expm1(-gap))).sum(-1, dtype=torch.float64)
    far = gap.amin(-1) < -FAR
    if far.any():
        kl[far] = (source * gap - source + q.exp())[far].sum(-1, dtype=torch.float64)
    top = p.argmax(-1, keepdim=True)
    above = (q > q.gather(-1, top)).sum(-1)
    token = following[:, None]
    return (
        kl.clamp(min=0),
        source.gather(-1, top)[:, 0].double(),
        -p.gather(-1, token)[:, 0].double(),
        -q.gather(-1, token)[:, 0].double(),
        q.argmax(-1) == top[:, 0],
        above < 5,
    )


def summary(records: Sequence[DocumentRecord], seed: int = 0) -> dict[str, Any]:
    """The figures of some documents, as eval.json has them but for those of the floor and of layers.

    Args:
        records: at least one, of at least one position each.
        seed: of the bootstrap.
    """
    kl = _joined(records, lambda record: record.kl)
    confidence = _joined(records, lambda record: record.confidence)
    before, after = (_joined(records, pick) for pick in (lambda r: r.source_nll, lambda r: r.output_nll))
    position = np.concatenate([np.arange(len(record.kl)) for record in records])
    median, p90, p99, p999 = (float(found) for found in np.quantile(kl, [0.5, 0.9, 0.99, 0.999]))
    domains = list(dict.fromkeys(record.domain for record in records))
    ratio = interval([(record.output_nll - record.source_nll) for record in records], seed)
    return {
        "kl": {
            "mean": mean(kl),
            "interval": interval([record.kl for record in records], seed),
            "median": median,
            "p90": p90,
            "p99": p99,
            "p999": p999,
            "max": float(kl.max()),
            f"share_above_{LARGE}": float((kl > LARGE).mean()),
        },
        "kl_by_confidence": [
            {"from": low, "to": high, "positions": int(chosen.sum()), "kl": mean(kl[chosen])}
            for low, high in pairwise(CONFIDENCE)
            for chosen in [(confidence >= low) & ((confidence < high) | (high == 1))]
        ],
        "kl_by_position": [
            {"from": low, "to": high, "positions": int(chosen.sum()), "kl": mean(kl[chosen])}
            for low, high in _spans(int(position.max()) + 1)
            for chosen in [(position >= low) & (position < high)]
        ],
        "kl_by_domain": [
            {
                "domain": domain,
                "positions": sum(map(len, of_domain)),
                "kl": mean(np.concatenate(of_domain)),
                "interval": interval(of_domain, seed),
            }
            for domain in domains
            for of_domain in [[record.kl for record in records if record.domain == domain]]
        ],
        "top1": float(_joined(records, lambda record: record.top1).mean()),
        "top5": float(_joined(records, lambda record: record.top5).mean()),
        "perplexity": {
            "source": math.exp(mean(before)),
            "output": math.exp(mean(after)),
            "ratio": math.exp(mean(after - before)),
            "interval": ratio and [math.exp(edge) for edge in ratio],
        },
        "rms_dp": math.sqrt(mean((np.exp(-after) - np.exp(-before)) ** 2)),
    }


def histogram(records: Sequence[DocumentRecord]) -> list[float]:
    """The share of positions whose KL lies between two neighbours of EDGES; what is beyond counts for the outermost."""
    kl = np.clip(_joined(records, lambda record: record.kl), EDGES[0], np.nextafter(EDGES[-1], 0))
    counts, _ = np.histogram(kl, EDGES)
    return [float(share) for share in counts / len(kl)]


def interval(documents: Sequence[Figures], seed: int) -> list[float] | None:
    """A 95 % interval of the mean over positions, bootstrapped over documents; None where there is one alone.

    Args:
        documents: a figure of each position, by document.
        seed: of the bootstrap.
    """
    if len(documents) < 2:
        return None
    sums = np.array([figures.sum() for figures in documents])
    counts = np.array([len(figures) for figures in documents], np.float64)
    chance = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = chance.integers(0, len(sums), len(sums))
        means[number] = sums[drawn].sum() / counts[drawn].sum()
    return [float(edge) for edge in np.quantile(means, [0.025, 0.975])]


def mean(figures: npt.NDArray[Any]) -> float:
    """Their mean; zero of none."""
    return float(figures.mean()) if len(figures) else 0.0


def _joined(records: Sequence[DocumentRecord], pick: Callable[[DocumentRecord], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([pick(record) for record in records])


def _spans(length: int) -> list[tuple[int, int]]:
    """[(0, 16), (16, 32), (32, 64), ...] up to `length`."""
    edges = [0, 16]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return [(low, min(high, length)) for low, high in pairwise(edges)]

"""KL divergence, token agreement and perplexity of two models' logits for the same texts.

`compare_logits` makes a `DocumentRecord` of each document; `summarize` computes the figures of a list of records.
Records of several processes are simply concatenated. docs/figures.md defines every figure.

    records = [compare_logits(source, output, document, names) for ...]
    summarize(records)["kl"]      # {"mean": 0.00129, "interval": [0.00121, 0.00137], "median": 0.0009, ...}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data.corpus import Document
from ..errors import SourceError
from ..patterns import group_pairs

# Logits converted to float32 at a time. With a vocabulary of 49k a position takes 0.5 ms on a CPU; with chunks four
# times as large it takes 1.0, as they no longer fit the CPU's caches.
CHUNK = 1 << 18
# Resamples of the bootstrap.
RESAMPLES = 2000
# Bin edges of the source's largest probability.
CONFIDENCE_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# Log-probabilities that differ by more overflow float32 when the difference is exponentiated.
MAX_EXPONENT = 40
# Positions with a larger KL, in nats, are counted in `share_above_0.1`.
LARGE_KL = 0.1
# Edges of the histogram of KL, in nats, four to a decade. Values beyond them count in the outermost bins.
EDGES = tuple(float(f"{10 ** (quarter / 4):.4g}") for quarter in range(-32, 5))

Figures = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DocumentRecord:
    """Figures at each position of one document. The last position is left out, as its next token is unknown.

    All arrays are [length - 1], float64 or bool.

    Attributes:
        domain: the file or dataset subset that the document comes from.
        name: name of the document, for messages.
        kl: KL(source || output) over the whole vocabulary, in nats.
        confidence: the source's largest probability.
        source_nll: negative log-probability of the next token under the source, in nats.
        output_nll: negative log-probability of the next token under the output, in nats.
        top1: whether both models have the same most probable token.
        top5: whether the source's most probable token is among the output's five most probable.
    """

    domain: str
    name: str
    kl: Figures
    confidence: Figures
    source_nll: Figures
    output_nll: Figures
    top1: Flags
    top5: Flags

    def figures(self) -> Figures:
        """Return all arrays as one, float64 [6, length - 1], for `from_figures`."""
        return np.stack([self.kl, self.confidence, self.source_nll, self.output_nll, self.top1, self.top5])

    @classmethod
    def from_figures(cls, document: Document, figures: Figures) -> DocumentRecord:
        """Make the record of a document whose `figures()` these are."""
        return cls(document.domain, document.name, *figures[:4], *figures[4:].astype(bool))


def compare_logits(source: Tensor, output: Tensor, document: Document, models: tuple[str, str]) -> DocumentRecord:
    """Compare two models' logits for one document.

    Args:
        source: the source's logits [length, vocabulary], any floating dtype.
        output: the output's logits [length, vocabulary], any floating dtype.
        document: the document, of two tokens at least.
        models: names of source and output, for messages.

    Returns:
        KL divergence and negative log-likelihoods in nats, the source's largest probability, and token agreement, at
        each position but the last: arrays [length - 1], float64 or, for agreement, bool.

    Raises:
        SourceError: a logit is NaN or infinite.
    """
    chunks = []
    next_tokens = torch.tensor(document.ids[1:], device=source.device)
    step = max(1, CHUNK // source.shape[-1])
    for start in range(0, len(next_tokens), step):
        rows = slice(start, min(start + step, len(next_tokens)))
        log_p = log_probabilities(source[rows], start, document.name, models[0])
        log_q = log_probabilities(output[rows], start, document.name, models[1])
        chunks.append(_position_figures(log_p, log_q, next_tokens[rows]))

    columns = [torch.cat(column).cpu().numpy() for column in zip(*chunks, strict=True)]
    return DocumentRecord(document.domain, document.name, *columns)


def log_probabilities(logits: Tensor, start: int, name: str, model: str) -> Tensor:
    """Compute log-probabilities in float32.

    Args:
        logits: logits [n, vocabulary], any floating dtype.
        start: position of the first row, for messages.
        name: name of the text, for messages.
        model: name of the model, for messages.

    Returns:
        The log-probabilities [n, vocabulary].

    Raises:
        SourceError: a logit is NaN or infinite.
    """
    wide = logits.float()
    # The sum is a cheap check: it is finite only if every logit is. The rows are looked at only if it is not.
    if not torch.isfinite(wide.sum()):
        bad = ~torch.isfinite(wide).all(-1)
        if bad.any():
            raise SourceError(
                f"{model} answers with NaN or infinity at position {start + int(bad.int().argmax())} of {name}",
                "its weights or scales are damaged, or its numbers overflow: openquant verify DIR finds NaN "
                "in a quantized directory, openquant diagnose MODEL in a source",
            )
    return wide.log_softmax(-1)


def _position_figures(log_p: Tensor, log_q: Tensor, next_tokens: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of a DocumentRecord, each [n], from log-probabilities [n, vocabulary] and next tokens [n]."""
    p = log_p.exp()
    kl = divergences(p, log_p, log_q)

    top = log_p.argmax(-1, keepdim=True)
    rank = (log_q > log_q.gather(-1, top)).sum(-1)
    token = next_tokens[:, None]

    return (
        kl,
        p.gather(-1, top)[:, 0].double(),
        -log_p.gather(-1, token)[:, 0].double(),
        -log_q.gather(-1, token)[:, 0].double(),
        log_q.argmax(-1) == top[:, 0],
        rank < 5,
    )


def divergences(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q) of each row, in nats.

    Args:
        p: probabilities [n, vocabulary], float32.
        log_p: log-probabilities [n, vocabulary], float32.
        log_q: log-probabilities [n, vocabulary], float32.

    Returns:
        The divergences [n], float64, none below 0.
    """
    gap = log_p - log_q
    # KL is the sum of p * gap. Adding q - p to each term changes nothing, as both sum to 1, but makes every term
    # p * (gap + expm1(-gap)): none is negative, and small ones are not lost to float32 rounding.
    kl = (p * (gap + torch.expm1(-gap))).sum(-1, dtype=torch.float64)
    overflowed = gap.amin(-1) < -MAX_EXPONENT
    if overflowed.any():
        kl[overflowed] = (p * gap - p + log_q.exp())[overflowed].sum(-1, dtype=torch.float64)
    return kl.clamp(min=0)


def summarize(records: Sequence[DocumentRecord], seed: int = 0) -> dict[str, Any]:
    """Compute the figures of some documents.

    Args:
        records: what `compare_logits` returned for each document; at least one, each with at least one position.
        seed: seed of the bootstrap.

    Returns:
        The keys of eval.json that come from logits: `kl`, `kl_by_confidence`, `kl_by_position`, `kl_by_domain`,
        `kl_by_document` (all in nats), `top1` and `top5` as shares of 1, `perplexity`, and `rms_dp`, the root mean
        square of the difference in probability of the next token.
    """
    figures = np.concatenate([record.figures() for record in records], axis=1)
    kl, confidence, source_nll, output_nll, top1, top5 = figures
    position = np.concatenate([np.arange(len(record.kl)) for record in records])
    median, p90, p99, p999 = (float(quantile) for quantile in np.quantile(kl, [0.5, 0.9, 0.99, 0.999]))
    nll_interval = bootstrap_interval([(record.output_nll - record.source_nll) for record in records], seed)

    return {
        "kl": {
            "mean": mean(kl),
            "interval": bootstrap_interval([record.kl for record in records], seed),
            "median": median,
            "p90": p90,
            "p99": p99,
            "p999": p999,
            "max": float(kl.max()),
            f"share_above_{LARGE_KL}": float((kl > LARGE_KL).mean()),
        },
        "kl_by_confidence": _kl_in_bins(kl, confidence, CONFIDENCE_EDGES),
        "kl_by_position": _kl_in_bins(kl, position, _position_edges(int(position.max()) + 1)),
        "kl_by_domain": _kl_by_domain(records, seed),
        "kl_by_document": [mean(record.kl) for record in records],
        "top1": float(top1.mean()),
        "top5": float(top5.mean()),
        "perplexity": {
            "source": math.exp(mean(source_nll)),
            "output": math.exp(mean(output_nll)),
            "ratio": math.exp(mean(output_nll - source_nll)),
            "interval": nll_interval and [math.exp(edge) for edge in nll_interval],
        },
        "rms_dp": math.sqrt(mean((np.exp(-output_nll) - np.exp(-source_nll)) ** 2)),
    }


def _kl_in_bins(kl: Figures, values: npt.NDArray[Any], edges: Sequence[float]) -> list[dict[str, Any]]:
    """The mean KL of the positions whose value is in each bin; the last bin has its upper edge."""
    bins = []
    for low, high in pairwise(edges):
        in_bin = (values >= low) & ((values < high) | (high == edges[-1]))
        of_bin = mean(kl[in_bin]) if in_bin.any() else None
        bins.append({"from": low, "to": high, "positions": int(in_bin.sum()), "kl": of_bin})
    return bins


def _kl_by_domain(records: Sequence[DocumentRecord], seed: int) -> list[dict[str, Any]]:
    """The mean KL of each file or subset, with its interval."""
    of_domains = group_pairs((record.domain, record.kl) for record in records)
    return [
        {
            "domain": domain,
            "positions": sum(map(len, kl)),
            "kl": mean(np.concatenate(kl)),
            "interval": bootstrap_interval(kl, seed),
        }
        for domain, kl in of_domains.items()
    ]


def kl_histogram(records: Sequence[DocumentRecord]) -> list[float]:
    """Count the KL divergences of all positions in bins.

    Args:
        records: what `compare_logits` returned for each document; at least one position in all.

    Returns:
        For each bin between two neighbours of EDGES, in nats, the share of positions in it: len(EDGES) - 1 shares of 1.
        Values beyond the edges count in the outermost bins.
    """
    kl = np.clip(np.concatenate([record.kl for record in records]), EDGES[0], np.nextafter(EDGES[-1], 0))
    counts, _ = np.histogram(kl, EDGES)
    return [float(share) for share in counts / len(kl)]


def bootstrap_interval(documents: Sequence[Figures], seed: int) -> list[float] | None:
    """Compute the 95 % interval of the mean over positions by a bootstrap over documents.

    Args:
        documents: for each document a figure of each of its positions, float64 [positions].
        seed: seed of the bootstrap.

    Returns:
        [lower bound, upper bound], in the unit of the figures; None for a single document.
    """
    if len(documents) < 2:
        return None
    sums = np.array([figures.sum() for figures in documents])
    counts = np.array([len(figures) for figures in documents], np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        sample = generator.integers(0, len(sums), len(sums))
        means[number] = sums[sample].sum() / counts[sample].sum()
    return [float(edge) for edge in np.quantile(means, [0.025, 0.975])]


def mean_kl(documents: Sequence[DocumentRecord]) -> float:
    """Return the mean KL divergence over all positions of all documents, in nats."""
    return mean(np.concatenate([record.kl for record in documents]))


def mean(figures: npt.NDArray[Any]) -> float:
    """Return the mean of an array; 0 if it is empty.

    Args:
        figures: float or bool, [n] or of more axes.
    """
    return float(figures.mean()) if len(figures) else 0.0


def _position_edges(length: int) -> list[int]:
    """Return edges of bins that double: [0, 16, 32, 64, ...] up to `length`."""
    edges = [0, 16]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return [*edges[:-1], length]

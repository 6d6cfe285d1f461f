"""Figures of two models' logits, against a plain implementation in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from openquant.data.corpus import Document
from openquant.errors import SourceError
from openquant.evaluation.kl import EDGES, DocumentRecord, bootstrap_interval, compare_logits, kl_histogram, summarize

MODELS = ("source", "output")
VOCABULARY, LENGTH, DOCUMENTS = 500, 150, 6


def logits(seed: int, dtype: torch.dtype = torch.bfloat16, noise: float = 0.05) -> list[tuple[torch.Tensor, ...]]:
    """Of some documents: the source's, the output's, and the tokens."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(DOCUMENTS):
        source = 3 * torch.randn(LENGTH, VOCABULARY, generator=chance)
        output = source + noise * torch.randn(LENGTH, VOCABULARY, generator=chance)
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=chance)
        found.append((source.to(dtype), output.to(dtype), ids))
    return found


def records(documents: list[tuple[torch.Tensor, ...]]) -> list[DocumentRecord]:
    return [
        compare_logits(source, output, Document(f"domain {number % 2}", f"document {number}", (*ids.tolist(),)), MODELS)
        for number, (source, output, ids) in enumerate(documents)
    ]


def test_figures_are_those_of_a_plain_implementation() -> None:
    documents = logits(0)
    kl, top1, top5, before, after, confidence = [], [], [], [], [], []
    for source, output, ids in documents:
        for position in range(LENGTH - 1):
            x, y = (each[position].double().numpy() for each in (source, output))
            p, q = (np.exp(each - each.max()) / np.exp(each - each.max()).sum() for each in (x, y))
            kl.append(sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True)))
            top1.append(p.argmax() == q.argmax())
            top5.append((q > q[p.argmax()]).sum() < 5)
            before.append(-math.log(p[ids[position + 1]]))
            after.append(-math.log(q[ids[position + 1]]))
            confidence.append(p.max())
    found = summarize(records(documents))
    assert found["kl"]["mean"] == pytest.approx(np.mean(kl), rel=1e-5)
    assert found["kl"]["max"] == pytest.approx(max(kl), rel=1e-5)
    for name, share in (("median", 50), ("p90", 90), ("p99", 99), ("p999", 99.9)):
        assert found["kl"][name] == pytest.approx(np.percentile(kl, share), rel=1e-5)
    assert found["top1"] == np.mean(top1)
    assert found["top5"] == np.mean(top5)
    assert found["perplexity"]["source"] == pytest.approx(math.exp(np.mean(before)), rel=1e-6)
    assert found["perplexity"]["output"] == pytest.approx(math.exp(np.mean(after)), rel=1e-6)
    assert found["perplexity"]["ratio"] == pytest.approx(math.exp(np.mean(after) - np.mean(before)), rel=1e-6)
    # llama.cpp's "RMS delta p".
    change = [math.exp(-b) - math.exp(-a) for a, b in zip(before, after, strict=True)]
    assert found["rms_dp"] == pytest.approx(math.sqrt(np.mean(np.square(change))), rel=1e-5)
    bins = [[k for k, c in zip(kl, confidence, strict=True) if low <= c < low + 0.2] for low in (0, 0.2, 0.4, 0.6, 0.8)]
    assert [each["positions"] for each in found["kl_by_confidence"]] == [len(each) for each in bins]
    assert [each["kl"] for each in found["kl_by_confidence"]] == pytest.approx(
        [np.mean(each) for each in bins], rel=1e-5
    )
    by_position = np.reshape(kl, (DOCUMENTS, LENGTH - 1))
    edges = [0, 16, 32, 64, 128, 149]
    assert [(each["from"], each["to"]) for each in found["kl_by_position"]] == [*pairwise(edges)]
    assert found["kl_by_position"][2]["kl"] == pytest.approx(by_position[:, 32:64].mean(), rel=1e-5)
    assert [each["domain"] for each in found["kl_by_domain"]] == ["domain 0", "domain 1"]
    assert found["kl_by_domain"][1]["kl"] == pytest.approx(by_position[1::2].mean(), rel=1e-5)
    assert found["kl_by_domain"][1]["positions"] == 3 * (LENGTH - 1)
    assert found["kl_by_document"] == pytest.approx(by_position.mean(1), rel=1e-5)


def test_a_small_kl_is_not_lost_in_float32() -> None:
    # What a float32 of log(vocabulary) rounds away, 5e-7, is ten times as much as this KL.
    chance = torch.Generator().manual_seed(1)
    source = 3 * torch.randn(65, 100_000, generator=chance)
    output = source + 3e-4 * torch.randn(source.shape, generator=chance)
    p, q = source[:-1].double().log_softmax(-1), output[:-1].double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).numpy()
    found = compare_logits(source, output, Document("", "", (0,) * 65), MODELS)
    assert exact.mean() < 6e-8
    assert found.kl.mean() == pytest.approx(exact.mean(), rel=1e-4)
    assert compare_logits(source, source, Document("", "", (0,) * 65), MODELS).kl.max() == 0


def test_tokens_that_only_one_of_two_models_holds_possible() -> None:
    # Up to where a probability, or the ratio of two, is no float32.
    chance = torch.Generator().manual_seed(5)
    source, output = torch.randn(9, 50, generator=chance), torch.randn(9, 50, generator=chance)
    height = torch.tensor([30, 39, 41, 60, 87, 90, 110, 500])
    source[:-1, 3] += height
    output[:-1, 7] += height
    p, q = source[:-1].double().log_softmax(-1), output[:-1].double().log_softmax(-1)
    found = compare_logits(source, output, Document("", "", (0,) * 9), MODELS)
    assert found.kl == pytest.approx((p.exp() * (p - q)).sum(-1).numpy(), rel=1e-5)


def test_the_interval_is_that_of_documents_not_of_positions() -> None:
    chance = np.random.default_rng(2)
    # Positions of a document are alike, so that only their number counts.
    means = chance.normal(10, 1, 40)
    low, high = bootstrap_interval(
        [np.full(size, mean) for size, mean in zip(chance.integers(50, 150, 40), means, strict=True)], seed=0
    )
    assert high - low == pytest.approx(2 * 1.96 * means.std() / math.sqrt(40), rel=0.25)
    assert low < means.mean() < high
    assert bootstrap_interval([np.ones(3)], seed=0) is None
    assert bootstrap_interval([np.ones(3), np.ones(4)], seed=0) == [1, 1]


def test_the_ratio_of_perplexities_is_paired() -> None:
    chance = np.random.default_rng(3)
    made = []
    for number in range(20):
        # Documents differ far more than the two models do.
        nll = chance.normal(chance.uniform(1, 6), 1, 100)
        flags = np.ones(100, bool)
        made.append(DocumentRecord("", str(number), np.zeros(100), np.ones(100), nll, nll + 0.01, flags, flags))
    found = summarize(made)["perplexity"]
    assert found["ratio"] == pytest.approx(math.exp(0.01))
    assert found["interval"] == pytest.approx([math.exp(0.01)] * 2)


def test_the_histogram_counts_every_position_once() -> None:
    one = records(logits(4))[0]
    shares = kl_histogram([one])
    assert len(shares) == len(EDGES) - 1
    assert sum(shares) == pytest.approx(1)
    middle = float(np.median(one.kl))
    place = next(number for number, edge in enumerate(EDGES) if edge > middle) - 1
    assert shares[place] == np.mean((one.kl >= EDGES[place]) & (one.kl < EDGES[place + 1]))
    flags = np.ones(4, bool)
    beyond = DocumentRecord("", "", np.array([0, 1e-9, 50, 60]), np.ones(4), np.ones(4), np.ones(4), flags, flags)
    shares = kl_histogram([beyond])
    assert (shares[0], shares[-1]) == (0.5, 0.5)
    kl = summarize([beyond])["kl"]
    assert (kl["share_above_0.1"], kl["interval"]) == (0.5, None)


def test_what_is_not_finite_is_named() -> None:
    for who, value in ((0, math.nan), (1, -math.inf)):
        *both, ids = logits(6)[0]
        both[who][70, 3] = value
        with pytest.raises(SourceError) as caught:
            compare_logits(*both, Document("", "a.txt", (*ids.tolist(),)), MODELS)
        assert caught.value.message == f"{MODELS[who]} answers with NaN or infinity at position 70 of a.txt"

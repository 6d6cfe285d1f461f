"""Requests that are computed together get what each gets alone, in every architecture that transformers has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conftest import EXAMPLE
from openquant.files.checkpoint import open_checkpoint
from openquant.models import MODELS
from openquant.streaming.interleaved import ForwardPass, run_interleaved
from openquant.streaming.model import StreamedModel
from openquant.streaming.packing import ChoiceRequest, Pack, Packing, make_packs, packed_logits, packing_of
from support import small_checkpoints
from support.conversions import Shelf
from support.representatives import ALONE, NOT_TREES, expected_packing, representatives

GENERATOR = np.random.default_rng(0)


def random_ids(count: int) -> tuple[int, ...]:
    return tuple(GENERATOR.integers(10, 500, count).tolist())


# Contexts with three choices each, of which two begin alike; together longer than what sparse attention picks (64).
REQUESTS = [
    ChoiceRequest(context, choice)
    for context in [random_ids(length) for length in (5, 37, 20, 11, 30)]
    for first in [random_ids(2)]
    for choice in (first, (*first, *random_ids(3)), random_ids(1))
]
LENGTH = 160


def loglikelihoods(model: StreamedModel, packs: Sequence[Pack]) -> list[float]:
    found: dict[int, float] = {}

    def add(number: int, _: int, logits: torch.Tensor) -> None:
        pack, log = packs[number], logits.log_softmax(-1)
        assert len(logits) == len(pack.rows)
        for at, row, token in pack.predictions.tolist():
            found[pack.requests[at]] = found.get(pack.requests[at], 0) + float(log[row, token])

    passes = [[ForwardPass(model, lambda pack=pack: packed_logits(model.model, pack, "cpu"))] for pack in packs]
    run_interleaved(passes, finished=add)
    return [found[number] for number in range(len(REQUESTS))]


def chosen(model: StreamedModel, longest: int = 40) -> Packing:
    return packing_of(model.model, MODELS.get(model.checkpoint.architecture), longest)


@pytest.mark.parametrize("architecture", representatives())
def test_what_is_computed_together_is_what_each_request_gets_alone(shelf: Shelf, architecture: str) -> None:
    model = StreamedModel(open_checkpoint(shelf.source(architecture)), dtype=torch.float32)
    packing = chosen(model)
    assert packing == expected_packing(architecture)
    alone = loglikelihoods(model, make_packs(REQUESTS, LENGTH, "alone"))
    packs = make_packs(REQUESTS, LENGTH, packing)
    assert packing == "alone" or len(packs) < len(REQUESTS) / 2
    assert loglikelihoods(model, packs) == pytest.approx(alone, rel=1e-5, abs=2e-5)


def test_most_architectures_take_trees() -> None:
    assert len(NOT_TREES | ALONE) < len(small_checkpoints.RUNNABLE) / 4
    assert {name for name, entry in MODELS.items() if entry.attends_ahead} == ALONE


def test_a_model_without_an_entry_with_a_short_window_or_with_biases_takes_no_trees(shelf: Shelf) -> None:
    model = StreamedModel(open_checkpoint(EXAMPLE))
    assert packing_of(model.model, None, 40) == "alone"
    gemma = StreamedModel(open_checkpoint(shelf.source("Gemma3ForCausalLM")))
    assert (chosen(gemma, 512), chosen(gemma, 513)) == ("tree", "batch")
    falcon = StreamedModel(open_checkpoint(shelf.source("FalconForCausalLM")))
    falcon.model.config.alibi = True
    assert chosen(falcon) == "batch"


def test_a_tree_has_each_beginning_once() -> None:
    requests = [
        ChoiceRequest((1, 2, 3), (4,)),
        ChoiceRequest((1, 2, 3), (5, 6)),
        ChoiceRequest((1, 2), (9, 8, 7)),
        ChoiceRequest((4,), (1,)),
    ]
    [pack] = make_packs(requests, 16, "tree")
    assert pack.ids.tolist() == [[1, 2, 3, 5, 9, 8, 4]]
    assert pack.positions.tolist() == [[0, 1, 2, 3, 2, 3, 0]]
    assert pack.parents is not None and pack.parents.tolist() == [-1, 0, 1, 2, 1, 4, -1]
    assert pack.visible().sum(1).tolist() == [1, 2, 3, 4, 3, 4, 1]
    assert pack.rows.tolist() == [1, 2, 3, 4, 5, 6]
    predicted = [(at, int(pack.rows[row]), token) for at, row, token in pack.predictions.tolist()]
    assert predicted == [(0, 2, 4), (1, 2, 5), (1, 3, 6), (2, 1, 9), (2, 4, 8), (2, 5, 7), (3, 6, 1)]


def test_packs_are_no_longer_than_they_may_be_unless_one_request_is() -> None:
    requests = [ChoiceRequest(random_ids(length), random_ids(2)) for length in (10, 30, 12, 3, 3, 3)]
    trees = make_packs(requests, 24, "tree")
    assert [pack.ids.size for pack in trees] == [11, 31, 21, 4]
    assert [pack.requests for pack in trees] == [(0,), (1,), (2, 3, 4), (5,)]
    batches = make_packs(requests, 24, "batch")
    assert [pack.ids.shape for pack in batches] == [(3, 4), (1, 11), (1, 13), (1, 31)]
    assert sorted(number for pack in batches for number in pack.requests) == list(range(6))
    assert {len(pack.requests) for pack in make_packs(requests, 24, "alone")} == {1}

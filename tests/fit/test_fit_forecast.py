"""What the forecast of --fit counts is what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from openquant.data.corpus import Corpus, Document
from openquant.files.checkpoint import open_checkpoint
from openquant.fit import rounding, scores
from openquant.fit.forecast import Trials, Work, count_calibration, count_work
from openquant.fit.scores import find_variants, measure_mixtures
from openquant.fit.units import units_of
from openquant.formats import kernels
from openquant.formats.schemes import find_scheme
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_plan
from openquant.streaming.model import StreamedModel
from support.conversions import Shelf

TEXTS, LENGTH = 2, 24


class Products(TorchFunctionMode):
    """Counts the products of the matrices of layers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            states, weight = args[:2]
            self.count += states.numel() // states.shape[-1] * weight.numel()
        elif func is torch._grouped_mm:
            states, stack = args[:2]
            self.count += len(states) * stack[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3nForCausalLM"])
def test_what_is_counted_is_computed(shelf: Shelf, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(shelf.source(architecture))
    plans = {
        name: make_plan(checkpoint, find_scheme(name), PlanOptions(head=architecture == "Qwen3ForCausalLM"))
        for name in ("int8-weights", "channel")
    }
    units, model = units_of(plans), StreamedModel(checkpoint)
    rounded = {"int8-weights": 0, "channel": 0}
    logits = 0
    rows, compare = rounding.rounded_rows, scores.compare_logits

    def counted_rows(weight: Any, scheme: Any, *rest: Any) -> Iterator[Any]:
        rounded[scheme.name] += weight.shape[0] * weight.shape[1]
        return rows(weight, scheme, *rest)

    def counted_logits(source: Any, *rest: Any) -> Any:
        nonlocal logits
        logits += source.numel()
        return compare(source, *rest)

    monkeypatch.setattr(rounding, "rounded_rows", counted_rows)
    monkeypatch.setattr(scores, "compare_logits", counted_logits)
    # The modes of torch that compute products otherwise would hide some.
    monkeypatch.setattr(scores, "products_in_float32", lambda _: Counting())
    counter = Products()

    class Counting:
        def __enter__(self) -> None:
            counter.__enter__()

        def __exit__(self, *exception: object) -> None:
            counter.__exit__(*exception)

    ids = torch.randint(10, 200, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    corpus = Corpus(tuple(Document("", "", tuple(text)) for text in ids), "", {})
    mixtures, changes = find_variants(model, units)
    whole = [dict.fromkeys(range(len(units)), name) for name in ("int8-weights", "channel")]
    whole = [{n: c for n, c in mixture.items() if c in units[n].choices} for mixture in whole]
    for chosen, changed in ((mixtures, changes), (whole, None)):
        counter.count, logits = 0, 0
        rounded.update({"int8-weights": 0, "channel": 0})
        plan = next(iter(plans.values()))
        measure_mixtures(model, units, plan.decisions.fused, corpus, chosen, kernels, changes=changed)
        work = count_work(model, units, TEXTS, LENGTH, chosen, changed)
        # Weights of norms count as those of matrices do, and those outside of layers do not count.
        assert sum(work.products.values()) == pytest.approx(counter.count, rel=0.05)
        assert dict(work.rounded) == {name: count for name, count in rounded.items() if count}
        assert work.logits == logits


def test_seconds_are_those_of_all_parts(shelf: Shelf) -> None:
    checkpoint = open_checkpoint(shelf.source("Qwen3ForCausalLM"))
    units = units_of({"nvfp4": make_plan(checkpoint, find_scheme("nvfp4"))})
    model = StreamedModel(checkpoint)
    trials = Trials(model, units, kernels)
    parts = [
        Work({96: 1e9, 3: 1e6}, {}, 0.0, 0.0),
        Work({}, {"nvfp4": 1e6}, 0.0, 0.0),
        Work({}, {}, 1e6, 0.0),
        Work({}, {}, 0.0, 100.0),
    ]
    assert all(trials.seconds(part) > 0 for part in parts)
    together = Work({96: 1e9, 3: 1e6}, {"nvfp4": 1e6}, 1e6, 100.0)
    assert trials.seconds(together) == pytest.approx(sum(map(trials.seconds, parts)))
    assert trials.seconds(together.times(3)) == pytest.approx(3 * trials.seconds(together))


def test_a_calibration_runs_each_layer_and_rounds_it_in_as_much_time(shelf: Shelf) -> None:
    model = StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")))
    weights = sum(weight.numel() for layer in model.layers for weight in model.units[layer].parameters())
    assert count_calibration(model, 5, 64).products == {64: 2.0 * 5 * 64 * weights}

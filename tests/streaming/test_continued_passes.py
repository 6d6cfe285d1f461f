"""Passes over texts of different lengths that continue before the output head give the same logits, of any class."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.interleaved import ForwardPass, TextCache, run_interleaved
from openquant.streaming.model import StreamedModel, products_in_float32
from openquant.streaming.pass_checkpoint import PassCheckpoint
from support.conversions import Shelf
from support.representatives import representatives


def logits(streamed: StreamedModel, ids: Tensor, cached: bool) -> Tensor:
    return streamed.logits(ids, TextCache(streamed.model.config) if cached else None)


def run(model: StreamedModel, kept: PassCheckpoint) -> list[Tensor]:
    """The logits of two texts, without a KV cache and with one if engines cache what transformers does."""
    latent = getattr(model.model.config.get_text_config(), "kv_lora_rank", None)
    found: list[Tensor] = []
    run_interleaved(
        [
            [
                ForwardPass(model, partial(logits, model, ids, cached), products_in_float32)
                for cached in ((False,) if latent else (False, True))
            ]
            for ids in (torch.arange(24) * 7 % 500, torch.arange(17) * 11 % 500)
        ],
        finished=lambda *result: found.append(result[-1]),
        checkpoint=kept,
    )
    return found


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("architecture", representatives())
def test_passes_continue_before_the_output_head(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    path, model = tmp_path / "x.part", StreamedModel(open_checkpoint(shelf.source(architecture)))
    loaded: list[str] = []
    load = model.load

    def recorded(unit: str) -> None:
        loaded.append(unit)
        load(unit)

    monkeypatch.setattr(model, "load", recorded)
    expected, units = run(model, PassCheckpoint(path, {})), list(loaded)
    loaded.clear()
    kept = PassCheckpoint(path, {})
    done = kept.done
    found = run(model, kept)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # All layers were computed when it was saved for the last time; the last one ends a pass if the head is no unit.
    layers = [unit for unit in units if unit in model.layers]
    assert done in (set(layers), set(layers[:-1]))
    assert loaded == [unit for unit in units if unit not in done]


@pytest.mark.usefixtures("at_once")
def test_passes_through_layers_that_repeat_start_afresh(shelf: Shelf, tmp_path: Path) -> None:
    path, model = tmp_path / "x.part", StreamedModel(open_checkpoint(shelf.source("HrmTextForCausalLM")))
    expected = run(model, PassCheckpoint(path, {}))
    found = run(model, PassCheckpoint(path, {}))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_passes_that_hold_what_cannot_be_saved_are_not(tmp_path: Path, at_once: None) -> None:
    path = tmp_path / "x.part"
    checkpoint = PassCheckpoint(path, {})
    checkpoint.record_output("layers.0", torch.ones(1))
    assert checkpoint.is_due("layers.0")
    checkpoint.write("layers.1", [[((object(),), {})]], lambda _: nullcontext())
    assert not path.exists()
    checkpoint.record_output("layers.0", object())
    assert not checkpoint.is_due("layers.0")

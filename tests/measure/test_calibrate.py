"""Calibration: what goes into each layer, as an ordinary forward pass of transformers has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tiny
from converted import Shelf
from openquant.errors import SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import CHANNEL
from openquant.forward.products import products_in_float32
from openquant.forward.streamed import StreamedModel
from openquant.measure.calibrate import calibrate
from openquant.plan.plan import make_plan
from openquant.texts.corpus import Corpus, Document
from openquant.weights.calibration import Calibration

IDS = [tuple((7 * at * at + 31 * number) % 500 for at in range(40)) for number in range(3)]


def corpus(ids: list[tuple[int, ...]]) -> Corpus:
    return Corpus(tuple(Document("some", f"some {at}", each) for at, each in enumerate(ids)), "", {})


def found(root: Path, ids: list[tuple[int, ...]] = IDS) -> Calibration:
    return Calibration(calibrate(StreamedModel(open_checkpoint(root)), corpus(ids)), "", {})


def watched(root: Path, watch: Callable[[str, nn.Module, Callable[[str, Tensor], None]], None]) -> dict[str, Tensor]:
    """What an ordinary model computes on the texts, by name: all tokens' activations, [tokens, in]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
    seen: dict[str, list[Tensor]] = {}

    def add(name: str, values: Tensor) -> None:
        seen.setdefault(name, []).append(values.detach().reshape(-1, values.shape[-1]))

    for name, module in model.named_modules():
        watch(name, module, add)
    with torch.inference_mode(), products_in_float32():
        for ids in IDS:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    return {name: torch.cat(each).float() for name, each in seen.items()}


def linear(name: str, module: nn.Module, add: Callable[[str, Tensor], None]) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_pre_hook(lambda _, args: add(name, args[0]))


def test_linears_are_seen_as_in_an_ordinary_pass(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "source", shards=3)
    expected, seen = watched(root, linear), found(root)
    assert len(seen.inputs) == 7 * tiny.LAYERS
    for each in seen.inputs:
        [tensor] = each.tensors
        values = expected[tensor.removesuffix(".weight")].abs()
        assert each.tokens == len(values) == 3 * 40
        assert torch.equal(torch.from_numpy(each.absmax), values.amax(0))
        assert torch.allclose(torch.from_numpy(each.mean), values.mean(0), rtol=1e-5)
    assert seen.of("lm_head.weight") is None


def test_experts_are_seen_together(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "source", "Qwen3MoeForCausalLM")

    def watch(name: str, module: nn.Module, add: Callable[[str, Tensor], None]) -> None:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            states, chosen = (*args, *kwargs.values())[:2]
            add(f"{name}.first", states)
            for expert in range(len(module.gate_up_proj)):
                tokens = (chosen == expert).any(-1)
                gate, up = (states[tokens] @ module.gate_up_proj[expert].T).chunk(2, -1)
                add(f"{name}.down", nn.functional.silu(gate) * up)

        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(hook, with_kwargs=True)

    expected, seen = watched(root, watch), found(root)
    # The first layer has none.
    place = "model.layers.1.mlp.experts"
    every = {each: seen.of(f"{place}.{each}.weight") for each in ("0.gate_proj", "3.up_proj", "1.down_proj")}
    gate, up, down = every.values()
    assert gate is not None
    assert down is not None
    # What goes into one expert goes into all, and gate and up have the same.
    assert gate is up
    assert down is seen.of(f"{place}.0.down_proj.weight")
    assert torch.equal(torch.from_numpy(gate.absmax), expected[f"{place}.first"].abs().amax(0))
    # Products in another order.
    assert torch.allclose(torch.from_numpy(down.absmax), expected[f"{place}.down"].abs().amax(0), rtol=0.02)
    assert down.tokens == len(expected[f"{place}.down"])


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_layer_of_a_plan_is_seen(shelf: Shelf, architecture: str) -> None:
    """However transformers computes it, experts and what it merges or splits among them."""
    root = shelf.source(architecture)
    plan = make_plan(open_checkpoint(root), CHANNEL)
    seen = found(root, IDS[:2])
    assert [layer.module for layer, _ in plan.fates.quantized if seen.of(layer.source.name) is None] == []


def test_what_overflows_is_an_error_that_names_the_weight(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name] * 1e38
    root = tiny.write(tmp_path / "source", weights=weights)
    with pytest.raises(SourceError) as caught:
        found(root)
    assert caught.value.message == "what goes into model.layers.1.mlp.down_proj.weight is not finite on these texts"


class Team:
    """Processes that share texts, one after the other; the first comes last, and gets what the others gave."""

    def __init__(self, rank: int, size: int, given: list[bytes]) -> None:
        self.rank, self.size, self.given = rank, size, given

    def gather(self, data: bytes) -> list[bytes]:
        if self.rank == 0:
            return [data, *self.given]
        self.given.append(data)
        return []

    def agree(self, *_: Any) -> list[Any]:
        raise AssertionError


@pytest.mark.parametrize("size", [2, 5])
def test_processes_see_together_what_one_does(tmp_path: Path, size: int) -> None:
    root = tiny.write(tmp_path / "source", "Qwen3MoeForCausalLM")
    given: list[bytes] = []
    for rank in reversed(range(size)):
        streamed = StreamedModel(open_checkpoint(root))
        inputs = calibrate(streamed, corpus(IDS), team=Team(rank, size, given))
    assert Calibration(inputs, "", {}).to_bytes() == found(root).to_bytes()

"""Calibration: what goes into each layer, as an ordinary forward pass of transformers has it."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from openquant.calibration.observers import CacheObserver, RunningStatistics, observe_inputs
from openquant.data.corpus import Corpus, Document
from openquant.errors import OutputError, SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.interleaved import TextRun
from openquant.streaming.model import StreamedModel, products_in_float32
from openquant.streaming.offload import OffloadFile
from openquant.streaming.pass_checkpoint import PassCheckpoint
from openquant.streaming.transformers_internals import cache_argument
from openquant.weights.statistics import Calibration
from support import small_checkpoints
from support.conversions import Shelf

IDS = [tuple((7 * at * at + 31 * number) % 500 for at in range(40)) for number in range(3)]


def corpus(ids: list[tuple[int, ...]]) -> Corpus:
    return Corpus(tuple(Document("some", f"some {at}", each) for at, each in enumerate(ids)), "", {})


def calibrated(root: Path, ids: list[tuple[int, ...]] = IDS) -> Calibration:
    inputs, cached = observe_inputs(TextRun(StreamedModel(open_checkpoint(root)), corpus(ids)))
    return Calibration(inputs, "", {}, cached)


def watched(root: Path, watch: Callable[[str, nn.Module, Callable[[str, Tensor], None]], None]) -> dict[str, Tensor]:
    """What an ordinary model computes on the texts, by name: all tokens' activations, [tokens, in]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
    activations: dict[str, list[Tensor]] = {}

    def add(name: str, values: Tensor) -> None:
        activations.setdefault(name, []).append(values.detach().reshape(-1, values.shape[-1]))

    for name, module in model.named_modules():
        watch(name, module, add)
    with torch.inference_mode(), products_in_float32():
        for ids in IDS:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    return {name: torch.cat(each).float() for name, each in activations.items()}


def linear(name: str, module: nn.Module, add: Callable[[str, Tensor], None]) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_pre_hook(lambda _, args: add(name, args[0]))


def test_linears_have_the_statistics_of_an_ordinary_pass(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "source", shards=3)
    expected, calibration = watched(root, linear), calibrated(root)
    assert sum(len(each.tensors) for each in calibration.inputs) == 7 * small_checkpoints.LAYERS
    for each in calibration.inputs:
        for tensor in each.tensors:
            values = expected[tensor.removesuffix(".weight")].abs()
            assert each.tokens == len(values) == 3 * 40
            assert torch.equal(torch.from_numpy(each.absmax), values.amax(0))
            assert torch.allclose(torch.from_numpy(each.mean), values.mean(0), rtol=1e-5)
            assert torch.allclose(torch.from_numpy(each.square), values.square().mean(0), rtol=1e-5)
    assert calibration.of("lm_head.weight") is None


def test_experts_have_one_statistic_for_all(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM")

    def watch(name: str, module: nn.Module, add: Callable[[str, Tensor], None]) -> None:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            states, chosen = (*args, *kwargs.values())[:2]
            add(f"{name}.first", states)
            add(f"{name}.routed", torch.bincount(chosen.reshape(-1), minlength=4)[None])
            for expert in range(len(module.gate_up_proj)):
                tokens = (chosen == expert).any(-1)
                gate, up = (states[tokens] @ module.gate_up_proj[expert].T).chunk(2, -1)
                add(f"{name}.down", nn.functional.silu(gate) * up)

        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(hook, with_kwargs=True)

    expected, calibration = watched(root, watch), calibrated(root)
    # The first layer is dense.
    place = "model.layers.1.mlp.experts"
    every = {each: calibration.of(f"{place}.{each}.weight") for each in ("0.gate_proj", "3.up_proj", "1.down_proj")}
    gate, _, down = every.values()
    assert gate is not None
    assert down is not None
    # All experts have one statistic.
    assert down is calibration.of(f"{place}.0.down_proj.weight")
    assert torch.equal(torch.from_numpy(gate.absmax), expected[f"{place}.first"].abs().amax(0))
    # Products in another order.
    assert torch.allclose(torch.from_numpy(down.absmax), expected[f"{place}.down"].abs().amax(0), rtol=0.02)
    assert down.tokens == len(expected[f"{place}.down"])
    assert gate.routed == tuple(expected[f"{place}.routed"].sum(0).int().tolist())
    assert sum(gate.routed) == down.tokens


class Ended(Exception):
    """What ends a pass, as a kill would."""


def ended_early(root: Path, kept: PassCheckpoint, scratch: OffloadFile | None = None) -> None:
    """Run texts through a model until something is kept, and a little further."""

    def progress(*_: int) -> None:
        if kept.path.exists():
            raise Ended

    with pytest.raises(Ended):
        observe_inputs(TextRun(StreamedModel(open_checkpoint(root)), corpus(IDS[:2]), scratch, progress, kept))


def test_layers_that_run_several_times_are_refused(shelf: Shelf) -> None:
    with pytest.raises(SourceError) as caught:
        calibrated(shelf.source("HrmTextForCausalLM"), IDS[:1])
    assert caught.value.message == (
        "HrmTextForCausalLM runs its layers several times, and a calibration observes each layer once"
    )


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.usefixtures("at_once")
def test_a_pass_that_was_ended_goes_on(shelf: Shelf, tmp_path: Path, architecture: str) -> None:
    root = shelf.source(architecture)
    ended_early(root, PassCheckpoint(tmp_path / "x.part", {}))
    kept = PassCheckpoint(tmp_path / "x.part", {})
    assert kept.saved is not None
    inputs, cached = observe_inputs(TextRun(StreamedModel(open_checkpoint(root)), corpus(IDS[:2]), checkpoint=kept))
    assert Calibration(inputs, "", {}, cached).to_bytes() == calibrated(root, IDS[:2]).to_bytes()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3NextForCausalLM"])
def test_keys_and_values_are_observed_as_they_are_cached(shelf: Shelf, architecture: str) -> None:
    root = shelf.source(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
    expected: dict[int, list[float]] = {}
    ranged = CacheObserver(model.config, {})
    for ids in IDS:
        with torch.inference_mode(), products_in_float32():
            answer = model(input_ids=torch.tensor([ids]), use_cache=True)
            watched = model(input_ids=torch.tensor([ids]), use_cache=True, **{cache_argument(model): ranged})
        assert torch.equal(answer.logits, watched.logits)
        ranged = CacheObserver(model.config, {})
        for number, layer in enumerate(answer.past_key_values.layers):
            if getattr(layer, "keys", None) is not None:
                both = expected.setdefault(number, [0.0, 0.0])
                both[:] = map(max, both, (float(part.abs().max()) for part in (layer.keys, layer.values)))
        for layer in watched.past_key_values.layers:
            held = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
            assert all(state is None for state in (*held, getattr(layer, "keys", None)))
    assert calibrated(root).cached == {number: tuple(both) for number, both in expected.items()}


@pytest.mark.usefixtures("at_once")
def test_a_file_of_another_version_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    ended_early(source, PassCheckpoint(path, {}))
    data = path.read_bytes()
    for other in (b"", b"no file of ours", data.replace(b"openquant passes", b"openquant future")):
        path.write_bytes(other)
        with pytest.raises(SourceError) as caught:
            PassCheckpoint(path, {})
        assert (caught.value.message, caught.value.hint) == (
            f"{path} cannot be continued: it is of another version",
            "remove it to begin again",
        )


@pytest.mark.usefixtures("at_once")
def test_a_file_that_is_cut_off_is_damaged(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    ended_early(source, PassCheckpoint(path, {}))
    data = path.read_bytes()
    # Within what is read at once, and within the arguments of the last text.
    for length in (100, len(data) - 1000):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError) as caught:
            observe_inputs(
                TextRun(StreamedModel(open_checkpoint(source)), corpus(IDS[:2]), checkpoint=PassCheckpoint(path, {}))
            )
        assert caught.value.message == f"{path} cannot be continued: it is damaged"


@pytest.mark.usefixtures("at_once")
def test_calls_with_unknown_objects_are_not_checkpointed(source: Path, tmp_path: Path) -> None:
    model = StreamedModel(open_checkpoint(source))
    layer = model.model.get_submodule("model.layers.0")

    def forward(*args: Any, of: Callable[..., Any] = layer.forward, **kwargs: Any) -> Any:
        assert kwargs.pop("more", None) is not None
        return of(*args, **kwargs)

    for layer in model.model.get_submodule("model.layers"):
        layer.forward = partial(forward, of=layer.forward)  # type: ignore[assignment]
    outer = model.model.model
    outer.forward = partial(outer.forward, more=object())
    observe_inputs(TextRun(model, corpus(IDS[:2]), checkpoint=PassCheckpoint(tmp_path / "x.part", {})))
    assert not list(tmp_path.glob("x.part*"))


def test_a_short_pass_writes_no_checkpoint(source: Path, tmp_path: Path) -> None:
    kept = PassCheckpoint(tmp_path / "x.part", {})
    assert observe_inputs(TextRun(StreamedModel(open_checkpoint(source)), corpus(IDS[:1]), checkpoint=kept))
    assert not kept.path.exists()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.part")
    with pytest.raises(SourceError, match="x.part is not a regular file"):
        PassCheckpoint(tmp_path / "x.part", {})


@pytest.mark.usefixtures("at_once")
def test_a_full_disk_is_an_error_that_names_the_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x.part"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        model = StreamedModel(open_checkpoint(source))
        observe_inputs(TextRun(model, corpus(IDS[:2]), checkpoint=PassCheckpoint(path, {})))
    assert caught.value.message == f"{path} cannot be written: No space left on device"
    assert not list(tmp_path.glob("x.part*"))


def test_overflow_is_an_error_that_names_the_weight(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name] * 1e38
    root = small_checkpoints.write(tmp_path / "source", weights=weights)
    with pytest.raises(SourceError) as caught:
        calibrated(root)
    assert caught.value.message == "the inputs of model.layers.1.mlp.down_proj.weight are not finite on these texts"


def test_squares_of_the_largest_bfloat16_are_finite() -> None:
    statistics = RunningStatistics(("a.weight",), 2)
    statistics.add(
        torch.tensor([1e38, 1.0]), torch.tensor([1e38, 1.0]).double(), torch.tensor([torch.inf, 1.0]).double(), 1
    )
    square = statistics.to_input_statistics().square
    assert square is not None
    assert square.tolist() == [torch.finfo(torch.float32).max, 1.0]

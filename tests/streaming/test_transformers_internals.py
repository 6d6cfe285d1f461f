"""What goes through functions of transformers that are private: which versions, names, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openquant.errors import SourceError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import StreamedModel
from openquant.streaming.transformers_internals import TESTED, require_tested
from support import small_checkpoints
from support.conversions import Shelf
from support.streamed_logits import SHORT, all_equal, streamed_logits

Weights = dict[str, torch.Tensor]
OTHER = "config.json or this shard belongs to other weights: download the checkpoint again"


def test_versions_outside_of_the_tested_range_are_refused() -> None:
    for found in ("5.15.1", "5.25.0", "4.57.6", "6.0.0", "main"):
        with pytest.raises(UsageError) as raised:
            require_tested(found)
        assert raised.value.message == (
            f"running a model takes transformers {TESTED[0]} to {TESTED[1]}; {found} is installed"
        )
        assert raised.value.hint == 'pip install "transformers>=5.18,<5.25"'
    for found in ("5.18.0", "5.19.0", "5.24.0", "5.24.1rc1"):
        require_tested(found)


def refused(root: Path, architecture: str, change: Callable[[Weights], object]) -> SourceError:
    """What is said of a model whose weights were changed."""
    source = small_checkpoints.write(root / "source", architecture)
    small_checkpoints.change_weights(source, change)
    with pytest.raises(SourceError) as raised:
        streamed_logits(StreamedModel(open_checkpoint(source)), [SHORT])
    return raised.value


def test_a_stack_of_experts_of_different_shapes_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    error = refused(tmp_path, "Qwen3MoeForCausalLM", lambda held: held.update({name: held[name][:-1].clone()}))
    assert error.message.startswith(
        "model.layers.1.mlp.experts.down_proj cannot be made of the checkpoint's tensors: Error: "
    )
    assert error.hint == OTHER


def test_what_a_class_can_do_without_may_be_missing(tmp_path: Path) -> None:
    bias = "e_score_correction_bias"

    def drop(held: Weights) -> None:
        for name in [name for name in held if name.endswith(bias)]:
            del held[name]

    source = small_checkpoints.write(tmp_path / "source", "AXK1ForCausalLM")
    held = small_checkpoints.read(source)
    small_checkpoints.change_weights(source, drop)
    assert len(small_checkpoints.read(source)) < len(held)
    found = streamed_logits(StreamedModel(open_checkpoint(source)), [SHORT])
    zeros = {name: tensor * 0 for name, tensor in held.items() if name.endswith(bias)}
    small_checkpoints.change_weights(source, lambda now: now.update(zeros))
    assert all_equal(found, streamed_logits(StreamedModel(open_checkpoint(source)), [SHORT]))
    error = refused(tmp_path / "other", "AXK1ForCausalLM", lambda now: now.pop("model.norm.weight"))
    assert error.message == "model.norm.weight of AXK1ForCausalLM is missing from the checkpoint"


def test_weights_may_have_the_names_that_the_class_itself_has(shelf: Shelf, tmp_path: Path) -> None:
    """Some of which would be renamed as if they were names of a checkpoint."""
    source = shelf.source("LagunaForCausalLM")
    held = small_checkpoints.read(source)
    renamed = {name.replace(".shared_expert.", ".shared_experts."): tensor for name, tensor in held.items()}
    assert renamed.keys() != held.keys()
    own = small_checkpoints.write(tmp_path / "own", "LagunaForCausalLM", weights=renamed)
    models = [StreamedModel(open_checkpoint(path)) for path in (source, own)]
    assert all_equal(*(streamed_logits(model, [SHORT]) for model in models))

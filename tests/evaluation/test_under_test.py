"""Checkpoints that can be held against one another, and what is said of those that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import change_json
from openquant.errors import UsageError
from openquant.evaluation.results import ModelUnderTest, require_one_model
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import StreamedModel
from support import small_checkpoints


def pair(path: Path) -> tuple[ModelUnderTest, StreamedModel]:
    checkpoint = open_checkpoint(path)
    return ModelUnderTest(path.name, checkpoint), StreamedModel(checkpoint)


def test_models_of_another_class_size_or_vocabulary_are_refused(tmp_path: Path) -> None:
    source = pair(small_checkpoints.write(tmp_path / "source"))
    require_one_model(*source, *pair(small_checkpoints.write(tmp_path / "same")))
    fewer = small_checkpoints.write(tmp_path / "fewer")
    change_json(fewer / "config.json", lambda found: found.update(num_hidden_layers=1, layer_types=["full_attention"]))
    others = {
        small_checkpoints.write(tmp_path / "llama", "LlamaForCausalLM"): ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        small_checkpoints.write(tmp_path / "small", vocab=300): ("300 tokens", "512 tokens"),
        # The output head counts beside them.
        fewer: ("2 layers", "3 layers"),
    }
    for path, (theirs, mine) in others.items():
        with pytest.raises(UsageError) as raised:
            require_one_model(*source, *pair(path))
        assert raised.value.message == f"{path.name} has {theirs}, source has {mine}"
        assert raised.value.hint == "name the model that it was made from"

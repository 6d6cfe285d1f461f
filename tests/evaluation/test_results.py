"""What an evaluation says of an output, from what was found of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant.data.corpus import Corpus, Document
from openquant.errors import UsageError
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import Evaluation, HiddenStateDistances, ModelUnderTest, require_one_model
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import StreamedModel
from support import small_checkpoints

CORPUS = Corpus((Document("a", "a", tuple(range(10, 42))), Document("b", "b", tuple(range(40, 72)))), "0", {})
# Settings that change nothing of what a model computes.
WITHOUT_EFFECT: dict[str, Any] = {
    "torch_dtype": "float16",
    "_name_or_path": "somewhere",
    "initializer_range": 0.5,
    "eos_token_id": [6, 7],
    "output_attentions": True,
    "attention_dropout": 0.5,
    "id2label": {"0": "good"},
    "max_position_embeddings": 12345,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoints.write(tmp_path_factory.mktemp("results") / "source")


def with_settings(source: Path, root: Path, settings: dict[str, Any]) -> Evaluation:
    """The source held against a copy of it with other settings in config.json."""
    copy = shutil.copytree(source, root / "copy")
    change_json(copy / "config.json", lambda config: config.update(settings))
    first, other = (ModelUnderTest(path.name, open_checkpoint(path)) for path in (source, copy))
    return compare_outputs(first, [other], CORPUS)


def test_settings_that_change_no_answer_are_not_suspected(source: Path, tmp_path: Path) -> None:
    [found] = with_settings(source, tmp_path, WITHOUT_EFFECT).outputs
    assert (found["suspects"], found["verdict"], found["kl"]["mean"]) == ([], "same", 0), found["reasons"]


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


def test_distances_are_the_mean_over_all_tokens_of_all_documents() -> None:
    mine, other = HiddenStateDistances(), HiddenStateDistances()
    source = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [6.0, 8.0]]])
    # One token 0.2 off, one not at all, one 1 off; then a document of one token, 2 off.
    output = torch.tensor([[[4.0, 4.0], [0.0, 2.0], [0.0, 0.0]]])
    for number, hidden in ((0, source), (1, output), (2, source)):
        mine.add("layers.0", number, hidden)
    for number, hidden in ((0, source[:, :1]), (1, source[:, :1] * 3), (2, source[:, :1])):
        other.add("layers.0", number, hidden)
    assert mine.mean("layers.0", 1) == pytest.approx(1.2 / 3)
    assert other.mean("layers.0", 1) == 2

    mine.merge(other.sums)
    assert mine.mean("layers.0", 1) == pytest.approx(3.2 / 4)
    assert mine.mean("layers.0", 2) == 0

    # What is far from nothing is finite.
    for number in range(2):
        mine.add("layers.1", number, torch.zeros(1, 1, 2))
    assert mine.mean("layers.1", 1) == 0

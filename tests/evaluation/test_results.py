"""What an evaluation says of an output, from what was found of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import change_json
from openquant.data.corpus import Corpus, Document
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import Evaluation, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from support import small_checkpoints

CORPUS = Corpus((Document("a", "a", tuple(range(10, 42))), Document("b", "b", tuple(range(40, 72)))), "0", {})
# Settings that change nothing of what a model computes.
WITHOUT_EFFECT: dict[str, Any] = {
    "dtype": "float16",
    "torch_dtype": "float16",
    "_name_or_path": "somewhere",
    "transformers_version": "4.0",
    "use_cache": False,
    "initializer_range": 0.5,
    "tokenizer_class": "Other",
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "pad_token_id": 8,
    "return_dict": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "attention_dropout": 0.5,
    "chunk_size_feed_forward": 3,
    "id2label": {"0": "good"},
    "label2id": {"good": 0},
    "problem_type": "regression",
    "is_encoder_decoder": True,
    "max_position_embeddings": 12345,
    "finetuning_task": "sst2",
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


def test_all_other_settings_are_suspected(source: Path, tmp_path: Path) -> None:
    [found] = with_settings(source, tmp_path, {"hidden_act": "gelu", "unknown": {"inner": [1, 2]}}).outputs
    assert found["suspects"] == ["config.json"]
    assert found["reasons"][3:] == [
        "config.json: hidden_act is 'gelu', the source has 'silu'",
        "config.json: unknown.inner is [1, 2], the source has None",
    ]

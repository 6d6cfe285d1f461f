"""Base classes serve as embedding models, and classifiers classify, with what their sources give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_client import Answers, find_engine

from conftest import EXAMPLE, change_json, everything
from openquant import compress
from support.small_checkpoints import changed_copy

pytestmark = pytest.mark.serve
Weights = dict[str, torch.Tensor]
SCHEMES = ("tensor", "channel", "int4") if everything() else ("tensor", "int4")


def of_class(root: Path, architecture: str, change: Callable[[Weights], None]) -> Path:
    """The example as another class."""
    source = changed_copy(EXAMPLE, root, change)
    change_json(source / "config.json", lambda config: config.update(architectures=[architecture], num_labels=1))
    return source


def to_base(weights: Weights) -> None:
    del weights["lm_head.weight"]
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


def to_classifier(weights: Weights) -> None:
    head = weights.pop("lm_head.weight")
    weights["score.weight"] = head[:1].clone()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    root = tmp_path_factory.mktemp("pooled")
    models = {
        "base": of_class(root / "base", "Qwen3Model", to_base),
        "classifier": of_class(root / "classifier", "Qwen3ForSequenceClassification", to_classifier),
    }
    for name, source in list(models.items()):
        for scheme in SCHEMES:
            # vLLM looks these layers of both up as model.layers.1.
            done = compress(source, root / f"{name}-{scheme}", scheme, ignore=["**.1.mlp.*"])
            models[f"{name} {scheme}"] = Path(done.output)
    return find_engine().logprobs(models, root / "answers", "pooled")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings_are_those_of_the_source(answers: Answers, scheme: str) -> None:
    source, output = answers.of("base"), answers.of(f"base {scheme}")
    cosines = (source * output).sum(1) / np.linalg.norm(source, axis=1) / np.linalg.norm(output, axis=1)
    assert cosines.min() > (0.95 if scheme == "int4" else 0.995)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_are_those_of_the_source(answers: Answers, scheme: str) -> None:
    source, output = answers.of("classifier"), answers.of(f"classifier {scheme}")
    assert source.shape == (len(source), 1)
    assert np.abs(source - output).max() < (0.15 if scheme == "int4" else 0.06)

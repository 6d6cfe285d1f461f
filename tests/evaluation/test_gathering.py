"""Documents shared out among processes, and what travels from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openquant import compress
from openquant.data.corpus import Corpus, Document
from openquant.distributed import Ranks
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import Evaluation, EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.session import documents_of_rank
from support import small_checkpoints


@dataclass
class First(Ranks):
    """The first of two processes, which gets what the other gave."""

    size: int = 2
    data: bytes = b""

    def gather(self, data: bytes) -> list[bytes]:
        del data
        return [self.data]

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        del error
        return [fact, None]


class Given(Exception):
    """Has what the other process gave, which is as far as that one goes."""


@dataclass
class Second(Ranks):
    """The other."""

    rank: int = 1
    size: int = 2

    def gather(self, data: bytes) -> list[bytes]:
        raise Given(data)

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        raise AssertionError(error, fact)


def test_every_document_is_one_process_s() -> None:
    assert list(documents_of_rank(5, Ranks())) == [0, 1, 2, 3, 4]
    assert list(documents_of_rank(5, First())) == [0, 2, 4]
    assert list(documents_of_rank(5, Second())) == [1, 3]
    assert list(documents_of_rank(1, Second())) == []


def test_what_two_processes_find_is_what_one_finds(tmp_path: Path) -> None:
    """With experts that tokens go to, and values that an FP8 cache does not hold."""
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    weights["model.layers.1.self_attn.v_proj.weight"] = weights["model.layers.1.self_attn.v_proj.weight"] * 600
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", weights=weights)
    compress(source, tmp_path / "out", "channel")
    ids = [(3,) * 32, tuple(7 * at * at % 500 for at in range(32)), tuple(range(32))]
    texts = tuple(Document(f"domain {at}", f"text {at}", each) for at, each in enumerate(ids))

    def found(team: Ranks, count: int) -> Evaluation:
        corpus = Corpus(texts[:count], "", {})
        subjects = [ModelUnderTest(path.name, open_checkpoint(path)) for path in (source, tmp_path / "out")]
        return compare_outputs(subjects[0], subjects[1:], corpus, EvaluationSettings(kv_cache="fp8", ranks=team))

    # Of a single text the second has nothing to run.
    for count in (1, 3):
        with pytest.raises(Given) as given:
            found(Second(), count)
        alone = found(Ranks(), count)
        assert found(First(data=given.value.args[0]), count) == alone
    assert alone.outputs[0]["layers"][1]["routed_otherwise"] > 0
    assert any("static scales clip" in each for each in alone.outputs[0]["reasons"])

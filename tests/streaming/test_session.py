"""What a run through a model needs on disk and in memory, from its config.json alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.session import hidden_bytes, vocabulary_of
from support import small_checkpoints


@pytest.mark.parametrize(
    ("config", "size", "vocabulary"),
    [
        ({"hidden_size": 64, "vocab_size": 100}, 64, 100),
        ({"text_config": {"hidden_size": 64, "vocab_size": 100}}, 64, 100),
        ({"hidden_size": None, "vocab_size": None, "text_config": {"hidden_size": 64, "vocab_size": 100}}, 64, 100),
        ({"text_config": "none"}, 0, None),
    ],
)
def test_sizes_may_be_those_of_the_text_config(
    config: dict[str, Any], size: int, vocabulary: int | None, tmp_path: Path
) -> None:
    checkpoint = replace(open_checkpoint(small_checkpoints.write(tmp_path)), config=config)
    # Hidden states and embeddings, two bytes a value.
    assert hidden_bytes(checkpoint, 10) == 10 * size * 2 * 2
    assert vocabulary_of(checkpoint) == vocabulary

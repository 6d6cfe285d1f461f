"""What a run through a model needs on disk and in memory, from its config.json alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.session import hidden_bytes, vocabulary_of
from support import small_checkpoints


def test_sizes_may_be_those_of_the_text_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 100}
    rows: list[tuple[dict[str, Any], int, int | None]] = [
        (sizes, 64, 100),
        ({"text_config": sizes}, 64, 100),
        ({"hidden_size": None, "vocab_size": None, "text_config": sizes}, 64, 100),
        ({"text_config": "none"}, 0, None),
    ]
    opened = open_checkpoint(small_checkpoints.write(tmp_path))
    for config, size, vocabulary in rows:
        checkpoint = replace(opened, config=config)
        # Hidden states and embeddings, two bytes a value.
        assert hidden_bytes(checkpoint, 10) == 10 * size * 2 * 2, config
        assert vocabulary_of(checkpoint) == vocabulary, config

"""Model cards read and rewritten; what a run makes of them is in tests/report/test_card.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from openquant import compress
from openquant.files.cards import base_models, published_card
from support import small_checkpoints

MINE = "Notes.\n\n```\nvllm serve mine\n```\n"


def test_a_published_card_s_own_commands_name_the_repository(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    (source / "README.md").write_text(MINE)
    compress(source, tmp_path / "out", "block")
    text = MINE + (tmp_path / "out" / "README.md").read_text() + MINE
    served = "\nvllm serve out\npython -m sglang.launch_server --model-path out\n"
    assert text.count(served) == 1
    on_main = served.replace(" out\n", " org/name\n")
    assert published_card(text, "org/name", None) == text.replace(served, on_main)
    in_request = served.replace(" out\n", " org/name --revision refs/pr/1\n")
    assert published_card(text, "org/name", "refs/pr/1") == text.replace(served, in_request)
    # What the user made of it is left as it is.
    for edited in ("", MINE, text.replace("| source |", "| from |")):
        assert published_card(edited, "org/name", None) == edited


def test_what_a_command_says_of_the_cache_stays(tmp_path: Path) -> None:
    compress(small_checkpoints.write(tmp_path / "source"), tmp_path / "out", kv_cache="fp8")
    text = (tmp_path / "out" / "README.md").read_text()
    served = "\nvllm serve out --kv-cache-dtype fp8\npython -m sglang.launch_server --model-path out\n"
    assert text.count(served) == 1
    in_request = served.replace(" out", " org/name --revision refs/pr/1")
    published = published_card(text, "org/name", "refs/pr/1")
    assert published == text.replace(served, in_request)
    assert published_card(published, "org/name", None) == text.replace(served, served.replace(" out", " org/name"))


@pytest.mark.parametrize(
    ("front", "names"),
    [
        ("base_model: a/b", ["a/b"]),
        ("base_model: [a/b, c/d]", ["a/b", "c/d"]),
        ("license: mit", []),
        ("[", []),
        ("base_model:", []),
        ("base_model: null", []),
        ("base_model:\n- a/b\n-\n", ["a/b"]),
    ],
)
def test_base_models_of_a_card(front: str, names: list[str]) -> None:
    assert base_models(f"---\n{front}\n---\ntext\n") == names

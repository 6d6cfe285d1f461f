"""What tests share is made once, and a test that writes to it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from converted import Shelf
from openquant.formats.schemes import TENSOR

WRITES: list[Callable[[Path], object]] = [
    lambda root: (root / "config.json").write_text("{}"),
    lambda root: (root / "more").touch(),
    lambda root: (root / "config.json").unlink(),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", ["source", "output"])
def test_a_write_is_noticed(tmp_path: Path, place: str, write: Callable[[Path], object]) -> None:
    shelf = Shelf(tmp_path / "shelf")
    made = shelf.converted("Qwen3ForCausalLM", TENSOR)
    assert shelf.converted("Qwen3ForCausalLM", TENSOR) is made
    copies = shelf.copied("Qwen3ForCausalLM", TENSOR, tmp_path, shards=3)
    shelf.check()
    for copy in copies:
        write(copy)
    shelf.check()
    root = getattr(made, place)
    # As root may at any time.
    for path in (root, root / "config.json"):
        path.chmod(0o755)
    shelf.converted("Qwen3ForCausalLM", TENSOR)
    write(root)
    with pytest.raises(AssertionError, match=f"^a test wrote to what others read too: {root}$"):
        shelf.check()
    shelf.clear()
    assert not (tmp_path / "shelf").exists()

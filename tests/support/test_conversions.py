"""What tests share is made once, and a test that writes to it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openquant.formats.schemes import TENSOR, VARIANTS
from openquant.models import MODELS
from support import small_checkpoints
from support.conversions import Shelf, walks

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


def test_walks_meet_every_scheme_in_dense_models_and_in_mixtures_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_night in (False, True):
        monkeypatch.setenv("OPENQUANT_ALL", str(int(at_night)))
        walks.cache_clear()
        pairs = [(name, scheme) for name, schemes in walks().items() for scheme in schemes]
        assert all(small_checkpoints.refused(name, scheme) is None for name, scheme in pairs)
        for mixture in (False, True):
            assert {scheme for name, scheme in pairs if bool(MODELS[name].experts) == mixture} == {*VARIANTS}
        # DeepSeek V4 has two.
        served = {name: sum(small_checkpoints.refused(name, scheme) is None for scheme in VARIANTS) for name in walks()}
        assert tuple(walks()) == small_checkpoints.ARCHITECTURES
        assert all(len(schemes) >= (min(served[name], 3) if at_night else 1) for name, schemes in walks().items())
        assert len(set(pairs)) == len(pairs)
    walks.cache_clear()

"""What tests share is made once, and a test that writes to it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openquant.formats.schemes import SCHEMES, TENSOR, VARIANTS
from openquant.models import MODELS
from support import small_checkpoints
from support.conversions import Shelf, covering

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


def test_pairs_cover_every_architecture_and_each_scheme_with_several() -> None:
    pairs = covering()
    # DeepSeek V4 has two.
    served = [
        sum(small_checkpoints.refused(name, scheme) is None for scheme in VARIANTS)
        for name in small_checkpoints.ARCHITECTURES
    ]
    assert len(set(pairs)) == len(pairs) >= sum(min(count, 3) for count in served)
    default = {name for name in small_checkpoints.ARCHITECTURES if small_checkpoints.refused(name, TENSOR) is None}
    assert {name for name, scheme in pairs if scheme is TENSOR} == default
    widths = {name for name, scheme in pairs if scheme.name in ("int5", "int6")}
    fives = [
        name for name in small_checkpoints.ARCHITECTURES if small_checkpoints.refused(name, SCHEMES["int5"]) is None
    ]
    assert widths == set(fives)
    for scheme in VARIANTS:
        if scheme.name != "int4" and scheme.group_size not in (None, "128"):
            continue
        names = [name for name, other in pairs if other == scheme]
        assert len(names) >= 7
        assert sum(bool(MODELS[name].experts) for name in names) >= 2
        assert sum(not MODELS[name].experts for name in names) >= 2
        assert all(small_checkpoints.refused(name, scheme) is None for name in names)

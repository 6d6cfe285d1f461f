"""Conversions of large models, whose loops are compiled: the bytes of all others, and memory that is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import tree
from openquant import compress, dequantize
from openquant.convert import conversion
from openquant.formats import compiled
from openquant.formats.schemes import BLOCK, INT4_W4A16, NVFP4, VARIANTS
from support.conversions import Shelf, asking
from support.representatives import in_all_ways


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The compiled loops that are called."""
    found: set[str] = set()

    def told(name: str) -> None:
        loop = getattr(compiled, name)

        def call(*arguments: object) -> object:
            found.add(name)
            return loop(*arguments)

        monkeypatch.setattr(compiled, name, call)

    for name in ("absmax", "encode_stored", "decode_rows", "best_scales", "to_bfloat16"):
        told(name)
    return found


def test_every_scheme_has_the_bytes_of_a_small_model(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: set[str], subtests: pytest.Subtests
) -> None:
    for scheme in in_all_ways(VARIANTS):
        with subtests.test(scheme=scheme.suffix):
            monkeypatch.setattr(conversion, "LARGE", 1 << 60)
            source, output, _ = shelf.converted("Qwen3ForCausalLM", scheme)
            monkeypatch.setattr(conversion, "LARGE", 0)
            called.clear()
            fast = tmp_path / f"fast{scheme.suffix}"
            compress(source, fast, **asking(scheme))
            assert tree(fast) == tree(output)
            assert called == {"absmax", "encode_stored", *(["best_scales"] if scheme.searches_scales else [])}


def test_quantized_sources_are_decoded_to_the_same_bytes(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: set[str]
) -> None:
    for scheme in (BLOCK, INT4_W4A16, NVFP4):
        here = tmp_path / scheme.name
        monkeypatch.setattr(conversion, "LARGE", 1 << 60)
        stored = shelf.converted("Qwen3ForCausalLM", scheme).output
        compress(stored, here / "slow", "mxfp8")
        dequantize(stored, here / "slow-plain")
        monkeypatch.setattr(conversion, "LARGE", 0)
        called.clear()
        compress(stored, here / "fast", "mxfp8")
        dequantize(stored, here / "fast-plain")
        assert called == {"absmax", "encode_stored", "decode_rows", "to_bfloat16"}
        for name in ("", "-plain"):
            assert tree(here / f"fast{name}") == tree(here / f"slow{name}")


def test_compiled_loops_are_loaded_for_large_models_where_the_memory_allows_it(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, openquant\n"
        "from openquant.convert import conversion\n"
        "conversion.LARGE = int(sys.argv[3])\n"
        "limit = int(sys.argv[4]) or None\n"
        "done = openquant.compress(sys.argv[1], sys.argv[2], workers=2, max_memory=limit)\n"
        "print('numba' in sys.modules, done.peak_rss_bytes <= (limit or 1 << 40))"
    )
    found = []
    for large, limit in ((1 << 30, 0), (0, 200_000_000), (0, 0)):
        command = [sys.executable, "-c", code, str(source), str(tmp_path / f"{large}-{limit}"), str(large), str(limit)]
        found.append(subprocess.run(command, capture_output=True, text=True, env={**os.environ}).stdout.split())
    assert found == [["False", "True"], ["False", "True"], ["True", "True"]]

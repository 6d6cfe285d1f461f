"""NaN and infinity in tensors that stay unquantized: found by name, whatever verify is asked to do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from openquant import compress, verify
from support import small_checkpoints
from support.small_checkpoints import change_weights

NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def planted(name: str, value: float, at: int = 5):
    def change(held: dict[str, torch.Tensor]) -> None:
        held[name].view(-1)[at] = value

    return change


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM", shards=2, vocab=128)


@pytest.mark.parametrize(("name", "dtype"), [(NORM, "bfloat16"), (HEAD, "float16"), (EMBED, "float32")])
def test_nan_is_a_problem_with_and_without_the_source(tmp_path: Path, name: str, dtype: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM", vocab=128, dtype=dtype)
    change_weights(source, planted(name, math.nan))
    compress(source, tmp_path / "out", "channel")
    place = f"model.safetensors: {name} holds NaN (1 value)"
    assert verify(tmp_path / "out").problems == (f"{place}: the model answers NaN where it is used",)
    for full in (False, True):
        found = verify(tmp_path / "out", source, full=full)
        assert found.problems == (f"{place}, as the source has it: the model answers NaN where it is used",)


def test_nan_that_the_source_does_not_have_is_named_beside_the_difference(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out", "channel")
    assert verify(tmp_path / "out", source).problems == ()
    shard = next(path for path in (tmp_path / "out").glob("*.safetensors") if NORM.encode() in path.read_bytes())
    change_weights(tmp_path / "out", planted(NORM, math.nan))
    differs, nan = verify(tmp_path / "out", source).problems
    assert differs.startswith(f"{shard.name}: {NORM} differs from the source's, first in byte ")
    assert nan == f"{shard.name}: {NORM} holds NaN (1 value): the model answers NaN where it is used"


def test_infinity_is_a_problem_in_a_weight_and_a_note_elsewhere(source: Path, tmp_path: Path) -> None:
    mask = "model.layers.0.self_attn.mask"

    def change(held: dict[str, torch.Tensor]) -> None:
        if NORM in held:
            held[NORM][:2] = math.inf
            held[mask] = torch.tensor([0.0, -math.inf])

    change_weights(source, change)
    compress(source, tmp_path / "out", "channel")
    found = verify(tmp_path / "out", source)
    assert [problem.partition(": ")[2] for problem in found.problems] == [
        f"{NORM} holds infinity (2 values), as the source has it: the model answers NaN where it is used"
    ]
    assert [note.partition(": ")[2] for note in found.notes] == [
        f"{mask} holds infinity (1 value), as the source has it: right in a mask or a bound only"
    ]

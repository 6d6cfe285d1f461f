"""NaN and infinity in tensors that stay unquantized: found by name, whatever verify is asked to do."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from openquant import compress, verify
from support import small_checkpoints
from support.small_checkpoints import change_weights

NORM, HEAD = "model.norm.weight", "lm_head.weight"


def planted(name: str, value: float, at: int = 5):
    def change(held: dict[str, torch.Tensor]) -> None:
        held[name].view(-1)[at] = value

    return change


def test_nan_is_a_problem_with_and_without_the_source(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", vocab=128)
    # In a large tensor and in a small one.
    for name in (NORM, HEAD):
        change_weights(source, planted(name, math.nan))
    out = tmp_path / "out"
    compress(source, out, "channel")
    places = [f"model.safetensors: {name} holds NaN (1 value)" for name in (HEAD, NORM)]
    assert sorted(verify(out).problems) == [f"{place}: the model answers NaN where it is used" for place in places]
    for full in (False, True):
        report = verify(out, source, full=full)
        assert sorted(report.problems) == [
            f"{place}, as the source has it: the model answers NaN where it is used" for place in places
        ]
        assert report.hints == ["the source has it too: download or save that again, and convert it with --overwrite"]

    # What the source does not have is named beside the difference.
    change_weights(source, planted(NORM, 1.0))
    differs, nan = (problem for problem in verify(out, source).problems if NORM in problem)
    assert differs.startswith(f"model.safetensors: {NORM} differs from the source's, first in byte ")
    assert nan == f"{places[1]}: the model answers NaN where it is used"


def test_infinity_is_a_problem_in_a_weight_and_a_note_elsewhere(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", vocab=128)
    mask = "model.layers.0.self_attn.masked_bias"

    def change(held: dict[str, torch.Tensor]) -> None:
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

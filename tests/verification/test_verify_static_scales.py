"""openquant verify of static scales: of activations, and of an FP8 KV cache. No weight says what they must be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from openquant import compress, verify
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import TENSOR
from openquant.plan.plan import make_plan
from support import small_checkpoints
from support.random_calibrations import skewed
from support.rows import for_each

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
STATIC: dict[str, dict[str, Any]] = {
    "tensor": {"scheme": "tensor", "activation_scheme": "static"},
    "calibrated": {"scheme": "nvfp4-w4a4"},
    "constant": {"scheme": "nvfp4-w4a4"},
    "cache": {"scheme": "channel", "kv_cache": "fp8"},
}
INPUT, GLOBAL = "input_scale", "input_global_scale"
# Which output, which tensor, by how much, and whether it shows without a journal.
DAMAGE = [
    ("tensor", f"{ATTENTION}.k_proj.{INPUT}", 30.0, True),
    ("tensor", f"{MLP}.up_proj.{INPUT}", 1 / 30, True),
    ("tensor", f"{MLP}.down_proj.{INPUT}", 30.0, False),
    ("tensor", f"{MLP}.down_proj.{INPUT}", 1e-30, True),
    ("calibrated", f"{MLP}.down_proj.{GLOBAL}", 2.0, False),
    ("constant", f"{MLP}.gate_proj.{GLOBAL}", 1000.0, True),
    ("cache", f"{ATTENTION}.v_scale", 1e-30, True),
    ("cache", f"{ATTENTION}.v_scale", 2.0, False),
    ("cache", f"{ATTENTION}.v_scale", 1e30, True),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and an output of each kind."""
    root = tmp_path_factory.mktemp("static")
    source = small_checkpoints.write(root / "source")
    calibration = skewed(make_plan(open_checkpoint(source), TENSOR), root / "calibration")
    for name, options in STATIC.items():
        more = {"calibration": calibration} if name in ("tensor", "calibrated") else {}
        compress(source, root / name, **options, **more)
    return root


def set_scale(out: Path, name: str, factor: float) -> tuple[float, float]:
    """Multiply a scale. Returns it before and after."""
    values: list[float] = []

    def change(weights: dict[str, torch.Tensor]) -> None:
        values.append(weights[name].item())
        weights[name].mul_(factor)
        values.append(weights[name].item())

    small_checkpoints.change_weights(out, change)
    return values[0], values[1]


@for_each("name", STATIC)
def test_sound_ones(made: Path, tmp_path: Path, name: str) -> None:
    out, source = shutil.copytree(made / name, tmp_path / "out"), made / "source"
    for _ in range(2):
        for report in (verify(out), verify(out, source), verify(out, source, full=True)):
            assert report.problems == ()
        (out / ".openquant.json").unlink(missing_ok=True)


@for_each(("kind", "name", "factor", "shows"), DAMAGE)
def test_damaged_ones(made: Path, tmp_path: Path, kind: str, name: str, factor: float, shows: bool) -> None:
    out = shutil.copytree(made / kind, tmp_path / "out")
    before, after = set_scale(out, name, factor)
    place = f"{next(out.glob('*.safetensors')).name}: {name}"
    chosen = f"{place} is {after:g}, the run that made it chose {before:g}"
    assert chosen in verify(out).problems
    (out / ".openquant.json").unlink()
    problems = verify(out).problems
    assert len(problems) == shows
    if shows:
        assert name in problems[0]
        unneeded = f"{place} is {after:g}, and activations need 1e-10 to 9e+09"
        fused = r"\S+: \S+ is \S+ and \S+ is \S+, but their layers read the same input"
        assert problems[0] == unneeded or re.fullmatch(fused, problems[0])


def test_the_values_of_all_experts_are_known_by_one(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM")
    compress(source, tmp_path / "out", "nvfp4-w4a4")
    assert verify(tmp_path / "out").problems == ()
    name = "model.layers.1.mlp.experts.3.down_proj.input_global_scale"
    set_scale(tmp_path / "out", name, 1.5)
    [problem] = verify(tmp_path / "out").problems
    assert problem.endswith(f"{name} is 1.5, the run that made it chose 1")

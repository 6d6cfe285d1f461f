"""verify and the scales of an FP8 cache: missing, unsound, misnamed, and of layers that have no cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import compress, verify
from support import small_checkpoints

Weights = dict[str, torch.Tensor]
ONE = "model-00001-of-00001.safetensors"
KEYS, VALUES = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"
OTHER = "model.layers.1.self_attn.k_scale"
MISSING = "is missing: config.json says that the KV cache is FP8"


@pytest.fixture(scope="module", params=["channel", "tensor", "none"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source, and an output with scales in compressed-tensors or in fp8, or beside weights as they are."""
    root = tmp_path_factory.mktemp("made")
    source = small_checkpoints.write(root / "source")
    compress(source, root / "out", request.param, kv_cache="fp8")
    return source, root / "out"


def test_a_sound_output(made: tuple[Path, Path]) -> None:
    source, out = made
    for report in (verify(out), verify(out, source), verify(out, source, full=True)):
        assert report.problems == () and report.notes == ()


def rename(old: str, new: str) -> Callable[[Weights], object]:
    return lambda held: held.update({new: held.pop(old)})


OFF: list[tuple[Callable[[Weights], object], str]] = [
    (lambda held: held.pop(KEYS), f"{KEYS} {MISSING}"),
    (lambda held: held[KEYS].zero_(), f"{KEYS} holds 0 at [0]: scales are finite and above zero"),
    (lambda held: held[VALUES].fill_(float("nan")), f"{VALUES} holds nan at [0]"),
    (lambda held: held.update({OTHER: torch.ones(2)}), f"{OTHER} is F32 [2], a KV-cache scale is one number"),
    (lambda held: held.update({OTHER: torch.ones(1).int()}), f"{OTHER} is I32 [1], a KV-cache scale"),
    (
        rename(KEYS, "model.layers.0.self_attn.k_proj.k_scale"),
        f"model.layers.0.self_attn.k_proj.k_scale must be called {KEYS}",
    ),
    (rename(OTHER, "model.layers.1.self_attn.key_scale"), f"{OTHER} {MISSING}"),
    (
        lambda held: held.update({"model.layers.7.self_attn.k_scale": torch.ones(1)}),
        "model.layers.7.self_attn.k_scale is a scale of a layer that has no KV cache of its own",
    ),
]


def test_what_is_off_is_named(subtests: pytest.Subtests, made: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = made
    for number, (change, problem) in enumerate(OFF):
        with subtests.test(problem=problem):
            damaged = shutil.copytree(out, tmp_path / f"{number}")
            small_checkpoints.change_weights(damaged, change)
            for problems in (verify(damaged, source).problems, verify(damaged).problems):
                assert any(problem in found for found in problems), problems


@pytest.mark.parametrize("made", ["channel"], indirect=True)
def test_a_config_that_does_not_say_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Scales that no config speaks of are nothing of the source's."""
    source, out = made
    shutil.copytree(out, tmp_path / "out")
    change_json(tmp_path / "out" / "config.json", lambda found: found["quantization_config"].pop("kv_cache_scheme"))
    assert f"{KEYS} is not in the source" in str(verify(tmp_path / "out", source).problems)


@pytest.mark.parametrize("made", ["channel"], indirect=True)
def test_other_schemes_of_a_cache(made: tuple[Path, Path], tmp_path: Path) -> None:
    out = shutil.copytree(made[1], tmp_path / "out")
    for change, problem in (
        ({"dynamic": True}, "kv_cache_scheme is {"),
        ({"num_bits": 4}, "has a kv_cache_scheme of 4"),
    ):
        change_json(
            out / "config.json",
            lambda found, change=change: found["quantization_config"]["kv_cache_scheme"].update(change),
        )
        assert problem in str(verify(out).problems)


@pytest.mark.parametrize(
    ("scheme", "shape"), [({"strategy": "attn_head"}, (2, 1, 1)), ({"dynamic": True}, None), ({}, (1,))]
)
def test_other_tools_may_have_scales_of_heads_or_none(scheme: dict[str, Any], shape: Any, tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    compress(source, tmp_path / "out", "channel", kv_cache="fp8")
    for name in (".openquant.json", "README.md"):
        (tmp_path / "out" / name).unlink(missing_ok=True)

    def change(held: Weights) -> None:
        for name in [name for name in held if name.endswith((".k_scale", ".v_scale"))]:
            del held[name]
            if shape is not None:
                # By a name that modelopt gives it.
                held[name.replace("attn.k", "attn.k_proj.k").replace("attn.v", "attn.v_proj.v")] = torch.ones(shape)

    small_checkpoints.change_weights(tmp_path / "out", change)
    change_json(
        tmp_path / "out" / "config.json", lambda found: found["quantization_config"]["kv_cache_scheme"].update(scheme)
    )
    for report in (verify(tmp_path / "out"), verify(tmp_path / "out", source)):
        assert report.problems == ()
        assert any("they are not checked" in note for note in report.notes) is bool(scheme)

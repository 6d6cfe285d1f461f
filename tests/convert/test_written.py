"""A shard that was written wrongly gets no final name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from openquant import compress
from openquant.convert.checks import verify_shard
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import ShardFile
from openquant.formats.schemes import CHANNEL, INT4_W4A16, TENSOR
from openquant.plan.layout import ShardLayout
from openquant.plan.plan import make_plan
from support import small_checkpoints
from support.rows import for_each

NAME = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM")


@pytest.fixture
def written(tmp_path: Path, source: Path) -> tuple[Path, ShardLayout]:
    compress(source, tmp_path / "out")
    return tmp_path / "out" / NAME, make_plan(open_checkpoint(source), TENSOR).layout.lay_out(NAME)


def wrong_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop(f"{QUERY}.weight")


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def added(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more"] = torch.ones(1)


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(1, dtype=torch.bfloat16)


def other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)


def scale_of(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def put(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{QUERY}.weight_scale"] = torch.full_like(tensors[f"{QUERY}.weight_scale"], value)

    return put


SCALE = f"{QUERY}.weight_scale is not finite and positive"
FAULTS: list[tuple[Callable[[dict[str, torch.Tensor]], None], str]] = [
    (wrong_name, "its tensors are not those of the plan"),
    (missing, "its tensors are not those of the plan"),
    (added, "its tensors are not those of the plan"),
    (other_shape, "model.norm.weight is BF16 [1]"),
    (other_dtype, "model.norm.weight is F16 [256]"),
    (scale_of(0.0), SCALE),
    (scale_of(-1.0), SCALE),
    (scale_of(float("inf")), SCALE),
    (scale_of(float("nan")), SCALE),
]


@for_each(("fault", "problem"), FAULTS)
def test_a_shard_that_is_not_the_plan_s(
    written: tuple[Path, ShardLayout], fault: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    path, layout = written
    verify_shard(path, layout)
    tensors = load_file(path)
    fault(tensors)
    save_file(tensors, path)
    with pytest.raises(RuntimeError) as caught:
        verify_shard(path, layout)
    assert str(caught.value).startswith(f"{NAME} was written wrongly: {problem}")


def test_a_shard_that_is_cut_off(written: tuple[Path, ShardLayout]) -> None:
    path, layout = written
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError) as reason:
        safe_open(path, "np")
    with pytest.raises(RuntimeError) as caught:
        verify_shard(path, layout)
    assert str(caught.value) == f"{NAME} was written wrongly: {reason.value}"


def test_scales_of_integers_have_either_sign(tmp_path: Path, source: Path) -> None:
    layout = make_plan(open_checkpoint(source), INT4_W4A16).layout.lay_out(NAME)
    compress(source, tmp_path / "out", "int4")
    path = tmp_path / "out" / NAME
    tensors = load_file(path)
    assert (tensors[f"{QUERY}.weight_scale"] < 0).any()
    for value, problem in ((-1.0, None), (0.0, "is not finite and not zero"), (-float("inf"), "is not finite and not")):
        scale_of(value)(tensors)
        save_file(tensors, path)
        if problem is None:
            verify_shard(path, layout)
            continue
        with pytest.raises(RuntimeError, match=f"{QUERY}.weight_scale {problem}"):
            verify_shard(path, layout)


def test_every_fault_of_a_shard_is_named(written: tuple[Path, ShardLayout]) -> None:
    path, layout = written
    tensors = load_file(path)
    other_dtype(tensors)
    scale_of(0.0)(tensors)
    save_file(tensors, path)
    with pytest.raises(RuntimeError) as caught:
        verify_shard(path, layout)
    start, problems = str(caught.value).split(": ")
    assert start == f"{NAME} was written wrongly"
    assert sorted(problems.split("; ")) == [SCALE, "model.norm.weight is F16 [256]"]


def test_a_disk_that_loses_small_writes_finishes_no_shard(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales are among them, and read back as zero."""

    def lose(file: ShardFile) -> None:
        file._pending.clear()
        file._pending_bytes = 0

    monkeypatch.setattr(ShardFile, "_write_pending", lose)
    with pytest.raises(RuntimeError, match=rf"^{NAME} was written wrongly: .*weight_scale is not finite and positive"):
        compress(source, tmp_path / "out")
    assert not (tmp_path / "out" / NAME).exists()
    assert not (tmp_path / "out" / "config.json").exists()


def test_scales_are_read_whole(written: tuple[Path, ShardLayout], tmp_path: Path, source: Path) -> None:
    """One wrong scale among many."""
    compress(source, tmp_path / "channel", "channel")
    path = tmp_path / "channel" / NAME
    tensors = load_file(path)
    tensors[f"{QUERY}.weight_scale"][-1] = float(np.nan)
    save_file(tensors, path)
    layout = make_plan(open_checkpoint(source), CHANNEL).layout.lay_out(NAME)
    with pytest.raises(RuntimeError, match=SCALE):
        verify_shard(path, layout)

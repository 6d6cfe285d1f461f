"""A shard that was written wrongly gets no final name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from openquant import compress
from openquant.convert.conversion import verify_shard
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import ShardFile
from openquant.formats.schemes import INT4_W4A16, TENSOR
from openquant.plan.layout import ShardLayout
from openquant.plan.plan import make_plan
from support import small_checkpoints

NAME = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM")


@pytest.fixture
def written(tmp_path: Path, source: Path) -> tuple[Path, ShardLayout]:
    compress(source, tmp_path / "out")
    return tmp_path / "out" / NAME, make_plan(open_checkpoint(source), TENSOR).layout.lay_out(NAME)


Change = Callable[[dict[str, torch.Tensor]], object]


def of_norm(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({"model.norm.weight": make(tensors["model.norm.weight"])})


def scale_of(value: float) -> Change:
    name = f"{QUERY}.weight_scale"
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


SCALE = f"{QUERY}.weight_scale is not finite and positive"
FAULTS: list[tuple[Change, str]] = [
    (lambda tensors: tensors.update(other=tensors.pop(f"{QUERY}.weight")), "its tensors are not those of the plan"),
    (lambda tensors: tensors.pop("model.norm.weight"), "its tensors are not those of the plan"),
    (lambda tensors: tensors.update(more=torch.ones(1)), "its tensors are not those of the plan"),
    (of_norm(lambda weight: weight[:1].clone()), "model.norm.weight is BF16 [1]"),
    (of_norm(torch.Tensor.half), "model.norm.weight is F16 [256]"),
    (scale_of(0.0), SCALE),
    (scale_of(-1.0), SCALE),
    (scale_of(float("inf")), SCALE),
    (scale_of(float("nan")), SCALE),
]


def test_a_shard_that_is_not_the_plan_s(written: tuple[Path, ShardLayout]) -> None:
    path, layout = written
    verify_shard(path, layout)
    sound = path.read_bytes()

    def told(*faults: Change) -> str:
        path.write_bytes(sound)
        tensors = load_file(path)
        for fault in faults:
            fault(tensors)
        save_file(tensors, path)
        with pytest.raises(RuntimeError) as caught:
            verify_shard(path, layout)
        return str(caught.value)

    for fault, problem in FAULTS:
        assert told(fault).startswith(f"{NAME} was written wrongly: {problem}")
    # All are named.
    start, problems = told(of_norm(torch.Tensor.half), scale_of(0.0)).split(": ")
    assert start == f"{NAME} was written wrongly"
    assert sorted(problems.split("; ")) == [SCALE, "model.norm.weight is F16 [256]"]

    path.write_bytes(sound[:-1])
    with pytest.raises(SafetensorError) as reason:
        safe_open(path, "np")
    with pytest.raises(RuntimeError) as caught:
        verify_shard(path, layout)
    assert str(caught.value) == f"{NAME} was written wrongly: {reason.value}"


def test_scales_of_integers_have_either_sign_and_are_read_whole(tmp_path: Path, source: Path) -> None:
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


def test_a_disk_that_loses_small_writes_finishes_no_shard(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def lose(file: ShardFile) -> None:
        file._pending.clear()
        file._pending_bytes = 0

    monkeypatch.setattr(ShardFile, "_write_pending", lose)
    with pytest.raises(RuntimeError, match=rf"^{NAME} was written wrongly: .*weight_scale is not finite and positive"):
        compress(source, tmp_path / "out")
    assert not (tmp_path / "out" / NAME).exists()
    assert not (tmp_path / "out" / "config.json").exists()

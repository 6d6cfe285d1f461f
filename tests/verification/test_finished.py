"""A directory that was written wrongly is not called finished."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conftest import change_json
from openquant import compress
from openquant.files.checkpoint import open_checkpoint
from openquant.files.output import OutputDirectory
from openquant.formats.schemes import TENSOR
from openquant.plan.plan import make_plan, output_config
from openquant.verification.checks import check_finished
from support import small_checkpoints

NAME = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM")


def damaged(name: str, damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file damaged once it has its final name."""
    publish = OutputDirectory.publish

    def publish_damaged(output: OutputDirectory, published: str) -> None:
        publish(output, published)
        if published == name:
            damage(output.path / name)

    monkeypatch.setattr(OutputDirectory, "publish", publish_damaged)


def add_a_key(path: Path) -> None:
    change_json(path, lambda config: config.update(more=1))


def rename_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors["more"] = tensors.pop("model.norm.weight")
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("config.json", add_a_key, "config.json: "),
        (NAME, rename_a_tensor, "model.norm.weight is not what was planned"),
    ],
)
def test_files_that_are_not_the_plan_s_are_not_called_finished(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], object],
    problem: str,
) -> None:
    out = tmp_path / "out"
    damaged(name, damage, monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        compress(source, out)
    assert str(caught.value).startswith(f"{out} was written wrongly: {problem}")
    assert not json.loads((out / ".openquant.json").read_text())["done"]


def test_what_engines_would_refuse_is_not_called_finished(tmp_path: Path, source: Path) -> None:
    """Config and tensors are as the plan has them, and it has left out a layer that is quantized."""
    out = tmp_path / "out"
    compress(source, out)
    plan = make_plan(open_checkpoint(source), TENSOR)
    check_finished(out, plan)
    quantization = {**plan.quantization_config, "ignored_layers": [QUERY]}
    config = {**output_config(plan), "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=rf"^{out} was written wrongly: .*{QUERY}"):
        check_finished(out, replace(plan, quantization_config=quantization))

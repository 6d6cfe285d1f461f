"""A directory that was written wrongly is not called finished."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from openquant import compress
from openquant.errors import OutputError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import TENSOR
from openquant.plan.plan import make_plan, output_config
from openquant.verification.checks import check_finished
from support import small_checkpoints

NAME = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3ForCausalLM")


def test_what_engines_would_refuse_is_not_called_finished(tmp_path: Path, source: Path) -> None:
    """Config and tensors are as the plan has them, and it has left out a layer that is quantized."""
    out = tmp_path / "out"
    compress(source, out)
    plan = make_plan(open_checkpoint(source), TENSOR)
    check_finished(out, plan)
    quantization = {**plan.quantization_config, "ignored_layers": [QUERY]}
    config = {**output_config(plan), "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutputError, match=rf"^{out} was written wrongly: .*{QUERY}"):
        check_finished(out, replace(plan, quantization_config=quantization))

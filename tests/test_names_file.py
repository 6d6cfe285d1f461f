"""tools/names_file.py: a checkpoint described by its headers, and read back as the tests read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from openquant.files.checkpoint import open_checkpoint
from support import small_checkpoints
from support.published_checkpoints import described


def run(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "names_file.py"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def test_what_alike_tensors_have_is_one_line(tmp_path: Path) -> None:
    done = run(small_checkpoints.write(tmp_path / "small", "Qwen3MoeForCausalLM"))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "# small, 35 tensors",
        "# names, shapes and dtypes: the headers of the shards of a directory",
        "# num_attention_heads 4, num_key_value_heads 2, head_dim 64, num_hidden_layers 2, num_experts 4, "
        "num_experts_per_tok 2, norm_topk_prob true",
        "lm_head.weight  1  [512, 256]  BF16",
    ]
    assert "model.layers.{0..1}.self_attn.q_proj.weight  2  [256, 256]  BF16" in lines
    assert "model.layers.1.mlp.experts.{0..3}.up_proj.weight  4  [128, 256]  BF16" in lines


def test_it_reads_back_as_the_same_checkpoint(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for architecture in ("NemotronHForCausalLM", "Qwen3_5MoeForConditionalGeneration"):
        with subtests.test(architecture):
            root = small_checkpoints.write(tmp_path / architecture, architecture)
            source = open_checkpoint(root)
            found = described(run(root).stdout, architecture)
            assert found.tensors == source.tensors
            config = source.config.get("text_config", source.config)
            assert found.config.get("text_config", found.config).items() <= config.items()

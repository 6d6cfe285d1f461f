"""tools/names_file.py: a checkpoint described by its headers, and read back as the tests read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from openquant.files.checkpoint import open_checkpoint
from support import small_checkpoints
from support.loopback_hub import COMMIT, LoopbackHub
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


def test_layers_that_are_not_all_alike_take_several_lines(tmp_path: Path) -> None:
    """Layers 0, 2 and 4 have two experts, layer 1 has one, and 00 is a name."""
    names = [f"model.layers.{layer}.experts.{expert}.weight" for layer in (0, 2, 4) for expert in (0, 1)]
    names += ["model.layers.1.experts.0.weight", "model.layers.00.norm.weight"]
    small_checkpoints.write(tmp_path, weights={name: torch.zeros(256, dtype=torch.bfloat16) for name in names})
    lines = [line for line in run(tmp_path).stdout.splitlines() if not line.startswith("#")]
    assert sorted(lines) == [
        "model.layers.00.norm.weight  1  [256]  BF16",
        "model.layers.1.experts.0.weight  1  [256]  BF16",
        "model.layers.{0..4..2}.experts.{0..1}.weight  6  [256]  BF16",
    ]


def test_it_prints_the_counts_and_switches_that_the_tests_read(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "small")
    read = {"num_hidden_layers": 2, "loop_num": 2, "n_layer": 2, "mamba_n_heads": 4, "head_dim": 64}
    read |= {"v_head_dim": 32, "o_groups": 8, "group_norm_size": 4, "attention_k_eq_v": True}
    other = {"hidden_size": 256, "learn_rate": 3, "tie_word_embeddings": False, "multi_query": None, "num_labels": "2"}
    (root / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **read, **other}))
    text = run(root).stdout
    assert text.splitlines()[2] == (
        "# num_hidden_layers 2, loop_num 2, n_layer 2, mamba_n_heads 4, head_dim 64, v_head_dim 32, o_groups 8, "
        "group_norm_size 4, attention_k_eq_v true"
    )
    assert described(text, "LlamaForCausalLM").config == read


def test_a_quantized_checkpoint_s_config_is_told(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "small")
    config = json.loads((root / "config.json").read_text())
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (root / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    found = described(run(root).stdout, "LlamaForCausalLM")
    assert found.config["quantization_config"] == told


def test_of_a_repository_only_headers_are_fetched(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "repository", shards=2)
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = root
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        done = run("org/name", cwd=tmp_path, **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == f"# names, shapes and dtypes: the headers of the shards of org/name@{COMMIT}"
    assert described(done.stdout, "LlamaForCausalLM").tensors == open_checkpoint(root).tensors
    assert hub.sent < max(path.stat().st_size for path in root.glob("*.safetensors")) / 4
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr

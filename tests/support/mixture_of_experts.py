"""examples/tiny-qwen3 with experts: each MLP stands there several times, so that routing changes nothing of its answers,
and each expert sees tokens of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from conftest import EXAMPLE
from support import small_checkpoints

EXPERTS, CHOSEN = 4, 2


def make(root: Path) -> Path:
    """A Qwen3 MoE of four experts, two of them for each token; how many tokens come to each differs by far."""
    shutil.copytree(EXAMPLE, root, copy_function=shutil.copyfile)
    config = json.loads((root / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (root / "config.json").write_text(json.dumps(config))

    def split(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(7)
        for name in [name for name in weights if ".mlp." in name]:
            held, (place, last) = weights.pop(name), name.split(".mlp.")
            for expert in range(EXPERTS):
                weights[f"{place}.mlp.experts.{expert}.{last}"] = held.clone()
        for layer in range(config["num_hidden_layers"]):
            router = torch.randn(EXPERTS, config["hidden_size"], generator=generator)
            weights[f"model.layers.{layer}.mlp.gate.weight"] = router.bfloat16()

    small_checkpoints.change_weights(root, split)
    return root

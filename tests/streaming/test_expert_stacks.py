"""Experts that lie one by one, put back into the stacks that transformers' classes have."""

from __future__ import annotations

import torch

from openquant.files.shardfile import TensorInfo
from openquant.streaming.meta_model import find_expert_stacks

Weights = dict[str, torch.Tensor]
COUNT = 11


def experts(path: str, rows: int = 6, cols: int = 4) -> Weights:
    """Of eleven experts gate and up [rows, cols], and down [cols, rows], in no order."""
    chance = torch.Generator().manual_seed(0)
    made = {
        f"{path}.{expert}.{part}_proj.weight": torch.randn(
            (cols, rows) if part == "down" else (rows, cols), generator=chance
        ).half()
        for expert in range(COUNT)
        for part in ("up", "down", "gate")
    }
    return dict(sorted(made.items()))


def infos(held: Weights) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, "F16", tuple(tensor.shape)) for name, tensor in held.items()}


def test_stacks_that_lack_a_part_or_have_one_of_another_shape_are_none() -> None:
    path = "model.layers.1.feed_forward.experts"
    whole, down = experts(path), f"{path}.down_proj"
    gate, wide = f"{path}.3.gate_proj.weight", torch.zeros(7, 4).half()
    lacking = {name: tensor for name, tensor in whole.items() if name != gate}
    assert set(find_expert_stacks("Llama4ForCausalLM", infos(lacking))) == {down, f"{down}.weight"}
    assert set(find_expert_stacks("Llama4ForCausalLM", infos(whole | {gate: wide}))) == {down, f"{down}.weight"}
    named_otherwise = {name.replace(".weight", ".bias"): tensor for name, tensor in whole.items()}
    assert find_expert_stacks("Llama4ForCausalLM", infos(named_otherwise)) == {}
    assert find_expert_stacks("Qwen3ForCausalLM", infos(whole)) == {}
    assert find_expert_stacks("Unknown", infos(whole)) == {}

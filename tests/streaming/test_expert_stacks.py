"""Experts that lie one by one, put back into the stacks that transformers' classes have."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize(
    ("architecture", "place", "names", "turned"),
    [
        ("Llama4ForCausalLM", "feed_forward", ("experts.gate_up_proj", "experts.down_proj"), True),
        ("GraniteMoeForCausalLM", "block_sparse_moe", ("input_linear", "output_linear"), False),
    ],
)
def test_a_stack_holds_each_part_of_each_expert_in_its_place(
    architecture: str, place: str, names: tuple[str, str], turned: bool
) -> None:
    first, second = (f"model.layers.1.{place}.{name}" for name in names)
    path = f"model.layers.1.{place}.experts"
    held = experts(path)
    stacks = find_expert_stacks(architecture, infos(held) | {"other": TensorInfo("other", "F16", (2,))})
    assert sorted(stacks) == sorted((first, second, f"{first}.weight", f"{second}.weight"))
    for name, parts in ((first, ("gate", "up")), (second, ("down",))):
        expected = torch.stack(
            [torch.cat([held[f"{path}.{expert}.{part}_proj.weight"] for part in parts]) for expert in range(COUNT)]
        )
        expected = expected.transpose(1, 2) if turned else expected
        made = stacks[name].make(held.__getitem__)
        assert (made.dtype, stacks[name].info.dtype) == (torch.float16, "F16")
        assert stacks[name].info.shape == tuple(expected.shape)
        assert torch.equal(made, expected)
        assert torch.equal(stacks[f"{name}.weight"].make(held.__getitem__), expected)


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

"""Smoothing mappings of the registry: whatever the scales are, a transformers model computes the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from openquant.calibration.smoothing import SmoothingMapping, find_smoothing_mappings
from openquant.models import MODELS
from support import small_checkpoints
from support.conversions import Shelf

Weights = dict[str, torch.Tensor]
IDS = torch.randint(10, 500, (1, 24), generator=torch.Generator().manual_seed(0))
SMOOTHED = [name for name in small_checkpoints.ARCHITECTURES if MODELS[name].smoothing]


def opened(root: Path) -> tuple[Weights, tuple[SmoothingMapping, ...]]:
    """A checkpoint's tensors in float64, with norms that are not all ones, and its smoothing mappings."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: tensor.double() for name, tensor in small_checkpoints.read(root).items()}
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        else:
            # So that attention and experts tell tokens apart.
            tensor *= 4
    shapes = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in weights.items()}
    config = json.loads((root / "config.json").read_text())
    return weights, find_smoothing_mappings(MODELS[config["architectures"][0]], shapes, config)


def smooth(
    weights: Weights, each: SmoothingMapping, scale: torch.Tensor, sides: Any = ("smooth_layer", "balance_layers")
) -> None:
    """Divide channels where they are made, and multiply columns where they are read."""
    rows = slice(each.first_row, each.first_row + each.channels)
    if "smooth_layer" in sides:
        for name in (f"{each.smooth_layer}.weight", f"{each.smooth_layer}.bias"):
            if name in weights:
                part = weights[name][rows]
                by = scale if part.dim() == 1 else scale[:, None]
                weights[name][rows] = (part + each.offset) / by - each.offset
    if "balance_layers" in sides:
        columns = torch.from_numpy(each.column_factors(scale.numpy()))
        for layer in each.balance_layers:
            weights[f"{layer}.weight"] *= columns


def scales(each: SmoothingMapping, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(each.channels, generator=generator, dtype=torch.float64))


def logits(root: Path, weights: Weights) -> torch.Tensor:
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float64, experts_implementation="eager")
        return model.eval()(input_ids=IDS, use_cache=False).logits


def copied(source: Path, root: Path) -> Path:
    root.mkdir()
    (root / "config.json").write_bytes((source / "config.json").read_bytes())
    return root


def test_smoothing_leaves_logits_as_they_are(shelf: Shelf, tmp_path: Path, subtests: pytest.Subtests) -> None:
    shown: set[str] = set()
    for architecture in SMOOTHED:
        with subtests.test(architecture):
            weights, found = opened(shelf.source(architecture))
            root = copied(shelf.source(architecture), tmp_path / architecture)
            before = logits(root, weights)
            assert {fold.smooth_layer.rpartition(".")[2] for fold in MODELS[architecture].smoothing} == {
                each.smooth_layer.rpartition(".")[2] for each in found
            }
            for number, each in enumerate(found):
                smooth(weights, each, scales(each, number))
            # Norms and softmax are computed in float32.
            assert (logits(root, weights) - before).abs().max() < 1e-4 * before.abs().max()
            # One side alone shows, of whatever kind: so the texts would have shown a wrong one.
            kinds = {each.smooth_layer.rpartition(".")[2]: each for each in found}
            for each in (kinds[kind] for kind in kinds.keys() - shown):
                other = {name: tensor.clone() for name, tensor in weights.items()}
                smooth(other, each, scales(each, 99), ("smooth_layer",))
                assert (logits(root, other) - before).abs().max() > 1e-3 * before.abs().max(), each.smooth_layer
            shown |= kinds.keys()


SHAPES = {
    "model.layers.0.self_attn.v_proj": (128, 256),
    "model.layers.0.self_attn.o_proj": (256, 256),
    "model.layers.0.mlp.up_proj": (512, 256),
    "model.layers.0.mlp.down_proj": (256, 512),
}


def test_shapes_that_do_not_fit_have_no_mapping(subtests: pytest.Subtests) -> None:
    for shapes, config, sources in [
        ({}, {"num_key_value_heads": 2}, ["v_proj", "up_proj"]),
        ({}, {"num_attention_heads": 4}, ["v_proj", "up_proj"]),
        ({}, {}, ["up_proj"]),
        ({}, {"num_key_value_heads": 3}, ["up_proj"]),
        ({}, {"num_key_value_heads": "2"}, ["up_proj"]),
        ({"self_attn.o_proj": (256, 192)}, {"num_key_value_heads": 2}, ["up_proj"]),
        ({"mlp.down_proj": (256, 1024)}, {"num_key_value_heads": 2}, ["v_proj"]),
        ({"mlp.down_proj": (512,)}, {"num_key_value_heads": 2}, ["v_proj"]),
    ]:
        with subtests.test(shapes=shapes, config=config, sources=sources):
            known = SHAPES | {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
            found = find_smoothing_mappings(MODELS["LlamaForCausalLM"], known, config)
            assert [each.smooth_layer.rpartition(".")[2] for each in found] == sources


def test_rows_of_a_fused_tensor_follow_the_config() -> None:
    known = {"model.layers.0.self_attn.qkv_proj": (512, 256), "model.layers.0.self_attn.o_proj": (256, 256)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}

    def ask(config: dict[str, Any]) -> tuple[SmoothingMapping, ...]:
        return find_smoothing_mappings(MODELS["Phi3ForCausalLM"], known, config)

    [found] = ask(heads)
    assert (found.first_row, found.channels, found.repeats) == (384, 128, 2)
    assert ask({"num_attention_heads": 4}) == ()
    assert ask({**heads, "num_attention_heads": 5}) == ()

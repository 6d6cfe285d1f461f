"""Stacks of experts that a source has in FP8: with a scale for each, for each output, for blocks, or one for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, PlanError, SourceError
from support import small_checkpoints
from support.quantized_checkpoints import BLOCKS, FP8, Weights, group, widened
from support.rows import for_each
from support.small_checkpoints import change_weights

# Stacks [E, in, 2 * out], [E, 2 * out, in], and ones that are a module's weight.
ACROSS, ALONG, BESIDE = "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "GraniteMoeForCausalLM"
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
# The quantization_config, which axes of a stack share a scale, the shape of the scales, and how their names end.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor], str]] = {
    "blocks": (BLOCKS, lambda stack: stack.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).abs().amax((2, 4)),
     "_scale_inv"),
    "each": (PER_TENSOR, lambda stack: stack.abs().amax((1, 2)), "_scale"),
    "each, of three axes": (PER_TENSOR, lambda stack: stack.abs().amax((1, 2), keepdim=True), "_scale"),
    "one for all": (MODELOPT, lambda stack: stack.abs().amax(), "_weight_scale"),
    "rows": (group("channel"), lambda stack: stack.abs().amax(2, keepdim=True), "_scale"),
    "columns": (group("channel"), lambda stack: stack.abs().amax(1, keepdim=True), "_scale"),
}  # fmt: skip


def spread(scale: torch.Tensor, stack: torch.Tensor, layout: str) -> torch.Tensor:
    """The scale of each element, float64."""
    if layout == "blocks":
        return torch.stack([widened(grid, stack.shape[1:]).double() for grid in scale])
    scale = scale.double()
    return (scale[:, None, None] if scale.dim() == 1 else scale).expand(stack.shape)


def write(root: Path, architecture: str, layout: str) -> tuple[Path, Weights]:
    """A model with its stacks in FP8, and what they stand for, by an arithmetic of its own, in float64."""
    config, most, last = LAYOUTS[layout]
    stored: Weights = {}
    meant: Weights = {}
    for name, weight in small_checkpoints.tensors(architecture).items():
        if weight.dim() != 3 or "conv1d" in name:
            stored[name] = weight
            continue
        grid = (most(weight.float()) / 448).clamp(min=1e-12)
        wide = spread(grid, weight, layout)
        stored[name] = (weight.double() / wide).clamp(-448, 448).to(FP8)
        stored[name + last] = grid
        meant[name] = stored[name].double() * wide
    small_checkpoints.write(root, architecture, weights=stored, shards=2)
    change_json(root / "config.json", lambda found: found.update(quantization_config=config))
    return root, meant


def split(architecture: str, stacks: Weights) -> Weights:
    """The experts of such stacks one by one, as outputs name them."""
    found: Weights = {}
    for name, stack in stacks.items():
        for number, expert in enumerate(stack.mT if architecture == ACROSS else stack):
            path = name.removesuffix(".weight").rsplit(".", 1)[0]
            path += ".experts" if architecture == BESIDE else ""
            down = "down" in name or "output" in name
            parts = {"down_proj": expert} if down else dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            found |= {f"{path}.{number}.{part}.weight": rows for part, rows in parts.items()}
    return found


def check_rows(found: Weights, experts: Weights) -> None:
    """What experts became with a scale for each row."""
    assert experts.keys() <= found.keys()
    for name, weight in experts.items():
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        assert torch.equal(found[f"{name}_scale"], scale), name
        assert torch.equal(found[name].view(torch.uint8), (weight.float() / scale).to(FP8).view(torch.uint8)), name


@for_each(("layout", "architecture"), [*zip(LAYOUTS, 3 * (ACROSS, ALONG), strict=True), ("blocks", ALONG)])
def test_experts_are_made_of_what_stacks_stand_for(tmp_path: Path, architecture: str, layout: str) -> None:
    source, meant = write(tmp_path / "source", architecture, layout)
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(small_checkpoints.tensors(architecture))
    for name, stack in meant.items():
        assert torch.equal(plain[name], stack.to(torch.bfloat16)), name
    compress(source, tmp_path / "out", "channel")
    assert verify(tmp_path / "out", source, full=True).problems == ()
    check_rows(small_checkpoints.read(tmp_path / "out"), split(architecture, meant))


def test_pieces_of_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, meant = write(tmp_path / "source", ACROSS, "blocks")
    monkeypatch.setattr("openquant.weights.reading.TRANSPOSED_BUFFER", 32 * 256 * 4)
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 128 * 256)
    compress(source, tmp_path / "out", "channel", workers=1)
    check_rows(small_checkpoints.read(tmp_path / "out"), split(ACROSS, meant))
    compress(source, tmp_path / "same", "block", workers=1)
    assert verify(tmp_path / "same", source).problems == ()


@for_each(("architecture", "layout", "scheme"), [
    *((architecture, "blocks", "block") for architecture in (ACROSS, ALONG, BESIDE)),
    (BESIDE, "each", "tensor"),
    (ALONG, "one for all", "tensor"),
    (ACROSS, "columns", "channel"),
    (ALONG, "rows", "channel"),
])  # fmt: skip
def test_codes_pass_where_the_scheme_is_the_same(tmp_path: Path, architecture: str, layout: str, scheme: str) -> None:
    source, meant = write(tmp_path / "source", architecture, layout)
    compress(source, tmp_path / "out", scheme)
    assert verify(tmp_path / "out", source).problems == verify(tmp_path / "out").problems == ()
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    codes = split(architecture, {name: stored[name] for name in meant})
    for name, wanted in codes.items():
        assert torch.equal(found[name].view(torch.uint8), wanted.contiguous().view(torch.uint8)), name
    last = "weight_scale_inv" if scheme == "block" else "weight_scale"
    # As float64 has it, codes and scales together are what the source's are.
    for name, weight in split(architecture, meant).items():
        scale = found[name.removesuffix("weight") + last]
        wide = widened(scale, weight.shape) if scheme == "block" else scale
        assert torch.equal(found[name].double() * wide.double(), weight), name


def test_ignored_experts_are_decoded_one_by_one(tmp_path: Path) -> None:
    source, meant = write(tmp_path / "source", ACROSS, "blocks")
    compress(source, tmp_path / "out", "block", ignore=["**.layers.0.mlp.experts.**"])
    assert verify(tmp_path / "out", source).problems == ()
    found = small_checkpoints.read(tmp_path / "out")
    decoded = [name for name in split(ACROSS, meant) if found[name].dtype == torch.bfloat16]
    assert len(decoded) == 12
    for name in decoded:
        assert torch.equal(found[name], split(ACROSS, meant)[name].to(torch.bfloat16)), name


GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
SCALE = f"{GATE_UP}_scale"
NONE: list[tuple[str, Callable[[Weights], object], type[OpenQuantError], str]] = [
    ("blocks", lambda weights: weights.update({f"{SCALE}_inv": torch.ones(4, 2, 3)}), SourceError,
     f"{SCALE}_inv is [4, 2, 3], for [4, 256, 256] with one scale per 128x128 block it must be [4, 2, 2]"),
    ("each", lambda weights: weights.update({SCALE: torch.ones(3)}), SourceError, f"{SCALE} is [3], for [4, 256, 256] with one scale per tensor it must be [4, 1, 1]"),
    # Which of two axes of the same length they are of nothing tells.
    ("rows", lambda weights: weights.update({SCALE: torch.ones(4, 256)}), SourceError, f"{SCALE} is [4, 256], for [4, 256, 256] with one scale per channel it must be [4, 256, 1] or [4, 1, 256]"),
    ("each", lambda weights: weights.update({SCALE: torch.ones(4, dtype=torch.int64)}), SourceError, f"{SCALE} is I64, not F32 or BF16 or F16"),
    ("each", lambda weights: weights.pop(SCALE), SourceError, f"{GATE_UP} has no scale: {SCALE} is missing"),
    ("each", lambda weights: weights.update({GATE_UP: torch.zeros(4, 2, 128, 256).to(FP8)}), PlanError, f"{GATE_UP} is F8_E4M3 [4, 2, 128, 256], which is not supported"),
    ("each", lambda weights: weights.update({SCALE: torch.full((4,), float("nan"))}), SourceError, f"{SCALE} in model-00002-of-00002.safetensors holds nan, which is not a valid scale"),
]  # fmt: skip


@for_each(("layout", "change", "error", "message"), NONE)
def test_scales_that_are_not_those_of_a_stack(
    tmp_path: Path, layout: str, change: Callable[[Weights], Any], error: type[OpenQuantError], message: str
) -> None:
    source, _ = write(tmp_path / "source", ALONG, layout)
    change_weights(source, change)
    with pytest.raises(error) as caught:
        compress(source, tmp_path / "out", "channel")
    assert caught.value.message == message


def test_blocks_that_reach_over_gate_and_up(tmp_path: Path) -> None:
    source, _ = write(tmp_path / "source", ALONG, "blocks")

    def change(weights: Weights) -> None:
        weights[GATE_UP] = weights[GATE_UP][:, :192].clone()
        weights[GATE_UP.replace("gate_up", "down")] = weights[GATE_UP.replace("gate_up", "down")][:, :, :96].clone()

    change_weights(source, change)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", "channel")
    assert caught.value.message == f"{GATE_UP} has blocks that span gate_proj and up_proj"

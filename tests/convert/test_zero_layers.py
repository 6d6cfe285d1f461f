"""Layers whose weights are all zero in the source: the run converts them, and says so by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import EXAMPLE
from openquant import compress, verify
from openquant.files.output import OutputDirectory
from openquant.weights import reading
from support import small_checkpoints

# One of three fused layers, and one that is fused with none.
ZERO = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
NOTE = f"all weights are zero: {', '.join(ZERO)}"


def clear(held: dict[str, torch.Tensor]) -> None:
    for module in ZERO:
        held[f"{module}.weight"].zero_()
    # What torch makes of a negative weight times zero.
    held[f"{ZERO[0]}.weight"][0] = -0.0
    # Zero in part only.
    held["model.layers.0.mlp.down_proj.weight"][1:] = 0
    held["model.layers.1.self_attn.q_proj.weight"][:-1] = 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = small_checkpoints.write(tmp_path / "source", shards=3)
    small_checkpoints.change_weights(root, clear)
    return root


def test_the_run_names_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are quantized or not, fused layers share a scale or not, and a weight is read in one piece or in several."""
    monkeypatch.setattr(reading, "BUFFER", 1 << 14)
    for scheme in ("tensor", "block", "int4", "nvfp4"):
        result = compress(source, tmp_path / scheme, scheme, workers=3)
        assert [note for note in result.notes if "zero" in note] == [NOTE], scheme

    result = compress(source, tmp_path / "kept", ignore=["**.down_proj"])
    assert NOTE in result.notes

    # Two more have a single row that is not zero, which verify looks for too, with the source as without it.
    nearly = ("model.layers.{0..1}.mlp.down_proj", "model.layers.{0..1}.self_attn.q_proj")
    for original in (None, source):
        report = verify(tmp_path / "block", original, full=original is not None)
        assert report.problems == ()
        assert f"nearly all weights are 0: {', '.join(nearly)}" in report.notes


def test_what_is_not_quantized_and_what_gptq_has_rounded(tmp_path: Path) -> None:
    modules = ("model.embed_tokens", "model.layers.1.mlp.up_proj")

    def zero(held: dict[str, torch.Tensor]) -> None:
        for module in modules:
            held[f"{module}.weight"].zero_()
        # It may be stored as its difference from 1.
        held["model.layers.0.input_layernorm.weight"].zero_()
        held["model.layers.0.mlp.up_proj.weight"].fill_(0.5)

    source = small_checkpoints.changed_copy(EXAMPLE, tmp_path / "source", zero)
    note = f"all weights are zero: {', '.join(modules)}"
    plain = compress(source, tmp_path / "plain", "int4", group_size=64)
    assert [found for found in plain.notes if "zero" in found] == [note]
    for original in (None, source):
        assert "all weights are zero: model.embed_tokens" in verify(tmp_path / "plain", original).notes
    for scheme in ("int4", "channel", "nvfp4"):
        gptq = compress(source, tmp_path / scheme, scheme, gptq=True, samples=2, length=16)
        assert [found for found in gptq.notes if "zero" in found] == [note], scheme


def test_experts_of_a_stack(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", vocab=128)
    stack = next(name for name in load_file(root / "model.safetensors") if name.endswith("experts.gate_up_proj"))

    def change(held: dict[str, torch.Tensor]) -> None:
        held[stack][1:3, :, held[stack].shape[2] // 2 :] = 0

    small_checkpoints.change_weights(root, change)
    result = compress(root, tmp_path / "out", "channel")
    assert f"all weights are zero: {stack.replace('gate_up_proj', '{1..2}.up_proj')}" in result.notes


# Layers that lose their weights beside others under one scale: of their own, of a fused layer, in each row.
OUTLIER, SMALL, COLUMN = (
    "model.layers.1.mlp.down_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.mlp.down_proj",
)
LOST = "far more weights than usual became 0, beside much larger ones that share their scale: "
HINT = "; --ignore leaves such layers as they are"


def enlarge(held: dict[str, torch.Tensor]) -> None:
    held[f"{OUTLIER}.weight"][3, 4] = 60000
    held[f"{SMALL}.weight"] *= 1e-3
    held["model.layers.0.self_attn.q_proj.weight"] *= 1e4
    held[f"{COLUMN}.weight"][:, 5] = 60000
    # A row, a block and a pruned layer lose no more than they must.
    held["model.layers.1.self_attn.o_proj.weight"][7, 8] = 1000
    held["model.layers.1.mlp.up_proj.weight"][:, ::2] = 0


def test_layers_that_lose_their_weights_are_named(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", dtype="float16", shards=2)
    small_checkpoints.change_weights(source, enlarge)
    for scheme, modules in (
        ("tensor", ("model.layers.{0..1}.mlp.down_proj", SMALL)),
        ("channel", (COLUMN,)),
        # The block of an outlier is an eighth of such a small layer.
        ("block", ("model.layers.{0..1}.mlp.down_proj",)),
        ("int8", (COLUMN,)),
        ("int4", ()),
        ("mxfp4", ()),
    ):
        output = tmp_path / scheme
        result = compress(source, output, scheme, ignore=["model.layers.1.self_attn.o_proj"])
        expected = [f"{LOST}{', '.join(modules)}{HINT}"] if modules else []
        assert [note for note in result.notes if "became 0" in note] == expected, scheme
        assert (output / "README.md").read_text().count("> Note: far more weights") == len(expected)
        report = verify(output, source, full=True)
        assert report.problems == ()
        assert [note for note in report.notes if "became 0" in note] == expected
        zero = [note for note in verify(output).notes if "are 0" in note]
        assert zero == (
            [f"nearly all weights are 0: {', '.join(modules)}"] if scheme in ("tensor", "channel", "int8") else []
        )


def test_a_layer_with_a_weight_of_damage_is_named_in_any_scheme(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")

    def damage(held: dict[str, torch.Tensor]) -> None:
        held[f"{OUTLIER}.weight"][3, 4] = 1e30

    small_checkpoints.change_weights(source, damage)
    for scheme in ("channel", "block", "int4", "nvfp4"):
        result = compress(source, tmp_path / scheme, scheme)
        assert f"{LOST}{OUTLIER}{HINT}" in result.notes, scheme


def test_a_run_that_is_continued_names_those_that_it_quantizes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    publish = OutputDirectory.publish

    def stopping(self: OutputDirectory, name: str) -> None:
        publish(self, name)
        if name == "model-00001-of-00003.safetensors":
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(OutputDirectory, "publish", stopping)
        with pytest.raises(Stop):
            compress(source, tmp_path / "out", "channel", workers=1)
    expected = [
        module for module in ZERO if f"{module}.weight" not in load_file(source / "model-00001-of-00003.safetensors")
    ]
    result = compress(source, tmp_path / "out", "channel")
    assert result.resumed and 0 < len(expected) < len(ZERO)
    assert f"all weights are zero: {', '.join(expected)}" in result.notes
    assert not any("zero" in note for note in compress(source, tmp_path / "out", "channel").notes)

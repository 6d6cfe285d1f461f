"""openquant verify: clean directories of ours and of other tools, and every kind of damage by its message."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import openquant
from conftest import EXAMPLE, ROOT, change_json
from openquant import Report, compress, verify
from openquant.cli.commands import main
from openquant.errors import OpenQuantError
from openquant.formats.schemes import BLOCK, INT8_W8A16, SCHEMES, TENSOR
from openquant.report import text
from support import small_checkpoints
from support.conversions import Shelf
from support.quantized_checkpoints import BLOCKS, FP8, Make, Weights, by_blocks, by_rows, by_tensor, group, store
from support.representatives import in_all_ways
from support.small_checkpoints import change_weights

Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
DOWN = "model.layers.0.mlp.down_proj"
ONE = "model.safetensors"


@pytest.fixture
def ours(shelf: Shelf, tmp_path: Path) -> tuple[Path, Path]:
    """A small Qwen3 in one file, and its output with one scale per tensor."""
    return shelf.copied("Qwen3ForCausalLM", TENSOR, tmp_path)


@pytest.fixture
def blocks(shelf: Shelf, tmp_path: Path) -> tuple[Path, Path]:
    """A small Qwen3 with experts in one file, and its output by blocks."""
    return shelf.copied("Qwen3MoeForCausalLM", BLOCK, tmp_path)


def run_verify(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run `openquant verify WORDS...` in this process. Returns its exit code, stdout and stderr."""
    code = main(["verify", *map(str, words)])
    return code, *capsys.readouterr()


def assert_clean(report: Report, *notes: str) -> None:
    assert report.problems == ()
    assert report.notes == notes


# What compress() makes.


def test_what_engines_read_beside_the_quantization_must_be_there(shelf: Shelf, tmp_path: Path) -> None:
    _, output = shelf.copied("DeepseekV4ForCausalLM", BLOCK, tmp_path)
    config = json.loads((output / "config.json").read_text())
    for held, found in (({}, "missing"), ({"expert_dtype": "fp4"}, '"fp4"')):
        del config["expert_dtype"]
        config |= held
        (output / "config.json").write_text(json.dumps(config))
        problem = f'config.json: expert_dtype is {found}, but must be "fp8": engines read it'
        assert verify(output).problems == (problem,)
        config.setdefault("expert_dtype", "")


MIXTURES = [
    ("Qwen3ForCausalLM", "tensor", {"scheme_for": {"**.self_attn.*": "channel", "**.layers.0.mlp.*": "block"}}),
    ("Qwen3MoeForCausalLM", "block", {"tp": 2, "quantize_lm_head": True}),
    ("Llama4ForConditionalGeneration", "channel", {"quantize_lm_head": True}),
    ("Qwen3ForCausalLM", "int8", {"scheme_for": {"**.self_attn.*": "channel", "**.layers.0.mlp.*": "int8-weights"}}),
    ("Gemma3ForConditionalGeneration", "nvfp4", {"scheme_for": {"**.self_attn.*": "channel", "**.1.mlp.*": "mxfp4"}}),
    ("Qwen3ForCausalLM", "mxfp4", {"scheme_for": {"**.self_attn.*": "int8"}, "quantize_lm_head": True}),
    ("Qwen3ForCausalLM", "nvfp4", {"quantize_lm_head": True, "quantize_embeddings": True}),
]


@pytest.mark.parametrize(("architecture", "scheme", "options"), MIXTURES)
def test_mixtures_are_clean(tmp_path: Path, architecture: str, scheme: str, options: dict[str, Any]) -> None:
    source = small_checkpoints.write(tmp_path / "source", architecture, shards=3)
    result = compress(source, tmp_path / "out", scheme, format="compressed-tensors", **options)
    assert_clean(verify(tmp_path / "out"))
    full = verify(tmp_path / "out", source, full=True)
    assert_clean(full)
    assert full.quantized == result.quantized_tensors == len(full.errors)
    assert all(0.004 < error.relative < 0.14 for error in full.errors)


def test_a_layer_in_another_scheme_than_the_config_says(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    compress(source, tmp_path / "out", "block", format="compressed-tensors", scheme_for={Q: "channel"}, workers=1)

    def move(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_1"]["targets"].remove(K)

    change_json(tmp_path / "out" / "config.json", move)
    report = verify(tmp_path / "out")
    assert report.problems == (
        f"{ONE}: {K}.weight_scale is F32 [128, 1], for F8_E4M3 [128, 256] it must be F32 [1, 2]",
        f"{ONE}: {K}.weight has one scale per 128x128 block and {Q}.weight one scale per channel, "
        "but engines need both in one format",
    )


def test_heads_and_embeddings_that_are_not_named(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    for scheme, option, told in (
        ("channel", "quantize_lm_head", "lm_head.weight is F8_E4M3"),
        ("int8-weights", "quantize_embeddings", "model.embed_tokens.weight_packed is I32"),
    ):
        out = tmp_path / scheme
        compress(source, out, scheme, workers=1, **{option: True})
        change_json(
            out / "config.json",
            lambda config: config["quantization_config"]["config_groups"]["group_0"].update(targets=["Linear"]),
        )
        assert verify(out).problems == (f"{ONE}: {told}, but no config group names it: engines find it by name only",)


def test_extreme_weights_are_within_the_bound(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    weights[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"] * 1e-30
    weights["model.layers.1.mlp.down_proj.weight"].zero_()
    weights["model.layers.1.mlp.gate_proj.weight"] *= 1e5
    weights["model.layers.0.self_attn.o_proj.weight"][:128] *= 1e-4
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    for scheme in [each.name for each in in_all_ways(SCHEMES.values())]:
        compress(source, tmp_path / scheme, scheme)
        report = verify(tmp_path / scheme, source, full=True)
        # One of two fused layers is 10^5 times as large.
        notes = [note for note in report.notes if "became 0" not in note]
        assert notes == ["nearly all weights are 0: model.layers.1.mlp.down_proj"]
        assert report.problems == ()
        zero = next(error for error in report.errors if error.module == "model.layers.1.mlp.down_proj")
        assert (zero.relative, zero.sqnr_db, zero.largest) == (0, None, 0)


def test_errors_are_what_torch_computes(blocks: tuple[Path, Path]) -> None:
    source, out = blocks
    report = verify(out, source, full=True)
    weights, found = small_checkpoints.read(source), small_checkpoints.read(out)
    for error in report.errors:
        weight = weights[f"{error.module}.weight"].double()
        scale = found[f"{error.module}.weight_scale_inv"].double()
        decoded = found[f"{error.module}.weight"].double() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        relative = float((decoded - weight).norm() / weight.norm())
        assert error.relative == pytest.approx(relative, rel=1e-4)
        assert error.sqnr_db == pytest.approx(-20 * np.log10(relative), abs=1e-3)
        assert error.largest == pytest.approx(float((decoded - weight).abs().max()), rel=1e-5)
    assert [error.relative for error in report.worst] == sorted((e.relative for e in report.errors), reverse=True)[:10]


def test_the_shape_beside_words_is_that_of_their_codes(shelf: Shelf, tmp_path: Path) -> None:
    """Engines go by it, and a wrong one is no damage that headers show."""
    _, out = shelf.copied("Qwen3ForCausalLM", INT8_W8A16, tmp_path)
    assert verify(out).problems == ()
    change_weights(out, lambda weights: weights[f"{DOWN}.weight_shape"].copy_(torch.tensor([256, 255])))
    assert verify(out).problems == (f"{ONE}: {DOWN}.weight_shape is [256, 255], its codes are [256, 512]",)


def test_pieces_do_not_change_what_is_found(blocks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = blocks
    whole = verify(out, source, full=True, workers=1)
    monkeypatch.setattr("openquant.verification.contents.PIECE", 3000)
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 3000)
    monkeypatch.setattr("openquant.weights.reading.TRANSPOSED_BUFFER", 3000)
    monkeypatch.setattr("openquant.weights.quant_error.CHUNK", 1000)
    pieces = verify(out, source, full=True, workers=3)
    assert_clean(pieces)
    assert [e.relative for e in pieces.errors] == pytest.approx([e.relative for e in whole.errors], rel=1e-4)
    assert [e.largest for e in pieces.errors] == [e.largest for e in whole.errors]
    assert verify(out).problems == ()


# Damage.

SCALE = f"{DOWN}.weight_scale"


def spoil(name: str, value: float) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[name].reshape(-1)[-1] = value

    return change


def nan_code(weights: Weights) -> None:
    weights[f"{DOWN}.weight"].view(torch.uint8)[3, 7] = 0xFF
    weights[f"{DOWN}.weight"].view(torch.uint8)[200, 0] = 0x7F


def unquantize(module: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        del weights[f"{module}.weight_scale"]
        weights[f"{module}.weight"] = weights[f"{module}.weight"].float().bfloat16()

    return change


DAMAGED = [
    (nan_code, f"{ONE}: {DOWN}.weight holds NaN, first at [3, 7]"),
    (spoil(SCALE, 0.0), f"{ONE}: {SCALE} holds 0: scales are finite and above zero"),
    (spoil(SCALE, float("nan")), f"{ONE}: {SCALE} holds nan: scales are finite and above zero"),
    (lambda weights: weights.pop(SCALE), f"{ONE}: {DOWN}.weight has no scale: {SCALE} is missing"),
    (lambda weights: weights.update({SCALE: torch.ones(2)}),
     f"{ONE}: {SCALE} is F32 [2], for F8_E4M3 [256, 512] it must be F32 [] or [1]"),
    (lambda weights: weights.update({SCALE: weights[SCALE].bfloat16()}),
     f"{ONE}: {SCALE} is BF16 [], for F8_E4M3 [256, 512] it must be F32 [] or [1]"),
    (lambda weights: weights.update({"lm_head.weight_scale": torch.ones(())}),
     f"{ONE}: lm_head.weight_scale is the scale of lm_head.weight, which is BF16"),
    (lambda weights: weights.update({"model.extra.weight_scale": torch.ones(())}),
     f"{ONE}: model.extra.weight_scale has no weight: model.extra.weight is missing"),
    (lambda weights: weights.update({f"{DOWN}.weight_scale_inv": torch.ones(())}),
     f"{ONE}: {DOWN}.weight_scale_inv is not the scale of {DOWN}.weight: the config asks for {SCALE}"),
    (lambda weights: weights.update({"model.norm.weight": torch.ones(256).to(torch.int8)}),
     f"{ONE}: model.norm.weight is I8 [256], not a matrix of F8_E4M3 called model.norm.weight"),
    (lambda weights: weights.update({f"{DOWN}.weight_packed": torch.zeros(256, 128, dtype=torch.int32)}),
     f"{ONE}: {DOWN}.weight_packed is I32 [256, 128], not a matrix of F8_E4M3 called {DOWN}.weight"),
    (lambda weights: weights[f"{K}.weight_scale"].mul_(2), None),
    (unquantize(DOWN), f"{ONE}: {DOWN}.weight is BF16, but ignored_layers does not list {DOWN}"),
]  # fmt: skip


def test_damaged_tensors_are_named(subtests: pytest.Subtests, ours: tuple[Path, Path]) -> None:
    _, out = ours
    sound = (out / ONE).read_bytes()
    before = float(load_file(out / ONE)[f"{K}.weight_scale"])
    fused = (
        f"{ONE}: {K}.weight_scale is {2 * before:g} and {Q}.weight_scale is {before:g}, "
        "but engines fuse their layers under one scale"
    )
    for change, message in DAMAGED:
        with subtests.test(message=message):
            (out / ONE).write_bytes(sound)
            change_weights(out, change)
            report = verify(out)
            assert (report.problems, report.notes) == ((message or fused,), ())


def test_a_missing_or_short_shard(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", shards=3)
    compress(source, tmp_path / "out")
    name = "model-00002-of-00003.safetensors"
    path = tmp_path / "out" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    report = verify(tmp_path / "out", source, full=True)
    assert report.problems == (
        f"{path} is truncated: it has {len(data) - 1} bytes, its header says {len(data)}",
    )  # fmt: skip
    assert report.notes == ("nothing else was checked",)
    path.unlink()
    assert verify(tmp_path / "out").problems == (f"{name} is missing from {tmp_path / 'out'}",)


def change_lists(out: Path, change: Callable[[list[str]], object]) -> None:
    """Change both lists of unquantized layers."""

    def both(config: dict[str, Any]) -> None:
        for key in ("ignored_layers", "modules_to_not_convert"):
            change(config["quantization_config"][key])

    change_json(out / "config.json", both)


def test_a_listed_layer_that_is_quantized(ours: tuple[Path, Path]) -> None:
    source, out = ours
    change_lists(out, lambda listed: listed.append(DOWN))
    message = f"{ONE}: {DOWN}.weight is F8_E4M3, but ignored_layers lists {DOWN}"
    assert verify(out).problems == (message,)
    assert verify(out, source, full=True).problems == (
        message, f"config.json: ignored_layers lists {DOWN}, the plan does not"
    )  # fmt: skip


def test_an_unquantized_layer_that_is_not_listed(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM")
    out = tmp_path / "out"
    compress(source, out, ignore=["model.layers.0.mlp.*"])
    for name in ("model.layers.1.mlp.gate", DOWN, "model.layers.0.mlp.gate_up_proj"):
        change_lists(out, lambda listed, name=name: listed.remove(name))
    expected = (
        f"{ONE}: {DOWN}.weight is BF16, but ignored_layers does not list {DOWN}",
        f"{ONE}: model.layers.0.mlp.gate_proj.weight is BF16, but ignored_layers does not list model.layers.0.mlp.gate_up_proj",
        f"{ONE}: model.layers.0.mlp.up_proj.weight is BF16, but ignored_layers does not list model.layers.0.mlp.gate_up_proj",
        f"{ONE}: model.layers.1.mlp.gate.weight is BF16, but ignored_layers does not list model.layers.1.mlp.gate",
    )
    assert verify(out).problems == expected
    assert verify(out, source, full=True).problems == expected


def test_joined_layers_and_experts_of_mixed_status(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM")
    out = tmp_path / "out"
    compress(source, out)
    expert = "model.layers.1.mlp.experts.2.down_proj"
    for module in (K, expert):
        change_weights(out, unquantize(module))
        change_lists(out, lambda listed, module=module: listed.append(module))
    problems = verify(out).problems
    assert [problem for problem in problems if "in one format" in problem] == [
        f"{ONE}: {Q}.weight is F8_E4M3 and {K}.weight is BF16, but engines need both in one format",
        f"{ONE}: model.layers.1.mlp.experts.0.down_proj.weight is F8_E4M3 and {expert}.weight is BF16, "
        "but engines need both in one format",
    ]
    # The one listed expert covers the others.
    others = [problem for problem in problems if "in one format" not in problem]
    assert len(others) == 11
    assert all(problem.endswith(f"is F8_E4M3, but ignored_layers lists {expert}") for problem in others)


def test_a_quantized_head(ours: tuple[Path, Path]) -> None:
    _, out = ours

    def quantize(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].to(FP8)
        weights["lm_head.weight_scale"] = torch.ones(())

    change_weights(out, quantize)
    assert verify(out).problems == (
        f"{ONE}: lm_head.weight is F8_E4M3, but ignored_layers lists lm_head",
        f"{ONE}: lm_head.weight is F8_E4M3, but it is kept: output head",
    )


def test_other_files(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (source / name).write_text(json.dumps(name) if name == "tokenizer.json" else name * 1000)
    out = tmp_path / "out"
    compress(source, out)
    (out / "tokenizer.json").unlink()
    (out / "merges.txt").write_text("merges.txt" * 999 + "merges.txT")
    gone = "tokenizer.json is missing: the run that made this directory wrote it"
    assert verify(out).problems == (gone,)
    assert verify(out, source).problems == (gone, "merges.txt differs from the source's")
    (out / ".openquant.json").unlink()
    assert verify(out).problems == ()
    assert_clean(
        verify(out, source), "merges.txt differs from the source's", "tokenizer.json is missing: the source has it"
    )


def test_a_copied_tensor_of_which_one_byte_changed(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM")
    out = tmp_path / "out"
    compress(source, out, ignore=["**.experts.**"])
    norm, up = "model.norm.weight", "model.layers.1.feed_forward.experts.1.up_proj.weight"

    def change(weights: Weights) -> None:
        weights[norm].view(torch.uint8)[9] ^= 1
        weights[up].view(torch.uint8)[100, 5] ^= 64

    change_weights(out, change)
    assert verify(out).problems == ()
    assert verify(out, source).problems == (
        f"{ONE}: {up} differs from model.layers.1.feed_forward.experts.gate_up_proj[1], "
        f"first in byte {100 * 512 + 5} of {128 * 512}",
        f"{ONE}: {norm} differs from the source's, first in byte 9 of 512",
    )


def test_tensors_that_are_not_the_source_s(ours: tuple[Path, Path]) -> None:
    source, out = ours

    def change(weights: Weights) -> None:
        del weights["model.norm.weight"]
        weights["model.more"] = torch.ones(2)
        weights["lm_head.weight"] = weights["lm_head.weight"][:500].contiguous()
        weights[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"][:, :500].contiguous()

    change_weights(out, change)
    assert verify(out, source, full=True).problems == (
        f"{ONE}: lm_head.weight is BF16 [500, 256], the source has BF16 [512, 256]",
        f"{ONE}: {DOWN}.weight is F8_E4M3 [256, 500], the source has BF16 [256, 512]",
        f"{ONE}: model.more is not in the source",
        "model.norm.weight is missing: the source has model.norm.weight in model.safetensors",
    )


def test_a_wrong_scale_shows_when_decoded(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    out = tmp_path / "out"
    compress(source, out, "block")
    # Neither journal nor card says that this program made it.
    for name in (".openquant.json", "README.md"):
        (out / name).unlink()
    scale = f"{DOWN}.weight_scale_inv"
    change_weights(out, lambda weights: weights[scale][1, 2].mul_(1.1))
    assert verify(out, source).problems == ()
    report = verify(out, source, full=True)
    (problem,) = report.problems
    place = re.fullmatch(
        rf"{ONE}: {DOWN}.weight is off by \S+ at \[(\d+), (\d+)\], where rounding explains \S+ "
        r"\(\d+ of 131072 weights are off\)",
        problem,
    )
    assert place is not None
    row, col = map(int, place.groups())
    assert row >= 128 and 256 <= col < 384
    assert report.worst[0].module == DOWN


def test_a_number_of_layers_that_is_none(ours: tuple[Path, Path]) -> None:
    _, out = ours
    change_json(out / "config.json", lambda config: config.update(num_hidden_layers="2"))
    assert "config.json gives num_hidden_layers '2', which is no number of layers" in verify(out).problems


def test_static_activations_without_input_scales(ours: tuple[Path, Path]) -> None:
    _, out = ours
    change_json(out / "config.json", lambda config: config["quantization_config"].update(activation_scheme="static"))
    problems = verify(out).problems
    assert len(problems) == 14
    assert f"{ONE}: {DOWN}.weight has no {DOWN}.input_scale, but its activations are static" in problems
    names = [name.replace("weight_scale", "input_scale") for name in load_file(out / ONE) if "weight_scale" in name]
    change_weights(out, lambda weights: weights.update({name: torch.ones(1) for name in names}))
    assert verify(out).problems == ()
    change_weights(out, spoil(f"{DOWN}.input_scale", 0.0))
    assert verify(out).problems == (f"{ONE}: {DOWN}.input_scale holds 0 at [0]: scales are finite and above zero",)
    change_json(out / "config.json", lambda config: config["quantization_config"].update(activation_scheme="dynamic"))
    assert_clean(verify(out))
    change_json(out / "config.json", lambda config: config["quantization_config"].pop("activation_scheme"))
    assert verify(out).problems == (
        'config.json: quantization_config.activation_scheme is missing, openquant writes "dynamic"',
    )


# What other tools make.


def write_other(
    source: Path,
    root: Path,
    make: Make,
    config: dict[str, Any],
    kept: tuple[str, ...] = ("lm_head", "embed", "mlp.gate.", "norm"),
) -> Path:
    """A source as another tool stores it: all matrices as `make` has them, but for those with such a name."""
    weights: Weights = {}
    for name, weight in small_checkpoints.read(source).items():
        if weight.ndim == 2 and not any(part in name for part in kept):
            weights |= {name.removesuffix("weight") + last: tensor for last, tensor in make(weight).items()}
        else:
            weights[name] = weight

    shutil.copytree(source, root)
    save_file(weights, root / ONE, {"format": "pt"})
    change_json(root / "config.json", lambda found: found.update(quantization_config=config))
    return root


def test_blocks_as_qwen_and_deepseek_write_them(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    # Sizes that are no multiples of a block, with the edges' blocks smaller.
    weights["model.layers.0.mlp.down_proj.weight"] = torch.randn(200, 500).bfloat16()
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", weights=weights)
    odd = "intermediate_size is 512, and model.layers.0.mlp.down_proj.weight is [200, 500]"

    def without_odd(report: Report) -> Report:
        return replace(report, problems=tuple(problem for problem in report.problems if odd not in problem))

    change_json(source / "config.json", lambda found: found.pop("hidden_size"))
    unquantized = ["lm_head", "model.layers.1.mlp.gate", "model.norm"]
    config = {**BLOCKS, "fmt": "e4m3", "modules_to_not_convert": unquantized}
    out = write_other(source, tmp_path / "out", by_blocks(torch.bfloat16), config)
    assert load_file(out / ONE)["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 4)
    assert_clean(without_odd(verify(out)))
    report = without_odd(verify(out, source, full=True))
    assert_clean(report)
    assert len(report.errors) == 23
    # DeepSeek lists nothing; nor need it, where the engine builds the router without quantization.
    change_json(out / "config.json", lambda found: found["quantization_config"].pop("modules_to_not_convert"))
    assert_clean(without_odd(verify(out)))
    change_weights(out, spoil(f"{Q}.weight_scale_inv", float("nan")))
    assert without_odd(verify(out)).problems == (
        f"{ONE}: {Q}.weight_scale_inv holds nan at [1, 1]: scales are finite and above zero",
    )


def test_compressed_tensors_by_channel(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Gemma3ForConditionalGeneration")
    config = group("channel")
    config["ignore"] += ["re:.*vision_tower.*", "re:.*projector.*", "language_model.model.layers.0.mlp.down_proj"]
    kept = ("embed", "vision", "projector", "norm", "layers.0.mlp.down")
    out = write_other(source, tmp_path / "out", by_rows(), config, kept)
    assert_clean(verify(out))
    report = verify(out, source, full=True)
    assert_clean(report)
    assert len(report.errors) == 13
    q = "language_model.model.layers.1.self_attn.q_proj"
    change_weights(out, lambda weights: weights.update({f"{q}.weight_scale": torch.ones(256)}))
    change_json(
        out / "config.json", lambda found: found["quantization_config"]["ignore"].append("re:.*layers.1.mlp.up")
    )
    report = verify(out)
    up = "language_model.model.layers.1.mlp.up_proj"
    assert report.problems == (
        f"{ONE}: {q}.weight_scale is F32 [256], for F8_E4M3 [256, 256] it must be F32, BF16 or F16 [256, 1]",
        f"{ONE}: {up}.weight is F8_E4M3, but ignore lists re:.*layers.1.mlp.up",
    )


def test_compressed_tensors_in_several_groups(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")

    [blocks] = group("block", block_structure=[128, 128])["config_groups"].values()
    [tensors] = group("tensor")["config_groups"].values()
    groups = {"a": {**blocks, "targets": ["re:.*self_attn.*"]}, "b": {**tensors, "targets": ["re:.*mlp.*"]}}
    config = {**group("tensor"), "config_groups": groups, "ignore": []}

    def make(weight: torch.Tensor) -> Weights:
        layout = by_tensor(shape=(1,)) if 512 in weight.shape else by_blocks(torch.bfloat16, "weight_scale")
        return layout(weight)

    out = write_other(source, tmp_path / "out", make, config)
    assert_clean(verify(out))
    report = verify(out, source, full=True)
    assert_clean(report)
    assert report.format == "compressed-tensors, one scale per 128x128 block and one scale per tensor"
    change_json(out / "config.json", lambda found: found["quantization_config"]["config_groups"].pop("b"))
    problems = verify(out).problems
    assert f"{ONE}: {DOWN}.weight is F8_E4M3, but no config group targets it" in problems
    assert len(problems) == 6


def test_tensors_that_other_tools_add_or_recast_are_notes(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    out = write_other(source, tmp_path / "out", by_tensor(shape=(1,)), config)

    def change(weights: Weights) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].float()
        for layer in (0, 1):
            weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.ones(1)

    change_weights(out, change)
    assert_clean(
        verify(out, source, full=True),
        "not in the source: model.layers.{0..1}.self_attn.k_scale",
        "not compared, since the source has another dtype: model.norm.weight",
    )


def test_another_name_of_a_scale_is_a_note(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    report = verify(store(tmp_path / "stored", by_tensor("weight_scale_inv"), config))
    assert "14 scales are called weight_scale_inv although they are one per tensor" in str(report.notes)


def test_an_output_is_checked_by_the_entry_it_was_made_with(tmp_path: Path) -> None:
    source, out = small_checkpoints.write(tmp_path / "source"), tmp_path / "out"
    change_json(source / "config.json", lambda config: config.update(architectures=["FooForCausalLM"]))
    compress(source, out, architecture="Qwen3ForCausalLM", ignore=[DOWN])
    assert_clean(verify(out, source, full=True, architecture="Qwen3ForCausalLM"))
    note = (
        "FooForCausalLM is not a known architecture: it was not checked which unquantized layers must be in the "
        "ignore list, which layers are fused, and whether any is missing"
    )
    # The generic entry says nothing of engines. Of the source it plans the same.
    for architecture in (None, "generic"):
        assert_clean(verify(out, source, full=True, architecture=architecture), note)
    change_lists(out, lambda listed: listed.remove(DOWN))
    assert verify(out).problems == ()
    (problem,) = verify(out, architecture="Qwen3ForCausalLM").problems
    assert DOWN in problem
    with pytest.raises(OpenQuantError, match="BarForCausalLM is not a known architecture"):
        verify(out, architecture="BarForCausalLM")


@pytest.mark.parametrize("listed", [True, False])
def test_stacks_beside_the_experts_are_listed_as_these(tmp_path: Path, listed: bool) -> None:
    source = small_checkpoints.write(tmp_path / "source", "GraniteMoeForCausalLM")
    config = dict(BLOCKS)
    config["modules_to_not_convert"] = [
        "lm_head",
        *(f"model.layers.{layer}.block_sparse_moe.router.layer" for layer in (0, 1)),
        *(f"model.layers.{layer}.block_sparse_moe.experts" for layer in (0, 1) if listed),
    ]
    out = write_other(source, tmp_path / "out", by_blocks(torch.bfloat16), config, ("lm_head", "embed", "router"))
    stack = "model.layers.0.block_sparse_moe.input_linear.weight"
    problem = (
        f"{ONE}: {stack} is BF16, but modules_to_not_convert does not list model.layers.0.block_sparse_moe.experts"
    )
    problems = verify(out).problems
    assert problems == () if listed else problem in problems


def test_lists_under_the_engine_s_own_names(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "MiniMaxM2ForCausalLM")
    config = dict(BLOCKS)
    config["modules_to_not_convert"] = ["lm_head", *(f"model.layers.{layer}.mlp.experts" for layer in (0, 1))]
    kept = ("lm_head", "embed", "gate", "experts")
    out = write_other(source, tmp_path / "out", by_blocks(torch.bfloat16), config, kept)
    assert verify(out).problems == ()


def test_stacked_experts(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM")
    config = {**BLOCKS, "ignored_layers": ["model.layers.1.feed_forward.router"]}
    out = write_other(source, tmp_path / "out", by_blocks(torch.bfloat16), config, ("lm_head", "embed", "router"))
    stack = "model.layers.1.feed_forward.experts.down_proj"
    expected = f"{ONE}: {stack} is BF16, but ignored_layers does not list {stack}"
    assert expected in verify(out).problems

    def quantize(weights: Weights) -> None:
        for name, grid in ((stack, (4, 1, 2)), (stack.replace("down", "gate_up"), (4, 2, 2))):
            weights[name] = weights[name].to(FP8)
            weights[f"{name}_scale_inv"] = torch.ones(grid)

    change_weights(out, quantize)
    assert_clean(verify(out))
    report = verify(out, source, full=True)
    assert report.problems == ()
    assert "2 quantized tensors were not decoded: the source has no matrix for them" in report.notes


# The command.


USAGE = [
    ({}, ["--full"], "--full compares with the source, and none is given", "give --source DIR"),
    ({}, ["--workers", "0"], "0 workers cannot work", "give --workers 1 or more"),
    ({}, ["--source", "nowhere/at/all"], "nowhere/at/all does not exist, and is no Hub repository id either", "check the path"),
    ({"quantization_config": None}, [], "DIR is not quantized: its config.json has no quantization_config",
     "give a quantized directory, and with --source the model that it was made from; openquant diagnose MODEL checks "
     "unquantized weights, and openquant eval A --source B compares the answers of two models"),
]  # fmt: skip


def test_usage_errors(subtests: pytest.Subtests, ours: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = ours
    sound = (out / "config.json").read_text()
    for config, arguments, message, hint in USAGE:
        with subtests.test(message=message):
            (out / "config.json").write_text(json.dumps(json.loads(sound) | config))
            message = message.replace("DIR", str(out))
            assert run_verify(capsys, out, *arguments) == (2, "", f"error: {message}\nhint: {hint}\n")


def test_a_directory_that_is_not_finished_is_not_checked(ours: tuple[Path, Path]) -> None:
    _, out = ours
    with pytest.raises(OpenQuantError, match="config.json is not a checkpoint: it has no config.json"):
        verify(out / "config.json")
    change_json(out / ".openquant.json", lambda journal: journal.update(done=False))
    with pytest.raises(OpenQuantError, match="is not finished"):
        verify(out)


SHOWN = "$ openquant verify tiny-qwen3-FP8 --source examples/tiny-qwen3 --full\n"


def test_the_document_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny-qwen3-FP8"
    compress(EXAMPLE, out)
    monkeypatch.chdir(ROOT)
    code, stdout, stderr = run_verify(capsys, out, "--source", "examples/tiny-qwen3", "--full")
    assert (code, stderr) == (0, "")
    shown = (ROOT / "docs" / "verification.md").read_text().split(SHOWN)[1].split("```")[0]
    found = stdout.replace(str(out), "tiny-qwen3-FP8")
    assert re.sub(r"\d\.\d s\n", "0.0 s\n", found, count=1) == shown


def test_problems_are_listed_and_the_exit_code_is_1(
    ours: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = ours
    change_weights(out, lambda weights: (nan_code(weights), weights.pop(f"{Q}.weight_scale")))
    code, stdout, stderr = run_verify(capsys, out)
    assert (code, stderr) == (1, "")
    lines = stdout.splitlines()
    assert lines[0].startswith(f"2 problems: {out}, FP8 with one scale per tensor (tensor), ")
    assert lines[1:5] == [
        f"problem: {ONE}: {Q}.weight has no scale: {Q}.weight_scale is missing",
        f"problem: {ONE}: {DOWN}.weight holds NaN, first at [3, 7]",
        "hint: download it again, or convert it again with --overwrite if the source is whole",
        "Qwen3ForCausalLM, quant_method fp8",
    ]
    assert lines[5].endswith(" in 1 shard: 38 tensors, 14 quantized layers")
    # Those that were not decoded do not count.
    _, stdout, _ = run_verify(capsys, out, "--source", source, "--full")
    assert "\n12 of 14 layers decoded: relative error " in stdout


def test_of_another_source_a_screen_is_printed(
    ours: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = ours
    other = small_checkpoints.write(tmp_path / "other", seed=1)
    monkeypatch.setattr(text, "MOST_PROBLEMS", 3)
    code, stdout, _ = run_verify(capsys, out, "--source", other)
    found = verify(out, other)
    assert code == 1
    assert [line for line in stdout.splitlines() if line.startswith(("problem", "and", "hint"))] == [
        *(f"problem: {problem}" for problem in found.problems[:3]),
        f"and {len(found.problems) - 3} more problems: --json has them all",
        f"hint: no tensor equals one of {other}: give --source the model that {out} was made from",
    ]
    narrow = small_checkpoints.write(tmp_path / "narrow", "LlamaForCausalLM", seed=1)
    assert verify(out, narrow).hints == [
        f"no tensor equals one of {narrow}: give --source the model that {out} was made from"
    ]
    # A finetune of the same model shares some.
    change_weights(source, lambda weights: weights[f"{Q}.weight"].mul_(2))
    assert verify(out, source, full=True).hints[-1] == f"if {out} was made from another model than {source}, name that"


def test_the_command_says_that_codes_were_not_compared(
    ours: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = ours
    note = "codes and scales were not compared: --source MODEL --full does that"
    assert run_verify(capsys, out)[1].endswith(f"\nnote: {note}\n")
    compared = {"codes and scales were not compared: --full does that": [], None: ["--full"]}
    for note, words in compared.items():
        _, stdout, _ = run_verify(capsys, out, "--source", source, "--json", *words)
        assert json.loads(stdout)["notes"] == ([note] if note else [])


def test_what_a_model_lacks_is_found_without_a_source(tmp_path: Path) -> None:
    source, out = four_layers(tmp_path / "source"), tmp_path / "out"
    compress(source, out, "int4", ignore=["**.layers.1.mlp.*"])
    assert verify(out).problems == ()
    sound = (out / ONE).read_bytes()
    for gone, lost in (
        (r"layers\.2\.input_layernorm", "model.layers.2.input_layernorm"),
        (r"layers\.[12]\.mlp", "model.layers.{1..2}.mlp (6 tensors)"),
        (r"layers\.3\.", "model.layers.3 (11 tensors)"),
        (r"\.q_norm", "model.layers.{0..3}.self_attn.q_norm (4 tensors)"),
        (r"lm_head", "lm_head (output head)"),
    ):
        (out / ONE).write_bytes(sound)
        change_weights(
            out, lambda weights, gone=gone: [weights.pop(name) for name in [*weights] if re.search(gone, name)]
        )
        assert verify(out).problems == (f"the shards lack {lost}",)


def test_what_the_source_lacks_is_found_with_it_too(tmp_path: Path) -> None:
    """An output is not sound because its source is broken in the same way."""
    source, out = four_layers(tmp_path / "source"), tmp_path / "out"
    lost = "model.layers.2.self_attn.q_proj.weight"
    change_weights(source, lambda weights: [weights.pop(name) for name in (lost, "model.norm.weight")])
    change_json(source / "config.json", lambda config: config.update(vocab_size=500))
    compress(source, out)
    problems = (
        "the shards lack model.norm",
        "the shards lack model.layers.2.self_attn.q_proj",
        "config.json does not fit the tensors: vocab_size is 500, and model.embed_tokens.weight is [512, 256] (2 tensors)",
    )
    assert verify(out).problems == verify(out, source).problems == problems


def four_layers(root: Path) -> Path:
    """A Qwen3 of four layers."""
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    for name in [name for name in weights if ".layers.0." in name]:
        for number in (2, 3):
            weights[name.replace(".0.", f".{number}.")] = weights[name].clone()
    small_checkpoints.write(root, weights=weights)
    change_json(root / "config.json", lambda config: config.update(num_hidden_layers=4))
    return root


def test_json_is_one_object(ours: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, out = ours
    code, stdout, stderr = run_verify(capsys, out, "--source", source, "--full", "--json")
    assert (code, stderr, stdout.count("\n")) == (0, "", 1)
    found, report = json.loads(stdout), verify(out, source, full=True)
    assert found["seconds"] > 0
    assert {**found, "seconds": 0} == {**json.loads(json.dumps(report.to_json())), "seconds": 0}
    assert (found["decoded"]["layers"], len(found["decoded"]["worst"])) == (14, 10)

    change_weights(out, nan_code)
    code, stdout, _ = run_verify(capsys, out, "--json")
    assert (code, json.loads(stdout)["problems"]) == (1, [f"{ONE}: {DOWN}.weight holds NaN, first at [3, 7]"])
    code, stdout, _ = run_verify(capsys, out, "--json", "--full")
    assert (code, json.loads(stdout)["hint"]) == (2, "give --source DIR")


def test_verify_does_not_load_torch(ours: tuple[Path, Path]) -> None:
    source, out = ours
    code = (
        f"import sys, openquant; print(openquant.verify({str(out)!r}, {str(source)!r}, full=True).problems, "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "() False\n"
    assert openquant.verify is verify

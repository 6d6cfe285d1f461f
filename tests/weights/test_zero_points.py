"""Integers whose groups have zero points, as compressed-tensors stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import SourceError
from support import small_checkpoints
from support.quantized_checkpoints import Weights, asymmetric, asymmetric_config, decompressed, is_layer, store
from support.rows import for_each
from support.small_checkpoints import change_weights

Q = "model.layers.0.self_attn.q_proj"
KINDS = [(4, 32), (8, None), (3, 32), (5, None)]


@for_each(("bits", "size"), KINDS)
def test_dequantized_as_compressed_tensors_does(tmp_path: Path, bits: int, size: int | None) -> None:
    source = store(tmp_path / "source", asymmetric(bits, size), asymmetric_config(bits, size), shards=3)
    stored = small_checkpoints.read(source)
    assert verify(source).problems == ()
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(small_checkpoints.tensors("Qwen3ForCausalLM"))
    for name in filter(is_layer, plain):
        wanted = decompressed(stored, name.removesuffix(".weight"), asymmetric_config(bits, size))
        assert torch.equal(plain[name].view(torch.int16), wanted.bfloat16().view(torch.int16))


def test_zero_points_of_others_show(tmp_path: Path) -> None:
    source = store(tmp_path / "source", asymmetric(), asymmetric_config())
    sound = (source / "model.safetensors").read_bytes()
    name = f"{Q}.weight_zero_point"
    change_weights(source, lambda weights: weights.update({name: weights[name] ^ 0x44444444}))
    report = verify(source, small_checkpoints.write(tmp_path / "original"), full=True)
    assert len(report.problems) == 1
    assert f"{Q}.weight_packed is off by" in report.problems[0]

    # Of symmetric weights.
    (source / "model.safetensors").write_bytes(sound)
    change_json(
        source / "config.json",
        lambda found: found["quantization_config"]["config_groups"]["group_0"]["weights"].update(symmetric=True),
    )
    with pytest.raises(Exception, match="weight_zero_point is not supported"):
        dequantize(source, tmp_path / "out")
    assert len(verify(source).problems) == 14


ZERO_POINTS = f"{Q}.weight_zero_point"
# How zero points are changed, what a run says, and what `verify` says.
NONE: list[tuple[Callable[[Weights], object], str, str]] = [
    (lambda weights: weights.pop(ZERO_POINTS), f"{Q}.weight_packed has no weight_zero_point: {ZERO_POINTS} is missing", f"model.safetensors: {Q}.weight_packed has no zero points: {ZERO_POINTS} is missing"),
    (lambda weights: weights.update({ZERO_POINTS: torch.zeros(256, 8, dtype=torch.int8)}),
     f"{ZERO_POINTS} is I8 [256, 8], for {Q}.weight_packed [256, 32] it must be I32 [32, 8]",
     f"model.safetensors: {ZERO_POINTS} is I8 [256, 8], for I32 [256, 32] it must be I32 [32, 8]"),
    (lambda weights: weights.update({ZERO_POINTS: weights[ZERO_POINTS][:-1].contiguous()}),
     f"{ZERO_POINTS} is I32 [31, 8], for {Q}.weight_packed [256, 32] it must be I32 [32, 8]",
     f"model.safetensors: {ZERO_POINTS} is I32 [31, 8], for I32 [256, 32] it must be I32 [32, 8]"),
]  # fmt: skip


def test_zero_points_that_are_none(tmp_path: Path) -> None:
    source = store(tmp_path / "source", asymmetric(), asymmetric_config())
    sound = (source / "model.safetensors").read_bytes()
    for damage, message, found in NONE:
        (source / "model.safetensors").write_bytes(sound)
        change_weights(source, damage)
        for work in (dequantize, compress):
            with pytest.raises(SourceError) as caught:
                work(source, tmp_path / "out")
            assert caught.value.message == message
        assert verify(source).problems == (found,)


@for_each(("bits", "shifted"), [(2, True), (3, False), (5, True), (6, False), (7, True)])
def test_each_width_is_written_verified_and_read_back(tmp_path: Path, bits: int, shifted: bool) -> None:
    source, out = small_checkpoints.write(tmp_path / "source"), tmp_path / "out"
    compress(source, out, f"int{bits}", asymmetric=shifted, group_size="32")  # type: ignore[arg-type]
    report = verify(out, source, full=True)
    assert (report.problems, report.equal_share, len(report.errors)) == ((), 1, 14)
    dequantize(out, tmp_path / "plain")
    stored, plain = small_checkpoints.read(out), small_checkpoints.read(tmp_path / "plain")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    for name in filter(is_layer, plain):
        wanted = decompressed(stored, name.removesuffix(".weight"), config)
        assert torch.equal(plain[name].view(torch.int16), wanted.bfloat16().view(torch.int16))
    # What is read from it passes through unchanged.
    compress(out, tmp_path / "again", f"int{bits}", asymmetric=shifted, group_size="32")  # type: ignore[arg-type]
    again = small_checkpoints.read(tmp_path / "again")
    assert all(torch.equal(again[name], stored[name]) for name in stored)


def padded(share: int) -> Callable[[Weights], None]:
    def damage(weights: Weights) -> None:
        packed = weights[f"{Q}.weight_packed"]
        weights[f"{Q}.weight_packed"] = torch.nn.functional.pad(packed, (0, packed.shape[1] * share // 10))

    return damage


@for_each(("damage", "message"), [
    # Twelve words of five-bit codes in place of 10 with 64, as versions before 0.18 have them.
    (padded(2), "its rows are not whole sets of 5 words with 32 codes"),
    (padded(5), f"for {Q}.weight_packed [256, 60] it must be I32 [40, 12]"),
    (lambda weights: weights.update({ZERO_POINTS: weights[ZERO_POINTS][:-1].clone()}), "weight_zero_point is I32"),
])  # fmt: skip
def test_words_of_a_wrong_width_are_named(tmp_path: Path, damage: Callable[[Weights], None], message: str) -> None:
    source, out = small_checkpoints.write(tmp_path / "source"), tmp_path / "out"
    compress(source, out, "int5", asymmetric=True, group_size="32")
    change_weights(out, damage)
    problems = verify(out).problems
    assert problems
    assert Q in problems[0]
    for work in (dequantize, compress):
        with pytest.raises(SourceError) as caught:
            work(out, tmp_path / "made")
        assert message in caught.value.message
    assert not (tmp_path / "made").exists()

"""verify of directories that modelopt, Quark, fbgemm, torchao and bitsandbytes wrote: sound ones, and every damage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import change_json
from openquant import verify
from openquant.errors import OpenQuantError, UsageError
from support import small_checkpoints
from support.mixed_precision import ARCHITECTURE, DENSE, EXPERTS, UNQUANTIZED, mixed_precision
from support.other_tools import KINDS, stored_only
from support.quantized_checkpoints import Weights, is_layer, store
from support.small_checkpoints import change_weights

ONE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
# Directories of auto-round are checked as engines load them.
WRITTEN = sorted((Path(__file__).parents[1] / "weights" / "written").glob("[!a]*.safetensors"))
# Where the scales of a layer lie.
SCALES = ("weight_scale", "_weight_scale", "weight.nested_absmax", "weight.absmax", "SCB")


def unpack(root: Path, path: Path, change: Callable[[Weights], Any] = lambda _: None) -> tuple[Path, Path]:
    """A file that a tool wrote as a checkpoint of one layer, and what the tool decodes it to as its source."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        quantization = json.loads(file.metadata()["config"])
    decoded = tensors.pop("decoded")
    change(tensors)
    config = {"architectures": ["LlamaForCausalLM"]}
    for name, weights, more in (
        ("stored", tensors, {"quantization_config": quantization}),
        ("decoded", {"layer.weight": decoded}, {}),
    ):
        (root / name).mkdir(parents=True)
        save_file(weights, root / name / ONE)
        (root / name / "config.json").write_text(json.dumps(config | more))
    return root / "stored", root / "decoded"


def scale_name(weights: Weights) -> str:
    return next(f"layer.{last}" for last in SCALES if f"layer.{last}" in weights)


def nan_code(weights: Weights) -> None:
    next(codes for codes in weights.values() if codes.dtype == torch.float8_e4m3fn).view(torch.uint8)[0, 5] = 127


def first(value: float) -> Callable[[Weights], None]:
    """Puts a value into the first scale of the layer; what E8M0 has for NaN, if it is in bytes."""

    def change(weights: Weights) -> None:
        scale = weights[scale_name(weights)]
        scale.view(-1)[0] = value if scale.is_floating_point() else 255

    return change


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_files_that_the_tools_wrote_and_damaged_ones(subtests: pytest.Subtests, tmp_path: Path, path: Path) -> None:
    with subtests.test("sound"):
        stored, decoded = unpack(tmp_path / "sound", path)
        report = verify(stored)
        assert (report.problems, report.quantized) == ((), 1)
        [note] = report.notes
        assert re.fullmatch(r"1 layer in (FP8|FP4|NF4|FP4 of bitsandbytes|INT[48]), one scale.* per .+: layer", note), (
            note
        )
        [error] = verify(stored, decoded, full=True).errors
        # bitsandbytes multiplies by the largest weight first, and then by 1 / 127.
        assert error.relative <= (2.0**-23 if path.stem == "bitsandbytes-int8" else 0)

    with subtests.test("a scale that is not finite"):
        stored, _ = unpack(tmp_path / "nan", path, first(float("nan")))
        [problem] = verify(stored).problems
        assert "scale" in problem and " holds nan" in problem, problem

    # Only bitsandbytes stores 0 for weights that are all zero.
    with subtests.test("a scale of zero"):
        stored, _ = unpack(tmp_path / "zero", path, first(0))
        problems = verify(stored).problems
        if path.stem.startswith(("quark-fp8", "quark-int8", "torchao")):
            [problem] = problems
            assert "_scale holds 0" in problem and ": scales are finite and " in problem
        elif path.stem != "quark-mxfp4":
            assert problems == ()

    with subtests.test("a missing scale"):
        stored, _ = unpack(tmp_path / "missing", path, lambda weights: weights.pop(scale_name(weights)))
        [problem] = verify(stored).problems
        assert problem.startswith(f"{ONE}: layer.") and " has no " in problem and problem.endswith(" is missing")

    if "fp8" in path.stem:
        with subtests.test("a code that is not a number"):
            stored, _ = unpack(tmp_path / "code", path, nan_code)
            [problem] = verify(stored).problems
            assert problem.endswith(f" in {ONE} holds NaN")


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_each_layer(tmp_path: Path, kind: str) -> None:
    make, config, _ = KINDS[kind]
    source = small_checkpoints.write(tmp_path / "source")
    stored = store(tmp_path / "stored", stored_only(make), config, shards=2)
    alone, report = verify(stored), verify(stored, source, full=True)
    assert alone.problems == report.problems == ()
    assert alone.notes[0].startswith("14 layers in ")
    assert alone.notes[0].endswith(", model.layers.{0..1}.self_attn.q_proj, model.layers.{0..1}.self_attn.v_proj")
    plain = small_checkpoints.tensors("Qwen3ForCausalLM")
    expected = {
        name.removesuffix(".weight"): ((make(weight)[1] - weight.float()).norm() / weight.float().norm()).item()
        for name, weight in plain.items()
        if is_layer(name)
    }
    assert {error.module: error.relative for error in report.errors} == pytest.approx(expected, rel=1e-4)
    assert report.equal_tensors == len(plain) - 14


def test_other_weights_than_the_source(tmp_path: Path) -> None:
    make, config, _ = KINDS["quark nvfp4"]
    source = small_checkpoints.write(tmp_path / "source")
    change_weights(source, lambda weights: weights.update({f"{Q}.weight": -weights[f"{Q}.weight"]}))
    report = verify(store(tmp_path / "stored", stored_only(make), config), source, full=True)
    assert report.worst[0].module == Q
    assert report.worst[0].relative == pytest.approx(2, abs=0.1)
    error = report.worst[0].relative
    assert report.problems == (f"{ONE}: {Q}.weight has a relative error of {error:.3g}, where GPTQ explains 0.98",)


@pytest.mark.parametrize("file", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_mixed_precision(tmp_path: Path, file: bool) -> None:
    source = small_checkpoints.write(tmp_path / "source", ARCHITECTURE)
    stored = mixed_precision(tmp_path / "stored", file=file)
    report = verify(stored, source, full=True)
    assert (report.problems, report.quantized, len(report.errors)) == ((), 22, 22)
    attention = "model.layers.{0..1}.self_attn"
    assert report.notes[:2] == (
        "7 layers in FP8, one scale per tensor: model.layers.0.self_attn.o_proj, "
        f"{attention}.k_proj, {attention}.q_proj, {attention}.v_proj",
        f"15 layers in FP4, one scale per 1x16 block: {DENSE}.down_proj, {DENSE}.gate_proj, {DENSE}.up_proj, "
        "model.layers.1.mlp.experts.{0..3}.down_proj, model.layers.1.mlp.experts.{0..3}.gate_proj, "
        "model.layers.1.mlp.experts.{0..3}.up_proj",
    )


GATE = f"{DENSE}.gate_proj"
UP = f"{EXPERTS}.0.up_proj"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weights: weights[f"{Q}.input_scale"].fill_(0), f"{Q}.input_scale holds 0: scales are finite and above zero"),
        (lambda weights: weights[f"{UP}.weight_scale"].view(torch.uint8)[2].fill_(127),
         f"{UP}.weight_scale holds nan at [2, 0]: scales are finite and above zero"),
        (lambda weights: weights.update({f"{Q}.input_scale": torch.ones(2, dtype=torch.int32)}),
         f"{Q}.input_scale is I32 [2], not a scale"),
        (lambda weights: weights.update({f"{Q}.weight": torch.ones(256, 256, dtype=torch.bfloat16)}),
         f"{Q}.weight is BF16, but the config has it in FP8"),
        (lambda weights: weights["model.layers.1.self_attn.k_proj.k_scale"].fill_(0),
         "model.layers.1.self_attn.k_proj.k_scale holds 0: scales are finite and above zero"),
        (lambda weights: weights[f"{GATE}.weight_scale_2"].mul_(2),
         None),
        (lambda weights: weights.update({f"{GATE}.weight": torch.ones(512, 64, dtype=torch.uint8)}),
         f"{GATE}.weight_scale is [512, 16], for [512, 128] with one scale per 1x16 block it must be [512, 8]"),
    ],
)  # fmt: skip
def test_damage_of_mixed_precision(tmp_path: Path, change: Callable[[Weights], Any], problem: str | None) -> None:
    stored = mixed_precision(tmp_path / "stored", shards=1)
    change_weights(stored, change)
    problems = verify(stored).problems
    if problem is None:
        [fused] = problems
        assert f"{ONE}: {DENSE}." in fused and "but engines fuse their layers under one scale" in fused
    else:
        assert f"{ONE}: {problem}" in problems


def test_what_lies_beside_mixed_precision(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", ARCHITECTURE)
    stored = mixed_precision(tmp_path / "stored", shards=1)
    change_weights(stored, lambda weights: [weights.pop(name) for name in list(weights) if name.startswith(f"{UP}.")])
    assert verify(stored, source).problems == (f"{UP}.weight is missing: the source has {UP}.weight in {ONE}",)

    change_weights(stored, lambda weights: weights.update({f"{UNQUANTIZED}.weight_scale": torch.ones(1)}))
    assert f"{UNQUANTIZED}.weight_scale is the scale of no quantized weight" in verify(stored).problems

    scheme = {"num_bits": 4, "type": "float"}
    change_json(stored / "config.json", lambda found: found["quantization_config"].update(kv_cache_scheme=scheme))
    assert "config.json has a kv_cache_scheme of 4 bits, type float" in verify(stored).notes


def test_layouts_that_are_not_read(tmp_path: Path) -> None:
    """modelopt's AWQ divides weights by factors that engines multiply the inputs by."""
    stored, name = mixed_precision(tmp_path / "stored", shards=1), f"{GATE}.pre_quant_scale"
    change_weights(stored, lambda weights: weights.update({name: torch.ones(256)}))
    with pytest.raises(UsageError) as caught:
        verify(stored)
    assert caught.value.message == f"{name} is not supported"


def test_the_index_names_other_shards(tmp_path: Path) -> None:
    stored = mixed_precision(tmp_path / "stored", shards=2)

    def move(index: dict[str, Any]) -> None:
        shards, name = index["weight_map"], f"{Q}.weight_scale"
        shards[name] = next(shard for shard in shards.values() if shard != shards[name])

    change_json(stored / "model.safetensors.index.json", move)
    assert any(f"{Q}.weight_scale" in problem for problem in verify(stored).problems)


def test_no_weight_is_quantized(tmp_path: Path) -> None:
    stored = small_checkpoints.write(tmp_path / "stored")
    (stored / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    report = verify(stored)
    assert (report.problems, report.notes[0]) == ((), "nothing is quantized")
    (stored / "hf_quant_config.json").write_text("[]")
    with pytest.raises(OpenQuantError, match=rf"^{stored}/hf_quant_config.json is not a JSON object"):
        verify(stored)

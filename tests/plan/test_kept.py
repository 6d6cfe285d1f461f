"""--scheme keep: codes and scales of a quantized source, byte for byte, as compressed-tensors stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import PlanError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_kept_plan
from support import small_checkpoints
from support.mixed_precision import DENSE, EXPERTS, KEY_SCALE, UNQUANTIZED, VALUE_SCALE, mixed_precision
from support.quantized_checkpoints import (
    INT4,
    SOURCES,
    Make,
    Weights,
    asymmetric,
    asymmetric_config,
    awq,
    awq_config,
    by_rows,
    gptq,
    gptq_config,
    group,
    int4,
    store,
)
from support.rows import for_each
from support.small_checkpoints import change_weights

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
STATIC = "modelopt per tensor"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of any shapes hold the same bytes."""
    return torch.equal(as_bytes(one), as_bytes(other))


def kept(source: Path, out: Path) -> tuple[Weights, Weights]:
    """Keep a source. Returns the tensors of source and output, which stand for the same weights bit for bit."""
    compress(source, out, "keep")
    report = verify(out, source, full=True)
    assert report.problems == ()
    for root in (source, out):
        dequantize(root, root.with_name(f"{root.name}-plain"))
    plain = [small_checkpoints.read(root.with_name(f"{root.name}-plain")) for root in (source, out)]
    assert plain[0].keys() == plain[1].keys()
    assert all(equal(plain[0][name], plain[1][name]) for name in plain[0])
    return small_checkpoints.read(source), small_checkpoints.read(out)


def config_of(root: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((root / "config.json").read_text())["quantization_config"]
    return config


def test_several_formats_of_modelopt(tmp_path: Path) -> None:
    stored, found = kept(mixed_precision(tmp_path / "source"), tmp_path / "out")
    expected: Weights = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        four_bits = stored.get(f"{module}.weight", tensor).dtype == torch.uint8
        if last == "weight_scale_2":
            expected[f"{module}.weight_global_scale"] = (1 / tensor).reshape(1)
        elif last == "input_scale":
            scale = (1 / tensor if four_bits else tensor).reshape(1)
            expected[f"{module}.input_global_scale" if four_bits else name] = scale
        elif last in ("k_scale", "v_scale"):
            expected[f"{module.rpartition('.')[0]}.{last}"] = tensor.reshape(1)
        else:
            expected[f"{module}.weight_packed" if four_bits and last == "weight" else name] = tensor
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, equal(found[name], tensor)) == (tensor.dtype, True), name
    assert found[f"{K.rpartition('.')[0]}.k_scale"] == KEY_SCALE
    assert found[f"{K.rpartition('.')[0]}.v_scale"] == VALUE_SCALE
    config = config_of(tmp_path / "out")
    groups = {entry["format"]: entry["targets"] for entry in config["config_groups"].values()}
    assert (config["format"], config["kv_cache_scheme"]["num_bits"]) == ("mixed-precision", 8)
    assert list(groups) == ["nvfp4-pack-quantized", "float-quantized"]
    assert UNQUANTIZED in config["ignore"]
    activations = [entry["input_activations"] for entry in config["config_groups"].values()]
    assert [entry and entry["dynamic"] for entry in activations] == ["local", False, None]
    assert [f"{DENSE}.up_proj" in entry["targets"] for entry in config["config_groups"].values()] == [
        False,
        False,
        True,
    ]


# By name: how the source is stored, its config, and the format of the output.
KEPT: dict[str, tuple[Make, dict[str, Any], str]] = {
    name: (*SOURCES[name][:2], "float-quantized") for name in ("fp8 blocks, bfloat16 scales", STATIC)
} | {
    "awq": (awq(), awq_config(), "pack-quantized"),
    "gptq": (gptq(), gptq_config(), "pack-quantized"),
    "int5 with zero points": (asymmetric(5), asymmetric_config(5), "pack-quantized"),
}


@for_each("name", KEPT)
def test_one_format(tmp_path: Path, name: str) -> None:
    make, config, form = KEPT[name]
    stored, found = kept(store(tmp_path / "source", make, config), tmp_path / "out")
    assert config_of(tmp_path / "out")["format"] == form
    if form == "float-quantized":
        scale = next(tensor for last, tensor in stored.items() if last.startswith(f"{Q}.weight_scale"))
        assert equal(found[f"{Q}.weight"], stored[f"{Q}.weight"])
        assert equal(found[f"{Q}.weight_scale"], scale.float())
    if name == STATIC:
        # Layers that engines fuse keep scales of their own: engines round their codes again, of the source too.
        assert stored[f"{Q}.weight_scale"] != stored[f"{K}.weight_scale"]
        assert equal(found[f"{K}.weight_scale"], stored[f"{K}.weight_scale"])
    activations = [name for name in found if name.endswith("input_scale")]
    assert len(activations) == sum(name.endswith((".input_scale", ".activation_scale")) for name in stored)
    plan = make_kept_plan(open_checkpoint(tmp_path / "source"), PlanOptions())
    assert (summary.scheme_name(plan), summary.suffix(plan)) == ("keep", "-CT")


def test_global_scales_of_fused_layers_must_be_equal(tmp_path: Path) -> None:
    source, gate = mixed_precision(tmp_path / "source", shards=1), f"{EXPERTS}.1.gate_proj"
    change_weights(source, lambda found: found[f"{gate}.weight_scale_2"].mul_(2))
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", "keep")
    up = gate.replace("gate_proj", "up_proj")
    names = {f"{gate}.weight_scale_2", f"{up}.weight_scale_2"}
    text, _, rest = caught.value.message.partition(" are not equal")
    assert (set(text.split(", ")), rest) == (names, ", and engines take one global scale for all of these layers")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def in_float32(weight: torch.Tensor) -> Weights:
    stored = int4(weight)
    return stored | {"weight_scale": stored["weight_scale"].float()}


REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "activations as they are": (
        by_rows(), group("channel"), f"{Q}.weight: FP8 with one scale per channel, F32 scales, activations as they are"
    ),
    "act-order": (
        gptq(act=True), gptq_config(act=True),
        f"{Q}.qweight: INT4 with one scale per 1x32 block, F16 scales, inputs in any order (act-order), activations as "
        "they are",
    ),
    "scales that would be rounded": (
        in_float32, INT4,
        f"{Q}.weight_packed: INT4 with one scale per 1x32 block, F32 scales, activations as they are",
    ),
}  # fmt: skip


@for_each("name", REFUSED)
def test_what_compressed_tensors_has_no_layout_for(tmp_path: Path, name: str) -> None:
    make, config, message = REFUSED[name]
    source = store(tmp_path / "source", make, config)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", "keep")
    # The layers are found in the order of the file.
    found = caught.value.message.replace("k_proj", "q_proj").replace("down_proj", "q_proj").replace("mlp", "self_attn")
    assert found == f"compressed-tensors has no layout for {message}"
    assert not (tmp_path / "out").exists()


def without_input_scale(source: Path) -> None:
    change_weights(source, lambda found: found.pop(f"{Q}.input_scale"))


def fused_alike(source: Path) -> None:
    """q unquantized, k and v not."""
    plain = small_checkpoints.tensors("Qwen3MoeForCausalLM")[f"{Q}.weight"]
    change_weights(source, lambda found: [found.pop(f"{Q}.{last}") for last in ("weight_scale", "input_scale")])
    change_weights(source, lambda found: found.update({f"{Q}.weight": plain}))


def quantized_router(source: Path) -> None:
    gate = "model.layers.1.mlp.gate"
    change_weights(
        source,
        lambda found: found.update({
            f"{gate}.weight": found[f"{gate}.weight"].to(torch.float8_e4m3fn), f"{gate}.weight_scale": torch.tensor(1.0),
            f"{gate}.input_scale": torch.tensor(1.0),
        }),
    )  # fmt: skip
    change_json(
        source / "config.json",
        lambda found: found["quantization_config"]["quantized_layers"].update({gate: {"quant_algo": "FP8"}}),
    )


@for_each(
    ("change", "message"),
    [
        (without_input_scale, f"{Q} has static activations: the source has no input_scale for it"),
        (fused_alike,
         "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj: its codes cannot be kept: same as q_proj "
         "(the source has it unquantized)"),
        (quantized_router, "model.layers.1.mlp.gate: its codes cannot be kept: router"),
    ],
)  # fmt: skip
def test_what_engines_cannot_load_so(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    source = mixed_precision(tmp_path / "source", shards=1)
    change(source)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", "keep")
    assert caught.value.message == message
    assert not (tmp_path / "out").exists()


def test_options_that_would_change_weights(tmp_path: Path) -> None:
    given: dict[str, dict[str, Any]] = {
        "--ignore": {"ignore": "**"},
        "--format": {"format": "fp8"},
        "--gptq": {"gptq": True},
        "--calibrate": {"calibrate": True},
        "--quantize-lm-head": {"quantize_lm_head": True},
    }
    for told, options in given.items():
        with pytest.raises(UsageError) as caught:
            compress(tmp_path, tmp_path / "out", "keep", **options)
        assert caught.value.message == f"--scheme keep leaves weights as they are, and {told} is given"
    # An unquantized source has no codes to keep.
    with pytest.raises(PlanError, match="^nothing in .* is quantized"):
        compress(small_checkpoints.write(tmp_path / "source"), tmp_path / "out", "keep")


def test_another_code_or_scale_than_the_source_s_is_reported(tmp_path: Path) -> None:
    source, out, module = mixed_precision(tmp_path / "source"), tmp_path / "out", f"{DENSE}.down_proj"
    compress(source, out, "keep")
    told = f"{module}.weight_packed stands for other weights than the source's codes and scales"
    for last in ("weight_packed", "weight_scale", "weight_global_scale"):

        def flip(found: Weights, last: str = last) -> None:
            found[f"{module}.{last}"].view(torch.uint8).reshape(-1)[0] ^= 1

        change_weights(out, flip)
        assert verify(out).problems == ()
        assert any(problem.endswith(told) for problem in verify(out, source, full=True).problems), last
        change_weights(out, flip)


def test_errors_against_the_unquantized_model_have_the_limits_of_gptq(tmp_path: Path) -> None:
    original = small_checkpoints.write(tmp_path / "original")
    compress(original, tmp_path / "made", "int4")
    compress(tmp_path / "made", tmp_path / "out", "keep")
    report = verify(tmp_path / "out", original, full=True)
    assert (report.problems, len(report.errors)) == ((), 14)
    name = report.errors[0].module + ".weight_packed"
    change_weights(tmp_path / "out", lambda found: found[name].view(torch.uint8).zero_())
    [problem] = verify(tmp_path / "out", original, full=True).problems
    assert problem == f"model.safetensors: {name} has a relative error of 2.95, where GPTQ explains 0.798"

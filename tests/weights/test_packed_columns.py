"""AutoAWQ's and GPTQ's weights: read, quantized anew, and repacked where the grids agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, PlanError, SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import find_scheme
from openquant.plan.plan import make_plan
from openquant.weights import reading
from openquant.weights import weight as weight_module
from support import small_checkpoints
from support.quantized_checkpoints import (
    Make,
    Weights,
    asymmetric_config,
    auto_round_config,
    awq,
    awq_config,
    decompressed,
    gptq,
    gptq_config,
    in_words,
    is_layer,
    shifted,
    store,
)
from support.rows import for_each
from support.small_checkpoints import change_weights

Q = "model.layers.0.self_attn.q_proj"
Kind = tuple[Make, dict[str, Any], tuple[Any, ...]]
# How it is stored, and what shifted() is asked for to get the same.
KINDS: dict[str, Kind] = {
    "awq": (awq(), awq_config(), (4, 32, False)),
    "awq, one scale a row": (awq(None), awq_config(None), (4, None, False)),
    "gptq": (gptq(), gptq_config(), (4, 32, True)),
    "gptq_v2, asymmetric": (gptq(sym=False, v2=True), gptq_config(sym=False, v2=True), (4, 32, False)),
    "gptq, one scale a row": (gptq(size=None), gptq_config(size=None), (4, None, True)),
    "gptq, 8 bits": (gptq(8), gptq_config(8), (8, 32, True)),
    "gptq, 3 bits": (gptq(3), gptq_config(3), (3, 32, True)),
    "auto-round": (gptq(sym="signed"), auto_round_config("auto_gptq"), (4, 32, "signed")),
    "auto-round, awq": (awq(sym=True), auto_round_config("auto_awq"), (4, 32, True)),
    "gptq, in another order": (gptq(act=True), gptq_config(act=True), (4, 32, True)),
    "gptq, asymmetric, in another order": (gptq(sym=False, act=True), gptq_config(sym=False, act=True), (4, 32, False)),
}


def meant(weight: torch.Tensor, asked: tuple[Any, ...], index: torch.Tensor | None) -> torch.Tensor:
    """What a stored weight stands for, float32."""
    codes, scale, zero = shifted(weight, *asked, index)
    width = weight.shape[1] // scale.shape[1]
    index = torch.arange(weight.shape[1]) // width if index is None else index.long()
    return (codes - zero[:, index]).float() * scale.float()[:, index]


@for_each("name", KINDS)
def test_read_quantized_anew_and_verified_as_what_codes_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, config, asked = KINDS[name]
    source, out = store(tmp_path / "source", make, config, shards=3), tmp_path / "out"
    stored, weights = small_checkpoints.read(source), small_checkpoints.tensors("Qwen3ForCausalLM")

    def stands_for(module: str) -> torch.Tensor:
        index = stored[f"{module}.g_idx"] if config.get("desc_act") else None
        return meant(weights[f"{module}.weight"], asked, index)

    # Whole, and in strips.
    for strip in (weight_module.STRIP, 1 << 12):
        plain = tmp_path / f"plain-{strip}"
        with monkeypatch.context() as patch:
            patch.setattr(weight_module, "STRIP", strip)
            patch.setattr(reading, "BUFFER", strip * 8)
            dequantize(source, plain)
        found = small_checkpoints.read(plain)
        assert set(found) == set(weights)
        for layer in filter(is_layer, found):
            assert torch.equal(found[layer], stands_for(layer.removesuffix(".weight")).bfloat16()), layer
        assert "quantization_config" not in open_checkpoint(plain).config

    assert compress(source, out, "block").quantized_tensors == 14
    assert verify(out, source, full=True).problems == ()
    report = verify(source, small_checkpoints.write(tmp_path / "original"), full=True)
    assert report.problems == ()
    assert report.quantized == len(report.errors) == 14
    assert report.equal_tensors == len(weights) - 14
    for error in report.errors:
        weight = weights[f"{error.module}.weight"].float()
        difference = stands_for(error.module) - weight
        assert error.relative == pytest.approx(float(difference.norm() / weight.norm()), rel=1e-4)


AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
AUTO_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True, "true_sequential": True}


@for_each(("name", "told", "kind"), [
    ("quantize_config.json", AUTO_GPTQ, "gptq"),
    ("quant_config.json", AUTO_AWQ, "awq"),
])  # fmt: skip
def test_a_tool_s_own_file_says_how_weights_are_stored(
    tmp_path: Path, name: str, told: dict[str, Any], kind: str
) -> None:
    """Where config.json does not, as AutoGPTQ and AutoAWQ left it once."""
    make, config, _ = KINDS[kind]
    source = store(tmp_path / "source", make, config)
    dequantize(source, tmp_path / "plain")
    change_json(source / "config.json", lambda found: found.pop("quantization_config"))
    with pytest.raises(
        PlanError, match=r"^the source is already quantized: it holds .*\.qweight, and config\.json has no"
    ):
        dequantize(source, tmp_path / "again")
    (source / name).write_text(json.dumps(told))
    dequantize(source, tmp_path / "again")
    plain, again = small_checkpoints.read(tmp_path / "plain"), small_checkpoints.read(tmp_path / "again")
    assert all(torch.equal(again[key], plain[key]) for key in plain)
    assert not (tmp_path / "again" / name).exists()
    assert verify(source, tmp_path / "plain").problems == ()
    change_json(source / name, lambda found: found.update(bits=3, w_bit=3))
    with pytest.raises(PlanError, match=f"^the source is already quantized: {name} has weights of 3 bits"):
        dequantize(source, tmp_path / "never")
    (source / name).write_text("[]")
    with pytest.raises(SourceError, match=f"/{name} is not a JSON object"):
        dequantize(source, tmp_path / "never")


SAME = [name for name in KINDS if KINDS[name][2][0] == 4 and not KINDS[name][1].get("desc_act")]


@for_each("name", SAME)
def test_repacked_without_a_change_of_any_value(tmp_path: Path, name: str) -> None:
    make, config, asked = KINDS[name]
    source, out = store(tmp_path / "source", make, config, shards=2), tmp_path / "out"
    (source / "quantize_config.json").write_text("{}")
    result = compress(source, out, "int4", group_size=str(asked[1] or "channel"), asymmetric=not asked[2])
    assert result.quantized_tensors == 14
    assert not (out / "quantize_config.json").exists()
    found, weights = small_checkpoints.read(out), small_checkpoints.tensors("Qwen3ForCausalLM")
    written = open_checkpoint(out).config["quantization_config"]
    for layer in filter(is_layer, weights):
        module = layer.removesuffix(".weight")
        codes, scale, _ = shifted(weights[layer], *asked)
        assert torch.equal(found[f"{module}.weight_packed"], in_words(codes, 4))
        assert torch.equal(found[f"{module}.weight_scale"], scale)
        assert (f"{module}.weight_zero_point" in found) == (not asked[2])
        # compressed-tensors multiplies in float16.
        exact = {**found, f"{module}.weight_scale": scale.float()}
        assert torch.equal(decompressed(exact, module, written), meant(weights[layer], asked, None))
    report = verify(out, source, full=True)
    assert report.problems == ()
    assert max(error.relative for error in report.errors) == 0


def test_the_plan_says_what_is_made_anew(tmp_path: Path) -> None:
    source = store(tmp_path / "awq", *KINDS["awq"][:2])
    plan = make_plan(open_checkpoint(source), find_scheme("int4", group_size="32"))
    assert "14 layers have zero points and are quantized again; --asymmetric keeps their codes" in plan.notes
    source = store(tmp_path / "gptq", *KINDS["gptq, in another order"][:2])
    compress(source, tmp_path / "out", "int4", group_size="32")
    dequantize(source, tmp_path / "plain")
    assert verify(tmp_path / "out", tmp_path / "plain", full=True).problems == ()


def changed(last: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({f"{Q}.{last}": change(weights[f"{Q}.{last}"]).contiguous()})


def without(last: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(f"{Q}.{last}")


def one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return change


ORDERED = "if it was quantized with act-order, set desc_act: true there: its weights are then quantized again"
FAULTS = [
    ("gptq", without("qzeros"), f"{Q}.qweight has no qzeros: {Q}.qzeros is missing"),
    ("awq", without("scales"), f"{Q}.qweight has no scales: {Q}.scales is missing"),
    ("gptq, in another order", without("g_idx"), f"{Q}.qweight has no g_idx: {Q}.g_idx is missing"),
    ("awq", changed("qzeros", lambda held: held[:-1]), f"{Q}.qzeros is I32 [7, 32], for {Q}.qweight [256, 32] it must be I32 [8, 32]"),
    ("gptq", changed("scales", lambda held: held.double()), f"{Q}.scales is F64 [8, 256], for {Q}.qweight [32, 256] it must be F32 or BF16 or F16 [8, 256]"),
    ("gptq", changed("qweight", lambda held: held.short()), f"{Q}.qweight is I16 [32, 256], not a matrix of I32"),
    ("gptq", changed("qweight", lambda held: held[:, :-1]), f"{Q}.qweight has 255 outputs, which do not fill words of 8"),
    ("awq", changed("qweight", lambda held: held[:-1]), f"{Q}.qweight has 255 inputs, which do not fill words of 8"),
    ("gptq", changed("g_idx", one(2)), f"{Q}.g_idx in model.safetensors is not in order, but config.json has no desc_act"),
    ("gptq, in another order", changed("g_idx", one(99)), f"{Q}.g_idx in model.safetensors holds 99, but there are 8 groups"),
    ("gptq", changed("qzeros", one(0x77777776)), f"{Q}.qzeros in model.safetensors holds the zero point 7, but config.json says sym: all are 8"),
    ("awq", changed("scales", one(float("nan"))), f"{Q}.scales in model.safetensors holds nan, which is not a valid scale"),
    ("gptq", lambda weights: weights.update({"gone.qzeros": torch.ones(1)}), "gone.qzeros is the scale of no quantized weight"),
]  # fmt: skip


def test_what_is_wrong_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in {fault[0]: None for fault in FAULTS}:
        store(tmp_path / name, *KINDS[name][:2])
    shifted_too = partial(compress, scheme="int4", group_size="32", asymmetric=True)
    for name, damage, message in FAULTS:
        source = tmp_path / name
        sound = (source / "model.safetensors").read_bytes()
        change_weights(source, damage)
        with subtests.test(message=message):
            for work in (dequantize, shifted_too):
                with pytest.raises(SourceError) as caught:
                    work(source, tmp_path / "out")
                assert caught.value.message == message
                assert (caught.value.hint == ORDERED) == ("not in order" in message)
            (problem,) = verify(source).problems
            assert message.startswith("gone") or message in problem
        (source / "model.safetensors").write_bytes(sound)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("awq", {"version": "gemv"}, 'config.json has the version "gemv"', "known is the GEMM layout of AutoAWQ, of 4 bits with zero points"),
    ("awq", {"zero_point": False}, "config.json has the zero_point false", "known is the GEMM layout of AutoAWQ, of 4 bits with zero points"),
    ("awq", {"bits": 8}, "config.json has weights of 8 bits", "known are 4"),
    ("awq", {"group_size": 12}, "config.json has the group_size 12", "known are -1 and multiples of 8"),
    ("gptq", {"group_size": True}, "config.json has the group_size true", "known are -1 and multiples of 8"),
    ("gptq", {"bits": 9}, "config.json has weights of 9 bits", "known are 2, 3, 4, 5, 6, 7, 8"),
    ("gptq", {"checkpoint_format": "marlin"}, 'config.json has the checkpoint_format "marlin"', "known are gptq and gptq_v2"),
    ("gptq", {"is_marlin_format": True}, "config.json has the is_marlin_format true", "known are gptq and gptq_v2"),
    ("gptq", {"pack_dtype": "int16"}, 'config.json has the pack_dtype "int16"', "known are words of 32 bits"),
    ("gptq", {"sym": 1}, "config.json has the sym 1", "it must be true or false"),
    ("gptq", {"dynamic": {"+:.*q_proj": 8}}, "config.json: dynamic is not an object of settings by layer", "mend quantization_config, or save the model again"),
    ("gptq", {"dynamic": {"+:(": {}}}, "config.json: 're:(' is no regular expression: missing ), unterminated subpattern at position 0", "mend quantization_config, or save the model again"),
    ("auto-round", {"extra_config": ["lm_head"]}, "config.json: extra_config is not an object of settings by layer", "mend quantization_config, or save the model again"),
    ("auto-round", {"extra_config": {"lm_head": {"data_type": "mx_fp"}}}, 'config.json has the data_type "mx_fp"', "known are integers"),
    ("auto-round", {"act_bits": 8}, "config.json has the act_bits 8", "known are activations as they are"),
    ("auto-round", {"rotation_config": {"hadamard_type": "hadamard"}}, 'config.json has the rotation_config {"hadamard_type": "hadamard"}', "known are weights that are not rotated"),
    ("auto-round", {"packing_format": "auto_round:fp8"}, 'config.json has the packing_format "auto_round:fp8"',
     "known are auto_round:auto_gptq, auto_round:gptq, auto_round:auto_awq, auto_round:awq, auto_round:gptqmodel, auto_round:exllamav2 and auto_round"),
]  # fmt: skip


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    for name in ("awq", "gptq", "auto-round"):
        store(tmp_path / name, *KINDS[name][:2])
    for name, change, message, hint in REFUSED:
        config = tmp_path / name / "config.json"
        text = config.read_text()
        change_json(config, lambda found, change=change: found["quantization_config"].update(change))
        with pytest.raises(PlanError) as caught:
            compress(tmp_path / name, tmp_path / "out", "int4")
        assert caught.value.message == f"the source is already quantized: {message}"
        assert caught.value.hint == f"{hint}; or start from the unquantized model"
        config.write_text(text)


# By a part of a layer's name, how it is stored and what shifted() is asked for to get the same; None is unquantized.
Stored = dict[str, tuple[Make, tuple[Any, ...]] | None]
EIGHT_BITS = gptq(8, 64), (8, 64, True)
THREE_BITS = gptq(3, sym=False), (3, 32, False)
EIGHT = {"bits": 8, "group_size": 64}
DYNAMIC = {
    # The first rule counts, whatever it changes.
    "-:.*\\.1\\.mlp\\.down_proj": {},
    "+:.*\\.self_attn\\.": EIGHT,
    r"model\.layers\.1\.mlp\.": {"bits": 3, "sym": False, "damp_percent": 0.1},
    ".*mlp": {"desc_act": True},
    "+:.*": {"bits": 2},
}
EXTRA = {
    f"model.layers.{layer}.self_attn.{name}_proj": {**EIGHT, "sym": True} for layer in (0, 1) for name in "qkvo"
} | {
    "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"},
    r".*layers\.1\.mlp\..*": {"bits": 3, "sym": False},
    "lm_head": {"bits": 8, "group_size": 32},
}
BY_LAYER: dict[str, tuple[dict[str, Any], Stored]] = {
    "gptq": (
        gptq_config() | {"dynamic": DYNAMIC},
        {"1.mlp.down_proj": None, "self_attn": EIGHT_BITS, "layers.1.mlp": THREE_BITS, "mlp": (gptq(act=True), (4, 32, True))},
    ),
    "auto-round": (
        auto_round_config("auto_gptq") | {"extra_config": EXTRA},
        {"1.mlp.down_proj": None, "self_attn": EIGHT_BITS, "layers.1.mlp": THREE_BITS, "": (gptq(), (4, 32, True))},
    ),
    "auto-round, in AutoAWQ's words": (
        auto_round_config("auto_awq") | {"extra_config": {"self_attn.[qk]_proj$": {"group_size": 64, "sym": False}}},
        {"q_proj": (awq(64), (4, 64, False)), "k_proj": (awq(64), (4, 64, False)), "": (awq(sym=True), (4, 32, True))},
    ),
    "auto-round, zero points as they are": (
        auto_round_config("exllamav2", 2, sym=False) | {"extra_config": {".*o_proj": {"bits": 4}}},
        {"o_proj": (gptq(sym=False, v2=True), (4, 32, False)), "": (gptq(2, sym=False, v2=True), (2, 32, False))},
    ),
}  # fmt: skip


@for_each("name", BY_LAYER)
def test_layers_may_be_stored_otherwise(tmp_path: Path, name: str) -> None:
    """By GPTQ's `dynamic`, and auto-round's `extra_config`: the same weights as if each layer were alone in its way."""
    config, stored = BY_LAYER[name]
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    mixed, expected = dict(weights), dict(weights)
    for layer in filter(is_layer, weights):
        way = next(way for part, way in stored.items() if part in layer)
        if way is None:
            continue
        make, asked = way
        tensors = make(mixed.pop(layer))
        mixed |= {layer.removesuffix("weight") + last: tensor for last, tensor in tensors.items()}
        expected[layer] = meant(weights[layer], asked, tensors.get("g_idx")).bfloat16()

    source = small_checkpoints.write(tmp_path / "source", weights=mixed, shards=2)
    change_json(source / "config.json", lambda found: found.update(quantization_config=config))

    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(expected)
    for layer in plain:
        assert torch.equal(plain[layer], expected[layer]), layer
    compress(source, tmp_path / "out", "channel")
    assert verify(tmp_path / "out", source, full=True).problems == ()
    fused = [problem for problem in verify(source).problems if "engines need both in one format" not in problem]
    assert fused == []


def test_codes_that_config_json_does_not_tell_of(tmp_path: Path) -> None:
    for make, config in ((gptq(), awq_config()), (awq(), gptq_config())):
        source = store(tmp_path / "source", make, config)
        with pytest.raises(OpenQuantError, match=r"qzeros is I32|scales is F16"):
            dequantize(source, tmp_path / "out")
    source = store(tmp_path / "source", gptq(), asymmetric_config())
    with pytest.raises(SourceError, match="but config.json has its layer in none of AWQ, GPTQ and auto-round"):
        dequantize(source, tmp_path / "out")
    told = f"model.safetensors: {Q}.qweight is I32 [32, 256], not a matrix of I32 called {Q}.weight_packed"
    assert told in verify(source).problems


def test_what_awq_leaves_out_is_a_part_of_names(tmp_path: Path) -> None:
    source = store(tmp_path / "source", awq(), awq_config())

    def listing(*names: str) -> tuple[str, ...]:
        change_json(
            source / "config.json",
            lambda found: found["quantization_config"].update(modules_to_not_convert=list(names)),
        )
        return verify(source).problems

    assert listing() == listing("head") == listing("lm_head", "visual") == ()
    assert len(listing("lm_head", "q_proj")) == 2
    down = "model.layers.0.mlp.down_proj"

    def plain(weights: Weights) -> None:
        for last in ("qweight", "qzeros", "scales"):
            del weights[f"{down}.{last}"]
        weights[f"{down}.weight"] = small_checkpoints.tensors("Qwen3ForCausalLM")[f"{down}.weight"]

    change_weights(source, plain)
    # Without a list vLLM goes by what there is.
    assert listing() == listing("lm_head", "layers.0.mlp.down") == ()
    assert listing("lm_head") == (
        f"model.safetensors: {down}.weight is BF16, but modules_to_not_convert does not list {down}",
    )

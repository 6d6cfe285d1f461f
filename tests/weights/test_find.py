"""Sources that are quantized already: decoded, encoded anew, or passed through."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT, change_json, everything, run_openquant, tree
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, PlanError, SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.format import Group
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import BLOCK, BLOCK_UE8M0, CHANNEL, INT8_W8A16, TENSOR, TENSOR_STATIC, VARIANTS, Scheme
from openquant.machine import peak_rss
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.layout import weight_kinds
from openquant.plan.plan import make_plain_plan, make_plan
from support import small_checkpoints
from support.conversions import Shelf, asking
from support.published_checkpoints import published, with_few_experts
from support.quantized_checkpoints import (
    BLOCKS,
    FP8,
    INT4,
    PER_TENSOR,
    SOURCES,
    STATIC,
    Make,
    Weights,
    by_blocks,
    by_rows,
    by_tensor,
    decompressed,
    float_groups,
    group,
    int4,
    is_layer,
    ragged_blocks,
    store,
    weights_of,
    widened,
)
from support.representatives import in_all_ways
from support.rows import for_each
from support.small_checkpoints import change_weights

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = (one.dtype, one.shape) == (other.dtype, other.shape)
    return kinds and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@for_each("kind", SOURCES)
def test_a_source_is_dequantized_and_quantized_anew_by_its_products(tmp_path: Path, kind: str) -> None:
    make, config, group = SOURCES[kind]
    source = store(tmp_path / "source", make, config, shards=3)
    plain, stored = small_checkpoints.tensors("Qwen3ForCausalLM"), weights_of(source, group)
    before, codes = tree(source), small_checkpoints.read(source)
    result = dequantize(source, tmp_path / "out")
    assert tree(source) == before
    found = small_checkpoints.read(tmp_path / "out")
    assert set(found) == set(plain)
    for name, weight in plain.items():
        assert same(found[name], stored[name].bfloat16() if is_layer(name) else weight), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == small_checkpoints.config("Qwen3ForCausalLM")
    assert (result.scheme, result.quantized_tensors, result.decoded_tensors) == ("bf16", 0, 14)
    assert result.source_bytes == sum(tensor.nbytes for tensor in codes.values())
    assert result.output_bytes == sum(tensor.nbytes for tensor in found.values())

    # Each meets all schemes at night, by day one; some then their own.
    schemes = (TENSOR, CHANNEL, BLOCK)
    first = (list(SOURCES).index(kind) + 2) % len(schemes)
    for scheme in schemes if everything() else schemes[first : first + 1]:
        out = tmp_path / scheme.name
        result = compress(source, out, scheme.name)
        assert (result.quantized_tensors, result.decoded_tensors) == (14, 0)
        assert verify(out).problems == ()
        check_quantized(small_checkpoints.read(out), scheme, stored, codes, group)


def check_quantized(found: Weights, scheme: Scheme, stored: Weights, codes: Weights, group: Group) -> None:
    """What weights became: the same codes if their group is the scheme's, or others by torch."""
    assert not [name for name in found if name.endswith(("input_scale", "activation_scale"))]
    for name, weight in stored.items():
        scale = found[name.replace("weight", scheme.format.scale.name)]
        if group == scheme.format.group != (None, None):
            assert same(found[name], codes[name])
            last = next(last for last in ("_scale", "_scale_inv") if name + last in codes)
            assert torch.equal(scale.reshape(-1), codes[name + last].float().reshape(-1))
            continue
        fused = [name]
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if scheme.format.shared and name.split(".")[-2] in parts:
                fused = [name.replace(name.split(".")[-2], part) for part in parts]
        absmax = torch.stack([group_absmax(stored[member], scheme.format.group) for member in fused]).amax(0)
        wanted = group_scale(absmax, scheme.format)
        assert torch.equal(scale.reshape(-1), wanted.reshape(-1)), name
        assert same(found[name], encode(weight, wanted, scheme.format)), name


def test_scales_of_the_cache_stay_with_quantized_weights(tmp_path: Path) -> None:
    """vLLM has no parameter for them in an unquantized model, and refuses it."""
    config = group("channel") | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    source = store(tmp_path / "source", by_rows(), config)
    lasts = ("k_scale", "kv_scale", "k_proj.k_scale", "k_proj.output_scale", "prob_output_scale")
    scales = {f"model.layers.0.self_attn.{last}": torch.tensor(0.5) for last in lasts}
    change_weights(source, lambda weights: weights.update(scales))
    compress(source, tmp_path / "out", "channel")
    found = small_checkpoints.read(tmp_path / "out")
    assert all(torch.equal(found[name], scale) for name, scale in scales.items())
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(small_checkpoints.tensors("Qwen3ForCausalLM"))
    assert make_plan(open_checkpoint(source), BLOCK).notes == (
        "kv_cache_scheme is left out, but its scales are kept: serve with --kv-cache-dtype fp8 to use them, or give "
        "--kv-cache fp8 here so that engines do by default",
    )


ITSELF = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"]


@for_each(
    ("scheme", "architecture"),
    [(scheme, ITSELF[number % len(ITSELF)]) for number, scheme in enumerate(in_all_ways(VARIANTS))],
)
def test_an_output_in_its_own_scheme_is_the_same_bytes(
    shelf: Shelf, tmp_path: Path, architecture: str, scheme: Scheme
) -> None:
    _, output, once = shelf.converted(architecture, scheme)
    twice = compress(output, tmp_path / "twice", **asking(scheme))
    one, two = tree(output), tree(tmp_path / "twice")
    for name in (".openquant.json", "README.md"):
        del one[name], two[name]
    if scheme.format.scale.dtype == "BF16":
        # Scales as wide as what is copied come before that where they follow codes.
        before, after = small_checkpoints.read(output), small_checkpoints.read(tmp_path / "twice")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        assert two == one
    assert (twice.quantized_tensors, twice.ignored_layers) == (once.quantized_tensors, once.ignored_layers)


def test_ragged_blocks_pass_through_and_dequantize(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    odd = {f"model.layers.{n}.mlp.down_proj.weight": torch.randn(200, 500).bfloat16() for n in (0, 1)}
    source = store(tmp_path / "source", by_blocks(), BLOCKS, weights | odd)
    stored = small_checkpoints.read(source)
    assert stored[f"{DOWN}.weight_scale_inv"].shape == (2, 4)
    compress(source, tmp_path / "out", "block")
    found = small_checkpoints.read(tmp_path / "out")
    assert set(found) == set(stored)
    assert all(same(found[name], stored[name]) for name in found)
    dequantize(source, tmp_path / "plain")
    expected = weights_of(source, (128, 128))[f"{DOWN}.weight"].bfloat16()
    assert same(small_checkpoints.read(tmp_path / "plain")[f"{DOWN}.weight"], expected)
    # In another scheme they are quantized like any other.
    compress(source, tmp_path / "rows", "channel")
    assert small_checkpoints.read(tmp_path / "rows")[f"{DOWN}.weight"].dtype == FP8


def test_ragged_blocks_that_engines_join_are_decoded(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    small = {name: weights[name][:64] for name in weights if name.split(".")[-2] in ("k_proj", "v_proj")}
    source = store(tmp_path / "source", by_blocks(), BLOCKS, weights | small)
    change_json(source / "config.json", lambda found: found.update(num_key_value_heads=1))
    result = compress(source, tmp_path / "out", "block")
    # q, k and v of both layers.
    assert (result.quantized_tensors, result.decoded_tensors) == (8, 6)
    assert {Q, Q.replace("q_proj", "k_proj")} < set(result.ignored_layers)
    expected = weights_of(source, (128, 128))[f"{Q}.weight"].bfloat16()
    assert same(small_checkpoints.read(tmp_path / "out")[f"{Q}.weight"], expected)
    assert verify(tmp_path / "out").problems == ()
    # In the other format they have one scale for each row.
    result = compress(source, tmp_path / "rows", "block", format="compressed-tensors")
    assert (result.schemes, result.decoded_tensors) == ({"block": 8, "channel": 6}, 0)


def test_the_same_scheme_keeps_the_choice_of_layers(tmp_path: Path) -> None:
    source = store(tmp_path / "source", by_blocks(), BLOCKS)
    plain = small_checkpoints.tensors("Qwen3ForCausalLM")
    # Those that are ignored are decoded.
    result = compress(source, tmp_path / "ignored", "block", ignore=[DOWN])
    assert (result.quantized_tensors, result.decoded_tensors) == (13, 1)
    expected = weights_of(source, (128, 128))[f"{DOWN}.weight"].bfloat16()
    assert same(small_checkpoints.read(tmp_path / "ignored")[f"{DOWN}.weight"], expected)

    def leave_out(weights: Weights) -> None:
        weights[f"{DOWN}.weight"] = plain[f"{DOWN}.weight"]
        del weights[f"{DOWN}.weight_scale_inv"]

    change_weights(source, leave_out)
    result = compress(source, tmp_path / "out", "block")
    assert result.quantized_tensors == 13
    assert DOWN in result.ignored_layers
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    assert all(same(found[name], stored[name]) for name in found)
    # Another scheme asks the registry.
    assert compress(source, tmp_path / "rows", "channel").quantized_tensors == 14


@for_each(("kind", "module"), [("fp8 blocks", "lm_head"), ("compressed-tensors per row", "model.embed_tokens")])
def test_a_quantized_head_or_embedding_is_decoded(tmp_path: Path, kind: str, module: str) -> None:
    """Engines load neither where it is listed as unquantized, as it always is."""
    make, config, group = SOURCES[kind]
    source = store(tmp_path / "source", make, config)
    plain = small_checkpoints.tensors("Qwen3ForCausalLM")[f"{module}.weight"]
    change_weights(source, lambda weights: weights.update({f"{module}.{k}": v for k, v in make(plain).items()}))
    result = compress(source, tmp_path / "out", "block" if group == (128, 128) else "channel")
    assert (result.quantized_tensors, result.decoded_tensors) == (14, 1)
    expected = weights_of(source, group)[f"{module}.weight"].bfloat16()
    assert same(small_checkpoints.read(tmp_path / "out")[f"{module}.weight"], expected)
    assert verify(tmp_path / "out").problems == ()


def test_a_quantized_router_is_decoded(tmp_path: Path) -> None:
    """vLLM builds most routers without quantization and refuses their scales."""
    source = tmp_path / "source"
    compress(small_checkpoints.write(tmp_path / "plain", "Qwen3MoeForCausalLM"), source)
    router, before = "model.layers.1.mlp.gate", small_checkpoints.read(source)
    weight = before[f"{router}.weight"]

    def quantize(weights: Weights) -> None:
        weights[f"{router}.weight"] = weight.to(FP8)
        weights[f"{router}.weight_scale"] = torch.tensor(0.25)

    change_weights(source, quantize)
    change_json(source / "config.json", lambda found: found["quantization_config"].update(ignored_layers=[]))
    assert any(problem.endswith("is F8_E4M3, but it is kept: router") for problem in verify(source).problems)
    result = compress(source, tmp_path / "out")
    assert result.decoded_tensors == 1
    assert router in result.ignored_layers
    found = small_checkpoints.read(tmp_path / "out")
    assert same(found[f"{router}.weight"], (weight.to(FP8).float() * 0.25).bfloat16())
    assert set(found) == set(before)
    assert all(same(found[name], before[name]) for name in found if name != f"{router}.weight")
    assert verify(tmp_path / "out").problems == ()


def test_draft_layers_of_a_quantized_source(tmp_path: Path) -> None:
    """DeepSeek ships them in FP8. In that scheme they stay, in another they are kept as bfloat16, as ever."""
    plain = small_checkpoints.write(tmp_path / "plain", "DeepseekV3ForCausalLM")
    weights = small_checkpoints.read(plain)
    stored: Weights = {}
    draft = [name for name in weights if name.startswith("model.layers.2.") and is_layer(name)]
    assert draft
    for name, weight in weights.items():
        kept = weight.ndim < 2 or "_proj" not in name or "eh_proj" in name
        codes, scale = (weight, None) if kept else ragged_blocks(weight)
        stored[name] = codes
        if scale is not None:
            stored[f"{name}_scale_inv"] = scale
    source = small_checkpoints.write(tmp_path / "source", "DeepseekV3ForCausalLM", weights=stored)
    change_json(source / "config.json", lambda found: found.update(quantization_config=BLOCKS))
    compress(source, tmp_path / "blocks", "block")
    assert verify(tmp_path / "blocks", source, full=True).problems == ()
    found = small_checkpoints.read(tmp_path / "blocks")
    assert set(found) == set(stored)
    assert all(same(found[name], stored[name]) for name in found)
    result = compress(source, tmp_path / "rows", "channel")
    assert verify(tmp_path / "rows", source, full=True).problems == ()
    found = small_checkpoints.read(tmp_path / "rows")
    assert result.decoded_tensors >= len(draft)
    for name in draft:
        product = stored[name].float() * widened(stored[f"{name}_scale_inv"], stored[name].shape)
        assert same(found[name], product.bfloat16())


def test_one_scale_of_a_joined_set_stays_where_engines_load_it(tmp_path: Path) -> None:
    def make(scale: float) -> Make:
        return lambda weight: {
            "weight": (weight.float() / scale).clamp(-448, 448).to(FP8),
            "weight_scale": torch.tensor(scale),
        }

    source = store(tmp_path / "source", make(0.001), PER_TENSOR)
    compress(source, tmp_path / "out")
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    assert all(same(found[name], stored[name]) for name in found)
    # Below 2^-15 codes lose bits where vLLM passes them through float16: they are made anew.
    source = store(tmp_path / "small", make(2.0**-16), PER_TENSOR)
    compress(source, tmp_path / "again")
    scale = small_checkpoints.read(tmp_path / "again")[f"{Q}.weight_scale"]
    assert scale >= 2.0**-15


@for_each(("kind", "format", "shape"), [("fp8 per tensor", "compressed-tensors", (1,)), ("Mistral's names", "fp8", ())])
def test_input_scales_are_kept_if_asked_for(tmp_path: Path, kind: str, format: str, shape: tuple[int, ...]) -> None:
    make, config, _ = SOURCES[kind]
    source = store(tmp_path / "source", make, config, shards=3)
    static = {"format": format, "activation_scheme": "static"}
    result = compress(source, tmp_path / "out", **static)
    assert (result.scheme, result.quantized_tensors) == ("tensor", 14)
    found = small_checkpoints.read(tmp_path / "out")
    scales = [name for name in found if name.endswith(".input_scale")]
    assert len(scales) == 14
    assert all(same(found[name], torch.full(shape, 0.25)) for name in scales)
    report = verify(tmp_path / "out")
    assert (report.problems, report.notes) == ((), ())
    compress(tmp_path / "out", tmp_path / "again", **static)
    again = small_checkpoints.read(tmp_path / "again")
    assert set(again) == set(found)
    assert all(same(again[name], found[name]) for name in found)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if format == "fp8":
        assert settings["activation_scheme"] == "static"
    else:
        activations = settings["config_groups"]["group_0"]["input_activations"]
        assert (activations["strategy"], activations["dynamic"]) == ("tensor", False)
    assert "dynamic" not in (tmp_path / "out" / "README.md").read_text()


@for_each(("dtype", "shape"), [(torch.bfloat16, (1,)), (torch.float16, (1, 1)), (torch.float64, ())])
def test_input_scales_of_any_float_dtype_are_read(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    config = group("tensor")
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False
    }  # fmt: skip
    source, scale = tmp_path / "source", torch.full(shape, 0.1, dtype=dtype)
    store(source, by_tensor(shape=(1,), input_scale=scale), config, shards=3)
    assert compress(source, tmp_path / "out", activation_scheme="static").quantized_tensors == 14
    found = small_checkpoints.read(tmp_path / "out")
    scales = [tensor for name, tensor in found.items() if name.endswith(".input_scale")]
    assert len(scales) == 14
    assert all(same(tensor, scale.reshape(()).float()) for tensor in scales)


def test_layers_without_an_input_scale_cannot_be_static(tmp_path: Path) -> None:
    source, name = store(tmp_path / "source", by_tensor(**STATIC), PER_TENSOR), f"{DOWN}.input_scale"
    # One that is none, and one beyond float32.
    for scale, told in ((torch.tensor(math.nan), "nan"), (torch.tensor(1e300, dtype=torch.float64), "inf")):
        change_weights(source, lambda weights, scale=scale: weights.update({name: scale}))
        with pytest.raises(SourceError) as caught:
            compress(source, tmp_path / "none", activation_scheme="static")
        assert caught.value.message == f"{name} in model.safetensors holds {told}, which is not a valid scale"
    # One of many numbers.
    change_weights(source, lambda weights: weights.update({name: torch.full((3,), 0.5)}))
    plan = make_plan(open_checkpoint(source), TENSOR_STATIC)
    why = [found.why for found in plan.lines if found.names == (DOWN,)]
    assert why == ["its input_scale is F32 [3], not a single float"]

    change_weights(source, lambda weights: weights.pop(name))
    result = compress(source, tmp_path / "out", activation_scheme="static")
    assert result.quantized_tensors == 13
    assert DOWN in result.ignored_layers
    assert make_plan(open_checkpoint(source), TENSOR_STATIC).notes == (
        "no static activation scale is known for 1 of 14 layers (11.1 % of their bytes), which stay unquantized",
    )
    with pytest.raises(OpenQuantError, match="--scheme block has no static activations"):
        compress(source, tmp_path / "no", "block", activation_scheme="static")
    with pytest.raises(PlanError) as caught:
        make_plan(open_checkpoint(small_checkpoints.write(tmp_path / "plain")), TENSOR_STATIC)
    assert caught.value.message == (
        "static activation scales need a calibration, or the input_scale tensors of a quantized source, of which this one "
        "has none"
    )


def test_a_plan_that_quantizes_nothing_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    source = store(tmp_path / "source", by_tensor(input_scale=torch.full((2,), 0.5)), PER_TENSOR)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", activation_scheme="static")
    assert (caught.value.message, caught.value.hint) == (
        "nothing would be quantized: its input_scale is F32 [2], not a single float (14 layers)",
        "choose other options, or say --ignore '**' if a copy is what you want",
    )
    assert not (tmp_path / "out").exists()
    result = compress(source, tmp_path / "out", activation_scheme="static", ignore=["**"])
    assert result.quantized_tensors == 0
    asked = small_checkpoints.write(tmp_path / "plain")
    assert "nothing is quantized" in make_plan(open_checkpoint(asked), TENSOR, PlanOptions(("**",))).notes


# What engines have no place for.

LEFTOVERS = ("act_scale", "output_scale", "input_zero_point", "weight_zero_point")


def test_leftovers_are_left_out_with_a_note(tmp_path: Path) -> None:
    left = {last: torch.tensor(1.0) for last in LEFTOVERS}
    source = store(tmp_path / "source", by_tensor(**STATIC, **left), PER_TENSOR, shards=2)
    cache = {f"model.layers.{layer}.self_attn.{part}_proj.output_scale" for layer in (0, 1) for part in "qkv"}
    for number, work in enumerate((compress, partial(compress, scheme="channel"), dequantize)):
        work(source, tmp_path / str(number))
        found = {name for name in small_checkpoints.read(tmp_path / str(number)) if name.endswith(LEFTOVERS)}
        assert found == (set() if work is dequantize else cache)
    checkpoint = open_checkpoint(source)
    for plan in (make_plain_plan(checkpoint), make_plan(checkpoint, TENSOR)):
        (note,) = plan.notes
        assert note.startswith("left out, as engines refuse them: model.layers.{0..1}.mlp.down_proj.act_scale, ")
        assert "o_proj.output_scale" in note
        assert "k_proj.output_scale" not in note

    # They are a problem to verify.
    out = tmp_path / "out"
    compress(small_checkpoints.write(tmp_path / "plain"), out)
    change_weights(out, lambda weights: weights.update({f"{Q}.act_scale": torch.tensor(1.0)}))
    assert verify(out).problems == (f"model.safetensors: {Q}.act_scale is a tensor that engines refuse to load",)
    # Zero points that count are refused.
    config = group("tensor", symmetric=False)
    source = store(tmp_path / "shifted", by_tensor(weight_zero_point=torch.tensor(1.0)), config)
    with pytest.raises(PlanError, match="group_0 stores asymmetric float8 weights by tensor"):
        compress(source, tmp_path / "no")


# Other numbers than FP8.


def test_mxfp4_stacks_as_gpt_oss_has_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = tmp_path / "source"
    path = "model.layers.0.mlp.experts"
    plain = {
        "model.embed_tokens.weight": torch.randn(64, 64).bfloat16(),
        f"{path}.gate_up_proj": torch.zeros(3, 64, 192),
        f"{path}.gate_up_proj_bias": torch.randn(3, 192).bfloat16(),
        f"{path}.down_proj": torch.zeros(3, 96, 64),
    }
    generator = torch.Generator().manual_seed(1)
    stored: Weights = {}
    for name, weight in plain.items():
        if weight.ndim == 3:
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
            scales = torch.randint(110, 130, (experts, outputs, inputs // 32), generator=generator)
            stored |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        else:
            stored[name] = weight
    small_checkpoints.write(source, weights=stored, shards=2)
    named = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    change_json(source / "config.json", lambda found: found.update(named))
    result = dequantize(source, tmp_path / "out", max_memory="16GB")
    found = small_checkpoints.read(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in plain.items()}
    stacks = [name for name in plain if plain[name].ndim == 3]
    assert result.decoded_tensors == len(stacks) > 0
    for name in stacks:
        expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert same(found[name], expected)
    with pytest.raises(PlanError, match=r"GptOssForCausalLM cannot be served with one scale per 128x128 block: vLLM"):
        compress(source, tmp_path / "fp8", "block")

    codes, scales = f"{path}.down_proj_blocks", f"{path}.down_proj_scales"
    damage: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({codes: stored[codes][..., :15].clone()}, f"{codes} is U8 [3, 64, 3, 15], not MXFP4 blocks of 16 bytes"),
        ({scales: None}, f"{codes} has no scale: {scales} is missing"),
        ({scales: stored[scales][:, 1:].clone()}, f"{scales} is U8 [3, 63, 3], for {codes} it must be U8 [3, 64, 3]"),
        ({f"{path}.down_proj": plain[f"{path}.down_proj"]}, f"{path}.down_proj is there twice, as {codes} too"),
    ]
    for number, (changed, message) in enumerate(damage):
        kept = {name: tensor for name, tensor in {**stored, **changed}.items() if tensor is not None}
        small_checkpoints.write(tmp_path / str(number), weights=kept)
        shutil.copy(source / "config.json", tmp_path / str(number))
        with pytest.raises(SourceError) as caught:
            dequantize(tmp_path / str(number), tmp_path / "none")
        assert caught.value.message == message


MXFP4 = group("group", num_bits=4, group_size=32, scale_dtype="torch.uint8") | {"format": "mxfp4-pack-quantized"}


def random_mxfp4(weight: torch.Tensor) -> Weights:
    generator = torch.Generator().manual_seed(len(weight))
    rows, cols = weight.shape
    return {
        "weight_packed": torch.randint(0, 256, (rows, cols // 2), generator=generator).to(torch.uint8),
        "weight_scale": torch.randint(110, 130, (rows, cols // 32), generator=generator).to(torch.uint8),
    }


@for_each(("make", "config"), [(int4, INT4), (random_mxfp4, MXFP4)])
def test_four_bits_as_compressed_tensors_has_them(tmp_path: Path, make: Make, config: dict[str, Any]) -> None:
    source = store(tmp_path / "source", make, config, shards=3)
    stored = small_checkpoints.read(source)
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(small_checkpoints.tensors("Qwen3ForCausalLM"))
    for name in filter(is_layer, plain):
        expected = decompressed(stored, name.removesuffix(".weight"), config).bfloat16()
        assert torch.equal(plain[name], expected), name
    assert compress(source, tmp_path / "out", "block").quantized_tensors == 14
    assert verify(tmp_path / "out", tmp_path / "plain", full=True).problems == ()


def test_int4_with_negative_scales_as_auto_round_has_it(tmp_path: Path) -> None:
    source = store(tmp_path / "source", partial(int4, signed=True), INT4)
    stored = small_checkpoints.read(source)
    assert (stored[f"{Q}.weight_scale"] < 0).any()
    assert all("weight_shape is I32" in problem for problem in verify(source).problems)
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    for name in filter(is_layer, plain):
        assert same(plain[name], decompressed(stored, name.removesuffix(".weight"), INT4).bfloat16())
    compress(source, tmp_path / "rows", "channel")
    assert verify(tmp_path / "rows", tmp_path / "plain", full=True).problems == ()
    for asymmetric in (False, True):
        out = tmp_path / f"out-{asymmetric}"
        compress(source, out, "int4", group_size="32", asymmetric=asymmetric)
        copied = small_checkpoints.read(out)
        assert all(same(copied[name], stored[name]) for name in stored if name.endswith(("_scale", "_packed")))
        assert verify(out, source, full=True).problems == ()
        dequantize(out, tmp_path / f"again-{asymmetric}")
        again = small_checkpoints.read(tmp_path / f"again-{asymmetric}")
        assert all(same(again[name], plain[name]) for name in plain)


def test_rows_that_do_not_fill_their_words_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    """As compressed-tensors packs them. That the last codes are none stands in `weight_shape` alone."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    config = group("channel", type="int") | {"format": "pack-quantized"}

    def make(weight: torch.Tensor) -> Weights:
        weight = weight[:, :-2].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        packed = pack_to_int32((weight / scale).round().to(torch.int8), 8)
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}

    source = store(tmp_path / "source", make, config, shards=3)
    told = (
        r"(model\.layers\.\d\.[a-z_.]*)\.weight_shape is \[(\d+), (254|510)\], "
        r"but \1\.weight_packed holds codes of \[\2, (256|512)\]"
    )
    for work in (dequantize, partial(compress, scheme="int8")):
        with pytest.raises(SourceError, match=f"^{told}") as caught:
            work(source, tmp_path / "out")
        assert caught.value.hint.startswith("rows that do not fill their words are not supported")

    # Shards come as they are named.
    plan = make_plain_plan(open_checkpoint(source), "")
    for name, place in plan.source.where.items():
        if name.endswith(".weight_shape"):
            assert place.shard in plan.layout.sources(plan.decoded.where[name.replace("_shape", "")].shard)

    # Where codes need no change, nothing is decoded.
    _, out = shelf.copied("Qwen3ForCausalLM", INT8_W8A16, tmp_path / "ours")
    change_weights(out, lambda weights: weights[f"{Q}.weight_shape"].copy_(torch.tensor([256, 255])))
    with pytest.raises(SourceError, match=rf"^{Q}\.weight_shape is \[256, 255\], but .* \[256, 256\]"):
        compress(out, tmp_path / "copied", "int8-weights")
    change_weights(out, lambda weights: weights.update({f"{Q}.weight_shape": torch.tensor([256, 256, 1])}))
    with pytest.raises(SourceError, match=rf"^{Q}\.weight_shape is I64 \[3\], not two integers"):
        make_plain_plan(open_checkpoint(out), "")


def test_power_of_two_scales(tmp_path: Path) -> None:
    compress(small_checkpoints.write(tmp_path / "plain"), tmp_path / "ours", "block", scale_format="ue8m0")
    ours = small_checkpoints.read(tmp_path / "ours")
    for dtype in (torch.float8_e8m0fnu, torch.uint8, torch.float32):

        def make(weight: torch.Tensor, dtype: torch.dtype = dtype) -> Weights:
            scale = group_scale(group_absmax(weight, BLOCK.format.group), BLOCK_UE8M0.format)
            bits = (scale.view(torch.int32) >> 23).to(torch.uint8)
            stored = {torch.float32: scale, torch.uint8: bits}.get(dtype, bits.view(torch.float8_e8m0fnu))
            return {"weight": encode(weight, scale, BLOCK.format), "weight_scale_inv": stored}

        source, out = tmp_path / f"source {dtype}", tmp_path / f"out {dtype}"
        store(source, make, BLOCKS | {"scale_fmt": "ue8m0"})
        compress(source, out, "block", scale_format="ue8m0")
        found = small_checkpoints.read(out)
        assert set(found) == set(ours)
        assert all(same(found[name], ours[name]) for name in found), dtype


MX = group("group", group_size=32, scale_dtype="torch.uint8") | {"format": "mxfp8-quantized"}


@for_each(("make", "config", "options"), [
    (float_groups, MX, {"scheme": "mxfp8"}),
    (by_blocks(), BLOCKS | {"scale_fmt": "ue8m0"}, {"scheme": "block", "scale_format": "ue8m0"}),
])  # fmt: skip
def test_scales_that_are_no_powers_of_two(
    tmp_path: Path, make: Make, config: dict[str, Any], options: dict[str, str]
) -> None:
    """They are decoded as they are, and pass for no exponents."""
    source = store(tmp_path / "source", make, config)
    with pytest.raises(SourceError) as caught:
        compress(source, tmp_path / "out", **options, workers=1)  # type: ignore[arg-type]
    name = next(name for name in make(torch.ones(128, 128)) if "scale" in name)
    assert re.fullmatch(
        rf"model\.layers\..*\.{name} in model\.safetensors holds \S+, not a power of two as config\.json says",
        caught.value.message,
    )
    compress(source, tmp_path / "rows", "channel")
    assert verify(tmp_path / "rows").problems == ()


def test_modelopts_blocks_have_scales_of_four_axes(tmp_path: Path) -> None:
    def make(weight: torch.Tensor) -> Weights:
        codes, scale = ragged_blocks(weight)
        return {"weight": codes, "weight_scale": scale[:, None, :, None].contiguous()}

    source = store(tmp_path / "source", make, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"})
    compress(source, tmp_path / "out", "block")
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    assert same(found[f"{Q}.weight"], stored[f"{Q}.weight"])
    assert same(found[f"{Q}.weight_scale_inv"], stored[f"{Q}.weight_scale"][:, 0, :, 0].contiguous())


# Shards.


def test_a_shard_of_scales_alone_leaves_none_behind(tmp_path: Path) -> None:
    source = store(tmp_path / "source", by_blocks(), BLOCKS)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    scales = {name: weights[name] for name in weights if name.endswith("_inv")}
    others = {name: weights[name] for name in weights if name not in scales}
    small_checkpoints.write_shards(source, [others, scales])
    compress(source, tmp_path / "out", "block")
    shards = [path.name for path in (tmp_path / "out").glob("*.safetensors")]
    assert shards == ["model-00001-of-00002.safetensors"]
    assert all(same(tensor, weights[name]) for name, tensor in small_checkpoints.read(tmp_path / "out").items())
    assert verify(tmp_path / "out").problems == ()


def test_matrices_larger_than_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 40_000)
    for kind, workers, scheme in (("fp8 blocks", 1, "block"), ("compressed-tensors per row", 3, "channel")):
        make, config, group = SOURCES[kind]
        source = store(tmp_path / kind, make, config)
        dequantize(source, tmp_path / f"{kind} plain", workers=workers)
        plain = small_checkpoints.read(tmp_path / f"{kind} plain")
        for name, weight in weights_of(source, group).items():
            assert same(plain[name], weight.bfloat16())
        compress(source, tmp_path / f"{kind} same", scheme, workers=workers)
        stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / f"{kind} same")
        assert all(same(found[name], stored[name]) for name in weights_of(source, group))


def test_what_is_decoded_counts_as_memory(tmp_path: Path) -> None:
    source = store(tmp_path / "source", by_blocks(), BLOCKS)
    kinds = weight_kinds(make_plain_plan(open_checkpoint(source)).decisions)
    assert {matrix.shape for matrix in kinds} == {(256, 256), (128, 256), (512, 256), (256, 512)}
    assert all(matrix.format is not None for matrix in kinds)
    with pytest.raises(OpenQuantError, match="memory"):
        dequantize(source, tmp_path / "none", max_memory=1)
    # What this process holds counts, and other tests have left much.
    dequantize(source, tmp_path / "little", max_memory=peak_rss() + (1 << 29), workers=3)
    dequantize(source, tmp_path / "much")
    assert tree(tmp_path / "little") == tree(tmp_path / "much")


def test_codes_of_one_scale_pass_a_piece_at_a_time(tmp_path: Path) -> None:
    weights = {f"{DOWN}.weight": torch.ones(4096, 16384).bfloat16()}
    source = store(tmp_path / "source", by_tensor(), PER_TENSOR, weights)
    code = (
        "import sys, openquant; r = openquant.compress(*sys.argv[1:], workers=1, device='cpu'); print(r.peak_rss_bytes)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    # The codes are 64 MiB.
    assert int(done.stdout) < 96 << 20
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    assert all(same(found[name], stored[name]) for name in found)


# Published checkpoints with so many experts, by their headers: layers in the same scheme, in another, and of the latter
# decoded ones. Numbers of twelve have two digits.
PUBLISHED = {
    "DeepseekV3ForCausalLM": (4, 1204, 1123, 81),
    "Qwen3MoeForCausalLM": (12, 1920, 1920, 0),
    "Qwen3NextForCausalLM": (4, 859, 840, 19),
}


@for_each("name", PUBLISHED)
def test_published_fp8_checkpoints(name: str) -> None:
    experts, few, other, decoded = PUBLISHED[name]
    checkpoint = with_few_experts(f"quantized/{name}", experts)
    plan = make_plan(checkpoint, BLOCK)
    assert (summary.quantized_tensors(plan), summary.decoded_tensors(plan)) == (few, 0)
    outputs = {info.name: info for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)}
    assert outputs.keys() == checkpoint.tensors.keys()
    for info in checkpoint.tensors.values():
        dtype = "F32" if info.name.endswith("_scale_inv") else info.dtype
        assert outputs[info.name] == info._replace(dtype=dtype)
    assert 1 in summary.parallel_sizes(plan)

    plan = make_plan(checkpoint, CHANNEL)
    assert (summary.quantized_tensors(plan), summary.decoded_tensors(plan)) == (other, decoded)
    plain = make_plain_plan(checkpoint)
    assert summary.decoded_tensors(plain) == few
    outputs = {info.name: info for shard in plain.layout.shards for info in plain.layout.outputs(shard.name)}
    assert outputs.keys() == {key for key in checkpoint.tensors if not key.endswith("_scale_inv")}
    assert {info.dtype for info in outputs.values() if len(info.shape) > 1} <= {"BF16", "F32"}


def test_published_experts_in_four_bits() -> None:
    plan = make_plain_plan(published("quantized/GptOssForCausalLM"))
    outputs = {info.name: info for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)}
    assert outputs == published("GptOssForCausalLM").tensors


# What is wrong with a source.


def spoiled(module: str, last: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        tensor = weights[f"{module}.{last}"].clone()
        tensor.reshape(-1).view(dtype)[0] = value
        weights[f"{module}.{last}"] = tensor

    return change


INVERSE = f"{Q}.weight_scale_inv"
TWICE = "download it again if it is damaged; if its maker lays it out so, start from the unquantized model"
DAMAGE: list[tuple[Callable[[Weights], Any], str]] = [
    (lambda weights: weights.pop(INVERSE), f"{Q}.weight has no scale: {INVERSE} is missing"),
    (lambda weights: weights.update({INVERSE: torch.ones(2, 3)}), f"{INVERSE} is [2, 3], for [256, 256] with one scale per 128x128 block it must be [2, 2]"),
    (lambda weights: weights.update({INVERSE: torch.ones(2, 2, dtype=torch.int32)}), f"{INVERSE} is I32, not F32 or BF16 or F16"),
    (lambda weights: weights.update({"model.norm.weight_scale_inv": torch.ones(1)}), "model.norm.weight_scale_inv is the scale of no quantized weight"),
    (lambda weights: weights.update({"model.norm.input_scale": torch.ones(())}), "model.norm.input_scale is the scale of no quantized weight"),
    # From here on it shows as weights are read.
    (spoiled(Q, "weight_scale_inv", math.nan), f"{INVERSE} in model.safetensors holds nan, which is not a valid scale"),
    (spoiled(Q, "weight_scale_inv", math.inf), f"{INVERSE} in model.safetensors holds inf, which is not a valid scale"),
    (spoiled(Q, "weight_scale_inv", -1.0), f"{INVERSE} in model.safetensors holds -1, which is not a valid scale"),
    (spoiled(Q, "weight", 0xFF, torch.uint8), f"{Q}.weight in model.safetensors holds NaN"),
    (spoiled(Q, "weight_scale_inv", 2.0**127), f"{Q}.weight in model.safetensors decodes to weights that overflow bfloat16: {INVERSE} reaches {2.0**127:g}"),
]  # fmt: skip


def test_damaged_scales_and_codes_are_refused(tmp_path: Path) -> None:
    source, out = store(tmp_path / "source", by_blocks(), BLOCKS), tmp_path / "out"
    sound = (source / "model.safetensors").read_bytes()
    for number, (change, message) in enumerate(DAMAGE):
        (source / "model.safetensors").write_bytes(sound)
        change_weights(source, change)
        for work in (dequantize, partial(compress, scheme="block")):
            with pytest.raises(SourceError) as caught:
                work(source, out)
            assert caught.value.message == message
            assert not (out / "model.safetensors").exists()
            assert number > 4 or not out.exists()
            shutil.rmtree(out, ignore_errors=True)
    [problem] = verify(source).problems
    assert problem.endswith(f"decodes to weights that overflow bfloat16: {INVERSE} reaches {2.0**127:g}")

    (source / "model.safetensors").write_bytes(sound)
    change_weights(source, lambda weights: weights.update({INVERSE: torch.cat([weights[INVERSE], weights[INVERSE]])}))
    with pytest.raises(SourceError) as caught:
        dequantize(source, out)
    assert caught.value.hint == TWICE

    # Zero decodes to zero, and is no output.
    (source / "model.safetensors").write_bytes(sound)
    change_weights(source, spoiled(Q, "weight_scale_inv", 0.0))
    dequantize(source, tmp_path / "plain")
    assert not small_checkpoints.read(tmp_path / "plain")[f"{Q}.weight"][:128, :128].any()
    compress(source, tmp_path / "rows", "channel")
    with pytest.raises(SourceError, match="holds 0, which is not a valid scale"):
        compress(source, out, "block")


def test_a_weight_both_quantized_and_not_or_in_another_number(tmp_path: Path) -> None:
    twice = store(tmp_path / "twice", int4, INT4)
    change_weights(twice, lambda weights: weights.update({f"{Q}.weight": torch.ones(256, 256).bfloat16()}))
    weights = {f"{Q}.weight": torch.ones(64, 64).bfloat16()}
    told = f"{Q}.weight is F8_E4M3, but config.json has its layer as"
    for source, message in (
        (twice, f"{Q}.weight is there twice, as {Q}.weight_packed too"),
        (store(tmp_path / "mxfp4", float_groups, {"quant_method": "mxfp4"}, weights), f"{told} FP4"),
        (store(tmp_path / "int4", float_groups, INT4, weights), f"{told} INT4"),
    ):
        for work in (dequantize, compress):
            with pytest.raises(SourceError) as caught:
                work(source, tmp_path / "out")
            assert caught.value.message == message


def test_a_parameter_beside_its_scale_is_no_quantized_weight(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    more = {"model.gain": torch.ones(4), "model.gain_scale": torch.ones(1), f"{Q}.weight_scale_scale": torch.ones(1)}
    change_weights(source, lambda weights: weights.update(more))
    compress(source, tmp_path / "out", "block")
    found = small_checkpoints.read(tmp_path / "out")
    assert torch.equal(found["model.gain_scale"], torch.ones(1))
    unread = "config.json does not fit the tensors: with it Qwen3ForCausalLM has no model.gain"
    assert verify(tmp_path / "out").problems == (unread,)


KNOWN = (
    "known are FP8 weights by tensor, channel or block, MXFP8, MXFP4, NVFP4, symmetric integers of 2 to 8 bits by "
    "tensor, channel or group, and asymmetric ones in words by channel or group; or start from the unquantized model"
)
UNKNOWN: list[tuple[Any, str, str]] = [
    (group("tensor", num_bits=4, type="int", symmetric=False), ": group_0 stores asymmetric int4 weights by tensor", KNOWN),
    (group("channel") | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, " has a transform_config: the weights are stored rotated", KNOWN),
    (group("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, " has a sparsity_config: zeros are not stored", KNOWN),
    ("fp8", " has a quantization_config that is no JSON object", "mend quantization_config, or save the model again; or start from the unquantized model"),
    ({"quant_method": "bitnet"}, ' has the quant_method "bitnet"',
     "known are fp8, compressed-tensors, modelopt, modelopt_mxfp8, modelopt_fp4, mxfp4, mxfp8, awq, gptq, auto-round, "
     "intel/auto-round, quark, torchao, bitsandbytes and fbgemm_fp8; or start from the unquantized model"),
]  # fmt: skip


def test_unknown_formats(tmp_path: Path) -> None:
    source = store(tmp_path / "source", int4, {})
    for config, message, hint in UNKNOWN:
        change_json(source / "config.json", lambda found, config=config: found.update(quantization_config=config))
        for work in (dequantize, compress):
            with pytest.raises(PlanError) as caught:
                work(source, tmp_path / "out")
            assert caught.value.message == f"the source is already quantized: config.json{message}"
            assert caught.value.hint == hint


def test_a_config_that_a_tool_left_behind_as_it_decoded_weights_stops_nothing(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    compress(source, tmp_path / "expected")
    for number, left in enumerate(({"group_size": 64, "bits": 4}, {"quant_method": "bitnet"}, {"quant_method": "fp8"})):
        change_json(source / "config.json", lambda found, left=left: found.update(quantization_config=left))
        compress(source, tmp_path / str(number))
        assert tree(tmp_path / str(number))["config.json"] == tree(tmp_path / "expected")["config.json"]


# The command.


def test_the_command(tmp_path: Path) -> None:
    source = store(tmp_path / "Foo-FP8", by_blocks(), BLOCKS)
    done = run_openquant("dequantize", source, "-o", tmp_path / "out", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["decoded_tensors"] == 14
    done = run_openquant("dequantize", source, "-o", tmp_path / "out")
    assert "is already complete; nothing was written" in done.stdout
    done = run_openquant("dequantize", tmp_path / "out", "-o", tmp_path / "again")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: nothing in {tmp_path / 'out'} is quantized\nhint: there is nothing to dequantize\n"
    dry = run_openquant("dequantize", source, "-o", tmp_path / "other", "--dry-run")
    assert dry.returncode == 0
    assert "BF16   787 kB  1.57 MB  model.layers.{0..1}.mlp.{down,gate,up}_proj\n" in dry.stdout
    assert "all weights in bfloat16 (14 layers)" in dry.stdout
    assert not (tmp_path / "other").exists()

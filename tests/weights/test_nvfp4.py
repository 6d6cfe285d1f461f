"""NVFP4 as compressed-tensors and modelopt lay it out: read, decoded, passed through, and held against itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, SourceError
from openquant.formats.reference import decode, encode, group_absmax, group_global_scale, group_scale, stored_scale
from openquant.formats.schemes import NVFP4, find_scheme
from support import small_checkpoints
from support.quantized_checkpoints import Weights, is_layer, store
from support.rows import for_each
from support.small_checkpoints import change_weights

FORM = NVFP4.format
GROUP = {"targets": ["Linear"], "weights": NVFP4.group["weights"], "input_activations": None}
LOCAL = {**NVFP4.group["weights"], "dynamic": "local"}
QUERY = "model.layers.0.self_attn.q_proj"


def compressed(activations: dict[str, Any] | None) -> dict[str, Any]:
    """The quantization_config of llm-compressor."""
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**GROUP, "input_activations": activations}},
        "ignore": ["lm_head"],
    }


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def parts(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and what these are divided by, given the largest weight of all that share the last."""
    shape = (weight.shape[0], weight.shape[1])
    divisor = group_global_scale(largest.reshape(1, 1), FORM)
    scale = group_scale(group_absmax(weight, FORM.group), FORM, divisor)
    return encode(weight, scale, FORM), stored_scale(scale, FORM, shape, divisor), divisor


def by_compressed_tensors(weight: torch.Tensor, largest: torch.Tensor) -> Weights:
    codes, scale, divisor = parts(weight, largest)
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor.reshape(1)}


def by_modelopt(weight: torch.Tensor, largest: torch.Tensor) -> Weights:
    """Its multiplier is a power of two here, so that one over it is exact."""
    codes, scale, divisor = parts(weight, torch.exp2(largest.log2().ceil()) * 2688 / 4096)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": (1 / divisor).reshape(())}


def with_inputs(make: Callable[..., Weights], name: str) -> Callable[..., Weights]:
    return lambda weight, largest: make(weight, largest) | {name: torch.tensor(0.25)}


SOURCES: dict[str, tuple[Callable[..., Weights], dict[str, Any]]] = {
    "compressed-tensors": (by_compressed_tensors, compressed(None)),
    "compressed-tensors W4A4": (with_inputs(by_compressed_tensors, "input_global_scale"), compressed(LOCAL)),
    "modelopt": (by_modelopt, modelopt("W4A16_NVFP4", group_size=16)),
    "modelopt W4A4": (with_inputs(by_modelopt, "input_scale"), modelopt("NVFP4")),
    "modelopt_fp4": (with_inputs(by_modelopt, "input_scale"), modelopt("NVFP4") | {"quant_method": "modelopt_fp4"}),
}


def source_of(root: Path, kind: str, shards: int = 3) -> Path:
    """A Qwen3 stored so, all layers under one global scale: those that are joined have one in any case."""
    make, config = SOURCES[kind]
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    largest = torch.stack([weight.abs().amax() for name, weight in weights.items() if is_layer(name)]).amax().float()
    return store(root, lambda weight: make(weight, largest), config, weights, shards)


def stands_for(stored: Weights, module: str) -> torch.Tensor:
    """The weight, float32, by what engines multiply."""
    codes = stored.get(f"{module}.weight_packed", stored.get(f"{module}.weight"))
    scale, divisor = stored[f"{module}.weight_scale"].float(), stored.get(f"{module}.weight_global_scale")
    if divisor is None:
        divisor = 1 / stored[f"{module}.weight_scale_2"]
    return decode(codes, scale / divisor, FORM)


@for_each("kind", SOURCES)
def test_products_are_decoded_and_codes_and_scales_stay(tmp_path: Path, kind: str) -> None:
    source = source_of(tmp_path / "source", kind)
    plain, stored = small_checkpoints.tensors("Qwen3ForCausalLM"), small_checkpoints.read(source)
    dequantize(source, tmp_path / "plain")
    found = small_checkpoints.read(tmp_path / "plain")
    assert set(found) == set(plain)
    for name, weight in plain.items():
        expected = stands_for(stored, name.removesuffix(".weight")).bfloat16() if is_layer(name) else weight
        assert torch.equal(found[name], expected), name
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config == small_checkpoints.config("Qwen3ForCausalLM")

    # Scales of activations stay or are a constant; of modelopt one over what others divide by.
    inputs = {"compressed-tensors": 1.0, "compressed-tensors W4A4": 0.25, "modelopt W4A4": 4.0}.get(kind)
    compress(source, tmp_path / "out", "nvfp4-w4a4" if inputs else "nvfp4")
    assert verify(tmp_path / "out").problems == ()
    found = small_checkpoints.read(tmp_path / "out")
    modules = [name.removesuffix(".weight_packed") for name in found if name.endswith(".weight_packed")]
    assert len(modules) == 14
    assert inputs or not [name for name in found if "input" in name and name.endswith("scale")]
    for module in modules:
        codes = stored.get(f"{module}.weight_packed", stored.get(f"{module}.weight"))
        assert torch.equal(found[f"{module}.weight_packed"], codes)
        scales = (held[f"{module}.weight_scale"].view(torch.uint8) for held in (found, stored))
        assert torch.equal(*scales)
        assert found[f"{module}.weight_global_scale"].shape == (1,)
        assert torch.equal(stands_for(found, module), stands_for(stored, module))
        if inputs:
            scale = found[f"{module}.input_global_scale"]
            assert (scale.dtype, scale.tolist()) == (torch.float32, [inputs])


@for_each(("kind", "scheme"), [("compressed-tensors", "mxfp4"), ("modelopt W4A4", "channel")])
def test_another_scheme_is_made_of_the_decoded_weights(tmp_path: Path, kind: str, scheme: str) -> None:
    source = source_of(tmp_path / "source", kind)
    stored = small_checkpoints.read(source)
    compress(source, tmp_path / "out", scheme)
    found, form = small_checkpoints.read(tmp_path / "out"), find_scheme(scheme).format
    for module in {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}:
        weight = stands_for(stored, module)
        scale = group_scale(group_absmax(weight, form.group), form)
        codes = encode(weight, scale, form).view(torch.uint8)
        assert torch.equal(found[f"{module}.{form.codes}"].view(torch.uint8), codes)


def test_joined_layers_under_several_global_scales_get_one(tmp_path: Path) -> None:
    source, last = source_of(tmp_path / "source", "modelopt"), "weight_scale_2"
    stored = small_checkpoints.read(source)
    change_weights(source, lambda found: found.update({f"{QUERY}.{last}": stored[f"{QUERY}.{last}"] * 2}))
    stored = small_checkpoints.read(source)
    compress(source, tmp_path / "out", "nvfp4", no_search=True)
    found = small_checkpoints.read(tmp_path / "out")
    owner = QUERY.rpartition(".")[0]
    fused = [f"{owner}.{part}_proj" for part in "qkv"]
    weights = {module: stands_for(stored, module) for module in fused}
    largest = torch.stack([weight.abs().amax() for weight in weights.values()]).amax()
    for module, weight in weights.items():
        codes, scale, divisor = parts(weight, largest)
        assert torch.equal(found[f"{module}.weight_global_scale"], divisor.reshape(1))
        assert torch.equal(found[f"{module}.weight_scale"].view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(found[f"{module}.weight_packed"], codes)
    assert torch.equal(found[f"{owner}.o_proj.weight_packed"], stored[f"{owner}.o_proj.weight"])


def test_a_scale_of_activations_that_is_no_number(tmp_path: Path) -> None:
    source, name = source_of(tmp_path / "source", "modelopt W4A4"), f"{QUERY}.input_scale"
    for value, message in (
        (torch.ones(2), f"{name} is F32 [2], not a single F32"),
        (torch.tensor(0.0), f"{name} in model-00001-of-00003.safetensors holds 0, which is not a valid scale"),
    ):
        change_weights(source, lambda found, value=value: found.update({name: value}))
        with pytest.raises(SourceError) as caught:
            compress(source, tmp_path / "out", "nvfp4-w4a4", overwrite=True)
        assert caught.value.message == message


def without(last: str) -> Callable[[Weights], object]:
    return lambda found: found.pop(f"{QUERY}.{last}")


def put(last: str, value: torch.Tensor) -> Callable[[Weights], object]:
    return lambda found: found.update({f"{QUERY}.{last}": value})


DAMAGE: list[tuple[str, Callable[[Weights], object], str]] = [
    ("compressed-tensors", without("weight_global_scale"), f"{QUERY}.weight_packed has no global scale: {QUERY}.weight_global_scale is missing"),
    ("modelopt", without("weight_scale_2"), f"{QUERY}.weight has no global scale: {QUERY}.weight_scale_2 is missing"),
    ("compressed-tensors", put("weight_global_scale", torch.ones(2)), f"{QUERY}.weight_global_scale is F32 [2], not a single F32"),
    ("compressed-tensors", put("weight_global_scale", torch.ones(1, dtype=torch.bfloat16)), f"{QUERY}.weight_global_scale is BF16 [1], not a single F32"),
    ("compressed-tensors", put("weight_global_scale", torch.zeros(1)), f"{QUERY}.weight_global_scale in model.safetensors holds 0, which is not a valid scale"),
    ("modelopt", put("weight_scale_2", torch.tensor(torch.nan)), f"{QUERY}.weight_scale_2 in model.safetensors holds nan, which is not a valid scale"),
    ("modelopt", put("weight_scale_2", torch.tensor(1e-44)), f"{QUERY}.weight_scale_2 in model.safetensors holds 9.80909e-45, which is not a valid scale"),
    ("compressed-tensors", without("weight_scale"), f"{QUERY}.weight_packed has no scale: {QUERY}.weight_scale is missing"),
]  # fmt: skip


def test_damaged_sources_are_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    sources = {kind: source_of(tmp_path / kind, kind, shards=1) for kind in ("compressed-tensors", "modelopt")}
    for kind, damage, message in DAMAGE:
        source = sources[kind]
        sound = (source / "model.safetensors").read_bytes()
        change_weights(source, damage)
        with subtests.test(message=message):
            for work in (dequantize, partial(compress, scheme="nvfp4")):
                with pytest.raises(SourceError) as caught:
                    work(source, tmp_path / "out")
                assert caught.value.message == message
            if kind == "compressed-tensors":
                # A scale that is missing is no matter of decoding to verify.
                try:
                    problems = verify(source).problems
                except OpenQuantError as error:
                    problems = (error.message,)
                assert any(QUERY in problem for problem in problems)
        (source / "model.safetensors").write_bytes(sound)

"""vLLM computes with what was made of a quantized source what the source stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import TO_DEQUANTIZED, TO_SOURCE, Answers, Engine, find_engine, rewrite

import openquant
from conftest import EXAMPLE
from openquant import compress
from support import small_checkpoints
from support.mixed_precision import stored_mixed
from support.quantized_checkpoints import INT4, Make, awq, awq_config, gptq, gptq_config, int4, is_layer

pytestmark = pytest.mark.serve

# Scheme and format of the source, then of the output.
RECODED = (
    ("block", "fp8", "channel"),
    ("channel", None, "tensor"),
    ("tensor", "fp8", "block"),
    ("mxfp8", None, "block"),
)
# By name: how AutoAWQ or GPTQ stores the source, its config, and what keeps all values.
COLUMNS: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "awq": (awq(128), awq_config(128), {"asymmetric": True}),
    "gptq": (gptq(size=128), gptq_config(size=128), {}),
}
PASSED = (("block", "compressed-tensors", "fp8"), ("block", "fp8", "compressed-tensors"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    return find_engine()


@pytest.fixture(scope="session")
def logprobs(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """By `<source>-<output>`; `-plain` is a source or output multiplied out."""
    root = tmp_path_factory.mktemp("quantized")
    models = {"source": EXAMPLE}
    for scheme, format, other in RECODED:
        compress(EXAMPLE, root / scheme, scheme, format=format)
        models[f"{scheme}-plain"] = root / f"{scheme}-plain"
        openquant.dequantize(root / scheme, models[f"{scheme}-plain"])
        models[f"{scheme}-{other}"] = root / f"{scheme}-{other}"
        compress(root / scheme, root / f"{scheme}-{other}", other)
        models[f"{scheme}-{other}-plain"] = root / f"{scheme}-{other}-plain"
        openquant.dequantize(root / f"{scheme}-{other}", models[f"{scheme}-{other}-plain"])
    for scheme, format, other in PASSED:
        name = f"{scheme}-{format}"
        compress(EXAMPLE, root / name, scheme, format=format)
        models[f"{name}-{other}"] = root / f"{name}-{other}"
        compress(root / name, root / f"{name}-{other}", scheme, format=other)
    models["static"] = root / "static"
    compress(calibrated(root / "tensor", root / "calibrated"), root / "static", activation_scheme="static")
    models["int4-plain"], models["int4-channel"] = root / "int4-plain", root / "int4-channel"
    openquant.dequantize(as_stored(root / "int4", int4, INT4), root / "int4-plain")
    compress(root / "int4", root / "int4-channel", "channel")
    for name, (make, config, options) in COLUMNS.items():
        models[name], models[f"{name}-int4"] = as_stored(root / name, make, config), root / f"{name}-int4"
        compress(root / name, root / f"{name}-int4", "int4", **options)
        models[f"{name}-dequantized"] = root / f"{name}-dequantized"
        openquant.dequantize(root / name, root / f"{name}-dequantized")
    return engine.logprobs(models, root / "answers")


def calibrated(source: Path, target: Path) -> Path:
    """A per-tensor output with an input_scale for each layer."""
    weights = small_checkpoints.read(source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    for name in [name for name in weights if name.endswith(".weight_scale")]:
        weights[name.replace("weight_scale", "input_scale")] = torch.tensor(0.02)
    return rewrite(source, target, weights, config)


def as_stored(target: Path, make: Make, quantization: dict[str, Any]) -> Path:
    """The example with its layers as another tool stores them."""
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"quantization_config": quantization}
    weights: dict[str, torch.Tensor] = {}
    for name, weight in small_checkpoints.read(EXAMPLE).items():
        if is_layer(name):
            weights |= {f"{name.removesuffix('weight')}{last}": tensor for last, tensor in make(weight).items()}
        else:
            weights[name] = weight
    return rewrite(EXAMPLE, target, weights, config)


@pytest.mark.parametrize(("scheme", "format", "other"), RECODED)
def test_another_scheme(scheme: str, format: str | None, other: str, logprobs: Answers) -> None:
    del format
    found = f"{scheme}-{other}"
    assert logprobs.between(f"{scheme}-{other}-plain", found) < TO_DEQUANTIZED[other]
    # Rounded twice: as far from what the source stands for as that is from the unquantized model.
    assert logprobs.between(f"{scheme}-plain", found) < TO_SOURCE
    assert logprobs.between("source", found) < 2 * TO_SOURCE


@pytest.mark.parametrize(("scheme", "format", "other"), PASSED)
def test_another_format(scheme: str, format: str, other: str, logprobs: Answers) -> None:
    found = f"{scheme}-{format}-{other}"
    assert logprobs.between("block-plain", found) < TO_DEQUANTIZED["block"]


def test_static_activations(logprobs: Answers) -> None:
    """The CPU kernel does not round activations, so this shows that vLLM loads them, and the rest right."""
    assert logprobs.between("tensor-plain", "static") < TO_DEQUANTIZED["tensor"]


def test_int4(logprobs: Answers) -> None:
    assert logprobs.between("int4-plain", "int4-channel") < TO_SOURCE
    assert logprobs.between("source", "int4-plain") > TO_SOURCE


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_repacked(name: str, logprobs: Answers) -> None:
    """vLLM reads AutoAWQ's and GPTQ's own layouts too, and rounds their scales to the model's bfloat16 alike."""
    assert (logprobs.of(name) == logprobs.of(f"{name}-int4")).all()
    assert logprobs.between(f"{name}-dequantized", f"{name}-int4") < 0.0005


def test_several_formats_of_modelopt_in_one_model(engine: Engine, tmp_path: Path) -> None:
    """What --scheme keep makes of it; the checkpoint itself has no kernel in vLLM's CPU build."""
    weights, quantization = stored_mixed(small_checkpoints.read(EXAMPLE))
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"quantization_config": quantization}
    source = rewrite(EXAMPLE, tmp_path / "source", weights, config)
    models = {"kept": tmp_path / "kept", "plain": tmp_path / "plain"}
    compress(source, models["kept"], "keep")
    openquant.dequantize(source, models["plain"])
    # Found: 0.0054. Activations of some layers are in FP4, and the KV cache is in FP8.
    assert engine.logprobs(models, tmp_path / "answers", "text").between("plain", "kept") < 0.0065

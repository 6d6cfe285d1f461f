"""transformers loads outputs on the CPU and computes with the weights we wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from openquant import compress
from openquant.packed import decode
from openquant.schemes import BLOCK, CHANNEL, VARIANTS, Scheme

# Llama 4's split experts are the exception (README); the wrapped models are read as a whole.
ARCHITECTURES = [name for name in tiny.ARCHITECTURES if not name.startswith("Llama4")]


def dequantized(output: Path, target: Path, scheme: Scheme) -> Path:
    """The same model in bfloat16, with the weights that codes and scales stand for."""
    target.mkdir()
    weights = tiny.read(output)
    for name in [name for name in weights if name.endswith(f".{scheme.scale_name}")]:
        module, scale = name.removesuffix(f".{scheme.scale_name}"), weights.pop(name)
        weights[f"{module}.weight"] = decode(weights[f"{module}.weight"], scale, scheme.group).to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(directory: Path, tokens: torch.Tensor, **options: object) -> torch.Tensor:
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = getattr(transformers, architecture).from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True, **options
        )
        assert not report["missing_keys"], report["missing_keys"]
        assert not report["unexpected_keys"], report["unexpected_keys"]
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits.float()


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_output_computes_what_its_dequantized_weights_do(
    tmp_path: Path, architecture: str, scale_format: str
) -> None:
    source = tiny.write(tmp_path / "source", architecture)
    compress(source, tmp_path / "out", "block", scale_format=scale_format)
    tokens = torch.randint(10, 500, (1, 32), generator=torch.Generator().manual_seed(0))
    found = logits(tmp_path / "out", tokens)
    expected = logits(dequantized(tmp_path / "out", tmp_path / "plain", BLOCK), tokens)
    bfloat16 = logits(source, tokens)
    assert (found - expected).norm() / expected.norm() < 0.01
    # The bound means something: the source itself is further away.
    assert (found - bfloat16).norm() / bfloat16.norm() > 0.015


COMPRESSED = [
    (scheme, architecture)
    for scheme in VARIANTS
    for architecture in ARCHITECTURES
    if scheme.package and (architecture != "Qwen3MoeForCausalLM" or scheme is CHANNEL)
]


@pytest.mark.parametrize(("scheme", "architecture"), COMPRESSED, ids=lambda value: getattr(value, "suffix", value))
def test_compressed_tensors_output_is_decompressed_to_what_it_stands_for(
    tmp_path: Path, scheme: Scheme, architecture: str
) -> None:
    """By compressed-tensors, as the weights are loaded."""
    from transformers import CompressedTensorsConfig

    source = tiny.write(tmp_path / "source", architecture)
    compress(source, tmp_path / "out", scheme.name, format=scheme.format)
    tokens = torch.randint(10, 500, (1, 32), generator=torch.Generator().manual_seed(0))
    expected = logits(dequantized(tmp_path / "out", tmp_path / "plain", scheme), tokens)
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    assert torch.equal(logits(tmp_path / "out", tokens, **options), expected)
    # As it is loaded by default it rounds scales to bfloat16 and activations to FP8.
    found = logits(tmp_path / "out", tokens)
    assert 0 < (found - expected).norm() / expected.norm() < 0.15

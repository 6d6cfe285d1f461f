"""transformers loads a block output on the CPU and computes with the weights we wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from openquant import PackedLinear, compress
from openquant.models import MODELS

# The exceptions are in the registry (split experts that it wants stacked); the wrapped models are read as a whole.
ARCHITECTURES = [
    name
    for name in tiny.ARCHITECTURES
    if MODELS[name].transformers_reads_blocks and "block" not in {refusal.scheme for refusal in MODELS[name].refused}
]
# It leaves draft layers out: those of a model of two layers.
DRAFT = "model.layers.2."


def dequantized(output: Path, target: Path) -> Path:
    """The same model in bfloat16, with the weights that codes and scales stand for."""
    target.mkdir()
    tensors = tiny.read(output)
    scales = {name.removesuffix(".weight_scale_inv"): name for name in tensors if name.endswith(".weight_scale_inv")}
    weights = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in scales:
            weights[name] = PackedLinear(tensor, tensors[scales[module]]).dequantized(torch.bfloat16)
        elif not name.endswith(".weight_scale_inv"):
            weights[name] = tensor
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = getattr(transformers, architecture).from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not report["missing_keys"], report["missing_keys"]
        unexpected = [name for name in report["unexpected_keys"] if not name.startswith(DRAFT)]
        assert not unexpected, unexpected
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits.float()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_output_computes_what_its_dequantized_weights_do(tmp_path: Path, architecture: str) -> None:
    source = tiny.write(tmp_path / "source", architecture)
    compress(source, tmp_path / "out", "block")
    tokens = torch.randint(10, 500, (1, 32), generator=torch.Generator().manual_seed(0))
    found = logits(tmp_path / "out", tokens)
    expected = logits(dequantized(tmp_path / "out", tmp_path / "plain"), tokens)
    bfloat16 = logits(source, tokens)
    assert (found - expected).norm() / expected.norm() < 0.01
    # The bound means something: the source itself is further away.
    assert (found - bfloat16).norm() / bfloat16.norm() > 0.015

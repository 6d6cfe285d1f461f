"""What a quantization_config promises, read from configs that mean harm as well."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import change_json
from openquant import dequantize, verify
from openquant.errors import UsageError
from openquant.formats.quantization import read_quantization
from support import small_checkpoints


def test_blocks_of_absurd_sizes_are_refused() -> None:
    for side in (2**16 + 1, 2**30, 2**63, 2**64):
        for size in ([side, 128], [128, side]):
            config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
            with pytest.raises(UsageError) as caught:
                read_quantization({"quantization_config": config})
            assert (caught.value.message, caught.value.hint) == (
                f"config.json has the weight_block_size {size}", "it must be two numbers from 1 to 65536"
            )  # fmt: skip
        block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, side]}
        groups = {"group_0": {"targets": ["Linear"], "weights": block}}
        with pytest.raises(UsageError) as caught:
            read_quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
        assert caught.value.message == "config.json: group_0 has no block_structure of two numbers from 1 to 65536"


@pytest.mark.parametrize("size", [[65536, 65536], [1, 65536], [65536, 1], [3, 5]])
def test_blocks_larger_than_a_matrix_take_no_more_memory(tmp_path: Path, size: list[int]) -> None:
    """One scale for all of it, or for a row or column of it."""
    rows, cols = 512, 16
    # None beyond what the scale reaches.
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).clamp(-4, 4).bfloat16()
    grid = -(-rows // size[0]), -(-cols // size[1])
    scale = torch.full(grid, 0.01)
    codes = (weight.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = "model.layers.0.mlp.down_proj.weight"
    source, out = tmp_path / "source", tmp_path / "out"
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
    for root, weights in ((source, {name: weight}), (out, {name: codes, f"{name}_scale_inv": scale})):
        root.mkdir()
        save_file(weights, root / "model.safetensors", {"format": "pt"})
        (root / "config.json").write_text(json.dumps({"architectures": ["AnyForCausalLM"]}))
    change_json(out / "config.json", lambda found: found.update(quantization_config=config))
    tracemalloc.start()
    report = verify(out, source, full=True)
    dequantize(out, tmp_path / "back")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.problems, len(report.errors)) == ((), 1)
    assert peak < 100 << 20
    found = small_checkpoints.read(tmp_path / "back")[name]
    assert torch.equal(found, (codes.float() * 0.01).bfloat16())

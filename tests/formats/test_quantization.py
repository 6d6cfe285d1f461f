"""What a quantization_config promises, read from configs that mean harm as well."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.formats.quantization import read_quantization


def test_blocks_and_targets_that_are_none_are_refused() -> None:
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 0]}
    channel = {"num_bits": 8, "type": "float", "strategy": "channel"}
    for config, message in (
        ({"quant_method": "fp8", "weight_block_size": [2**64, 128]}, f"config.json has the weight_block_size [{2**64}, 128]"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": block}}},
         "config.json: a has no block_structure of two numbers from 1 to 65536"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": [5], "weights": channel}}},
         "config.json: targets is not a list of names"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            read_quantization({"quantization_config": {"activation_scheme": "dynamic", **config}})
        assert caught.value.message == message

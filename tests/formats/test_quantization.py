"""What a quantization_config promises, read from configs that mean harm as well."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.formats.quantization import read_quantization


def test_blocks_of_absurd_sizes_are_refused() -> None:
    for side in (2**16 + 1, 2**64, 0, -1, 128.0):
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


def test_targets_that_are_no_names() -> None:
    groups = {"group_0": {"targets": [5], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
    with pytest.raises(UsageError, match="^config.json: targets is not a list of names"):
        read_quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})


def test_groups_that_are_not_read() -> None:
    def of(**weights: object) -> dict[str, object]:
        return {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}}

    rows: list[tuple[object, str]] = [
        ({}, "config.json has no config_groups"),
        ({"g": 5}, "config.json: g is not a config group"),
        ({"g": {"weights": 5}}, "config.json: g is not a config group"),
        (of(strategy="channel", symmetric=False), "config.json: g stores asymmetric int8 weights by channel"),
        (of(strategy="group", group_size=0), "config.json: g stores int8 weights by group"),
    ]
    for groups, message in rows:
        with pytest.raises(UsageError) as caught:
            read_quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
        assert caught.value.message == message
    found = read_quantization(
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": of(strategy="channel")}}
    )
    assert found.inputs_of("layer") is None
    with pytest.raises(UsageError, match="^config.json has no quantization_config"):
        read_quantization({})

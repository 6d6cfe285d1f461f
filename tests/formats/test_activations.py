"""How activations are quantized, read from configs of all kinds."""

from __future__ import annotations

from typing import Any

import pytest

from openquant.errors import UsageError
from openquant.formats.activations import ActivationQuantization, read_activation_quantization
from openquant.formats.numbers import E2M1, E4M3, INT8
from openquant.formats.quantization import read_quantization
from openquant.formats.schemes import (
    BLOCK,
    BLOCK_COMPRESSED,
    BLOCK_UE8M0,
    CHANNEL,
    INT8_W8A8,
    INT8_W8A16,
    MXFP8,
    NVFP4,
    NVFP4_W4A4,
    TENSOR,
    TENSOR_COMPRESSED,
    TENSOR_COMPRESSED_STATIC,
    TENSOR_STATIC,
    Scheme,
)

OF_SCHEMES = [
    (TENSOR, ActivationQuantization(E4M3, (None, None))),
    (TENSOR_STATIC, ActivationQuantization(E4M3, (None, None), static=True)),
    (TENSOR_COMPRESSED, ActivationQuantization(E4M3, (1, None))),
    (TENSOR_COMPRESSED_STATIC, ActivationQuantization(E4M3, (None, None), static=True)),
    (CHANNEL, ActivationQuantization(E4M3, (1, None))),
    (BLOCK, ActivationQuantization(E4M3, (1, 128))),
    (BLOCK_COMPRESSED, ActivationQuantization(E4M3, (1, 128))),
    (BLOCK_UE8M0, ActivationQuantization(E4M3, (1, 128), power_of_two=True)),
    (MXFP8, ActivationQuantization(E4M3, (1, 32), power_of_two=True)),
    (INT8_W8A8, ActivationQuantization(INT8, (1, None))),
    (INT8_W8A16, None),
    (NVFP4, None),
    (NVFP4_W4A4, ActivationQuantization(E2M1, (1, 16), has_global_scale=True)),
]


@pytest.mark.parametrize(("scheme", "inputs"), OF_SCHEMES, ids=lambda value: getattr(value, "suffix", ""))
def test_every_scheme_says_what_becomes_of_activations(scheme: Scheme, inputs: ActivationQuantization | None) -> None:
    found = read_quantization({"quantization_config": scheme.config([])})
    assert found.inputs_of("model.layers.0.mlp.up_proj") == inputs


@pytest.mark.parametrize(
    ("algorithm", "inputs"),
    [
        ("FP8", ActivationQuantization(E4M3, (None, None), static=True)),
        ("FP8_PER_CHANNEL_PER_TOKEN", ActivationQuantization(E4M3, (1, None))),
        ("FP8_PB_WO", ActivationQuantization(E4M3, (1, 128))),
        ("MXFP8", ActivationQuantization(E4M3, (1, 32), power_of_two=True)),
        ("NVFP4", ActivationQuantization(E2M1, (1, 16), has_global_scale=True)),
        ("W4A16_NVFP4", None),
    ],
)
def test_so_does_every_algorithm_of_modelopt(algorithm: str, inputs: ActivationQuantization | None) -> None:
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    assert read_quantization(config).inputs_of("model.layers.0.mlp.up_proj") == inputs


def test_mxfp4_has_weights_alone() -> None:
    assert read_quantization({"quantization_config": {"quant_method": "mxfp4"}}).inputs_of("any") is None


def test_layers_of_several_groups_have_their_own() -> None:
    config = CHANNEL.config([], {INT8_W8A16: ["model.layers.0.mlp.up_proj"], INT8_W8A8: ["re:.*k_proj$"]})
    found = read_quantization({"quantization_config": config})
    assert found.inputs_of("model.layers.0.mlp.up_proj") is None
    assert found.inputs_of("model.layers.0.self_attn.k_proj") == ActivationQuantization(INT8, (1, None))
    assert found.inputs_of("model.layers.0.mlp.down_proj") == ActivationQuantization(E4M3, (1, None))


@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 4},
        {"type": "int", "symmetric": False},
        {"strategy": "channel"},
        {"strategy": ["token"]},
        {"strategy": "group", "group_size": "128"},
        {"dynamic": False},
    ],
)
def test_what_is_not_known_stops(change: dict[str, Any]) -> None:
    said = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, **change}
    with pytest.raises(UsageError, match="config.json quantizes activations as .*, which is not known here"):
        read_activation_quantization(said)

"""How activations are quantized, read from configs of all kinds."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.formats.format import ActivationQuantization, read_activation_quantization
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
)

STATIC = ActivationQuantization(E4M3, (None, None), static=True)
BY_TOKEN = ActivationQuantization(E4M3, (1, None))
BY_GROUP = ActivationQuantization(E4M3, (1, 128))
MX = ActivationQuantization(E4M3, (1, 32), power_of_two=True)
NV = ActivationQuantization(E2M1, (1, 16), has_global_scale=True)
OF_SCHEMES = [
    (TENSOR, ActivationQuantization(E4M3, (None, None))),
    (TENSOR_STATIC, STATIC),
    (TENSOR_COMPRESSED, BY_TOKEN),
    (TENSOR_COMPRESSED_STATIC, STATIC),
    (CHANNEL, BY_TOKEN),
    (BLOCK, BY_GROUP),
    (BLOCK_COMPRESSED, BY_GROUP),
    (BLOCK_UE8M0, ActivationQuantization(E4M3, (1, 128), power_of_two=True)),
    (MXFP8, MX),
    (INT8_W8A8, ActivationQuantization(INT8, (1, None))),
    (INT8_W8A16, None),
    (NVFP4, None),
    (NVFP4_W4A4, NV),
]  # fmt: skip
MODELOPT = {
    "FP8": STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": BY_TOKEN,
    "FP8_PB_WO": BY_GROUP,
    "MXFP8": MX,
    "NVFP4": NV,
    "W4A16_NVFP4": None,
}


def test_every_scheme_and_algorithm_of_modelopt_says_what_becomes_of_activations() -> None:
    configs = [(scheme.config([]), inputs) for scheme, inputs in OF_SCHEMES]
    configs += [({"quant_method": "modelopt", "quant_algo": name}, inputs) for name, inputs in MODELOPT.items()]
    # It has weights alone.
    configs += [({"quant_method": "mxfp4"}, None)]
    for config, inputs in configs:
        found = read_quantization({"quantization_config": config})
        assert found.inputs_of("model.layers.0.mlp.up_proj") == inputs, config


def test_what_is_not_known_stops() -> None:
    for change in (
        {"num_bits": 4},
        {"type": "int", "symmetric": False},
        {"strategy": "channel"},
        {"strategy": ["token"]},
        {"strategy": "group", "group_size": "128"},
        {"dynamic": False},
    ):
        said = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, **change}
        with pytest.raises(UsageError, match="config.json quantizes activations as .*, which is not known here"):
            read_activation_quantization(said)

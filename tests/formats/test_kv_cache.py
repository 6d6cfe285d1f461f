"""What configs say of a cache in FP8, and what its scales are called and hold."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.formats.numbers import cache_scales, says_fp8_cache, scale_for, with_fp8_cache, without_fp8_cache
from openquant.formats.schemes import BLOCK, CHANNEL


def test_the_config_says_what_the_cache_holds() -> None:
    for quantization, expected in (
        ({}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, True),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False),
    ):
        assert says_fp8_cache(quantization) is expected, quantization
    for other in ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, {"kv_cache_quant_algo": "NVFP4"}):
        with pytest.raises(UsageError, match="kv_cache_"):
            says_fp8_cache(other)


def test_scales_of_the_cache_have_several_names() -> None:
    names = [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
        "model.layers.1.self_attn.kv_scale",
        "model.layers.2.self_attn.k_proj.output_scale",
        "model.layers.10.self_attn.attn.v_scale",
        "model.layers.0.self_attn.q_scale",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "transformer.h.11.self_attention.v_scale",
    ]
    expected = {
        0: (names[0], names[1]),
        1: (names[2], names[2]),
        2: (names[3], None),
        10: (None, names[4]),
        11: (None, names[7]),
    }
    assert cache_scales(names) == expected


def test_a_config_says_it_and_can_be_rid_of_it() -> None:
    for scheme in (CHANNEL, BLOCK):
        settings = scheme.config([])
        said = with_fp8_cache(settings)
        assert says_fp8_cache(said) and not says_fp8_cache(settings)
        assert without_fp8_cache(said) == settings
        # What nobody here writes stays, to be looked at.
        other = {**settings, "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "kv_cache_quant_algo": "NVFP4"}
        assert without_fp8_cache(other) == other


def test_scales_are_powers_of_two_that_hold_the_largest() -> None:
    for largest, scale in (
        (0.0, 1.0),
        (448.0, 1.0),
        (448.1, 2.0),
        (224.0, 0.5),
        (225.0, 1.0),
        (14.0, 2.0**-5),
        (1e-30, 2.0**-64),
        (5e-324, 2.0**-64),
    ):
        assert scale_for(largest) == scale
        assert largest <= 448 * scale

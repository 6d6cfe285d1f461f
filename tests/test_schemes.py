"""What the formats promise: rounding bounds, scales, zeros, exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openquant.packed import decode, encode, group_absmax, group_scale
from openquant.schemes import BLOCK, SCHEMES, TENSOR, Scheme

schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@schemes
@given(seed=st.integers(0, 2**31), magnitude=st.floats(-30, 30), spread=st.floats(0, 4))
def test_decoding_gives_the_weight_back_within_half_a_code(
    scheme: Scheme, seed: int, magnitude: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(256, 128, generator=generator)
    weight = (weight * (weight.abs() ** spread) * 2.0**magnitude).float()
    scale = group_scale(group_absmax(weight, scheme.block), scheme)
    found = decode(encode(weight, scale, scheme.block), scale, scheme.block)
    step = scale if scheme.block is None else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Normal codes keep 3 mantissa bits, so half a unit is 1/16 of the weight; subnormal ones are 2^-9 apart.
    bound = torch.maximum(weight.abs() / 16, step * 2.0**-10) * (1 + 1e-6)
    assert ((found - weight).abs() <= bound).all()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@schemes
def test_zeros_stay_zeros_under_scale_one(scheme: Scheme) -> None:
    weight = torch.zeros(256, 128)
    scale = group_scale(group_absmax(weight, scheme.block), scheme)
    assert (scale == 1).all()
    assert (encode(weight, scale, scheme.block).view(torch.uint8) == 0).all()


def test_tensor_scale_does_not_go_below_what_float16_keeps() -> None:
    assert TENSOR.scale(np.float32(0.0137)) == np.float32(0.0137) / np.float32(448)
    assert TENSOR.scale(np.float32(0.0136)) == np.float32(2.0**-15)
    assert TENSOR.scale(np.float32(0)) == 1


def test_block_scale_of_the_smallest_weights_is_a_normal_number() -> None:
    scale = BLOCK.scale(np.array([[1e-45, 1e-38, 1.0, 0.0]], np.float32))
    np.testing.assert_array_equal(scale, np.array([[2.0**-126, 2.0**-126, 1 / 448, 1.0]], np.float32))


def test_golden_bytes_of_one_tensor() -> None:
    weight = torch.tensor(
        [[448.0, -448.0, 1.0, -1.0], [0.0, 240.0, 2.0**-9, 17.0], [18.0, 19.0, 465.0 / 464, 2.0**-10]]
    )
    scale = group_scale(group_absmax(weight, None), TENSOR)
    assert scale.item() == 1.0
    codes = encode(weight, scale, None).view(torch.uint8)
    # 17 lies between 16 (0x58) and 18 (0x59) and goes to the even code, 19 between 18 and 20 (0x5a) likewise.
    assert codes.tolist() == [[0x7E, 0xFE, 0x38, 0xB8], [0x00, 0x77, 0x01, 0x58], [0x59, 0x5A, 0x38, 0x00]]


def test_golden_bytes_of_blocks() -> None:
    weight = torch.zeros(128, 256)
    weight[0, :4] = torch.tensor([0.5, -0.25, 0.1, 0.003])
    weight[127, 255] = 896.0
    weight[0, 128] = -1.0
    scale = group_scale(group_absmax(weight, 128), BLOCK)
    assert scale.tolist() == [[float(np.float32(0.5) / np.float32(448)), 2.0]]
    codes = encode(weight, scale, 128).view(torch.uint8)
    assert codes[0, :4].tolist() == [0x7E, 0xF6, 0x6B, 0x43]
    assert codes[127, 255] == 0x7E
    assert codes[0, 128] == 0xB0
    assert int((codes != 0).sum()) == 6


@schemes
def test_config_is_what_engines_read(scheme: Scheme) -> None:
    assert scheme.config(["lm_head"]) == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": None if scheme is TENSOR else [128, 128],
        "ignored_layers": ["lm_head"],
        "modules_to_not_convert": ["lm_head"],
    }


def test_blocks_need_multiples_of_128_both_ways() -> None:
    assert BLOCK.misfit((256, 128)) is None
    assert BLOCK.misfit((192, 128)) == "192 x 128 is not a multiple of 128 both ways"
    assert BLOCK.misfit((128, 960)) == "128 x 960 is not a multiple of 128 both ways"
    assert TENSOR.misfit((3, 5)) is None

"""Scales with zero points: against compressed-tensors, torch and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from openquant.errors import UsageError
from openquant.formats import compiled, kernels
from openquant.formats.kernels import Scales, choose_scales
from openquant.formats.numbers import INT4
from openquant.formats.quantization import read_quantization
from openquant.formats.reference import decode, encode
from openquant.formats.schemes import (
    ASYMMETRIC,
    CHANNEL,
    INT4_SHIFTED,
    INT4_SHIFTED_32,
    INT4_SHIFTED_64,
    INT4_SHIFTED_CHANNEL,
    INT4_W4A16,
    INT8_W8A8,
    Scheme,
    as_written,
    find_others,
    find_scheme,
)
from support.zero_points import group_ranges

FORM = INT4_SHIFTED.format


def skewed(seed: int, magnitude: int = 0, rows: int = 16, cols: int = 384) -> torch.Tensor:
    """Weights of groups whose middle is not zero, and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator) + torch.randn(rows, 1, generator=generator)
    weight[3, :128] = 0
    return weight * 2.0**magnitude


def of(weight: torch.Tensor, scheme: Scheme, counts: np.ndarray | None = None) -> Scales:
    return choose_scales(scheme, weight.numpy().view(np.uint32), "F32", importance=counts)


def test_golden_bytes() -> None:
    weight = torch.zeros(8, 128)
    weight[0, :8] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 15.0, 14.6, 0.5])
    weight[1, :8] = torch.tensor([-5.0, 10.0, -4.5, 0.0, 1.5, 2.5, 9.4, -0.5])
    weight[2, :2] = torch.tensor([-15.0, -1.0])
    scale, zero = of(weight, INT4_SHIFTED.unsearched)
    # (max - min) / 15 over a range that includes zero; a group of zeros has the spacing of bfloat16.
    assert scale[:, 0].tolist() == [1.0, 1.0, 1.0, *[2.0**-7] * 5]
    assert zero[:, 0].tolist() == [-8, -3, 7, *[-8] * 5]
    codes = encode(weight, torch.from_numpy(scale), FORM, torch.from_numpy(zero))
    words = [[word & 0xFFFFFFFF for word in row[:2]] for row in codes.tolist()]
    # Halves go to the even code, counted from the middle one.
    assert words[:4] == [[0x0FF43210, 0], [0x4E8650F0, 0x55555555], [0xFFFFFFE0, 0xFFFFFFFF], [0, 0]]
    zeros = kernels.pack_words(INT4.encode(zero), INT4)
    assert zeros.tolist() == [[0x00000F50]]


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-20, 20))
def test_what_compressed_tensors_makes(seed: int, magnitude: int) -> None:
    weight = skewed(seed, magnitude)
    for scheme in ASYMMETRIC:
        form = scheme.format
        config = QuantizationConfig.model_validate(scheme.config([])).config_groups["group_0"]
        grouped = weight.reshape(16, -1, form.group[1] or 384)
        wanted, wanted_zero = calculate_qparams(grouped.amin(2), grouped.amax(2), config.weights)
        # Of a group of zeros its own are divided by zero.
        some = grouped.abs().amax(2) > 0
        scale, zero = (torch.from_numpy(found) for found in of(weight, scheme.unsearched))
        assert torch.equal(scale[some], wanted[some].bfloat16().float()), scheme.suffix
        assert torch.equal(zero[some], wanted_zero[some].float()), scheme.suffix
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        theirs = compressor.compress(state, config)
        assert torch.equal(encode(weight, scale, form, zero), theirs["weight_packed"]), scheme.suffix
        words = kernels.pack_words(form.number.encode(zero.numpy()), form.number).view(np.int32)
        assert torch.equal(torch.from_numpy(words), theirs["weight_zero_point"]), scheme.suffix
        back = decode(theirs["weight_packed"], scale, form, zero)
        assert torch.equal(back, compressor.decompress(theirs, config)["weight"]), scheme.suffix


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-100, 100), dtype=st.sampled_from(["BF16", "F32"]))
def test_kernels_are_what_torch_computes(seed: int, magnitude: int, dtype: str) -> None:
    weight = skewed(seed, magnitude)
    bits = weight.numpy().view(np.uint32)
    if dtype == "BF16":
        weight = weight.bfloat16()
        bits = weight.view(torch.int16).numpy().view(np.uint16)
    for scheme in ASYMMETRIC:
        form, name = scheme.format, scheme.suffix
        scale, zero = choose_scales(scheme.unsearched, bits, dtype)
        wanted = group_ranges(weight, form)
        assert np.array_equal(scale, wanted[0].numpy()), name
        assert np.array_equal(zero, wanted[1].numpy()), name
        codes = np.empty((16, form.number.nbytes(384)), np.uint8)
        kernels.encode_stored(bits, dtype, scale, form, codes, zero)
        again = np.empty_like(codes)
        compiled.encode_stored(bits, dtype, scale, form, again, zero)
        assert np.array_equal(again, codes), name
        words = encode(weight, wanted[0], form, wanted[1])
        assert np.array_equal(codes.view(np.int32), words.numpy()), name
        out = np.empty((16, 384), np.float32)
        kernels.decode_rows(codes, form.number, scale, form.group, 0, out, zero)
        assert np.array_equal(out, decode(words, wanted[0], form, wanted[1]).numpy()), name
        # Rounding the zero point may clip the ends by half a step, rounding the scale by its share of the range.
        spread = np.repeat(scale, 384 // scale.shape[1], axis=1)
        assert (np.abs(out - weight.float().numpy()) <= spread * (1 + 2 * form.number.span / 256)).all(), name


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-60, 60), weighed=st.booleans())
def test_no_other_ratio_is_better(seed: int, magnitude: int, weighed: bool) -> None:
    weight = skewed(seed, magnitude, rows=8, cols=256)
    counts = np.exp(2 * np.random.default_rng(seed).standard_normal(256)).astype(np.float32)

    def errors(scheme: Scheme, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
        form = scheme.format
        grouped = weight.numpy().astype(np.float64).reshape(*scale.shape, -1)
        spread, shift = scale.astype(np.float64)[..., None], zero[..., None]
        codes = np.clip(np.rint(grouped / spread + shift), -form.number.largest, form.number.largest - 1)
        squares = np.square((codes - shift) * spread - grouped)
        if weighed:
            squares *= counts.reshape(grouped.shape[1:])
        elif scheme.weighs_by_size:
            squares *= np.abs(grouped)
        return squares.sum(axis=2)

    for scheme in ASYMMETRIC:
        form, found = scheme.format, of(weight, scheme, counts if weighed else None)
        grouped = weight.numpy().reshape(8, -1, form.group[1] or 256)
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        tried = [form.ranges(low * np.float32(ratio), high * np.float32(ratio)) for ratio in scheme.clip_ratios]
        assert np.any([(found[0] == scale) & (found[1] == zero) for scale, zero in tried], axis=0).all(), scheme.suffix
        least = np.min([errors(scheme, *one) for one in tried], axis=0)
        assert (errors(scheme, *found) <= least * (1 + 1e-4)).all(), scheme.suffix


def test_they_are_of_one_config() -> None:
    for scheme in ASYMMETRIC:
        assert find_scheme(scheme.name, group_size=scheme.group_size, asymmetric=True) == scheme
        read = read_quantization({"quantization_config": scheme.config([])})
        assert read.scheme == scheme
        assert as_written(scheme, read.settings)
    found = CHANNEL.config(["a"], {INT4_SHIFTED: ["b"], INT4_W4A16: ["c"]})
    read = read_quantization({"quantization_config": found})
    assert [read.format_of(name) for name in "xbc"] == [CHANNEL.format, INT4_SHIFTED.format, INT4_W4A16.format]
    assert as_written(CHANNEL, read.settings)
    assert find_others(CHANNEL, {"a": "int4", "b": "int8"}, "64", True) == (("a", INT4_SHIFTED_64), ("b", INT8_W8A8))
    assert (FORM.indivisible, INT4_SHIFTED_CHANNEL.format.indivisible, FORM.height) == ((8, 128), (8, 8), 8)
    assert FORM.shape_error((12, 128)) == "12 rows do not divide into words of 8 zero points"
    assert INT4_SHIFTED.fallback == INT4_SHIFTED_32
    assert (FORM.holds(INT4_W4A16.format), INT4_W4A16.format.holds(FORM)) == (True, False)
    assert INT4_SHIFTED.title == "one scale and zero point per 128 inputs of a row"
    with pytest.raises(UsageError, match="--scheme channel has no zero points"):
        find_scheme("channel", asymmetric=True)

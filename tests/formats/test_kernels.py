"""The kernels, in numpy and compiled, against the torch reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from openquant.formats import compiled, kernels
from openquant.formats.reference import encode, group_absmax, group_scale
from openquant.formats.schemes import BLOCK, BLOCK_UE8M0, SCHEMES, TENSOR, Scheme

KINDS = (*SCHEMES.values(), BLOCK_UE8M0)
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF}
SIGN = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}


def as_torch(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy()).view(TORCH[dtype])


def bits_of(weight: torch.Tensor, dtype: str) -> np.ndarray:
    signed = torch.int32 if dtype == "F32" else torch.int16
    return weight.to(TORCH[dtype]).view(signed).numpy().view(kernels.BITS_TYPE[dtype])


def assert_equal_to_torch(bits: np.ndarray, dtype: str, scheme: Scheme) -> None:
    weight, form, number, name = as_torch(bits, dtype), scheme.format, scheme.format.number, scheme.suffix
    absmax = group_absmax(weight, form.group)
    found = kernels.absmax(bits, dtype, form.group)
    np.testing.assert_array_equal(found, absmax.numpy(), name)
    np.testing.assert_array_equal(compiled.absmax(bits, dtype, form.group), found, name)
    divisor = form.choose_global_scale(found.max(keepdims=True)) if form.global_scale else None
    scale = group_scale(absmax, form)
    np.testing.assert_array_equal(form.scales(found, divisor), scale.numpy(), name)
    codes = np.empty((bits.shape[0], number.nbytes(bits.shape[1])), np.uint8)
    expected = encode(weight, scale, form).view(torch.uint8).numpy()
    for loops in (kernels, compiled):
        codes[:] = 0
        loops.encode_stored(bits, dtype, scale.numpy(), form, codes)
        np.testing.assert_array_equal(codes, expected, name)


@st.composite
def weights(draw: st.DrawFn, dtype: str) -> np.ndarray:
    """[128 or 256, 128 or 384] bits: a few drawn values, signs included, repeated at random over the matrix."""
    kind = kernels.BITS_TYPE[dtype]
    finite = st.integers(0, LARGEST[dtype]) | st.integers(SIGN[dtype], SIGN[dtype] + LARGEST[dtype])
    values = draw(hnp.arrays(kind, st.integers(1, 40), elements=finite))
    shape = draw(st.sampled_from([(128, 128), (256, 128), (128, 384)]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return generator.choice(values, shape)


@pytest.mark.parametrize("dtype", TORCH)
def test_codes_and_scales_equal_torch_for_any_finite_weight(dtype: str) -> None:
    @settings(max_examples=5)
    @given(weights(dtype))
    def check(bits: np.ndarray) -> None:
        for scheme in KINDS:
            assert_equal_to_torch(bits, dtype, scheme)

    check()


def test_codes_and_scales_equal_torch_for_gaussian_weights(subtests: pytest.Subtests) -> None:
    noise = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    noise[:128, :128] = 0
    noise[0, :128] = -0.0
    noise[128:256] *= 1e-3
    # Tables serve usual scales only, so those of the others are on their own.
    for scales in ([1e-6, 1e-4, 0.02, 3.0, 1000.0], [1e-38, 1e-30], [0.02]):
        weight = torch.cat([noise * scale for scale in scales])
        for dtype in TORCH:
            for scheme in KINDS:
                with subtests.test(dtype=dtype, scheme=scheme.suffix, scales=scales):
                    assert_equal_to_torch(bits_of(weight, dtype), dtype, scheme)


def test_every_bfloat16_gets_torch_s_code_whatever_the_largest_weight() -> None:
    everything = np.arange(65536, dtype=np.uint16)
    for exponent in (63, 64, 65, 100, 127, 200, 254):
        for mantissa in range(0, 128, 9):
            top = exponent << 7 | mantissa
            smaller = everything[(everything & 0x7FFF) <= top]
            bits = np.resize(smaller, (-(-smaller.size // 16384) * 128, 128))
            absmax = kernels.to_float32(np.full((bits.shape[0] // 128, 1), top, np.uint16), "BF16")
            scale = BLOCK.format.scales(absmax)
            expected = encode(as_torch(bits, "BF16"), torch.from_numpy(scale), BLOCK.format).view(torch.uint8).numpy()
            codes = np.empty(bits.shape, np.uint8)
            kernels.encode_stored(bits, "BF16", scale, BLOCK.format, codes)
            np.testing.assert_array_equal(codes, expected, f"{exponent} {mantissa}")


def test_values_are_rounded_to_other_dtypes_as_torch_rounds_them() -> None:
    values = torch.randn(1 << 12) * torch.exp(torch.linspace(-90, 88, 1 << 12))
    for dtype in TORCH:
        assert np.array_equal(kernels.from_float32(values.numpy(), dtype), bits_of(values, dtype)), dtype


def test_absmax_shows_infinity_and_nan() -> None:
    for dtype, infinity in (("BF16", 0x7F80), ("F16", 0x7C00), ("F32", 0x7F800000)):
        for bad in (infinity, SIGN[dtype] | infinity, infinity + 1, SIGN[dtype] | infinity | 1):
            bits = np.zeros((128, 256), kernels.BITS_TYPE[dtype])
            bits[5, 200] = bad
            for scheme in KINDS:
                assert not np.isfinite(kernels.absmax(bits, dtype, scheme.format.group)).all(), scheme.suffix


def test_where_chunks_end_changes_nothing(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    noise = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    weight = noise * torch.logspace(-3, 3, 256)[:, None]
    for chunk in (1, 1000):
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        for dtype in TORCH if chunk == 1000 else ("BF16",):
            for scheme in KINDS:
                with subtests.test(chunk=chunk, dtype=dtype, scheme=scheme.suffix):
                    assert_equal_to_torch(bits_of(weight, dtype), dtype, scheme)


def test_a_scale_that_no_bfloat16_made_is_divided_by() -> None:
    """Joined layers of different dtypes share the scale of the largest."""
    bits = np.arange(128 * 128, dtype=np.uint16).reshape(128, 128)
    scale = np.array([[0.1]], np.float32)
    codes = np.empty(bits.shape, np.uint8)
    kernels.encode_stored(bits, "BF16", scale, TENSOR.format, codes)
    expected = encode(as_torch(bits, "BF16"), torch.from_numpy(scale), TENSOR.format).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes, expected)

"""Scales searched for: against a plain loop, and whatever the weights are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openquant.formats import compiled, kernels
from openquant.formats.kernels import choose_scales
from openquant.formats.numbers import E2M1
from openquant.formats.schemes import INT4_W4A16, INTEGER_GROUPS, NVFP4, VARIANTS, Scheme

SEARCHED = (*INTEGER_GROUPS[4], *(groups[0] for bits, groups in INTEGER_GROUPS.items() if bits != 4), NVFP4)


def noise(seed: int, rows: int = 8, cols: int = 256, magnitude: int = 0) -> torch.Tensor:
    made = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made.pow(3) * 2.0**magnitude).float()


def importance(seed: int, cols: int = 256) -> np.ndarray:
    """Of which most is nearly nothing."""
    return np.exp(4 * np.random.default_rng(seed).standard_normal(cols)).astype(np.float32)


def found_in(
    weight: torch.Tensor, scheme: Scheme, divisor: np.ndarray | None = None, counts: np.ndarray | None = None
) -> np.ndarray:
    bits = weight.numpy().view(np.uint32)
    absmax = kernels.absmax(bits, "F32", scheme.format.group)
    found, same = (
        choose_scales(scheme, bits, "F32", absmax, divisor, counts, loops).scale for loops in (kernels, compiled)
    )
    np.testing.assert_array_equal(same, found)
    return found


def errors(weight: torch.Tensor, scale: np.ndarray, scheme: Scheme, counts: np.ndarray | None = None) -> np.ndarray:
    """Squared errors of each group under its scale, in float64, as the search weighs them."""
    form = scheme.format
    grouped = weight.numpy().astype(np.float64).reshape(*scale.shape, -1)
    spread = scale.astype(np.float64)[..., None]
    if form.number == E2M1:
        values = E2M1.values().astype(np.float64)
        codes = values[np.abs((grouped / spread)[..., None] - values).argmin(axis=-1)]
    else:
        half = 2 ** (form.number.bits - 1)
        codes = np.clip(np.rint(grouped / spread), -half, half - 1)
    squares = np.square(codes * spread - grouped)
    if counts is not None:
        squares *= counts.reshape(grouped.shape[1:])
    elif scheme.weighs_by_size:
        squares *= np.abs(grouped)
    return squares.sum(axis=2)


def signs(weight: torch.Tensor, scheme: Scheme) -> np.ndarray:
    """-1 for each group of integers whose largest weight is positive."""
    groups = weight.unflatten(1, (-1, scheme.format.group[1] or weight.shape[1]))
    positive = groups.amax(2) > -groups.amin(2)
    return np.where(positive & (scheme.format.number != E2M1), np.float32(-1), np.float32(1))


@settings(max_examples=3)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-60, 60), fused=st.floats(1, 64), weighed=st.booleans())
def test_no_other_ratio_is_better(seed: int, magnitude: int, fused: float, weighed: bool) -> None:
    counts, weight = importance(seed, 128) if weighed else None, noise(seed, 8, 128, magnitude)
    for scheme in SEARCHED:
        form = scheme.format
        absmax = kernels.absmax(weight.numpy().view(np.uint32), "F32", form.group)
        # As if what it is joined with had a weight so many times as large.
        divisor = form.choose_global_scale(absmax.max(keepdims=True) * np.float32(fused))
        scale, sign = found_in(weight, scheme, divisor, counts), signs(weight, scheme)
        tried = [sign * form.scales(absmax * np.float32(ratio), divisor) for ratio in scheme.clip_ratios]
        assert np.any([scale == each for each in tried], axis=0).all(), scheme.suffix
        least = np.min([errors(weight, each, scheme, counts) for each in tried], axis=0)
        assert (errors(weight, scale, scheme, counts) <= least * (1 + 1e-5)).all(), scheme.suffix


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    weight, counts = noise(3, 16, 512), importance(3, 512)
    for scheme in SEARCHED:
        whole, weighed = found_in(weight, scheme), found_in(weight, scheme, counts=counts)
        assert not np.array_equal(whole, weighed), scheme.suffix
        for piece in (2, 30, 100):
            with subtests.test(scheme=scheme.suffix, piece=piece), monkeypatch.context() as patch:
                patch.setattr(kernels, "CHUNK", piece * 40)
                patch.setattr(kernels, "GROUPS", piece)
                assert np.array_equal(found_in(weight, scheme), whole)
                assert np.array_equal(found_in(weight, scheme, counts=counts), weighed)
        # Where all inputs count alike, scales are those of the weights; also where nothing ever goes in.
        if scheme.weighs_by_size:
            continue
        for count in (0.0, 2.0**-126, 2.0**126):
            with subtests.test(scheme=scheme.suffix, count=count):
                assert np.array_equal(found_in(weight, scheme, counts=np.full(512, count, np.float32)), whole)


def test_other_dtypes_have_the_scales_of_their_values() -> None:
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        weight = noise(4).to(kind)
        scale = choose_scales(INT4_W4A16, weight.view(torch.int16).numpy().view(np.uint16), dtype).scale
        assert np.array_equal(scale, found_in(weight.float(), INT4_W4A16)), dtype


def test_a_group_without_outliers_keeps_its_largest_weight_and_zeros_their_scale() -> None:
    weight = torch.zeros(2, 128)
    weight[1] = torch.arange(128) % 15 - 7.0
    scale = found_in(weight, INT4_W4A16)
    assert scale.tolist() == [[2.0**-7], [pytest.approx(7 / 7.5, rel=2.0**-8)]]


def test_the_largest_weight_has_the_code_below_all_others() -> None:
    """Whichever sign it has; of two as large the negative one, and the scale of zeros is positive."""
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for dtype, width in itertools.product(kinds, (8, 128, 600)):
        weight = torch.randn(300, width, generator=torch.Generator().manual_seed(width)) / 8
        weight[0], weight[1:3] = 0, weight[1:3].abs()
        weight[3:5] = -weight[1:3]
        weight[5, :2] = torch.tensor([3.0, -3.0])
        weight[6, :2] = torch.tensor([-3.0, 3.0])
        weight = weight.to(kinds[dtype])
        bits = weight.view(torch.int32 if dtype == "F32" else torch.int16).numpy()
        bits = bits.view(bits.dtype.str.replace("i", "u"))
        found = kernels.signs(bits)
        np.testing.assert_array_equal(compiled.signs(bits), found)
        assert found[:7].tolist() == [1, -1, -1, 1, 1, 1, 1], (dtype, width)
        positive = weight.amax(1) > -weight.amin(1)
        np.testing.assert_array_equal(found[7:], np.where(positive, -1, 1)[7:])


def test_the_largest_weight_becomes_6_or_4_or_is_clipped() -> None:
    weight = torch.zeros(3, 16)
    weight[0] = torch.tensor([6.0, 4, 3, 2, 1.5, 1, 0.5, 0] * 2)
    weight[1] = torch.tensor([4.0] + [3.0, 2, 1.5, 1, 0.5] * 3)
    weight[2] = torch.tensor([6.5] + [6.0, 4, 3, 2, 1.5] * 3)
    scale = found_in(weight, NVFP4, np.full((1, 1), 256, np.float32))
    assert scale.tolist() == [[1.0], [1.0], [1.0]]
    # The block of the largest weight of all has no room for 4 as its largest code, which were best here.
    for magnitude in (6.0, 2.0**127):
        weight = torch.full((1, 16), magnitude / 4 * 3)
        weight[0, 0] = magnitude
        divisor = np.full((1, 1), 2688 / magnitude, np.float32)
        assert (found_in(weight, NVFP4, divisor) * divisor).item() == 448
        beside_a_larger = np.full((1, 1), 1024 / magnitude, np.float32)
        assert (found_in(weight, NVFP4, beside_a_larger) * beside_a_larger).item() == 256


def test_without_a_search_the_largest_weight_makes_the_scale() -> None:
    unsearched = INT4_W4A16.unsearched
    assert (unsearched.searches_scales, unsearched.format) == (False, INT4_W4A16.format)
    assert unsearched.fallback is not None
    assert not unsearched.fallback.searches_scales
    assert {scheme.name for scheme in VARIANTS if scheme.searches_scales} == {
        *(f"int{bits}" for bits in range(2, 8)),
        *("nvfp4", "nvfp4-w4a4"),
    }

"""Scales searched for: against a plain loop, and whatever the weights are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openquant.formats import kernels, search
from openquant.formats.format import Format
from openquant.formats.schemes import INT4_GROUPS, INT4_W4A16, VARIANTS, Scheme
from openquant.formats.search import searched

RATIOS = INT4_W4A16.ratios


def noise(seed: int, rows: int = 8, cols: int = 256, magnitude: int = 0) -> torch.Tensor:
    made = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made.pow(3) * 2.0**magnitude).float()


def found_in(weight: torch.Tensor, form: Format, ratios: tuple[float, ...] = RATIOS) -> np.ndarray:
    bits = weight.numpy().view(np.uint32)
    return searched(bits, "F32", kernels.absmax(bits, "F32", form.group), form, ratios)


def errors(weight: torch.Tensor, scale: np.ndarray, form: Format) -> np.ndarray:
    """Squared errors of each group under its scale, in float64."""
    grouped = weight.numpy().astype(np.float64).reshape(*scale.shape, -1)
    spread = scale.astype(np.float64)[..., None]
    codes = np.clip(np.rint(grouped / spread), -8, 7)
    return np.square(codes * spread - grouped).sum(axis=2)


@pytest.mark.parametrize("scheme", INT4_GROUPS, ids=lambda scheme: scheme.suffix)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-60, 60))
def test_no_other_ratio_is_better(scheme: Scheme, seed: int, magnitude: int) -> None:
    form, weight = scheme.format, noise(seed, magnitude=magnitude)
    absmax = kernels.absmax(weight.numpy().view(np.uint32), "F32", form.group)
    scale = found_in(weight, form)
    tried = [form.scales(absmax * np.float32(ratio)) for ratio in RATIOS]
    assert np.any([scale == each for each in tried], axis=0).all()
    least = np.min([errors(weight, each, form) for each in tried], axis=0)
    assert (errors(weight, scale, form) <= least * (1 + 1e-5)).all()


@pytest.mark.parametrize("scheme", INT4_GROUPS, ids=lambda scheme: scheme.suffix)
@pytest.mark.parametrize("piece", [1, 300, 4096])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, scheme: Scheme, piece: int) -> None:
    weight = noise(3, 16, 512)
    whole = found_in(weight, scheme.format)
    monkeypatch.setattr(search, "PIECE", piece)
    assert np.array_equal(found_in(weight, scheme.format), whole)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_other_dtypes_have_the_scales_of_their_values(dtype: str) -> None:
    weight = noise(4).to(torch.bfloat16 if dtype == "BF16" else torch.float16)
    bits, form = weight.view(torch.int16).numpy().view(np.uint16), INT4_W4A16.format
    scale = searched(bits, dtype, kernels.absmax(bits, dtype, form.group), form, RATIOS)
    assert np.array_equal(scale, found_in(weight.float(), form))


def test_a_group_without_outliers_keeps_its_largest_weight_and_zeros_their_scale() -> None:
    weight = torch.zeros(2, 128)
    weight[1] = torch.arange(128) % 15 - 7.0
    scale = found_in(weight, INT4_W4A16.format)
    assert scale.tolist() == [[2.0**-7], [pytest.approx(7 / 7.5, rel=2.0**-8)]]


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_stay_what_they_are(rows: int) -> None:
    weight = noise(5, rows, 128)
    before = weight.clone()
    found_in(weight, INT4_W4A16.format)
    assert torch.equal(weight, before)


def test_without_a_search_the_largest_weight_makes_the_scale() -> None:
    unsearched = INT4_W4A16.unsearched
    assert (unsearched.ratios, unsearched.format) == ((), INT4_W4A16.format)
    assert unsearched.fallback is not None
    assert unsearched.fallback.ratios == ()
    assert {scheme.name for scheme in VARIANTS if scheme.ratios} == {"int4"}

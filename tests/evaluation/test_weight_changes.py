"""Weights of an output held against its source's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openquant.evaluation import verdict
from openquant.evaluation.verdict import MOST_MOVED, WeightChange, compare_weights
from openquant.formats.format import Format
from openquant.formats.reference import decode, encode, group_absmax, group_ranges, group_scale
from openquant.formats.schemes import (
    BLOCK,
    CHANNEL,
    INT4_SHIFTED_32,
    INT4_W4A16,
    INT8_W8A8,
    MXFP8,
    NVFP4,
    TENSOR,
    Scheme,
)

SCHEMES = [TENSOR, BLOCK, MXFP8, INT8_W8A8, INT4_W4A16, NVFP4]


def weights(rows: int = 256, cols: int = 384) -> torch.Tensor:
    made = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    return (made * torch.logspace(-2, 0, rows)[:, None]).bfloat16()


def stored(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    scale = group_scale(group_absmax(weight, form.group), form)
    return encode(weight, scale, form), scale


def test_what_rounding_explains_is_no_more_than_that_and_one_scale_too_large_is_off(subtests: pytest.Subtests) -> None:
    weight = weights()
    for scheme in SCHEMES:
        with subtests.test(scheme.name):
            codes, scale = stored(weight, scheme.format)
            made = decode(codes, scale, scheme.format)
            found = compare_weights("up", weight, made.bfloat16(), scheme.format)
            error = float((made - weight.float()).norm() / weight.float().norm())
            assert (found.name, found.quantized, found.bad_groups) == ("up", True, 0)
            assert found.rounding_error == pytest.approx(error, rel=1e-4)
            assert found.error == pytest.approx(error, rel=0.05)
            scale[-1, -1] *= 1.5
            found = compare_weights("up", weight, decode(codes, scale, scheme.format).bfloat16(), scheme.format)
            assert found.bad_groups == 1 / scale.numel()
            assert found.error > found.rounding_error


@pytest.mark.parametrize("scheme", [BLOCK, INT4_W4A16, NVFP4], ids=lambda scheme: scheme.name)
def test_a_scale_is_wrong_where_it_is_twice_or_half_as_large(scheme: Scheme) -> None:
    weight = weights()
    codes, scale = stored(weight, scheme.format)
    sound = decode(codes, scale, scheme.format).bfloat16()
    assert compare_weights("up", weight, sound, scheme.format).wrong_scales == 0
    # Of groups of 16 weights GPTQ turns some round, so it takes more of them.
    few = scheme is NVFP4
    for factor, wrong in ((1.6, 0), (1 / 1.6, 0), (2.2, 1), (0.45, 1), (-1, 1)):
        other = scale.clone()
        other[-1, -1] *= factor
        made = decode(codes, other, scheme.format).bfloat16()
        found = compare_weights("up", weight, made, scheme.format).wrong_scales
        assert found == (0 if few else wrong / scale.numel())
        other[: len(other) // 8] *= factor
        made = decode(codes, other, scheme.format).bfloat16()
        assert (compare_weights("up", weight, made, scheme.format).wrong_scales > MOST_MOVED) == bool(wrong)


def test_rounding_with_zero_points_is_explained() -> None:
    """Weights far from zero, for which codes without zero points have few values."""
    weight = (weights().float() + 3).bfloat16()
    scale, zero = group_ranges(weight, INT4_SHIFTED_32.format)
    made = decode(encode(weight, scale, INT4_SHIFTED_32.format, zero), scale, INT4_SHIFTED_32.format, zero)
    error = float((made - weight.float()).norm() / weight.float().norm())
    found = compare_weights("up", weight, made, INT4_SHIFTED_32.format)
    assert (found.error, found.rounding_error) == (pytest.approx(error, rel=1e-4), pytest.approx(error, rel=1e-4))
    assert (found.bad_groups, found.wrong_scales) == (0, 0)
    even = replace(INT4_SHIFTED_32.format, zero_point=None)
    assert compare_weights("up", weight, made, even).rounding_error > 1.5 * error


def test_groups_at_the_edge_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(200, 200)
    whole = compare_weights("up", weight, weight * 1.02, BLOCK.format)
    # Blocks of 256 fill 200 rows up with zeros.
    assert whole.error == pytest.approx(0.02, rel=0.05)
    monkeypatch.setattr(verdict, "CHUNK", 1000)
    pieces = compare_weights("up", weight, weight * 1.02, BLOCK.format)
    assert pieces.error == pytest.approx(whole.error, rel=1e-6)
    assert pieces.rounding_error == pytest.approx(whole.rounding_error, rel=1e-6)


def test_what_is_not_quantized_must_be_the_same() -> None:
    weight = weights()
    assert compare_weights("norm", weight, weight.clone(), None) == WeightChange("norm", False, 0, 0, 0)
    found = compare_weights("norm", weight, weight * 1.5, None)
    assert (found.error, found.bad_groups) == (pytest.approx(0.5, rel=0.01), 1)
    wide = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert compare_weights("norm", wide, wide.bfloat16().float(), None).bad_groups == 0
    assert compare_weights("norm", weight * 0, weight, None).error == 1
    weight[3, 4] = torch.nan
    assert compare_weights("norm", weight, weight.clone(), None) == WeightChange("norm", False, 0, 0, 0)
    assert compare_weights("norm", weight, weights(), None).error == 1


def test_nothing_left_of_a_weight_is_all_of_it() -> None:
    weight = weights()
    found = compare_weights("expert", weight, weight * 0, CHANNEL.format)
    assert (found.error, found.bad_groups) == (1, 1)
    assert compare_weights("expert", weight, weight * torch.nan, CHANNEL.format).error == 1
    # One NaN where no text comes by, such as in a row of an embedding table.
    damaged = weight.clone()
    damaged[0, 0] = torch.nan
    change = compare_weights("table", weight, damaged, None)
    assert (change.error, change.bad_groups) == (1, 1)

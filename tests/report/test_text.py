"""What is said of a plan in a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openquant.plan.serving import CachedLayers, Fit, SequenceMemory, Serving
from openquant.report.cells import short
from openquant.report.text import serving_line

FITS = (Fit(24, None, None, None), *(Fit(size, 2, 16384, 1_250_000) for size in (48, 80, 96, 141, 192)))
MORE = ". By card: openquant fit MODEL --gpu 4090"


def test_the_fewest_and_smallest_gpus_are_named() -> None:
    cache = SequenceMemory((CachedLayers(2048, 1024, None, 8), CachedLayers(2048, 1024, 512, 8)), 1000, None)
    two = Serving(10**9, cache, None, FITS)
    # 16,384 tokens in one sequence have one full window of 512, those of 8,192 have one each.
    assert serving_line(two, two) == f"serving:  2 GPUs of 48 GB: 16k tokens, 1 sequence of 8,192 at once{MORE}"
    assert serving_line(two, two, True).startswith("serving:  2 GPUs of 48 GB: 1.2M tokens, ")
    one = replace(two, fits=(Fit(24, 1, 9000, 18000), *FITS[1:]))
    source = "; the source needs 2 GPUs of 48 GB"
    assert serving_line(two, one) == f"serving:  one 24 GB GPU: 9k tokens, 1 sequence of 8,192 at once{source}{MORE}"


def test_what_is_not_known_is_said() -> None:
    unknown = Serving(10**9, None, "the size of a state", tuple(Fit(fit.gpu_gb, fit.gpus, None, None) for fit in FITS))
    told = "how many tokens they hold is not known: the size of a state"
    assert serving_line(unknown, unknown) == f"serving:  2 GPUs of 48 GB; {told}{MORE}"
    none = replace(unknown, fits=FITS[:1])
    assert serving_line(unknown, none) == "serving:  8 GPUs of 192 GB are too few, or do not divide it"


def test_counts_are_never_said_to_be_more(subtests: pytest.Subtests) -> None:
    for count, text in [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (1999, "1.9k"),
        (16_999, "16k"),
        (1_299_999, "1.2M"),
        (10**8, "100M"),
    ]:
        with subtests.test(count=count, text=text):
            assert short(count) == text


def test_one_gpu_is_fewer_than_two_smaller_ones() -> None:
    fits = (Fit(24, 2, None, None), Fit(48, 1, None, None), Fit(80, 1, None, None))
    assert Serving(10**9, None, "", fits).fewest == fits[1]

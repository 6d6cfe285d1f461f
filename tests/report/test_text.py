"""What is said of a plan in a terminal."""

from __future__ import annotations

import pytest

from openquant.plan.serving import CachedLayers, Fit, SequenceMemory, Serving
from openquant.report.cells import short
from openquant.report.text import serving_lines

MORE = "  by a card's exact memory: openquant fit MODEL --gpu 4090"
FITS = (Fit(24, None, None, None), *(Fit(size, 2, 16384, 1_250_000) for size in (48, 80, 96, 141, 192)))


def test_gpus_and_tokens_as_a_table() -> None:
    cache = SequenceMemory((CachedLayers(2048, 1024, None, 8), CachedLayers(2048, 1024, 512, 8)), 1000, None)
    known = Serving(10**9, cache, None, FITS)
    assert serving_lines(known, known) == [
        "serving:  KV cache 2.05 kB a token and 1.05 MB a sequence; GPUs that are needed: tokens of all sequences together, cached in bfloat16, in FP8",
        "          24 GB         48 GB         80 GB         96 GB        141 GB        192 GB",
        "  source      -  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M",
        "  output      -  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M  2: 16k, 1.2M",
        MORE,
    ]


def test_what_is_not_known_is_said() -> None:
    unknown = Serving(10**9, None, "the size of a state", tuple(Fit(fit.gpu_gb, fit.gpus, None, None) for fit in FITS))
    assert serving_lines(unknown, unknown) == [
        "serving:  the fewest GPUs; how many tokens they hold is not known: the size of a state",
        "          24 GB  48 GB  80 GB  96 GB  141 GB  192 GB",
        "  source      -      2      2      2       2       2",
        "  output      -      2      2      2       2       2",
        MORE,
    ]


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

"""Integers of 2, 3, 5, 6 and 7 bits served by vLLM on text: how far they are from what their codes and scales stand for.

vLLM has a kernel for them on NVIDIA GPUs alone (Humming). Here the plugin of shim/ multiplies by what they stand for: vLLM's
own classes make the parameters, and fill and slice them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from engine_client import Answers, compressed_examples, find_engine

pytestmark = pytest.mark.serve

CASES: dict[str, Mapping[str, Any]] = {
    **{f"int{bits}": {"scheme": f"int{bits}"} for bits in (2, 3, 5, 6, 7)},
    **{
        f"int{bits}-asymmetric": {"scheme": f"int{bits}", "asymmetric": True, "group_size": 32}
        for bits in (2, 3, 5, 6, 7)
    },
    "int5-channel": {"scheme": "int5", "group_size": "channel"},
    "int6-with-head": {"scheme": "int6", "quantize_lm_head": True},
    "int6-with-int4-embedding": {
        "scheme": "int6",
        "quantize_embeddings": True,
        "scheme_for": {"**.embed_tokens": "int4"},
        "group_size": 64,
    },
    "int2-with-embedding": {"scheme": "int2", "quantize_embeddings": True},
    "int3-gptq": {"scheme": "int3", "gptq": True, "samples": 16, "length": 256},
    "int6-beside-int3": {"scheme": "int6", "scheme_for": {"**.mlp.*": "int3"}},
}
OWN = 0.0002


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the source, each case, and `<it>-plain`."""
    engine, root = find_engine(), tmp_path_factory.mktemp("widths")
    return engine.logprobs(compressed_examples(root, CASES), root / "answers", "text")


@pytest.mark.parametrize("name", CASES)
def test_computes_what_codes_and_scales_stand_for(name: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-plain", name) <= OWN


def test_each_bit_takes_most_of_the_loss(logprobs: Answers) -> None:
    lost = [logprobs.between("source", f"int{bits}") for bits in (2, 3, 5, 6, 7)]
    assert lost == sorted(lost, reverse=True)
    assert logprobs.between("source", "int3-gptq") < 0.7 * lost[1]

"""Integers of 2, 3, 5, 6 and 7 bits served by vLLM on text: how far they are from what their codes and scales stand for,
alone and in checkpoints of four schemes.

vLLM has a kernel for them on NVIDIA GPUs alone (Humming). Here the plugin of shim/ multiplies by what they stand for: vLLM's
own classes make the parameters, and fill and slice them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
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
# Each has four schemes, and the bound on its divergence from the dequantized weights: of weights alone, and of layers
# with FP8 and INT8 activations, which round. Found: 0.00007, 0.0006. test_serve_four_bits.py has one with experts.
MIXTURES: dict[str, tuple[Mapping[str, Any], float]] = {
    # What --fit chooses, with the output head among what it chooses for.
    "fit": ({"fit": "4.7bits", "engines": "vllm", "quantize_lm_head": True, "gptq": True, "samples": 16}, OWN),
    "int4-int6-nvfp4-int8-weights": (
        {
            "scheme": "int4",
            "scheme_for": {"**.{q,k,v}_proj": "int6", "**.o_proj": "nvfp4", "**.down_proj": "int8-weights"},
        },
        OWN,
    ),
    "channel-int8-int5-mxfp4": (
        {
            "scheme": "channel",
            "scheme_for": {"**.o_proj": "int8", "**.{gate,up}_proj": "int5", "**.layers.0.mlp.down_proj": "mxfp4"},
        },
        0.002,
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source, each case, and `<it>-plain`."""
    asked = {**CASES, **{name: options for name, (options, _) in MIXTURES.items()}}
    return compressed_examples(tmp_path_factory.mktemp("widths"), asked)


@pytest.fixture(scope="module")
def logprobs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return find_engine().logprobs(models, tmp_path_factory.mktemp("widths-answers") / "answers", "text")


@pytest.mark.parametrize("name", CASES)
def test_computes_what_codes_and_scales_stand_for(name: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-plain", name) <= OWN


@pytest.mark.parametrize("name", MIXTURES)
def test_four_schemes_in_one_checkpoint_compute_what_codes_and_scales_stand_for(name: str, logprobs: Answers) -> None:
    assert logprobs.between(f"{name}-plain", name) <= MIXTURES[name][1]


def test_the_chosen_mixture_has_three_schemes_or_more(models: dict[str, Path]) -> None:
    groups = json.loads((models["fit"] / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) >= 3


def test_each_bit_takes_most_of_the_loss(logprobs: Answers) -> None:
    lost = [logprobs.between("source", f"int{bits}") for bits in (2, 3, 5, 6, 7)]
    assert lost == sorted(lost, reverse=True)
    assert logprobs.between("source", "int3-gptq") < 0.7 * lost[1]

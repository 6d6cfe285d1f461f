"""Integers, FP4 and mixtures served by vLLM on text: how far they are from the source, and from what their codes and scales stand for.

text_prompts.json holds 16 x 160 tokens of Python files outside of the standard library, which the example was trained
on. vLLM's CPU build rounds activations to INT8 as its GPU kernels do, and has a kernel for INT4 where the CPU has
AVX-512; elsewhere the plugin of shim/ multiplies by what codes and scales stand for: vLLM's own classes make the
parameters, and fill and slice them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import Answers, compressed_examples, find_engine, rewrite

import openquant
from conftest import EXAMPLE
from openquant import calibrate
from openquant.data.corpus import Corpus, Document
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from support import mixture_of_experts, small_checkpoints
from support.outlier_channels import twin

pytestmark = pytest.mark.serve

Weights = dict[str, torch.Tensor]
ATTENTION, MLP = "**.self_attn.*", "**.mlp.*"
WIDTHS = (2, 3, 5, 6, 7)
GPTQ = {"gptq": True, "samples": 16, "length": 256}
OWN = 0.0002

# By name: what is made of the example, and bounds on the divergence to it and to the dequantized weights, in nats; None
# where it is not asked. The first is a tenth more than was found; the second is of activations that are rounded.
CASES: dict[str, tuple[Mapping[str, Any], float | None, float | None]] = {
    "int8": ({"scheme": "int8"}, 0.0008, 0.0008),
    "int8-weights": ({"scheme": "int8-weights"}, 0.00025, 0.00001),
    "int8-with-head": ({"scheme": "int8", "quantize_lm_head": True}, 0.0016, 0.0016),
    "int8-weights-with-embedding": ({"scheme": "int8-weights", "quantize_embeddings": True}, 0.0005, 0.00001),
    # FP8 alone, with one scale per row: 0.0033.
    "int8-beside-fp8": ({"scheme": "int8", "scheme_for": {ATTENTION: "channel"}}, 0.003, 0.003),
    "down-in-words": ({"scheme": "channel", "scheme_for": {"**.down_proj": "int8-weights"}}, 0.004, 0.004),
    "int4": ({"scheme": "int4"}, 0.0092, OWN),
    "int4-channel": ({"scheme": "int4", "group_size": "channel"}, 0.0117, OWN),
    "int4-asymmetric": ({"scheme": "int4", "asymmetric": True}, 0.0091, OWN),
    "int4-awq": ({"scheme": "int4", "awq": True, "samples": 16, "length": 256}, 0.0091, None),
    "int4-gptq": ({"scheme": "int4", **GPTQ}, 0.0043, None),
    "int4-awq-gptq": ({"scheme": "int4", "awq": True, **GPTQ}, 0.0043, OWN),
    "int4-falls-back": ({"scheme": "int4", "tp": 4}, 0.0089, OWN),
    "int4-beside-fp8": ({"scheme": "int4", "scheme_for": {ATTENTION: "channel"}}, 0.0069, 0.001),
    **{f"int{bits}": ({"scheme": f"int{bits}"}, None, OWN) for bits in WIDTHS},
    **{
        f"int{bits}-asymmetric": ({"scheme": f"int{bits}", "asymmetric": True, "group_size": 32}, None, OWN)
        for bits in WIDTHS
    },
    "int5-channel": ({"scheme": "int5", "group_size": "channel"}, None, OWN),
    "int6-with-head": ({"scheme": "int6", "quantize_lm_head": True}, None, OWN),
    "int6-with-int4-embedding": (
        {"scheme": "int6", "quantize_embeddings": True, "scheme_for": {"**.embed_tokens": "int4"}, "group_size": 64},
        None,
        OWN,
    ),
    "int2-with-embedding": ({"scheme": "int2", "quantize_embeddings": True}, None, OWN),
    "int3-gptq": ({"scheme": "int3", **GPTQ}, None, OWN),
    "int6-beside-int3": ({"scheme": "int6", "scheme_for": {MLP: "int3"}}, None, OWN),
    # An FP8 cache of keys and values: without it channel is 0.0019.
    "channel": ({"scheme": "channel"}, 0.0021, None),
    "cached": ({"scheme": "channel", "kv_cache": "fp8"}, 0.0033, None),
    "cached-calibrated": ({"scheme": "channel", "kv_cache": "fp8"}, 0.0033, None),
    "cached-alone": ({"scheme": "none", "kv_cache": "fp8"}, 0.0015, None),
    "nvfp4": ({"scheme": "nvfp4"}, 0.0066, OWN),
    "nvfp4-with-head": ({"scheme": "nvfp4", "quantize_lm_head": True}, 0.0119, OWN),
    "nvfp4-beside-mxfp4": ({"scheme": "nvfp4", "scheme_for": {MLP: "mxfp4"}}, 0.010, OWN),
    "w4a4": ({"scheme": "nvfp4-w4a4"}, 0.024, 0.0176),
    "w4a4-calibrated": ({"scheme": "nvfp4-w4a4"}, 0.024, 0.0176),
    "w4a4-beside-fp8": ({"scheme": "nvfp4-w4a4", "scheme_for": {ATTENTION: "channel"}}, 0.0132, 0.009),
    "mxfp4": ({"scheme": "mxfp4"}, 0.0128, OWN),
    "mxfp4-with-head": ({"scheme": "mxfp4", "quantize_lm_head": True}, 0.022, OWN),
    # Four schemes. The first is what --fit chooses, with the output head among what it chooses for.
    "fit": ({"fit": "4.7bits", "engines": "vllm", "quantize_lm_head": True, "gptq": True, "samples": 16}, None, OWN),
    "int4-int6-nvfp4-int8-weights": (
        {
            "scheme": "int4",
            "scheme_for": {"**.{q,k,v}_proj": "int6", "**.o_proj": "nvfp4", "**.down_proj": "int8-weights"},
        },
        None,
        OWN,
    ),
    "channel-int8-int5-mxfp4": (
        {
            "scheme": "channel",
            "scheme_for": {"**.o_proj": "int8", "**.{gate,up}_proj": "int5", "**.layers.0.mlp.down_proj": "mxfp4"},
        },
        None,
        0.002,
    ),
}


def rolled(last: str, layer: int) -> Callable[[Weights], Weights]:
    """The scales of one layer's rows one group on, or the zero points of its words of rows."""
    name = f"model.layers.{layer}.mlp.down_proj.{last}"

    def change(tensors: Weights) -> Weights:
        held = tensors[name]
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[held.element_size()]
        return tensors | {name: held.view(width).roll(1, 1).view(held.dtype)}

    return change


def bytes_reversed(tensors: Weights) -> Weights:
    """The two codes of each byte in each other's place."""
    return {name: each >> 4 | each << 4 if name.endswith("_packed") else each for name, each in tensors.items()}


def larger(last: str | tuple[str, ...], factor: float) -> Callable[[Weights], Weights]:
    """All tensors of a name times a factor."""
    return lambda tensors: {name: each * factor if name.endswith(last) else each for name, each in tensors.items()}


# What is made of the output of a case, and the least divergence to its dequantized weights.
CONTROLS: dict[str, tuple[str, Callable[[Weights], Weights], float]] = {
    "int8-larger": ("int8", larger("weight_scale", 1.25), 0.01),
    "int4-scale-moved": ("int4", rolled("weight_scale", 1), 2 * OWN),
    "int4-zero-points-moved": ("int4-asymmetric", rolled("weight_zero_point", 1), 2 * OWN),
    "nvfp4-swapped": ("nvfp4", bytes_reversed, 0.1),
    "nvfp4-moved": ("nvfp4", rolled("weight_scale", 0), 0.01),
    # Activations are clipped.
    "w4a4-far-off": ("w4a4", larger("input_global_scale", 1024), 0.1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source, each case, `<it>-plain` and each control; models with experts and with outliers, and what is made of them."""
    find_engine()
    root = tmp_path_factory.mktemp("text")
    asked = {name: {**options} for name, (options, _, _) in CASES.items()}
    calibration = calibrate(EXAMPLE, root / "calibration", samples=16)
    for name in ("w4a4-calibrated", "cached-calibrated"):
        asked[name]["calibration"] = calibration
    models = compressed_examples(root, asked, {name for name, (_, _, own) in CASES.items() if own is not None})
    for control, (case, change, _) in CONTROLS.items():
        models[control] = rewrite(models[case], root / control, change(small_checkpoints.read(models[case])))
    cached = small_checkpoints.read(models["cached-calibrated"])
    models["cache-off"] = rewrite(
        models["cached-calibrated"], root / "cache-off", larger(("k_scale", "v_scale"), 2.0**16)(cached)
    )

    models |= {"experts": mixture_of_experts.make(root / "experts"), "twin": twin(EXAMPLE, root / "twin")}
    for name, source, options in (
        ("experts-int4", "experts", CASES["int4"][0]),
        ("experts-gptq", "experts", CASES["int4-gptq"][0]),
        ("twin-int8", "twin", {"scheme": "int8"}),
        ("twin-smooth", "twin", {"scheme": "int8", "smooth": 0.5, "samples": 16}),
    ):
        models[name] = root / name
        openquant.compress(models[source], models[name], **options)
    return models


@pytest.fixture(scope="module")
def logprobs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return find_engine().logprobs(models, tmp_path_factory.mktemp("answers") / "text", "text")


def test_each_case_is_as_near_as_it_may_be(logprobs: Answers, subtests: pytest.Subtests) -> None:
    for name, (_, to_source, own) in CASES.items():
        with subtests.test(name):
            assert to_source is None or logprobs.between("source", name) <= to_source
            assert own is None or logprobs.between(f"{name}-plain", name) <= own


def test_control_what_is_off_or_lies_elsewhere_shows(logprobs: Answers, subtests: pytest.Subtests) -> None:
    for control, (case, _, least) in CONTROLS.items():
        with subtests.test(control):
            assert logprobs.between(f"{case}-plain", control) > least


def test_an_fp8_cache_is_rounded_by_its_scales(logprobs: Answers) -> None:
    for before, after in (("channel", "cached"), ("channel", "cached-calibrated"), ("source", "cached-alone")):
        cost = logprobs.between("source", after) - logprobs.between("source", before)
        # Keys and values are rounded at all.
        assert 0.0007 < cost < 0.0015, after
    assert logprobs.between("channel", "cache-off") > 0.5


def test_experts_are_rounded_by_what_comes_to_each(logprobs: Answers) -> None:
    # Found: 0.0001; 0.0042 and 0.0089.
    assert logprobs.between("source", "experts") <= 0.0005
    assert logprobs.between("experts", "experts-gptq") <= 0.6 * logprobs.between("experts", "experts-int4")


def test_outliers_are_folded_into_weights(logprobs: Answers) -> None:
    # The twin is the example but for the size of what goes into its layers.
    assert logprobs.between("source", "twin") < 0.0005
    assert logprobs.between("twin", "twin-int8") > 0.01
    assert logprobs.between("twin", "twin-smooth") <= 0.0008


def test_each_bit_takes_most_of_the_loss(logprobs: Answers) -> None:
    lost = [logprobs.between("source", f"int{bits}") for bits in WIDTHS]
    assert lost == sorted(lost, reverse=True)
    assert logprobs.between("source", "int3-gptq") < 0.7 * lost[1]


def test_the_chosen_mixture_has_three_schemes_or_more(models: dict[str, Path]) -> None:
    groups = json.loads((models["fit"] / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) >= 3


def test_openquant_eval_says_the_same(models: dict[str, Path], logprobs: Answers) -> None:
    ids = json.loads((Path(__file__).parent / "text_prompts.json").read_text())
    texts = Corpus(tuple(Document("code", str(at), tuple(each)) for at, each in enumerate(ids)), "", {})
    for source, *names in (("twin", "twin-int8", "twin-smooth"), ("source", "cached", "cached-alone")):
        of, *outputs = (ModelUnderTest(each, open_checkpoint(models[each])) for each in (source, *names))
        evaluated = compare_outputs(of, outputs, texts, EvaluationSettings()).outputs
        for name, found in zip(names, evaluated, strict=True):
            assert found["kl"]["mean"] == pytest.approx(logprobs.between(source, name), rel=0.1)

"""Weights as they are, with the scales of keys and values that an FP8 cache needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from openquant import compress, dequantize, verify
from openquant.errors import PlanError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_unchanged_plan
from openquant.report.text import plan_text
from support import small_checkpoints
from support.rows import for_each


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The last has stacks of experts, which every other scheme splits.
@for_each("name", ["Gemma3ForConditionalGeneration", "Llama4ForCausalLM"])
def test_all_tensors_are_the_source_s_and_scales_beside_them(tmp_path: Path, name: str) -> None:
    source, out = small_checkpoints.write(tmp_path / "source", name), tmp_path / "out"
    result = compress(source, out, "none", kv_cache="fp8")
    held = small_checkpoints.read(out)
    scales = {key: held.pop(key) for key in list(held) if key.endswith(("k_scale", "v_scale"))}
    assert same(held, small_checkpoints.read(source))
    assert len(scales) == 4 and all(torch.equal(each, torch.ones(1)) for each in scales.values())
    assert (result.scheme, result.schemes, result.kv_cache, result.quantized_tensors) == ("none", {}, "fp8", 0)
    assert result.tensor_parallel and result.serving is not None
    report = verify(out, source, full=True)
    assert (report.problems, report.notes) == ((), ())
    assert report.format == "compressed-tensors, weights as they are"
    dequantize(out, tmp_path / "plain")
    assert same(small_checkpoints.read(tmp_path / "plain"), small_checkpoints.read(source))
    before, after = (json.loads((root / "config.json").read_text()) for root in (source, tmp_path / "plain"))
    assert before == after


def test_what_config_card_and_plan_say(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    plan = make_unchanged_plan(open_checkpoint(source), PlanOptions(fp8_kv_cache=True))
    assert summary.suffix(plan) == "-KV8" and summary.scheme_name(plan) == "none"
    text = plan_text(plan, "source", tmp_path / "out", (0, 0))
    assert "Qwen3ForCausalLM, weights as they are\n" in text and "all weights as they are\n" in text
    compress(source, tmp_path / "out", "none", kv_cache="fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": cache,
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nsource with its weights as they are and scales for an FP8 KV cache. " in card
    assert "| KV cache | FP8, one scale for keys" in card
    assert "with compressed-tensors installed" in card and "Not quantized" not in card


def test_quantized_weights_and_sizes_that_heads_do_not_divide_by_are_refused(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    compress(source, tmp_path / "fp8")
    with pytest.raises(PlanError, match="14 weights of .* are quantized, and --scheme none writes unquantized ones"):
        compress(tmp_path / "fp8", tmp_path / "out", "none", kv_cache="fp8")
    with pytest.raises(PlanError, match="--tp 3 cannot serve this model"):
        compress(source, None, "none", kv_cache="fp8", tp=3)
    with pytest.raises(UsageError, match="--tp 0 is no number of ranks"):
        make_unchanged_plan(open_checkpoint(source), PlanOptions(tp=0, fp8_kv_cache=True))


def test_what_says_how_weights_are_stored_is_refused() -> None:
    given: list[tuple[dict[str, Any], str]] = [
        ({"group_size": "32"}, "--group-size"),
        ({"ignore": ["**.up_proj"]}, "--ignore"),
        ({"scheme_for": {"**.up_proj": "channel"}}, "--scheme-for"),
        ({"activation_scheme": "static"}, "--activation-scheme"),
        ({"quantize_lm_head": True}, "--quantize-lm-head"),
        ({"format": "fp8"}, "--format"),
    ]
    for options, named in given:
        with pytest.raises(UsageError, match=f"--scheme none leaves weights as they are, and {named} is given"):
            compress("anything", None, "none", kv_cache="fp8", **options)
    with pytest.raises(UsageError) as caught:
        compress("anything", None, "none")
    assert caught.value.message == "--scheme none leaves weights as they are, and nothing else is asked for"
    assert caught.value.hint == "give --kv-cache fp8 too, for KV-cache scales, or choose another scheme"

"""Scales of an FP8 cache in a plan: in which layers, with which values, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openquant import compress, dequantize
from openquant.errors import PlanError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import CHANNEL, VARIANTS, Scheme
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.architecture import text_config
from openquant.plan.decisions import PlanOptions
from openquant.plan.engines import sglang_refusal
from openquant.plan.plan import Plan, has_fp8_cache, make_plan, output_config
from openquant.plan.serving import find_cached_attentions
from openquant.registry.architecture import ModuleRules
from openquant.registry.parts import IGNORED_CACHE_SCALES
from openquant.version import SGLANG
from openquant.weights.statistics import Calibration
from support import small_checkpoints
from support.conversions import Shelf
from support.published_checkpoints import published

FP8 = PlanOptions(fp8_kv_cache=True)


def planned(root: Path, scheme: Scheme = CHANNEL, options: PlanOptions = FP8) -> Plan:
    return make_plan(open_checkpoint(root), scheme, options)


def seen(*both: tuple[float, float]) -> Calibration:
    """A calibration that has found these ranges, layer by layer."""
    return Calibration((), "model", {"documents": 2, "length": 8}, dict(enumerate(both)))


def scales_of(root: Path) -> dict[str, float]:
    found = {
        name: each for name, each in small_checkpoints.read(root).items() if name.endswith((".k_scale", ".v_scale"))
    }
    assert all(each.dtype == torch.float32 and each.shape == (1,) for each in found.values())
    return {name: float(each) for name, each in found.items()}


def layers_of(name: str, **config: Any) -> dict[int, str]:
    checkpoint = published(name)
    checkpoint.config.update(config)
    entry = ModuleRules(MODELS[checkpoint.architecture])
    return find_cached_attentions(
        (info.module for info in checkpoint.tensors.values()), entry, text_config(checkpoint, entry.model)
    )


ALL = [f"model.layers.{layer}.self_attn.{last}" for layer in range(2) for last in ("k_scale", "v_scale")]


def test_every_scheme_has_scales_of_one_in_all_layers(source: Path, subtests: pytest.Subtests) -> None:
    told = "vLLM does not take an FP8 KV cache from a config in this format: serve with --kv-cache-dtype fp8; fp8_e5m2 is refused"
    for scheme in VARIANTS:
        with subtests.test(scheme=scheme.suffix):
            plan = planned(source, scheme)
            outputs = [info for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)]
            assert sorted(info.name for info in outputs if info.name.endswith(("k_scale", "v_scale"))) == ALL
            assert has_fp8_cache(plan) and summary.cache_layers(plan) == 2
            assert summary.suffix(plan) == f"{scheme.suffix}-KV8"
            key = "kv_cache_quant_algo" if scheme.method == "fp8" else "kv_cache_scheme"
            assert key in output_config(plan)["quantization_config"]
            assert (told in plan.notes) is (scheme.method == "fp8")
            assert any(note.startswith("scales of the KV cache are 1 in all of 2 layers") for note in plan.notes)
            assert all(line.bytes_before == 0 for line in plan.lines if line.names[0] in ALL)
    with pytest.raises(UsageError, match="^--kv-cache: int8 is none of fp8, auto"):
        compress(source, kv_cache="int8")


def test_layers_with_a_cache_are_known_by_their_projections(tmp_path: Path) -> None:
    for name, layers in (
        ("Qwen3ForCausalLM", range(28)),
        ("Phi3ForCausalLM", range(40)),
        # One layer in four attends.
        ("Qwen3NextForCausalLM", range(3, 48, 4)),
    ):
        assert list(layers_of(name).values()) == [f"model.layers.{layer}.self_attn" for layer in layers]
    found = layers_of("NemotronHForCausalLM")
    assert found and list(found.values()) == [f"backbone.layers.{layer}.mixer" for layer in found]
    # Those that read the cache of others have no scales.
    assert len(layers_of("Gemma4ForCausalLM")) == 35
    assert list(layers_of("Gemma4ForCausalLM", num_kv_shared_layers=20)) == list(range(15))

    for name in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"):
        with pytest.raises(PlanError, match=r"\(MLA\)"):
            layers_of(name)
    for name in ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"):
        with pytest.raises(PlanError, match="no engine loads scales of the KV cache"):
            planned(small_checkpoints.write(tmp_path / name, name))


# As its loader does (run on a small model of each architecture).
FAILS = (
    *("MiMo", "Gemma", "Olmo", "Olmo2", "Olmo3", "Granite", "SmolLM3", "SeedOss", "Cwm", "Ernie4_5", "StableLm"),
    *("Olmoe", "Ernie4_5_Moe", "GraniteMoeHybrid"),
)


def test_where_sglang_fails_on_the_scales_the_plan_says_so(shelf: Shelf) -> None:
    assert all(MODELS[f"{name}ForCausalLM"].sglang.cache for name in FAILS)
    plan = planned(shelf.source("Olmo2ForCausalLM"))
    unread = sglang_refusal(plan.entry, plan.decisions)
    assert unread and unread.why == MODELS["Olmo2ForCausalLM"].sglang.cache
    plan = planned(shelf.source("Qwen3ForCausalLM"))
    assert sglang_refusal(plan.entry, plan.decisions) is None


def test_where_sglang_takes_one_in_their_place_the_plan_says_so(shelf: Shelf) -> None:
    note = f"{SGLANG} silently uses 1 in place of these scales of the KV cache"
    two = PlanOptions(fp8_kv_cache=True, calibration=seen((900.0, 1.0), (900.0, 1.0)))
    # The first has no such scales in its attention, the second leaves them as they were made.
    for name in ("Qwen3ForCausalLM", "Qwen2ForCausalLM"):
        assert note in planned(shelf.source(name), options=two).notes
        assert note not in planned(shelf.source(name)).notes
    assert note not in planned(shelf.source("LlamaForCausalLM"), options=two).notes
    assert {name for name, entry in MODELS.items() if entry.sglang.ignores_cache_scales} == set(IGNORED_CACHE_SCALES)


def test_calibrated_scales_are_powers_of_two(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    plan = planned(source, options=PlanOptions(fp8_kv_cache=True, calibration=seen((21.5, 3.25), (900.0, 0.5))))
    made = {kept.tensor.name: kept.value for kept in plan.decisions.passthrough if kept.value is not None}
    assert list(made.values()) == [2.0**-4, 2.0**-7, 4.0, 2.0**-9]
    assert any(note.startswith("scales of the KV cache are powers of two, from a cal") for note in plan.notes)
    usual = planned(source, options=PlanOptions(fp8_kv_cache=True, calibration=seen((21.5, 3.25), (448.0, 1.0))))
    assert len({plan.digest, usual.digest, planned(source).digest, planned(source, options=PlanOptions()).digest}) == 4


def with_scales(root: Path, **scales: torch.Tensor) -> Path:
    """A directory made by this program that has scales of keys and values, as another tool calls them."""
    compress(small_checkpoints.write(root / "source"), root / "quantized", "channel")

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, scale in scales.items():
            weights[f"model.layers.{name.replace('__', '.')}"] = scale

    small_checkpoints.change_weights(root / "quantized", change)
    return root / "quantized"


def test_scales_of_a_source_are_kept_under_names_that_engines_load(tmp_path: Path) -> None:
    source = with_scales(
        tmp_path,
        **{
            "0__self_attn__k_proj__output_scale": torch.tensor(0.25, dtype=torch.bfloat16),
            "0__self_attn__v_proj__output_scale": torch.tensor([0.5]),
            "1__self_attn__kv_scale": torch.tensor(3.0),
        },
    )
    compress(source, tmp_path / "out", "channel", kv_cache="fp8")
    assert scales_of(tmp_path / "out") == dict(zip(ALL, [0.25, 0.5, 3.0, 3.0], strict=True))
    assert not any("output_scale" in name or "kv_scale" in name for name in small_checkpoints.read(tmp_path / "out"))
    assert "4 of 4 scales of the KV cache are the source's, all others 1" in planned(source).notes
    dequantize(tmp_path / "out", tmp_path / "plain")
    assert scales_of(tmp_path / "plain") == {}


def test_scales_of_a_source_by_head_are_refused(tmp_path: Path) -> None:
    source = with_scales(tmp_path, **{"0__self_attn__k_scale": torch.ones(2)})
    with pytest.raises(PlanError, match=r"k_scale is F32 \[2\], not a single scale"):
        planned(source)


def test_a_calibration_without_ranges_of_a_layer_is_refused(tmp_path: Path) -> None:
    options = PlanOptions(fp8_kv_cache=True, calibration=seen((1.0, 1.0)))
    with pytest.raises(PlanError, match="did not observe keys and values of layer 1"):
        planned(small_checkpoints.write(tmp_path / "source"), options=options)

"""The registry against the tensor names of published checkpoints (names/*.txt)."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from openquant.errors import PlanError
from openquant.files.checkpoint import Checkpoint
from openquant.formats.schemes import BLOCK, BLOCK_COMPRESSED, BLOCK_UE8M0, CHANNEL, TENSOR, TENSOR_COMPRESSED, VARIANTS
from openquant.models import MODELS
from openquant.patterns import translate
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.engines import find_refusal
from openquant.plan.plan import Plan, ignored_layers, make_plain_plan, make_plan, output_config
from openquant.registry.architecture import ModuleRules
from openquant.verification.verify import model_problems
from openquant.version import VLLM
from support import small_checkpoints
from support.published_checkpoints import NAMES, lines_of, published, shortened, with_few_experts

# Layers quantized, modules kept (as in ignored_layers, one spelling each), tensor-parallel sizes for blocks.
EXPECTED = {
    "LlamaForCausalLM": (32 * 7, ["lm_head", "model.embed_tokens"], [1, 2]),
    "MistralForCausalLM": (40 * 7, ["lm_head", "model.embed_tokens"], [1, 2, 4, 8, 16]),
    "Qwen3ForCausalLM": (28 * 7, ["lm_head", "model.embed_tokens"], [1, 2, 4, 8, 16]),
    "Qwen3MoeForCausalLM": (
        48 * (4 + 3 * 128),
        ["lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(48))],
        [1, 2],
    ),
    "Gemma3ForCausalLM": (34 * 7, ["lm_head", "model.embed_tokens"], [1, 2, 4, 8]),
    "Gemma3ForConditionalGeneration": (34 * 7, None, [1, 2, 4, 8]),
    "Gemma3ForConditionalGeneration-new": (34 * 7, None, [1, 2, 4, 8]),
    "Llama4ForCausalLM": (
        48 * (4 + 3 + 3 * 16),
        ["lm_head", "model.embed_tokens", *(f"model.layers.{n}.feed_forward.router" for n in range(48))],
        [1, 2, 4, 8],
    ),
    "Llama4ForConditionalGeneration": (48 * (4 + 3 + 3 * 16), None, [1, 2, 4, 8]),
}
# The same of the others, without the list of what is kept. Where blocks leave layers out that do not divide, both counts;
# where a single scale does so too, that of rows before them.
MORE: dict[str, tuple[tuple[int, ...], list[int]]] = {
    name: (tuple(map(int, counts.split("/"))), list(map(int, sizes.split(","))))
    for name, counts, sizes in map(str.split, Path(__file__).with_name("layers.txt").read_text().splitlines())
}


def test_every_architecture_has_a_names_file_and_a_small_model() -> None:
    assert {path.stem for path in NAMES.glob("*.txt")} - {"GptOssForCausalLM"} == {*EXPECTED, *MORE}
    assert {name.split("-")[0] for name in (*EXPECTED, *MORE, "GptOssForCausalLM")} == set(MODELS)
    assert set(MODELS) - {"GptOssForCausalLM"} == set(small_checkpoints.ARCHITECTURES)


# Planned whole; of all others, three layers of each kind and four experts stand for the rest.
WHOLE = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize("name", [*EXPECTED, *MORE])
def test_published_names_plan_without_a_misfit(name: str) -> None:
    count, ignored, parallel = EXPECTED[name] if name in EXPECTED else (MORE[name][0], None, MORE[name][1])
    counts = count if isinstance(count, tuple) else (count,)
    of_tensor, of_rows, of_block = counts[0], *(counts[0], *counts)[-2:]
    whole = published(name)
    model = MODELS[whole.architecture]
    assert model_problems(ModuleRules(model), whole.tensors.values(), whole) == []

    few, stands_for = shortened(whole)
    assert stands_for.total() == len(whole.tensors)
    checkpoint = whole if name in WHOLE else few
    expected = {TENSOR: of_tensor, CHANNEL: of_rows, BLOCK: of_block, BLOCK_COMPRESSED: of_block}
    blocks = BLOCK_COMPRESSED if find_refusal(model.refused, BLOCK) else BLOCK
    schemes = [scheme for scheme in (TENSOR, CHANNEL, blocks) if not find_refusal(model.refused, scheme)]
    for scheme in schemes:
        plan = make_plan(checkpoint, scheme)
        quantized = (weight.source.name for weight, _ in plan.decisions.quantized)
        assert sum(1 if name in WHOLE else stands_for[tensor] for tensor in quantized) == expected[scheme]
        assert sum(line.bytes_before for line in plan.lines) == summary.source_bytes(plan)
        assert sum(line.bytes_after for line in plan.lines) == summary.output_bytes(plan)

    assert summary.parallel_sizes(plan) == parallel
    if ignored is not None:
        assert ignored_layers(plan if name in WHOLE else make_plan(whole, schemes[-1])) == ignored
    assert_all_tensors_are_in_the_output(checkpoint, plan)


def assert_all_tensors_are_in_the_output(checkpoint: Checkpoint, plan: Plan) -> None:
    """Every source tensor is there under its own name, or split into experts."""
    outputs = {info.name: info for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)}
    stacks = {stacked.name: (experts, stacked) for experts in plan.model.experts for stacked in experts.stacked}
    for info in checkpoint.tensors.values():
        if info.name in outputs:
            continue
        path, last = info.module.rsplit(".", 1)
        experts, stacked = stacks[last]
        path += "." + experts.path.rsplit(".", 1)[1] if experts.beside else ""
        number, rows, cols = info.shape
        rows, cols = (cols, rows) if stacked.transposed else (rows, cols)
        for expert, part in itertools.product(range(number), stacked.parts):
            assert outputs[f"{path}.{expert}.{part}.weight"].shape == (rows // len(stacked.parts), cols)


def test_state_spaces_of_falcon_are_listed_as_layers_beyond_the_last() -> None:
    """By as many layers as config.json counts, and in a nonsensical number by none."""
    checkpoint = published("FalconH1ForCausalLM")
    ignored = set(ignored_layers(make_plan(checkpoint, TENSOR)))
    assert {f"model.{44 + layer}.mixer.in_proj" for layer in range(44)} <= ignored
    assert "model.88.mixer.in_proj" not in ignored
    for layers in (10**9, None):
        odd = replace(checkpoint, config={**checkpoint.config, "num_hidden_layers": layers})
        assert not any(name.startswith("model.4") for name in ignored_layers(make_plan(odd, TENSOR)))


def test_refused_schemes_say_why_and_what_to_do() -> None:
    wrapped = published("Mistral3ForConditionalGeneration")
    for scheme in (BLOCK, BLOCK_UE8M0):
        with pytest.raises(PlanError) as caught:
            make_plan(wrapped, scheme)
        assert str(caught.value) == (
            f"Mistral3ForConditionalGeneration cannot be served with {scheme.title}: "
            f"{VLLM} does not find its block scales"
        )
        assert caught.value.hint == "use --scheme tensor or channel, or --format compressed-tensors"
    for scheme in (TENSOR, TENSOR_COMPRESSED, CHANNEL, BLOCK_COMPRESSED):
        assert summary.quantized_tensors(make_plan(wrapped, scheme)) == 280
    for scheme in VARIANTS:
        with pytest.raises(PlanError, match=rf"GptOssForCausalLM cannot be served with .*: {VLLM} reads its"):
            make_plan(published("GptOssForCausalLM"), scheme)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"])
def test_draft_layers_stay_and_are_listed(name: str) -> None:
    checkpoint = with_few_experts(name)
    plan = make_plan(checkpoint, TENSOR)
    draft = f"model.layers.{checkpoint.config['num_hidden_layers']}."
    kept = {module for line in plan.lines if line.why == "MTP layer" for module in line.names}
    assert kept == {
        info.module for info in checkpoint.tensors.values() if info.name.startswith(draft) and len(info.shape) > 1
    }
    merged = "qkv_proj" if name.startswith("Glm4") else "fused_qkv_a_proj"
    others = {f"{draft}{path}" for path in ("mlp.experts", "mlp.shared_experts.gate_up_proj", f"self_attn.{merged}")}
    assert kept | others <= set(ignored_layers(plan))


def test_names_an_engine_builds_otherwise_are_listed_under_both() -> None:
    ignored = set(ignored_layers(make_plan(published("GraniteMoeHybridForCausalLM"), TENSOR)))
    assert {"model.layers.0.mamba.in_proj", "model.layers.0.mixer.in_proj"} <= ignored
    # The draft layer, as one after the last of the decoder.
    ignored = set(ignored_layers(make_plan(published("MiMoForCausalLM"), TENSOR)))
    for layer in ("model.mtp_layers.0", "model.layers.36"):
        parts = ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        assert {f"{layer}.{part}" for part in parts} <= ignored


def test_parts_of_a_joined_tensor_must_divide() -> None:
    """phi-4 with heads of 192, say: qkv divides into blocks, k and v do not. Nor without a config to tell them by."""
    checkpoint = published("Phi3ForCausalLM")
    for heads, quantized in ((checkpoint.config, 160), ({"num_attention_heads": 36, "num_key_value_heads": 12}, 160),
                             ({"num_attention_heads": 38, "num_key_value_heads": 1}, 120), ({}, 120)):  # fmt: skip
        assert summary.quantized_tensors(make_plan(replace(checkpoint, config=heads), BLOCK)) == quantized
        for scheme in (TENSOR, CHANNEL):
            assert summary.quantized_tensors(make_plan(replace(checkpoint, config=heads), scheme)) == 160


def test_experts_stacked_the_other_way_around_are_refused() -> None:
    checkpoint = published("Qwen3VLMoeForConditionalGeneration")
    tensors = {
        name: info._replace(shape=(info.shape[0], info.shape[2], info.shape[1])) if ".experts." in name else info
        for name, info in checkpoint.tensors.items()
    }
    with pytest.raises(PlanError, match="are the experts transposed"):
        make_plan(replace(checkpoint, tensors=tensors), TENSOR)


def test_gemma3_tower_is_listed_under_every_spelling_of_the_engines() -> None:
    for name in ("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration-new"):
        ignored = set(ignored_layers(make_plan(published(name), BLOCK)))
        for tower, part in itertools.product(
            ("vision_tower", "vision_tower.vision_model", "model.vision_tower", "model.vision_tower.vision_model"),
            ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
        ):
            assert {f"{tower}.encoder.layers.{layer}.{part}" for layer in range(27)} <= ignored
        assert {"language_model.model.embed_tokens", "model.language_model.embed_tokens", "lm_head"} <= ignored


def test_llama4_wrapper_lists_the_engine_s_own_names() -> None:
    plan = make_plan(published("Llama4ForConditionalGeneration"), BLOCK, PlanOptions(("**.layers.0.self_attn.*",)))
    assert {
        "language_model.model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.feed_forward.router",
        "multi_modal_projector.linear_1",
    } <= set(ignored_layers(plan))


def test_draft_layers_are_listed_under_the_numbers_that_engines_count_on_to() -> None:
    """vLLM vllm/models/deepseek_v4/nvidia/mtp.py."""
    listed = {*ignored_layers(make_plan(with_few_experts("DeepseekV4ForCausalLM"), BLOCK))}
    layer = "model.layers.61"
    assert {
        f"{layer}.{name}" for name in ("e_proj", "h_proj", "attn.fused_wqa_wkv", "attn.wq_b", "ffn.experts")
    } <= listed
    assert {f"{layer}.ffn.shared_experts.{name}" for name in ("gate_up_proj", "down_proj")} <= listed
    assert not any(name.startswith(("model.layers.60.attn.w", "model.layers.60.ffn.experts")) for name in listed)


def test_what_engines_read_beside_the_quantization_is_written() -> None:
    few = {name: with_few_experts(f"{name}ForCausalLM") for name in ("DeepseekV4", "DeepseekV3")}
    assert output_config(make_plan(few["DeepseekV4"], BLOCK))["expert_dtype"] == "fp8"
    stored = with_few_experts("quantized/DeepseekV4ForCausalLM")
    assert "expert_dtype" not in output_config(make_plain_plan(stored))
    assert "expert_dtype" not in output_config(make_plan(few["DeepseekV3"], BLOCK))


def test_entries_are_sound() -> None:
    for name, entry in MODELS.items():
        patterns = [*entry.compress, *(keep.pattern for keep in entry.keep), *(fused.pattern for fused in entry.fused)]
        patterns += [split.pattern for split in entry.splits] + [experts.path for experts in entry.experts]
        for pattern in patterns:
            re.compile(translate(entry.layers + pattern if pattern.startswith(".") else pattern))
        assert all(split.axis in ("in", "out") for split in entry.splits), name
        assert all(keep.why for keep in entry.keep), name


def test_experts_taken_from_a_stack_have_the_rules_of_separate_ones() -> None:
    for entry in MODELS.values():
        rules = ModuleRules(entry)
        for experts in entry.experts:
            # The first of the places where a layer can be.
            place = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", entry.absolute(experts.path)).replace("*", "0")
            for part in (part for stacked in experts.stacked for part in stacked.parts):
                module = f"{place}.0.{part}"
                rule = rules.rule(module)
                assert rule.compress and rules.experts(module) == place, (entry.name, module)
                assert rule.split is not None and rule.split.axis == ("in" if part == "down_proj" else "out")
                assert (rule.fused is not None) == (part in ("gate_proj", "up_proj")), (entry.name, module)


def test_wrappers_with_their_sizes_at_the_top_are_understood() -> None:
    """As the first files of Qwen2-VL: no text_config."""
    checkpoint = published("Qwen2VLForConditionalGeneration")
    flat = replace(checkpoint, config=checkpoint.config["text_config"])
    assert make_plan(flat, BLOCK).parallel == make_plan(checkpoint, BLOCK).parallel


def test_the_tables_have_each_architecture_once() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    for engine in ("vLLM", "SGLang"):
        section = text.split(f"\n## {engine}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| ([^|]+) \|.*\| ([^|]+) \|$", section, re.MULTILINE)
        cells = [(name, cell) for cell, names in rows for name in re.findall(r"`([A-Z]\w+)`", names)]
        assert sorted(name for name, _ in cells) == sorted(MODELS)
        if engine == "vLLM":
            refused = {name for name, cell in cells if cell == "refused"}
    assert refused == {
        "AriaForConditionalGeneration",
        "DeepseekV4ForCausalLM",
        "GptOssForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    }


def test_what_is_not_covered_has_a_reason() -> None:
    listed = [line.split("  ", 1) for line in lines_of("not_covered.txt")]
    assert all(len(entry) == 2 and entry[1] for entry in listed)
    names = [entry[0] for entry in listed]
    assert len(names) == len(set(names))
    assert not {*names} & {*MODELS}


def test_every_class_of_the_engine_has_an_entry_or_a_reason() -> None:
    reasons = {line.split("  ", 1)[0] for line in lines_of("not_covered.txt")}
    assert {*lines_of("engine_classes.txt")} - {*MODELS} - reasons == set()


def test_published_models_fall_back_where_their_blocks_do_not_divide() -> None:
    # Experts of 768 rows: six blocks, which 4 ranks do not share.
    plan = make_plan(with_few_experts("Qwen3MoeForCausalLM"), BLOCK_COMPRESSED, PlanOptions(tp=4))
    assert summary.schemes(plan) == {BLOCK_COMPRESSED: 48 * 4, CHANNEL: 48 * 3 * 4}
    assert summary.parallel_sizes(plan) == [1, 2, 4, 8, 16]
    targets = plan.quantization_config["config_groups"]["group_1"]["targets"]
    assert targets == [rf"re:(.*[.])?layers[.]{layer}[.]mlp[.]experts[.].*" for layer in range(48)]
    # A projection of 576 rows, and the one it is joined with.
    plan = make_plan(with_few_experts("DeepseekV3ForCausalLM"), BLOCK_COMPRESSED)
    assert summary.schemes(plan) == {BLOCK_COMPRESSED: summary.quantized_tensors(plan) - 2 * 61, CHANNEL: 2 * 61}
    assert (
        "model.layers.60.self_attn.fused_qkv_a_proj" in plan.quantization_config["config_groups"]["group_1"]["targets"]
    )

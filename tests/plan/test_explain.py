"""What becomes of a layer, and which rule says so: of published models, and as the command prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import EXAMPLE, run_openquant
from openquant import explain
from openquant.errors import UsageError
from openquant.formats.schemes import SCHEMES, TENSOR, Scheme
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, make_plan
from openquant.plan.summary import ModuleExplanation, Rule, explain_modules
from support import small_checkpoints
from support.published_checkpoints import with_few_experts
from support.rows import for_each


def planned(name: str, scheme: Scheme = TENSOR, **options: object) -> Plan:
    return make_plan(with_few_experts(name), scheme, PlanOptions(**options))  # type: ignore[arg-type]


def one(plan: Plan, asked: str) -> ModuleExplanation:
    (found,) = explain_modules(plan, asked)
    return found


def test_a_layer_that_engines_join() -> None:
    found = one(planned("Qwen3MoeForCausalLM"), "model.layers.3.self_attn.q_proj.weight")
    entry = MODELS["Qwen3MoeForCausalLM"]
    assert found.modules == ("model.layers.3.self_attn.q_proj",)
    assert (found.scheme, found.why, found.listed, found.experts) == ("tensor", "", None, None)
    assert found.rule is not None
    assert found.rule.field == "compress"
    assert found.rule.pattern in [entry.layers + pattern for pattern in entry.compress]
    assert set(found.joined) == {f"model.layers.3.self_attn.{part}_proj" for part in "qkv"}
    assert [each.name for each in found.output] == [f"{found.module}.weight", f"{found.module}.weight_scale"]
    assert found.ranks is not None
    assert (found.ranks.axis, found.ranks.heads) == ("out", "num_attention_heads")
    assert found.engines["SGLang"][0] == "model.layers.3.self_attn.qkv_proj"


def test_what_stays_has_its_rule_and_is_listed() -> None:
    gate, norm = (one(planned("Qwen3MoeForCausalLM"), name) for name in ("model.layers.0.mlp.gate", "model.norm"))
    assert (gate.scheme, gate.why, gate.listed) == (None, "router", "model.layers.0.mlp.gate")
    assert gate.rule == Rule("keep", "model.layers.*.mlp.gate")
    assert gate.ranks is None
    assert (norm.why, norm.rule) == ("fewer than two axes", None)
    ignored = one(planned("Qwen3MoeForCausalLM", ignore=("**.o_proj",)), "model.layers.0.self_attn.o_proj")
    assert (ignored.scheme, ignored.why, ignored.listed) == (None, "--ignore **.o_proj", ignored.module)
    assert ignored.rule is not None
    assert ignored.rule.field == "compress"


def test_a_stack_is_its_experts_and_draft_layers_are_counted() -> None:
    down = one(planned("Qwen3VLMoeForConditionalGeneration"), "model.language_model.layers.0.mlp.experts.down_proj")
    assert down.rule is not None
    assert down.rule.field == "experts"
    assert down.experts == "model.language_model.layers.0.mlp.experts"
    assert len(down.modules) == 128
    assert [each.shape for each in down.source] == [(128, 768, 2048)]
    plan = planned("DeepseekV3ForCausalLM")
    draft = one(plan, "model.layers.61.self_attn.o_proj")
    assert (draft.why, draft.rule) == ("MTP layer", Rule("draft_layers", "num_hidden_layers"))
    # Listed once for all experts of a layer.
    expert = one(plan, "model.layers.61.mlp.experts.0.up_proj")
    assert expert.listed is not None


@for_each("name", ["Qwen3ForCausalLM", "Llama4ForConditionalGeneration", "NemotronHForCausalLM"])
def test_every_module_is_explained_as_it_is_planned(name: str) -> None:
    plan = planned(name, SCHEMES["channel"])
    layers = explain_modules(plan, "**")
    assert sum(len(layer.modules) for layer in layers) == sum(len(line.names) for line in plan.lines)
    assert sum(len(layer.modules) for layer in layers if layer.scheme) == summary.quantized_tensors(plan)
    for layer in layers:
        assert layer.rule is not None or layer.why == "fewer than two axes"
        # What is quantized is found in no list, everything else that has a weight of two axes in one.
        assert not (layer.scheme and layer.listed)
        linear = len(layer.shape) == 2 and all(each.name.endswith(".weight") for each in layer.output)
        assert layer.scheme or layer.listed or not linear, layer.module


@for_each("asked", ["model.layers.99.mlp.down_proj", "down_proj", "**.nothing", "x" * 5000])
def test_a_name_that_is_not_there(asked: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain(EXAMPLE, asked)
    assert caught.value.message == f"{asked} is no module of this model, nor does it match one"
    assert caught.value.hint.startswith("modules are named like tensors, without .weight; ** is any part; ")


def test_the_command_says_it_to_people_and_programs(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "mine", "Qwen3MoeForCausalLM")
    done = run_openquant("explain", source, "**.q_proj", "-w", "128", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  becomes      quantized, --scheme block\n" in done.stdout
    assert "\n  rule         compress: model.layers.*.self_attn." in done.stdout
    asked = run_openquant("explain", source, "**.q_proj", "-w", "128", "--json", cwd=tmp_path)
    assert json.loads(asked.stdout) == json.loads(json.dumps(explain(source, "**.q_proj", "block").to_json()))
    missing = run_openquant("explain", source, "**.q", "--json", cwd=tmp_path)
    assert missing.returncode == 2
    assert json.loads(missing.stdout)["error"] == "**.q is no module of this model, nor does it match one"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_output_head_that_is_the_embedding_and_what_no_pattern_covers(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "tied", "Gemma2ForCausalLM")
    told = "^lm_head is no module of its own: the output head is the input embedding, which stays unquantized"
    with pytest.raises(UsageError, match=told):
        explain(source, "lm_head.weight")
    plan = make_plan(with_few_experts("Qwen3MoeForCausalLM"), TENSOR, architecture="generic")
    assert one(plan, "model.layers.0.mlp.gate").rule == Rule("rest", None)

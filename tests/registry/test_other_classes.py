"""Base classes and classes with the head of a task: planned by the entry of the class whose body they have."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from transformers.models.auto import modeling_auto

from openquant.files.checkpoint import Checkpoint
from openquant.files.shardfile import TensorInfo
from openquant.formats.schemes import BLOCK, CHANNEL, TENSOR
from openquant.models import MODELS, find_body, find_entry
from openquant.patterns import compile_pattern
from openquant.plan.plan import Plan, ignored_layers, make_plan
from openquant.registry.architecture import HEAD, ModuleRules
from support.published_checkpoints import NAMES, shortened, with_few_experts
from support.representatives import representatives
from support.small_checkpoints import refused

PLANNED_IN = (CHANNEL, TENSOR, BLOCK)
ENDING = re.compile("For(CausalLM|ConditionalGeneration)$")
# What transformers has as the base of a class, by the class.
BASES = {
    name: base
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    for model_type, name in mapping.items()
    for base in (modeling_auto.MODEL_MAPPING_NAMES.get(model_type),)
    if name in MODELS and isinstance(base, str) and base.endswith("Model")
}


# gpt-oss is refused in all three.
FILES = sorted(
    path.stem
    for path in NAMES.glob("*.txt")
    if representatives([name := path.stem.split("-")[0]]) and not all(refused(name, scheme) for scheme in PLANNED_IN)
)


def plan_of(checkpoint: Checkpoint) -> Plan:
    name = find_body(checkpoint.architecture, checkpoint.config)[0]
    return make_plan(checkpoint, next(each for each in PLANNED_IN if name is None or not refused(name.name, each)))


def renamed(checkpoint: Checkpoint, names: dict[str, str], architecture: str) -> Checkpoint:
    """A checkpoint of another class, with these of the tensors under their new names."""
    tensors = {new: checkpoint.tensors[old]._replace(name=new) for old, new in names.items()}
    where = {new: checkpoint.where[old] for old, new in names.items()}
    return replace(checkpoint, tensors=tensors, where=where, architecture=architecture)


def schemes_of(plan: Plan, prefix: str = "") -> dict[str, str | None]:
    return {
        weight.module.removeprefix(prefix): decision.scheme.name if decision.scheme else None
        for weight, decision in plan.decisions.iter_decisions()
    }


@pytest.mark.parametrize("file", FILES)
def test_a_base_class_and_a_classifier_are_planned_like_their_class(subtests: pytest.Subtests, file: str) -> None:
    checkpoint = shortened(with_few_experts(file))[0]
    plan = plan_of(checkpoint)
    notes = "\n".join(plan.notes)
    is_layer = compile_pattern(f"{plan.model.layers}.**").fullmatch
    prefix = next(name for name in checkpoint.tensors if is_layer(name)).partition(".")[0] + "."
    if is_layer("layers.0.x") or is_layer("h.0.x"):
        prefix = ""
    body = {
        name: name.removeprefix(prefix)
        for name, info in checkpoint.tensors.items()
        if plan.entry.rule(info.module).keep != HEAD.why and name != "lm_head.bias"
    }
    ignored = {
        name for name in ignored_layers(plan) if "head" not in name and "output" not in name and name != "embed_out"
    }

    classes = [ENDING.sub("Model", checkpoint.architecture), *([checkpoint.architecture] if prefix else [])]
    for architecture in dict.fromkeys(classes):
        with subtests.test(f"{architecture}, whose names lack the prefix"):
            base = plan_of(renamed(checkpoint, body, architecture))
            assert schemes_of(base) == schemes_of(plan, prefix)
            assert ignored <= {*ignored_layers(base)}
            assert not [note for note in base.notes if "output head" in note and note not in notes]

    with subtests.test("with the head of a task"):
        classifier = renamed(
            checkpoint, {name: name for name in body}, ENDING.sub("ForSequenceClassification", checkpoint.architecture)
        )
        score = TensorInfo("score.weight", "BF16", (1, 256))
        tensors = {**classifier.tensors, "score.weight": score}
        where = {**classifier.where, "score.weight": next(iter(classifier.where.values()))}
        if ENDING.search(checkpoint.architecture):
            planned = plan_of(replace(classifier, tensors=tensors, where=where))
            assert schemes_of(planned) == schemes_of(plan)
            assert {*ignored, "score"} <= {*ignored_layers(planned)}
            assert not [note for note in planned.notes if "head" in note and note not in notes]


@pytest.mark.parametrize(
    ("architecture", "config", "name"),
    [
        ("LlamaBidirectionalModel", {}, "LlamaForCausalLM"),
        ("LlamaForSequenceClassificationWithNormal_Weights", {}, "LlamaForCausalLM"),
        ("InternLM2ForRewardModel", {}, "InternLM2ForCausalLM"),
        ("Gemma3TextForSequenceClassification", {}, "Gemma3ForCausalLM"),
        ("Gemma3Model", {"text_config": {}}, "Gemma3ForConditionalGeneration"),
        ("HrmTextModel", {}, "HrmTextForCausalLM"),
        ("Qwen3MoeForTokenClassification", {}, "Qwen3MoeForCausalLM"),
        ("Qwen3ForMyTask", {}, None),
        ("BertModel", {}, None),
        ("Qwen3", {}, None),
    ],
)
def test_the_body_of_a_class_is_found_by_its_name(
    architecture: str, config: dict[str, object], name: str | None
) -> None:
    entry = find_entry(architecture, config, ["model.layers.0.mlp.up_proj"])
    assert (entry and entry.name) == name


def test_base_classes_of_transformers_have_the_entry_of_their_class(subtests: pytest.Subtests) -> None:
    assert len(BASES) > 100
    for name, base in BASES.items():
        with subtests.test(base):
            key = MODELS[name].text_config
            config = {key: {}} if key and "." not in key else {}
            entry = find_entry(base, config, ["layers.0.mlp.up_proj"])
            assert entry is not None
            assert ModuleRules(entry).rule("lm_head").compress is False
            assert not entry.has_head
            assert entry.name in (name, find_body(name, config)[0])

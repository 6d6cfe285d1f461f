"""Each small model has every kind of module that its class has, or else a test that loads it says nothing of that kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from openquant.files.checkpoint import Checkpoint
from openquant.models import MODELS
from openquant.patterns import compile_pattern, template
from openquant.plan.architecture import mtp_layer_finder, text_config
from openquant.registry.architecture import MTP_LAYER, NOT_LINEAR, TOWER, ModuleRules, find_class_tensors
from support import small_checkpoints
from support.published_checkpoints import NAMES, published

QUERIES = (
    r".*\.q(_a|_b)?_proj\.weight",
    "config.json chooses how queries are made: other small models have the other way",
)
DENSE = r"mlp\.(gate|up|down)_proj\.weight", "no published model has a dense layer, which SGLang knows nothing of"
TABLES = r".*\.ngram_embedding\.shard_\d+\.weight", "config.json says into how many parts the tables are divided"
# What small models lack, and why.
LACKING = {
    **dict.fromkeys(
        (
            *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            *("MiniCPM3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiLinearForCausalLM"),
            "KimiVLForConditionalGeneration",
        ),
        QUERIES,
    ),
    **dict.fromkeys(
        (
            *("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
            "Qwen3OmniMoeForConditionalGeneration",
        ),
        DENSE,
    ),
    **dict.fromkeys(("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), TABLES),
    **dict.fromkeys(
        ("InternVLForConditionalGeneration", "QianfanOCRForConditionalGeneration", "InternVLChatModel"),
        ("experts", "the language model may be any, and the most usual ones have none"),
    ),
    "Gemma4UnifiedForConditionalGeneration": ("experts", "its entry is Gemma 4's, and its class has none"),
}


class Kinds:
    """Finds the kinds of modules that a checkpoint of an architecture has."""

    def __init__(self, architecture: str) -> None:
        self.model = MODELS[architecture]
        self.entry = ModuleRules(self.model)
        self.layer = compile_pattern(f"{self.model.layers}.**")

    def find(self, names: Iterable[str], config: dict[str, Any] | None = None) -> set[str]:
        """Name templates below a decoder layer of what is quantized, with biases, and of what is kept but for towers."""
        text = text_config(Checkpoint(Path(), config, "", {}, {}, {}, {}, False, {}, ()), self.model) if config else {}
        is_mtp_layer = mtp_layer_finder(self.model, text)
        found = set()
        for name in names:
            module = name.removesuffix(".weight").removesuffix(".bias")
            if is_mtp_layer(module):
                found.add(f"{MTP_LAYER}: {self._below(name)}")
            elif self._counts(name, module):
                found |= set(map(self._below, self._unstack(module, name)))
                found |= {"experts"} if self.entry.rule(module).stack or self.entry.experts(module) else set()
        return found

    def _counts(self, name: str, module: str) -> bool:
        """Whether a tensor belongs to a module that is quantized or, if it is a weight, kept for a reason of its own."""
        rule = self.entry.rule(module)
        is_kept = rule.keep not in (None, TOWER, *NOT_LINEAR) and not name.endswith(".bias")
        return rule.compress or rule.stack is not None or is_kept

    def _unstack(self, module: str, name: str) -> list[str]:
        """The names of an expert's projections in a stack; a tensor that is none has its own."""
        stack = self.entry.rule(module).stack
        if stack is None:
            return [name]
        layout, stacked = stack
        path = module.rpartition(".")[0]
        if layout.beside:
            path += "." + layout.path.rpartition(".")[2]
        return [f"{path}.0.{part}.weight" for part in stacked.parts]

    def _below(self, name: str) -> str:
        match = self.layer.fullmatch(name)
        return template(match[match.lastindex or 0] if match else name)


def small(architecture: str) -> set[str]:
    return Kinds(architecture).find(small_checkpoints.shapes(architecture), small_checkpoints.config(architecture))


def of_class(architecture: str) -> set[str]:
    """The weights that transformers' class has with one config.json or another."""
    known = find_class_tensors(architecture)
    assert known is not None
    below = {f"{prefix}.0.{name}" for prefix, layers in known.lists.items() for kind in layers.kinds for name in kind}
    names = {name.replace("*", "0") for name in (*known.outside, *below)}
    return Kinds(architecture).find(name for name in names if not name.endswith(".bias"))


@pytest.mark.parametrize("architecture", small_checkpoints.ARCHITECTURES)
def test_a_small_model_has_every_kind_of_module(architecture: str) -> None:
    kinds = of_class(architecture)
    for path in (*NAMES.glob(f"{architecture}.txt"), *NAMES.glob(f"{architecture}-*.txt")):
        checkpoint = published(path.stem)
        kinds |= Kinds(architecture).find(checkpoint.tensors, checkpoint.config)
    if MODELS[architecture].experts:
        kinds.add("experts")

    lacking = kinds - small(architecture)
    expected, _ = LACKING.get(architecture, ("(?!)", ""))
    assert {kind for kind in lacking if not re.fullmatch(expected, kind)} == set()
    assert lacking or architecture not in LACKING

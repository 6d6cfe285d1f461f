"""What each class has (registry/class_tensors.jsonl), and that whatever a checkpoint of it loses is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from openquant.files.checkpoint import Checkpoint
from openquant.files.shardfile import TensorInfo
from openquant.models import MODELS
from openquant.patterns import compile_pattern, template
from openquant.plan import completeness
from openquant.plan.architecture import mtp_layer_finder, text_config
from openquant.plan.completeness import ClassComparison, ConfigSizes, compare_with_class, completeness_notes
from openquant.registry.architecture import MTP_LAYER, ModuleRules, find_class_tensors
from support import small_checkpoints
from support.representatives import representatives

# What may be lost without a word: parts that transformers does not build, and the last of layers that no key counts.
UNNAMED = {
    "AXK1ForCausalLM": r"model\.layers\.0\.post_mlp_layernorm",
    "DeciLMForCausalLM": r"model\.layers\.[0*]\.(self_attn|input_layernorm)",
    "Emu3ForConditionalGeneration": r"vqmodel\.(en|de)coder\.time_conv\.1",
    "FunASRForConditionalGeneration": r"audio_adaptor\.blocks\.1",
    "IQuestLoopCoderForCausalLM": r"model\.gate_projections\.1",
    "Gemma3nForConditionalGeneration": r"model\.vision_tower",
    "VibeVoiceAsrForConditionalGeneration": r".*_tokenizer_encoder\.conv_layers\.\d\.stage\.1",
}

_OMNI = ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel", "Qwen3OmniMoeForConditionalGeneration")


class Small:
    """The headers of a small model without its MTP layers, which no class of transformers has."""

    def __init__(self, architecture: str) -> None:
        model = MODELS[architecture]
        self.entry = ModuleRules(model)
        self.config = small_checkpoints.config(architecture)
        checkpoint = Checkpoint(Path(), self.config, architecture, {}, {}, {}, {}, False, {}, ())
        self.text = text_config(checkpoint, model)
        self.is_layer = compile_pattern(f"{model.layers}.**")
        known = find_class_tensors(architecture)
        assert known is not None
        self.known = known
        self.sizes = ConfigSizes(self.config, self.text, model.text_config or "", known)
        is_mtp_layer = mtp_layer_finder(model, self.text)
        self.tensors = {
            name: TensorInfo(name, "BF16", tuple(shape))
            for name, shape in small_checkpoints.shapes(architecture).items()
            if not is_mtp_layer(name)
            and self.entry.rule(name.rpartition(".")[0]).keep != MTP_LAYER
            and "mtp" not in name
        }

    def compared(self, tensors: dict[str, TensorInfo]) -> ClassComparison:
        comparison = compare_with_class(self.entry, tensors.values(), self.config, self.text)
        assert comparison is not None
        return comparison

    def notes(self, tensors: dict[str, TensorInfo]) -> list[str]:
        return completeness_notes(self.entry, tensors.values(), self.config, self.text)

    def losses(self) -> Iterator[tuple[str, set[str]]]:
        """Each tensor in all layers, each layer, each module of one layer, and each module outside of them."""
        groups: dict[str, set[str]] = {}
        for name in self.tensors:
            groups.setdefault(template(name), set()).add(name)
            match = self.is_layer.fullmatch(name)
            parts = name.split(".")
            first = len(name[: match.end(1)].split(".")) if match else 1
            for length in range(first, len(parts)):
                groups.setdefault(".".join(parts[:length]), set()).add(name)
        for what, names in groups.items():
            if len(names) < len(self.tensors):
                yield what, names

    def wrong_shapes(self) -> Iterator[TensorInfo]:
        """Each axis of one tensor of each name template, by one longer, where config.json says it."""
        for info in {template(name): info for name, info in self.tensors.items()}.values():
            for axis, length in enumerate(info.shape):
                if self.is_said(info, axis):
                    yield info._replace(shape=(*info.shape[:axis], length + 1, *info.shape[axis + 1 :]))

    def is_said(self, info: TensorInfo, axis: int) -> bool:
        """Whether config.json says the length of an axis, as all that the class says of it."""
        known, sizes = self.known, self.sizes
        rules = [rule for name, rule in known.outside.items() if name == info.name]
        for prefix, layers in known.lists.items():
            below = template(info.name).removeprefix(f"{template(prefix)}.*.")
            rules += [rule for kind in layers.kinds for name, rule in kind.items() if template(name) == below]
        return bool(rules) and all(sizes.size(rule.shape[axis]) for rule in rules if axis < len(rule.shape))


def test_every_class_is_known() -> None:
    assert {name for name in MODELS if find_class_tensors(name) is None} == {"GptOssForCausalLM"}


@pytest.mark.parametrize("architecture", _OMNI)
def test_an_omni_model_that_only_thinks_says_so(architecture: str) -> None:
    small = Small(architecture)
    thinker = {name: info for name, info in small.tensors.items() if name.startswith("thinker.")}
    lost = {text.partition(" ")[0] for text in small.compared(thinker).lost}
    assert lost == {"talker", "code2wav" if "Qwen3" in architecture else "token2wav"}
    small.config["enable_audio_output"] = False
    assert small.compared(thinker) == ClassComparison([], [], True)


def test_mtp_layers_that_config_json_counts_are_named(subtests: pytest.Subtests) -> None:
    counted = []
    for architecture in small_checkpoints.ARCHITECTURES:
        model = MODELS[architecture]
        if not model.draft_layers and not any(keep.why == MTP_LAYER for keep in model.keep):
            continue
        small = Small(architecture)
        lost = [note for note in small.notes(small.tensors) if "MTP" in note]
        every = {
            name: TensorInfo(name, "BF16", tuple(shape))
            for name, shape in small_checkpoints.shapes(architecture).items()
        }
        with subtests.test(architecture):
            assert not any("MTP" in note for note in small.notes(every))
            # transformers drops them as it saves, which is no problem of an output.
            assert not any("MTP" in text for text in small.compared(small.tensors).lost)
            if lost:
                counted.append(architecture)
                assert lost == ["the source lacks its MTP layers, and num_nextn_predict_layers is 1"]
    assert {"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "MiMoForCausalLM"} <= {*counted}


def test_tensors_that_a_class_does_not_read_are_named() -> None:
    small = Small("LlamaForCausalLM")
    attention = "model.layers.1.self_attn"
    norm, bias, constant = (f"{attention}.{name}" for name in ("q_norm.weight", "q_proj.bias", "rotary_emb.inv_freq"))
    more = {name: TensorInfo(name, "BF16", (64,)) for name in (norm, constant)}
    with_bias = small.tensors | {bias: TensorInfo(bias, "BF16", (small.config["num_attention_heads"] * 64,))}

    said = "with it LlamaForCausalLM has no model.layers.*.self_attn."
    assert small.compared(small.tensors | more).misfits == [f"{said}q_norm.weight"]
    assert small.compared(with_bias).misfits == [f"{said}q_proj.bias"]
    for key in ("attention_bias", "bias"):
        small.text = {**small.config, key: True}
        assert not [text for text in small.compared(with_bias).misfits if "has no" in text]


# Of these an expert, and a layer of a list of sizes, is named by facts of their own.
COUNTED_OTHERWISE = ("NemotronHPuzzleForCausalLM", "VibeVoiceAsrForConditionalGeneration")


@pytest.mark.parametrize(
    "architecture", dict.fromkeys([*representatives(small_checkpoints.ARCHITECTURES), *COUNTED_OTHERWISE])
)
def test_whatever_is_lost_or_of_another_shape_is_named(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(architecture)
    # Parsed once in place of a hundred times.
    monkeypatch.setattr(completeness, "find_class_tensors", lambda _: small.known)
    whole = small.compared(small.tensors)
    # Without its MTP layers, which config.json may count.
    assert ([text for text in whole.lost if "MTP" not in text], whole.misfits) == ([], [])

    unnamed = []
    for what, names in small.losses():
        kept = {name: info for name, info in small.tensors.items() if name not in names}
        if small.compared(kept) == whole:
            unnamed.append(what)
    for info in small.wrong_shapes():
        if small.compared({**small.tensors, info.name: info}) == whole:
            unnamed.append(f"{info.name} {list(info.shape)}")
    assert [what for what in unnamed if not re.match(UNNAMED.get(architecture, "(?!)"), what)] == []


def test_a_lost_module_has_its_own_name() -> None:
    small = Small("Qwen3MoeForCausalLM")
    for what, names in small.losses():
        kept = {name: info for name, info in small.tensors.items() if name not in names}
        said = [text.partition(" (")[0] for text in small.compared(kept).lost]
        if "*" not in what and what != "model":
            assert said == [what.removesuffix(".weight")]

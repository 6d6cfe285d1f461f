"""The registry against the tensor names of published checkpoints (names/*.txt)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny
from openquant.checkpoint import Checkpoint, Location, TensorInfo
from openquant.models import MODELS, Model
from openquant.patterns import translate
from openquant.plan import make_plan
from openquant.schemes import BLOCK, CHANNEL, TENSOR

NAMES = Path(__file__).parent / "names"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(name: str) -> list[str]:
    found = _RANGE.search(name)
    if not found:
        return [name]
    numbers = range(int(found[1]), int(found[2]) + 1)
    return [full for n in numbers for full in expand(name[: found.start()] + str(n) + name[found.end() :])]


def published(name: str) -> Checkpoint:
    """A checkpoint as a names file describes it, all in one shard; nothing of it is on disk."""
    tensors: dict[str, TensorInfo] = {}
    config: dict[str, object] = {}
    for line in (NAMES / f"{name}.txt").read_text().splitlines():
        if line.startswith("#"):
            config |= {key: int(value) for key, value in re.findall(r"(num_\w+) (\d+)", line)}
            continue
        pattern, count, shape, dtype = re.split(r"  +", line)
        names = expand(pattern)
        assert len(names) == int(count)
        sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
        tensors |= {full: TensorInfo(full, dtype, sizes) for full in names}
    architecture = name.split("-")[0]
    where, offset = {}, 0
    for full, info in tensors.items():
        where[full] = Location("model.safetensors", offset)
        offset += info.nbytes
    if architecture.endswith("ForConditionalGeneration"):
        config = {"text_config": config}
    return Checkpoint(
        Path("nowhere"), config, architecture, {"model.safetensors": offset}, {}, tensors, where, False, {}, ()
    )


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


def test_every_architecture_has_a_names_file_and_a_small_model() -> None:
    assert {path.stem for path in NAMES.glob("*.txt")} == set(EXPECTED)
    assert {name.split("-")[0] for name in EXPECTED} == set(MODELS) == set(tiny.ARCHITECTURES)


@pytest.mark.parametrize("name", EXPECTED)
def test_published_names_plan_without_a_misfit(name: str) -> None:
    count, ignored, parallel = EXPECTED[name]
    checkpoint = published(name)
    plan = make_plan(checkpoint, BLOCK)
    assert plan.quantized_tensors == count
    assert plan.parallel_sizes == parallel
    if ignored is not None:
        assert plan.ignored_layers == ignored
    # Every source tensor is in the output: under its own name, or split into experts.
    outputs = {info.name: info for shard in plan.shards for info in plan.outputs(shard.name)}
    for info in checkpoint.tensors.values():
        if info.name in outputs:
            continue
        assert info.name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        parts = ("gate_proj", "up_proj") if info.name.endswith("gate_up_proj") else ("down_proj",)
        for expert in range(info.shape[0]):
            for part in parts:
                split = outputs[f"{info.name.rsplit('.', 1)[0]}.{expert}.{part}.weight"]
                assert split.shape == ((8192, 5120) if part != "down_proj" else (5120, 8192))
    assert sum(group.bytes_before for group in plan.groups) == plan.source_bytes
    assert sum(group.bytes_after for group in plan.groups) == plan.output_bytes
    assert make_plan(checkpoint, TENSOR).quantized_tensors == count
    assert make_plan(checkpoint, CHANNEL).quantized_tensors == count


def test_gemma3_tower_is_listed_under_every_spelling_of_the_engines() -> None:
    for name in ("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration-new"):
        ignored = set(make_plan(published(name), BLOCK).ignored_layers)
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.out_proj",
            "mlp.fc1",
            "mlp.fc2",
        ):
            for layer in range(27):
                for tower in (
                    "vision_tower",
                    "vision_tower.vision_model",
                    "model.vision_tower",
                    "model.vision_tower.vision_model",
                ):
                    assert f"{tower}.encoder.layers.{layer}.{part}" in ignored  # fmt: skip
        assert {"language_model.model.embed_tokens", "model.language_model.embed_tokens", "lm_head"} <= ignored


def test_llama4_wrapper_lists_the_engine_s_own_names() -> None:
    plan = make_plan(published("Llama4ForConditionalGeneration"), BLOCK, ["**.layers.0.self_attn.*"])
    assert {
        "language_model.model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.feed_forward.router",
        "multi_modal_projector.linear_1",
    } <= set(plan.ignored_layers)


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_entries_are_sound(entry: Model) -> None:
    patterns = [*entry.compress, *(keep.pattern for keep in entry.keep), *(joined.pattern for joined in entry.joined)]
    patterns += [split.pattern for split in entry.splits] + [experts.path for experts in entry.experts]
    for pattern in patterns:
        re.compile(translate(entry.layers + pattern if pattern.startswith(".") else pattern))
    assert all(split.axis in ("in", "out") for split in entry.splits)
    assert all(keep.why for keep in entry.keep)

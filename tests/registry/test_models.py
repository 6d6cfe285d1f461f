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
# The same without the list of what is kept, by the sizes: "NAME COUNT, ..". Where blocks leave layers out that do not
# divide, both counts; where a single scale does so too, that of rows before them.
COUNTS = {
    (1,): (
        "Glm4ForCausalLM 240, GlmForCausalLM 240, Qwen2MoeForCausalLM 4488, Glm4MoeForCausalLM 17602/17599, "
        "DeepseekV2ForCausalLM 5154/5124, Qwen4ExpForCausalLM 74040, Qwen4ExpForConditionalGeneration 74040, "
        "NemotronHForCausalLM 5981/93, NemotronH_Omni_Reasoning_V3 5981/93, NemotronH_Nano_Omni_Reasoning_V3 "
        "5981/93, NemotronH_Super_Omni_Reasoning_V3 5981/93, Glm4vForConditionalGeneration 240, "
        "Glm4vMoeForConditionalGeneration 17602/17415, AriaForConditionalGeneration 3780, DeepseekOCRForCausalLM "
        "2196/2193, DeepseekOCR2ForCausalLM 2196/2193, UnlimitedOCRForCausalLM 2196/2193, "
        "KimiVLForConditionalGeneration 5154/5127, HCXVisionV2ForCausalLM 504, MiniCPMForCausalLM 280, ChatGLMModel "
        "112, ChatGLMForConditionalGeneration 160, GLM4VForCausalLM 160, DeepseekForCausalLM 5380/5377, "
        "BailingMoeForCausalLM 5516, MellumForCausalLM 5488, OlmoHybridForCausalLM 248/152"
    ),
    (1, 2): (
        "MiMoForCausalLM 252, OlmoForCausalLM 224, Olmo2ForCausalLM 224, Olmo3ForCausalLM 224, SmolLM3ForCausalLM "
        "252, Exaone4ForCausalLM 448, Phi3ForCausalLM 160, PhiMoEForCausalLM 1664, Lfm2MoeForCausalLM 2160, "
        "LlavaForConditionalGeneration 224, LlavaNextVideoForConditionalGeneration 224, "
        "Qwen2AudioForConditionalGeneration 224, Exaone4_5_ForConditionalGeneration 448, "
        "Qwen3OmniMoeForConditionalGeneration 18624, Qwen3VLMoeForConditionalGeneration 18624, "
        "MiMoV2FlashForCausalLM 36291, Step3p7ForConditionalGeneration 36603, Step3p5ForCausalLM 36603, "
        "LLaMAForCausalLM 224, NemotronHPuzzleForCausalLM 41112, DeciLMForCausalLM 436, SolarForCausalLM 448, "
        "Jais2ForCausalLM 192, VaultGemmaForCausalLM 182, BailingMoeV3ForCausalLM 61839/61685, FlexOlmoForCausalLM "
        "800, MiniCPM3ForCausalLM 434/372"
    ),
    (1, 2, 4): (
        "Qwen2ForCausalLM 336, GraniteForCausalLM 280, ArceeForCausalLM 216, PhiForCausalLM 192, "
        "StableLmForCausalLM 168, MiniMaxM2ForCausalLM 47864, GraniteMoeForCausalLM 2400, Ernie4_5_MoeForCausalLM "
        "5380, Glm4MoeLiteForCausalLM 9161/9067, Qwen3NextForCausalLM 73992, FalconH1ForCausalLM 352, "
        "Qwen3_5MoeForCausalLM 30970, GraniteMoeHybridForCausalLM 7812, Lfm2ForCausalLM 82, "
        "InternVLForConditionalGeneration 196, LlavaOnevisionForConditionalGeneration 196, "
        "Lfm2VlForConditionalGeneration 82, GlmOcrForConditionalGeneration 96, "
        "AudioFlamingo3ForConditionalGeneration 196, GraniteSpeechForConditionalGeneration 280, "
        "HunYuanVLForConditionalGeneration 168, VibeVoiceAsrForConditionalGeneration 196, "
        "Granite4VisionForConditionalGeneration 280, QianfanOCRForConditionalGeneration 224, InternVLChatModel 196, "
        "Ernie4_5_VLMoeForConditionalGeneration 10564, Qwen2_5OmniForConditionalGeneration 196, Qwen2_5OmniModel "
        "196, Qwen2VLForConditionalGeneration 196, Qwen2_5_VLForConditionalGeneration 196, "
        "Qwen3_5MoeForConditionalGeneration 30970, MiMoV2ForCausalLM 79771, HYV3ForCausalLM 46064, "
        "PanguEmbeddedForCausalLM 238, GraniteSWAForCausalLM 168, GraniteMoeSharedForCausalLM 2448, "
        "GraniteMoeSWAForCausalLM 2448, BailingMoeV2ForCausalLM 14692, Blip2ForConditionalGeneration 192, "
        "LagunaForCausalLM 30232, FalconForCausalLM 320/240, Dots3NoteForCausalLM 34882/34790, HrmTextForCausalLM "
        "128, MuseGlimmerForCausalLM 416, MuseGlimmerForConditionalGeneration 416"
    ),
    (1, 2, 4, 8): (
        "GemmaForCausalLM 126, Gemma2ForCausalLM 182, SeedOssForCausalLM 448, CwmForCausalLM 448, "
        "Ernie4_5ForCausalLM 126, ApertusForCausalLM 192, Starcoder2ForCausalLM 180, OlmoeForCausalLM 3136, "
        "HunYuanMoEV1ForCausalLM 6368, AfmoeForCausalLM 11776, DeepseekV4ForCausalLM 70790, KimiLinearForCausalLM "
        "20250/20143, Qwen3_5ForCausalLM 150, NemotronH_Nano_VL_V2 108, Gemma4ForCausalLM 245, "
        "Gemma4ForConditionalGeneration 410, PaliGemmaForConditionalGeneration 126, "
        "Gemma4UnifiedForConditionalGeneration 210, MossTranscribeDiarizeForConditionalGeneration 196, "
        "LightOnOCRForConditionalGeneration 196, FunASRForConditionalGeneration 196, "
        "PaddleOCRVLForConditionalGeneration 126, Qwen3_5ForConditionalGeneration 400, "
        "MiniMaxM3SparseForConditionalGeneration 22422, IQuestLoopCoderForCausalLM 560, IQuestCoderForCausalLM 560, "
        "OrionForCausalLM 280, InternLM2ForCausalLM 160, BailingMoeV2_5ForCausalLM 24004/23996, "
        "Gemma3nForConditionalGeneration 210, Gemma3nForCausalLM 210"
    ),
    (1, 2, 4, 8, 16): (
        "Ministral3ForCausalLM 238, CohereForCausalLM 280, Cohere2ForCausalLM 224, HunYuanDenseV1ForCausalLM 224, "
        "MixtralForCausalLM 896, ExaoneMoeForCausalLM 18384, DeepseekV3ForCausalLM 44971/44849, "
        "DeepseekV32ForCausalLM 44971/44849, GlmMoeDsaForCausalLM 58146/57990, Glm5NextForCausalLM 36423, "
        "Glm5NextForConditionalGeneration 36423, HYV4ForCausalLM 59760/59604, "
        "Gemma4ForConditionalGeneration-26b-a4b 11725/115, Mistral3ForConditionalGeneration 280, "
        "LlavaNextForConditionalGeneration 224, Cohere2VisionForConditionalGeneration 448, "
        "Idefics3ForConditionalGeneration 224, SmolVLMForConditionalGeneration 168, GlmAsrForConditionalGeneration "
        "196, GraniteSpeechPlusForConditionalGeneration 280, DiffusionGemmaForBlockDiffusion 11725/115, "
        "Molmo2ForConditionalGeneration 144, Qwen3ASRForConditionalGeneration 196, Qwen3ASRRealtimeGeneration 196, "
        "Emu3ForConditionalGeneration 224, MiniCPMV4_6ForConditionalGeneration 200/152, "
        "MiniCPMV4_7ForConditionalGeneration 200/152, CohereCompassForConditionalGeneration 280, "
        "Qwen3VLForConditionalGeneration 196, KimiK25ForConditionalGeneration 69547/69425, InternLM3ForCausalLM "
        "336, TeleChat3ForCausalLM 448, Rnj1ForCausalLM 224, NemotronForCausalLM 192, HyperCLOVAXForCausalLM 266, "
        "ExaoneMoEForCausalLM 18384, GPTBigCodeForCausalLM 160, GPTJForCausalLM 168, ExaoneForCausalLM 224, "
        "TeleChat2ForCausalLM 120/180/120, OPTForCausalLM 192, Cohere2MoeForCausalLM 1216, AXK1ForCausalLM "
        "34987/34865, Mamba2ForCausalLM 64, JambaForCausalLM 832, TeleFLMForCausalLM 448/256, BloomForCausalLM "
        "210/280/280, LongcatFlashForCausalLM 43400/43288, GPTNeoXForCausalLM 128"
    ),
}
MORE: dict[str, tuple[tuple[int, ...], list[int]]] = {
    name: (tuple(map(int, counts.split("/"))), list(sizes))
    for sizes, text in COUNTS.items()
    for name, counts in (row.split(" ") for row in text.split(", "))
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

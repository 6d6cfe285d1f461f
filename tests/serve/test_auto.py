"""--architecture auto of a class without an entry: what vLLM says of it is what the entry would have said, and is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import EVERYTHING
from engine_client import HERE, TO_SOURCE, Answers, find_engine
from engine_layers import UNBUILT

from entry_draft import differences
from openquant import compress
from openquant.errors import PlanError
from openquant.files.checkpoint import Checkpoint, open_checkpoint
from openquant.formats.schemes import find_scheme
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.config import ignored_layers
from openquant.plan.plan import Plan, make_plan
from openquant.registry.architecture import Architecture
from openquant.vllm_probe.build import build_architectures
from openquant.vllm_probe.client import EngineAnswer, Question, ask_engine
from openquant.vllm_probe.modules import engine_modules
from support import small_checkpoints

pytestmark = pytest.mark.serve

LLAMA4, FALCON = "Llama4ForCausalLM", "FalconForCausalLM"
QWEN3_MOE, QWEN3_VL = "Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration"
STACKED = "Qwen3VLMoeForConditionalGeneration"
# Of each kind one: q, k and v apart and together on disk, experts one by one and stacked, latent attention beside draft
# layers, linear attention, a wrapper, one whose towers vLLM has under other names.
KINDS = (
    *("LlamaForCausalLM", "Phi3ForCausalLM", QWEN3_MOE, "GraniteMoeForCausalLM", "DeepseekV3ForCausalLM"),
    *("Qwen3NextForCausalLM", QWEN3_VL, STACKED, "PaliGemmaForConditionalGeneration"),
)
# Rows in an order that only an entry tells.
TURNED = {
    LLAMA4: {"q_proj", "k_proj", "v_proj"},
    "Llama4ForConditionalGeneration": {"q_proj", "k_proj", "v_proj"},
    FALCON: {"query_key_value"},
    "BloomForCausalLM": {"query_key_value"},
    "TeleChat2ForCausalLM": {"query", "key_value"},
}
# What has to stay cannot be listed; an output's experts one by one would be loaded wrongly.
REFUSED = {
    "AriaForConditionalGeneration": "nor left out: a stack of experts that the engine does not load one by one",
    "FalconH1ForCausalLM": "in_proj",
    "IQuestLoopCoderForCausalLM": "gate_projections",
    "Lfm2VlForConditionalGeneration": "short_conv",
    "MossTranscribeDiarizeForConditionalGeneration": "whisper_encoder",
}
# What else is otherwise than an entry says, and why.
OTHERWISE = {
    "BailingMoeV3ForCausalLM": "g_proj stays: of its two kinds of layers, one has few rows there",
    "DeciLMForCausalLM": "refused: only its own code reads its configuration",
    "DeepseekForCausalLM": "its attention has no name, so nothing tells that it is one of the quantized",
    "GPTNeoXForCausalLM": "on the Transformers backend nothing tells that heads divide its query_key_value",
    "DeepseekV4ForCausalLM": "its compressors are built on CUDA alone",
    "HrmTextForCausalLM": "of its two stacks one is taken for the decoder's layers, the other stays",
    "LagunaForCausalLM": "vLLM names no gate_up_proj of it, so gate and up are not known to be one layer",
    "Mamba2ForCausalLM": "nothing tells that heads divide its out_proj",
    "MiniCPM3ForCausalLM": "its q_a_proj has no name, so nothing tells that it is one of the quantized",
    **dict.fromkeys(
        ("ChatGLMModel", "ChatGLMForConditionalGeneration", "GLM4VForCausalLM", "GPTBigCodeForCausalLM"),
        "q, k and v stay: no rule tells into which sizes the engine cuts what holds them",
    ),
    "InternLM2ForCausalLM": "it gathers what wqkv makes as if no head were copied to ranks (models/internlm2.py:162)",
}
ALIKE = (
    tuple(name for name in small_checkpoints.ARCHITECTURES if name not in (*UNBUILT, *TURNED, *REFUSED, *OTHERWISE))
    if EVERYTHING
    else KINDS
)
SERVED = (QWEN3_MOE, QWEN3_VL, STACKED, FALCON)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: open_checkpoint(small_checkpoints.write(root / name, name, vocab=2048))
        for name in (*ALIKE, *TURNED, *REFUSED)
    }


@pytest.fixture(scope="module")
def entries(checkpoints: dict[str, Checkpoint]) -> dict[str, Architecture | PlanError]:
    """What vLLM's answers make an entry of, or why they make none."""
    made = build_architectures(list(checkpoints.values()), find_engine().python, HERE / "stub")
    return dict(zip(checkpoints, made, strict=True))


@pytest.fixture(scope="module")
def found(entries: dict[str, Architecture | PlanError]) -> dict[str, Architecture]:
    return {name: one for name, one in entries.items() if isinstance(one, Architecture)}


@pytest.fixture(scope="module")
def asked(checkpoints: dict[str, Checkpoint], found: dict[str, Architecture]) -> dict[str, EngineAnswer]:
    """What it says once all is listed that these leave as it is."""
    questions = {
        name: Question(
            checkpoint.config,
            {info.name: info.shape for info in checkpoint.tensors.values()},
            ignored_layers(planned(checkpoint, found[name])),
        )
        for name, checkpoint in checkpoints.items()
        if name in found
    }
    answers = ask_engine(list(questions.values()), find_engine().python, HERE / "stub")
    return {name: one for name, one in zip(questions, answers, strict=True) if isinstance(one, EngineAnswer)}


def planned(checkpoint: Checkpoint, entry: Architecture | None = None) -> Plan:
    return make_plan(checkpoint, find_scheme("channel"), architecture=entry)


def test_the_plan_is_that_of_the_entry(subtests, checkpoints, found):
    for name in ALIKE:
        with subtests.test(name=name):
            ours, theirs = planned(checkpoints[name], found[name]), planned(checkpoints[name])
            # A stack's experts lie the same way around.
            cut = [
                {(one.module, one.part, one.transposed) for one, _ in plan.decisions.quantized}
                for plan in (ours, theirs)
            ]
            assert cut[0] == cut[1]
            sets = [{each for each in plan.decisions.fused.values() if len(each) > 1} for plan in (ours, theirs)]
            assert sets[0] == sets[1]
            assert summary.parallel_sizes(ours) == summary.parallel_sizes(theirs)
            assert found[name].embedding == MODELS[name].embedding


def test_what_stays_is_listed_and_what_is_quantized_is_not(subtests, checkpoints, found, asked):
    for name in (*ALIKE, *TURNED):
        with subtests.test(name=name):
            told = engine_modules(asked[name], {info.name: info.shape for info in checkpoints[name].tensors.values()})
            assert differences(found[name], told).keys() <= {"no pattern matches"}
            quantized = {
                weight.source.module for weight, _ in planned(checkpoints[name], found[name]).decisions.quantized
            }
            assert quantized
            assert not [
                module for module in quantized if (layer := told[module].layer) is None or layer.skipped is not False
            ]


def test_rows_in_another_order_stay_as_they_are(subtests, checkpoints, found):
    for name in TURNED:
        with subtests.test(name=name):
            plan = planned(checkpoints[name], found[name])
            kept = {
                one.tensor.module.rpartition(".")[2]
                for one in plan.decisions.passthrough
                if "in another order" in one.why
            }
            assert kept == TURNED[name]


def test_what_would_be_served_wrongly_is_refused(subtests, entries):
    for name in REFUSED:
        with subtests.test(name=name):
            error = entries[name]
            assert isinstance(error, PlanError)
            assert REFUSED[name] in str(error)


@pytest.fixture(scope="module")
def logprobs(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of each source, and of what is made of it where it has no entry, `-auto`."""
    root, engine = tmp_path_factory.mktemp("served"), find_engine()
    script = root / "python"
    script.write_text(f'#!/bin/sh\nexec env PYTHONPATH={HERE / "stub"} {engine.python} "$@"\n')
    script.chmod(0o755)
    models: dict[str, Path] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPENQUANT_VLLM", str(script))
        for name in SERVED:
            patched.delitem(MODELS, name)
            models |= {name: checkpoints[name].root, f"{name}-auto": root / name}
            assert compress(checkpoints[name].root, root / name, architecture="auto").architecture == name
    return engine.logprobs(models, root / "answers")


def test_it_is_served(subtests: pytest.Subtests, logprobs: Answers) -> None:
    for name in SERVED:
        with subtests.test(name=name):
            assert logprobs.between(name, f"{name}-auto") <= TO_SOURCE

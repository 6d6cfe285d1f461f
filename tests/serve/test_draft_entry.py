"""Every entry of the registry held against vLLM: what it quantizes, joins, splits and lists is what the engine builds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from chosen import CHOSEN
from engine_client import HERE, find_engine
from engine_layers import UNBUILT

from conftest import ROOT
from entry_draft import differences, draft
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import find_scheme
from openquant.models import MODELS
from openquant.plan.plan import ignored_layers, make_plan
from openquant.registry.architecture import Architecture, FusedLayers, ModuleRules, ParallelSplit
from openquant.version import SGLANG
from support import small_checkpoints
from vllm_probe.client import EngineAnswer, EngineFailed, Question, ask_engine
from vllm_probe.modules import EngineModule, engine_modules

pytestmark = pytest.mark.serve

# Refused in both schemes that entries are asked in, and what no engine reads the configuration of by itself; experts
# without a gate, which the CPU build refuses (layers/fused_moe/config.py:1403).
UNASKED = ("DeepseekV4ForCausalLM", "DeciLMForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
BUILT = tuple(name for name in small_checkpoints.ARCHITECTURES if name not in (*UNBUILT, *UNASKED))
HELD = tuple(name for name in BUILT if name in CHOSEN)
# What an entry says otherwise than the engine, and why that is right.
EXPLAINED: Mapping[str, Mapping[str, str]] = {
    # SGLang does, which has its own name for them.
    "LagunaForCausalLM": {
        "the engine joins it with nothing, not gate_proj, up_proj": f"{SGLANG} joins them (models/laguna.py:617)"
    },
    "MiniMaxM3SparseForConditionalGeneration": {
        "the engine splits it along out, not None": "each rank has all of index_k (layers/linear.py:1485)"
    },
}
LLAMA, LLAMA4 = "LlamaForCausalLM", "Llama4ForCausalLM"
QWEN3_MOE, DEEPSEEK = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
UNLISTED = f"{QWEN3_MOE}-unlisted"


def listed(architecture: str, root: Path) -> list[str]:
    """What an output's config lists."""
    source = small_checkpoints.write(root / architecture, architecture)
    schemes = map(find_scheme, ("tensor", "channel"))
    scheme = next(scheme for scheme in schemes if small_checkpoints.refused(architecture, scheme) is None)
    return ignored_layers(make_plan(open_checkpoint(source), scheme))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineAnswer]:
    """What vLLM says of each architecture that a test here is about, and of one whose list was left out."""
    root, interpreter = tmp_path_factory.mktemp("asked"), find_engine().python
    names = dict.fromkeys(
        (*HELD, *DRAFTED, *(name for name, _, _ in MUTATIONS.values() if name != UNLISTED), QWEN3_MOE)
    )
    questions = {
        name: Question(small_checkpoints.config(name), small_checkpoints.shapes(name), listed(name, root))
        for name in names
    }
    questions[UNLISTED] = replace(questions[QWEN3_MOE], listed=())
    found = dict(zip(questions, ask_engine(list(questions.values()), interpreter, HERE / "stub"), strict=True))
    failed = {name: one.message for name, one in found.items() if isinstance(one, EngineFailed)}
    assert failed == {}
    return {name: one for name, one in found.items() if isinstance(one, EngineAnswer)}


@pytest.fixture(scope="module")
def told(asked: dict[str, EngineAnswer]) -> dict[str, dict[str, EngineModule]]:
    """The same by the checkpoint's modules."""
    return {
        name: engine_modules(one, small_checkpoints.shapes(name.removesuffix("-unlisted")))
        for name, one in asked.items()
    }


def test_an_entry_says_what_the_engine_does(subtests, told):
    for architecture in HELD:
        with subtests.test(architecture=architecture):
            assert any(one.layer is not None and one.layer.linear for one in told[architecture].values())
            assert (
                differences(MODELS[architecture], told[architecture]).keys() == EXPLAINED.get(architecture, {}).keys()
            )


def without(entry: Architecture, *fused: str) -> Architecture:
    return replace(entry, fused=tuple(one for one in entry.fused if one.pattern not in fused))


def quantizing(entry: Architecture, pattern: str) -> Architecture:
    keep = tuple(one for one in entry.keep if one.pattern != pattern)
    assert len(keep) < len(entry.keep)
    return replace(entry, compress=(*entry.compress, pattern), keep=keep)


def splitting(entry: Architecture, pattern: str, axis: str) -> Architecture:
    return replace(entry, splits=(ParallelSplit(pattern, axis), *entry.splits))


STABLELM, GRANITE = "StableLmForCausalLM", "GraniteMoeForCausalLM"
QKV = ".self_attn.{q,k,v}_proj"
MUTATIONS = {
    "joined left out": (LLAMA, without(MODELS[LLAMA], QKV), "the engine joins q_proj, k_proj, v_proj, not "),
    "joined too much": (
        LLAMA,
        replace(MODELS[LLAMA], fused=(FusedLayers(".mlp.{gate,up,down}_proj"),)),
        "the engine joins it with nothing, not gate_proj, up_proj, down_proj",
    ),
    "rows for columns": (
        LLAMA,
        splitting(MODELS[LLAMA], ".mlp.{gate,up}_proj", "in"),
        "the engine splits it along out, not in",
    ),
    "columns for rows": (
        LLAMA,
        splitting(MODELS[LLAMA], ".mlp.down_proj", "out"),
        "the engine splits it along in, not out",
    ),
    "router quantized": (
        DEEPSEEK,
        quantizing(MODELS[DEEPSEEK], ".mlp.gate"),
        "quantized, and the engine builds it without a quantization",
    ),
    "merged name left out": (
        STABLELM,
        replace(MODELS[STABLELM], fused=tuple(FusedLayers(one.pattern) for one in MODELS[STABLELM].fused)),
        "the engine does not derive qkv_proj from its members, and listed_as does not say it",
    ),
    "order left out": (LLAMA4, replace(MODELS[LLAMA4], reordered=()), "the engine puts its rows in another order"),
    "experts called layers": (
        QWEN3_MOE,
        replace(MODELS[QWEN3_MOE], experts=()),
        "experts to the engine, and not to the entry",
    ),
    "tensor without a rule": (LLAMA, replace(MODELS[LLAMA], compress=MODELS[LLAMA].compress[:1]), "no pattern matches"),
    "router not listed": (
        UNLISTED,
        MODELS[QWEN3_MOE],
        "kept, and not listed under the engine's name model.layers.*.mlp.gate",
    ),
}


def test_control_a_wrong_entry_shows(subtests: pytest.Subtests, told: dict[str, dict[str, EngineModule]]) -> None:
    for mutation in MUTATIONS:
        with subtests.test(mutation=mutation):
            architecture, entry, wrong = MUTATIONS[mutation]
            found = differences(entry, told[architecture])
            assert wrong in found
            assert found[wrong]


# Each has another way of joining, stacking or naming, and none has layers that are kept although the engine would
# quantize them: those are decisions, which the engine does not know of.
DRAFTED = (
    *(LLAMA, QWEN3_MOE, STABLELM, GRANITE, "MixtralForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM"),
    *("Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "Starcoder2ForCausalLM"),
)


def test_a_draft_quantizes_what_the_written_entry_does(subtests, asked, told):
    for architecture in DRAFTED:
        with subtests.test(architecture=architecture):
            shapes = small_checkpoints.shapes(architecture)
            made = draft(architecture, asked[architecture], shapes, small_checkpoints.HIDDEN)
            assert differences(made.entry, told[architecture]) == {}
            for module, one in told[architecture].items():
                if one.read:
                    drafted, written = (
                        ModuleRules(made.entry).rule(module),
                        ModuleRules(MODELS[architecture]).rule(module),
                    )
                    assert (drafted.compress, drafted.stack, drafted.expert_depth) == (
                        written.compress,
                        written.stack,
                        written.expert_depth,
                    )


def test_the_tool_prints_a_draft() -> None:
    command = [sys.executable, str(ROOT / "tools" / "draft_entry.py"), LLAMA]
    environment = {**os.environ, "OPENQUANT_VLLM": str(find_engine().python)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert 'model(\n    "LlamaForCausalLM",\n    ATTENTION,\n    MLP,\n)' in done.stdout
    assert "otherwise than the engine\n#   " not in done.stdout

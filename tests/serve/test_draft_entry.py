"""Every entry of the registry held against vLLM: what it quantizes, joins, splits and lists is what the engine builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from chosen import CHOSEN
from engine_client import HERE, find_engine
from engine_layers import UNBUILT

from entry_draft import differences
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import find_scheme
from openquant.models import MODELS
from openquant.plan.plan import ignored_layers, make_plan
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


def listed(architecture: str, root: Path) -> list[str]:
    """What an output's config lists."""
    source = small_checkpoints.write(root / architecture, architecture)
    schemes = map(find_scheme, ("tensor", "channel"))
    scheme = next(scheme for scheme in schemes if small_checkpoints.refused(architecture, scheme) is None)
    return ignored_layers(make_plan(open_checkpoint(source), scheme))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineAnswer]:
    """What vLLM says of each architecture that a test here is about."""
    root, interpreter = tmp_path_factory.mktemp("asked"), find_engine().python
    questions = {
        name: Question(small_checkpoints.config(name), small_checkpoints.shapes(name), listed(name, root))
        for name in HELD
    }
    found = dict(zip(questions, ask_engine(list(questions.values()), interpreter, HERE / "stub"), strict=True))
    failed = {name: one.message for name, one in found.items() if isinstance(one, EngineFailed)}
    assert failed == {}
    return {name: one for name, one in found.items() if isinstance(one, EngineAnswer)}


@pytest.fixture(scope="module")
def told(asked: dict[str, EngineAnswer]) -> dict[str, dict[str, EngineModule]]:
    """The same by the checkpoint's modules."""
    return {name: engine_modules(one, small_checkpoints.shapes(name)) for name, one in asked.items()}


def test_an_entry_says_what_the_engine_does(subtests, told):
    for architecture in HELD:
        with subtests.test(architecture=architecture):
            assert any(one.layer is not None and one.layer.linear for one in told[architecture].values())
            assert (
                differences(MODELS[architecture], told[architecture]).keys() == EXPLAINED.get(architecture, {}).keys()
            )


LLAMA, QWEN3_MOE, STABLELM, GRANITE = (
    *("LlamaForCausalLM", "Qwen3MoeForCausalLM"),
    *("StableLmForCausalLM", "GraniteMoeForCausalLM"),
)

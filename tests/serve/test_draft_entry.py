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
from vllm_probe.client import EngineAnswer, Question, ask_engine
from vllm_probe.modules import engine_modules

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


def test_an_entry_says_what_the_engine_does(subtests: pytest.Subtests, tmp_path: Path) -> None:
    questions = [
        Question(small_checkpoints.config(name), small_checkpoints.shapes(name), listed(name, tmp_path))
        for name in HELD
    ]
    for architecture, answer in zip(HELD, ask_engine(questions, find_engine().python, HERE / "stub"), strict=True):
        with subtests.test(architecture=architecture):
            assert isinstance(answer, EngineAnswer), answer
            told = engine_modules(answer, small_checkpoints.shapes(architecture))
            assert any(one.layer is not None and one.layer.linear for one in told.values())
            found = differences(MODELS[architecture], told)
            assert found.keys() == EXPLAINED.get(architecture, {}).keys()

"""What the plan counts as kept of a token and of a sequence is what vLLM keeps of them, and vLLM loads scales of an FP8 cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chosen import EVERYTHING
from engine_client import EngineError, find_engine, write_cached
from engine_layers import UNBUILT

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import TENSOR
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.plan import make_plan
from support import small_checkpoints

pytestmark = pytest.mark.serve

# All heads alike, windows, latent attention, states, chunks, mixers of several kinds, a fused projection.
CASES = (
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Llama4ForCausalLM",
    "NemotronHForCausalLM",
    "Lfm2ForCausalLM",
    "Phi3ForCausalLM",
)
WINDOWED = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    engine, root = find_engine(), tmp_path_factory.mktemp("cache")
    models = [small_checkpoints.write(root / name, name) for name in CASES]
    return {
        (name, dtype): one
        for dtype in ("auto", "fp8")
        for name, one in zip(CASES, engine.cache(models, root / dtype, dtype), strict=True)
    } | {("", "root"): root}


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_token_and_of_a_sequence(kept: dict[tuple[str, str], Any], name: str, dtype: str) -> None:
    found = kept[name, dtype]
    assert not isinstance(found, EngineError), found
    token = window = state = 0
    for kind, page, tokens in found.values():
        if kind == "MambaSpec":
            state += page
        elif kind in WINDOWED:
            window += page // tokens
        else:
            token += page // tokens
    root: Path = kept["", "root"]
    served = summary.serving(make_plan(open_checkpoint(root / name), TENSOR))
    assert served is not None
    ours = served[0].cache
    assert ours is not None
    fp8 = dtype == "fp8"
    assert ours.per_token(fp8) == token
    assert sum(each.fp8 if fp8 else each.bf16 for each in ours.layers if each.window) == window
    assert ours.state == state


# Scales of keys and values.


def cached(name: str) -> bool:
    """Whether an architecture is said to have scales of keys and values."""
    model = MODELS[name]
    return model.cache_refused is None and any(what.heads is not None for what in model.cached)


# All heads alike, windows, a fused projection, mixers of several kinds, chunks, linear attention, experts, layers that are
# called h, and such without attention.
LOADED = (
    ("Qwen3ForCausalLM", "channel"),
    ("Gemma3ForConditionalGeneration", "channel"),
    ("Phi3ForCausalLM", "tensor"),
    ("NemotronHForCausalLM", "channel"),
    ("Llama4ForCausalLM", "channel"),
    ("Qwen3NextForCausalLM", "channel"),
    ("Gemma4ForCausalLM", "channel"),
    ("Qwen3MoeForCausalLM", "none"),
    ("FalconForCausalLM", "channel"),
    ("DeciLMForCausalLM", "channel"),
)
# With weights as they are; their scales are another question.
ALL = tuple((name, "none") for name in small_checkpoints.ARCHITECTURES if name not in UNBUILT and cached(name))


def test_vllm_loads_the_scales_of_all_layers(tmp_path: Path) -> None:
    asked = dict.fromkeys((*LOADED, *(ALL if EVERYTHING else ())))
    outputs = [write_cached(tmp_path / f"{name}-{scheme}", name, scheme) for name, scheme in asked]
    for output, answer in zip(outputs, find_engine().layers(outputs, tmp_path / "answers"), strict=True):
        assert not isinstance(answer, EngineError), f"{output}: {answer}"
        found = sorted(scale for both in answer["cache"].values() for scale in both)
        stored = small_checkpoints.read(output).items()
        scales = [float(each) for key, each in stored if key.endswith((".k_scale", ".v_scale"))]
        # Layers that use another's keys and values have none of their own.
        shared = [1.0] * (len(found) - len(scales)) if "Gemma3n" in output.name else []
        assert found == sorted([*scales, *shared]), output

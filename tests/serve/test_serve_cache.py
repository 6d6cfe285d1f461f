"""What the plan counts as kept of a token and of a sequence is what vLLM keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_client import EngineError, find_engine

from openquant.files.checkpoint import open_checkpoint
from openquant.plan.serving import stored_serving
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
    ours = stored_serving(open_checkpoint(root / name)).cache
    assert ours is not None
    fp8 = dtype == "fp8"
    assert ours.per_token(fp8) == token
    assert sum(each.fp8 if fp8 else each.bf16 for each in ours.layers if each.window) == window
    assert ours.state == state

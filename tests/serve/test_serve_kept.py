"""vLLM computes with what --scheme keep makes of a checkpoint of modelopt what it computes with the checkpoint itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_client import Answers, find_engine, rewrite

from conftest import EXAMPLE
from openquant import compress, dequantize
from support import small_checkpoints
from support.mixed_precision import stored_mixed

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    root = tmp_path_factory.mktemp("kept")
    weights, quantization = stored_mixed(small_checkpoints.read(EXAMPLE))
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"quantization_config": quantization}
    models = {"modelopt": rewrite(EXAMPLE, root / "modelopt", weights, config)}
    models |= {name: root / name for name in ("kept", "plain")}
    compress(models["modelopt"], root / "kept", "keep")
    dequantize(models["modelopt"], root / "plain")
    return find_engine().logprobs(models, Path(root / "answers"))


def test_kept(logprobs: Answers) -> None:
    print(
        logprobs.between("modelopt", "kept"), logprobs.between("plain", "kept"), logprobs.between("plain", "modelopt")
    )
    assert (logprobs.of("modelopt") == logprobs.of("kept")).all()

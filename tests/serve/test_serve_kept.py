"""What --scheme keep makes of a checkpoint of modelopt, served by vLLM.

vLLM's CPU build has no kernel for modelopt's FP4, so the checkpoint itself is not served.
"""

from __future__ import annotations

import json

import pytest
from engine_client import Answers, find_engine, rewrite

from conftest import EXAMPLE
from openquant import compress, dequantize
from support import small_checkpoints
from support.mixed_precision import stored_mixed

pytestmark = pytest.mark.serve

# Found: 0.0054. Activations of some layers are in FP4, and the KV cache is in FP8.
TO_PLAIN = 0.0065


@pytest.fixture(scope="module")
def logprobs(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the output, and of the dequantized checkpoint."""
    root = tmp_path_factory.mktemp("kept")
    weights, quantization = stored_mixed(small_checkpoints.read(EXAMPLE))
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"quantization_config": quantization}
    source = rewrite(EXAMPLE, root / "source", weights, config)
    compress(source, root / "kept", "keep")
    dequantize(source, root / "plain")
    models = {"kept": root / "kept", "plain": root / "plain"}
    return find_engine().logprobs(models, root / "answers", "text")


def test_several_formats_in_one_model(logprobs: Answers) -> None:
    assert logprobs.between("plain", "kept") < TO_PLAIN

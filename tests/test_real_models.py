"""What is fetched of a real model is what was measured, and schemes cost on it what they cost then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import openquant
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))

REAL = os.environ.get("OPENQUANT_REAL_MODELS")


@pytest.mark.skipif(REAL is None, reason="OPENQUANT_REAL_MODELS is not set to what benchmarks/real_models.py fetched")
def test_schemes_cost_on_a_real_model_what_they_did(tmp_path: Path) -> None:
    assert REAL is not None
    source = Path(REAL, "smollm2-135m")
    schemes = ("int8-weights", "nvfp4")
    outputs = [tmp_path / scheme for scheme in schemes]
    for output in outputs:
        openquant.compress(source, output, output.name)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The capital of France is")
    articles = Path(REAL, "texts", "articles.jsonl")
    found = openquant.evaluate(outputs, source, text=articles, samples=4, length=128, prompts=prompt)
    # Weights alone, as this does not depend on how the processor rounds.
    losses = [entry["weights_only"]["kl"] for entry in found.outputs]
    assert losses == [pytest.approx(0.00599, rel=0.15), pytest.approx(0.2457, rel=0.1)]
    assert found.floor["kl"] < losses[0]
    assert [output["verdict"] for output in found.outputs] == ["close", "changed"]

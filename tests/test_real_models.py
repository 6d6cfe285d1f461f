"""What is fetched of a real model is what was measured, and schemes cost on it what they cost then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import openquant
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import real_models

REAL = os.environ.get("OPENQUANT_REAL_MODELS")


def test_articles_are_long_and_english() -> None:
    english = "The history of the town and of the river was long.\n" * 200
    german = "Die Geschichte der Stadt und des Flusses war lang.\n" * 200
    rows = list(real_models.articles([{"input": english}, {"input": german}, {"input": english[:1000]}]))
    assert rows == [{"text": english.replace("\n", " ")}]


def test_a_chat_is_taken_once_at_its_last_turn() -> None:
    turns = [f'agent_{"AB"[n % 2]}: "turn {n}, as they say"' for n in range(16)]
    examples = [{"input": " ".join(turns[: n + 1])} for n in range(16)]
    (chat,) = real_models.chats([*examples, {"input": 'agent_A: "hello"'}])
    assert chat["messages"][0] == {"role": "user", "content": "turn 0, as they say"}
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"] * 8
    assert chat["messages"][-1]["content"] == "turn 15, as they say"


def test_other_files_than_those_that_were_measured_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "real_models.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} has no smollm2-135m/model.safetensors: remove it, and run this again\n"
    for name in real_models.DIGESTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("smollm2-135m/model.safetensors is not what was measured: its SHA-256 is 2d7116")


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

"""`openquant eval` says of a model that somebody else trained what vLLM measures, over the same tokens.

In the schemes here vLLM rounds activations where eval does, with kernels of its own or those of shim/. Its CPU kernel
for one FP8 scale per tensor leaves them in bfloat16. Of `int8-weights` the KL is near the floor, which is rounding in
bfloat16 alone, and not the same in two programs.

Medians are compared: ten of the 508 positions have a quarter of the mean, and what these say depends on how a CPU
rounds. On one without AVX-512 vLLM's mean of `channel` was 0.069, that of eval 0.091, the medians 0.0281 and
0.0279.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from engine_client import Answers, divergence, find_engine

from conftest import everything
from openquant import compress
from openquant.data.corpus import read_corpus
from openquant.data.tokenizer import load_tokenizer
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import Evaluation, EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.options import Texts

REAL = os.environ.get("OPENQUANT_REAL_MODELS")
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(
        REAL is None, reason="OPENQUANT_REAL_MODELS is not set to what benchmarks/real_models.py fetched"
    ),
]

# By day that which serves most.
SCHEMES = ("channel", "int8", "int4", "nvfp4") if everything() else ("channel",)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Answers]:
    """What eval says of each scheme, and vLLM's log-probabilities of the source and of each, over the same documents."""
    engine = find_engine()
    root = tmp_path_factory.mktemp("real")
    assert REAL is not None
    models = {"source": Path(REAL, "smollm2-135m")} | {scheme: root / scheme for scheme in SCHEMES}
    for scheme in SCHEMES:
        compress(models["source"], models[scheme], scheme)
    files = [str(Path(REAL, "texts", f"{name}.jsonl")) for name in ("articles", "chats", "code")]
    corpus = read_corpus(Texts(text=files, dataset=None, samples=4, length=128), load_tokenizer(models["source"]))
    source, *outputs = (ModelUnderTest(name, open_checkpoint(path)) for name, path in models.items())
    evaluation = compare_outputs(source, outputs, corpus, EvaluationSettings())
    prompts = root / "prompts.json"
    prompts.write_text(json.dumps([document.ids for document in corpus.documents]))
    return evaluation, engine.logprobs(models, root / "answers", str(prompts))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_openquant_eval_says_the_same(scheme: str, measured: tuple[Evaluation, Answers]) -> None:
    evaluation, logprobs = measured
    kl = evaluation.outputs[SCHEMES.index(scheme)]["kl"]
    assert kl["mean"] > 10 * evaluation.floor["kl"]
    served = divergence(logprobs.of("source"), logprobs.of(scheme))
    assert np.median(served) == pytest.approx(kl["median"], rel=0.1)

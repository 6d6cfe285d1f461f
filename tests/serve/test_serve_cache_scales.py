"""An FP8 cache of keys and values: what it costs, in vLLM and as openquant eval computes it, and that vLLM loads its scales.

The divergence of text is 0.0011 larger with it: channel 0.0019 -> 0.0030, tensor 0.0008 -> 0.0018, int4 0.0089 -> 0.0098.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chosen import EVERYTHING
from engine_client import Answers, EngineError, find_engine, rewrite, write_cached
from engine_layers import UNBUILT

from conftest import EXAMPLE
from openquant import calibrate, compress
from openquant.data.corpus import Corpus, Document
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.models import MODELS
from support import small_checkpoints

pytestmark = pytest.mark.serve

TEXT = Path(__file__).parent / "text_prompts.json"
# How outputs are made of the example.
MADE: dict[str, dict[str, Any]] = {
    "plain": {"scheme": "channel"},
    "ones": {"scheme": "channel", "kv_cache": "fp8"},
    "calibrated": {"scheme": "channel", "kv_cache": "fp8"},
    "tensor": {},
    "tensor, ones": {"kv_cache": "fp8"},
    # Weights as they are.
    "ones alone": {"scheme": "none", "kv_cache": "fp8"},
}
# Of one whose scales are those of a calibration, what they are multiplied by.
WRONG = {"small": 1 / 32, "large": 2.0**16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    find_engine()
    root = tmp_path_factory.mktemp("models")
    calibration = calibrate(EXAMPLE, root / "calibration", samples=16)
    models = {"source": EXAMPLE, **{name: root / name for name in MADE}}
    for name, options in MADE.items():
        more = {"calibration": calibration} if name == "calibrated" else {}
        compress(EXAMPLE, models[name], **options, **more)
    tensors = small_checkpoints.read(models["calibrated"])
    for name, factor in WRONG.items():
        changed = {
            key: each * factor if key.endswith(("k_scale", "v_scale")) else each for key, each in tensors.items()
        }
        models[name] = rewrite(models["calibrated"], root / name, changed)
    return models


@pytest.fixture(scope="module")
def logprobs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    engine, root = find_engine(), tmp_path_factory.mktemp("answers")
    told = {name: path for name, path in models.items() if name == "tensor, ones"}
    rest = {name: path for name, path in models.items() if name not in told}
    # The fp8 format cannot say it.
    return Answers({**engine.logprobs(rest, root / "text", "text"), **engine.logprobs(told, root / "cached", "cached")})


@pytest.mark.parametrize(
    ("plain", "cached"),
    [
        ("plain", "ones"),
        ("plain", "calibrated"),
        ("tensor", "tensor, ones"),
        ("source", "ones alone"),
    ],
)
def test_an_fp8_cache_costs_little(plain: str, cached: str, logprobs: Answers) -> None:
    before, after = logprobs.between("source", plain), logprobs.between("source", cached)
    # Keys and values are rounded at all.
    assert 0.0007 < after - before < 0.0015


@pytest.mark.parametrize("wrong", WRONG)
def test_control_wrong_scales_show(wrong: str, logprobs: Answers) -> None:
    assert logprobs.between("plain", wrong) > 0.5


def test_openquant_eval_says_the_same(models: dict[str, Path], logprobs: Answers) -> None:
    ids = json.loads(TEXT.read_text())
    texts = Corpus(tuple(Document("code", str(at), tuple(each)) for at, each in enumerate(ids)), "", {})
    names = ("ones", "calibrated", "ones alone")
    source, *outputs = (ModelUnderTest(each, open_checkpoint(models[each])) for each in ("source", *names))
    for name, found in zip(names, compare_outputs(source, outputs, texts, EvaluationSettings()).outputs, strict=True):
        assert found["kv_cache"] == "fp8"
        assert found["kl"]["mean"] == pytest.approx(logprobs.between("source", name), rel=0.1)


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

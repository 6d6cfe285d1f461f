"""Streamed logits, to the last bit: of the oldest transformers, of quantized outputs, of experts one by one.

tests/registry/test_every_architecture.py has those of every architecture in the installed transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import ROOT, everything
from openquant import dequantize
from openquant.errors import SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import BLOCK, VARIANTS, Scheme
from openquant.models import MODELS
from openquant.streaming.model import StreamedModel
from openquant.streaming.transformers_internals import TESTED
from support import small_checkpoints, small_models
from support.conversions import Shelf
from support.representatives import in_all_ways, representatives
from support.streamed_logits import all_equal, computes_the_same, streamed_logits

OLDEST = "OPENQUANT_OLDEST_TRANSFORMERS"


def test_logits_are_those_of_from_pretrained_in_the_oldest_transformers(shelf: Shelf) -> None:
    folder = os.environ.get(OLDEST)
    if not folder:
        assert os.environ.get("OPENQUANT_REQUIRE_SERVE") != "1", f"{OLDEST} is not set, and must be here"
        pytest.skip(f"{OLDEST} names no directory with transformers {TESTED[0]}.0 (.ci/run makes one)")
    newer = {name for name, small in small_models.MODELS.items() if small.newer}
    # By day each third of them.
    names = [name for name in representatives(small_checkpoints.STREAMED) if name not in newer]
    sources = [shelf.source(name) for name in names[:: 1 if everything() else 3]]
    path = os.pathsep.join([folder, str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run([sys.executable, "-c", "import transformers as t; print(t.__version__)"], env=environment,
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert found.stdout.startswith(f"{TESTED[0]}.")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "streamed_logits.py"), *map(str, sources)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = dict(map(json.loads, done.stdout.splitlines()))
    assert told == dict.fromkeys(map(str, sources), True)


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        *(("Qwen3ForCausalLM", scheme) for scheme in in_all_ways(VARIANTS)),
        ("Qwen3MoeForCausalLM", BLOCK),
        ("Gemma3ForConditionalGeneration", VARIANTS[0]),
        ("DeepseekV3ForCausalLM", BLOCK),
    ],
    ids=lambda value: getattr(value, "suffix", value),
)
def test_outputs_compute_what_their_dequantized_weights_do(
    shelf: Shelf, tmp_path: Path, architecture: str, scheme: Scheme
) -> None:
    output = shelf.converted(architecture, scheme).output
    dequantize(output, tmp_path / "plain")
    assert computes_the_same(output, tmp_path / "plain")


@pytest.mark.parametrize("architecture", ["GraniteMoeForCausalLM", "Llama4ForCausalLM"])
def test_experts_one_by_one_compute_what_their_stacks_do(shelf: Shelf, tmp_path: Path, architecture: str) -> None:
    """As outputs have them, for transformers' classes that know no such names."""
    source = shelf.source(architecture)
    split = {}
    [experts] = MODELS[architecture].experts
    for name, tensor in small_checkpoints.read(source).items():
        place, _, last = name.removesuffix(".weight").rpartition(".")
        layout = next(
            (layout for layout in experts.stacked if layout.name == last and place.endswith(experts.place)), None
        )
        if layout is None:
            split[name] = tensor
            continue
        path = place.removesuffix(experts.place) + experts.path
        for expert, matrix in enumerate(tensor):
            pieces = (matrix.T if layout.transposed else matrix).chunk(len(layout.parts))
            split |= {
                f"{path}.{expert}.{part}.weight": piece.contiguous()
                for part, piece in zip(layout.parts, pieces, strict=True)
            }
    assert len(split) > len(small_checkpoints.read(source))
    small_checkpoints.write(tmp_path / "split", architecture, weights=split)
    models = [StreamedModel(open_checkpoint(path)) for path in (source, tmp_path / "split")]
    assert all_equal(*map(streamed_logits, models))
    del split[next(name for name in split if ".experts.2." in name)]
    small_checkpoints.write(tmp_path / "lacking", architecture, weights=split)
    with pytest.raises(SourceError, match=r"experts\.\w+ of \w+ is missing from the checkpoint"):
        streamed_logits(StreamedModel(open_checkpoint(tmp_path / "lacking")))


def test_the_installed_transformers_is_the_newest_tested() -> None:
    assert version("transformers").startswith(f"{TESTED[1]}.")
    assert f'"transformers>={TESTED[0]}"' in (ROOT / "pyproject.toml").read_text()

"""What it takes to serve a checkpoint as it lies is what its plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from openquant import compress
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import BLOCK, CHANNEL, TENSOR
from openquant.plan import summary
from openquant.plan.plan import make_plan
from openquant.plan.serving import stored_serving
from support import small_checkpoints
from support.published_checkpoints import with_few_experts
from support.rows import for_each


@for_each(
    "name",
    ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "Lfm2ForCausalLM", "Qwen2_5_VLForConditionalGeneration",
     "Phi3ForCausalLM", "Gemma3ForConditionalGeneration"],
)  # fmt: skip
def test_a_source_is_as_its_plan_says(name: str) -> None:
    checkpoint = with_few_experts(name)
    plan = make_plan(checkpoint, TENSOR)
    assert summary.serving(plan) is not None
    assert stored_serving(checkpoint) == summary.serving(plan)[0]


@for_each("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_an_output_is_as_its_plan_says(tmp_path: Path, architecture: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", architecture)
    for scheme in (TENSOR, BLOCK, CHANNEL):
        plan, out = make_plan(open_checkpoint(source), scheme), tmp_path / scheme.name
        compress(source, out, scheme.name)
        found = stored_serving(open_checkpoint(out))
        assert summary.serving(plan) is not None
        output = summary.serving(plan)[1]
        assert (found.weights_bytes, found.cache) == (output.weights_bytes, output.cache)
        assert [fit.gpus for fit in found.fits] == [fit.gpus for fit in output.fits]


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["Another"]}))
    found = stored_serving(open_checkpoint(source))
    assert found.cache is not None
    assert stored_serving(replace(open_checkpoint(source), config={"architectures": ["Another"]})).cache is None

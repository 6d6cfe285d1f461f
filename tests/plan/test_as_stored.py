"""What it takes to serve a checkpoint as it lies is what its plan says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import TENSOR
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


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_checkpoints.write(tmp_path / "source"))
    config = {**checkpoint.config, "architectures": ["Another"]}
    assert stored_serving(replace(checkpoint, config=config, architecture="Another")).cache is not None
    bare = replace(checkpoint, config={"architectures": ["Another"]}, architecture="Another")
    assert stored_serving(bare).cache is None

"""--architecture: a known layout under another name, and what has no entry."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Run, change_json, tree
from openquant import compress
from openquant.errors import PlanError
from openquant.formats.schemes import TENSOR
from openquant.plan.plan import Plan, make_plan
from support import small_checkpoints
from support.published_checkpoints import NAMES, shortened, with_few_experts
from support.rows import for_each


def renamed(root: Path, architecture: str, name: str) -> Path:
    source = small_checkpoints.write(root, architecture)
    change_json(source / "config.json", lambda config: config.update(architectures=[name]))
    return source


def test_a_renamed_class_converts_as_the_one_it_is(run: Run, tmp_path: Path) -> None:
    source = renamed(tmp_path / "mine", "Qwen3ForCausalLM", "MyForCausalLM")
    refused = run("-m", source)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0].startswith("error: MyForCausalLM is not a known architecture; of ")
    assert "--architecture" in refused.stderr.splitlines()[1]
    done = run("-m", source, "-o", "out", "--architecture", "Qwen3ForCausalLM")
    assert (done.returncode, done.stderr) == (0, "")
    compress(small_checkpoints.write(tmp_path / "plain", "Qwen3ForCausalLM"), tmp_path / "expected")
    found, expected = tree(tmp_path / "here" / "out"), tree(tmp_path / "expected")
    assert found["model.safetensors"] == expected["model.safetensors"]
    config = json.loads(found["config.json"])
    assert config["architectures"] == ["MyForCausalLM"]
    assert config["quantization_config"] == json.loads(expected["config.json"])["quantization_config"]


def test_a_renamed_class_keeps_its_weights_under_the_one_it_is(tmp_path: Path) -> None:
    source = renamed(tmp_path / "mine", "Qwen3ForCausalLM", "MyForCausalLM")
    result = compress(source, tmp_path / "out", "none", kv_cache="fp8", architecture="Qwen3ForCausalLM")
    assert result.kv_cache == "fp8"


NOTE = "decided from names and shapes alone: look at the plan, and at what the engine makes of it"


def test_names_and_shapes_say_so_unless_told_to_be_quiet(run: Run, tmp_path: Path) -> None:
    source = renamed(tmp_path / "mine", "Qwen3MoeForCausalLM", "MyForCausalLM")
    compress(small_checkpoints.write(tmp_path / "plain", "Qwen3MoeForCausalLM"), tmp_path / "expected")
    expected = (tmp_path / "expected" / "model.safetensors").read_bytes()
    for number, (name, how) in enumerate((("generic", ""), ("auto", "--json"), ("auto", "-q"))):
        done = run("-m", source, "-o", f"out{number}", "--architecture", name, *how.split())
        assert done.returncode == 0, done.stderr
        said = {"": done.stdout, "--json": done.stderr, "-q": done.stderr}[how]
        assert (f"note: {NOTE}\n" in said) == (how != "-q")
        assert (tmp_path / "here" / f"out{number}" / "model.safetensors").read_bytes() == expected


def quantized(plan: Plan) -> set[str]:
    return {name for line in plan.lines if line.quantized for name in line.names}


# Of which it finds all.
USUAL = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "OlmoeForCausalLM")
# With draft layers, latent attention, shared experts, hybrids, towers for pictures and sounds, routers of other names, a
# bias for each expert.
OTHERS = (
    *("AriaForConditionalGeneration", "DeepseekV3ForCausalLM", "Gemma3nForConditionalGeneration"),
    *("GraniteMoeHybridForCausalLM", "Llama4ForConditionalGeneration", "MiniMaxM2ForCausalLM", "PhiForCausalLM"),
    *("Qwen2AudioForConditionalGeneration", "Qwen3NextForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
)
# These have names of their own, or none, for what their layers are in.
OWN = ("BloomForCausalLM", "ChatGLM", "Mamba2ForCausalLM", "NemotronH")
# vLLM builds its attention without a quantization, which neither names nor shapes tell.
ATTENTION_KEPT = "Glm5Next"
FILES = sorted(path.stem for path in NAMES.glob("*.txt"))
CHOSEN = [name for name in FILES if name in {*USUAL, *OTHERS} or name.startswith((*OWN, ATTENTION_KEPT))]


@for_each("name", CHOSEN)
def test_generic_quantizes_nothing_that_an_entry_keeps(name: str) -> None:
    checkpoint, _ = shortened(with_few_experts(name))
    if small_checkpoints.refused(checkpoint.architecture, TENSOR) is not None:
        return
    try:
        chosen = quantized(make_plan(checkpoint, TENSOR, architecture="generic"))
    except PlanError as error:
        assert error.message == "nothing would be quantized: generic has no layer here that could be"
        chosen = set()
    assert bool(chosen) == (not name.startswith(OWN))
    if name.startswith(ATTENTION_KEPT):
        chosen = {module for module in chosen if ".self_attn." not in module}
    entry = quantized(make_plan(checkpoint, TENSOR))
    assert chosen <= entry
    assert name not in USUAL or chosen == entry

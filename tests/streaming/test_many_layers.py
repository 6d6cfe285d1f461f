"""Models of many small layers: work grows as their number does, and no faster."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import EXAMPLE
from openquant import calibrate, compress, diagnose, verify
from support.small_checkpoints import COMMON

HIDDEN, EXPERT, EXPERTS, VOCABULARY = 32, 32, 16, 2048
TEXTS = {"samples": 2, "length": 16}


def model(root: Path, layers: int) -> Path:
    """A mixture of experts with so many decoder layers."""
    root.mkdir()
    config = {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
    }
    (root / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    shapes["model.norm"] = (HIDDEN,)
    for number in range(layers):
        layer = f"model.layers.{number}"
        norms = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"
        shapes |= {f"{layer}.{name}": (HIDDEN,) for name in norms}
        shapes |= {f"{layer}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes[f"{layer}.mlp.gate"] = EXPERTS, HIDDEN
        for expert in range(EXPERTS):
            shapes |= {f"{layer}.mlp.experts.{expert}.{name}_proj": (EXPERT, HIDDEN) for name in ("gate", "up", "down")}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()
    }
    save_file(tensors, root / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, root)
    return root


def calls_of(work: Callable[[Path], None], root: Path) -> int:
    """How many functions a verb calls for a model, in all threads."""
    counts: dict[int, int] = {}

    def count(frame: object, event: str, argument: object) -> None:
        del frame, argument
        if event in ("call", "c_call"):
            thread = threading.get_ident()
            counts[thread] = counts.get(thread, 0) + 1

    before = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        work(root)
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return sum(counts.values())


def convert_and_verify(root: Path) -> None:
    output = root.with_name(f"{root.name}-FP8")
    compress(root, output, workers=1)
    assert not verify(output, source=root, full=True).problems


def diagnose_and_print(root: Path) -> None:
    json.dumps(diagnose(root, workers=1).to_json())


def calibrate_on_a_text(root: Path) -> None:
    calibrate(root, root.with_name(f"{root.name}.calibration.safetensors"), **TEXTS)


# Of a calibration transformers compiles regular expressions again, when they are too many to be remembered.
@pytest.mark.parametrize(
    ("work", "most"), [(convert_and_verify, 2.05), (diagnose_and_print, 2.05), (calibrate_on_a_text, 2.4)]
)
def test_work_grows_as_the_number_of_layers(tmp_path: Path, work: Callable[[Path], None], most: float) -> None:
    # What is imported and made once is not counted.
    work(model(tmp_path / "1", 1))
    few, some, many = (calls_of(work, model(tmp_path / str(layers), layers)) for layers in (2, 4, 8))
    # Twice as many layers are added, and take twice the calls.
    assert many - some < most * (some - few)

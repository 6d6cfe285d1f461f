"""What an engine answers is checked before it is used; a script stands in for the engine, which tests/serve asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from entry_draft import differences, draft
from openquant.models import MODELS
from vllm_probe.client import EngineAnswer, EngineFailed, Question, ask_engine
from vllm_probe.modules import engine_modules

SHAPES = {
    "model.embed_tokens.weight": (512, 256),
    **{f"model.layers.0.self_attn.{part}_proj.weight": (256, 256) for part in "qkvo"},
    **{f"model.layers.0.mlp.{part}_proj.weight": (512, 256) for part in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (256, 512),
}


def layer(path: str, kind: str, *members: str) -> dict[str, Any]:
    parent = path.rpartition(".")[0]
    holds = [[f"{parent}.{member}.weight", 0, 256] for member in members or (path.rpartition(".")[2],)]
    known = {"kinds": [kind, "LinearBase"], "asked": True, "prefix": path, "skipped": False, "divided": True}
    return {**known, "experts": 0, "sizes": [256], "own": True, "named": True, "holds": {"weight": holds}}


LAYERS = {
    path: layer(path, *more)
    for path, *more in (
        ("model.layers.0.self_attn.qkv_proj", "ColumnParallelLinear", "q_proj", "k_proj", "v_proj"),
        ("model.layers.0.self_attn.o_proj", "RowParallelLinear"),
        ("model.layers.0.mlp.gate_up_proj", "ColumnParallelLinear", "gate_proj", "up_proj"),
        ("model.layers.0.mlp.down_proj", "RowParallelLinear"),
    )
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
GOOD = {"layers": LAYERS, "unread": [], "packed": PACKED, "mapper": {}, "version": "0.32.0"}


def answering(root: Path, answer: str, suffix: str = "json", status: int = 0) -> list[EngineAnswer | EngineFailed]:
    """What is made of an interpreter that writes this instead of running the probe."""
    (root / "answer").write_text(answer)
    script = root / "python"
    script.write_text(f'#!/bin/sh\ncat "{root}/answer" > "$2/0.{suffix}"\nexit {status}\n')
    script.chmod(0o755)
    return ask_engine([Question({"architectures": ["LlamaForCausalLM"]}, SHAPES)], script)


def test_an_answer_is_told_by_modules_and_drafted(tmp_path: Path) -> None:
    (found,) = answering(tmp_path, json.dumps(GOOD))
    assert isinstance(found, EngineAnswer)
    told = engine_modules(found, SHAPES)
    assert told["model.layers.0.self_attn.k_proj"].fused == tuple(
        f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
    )
    assert differences(MODELS["LlamaForCausalLM"], told) == {}
    made = draft("LlamaForCausalLM", found, SHAPES, 256)
    assert (made.pieces, made.keep, made.questions) == (("ATTENTION", "MLP"), (), ())

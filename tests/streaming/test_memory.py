"""--max-memory: what the verbs need is known before anything is run, less is refused, and as much is enough."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import EXAMPLE, ROOT, change_json, everything
from openquant import compress
from openquant.cli.commands import main
from openquant.errors import UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.fit import session
from openquant.formats.schemes import INT4_W4A16
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_plan
from openquant.streaming.memory import (
    MemoryStep,
    gptq_steps,
    hidden_bytes,
    memory_left,
    rounded_up,
    vocabulary_of,
    weight_memory,
)
from support import small_checkpoints, starting

# Of each matrix the outputs of gate and up, and what goes into down, whose Gram matrix has 67 MB.
WIDE = 4096
TEXTS = ["--samples", "2", "--length", "64"]
GPTQ = ["--scheme", "int4", "--gptq", "--no-search"]
AWQ = ["--scheme", "int4", "--awq", "--calibrate"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with one layer, whose MLP is wide."""
    root = tmp_path_factory.mktemp("wide") / "wide"
    shutil.copytree(EXAMPLE, root, ignore=shutil.ignore_patterns("*.safetensors*"))
    sizes = {"intermediate_size": WIDE, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    change_json(root / "config.json", lambda config: config.update(sizes))
    weights, generator = {}, torch.Generator().manual_seed(0)
    for name, tensor in small_checkpoints.read(EXAMPLE).items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        shape = [WIDE if ".mlp." in name and size == 768 else size for size in tensor.shape]
        weights[name] = tensor if [*tensor.shape] == shape else 0.02 * torch.randn(shape, generator=generator)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, root / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def stored(wide: Path) -> Path:
    return Path(compress(wide, wide.with_name("wide-FP8"), "block").output)


def words(verb: str, wide: Path, stored: Path, out: Path) -> list[str]:
    """A command of each verb that takes the option."""
    return [
        str(word)
        for word in {
            "compress": ["compress", "-m", wide, "-o", out],
            "gptq": ["compress", "-m", wide, "-o", out, *GPTQ, *TEXTS],
            "tune": ["compress", "-m", wide, "-o", out, *GPTQ, "--tune", "--samples", "2", "--length", "1500"],
            "awq": ["compress", "-m", wide, "-o", out, *AWQ, *TEXTS],
            "dequantize": ["dequantize", stored, "-o", out],
            "calibrate": ["calibrate", wide, "-o", out, *TEXTS],
            "fit": ["compress", "-m", wide, "-o", out, "--fit", "6bits", "--gptq", *TEXTS],
            "search": ["fit", wide, "--search"],
            "eval": ["eval", stored, "--source", wide, "--out", out, *TEXTS, "--no-prompts"],
        }[verb]
    ]


VERBS = ["compress", "gptq", "tune", "awq", "dequantize", "calibrate", "fit", "search", "eval"]


def test_less_than_a_step_takes_is_refused_before_anything_is_run(
    wide: Path, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, limit in [*((verb, "0") for verb in VERBS), ("compress", "1"), ("eval", "1")]:
        assert main([*words(verb, wide, stored, tmp_path / "out"), "--max-memory", limit]) == 2, verb
        out, err = capsys.readouterr()
        error, hint = err.strip().splitlines()
        found = re.fullmatch(rf"error: a memory of {limit} bytes is too little: (.+) takes up to ([\d,]+)", error)
        assert out == "" and found is not None, verb
        assert re.match(r"hint: give --max-memory [\d.]+[MG]B or more", hint), verb
    for verb, step in (("gptq", "rounding layers by GPTQ"), ("tune", "rounding and tuning layers")):
        assert main([*words(verb, wide, stored, tmp_path / "out"), "--dry-run", "--max-memory", "0"]) == 2
        error, hint = capsys.readouterr().err.strip().splitlines()
        assert error.startswith(f"error: a memory of 0 bytes is too little: {step} takes up to ")
        assert hint.endswith(f" or more, or leave --{verb} out")
    assert list(tmp_path.iterdir()) == []


# Runs a command, and says the most that its process had resident. The check of --fit has fewer texts.
MEASURED = """
import sys
if "--fit" in sys.argv:
    from openquant.fit import session
    session.COMPARED = (3, 256)
from openquant.cli.commands import main
from openquant.machine import peak_rss
code = main(sys.argv[1:])
print(peak_rss())
sys.exit(code)
"""


@pytest.mark.parametrize("verb", ["gptq", "tune", "awq", "fit", "eval"] if everything() else ["gptq"])
def test_what_a_hint_says_is_enough_and_is_kept(
    wide: Path,
    stored: Path,
    tmp_path: Path,
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "COMPARED", (3, 256))
    # Answers are measured too.
    command = [word for word in words(verb, wide, stored, tmp_path / "out") if word != "--no-prompts"]
    command += ["--max-memory"]
    assert main([*command, "1"]) == 2
    hint = re.search(r"give --max-memory (([\d.]+)([MG])B) or more", capsys.readouterr().err)
    assert hint is not None
    done = starting.run(["-c", MEASURED, *command, hint[1]], cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) <= float(hint[2]) * {"M": 10**6, "G": 10**9}[hint[3]]


def test_what_weights_take_is_read_from_headers(wide: Path) -> None:
    found = weight_memory(open_checkpoint(wide))
    header = json.loads((wide / "config.json").read_text())
    layer = sum(
        tensor.nbytes for name, tensor in small_checkpoints.read(wide).items() if name.startswith("model.layers.0.")
    )
    table = 2 * header["vocab_size"] * header["hidden_size"]
    assert (found.layer, found.width, found.table) == (layer, WIDE, table)
    plan = make_plan(open_checkpoint(wide), INT4_W4A16, PlanOptions(gptq={}))
    [step] = gptq_steps(open_checkpoint(wide), plan, 64)
    # A Gram matrix, and once more in order and in float64.
    assert step.nbytes > 16 * WIDE**2


def test_what_no_step_takes_is_left() -> None:
    steps = [MemoryStep("a", 1 << 20, models=False), MemoryStep("b", 1 << 30, models=False)]
    left = memory_left(16 << 30, steps)
    assert left is not None and left < 15 << 30
    assert memory_left(None, steps) is None
    assert memory_left(1, steps, refuse=False) == 0
    with pytest.raises(UsageError, match="too little: b takes up to "):
        memory_left(1, steps)


def test_sizes_are_rounded_up_and_may_be_those_of_the_text_config(tmp_path: Path) -> None:
    for nbytes, expected in ((1, "10MB"), (500_000_000, "510MB"), (1_300_000_000, "1.4GB")):
        assert rounded_up(nbytes) == expected
    opened = open_checkpoint(small_checkpoints.write(tmp_path))
    sizes = {"hidden_size": 64, "vocab_size": 100}
    for config in (sizes, {"text_config": sizes}):
        checkpoint = replace(opened, config=config)
        # Hidden states and embeddings, two bytes a value.
        assert (hidden_bytes(checkpoint, 10), vocabulary_of(checkpoint)) == (10 * 64 * 2 * 2, 100)

    # DeepSeek-V4 and Gemma 3n carry several hidden states of each token.
    for key in ("hc_mult", "altup_num_inputs"):
        checkpoint = replace(opened, config={**sizes, key: 4})
        assert hidden_bytes(checkpoint, 10) == 10 * 64 * 2 * (1 + 4)

"""NaN and infinity in tensors that stay unquantized: they go to the output as they are, and the run says so by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import run_openquant, tree
from openquant import compress
from openquant.files.output import OutputDirectory
from openquant.weights import reading
from support import small_checkpoints

NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
FOUND = {EMBED: "NaN (1 value) and infinity (1 value)", ROUTER: "infinity (2 values)", NORM: "NaN (1 value)"}
SHARDS = 5


def damage(held: dict[str, torch.Tensor]) -> None:
    held[NORM][3] = math.nan
    held[EMBED][1, :2] = torch.tensor([math.nan, math.inf])
    held[ROUTER][0, :2] = -math.inf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=SHARDS, vocab=128)
    small_checkpoints.change_weights(root, damage)
    return root


def test_the_run_names_them_and_copies_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compress(source, tmp_path / "out", workers=3)
    assert (result.not_finite, result.unread_shards) == (FOUND, 0)
    assert list(result.not_finite) == sorted(FOUND)
    shard = next(path for path in (tmp_path / "out").glob("*.safetensors") if NORM in load_file(path))
    assert load_file(shard)[NORM][3].isnan()
    sound = small_checkpoints.write(tmp_path / "sound", "Qwen3MoeForCausalLM", vocab=128)
    assert compress(sound, tmp_path / "sound-out").not_finite == {}
    for dtype in ("float16", "float32"):
        root = small_checkpoints.write(tmp_path / dtype, "Qwen3MoeForCausalLM", dtype=dtype, vocab=128)
        small_checkpoints.change_weights(root, damage)
        assert compress(root, tmp_path / f"{dtype}-out").not_finite == FOUND
    # Pieces of a tensor are summed up.
    monkeypatch.setattr(reading, "BUFFER", 512)
    assert compress(source, tmp_path / "pieces").not_finite == FOUND


def test_a_run_that_is_continued_counts_the_shards_it_has_not_looked_at(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    publish, left = OutputDirectory.publish, [0]

    def stopping(self: OutputDirectory, name: str) -> None:
        publish(self, name)
        left[0] -= name.endswith(".safetensors")
        if not left[0]:
            raise Stop

    compress(source, tmp_path / "whole")
    for finished in (2, SHARDS):
        out, left[0] = tmp_path / str(finished), finished
        with monkeypatch.context() as patched:
            patched.setattr(OutputDirectory, "publish", stopping)
            with pytest.raises(Stop):
                compress(source, out, workers=1)
        result = compress(source, out)
        assert result.resumed and result.unread_shards == finished
        assert result.not_finite.items() <= FOUND.items()
        assert tree(out) == tree(tmp_path / "whole")


def test_experts_that_stay_unquantized_are_named_one_by_one(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", vocab=128)
    stack = next(name for name in load_file(root / "model.safetensors") if name.endswith("experts.down_proj"))

    def change(held: dict[str, torch.Tensor]) -> None:
        held[stack][2, 5, 7] = math.nan

    small_checkpoints.change_weights(root, change)
    result = compress(root, tmp_path / "out", ignore=["**.experts.**"])
    assert result.not_finite == {f"{stack.replace('down_proj', '2.down_proj')}.weight": "NaN (1 value)"}


def test_it_is_printed_and_in_json(source: Path, tmp_path: Path) -> None:
    note = (
        f"note: of the tensors that are not quantized {', '.join(f'{name} holds {held}' for name, held in FOUND.items())}"
        ": with NaN, or infinity in a weight, a model answers NaN\n"
    )
    done = run_openquant("compress", "-m", source, "-o", tmp_path / "out")
    assert (done.returncode, note in done.stdout + done.stderr) == (0, True), done.stderr
    done = run_openquant("compress", "-m", source, "-o", tmp_path / "other", "--json")
    assert json.loads(done.stdout)["not_finite"] == FOUND

"""GGUF files that are damaged, hostile, or whose config.json is not known are refused by name."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

import openquant
from openquant.errors import SourceError, UsageError
from openquant.gguf.source import open_gguf
from support.gguf_files import BYTE_TOKENS, split_gguf, write_gguf

F32 = GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path.read_bytes()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(keys: bytes, count: int, tensors: bytes = b"", tensor_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, count) + keys + tensors


def entry(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")


def of(*tensors: bytes, data: int = 0) -> bytes:
    return header(ARCHITECTURE, 1, b"".join(tensors), len(tensors)) + bytes(data)


UNREADABLE = "m.gguf is no GGUF file that the package gguf reads: "
HEADERS: list[tuple[bytes, str]] = [
    (b"", UNREADABLE),
    (b"GGML" + bytes(40), f"{UNREADABLE}GGUF magic invalid"),
    (header(b"", 0, version=1), f"{UNREADABLE}Sorry, file appears to be version 1 which we cannot handle"),
    (header(b"", 0, version=3 << 24), "m.gguf is big-endian"),
    (header(ARCHITECTURE * 2, 2), UNREADABLE),
    (of(entry(b"a", [4, 1 << 30])), UNREADABLE),
    (of(entry(b"a\x1b[2J", [4]), data=100), r"m.gguf: 'a\x1b[2J' is not a possible name of a tensor"),
    (of(entry(b"a", [4], kind=777), data=100), UNREADABLE),
    (of(entry(b"a", [4], kind=26), data=100), "m.gguf: a has the type I32, which the installed gguf does not decode"),
    (header(string(b"general.name") + struct.pack("<I", 8) + string(b"x"), 1), "m.gguf names no architecture"),
]


def test_what_the_package_does_not_read_is_refused(tmp_path: Path) -> None:
    for data, message in HEADERS:
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(SourceError, match=f"^{re.escape(message)}"):
            open_gguf(tmp_path / "m.gguf")


def test_a_file_that_ends_early_is_refused(sound: bytes, tmp_path: Path) -> None:
    for size in (1000, len(sound) - 1):
        (tmp_path / "m.gguf").write_bytes(sound[:size])
        with pytest.raises(SourceError, match=f"^{UNREADABLE}"):
            open_gguf(tmp_path / "m.gguf")


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "m.gguf has the architecture 'mamba'; read are llama, qwen2,"),
    ("llama", {"block_count": None}, "m.gguf lacks the metadata key llama.block_count"),
    ("llama", {"block_count": 1 << 31}, "m.gguf: llama.block_count is 2147483648, which its tensors contradict"),
    ("llama", {"block_count": 100}, "m.gguf claims 100 layers and 1 experts, and holds 21 tensors"),
    ("llama", {"block_count": 3}, "m.gguf lacks blk.2."),
    ("llama", {"block_count": 1}, "m.gguf holds blk.1.attn_norm.weight, blk.1.ffn_norm.weight, blk.1.attn_q.weight and 6 more, which LlamaForCausalLM has no place for"),
    ("llama", {"rope.dimension_count": "x"}, "m.gguf: llama has heads of 'x' dimensions"),
    ("llama", {"feed_forward_length": 256}, "m.gguf: blk.0.ffn_gate.weight is [512, 256], but model.layers.0.mlp.gate_proj.weight of LlamaForCausalLM is made from [256, 256]"),
    ("llama", {"attention.head_count_kv": 2}, "m.gguf: blk.0.attn_k.weight is [128, 256], but model.layers.0.self_attn.k_proj.weight of LlamaForCausalLM is made from [256, 256]"),
    ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "m.gguf: llama.attention.layer_norm_rms_epsilon is nan, which its tensors contradict"),
    ("llama", {"rope.dimension_count": 64}, "m.gguf: blk.0.attn_q.weight is [256, 256], but"),
    ("llama", {"expert_count": 8}, "m.gguf: no key of config.json is known for llama.expert_count = 8"),
    ("llama", {"rope.scaling.type": "longrope"}, "m.gguf: no rope_scaling of config.json is known for llama's rope.scaling.type = 'longrope'"),
    ("qwen3", {"attention.value_length": 64}, "m.gguf: qwen3 has heads of 128 dimensions, 64 for values and 128 that are rotated"),
    ("qwen3moe", {"expert_count": 2}, "m.gguf: blk.0.ffn_gate_exps.weight is [3, 256, 256], but model.layers.0.mlp.experts.0.gate_proj.weight of Qwen3MoeForCausalLM is made from [2, 256, 256]"),
]  # fmt: skip


def test_a_config_that_cannot_be_rebuilt_is_refused(tmp_path: Path) -> None:
    for architecture, metadata, message in CONFIGS:
        shapes = None if architecture != "mamba" else {"a": (4,)}
        write_gguf(tmp_path / "m.gguf", architecture, metadata=metadata, shapes=shapes)
        with pytest.raises(SourceError, match=f"^{re.escape(message)}"):
            open_gguf(tmp_path / "m.gguf")


TOKENIZERS: list[tuple[dict[str, Any], str]] = [
    ({"model": "bert"}, "m.gguf has the tokenizer 'bert'; read are gpt2, llama,"),
    ({"pre": "unheard-of"}, "m.gguf: it is not known how the tokenizer 'unheard-of' (tokenizer.ggml.pre) splits text"),
    ({"tokens": None}, "m.gguf has no vocabulary (tokenizer.ggml.tokens)"),
    ({"merges": ["h"]}, "m.gguf: its tokenizer cannot be built: "),
    (
        {"model": "llama", "pre": None, "merges": None, "scores": [-float(n) for n in range(len(BYTE_TOKENS))]},
        "m.gguf has the tokenizer 'llama', but its vocabulary is of another kind: no token begins with '▁'",
    ),
    ({"tokens": [token.replace("Ġ", "▁") for token in BYTE_TOKENS], "merges": ["h e"]}, "m.gguf has the tokenizer 'gpt2', but its vocabulary is of another kind: no token begins with 'Ġ'"),
]  # fmt: skip


def test_a_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    for tokenizer, message in TOKENIZERS:
        write_gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
        with pytest.raises(SourceError, match=f"^{re.escape(message)}"):
            open_gguf(tmp_path / "m.gguf")


def test_a_sound_file_is_refused_where_it_cannot_be_used(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(sound)
    with pytest.raises(SourceError) as refused:
        openquant.dequantize(tmp_path, tmp_path / "out")
    assert refused.value.message == f"{tmp_path} holds GGUF weights (m.gguf), which are read from a file"
    assert refused.value.hint == "download it if it is on the Hub, and give the path of the file"
    # Options of repositories.
    with pytest.raises(UsageError, match="m.gguf is a local file, which has no revision main"):
        openquant.dequantize(file, tmp_path / "out", revision="main")
    with pytest.raises(UsageError, match="m.gguf is a local file, nothing of it can be streamed"):
        openquant.dequantize(file, tmp_path / "out", stream=True)
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    with pytest.raises(UsageError, match="^this transformers is too old to build the tokenizers of GGUF files"):
        open_gguf(file)


def test_the_package_is_named_where_it_is_missing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    code = "import sys; sys.modules['gguf'] = None; from openquant.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "dequantize", tmp_path / "m.gguf", "-o", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "error: GGUF files are read with the package gguf, which is not installed\n"
        "hint: pip install 'openquant-llm[gguf]'\n",
    )
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")

    class Truncates(openquant.Reporter):
        def on_plan(self, *_: object) -> None:
            with (tmp_path / "m.gguf").open("r+b") as file:
                file.truncate(100_000)

    with pytest.raises(SourceError, match="m.gguf changed while it was being read"):
        openquant.dequantize(tmp_path / "m.gguf", tmp_path / "out", reporter=Truncates())
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_part_that_was_given_the_name_of_a_whole_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    split_gguf(tmp_path / "m.gguf", tmp_path, 2)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "whole.gguf")
    message = r"^whole.gguf says that it is one of 2 parts \(split.count\), not of 1"
    with pytest.raises(SourceError, match=message):
        open_gguf(tmp_path / "whole.gguf")


def test_other_tensors_of_the_same_name_in_two_parts_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    split_gguf(tmp_path / "m.gguf", tmp_path, 2, both=("token_embd.weight",))
    message = "^token_embd.weight is in m-00001-of-00002.gguf and in m-00002-of-00002.gguf"
    with pytest.raises(SourceError, match=message):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")

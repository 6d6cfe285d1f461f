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
from support.gguf_files import write_gguf

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
ALIGNMENT = string(b"general.alignment") + struct.pack("<II", 4, 48)
ROWS = string(b"x.y") + struct.pack("<IIQ", 9, 4, 1 << 60)


def of(*tensors: bytes, data: int = 0) -> bytes:
    return header(ARCHITECTURE, 1, b"".join(tensors), len(tensors)) + bytes(data)


HEADERS: list[tuple[bytes, str]] = [
    (b"", "m.gguf is no GGUF file"),
    (b"GGUF" + bytes(10), "m.gguf is no GGUF file"),
    (b"GGML" + bytes(40), "m.gguf is no GGUF file"),
    (header(b"", 0, version=1), "m.gguf is GGUF version 1; 2 and 3 are read"),
    (header(b"", 0, version=3 << 24), "m.gguf is big-endian"),
    (header(b"", 1 << 63), "m.gguf claims 0 tensors and 9,223,372,036,854,775,808 metadata keys"),
    (header(b"", 0, tensor_count=1 << 63), "m.gguf claims 9,223,372,036,854,775,808 tensors and 0 metadata keys"),
    (header(bytes(100), 2), "m.gguf: '' is not a possible metadata key"),
    (header(string(b"a\n") + bytes(20), 1), r"m.gguf: 'a\n' is not a possible metadata key"),
    (header(struct.pack("<Q", 1 << 62) + bytes(20), 1), "m.gguf: a metadata key claims 4,611,686,018,427,387,904 bytes"),
    (header(struct.pack("<Q", 1000) + bytes(20), 1), "m.gguf is truncated: it ends inside its header"),
    (header(string(b"\xff\xfe") + bytes(20), 1), "m.gguf: a metadata key is no UTF-8"),
    (header(ARCHITECTURE * 2, 2), "m.gguf holds the metadata key general.architecture twice"),
    (header(string(b"x.y") + struct.pack("<I", 77), 1), "m.gguf: x.y has the unknown type 77"),
    (header(ROWS, 1), "m.gguf: x.y claims 1,152,921,504,606,846,976 values"),
    (header(string(b"x.y") + struct.pack("<IIQ", 9, 4, 100), 1), "m.gguf is truncated: it ends inside its header"),
    (header(string(b"x.y") + struct.pack("<IIQ", 9, 9, 1), 1), "m.gguf: x.y is an array of the type 9, which is not read"),
    (header(string(b"x.y") + struct.pack("<IIQ", 9, 8, 1) + string(b"a" * 5000), 1), "m.gguf: x.y claims 5,000 bytes"),
    (header(ALIGNMENT, 1), "m.gguf has the impossible general.alignment 48"),
    (of(entry(b"a/../b", [1 << 40])), "m.gguf is truncated: a/../b ends at byte 4,398,046,511,232 of 107"),
    (of(entry(b"a\x1b[2J", [4])), r"m.gguf: 'a\x1b[2J' is not a possible name of a tensor"),
    (of(entry(b"a", [])), "m.gguf: a has 0 axes (1 to 4 are allowed)"),
    (of(entry(b"a", [1] * 5)), "m.gguf: a has 5 axes (1 to 4 are allowed)"),
    (of(entry(b"a", [0])), "m.gguf: a is [0], and F32 has blocks of 1"),
    (of(entry(b"a", [33, 2], kind=2)), "m.gguf: a is [2, 33], and Q4_0 has blocks of 32"),
    (of(entry(b"a", [4], kind=777)), "m.gguf: a has the type 777, which the installed gguf does not decode"),
    (of(entry(b"a", [4], kind=26)), "m.gguf: a has the type 26, which the installed gguf does not decode"),
    (of(entry(b"a", [1 << 63] * 4)), None),
    (of(entry(b"a*", [4])), "m.gguf: 'a*' is not a possible name of a tensor"),
    (of(entry(b"a", [4], offset=4), data=64), "m.gguf: a starts at 4, which is no multiple of 32"),
    (of(entry(b"a", [4]), entry(b"a", [4], offset=32), data=100), "m.gguf holds a twice"),
    (of(entry(b"a", [9]), entry(b"b", [4], offset=32), data=100), "m.gguf: b overlaps the tensor before it"),
    (header(string(b"general.name") + struct.pack("<I", 8) + string(b"x"), 1), "m.gguf names no architecture"),
]  # fmt: skip


def test_damaged_and_hostile_headers_are_refused(tmp_path: Path) -> None:
    for data, message in HEADERS:
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(SourceError, match=f"^{re.escape(message or 'm.gguf is truncated: a ends at byte ')}"):
            open_gguf(tmp_path / "m.gguf")


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "m.gguf has the architecture 'mamba'; read are llama, qwen2,"),
    ("llama", {"block_count": None}, "m.gguf lacks the metadata key llama.block_count"),
    ("llama", {"block_count": 100}, "m.gguf claims 100 layers and 1 experts, and holds 21 tensors"),
    ("llama", {"block_count": 3}, "m.gguf lacks blk.2."),
    ("llama", {"block_count": 1}, "m.gguf holds blk.1.attn_norm.weight, blk.1.ffn_norm.weight, blk.1.attn_q.weight and 6 more, which LlamaForCausalLM has no place for"),
    ("llama", {"rope.dimension_count": "x"}, "m.gguf: llama has heads of 'x' dimensions"),
    ("llama", {"feed_forward_length": 256}, "m.gguf: blk.0.ffn_gate.weight is [512, 256], but model.layers.0.mlp.gate_proj.weight of LlamaForCausalLM is made from [256, 256]"),
    ("llama", {"attention.head_count_kv": 2}, "m.gguf: blk.0.attn_k.weight is [128, 256], but model.layers.0.self_attn.k_proj.weight of LlamaForCausalLM is made from [256, 256]"),
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
    with pytest.raises(UsageError, match="m.gguf is a local file, which has no revision main$"):
        openquant.dequantize(file, tmp_path / "out", revision="main")
    with pytest.raises(UsageError, match="m.gguf is a local file, nothing of it can be streamed$"):
        openquant.dequantize(file, tmp_path / "out", stream=True)
    with monkeypatch.context() as patch:
        patch.setattr("openquant.files.gguf.MAX_HEADER", 1000)
        with pytest.raises(SourceError, match="^m.gguf has a header of more than 1,000 bytes$"):
            open_gguf(file)
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    with pytest.raises(UsageError, match="^this transformers is too old to build the tokenizers of GGUF files$"):
        open_gguf(file)


def test_the_package_is_named_where_it_is_missing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    code = "import sys; sys.modules['gguf'] = None; from openquant.cli.start import main; sys.exit(main())"
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

    with pytest.raises(SourceError, match="m.gguf changed while it was being converted"):
        openquant.dequantize(tmp_path / "m.gguf", tmp_path / "out", reporter=Truncates())
    assert not (tmp_path / "out" / "model.safetensors").exists()

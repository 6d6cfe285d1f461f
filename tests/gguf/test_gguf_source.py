"""A GGUF file becomes the directory that transformers makes of it, bit for bit, and is compressed as that directory is."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import openquant
from conftest import everything
from openquant.errors import SourceError, UsageError
from openquant.formats.format import ggml_types
from openquant.gguf import source
from openquant.gguf.source import ARCHITECTURES, gguf_config, open_gguf, read_gguf_header
from support.gguf_files import DECODABLE, HEAD_DIM, LAYERS, TEMPLATE, WIDTH, split_gguf, write_gguf
from support.rows import for_each

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STACK = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_output(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors of all shards, experts stacked as transformers has them."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    experts: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for name in list(tensors):
        if match := _STACK.fullmatch(name):
            experts.setdefault((match[1], match[3]), []).append((int(match[2]), tensors.pop(name)))
    stacks = {key: torch.stack([tensor for _, tensor in sorted(of)]) for key, of in experts.items()}
    for path in {path for path, _ in stacks}:
        tensors[f"{path}.gate_up_proj"] = torch.cat([stacks[path, "gate"], stacks[path, "up"]], dim=1)
        tensors[f"{path}.down_proj"] = stacks[path, "down"]
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


# By day rows in another order, experts, shared experts whose gate is a vector, norms that add one, norms of queries and
# keys, and a part of a head that is rotated; at night all.
BY_DAY = ("llama", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "phi3")


@pytest.mark.filterwarnings("ignore")
@for_each("architecture", ARCHITECTURES if everything() else BY_DAY)
def test_a_file_becomes_what_transformers_makes_of_it(architecture: str, tmp_path: Path) -> None:
    # Types that divide all rows, of every kind.
    write_gguf(tmp_path / "m.gguf", architecture, DECODABLE)
    openquant.dequantize(tmp_path / "m.gguf", tmp_path / "out")
    # transformers does not read the sizes of heads and experts of some.
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16, config=AutoConfig.from_pretrained(tmp_path / "out")
    )
    tensors, expected = load_output(tmp_path / "out"), model.state_dict()
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    assert tensors.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(bits(tensors[name]), bits(expected[name].contiguous()))]
    assert different == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    other = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps", "vocab_size", "rope_parameters",
             "num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "model_type", "eos_token_id")  # fmt: skip
    assert {key: config.get(key) for key in sizes} == {key: other.get(key) for key in sizes}
    assert config["architectures"] == [type(model).__name__]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the 12 hens\n"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]).strip() == text.strip()
    assert ours.chat_template == TEMPLATE


def test_decoded_weights_are_compressed_in_float32(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", "qwen3", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K])
    openquant.dequantize(tmp_path / "m.gguf", tmp_path / "plain")
    openquant.compress(tmp_path / "m.gguf", tmp_path / "out", "nvfp4")
    # The same model with matrices in float32, which llama.cpp's names give independently of ours.
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, LAYERS)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            blocks, kind = written[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
            tensors[name] = torch.from_numpy(np.array(dequantize(blocks, kind)))
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "plain" / ".openquant.json").unlink()
    openquant.compress(tmp_path / "plain", tmp_path / "detour", "nvfp4")
    out, detour = load_output(tmp_path / "out"), load_output(tmp_path / "detour")
    assert out.keys() == detour.keys()
    # Unquantized tensors are BF16 in one and F32 in the other.
    assert all(torch.equal(out[name], detour[name].to(out[name].dtype)) for name in out)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "detour" / name).read_bytes(), name
    report = openquant.verify(tmp_path / "out", tmp_path / "m.gguf")
    # transformers adds the end of a text to these 102 tokens.
    added = "tokenizer.json does not fit the tensors: token '<|endoftext|>' has number 102"
    assert [problem for problem in report.problems if not problem.startswith(added)] == []


def test_parts_of_a_model_are_read_together(tmp_path: Path, monkeypatch) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", [GGMLQuantizationType.Q4_0])
    split_gguf(tmp_path / "m.gguf", tmp_path / "parts", 3)
    openquant.dequantize(tmp_path / "m.gguf", tmp_path / "whole")
    openquant.dequantize(tmp_path / "parts" / "m-00001-of-00003.gguf", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    whole, parts = load_output(tmp_path / "whole"), load_output(tmp_path / "out")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # A large file becomes several shards.
    monkeypatch.setattr(source, "SHARD_BYTES", 500_000)
    openquant.dequantize(tmp_path / "m.gguf", tmp_path / "sharded")
    sharded = load_output(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 3
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_part_of_a_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    split_gguf(tmp_path / "m.gguf", tmp_path, 2)
    with pytest.raises(UsageError, match=r"^m-00002-of-00002.gguf is not the first of 2 files"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(SourceError, match=r"^m-00002-of-00002.gguf is missing from "):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")
    shutil.copy(tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(
        SourceError, match=r"^token_embd.weight is in m-00001-of-00002.gguf and in m-00002-of-00002.gguf"
    ):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_rotary_factors_become_rope_scaling(tmp_path: Path) -> None:
    angles = 20000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    # transformers computes the frequencies that Llama 3 has; llama.cpp writes the quotients.
    config = AutoConfig.for_model(
        "llama",
        hidden_size=WIDTH,
        num_attention_heads=WIDTH // HEAD_DIM,
        rope_theta=20000.0,
        rope_scaling={"rope_type": "llama3", **LLAMA3},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = (torch.from_numpy(angles) / scaled).float().numpy()
    write_gguf(tmp_path / "m.gguf", vectors={"rope_freqs.weight": factors})
    rope = open_gguf(tmp_path / "m.gguf").checkpoint.config["rope_parameters"]
    assert rope == {"rope_type": "llama3", "rope_theta": 20000.0, **LLAMA3}
    factors[3] += 1
    write_gguf(tmp_path / "n.gguf", vectors={"rope_freqs.weight": factors})
    with pytest.raises(SourceError, match="^n.gguf: rope_freqs.weight are not the factors of Llama 3's rope_scaling"):
        open_gguf(tmp_path / "n.gguf")


def test_single_digits_are_tokens_where_the_vocabulary_was_made_so(tmp_path: Path) -> None:
    counts = {}
    for split in ("gpt-2", "smollm"):
        write_gguf(tmp_path / f"{split}.gguf", tokenizer={"pre": split})
        opened = open_gguf(tmp_path / f"{split}.gguf")
        counts[split] = len(AutoTokenizer.from_pretrained(opened.checkpoint.root)("12")["input_ids"])
    assert counts == {"gpt-2": 1, "smollm": 2}


def test_yarn_becomes_rope_scaling(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    write_gguf(tmp_path / "m.gguf", "qwen2", metadata=yarn)
    rope = open_gguf(tmp_path / "m.gguf").checkpoint.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


def test_large_gemmas_scale_queries_by_their_width(tmp_path: Path) -> None:
    """Told by its number of layers; that many take long to write and to build."""
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        write_gguf(tmp_path / f"{name}.gguf", name)
        header = read_gguf_header(tmp_path / f"{name}.gguf", "m.gguf", ggml_types())
        metadata = {**header.metadata, f"{name}.block_count": layers, f"{name}.attention.head_count": 1}
        tensors = header.tensors | {f"blk.{layer}": next(iter(header.tensors.values())) for layer in range(layers)}
        assert gguf_config(metadata, tensors, None, "m.gguf")["query_pre_attn_scalar"] == WIDTH


def test_the_directory_that_is_made_goes_with_its_source_or_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write_gguf(tmp_path / "m.gguf")
    opened = open_gguf(tmp_path / "m.gguf")
    assert list((tmp_path / "tmp").iterdir())
    del opened
    write_gguf(tmp_path / "m.gguf", tokenizer={"pre": "unheard-of"})
    with pytest.raises(SourceError):
        open_gguf(tmp_path / "m.gguf")
    assert list((tmp_path / "tmp").iterdir()) == []

"""Whole conversions, reopened with the safetensors library and compared tensor by tensor with torch."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import change_json, everything, tree
from openquant import compress, dequantize, verify
from openquant.errors import PlanError, SourceError
from openquant.formats.kernels import choose_scales
from openquant.formats.numbers import E2M1, E4M3, INT8, INT8_WORDS
from openquant.formats.reference import encode, group_absmax, group_global_scale, group_scale, stored_scale
from openquant.formats.schemes import (
    CHANNEL,
    INTEGER_GROUPS,
    MXFP8,
    SCHEMES,
    TENSOR_COMPRESSED,
    VARIANTS,
    Scheme,
    find_scheme,
)
from openquant.patterns import compile_any
from support import small_checkpoints
from support.conversions import Shelf, asking
from support.representatives import in_all_ways
from support.rows import for_each

STORED = {scheme.name: scheme for scheme in in_all_ways(SCHEMES.values())}


def split_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama 4's stacked experts as one [out, in] matrix each."""
    found = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2, dim=1)
                found[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate.T.contiguous()
                found[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.T.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.T.contiguous()
        else:
            found[name] = weight
    return found


def joined_with(module: str, weights: dict[str, torch.Tensor]) -> list[str]:
    owner, _, last = module.rpartition(".")
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if last in group:
            return [f"{owner}.{part}" for part in group if f"{owner}.{part}.weight" in weights]
    return [module]


def expected_output(
    weights: dict[str, torch.Tensor], quantized: set[str], default: Scheme, others: Mapping[str, Scheme] = {}
) -> dict[str, torch.Tensor]:
    weights = split_experts(weights)
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module not in quantized:
            found[name] = weight
            continue
        scheme = others.get(module, default)
        absmax = group_absmax(weight, scheme.format.group)
        members = joined_with(module, weights)
        largest = torch.stack([group_absmax(weights[f"{member}.weight"], (None, None)) for member in members]).amax(0)
        divisor = group_global_scale(largest, scheme.format)
        scale = group_scale(largest if scheme.format.shared else absmax, scheme.format, divisor)
        if scheme.searches_scales:
            bits = weight.float().contiguous().numpy().view(np.uint32)
            scale = torch.from_numpy(choose_scales(scheme, bits, "F32", absmax.numpy(), divisor.numpy()).scale)
        found[f"{module}.{scheme.format.codes}"] = encode(weight, scale, scheme.format)
        found[f"{module}.{scheme.format.scale.name}"] = stored_scale(scale, scheme.format, tuple(weight.shape), divisor)
        if scheme.format.global_scale:
            found[scheme.format.shared_scale_name(module)] = divisor.reshape(1)
        if scheme.default_input_global_scale is not None:
            found[f"{module}.{scheme.format.input_scale}"] = torch.tensor([scheme.default_input_global_scale])
        for info, _ in scheme.format.constant_tensors(module, tuple(weight.shape)):
            found[info.name] = torch.tensor(weight.shape)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def quantized_by(weights: dict[str, torch.Tensor]) -> set[str]:
    """What the first release quantizes: attention, MLP and experts of the language model."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {
        name.removesuffix(".weight")
        for name in split_experts(weights)
        if name.removesuffix(".weight").endswith(parts) and not name.startswith("vision")
    }


# Dense, with experts one by one, with stacks of them, with a vision tower; each scheme with one of them, and all of the
# first release with the default.
KINDS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Llama4ForCausalLM", "Gemma3ForConditionalGeneration")
CONVERTED = [
    *((architecture, VARIANTS[0]) for architecture in small_checkpoints.FIRST),
    *((KINDS[number % 4], scheme) for number, scheme in enumerate(VARIANTS[1:])),
]


@for_each(("architecture", "scheme"), CONVERTED)
def test_every_architecture_converts_to_what_torch_computes(shelf: Shelf, architecture: str, scheme: Scheme) -> None:
    source, output, result = shelf.converted(architecture, scheme)
    weights = small_checkpoints.read(source)
    ignore = ["**.experts.**"] if not scheme.expert_engines and architecture.startswith(("Llama4", "Qwen3Moe")) else []
    ignored = compile_any(ignore)
    quantized = {module for module in quantized_by(weights) if not ignored.fullmatch(module)}
    # What a scheme cannot store for an engine's sake falls back by itself; experts have to be asked for.
    reordered = () if scheme.follows_rows or not architecture.startswith("Llama4") else ("q_proj", "k_proj", "v_proj")
    others = {module: CHANNEL for module in quantized if module.endswith(reordered)} if reordered else {}
    found = small_checkpoints.read(output)
    assert_same(found, expected_output(weights, quantized, scheme, others))
    assert result.quantized_tensors == len(quantized)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    total = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    assert index["metadata"] == {"total_size": total}
    assert result.output_bytes == total
    placed = {name: path.name for path in output.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == placed


def test_output_head_is_quantized_like_any_layer(shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.source("Qwen3ForCausalLM")
    weights = small_checkpoints.read(source)
    quantized = quantized_by(weights) | {"lm_head"}
    for scheme, stored in (("tensor", TENSOR_COMPRESSED), ("channel", CHANNEL), ("block", CHANNEL), ("mxfp8", MXFP8)):
        out, chosen = tmp_path / scheme, find_scheme(scheme, "compressed-tensors")
        compress(source, out, scheme, format="compressed-tensors", quantize_lm_head=True)
        assert_same(small_checkpoints.read(out), expected_output(weights, quantized, chosen, {"lm_head": stored}))


@for_each("dtype", ["float16", "float32"])
def test_other_source_dtypes(tmp_path: Path, dtype: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", dtype=dtype)
    weights = small_checkpoints.read(source)
    quantized = quantized_by(weights)
    for name, scheme in [*STORED.items()][dtype == "float32" :: 2]:
        compress(source, tmp_path / name, name)
        assert_same(small_checkpoints.read(tmp_path / name), expected_output(weights, quantized, scheme))
        assert not (tmp_path / name / "model.safetensors.index.json").exists()


def test_llama4_experts_are_split_also_when_they_stay_bfloat16(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM")
    weights = small_checkpoints.read(source)
    quantized = {module for module in quantized_by(weights) if ".experts." not in module}
    result = compress(source, tmp_path / "out", ignore=["**.experts.**"])
    assert_same(small_checkpoints.read(tmp_path / "out"), expected_output(weights, quantized, SCHEMES["tensor"]))
    assert "model.layers.1.feed_forward.experts" in result.ignored_layers


@for_each("scheme", STORED.values())
def test_bytes_depend_neither_on_buffers_nor_on_the_number_of_workers(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Scheme
) -> None:
    source = shelf.source("Qwen3MoeForCausalLM", 4)
    compress(source, tmp_path / "one", scheme.name, workers=1)
    compress(source, tmp_path / "seven", scheme.name, workers=7)
    assert tree(tmp_path / "seven") == tree(tmp_path / "one")

    source = shelf.source("Llama4ForCausalLM", 2)
    compress(source, tmp_path / "whole", scheme.name)
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 1 << 14)
    monkeypatch.setattr("openquant.weights.reading.TRANSPOSED_BUFFER", 1 << 14)
    compress(source, tmp_path / "pieces", scheme.name)
    assert tree(tmp_path / "pieces") == tree(tmp_path / "whole")


def test_zero_points_of_later_pieces_follow_the_first(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shelf.source("Qwen3ForCausalLM")
    compress(source, tmp_path / "whole", "int4", asymmetric=True)
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 1 << 14)
    compress(source, tmp_path / "pieces", "int4", asymmetric=True)
    assert tree(tmp_path / "pieces") == tree(tmp_path / "whole")


@for_each("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stop_the_run_and_name_the_tensor(tmp_path: Path, value: float) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][500, 255] = value
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    for number, scheme in enumerate([*STORED][value > 0 :: 2]):
        out = tmp_path / scheme
        with pytest.raises(SourceError) as caught:
            compress(source, out, scheme)
        assert (caught.value.message, caught.value.hint) == (
            f"{name} in model.safetensors holds NaN or infinity",
            "the weights are damaged: download or save them again",
        )
        assert not (out / "config.json").exists()
        assert not list(out.glob("*.safetensors"))
        if number % 3 != 1:
            continue
        # What stays unquantized is copied byte for byte, whatever it holds.
        compress(source, tmp_path / "kept", scheme, ignore=["model.layers.1.mlp.*"], overwrite=True)
        kept = small_checkpoints.read(tmp_path / "kept")[name]
        assert torch.equal(kept.view(torch.int16), weights[name].view(torch.int16))


def test_nan_in_one_stacked_expert_names_its_number(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Llama4ForCausalLM")
    weights["model.layers.1.feed_forward.experts.gate_up_proj"][2, 3, 4] = float("nan")
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", weights=weights)
    with pytest.raises(SourceError, match=r"experts.gate_up_proj\[2\] in model.safetensors holds NaN"):
        compress(source, tmp_path / "out")


def test_a_joined_set_above_float16_is_an_error_that_names_it(tmp_path: Path) -> None:
    weights, name = (
        small_checkpoints.tensors("Qwen3ForCausalLM", dtype="float32"),
        "model.layers.0.self_attn.k_proj.weight",
    )
    weights[name][0, 0] = -65505.0
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out")
    assert caught.value.message == (
        f"{name}, {name.replace('k_proj', 'q_proj')}, {name.replace('k_proj', 'v_proj')}: a weight reaches 65505, engines "
        "load at most 65504 under one scale"
    )
    compress(source, tmp_path / "block", "block")
    weights[name][0, 0] = 65504.0
    compress(small_checkpoints.write(tmp_path / "source", weights=weights), tmp_path / "out2")

    # One beyond a global scale names all that it is joined with.
    weights, limit = small_checkpoints.tensors("Qwen3ForCausalLM"), 1.5 * 2.0**127
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][1, 2] = -(limit + 2.0**120)
    with pytest.raises(PlanError) as caught:
        compress(small_checkpoints.write(tmp_path / "source", weights=weights), tmp_path / "no", "nvfp4")
    assert caught.value.message == (
        f"model.layers.1.mlp.gate_proj.weight, {name}: a weight reaches {limit + 2.0**120:g}, engines load at most "
        f"{limit:g} under one scale"
    )
    assert caught.value.hint.startswith("a weight this large is mostly damage")
    weights[name][1, 2] = limit
    compress(small_checkpoints.write(tmp_path / "source", weights=weights), tmp_path / "nvfp4", "nvfp4")
    assert verify(tmp_path / "nvfp4", tmp_path / "source", full=True).problems == ()
    dequantize(tmp_path / "nvfp4", tmp_path / "plain")
    assert small_checkpoints.read(tmp_path / "plain")[name][1, 2] == limit


# Of a weight, in units of 2^127: what is left of the largest code under the largest scale.
INTEGERS = {groups[0].format.number: bits for bits, groups in INTEGER_GROUPS.items()}
LARGEST = {E4M3: 1.75, INT8: 127 / 64, INT8_WORDS: 127 / 64, E2M1: 1.5}
LARGEST |= {number: 1 - 2.0**-bits for number, bits in INTEGERS.items()}


def test_a_weight_whose_code_would_overflow_bfloat16_is_an_error_that_names_it(tmp_path: Path) -> None:
    name, hint = (
        "model.layers.1.mlp.up_proj.weight",
        "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
    )
    weights, source = small_checkpoints.tensors("Qwen3ForCausalLM"), tmp_path / "source"
    for limit in set(LARGEST.values()):
        limit *= 2.0**127
        schemes = [
            scheme
            for scheme in in_all_ways(VARIANTS)
            if not scheme.format.shares_scale and LARGEST[scheme.format.number] * 2.0**127 == limit
        ]
        weights[name][1, 2] = -(limit + 2.0**120)
        small_checkpoints.write(source, weights=weights)
        for scheme in schemes:
            with pytest.raises(PlanError) as caught:
                compress(source, tmp_path / "no", **asking(scheme))
            assert (caught.value.message, caught.value.hint) == (
                f"{name} in model.safetensors: a weight reaches {limit + 2.0**120:g}, engines load at most {limit:g} with "
                f"{scheme.title}",
                hint,
            )
            assert not (tmp_path / "no" / "model.safetensors").exists()
            shutil.rmtree(tmp_path / "no", ignore_errors=True)

        weights[name][1, 2] = limit
        small_checkpoints.write(source, weights=weights)
        for scheme in schemes:
            out, plain = tmp_path / f"out{scheme.suffix}", tmp_path / f"plain{scheme.suffix}"
            compress(source, out, **asking(scheme))
            report = verify(out, source, full=True)
            assert report.problems == ()
            dequantize(out, plain)
            # With a searched scale the largest weight of a group may lie between two codes.
            bits = INTEGERS.get(scheme.format.number)
            decoded = float(small_checkpoints.read(plain)[name][1, 2])
            assert decoded == limit if bits is None else abs(decoded - limit) <= limit / 2**bits, scheme.suffix


def test_config_gains_quantization_config_and_nothing_else(tmp_path: Path, source: Path) -> None:
    text = '{"architectures": ["Qwen3ForCausalLM"], "zeta": 1, "eps": 1e-06, "name": "Überläufer", "alpha": {"b": [1, 2.50]},' \
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "big": 12345678901234567890}'  # fmt: skip
    (source / "config.json").write_text(text, encoding="utf-8")
    compress(source, tmp_path / "out", "block")
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert list(written) == [*json.loads(text), "quantization_config"]
    added = written.pop("quantization_config")
    assert written == json.loads(text)
    assert added["weight_block_size"] == [128, 128]


def test_other_files_are_copied_and_links_followed(tmp_path: Path) -> None:
    """A snapshot in the Hub's cache: every file a link to ../../blobs/HASH."""
    plain = small_checkpoints.write(tmp_path / "plain", shards=2)
    (plain / "tokenizer.json").write_text("{}")
    (plain / "LICENSE").write_text("terms")
    (plain / "processor").mkdir()
    (plain / "processor" / "config.json").write_text("{}")
    (plain / "training_args.bin").write_bytes(b"pickle")
    cache = tmp_path / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = cache / "snapshots" / commit
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, cache / "blobs" / str(number))
        link.symlink_to(os.path.relpath(cache / "blobs" / str(number), link.parent))
    result = compress(snapshot, tmp_path / "out")
    assert result.revision == commit
    compress(plain, tmp_path / "out-plain")
    found, expected = tree(tmp_path / "out"), tree(tmp_path / "out-plain")
    assert set(found) == set(expected)
    assert set(expected) == {
        ".openquant.json", "LICENSE", "README.md", "config.json", "generation_config.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        "processor/config.json", "tokenizer.json",
    }  # fmt: skip
    assert {name for name in found if found[name] != expected[name]} == {".openquant.json", "README.md"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert b"base_model: org/name\n" in found["README.md"]


# Each scheme lies in one of two ways and in one of two dtypes; neighbours, which may be stored alike, otherwise.
LIMITED = [
    (name, ("wide", "transposed")[number % 2], (torch.bfloat16, torch.float32)[number // 2 % 2])
    for number, name in enumerate(SCHEMES)
]


@for_each(("scheme", "stored", "dtype"), LIMITED if everything() else LIMITED[::5])
def test_max_memory_is_kept(tmp_path: Path, scheme: str, stored: str, dtype: torch.dtype) -> None:
    """By using fewer of the workers; with room for one only the least that is possible is named."""
    if stored == "wide":
        weights = {f"model.layers.{n}.mlp.down_proj.weight": torch.ones(128, 65536, dtype=dtype) for n in range(4)}
        source = small_checkpoints.write(tmp_path / "source", weights=weights)
    else:
        weights = {"model.layers.0.feed_forward.experts.down_proj": torch.ones(8, 2048, 2048, dtype=dtype)}
        source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", weights=weights)
    code = (
        "import re, sys, openquant\n"
        "def peak(limit):\n"
        "    output = f'{sys.argv[2]}-{limit}'\n"
        "    done = openquant.compress(sys.argv[1], output, sys.argv[3], workers=9, max_memory=limit)\n"
        "    return done.peak_rss_bytes\n"
        "try:\n"
        "    peak(50_000_000)\n"
        "except openquant.OpenQuantError as error:\n"
        "    pattern = 'a memory of 50,000,000 bytes is too little: converting with a single worker takes up to ([0-9,]+)'\n"
        "    least = int(re.match(pattern, error.message)[1].replace(',', '')) + 500_000\n"
        "for limit in (least, 300_000_000):\n"
        "    print(peak(limit), limit)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), scheme]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 2, done.stderr
    assert all(peak <= limit for peak, limit in lines), lines


def test_writes_around_the_page_cache_leave_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours share disk blocks, so their edges go through the cache; pieces of odd sizes, from many threads."""
    architecture = "Llama4ForCausalLM"
    weights = small_checkpoints.tensors(architecture)
    weights["model.norm.weight"] = torch.ones(257, dtype=torch.bfloat16)
    weights["model.embed_tokens.weight"] = torch.randn(1001, 255).to(torch.bfloat16)
    source = small_checkpoints.write(tmp_path / "source", architecture, shards=2, weights=weights)
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 40_000)
    monkeypatch.setattr("openquant.files.shardfile.DIRECT_FROM", 1)
    direct: list[int] = []
    pwrite, flag = os.pwrite, os.O_DIRECT

    def count(handle: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & flag:
            direct.append(len(data))
        return pwrite(handle, data, offset)

    monkeypatch.setattr("openquant.files.shardfile.os.pwrite", count)
    quantized = quantized_by(weights)
    for name, scheme in [*STORED.items()][::3]:
        out, cached = tmp_path / name, tmp_path / f"{name}-cached"
        direct.clear()
        compress(source, out, name, workers=4)
        assert sum(direct) > 500_000, "this file system has no O_DIRECT, or nothing used it"
        direct.clear()
        with monkeypatch.context() as patch:
            patch.delattr("openquant.files.shardfile.os.O_DIRECT")
            compress(source, cached, name)
        assert not direct, name
        assert tree(out) == tree(cached)
        assert_same(small_checkpoints.read(out), expected_output(weights, quantized, scheme))


def test_a_joined_set_of_mixed_dtypes(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    for layer, dtype in ((0, torch.float32), (1, torch.float16)):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        weights[name] = torch.randn(128, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    compress(source, tmp_path / "out")
    assert_same(
        small_checkpoints.read(tmp_path / "out"), expected_output(weights, quantized_by(weights), SCHEMES["tensor"])
    )


def test_experts_both_stacked_and_on_their_own_are_refused(tmp_path: Path) -> None:
    weights, path = small_checkpoints.tensors("Llama4ForCausalLM"), "model.layers.1.feed_forward.experts"
    weights[f"{path}.0.gate_proj.weight"] = torch.ones(128, 256, dtype=torch.bfloat16)
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", weights=weights)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out")
    assert caught.value.message == f"{path}.0.gate_proj.weight is also in the stack of experts"


@for_each("dtype", ["bfloat16", "float16", "float32"])
def test_torch_devices_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", dtype=dtype)
    for scheme in [*STORED][("bfloat16", "float16", "float32").index(dtype) :: 3]:
        compress(source, tmp_path / "numpy" / scheme, scheme)
        for device in ("cpu:0", "cuda:0") if torch.cuda.is_available() else ("cpu:0",):
            out = tmp_path / device / scheme
            with monkeypatch.context() as patch:
                patch.setattr("openquant.job.find_device", lambda *_, device=device: device)
                compress(source, out, scheme)
            assert tree(out) == tree(tmp_path / "numpy" / scheme), scheme


def test_half_of_a_surrogate_pair_in_a_config_is_kept(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    change_json(source / "config.json", lambda config: config.update(note="\ud800 \u00e9"))
    compress(source, tmp_path / "out")
    dequantize(tmp_path / "out", tmp_path / "plain")
    for made in ("out", "plain"):
        assert json.loads((tmp_path / made / "config.json").read_text())["note"] == "\ud800 \u00e9"


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source = small_checkpoints.write(
        tmp_path / "source",
        weights={"model.layers.0.mlp.down_proj.weight": torch.zeros(4096, 16384, dtype=torch.bfloat16)},
    )
    code = (
        "import sys, openquant; r = openquant.compress(sys.argv[1], sys.argv[2], sys.argv[3], workers=2);"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys(); print(r.peak_rss_bytes)"
    )
    for scheme in ("block", "nvfp4"):
        command = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), scheme]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert peak < 120e6, scheme
        shutil.rmtree(tmp_path / "out")

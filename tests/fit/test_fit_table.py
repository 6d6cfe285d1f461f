"""openquant fit: cells, their order, the commands, what it refuses, and that it reads headers only."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE, ROOT
from openquant import FitTable, compress, fit_table
from openquant.cli.commands import main
from openquant.diagnosis.result import least_loss
from openquant.errors import OpenQuantError, PlanError
from openquant.files.checkpoint import open_checkpoint
from openquant.fit.budget import allowed_context, read_budget, weights_on_gpus
from openquant.formats.hardware import GPUS
from openquant.formats.schemes import SCHEMES, find_scheme
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_plan
from openquant.plan.serving import OVERHEAD, UTILIZATION
from openquant.report.fit import fit_text
from openquant.web.choices import make_sections
from support import small_checkpoints, starting
from support.loopback_hub import COMMIT, LoopbackHub

# Bytes of a token in a bfloat16 KV cache of `qwen`: layers, keys and values, heads, numbers of a head, bytes.
TOKEN = 64 * 2 * 8 * 128 * 2
A6000, RTX_4090 = int(47.4 * 2**30), int(23.5 * 2**30)


def write_headers(root: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a checkpoint of which the weights are a hole in the file."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (root / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return root


def qwen(root: Path, experts: int = 0, layers: int = 64, **more: Any) -> Path:
    """A model with the shapes of Qwen3-32B, or with experts a fifth as wide."""
    hidden, inner, queries, keys, vocab = 5120, 25600, 64 * 128, 8 * 128, 151936
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "num_experts": experts,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    paths = [f"mlp.experts.{number}." for number in range(experts)] or ["mlp."]
    for layer in range(layers):
        attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "q_norm": 128, "k_norm": 128}
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{'self_attn.' if size == 128 else ''}{name}.weight"] = (size,)
        if experts:
            shapes[f"model.layers.{layer}.mlp.gate.weight"] = (experts, hidden)
        rows = inner // 5 if experts else inner
        for path in paths:
            for name, shape in {"gate": (rows, hidden), "up": (rows, hidden), "down": (hidden, rows)}.items():
                shapes[f"model.layers.{layer}.{path}{name}_proj.weight"] = shape
    return write_headers(root, config | more, shapes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("fit") / "Qwen3-32B")


# Each question of the large model is asked once.
table = cache(fit_table)


def rows_of(found: FitTable) -> list[str | None]:
    return [row.scheme for row in found.schemes]


def kl(scheme: str) -> str:
    found = least_loss(SCHEMES[scheme])
    if found is None:
        return "-"
    return f"{found.kl:.3f}{'*' if found.readings else ''}"


def test_the_cells_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(EXAMPLE), "--gpu", "rtx-4090", "--for", "both", "--context", "1k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "1 RTX 4090 of 25.2 GB (Ada), for sequences of 1,024 tokens in a bfloat16 KV cache"
    # 2048 bytes a token, in sequences of 1024, in 92 % of 23.5 GiB less 2 GB and the weights.
    assert int((RTX_4090 * UTILIZATION - OVERHEAD - 8394240) // 2**21 // 1000) == 10
    assert lines[3:6] == [
        "scheme        bits     size  GPUs  longest  at once  computes  engine      KL",
        "(as it is)       -  8.39 MB     1    2,048      10k   16 bits       -       0",
        f"int8-weights  8.05  5.27 MB     1    2,048      10k   16 bits    both   {kl('int8-weights')}",
    ]
    assert lines[-8:] == [
        "KL -: not measured for this scheme",
        "not mxfp8, int7, int6, int5, int3, int2, mxfp4: SGLang does not load it",
        "",
        "the model fits as it is: nothing need be compressed. Compressed it has 5.27 MB in place of 8.39 MB.",
        "closest, 0.005 nats, computed in 16 bits:",
        f"  openquant compress -m {EXAMPLE} --scheme int8-weights",
        "fastest, 0.030 nats, computed in FP8:",
        f"  openquant compress -m {EXAMPLE} --scheme channel",
    ]


def test_the_document_has_the_table_of_qwen3_32b(model: Path) -> None:
    found = table(model, "5090", context="16k")
    assert next(row.bytes for row in found.schemes if row.scheme is None) == 65_524_246_528
    text = fit_text(found).replace(str(model), "Qwen/Qwen3-32B")
    assert f"```\n$ openquant fit Qwen/Qwen3-32B --gpu 5090 --context 16k\n{text}\n```" in (
        (ROOT / "docs" / "fit.md").read_text()
    )


def test_the_document_names_all_gpus() -> None:
    text = (ROOT / "docs" / "fit.md").read_text()
    for gpu in GPUS:
        name = gpu.name if gpu.memory is None else f"{gpu.name} ({gpu.memory / 1e9:.1f})"
        assert name in text


def test_the_figures_of_a_row(model: Path) -> None:
    found = table(model, "A6000", context="16k")
    assert (found.architecture, found.context, found.longest_context, found.unknown) == (
        *("Qwen3ForCausalLM", 16384, 40960),
        None,
    )
    checkpoint = open_checkpoint(model)
    for row in found.schemes:
        [held] = row.holds
        if row.scheme is None:
            # 65.5 GB, of which two ranks have a half each.
            assert (row.bytes, held.gpus, held.left) == (
                summary.source_bytes(make_plan(checkpoint, SCHEMES["int4"])),
                2,
                0,
            )
            continue
        plan = make_plan(checkpoint, SCHEMES[row.scheme])
        assert row.bytes == summary.output_bytes(plan)
        assert row.bits == pytest.approx(
            8 * sum(line.bytes_after for line in plan.lines if line.quantized) / (64 * 5120 * (3 * 25600 + 18432))
        )
        room = int(A6000 * UTILIZATION) - OVERHEAD - row.bytes
        assert (held.gpus, held.longest, held.sequences) == (1, min(room // TOKEN, 40960), room // (16384 * TOKEN))
        assert held.left == held.longest
        assert row.engines == tuple(SCHEMES[row.scheme].engines)


def test_two_gpus_share_weights_and_cache(model: Path) -> None:
    found = table(model, "2x4090", context=40960)
    [held] = next(row for row in found.schemes if row.scheme == "int6").holds
    shapes = {"model.embed_tokens": 1, "lm_head": 1}
    plan = make_plan(open_checkpoint(model), SCHEMES["int6"])
    whole = sum(line.bytes_after for line in plan.lines if not plan.entry.rule(line.names[0]).divided)
    assert {name for line in plan.lines for name in line.names} >= shapes.keys()
    room = int(RTX_4090 * UTILIZATION) - OVERHEAD - (summary.output_bytes(plan) - whole) // 2 - whole
    assert (held.gpus, held.longest, held.sequences) == (2, 40960, room // (40960 * TOKEN // 2))
    # int8-weights needs four: what is left of two is said too.
    [held] = next(row for row in found.schemes if row.scheme == "int8-weights").holds
    assert held.gpus == 4 and held.left is not None and 0 < held.left < 40960


def test_what_fits_comes_first_then_what_loses_least_then_what_is_smallest(model: Path) -> None:
    names = rows_of(table(model, "5090", context="16k"))
    fitting = ["nvfp4", "int5", "int4", "nvfp4-w4a4", "mxfp4"]
    # Of the last two no KL is known; the larger first. int8 has no kernel on Blackwell.
    assert names[:7] == [*sorted(fitting, key=kl), "int3", "int2"]
    assert names[7:-1] == ["int8-weights", "int6", "channel", "tensor", "mxfp8", "block", "int7"]
    # It needs four.
    assert names[-1] is None
    # Twice as much memory, and no scheme needs more than one.
    assert rows_of(table(model, "H100", context="16k"))[0] is None


def test_schemes_that_broke_the_model_are_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["fit", str(model), "--gpu", "5090", "--context", "16k"]) == 0
    legend = "KL -: not measured for this scheme; int3 and int2 in groups of 64 broke it (docs/results.md)"
    assert legend in " ".join(capsys.readouterr().out.split())


def test_what_a_scheme_needs_is_said_of_a_gpu_without_a_name_too(model: Path) -> None:
    needs = {gpu: {row.scheme: row.needs for row in table(model, gpu).schemes} for gpu in ("4090", "24GB")}
    assert needs["4090"]["int6"] == needs["24GB"]["int6"] == ("humming-kernels",)
    assert needs["24GB"]["tensor"] == ()


def test_the_commands_for_the_best_and_for_a_mixture(model: Path) -> None:
    found = table(model, "5090", context="16k")
    # int5 is larger, and lost more than nvfp4 with its calibration.
    assert (found.best, found.command) == ("nvfp4", f"openquant compress -m {model} --scheme nvfp4 --gptq")
    assert (found.fastest, found.fastest_command) == (None, None)
    assert found.mixture == f"openquant compress -m {model} --fit 5090 --context 16k --gptq"
    assert table(model, "5090").mixture == f"openquant compress -m {model} --fit 5090 --gptq"
    options: dict[str, Any] = {"kv_cache": "fp8", "ignore": ["**.o_proj", "**.q_proj"], "quantize_lm_head": True}
    more = "--kv-cache fp8 --quantize-lm-head --ignore '**.o_proj' --ignore '**.q_proj'"
    found = fit_table(model, "2x80GB", engines="sglang", architecture="Qwen3ForCausalLM", **options)
    words = f"--kv-cache fp8 --quantize-lm-head --architecture Qwen3ForCausalLM {more.split('head ')[1]}"
    assert found.command == f"openquant compress -m {model} --scheme int8-weights {words}"
    # Nothing is known of what a GPU without a name multiplies.
    assert found.fastest is None
    # Where int8-weights fits, a mixture gains nothing; nor where the best fills the GPU.
    assert found.mixture is None
    assert table(model, "24.5GB", context=2048, engines="sglang").mixture is None
    found = table(model, "30GB", context=2048, engines="sglang")
    assert (found.best, found.mixture) == (
        "nvfp4",
        f"openquant compress -m {model} --fit 30GB --context 2k --for sglang --gptq",
    )


def test_the_page_takes_the_closest_that_is_made_without_texts(model: Path, tmp_path: Path) -> None:
    fit = {"model": str(model), "gpu": "30GB", "context": 2048}
    assert str(fit_table(**fit).command).endswith("--scheme nvfp4 --gptq")
    compress = {"model": str(model), "output": str(tmp_path / "out"), "scheme": ""}
    assert make_sections(compress, fit)["scheme"] == "int5"


def test_experts_have_kernels_of_their_own(tmp_path: Path) -> None:
    moe = qwen(tmp_path / "moe", experts=8, layers=8)
    found = fit_table(moe, "L40S", context="16k")
    rows = {row.scheme: row for row in found.schemes}
    assert (rows["block"].arithmetic, rows["block"].expert_arithmetic) == ("16 bits", "FP8")
    assert "16 bits/FP8" in next(line for line in fit_text(found).splitlines() if line.startswith("block"))
    # SGLang has no experts in INT8.
    assert rows["int8"].engines == ("vLLM",)
    assert "SGLang" in fit_table(moe, "L40S", engines="sglang").refused["int8"]
    # vLLM's kernel for dense layers fails on Blackwell.
    assert fit_table(moe, "B200").refused["int8"] == "no engine has a kernel for it on B200"


def test_radeons_get_nothing_that_only_nvidia_runs(model: Path) -> None:
    found = table(model, "2x7900xtx")
    only_nvidia = {"int7", "int6", "int5", "int3", "int2"}
    assert only_nvidia | {"tensor", "channel", "block"} == found.refused.keys()
    # Nothing emulated is advised, and FP8 is none of its numbers.
    assert (found.best, found.fastest) == ("int8-weights", "int8")
    assert found.fastest_command == f"openquant compress -m {model} --scheme int8 --smooth 0.5"
    # What is served has room in both.
    longest = min(row.holds[0].longest or 0 for row in found.schemes if row.scheme in ("int8-weights", "int8"))
    assert fit_text(found).splitlines()[-1] == f"serve it with --max-model-len {longest} or less"
    assert table(model, "2xr9700").refused.keys() == only_nvidia
    assert [target.name for target in table(model, "7900xtx", context=64).targets] == ["RX 7900 XTX"]


def test_without_a_gpu_there_are_three_sizes_and_no_command(model: Path) -> None:
    found = table(model, context="32k")
    assert [target.memory_bytes for target in found.targets] == [24 * 10**9, 48 * 10**9, 80 * 10**9]
    assert rows_of(found)[:3] == [None, "int8-weights", "int8"]
    assert [held.gpus for held in found.schemes[1].holds] == [4, 2, 1]
    assert (found.best, found.command, found.mixture, found.fastest) == (None, None, None, None)
    text = fit_text(found)
    assert text.splitlines()[-1] == "name your GPU with --gpu, such as --gpu 4090, to get the command for it"
    assert "int8-weights  8.00  34.3 GB  4: 40k  2: 40k  1: 40k    both   0.005" in text


def test_a_cpu_has_no_size() -> None:
    found = fit_table(EXAMPLE, "cpu")
    assert {row.scheme for row in found.schemes} == {None, "tensor", "channel", "block", "int8", "int4"}
    assert (found.best, found.fastest, found.mixture) == ("int8", "int8", None)
    text = fit_text(found)
    assert text.splitlines()[1].startswith("CPU, for sequences of 2,048 tokens") and "GPUs" not in text
    assert "AMX: needed for tensor, block" in text


def test_an_fp8_cache_holds_twice_as_much(model: Path) -> None:
    wide, narrow = (table(model, "A6000", context="16k", kv_cache=cache) for cache in ("auto", "fp8"))
    held = [next(row for row in found.schemes if row.scheme == "int4").holds[0] for found in (wide, narrow)]
    assert held[0].sequences == 5 and held[1].sequences in (10, 11)
    assert "in an FP8 KV cache" in fit_text(narrow)


CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


DENSE = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}


def test_an_fp8_cache_of_the_config_is_counted(tmp_path: Path, model: Path) -> None:
    for numbers, fp8 in (("float", True), ("int", False)):
        settings = DENSE | {"kv_cache_scheme": CACHE | {"type": numbers}}
        stored = qwen(tmp_path / numbers, quantization_config=settings)
        found, same = fit_table(stored, "A6000"), table(model, "A6000", kv_cache="fp8" if fp8 else "auto")
        assert (found.kv_cache, found.cache_in_config) == (same.kv_cache, fp8) and found.schemes == same.schemes
        assert same.command is not None and found.command == same.command.replace(str(model), str(stored))
        said = "FP8 KV cache: config.json asks for it (docs/how-to/serve.md)"
        assert (said in fit_text(found).splitlines()) is fp8 and said not in fit_text(same)


def test_what_to_do_if_nothing_fits(model: Path, tmp_path: Path) -> None:
    # Whose embedding and head alone are too large.
    small = qwen(tmp_path / "small", layers=1)

    def last(**given: Any) -> str:
        return fit_text(fit_table(small, **given)).splitlines()[-1]

    advice = "try a smaller --context, --kv-cache fp8, --quantize-lm-head or more GPUs (--gpu 2x..)"
    left = (
        int(RTX_4090 * UTILIZATION)
        - OVERHEAD
        - summary.output_bytes(make_plan(open_checkpoint(model), SCHEMES["int4"]))
    )
    # An FP8 cache alone does not make room for so much; with eight bits for the head there is.
    assert fit_text(table(model, "4090", context="16k")).splitlines()[-4:] == [
        f"no scheme with a known KL fits 1 RTX 4090; int4 leaves {left // TOKEN:,} tokens; int8-weights needs 2: "
        f"{advice}",
        "this fits, for sequences of 16,384 tokens:",
        f"  openquant compress -m {model} --scheme int4 --awq --gptq --scheme-for lm_head=int8-weights --kv-cache fp8 "
        "--quantize-lm-head",
        "serve it with --max-model-len 16384 (SGLang: --context-length)",
    ]
    assert last(gpu="2GB") == f"no scheme with a known KL fits 1 GPU, nor do 8 of them hold one: {advice}"
    # What is given is not advised.
    for given, others in (
        ({"kv_cache": "fp8"}, "a smaller --context, --quantize-lm-head"),
        ({"quantize_lm_head": True}, "a smaller --context, --kv-cache fp8"),
        ({"kv_cache": "fp8", "quantize_lm_head": True}, "a smaller --context"),
    ):
        assert last(gpu="2GB", **given).endswith(f": try {others} or more GPUs (--gpu 2x..)")


def test_a_quantized_source_needs_no_calibration_and_is_not_called_unquantized(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(EXAMPLE, out)
    found = fit_table(out, "4090")
    [source] = [row for row in found.schemes if row.scheme is None]
    assert source.arithmetic is None and source.bytes < 6 * 10**6
    assert all(row.calibrated is None for row in found.schemes)
    # It is not made larger or worse without need.
    assert found.source_fits
    assert found.quantized_source and (found.best, found.command, found.mixture, found.instead) == (None,) * 4
    lines = fit_text(found).splitlines()
    assert lines[-1] == "the model is quantized already, and fits as it is: serve it"
    assert "the model is quantized already: KL is what is lost on top of that" in lines
    # Where it does not fit, 2 GB of which are the engine's, it is made smaller.
    [nvfp4] = [row for row in found.schemes if row.scheme == "nvfp4"]
    memory = int((OVERHEAD + nvfp4.bytes + 2048 * 2048 + 10_000) / UTILIZATION)
    found = fit_table(out, f"{memory}B", context=2048)
    assert (found.best, found.source_fits) == ("nvfp4", False)
    # But not where it leaves some tokens, and no scheme those that were asked for.
    memory = int((OVERHEAD + source.bytes + 100 * 2048 + 10_000) / UTILIZATION)
    said = fit_text(fit_table(out, f"{memory}B", context=2048)).splitlines()[-1]
    assert said.startswith("as it is the model leaves 104 tokens: serve it with --max-model-len 104 ")


def test_a_quantized_head_has_eight_bits_in_schemes_of_fewer(model: Path) -> None:
    found = table(model, "4090", kv_cache="fp8", quantize_lm_head=True)
    assert found.best == "nvfp4"
    more = "--scheme-for lm_head=int8-weights --kv-cache fp8 --quantize-lm-head"
    assert found.command == f"openquant compress -m {model} --scheme nvfp4 --gptq {more}"
    narrow = {"int7", "int6", "int5", "int4", "int3", "int2", "nvfp4", "nvfp4-w4a4", "mxfp4"}
    assert found.head_schemes == dict.fromkeys(narrow, "lm_head=int8-weights")
    head = find_scheme("int8-weights")
    texts = {"documents": 1, "length": 2}
    options = PlanOptions(scheme_for=(("lm_head", head),), head=True, fp8_kv_cache=True, texts=texts)
    plan = make_plan(open_checkpoint(model), SCHEMES["nvfp4"], options)
    [row] = [row for row in found.schemes if row.scheme == "nvfp4"]
    assert row.bytes == summary.output_bytes(plan)
    lines = fit_text(found).splitlines()
    assert "KL is without what the quantized output head loses (docs/output-head.md)" in lines
    [said] = [line for line in lines if line.startswith("the output head is int8-weights beside nvfp4, ")]
    assert said.endswith(": fewer bits lose much in it") and "channel" not in said
    # The context that is left is less than the model allows.
    assert f"serve it with --max-model-len {row.holds[0].longest} (SGLang: --context-length) or less" in lines
    assert found.to_json()["head_schemes"]["int4"] == "lm_head=int8-weights"


def test_refusals(subtests: pytest.Subtests) -> None:
    for given, message, hint in [
        ({"gpu": "4091"}, "--gpu '4091' is no GPU that is known", "did you mean RTX 4090"),
        ({"gpu": "1080Ti"}, "--gpu '1080Ti' is no GPU that is known", "did you mean RTX 3080 Ti or RTX 2080 Ti"),
        ({"gpu": "24"}, "--gpu '24' is no GPU that is known", "give its memory: --gpu 24GB"),
        ({"gpu": "m3-max"}, "--gpu 'm3-max': vLLM and SGLang have no kernels for Apple's GPUs", "serve it with mlx-lm"),
        ({"gpu": ""}, "--gpu: it is empty", ""),
        ({"gpu": "3x4090"}, "3 GPUs cannot share this model: they do not divide it", "name one of 1, 2, 4 GPUs"),
        ({"context": 0}, "a context of 0 tokens holds nothing", ""),
        ({"context": "8q"}, "--context: 8q is no number of tokens", ""),
        ({"context": "64k"}, "--context 65536 is more than the model allows: max_position_embeddings is 2,048", ""),
        ({"engines": "tgi"}, "--for: tgi is none of vllm, sglang, both", "choose one, or leave --for out"),
        ({"kv_cache": "int8"}, "--kv-cache: int8 is none of fp8, auto", "choose one, or leave --kv-cache out"),
        ({"gpu": "T4", "engines": "sglang"}, "no scheme is left", "name another engine or GPU"),
        ({"ignore": ["**"]}, "no scheme is left, such as tensor: it quantizes nothing", ""),
    ]:
        with subtests.test(given=given):
            with pytest.raises(OpenQuantError) as caught:
                fit_table(EXAMPLE, **given)
            assert caught.value.message.startswith(message), caught.value.message
            assert caught.value.hint.startswith(hint), caught.value.hint


def test_a_context_is_no_longer_than_the_model_allows() -> None:
    assert [allowed_context(tokens, 2048) for tokens in (1, 2048, 4096, 8192)] == [1, 2048, 2048, 2048]
    assert allowed_context(10**6, None) == 10**6
    with pytest.raises(PlanError, match="^--context 8193 is more than the model allows"):
        allowed_context(8193, 2048)
    plan = make_plan(open_checkpoint(EXAMPLE), SCHEMES["int4"])
    with pytest.raises(PlanError, match="max_position_embeddings is 2,048"):
        weights_on_gpus(read_budget("24GB"), plan, 9000, False)


def test_gpus_load_no_mtp_layers(tmp_path: Path) -> None:
    small_checkpoints.write(tmp_path / "mtp", "DeepseekV3ForCausalLM")
    plan = make_plan(open_checkpoint(tmp_path / "mtp"), find_scheme("int4"))
    unloaded = sum(line.bytes_after for line in plan.lines if line.why == "MTP layer")
    loaded = summary.output_bytes(plan) - unloaded
    budget = read_budget("2.2GB")
    assert unloaded > 0
    serving = summary.serving(plan)
    assert serving is not None and serving[1].cache is not None
    cached = serving[1].cache.sequence(1024, False)
    limit = weights_on_gpus(budget, plan, 1024, False)
    assert limit == int(2.2e9 * UTILIZATION) - OVERHEAD - cached + unloaded
    [row] = [row for row in fit_table(tmp_path / "mtp", "2.2GB", context=1024).schemes if row.scheme == "int4"]
    room = int(2.2e9 * UTILIZATION) - OVERHEAD - loaded
    assert row.holds[0].sequences == room // cached


def test_what_the_source_lacks_is_named(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "source")
    small_checkpoints.change_weights(root, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    found = fit_table(root, "4090")
    assert found.notes == ["the source lacks model.layers.1.mlp.up_proj"]
    assert f"\nnote: {found.notes[0]}\n" in fit_text(found, 80)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as server:
        yield server


def test_of_a_repository_only_headers_are_read(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repositories["org/name"] = EXAMPLE
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    words = ["-m", "openquant", "fit", "org/name", "--gpu", "a6000", "--json"]
    done = starting.run(words, cwd=ROOT, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {**fit_table(EXAMPLE, "a6000").to_json(), "model": "org/name", "revision": COMMIT} | {
        key: found[key] for key in ("command", "fastest_command", "schemes", "targets")
    }
    # Of 8.4 MB.
    assert hub.sent < 1_000_000
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_a_model_that_runs_its_layers_twice_gets_no_mixture(model: Path, tmp_path: Path) -> None:
    copy = qwen(tmp_path / "loops", architectures=["IQuestLoopCoderForCausalLM"], loop_num=2, loop_window_size=64)
    found = fit_table(copy, "30GB", context=2048)
    assert (found.best, found.best, found.mixture) == (found.uncalibrated, "int5", None)
    assert found.command == f"openquant compress -m {copy} --scheme int5"


def test_a_head_that_is_the_embedding_is_the_reason_whatever_the_scheme(tmp_path: Path) -> None:
    tied = qwen(tmp_path / "tied", layers=1, tie_word_embeddings=True)
    with pytest.raises(
        PlanError, match=r"^config.json ties the output head to the embedding, although the source has one"
    ):
        fit_table(tied, "4090", quantize_lm_head=True)


def test_what_is_not_known_of_the_cache_leaves_the_weights(tmp_path: Path) -> None:
    root = qwen(tmp_path / "model", layer_types=["sliding_attention"] * 64, sliding_window="wide")
    found = fit_table(root, "4090", context="16k")
    held = {row.scheme: row.holds[0] for row in found.schemes}
    assert (held["int4"].gpus, held["int4"].longest, held["int4"].sequences) == (1, None, None)
    assert (held["int8-weights"].gpus, found.best, found.mixture) == (2, "nvfp4", None)

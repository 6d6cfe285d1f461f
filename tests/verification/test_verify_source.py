"""What verify says of directories that loaders refuse, or serve otherwise than their source: made by us and by others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import change_json
from openquant import Report, compress, verify
from openquant.cli.commands import main
from openquant.formats.schemes import BLOCK, CHANNEL, INT4_W4A16, SCHEMES, TENSOR
from openquant.verification.checks import judge_config
from support import small_checkpoints
from support.conversions import Shelf
from support.quantized_checkpoints import BLOCKS, by_blocks, store
from support.representatives import in_all_ways
from support.small_checkpoints import change_weights

Weights = dict[str, torch.Tensor]
ONE = "model.safetensors"
CONFIG = "config.json"
Q, K, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture
def both(shelf: Shelf, tmp_path: Path) -> tuple[Path, Path]:
    """A small Qwen3 in one file, and its output with one scale per tensor."""
    source, out = shelf.copied("Qwen3ForCausalLM", TENSOR, tmp_path)
    # Tests make outputs of their own under that name.
    return source, out.rename(tmp_path / "ours")


@pytest.fixture
def source(both: tuple[Path, Path]) -> Path:
    return both[0]


@pytest.fixture
def ours(both: tuple[Path, Path]) -> Path:
    return both[1]


@pytest.fixture
def others(ours: Path) -> Path:
    """The same, with nothing that says who made it."""
    (ours / ".openquant.json").unlink()
    (ours / "README.md").unlink()
    return ours


def change_settings(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    change_json(root / CONFIG, lambda config: change(config["quantization_config"]))


def found(report: Report) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return report.problems, report.notes


# Whose directory it is.


def test_the_journal_says_that_it_is_ours(ours: Path, source: Path) -> None:
    change_json(ours / CONFIG, lambda config: config.update(initializer_range=9))
    message = "config.json: initializer_range is 9, the source has 0.02"
    assert found(verify(ours, source)) == ((message,), ())
    (ours / ".openquant.json").rename(ours / "kept")
    assert found(verify(ours, source)) == ((), ("not in the source: kept", message))
    (ours / "README.md").unlink()
    assert found(verify(ours, source)) == ((), ("not in the source: kept", message))
    (ours / "kept").rename(ours / ".openquant.json")
    problems = verify(ours, source).problems
    assert problems == ("README.md is missing: the run that made this directory wrote it", message)


def test_a_deleted_key_does_not_make_it_another_tool_s(shelf: Shelf, subtests: pytest.Subtests, tmp_path: Path) -> None:
    for scheme in (BLOCK, CHANNEL, INT4_W4A16):
        with subtests.test(scheme=scheme.suffix):
            source, out = shelf.copied("Qwen3ForCausalLM", scheme, tmp_path / scheme.suffix)
            key = "fmt" if scheme.method == "fp8" else "quantization_status"
            held = scheme.settings[key]
            change_settings(out, lambda settings, key=key: settings.pop(key))
            change_json(out / CONFIG, lambda config: config.update(num_key_value_heads=1))
            assert found(verify(out, source, full=True)) == (
                (
                    f'config.json: quantization_config.{key} is missing, openquant writes "{held}"',
                    "config.json: num_key_value_heads is 1, the source has 2",
                ),
                (),
            )


# config.json.


COMPUTED = [
    ({"hidden_size": 512}, "hidden_size is 512, the source has 256"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu", the source has "silu"'),
    ({"dtype": "float16"}, 'dtype is "float16", the source has "bfloat16"'),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is true, the source has false"),
    ({"architectures": ["Qwen2ForCausalLM"]}, 'architectures is ["Qwen2ForCausalLM"], the source has ["Qwen3ForCausalLM"]'),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
     "rope_parameters.rope_theta is 1000000.0, the source has 10000.0"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_parameters.rope_type is "linear", the source has "default"'),
    ({"rms_norm_eps": None}, "rms_norm_eps is null, the source has 1e-06"),
    ({"num_key_value_heads": ...}, "num_key_value_heads is 32, the source has 2"),
]  # fmt: skip
NOT_COMPUTED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"initializer_range": 0.5}, ("initializer_range is 0.5, the source has 0.02",)),
    # What is the class's default.
    ({"attention_dropout": 0.0, "initializer_range": ...}, ()),
    ({"attention_multiplier": 1.0}, ("attention_multiplier is 1.0, the source has none",)),
    # As transformers spelled them before 5.
    ({"dtype": ..., "torch_dtype": "bfloat16"}, ()),
    ({"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None}, ()),
]


def changed(config: bytes, change: dict[str, Any]) -> str:
    """A config.json with other values; without the keys whose value is `...`."""
    return json.dumps({key: value for key, value in (json.loads(config) | change).items() if value is not ...})


def test_what_is_computed_otherwise_is_a_problem_in_others_and_the_rest_a_note(
    subtests: pytest.Subtests, others: Path, source: Path
) -> None:
    config = (others / CONFIG).read_bytes()
    for change, message in COMPUTED:
        with subtests.test(change=change):
            (others / CONFIG).write_text(changed(config, change))
            assert f"config.json: {message}" in verify(others, source).problems
    for change, messages in NOT_COMPUTED:
        with subtests.test(change=change):
            (others / CONFIG).write_text(changed(config, change))
            assert found(verify(others, source)) == ((), tuple(f"config.json: {message}" for message in messages))


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Qwen2VLForConditionalGeneration"]
)
def test_a_config_that_transformers_saved_again_computes_the_same(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    config = small_checkpoints.config(architecture)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    again = json.loads((tmp_path / CONFIG).read_text())
    assert [difference for difference, computed in judge_config(again, config) if computed] == []


# quantization_config.


def test_keys_that_openquant_does_not_write_are_a_problem(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out, "channel", workers=1)
    change_settings(out, lambda settings: settings["config_groups"]["group_0"]["weights"].update(more=1))
    place = "quantization_config.config_groups.group_0.weights.more"
    assert found(verify(out)) == ((f"config.json: {place} is 1, openquant writes none",), ())


def test_a_matrix_that_the_source_does_not_have(ours: Path, source: Path) -> None:

    def change(weights: Weights) -> None:
        weights["model.layers.0.more.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)

    change_weights(ours, change)
    change_settings(ours, lambda settings: settings["ignored_layers"].remove("lm_head"))
    change_settings(ours, lambda settings: settings["modules_to_not_convert"].remove("lm_head"))
    problems, notes = found(verify(ours, source))
    assert problems == (
        f"{ONE}: model.layers.0.more.weight is not in the source",
        "config.json: ignored_layers does not list lm_head",
    )
    assert notes == ()


def test_two_quantization_configs(others: Path, source: Path) -> None:
    out = others
    change_json(out / CONFIG, lambda config: config.update(compression_config=config["quantization_config"]))
    assert verify(out, source).problems == ()
    change_json(
        out / CONFIG, lambda config: config.update(text_config={"quantization_config": {"quant_method": "awq"}})
    )
    (problem, *_) = verify(out, source).problems
    assert problem == "config.json has several quantization configs, which differ"


# Files.


def test_weights_beside_a_single_file(others: Path, source: Path) -> None:
    out = others
    save_file({"x": torch.ones(1)}, out / "extra.safetensors")
    save_file({"x": torch.ones(1)}, out / "consolidated.safetensors")
    expected = (
        f"consolidated.safetensors is there too: vLLM loads it instead of {ONE}",
        f"extra.safetensors lies beside {ONE}, and there is no index: engines load both",
    )
    assert verify(out).problems == expected
    assert verify(out, source).problems == expected


def test_weights_that_no_index_names(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", shards=2)
    compress(source, tmp_path / "out")
    save_file({"x": torch.ones(1)}, tmp_path / "out" / "extra.safetensors")
    assert verify(tmp_path / "out").problems == (
        "extra.safetensors holds weights that model.safetensors.index.json does not name",
    )


def test_files_that_change_nothing_are_a_note(ours: Path, source: Path) -> None:
    names = ["LICENSE", "a.png", "b.png", "c.png", "d.png", "e.png"]
    for name in names:
        (ours / name).write_text("")
    assert found(verify(ours)) == ((), (f"not of the run that made it: {', '.join(names[:5])} and 1 more",))
    assert found(verify(ours, source)) == ((), (f"not in the source: {', '.join(names[:5])} and 1 more",))


def test_an_adapter_is_a_problem(ours: Path, source: Path) -> None:
    out = ours
    (out / "adapter_config.json").write_text("{}")
    problem = "adapter_config.json is there: transformers loads the adapter with the model"
    assert found(verify(out)) == ((problem,), ())
    assert found(verify(out, source)) == ((problem,), ())
    # Of the source none is copied, so it explains none.
    (source / "adapter_config.json").write_text("{}")
    assert found(verify(out, source)) == ((problem,), ())


# Codes and scales made again.


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_quantizing_the_source_again_gives_all_of_it(subtests: pytest.Subtests, tmp_path: Path, dtype: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", dtype=dtype)
    for scheme in [each.name for each in in_all_ways(SCHEMES.values())][dtype == "float32" :: 2]:
        with subtests.test(scheme=scheme):
            compress(source, tmp_path / scheme, scheme)
            report = verify(tmp_path / scheme, source, full=True)
            assert found(report) == ((), ())
            assert report.recomputed
            assert report.compared_codes == report.equal_codes > 10**6


@pytest.mark.parametrize("whose", ["ours", "others"])
def test_a_code_moved_by_one(whose: str, source: Path, request: pytest.FixtureRequest) -> None:
    out = request.getfixturevalue(whose)
    weight, stored = small_checkpoints.read(source)[f"{DOWN}.weight"].float(), small_checkpoints.read(out)
    codes, scale = stored[f"{DOWN}.weight"], stored[f"{DOWN}.weight_scale"]
    quotient, moved = weight / scale, (codes.view(torch.uint8) + 1).view(torch.float8_e4m3fn).float()
    error = (quotient - moved).abs()
    error[(quotient.abs() >= 400) | (moved * quotient <= 0)] = float("inf")
    row, col = divmod(int((error / quotient.abs()).argmin()), 512)
    assert error[row, col] <= quotient[row, col].abs() / 16
    before = int(codes.view(torch.uint8)[row, col])
    change_weights(out, lambda weights: weights[f"{DOWN}.weight"].view(torch.uint8)[row, col].add_(1))
    report = verify(out, source, full=True)
    assert report.compared_codes == report.equal_codes + 1
    message = (
        f"{ONE}: {DOWN}.weight has the code 0x{before + 1:02x} at [{row}, {col}], the source makes it 0x{before:02x} "
        "(1 of 131072 codes differ)"
    )
    assert report.problems == ((message,) if whose == "ours" else ())


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_one_scale_of_several_layers_a_little_off(source: Path, tmp_path: Path, known: bool) -> None:
    out = tmp_path / "out"
    if not known:
        change_json(source / CONFIG, lambda config: config.update(architectures=["MyForCausalLM"]))
    compress(source, out, architecture="Qwen3ForCausalLM")
    notes = verify(out, source).notes
    assert found(verify(out, source, full=True)) == ((), notes)
    fused = [f"{Q[:-6]}{part}_proj" for part in "kqv"]
    before = float(load_file(out / ONE)[f"{Q}.weight_scale"])
    originals = small_checkpoints.read(source)

    def change(weights: Weights) -> None:
        for module in fused:
            scale = weights[f"{module}.weight_scale"].mul_(1.004)
            quotient = (originals[f"{module}.weight"].float() / scale).clamp(-448, 448)
            weights[f"{module}.weight"] = quotient.to(torch.float8_e4m3fn)

    change_weights(out, change)
    after = float(load_file(out / ONE)[f"{Q}.weight_scale"])
    report = verify(out, source, full=True)
    assert sorted(report.problems) == [
        f"{ONE}: {module}.weight_scale is {after:.9g}, the source makes it {before:.9g}" for module in fused
    ]


def test_codes_of_other_tools_are_counted(source: Path, tmp_path: Path) -> None:
    """llm-compressor rounds scales and quotients to bfloat16 first."""
    out = tmp_path / "out"
    compress(source, out, "channel")
    (out / ".openquant.json").unlink()
    (out / "README.md").unlink()
    originals = small_checkpoints.read(source)

    def change(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith("_scale")]:
            weight = originals[name.removesuffix("_scale")]
            scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            quotient = (weight / scale).float().clamp(-448, 448)
            weights[name], weights[name.removesuffix("_scale")] = scale, quotient.to(torch.float8_e4m3fn)

    change_weights(out, change)
    report = verify(out, source, full=True)
    assert report.problems == ()
    assert not report.recomputed
    assert report.equal_share is not None
    assert 0.95 < report.equal_share < 0.999
    assert report.to_json()["decoded"]["equal_codes"] == report.equal_share


def test_a_scale_too_small_for_its_weights(others: Path, source: Path) -> None:
    original = small_checkpoints.read(source)[f"{DOWN}.weight"].float()

    def change(weights: Weights) -> None:
        scale = weights[f"{DOWN}.weight_scale"].mul_(0.5)
        weights[f"{DOWN}.weight"] = (original / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    change_weights(others, change)
    report = verify(others, source, full=True)
    assert report.compared_codes == report.equal_codes
    (problem,) = report.problems
    assert problem.startswith(f"{ONE}: {DOWN}.weight is off by ")


def test_a_source_that_was_quantized_already_cannot_be_made_again(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    quantized = store(tmp_path / "quantized", by_blocks(torch.bfloat16), BLOCKS)
    out = tmp_path / "out"
    compress(quantized, out, "block", format="compressed-tensors")
    report = verify(out, source, full=True)
    assert found(report) == ((), ())
    assert len(report.errors) == 14
    change_weights(out, lambda weights: weights[f"{DOWN}.weight"].view(torch.uint8)[0, 0].bitwise_xor_(0x82))
    (problem,) = verify(out, source, full=True).problems
    assert problem.startswith(f"{ONE}: {DOWN}.weight is off by ")


def test_a_source_that_holds_no_number(ours: Path, source: Path) -> None:
    change_weights(source, lambda weights: weights[f"{DOWN}.weight"][3].fill_(float("inf")))
    report = verify(ours, source, full=True)
    assert report.problems == (f"{DOWN}.weight in the source's {ONE} holds NaN or infinity",)
    assert len(report.errors) == 13


def test_what_is_printed_of_codes(others: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_weights(others, lambda weights: weights[f"{DOWN}.weight"].view(torch.uint8)[0, 0].bitwise_xor_(1))
    main(["verify", str(others), "--source", str(source), "--full"])
    printed = capsys.readouterr().out
    assert "99.99 % of the codes are the nearest to the source under their scales\n" in printed


@pytest.mark.parametrize("search", [True, False], ids=["searched", "from the largest"])
def test_scales_of_int4_may_be_searched_for_or_not(source: Path, tmp_path: Path, search: bool) -> None:
    out, scale = tmp_path / "out", f"{DOWN}.weight_scale"
    compress(source, out, "int4", no_search=not search)
    assert found(verify(out, source, full=True)) == ((), ())
    before = float(load_file(out / ONE)[scale][1, 2])
    change_weights(out, lambda weights: weights[scale][1, 2].mul_(1 + 2.0**-6))
    problem, *codes = verify(out, source, full=True).problems
    assert problem.startswith(f"{ONE}: {scale} holds {float(load_file(out / ONE)[scale][1, 2]):.9g} at [1, 2]")
    assert problem.endswith("(1 of 1024 scales differ)")
    assert search == problem.endswith(f"the source makes it {before:.9g} (1 of 1024 scales differ)")
    assert all(" has the code " in message for message in codes)


def test_another_tool_may_clip_the_largest_weights_of_int4(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(source, out, "int4")
    (out / "README.md").unlink()
    (out / ".openquant.json").unlink(missing_ok=True)
    report = verify(out, source, full=True)
    assert (report.problems, report.equal_codes) == ((), report.compared_codes)
    change_weights(out, lambda weights: weights[f"{DOWN}.weight_scale"].mul_(0.25))
    assert any(" is off by " in message for message in verify(out, source, full=True).problems)

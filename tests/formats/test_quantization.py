"""What a quantization_config promises, read from configs that mean harm as well."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, UsageError
from openquant.formats.ignored import Expressions
from openquant.formats.quantization import read_quantization

NAMES = [f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 10) for part in ("gate", "up")]


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("re:.*up_proj", {1, 3}),
        ("re:.*up", {1, 3}),
        ("re:up_proj", set()),
        (r"re:model\.layers\.(0|1)\..*", {0, 1}),
        (r"re:^(?!.*up).*layers\.\d{2}\.(?:mlp|moe)\.(?:gate|down)_proj$", {2}),
        ("re:(.*[.])?layers[.]10[.]mlp[.].*", {2, 3}),
        ("re:(m|o|d)+el.*", {0, 1, 2, 3}),
        (NAMES[0], set()),
    ],
)
def test_expressions_match_from_the_start(entry: str, found: set[int]) -> None:
    expressions = Expressions(["lm_head", entry])
    assert [expressions.find(name) for name in NAMES] == [entry if n in found else None for n in range(4)]


def test_the_first_of_several_expressions_counts() -> None:
    assert Expressions(["re:.*gate.*", "re:.*", "re:(.)*"]).find(NAMES[0]) == "re:.*gate.*"


HINT = "list names, or fewer and simpler expressions"
MEND = "mend quantization_config, or save the model again"
UNSOUND = [
    (["re:a(b"], "config.json: 're:a(b' is no regular expression: missing ), unterminated subpattern at position 1", MEND),
    (["re:*"], "config.json: 're:*' is no regular expression: nothing to repeat at position 0", MEND),
    ([r"re:(?<n>a)+"], r"config.json: 're:(?<n>a)+' is no regular expression: unknown extension ?<n at position 1", MEND),
    (["re:a{99999999999}"], "config.json: 're:a{99999999999}' is too large a regular expression", HINT),
    (["re:(?:(?:.?){1000}){1000}!"], "config.json: 're:(?:(?:.?){1000}){1000}!' is too large a regular expression", HINT),
    (["re:(?:(?:.?){0,1000}){,1000}!"], "config.json: 're:(?:(?:.?){0,1000}){,1000}!' is too large a regular expression", HINT),
    (["re:" + "a" * 2000], f"config.json: 're:{'a' * 77}...' is too large a regular expression", HINT),
    ([f"re:{number}" for number in range(1001)], "config.json has 1001 regular expressions in one list", HINT),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "message", "hint"), UNSOUND, ids=range(len(UNSOUND)))
def test_expressions_that_are_none(entries: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Expressions(entries)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_parentheses_without_end_are_an_error() -> None:
    with pytest.raises(UsageError, match="is no regular expression"):
        Expressions(["re:" + "(" * 900])


FOR_EVER = [
    r"re:(?:[a-z._0-9]|[a-z])*[0-9]$",
    r"re:(.|.)*(.|.)*=$",
    r"re:(?=(?:.|.)*=$).",
    r"re:((?:a|e|.)*\b)*#$",
]


@pytest.mark.parametrize("entry", FOR_EVER)
def test_an_expression_that_backtracks_for_ever_ends(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.formats.ignored.MAX_SECONDS", 0.2)
    # With the letters it wants, or it would be told at once that it cannot match.
    name = "model.layers.self_attn.q_proj." * 4 + "9=#x"
    with pytest.raises(UsageError) as caught:
        Expressions([entry]).find(name)
    assert (caught.value.message, caught.value.hint) == (f"config.json: {entry!r} takes too long to match", HINT)


def test_many_expressions_that_take_their_time_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.formats.ignored.MAX_SECONDS", 0.2)
    expressions = Expressions(["re:.*a.*(b|c|d)$"])
    with pytest.raises(UsageError) as caught:
        for number in range(10**6):
            assert expressions.find(f"{'a' * 1000}.{number}") is None
    assert caught.value.message == "config.json: its regular expressions take too long to match"


def with_targets(source: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """An output in the compressed-tensors format, its quantization_config changed."""
    compress(source, out, "channel", workers=1)
    change_json(out / "config.json", lambda config: change(config["quantization_config"]))
    return out


@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_every_command_refuses_such_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    def add(config: dict[str, Any]) -> None:
        found = config if key == "ignore" else config["config_groups"]["group_0"]
        found[key] = [FOR_EVER[0]]

    monkeypatch.setattr("openquant.formats.ignored.MAX_SECONDS", 0.2)
    source = tiny.write(tmp_path / "source")
    out = with_targets(source, tmp_path / "out", add)
    if key == "targets":
        for command in (verify, dequantize, lambda path: compress(path, tmp_path / "again")):
            with pytest.raises(OpenQuantError, match="takes too long to match"):
                command(out)
    else:
        with pytest.raises(OpenQuantError, match="takes too long to match"):
            verify(out)


@pytest.mark.parametrize("side", [2**16 + 1, 2**30, 2**63, 2**64])
def test_blocks_of_absurd_sizes_are_refused(tmp_path: Path, side: int) -> None:
    for size in ([side, 128], [128, side]):
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
        with pytest.raises(UsageError) as caught:
            read_quantization({"quantization_config": config})
        assert (caught.value.message, caught.value.hint) == (
            f"config.json has the weight_block_size {size}", "it must be two numbers from 1 to 65536"
        )  # fmt: skip
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, side]}
    groups = {"group_0": {"targets": ["Linear"], "weights": block}}
    with pytest.raises(UsageError) as caught:
        read_quantization({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
    assert caught.value.message == "config.json: group_0 has no block_structure of two numbers from 1 to 65536"


@pytest.mark.parametrize("size", [[65536, 65536], [1, 65536], [65536, 1], [3, 5]])
def test_blocks_larger_than_a_matrix_take_no_more_memory(tmp_path: Path, size: list[int]) -> None:
    """One scale for all of it, or for a row or column of it."""
    rows, cols = 512, 16
    weight = torch.randn(rows, cols).bfloat16()
    grid = -(-rows // size[0]), -(-cols // size[1])
    scale = torch.full(grid, 0.01)
    codes = (weight.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = "model.layers.0.mlp.down_proj.weight"
    source, out = tmp_path / "source", tmp_path / "out"
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
    for root, weights in ((source, {name: weight}), (out, {name: codes, f"{name}_scale_inv": scale})):
        root.mkdir()
        save_file(weights, root / "model.safetensors", {"format": "pt"})
        (root / "config.json").write_text(json.dumps({"architectures": ["AnyForCausalLM"]}))
    change_json(out / "config.json", lambda found: found.update(quantization_config=config))
    tracemalloc.start()
    report = verify(out, source, full=True)
    dequantize(out, tmp_path / "back")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.problems, len(report.errors)) == ((), 1)
    assert peak < 100 << 20
    found = tiny.read(tmp_path / "back")[name]
    assert torch.equal(found, (codes.float() * 0.01).bfloat16())

"""Which modules a quantization_config leaves out: names and expressions, some of which mean harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, UsageError
from openquant.patterns import Expressions
from support import small_checkpoints

NAMES = [f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 10) for part in ("gate", "up")]


def test_expressions_match_from_the_start() -> None:
    for entry, found in (
        ("re:.*up_proj", {1, 3}),
        ("re:.*up", {1, 3}),
        ("re:up_proj", set()),
        (r"re:model\.layers\.(0|1)\..*", {0, 1}),
        (r"re:^(?!.*up).*layers\.\d{2}\.(?:mlp|moe)\.(?:gate|down)_proj$", {2}),
        ("re:(.*[.])?layers[.]10[.]mlp[.].*", {2, 3}),
        ("re:(m|o|d)+el.*", {0, 1, 2, 3}),
        (NAMES[0], set()),
    ):
        expressions = Expressions(["lm_head", entry])
        assert [expressions.find(name) for name in NAMES] == [entry if n in found else None for n in range(4)], entry
    # The first of several counts.
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


def test_expressions_that_are_none() -> None:
    for entries, message, hint in UNSOUND:
        with pytest.raises(UsageError) as caught:
            Expressions(entries)
        assert (caught.value.message, caught.value.hint) == (message, hint)
    with pytest.raises(UsageError, match="is no regular expression"):
        Expressions(["re:" + "(" * 900])


FOR_EVER = [r"re:(?:[a-z._0-9]|[a-z])*[0-9]$", r"re:(.|.)*(.|.)*=$", r"re:(?=(?:.|.)*=$).", r"re:((?:a|e|.)*\b)*#$"]


def test_an_expression_that_backtracks_for_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.patterns.MAX_SECONDS", 0.2)
    # With the letters it wants, or it would be told at once that it cannot match.
    name = "model.layers.self_attn.q_proj." * 4 + "9=#x"
    for entry in FOR_EVER:
        with pytest.raises(UsageError) as caught:
            Expressions([entry]).find(name)
        assert (caught.value.message, caught.value.hint) == (f"config.json: {entry!r} takes too long to match", HINT)


def test_many_expressions_that_take_their_time_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.patterns.MAX_SECONDS", 0.2)
    expressions = Expressions(["re:.*a.*(b|c|d)$"])
    with pytest.raises(UsageError) as caught:
        for number in range(10**6):
            assert expressions.find(f"{'a' * 1000}.{number}") is None
    assert caught.value.message == "config.json: its regular expressions take too long to match"


def test_every_command_refuses_such_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.patterns.MAX_SECONDS", 0.2)
    out = tmp_path / "out"
    compress(small_checkpoints.write(tmp_path / "source"), out, "channel", workers=1)
    config = json.loads((out / "config.json").read_text())
    kept = config["quantization_config"].pop("ignore")
    config["quantization_config"]["ignore"] = [FOR_EVER[0]]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(OpenQuantError, match="takes too long to match"):
        verify(out)

    config["quantization_config"]["ignore"] = kept
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [FOR_EVER[0]]
    (out / "config.json").write_text(json.dumps(config))
    for command in (verify, dequantize, lambda path: compress(path, tmp_path / "again")):
        with pytest.raises(OpenQuantError, match="takes too long to match"):
            command(out)

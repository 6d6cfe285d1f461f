"""Which modules a quantization_config leaves out: names and expressions, some of which mean harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import OpenQuantError, UsageError
from openquant.formats.ignored import Expressions
from support import small_checkpoints

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
    source = small_checkpoints.write(tmp_path / "source")
    out = with_targets(source, tmp_path / "out", add)
    if key == "targets":
        for command in (verify, dequantize, lambda path: compress(path, tmp_path / "again")):
            with pytest.raises(OpenQuantError, match="takes too long to match"):
                command(out)
    else:
        with pytest.raises(OpenQuantError, match="takes too long to match"):
            verify(out)

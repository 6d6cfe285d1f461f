"""Which modules a quantization_config leaves out: names and expressions."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.patterns import Expressions, Ignored

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


MEND = "mend quantization_config, or save the model again"
UNSOUND = [
    ("re:a(b", "missing ), unterminated subpattern at position 1"),
    ("re:*", "nothing to repeat at position 0"),
    (r"re:(?<n>a)+", "unknown extension ?<n at position 1"),
]  # fmt: skip


def test_expressions_that_are_none() -> None:
    for entry, problem in UNSOUND:
        with pytest.raises(UsageError) as caught:
            Expressions([entry])
        assert caught.value.message == f"config.json: {entry!r} is no regular expression: {problem}"
        assert caught.value.hint == MEND
    with pytest.raises(UsageError, match="is no regular expression"):
        Expressions(["re:" + "(" * 900])
    # Where an engine reads names alone, nothing is an expression.
    assert Ignored("modules_to_not_convert", ["re:a(b", NAMES[0]], by_experts=True).find(NAMES) == NAMES[0]


def test_python_s_warnings_of_expressions_are_not_the_user_s(recwarn: pytest.WarningsRecorder) -> None:
    assert Expressions(["re:[[]x"]).find("[x") == "re:[[]x"
    assert list(recwarn) == []

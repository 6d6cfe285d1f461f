"""Glob patterns over module names."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.patterns import collapse, compile_any, compile_pattern
from support.rows import for_each


@for_each(("pattern", "name", "matches"), [
    ("lm_head", "lm_head", True),
    ("lm_head", "model.lm_head", False),
    ("model.layers.*.mlp.up_proj", "model.layers.12.mlp.up_proj", True),
    ("model.layers.*.mlp.up_proj", "model.layers.1.2.mlp.up_proj", False),
    ("model.layers.0.**", "model.layers.0.mlp.up_proj", True),
    ("model.layers.0.**", "model.layers.0", True),
    ("model.layers.0.**", "model.layers.01.mlp", False),
    ("**.mlp.gate", "model.layers.3.mlp.gate", True),
    ("**.mlp.gate", "mlp.gate", True),
    ("**.mlp.gate", "xmlp.gate", False),
    ("**.experts.**", "model.layers.3.mlp.experts.4.up_proj", True),
    ("**", "anything.at.all", True),
    ("a.{q,k}_proj", "a.k_proj", True),
    ("a.{q,k}_proj", "a.v_proj", False),
    ("{a,b.c}.d", "b.c.d", True),
    ("a.b", "aXb", False),
    ("a.*", "a.", False),
])  # fmt: skip
def test_matching(pattern: str, name: str, matches: bool) -> None:
    assert bool(compile_pattern(pattern).fullmatch(name)) is matches
    assert bool(compile_any(["nothing", pattern]).fullmatch(name)) is matches


def test_no_patterns_match_nothing() -> None:
    assert not compile_any([]).fullmatch("")


@for_each("pattern", ["a.{q,k", "a.q}_proj", "{a{b}}"])
def test_unmatched_braces_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="unmatched brace"):
        compile_pattern(pattern)


@for_each("pattern", ["***", "a.***.b", "*" * 50 + "x"])
def test_stars_that_would_share_a_name_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="more than two stars in a row"):
        compile_pattern(pattern)


def test_collapse_says_no_number_otherwise() -> None:
    assert collapse(["a.00.b", "a.0.b", "a.1.b", "a.٣.b"]) == ["a.00.b", "a.{0..1}.b", "a.٣.b"]


def test_collapse_writes_ranges() -> None:
    names = [f"model.layers.{n}.mlp" for n in (0, 1, 2, 5)] + ["lm_head", "a.3.b", "x.1.y.0", "x.1.y.1"]
    assert collapse(names) == ["model.layers.{0..2,5}.mlp", "lm_head", "a.3.b", "x.1.y.{0..1}"]


def test_collapse_takes_names_that_hold_stars() -> None:
    assert collapse(["re:.*", "a.*.1", "a.*.2", "a.1.b"]) == ["re:.*", "a.*.{1..2}", "a.1.b"]


def test_collapse_takes_numbers_that_python_does_not_convert() -> None:
    name = f"model.layers.{'9' * 5000}.mlp"
    assert collapse([name, "a.1", "a.2"]) == [name, "a.{1..2}"]

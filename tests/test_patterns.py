"""Glob patterns over module names."""

from __future__ import annotations

import pytest

from openquant.errors import UsageError
from openquant.patterns import collapse, compile_any, compile_pattern

MATCHES = [
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
]


def test_matching() -> None:
    for pattern, name, matches in MATCHES:
        assert bool(compile_pattern(pattern).fullmatch(name)) is matches, (pattern, name)
        assert bool(compile_any(["nothing", pattern]).fullmatch(name)) is matches, (pattern, name)


def test_patterns_that_are_none_are_refused() -> None:
    for pattern in ("a.{q,k", "a.q}_proj", "{a{b}}"):
        with pytest.raises(UsageError, match="unmatched brace"):
            compile_pattern(pattern)
    for pattern in ("***", "a.***.b", "*" * 50 + "x"):
        with pytest.raises(UsageError, match="more than two stars in a row"):
            compile_pattern(pattern)
    assert not compile_any([]).fullmatch("")


def test_collapse_writes_ranges() -> None:
    names = [f"model.layers.{n}.mlp" for n in (0, 1, 2, 5)] + ["lm_head", "a.3.b", "x.1.y.0", "x.1.y.1"]
    assert collapse(names) == ["model.layers.{0..2,5}.mlp", "lm_head", "a.3.b", "x.1.y.{0..1}"]
    # No number is said otherwise, names may hold stars, and numbers be those that Python does not convert.
    assert collapse(["a.00.b", "a.0.b", "a.1.b", "a.٣.b"]) == ["a.00.b", "a.{0..1}.b", "a.٣.b"]
    assert collapse(["re:.*", "a.*.1", "a.*.2", "a.1.b"]) == ["re:.*", "a.*.{1..2}", "a.1.b"]
    name = f"model.layers.{'9' * 5000}.mlp"
    assert collapse([name, "a.1", "a.2"]) == [name, "a.{1..2}"]

"""Which modules a quantization_config leaves out: names and expressions."""

from __future__ import annotations

from openquant.patterns import Expressions

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

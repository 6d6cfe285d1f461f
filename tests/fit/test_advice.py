"""Which scheme to take on a GPU."""

from __future__ import annotations

from openquant.diagnosis.result import advise


def advised(schemes: dict[str, set[str]]) -> list[str | None]:
    return [measured and measured.scheme.name for measured in advise(schemes)]


def test_the_fastest_multiplies_nothing_else_and_the_closest_lost_least() -> None:
    assert advised({"int4": {"16 bits"}, "int8-weights": {"16 bits"}, "int8": {"INT8"}}) == ["int8", "int8-weights"]
    assert advised({"channel": {"FP8"}, "int8": {"INT8"}})[0] == "channel"
    # Experts in other numbers.
    assert advised({"channel": {"FP8", "16 bits"}, "int8": {"INT8"}})[0] == "int8"
    assert advised({"channel": {"emulated"}, "int8": {"INT8", "emulated"}}) == [None, None]
    assert advised({"channel": set()})[0] is None

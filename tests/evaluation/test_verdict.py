"""The verdict's limits, and what makes a layer suspect."""

from __future__ import annotations

import math

from openquant.evaluation.verdict import (
    AT_FLOOR,
    CHANGED,
    CLOSE,
    JUMP,
    LEAST_JUMP,
    LEAST_ROUTED,
    SIMILAR,
    LayerFigures,
    Suspect,
    suspects_by_layers,
    verdict_word,
)

FLOOR = 0.0001


def test_each_limit_parts_two_words() -> None:
    for limit, below, above in [
        (AT_FLOOR * FLOOR, "same", "close"),
        (CLOSE, "close", "similar"),
        (SIMILAR, "similar", "changed"),
        (CHANGED, "changed", "broken"),
    ]:
        assert verdict_word(limit, FLOOR) == below
        assert verdict_word(math.nextafter(limit, 1), FLOOR) == above


def names(found: list[Suspect]) -> list[str]:
    return [suspect.layer for suspect in found]


def layers(distances: list[float], floors: list[float] | None = None) -> list[LayerFigures]:
    floors = floors or [0.001 * math.sqrt(number + 1) for number in range(len(distances))]
    return [LayerFigures(f"layers.{number}", *each) for number, each in enumerate(zip(distances, floors, strict=True))]


def test_a_jump_in_the_distance_stands_out() -> None:
    # Errors of layers add up as squares, here 0.01 of each.
    sound = [0.01 * math.sqrt(number + 1) for number in range(12)]
    assert suspects_by_layers(layers(sound)) == []

    def after(added: float) -> list[float]:
        return [distance if number < 6 else math.hypot(distance, added) for number, distance in enumerate(sound)]

    limit = JUMP * 0.01
    assert suspects_by_layers(layers(after(limit * 0.98))) == []
    assert names(suspects_by_layers(layers(after(limit * 1.01)))) == ["layers.6"]
    # Not where the source's own noise jumps as well.
    noise = [0.001 * math.sqrt(number + 1 + 100 * (number >= 6)) for number in range(12)]
    assert suspects_by_layers(layers(after(limit * 1.01), noise)) == []


def test_small_jumps_and_the_first_layer_do_not_count() -> None:
    small = [0.0001 * (number + 1) for number in range(8)]
    small[5:] = [LEAST_JUMP * 0.99] * 3
    assert suspects_by_layers(layers(small)) == []
    assert suspects_by_layers(layers([0.2, *[0.2 + 0.0001 * number for number in range(8)]])) == []
    assert suspects_by_layers(layers([0.0, 0.5])) == []


def test_a_layer_that_adds_less_than_all_before_it_does_not_stand_out() -> None:
    # As a sound mixture of experts has it, whose later layers add nothing.
    def second(added: float) -> list[Suspect]:
        return suspects_by_layers(layers([0.11, math.hypot(0.11, added), 0.11, 0.11, 0.11]))

    assert second(0.109) == []
    assert names(second(0.111)) == ["layers.1"]


def test_tokens_that_go_elsewhere_stand_out() -> None:
    shares = [None, 0.01, 0.02, 0.03, LEAST_ROUTED]
    assert suspects_by_layers([LayerFigures(str(number), 0, 0, share) for number, share in enumerate(shares)]) == []
    shares[-1] = LEAST_ROUTED * 1.01
    assert names(
        suspects_by_layers([LayerFigures(str(number), 0, 0, share) for number, share in enumerate(shares)])
    ) == ["4"]
    # All alike: four times the median is more.
    assert suspects_by_layers([LayerFigures(str(number), 0, 0, 0.3) for number in range(4)]) == []

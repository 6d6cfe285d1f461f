"""The verdict's limits, and what makes a layer suspect."""

from __future__ import annotations

import math

from openquant.evaluation.types import AT_FLOOR, CHANGED, CLOSE, SIMILAR, verdict_word
from openquant.evaluation.verdict import (
    ERROR,
    ERROR_MOVED,
    JUMP,
    LEAST_JUMP,
    LEAST_ROUTED,
    OTHER_WEIGHTS,
    LayerFigures,
    Suspect,
    WeightChange,
    suspects_by_layers,
    suspects_by_weights,
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


def quantized(name: str, error: float = 0.026, off: float = 0.0) -> WeightChange:
    return WeightChange(name, True, error, 0.026, off)


def names(found: list[Suspect]) -> list[str]:
    return [suspect.layer for suspect in found]


SOUND = [quantized(f"layers.{number}.up") for number in range(10)]


def test_weights_beyond_what_their_format_explains_stand_out() -> None:
    assert suspects_by_weights(SOUND, []) == []
    at = 0.026 * ERROR
    assert names(suspects_by_weights([*SOUND, quantized("a", at * 0.999)], [])) == []
    found = suspects_by_weights([*SOUND, quantized("a", at * 1.001), quantized("b", 1.0)], [])
    assert names(found) == ["b", "a"]
    assert found[0].why == "relative error of its weights is 1, its format explains 0.026"


def test_a_maker_who_moves_all_weights_leaves_no_suspect() -> None:
    moved = [quantized(f"layers.{number}.up", 0.045, off=0.02) for number in range(10)]
    assert suspects_by_weights(moved, []) == []
    assert names(suspects_by_weights([*moved, quantized("a", 0.4, off=0.9)], [])) == ["a"]


def gptq(name: str, times: float, off: float = 0.0, wrong_scales: float = 0.0) -> WeightChange:
    """A layer whose error is so many times what its format explains."""
    return WeightChange(name, True, 0.11 * times, 0.11, off, wrong_scales)


def test_gptq_leaves_no_suspect() -> None:
    # As measured on the example, where groups are off in fewer than half of the layers.
    sound = [gptq(f"layers.{number}.up", 1.16 + 0.03 * number, off=0.0007 * (number == 9)) for number in range(10)]
    worst = [*sound, gptq("o_proj", 1.7, off=0.01)]
    assert suspects_by_weights(worst, []) == []
    assert suspects_by_weights(worst, [], gptq=True) == []
    # And on SmolLM2-135M, whose first layer has inputs that are much alike.
    assert suspects_by_weights([*sound, gptq("layers.0.k_proj", 4.98)], []) == []
    limit = OTHER_WEIGHTS / 0.11
    assert names(suspects_by_weights([*sound, gptq("a", limit * 0.99)], [])) == []
    assert names(suspects_by_weights([*sound, gptq("a", limit * 1.01)], [])) == ["a"]
    # Eight bits explain so little that the ratio decides.
    fine = [quantized(f"layers.{number}.up", 0.026 * 1.2) for number in range(10)]
    limit = 0.026 * ERROR_MOVED * 1.2
    assert names(suspects_by_weights([*fine, quantized("a", limit * 0.99)], [])) == []
    assert names(suspects_by_weights([*fine, quantized("a", limit * 1.01)], [])) == ["a"]


def test_a_wrong_scale_stands_out_in_what_gptq_rounded() -> None:
    sound = [gptq(f"layers.{number}.up", 1.3) for number in range(10)]
    found = suspects_by_weights([*sound, gptq("a", 1.4, off=0.002, wrong_scales=0.001)], [])
    assert found == [Suspect("a", "in 0.1 % of its groups weights or scales are not those of the source")]


def test_the_card_says_gptq_where_most_layers_moved_little() -> None:
    sound = [gptq(f"layers.{number}.up", 1.0) for number in range(10)]
    one = [*sound, gptq("o_proj", 1.7, off=0.01)]
    assert names(suspects_by_weights(one, [])) == ["o_proj"]
    assert suspects_by_weights(one, [], gptq=True) == []


def test_what_is_not_quantized_stands_out_where_most_stayed() -> None:
    same = [WeightChange(f"norm.{number}", False, 0, 0, 0) for number in range(5)]
    changed = [WeightChange(f"other.{number}", False, 0.1, 0, 1) for number in range(5)]
    assert names(suspects_by_weights([*same, *changed[:1]], [])) == ["other.0"]
    # Smoothing changes every norm, and means to.
    assert suspects_by_weights([*same[:4], *changed], []) == []


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

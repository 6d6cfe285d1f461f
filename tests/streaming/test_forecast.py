"""How long a run is said to take."""

from __future__ import annotations

from openquant.streaming.forecast import Forecast, spoken


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_all_layers_take_as_long_as_the_first_until_more_is_known() -> None:
    clock = Clock()
    forecast = Forecast(dict.fromkeys("abcd", 1.0), clock)
    assert forecast.remaining() is None
    clock.now += 6
    assert forecast.remaining() is None
    forecast.done("a")
    assert forecast.remaining() == 18
    # What has passed of the second is not to come, and never more than all of it.
    clock.now += 2
    assert forecast.remaining() == 16
    clock.now += 10
    assert forecast.remaining() == 12
    forecast.done("b")
    assert forecast.remaining() == 18
    clock.now += 6
    forecast.done("c")
    assert forecast.remaining() == 8
    forecast.done("d")
    assert forecast.remaining() == 0


def test_a_kind_that_was_not_measured_goes_by_its_cost() -> None:
    clock = Clock()
    forecast = Forecast({"dense": 1.0, "moe 1": 3.0, "moe 2": 3.0}, clock)
    clock.now += 2
    forecast.done("dense")
    assert forecast.remaining() == 12
    clock.now += 10
    forecast.done("moe 1")
    assert forecast.remaining() == 10


def test_steps_that_are_passed_over_are_not_waited_for() -> None:
    clock = Clock()
    forecast = Forecast({"visual.0": 1.0, "visual.1": 1.0, "layers.0": 1.0, "layers.1": 1.0}, clock)
    clock.now += 2
    forecast.done("layers.0")
    assert forecast.remaining() == 2
    # A step that nobody knows takes time that counts for none.
    clock.now += 50
    forecast.done("norm")
    clock.now += 2
    forecast.done("layers.1")
    assert forecast.remaining() == 0


def test_times_known_from_elsewhere_and_time_that_belongs_to_no_step() -> None:
    clock = Clock()
    forecast = Forecast({"a": 1.0, "head": 50.0}, clock)
    forecast.expect("head", 4)
    forecast.expect("answers", 30)
    clock.now += 9
    forecast.restart()
    clock.now += 1
    assert forecast.remaining() is None
    forecast.done("a")
    assert forecast.remaining() == 34
    clock.now += 5
    forecast.done("head")
    assert forecast.remaining() == 30


def test_times_are_said_to_people() -> None:
    rows = {0.2: "1 second", 89: "89 seconds", 91: "2 minutes", 3000: "50 minutes", 9000: "2.5 hours"}
    assert {seconds: spoken(seconds) for seconds in rows} == rows

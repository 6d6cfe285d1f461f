"""Estimates how long a run will still take, from the steps that are done.

forecast = Forecast({"model.layers.0": 1.0, "model.layers.1": 1.0, "lm_head": 9.0})
forecast.done("model.layers.0")
forecast.remaining()        # seconds: ten times what model.layers.0 took
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Forecast:
    """Estimates the remaining seconds of a run that starts when this object is made.

    Args:
        costs: relative cost of each step, in the order they are done. Steps of equal cost are of one kind, and take as
            long as those of this kind that are done. If none is, the time per cost of all done steps is used.
        clock: returns the time in seconds.
    """

    def __init__(self, costs: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._remaining_costs = dict(costs)
        # Seconds of steps whose duration is known beforehand.
        self._seconds: dict[str, float] = {}
        # By cost: the number of done steps of that kind, and the seconds they took together.
        self._done: dict[float, tuple[int, float]] = {}
        self._clock = clock
        self._last = clock()

    def expect(self, step: str, seconds: float) -> None:
        """Set the seconds that a step will take; a new one is added after all others."""
        self._remaining_costs.setdefault(step, 0.0)
        self._seconds[step] = seconds

    def restart(self) -> None:
        """Ignore the time since the last step, which belongs to none."""
        self._last = self._clock()

    def done(self, step: str) -> None:
        """Note that a step is done, which took the time since the last one.

        Steps before it are skipped. If it is not one of the remaining steps, its time counts for none.
        """
        now = self._clock()
        if step in self._remaining_costs:
            names = list(self._remaining_costs)
            costs = [self._remaining_costs.pop(name) for name in names[: names.index(step) + 1]]
            if step not in self._seconds:
                count, seconds = self._done.get(costs[-1], (0, 0.0))
                self._done[costs[-1]] = count + 1, seconds + now - self._last
        self._last = now

    def remaining(self) -> float | None:
        """Return the estimated remaining seconds; None until a step is done that they can be estimated from."""
        total = sum(cost * count for cost, (count, _) in self._done.items())
        if not total:
            return None
        rate = sum(seconds for _, seconds in self._done.values()) / total

        def expected(step: str, cost: float) -> float:
            count, seconds = self._done.get(cost, (0, 0.0))
            return self._seconds[step] if step in self._seconds else seconds / count if count else cost * rate

        estimates = [expected(step, cost) for step, cost in self._remaining_costs.items()]
        # The current step's elapsed time is subtracted, up to its estimate.
        return sum(estimates) - min(self._clock() - self._last, *estimates[:1]) if estimates else 0.0


def spoken(seconds: float) -> str:
    """Format a duration in seconds, at least one second: "5 seconds", "3 minutes", "2.5 hours"."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 90:
        return f"{round(seconds)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"

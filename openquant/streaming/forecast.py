"""How long a run will take, estimated from the steps that are done and corrected with each further one.

forecast = Forecast({"model.layers.0": 1.0, "model.layers.1": 1.0, "lm_head": 9.0})
forecast.done("model.layers.0")
forecast.remaining()        # ten times what that took, in seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Forecast:
    """Estimates the seconds that are left. Time counts from when it is made.

    Args:
        costs: of each step, in the order they are done, what it takes in proportion to other steps. Steps of equal
            cost are of one kind: until one of a kind is done, its time follows from the cost and from all that are.
        clock: seconds.
    """

    def __init__(self, costs: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._left = dict(costs)
        self._seconds: dict[str, float] = {}
        # By cost: the steps of that kind that are done, and the seconds they took.
        self._done: dict[float, tuple[int, float]] = {}
        self._clock = clock
        self._last = clock()

    def expect(self, step: str, seconds: float) -> None:
        """Add a step of which it is known how long it takes; or say that of one which is still to be done."""
        self._left.setdefault(step, 0.0)
        self._seconds[step] = seconds

    def restart(self) -> None:
        """Leave out the time since the last step: it belongs to none."""
        self._last = self._clock()

    def done(self, step: str) -> None:
        """A step is done, and took the time since the last one. Those before it that are left will not be done."""
        now = self._clock()
        if step in self._left:
            names = list(self._left)
            costs = [self._left.pop(name) for name in names[: names.index(step) + 1]]
            if step not in self._seconds:
                count, seconds = self._done.get(costs[-1], (0, 0.0))
                self._done[costs[-1]] = count + 1, seconds + now - self._last
        self._last = now

    def remaining(self) -> float | None:
        """About how many seconds are left; None before a step is done by which that can be estimated."""
        total = sum(cost * count for cost, (count, _) in self._done.items())
        if not total:
            return None
        rate = sum(seconds for _, seconds in self._done.values()) / total

        def expected(step: str, cost: float) -> float:
            count, seconds = self._done.get(cost, (0, 0.0))
            return self._seconds[step] if step in self._seconds else seconds / count if count else cost * rate

        left = [expected(step, cost) for step, cost in self._left.items()]
        # Of the step that is being done, as much as has passed, and no more than all of it.
        return sum(left) - min(self._clock() - self._last, *left[:1]) if left else 0.0


def spoken(seconds: float) -> str:
    """A time for people: "5 seconds", "3 minutes", "2.5 hours"."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 90:
        return f"{round(seconds)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"

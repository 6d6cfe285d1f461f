"""Who is told of a run while it works: a terminal, a notebook, a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hub.source import Source
    from .plan.plan import Plan
    from .result import Result


class Reporter:
    """Is told by compress() and dequantize() what they do, in this order; this one takes no notice.

    Override what is of interest. Calls may come from any thread, never from two at once; what they raise ends the run.
    """

    def opened(self, source: Source, output: Path) -> None:
        """The source is opened, and the output has a place; nothing is computed or written yet."""

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """The plan is made; nothing is written yet. A second time where a calibration has changed it."""

    def calibrating(self, about: str) -> None:
        """A pass begins before the conversion: a line about it, such as on which texts."""

    def calibrated(self, done: int, total: int, unit: str = "tokens") -> None:
        """Of that: tokens that are through all layers and how many there are, or layers; from 0 after `calibrating`."""

    def remaining(self, seconds: float) -> None:
        """About so many seconds of that pass are left, told from its first layer on."""

    def started(self, total: int, done: int) -> None:
        """Conversion begins: bytes of source weights in all, and those an earlier run converted."""

    def advanced(self, nbytes: int) -> None:
        """`nbytes` more bytes of the source are converted."""

    def publishing(self, repo: str) -> None:
        """All is converted; what is not uploaded yet goes to that repository."""

    def finished(self, result: Result, already_complete: bool) -> None:
        """All is written; `already_complete` if an earlier run had left nothing to do."""

"""Callbacks that report a run's progress to a terminal, a notebook or a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .files.destination import DiskSpace
    from .hub.source import Source
    from .plan.plan import Plan
    from .result import Result


class Reporter:
    """Callbacks of compress() and dequantize(), called in the order below. The methods of this class do nothing.

    Override those that you need. They may be called from any thread, but never by two at once. An exception that one of
    them raises ends the run. A run calls only those whose work it has to do. GPTQ reports as a calibration does, after
    the second plan.
    """

    def disk_space(self, space: DiskSpace) -> None:
        """Called with the disk space that the run needs, once, before the first `planned`.

        It is not called if the run will be refused because of its output directory.
        """

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """Called when the plan is made, before anything is written.

        A run that calibrates calls it again with the plan that the calibration gave, and one with GPTQ once more
        before its texts run through the model.
        """

    def calibrating(self, about: str) -> None:
        """Called when a calibration begins.

        Args:
            about: a line that describes it, such as its texts.
        """

    def calibrated(self, done: int, total: int, unit: str = "tokens") -> None:
        """Called as the calibration advances, from 0 on.

        Args:
            done: tokens or layers that are done.
            total: all tokens or layers.
            unit: "tokens" or "layers".
        """

    def started(self, total: int, done: int) -> None:
        """Called when the conversion begins.

        Args:
            total: bytes of all source weights.
            done: bytes that an earlier run has converted.
        """

    def advanced(self, nbytes: int) -> None:
        """Called when `nbytes` more bytes of the source are converted; it may be 0."""

    def publishing(self, repo: str) -> None:
        """Called when everything is converted, before the rest of it is uploaded to the Hub repository `repo`."""

    def finished(self, result: Result, already_complete: bool) -> None:
        """Called when everything is written and published; `already_complete` if nothing was left to do."""

"""A reporter that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable

from openquant import Reporter


class Told(Reporter):
    """Keeps notes and steps.

    Args:
        then: called with what is done and the total after each step; what it raises ends the run.
    """

    def __init__(self, then: Callable[[int, int], None] = lambda *_: None) -> None:
        self.then = then
        self.notes: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def on_note(self, about: str) -> None:
        self.notes.append(about)

    def on_progress(self, done: int, total: int, unit: str = "tokens") -> None:
        del unit
        self.steps.append((done, total))
        self.then(done, total)

"""Errors the user can act on: what is wrong, and what to do next.

Everything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OpenQuantError(Exception):
    """A problem the user can fix.

    Args:
        message: names the file or tensor, what was found and what was expected.
        hint: what to do next.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OpenQuantError):
    """Options that do not make sense, alone or together."""


class SourceError(OpenQuantError):
    """The source is missing, broken, or nothing we can compress."""


class PlanError(OpenQuantError):
    """The source is sound, and no rule says what to do with a part of it."""


class OutputError(OpenQuantError):
    """The output directory cannot be used or written."""


@contextmanager
def naming(model: str) -> Iterator[None]:
    """Put the model's name before the message of a `SourceError`: "out: config.json has no ..."."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{model}: {error.message}", error.hint) from error

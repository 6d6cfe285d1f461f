"""Errors that the user can fix: each says what is wrong and what to do next.

Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class OpenQuantError(Exception):
    """A problem that the user can fix.

    Args:
        message: what is wrong: the file or tensor, its value and the expected one.
        hint: what to do next.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        # A traceback ends with it.
        if sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[type[OpenQuantError], tuple[str, str]]:
        """Let it be pickled, as a pool of processes does with what a worker raises."""
        return type(self), (self.message, self.hint)


class UsageError(OpenQuantError):
    """Options that do not make sense, alone or together."""


class SourceError(OpenQuantError):
    """The source is missing or damaged, or we cannot quantize it."""


class PlanError(OpenQuantError):
    """The source is sound, but no rule says what to do with a part of it."""


class OutputError(OpenQuantError):
    """The output directory cannot be used or written."""


@contextmanager
def naming(model: str) -> Iterator[None]:
    """In the `with` block, put a model's name before the message of a `SourceError`: "out: config.json has no ...".

    Args:
        model: the model's name.
    """
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{model}: {error.message}", error.hint) from error

"""The shards of a source for what writes nothing: read where they lie, from the Hub's cache, or streamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import OutputError, UsageError
from ..files.journal import explained
from .fetch import Supply, scratch_bytes
from .source import Source, silent


@contextmanager
def supplied(
    source: Source, needs: Mapping[str, Sequence[str]], stream: bool, scratch: str | os.PathLike[str] | None
) -> Iterator[Supply]:
    """The shards of a source, each by the time it is needed.

    Args:
        source: where they lie.
        needs: for each thing to be done, in order, the source shards it is done with.
        stream: keep fetched shards only until their last use, below `scratch`.
        scratch: the working directory if None. Nothing of ours is left in it afterwards.

    Raises:
        SourceError: the disk of the Hub's cache cannot hold the shards.
        UsageError: that of `scratch` cannot.
        OutputError: nothing can be written there.
    """
    with ExitStack() as stack:
        place = None
        if source.remote:
            stack.enter_context(silent())
            if stream:
                place = stack.enter_context(_directory(Path(scratch or "."), scratch_bytes(source, needs)))
            else:
                source.require_cache_space({name for names in needs.values() for name in names})
        with Supply(source, needs if source.remote else {}, place) as supply:
            yield supply


@contextmanager
def _directory(parent: Path, needed: int) -> Iterator[Path]:
    """A directory below `parent` that is gone afterwards."""
    try:
        with explained(parent):
            free = shutil.disk_usage(parent).free
            made = tempfile.TemporaryDirectory(prefix=".openquant-", dir=parent, ignore_cleanup_errors=True)
        with made as path:
            if needed > free:
                raise UsageError(
                    f"{parent} needs {needed:,} bytes for shards that come and go, its disk has {free:,} free",
                    "name a directory on a larger one with --scratch",
                )
            # Not the directory itself, which the last shard would take along.
            yield Path(path) / "shards"
    except OutputError as error:
        raise OutputError(error.message, "name a directory on another disk with --scratch") from error

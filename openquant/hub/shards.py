"""The shards of sources for what writes nothing: read where they lie, from the Hub's cache, or streamed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import OutputError, UsageError
from ..files.journal import output_errors
from .fetch import ShardSupply, scratch_bytes
from .source import Source, silent

# For each thing to be done, in order, the source shards it is done with.
Needs = Mapping[str, Sequence[str]]
# Waits until what holds the other end of its input has ended, however it did.
_WAITS = 'read -r _; rm -rf -- "$1"'


@contextmanager
def supply_shards(
    sources: Sequence[tuple[Source, Needs]],
    stream: bool,
    scratch: str | os.PathLike[str] | None,
    more: int = 0,
    times: int = 1,
) -> Iterator[list[ShardSupply]]:
    """The shards of some sources, each by the time it is needed.

    Args:
        sources: where they lie, and in which order they are needed.
        stream: keep fetched shards only until their last use, below `scratch`.
        scratch: the working directory if None. Nothing of ours is left in it afterwards, however the process ends.
        more: bytes that something else will take there.
        times: how many processes do the same there.

    Raises:
        SourceError: the disk of the Hub's cache cannot hold the shards.
        UsageError: that of `scratch` cannot.
        OutputError: nothing can be written there.
    """
    with ExitStack() as stack:
        place = None
        if any(source.remote for source, _ in sources):
            stack.enter_context(silent())
            if stream:
                needed = times * (more + sum(scratch_bytes(source, needs) for source, needs in sources))
                place = stack.enter_context(_directory(Path(scratch or "."), needed))
        supplies = []
        for number, (source, needs) in enumerate(sources):
            if source.remote and place is None:
                source.require_cache_space({name for names in needs.values() for name in names})
            folder = None if place is None else place / str(number)
            supplies.append(stack.enter_context(_Supply(source, needs if source.remote else {}, folder)))
        yield supplies


class _Supply(ShardSupply):
    """A supply whose errors about its scratch directory name the option for it."""

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        with _hinted():
            super().wait_for(output, stopped)

    def finished(self, output: str) -> None:
        with _hinted():
            super().finished(output)


@contextmanager
def _hinted() -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        raise OutputError(error.message, "name a directory on another disk with --scratch") from error


@contextmanager
def _directory(parent: Path, needed: int) -> Iterator[Path]:
    """A directory below `parent` that is gone afterwards."""
    with _hinted(), output_errors(parent):
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise UsageError(
                f"{parent} needs {needed:,} bytes for shards that come and go, its disk has {free:,} free",
                "name a directory on a larger one with --scratch",
            )
        made = tempfile.TemporaryDirectory(prefix=".openquant-", dir=parent, ignore_cleanup_errors=True)
    with _gone_with_us(made.name), made as path:
        yield Path(path)


@contextmanager
def _gone_with_us(path: str) -> Iterator[None]:
    """Have a directory removed if this process is killed meanwhile, which it cannot hear of itself."""
    command = ["/bin/sh", "-c", _WAITS, "sh", str(Path(path).absolute())]
    try:
        # In a session of its own: what is typed at a terminal, or sent to a whole group, goes to us alone.
        started = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise OutputError(
            f"/bin/sh, which removes {path} if this process is killed, cannot be started: {error.strerror}",
            "raise the limit on processes (ulimit -u; in a container also its own)",
        ) from error
    with started as waiting:
        try:
            yield
        finally:
            # Else a thread that still fetched wrote there as it was removed, and the shell removes it again.
            if not os.path.lexists(path):
                waiting.kill()

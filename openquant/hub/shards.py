"""Shard supplies for commands that write no shards: shards are read locally, from the Hub's cache, or streamed."""

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
from ..files.model_files import EVAL_FILE, JOURNAL_FILE, left_out_part
from .fetch import ShardSupply, scratch_bytes
from .source import Source, find_source, silent

# The source shards that each step needs, by the name of the step, in order.
Needs = Mapping[str, Sequence[str]]
# Files that only outputs have, which are no part of a source.
_OF_OUTPUTS = (JOURNAL_FILE, EVAL_FILE)
# A shell command that removes a directory when the process at the other end of its stdin has ended.
_REMOVE_AT_END = 'read -r _; rm -rf -- "$1"'


@contextmanager
def supply_shards(
    sources: Sequence[tuple[Source, Needs]],
    stream: bool,
    scratch: str | os.PathLike[str] | None,
    more: int = 0,
    times: int = 1,
) -> Iterator[list[ShardSupply]]:
    """Start supplies, which download shards of sources ahead of the steps that read them.

    Args:
        sources: each source with file names of the shards that its steps need, by the name of the step, in order.
        stream: whether to keep downloaded shards below `scratch` until their last use, not in the Hub's cache.
        scratch: the directory in which to make a temporary directory; None for the working directory. The temporary
            directory is removed at the end, even if the process is killed.
        more: bytes that the caller will write to the same disk.
        times: number of processes that use the same disk, each with the same supplies.

    Returns:
        A context manager that gives one supply for each source, in the same order.

    Raises:
        SourceError: the disk of the Hub's cache has too little space.
        UsageError: the disk of `scratch` has too little space.
        OutputError: `scratch` cannot be written, or the shell that removes the directory cannot be started.
    """
    with ExitStack() as stack:
        directory = None
        if any(source.remote for source, _ in sources):
            stack.enter_context(silent())
            if stream:
                needed = times * (more + sum(scratch_bytes(source, needs) for source, needs in sources))
                directory = stack.enter_context(_temporary_directory(Path(scratch or "."), needed))
        supplies = []
        for number, (source, needs) in enumerate(sources):
            if source.remote and directory is None:
                source.require_cache_space(needs)
            folder = None if directory is None else directory / str(number)
            supplies.append(stack.enter_context(_HintedSupply(source, needs if source.remote else {}, folder)))
        yield supplies


def find_whole(model: str, begun: Callable[[str], None] | None = None) -> Source:
    """Find a local directory or GGUF file, or else download a whole repository into the Hub's cache.

    Args:
        model: a directory, a GGUF file, "org/name" or "org/name@revision".
        begun: called with a line that says what is downloaded, if anything is.

    Returns:
        Where all of its files lie.

    Raises:
        SourceError: there is no such directory or repository, or it cannot be downloaded.
        UsageError: see find_source.
    """
    source = find_source(model)
    needs = {name: [name] for name in source.remote}
    files = [name for name in source.absent if left_out_part(name) is None or name in _OF_OUTPUTS]
    if begun is not None and (nbytes := source.remote_bytes([*needs, *files])):
        begun(f"downloading {nbytes:,} bytes of {source.identity} to the Hub's cache")
    source.fetch_files(files)
    with supply_shards([(source, needs)], False, None) as (supply,):
        for name in needs:
            supply.wait_for(name, lambda: False)
            supply.finished(name)
    return source


class _HintedSupply(ShardSupply):
    """A supply whose errors about the scratch directory name --scratch in the hint."""

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        with _scratch_hint():
            super().wait_for(output, stopped)

    def finished(self, output: str) -> None:
        with _scratch_hint():
            super().finished(output)


@contextmanager
def _scratch_hint() -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        raise OutputError(error.message, "name a directory on another disk with --scratch") from error


@contextmanager
def _temporary_directory(parent: Path, needed: int) -> Iterator[Path]:
    """A directory in `parent` that is removed at the end, if `needed` bytes are free on its disk."""
    with _scratch_hint(), output_errors(parent):
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise UsageError(
                f"{parent} needs {needed:,} bytes for shards that come and go, its disk has {free:,} free",
                "name a directory on a larger one with --scratch",
            )
        directory = tempfile.TemporaryDirectory(prefix=".openquant-", dir=parent, ignore_cleanup_errors=True)
    with _removed_if_killed(directory.name), directory as path:
        yield Path(path)


@contextmanager
def _removed_if_killed(path: str) -> Iterator[None]:
    """Have a shell remove a directory if this process is killed, since SIGKILL cannot be handled."""
    command = ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(Path(path).absolute())]
    try:
        # A session of its own keeps signals of the terminal, or to the process group, from the shell.
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise OutputError(
            f"/bin/sh, which removes {path} if this process is killed, cannot be started: {error.strerror}",
            "raise the limit on processes (ulimit -u; in a container also its own)",
        ) from error
    with shell:
        try:
            yield
        finally:
            # If the directory is still there, a download wrote to it as it was removed. The shell then removes it.
            if not os.path.lexists(path):
                shell.kill()

"""Downloads source shards in the order they are needed, into the Hub's cache or a scratch directory.

Several shards are downloaded at a time, each by huggingface_hub. A scratch directory (`--stream`) has only those that
are read or come next; each is removed after its last use. A shard is used once its size and digest are those that the
Hub states. One whose download was interrupted starts anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutputError, SourceError, UsageError
from ..files.destination import output_errors
from ..files.model_files import EVAL_FILE, JOURNAL_FILE, left_out_part, open_regular
from ..threads import FirstFailure
from .error_mapping import source_errors
from .source import HubFile, Source, find_source, silent, with_retries

# The source shards that each step needs, by the name of the step, in order.
Needs = Mapping[str, Sequence[str]]

# Number of shards that are downloaded at a time, as in huggingface_hub.
CONNECTIONS = 8
# Number of shards that streaming downloads before they are requested.
AHEAD = 2
# Number of output shards that are made at a time when their sources are streamed.
AT_ONCE = 3
# Bytes of a file that the client reads at once, and how many copies of them it has in memory at a time
# (huggingface_hub 2.4, file_download.py: http_get).
PIECE, COPIES = 10 << 20, 4
# Where huggingface_hub keeps unfinished downloads and its records, in a directory that it downloads to.
_CLIENT_FOLDER = ".cache"
# Files that only outputs have, which are no part of a source.
_OF_OUTPUTS = (JOURNAL_FILE, EVAL_FILE)
# A shell command that removes a directory when the process at the other end of its stdin has ended.
_REMOVE_AT_END = 'read -r _; rm -rf -- "$1"'


@dataclass(frozen=True)
class Download:
    """The size of what a run downloads from the Hub.

    Attributes:
        nbytes: size of all shards and files in bytes.
        streamed: the most bytes of shards that are on disk at a time if they are streamed.
        files: number of files that are not shards.
        file_bytes: their size in bytes.
    """

    nbytes: int
    streamed: int
    files: int
    file_bytes: int


def memory_needed(source: Source) -> int:
    """Return the most bytes of memory that downloading a source's shards needs; 0 if all shards are on disk."""
    largest = sorted((file.size for file in source.remote.values()), reverse=True)[:CONNECTIONS]
    return sum(COPIES * min(PIECE, size) for size in largest)


def scratch_bytes(source: Source, needs: Mapping[str, Iterable[str]]) -> int:
    """Return the most bytes of disk space that the shards of a source need at a time when they are streamed.

    Args:
        source: the source.
        needs: file names of the source shards that each step needs, by the name of the step, in order. When converting,
            a step is an output shard.

    Returns:
        Bytes; 0 if all shards are on disk.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, names in enumerate(needs.values()):
        for name in names:
            if name in source.remote:
                first.setdefault(name, number)
                last[name] = number

    most = 0
    for number in range(len(needs)):
        in_use = [name for name in first if first[name] <= number < last[name] + AT_ONCE]
        ahead = [name for name in first if first[name] > number][:AHEAD]
        most = max(most, sum(source.remote[name].size for name in (*in_use, *ahead)))
    return most


class ShardSupply:
    """Downloads the shards of a source in the background, in the order they are needed. Use as a context manager.

    Args:
        source: the source. Shards that it has on disk are used where they are.
        needs: for each output shard, or other step that reads shards, in order, the source shards that it is made from.
        scratch: the directory that keeps downloaded shards until their last use; None to keep them in the Hub's cache.
            It is made if it is missing. What another run left there is removed, but for whole shards of these names.
            At the end it is removed, unless an error or an interrupt ends the context: then the next run uses its
            shards.
    """

    def __init__(self, source: Source, needs: Mapping[str, Iterable[str]], scratch: Path | None) -> None:
        self.source = source
        self.needs = {output: list(names) for output, names in needs.items()}
        self.scratch = scratch
        uses = [name for names in self.needs.values() for name in names]
        self._uses = Counter(uses)
        # Shards whose download has not started, in the order they are needed.
        self._queue = deque(name for name in dict.fromkeys(uses) if name in source.remote)
        # Output shards that are not complete, with their numbers, in order.
        self._unfinished = {output: number for number, output in enumerate(self.needs)}
        # Source shards that an output shard waits for or has waited for.
        self._requested: set[str] = set()
        # Source shards whose download has begun and that are not removed, and where those lie that are complete.
        self._begun: set[str] = set()
        self._paths: dict[str, Path] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._wake)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ShardSupply:
        if self.scratch is not None:
            self._prepare_scratch(self.scratch)

        for _ in range(min(CONNECTIONS, len(self._queue))):
            thread = threading.Thread(target=self._download_all, name="openquant-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

        failed = exception[0] is not None
        end = time.monotonic() + 0.1
        for thread in self._threads:
            # After Ctrl-C, do not wait until an open request times out.
            thread.join(max(0, end - time.monotonic()) if failed else None)

        if self.scratch is not None and not failed:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Return the path of a source shard, which is on disk once `wait_for` has returned for an output made from it.

        Args:
            name: file name of the source shard.
        """
        return self._paths.get(name, self.source.root / name)

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        """Wait until all source shards of an output shard are on disk, or `stopped()` is true.

        Args:
            output: name of the output shard; one that `needs` does not have needs none.
            stopped: returns whether to give up waiting.

        Raises:
            SourceError: a shard cannot be downloaded.
            OutputError: the scratch directory cannot be written.
        """
        missing = {name for name in self.needs.get(output, ()) if name in self.source.remote}
        if not missing:
            return

        with self._changed:
            while not self._is_next(output) and not stopped():
                self._changed.wait(0.2)

            self._requested |= missing
            self._changed.notify_all()
            while not missing <= self._paths.keys() and not stopped():
                self._failure.check()
                self._changed.wait(0.2)

    def release(self, output: str) -> None:
        """Release the source shards of an output shard that is complete or not to be made. Call it once for each.

        Streamed source shards that no other output needs are removed, or not downloaded at all.

        Raises:
            OutputError: one cannot be removed.
        """
        with self._changed:
            self._unfinished.pop(output, None)
            for name in self.needs.get(output, ()):
                self._uses[name] -= 1
                self._remove_if_unused(name)
            self._changed.notify_all()

    def _is_next(self, output: str) -> bool:
        """Whether an output shard may be made: more than AT_ONCE would need more disk space than `scratch_bytes`."""
        if self.scratch is None:
            return True
        first = next(iter(self._unfinished.values()))
        return self._unfinished[output] < first + AT_ONCE

    def _remove_if_unused(self, name: str) -> None:
        """Remove a streamed shard after its last use. One that is being downloaded is removed when it is complete."""
        if self.scratch is None or self._uses[name] > 0:
            return

        if name in self._queue:
            self._queue.remove(name)
        if name in self._begun and name in self._paths:
            self._begun.remove(name)
            with output_errors(self._paths[name], "removed"):
                self._paths[name].unlink(missing_ok=True)

    def _prepare_scratch(self, scratch: Path) -> None:
        """Make the scratch directory, and remove what an earlier run left there but shards that this one needs."""
        with output_errors(scratch):
            scratch.mkdir(parents=True, exist_ok=True)

        shutil.rmtree(scratch / _CLIENT_FOLDER, ignore_errors=True)
        for path in scratch.iterdir():
            if path.name not in self._queue:
                with output_errors(path, "removed"):
                    path.unlink()

    def _is_stopped(self) -> bool:
        return self._closed or bool(self._failure)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        """Sleep between two tries of a download, until the supply is closed."""
        with self._changed:
            if self._changed.wait_for(self._is_stopped, seconds):
                raise _SupplyClosed

    def _download_all(self) -> None:
        """Download one shard after the other, until all are there; the work of a thread."""
        with self._failure.kept():
            while (name := self._next_download()) is not None:
                path = self._download(name)
                with self._changed:
                    self._paths[name] = path
                    self._remove_if_unused(name)
                    self._changed.notify_all()

    def _next_download(self) -> str | None:
        """Wait until the next shard may be downloaded, and return its name; None if there is none."""
        with self._changed:
            while self._queue and not self._is_stopped():
                name = self._queue[0]
                ahead = len(self._begun - self._requested)
                if self.scratch is None or name in self._requested or ahead < AHEAD:
                    self._begun.add(name)
                    return self._queue.popleft()
                self._changed.wait()
            return None

    def _download(self, name: str) -> Path:
        """Download a shard, and once more if it is not what the Hub states."""
        for _ in range(2):
            path = with_retries(lambda: self._download_once(name), sleep=self._sleep)
            if _is_sound(path, self.source.remote[name]):
                return path
            # Otherwise the client would return the damaged file again.
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        raise SourceError(
            f"{name} did not arrive as {self.source.repo}@{self.source.revision} has it: its size or digest differs",
            "run the same command again; if that does not help, the repository or something on the way is broken",
        )

    def _download_once(self, name: str) -> Path:
        """Have the client download a shard, or find it on disk."""
        from huggingface_hub import hf_hub_download

        repo, revision = self.source.repo, self.source.revision
        assert repo is not None
        with source_errors(repo, revision):
            try:
                path = hf_hub_download(
                    repo, name, revision=revision, local_dir=self.scratch, tqdm_class=self._progress_class()
                )
            except OSError as error:
                # The client's own errors are OSErrors too, without a number.
                if self.scratch is None or error.errno is None:
                    raise
                with output_errors(self.scratch / name):
                    raise
        return Path(path)

    def _progress_class(self) -> type[Any]:
        """A progress bar class that shows nothing, and ends a download once the supply is closed."""
        from tqdm import tqdm

        supply = self

        class Watch(tqdm):  # type: ignore[type-arg]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if supply._is_stopped():
                    raise _SupplyClosed
                return super().update(n)

        return Watch


class _SupplyClosed(Exception):
    """Raised in a download thread once the supply is closed."""


def _is_sound(path: Path, file: HubFile) -> bool:
    """Whether a file has the size and digest that the Hub states."""
    digest = file.hasher()
    with output_errors(path, "read"), open_regular(path, str(path), "remove it") as local:
        # Large pieces, because each read waits for the interpreter lock, which downloads keep busy.
        while piece := local.read(4 << 20):
            digest.update(piece)
        return os.fstat(local.fileno()).st_size == file.size and digest.hexdigest() == file.digest


@contextmanager
def supply_shards(
    sources: Sequence[tuple[Source, Needs]],
    stream: bool,
    scratch: str | os.PathLike[str] | None,
    more: int = 0,
    times: int = 1,
) -> Iterator[list[ShardSupply]]:
    """Start supplies for a command that writes no shards, such as `calibrate` and `eval`.

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
        OutputError: `scratch` cannot be written.
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
            folder = directory and directory / str(number)
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
    shards = list(source.remote)
    files = [name for name in source.absent if left_out_part(name) is None or name in _OF_OUTPUTS]

    nbytes = source.remote_bytes([*shards, *files])
    if begun is not None and nbytes > 0:
        begun(f"downloading {nbytes:,} bytes of {source.identity} to the Hub's cache")

    source.fetch_files(files)
    with supply_shards([(source, {"all": shards})], False, None) as (supply,):
        supply.wait_for("all", lambda: False)
    return source


class _HintedSupply(ShardSupply):
    """A supply whose errors about the scratch directory name --scratch in the hint."""

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        with _scratch_hint():
            super().wait_for(output, stopped)

    def release(self, output: str) -> None:
        with _scratch_hint():
            super().release(output)


@contextmanager
def _scratch_hint() -> Iterator[None]:
    """Have errors about the scratch directory name --scratch in the hint."""
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
        # SIGKILL cannot be handled, so a shell waits for the end of this process. A session of its own keeps signals of
        # the terminal from it.
        command = ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(Path(directory.name).absolute())]
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    with directory as path, shell:
        yield Path(path)

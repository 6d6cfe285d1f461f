"""Downloads source shards in the order they are needed, into the Hub's cache or a scratch directory.

Downloads use several connections at once. Into the cache, huggingface_hub downloads one shard over each connection.
Into the scratch directory, all connections download parts of the next shards, so that the first is complete soon.
An interrupted download is resumed: in the scratch directory from the units that a .partial file records, in the cache
by huggingface_hub. Every shard's size and digest are compared with those that the Hub states before it is used.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..files.journal import output_errors
from ..files.small_files import open_regular
from ..threads import FirstFailure
from .error_mapping import Unreachable, is_transient, source_errors
from .source import HubFile, Source, is_expired_address, with_retries

# The number of parallel downloads, as in huggingface_hub.
CONNECTIONS = 8
# Number of shards that streaming downloads before they are requested.
AHEAD = 2
# Number of output shards that are made at a time when their sources are streamed.
AT_ONCE = 3
# Bytes of a streamed shard whose arrival is recorded together.
UNIT = 1 << 20
# Units in a request. Large requests lose less time to round trips; smaller ones at the end let all connections finish
# together.
MOST_UNITS, FEWEST_UNITS = 64, 4
# Bytes of memory that streaming needs: a unit for each shard that is hashed, a response buffer for each connection.
STREAM_MEMORY = (AHEAD + AT_ONCE) * UNIT + CONNECTIONS * UNIT
# The client collects pieces of 10 MiB and joins them (huggingface_hub 2.4, file_download.py: http_get).
CACHED_PIECE, COPIES = 10 << 20, 4

_AGAIN_HINT = "run the same command again"


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


def memory_needed(source: Source, stream: bool) -> int:
    """Return the most bytes of memory that downloading a source's shards needs.

    Args:
        source: the source.
        stream: whether its shards are streamed, not kept in the Hub's cache.

    Returns:
        Bytes; 0 if all shards are on disk.
    """
    if stream and source.remote:
        return STREAM_MEMORY
    largest = sorted((file.size for file in source.remote.values()), reverse=True)[:CONNECTIONS]
    return sum(COPIES * min(CACHED_PIECE, size) for size in largest)


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
    order = list(first)
    most = 0
    for number in range(len(needs)):
        in_use = [name for name in order if first[name] <= number < last[name] + AT_ONCE]
        ahead = [name for name in order if first[name] > number][:AHEAD]
        most = max(most, sum(source.remote[name].size for name in (*in_use, *ahead)))
    return most


class ShardSupply:
    """Downloads the shards of a source in the background, in the order they are needed. Use as a context manager.

    Args:
        source: the source. Shards that it has on disk are used where they are.
        needs: for each output shard, or other step that reads shards, in order, the source shards that it is made from.
        scratch: the directory that keeps downloaded shards until their last use; None to keep them in the Hub's cache.
            It is made if it is missing and removed at the end if it is empty. Files in it that are none of these
            shards, whole or unfinished, are deleted.
    """

    def __init__(self, source: Source, needs: Mapping[str, Iterable[str]], scratch: Path | None) -> None:
        self.source = source
        self.needs = {output: list(names) for output, names in needs.items()}
        self.scratch = scratch
        self._order = [
            name for name in dict.fromkeys(n for names in self.needs.values() for n in names) if name in source.remote
        ]
        self._uses = Counter(name for names in self.needs.values() for name in names)
        self._paths: dict[str, Path] = {}
        # Streamed shards that take disk space, and those that an output shard waits for or has waited for.
        self._on_disk: set[str] = set()
        self._requested: set[str] = set()
        # The output shards that are not complete, with their numbers, in order.
        self._unfinished = {output: number for number, output in enumerate(self.needs)}
        # Shards whose download has not started, and those whose download has, in the order they are needed.
        self._queue = deque(self._order)
        self._downloading: list[_PartialShard] = []
        self._closed = False
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._wake)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ShardSupply:
        if self.scratch is not None and self._order:
            # Not in a thread, which could make it again after it was removed.
            with output_errors(self.scratch):
                self.scratch.mkdir(parents=True, exist_ok=True)
        if self.scratch is not None and self.scratch.exists():
            # Remove shards that an earlier run no longer needed when it was killed.
            needed = {name for shard in self._order for name in (shard, self._partial_path(shard).name)}
            for path in self.scratch.iterdir():
                if path.name not in needed:
                    with output_errors(path, "removed"):
                        path.unlink()
        if self._order and self.scratch is None:
            for _ in range(min(CONNECTIONS, len(self._order))):
                self._start(self._fill_cache)
        elif self._order:
            self._start(self._admit)
            for _ in range(CONNECTIONS):
                self._start(self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + 0.1
        for thread in threads:
            # After Ctrl-C, do not wait until an open request times out.
            thread.join(None if exception[0] is None else max(0, end - time.monotonic()))
        if self.scratch is not None:
            # It is not empty if another run can continue its downloads.
            with suppress(OSError):
                self.scratch.rmdir()

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
        with self._changed:
            while missing and self.scratch is not None and not stopped():
                # More outputs than AT_ONCE behind a slow one would need more disk space than scratch_bytes counts.
                if self._unfinished[output] < next(iter(self._unfinished.values())) + AT_ONCE:
                    break
                self._changed.wait(0.2)
            self._requested |= missing
            self._changed.notify_all()
            while not missing <= self._paths.keys() and not stopped():
                self._failure.check()
                self._changed.wait(0.2)

    def finished(self, output: str) -> None:
        """Mark an output shard as complete or not to be made. Call it once for each.

        Streamed source shards that no other output needs are removed, or not downloaded at all.

        Raises:
            OutputError: one cannot be removed.
        """
        with self._changed:
            self._unfinished.pop(output, None)
            for name in self.needs.get(output, ()):
                self._uses[name] -= 1
                if self._uses[name] == 0 and self.scratch is not None:
                    if name in self._queue:
                        self._queue.remove(name)
                    self._remove(name)
            self._changed.notify_all()

    def _remove(self, name: str) -> None:
        """Remove a shard that is on disk. One that is being downloaded is removed when it is complete."""
        if name in self._on_disk and name in self._paths:
            self._on_disk.discard(name)
            with output_errors(self._paths[name], "removed"):
                self._paths[name].unlink(missing_ok=True)

    def _start(self, work: Callable[[], None]) -> None:
        """Call `work` in a thread. If it fails, all threads end."""

        def run() -> None:
            with self._failure.kept():
                work()

        thread = threading.Thread(target=run, name="openquant-fetch", daemon=True)
        with self._changed:
            self._threads.append(thread)
        thread.start()

    def _is_stopped(self) -> bool:
        return self._closed or bool(self._failure)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _arrived(self, name: str, path: Path) -> None:
        with self._changed:
            self._paths[name] = path
            if self.scratch is not None and self._uses[name] == 0:
                self._remove(name)
            self._changed.notify_all()

    # Into the Hub's cache.

    def _fill_cache(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped() or not self._queue:
                    return
                name = self._queue.popleft()
            self._arrived(name, self._from_cache(name))

    def _from_cache(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        repo, revision = self.source.repo, self.source.revision
        assert repo is not None

        def download() -> Path:
            with source_errors(repo, revision):
                try:
                    return Path(hf_hub_download(repo, name, revision=revision, tqdm_class=self._watch()))
                except HfHubHTTPError as error:
                    if not is_expired_address(error):
                        raise
                    # The next try gets a new address from the Hub.
                    raise Unreachable(f"{name}: the address that the Hub gave for it expired", _AGAIN_HINT) from None

        for _ in range(2):
            path = with_retries(download, sleep=self._sleep)
            if _is_sound(path, self.source.remote[name]):
                return path
            # Otherwise the client would return the damaged file again.
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        raise self._mismatch(name)

    def _watch(self) -> type[Any]:
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

    # Into the scratch directory.

    def _partial_path(self, name: str) -> Path:
        """The path of an incomplete shard. It is a hash, since the shard's name may be too long for a suffix."""
        assert self.scratch is not None
        key = f"{name}\0{self.source.remote[name].digest}"
        return self.scratch / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:24]}.partial"

    def _admit(self) -> None:
        """Start downloads in order, each when it is requested or fewer than AHEAD unrequested shards are on disk."""
        while True:
            with self._changed:
                while (
                    self._queue
                    and not self._is_stopped()
                    and self._queue[0] not in self._requested
                    and len(self._on_disk - self._requested) >= AHEAD
                ):
                    self._changed.wait()
                if self._is_stopped() or not self._queue:
                    return
                name = self._queue.popleft()
                self._on_disk.add(name)
            self._start(partial(self._to_scratch, name))

    def _to_scratch(self, name: str) -> None:
        """Start the download of a shard, hash it as it arrives, and give it its name once it is complete."""
        assert self.scratch is not None
        target, file = self.scratch / name, self.source.remote[name]
        with output_errors(target):
            if target.exists():
                # An earlier run left it. It may be of another repository, or damaged by a loss of power.
                if _is_sound(target, file):
                    self._arrived(name, target)
                    return
                target.unlink()
        for _ in range(2):
            with closing(_PartialShard(self._order.index(name), file, self._partial_path(name))) as shard:
                with self._changed:
                    self._downloading = sorted([*self._downloading, shard], key=lambda other: other.number)
                    self._changed.notify_all()
                sound = shard.is_sound(self._is_stopped)
                with self._changed:
                    self._downloading.remove(shard)
                if sound:
                    shard.finish(target)
                    self._arrived(name, target)
                    return
                shard.path.unlink()
        raise self._mismatch(name)

    def _receive(self) -> None:
        """Download parts of shards over one connection, until all shards are complete."""
        while True:
            with self._changed:
                while (part := self._next_part()) is None:
                    if self._is_stopped() or not (self._queue or self._on_disk - self._paths.keys()):
                        return
                    self._changed.wait()
            self._fetch(*part)

    def _next_part(self) -> tuple[_PartialShard, int, int] | None:
        """The next bytes to request, as (shard, start, end), of the first shard with unassigned units; else None."""
        queued_bytes = sum(self.source.remote[name].size for name in self._queue)
        units = queued_bytes // UNIT + sum(shard.unassigned_units for shard in self._downloading)
        for shard in self._downloading:
            # At most half a shard, so that small shards keep several connections busy.
            most = max(FEWEST_UNITS, min(MOST_UNITS, units // CONNECTIONS, shard.file.size // 2 // UNIT + 1))
            if shard.unassigned_units:
                return shard, *shard.take(most)
        return None

    def _fetch(self, shard: _PartialShard, at: int, end: int) -> None:
        """Download the bytes from `at` to `end`."""

        def attempt() -> None:
            nonlocal at
            start = at
            try:
                with closing(shard.file.stream(at, end)) as pieces:
                    for piece in pieces:
                        if self._is_stopped():
                            raise _SupplyClosed
                        shard.write(at, piece)
                        at += len(piece)
            except Exception as error:
                # An interruption after some progress does not count as a failed try.
                if at < end and (at - start < UNIT or not is_transient(error)):
                    raise

        while at < end:
            with_retries(attempt, sleep=self._sleep)

    def _mismatch(self, name: str) -> SourceError:
        return SourceError(
            f"{name} did not arrive as {self.source.repo}@{self.source.revision} has it: its size or digest differs",
            "run the same command again; if that does not help, the repository or something on the way is broken",
        )

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            end = time.monotonic() + seconds
            while not self._is_stopped() and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            if self._is_stopped():
                raise _SupplyClosed


class _PartialShard:
    """A shard that is being downloaded: a file with its bytes, followed by one byte for each UNIT, 1 if it has arrived.

    So another run can continue a download that was killed, whichever units had arrived.

    Attributes:
        number: its position in the order of downloads.
        file: the shard on the Hub.
        path: the path of the incomplete file.
    """

    def __init__(self, number: int, file: HubFile, path: Path) -> None:
        self.number = number
        self.file = file
        self.path = path
        self._changed = threading.Condition()
        units = -(-file.size // UNIT)
        with output_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            if os.fstat(self._handle).st_size != file.size + units:
                os.ftruncate(self._handle, 0)
                os.ftruncate(self._handle, file.size + units)
            self._done = bytearray(os.pread(self._handle, units, file.size))
        # Units that no connection downloads yet.
        self._unassigned = deque(unit for unit in range(units) if not self._done[unit])

    def close(self) -> None:
        """Close the file. Bytes that still arrive are dropped."""
        with self._changed:
            os.close(self._handle)
            self._handle = -1

    @property
    def unassigned_units(self) -> int:
        """Number of units that no connection downloads yet."""
        return len(self._unassigned)

    def take(self, most: int) -> tuple[int, int]:
        """Assign the next adjacent units, at most `most`, and return their bytes as (start, end)."""
        first = last = self._unassigned.popleft()
        if self.file.ignores_range:
            # A request for a part costs as much as one for the whole file.
            last = self._unassigned[-1] if self._unassigned else first
            self._unassigned.clear()
        while self._unassigned and self._unassigned[0] == last + 1 and self._unassigned[0] < first + most:
            last = self._unassigned.popleft()
        return first * UNIT, min((last + 1) * UNIT, self.file.size)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset. A unit counts as arrived once its last byte is written."""
        with self._changed, output_errors(self.path):
            if self._handle < 0:
                raise _SupplyClosed
            end = offset + len(data)
            while data:
                written = os.pwrite(self._handle, data, end - len(data))
                data = data[written:]
            last = -(-end // UNIT) if end == self.file.size else end // UNIT
            for unit in range(offset // UNIT, last):
                os.pwrite(self._handle, b"\1", self.file.size + unit)
                self._done[unit] = 1
            self._changed.notify_all()

    def is_sound(self, stopped: Callable[[], bool]) -> bool:
        """Hash the shard as it arrives, wait for its end, and return whether its digest is the Hub's."""
        digest = self.file.hasher()
        buffer = memoryview(bytearray(UNIT))
        for unit in range(len(self._done)):
            with self._changed:
                while not self._done[unit]:
                    if stopped():
                        raise _SupplyClosed
                    self._changed.wait(0.2)
            with output_errors(self.path, "read"):
                _update(digest, self._handle, unit * UNIT, min((unit + 1) * UNIT, self.file.size), buffer)
        return digest.hexdigest() == self.file.digest

    def finish(self, target: Path) -> None:
        """Cut off the record of units and give the file its final name."""
        with output_errors(target):
            os.ftruncate(self._handle, self.file.size)
            self.path.replace(target)


def _is_sound(path: Path, file: HubFile) -> bool:
    """Whether a file has the size and digest that the Hub states."""
    digest = file.hasher()
    with output_errors(path, "read"), open_regular(path, str(path), "remove it") as local:
        # A large buffer, because each read waits for the interpreter lock, which downloads keep busy.
        _update(digest, local.fileno(), 0, file.size, memoryview(bytearray(4 * UNIT)))
        return os.fstat(local.fileno()).st_size == file.size and digest.hexdigest() == file.digest


def _update(digest: hashlib._Hash, handle: int, start: int, end: int, buffer: memoryview) -> None:
    """Update a digest with the bytes of a file from `start` to `end`, or to its end if it is shorter."""
    while start < end and (count := os.preadv(handle, [buffer[: end - start]], start)):
        digest.update(buffer[:count])
        start += count


class _SupplyClosed(Exception):
    """Raised in a download thread once the supply is closed."""

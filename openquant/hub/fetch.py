"""Source shards, where they are needed: on disk already, from the Hub's cache, or through a scratch directory.

Shards that are still on the Hub are fetched in the order they are needed, over several connections at once: into the
cache by the client's own download, a shard to a connection; into the scratch directory in parts, so that the first
shard is there soon. Every one is held against the size and digest the Hub states for it before a byte of it is used.
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
from ..files.atomic import make_directory
from ..files.journal import output_errors
from ..files.small_files import open_regular
from ..threads import FirstFailure
from .error_mapping import Unreachable, is_transient, source_errors
from .source import HubFile, Source, is_refused_elsewhere, patiently

# As many as huggingface_hub downloads by itself.
CONNECTIONS = 8
# Shards fetched before the conversion asks for them, where they take space only for it.
AHEAD = 2
# Output shards that are made at a time when their sources are only here for that.
AT_ONCE = 3
# Whether a part of a streamed shard is there is written down for so many bytes.
UNIT = 1 << 20
# What is asked for at a time: much, so that few requests wait for their answer, and less towards the end, so that all
# connections end together.
MOST_UNITS, FEWEST_UNITS = 64, 4
# What streaming takes in memory: a unit of each shard whose digest is taken, and what the client holds of each answer.
STREAM_MEMORY = (AHEAD + AT_ONCE) * UNIT + CONNECTIONS * UNIT
# The client collects pieces of 10 MiB and joins them (huggingface_hub 2.4, file_download.py: http_get).
CACHED_PIECE, COPIES = 10 << 20, 4


_AGAIN = "run the same command again"


@dataclass(frozen=True)
class Download:
    """What a run fetches from the Hub.

    Attributes:
        nbytes: all of it.
        streamed: of shards, what is on disk at a time if they are streamed.
        files: number of files that are no shards.
        file_bytes: their size.
    """

    nbytes: int
    streamed: int
    files: int
    file_bytes: int


def memory_needed(source: Source, stream: bool) -> int:
    """Bytes that fetching holds in memory at most."""
    if stream and source.remote:
        return STREAM_MEMORY
    largest = sorted((file.size for file in source.remote.values()), reverse=True)[:CONNECTIONS]
    return sum(COPIES * min(CACHED_PIECE, size) for size in largest)


def scratch_bytes(source: Source, needs: Mapping[str, Iterable[str]]) -> int:
    """What source shards take on disk at most when they are streamed.

    Args:
        source: where they lie.
        needs: for each output shard to be made, in order, the source shards it is made from.
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
        held = [name for name in order if first[name] <= number < last[name] + AT_ONCE]
        ahead = [name for name in order if first[name] > number][:AHEAD]
        most = max(most, sum(source.remote[name].size for name in (*held, *ahead)))
    return most


class ShardSupply:
    """The shards of a source, each by the time it is needed; use as a context manager.

    Args:
        source: where they lie.
        needs: for each output shard to be made, in order, the source shards it is made from.
        scratch: keep fetched shards here, and only until their last use; None to keep them in the Hub's cache.
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
        # Of streamed shards those that take space, and those that some output waits for or has waited for.
        self._held: set[str] = set()
        self._wanted: set[str] = set()
        # Numbers of the output shards that are not whole yet, in order.
        self._unfinished = {output: number for number, output in enumerate(self.needs)}
        # Those not begun yet, and those on their way in the order they are needed.
        self._coming = deque(self._order)
        self._arriving: list[_Arrival] = []
        self._closed = False
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._wake)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ShardSupply:
        if self.scratch is not None and self.scratch.exists():
            # What an earlier run had done with when it was killed.
            known = {name for shard in self._order for name in (shard, self._partial(shard).name)}
            for path in self.scratch.iterdir():
                if path.name not in known:
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
            # A request under way ends by its own timeout; nobody waits for that after Ctrl-C.
            thread.join(None if exception[0] is None else max(0, end - time.monotonic()))
        if self.scratch is not None:
            # Unless it holds what another run will continue.
            with suppress(OSError):
                self.scratch.rmdir()

    def path(self, name: str) -> Path:
        """Where a source shard lies that has arrived."""
        return self._paths.get(name, self.source.root / name)

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        """Wait until every source shard of an output shard is here, or `stopped()` is true.

        Raises:
            SourceError: one of them cannot be had.
        """
        missing = {name for name in self.needs.get(output, ()) if name in self.source.remote}
        with self._changed:
            while missing and self.scratch is not None and not stopped():
                # So many in a row, as scratch_bytes counts; others behind a slow one would hold more shards here.
                if self._unfinished[output] < next(iter(self._unfinished.values())) + AT_ONCE:
                    break
                self._changed.wait(0.2)
            self._wanted |= missing
            self._changed.notify_all()
            while not missing <= self._paths.keys() and not stopped():
                self._failure.check()
                self._changed.wait(0.2)

    def finished(self, output: str) -> None:
        """Is told that an output shard is whole, or will not be made: source shards that nothing else is made from are
        removed, or do not come.
        """
        with self._changed:
            self._unfinished.pop(output, None)
            for name in self.needs.get(output, ()):
                self._uses[name] -= 1
                if self._uses[name] == 0 and self.scratch is not None:
                    if name in self._coming:
                        self._coming.remove(name)
                    self._remove(name)
            self._changed.notify_all()

    def _remove(self, name: str) -> None:
        """Remove a shard, unless it is still on its way; it is then removed once it has arrived."""
        if name in self._held and name in self._paths:
            self._held.discard(name)
            with output_errors(self._paths[name], "removed"):
                self._paths[name].unlink(missing_ok=True)

    def _start(self, work: Callable[[], None]) -> None:
        """Call `work` in a thread; that it fails ends them all."""

        def run() -> None:
            with self._failure.kept():
                work()

        thread = threading.Thread(target=run, name="openquant-fetch", daemon=True)
        with self._changed:
            self._threads.append(thread)
        thread.start()

    def _ended(self) -> bool:
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
                if self._ended() or not self._coming:
                    return
                name = self._coming.popleft()
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
                    if not is_refused_elsewhere(error):
                        raise
                    # The next try asks the Hub for another address.
                    raise Unreachable(f"{name}: the address that the Hub gave for it expired", _AGAIN) from None

        for _ in range(2):
            path = patiently(download, sleep=self._sleep)
            if _is_sound(path, self.source.remote[name]):
                return path
            # The cache must not hand it out again.
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        raise self._mismatch(name)

    def _watch(self) -> type[Any]:
        """A progress bar that shows nothing and ends a download nobody waits for any more."""
        from tqdm import tqdm

        supply = self

        class Watch(tqdm):  # type: ignore[type-arg]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if supply._ended():
                    raise _Closed
                return super().update(n)

        return Watch

    # Through the scratch directory.

    def _partial(self, name: str) -> Path:
        """Where a shard arrives; its own name may be too long to have something added."""
        assert self.scratch is not None
        what = f"{name}\0{self.source.remote[name].digest}"
        return self.scratch / f"{hashlib.sha256(os.fsencode(what)).hexdigest()[:24]}.partial"

    def _admit(self) -> None:
        """Let shards come one after the other, each as soon as there may be one more."""
        while True:
            with self._changed:
                while (
                    self._coming
                    and not self._ended()
                    and self._coming[0] not in self._wanted
                    and len(self._held - self._wanted) >= AHEAD
                ):
                    self._changed.wait()
                if self._ended() or not self._coming:
                    return
                name = self._coming.popleft()
                self._held.add(name)
            self._start(partial(self._to_scratch, name))

    def _to_scratch(self, name: str) -> None:
        """Wait for all of a shard, taking its digest meanwhile."""
        assert self.scratch is not None
        target, file = self.scratch / name, self.source.remote[name]
        with output_errors(target):
            make_directory(self.scratch)
            if target.exists():
                # Left by an earlier run, perhaps of another repository, perhaps on a disk that lost power.
                if _is_sound(target, file):
                    self._arrived(name, target)
                    return
                target.unlink()
        for _ in range(2):
            with closing(_Arrival(self._order.index(name), file, self._partial(name))) as arrival:
                with self._changed:
                    self._arriving = sorted([*self._arriving, arrival], key=lambda other: other.number)
                    self._changed.notify_all()
                sound = arrival.is_sound(self._ended)
                with self._changed:
                    self._arriving.remove(arrival)
                if sound:
                    arrival.finish(target)
                    self._arrived(name, target)
                    return
                arrival.path.unlink()
        raise self._mismatch(name)

    def _receive(self) -> None:
        """Fetch parts of what is on its way, until nothing will be any more."""
        while True:
            with self._changed:
                while (part := self._next_part()) is None:
                    if self._ended() or not (self._coming or self._held - self._paths.keys()):
                        return
                    self._changed.wait()
            self._fetch(*part)

    def _next_part(self) -> tuple[_Arrival, int, int] | None:
        """What to fetch next, of the first shard that lacks something: (shard, begin, end); None if none does."""
        coming = sum(self.source.remote[name].size for name in self._coming)
        left = coming // UNIT + sum(arrival.units_left for arrival in self._arriving)
        for arrival in self._arriving:
            # No connection is without work where shards are small.
            most = max(FEWEST_UNITS, min(MOST_UNITS, left // CONNECTIONS, arrival.file.size // 2 // UNIT + 1))
            if arrival.units_left:
                return arrival, *arrival.take(most)
        return None

    def _fetch(self, arrival: _Arrival, at: int, end: int) -> None:
        def attempt() -> None:
            nonlocal at
            begin = at
            try:
                with closing(arrival.file.stream(at, end)) as pieces:
                    for piece in pieces:
                        if self._ended():
                            raise _Closed
                        arrival.write(at, piece)
                        at += len(piece)
            except Exception as error:
                # What comes slowly with many interruptions comes all the same.
                if at < end and (at - begin < UNIT or not is_transient(error)):
                    raise

        while at < end:
            patiently(attempt, sleep=self._sleep)

    def _mismatch(self, name: str) -> SourceError:
        return SourceError(
            f"{name} did not arrive as {self.source.repo}@{self.source.revision} has it: its size or digest differs",
            "run the same command again; if that does not help, the repository or something on the way is broken",
        )

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            end = time.monotonic() + seconds
            while not self._ended() and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            if self._ended():
                raise _Closed


class _Arrival:
    """A shard on its way: a file with its bytes and, behind them, a byte for each UNIT of them that is there.

    So another run continues what was killed, wherever the parts lie that had arrived.

    Attributes:
        number: its place among all that come.
        file: what it is.
        path: where it arrives.
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
            self._here = bytearray(os.pread(self._handle, units, file.size))
        # Those that nobody fetches yet.
        self._open = deque(unit for unit in range(units) if not self._here[unit])

    def close(self) -> None:
        """Close the file; parts that still come are dropped."""
        with self._changed:
            os.close(self._handle)
            self._handle = -1

    @property
    def units_left(self) -> int:
        """How many units nobody fetches yet."""
        return len(self._open)

    def take(self, most: int) -> tuple[int, int]:
        """The next bytes to fetch, from where to where, at most so many units of those left."""
        first = after = self._open.popleft()
        if self.file.only_whole:
            # Parts cost as much as all of it.
            after = self._open[-1] if self._open else first
            self._open.clear()
        while self._open and self._open[0] == after + 1 and self._open[0] < first + most:
            after = self._open.popleft()
        return first * UNIT, min((after + 1) * UNIT, self.file.size)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes where they belong; a unit counts as there once its last byte is."""
        with self._changed, output_errors(self.path):
            if self._handle < 0:
                raise _Closed
            end = offset + len(data)
            while data:
                written = os.pwrite(self._handle, data, end - len(data))
                data = data[written:]
            last = -(-end // UNIT) if end == self.file.size else end // UNIT
            for unit in range(offset // UNIT, last):
                os.pwrite(self._handle, b"\1", self.file.size + unit)
                self._here[unit] = 1
            self._changed.notify_all()

    def is_sound(self, ended: Callable[[], bool]) -> bool:
        """Wait for all of it; whether it then is what the Hub says it is."""
        digest = self.file.hasher()
        buffer = memoryview(bytearray(UNIT))
        for unit in range(len(self._here)):
            with self._changed:
                while not self._here[unit]:
                    if ended():
                        raise _Closed
                    self._changed.wait(0.2)
            with output_errors(self.path, "read"):
                _feed(digest, self._handle, unit * UNIT, min((unit + 1) * UNIT, self.file.size), buffer)
        return digest.hexdigest() == self.file.digest

    def finish(self, target: Path) -> None:
        """Give it its name, without what was noted behind it."""
        with output_errors(target):
            os.ftruncate(self._handle, self.file.size)
            self.path.replace(target)


def _is_sound(path: Path, file: HubFile) -> bool:
    """Whether a file is what the Hub says it is."""
    digest = file.hasher()
    with output_errors(path, "read"), open_regular(path, str(path), "remove it") as here:
        # Each read and each update waits for the interpreter lock, which downloads keep busy.
        _feed(digest, here.fileno(), 0, file.size, memoryview(bytearray(4 * UNIT)))
        return os.fstat(here.fileno()).st_size == file.size and digest.hexdigest() == file.digest


def _feed(digest: hashlib._Hash, handle: int, start: int, end: int, buffer: memoryview) -> None:
    """Let a digest take a part of a file, or as much of it as there is."""
    while start < end and (count := os.preadv(handle, [buffer[: end - start]], start)):
        digest.update(buffer[:count])
        start += count


class _Closed(Exception):
    """Raised in a thread that fetches once nobody waits for these shards any more."""

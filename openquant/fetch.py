"""Source shards, where they are needed: on disk already, from the Hub's cache, or through a scratch directory.

Shards that are still on the Hub are fetched in the order they are needed, a few ahead of the conversion. Every one is
held against the size and digest the Hub states for it before a byte of it is used.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from .checkpoint import RemoteFile
from .errors import SourceError
from .hub import Source, patiently
from .output import explained
from .plan import Plan
from .refusals import Unreachable, explained_source

# Shards fetched before the conversion asks for them.
AHEAD = 2
# Output shards that are made at a time when their sources are only here for that.
AT_ONCE = 3
# A streamed shard comes in pieces of so many bytes, so many at a time.
PIECE = 8 << 20
PIECES = 4
# What that takes in memory: what has arrived, and what the client still holds of it.
MEMORY = 2 * PIECES * PIECE


def source_needs(source: Source, plan: Plan, outputs: Sequence[str] | None = None) -> dict[str, list[str]]:
    """For each of these output shards (all if None) the source shards it is made from; of a local source, nothing."""
    if not source.remote:
        return {}
    if outputs is None:
        outputs = [shard.name for shard in plan.shards]
    return {output: sorted(plan.sources(output)) for output in outputs}


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


class Supply:
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
        self._held: set[str] = set()
        self._wanted: set[str] = set()
        self._begun: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fetch_all, name="openquant-fetch", daemon=True)

    def __enter__(self) -> Supply:
        if self.scratch is not None and self.scratch.exists():
            # What an earlier run had done with when it was killed.
            for path in self.scratch.iterdir():
                if path.name.removesuffix(".partial") not in self._order:
                    with explained(path, "removed"):
                        path.unlink()
        if self._order:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._order:
            # A request under way ends by its own timeout; nobody waits for that after Ctrl-C.
            self._thread.join(None if exception[0] is None else 0.1)
        if self.scratch is not None:
            # Unless it holds what another run will continue.
            with suppress(OSError):
                self.scratch.rmdir()

    def path(self, name: str) -> Path:
        """Where a source shard lies that has arrived."""
        return self._paths.get(name, self.source.root / name)

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        """Until every source shard of an output shard is here, or the work has stopped.

        Raises:
            SourceError: one of them cannot be had.
        """
        missing = {name for name in self.needs.get(output, ()) if name in self.source.remote}
        with self._changed:
            while self.scratch is not None and len(self._begun) >= AT_ONCE and not stopped():
                self._changed.wait(0.2)
            self._begun.add(output)
            self._wanted |= missing
            self._changed.notify_all()
            while not missing <= self._paths.keys() and not stopped():
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(0.2)

    def finished(self, output: str) -> None:
        """An output shard is whole: what nothing else is made from may go."""
        with self._changed:
            self._begun.discard(output)
            for name in self.needs.get(output, ()):
                self._uses[name] -= 1
                if self._uses[name] == 0 and name in self._held:
                    self._held.discard(name)
                    if self.scratch is not None:
                        with explained(self._paths[name], "removed"):
                            self._paths[name].unlink(missing_ok=True)
            self._changed.notify_all()

    def _fetch_all(self) -> None:
        fetch = self._from_cache if self.scratch is None else self._to_scratch
        try:
            self._fetch_in_order(fetch)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _fetch_in_order(self, fetch: Callable[[str, RemoteFile], Path]) -> None:
        for name in self._order:
            with self._changed:
                while not self._closed and name not in self._wanted and len(self._held - self._wanted) >= AHEAD:
                    self._changed.wait()
                if self._closed:
                    return
            path = fetch(name, self.source.remote[name])
            with self._changed:
                self._paths[name] = path
                self._held.add(name)
                self._changed.notify_all()

    def _from_cache(self, name: str, remote: RemoteFile) -> Path:
        from huggingface_hub import hf_hub_download

        repo, revision = self.source.repo, self.source.revision
        assert repo is not None

        def download() -> Path:
            with explained_source(repo, revision):
                return Path(hf_hub_download(repo, name, revision=revision, tqdm_class=self._watch()))

        for _ in range(2):
            path = patiently(download, sleep=self._sleep)
            if _is_sound(path, remote):
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
                if supply._closed:
                    raise _Closed
                return super().update(n)

        return Watch

    def _to_scratch(self, name: str, remote: RemoteFile) -> Path:
        assert self.scratch is not None
        target = self.scratch / name
        partial = self.scratch / f"{name}.partial"
        with explained(target):
            self.scratch.mkdir(parents=True, exist_ok=True)
            if target.exists():
                # Left by an earlier run, perhaps of another repository, perhaps on a disk that lost power.
                if _is_sound(target, remote):
                    return target
                target.unlink()
        for _ in range(2):
            if self._download(name, remote, partial):
                with explained(target):
                    partial.replace(target)
                return target
            partial.unlink()
        raise self._mismatch(name)

    def _mismatch(self, name: str) -> SourceError:
        return SourceError(
            f"{name} did not arrive as {self.source.repo}@{self.source.revision} has it: its size or digest differs",
            "run the same command again; if that does not help, the repository or something on the way is broken",
        )

    def _download(self, name: str, remote: RemoteFile, partial: Path) -> bool:
        """Fetch what a partial file lacks; whether it then is what the Hub says it is."""
        digest = remote.hasher()

        def read(offset: int) -> bytes:
            length = min(PIECE, remote.size - offset)

            def piece() -> bytes:
                data = remote.read(offset, length)
                if len(data) != length:
                    raise Unreachable(
                        f"{name} ended at byte {offset + len(data):,} of {remote.size:,}", "run the same command again"
                    )
                return data

            return patiently(piece, sleep=self._sleep)

        def append(file: BinaryIO, data: bytes) -> None:
            digest.update(data)
            file.write(data)

        coming: deque[_Piece] = deque()
        with explained(partial), partial.open("ab+") as file:
            file.seek(0)
            while data := file.read(PIECE):
                digest.update(data)
            for offset in range(file.tell(), remote.size, PIECE):
                coming.append(_Piece(read, offset))
                if len(coming) == PIECES:
                    append(file, coming.popleft().wait())
            while coming:
                append(file, coming.popleft().wait())
            return file.tell() == remote.size and digest.hexdigest() == remote.digest

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            end = time.monotonic() + seconds
            while not self._closed and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            if self._closed:
                raise _Closed


def _is_sound(path: Path, remote: RemoteFile) -> bool:
    """Whether a file is what the Hub says it is."""
    digest = remote.hasher()
    with explained(path, "read"), path.open("rb") as file:
        while data := file.read(PIECE):
            digest.update(data)
        return file.tell() == remote.size and digest.hexdigest() == remote.digest


class _Piece(threading.Thread):
    """A part of a file on its way; a thread that nobody waits for when the program ends, unlike a pool's."""

    def __init__(self, read: Callable[[int], bytes], offset: int) -> None:
        super().__init__(name="openquant-fetch", daemon=True)
        self.read = read
        self.offset = offset
        self.data = b""
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.data = self.read(self.offset)
        except BaseException as error:
            self.error = error

    def wait(self) -> bytes:
        """Its bytes, once they are here."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.data


class _Closed(Exception):
    """Nobody waits for these shards any more."""

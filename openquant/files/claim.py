"""An output directory claimed for one run: whose it is, what an earlier run has finished in it, and the lock.

    with Claim(Path("out"), contents, overwrite=False) as claim:
        claim.directory.write("config.json", data)
        claim.finish()

The journal, `.openquant.json`, names the plan's digest and every file the run writes. Running again with the same
digest continues; anything else is refused. A finished directory keeps the journal and loses `.openquant/`.

What an output holds may be somebody else's, the journal included: names in it that no run of ours would write are
refused, and so are links where our files lie (folder.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .atomic import make_directory
from .folder import Folder
from .journal import (
    ELSEWHERE,
    FORMAT,
    LOCK,
    PUSHED,
    SOURCE,
    WORK,
    Provenance,
    foreign_files,
    is_sound_work,
    is_work,
    journal_in,
    output_errors,
)
from .names import EVALUATION_FILES
from .names import JOURNAL_FILE as JOURNAL
from .output import REPLACE, OutputDirectory
from .space import existing_parent, require_space


@dataclass(frozen=True)
class OutputContents:
    """What a run will leave in its output directory.

    Attributes:
        digest: of the plan.
        shards: bytes of tensors in every shard, by name; the files are larger by a header.
        others: size in bytes of every other file, by name relative to the directory.
        provenance: how it was asked for.
        at_once: how many shards will be there at a time; None for all of them.
        scratch: bytes of other files that will be there for a while.
    """

    digest: str
    shards: Mapping[str, int]
    others: Mapping[str, int]
    provenance: Provenance = field(default_factory=Provenance)
    at_once: int | None = None
    scratch: int = 0

    @cached_property
    def files(self) -> dict[str, int]:
        """Bytes of every file, by name; of shards those of their tensors."""
        return {**self.others, **self.shards}

    def needed(self, missing: Sequence[str], fetched: int) -> int:
        """Bytes of disk that files take with what is there for a while.

        Args:
            missing: the names of the files.
            fetched: how many bytes of what is there for a while are there already.
        """
        shards = sorted((self.files[name] for name in missing if name in self.shards), reverse=True)
        needed = sum(self.files[name] for name in missing if name not in self.shards)
        return needed + sum(shards[: self.at_once]) + (max(0, self.scratch - fetched) if shards else 0)

    def journal(self, sources: Mapping[str, object], done: bool) -> bytes:
        """The journal of a run.

        Args:
            sources: what every file of the source looks like.
            done: whether all files are there.
        """
        files = sorted(self.files)
        looks = dict(sorted(sources.items()))
        record = {"format": FORMAT, "digest": self.digest, "done": done, "files": files, "sources": looks}
        if self.provenance.recipe is not None:
            record["recipe"] = self.provenance.recipe
        if self.provenance.entry is not None:
            record["entry"] = self.provenance.entry
        return (json.dumps(record, indent=1) + "\n").encode()


class Claim:
    """The claim of a run on its output directory; use as a context manager, which holds the lock.

    Args:
        path: the directory; made if missing.
        contents: what the run will leave there.
        overwrite: discard what an earlier run of ours left there.
        elsewhere: gives the shards that are finished although they are not there.
        sources: gives what every file of the source looks like: its digest, or a list of sizes and times. These may
            change though the bytes do not.

    Attributes:
        directory: where files are written, open while it is claimed.
        contents: what the run will leave there.
        resumed: whether an earlier run's work is continued, or already complete.
        complete: whether an earlier run finished and all it wrote is still there; then nothing is locked or written,
            unless the source moved.
        moved: files of the source that look unlike what an earlier run was made from.
    """

    def __init__(
        self,
        path: Path,
        contents: OutputContents,
        overwrite: bool,
        elsewhere: Callable[[], Set[str]] = frozenset,
        sources: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.directory = OutputDirectory(path, contents.digest)
        self.contents = contents
        self.resumed = False
        self.complete = False
        self.moved: Set[str] = frozenset()
        self._path = path
        self._overwrite = overwrite
        self._find_elsewhere = elsewhere
        self._elsewhere: Set[str] = frozenset()
        self._look = sources
        self._lock: _Lock | None = None
        self._made = False

    @cached_property
    def sources(self) -> Mapping[str, object]:
        """What the files of the source look like; read when first asked for, which may take long."""
        return self._look()

    def __enter__(self) -> Claim:
        path, directory = self._path, self.directory
        try:
            with output_errors(path, "read"):
                self._made = not path.exists() and not path.is_symlink()
                if not self._made:
                    _open(directory)
                    if self._is_complete(self._inspect()) and not self.moved:
                        return self
            with output_errors(path):
                if self._made:
                    make_directory(path)
                    directory.open()
                directory.folder.make(WORK)
            self._take_lock()
            # Another run may have finished or begun between the first look and the lock.
            journal = self._inspect()
            if self._is_complete(journal) and not self.moved:
                return self
            _sweep(directory.folder)
            needed, freed = self._needed(journal["files"] if journal and self._overwrite else ())
            require_space([(path, needed)], freed)
            if journal and self._overwrite:
                _discard(directory.folder, journal)
                self._elsewhere = frozenset()
                journal = None
            self.resumed = journal is not None
            if journal is None:
                directory.write(JOURNAL, self.contents.journal(self.sources, done=False))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let a rank that is not the first write there too, once the first one has claimed the directory."""
        try:
            with output_errors(self._path):
                self.directory.open()
            yield
        finally:
            self.directory.close()

    def is_finished(self, name: str) -> bool:
        """Whether a file of this run stands under its final name; a shard not without its tensors."""
        if name in self._elsewhere:
            return True
        found = self.directory.folder.stat(name)
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_size > self.contents.shards.get(name, -1)

    def finish(self) -> None:
        """Record that everything is there, and drop what it was made from."""
        folder = self.directory.folder
        with output_errors(self._path / WORK, "removed"):
            for name in folder.names(WORK):
                if name.startswith(SOURCE):
                    folder.remove_folder(f"{WORK}/{name}")
        self.directory.write(JOURNAL, self.contents.journal(self.sources, done=True))

    def renew(self) -> None:
        """Record what the source looks like now: what is finished is what it makes."""
        journal = journal_in(self.directory.folder)
        done = journal is not None and journal["done"]
        self.directory.write(JOURNAL, self.contents.journal(self.sources, done))
        self.moved = frozenset()

    def missing_bytes(self) -> int:
        """Bytes of disk that the run has still to write there, less what it discards first; nothing is written.

        Raises:
            OutputError: the directory could not be claimed: it is not a run's, is that of a run with other options, or
                cannot be written to. The digest, which may not be final yet, is not looked at.
        """
        path, exists = self._path, False
        try:
            with output_errors(path, "read"):
                exists = path.exists() or path.is_symlink()
                if exists:
                    _open(self.directory)
            with output_errors(path):
                place = existing_parent(path)
                if not place.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                if not os.access(place, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if not exists:
                return self.contents.needed(list(self.contents.files), 0)
            journal, found = _earlier_files(self.directory.folder, self.contents.files, self._overwrite)
            if journal and not self._overwrite and any(not is_work(name) for name, _ in found):
                recipes = (journal.get("recipe") or {}, self.contents.provenance.recipe or {})
                before, now = (recipe.get("options") for recipe in recipes)
                if before is not None and before != now:
                    raise _another_run(path)
            needed, freed = self._needed(journal["files"] if journal and self._overwrite else ())
            return max(0, needed - freed)
        finally:
            self.directory.close()

    def _is_complete(self, journal: dict[str, Any] | None) -> bool:
        done = journal is not None and journal["done"] and not self._overwrite
        self.complete = done and all(self.is_finished(name) for name in self.contents.files)
        if self.complete:
            self.resumed = True
            # What a run left that was killed at its very end; a read-only directory may keep it.
            if self._lock is None and self.directory.folder.stat(WORK) is not None:
                with suppress(OutputError):
                    self._take_lock()
                    self._let_go()
        return self.complete

    def _inspect(self) -> dict[str, Any] | None:
        """The journal of an earlier run that may be continued or overwritten; None for a fresh directory.

        Raises:
            OutputError: the directory holds something else.
        """
        journal, found = _earlier_files(self.directory.folder, self.contents.files, self._overwrite)
        if journal is None:
            return None
        if not self._overwrite:
            made_from = journal.get("sources", {})
            self.moved = {name for name, look in self.sources.items() if made_from.get(name) != look}
        # Not before now: its records lie here. What is elsewhere cannot be held against a source that moved.
        self._elsewhere = frozenset() if self.moved else self._find_elsewhere()
        present = {name for name, mode in found if not stat.S_ISDIR(mode) and not is_work(name)}
        if not present and not self._elsewhere:
            return None
        if self._overwrite:
            return journal
        if journal["digest"] != self.contents.digest:
            raise _another_run(self._path)
        foreign = present - {*journal["files"], *EVALUATION_FILES}
        if foreign and not journal["done"]:
            raise OutputError(
                f"{self._path} holds {min(foreign)}, which this run did not write",
                "move it away, or choose another directory with -o",
            )
        return journal

    def _needed(self, discarded: Iterable[str]) -> tuple[int, int]:
        """Bytes that are still to be written, and bytes of what will be discarded first."""
        folder = self.directory.folder
        with output_errors(self._path, "examined"):
            gone = {name: found.st_size for name in discarded if (found := folder.stat(name)) is not None}
            missing = [name for name in self.contents.files if name in gone or not self.is_finished(name)]
            fetched = sum(what.st_blocks * 512 for name, what in folder.walk() if name.startswith(f"{WORK}/{SOURCE}"))
        return self.contents.needed(missing, fetched), sum(gone.values())

    def _take_lock(self) -> None:
        with output_errors(self._path / LOCK):
            self._lock = lock = _Lock(self.directory.folder)
            if lock.take():
                return
        # What lies there is that of the run that holds it.
        self._lock = None
        lock.release()
        raise OutputError(f"another run is writing to {self._path}", "wait for it, or choose another directory with -o")

    def _let_go(self) -> None:
        """Remove what is half-written, and all trace of a run that wrote nothing; release the lock."""
        if self._lock is None:
            return
        folder = self.directory.folder
        with suppress(OSError):
            _sweep(folder)
            folder.remove(LOCK)
            # Not empty where another run just put its own lock there.
            (self._path / WORK).rmdir()
            if self._made and set(folder.names()) <= {JOURNAL}:
                folder.remove(JOURNAL)
                self._path.rmdir()
        self._lock.release()
        self._lock = None

    def _release(self) -> None:
        self._let_go()
        self.directory.close()


class _Lock:
    """The lock of a directory, which one run at a time holds until it is released or the process ends.

    Args:
        folder: the directory, in which WORK is there.

    Raises:
        OSError: its file cannot be opened.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._handle = folder.open(LOCK, os.O_RDWR | os.O_CREAT)

    def take(self) -> bool:
        """Take it, unless another run holds it. Returns whether this one does.

        Raises:
            OutputError: the file system has no locks.
        """
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise OutputError(
                f"{self.folder.path} cannot be locked: {error.strerror}: its file system does not let programs lock "
                "files",
                "mount it with locks (Lustre: its option flock), or choose another disk with -o",
            ) from None
        # A run that finished in between removed the file we locked.
        there = self.folder.stat(LOCK)
        return there is not None and os.path.samestat(os.fstat(self._handle), there)

    def release(self) -> None:
        """Let another run have it."""
        os.close(self._handle)


def _open(directory: OutputDirectory) -> None:
    """Open a directory that exists.

    Raises:
        OutputError: it is something else.
    """
    if not directory.path.is_dir():
        raise OutputError(f"{directory.path} exists and is not a directory", ELSEWHERE)
    directory.open()


def _another_run(path: Path) -> OutputError:
    return OutputError(
        f"{path} holds the output of another run: other options, another source or another version", REPLACE
    )


def _earlier_files(
    folder: Folder, files: Iterable[str], overwrite: bool
) -> tuple[dict[str, Any] | None, list[tuple[str, int]]]:
    """The journal of an earlier run, None for a fresh directory; and names and modes of what else is there.

    Args:
        folder: the directory.
        files: the names that this run will write.
        overwrite: whether it discards what an earlier run left.

    Raises:
        OutputError: the directory holds something else.
    """
    journal = journal_in(folder)
    if journal is None:
        with output_errors(folder.path, "read"):
            strange = next(foreign_files(folder), None)
        if strange is not None:
            raise OutputError(
                f"{folder.path} is not empty and was not made by openquant: it holds {strange}",
                "choose another directory with -o, or empty this one yourself",
            )
        return None, []
    with output_errors(folder.path, "read"):
        found = [(name, what.st_mode) for name, what in folder.walk() if name != JOURNAL]
    # An evaluation comes later, and says nothing any more of what is overwritten.
    ours = {*journal["files"], *EVALUATION_FILES}
    written = ours.union(files)
    below = sorted(written)

    def is_in_the_way(name: str, mode: int) -> bool:
        if is_work(name):
            return not is_sound_work(name, mode)
        if stat.S_ISDIR(mode):
            return name in written
        if stat.S_ISREG(mode) and name in ours:
            return False
        # A linked directory would lead our files to somebody else's.
        first = bisect_left(below, f"{name}/")
        return (
            name in written
            or any(other.startswith(f"{name}/") for other in below[first : first + 1])
            or (overwrite and name.endswith((".safetensors", ".index.json")))
        )

    clash = [name for name, mode in found if is_in_the_way(name, mode)]
    if clash:
        raise OutputError(
            f"{folder.path / min(clash)} was not made by openquant and will not be overwritten",
            "move it away, or choose another directory with -o",
        )
    return journal, found


def _discard(folder: Folder, journal: dict[str, Any]) -> None:
    """Remove what an earlier run wrote: first what makes the directory look like a model, the journal last."""
    with output_errors(folder.path / WORK / PUSHED, "removed"):
        folder.remove_folder(f"{WORK}/{PUSHED}")
    names = sorted(journal["files"], key=lambda name: (name != "config.json", not name.endswith(".json"), name))
    for name in [*names, *EVALUATION_FILES, JOURNAL]:
        with output_errors(folder.path / name, "removed"):
            folder.remove(name)


def _sweep(folder: Folder) -> None:
    """Remove what an interrupted run left half-written."""
    for name in folder.names(WORK):
        if name.endswith(".partial"):
            with output_errors(folder.path / WORK / name, "removed"):
                folder.remove(f"{WORK}/{name}")

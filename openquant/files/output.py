"""The output directory: whose it is, what is finished in it, and how a file gets its final name.

`.openquant.json`, the journal, names the plan's digest and every file the run writes. Files are written under
`.openquant/` and renamed when they are whole and on disk, so a final name means a finished file, whenever the
process or the machine died. Running again with the same digest continues; anything else is refused. A finished
directory keeps the journal and loses `.openquant/`.

What an output holds may be somebody else's, the journal included: names in it that no run of ours would write are
refused, and so are links where our files lie (files/folder.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

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
    foreign_files,
    is_sound_work,
    is_work,
    journal_in,
    output_errors,
    short_name,
)
from .names import EVALUATION_FILES
from .names import JOURNAL_FILE as JOURNAL
from .small_files import open_regular
from .space import existing_parent, require_space

REPLACE = "choose another directory with -o, or replace that output with --overwrite"


class OutputDirectory:
    """A directory claimed for one run; use as a context manager, which holds the lock.

    Args:
        path: the directory; made if missing.
        digest: of the plan.
        shards: bytes of tensors in every shard the run will leave there, by name; the files are larger by a header.
        others: size in bytes of every other file it will leave there, by name relative to path.
        overwrite: discard what an earlier run of ours left there.
        elsewhere: gives the shards that are finished although they are not there.
        at_once: how many shards will be there at a time, if not all of them.
        scratch: bytes of other files that will be there for a while.
        sources: gives what every file of the source looks like: its digest, or a list of sizes and times. These may
            change though the bytes do not.
        recipe: the options that all was asked for with; None where that is of no use.
        entry: what it was planned by where the registry has nothing; None otherwise.

    Attributes:
        resumed: whether an earlier run's work is continued, or already complete.
        complete: whether an earlier run finished and all it wrote is still there; then nothing is locked or written,
            unless the source moved.
        moved: files of the source that look unlike what an earlier run was made from.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        shards: dict[str, int],
        others: dict[str, int],
        overwrite: bool,
        elsewhere: Callable[[], Set[str]] = frozenset,
        at_once: int | None = None,
        scratch: int = 0,
        sources: Callable[[], Mapping[str, object]] = dict,
        recipe: Mapping[str, object] | None = None,
        entry: Mapping[str, object] | None = None,
    ) -> None:
        self.path = path
        self.digest = digest
        self.shards = shards
        self.files = {**others, **shards}
        self.overwrite = overwrite
        self._elsewhere = elsewhere
        self.elsewhere: Set[str] = frozenset()
        self.at_once = at_once
        self.scratch = scratch
        self._look = sources
        self.recipe = recipe
        self.entry = entry
        self.resumed = False
        self.complete = False
        self.moved: Set[str] = frozenset()
        # Ranks of a run whose first one died may still be writing when the next run does.
        self._process = secrets.token_hex(4)
        self._folder: Folder | None = None
        # Inode and time of the journal that was last seen to be this run's.
        self._own: tuple[int, int] | None = None
        self._lock = -1
        self._made = False

    @cached_property
    def sources(self) -> Mapping[str, object]:
        """What the files of the source look like; read when first asked for, which may take long."""
        return self._look()

    def __enter__(self) -> OutputDirectory:
        try:
            with output_errors(self.path, "read"):
                self._made = not self.path.exists() and not self.path.is_symlink()
                if not self._made:
                    if not self.path.is_dir():
                        raise OutputError(f"{self.path} exists and is not a directory", ELSEWHERE)
                    self._folder = Folder(self.path)
                    if self._is_complete(self._inspect()) and not self.moved:
                        return self
            with output_errors(self.path):
                if self._made:
                    make_directory(self.path)
                    self._folder = Folder(self.path)
                self.folder.make(WORK)
            self._take_lock()
            # Another run may have finished or begun between the first look and the lock.
            journal = self._inspect()
            if self._is_complete(journal) and not self.moved:
                return self
            self._sweep()
            self._require_space(journal["files"] if journal and self.overwrite else ())
            if journal and self.overwrite:
                self._discard(journal)
                journal = None
            self.resumed = journal is not None
            if journal is None:
                self.write(JOURNAL, self._journal(done=False))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    def missing_bytes(self) -> int:
        """Bytes of disk that the run has still to write there, less what it discards first; nothing is written.

        Raises:
            OutputError: the directory could not be claimed: it is not a run's, is that of a run with other options, or
                cannot be written to. The digest, which may not be final yet, is not looked at.
        """
        try:
            with output_errors(self.path, "read"):
                if self.path.exists() or self.path.is_symlink():
                    if not self.path.is_dir():
                        raise OutputError(f"{self.path} exists and is not a directory", ELSEWHERE)
                    self._folder = Folder(self.path)
            with output_errors(self.path):
                place = existing_parent(self.path)
                if not place.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                if not os.access(place, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if self._folder is None:
                return self._needed(())[0]
            journal, found = self._own_files()
            if journal and not self.overwrite and any(not is_work(name) for name, _ in found):
                before, now = (recipe.get("options") for recipe in (journal.get("recipe") or {}, self.recipe or {}))
                if before is not None and before != now:
                    raise self._another_run()
            needed, freed = self._needed(journal["files"] if journal and self.overwrite else ())
            return max(0, needed - freed)
        finally:
            self._close()
            self._folder = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let a rank that is not the first write there too, once the first one has claimed the directory."""
        try:
            with output_errors(self.path):
                self._folder = Folder(self.path)
            yield
        finally:
            self._close()

    @property
    def folder(self) -> Folder:
        """The directory, open once it is claimed."""
        assert self._folder is not None, "not claimed"
        return self._folder

    def is_finished(self, name: str) -> bool:
        """Whether a file of this run stands under its final name; a shard not without its tensors."""
        if name in self.elsewhere:
            return True
        found = self.folder.stat(name)
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_size > self.shards.get(name, -1)

    def _is_complete(self, journal: dict[str, Any] | None) -> bool:
        done = journal is not None and journal["done"] and not self.overwrite
        self.complete = done and all(self.is_finished(name) for name in self.files)
        if self.complete:
            self.resumed = True
            # What a run left that was killed at its very end; a read-only directory may keep it.
            if self._lock < 0 and self.folder.stat(WORK) is not None:
                with suppress(OutputError):
                    self._take_lock()
                    self._let_go()
        return self.complete

    def partial(self, name: str) -> str:
        """Where a file is written before it gets its final name, relative to the directory; no two processes write to
        the same place.
        """
        return f"{WORK}/{short_name(name)}.{self._process}.partial"

    def make_scratch(self, rank: int) -> Path:
        """A directory for source shards that are only here for a while."""
        name = f"{WORK}/{SOURCE}{rank}"
        with output_errors(self.path / name):
            self.folder.make(name)
        return self.path / name

    def publish(self, name: str) -> None:
        """Give a written file its final name, once its bytes are on disk.

        Raises:
            OutputError: another run has claimed the directory since, or the file cannot be renamed.
        """
        target = self.path / name
        with output_errors(target):
            found = None if name == JOURNAL else self.folder.stat(JOURNAL)
        # It is never changed, only replaced; reading it for each of thousands of files takes minutes.
        seen = found and (found.st_ino, found.st_ctime_ns)
        if seen is not None and seen != self._own:
            journal = self._read_journal()
            if journal is not None and journal["digest"] != self.digest:
                raise OutputError(
                    f"{target} was not finished: another run has claimed {self.path}",
                    "let one run at a time write there",
                )
            self._own = seen
        with output_errors(target):
            self.folder.rename(self.partial(name), name)

    @contextmanager
    def _writing(self, name: str) -> Iterator[BinaryIO]:
        """A file to be filled, which gets its final name once all of it is on disk."""
        with output_errors(self.path / name):
            handle = self.folder.open(self.partial(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        self.publish(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        with self._writing(name) as file:
            file.write(data)

    def copy(self, source: Path, name: str) -> None:
        """Copy a file's contents (of a link, what it points to)."""
        try:
            reader = open_regular(source, str(source))
        except OSError as error:
            raise OutputError(
                f"{source} cannot be read: {error.strerror}", "check the file and its permissions"
            ) from None
        with reader, self._writing(name) as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)

    def finish(self) -> None:
        """Record that everything is there, and drop what it was made from."""
        with output_errors(self.path / WORK, "removed"):
            for name in self.folder.names(WORK):
                if name.startswith(SOURCE):
                    self.folder.remove_folder(f"{WORK}/{name}")
        self.write(JOURNAL, self._journal(done=True))

    def renew(self) -> None:
        """Record what the source looks like now: what is finished is what it makes."""
        journal = self._read_journal()
        self.write(JOURNAL, self._journal(done=journal is not None and journal["done"]))
        self.moved = frozenset()

    def _journal(self, done: bool) -> bytes:
        files, sources = sorted(self.files), dict(sorted(self.sources.items()))
        record = {"format": FORMAT, "digest": self.digest, "done": done, "files": files, "sources": sources}
        if self.recipe is not None:
            record["recipe"] = self.recipe
        if self.entry is not None:
            record["entry"] = self.entry
        return (json.dumps(record, indent=1) + "\n").encode()

    def _read_journal(self) -> dict[str, Any] | None:
        return journal_in(self.folder)

    def _own_files(self) -> tuple[dict[str, Any] | None, list[tuple[str, int]]]:
        """The journal of an earlier run, None for a fresh directory; and names and modes of what else is there.

        Raises:
            OutputError: the directory holds something else.
        """
        journal = self._read_journal()
        if journal is None:
            with output_errors(self.path, "read"):
                strange = next(foreign_files(self.folder), None)
            if strange is not None:
                raise OutputError(
                    f"{self.path} is not empty and was not made by openquant: it holds {strange}",
                    "choose another directory with -o, or empty this one yourself",
                )
            return None, []
        with output_errors(self.path, "read"):
            found = [(name, what.st_mode) for name, what in self.folder.walk() if name != JOURNAL]
        # An evaluation comes later, and says nothing any more of what is overwritten.
        ours = {*journal["files"], *EVALUATION_FILES}
        written = ours | self.files.keys()
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
                or (self.overwrite and name.endswith((".safetensors", ".index.json")))
            )

        clash = [name for name, mode in found if is_in_the_way(name, mode)]
        if clash:
            raise OutputError(
                f"{self.path / min(clash)} was not made by openquant and will not be overwritten",
                "move it away, or choose another directory with -o",
            )
        return journal, found

    def _inspect(self) -> dict[str, Any] | None:
        """The journal of an earlier run that may be continued or overwritten; None for a fresh directory.

        Raises:
            OutputError: the directory holds something else.
        """
        journal, found = self._own_files()
        if journal is None:
            return None
        if not self.overwrite:
            made_from = journal.get("sources", {})
            self.moved = {name for name, look in self.sources.items() if made_from.get(name) != look}
        # Not before now: its records lie here. What is elsewhere cannot be held against a source that moved.
        self.elsewhere = frozenset() if self.moved else self._elsewhere()
        present = {name for name, mode in found if not stat.S_ISDIR(mode) and not is_work(name)}
        if not present and not self.elsewhere:
            return None
        if self.overwrite:
            return journal
        if journal["digest"] != self.digest:
            raise self._another_run()
        foreign = present - {*journal["files"], *EVALUATION_FILES}
        if foreign and not journal["done"]:
            raise OutputError(
                f"{self.path} holds {min(foreign)}, which this run did not write",
                "move it away, or choose another directory with -o",
            )
        return journal

    def _another_run(self) -> OutputError:
        return OutputError(
            f"{self.path} holds the output of another run: other options, another source or another version", REPLACE
        )

    def _take_lock(self) -> None:
        with output_errors(self.path / LOCK):
            self._lock = self.folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = True
            except OSError as error:
                raise OutputError(
                    f"{self.path} cannot be locked: {error.strerror}: its file system does not let programs lock files",
                    "mount it with locks (Lustre: its option flock), or choose another disk with -o",
                ) from None
            else:
                # A run that finished in between removed the file we locked.
                there = self.folder.stat(LOCK)
                held = there is None or not os.path.samestat(os.fstat(self._lock), there)
        if held:
            os.close(self._lock)
            self._lock = -1
            raise OutputError(
                f"another run is writing to {self.path}", "wait for it, or choose another directory with -o"
            )

    def _let_go(self) -> None:
        """Remove what is half-written, and all trace of a run that wrote nothing; release the lock."""
        if self._lock < 0:
            return
        with suppress(OSError):
            self._sweep()
            self.folder.remove(LOCK)
            # Not empty where another run just put its own lock there.
            (self.path / WORK).rmdir()
            if self._made and set(self.folder.names()) <= {JOURNAL}:
                self.folder.remove(JOURNAL)
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1

    def _close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _release(self) -> None:
        self._let_go()
        self._close()

    def _require_space(self, discarded: Iterable[str]) -> None:
        """Refuse to start what the disk cannot hold, counting what will be discarded first as free."""
        needed, freed = self._needed(discarded)
        require_space([(self.path, needed)], freed)

    def _needed(self, discarded: Iterable[str]) -> tuple[int, int]:
        """Bytes that are still to be written, and bytes of what will be discarded first."""
        if self._folder is None:
            return self._bytes_of(list(self.files), 0), 0
        with output_errors(self.path, "examined"):
            gone = {name: found.st_size for name in discarded if (found := self.folder.stat(name)) is not None}
            missing = [name for name in self.files if name in gone or not self.is_finished(name)]
            fetched = sum(
                what.st_blocks * 512 for name, what in self.folder.walk() if name.startswith(f"{WORK}/{SOURCE}")
            )
        return self._bytes_of(missing, fetched), sum(gone.values())

    def _bytes_of(self, missing: Sequence[str], fetched: int) -> int:
        """Bytes that these files take with what is there for a while, of which so many bytes are there already."""
        shards = sorted((self.files[name] for name in missing if name in self.shards), reverse=True)
        needed = sum(self.files[name] for name in missing if name not in self.shards)
        return needed + sum(shards[: self.at_once]) + (max(0, self.scratch - fetched) if shards else 0)

    def _discard(self, journal: dict[str, Any]) -> None:
        """Remove what an earlier run wrote: first what makes the directory look like a model, the journal last."""
        with output_errors(self.path / WORK / PUSHED, "removed"):
            self.folder.remove_folder(f"{WORK}/{PUSHED}")
        self.elsewhere = frozenset()
        names = sorted(journal["files"], key=lambda name: (name != "config.json", not name.endswith(".json"), name))
        for name in [*names, *EVALUATION_FILES, JOURNAL]:
            with output_errors(self.path / name, "removed"):
                self.folder.remove(name)

    def _sweep(self) -> None:
        """Remove what an interrupted run left half-written."""
        for name in self.folder.names(WORK):
            if name.endswith(".partial"):
                with output_errors(self.path / WORK / name, "removed"):
                    self.folder.remove(f"{WORK}/{name}")


def refuse_root(output: Path) -> None:
    """Refuse the root of the file system as output.

    Raises:
        OutputError: it is.
    """
    # realpath, since Path.resolve() fails on links that lead in a circle.
    real = Path(os.path.realpath(output))
    if real == real.parent:
        raise OutputError(f"the output {output} is the root of the file system", ELSEWHERE)


def refuse_overlap(source: Path, output: Path) -> None:
    """Refuse an output that is the source, lies inside it, or holds it.

    Raises:
        OutputError: it does.
    """
    made, given = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if made == given:
        where = "is the source itself"
    elif given in made.parents:
        where = f"lies inside the source {source}"
    elif made in given.parents:
        where = f"holds the source {source}"
    else:
        return
    raise OutputError(f"the output {output} {where}", ELSEWHERE)

"""A run's claim on its output directory: the lock, whose directory it is, and what an earlier run has finished there.

    with Claim(Path("out"), contents, overwrite=False) as claim:
        claim.directory.write("config.json", data)
        claim.finish()

The journal, `.openquant.json`, names the plan's digest and all files that the run writes. A run with the same digest
continues; others are refused. A finished directory keeps the journal, and `.openquant/` is removed.

Somebody else may have written the files there, the journal included: names that no run of ours would write, and links
in place of our files, are refused (folder.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .destination import make_directory
from .folder import Folder
from .journal import (
    ELSEWHERE,
    FORMAT,
    LOCK,
    PUSHED,
    SOURCE,
    WORK,
    Provenance,
    WeightFacts,
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
    """The files that a run will write to its output directory.

    Attributes:
        digest: digest of the plan.
        shards: bytes of tensors in each shard, by file name; the file also has a header.
        others: size of each other file in bytes, by path relative to the directory.
        provenance: options, for the journal.
        facts: what the run does to weights, for the journal.
        at_once: number of shards on disk at a time; None for all.
        scratch: bytes of temporary files.
    """

    digest: str
    shards: Mapping[str, int]
    others: Mapping[str, int]
    provenance: Provenance = field(default_factory=Provenance)
    facts: WeightFacts = field(default_factory=WeightFacts)
    at_once: int | None = None
    scratch: int = 0

    @cached_property
    def files(self) -> dict[str, int]:
        """Size of each file in bytes, by name; of shards only their tensors."""
        return {**self.others, **self.shards}

    def needed(self, missing: Sequence[str], fetched: int) -> int:
        """Return the bytes of disk that a run still needs, temporary files included.

        Args:
            missing: names of the files that are not written yet.
            fetched: bytes of temporary files that are already there.
        """
        shards = sorted((self.files[name] for name in missing if name in self.shards), reverse=True)
        needed = sum(self.files[name] for name in missing if name not in self.shards)
        return needed + sum(shards[: self.at_once]) + (max(0, self.scratch - fetched) if shards else 0)

    def journal(self, sources: Mapping[str, object], done: bool) -> bytes:
        """Return the bytes of the run's journal.

        Args:
            sources: stamp or digest of each file of the source, by name.
            done: whether all files are written.
        """
        record: dict[str, object] = {
            "format": FORMAT,
            "digest": self.digest,
            "done": done,
            "files": sorted(self.files),
            "sources": dict(sorted(sources.items())),
            "weights": {**self.facts._asdict(), "static_scales": dict(self.facts.static_scales)},
        }
        if self.provenance.recipe is not None:
            record["recipe"] = self.provenance.recipe
        if self.provenance.copy:
            record["copy"] = list(self.provenance.copy)
        return (json.dumps(record, indent=1) + "\n").encode()


class Claim:
    """A run's claim on its output directory; a context manager that holds the lock.

    At its end the directory's unfinished files are removed, and the directory itself if the run has made it and
    finished nothing.

    Args:
        path: the directory; made if missing.
        contents: the files that the run will write.
        overwrite: whether to remove the output of an earlier run.
        elsewhere: returns names of shards that are finished but no longer in the directory, because they are uploaded.
        sources: returns the digest, or the stamp (size and times), of each file of the source. A stamp may change
            although the bytes are the same.

    Attributes:
        directory: the output directory, open while it is claimed.
        contents: the files that the run will write.
        resumed: whether the work of an earlier run is continued, or is already complete.
        complete: whether an earlier run finished and all its files are still there. Then nothing is locked or written,
            unless `changed_sources` is not empty.
        changed_sources: files of the source whose digest or stamp differs from the earlier run's journal.

    Raises:
        OutputError: while entering: the directory has other files or the output of another run, another run is writing
            there, it cannot be written, or its disk has too little room.
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
        self.changed_sources: Set[str] = frozenset()
        self._path = path
        self._overwrite = overwrite
        self._find_elsewhere = elsewhere
        self._elsewhere: Set[str] = frozenset()
        self._find_sources = sources
        self._lock: _Lock | None = None
        self._created = False

    @cached_property
    def sources(self) -> Mapping[str, object]:
        """Digest or stamp of each file of the source, by name; found at first use, which may take long."""
        return self._find_sources()

    def __enter__(self) -> Claim:
        path, directory = self._path, self.directory
        try:
            with output_errors(path, "read"):
                self._created = not path.exists() and not path.is_symlink()
                if not self._created:
                    _open(directory)
                    if self._is_complete(self._inspect()) and not self.changed_sources:
                        return self
            with output_errors(path):
                if self._created:
                    make_directory(path)
                    directory.open()
                directory.folder.make(WORK)
            self._take_lock()
            # Another run may have finished or begun between the first look and the lock.
            journal = self._inspect()
            if self._is_complete(journal) and not self.changed_sources:
                return self
            _sweep(directory.folder)
            needed, freed = self._needed(journal)
            require_space([(path, needed)], freed)
            if journal and self._overwrite:
                _discard(directory.folder, journal)
                self._elsewhere = frozenset()
                journal = None
            self.resumed = journal is not None or bool(self._elsewhere)
            if journal is None:
                self._write_journal(done=False)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    @contextmanager
    def opened_directory(self) -> Iterator[None]:
        """Open the directory for another rank, once the first rank has claimed it."""
        try:
            with output_errors(self._path):
                self.directory.open()
            yield
        finally:
            self.directory.close()

    def is_finished(self, name: str) -> bool:
        """Return whether a file of the claimed directory is finished.

        It is if it has its final name and, as a shard, the size that its header and the plan say; other files, which
        people change, only must not be empty. A shard that is uploaded counts as finished too (`elsewhere`).

        Args:
            name: path of the file, relative to the directory.
        """
        if name in self._elsewhere:
            return True
        status = self.directory.folder.stat(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        tensors = self.contents.shards.get(name)
        if tensors is None:
            return status.st_size > 0 or not self.contents.others.get(name)
        with os.fdopen(self.directory.folder.open(name, os.O_RDONLY), "rb") as file:
            # A safetensors file: the header's length in eight bytes, the header, the tensors.
            header = int.from_bytes(file.read(8), "little")
        return status.st_size == 8 + header + tensors

    def finish(self) -> None:
        """Record in the journal that all files are written, and remove downloaded source shards."""
        folder = self.directory.folder
        with output_errors(self._path / WORK, "removed"):
            for name in folder.names(WORK):
                if name.startswith(SOURCE):
                    shutil.rmtree(self._path / WORK / name)
        self._write_journal(done=True)

    def renew(self) -> None:
        """Record the current stamps of the source, once finished shards are known to be what it gives."""
        journal = journal_in(self.directory.folder)
        self._write_journal(done=journal is not None and journal["done"])
        self.changed_sources = frozenset()

    def _write_journal(self, done: bool) -> None:
        self.directory.write(JOURNAL, self.contents.journal(self.sources, done))

    def missing_bytes(self, final: bool) -> int:
        """Return the bytes of disk that the run still needs, less those that it frees first. Nothing is written.

        Args:
            final: whether the plan's digest is final. Before a calibration it is not, and options are compared instead.

        Raises:
            OutputError: the directory could not be claimed: it is not an output, is that of another run, or cannot be
                written to.
        """
        path, exists = self._path, False
        try:
            with output_errors(path, "read"):
                exists = path.exists() or path.is_symlink()
                if exists:
                    _open(self.directory)
            with output_errors(path):
                parent = existing_parent(path)
                if not parent.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                if not os.access(parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if not self._overwrite:
                self._elsewhere = self._find_elsewhere()
            if not exists:
                return self.contents.needed([name for name in self.contents.files if name not in self._elsewhere], 0)
            journal, modes = _earlier_files(self.directory.folder, self.contents.files, self._overwrite)
            begun = bool(self._elsewhere) or any(not is_work(name) for name, _ in modes)
            if journal and not self._overwrite and begun:
                recipes = (journal.get("recipe") or {}, self.contents.provenance.recipe or {})
                earlier_options, options = (recipe.get("options") for recipe in recipes)
                differs = earlier_options is not None and earlier_options != options
                if journal["digest"] != self.contents.digest if final else differs:
                    raise _another_run(path)
            needed, freed = self._needed(journal)
            return max(0, needed - freed)
        finally:
            self.directory.close()

    def _is_complete(self, journal: dict[str, Any] | None) -> bool:
        done = journal is not None and journal["done"] and not self._overwrite
        self.complete = done and all(self.is_finished(name) for name in self.contents.files)
        if self.complete:
            self.resumed = True
            # Clean up after a run that was killed at its very end, unless the directory is read-only.
            if self._lock is None and self.directory.folder.stat(WORK) is not None:
                with suppress(OutputError):
                    self._take_lock()
                    self._unlock()
        return self.complete

    def _inspect(self) -> dict[str, Any] | None:
        """Return the journal of an earlier run that is continued or overwritten; None for a new directory.

        Raises:
            OutputError: the directory has other files, or the output of another run.
        """
        journal, modes = _earlier_files(self.directory.folder, self.contents.files, self._overwrite)
        if journal is None:
            # Another machine may have uploaded shards.
            self._elsewhere = frozenset() if self._overwrite else self._find_elsewhere()
            return None
        if not self._overwrite:
            recorded = journal.get("sources", {})
            self.changed_sources = {name for name, stamp in self.sources.items() if recorded.get(name) != stamp}
        # Uploaded shards cannot be compared with a changed source. Their records lie in this directory.
        self._elsewhere = frozenset() if self.changed_sources else self._find_elsewhere()
        present = {name for name, mode in modes if not stat.S_ISDIR(mode) and not is_work(name)}
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

    def _needed(self, journal: dict[str, Any] | None) -> tuple[int, int]:
        """Return the bytes of disk that are still needed, and the bytes that removing earlier files frees.

        Args:
            journal: the journal of an earlier run; with `overwrite` its files are removed.
        """
        folder = self.directory.folder
        discarded = journal["files"] if journal and self._overwrite else ()
        with output_errors(self._path, "examined"):
            freed = {name: status.st_size for name in discarded if (status := folder.stat(name)) is not None}
            missing = [name for name in self.contents.files if name in freed or not self.is_finished(name)]
            source = f"{WORK}/{SOURCE}"
            fetched = sum(status.st_blocks * 512 for name, status in folder.walk() if name.startswith(source))
        return self.contents.needed(missing, fetched), sum(freed.values())

    def _take_lock(self) -> None:
        with output_errors(self._path / LOCK):
            self._lock = lock = _Lock(self.directory.folder)
            if lock.take():
                return
        # The unfinished files are those of the run that has the lock.
        self._lock = None
        lock.release()
        raise OutputError(f"another run is writing to {self._path}", "wait for it, or choose another directory with -o")

    def _unlock(self) -> None:
        """Remove unfinished files, and all traces of a run that wrote nothing; release the lock."""
        if self._lock is None:
            return
        folder = self.directory.folder
        with suppress(OSError):
            _sweep(folder)
            folder.remove(LOCK)
            # Fails if another run has just put its lock there.
            (self._path / WORK).rmdir()
            if self._created and set(folder.names()) <= {JOURNAL}:
                folder.remove(JOURNAL)
                self._path.rmdir()
        self._lock.release()
        self._lock = None

    def _release(self) -> None:
        self._unlock()
        self.directory.close()


class _Lock:
    """The lock of an output directory. One run at a time holds it, until it releases it or its process ends.

    Args:
        folder: the output directory, in which WORK exists.

    Raises:
        OSError: the lock file cannot be opened.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._handle = folder.open(LOCK, os.O_RDWR | os.O_CREAT)

    def take(self) -> bool:
        """Take the lock unless another run holds it. Returns whether this run holds it.

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
        # A run that finished meanwhile may have removed the file that we locked.
        status = self.folder.stat(LOCK)
        return status is not None and os.path.samestat(os.fstat(self._handle), status)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._handle)


def _open(directory: OutputDirectory) -> None:
    """Open an existing output directory.

    Raises:
        OutputError: it is not a directory.
    """
    if not directory.path.is_dir():
        raise OutputError(f"{directory.path} exists and is not a directory", ELSEWHERE)
    directory.open()


def _another_run(path: Path) -> OutputError:
    return OutputError(
        f"{path} holds the output of another run: other options, another source or another version",
        f"{REPLACE}; --recipe {path / JOURNAL} takes its options, which helps if the source has not changed",
    )


def _earlier_files(
    folder: Folder, files: Iterable[str], overwrite: bool
) -> tuple[dict[str, Any] | None, list[tuple[str, int]]]:
    """Read what an earlier run left in a directory.

    Args:
        folder: the directory.
        files: names of the files that this run will write.
        overwrite: whether this run removes the earlier output.

    Returns:
        The journal, None for a new directory; and names and modes of all other files.

    Raises:
        OutputError: files of somebody else lie there.
    """
    journal = journal_in(folder)
    if journal is None:
        with output_errors(folder.path, "read"):
            foreign = next(foreign_files(folder), None)
        if foreign is not None:
            raise OutputError(
                f"{folder.path} is not empty and was not made by openquant: it holds {foreign}",
                "choose another directory with -o, or empty this one yourself",
            )
        return None, []
    with output_errors(folder.path, "read"):
        modes = [(name, status.st_mode) for name, status in folder.walk() if name != JOURNAL]
    # An evaluation of the earlier output is removed with it.
    ours = {*journal["files"], *EVALUATION_FILES}
    written = ours.union(files)
    sorted_names = sorted(written)

    def is_in_the_way(name: str, mode: int) -> bool:
        if is_work(name):
            return not is_sound_work(name, mode)
        if stat.S_ISDIR(mode):
            return name in written
        if stat.S_ISREG(mode) and name in ours:
            return False
        # A file or linked directory where we need a directory.
        first = bisect_left(sorted_names, f"{name}/")
        return (
            name in written
            or any(other.startswith(f"{name}/") for other in sorted_names[first : first + 1])
            or (overwrite and name.endswith((".safetensors", ".index.json")))
        )

    conflicts = [name for name, mode in modes if is_in_the_way(name, mode)]
    if conflicts:
        raise OutputError(
            f"{folder.path / min(conflicts)} was not made by openquant and will not be overwritten",
            "move it away, or choose another directory with -o",
        )
    return journal, modes


def _discard(folder: Folder, journal: dict[str, Any]) -> None:
    """Remove the output of an earlier run: config.json first, so that it is no model any more, the journal last."""
    with output_errors(folder.path / WORK / PUSHED, "removed"):
        folder.remove_folder(f"{WORK}/{PUSHED}")
    names = sorted(journal["files"], key=lambda name: (name != "config.json", not name.endswith(".json"), name))
    for name in [*names, *EVALUATION_FILES, JOURNAL]:
        with output_errors(folder.path / name, "removed"):
            folder.remove(name)


def _sweep(folder: Folder) -> None:
    """Remove the unfinished files of an interrupted run."""
    for name in folder.names(WORK):
        if name.endswith(".partial"):
            with output_errors(folder.path / WORK / name, "removed"):
                folder.remove(f"{WORK}/{name}")

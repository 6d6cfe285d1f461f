"""The output directory of a run: whose it is, what an earlier run has finished, and how its files get their names.

    with Claim(Path("out"), contents, overwrite=False) as claim:
        claim.directory.write("config.json", data)
        claim.finish()

Files are written in `.openquant/`, and renamed when they are complete and on disk. So a file under its final name is
finished, even if the process or the machine died.

The journal, `.openquant.json`, names the plan's digest and all files that the run writes. A run with the same digest
continues; others are refused. A finished directory keeps the journal, and `.openquant/` is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import OutputError
from . import destination
from .model_files import EVALUATION_FILES, open_regular
from .model_files import JOURNAL_FILE as JOURNAL

REPLACE = "choose another directory with -o, or replace that output with --overwrite"
_MOVE = "move it away, or choose another directory with -o"

# What lies in an output directory, by path relative to it.
_Found = dict[str, os.stat_result]


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
    provenance: destination.Provenance = field(default_factory=destination.Provenance)
    facts: destination.WeightFacts = field(default_factory=destination.WeightFacts)
    at_once: int | None = None
    scratch: int = 0

    @cached_property
    def files(self) -> dict[str, int]:
        """Size of each file in bytes, by name; of shards only their tensors."""
        return {**self.others, **self.shards}

    def count_needed(self, missing: Sequence[str], fetched: int) -> int:
        """Return the bytes of disk that a run still needs, temporary files included.

        Args:
            missing: names of the files that are not written yet.
            fetched: bytes of temporary files that are already there.
        """
        shards = sorted((self.files[name] for name in missing if name in self.shards), reverse=True)
        needed = sum(self.files[name] for name in missing if name not in self.shards)
        if not shards:
            return needed
        return needed + sum(shards[: self.at_once]) + max(0, self.scratch - fetched)

    def journal(self, sources: Mapping[str, object], done: bool) -> bytes:
        """Return the bytes of the run's journal.

        Args:
            sources: stamp or digest of each file of the source, by name.
            done: whether all files are written.
        """
        record: dict[str, object] = {
            "format": destination.FORMAT,
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
        if self.provenance.smoothing:
            record["smoothing"] = self.provenance.smoothing
        return (json.dumps(record, indent=1) + "\n").encode()


class OutputDirectory:
    """The output directory of a run that has claimed it.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # In names of unfinished files, because ranks of a dead run may still write while the next run does.
        self._process = secrets.token_hex(4)

    def partial(self, name: str) -> Path:
        """Return the path under which this process writes a file until it is finished."""
        return self.path / destination.WORK / f"{destination.short_name(name)}.{self._process}.partial"

    def make_scratch(self, rank: int) -> Path:
        """Make a directory for source shards that a rank downloads, converts and removes. Returns its path.

        Raises:
            OutputError: it cannot be made.
        """
        path = self.path / destination.WORK / f"{destination.SOURCE}{rank}"
        with destination.output_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, name: str) -> None:
        """Give a finished file its final name. Its bytes must be on disk, under the path that `partial` returns.

        Raises:
            OutputError: the file cannot be renamed.
        """
        target = self.path / name
        with destination.output_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.partial(name), target)

            # The new name is on disk when its directory is.
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @contextmanager
    def _writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing; it gets its final name when the `with` block ends and its bytes are on disk."""
        with destination.output_errors(self.path / name), self.partial(name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.publish(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all; an existing one is replaced.

        Raises:
            OutputError: it cannot be written.
        """
        with self._writing(name) as file:
            file.write(data)

    def copy(self, source: Path, name: str) -> None:
        """Copy a file into the directory, whole or not at all; an existing one is replaced. Links are followed.

        Args:
            source: path of the file.
            name: its new name, relative to the directory.

        Raises:
            OutputError: it cannot be read or written.
            SourceError: it is not a regular file.
        """
        try:
            reader = open_regular(source, str(source))
        except OSError as error:
            raise OutputError(
                f"{source} cannot be read: {error.strerror}", "check the file and its permissions"
            ) from None
        with reader, self._writing(name) as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)


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
        directory: the output directory.
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
        self.directory = OutputDirectory(path)
        self.contents = contents
        self.resumed = False
        self.complete = False
        self.changed_sources: Set[str] = frozenset()
        self._path = path
        self._overwrite = overwrite
        self._find_elsewhere = elsewhere
        self._elsewhere: Set[str] = frozenset()
        self._find_sources = sources
        # Handle of the lock's file.
        self._lock: int | None = None
        self._created = False

    @cached_property
    def sources(self) -> Mapping[str, object]:
        """Digest or stamp of each file of the source, by name; found at first use, which may take long."""
        return self._find_sources()

    def __enter__(self) -> Claim:
        try:
            self._enter()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._unlock()

    def _enter(self) -> None:
        """Claim the directory, unless an earlier run has finished it."""
        path = self._path
        self._created = not _exists(path)
        if not self._created and self._is_complete(*self._inspect()):
            return

        with destination.output_errors(path):
            (path / destination.WORK).mkdir(parents=True, exist_ok=True)
        self._take_lock()

        # Another run may have finished or begun between the first look and the lock.
        journal, found = self._inspect()
        if self._is_complete(journal, found):
            return
        with destination.output_errors(path / destination.WORK, "removed"):
            _sweep(path)

        needed, freed = self._count_needed(journal, found)
        destination.require_space([(path, needed)], freed)
        if journal and self._overwrite:
            _discard(path, journal, found)
            self._elsewhere = frozenset()
            journal = None
        self.resumed = journal is not None or bool(self._elsewhere)
        if journal is None:
            self._write_journal(done=False)

    def is_finished(self, name: str) -> bool:
        """Return whether a file of the claimed directory is finished.

        It is if it has its final name and, as a shard, the size that its header and the plan say; other files, which
        people change, only must not be empty. A shard that is uploaded counts as finished too (`elsewhere`).

        Args:
            name: path of the file, relative to the directory.
        """
        if name in self._elsewhere:
            return True
        path = self._path / name
        if not path.is_file():
            return False

        size = path.stat().st_size
        tensors = self.contents.shards.get(name)
        if tensors is None:
            return size > 0 or not self.contents.others.get(name)

        # A safetensors file: the header's length in eight bytes, the header, the tensors.
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        return size == 8 + header + tensors

    def finish(self) -> None:
        """Record in the journal that all files are written, and remove downloaded source shards."""
        with destination.output_errors(self._path / destination.WORK, "removed"):
            for scratch in (self._path / destination.WORK).glob(f"{destination.SOURCE}*"):
                shutil.rmtree(scratch)
        self._write_journal(done=True)

    def discard(self, outdated: Iterable[str]) -> None:
        """Remove shards that were made from an earlier source, and record the source of those that take their place."""
        for name in ("config.json", *outdated):
            with destination.output_errors(self._path / name, "removed"):
                (self._path / name).unlink(missing_ok=True)
        self._write_journal(done=False)

    def _write_journal(self, done: bool) -> None:
        self.directory.write(JOURNAL, self.contents.journal(self.sources, done))

    def missing_bytes(self, final: bool) -> int:
        """Return the bytes of disk that the run still needs, less those that it frees first. Nothing is written.

        Args:
            final: whether the plan's digest is final. Before a calibration it is not, and options are compared instead.

        Raises:
            OutputError: the directory could not be claimed: it is not an output, or is that of another run.
            UsageError: nothing can be written there.
        """
        exists = _exists(self._path)
        destination.require_place(self._path / JOURNAL, f"the output {self._path}", destination.ELSEWHERE)
        journal, found = self._inspect(final) if exists else (None, {})
        needed, freed = self._count_needed(journal, found)
        return max(0, needed - freed)

    def _has_other_options(self, journal: Mapping[str, Any]) -> bool:
        """Return whether a journal records other options than those of this run."""
        earlier = (journal.get("recipe") or {}).get("options")
        return earlier is not None and earlier != (self.contents.provenance.recipe or {}).get("options")

    def _is_complete(self, journal: dict[str, Any] | None, found: _Found) -> bool:
        """Return whether nothing is left to do: an earlier run of this source finished, and all its files are there."""
        done = journal is not None and journal["done"] and not self._overwrite
        self.complete = done and all(self.is_finished(name) for name in self.contents.files)
        if not self.complete:
            return False

        self.resumed = True
        # Clean up after a run that was killed at its very end, unless the directory is read-only.
        if self._lock is None and destination.WORK in found:
            with suppress(OutputError):
                self._take_lock()
                self._unlock()
        return not self.changed_sources

    def _read_earlier(self) -> tuple[dict[str, Any] | None, _Found]:
        """Read what an earlier run left in the directory.

        Returns:
            The journal, None for a new directory; and all other files and folders.

        Raises:
            OutputError: files of somebody else, or links, lie there.
        """
        path = self._path
        found = destination.list_output(path)
        found.pop(JOURNAL, None)
        journal = destination.read_journal(path)
        if journal is None:
            files = [name for name, status in found.items() if not stat.S_ISDIR(status.st_mode)]
            foreign = [name for name in files if not _is_early(name)]
            if foreign:
                raise OutputError(
                    f"{path} is not empty and was not made by openquant: it holds {min(foreign)}",
                    "choose another directory with -o, or empty this one yourself",
                )
            return None, {}

        # An evaluation of the earlier output is removed with it.
        ours = {*journal["files"], *EVALUATION_FILES}
        written = ours.union(self.contents.files)
        for name, status in sorted(found.items()):
            is_file = stat.S_ISREG(status.st_mode)
            if is_file and name in ours:
                continue
            # Engines load all weights that lie in a directory.
            is_weights = self._overwrite and is_file and name.endswith((".safetensors", ".index.json"))
            if name in written or (is_weights and not destination.is_work(name)):
                raise OutputError(f"{path / name} was not made by openquant and will not be overwritten", _MOVE)
        return journal, found

    def _inspect(self, final: bool = True) -> tuple[dict[str, Any] | None, _Found]:
        """Return the journal of an earlier run that is continued or overwritten, None for a new directory; and all
        other files and folders.

        Args:
            final: whether the plan's digest is final; if not, options are compared.

        Raises:
            OutputError: the directory has other files, or the output of another run.
        """
        journal, found = self._read_earlier()
        if journal is None:
            # Another machine may have uploaded shards.
            self._elsewhere = frozenset() if self._overwrite else self._find_elsewhere()
            return None, found

        if not self._overwrite:
            recorded = journal.get("sources", {})
            self.changed_sources = {name for name, stamp in self.sources.items() if recorded.get(name) != stamp}
        # Shards that are uploaded are those of the earlier source. Their records lie in this directory.
        self._elsewhere = frozenset() if self.changed_sources else self._find_elsewhere()

        present = {
            name for name, status in found.items() if not stat.S_ISDIR(status.st_mode) and not destination.is_work(name)
        }
        if not present and not self._elsewhere:
            return None, found
        if self._overwrite:
            return journal, found

        is_another = journal["digest"] != self.contents.digest
        if not final:
            is_another = self._has_other_options(journal)
        if is_another:
            raise OutputError(
                f"{self._path} holds the output of another run: other options, another source or another version",
                f"{REPLACE}; --recipe {self._path / JOURNAL} takes its options, which helps if the source has not "
                "changed",
            )
        foreign = present - {*journal["files"], *EVALUATION_FILES}
        if foreign and not journal["done"]:
            raise OutputError(f"{self._path} holds {min(foreign)}, which this run did not write", _MOVE)
        return journal, found

    def _count_needed(self, journal: dict[str, Any] | None, found: _Found) -> tuple[int, int]:
        """Return the bytes of disk that are still needed, and the bytes that removing earlier files frees.

        Args:
            journal: the journal of an earlier run; with `overwrite` its files are removed.
            found: what lies in the directory.
        """
        discarded = journal["files"] if journal and self._overwrite else ()
        freed = {name: found[name].st_size for name in discarded if name in found}
        with destination.output_errors(self._path, "examined"):
            missing = [name for name in self.contents.files if name in freed or not self.is_finished(name)]

        scratch = f"{destination.WORK}/{destination.SOURCE}"
        fetched = sum(status.st_blocks * 512 for name, status in found.items() if name.startswith(scratch))
        return self.contents.count_needed(missing, fetched), sum(freed.values())

    def _take_lock(self) -> None:
        """Take the lock, which one run at a time holds, until it releases it or its process ends."""
        path = self._path / destination.LOCK
        with destination.output_errors(path):
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A run that finished meanwhile may have removed the file that we locked.
                if os.path.samestat(os.fstat(self._lock), path.stat()):
                    return
            except (BlockingIOError, FileNotFoundError):
                pass

        # The unfinished files are those of the run that has the lock.
        os.close(self._lock)
        self._lock = None
        raise OutputError(f"another run is writing to {self._path}", "wait for it, or choose another directory with -o")

    def _unlock(self) -> None:
        """Remove unfinished files, and all traces of a run that wrote nothing; release the lock."""
        path = self._path
        if self._lock is None:
            return
        with suppress(OSError):
            _sweep(path)
            (path / destination.LOCK).unlink()
            # Fails if another run has just put its lock there.
            (path / destination.WORK).rmdir()
            if self._created and set(os.listdir(path)) <= {JOURNAL}:
                (path / JOURNAL).unlink(missing_ok=True)
                path.rmdir()
        os.close(self._lock)
        self._lock = None


def _exists(path: Path) -> bool:
    """Return whether an output directory exists.

    Raises:
        OutputError: it is not a directory.
    """
    with destination.output_errors(path, "read"):
        if path.is_dir():
            return True
        if path.exists() or path.is_symlink():
            raise OutputError(f"{path} exists and is not a directory", destination.ELSEWHERE)
    return False


def _is_early(name: str) -> bool:
    """Return whether a name may be there before the journal is: WORK, the lock, or the journal half-written."""
    return name in (destination.WORK, destination.LOCK) or (
        name.startswith(f"{destination.WORK}/{destination.short_name(JOURNAL)}.") and name.endswith(".partial")
    )


def _discard(path: Path, journal: Mapping[str, Any], found: _Found) -> None:
    """Remove the output of an earlier run: config.json first, so that it is no model any more, the journal last."""
    records = path / destination.WORK / destination.PUSHED
    with destination.output_errors(records, "removed"):
        if records.exists():
            shutil.rmtree(records)

    names = sorted(journal["files"], key=lambda name: (name != "config.json", not name.endswith(".json"), name))
    for name in [*names, *EVALUATION_FILES, JOURNAL]:
        # Only what lies in the directory, whatever a journal names.
        if name in found or name == JOURNAL:
            with destination.output_errors(path / name, "removed"):
                (path / name).unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the unfinished files of an interrupted run."""
    for partial in (path / destination.WORK).glob("*.partial"):
        partial.unlink(missing_ok=True)


def refuse_overlap(source: Path, output: Path) -> None:
    """Refuse an output directory that is the source's, lies in it, or contains it.

    Args:
        source: directory of the source.
        output: the output directory, which may be missing.

    Raises:
        OutputError: it is refused.
    """
    output_path = Path(os.path.realpath(output))
    source_path = Path(os.path.realpath(source))
    if output_path == source_path:
        where = "is the source itself"
    elif source_path in output_path.parents:
        where = f"lies inside the source {source}"
    elif output_path in source_path.parents:
        where = f"holds the source {source}"
    else:
        return
    raise OutputError(f"the output {output} {where}", destination.ELSEWHERE)

"""The output directory: whose it is, what is finished in it, and how a file gets its final name.

`.openquant.json`, the journal, names the plan's digest and every file the run writes. Files are written under
`.openquant/` and renamed when they are whole and on disk, so a final name means a finished file, whenever the
process or the machine died. Running again with the same digest continues; anything else is refused. A finished
directory keeps the journal and loses `.openquant/`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .checkpoint import JOURNAL_FILE as JOURNAL
from .errors import OutputError

WORK = ".openquant"
LOCK = f"{WORK}/lock"
# Records of uploads, and shards that are streamed (with a rank's number behind it).
PUSHED, SOURCE = "pushed", "source-"
FORMAT = 1


@contextmanager
def explained(path: Path | str, doing: str = "written") -> Iterator[None]:
    """Turn an OSError about an output file into an OutputError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "free some space (or choose another -o) and run the same command again: finished shards are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check the permissions, or choose another directory with -o"
        else:
            hint = "run the same command again once that is solved: finished shards are kept"
        raise OutputError(f"{path} cannot be {doing}: {error.strerror or error}", hint) from error


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class OutputDirectory:
    """A directory claimed for one run; use as a context manager, which holds the lock.

    Args:
        path: the directory; made if missing.
        digest: of the plan.
        shards: bytes of tensors in every shard the run will leave there, by name; the files are larger by a header.
        others: size in bytes of every other file it will leave there, by name relative to path.
        overwrite: discard what an earlier run of ours left there.
        elsewhere: shards that are finished although they are not there.
        at_once: how many shards will be there at a time, if not all of them.
        scratch: bytes of other files that will be there for a while.

    Attributes:
        resumed: whether an earlier run's work is continued, or already complete.
        complete: whether an earlier run finished and all it wrote is still there; then nothing is locked or written.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        shards: dict[str, int],
        others: dict[str, int],
        overwrite: bool,
        elsewhere: Set[str] = frozenset(),
        at_once: int | None = None,
        scratch: int = 0,
    ) -> None:
        self.path = path
        self.digest = digest
        self.shards = shards
        self.files = {**others, **shards}
        self.overwrite = overwrite
        self.elsewhere = elsewhere
        self.at_once = at_once
        self.scratch = scratch
        self.resumed = False
        self.complete = False
        # Ranks of a run whose first one died may still be writing when the next run does.
        self._process = secrets.token_hex(4)
        self._lock = -1
        self._made = False

    def __enter__(self) -> OutputDirectory:
        with explained(self.path, "read"):
            if self._is_complete(self._inspect()):
                return self
            self._made = not self.path.exists()
        try:
            with explained(self.path):
                (self.path / WORK).mkdir(parents=True, exist_ok=True)
            self._take_lock()
            # Another run may have finished or begun between the first look and the lock.
            journal = self._inspect()
            if self._is_complete(journal):
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

    def is_finished(self, name: str) -> bool:
        """Whether a file of this run stands under its final name; a shard not without its tensors."""
        path = self.path / name
        return name in self.elsewhere or (path.is_file() and path.stat().st_size > self.shards.get(name, -1))

    def _is_complete(self, journal: dict[str, Any] | None) -> bool:
        if journal and journal["done"] and not self.overwrite and all(self.is_finished(name) for name in self.files):
            self.resumed = self.complete = True
            # What a run left that was killed at its very end; a read-only directory may keep it.
            if self._lock < 0 and (self.path / WORK).exists():
                with suppress(OutputError):
                    self._take_lock()
                    self._release()
        return self.complete

    def partial(self, name: str) -> Path:
        """Where a file is written before it gets its final name; no two processes write to the same place."""
        return self.path / WORK / f"{_short(name)}.{self._process}.partial"

    def publish(self, name: str) -> None:
        """Give a written file its final name, once its bytes are on disk.

        Raises:
            OutputError: another run has claimed the directory since, or the file cannot be renamed.
        """
        target = self.path / name
        journal = None if name == JOURNAL else self._read_journal()
        if journal is not None and journal["digest"] != self.digest:
            raise OutputError(
                f"{target} was not finished: another run has claimed {self.path}", "let one run at a time write there"
            )
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.partial(name), target)
            sync_directory(target.parent)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        with explained(self.path / name), self.partial(name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.publish(name)

    def copy(self, source: Path, name: str) -> None:
        """Copy a file's contents (of a link, what it points to)."""
        try:
            reader = source.open("rb")
        except OSError as error:
            raise OutputError(
                f"{source} cannot be read: {error.strerror}", "check the file and its permissions"
            ) from None
        with reader, explained(self.path / name), self.partial(name).open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        self.publish(name)

    def finish(self) -> None:
        """Record that everything is there, and drop what it was made from."""
        for scratch in (self.path / WORK).glob(f"{SOURCE}*"):
            with explained(scratch, "removed"):
                shutil.rmtree(scratch)
        self.write(JOURNAL, self._journal(done=True))

    def _journal(self, done: bool) -> bytes:
        record = {"format": FORMAT, "digest": self.digest, "done": done, "files": sorted(self.files)}
        return (json.dumps(record, indent=1) + "\n").encode()

    def _read_journal(self) -> dict[str, Any] | None:
        return read_journal(self.path)

    def _inspect(self) -> dict[str, Any] | None:
        """The journal of an earlier run that may be continued or overwritten; None for a fresh directory.

        Raises:
            OutputError: the directory holds something else.
        """
        if not self.path.exists() and not self.path.is_symlink():
            return None
        if not self.path.is_dir():
            raise OutputError(f"{self.path} exists and is not a directory", "choose another directory with -o")
        journal = self._read_journal()
        with explained(self.path, "read"):
            present = set(_files_below(self.path, journal is not None))
        if journal is None:
            if present:
                raise OutputError(
                    f"{self.path} is not empty and was not made by openquant: it holds {min(present)}",
                    "choose another directory with -o, or empty this one yourself",
                )
            return None
        if not present:
            return None
        ours = set(journal["files"])
        foreign = sorted(present - ours)
        written = {*self.files, *ours}
        # A linked directory in the way would lead our files to somebody else's.
        clash = [
            name
            for name in foreign
            if name in written
            or name == WORK
            or any(other.startswith(f"{name}/") for other in written)
            or (self.overwrite and name.endswith((".safetensors", ".index.json")))
        ]
        if clash:
            raise OutputError(
                f"{self.path / clash[0]} was not made by openquant and will not be overwritten",
                "move it away, or choose another directory with -o",
            )
        if self.overwrite:
            return journal
        if journal["digest"] != self.digest:
            raise OutputError(
                f"{self.path} holds the output of another run: other options, another source or another version",
                "choose another directory with -o, or replace that output with --overwrite",
            )
        if foreign and not journal["done"]:
            raise OutputError(
                f"{self.path} holds {foreign[0]}, which this run did not write",
                "move it away, or choose another directory with -o",
            )
        return journal

    def _take_lock(self) -> None:
        with explained(self.path / LOCK):
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = True
            except OSError as error:
                raise OutputError(
                    f"{self.path} cannot be locked: {error.strerror}: its file system does not let programs lock files",
                    "mount it with locks (Lustre: -o flock), or choose another disk with -o",
                ) from None
            else:
                # A run that finished in between removed the file we locked.
                held = not (self.path / LOCK).exists() or not os.path.samestat(
                    os.fstat(self._lock), (self.path / LOCK).stat()
                )
        if held:
            os.close(self._lock)
            self._lock = -1
            raise OutputError(
                f"another run is writing to {self.path}", "wait for it, or choose another directory with -o"
            )

    def _release(self) -> None:
        """Remove what is half-written, and all trace of a run that wrote nothing; let go of the lock."""
        if self._lock < 0:
            return
        with suppress(OSError):
            self._sweep()
            (self.path / LOCK).unlink()
            # Not empty where another run just put its own lock there.
            (self.path / WORK).rmdir()
            if self._made and {path.name for path in self.path.iterdir()} <= {JOURNAL}:
                (self.path / JOURNAL).unlink(missing_ok=True)
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1

    def _require_space(self, discarded: Iterable[str]) -> None:
        """Refuse to start what the disk cannot hold, counting what will be discarded first as free."""
        with explained(self.path, "examined"):
            gone = {name for name in discarded if (self.path / name).is_file()}
            free = shutil.disk_usage(self.path).free + sum((self.path / name).stat().st_size for name in gone)
            missing = [name for name in self.files if name in gone or not self.is_finished(name)]
            shards = sorted((self.files[name] for name in missing if name in self.shards), reverse=True)
            needed = sum(self.files[name] for name in missing if name not in self.shards)
            fetched = sum(path.stat().st_size for path in (self.path / WORK).glob(f"{SOURCE}*/*"))
            needed += sum(shards[: self.at_once]) + (max(0, self.scratch - fetched) if shards else 0)
        if needed > free:
            raise OutputError(
                f"{self.path} needs {needed:,} bytes, its disk has {free:,} free",
                "free some space, or choose another disk with -o",
            )

    def _discard(self, journal: dict[str, Any]) -> None:
        """Remove what an earlier run wrote: first what makes the directory look like a model, the journal last."""
        shutil.rmtree(self.path / WORK / PUSHED, ignore_errors=True)
        self.elsewhere = frozenset()
        names = sorted(journal["files"], key=lambda name: (name != "config.json", not name.endswith(".json"), name))
        for name in [*names, JOURNAL]:
            with explained(self.path / name, "removed"):
                (self.path / name).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what an interrupted run left half-written."""
        for path in (self.path / WORK).glob("*.partial"):
            with explained(path, "removed"):
                path.unlink()


def read_journal(directory: Path) -> dict[str, Any] | None:
    """What a run wrote down in its directory; None if no run did.

    Raises:
        OutputError: something else is there.
    """
    path = directory / JOURNAL
    if not path.exists():
        return None
    with explained(path, "read"):
        data = path.read_bytes()
    try:
        journal = json.loads(data)
        sound = (
            journal["format"] == FORMAT
            and isinstance(journal["digest"], str)
            and isinstance(journal["done"], bool)
            and all(_is_plain(name) for name in journal["files"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise OutputError(
            f"{path} is not a journal that this version of openquant wrote", "choose another directory with -o"
        )
    return dict(journal)


def finished_files(directory: Path) -> tuple[str, set[str]]:
    """The digest of the plan a directory was made by, and the names of its files.

    Raises:
        OutputError: it was not made by us, not finished, or has lost a file.
    """
    if not directory.is_dir():
        raise OutputError(f"{directory} is not a directory", "check the path")
    journal = read_journal(directory)
    if journal is None:
        raise OutputError(f"{directory} was not made by openquant", "give a directory that compress wrote")
    missing = sorted(name for name in journal["files"] if not (directory / name).is_file())
    if not journal["done"] or missing:
        what = f"lacks {missing[0]}" if missing else "is not finished"
        raise OutputError(f"{directory} {what}", "run the command that made it again, without --push-only")
    return journal["digest"], set(journal["files"])


def _is_plain(name: object) -> bool:
    """Whether a journal's entry can only mean a file in its own directory."""
    return isinstance(name, str) and "\0" not in name and not {"", ".", "..", WORK} & set(name.split("/"))


def _short(name: str) -> str:
    """A file's name as it begins below WORK: with an ending, its own may be too long for the file system."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:24]


def _is_early(name: str) -> bool:
    """Whether a file below WORK may be there before the journal is."""
    return name == "lock" or (name.startswith(f"{_short(JOURNAL)}.") and name.endswith(".partial"))


def _files_below(root: Path, ours: bool) -> Iterator[str]:
    """Every file below root but the journal and our work, relative to it; empty directories count for nothing.

    Args:
        root: the directory.
        ours: whether it has a journal. Without one, only what a run leaves that died before writing it is our work.
    """
    for folder, directories, names in os.walk(root):
        base = Path(folder)
        if base == root and WORK in directories:
            work = base / WORK
            if not work.is_symlink() and (ours or all(_is_early(path.name) for path in work.iterdir())):
                directories.remove(WORK)
        linked = [name for name in directories if (base / name).is_symlink()]
        for name in (*names, *linked):
            relative = (base / name).relative_to(root).as_posix()
            if relative != JOURNAL:
                yield relative


def refuse_overlap(source: Path, output: Path) -> None:
    """Refuse an output that is the source, or lies inside it.

    Raises:
        OutputError: it does.
    """
    # realpath, since Path.resolve() fails on links that lead in a circle.
    inside, outside = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if inside == outside or outside in inside.parents:
        where = "is the source itself" if inside == outside else f"lies inside the source {source}"
        raise OutputError(f"the output {output} {where}", "choose another directory with -o")

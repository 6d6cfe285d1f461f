"""Where a verb may write: what a file must not replace, whole or not at all, and whether disks have room.

A page, a picture, a calibration or an evaluation must not replace a part of a model, an input of the run, another file
that the run writes, or a file of another kind.

    page = Destination(Path("report.html"), "--report", PAGE, taken_by(models=[Path("Qwen3-8B")]))
    page.require()          # before hours of work
    page.write(data)        # after them: checked again, then written whole

    require_space([(Path("out"), 5_000_000_000), (Path("."), 1_000_000)])       # added up if on one disk
    find_shortages([(Path("out"), 5_000_000_000)])                             # the same, and nothing is refused
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import OutputError, UsageError
from .journal import output_errors

# Files and directories, each with its name in messages: (Path("wiki.txt"), "a text that this run reads").
Taken = Sequence[tuple[Path, str]]
# Directories, which may be missing, each with the bytes that will be written there at the same time.
Needs = Sequence[tuple[Path, int]]


@dataclass(frozen=True)
class FileKind:
    """A kind of file that openquant writes.

    Attributes:
        title: name in messages, such as "a calibration".
        recognizes: returns whether an open file is of this kind. It may raise a UsageError with a better reason.
        name_in_model: file name in a model's directory; None if it may not lie there.
    """

    title: str
    recognizes: Callable[[BinaryIO], bool]
    name_in_model: str | None = None


def taken_by(
    models: Iterable[Path] = (), inputs: Iterable[tuple[Path, str]] = (), outputs: Iterable[Path] = ()
) -> Taken:
    """Return the paths that the files of a run must not replace.

    Args:
        models: directories of the models that the run reads.
        inputs: other files and directories that it reads, each with its kind: (Path("wiki.txt"), "a text").
        outputs: other directories and files that the run writes; they may be missing.
    """
    return [
        *((path, f"the model {path}") for path in models),
        *((path, f"{what} that this run reads") for path, what in inputs),
        *((path, f"{path}, which this run writes") for path in outputs),
    ]


@dataclass(frozen=True)
class Destination:
    """A file that a run will write.

    Attributes:
        path: the file.
        option: command-line option that gave the path, "--report"; empty for a default.
        kind: kind of the file. An existing file is replaced only if it is empty or of this kind.
        taken: paths that the file must not replace, and in which it must not lie.
        model_dir: directory of a model in which the file may lie, under the name `kind.name_in_model`.
        elsewhere: hint that says how to give another path.
    """

    path: Path
    option: str
    kind: FileKind
    taken: Taken = ()
    model_dir: Path | None = None
    elsewhere: str = "give another place"

    @property
    def title(self) -> str:
        """Name in messages: "--report report.html"."""
        return f"{self.option} {self.path}" if self.option else str(self.path)

    def require(self) -> None:
        """Refuse a path that must not, or cannot, be written. Nothing is written.

        Raises:
            UsageError: the path is refused.
        """
        require_place(self.path, self.title, self.elsewhere)
        self._refuse_taken()
        if self.path.exists():
            self._refuse_content()

    def write(self, *parts: bytes | memoryview) -> None:
        """Check the path again, and write the file whole or not at all.

        Args:
            parts: contents of the file, written one after the other.

        Raises:
            UsageError: the path must not be written.
            OutputError: the file cannot be written.
        """
        self.require()
        write_atomic(self.path, *parts, elsewhere=self.elsewhere)

    def _refuse_taken(self) -> None:
        """Refuse a path that is, lies in or holds one that the run reads or writes."""
        path = _real(self.path)
        hint = self.elsewhere
        if self.model_dir is not None and self.kind.name_in_model is not None:
            place = self.model_dir / self.kind.name_in_model
            if path == _real(place):
                return
            hint = f"{self.elsewhere}, or {place}"

        for other, what in self.taken:
            real = _real(other)
            if path == real:
                raise UsageError(f"{self.title} is {what}", hint)
            if real in path.parents:
                raise UsageError(f"{self.title} lies in {what}", hint)
            if path in real.parents:
                raise UsageError(f"{self.title} holds {what}", hint)

    def _refuse_content(self) -> None:
        """Refuse to replace a file that is neither empty nor of this kind."""
        try:
            with self.path.open("rb") as file:
                replaceable = not os.fstat(file.fileno()).st_size or self.kind.recognizes(file)
        except OSError as error:
            raise UsageError(f"{self.title} cannot be read: {error.strerror}", self.elsewhere) from None
        if not replaceable:
            raise UsageError(
                f"{self.title} exists and is not {self.kind.title} that openquant wrote",
                f"{self.elsewhere}, or remove that file",
            )


def require_all(destinations: Sequence[Destination]) -> None:
    """Refuse paths that must not, or cannot, be written, and two paths of the same file.

    Args:
        destinations: the files that a command will write, each with its kind and the paths that it must not replace.

    Raises:
        UsageError: a path is refused.
    """
    for number, file in enumerate(destinations):
        for other in destinations[:number]:
            if _real(file.path) == _real(other.path):
                raise UsageError(f"{other.option} and {file.option} name one file, {file.path}", "give each its own")
        file.require()


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def require_place(path: Path, title: str, elsewhere: str = "give another place") -> None:
    """Refuse a path at which no file can be written.

    Args:
        path: the file; it and its directory may be missing.
        title: name of the file in messages, such as "--report report.html".
        elsewhere: hint that says how to give another path.

    Raises:
        UsageError: it is a directory, a link, a pipe or a device, or its directory can hold no file.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise UsageError(f"{title} cannot be written: {_reason(error)}", elsewhere) from None

    if stat.S_ISDIR(mode):
        raise UsageError(f"{title} is a directory", "give the name of a file")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{title} is a link, a pipe or a device", elsewhere)

    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise UsageError(f"{title}: {parent} is no directory", elsewhere)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{title}: {parent} cannot be written to", f"check its permissions, or {elsewhere}")


def write_atomic(path: Path, *parts: bytes | memoryview, elsewhere: str = "give another place") -> None:
    """Write a file whole or not at all. Its directory is made if it is missing.

    Args:
        path: the file; an existing one is replaced.
        parts: its contents, written one after the other.
        elsewhere: hint that says how to give another path.

    Raises:
        OutputError: it cannot be written, or is a link.
    """
    # A random name, because two runs may write the same file.
    write_pieces(path, parts, path.with_name(f".openquant-{secrets.token_hex(8)}.partial"), elsewhere)


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], partial: Path, elsewhere: str = "give another place"
) -> None:
    """Write a file whole or not at all, as `write_atomic` does, of contents that are made while it is written.

    Args:
        path: the file; an existing one is replaced.
        pieces: its contents.
        partial: a file beside it that has them until they are complete.
        elsewhere: hint that says how to give another path.

    Raises:
        OutputError: it cannot be written, or is a link.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)

        if path.is_symlink():
            raise OutputError(f"{path} is a link", f"{elsewhere}, or remove it")
        partial.unlink(missing_ok=True)

        try:
            with partial.open("xb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {_reason(error)}", f"free some space, or {elsewhere}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


@dataclass(frozen=True)
class DiskSpace:
    """The disk space of a run.

    Attributes:
        needed: the most bytes at a time that the run has still to write to the disk of its output; 0 if it is complete.
        output: bytes of the whole output.
        streamed: whether source shards are streamed, so that `needed` includes them.
        notes: for a dry run, a text for each disk that has too little room.
    """

    needed: int
    output: int
    streamed: bool
    notes: tuple[str, ...] = ()


class Shortage(NamedTuple):
    """A file system with too little room.

    Attributes:
        path: the directory on it.
        needed: bytes that are needed there.
        free: bytes that are free.
    """

    path: Path
    needed: int
    free: int


def existing_parent(path: Path) -> Path:
    """Return a directory itself if it exists, else its nearest parent that does, as an absolute path without links.

    Args:
        path: the directory, absolute or relative to the working directory. If it is a file, so is the result.
    """
    absolute = Path(os.path.realpath(path))
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def require_space(needs: Needs, freed: int = 0) -> None:
    """Refuse to begin a run whose files do not fit on their disks.

    Args:
        needs: directories, which may be missing, each with the bytes that will be written there; added up for each file
            system.
        freed: bytes that are removed from each file system first.

    Raises:
        OutputError: a file system has too little room, or cannot be examined. The message names the first of its
            directories.
    """
    for path, needed, free in find_shortages(needs, freed):
        raise OutputError(
            f"{path} needs {needed:,} bytes, its disk has {free:,} free",
            "free some space, or choose another disk with -o",
        )


def find_shortages(needs: Needs, freed: int = 0) -> list[Shortage]:
    """Return the file systems that have too little room.

    Args:
        needs: as for `require_space`.
        freed: as for `require_space`.

    Returns:
        The first directory on each such file system, the bytes that all its directories need, and the bytes that are
        free there.

    Raises:
        OutputError: a file system cannot be examined.
    """
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, nbytes in needs:
        with output_errors(path, "examined"):
            disks.setdefault(existing_parent(path).stat().st_dev, []).append((path, nbytes))

    shortages = []
    for writes in disks.values():
        path = writes[0][0]
        needed = sum(nbytes for _, nbytes in writes)
        with output_errors(path, "examined"):
            free = shutil.disk_usage(existing_parent(path)).free + freed

        if needed > free:
            shortages.append(Shortage(path, needed, free))
    return shortages

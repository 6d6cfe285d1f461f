"""Files that a verb writes beside its models: a calibration, an evaluation, a page, a picture.

Such a file must not replace a part of a model, an input of the run, another file that the run writes, or a file of
another kind.

    page = Destination(Path("report.html"), "--report", PAGE, ProtectedPaths(models=(Path("Qwen3-8B"),)))
    page.require()          # before hours of work
    page.write(data)        # after them: checked again, then written whole

Writes single files atomically, and refuses impossible paths before hours of work.

require_place(Path("report.html"), "--report report.html")      # before hours of work
write_atomic(Path("report.html"), data)                         # after them
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..errors import OutputError, UsageError

STREAMS = ("stdin", "stdout", "stderr")


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


@dataclass(frozen=True)
class ProtectedPaths:
    """Paths that the files of a run must not replace.

    Attributes:
        models: directories of the models that the run reads.
        inputs: other files and directories that it reads, each with its kind: (Path("wiki.txt"), "a text").
        outputs: other directories and files that the run writes; they may be missing.
    """

    models: Sequence[Path] = ()
    inputs: Sequence[tuple[Path, str]] = ()
    outputs: Sequence[Path] = ()


@dataclass(frozen=True)
class Destination:
    """A file that a run will write.

    Attributes:
        path: the file.
        option: command-line option that gave the path, "--report"; empty for a default.
        kind: kind of the file. An existing file is replaced only if it is empty or of this kind.
        protected: paths that the file must not replace.
        model_dir: directory of a model in which the file may lie, under the name `kind.name_in_model`.
        elsewhere: hint that says how to give another path.
    """

    path: Path
    option: str
    kind: FileKind
    protected: ProtectedPaths = field(default_factory=ProtectedPaths)
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
        status = _stat(self.path)
        if status is not None:
            self._refuse_stream(status)
        self._refuse_models()
        for path, what in self.protected.inputs:
            if _is_within(self.path, path):
                where = "lies in" if path.is_dir() else "is"
                self._refuse(f"{where} {what} that this run reads")
        for path in self.protected.outputs:
            if _is_within(self.path, path):
                same = _real(self.path) == _real(path)
                self._refuse(f"{'is' if same else 'lies in'} {path}, which this run writes")
            if _is_within(path, self.path):
                self._refuse(f"has no place: this run writes {path}")
        if status is not None:
            self._refuse_content()
            self._refuse_links(status)

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

    def _refuse(self, why: str, hint: str | None = None) -> None:
        raise UsageError(f"{self.title} {why}", hint or self.elsewhere)

    def _refuse_stream(self, status: os.stat_result) -> None:
        for number, name in enumerate(STREAMS):
            with suppress(OSError):
                if os.path.samestat(os.fstat(number), status):
                    self._refuse(f"is {name} of this command")

    def _refuse_models(self) -> None:
        """Refuse a path in a model's directory, because copies of the model would include the file."""
        place = self._place_in_model
        if place is not None and place.name == self.path.name and _is_same(place.parent, self.path.parent):
            return
        for model in self.protected.models:
            if _is_within(self.path, model):
                more = "" if place is None else f", or {place}"
                if place is None and self.path.name == self.kind.name_in_model:
                    more = f"; {self.path.name} of an output that is evaluated alone may lie in its directory"
                self._refuse(f"lies in the model {model}", f"give a place outside of it{more}")

    def _refuse_content(self) -> None:
        """Refuse to replace a file that is neither empty nor of this kind."""
        try:
            # Without O_NONBLOCK, opening a pipe that was put here meanwhile would wait for its other end.
            with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                size = os.fstat(file.fileno()).st_size
                replaceable = not size or self.kind.recognizes(file)
        except OSError as error:
            raise UsageError(f"{self.title} cannot be read: {error.strerror}", self.elsewhere) from None
        if not replaceable:
            self._refuse(
                f"exists and is not {self.kind.title} that openquant wrote", f"{self.elsewhere}, or remove that file"
            )

    def _refuse_links(self, status: os.stat_result) -> None:
        """Refuse a path that is a file of a model by a hard link, or because the model links to it."""
        for model in self.protected.models:
            for path in _files(model):
                with suppress(OSError):
                    if os.path.samestat(path.stat(), status) and not _is_same(path, self._place_in_model):
                        self._refuse(f"is {path.relative_to(model)} of the model {model}")

    @property
    def _place_in_model(self) -> Path | None:
        """The path in a model's directory that the file may have."""
        if self.model_dir is None or self.kind.name_in_model is None:
            return None
        return self.model_dir / self.kind.name_in_model


def require_all(destinations: Sequence[Destination]) -> None:
    """Refuse paths that must not, or cannot, be written, and two paths of the same file.

    Args:
        destinations: the files that a command will write, each with its kind and the paths that it must not replace.

    Raises:
        UsageError: a path is refused.
    """
    for number, file in enumerate(destinations):
        for other in destinations[:number]:
            if _real(file.path) == _real(other.path) or _is_same(file.path, other.path):
                raise UsageError(f"{other.option} and {file.option} name one file, {file.path}", "give each its own")
        file.require()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_same(path: Path, other: Path | None) -> bool:
    """Return whether two paths lead to the same existing file or directory."""
    status = _stat(path)
    other_status = None if other is None else _stat(other)
    return status is not None and other_status is not None and os.path.samestat(status, other_status)


def _is_within(path: Path, other: Path) -> bool:
    """Return whether a path is another path or lies below it, by name or by inode (case and mounts change names)."""
    real, status = _real(path), _stat(other)
    if _real(other) in (real, *real.parents):
        return True
    if status is None:
        return False
    ancestors = [real, *real.parents] if stat.S_ISDIR(status.st_mode) else [real]
    return any(os.path.samestat(found, status) for found in map(_stat, ancestors) if found is not None)


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)


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


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents.

    Args:
        path: the directory, which may exist already.

    Raises:
        OSError: it cannot be made.
    """
    # A loop, because pathlib and os recurse, and a path has room for 2,000 directories.
    for directory in (*reversed(path.parents), path):
        directory.mkdir(exist_ok=True)


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
        make_directory(path.parent)
        if path.is_symlink():
            raise OutputError(f"{path} is a link", f"{elsewhere}, or remove it")
        partial.unlink(missing_ok=True)

        try:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(handle, "wb") as file:
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

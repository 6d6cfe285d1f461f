"""Files that a verb writes beside models: a calibration, an evaluation, a page, a picture.

One rule says what such a file must not replace: a part of a model, an input of the run, another file that the run
writes, or a file of another kind.

    page = Destination(Path("report.html"), "--report", PAGE, Protected(models=(Path("Qwen3-8B"),)))
    page.require()          # before hours of work
    page.write(data)        # after them: checked again, then written whole
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError
from .atomic import require_place, write_whole

STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True)
class FileKind:
    """What is written to a file.

    Attributes:
        title: "a calibration", for messages.
        recognizes: whether an open file is one that openquant wrote. It may raise a UsageError that says more.
        beside: its name in the directory of a model, where that is a place for it.
    """

    title: str
    recognizes: Callable[[BinaryIO], bool]
    beside: str | None = None


@dataclass(frozen=True)
class ProtectedPaths:
    """What no file of a run may replace.

    Attributes:
        models: the directories of the models that the run reads.
        inputs: other files and directories that it reads, each with what it is: (Path("wiki.txt"), "a text").
        outputs: directories and files that the run makes otherwise; they may be missing.
    """

    models: Sequence[Path] = ()
    inputs: Sequence[tuple[Path, str]] = ()
    outputs: Sequence[Path] = ()


@dataclass(frozen=True)
class Destination:
    """A file that a run will write.

    Attributes:
        path: the file.
        option: what names it on the command line, "--report"; empty for a default.
        kind: what is written. An existing file is replaced if it is empty or of this kind.
        protected: what the file may not replace.
        beside: the directory of a model that may hold the file, under the name that the kind has there.
        elsewhere: the hint, how to name another file.
    """

    path: Path
    option: str
    kind: FileKind
    protected: ProtectedPaths = field(default_factory=ProtectedPaths)
    beside: Path | None = None
    elsewhere: str = "give another place"

    @property
    def title(self) -> str:
        """How messages name it: "--report report.html"."""
        return f"{self.option} {self.path}" if self.option else str(self.path)

    def require(self) -> None:
        """Refuse a file that must not, or cannot, be written.

        Raises:
            UsageError: it is one.
        """
        require_place(self.path, self.title, self.elsewhere)
        found = _stat(self.path)
        if found is not None:
            self._refuse_stream(found)
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
        if found is not None:
            self._refuse_content()
            self._refuse_links(found)

    def write(self, *parts: bytes | memoryview) -> None:
        """Write the file whole or not at all, if it still may be.

        Raises:
            UsageError: it may not be.
            OutputError: it cannot be.
        """
        self.require()
        write_whole(self.path, *parts)

    def _refuse(self, why: str, hint: str | None = None) -> None:
        raise UsageError(f"{self.title} {why}", hint or self.elsewhere)

    def _refuse_stream(self, found: os.stat_result) -> None:
        for number, name in enumerate(STREAMS):
            with suppress(OSError):
                if os.path.samestat(os.fstat(number), found):
                    self._refuse(f"is {name} of this command")

    def _refuse_models(self) -> None:
        """Refuse what lies in a model's directory, whatever its name: who copies the model takes all that is there."""
        place = self._beside
        if place is not None and place.name == self.path.name and _is_same(place.parent, self.path.parent):
            return
        for model in self.protected.models:
            if _is_within(self.path, model):
                more = "" if self._beside is None else f", or {self._beside}"
                self._refuse(f"lies in the model {model}", f"give a place outside of it{more}")

    def _refuse_content(self) -> None:
        """Refuse to replace a file with something in it that is of another kind."""
        try:
            # A pipe that came here since would wait for its other end.
            with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                size = os.fstat(file.fileno()).st_size
                known = not size or self.kind.recognizes(file)
        except OSError as error:
            raise UsageError(f"{self.title} cannot be read: {error.strerror}", self.elsewhere) from None
        if not known:
            self._refuse(
                f"exists and is not {self.kind.title} that openquant wrote", f"{self.elsewhere}, or remove that file"
            )

    def _refuse_links(self, found: os.stat_result) -> None:
        """Refuse what is a file of a model under another name: through a hard link, or since the model links to it."""
        for model in self.protected.models:
            for path in _files(model):
                with suppress(OSError):
                    if os.path.samestat(path.stat(), found) and not _is_same(path, self._beside):
                        self._refuse(f"is {path.relative_to(model)} of the model {model}")

    @property
    def _beside(self) -> Path | None:
        """The place in a model's directory that it may have."""
        return None if self.beside is None or self.kind.beside is None else self.beside / self.kind.beside


def require_all(destinations: Sequence[Destination]) -> None:
    """Refuse files that must not, or cannot, be written, and two that are one.

    Raises:
        UsageError: there is one.
    """
    for number, each in enumerate(destinations):
        for other in destinations[:number]:
            if _real(each.path) == _real(other.path) or _is_same(each.path, other.path):
                raise UsageError(f"{other.option} and {each.option} name one file, {each.path}", "give each its own")
        each.require()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_same(path: Path, other: Path | None) -> bool:
    """Whether two paths lead to one file or directory that exists."""
    found = _stat(path)
    known = None if other is None else _stat(other)
    return found is not None and known is not None and os.path.samestat(found, known)


def _is_within(path: Path, other: Path) -> bool:
    """Whether a path is another one or lies below it: by name, or by inode where names differ (case, mounts)."""
    real, found = _real(path), _stat(other)
    if _real(other) in (real, *real.parents):
        return True
    if found is None:
        return False
    lines = [real, *real.parents] if stat.S_ISDIR(found.st_mode) else [real]
    return any(os.path.samestat(each, found) for each in map(_stat, lines) if each is not None)


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)

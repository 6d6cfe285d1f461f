"""An output directory held open: how its files get their final names.

Files are written under `.openquant/` and renamed when they are whole and on disk, so a final name means a finished
file, whenever the process or the machine died. Whose the directory is, and what is finished in it, claim.py says.

What an output holds may be somebody else's: links where our files lie are refused (folder.py).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import OutputError
from .folder import Folder
from .journal import ELSEWHERE, SOURCE, WORK, journal_in, output_errors, short_name
from .names import JOURNAL_FILE as JOURNAL
from .small_files import open_regular

REPLACE = "choose another directory with -o, or replace that output with --overwrite"


class OutputDirectory:
    """An output directory, in which the run that has claimed it writes.

    Args:
        path: the directory.
        digest: of the run's plan.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        # Ranks of a run whose first one died may still be writing when the next run does.
        self._process = secrets.token_hex(4)
        self._folder: Folder | None = None
        # Inode and time of the journal that was last seen to be this run's.
        self._own: tuple[int, int] | None = None

    def open(self) -> None:
        """Hold the directory open until it is closed.

        Raises:
            OSError: it is none, or cannot be opened.
        """
        self._folder = Folder(self.path)

    def close(self) -> None:
        """Close the directory, if it is open."""
        if self._folder is not None:
            self._folder.close()

    @property
    def folder(self) -> Folder:
        """The directory, open once it is claimed."""
        assert self._folder is not None, "not claimed"
        return self._folder

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
            journal = journal_in(self.folder)
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

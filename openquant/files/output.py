"""An output directory, held open: how its files get their final names.

Files are written in `.openquant/`, and renamed when they are complete and on disk. So a file under its final name is
finished, even if the process or the machine died. claim.py says whose the directory is and what is finished in it.

Somebody else may have put files into an output: links in place of our files are refused (folder.py).
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
    """The output directory of a run that has claimed it.

    Args:
        path: the directory.
        digest: digest of the run's plan.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        # In names of unfinished files, because ranks of a dead run may still write while the next run does.
        self._process = secrets.token_hex(4)
        self._folder: Folder | None = None
        # Inode and ctime of the journal when it last had this run's digest.
        self._checked_journal: tuple[int, int] | None = None

    def open(self) -> None:
        """Open the directory, until `close`.

        Raises:
            OSError: it is not a directory, or cannot be opened.
        """
        self._folder = Folder(self.path)

    def close(self) -> None:
        """Close the directory, if it is open."""
        if self._folder is not None:
            self._folder.close()

    @property
    def folder(self) -> Folder:
        """The open directory."""
        assert self._folder is not None, "not claimed"
        return self._folder

    def partial(self, name: str) -> str:
        """Return the name under which this process writes a file until it is finished, relative to the directory."""
        return f"{WORK}/{short_name(name)}.{self._process}.partial"

    def make_scratch(self, rank: int) -> Path:
        """Make a directory for source shards that a rank downloads, converts and removes. Returns its path.

        Raises:
            OutputError: it cannot be made.
        """
        name = f"{WORK}/{SOURCE}{rank}"
        with output_errors(self.path / name):
            self.folder.make(name)
        return self.path / name

    def publish(self, name: str) -> None:
        """Give a finished file its final name. Its bytes must be on disk, under the name that `partial` returns.

        Raises:
            OutputError: another run has claimed the directory since, or the file cannot be renamed.
        """
        target = self.path / name
        with output_errors(target):
            status = None if name == JOURNAL else self.folder.stat(JOURNAL)
        # A journal is only replaced, never changed. Reading it for each of thousands of files would take minutes.
        identity = status and (status.st_ino, status.st_ctime_ns)
        if identity is not None and identity != self._checked_journal:
            journal = journal_in(self.folder)
            if journal is not None and journal["digest"] != self.digest:
                raise OutputError(
                    f"{target} was not finished: another run has claimed {self.path}",
                    "let one run at a time write there",
                )
            self._checked_journal = identity
        with output_errors(target):
            self.folder.rename(self.partial(name), name)

    @contextmanager
    def _writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing; it gets its final name when the `with` block ends and its bytes are on disk."""
        with output_errors(self.path / name):
            handle = self.folder.open(self.partial(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        self.publish(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all; an existing one is replaced.

        Raises:
            OutputError: it cannot be written, or another run has claimed the directory since.
        """
        with self._writing(name) as file:
            file.write(data)

    def copy(self, source: Path, name: str) -> None:
        """Copy a file into the directory, whole or not at all; an existing one is replaced. Links are followed.

        Args:
            source: path of the file.
            name: its new name, relative to the directory.

        Raises:
            OutputError: it cannot be read or written, or another run has claimed the directory since.
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


def refuse_root(output: Path) -> None:
    """Refuse an output that is the root of the file system.

    Args:
        output: the output directory, which may be missing.

    Raises:
        OutputError: it is.
    """
    # realpath, since Path.resolve() fails on links that lead in a circle.
    real = Path(os.path.realpath(output))
    if real == real.parent:
        raise OutputError(f"the output {output} is the root of the file system", ELSEWHERE)


def refuse_overlap(source: Path, output: Path) -> None:
    """Refuse an output directory that is the source's, lies in it, or contains it.

    Args:
        source: directory of the source.
        output: the output directory, which may be missing.

    Raises:
        OutputError: it is refused.
    """
    output_path, source_path = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if output_path == source_path:
        where = "is the source itself"
    elif source_path in output_path.parents:
        where = f"lies inside the source {source}"
    elif output_path in source_path.parents:
        where = f"holds the source {source}"
    else:
        return
    raise OutputError(f"the output {output} {where}", ELSEWHERE)

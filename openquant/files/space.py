"""Checks before hours of work that disks have room for what a run will write.

require_space([(Path("out"), 5_000_000_000), (Path("."), 1_000_000)])       # added up if on one disk
find_shortages([(Path("out"), 5_000_000_000)])                             # the same, and nothing is refused
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import OutputError
from .journal import output_errors

# Directories, which may be missing, each with the bytes that will be written there at the same time.
Needs = Sequence[tuple[Path, int]]


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
        path, needed = writes[0][0], sum(nbytes for _, nbytes in writes)
        with output_errors(path, "examined"):
            free = shutil.disk_usage(existing_parent(path)).free + freed
        if needed > free:
            shortages.append(Shortage(path, needed, free))
    return shortages

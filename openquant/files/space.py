"""Checks before hours of work that disks have room for what a run will write.

require_space([(Path("out"), 5_000_000_000), (Path("."), 1_000_000)])       # added up if on one disk
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..errors import OutputError
from .journal import output_errors


def existing_parent(path: Path) -> Path:
    """Return a directory itself if it exists, else its nearest parent that does, as an absolute path without links.

    Args:
        path: the directory, absolute or relative to the working directory. If it is a file, so is the result.
    """
    absolute = Path(os.path.realpath(path))
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def require_space(needs: Sequence[tuple[Path, int]], freed: int = 0) -> None:
    """Refuse to begin a run whose files do not fit on their disks.

    Args:
        needs: directories, which may be missing, each with the bytes that will be written there; added up for each file
            system.
        freed: bytes that are removed from each file system first.

    Raises:
        OutputError: a file system has too little room, or cannot be examined. The message names the first of its
            directories.
    """
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, nbytes in needs:
        with output_errors(path, "examined"):
            disks.setdefault(existing_parent(path).stat().st_dev, []).append((path, nbytes))
    for writes in disks.values():
        path, needed = writes[0][0], sum(nbytes for _, nbytes in writes)
        with output_errors(path, "examined"):
            free = shutil.disk_usage(existing_parent(path)).free + freed
        if needed > free:
            raise OutputError(
                f"{path} needs {needed:,} bytes, its disk has {free:,} free",
                "free some space, or choose another disk with -o",
            )

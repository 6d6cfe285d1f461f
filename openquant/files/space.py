"""Room on disk for all that a run will write, looked for before hours of work.

require_space([(Path("out"), 5_000_000_000), (Path("."), 1_000_000)])       # these add up if they are on one disk
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..errors import OutputError
from .journal import output_errors


def existing_parent(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    absolute = Path(os.path.realpath(path))
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def require_space(needs: Sequence[tuple[Path, int]], freed: int = 0) -> None:
    """Refuse to begin what disks cannot hold.

    Args:
        needs: directories, which may be missing, and bytes that will be written there; those on one file system add up.
        freed: bytes that are removed there first.

    Raises:
        OutputError: a file system has less room. The first of its directories is named.
    """
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, nbytes in needs:
        with output_errors(path, "examined"):
            disks.setdefault(existing_parent(path).stat().st_dev, []).append((path, nbytes))
    for found in disks.values():
        path, needed = found[0][0], sum(nbytes for _, nbytes in found)
        with output_errors(path, "examined"):
            free = shutil.disk_usage(existing_parent(path)).free + freed
        if needed > free:
            raise OutputError(
                f"{path} needs {needed:,} bytes, its disk has {free:,} free",
                "free some space, or choose another disk with -o",
            )

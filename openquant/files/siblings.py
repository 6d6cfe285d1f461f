"""A directory whose name is like that of one that does not exist, for the hint of its error."""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import Path

# Entries of a directory that are looked at.
_MOST = 10_000


def similar_path(path: Path) -> Path | None:
    """Return the path beside one that does not exist whose name is nearest: "models/Qwen3-8B" for "models/Qwen3-8b".

    Args:
        path: the path that does not exist.

    Returns:
        The other path, written as this one is; None if none is near, or the directory cannot be read.
    """
    try:
        with os.scandir(path.parent) as entries:
            names = {entry.name.lower(): entry.name for entry in islice(entries, _MOST)}
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.name.lower(), names, n=1, cutoff=0.8)
    return path.with_name(names[near[0]]) if near else None

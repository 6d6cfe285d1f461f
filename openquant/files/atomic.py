"""Writes single files atomically, and refuses impossible paths before hours of work.

require_place(Path("report.html"), "--report report.html")      # before hours of work
write_atomic(Path("report.html"), data)                         # after them
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ..errors import OutputError, UsageError


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
    partial = path.with_name(f".openquant-{secrets.token_hex(8)}.partial")
    try:
        make_directory(path.parent)
        if path.is_symlink():
            raise OutputError(f"{path} is a link", f"{elsewhere}, or remove it")
        try:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(handle, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {_reason(error)}", f"free some space, or {elsewhere}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)

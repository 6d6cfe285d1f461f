"""A directory held open, in which no file is reached through a link.

Somebody else may have put files into an output: a link under one of our names would lead a write, rename or removal to
another file. So names are relative to the directory, such as "assets/logo.png", and each part is looked up in the open
directory before it. The directory itself may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Limits of Linux in bytes; those of macOS are lower.
_MAX_PART, _MAX_NAME = 255, 4095


def is_plain(name: object) -> bool:
    """Return whether a value can be the path of a file inside a directory: "assets/a.txt", not "../a" or "/a".

    Args:
        name: any value, as JSON may have it; False for all but text.
    """
    if not isinstance(name, str):
        return False
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError:
        return False  # half of a surrogate pair
    parts = data.split(b"/")
    return (
        len(data) <= _MAX_NAME
        and b"\0" not in data
        and not {b"", b".", b".."} & set(parts)
        and all(len(part) <= _MAX_PART for part in parts)
    )


class Folder:
    """A directory held open; use as a context manager, or close it.

    Its methods raise OSError; ELOOP or ENOTDIR if a part of a name is a link.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, _FOLDER)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    @contextmanager
    def _entered(self, name: str, make: bool = False) -> Iterator[int]:
        """Open a directory below this one, or this one for "". With `make` it is made if it is missing."""
        handle = os.dup(self._handle)
        try:
            for part in name.split("/") if name else ():
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=handle)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def _at(self, name: str, make: bool = False) -> Iterator[tuple[str, int]]:
        """Open the directory of a file. Yields the last part of the name and the directory's descriptor."""
        folder, _, last = name.rpartition("/")
        with self._entered(folder, make) as handle:
            yield last, handle

    def open(self, name: str, flags: int) -> int:
        """Open a file with `flags` of os.open. Returns its descriptor, which the caller closes."""
        with self._at(name) as (last, handle):
            # Without O_NONBLOCK, opening a pipe would wait for its other end.
            return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=handle)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of a file, or of a link itself; None if it is missing."""
        try:
            with self._at(name) as (last, handle):
                return os.stat(last, dir_fd=handle, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_file(self, name: str) -> bool:
        """Return whether a name is that of a regular file."""
        status = self.stat(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the contents of a file that exists; None if it is not a regular file or larger than `limit` bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(limit + 1)
        return data if len(data) <= limit else None

    def make(self, name: str) -> None:
        """Make a directory and its parents if they are missing."""
        with self._entered(name, make=True):
            pass

    def rename(self, old: str, new: str) -> None:
        """Rename a file, and write the change to disk. Missing directories are made, an existing file replaced."""
        with self._at(old) as (old_last, old_folder), self._at(new, make=True) as (new_last, new_folder):
            os.replace(old_last, new_last, src_dir_fd=old_folder, dst_dir_fd=new_folder)
            os.fsync(new_folder)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with suppress(FileNotFoundError, NotADirectoryError), self._at(name) as (last, handle):
            os.unlink(last, dir_fd=handle)

    def remove_folder(self, name: str) -> None:
        """Remove a directory and the files in it, if it exists. There must be no directory in it."""
        with suppress(FileNotFoundError):
            for entry in self.names(name):
                self.remove(f"{name}/{entry}")
            with self._at(name) as (last, handle):
                os.rmdir(last, dir_fd=handle)

    def names(self, name: str = "") -> list[str]:
        """Return the sorted names of what lies in the directory `name` below this one, or in this one for ""."""
        with self._entered(name) as handle:
            return sorted(os.listdir(handle))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name, such as "assets/a.txt", and the status of all files and directories below, in a fixed order.

        Links are not followed. Directories that cannot be read count as empty.
        """
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                with self._entered(folder) as handle, os.scandir(handle) as entries:
                    statuses = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
            except PermissionError:
                if not folder:
                    raise
                continue
            inner = []
            for last, status in statuses:
                name = f"{folder}/{last}" if folder else last
                if len(name) > _MAX_NAME:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                yield name, status
                if stat.S_ISDIR(status.st_mode):
                    inner.append(name)
            waiting += reversed(inner)

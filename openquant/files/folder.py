"""A directory held open, in which nothing is reached through a link.

What lies in an output may have been put there by somebody else: a link under a name of ours would lead a write, a
rename or a removal to another file. Names here are relative to the directory, such as "assets/logo.png", and every
part of one is looked up in the open directory before it. The directory itself may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# What Linux allows, in bytes; macOS allows less.
_LONGEST_PART, _LONGEST_NAME = 255, 4095


def is_plain(name: object) -> bool:
    """Whether something is a name that a file below a directory can have: "assets/a.txt", not "../a" or "/a"."""
    if not isinstance(name, str):
        return False
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError:
        return False  # half of a surrogate pair
    parts = data.split(b"/")
    return (
        len(data) <= _LONGEST_NAME
        and b"\0" not in data
        and not {b"", b".", b".."} & set(parts)
        and all(len(part) <= _LONGEST_PART for part in parts)
    )


class Folder:
    """A directory held open; use as a context manager, or close it.

    What its methods raise is an OSError: ELOOP or ENOTDIR where a link is in the way.

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
        """A directory below this one, open; "" is this one. With `make` it is made if it is missing."""
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
        """The last part of a name, and the open directory it lies in: ("logo.png", handle) for "assets/logo.png"."""
        folder, _, last = name.rpartition("/")
        with self._entered(folder, make) as handle:
            yield last, handle

    def open(self, name: str, flags: int) -> int:
        """The descriptor of a file, opened with `flags`; the caller closes it."""
        with self._at(name) as (last, handle):
            # Opening a pipe would wait for its other end.
            return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=handle)

    def stat(self, name: str) -> os.stat_result | None:
        """What is there, a link itself rather than what it leads to; None if nothing is."""
        try:
            with self._at(name) as (last, handle):
                return os.stat(last, dir_fd=handle, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_file(self, name: str) -> bool:
        """Whether a regular file is there."""
        found = self.stat(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def read(self, name: str, limit: int) -> bytes | None:
        """The contents of a regular file of at most `limit` bytes; None if something else is there, or more."""
        with os.fdopen(self.open(name, os.O_RDONLY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(limit + 1)
        return data if len(data) <= limit else None

    def make(self, name: str) -> None:
        """Make a directory, unless it is there."""
        with self._entered(name, make=True):
            pass

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in directories that are made if need be; it lasts from then on."""
        with self._at(old) as (old_last, old_folder), self._at(new, make=True) as (new_last, new_folder):
            os.replace(old_last, new_last, src_dir_fd=old_folder, dst_dir_fd=new_folder)
            os.fsync(new_folder)

    def remove(self, name: str) -> None:
        """Remove a file, or a link itself, if it is there."""
        with suppress(FileNotFoundError, NotADirectoryError), self._at(name) as (last, handle):
            os.unlink(last, dir_fd=handle)

    def remove_folder(self, name: str) -> None:
        """Remove a directory of files if it is there."""
        with suppress(FileNotFoundError):
            for entry in self.names(name):
                self.remove(f"{name}/{entry}")
            with self._at(name) as (last, handle):
                os.rmdir(last, dir_fd=handle)

    def names(self, name: str = "") -> list[str]:
        """The names in a directory, in order."""
        with self._entered(name) as handle:
            return sorted(os.listdir(handle))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Name and status of everything below, directories included and links not followed: ("assets/a.txt", its stat).

        The files of a directory come in order, before those of directories in it. What may not be read holds nothing.
        """
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                with self._entered(folder) as handle, os.scandir(handle) as entries:
                    found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
            except PermissionError:
                if not folder:
                    raise
                continue
            inner = []
            for last, what in found:
                name = f"{folder}/{last}" if folder else last
                if len(name) > _LONGEST_NAME:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                yield name, what
                if stat.S_ISDIR(what.st_mode):
                    inner.append(name)
            waiting += reversed(inner)

"""Reads small files whole: configs, indexes, cards, journals.

Anybody may have put anything into a directory: a pipe, a link to an endless device, a gigabyte, deeply nested JSON.
What these functions return is bounded in size and depth, and comes from a regular file.

A directory whose name is like that of one that does not exist, for the hint of its error.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import hashlib
import json
import os
import reprlib
import stat
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import SourceError

# Largest sizes in bytes: of a config, card or journal, and of an index, which lists every tensor.
MAX_SMALL = 16 << 20
MAX_INDEX = 100_000_000
# Nesting of JSON. Published configs have 5 levels; a thousand would parse, but overflow the stack later.
MAX_DEPTH = 64
# Values in a JSON text: four for each tensor that an index may list. More take seconds and gigabytes.
MAX_VALUES = 4_000_000
# Bytes that are hashed at a time.
_PIECE = 1 << 22
# Characters of foreign text that a message shows.
_MAX_SHOWN = 100

# How a pointer of git-lfs begins, and the bytes that one has at most (docs/spec.md of git-lfs).
_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_POINTER = 1023

_DAMAGED = "download or copy it again"


def open_regular(path: Path, what: str, hint: str = _DAMAGED, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or a device.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".
        hint: hint of the error.
        links: whether a link to a regular file is allowed.

    Returns:
        The open binary file, which the caller closes.

    Raises:
        SourceError: it is not a regular file, or no file can have this path.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    try:
        # Opening a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
        handle = os.open(path, flags)
    except OSError as error:
        # Errors of opening a socket, a device without a driver, and a link where none is allowed.
        not_regular = (errno.ENXIO, errno.ENODEV, *(() if links else (errno.ELOOP,)))
        if error.errno in not_regular:
            raise SourceError(f"{what} is not a regular file", hint) from None
        raise
    except ValueError:
        # A null byte or half of a surrogate pair, which names from JSON may have.
        raise SourceError(f"{what} is no name that a file can have", "give the name of a file") from None

    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise SourceError(f"{what} is not a regular file", hint)
    return os.fdopen(handle, "rb")


def file_sha256(path: Path, what: str) -> str:
    """Return the SHA-256 of a regular file of any size, hexadecimal. Links are followed.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".

    Raises:
        SourceError: it is not a regular file.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    # hashlib.file_digest is not in Python 3.10.
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE))
    with open_regular(path, what) as file:
        while count := os.readv(file.fileno(), [piece]):
            digest.update(piece[:count])
    return digest.hexdigest()


def refuse_pointer(data: bytes, what: str) -> None:
    """Refuse a file that a clone without git-lfs has left as a pointer.

    Args:
        data: the file's contents, or at least its first 64 bytes.
        what: name of the file in the message.

    Raises:
        SourceError: it is a pointer.
    """
    if data.startswith(_POINTER):
        raise SourceError(f"{what} is a pointer of git-lfs, not the file itself", "fetch the files: git lfs pull")


def read_small(path: Path, what: str, limit: int = MAX_SMALL) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes. Links are followed.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".
        limit: largest size in bytes.

    Raises:
        SourceError: it is not a regular file, larger than that, a pointer of git-lfs, or `path` is no possible path.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    with open_regular(path, what) as file:
        # In pieces, because a file may grow or claim a size of zero, and Python allocates all that is asked for.
        parts = []
        left = 0 if os.fstat(file.fileno()).st_size > limit else limit + 1
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
    if left == 0:
        raise SourceError(f"{what} is larger than {limit:,} bytes", _DAMAGED)
    refuse_pointer(data, what)
    return data


def parse_json(data: bytes, what: str) -> Any:
    """Parse a JSON text in UTF-8 without a byte-order mark, as engines do.

    Args:
        data: the text.
        what: name of the file in messages.

    Returns:
        The parsed value: dict, list, str, int, float, bool or None.

    Raises:
        SourceError: it is not JSON, nested deeper than MAX_DEPTH, or has more than about MAX_VALUES values.
    """
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError(
            f"{what} begins with a byte-order mark, which engines do not read",
            "save it again as UTF-8 without a mark",
        )

    if data.count(b",") > MAX_VALUES:
        raise SourceError(f"{what} holds more than {MAX_VALUES:,} values", _DAMAGED)
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not valid JSON: {error}", _DAMAGED) from None

    level = [value]
    depth = 0
    while level := [inner for outer in level for inner in _contents(outer) if isinstance(inner, (dict, list))]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise SourceError(f"{what} is nested more than {MAX_DEPTH} levels deep", _DAMAGED)
    return value


def _contents(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened for a message.

    Args:
        value: any value, such as one from a JSON file.
    """
    if not isinstance(value, str):
        return reprlib.repr(value)
    return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}...")


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

"""Small files that are read whole: configs, indexes, cards, journals.

Whoever made a directory may have put anything there: a pipe, a link to an endless device, a gigabyte, JSON nested to
the parser's limit. What these return is bounded in size and depth, and comes from a regular file.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import SourceError

# Of a config, a card or a journal; an index lists every tensor, and may be this long.
MAX_SMALL = 16 << 20
MAX_INDEX = 100_000_000
# Brackets within brackets. Published configs have five; what parses at a thousand fails wherever it is walked later.
MAX_DEPTH = 64
# Of lists and objects together: four for each tensor that an index may list. More take seconds and gigabytes.
MAX_VALUES = 4_000_000
# Letters of what others wrote in a message of ours.
_SHOWN = 100

_DAMAGED = "download or copy it again"


def open_regular(path: Path, what: str, hint: str = _DAMAGED, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading. A pipe, a socket, a device or a directory is never waited for.

    Args:
        path: the file.
        what: what messages call it, such as "config.json".
        hint: what to do if it is something else.
        links: whether a link to a file is one.

    Raises:
        SourceError: it is no regular file.
        OSError: it is missing or cannot be read; `readable()` and `explained()` tell the user.
    """
    try:
        # Opening a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
        handle = os.open(path, flags)
    except OSError as error:
        # What a socket, a device that nothing drives, and a link where none may be say to being opened.
        kinds = (errno.ENXIO, errno.ENODEV, *(() if links else (errno.ELOOP,)))
        if error.errno in kinds:
            raise SourceError(f"{what} is not a regular file", hint) from None
        raise
    except ValueError:
        # A null byte, or half of a surrogate pair, which JSON can hold.
        raise SourceError(f"{what} is no name that a file can have", "give the name of a file") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise SourceError(f"{what} is not a regular file", hint)
    return os.fdopen(handle, "rb")


def read_small(path: Path, what: str, limit: int = MAX_SMALL) -> bytes:
    """The contents of a regular file of at most `limit` bytes; links to one are followed.

    Args:
        path: the file.
        what: what messages call it, such as "config.json".
        limit: bytes it may have.

    Raises:
        SourceError: it is no regular file, or larger than that.
        OSError: it is missing or cannot be read; `readable()` and `explained()` tell the user.
    """
    with open_regular(path, what) as file:
        # A file can grow while it is read, and some claim no size at all; asked for all at once, Python takes that much
        # memory first.
        parts, left = [], 0 if os.fstat(file.fileno()).st_size > limit else limit + 1
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
    if left == 0:
        raise SourceError(f"{what} is larger than {limit:,} bytes", _DAMAGED)
    return data


def parse_json(data: bytes, what: str) -> Any:
    """The value of a JSON text in UTF-8, as engines read it: without a byte-order mark, nested at most MAX_DEPTH deep
    and of about MAX_VALUES values at most.

    Raises:
        SourceError: it is no such text.
    """
    if data.count(b",") > MAX_VALUES:
        raise SourceError(f"{what} holds more than {MAX_VALUES:,} values", _DAMAGED)
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not valid JSON: {error}", _DAMAGED) from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _contents(outer) if isinstance(inner, (dict, list))]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise SourceError(f"{what} is nested more than {MAX_DEPTH} levels deep", _DAMAGED)
    return value


def _contents(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def short_repr(value: object) -> str:
    """A value as Python writes it, cut to what a message can hold."""
    if not isinstance(value, str):
        return reprlib.repr(value)
    return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")

"""Memory that malloc gives back to the system, as far as it can be told to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's malloc.h: parameters of mallopt, what they are set to, and what they are by default. A tensor from 4 MB on has
# memory of its own, which the system zeroes before and takes back after; with such memory for every tensor a layer took
# a quarter more time. Smaller ones share an arena, of which 32 MB are kept. With tensors of up to 16 MB in it, hidden
# states of 4 MB that wait lay scattered among what layers computed with, and 8B shapes took 0.2 GB more.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = ((_TRIM_THRESHOLD, 1 << 25, 1 << 17), (_MMAP_THRESHOLD, 1 << 22, 1 << 17), (_ARENA_MAX, 1, 0))


@contextmanager
def given_back() -> Iterator[None]:
    """Meanwhile what is freed is used again or goes back to the system, whichever thread frees it.

    With an arena for each thread, tensors of many sizes that are made on one thread and freed on another would leave
    holes that grow with every layer. Nothing changes where the C library is not glibc.
    """
    try:
        library = ctypes.CDLL(None)
        tell = library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        tell = None
    if tell is None:
        yield
        return
    for number, value, _ in _SETTINGS:
        tell(number, value)
    try:
        yield
    finally:
        for number, _, value in _SETTINGS:
            tell(number, value)

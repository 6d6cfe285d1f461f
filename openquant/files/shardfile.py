"""Shard files: reading at offsets from a source, writing at offsets to an output.

Large writes go around the page cache where the system can (O_DIRECT): what is written is not read again, and
filling the cache with it costs more processor time than quantizing. The edges of such a write, which share a disk
block with a neighbour, and small tensors go through the cache as usual, many at once: each waits for the direct
writes to the same file. The two never touch the same block.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from .journal import output_errors
from .output import REPLACE, OutputDirectory

Bytes = npt.NDArray[np.uint8]

# Direct writes need offset, length and address to be multiples of the disk's block, and keep out of the pages that
# other writes go through.
ALIGNMENT = max(4096, os.sysconf("SC_PAGE_SIZE"))
DIRECT_FROM = 1 << 18
# Small writes to a shard are held back until they are so many bytes.
HELD = 1 << 20


class AlignedBuffer:
    """Memory whose place within a disk block can be chosen.

    Args:
        memory: makes so many bytes of it.
        size: bytes it must be able to hold.
    """

    def __init__(self, memory: Callable[[int], Bytes], size: int) -> None:
        self.size = size
        self._memory = memory(size + ALIGNMENT)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` bytes that lie in memory as they will lie at `offset` in a file."""
        start = (offset - self._memory.ctypes.data) % ALIGNMENT
        return self._memory[start : start + nbytes]


class SourceFile:
    """A source shard open for reading at offsets; use as a context manager.

    Raises:
        SourceError: it cannot be opened.
    """

    def __init__(self, path: Path, shard: str) -> None:
        self.path = path
        self.shard = shard

    def __enter__(self) -> SourceFile:
        try:
            # Opening a pipe, should it have become one, would wait for its other end.
            self.handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(
                f"{self.shard} cannot be read: {error.strerror}", "the source changed while it was being read"
            ) from None
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.handle)

    def read(self, into: Bytes, offset: int, label: str) -> None:
        """Fill a buffer from an offset of the file; `label` names the tensor in messages.

        Raises:
            SourceError: the file ends early, or the disk fails.
        """
        view = into.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.handle, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{label} in {self.shard} cannot be read: {error.strerror}", "check the disk that holds the source"
                ) from None
            if count == 0:
                raise SourceError(
                    f"{self.shard} ends inside {label}", "the source changed while it was being read: run again"
                )
            done += count


class ShardFile:
    """An output shard being filled, from any thread and in any order.

    Args:
        name: its file name.
        header: everything before the first tensor.
        size: of the whole file in bytes.
        output: the directory it will belong to.
        check: looks at it once all is on disk, before it gets its name.
        published: is told when it has its final name.
    """

    def __init__(
        self,
        name: str,
        header: bytes,
        size: int,
        output: OutputDirectory,
        check: Callable[[Path], None],
        published: Callable[[str], None],
    ) -> None:
        self.name = name
        self.header = header
        self.size = size
        self.check = check
        self.published = published
        self.output = output
        self.path = output.path / name
        self._left = size - len(header)
        self._lock = threading.Lock()
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._handle = -1
        self._direct = -1

    def open(self) -> None:
        """Create it, with its final size and its header."""
        partial = self.output.partial(self.name)
        with output_errors(self.path):
            self._handle = self.output.folder.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.ftruncate(self._handle, self.size)
            _write_all(self._handle, memoryview(self.header), 0)
        try:
            self._direct = self.output.folder.open(partial, os.O_WRONLY | os.O_DIRECT)
        except (AttributeError, OSError):
            self._direct = -1  # this system or file system has no such mode

    def write(self, data: npt.NDArray[Any], offset: int) -> None:
        """Write an array at an offset; the write that completes the file gives it its final name.

        Raises:
            OutputError: the disk is full or fails.
        """
        view = data.reshape(-1).view(np.uint8)
        with output_errors(self.path):
            start, end = self._write_direct(view, offset)
            edges = [(view[:start], offset), (view[end:], offset + end)]
            for edge, place in edges:
                if edge.nbytes >= DIRECT_FROM:
                    _write_all(self._handle, edge.data, place)
            with self._lock:
                for edge, place in edges:
                    if 0 < edge.nbytes < DIRECT_FROM:
                        self._held[place] = edge.tobytes()
                        self._held_bytes += edge.nbytes
                self._left -= view.nbytes
                complete = self._left == 0
                if complete or self._held_bytes >= HELD:
                    self._write_held()
        if complete:
            self._publish()

    def _write_direct(self, view: Bytes, offset: int) -> tuple[int, int]:
        """Write around the page cache what can go so; (begin, end) of that in `view`."""
        start = -offset % ALIGNMENT
        if self._direct < 0 or view.nbytes < DIRECT_FROM or (view.ctypes.data - offset) % ALIGNMENT:
            return 0, 0
        body = (view.nbytes - start) // ALIGNMENT * ALIGNMENT
        try:
            written = os.pwrite(self._direct, view[start : start + body].data, offset + start)
        except OSError:
            return 0, 0  # an ordinary write succeeds, or says what is wrong
        return start, start + written // ALIGNMENT * ALIGNMENT

    def _write_held(self) -> None:
        """Write what was held back, neighbours together."""
        start, run = 0, bytearray()
        for offset in sorted(self._held):
            if offset != start + len(run):
                _write_all(self._handle, memoryview(run), start)
                start, run = offset, bytearray()
            run += self._held[offset]
        _write_all(self._handle, memoryview(run), start)
        self._held.clear()
        self._held_bytes = 0

    def _publish(self) -> None:
        with output_errors(self.path):
            os.fsync(self._handle)
        self.close()
        partial = self.output.partial(self.name)
        with output_errors(self.path):
            # A run that took this one for dead has removed it.
            if not self.output.folder.is_file(partial):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.check(self.output.path / partial)
        self.output.publish(self.name)
        self.published(self.name)

    def close(self) -> None:
        """Close the file, finished or not."""
        for handle in (self._handle, self._direct):
            if handle >= 0:
                os.close(handle)
        self._handle = self._direct = -1


class FinishedShard:
    """An output shard that is finished, held against what would be written there now, from any thread, in any order.

    Args:
        name: its file name.
        header: everything before the first tensor.
        size: of the whole file in bytes.
        output: the directory it belongs to.
        confirmed: is told when all of it is the same.
        made_from: files of the source that look different since it was made, for messages.
    """

    def __init__(
        self,
        name: str,
        header: bytes,
        size: int,
        output: OutputDirectory,
        confirmed: Callable[[str], None],
        made_from: str,
    ) -> None:
        self.name = name
        self.header = header
        self.size = size
        self.output = output
        self.confirmed = confirmed
        self.made_from = made_from
        self.path = output.path / name
        self._left = size - len(header)
        self._lock = threading.Lock()
        self._handle = -1

    def open(self) -> None:
        """Open it, and compare size and header."""
        with output_errors(self.path, "read"):
            self._handle = self.output.folder.open(self.name, os.O_RDONLY)
            size = os.fstat(self._handle).st_size
        if size != self.size:
            self._refuse()
        self._compare(np.frombuffer(self.header, np.uint8), 0)

    def write(self, data: npt.NDArray[Any], offset: int) -> None:
        """Compare an array with what is at an offset.

        Raises:
            SourceError: it is something else.
        """
        view = data.reshape(-1).view(np.uint8)
        self._compare(view, offset)
        with self._lock:
            self._left -= view.nbytes
            complete = self._left == 0
        if complete:
            self.close()
            self.confirmed(self.name)

    def _compare(self, view: Bytes, offset: int) -> None:
        found = np.empty(min(HELD, view.nbytes), np.uint8)
        done = 0
        while done < view.nbytes:
            with output_errors(self.path, "read"):
                count = os.preadv(self._handle, [found[: view.nbytes - done].data], offset + done)
            if count == 0 or not np.array_equal(found[:count], view[done : done + count]):
                self._refuse()
            done += count

    def _refuse(self) -> NoReturn:
        raise SourceError(f"{self.made_from} changed since {self.path} was made", REPLACE)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)

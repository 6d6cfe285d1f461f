"""Shard files: reading at offsets from a source, writing at offsets to an output.

Large writes go around the page cache where the system can (O_DIRECT): what is written is not read again, and
filling the cache with it costs more processor time than quantizing. The edges of such a write, which share a disk
block with a neighbour, go through the cache as usual; the two never touch the same block.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import SourceError
from .output import OutputDirectory, explained
from .plan import Layout
from .verify import verify_shard

Bytes = npt.NDArray[np.uint8]

# Direct writes need offset, length and address to be multiples of the disk's block; no disk here has larger ones.
ALIGNMENT = 4096
DIRECT_FROM = 1 << 18


class AlignedBuffer:
    """Memory whose place within a disk block can be chosen.

    Args:
        size: bytes it must be able to hold.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.frombuffer(mmap.mmap(-1, size + ALIGNMENT), np.uint8)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` bytes that lie in memory as they will lie at `offset` in a file."""
        start = offset % ALIGNMENT
        return self._memory[start : start + nbytes]


class SourceFile:
    """A source shard open for reading at offsets; use as a context manager.

    Raises:
        SourceError: it cannot be opened.
    """

    def __init__(self, root: Path, shard: str) -> None:
        self.path = root / shard
        self.layout = shard

    def __enter__(self) -> SourceFile:
        try:
            self.handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"{self.layout} cannot be read: {error.strerror}", "the source changed while it was being read"
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
                    f"{label} in {self.layout} cannot be read: {error.strerror}", "check the disk that holds the source"
                ) from None
            if count == 0:
                raise SourceError(
                    f"{self.layout} ends inside {label}", "the source changed while it was being read: run again"
                )
            done += count


class ShardFile:
    """An output shard being filled, from any thread and in any order.

    Args:
        layout: what it is made of.
        output: the directory it will belong to.
    """

    def __init__(self, layout: Layout, output: OutputDirectory) -> None:
        self.layout = layout
        self.output = output
        self.path = output.path / layout.name
        self._left = layout.size - len(layout.header)
        self._lock = threading.Lock()
        self._handle = -1
        self._direct = -1

    def open(self) -> None:
        """Create it, with its final size and its header."""
        partial = self.output.partial(self.layout.name)
        with explained(self.path):
            self._handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._handle, self.layout.size)
            _write_all(self._handle, memoryview(self.layout.header), 0)
        try:
            self._direct = os.open(partial, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (AttributeError, OSError):
            self._direct = -1  # this system or file system has no such mode

    def write(self, data: npt.NDArray[Any], offset: int) -> None:
        """Write an array at an offset; the write that completes the file gives it its final name.

        Raises:
            OutputError: the disk is full or fails.
        """
        view = data.reshape(-1).view(np.uint8)
        with explained(self.path):
            self._write(view, offset)
        with self._lock:
            self._left -= view.nbytes
            complete = self._left == 0
        if complete:
            self._publish()

    def _write(self, view: Bytes, offset: int) -> None:
        if self._direct >= 0 and view.nbytes >= DIRECT_FROM and (view.ctypes.data - offset) % ALIGNMENT == 0:
            head = -offset % ALIGNMENT
            body = (view.nbytes - head) // ALIGNMENT * ALIGNMENT
            try:
                written = os.pwrite(self._direct, view[head : head + body].data, offset + head)
            except OSError:
                written = 0  # the ordinary write below succeeds, or says what is wrong
            written = written // ALIGNMENT * ALIGNMENT
            _write_all(self._handle, view[:head].data, offset)
            head += written
            view, offset = view[head:], offset + head
        _write_all(self._handle, view.data, offset)

    def _publish(self) -> None:
        with explained(self.path):
            os.fsync(self._handle)
        self.close()
        verify_shard(self.output.partial(self.layout.name), self.layout)
        self.output.publish(self.layout.name)

    def close(self) -> None:
        """Let go of the file, finished or not."""
        for handle in (self._handle, self._direct):
            if handle >= 0:
                os.close(handle)
        self._handle = self._direct = -1


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)

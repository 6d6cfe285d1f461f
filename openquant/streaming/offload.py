"""Hidden states of passes that wait, kept in a file beyond a budget of memory.

A tensor is emptied in place: its storage goes to the file and shrinks to nothing, and is filled again before the pass
runs on. So whatever else of the model's code holds that tensor, or a view of it, holds the same storage.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import OutputError
from ..machine import give_memory_back

# Smaller ones, such as masks and angles, are not worth a call to the system.
LEAST = 1 << 16
# Bytes that are put away before memory is given back: malloc keeps what is freed, and finds little use for holes of
# that size. Two layers of qwen3-1.7b's shapes held 0.17 GB so.
GIVEN_BACK = 1 << 26
# File systems that are memory.
IN_MEMORY = ("tmpfs", "ramfs")


class OffloadFile:
    """A file for hidden states; a context manager.

    It has no name, so nothing is left of it however the process ends.

    Args:
        directory: where it lies.
        budget: bytes of hidden states of waiting passes that stay in memory.
        asked: whether the user named the directory, which may then be memory itself.

    Raises:
        OutputError: no file can be made there, or what lies there takes memory.
    """

    def __init__(self, directory: Path, budget: int, asked: bool = False) -> None:
        if not asked:
            refuse_memory(directory, "hidden states")
        self.directory, self.budget = directory, budget
        with self._explained("written"):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def __enter__(self) -> OffloadFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"hidden states cannot be {doing} in {self.directory}: {error.strerror or error}",
                "free some space, or name another directory with --scratch",
            ) from error

    def require_room(self, needed: int) -> None:
        """Refuse to begin what the disk cannot hold.

        Args:
            needed: bytes.

        Raises:
            OutputError: there is less room.
        """
        with self._explained("written"):
            found = os.fstatvfs(self._file.fileno())
        room = found.f_bavail * found.f_frsize + self._end
        if needed > room:
            raise OutputError(
                f"hidden states take {needed:,} bytes in {self.directory}, which has room for {room:,}",
                "free some space, name another directory with --scratch, or use fewer or shorter texts",
            )

    def write(self, data: memoryview) -> int:
        """The offset that bytes were written at.

        Raises:
            OutputError: the disk is full or fails.
        """
        places = self._free.get(len(data))
        offset = places.pop() if places else self._end
        self._end = max(self._end, offset + len(data))
        with self._explained("written"):
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        return offset

    def read(self, into: memoryview, offset: int) -> None:
        """Fill a buffer with what was written at an offset, which is free then.

        Raises:
            OutputError: the disk fails.
        """
        with self._explained("read"):
            done = 0
            while done < len(into):
                count = os.preadv(self._file.fileno(), [into[done:]], offset + done)
                if count == 0:
                    raise OSError(f"the scratch file ends at {offset + done}")
                done += count
        self._free.setdefault(len(into), []).append(offset)


class OffloadedTensors:
    """The large tensors that a waiting pass holds, in memory or in a scratch file."""

    def __init__(self) -> None:
        # The model's code may hold what an earlier unit took, such as embeddings that a later one adds.
        self._seen: dict[int, Any] = {}
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []

    def note(self, call: Any) -> int:
        """Look at what a unit is called with, and say how many bytes the pass holds."""
        for tensor in _tensors(call):
            storage = tensor.untyped_storage()
            # What is mapped from a file cannot be resized, and takes no memory of its own.
            if storage.nbytes() >= LEAST and storage.resizable():
                make: Any = StorageWeakRef
                self._seen[storage._cdata] = make(storage)
        self._seen = {key: each for key, each in self._seen.items() if not each.expired()}
        return sum(storage.nbytes() for storage in self._storages())

    def put_away(self, scratch: OffloadFile) -> None:
        """Empty all of them into a file.

        Raises:
            OutputError: the disk is full or fails.
        """
        storage: Any
        for storage in self._storages():
            size = storage.nbytes()
            self._away.append((storage, size, scratch.write(_bytes(storage.cpu()))))
            storage.resize_(0)

    def bring_back(self, scratch: OffloadFile) -> None:
        """Fill them again.

        Raises:
            OutputError: the disk fails.
        """
        while self._away:
            storage, size, offset = self._away.pop()
            storage.resize_(size)
            if storage.device.type == "cpu":
                scratch.read(_bytes(storage), offset)
            else:
                make: Any = torch.UntypedStorage
                data = make(size)
                scratch.read(_bytes(data), offset)
                storage.copy_(data)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for each in self._seen.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
            if storage is not None:
                yield storage


class WaitingPass(Protocol):
    """A pass, which waits with what it calls a unit with, or is done."""

    call: Any
    done: bool
    held: OffloadedTensors


class HiddenStateStore:
    """Which groups' hidden states wait in memory, and which in a file: the first stay, as long as they fit."""

    def __init__(self, scratch: OffloadFile | None, groups: int) -> None:
        self._scratch = scratch
        self._groups = groups
        # Bytes of each group that waits in memory: before the current unit, or after it with more.
        self._held: dict[int, int] = {}
        # Bytes put away since memory was last given back.
        self._put = 0

    def put_away(self, group: Sequence[WaitingPass]) -> None:
        """Note what a group holds that waits now, and put it into the file where memory has no room for it."""
        if self._scratch is None:
            return
        waiting = [each for each in group if not each.done]
        size = sum(each.held.note(each.call) for each in waiting)
        self._held.pop(id(group), None)
        if sum(self._held.values()) + size <= self._scratch.budget:
            self._held[id(group)] = size
            return
        self._scratch.require_room(size * self._groups)
        for each in waiting:
            each.held.put_away(self._scratch)
        self._put += size
        if self._put >= GIVEN_BACK:
            give_memory_back()
            self._put = 0

    def bring_back(self, group: Sequence[WaitingPass]) -> None:
        """Have a group's hidden states in memory."""
        if self._scratch is not None:
            for each in group:
                each.held.bring_back(self._scratch)


def refuse_memory(directory: Path, what: str) -> None:
    """Refuse a directory that is no place for what has no room in memory.

    Args:
        directory: which nobody named.
        what: is to lie there.

    Raises:
        OutputError: its file system is memory.
    """
    if file_system(directory) in IN_MEMORY:
        raise OutputError(
            f"{directory} is kept in memory, where there is no room for {what}",
            "name a directory on a disk with --scratch",
        )


def file_system(directory: Path) -> str:
    """The type of the file system that a directory lies on, such as "ext4"; "" where that cannot be told."""
    try:
        number = directory.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    name = f"{os.major(number)}:{os.minor(number)}"
    found = (line.split(" - ") for line in lines if line.split()[2] == name)
    return next((tail[-1].split()[0] for tail in found), "")


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage. By torch's own ways to numpy it could not be resized any more."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)

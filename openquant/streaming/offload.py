"""Offloads hidden states of waiting forward passes to a file when they exceed a memory budget.

A tensor is emptied in place: its storage is written to the file and resized to zero, and filled again before the pass
runs on. So other references of the model's code to that tensor, or to views of it, stay valid.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import OutputError
from ..machine import give_memory_back

# Least bytes of a storage that is offloaded. Smaller ones, such as masks and angles, are not worth a system call.
LEAST = 1 << 16
# Bytes that are offloaded before memory is given back to the system. malloc keeps freed memory and seldom reuses holes
# of that size: with two layers of qwen3-1.7b's shapes it kept 0.17 GB.
GIVEN_BACK = 1 << 26


class OffloadFile:
    """An unnamed temporary file for hidden states; a context manager that closes it.

    The system deletes it however the process ends.

    Args:
        directory: the directory it is made in.
        budget: bytes of waiting passes' hidden states that stay in memory.

    Raises:
        OutputError: no file can be made there.
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self.directory = directory
        self.budget = budget
        with self._explain_errors("written"):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._end = 0
        # Offsets of regions that can be written again, by their size in bytes.
        self._free: dict[int, list[int]] = {}

    def __enter__(self) -> OffloadFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    @contextmanager
    def _explain_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"hidden states cannot be {doing} in {self.directory}: {error.strerror or error}",
                "free some space, or name another directory with --scratch",
            ) from error

    def write(self, data: memoryview) -> int:
        """Write bytes and return their offset in the file.

        Raises:
            OutputError: the disk is full or fails.
        """
        offsets = self._free.get(len(data))
        offset = offsets.pop() if offsets else self._end
        self._end = max(self._end, offset + len(data))
        with self._explain_errors("written"):
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        return offset

    def read(self, into: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes at an offset, whose region can be written again afterwards.

        Args:
            into: as long as what was written there.
            offset: what `write` returned; it is read once.

        Raises:
            OutputError: the disk fails.
        """
        with self._explain_errors("read"):
            done = 0
            while done < len(into):
                done += os.preadv(self._file.fileno(), [into[done:]], offset + done)
        self._free.setdefault(len(into), []).append(offset)

    def clear(self) -> None:
        """Drop all that was written, and give its space back."""
        self._end = 0
        self._free.clear()
        with self._explain_errors("written"):
            os.ftruncate(self._file.fileno(), 0)


class OffloadedTensors:
    """The large tensors of one waiting pass, in memory or in a file."""

    def __init__(self) -> None:
        # Weak references to storages by address. Those of earlier calls too: the model's code may still refer to them,
        # such as to embeddings that a later layer adds.
        self._tracked: dict[int, Any] = {}
        # Storage, size in bytes and offset in the file of each that is offloaded.
        self._offloaded: list[tuple[torch.UntypedStorage, int, int]] = []

    def track(self, call: Any) -> int:
        """Add the tensors of a unit's arguments, and return the bytes of all tracked tensors that still exist.

        Args:
            call: tensors in tuples, lists and dicts.
        """
        for tensor in _tensors(call):
            storage = tensor.untyped_storage()
            # A memory-mapped storage cannot be resized, and takes no memory of its own.
            if storage.nbytes() >= LEAST and storage.resizable():
                make: Any = StorageWeakRef
                self._tracked[storage._cdata] = make(storage)
        self._tracked = {key: reference for key, reference in self._tracked.items() if not reference.expired()}
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self, scratch: OffloadFile) -> None:
        """Move all of them to the file, and resize their storages to zero.

        Raises:
            OutputError: the disk is full or fails.
        """
        storage: Any
        for storage in self._storages():
            size = storage.nbytes()
            # Another pass of the batch has offloaded a tensor that both refer to, such as the token ids.
            if size:
                self._offloaded.append((storage, size, scratch.write(view_bytes(storage.cpu()))))
                storage.resize_(0)

    def restore(self, scratch: OffloadFile) -> None:
        """Read all that are in the file back into memory.

        Args:
            scratch: the file that they were moved to.

        Raises:
            OutputError: the disk fails.
        """
        while self._offloaded:
            storage, size, offset = self._offloaded.pop()
            storage.resize_(size)
            if storage.device.type == "cpu":
                scratch.read(view_bytes(storage), offset)
            else:
                make: Any = torch.UntypedStorage
                data = make(size)
                scratch.read(view_bytes(data), offset)
                storage.copy_(data)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for reference in self._tracked.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                yield storage


class WaitingPass(Protocol):
    """A suspended forward pass.

    Attributes:
        call: the arguments of the unit it waits for.
        done: whether it waits for none any more.
        offloaded: its large tensors.
    """

    call: Any
    done: bool
    offloaded: OffloadedTensors


class HiddenStateStore:
    """Decides which batches' hidden states wait in memory and which in the file: the first stay while they fit.

    Args:
        scratch: the file, with its memory budget; None keeps all in memory.
    """

    def __init__(self, scratch: OffloadFile | None) -> None:
        self._scratch = scratch
        # Bytes of each batch that waits in memory.
        self._in_memory: dict[int, int] = {}
        # Bytes offloaded since memory was last given back to the system.
        self._offloaded = 0

    def offload(self, batch: Sequence[WaitingPass]) -> None:
        """Move the hidden states of a batch that waits now to the file, if they do not fit into the budget.

        Args:
            batch: the passes of the batch; the same object each time.

        Raises:
            OutputError: the disk is full or fails.
        """
        if self._scratch is None:
            return

        waiting = [suspended for suspended in batch if not suspended.done]
        size = sum(suspended.offloaded.track(suspended.call) for suspended in waiting)
        self._in_memory.pop(id(batch), None)
        if sum(self._in_memory.values()) + size <= self._scratch.budget:
            self._in_memory[id(batch)] = size
            return

        for suspended in waiting:
            suspended.offloaded.offload(self._scratch)
        self._offloaded += size
        if self._offloaded >= GIVEN_BACK:
            give_memory_back()
            self._offloaded = 0

    def restore(self, batch: Sequence[WaitingPass]) -> None:
        """Read a batch's hidden states back into memory.

        Raises:
            OutputError: the disk fails.
        """
        if self._scratch is not None:
            for suspended in batch:
                suspended.offloaded.restore(self._scratch)


def view_bytes(values: torch.UntypedStorage | torch.Tensor) -> memoryview:
    """Return the bytes of a storage or a contiguous tensor on the CPU.

    Not through numpy: torch does not resize a storage that numpy has seen.
    """
    nbytes = values.nbytes if isinstance(values, torch.Tensor) else values.nbytes()
    array: Any = (ctypes.c_char * nbytes).from_address(values.data_ptr())
    # The view keeps the array, and so the memory.
    array.owner = values
    return memoryview(array).cast("B")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)

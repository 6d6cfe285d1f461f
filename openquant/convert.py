"""Carry out a plan: read, quantize and write, a bounded piece at a time, on several threads.

A worker holds one buffer of the source and what that becomes, never a whole tensor. numpy, torch and the system
calls let go of the interpreter lock, so threads suffice. Every byte's place is known from the plan: the number
of workers and the order in which they finish change nothing in the output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .errors import PlanError, SourceError
from .kernels import BITS_TYPE, Bits, Codes
from .output import OutputDirectory, explained
from .plan import Copy, Job, Matrix, Piece, Plan, Shard
from .schemes import CODE_MAX, Floats, Scheme
from .verify import verify_shard

BUFFER = 4 << 20
# A transposed matrix is read in columns: longer pieces of each stored row make fewer system calls.
TRANSPOSED_BUFFER = 32 << 20

Progress = Callable[[int], None]


class CpuKernels:
    """absmax and encode as in kernels.py."""

    absmax = staticmethod(kernels.absmax)
    encode = staticmethod(kernels.encode)


class TorchKernels:
    """The same on a torch device; the arithmetic of packed.py, so the codes are the same too.

    Args:
        device: a torch device name such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        self.dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

    def _load(self, bits: Bits, dtype: str) -> Any:
        signed = np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}")
        return self.torch.from_numpy(signed).to(self.device).view(self.dtypes[dtype])

    def absmax(self, bits: Bits, dtype: str, block: int | None) -> Floats:
        """As kernels.absmax."""
        from .packed import group_absmax

        return group_absmax(self._load(bits, dtype), block).cpu().numpy()

    def encode(self, bits: Bits, dtype: str, amax: Floats, scale: Floats, block: int | None) -> Codes:
        """As kernels.encode."""
        del amax  # only the CPU's tables are chosen by it
        from .packed import encode

        codes = encode(self._load(bits, dtype), self.torch.from_numpy(scale).to(self.device), block)
        return codes.view(self.torch.uint8).cpu().numpy()


def convert(
    plan: Plan, root: Path, output: OutputDirectory, workers: int, device: str = "cpu", progress: Progress | None = None
) -> None:
    """Write every shard of the plan that the output directory does not hold yet.

    Args:
        plan: what to do.
        root: the source directory.
        output: the claimed output directory.
        workers: number of threads.
        device: "cpu" or a torch device that computes the codes.
        progress: called, from any thread but never from two at once, with bytes of the source done.

    Raises:
        SourceError: NaN or infinity in a weight, or a source that cannot be read.
        PlanError: a joined set too large for the scheme.
        OutputError: the output cannot be written.
    """
    todo = [shard for shard in plan.shards if not output.is_finished(shard.name)]
    _Conversion(plan.scheme, todo, root, output, device, progress).run(workers)


class _OpenShard:
    """An output shard being filled."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.remaining = len(shard.jobs)
        self.handle = -1

    def open(self, output: OutputDirectory) -> None:
        path = output.partial(self.shard.name)
        with explained(output.path / self.shard.name):
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.ftruncate(self.handle, self.shard.size)
            _write_all(self.handle, memoryview(self.shard.header), 0)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class _Conversion:
    def __init__(
        self,
        scheme: Scheme,
        shards: Sequence[Shard],
        root: Path,
        output: OutputDirectory,
        device: str,
        progress: Progress | None,
    ) -> None:
        self.scheme = scheme
        self.root = root
        self.output = output
        self.device = device
        self.progress = progress
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self.open_shards: list[_OpenShard] = []
        self.tasks = self._tasks(shards)

    def _tasks(self, shards: Sequence[Shard]) -> Iterator[tuple[_OpenShard, Copy | Job]]:
        for shard in shards:
            target = _OpenShard(shard)
            self.open_shards.append(target)
            target.open(self.output)
            for job in shard.jobs:
                yield target, job

    def run(self, workers: int) -> None:
        threads = [threading.Thread(target=self._work, name=f"openquant-{n}", daemon=True) for n in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    # With a timeout, so that the main thread gets to see signals.
                    thread.join(0.2)
        finally:
            self.stopped.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for target in self.open_shards:
                target.close()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            worker = _Worker(self)
            while not self.stopped.is_set():
                with self.lock:
                    task = next(self.tasks, None)
                if task is None:
                    return
                target, job = task
                worker.do(job, target)
                with self.lock:
                    target.remaining -= 1
                    last = target.remaining == 0
                if last:
                    self._finish(target)
        except BaseException as error:
            with self.lock:
                if self.failure is None and not isinstance(error, _Stopped):
                    self.failure = error
            self.stopped.set()

    def _finish(self, target: _OpenShard) -> None:
        name = target.shard.name
        with explained(self.output.path / name):
            os.fsync(target.handle)
        target.close()
        verify_shard(self.output.partial(name), target.shard)
        self.output.publish(name)

    def advance(self, nbytes: int) -> None:
        if self.progress is not None:
            with self.lock:
                self.progress(nbytes)


class _Stopped(Exception):
    """Another worker failed, or the user interrupted: leave quietly."""


class _Worker:
    """One thread's buffers and kernels."""

    def __init__(self, conversion: _Conversion) -> None:
        self.conversion = conversion
        self.scheme = conversion.scheme
        self.kernels = CpuKernels() if conversion.device == "cpu" else TorchKernels(conversion.device)
        self.buffer = np.empty(BUFFER, np.uint8)

    def do(self, job: Copy | Job, target: _OpenShard) -> None:
        if isinstance(job, Copy):
            self._copy(job, target)
            return
        shared = self._shared_absmax(job) if job.joined else None
        for piece in job.pieces:
            if piece.scale_target is None:
                self._copy_matrix(piece, target)
            else:
                self._quantize(piece, piece.scale_target, shared, target)

    def _copy(self, job: Copy, target: _OpenShard) -> None:
        done = 0
        with _SourceFile(self.conversion.root, job.shard) as source:
            while done < job.nbytes:
                part = self.buffer[: min(BUFFER, job.nbytes - done)]
                source.read(part, job.offset + done, job.label)
                self._write(target, part, job.target + done)
                done += part.nbytes
                self._step(part.nbytes)

    def _copy_matrix(self, piece: Piece, target: _OpenShard) -> None:
        place = piece.target
        for bits in self._rows(piece.matrix, 1):
            self._write(target, bits, place)
            place += bits.nbytes
            self._step(bits.nbytes)

    def _shared_absmax(self, job: Job) -> Floats:
        largest = np.zeros((), np.float32)
        for matrix in job.joined:
            for bits in self._rows(matrix, 1):
                largest = np.maximum(largest, self._finite(matrix, self.kernels.absmax(bits, matrix.dtype, None)))
                self._step(0)
        limit = self.scheme.largest
        if limit is not None and largest > limit:
            names = ", ".join(matrix.label for matrix in job.joined)
            raise PlanError(
                f"{names}: a weight reaches {float(largest):g}, engines load at most {limit:g} under one scale",
                "use --scheme block, or leave these layers as they are with --ignore",
            )
        # The scale's floor acts as if the weights were larger.
        floor = np.float32(self.scheme.scale_floor) * CODE_MAX
        return np.where(largest == 0, largest, np.maximum(largest, floor)).astype(np.float32)

    def _quantize(self, piece: Piece, scale_place: int, shared: Floats | None, target: _OpenShard) -> None:
        matrix, block, place = piece.matrix, self.scheme.block, piece.target
        if shared is not None:
            self._write(target, self.scheme.scale(shared), scale_place)
        for bits in self._rows(matrix, block or 1):
            if shared is None:
                amax = self._finite(matrix, self.kernels.absmax(bits, matrix.dtype, block))
                scale = self.scheme.scale(amax)
                self._write(target, scale, scale_place)
                scale_place += scale.nbytes
            else:
                amax, scale = shared, self.scheme.scale(shared)
            codes = self.kernels.encode(bits, matrix.dtype, amax, scale, block)
            self._write(target, codes, place)
            place += codes.nbytes
            self._step(bits.nbytes)

    def _finite(self, matrix: Matrix, amax: Floats) -> Floats:
        if not np.isfinite(amax).all():
            raise SourceError(
                f"{matrix.label} in {matrix.shard} holds NaN or infinity",
                "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
            )
        return amax

    def _rows(self, matrix: Matrix, multiple: int) -> Iterator[Bits]:
        """The matrix in runs of rows [n, in], each a multiple of `multiple` rows and about a buffer long."""
        rows, cols = matrix.shape
        itemsize = BITS_TYPE[matrix.dtype].itemsize
        limit = TRANSPOSED_BUFFER if matrix.transposed else BUFFER
        step = min(rows, max(1, limit // (cols * itemsize) // multiple) * multiple)
        if self.buffer.nbytes < step * cols * itemsize:
            self.buffer = np.empty(step * cols * itemsize, np.uint8)
        with _SourceFile(self.conversion.root, matrix.shard) as source:
            for low in range(0, rows, step):
                count = min(step, rows - low)
                part = self.buffer[: count * cols * itemsize]
                if matrix.transposed:
                    width = count * itemsize
                    for col in range(cols):
                        piece = part[col * width : (col + 1) * width]
                        source.read(piece, matrix.offset + col * matrix.pitch + low * itemsize, matrix.label)
                    bits = np.ascontiguousarray(part.view(BITS_TYPE[matrix.dtype]).reshape(cols, count).T)
                else:
                    source.read(part, matrix.offset + low * matrix.pitch, matrix.label)
                    bits = part.view(BITS_TYPE[matrix.dtype]).reshape(count, cols)
                yield bits

    def _write(self, target: _OpenShard, data: npt.NDArray[Any], offset: int) -> None:
        with explained(self.conversion.output.path / target.shard.name):
            _write_all(target.handle, data.reshape(-1).view(np.uint8).data, offset)

    def _step(self, nbytes: int) -> None:
        if self.conversion.stopped.is_set():
            raise _Stopped
        self.conversion.advance(nbytes)


class _SourceFile:
    """A source shard open for reading at offsets."""

    def __init__(self, root: Path, shard: str) -> None:
        self.path = root / shard
        self.shard = shard

    def __enter__(self) -> _SourceFile:
        try:
            self.handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"{self.shard} cannot be read: {error.strerror}", "the source changed while it was being read"
            ) from None
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.handle)

    def read(self, into: npt.NDArray[np.uint8], offset: int, label: str) -> None:
        """Fill a buffer from an offset of the file."""
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


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)

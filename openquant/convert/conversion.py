"""Carry out a plan: read, quantize and write, a bounded piece at a time, on several threads.

A worker holds one buffer of the source and two of the output, never a whole tensor; while it computes, its last
piece is being written. numpy, torch and the system calls let go of the interpreter lock, so threads suffice. Every
byte's place is known from the plan: the number of workers and the order in which they finish change nothing in
the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import PlanError
from ..files.output import OutputDirectory
from ..files.shardfile import ALIGNMENT, AlignedBuffer, Bytes, FinishedShard, ShardFile, SourceFile
from ..files.tensors import DTYPE_BITS
from ..formats.finite import NonFinite, can_be_non_finite, count_non_finite
from ..formats.format import grid_of
from ..formats.kernels import from_float32, pack_words, scale_values
from ..formats.numbers import Floats
from ..formats.scales import choose_scales, choose_shared_scale
from ..formats.schemes import Scheme
from ..plan.layout import (
    CopyBytes,
    CopyRounded,
    CopyScale,
    Decode,
    Encode,
    Job,
    PutBytes,
    Shard,
    ShardLayout,
    TransformWeight,
    Unstack,
    WeightPlace,
    stored_as,
    weight_kinds,
)
from ..plan.plan import Plan
from ..threads import FirstFailure, Helpers, in_threads
from ..weights.reading import (
    BUFFER,
    SMALLEST_SCALE,
    Reader,
    check_scales,
    memory_of,
    require_finite,
    require_small,
    row_bytes,
)
from ..weights.weight import Weight
from .checks import verify_shard
from .devices import CpuKernels, TorchKernels, loops

# What the kernels need for CHUNK weights, their tables, and what they leave behind in the allocator.
KERNEL_MEMORY = 16 << 20

# What compiled loops need: numba, and its compiler at work.
COMPILED_MEMORY = 176 << 20
# From this many weights on they are worth loading, and compiling where they have not been before.
LARGE = 2 << 30

# Copies from this many bytes on are begun before all else of a shard.
LONG = 128 << 20

Progress = Callable[[int], None]
# What is made of a shard goes there.
Target = ShardFile | FinishedShard


def worker_memory(plan: Plan, device: str) -> int:
    """Bytes that one worker needs at most, beyond what the process already holds."""
    multiples = {scheme.format.height for scheme in plan.decisions.schemes} or {1}
    largest = BUFFER
    beside = 0
    for weight in weight_kinds(plan.decisions):
        piece, held = max(memory_of(weight, multiple) for multiple in multiples)
        largest = max(largest, piece)
        # What is decoded and turned around is held whole.
        turned = weight.shape[0] * weight.shape[1] * 2 if weight.turned else 0
        beside = max(beside, held + turned)
    # torch takes pinned memory in powers of two.
    buffer = largest if device == "cpu" else 1 << (largest + ALIGNMENT - 1).bit_length()
    # Read into one buffer, written from two.
    return 3 * buffer + beside + KERNEL_MEMORY


def worth_compiling(plan: Plan) -> bool:
    """Whether compiled loops save more time than they take to load; numba must be there."""
    searches = any(scheme.searches_scales for scheme in plan.decisions.schemes)
    kept = (kept.weight for kept in plan.decisions.kept if kept.weight is not None)
    weights = sum(weight.shape[0] * weight.shape[1] for weight in (*plan.layers.values(), *kept))
    return weights >= (LARGE // 4 if searches else LARGE) and find_spec("numba") is not None


class ShardTransfer(Protocol):
    """How source shards come and output shards go. Calls may come from any thread."""

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        """Wait until an output shard may be begun: what it is made from is here, or `stopped()` is true."""

    def path(self, name: str) -> Path:
        """Where a source shard lies, such as "/cache/model-00001-of-00005.safetensors"."""

    def finished(self, output: str) -> None:
        """Is told that an output shard has its final name."""


def convert(
    plan: Plan,
    shards: Sequence[Shard],
    traffic: ShardTransfer,
    output: OutputDirectory,
    workers: int,
    device: str = "cpu",
    progress: Progress | None = None,
    against: Mapping[str, str] | None = None,
    fast: bool = False,
) -> dict[str, NonFinite]:
    """Write shards of a plan, or hold finished ones against what would be written now.

    Args:
        plan: the plan.
        shards: those to write.
        traffic: where their sources are.
        output: the claimed output directory.
        workers: number of threads that compute; as many write.
        device: "cpu" or a torch device that computes the codes.
        progress: called, from any thread but never from two at once, with bytes of the source done.
        against: nothing is written, but each shard held against the source, of which these files changed.
        fast: whether its loops over weights are compiled, if they can be; they make the same bytes.

    Returns:
        The tensors with NaN or infinity among those that stay unquantized, which go to the output as they are.

    Raises:
        SourceError: NaN or infinity in a weight to be quantized, a source that cannot be read, or that a shard was not
            made from.
        PlanError: a weight too large for the scheme.
        OutputError: the output cannot be written.
    """
    return _Conversion(plan, shards, traffic, output, device, progress, against, fast).run(workers)


def check_copied(path: Path, layout: ShardLayout) -> dict[str, NonFinite]:
    """The tensors with NaN or infinity among those of a finished shard that are not quantized.

    Args:
        path: the shard.
        layout: what it is made of.

    Raises:
        SourceError: it cannot be read.
    """
    found: dict[str, NonFinite] = {}
    buffer = np.empty(BUFFER, np.uint8)
    with SourceFile(path, layout.name) as file:
        for job in layout.jobs:
            match job:
                case CopyBytes():
                    name, nbytes, dtype = job.label, job.nbytes, job.dtype
                case Unstack() | TransformWeight():
                    name, nbytes, dtype = _name(job.weight), job.weight.nbytes, job.weight.source.dtype
                case _:
                    continue
            for low in range(0, nbytes if can_be_non_finite(dtype) else 0, BUFFER):
                part = buffer[: min(BUFFER, nbytes - low)]
                file.read(part, job.target + low, name)
                if count := count_non_finite(part, dtype):
                    found[name] = found.get(name, NonFinite()) + count
    return found


def _name(weight: Weight) -> str:
    """The name under which a weight is written unquantized."""
    return weight.source.name if weight.expert < 0 else f"{weight.module}.weight"


class _Stopped(Exception):
    """Raised in a worker whose work is no longer wanted: another failed, or the user interrupted."""


class _Conversion:
    """One call of `convert`: the tasks still to do, the files being filled, and the first failure."""

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[Shard],
        traffic: ShardTransfer,
        output: OutputDirectory,
        device: str,
        progress: Progress | None,
        against: Mapping[str, str] | None,
        fast: bool,
    ) -> None:
        self.plan = plan
        self.traffic = traffic
        self.output = output
        self.device = device
        self.progress = progress
        self.against = against
        self.loops = loops(fast)
        self.lock = threading.Lock()
        # Another one, since a worker may wait long for its next task.
        self.task_lock = threading.Lock()
        self.stopped = threading.Event()
        self.failure = FirstFailure(self.stopped.set)
        # Those begun and not finished: each holds its shard's layout.
        self.files: dict[str, Target] = {}
        self.not_finite: dict[str, NonFinite] = {}
        self.tasks = self._tasks(shards)

    def _tasks(self, shards: Sequence[Shard]) -> Iterator[tuple[Target, Job]]:
        for shard in shards:
            self.traffic.wait_for(shard.name, self.stopped.is_set)
            if self.stopped.is_set():
                return
            layout = self.plan.layout.lay_out(shard.name)
            file = self.files[shard.name] = self._target(layout)
            file.open()
            # What one worker is busy with for long comes first, so that others have something to do meanwhile.
            for job in sorted(layout.jobs, key=lambda job: not (isinstance(job, CopyBytes) and job.nbytes >= LONG)):
                yield file, job

    def _target(self, layout: ShardLayout) -> Target:
        if self.against is None:
            check = partial(verify_shard, layout=layout)
            return ShardFile(layout.name, layout.header, layout.size, self.output, check, self._finished)
        made_from = self.against[layout.name]
        return FinishedShard(layout.name, layout.header, layout.size, self.output, self._finished, made_from)

    def _finished(self, shard: str) -> None:
        del self.files[shard]
        self.traffic.finished(shard)

    def run(self, workers: int) -> dict[str, NonFinite]:
        try:
            with Helpers(workers, "openquant-write") as writers:
                in_threads(lambda: self._work(writers), workers, self.stopped)
        finally:
            for file in self.files.values():
                file.close()
        self.failure.check()
        return self.not_finite

    def _work(self, writers: Helpers) -> None:
        worker = None
        try:
            worker = _Worker(self, writers)
            while not self.stopped.is_set():
                with self.task_lock:
                    task = next(self.tasks, None)
                if task is None:
                    break
                file, job = task
                worker.do(job, file)
        except BaseException as error:
            self.fail(error)
        finally:
            if worker is not None:
                worker.settle()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self.failure.keep(error)

    def check(self, name: str, data: Bytes, dtype: str) -> None:
        """Note NaN and infinity in a piece of a tensor that stays unquantized."""
        if found := count_non_finite(data, dtype):
            with self.lock:
                self.not_finite[name] = self.not_finite.get(name, NonFinite()) + found

    def advance(self, nbytes: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        if self.progress is not None and nbytes:
            with self.lock:
                self.progress(nbytes)


class _Slot:
    """An output buffer, and the write that still needs it."""

    def __init__(self, conversion: _Conversion, writers: Helpers, memory: Callable[[int], Bytes]) -> None:
        self.conversion = conversion
        self.writers = writers
        self.memory = memory
        self.buffer = AlignedBuffer(memory, 0)
        self.pending: Future[None] | None = None

    def take(self, offset: int, nbytes: int) -> Bytes:
        """Memory for `nbytes` bytes that will go to `offset`, once its last contents are written."""
        self.settle()
        if self.buffer.size < nbytes:
            self.buffer = AlignedBuffer(self.memory, nbytes)
        return self.buffer.view(offset, nbytes)

    def send(self, file: Target, data: Bytes, offset: int) -> None:
        """Have the memory written while the worker goes on."""

        def write() -> None:
            try:
                file.write(data, offset)
            except BaseException as error:
                self.conversion.fail(error)

        self.pending = self.writers.submit(write)

    def settle(self) -> None:
        """Wait until nothing is being written from here."""
        if self.pending is not None:
            wait([self.pending])


class _Worker:
    """One thread's buffers and kernels."""

    def __init__(self, conversion: _Conversion, writers: Helpers) -> None:
        self.conversion = conversion
        self.loops = conversion.loops
        self.kernels = CpuKernels(self.loops) if conversion.device == "cpu" else TorchKernels(conversion.device)
        self.reader = Reader(conversion.plan.seen.where, conversion.traffic.path, self.kernels.memory, self.loops)
        self.slots = [_Slot(conversion, writers, self.kernels.memory) for _ in range(2)]

    def do(self, job: Job, file: Target) -> None:
        """Carry out one job; its last pieces may still be on their way to the disk."""
        match job:
            case CopyBytes():
                with self.reader.open(job.shard) as source:
                    self._copy(job, source, file)
            case CopyRounded():
                with SourceFile(job.path, job.path.name) as source:
                    self._copy(job, source, file)
                self.conversion.advance(job.consumed)
            case CopyScale():
                self._copy_scale(job, file)
            case PutBytes():
                file.write(np.frombuffer(job.data, np.uint8), job.target)
                self.conversion.advance(job.nbytes)
            case Unstack():
                self._unstack(job, file)
            case TransformWeight():
                self._fold(job, file)
            case Decode() if job.weight.turned:
                self._turn(job, file)
            case Decode():
                self._decode(job, file)
            case Encode():
                self._encode(job, file)

    def settle(self) -> None:
        """Wait for the last writes."""
        for slot in self.slots:
            slot.settle()

    def _slot(self) -> _Slot:
        self.slots.reverse()
        return self.slots[0]

    def _copy(self, job: CopyBytes | CopyRounded, source: SourceFile, file: Target) -> None:
        done = 0
        while done < job.nbytes:
            slot = self._slot()
            part = slot.take(job.target + done, min(BUFFER, job.nbytes - done))
            source.read(part, job.offset + done, job.label)
            if isinstance(job, CopyBytes):
                self.conversion.check(job.label, part, job.dtype)
            slot.send(file, part, job.target + done)
            done += part.nbytes
            self.conversion.advance(part.nbytes if isinstance(job, CopyBytes) else 0)

    def _copy_scale(self, job: CopyScale, file: Target) -> None:
        raw = np.empty(job.nbytes, np.uint8)
        with self.reader.open(job.shard) as source:
            source.read(raw, job.offset, job.label)
        scale = scale_values(raw, job.dtype)
        check_scales(scale, job.label, job.shard, SMALLEST_SCALE)
        file.write(np.float32(1) / scale if job.inverse else scale, job.target)
        self.conversion.advance(job.nbytes)

    def _unstack(self, job: Unstack, file: Target) -> None:
        place = job.target
        for bits in self.reader.rows(job.weight, 1):
            slot = self._slot()
            part = slot.take(place, bits.nbytes)
            part[:] = bits.reshape(-1).view(np.uint8)
            self.conversion.check(_name(job.weight), part, job.weight.source.dtype)
            slot.send(file, part, place)
            place += part.nbytes
            self.conversion.advance(row_bytes(job.weight, len(bits)))

    def _fold(self, job: TransformWeight, file: Target) -> None:
        place = job.target
        for bits in self.reader.rows(job.weight, 1):
            slot = self._slot()
            made = from_float32(bits.view(np.float32), job.weight.source.dtype)
            part = slot.take(place, made.nbytes)
            part[:] = made.reshape(-1).view(np.uint8)
            self.conversion.check(_name(job.weight), part, job.weight.source.dtype)
            slot.send(file, part, place)
            place += part.nbytes
            self.conversion.advance(row_bytes(job.weight, len(bits)))

    def _decode(self, job: Decode, file: Target) -> None:
        place = job.target
        for bits in self.reader.rows(job.weight, 1):
            slot = self._slot()
            part = slot.take(place, bits.nbytes // 2)
            self.loops.to_bfloat16(bits.view(np.float32), part.view(np.uint16).reshape(bits.shape))
            slot.send(file, part, place)
            place += part.nbytes
            self.conversion.advance(row_bytes(job.weight, len(bits)))
        self._scales_done(job.weight)

    def _turn(self, job: Decode, file: Target) -> None:
        """Decode a weight, one expert's of a stack [experts, in, out], and write its rows as columns."""
        turned = np.empty(job.weight.shape[::-1], np.uint16)
        low = 0
        for bits in self.reader.rows(job.weight, 1):
            part = np.empty(bits.shape, np.uint16)
            self.loops.to_bfloat16(bits.view(np.float32), part)
            turned[:, low : low + len(bits)] = part.T
            low += len(bits)
            self.conversion.advance(row_bytes(job.weight, len(bits)))
        file.write(turned, job.target)
        self._scales_done(job.weight)

    def _scales_done(self, weight: Weight) -> None:
        if weight.format is not None:
            down, along = grid_of(weight.format.group, weight.shape)
            self.conversion.advance(down * along * DTYPE_BITS[weight.parts[1].dtype] // 8)

    def _encode(self, job: Encode, file: Target) -> None:
        stays = not job.fused or self.reader.keeps_scale(job.fused, job.scheme)
        shared = self._shared_absmax(job) if job.fused and not stays else None
        for piece in job.pieces:
            if piece.passes and stays:
                self._pass(piece, job.scheme, file)
            else:
                self._quantize(piece, job.scheme, shared, file)
            self._scales_done(piece.weight)

    def _pass(self, piece: WeightPlace, scheme: Scheme, file: Target) -> None:
        """Write the source's codes unchanged, and its scales as the scheme stores them."""
        weight, scale_place = piece.weight, piece.scale_target
        assert weight.format is not None
        group, extent, pitch = weight.format.group, weight.rows(self.reader.where), weight.row_bytes
        height, zero_place = max(group[0] or 1, scheme.format.height), piece.zero_target
        step = max(1, BUFFER // (pitch * height)) * height
        divisor = self.reader.divisor(weight)
        if scheme.format.global_scale is not None and piece.tied_target is not None:
            file.write(divisor, piece.tied_target)
        with self.reader.open(extent.shard) as source:
            for low in range(0, weight.shape[0], step):
                count = min(step, weight.shape[0] - low)
                place = piece.target + low * pitch
                slot = self._slot()
                codes = slot.take(place, count * pitch)
                self.reader.codes(source, weight, low, codes)
                scale = self.reader.scales(weight, low, count, SMALLEST_SCALE, scheme.format.scale.power_of_two)
                zero = self.reader.zeros(weight, low, count)
                self.reader.check_codes(weight, low, codes, scale, zero)
                slot.send(file, codes, place)
                stored = stored_as(weight, scheme).stored(scale, divisor)
                if low == 0 or group[0] is not None:
                    file.write(stored, scale_place)
                    scale_place += stored.nbytes
                if zero_place is not None:
                    zero_place = _write_zeros(np.zeros_like(scale) if zero is None else zero, scheme, file, zero_place)
                self.conversion.advance(codes.nbytes)

    def _shared_absmax(self, job: Encode) -> Floats:
        largest = np.zeros((1, 1), np.float32)
        for weight in job.fused:
            for bits in self.reader.rows(weight, 1):
                loaded = self.kernels.load(bits, weight.dtype)
                amax = self.kernels.absmax(loaded, weight.dtype, (None, None))
                require_finite(weight, amax, self.reader.where)
                largest = np.maximum(largest, amax)
                self.conversion.advance(0)
        limit = job.scheme.largest
        if largest.item() > limit:
            names = ", ".join(weight.rows(self.reader.where).label for weight in job.fused)
            raise PlanError(
                f"{names}: a weight reaches {largest.item():g}, engines load at most {limit:g} under one scale",
                "use --scheme block, or leave these layers as they are with --ignore",
            )
        return largest

    def _quantize(self, piece: WeightPlace, scheme: Scheme, shared: Floats | None, file: Target) -> None:
        weight, form, place, scale_place = piece.weight, scheme.format, piece.target, piece.scale_target
        importance = None if weight.transform is None else weight.transform.importance
        global_scale, zero_place = None, piece.zero_target
        if shared is not None and piece.tied_target is not None:
            shared_scale = choose_shared_scale(form, shared)
            file.write(form.stored(shared_scale) if form.shared else shared_scale, piece.tied_target)
            global_scale = None if form.shared else shared_scale
        for bits in self.reader.rows(weight, form.height):
            loaded, absmax = self.kernels.load(bits, weight.dtype), shared
            if absmax is None or not form.shared:
                absmax = self.kernels.absmax(loaded, weight.dtype, form.group)
                require_small(weight, absmax, scheme, self.reader.where)
            # On a CPU whatever the device, so that all of them find the same.
            scale, zero = choose_scales(scheme, bits, weight.dtype, absmax, global_scale, importance, self.loops)
            if shared is None or not form.shared:
                stored = self.loops.stored(form, scale, global_scale)
                file.write(stored, scale_place)
                scale_place += stored.nbytes
            if zero is not None and zero_place is not None:
                zero_place = _write_zeros(zero, scheme, file, zero_place)
            slot = self._slot()
            codes = slot.take(place, bits.size // form.number.per_byte)
            self.kernels.encode(loaded, weight.dtype, scale, form, codes.reshape(len(bits), -1), global_scale, zero)
            slot.send(file, codes, place)
            place += codes.nbytes
            self.conversion.advance(row_bytes(weight, len(bits)))


def _write_zeros(zero: Floats, scheme: Scheme, file: Target, place: int) -> int:
    """Write the zero points of some rows; where those of the next go."""
    words = pack_words(scheme.format.number.encode(zero), scheme.format.number)
    file.write(words, place)
    return place + words.nbytes

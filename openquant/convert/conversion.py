"""Carry out a plan: read, quantize and write one bounded piece at a time, on several threads.

A worker has one buffer for source bytes and two for output bytes, never a whole tensor; while it computes a piece, the
previous one is written. numpy, torch and system calls release the interpreter lock, so threads suffice. The plan fixes
the offset of every output byte, so the output does not depend on the number of workers or on their order.

Codes are computed with numpy or numba on the CPU, or with torch on another device. Both give the same bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import PlanError, UsageError
from ..files.output import OutputDirectory
from ..files.shardfile import ALIGNMENT, AlignedBuffer, Bytes, ShardFile, SourceFile, TensorInfo
from ..formats import kernels
from ..formats.format import Format, Group
from ..formats.kernels import Bits, Loops, choose_scales, choose_shared_scale, from_float32, pack_words
from ..formats.numbers import Codes, Floats, NonFinite, count_non_finite
from ..formats.schemes import Scheme
from ..machine import first_line
from ..plan.layout import (
    CopyRounded,
    CopyScale,
    CopyTensor,
    Decode,
    Encode,
    PutBytes,
    Shard,
    TransformWeight,
    Unstack,
    WeightPlace,
    Write,
    stored_as,
    weight_kinds,
)
from ..plan.plan import Plan
from ..threads import in_threads
from ..weights import reading
from ..weights.weight import Weight

# Bytes that the kernels need for CHUNK weights, for their tables, and as slack in the allocator.
KERNEL_MEMORY = 24 << 20

# Number of weights from which on the compiled loops save more time than loading and compiling them takes.
LARGE = 2 << 30

# How names of tensors end whose elements are weights.
WEIGHTS = (".weight", "_proj")
# Bytes that tell nearly always that others than the first occur.
PROBED = 1 << 12

# Copies of at least this many bytes are the first writes of a shard, so that other workers are busy meanwhile.
LONG = 128 << 20


def worker_memory(plan: Plan, device: str) -> int:
    """Return the bytes of memory that one worker needs at most.

    Args:
        plan: the plan to be carried out.
        device: "cpu" or a torch device such as "cuda:0".
    """
    multiples = {scheme.format.height for scheme in plan.decisions.schemes} or {1}
    largest_piece = reading.BUFFER
    temporary = 0

    for weight in weight_kinds(plan.decisions):
        piece, decoding = max(reading.memory_of(weight, multiple) for multiple in multiples)
        largest_piece = max(largest_piece, piece)
        # A weight that is decoded and transposed is in memory as a whole, in bfloat16.
        if weight.decodes_transposed:
            decoding += weight.shape[0] * weight.shape[1] * 2
        temporary = max(temporary, decoding)

    # torch allocates pinned memory in powers of two.
    buffer = largest_piece if device == "cpu" else 1 << (largest_piece + ALIGNMENT - 1).bit_length()
    # One buffer for reading, two for writing.
    return 3 * buffer + temporary + KERNEL_MEMORY


def worth_compiling(plan: Plan) -> bool:
    """Return whether compiled loops save more time than loading them takes; False if numba is not installed.

    Args:
        plan: the plan to be carried out, whose number of weights decides.
    """
    searches = any(scheme.searches_scales for scheme in plan.decisions.schemes)
    passthrough = (kept.weight for kept in plan.decisions.passthrough if kept.weight is not None)
    num_weights = sum(weight.shape[0] * weight.shape[1] for weight in (*plan.layers.values(), *passthrough))
    return num_weights >= (LARGE // 4 if searches else LARGE) and find_spec("numba") is not None


# Published weights of Linear layers reach hundreds. One that float16 cannot hold is damage, also where it shares its
# scale with a row or a block only.
IMPLAUSIBLE = 65504


@dataclass(frozen=True)
class WeightFindings:
    """What a conversion found in the weights that it read.

    Attributes:
        not_finite: by tensor name in the output, the numbers of NaN and of infinite elements in unquantized tensors,
            which are written all the same; tensors without any are left out.
        zero_layers: modules whose weights are all zero, quantized or not. Norms, and weights that the source has in
            codes, are not looked at.
        lost_layers: modules of which far more weights than usual became zero as they were quantized.
        zero_bytes: by tensor name, the bytes found in pieces that stand for nothing but zeros.
        lock: is held while counts of a tensor change, of which several threads may have pieces.
    """

    not_finite: dict[str, NonFinite] = field(default_factory=dict)
    zero_layers: set[str] = field(default_factory=set)
    lost_layers: set[str] = field(default_factory=set)
    zero_bytes: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look_at(self, tensor: TensorInfo, data: Bytes) -> None:
        """Look for NaN and infinities, and for nothing but zeros, in a piece of a tensor that stays as it is.

        Args:
            tensor: its name in the output, dtype and shape.
            data: bytes of whole elements.
        """
        name = tensor.name
        if count := count_non_finite(data, tensor.dtype):
            with self.lock:
                self.not_finite[name] = self.not_finite.get(name, NonFinite()) + count

        # Of a norm that is stored as its difference from 1, zeros are sound.
        if name.endswith(WEIGHTS) and len(tensor.shape) > 1 and _has_only(0, data):
            self.add_zeros(tensor, data.nbytes)

    def add_zeros(self, tensor: TensorInfo, nbytes: int) -> None:
        """Count the bytes that are codes of zero. In a layer of zeros these are all of its bytes."""
        with self.lock:
            self.zero_bytes[tensor.name] += nbytes
            if self.zero_bytes[tensor.name] == tensor.nbytes:
                self.zero_layers.add(tensor.name.removesuffix("_packed").removesuffix(".weight"))


def _has_only(value: int, data: Bytes) -> bool:
    """Return whether all bytes have a value."""
    return bool((data[:PROBED] == value).all() and (data == value).all())


class ShardProvider(Protocol):
    """Provides source shards, on disk or as they are downloaded. Methods may be called from any thread."""

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until all shards that `what` needs are on disk, or `stopped()`.

        Args:
            what: name of what reads the shards, such as a unit or an output shard.
            stopped: returns whether to give up waiting; called from time to time.

        Raises:
            SourceError: a shard cannot be downloaded.
            OutputError: it cannot be written.
        """

    def path(self, name: str) -> Path:
        """Return the path of a source shard that is on disk, by its file name."""

    def release(self, what: str) -> None:
        """Release the shards of `what`, so that they may be deleted."""


def _tensor(weight: Weight) -> TensorInfo:
    """Return the tensor as which an unquantized weight is written."""
    name = weight.source.name if weight.expert < 0 else f"{weight.module}.weight"
    return TensorInfo(name, weight.source.dtype, weight.shape)


def _is_long_copy(write: Write) -> bool:
    return isinstance(write, CopyTensor) and write.tensor.nbytes >= LONG


class _Stopped(Exception):
    """Ends a worker because another one failed or the user interrupted."""


@dataclass(eq=False)
class Conversion:
    """Writes output shards of a plan.

    Attributes:
        plan: what becomes of each tensor of the source.
        shards: file name of each output shard to write, and the size of its tensors in bytes.
        transfer: provides the source shards.
        output: the output directory, which this run has claimed.
        device: "cpu" or a torch device such as "cuda:0", which computes the codes.
        progress: called with the number of bytes written since the last call, from any thread, one at a time.
        loops: the result of `loops()`.
    """

    plan: Plan
    shards: Sequence[Shard]
    transfer: ShardProvider
    output: OutputDirectory
    device: str
    progress: Callable[[int], None] | None
    loops: Loops

    lock: threading.Lock = field(default_factory=threading.Lock)
    # Separate from `lock`, since a worker may wait long for its next task.
    task_lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)
    # By name, the shards that were begun and are not finished.
    files: dict[str, ShardFile] = field(default_factory=dict)
    findings: WeightFindings = field(default_factory=WeightFindings)

    def __post_init__(self) -> None:
        self.tasks = self._make_tasks()

    def _make_tasks(self) -> Iterator[tuple[ShardFile, Write]]:
        for shard in self.shards:
            self.transfer.wait_for(shard.name, self.stopped.is_set)
            if self.stopped.is_set():
                return
            layout = self.plan.layout.lay_out(shard.name)
            file = ShardFile(layout.name, layout.header, layout.size, self.output, self._finish, self.advance)
            self.files[shard.name] = file
            file.open()
            for write in sorted(layout.writes, key=lambda write: not _is_long_copy(write)):
                yield file, write

    def _finish(self, shard: str) -> None:
        del self.files[shard]
        self.transfer.release(shard)

    def run(self, workers: int) -> WeightFindings:
        """Write all of them.

        Args:
            workers: number of threads that compute; as many more write.

        Returns:
            The NaN and infinities in unquantized tensors, and the layers of zeros.

        Raises:
            SourceError: a weight to be quantized has NaN or infinity, or a source cannot be read.
            PlanError: a weight is too large for its scheme.
            OutputError: the output cannot be written.
            UsageError: the device failed, as for too little memory.
            Exception: what `transfer` or `progress` raised.
        """
        try:
            with ThreadPoolExecutor(workers, "openquant-write") as writers:
                in_threads(lambda: self._work(writers), workers, self.stopped)
        finally:
            for file in self.files.values():
                file.close()
        return self.findings

    def _work(self, writers: ThreadPoolExecutor) -> None:
        worker = _Worker(self, writers)
        try:
            while not self.stopped.is_set():
                with self.task_lock:
                    task = next(self.tasks, None)
                if task is None:
                    break

                file, write = task
                worker.do(write, file)
        finally:
            worker.wait()

    def advance(self, nbytes: int) -> None:
        """Report bytes as written, if there are any; raise _Stopped if the conversion was stopped."""
        if self.stopped.is_set():
            raise _Stopped
        if self.progress is not None and nbytes:
            with self.lock:
                self.progress(nbytes)


class _OutputBuffer:
    """A buffer for output bytes, which is written in the background."""

    def __init__(self, writers: ThreadPoolExecutor, memory: Callable[[int], Bytes]) -> None:
        self.writers = writers
        self.memory = memory
        self.buffer = AlignedBuffer(memory, 0)
        self.pending: Future[int] | None = None

    def take(self, offset: int, nbytes: int) -> Bytes:
        """Wait until the last contents are written, then return uint8 [nbytes] for bytes that will go to `offset`."""
        self.wait()
        if self.buffer.size < nbytes:
            self.buffer = AlignedBuffer(self.memory, nbytes)
        return self.buffer.view(offset, nbytes)

    def send(self, file: ShardFile, data: Bytes, offset: int) -> None:
        """Write `data`, which `take` returned, to `offset` of a file on another thread."""
        self.pending = self.writers.submit(file.write, data, offset)

    def wait(self) -> None:
        """Wait until the last contents are written; an error of writing them is raised here."""
        if self.pending is not None:
            self.pending.result()


class _Worker:
    """The buffers and kernels of one thread, and what it does for each kind of write."""

    def __init__(self, conversion: Conversion, writers: ThreadPoolExecutor) -> None:
        self.conversion = conversion
        self.findings = conversion.findings
        self.loops = conversion.loops
        # What computes codes: the loops, or torch with functions of the same names.
        self.kernels: Any = self.loops
        memory = reading.allocate
        if conversion.device != "cpu":
            self.kernels = TorchKernels(conversion.device)
            memory = self.kernels.memory
        self.reader = reading.Reader(conversion.plan.decoded.where, conversion.transfer.path, memory, self.loops)
        self.buffers = [_OutputBuffer(writers, memory) for _ in range(2)]

    def do(self, write: Write, file: ShardFile) -> None:
        """Carry out one write. Its last pieces may still be being written when this returns."""
        match write:
            case CopyTensor():
                with self.reader.open(write.location.shard) as source:
                    self._copy(write, source, write.location.offset, file)
            case CopyRounded():
                with SourceFile(write.place.path, write.place.path.name) as source:
                    self._copy(write, source, write.place.offset, file)
            case CopyScale():
                self._copy_scale(write, file)
            case PutBytes():
                file.write(np.frombuffer(write.data, np.uint8), write.target)

            case Unstack():
                self._write_unquantized(write, self.reader.rows(write.weight, 1), file)
            case TransformWeight():
                dtype = write.weight.source.dtype
                rows = (from_float32(bits.view(np.float32), dtype) for bits in self.reader.rows(write.weight, 1))
                self._write_unquantized(write, rows, file)
            case Decode() if write.weight.decodes_transposed:
                self._decode_transposed(write, file)
            case Decode():
                self._decode(write, file)
            case Encode():
                self._encode(write, file)

    def wait(self) -> None:
        """Wait for the last writes."""
        for buffer in self.buffers:
            buffer.wait()

    def _take(self, offset: int, nbytes: int) -> Bytes:
        """Return uint8 [nbytes] for bytes that will go to `offset`, in the buffer that was not taken last."""
        self.buffers.reverse()
        return self.buffers[0].take(offset, nbytes)

    def _copy(self, write: CopyTensor | CopyRounded, source: SourceFile, offset: int, file: ShardFile) -> None:
        """Copy a tensor that begins at `offset` of a file."""
        name = write.tensor.name
        nbytes = write.tensor.nbytes
        done = 0

        while done < nbytes:
            piece = self._take(write.target + done, min(reading.BUFFER, nbytes - done))
            source.read(piece, offset + done, name)
            if isinstance(write, CopyTensor):
                self.findings.look_at(write.tensor, piece)
            elif write.zero is not None and _has_only(write.zero, piece):
                self.findings.add_zeros(write.tensor, piece.nbytes)
            self.buffers[0].send(file, piece, write.target + done)
            done += piece.nbytes

    def _copy_scale(self, write: CopyScale, file: ShardFile) -> None:
        scale = self.reader.read_scale(write.tensor)
        reading.check_scales(scale, write.tensor.name, write.location.shard, reading.SMALLEST_SCALE)
        if write.inverse:
            scale = np.float32(1) / scale
        file.write(scale, write.target)

    def _write_unquantized(self, write: Unstack | TransformWeight, rows: Iterator[Bits], file: ShardFile) -> None:
        """Write rows of a weight, given as bits [n, in] of its own dtype."""
        target = write.target
        tensor = _tensor(write.weight)
        for bits in rows:
            piece = self._take(target, bits.nbytes)
            piece[:] = bits.reshape(-1).view(np.uint8)
            self.findings.look_at(tensor, piece)
            self.buffers[0].send(file, piece, target)
            target += piece.nbytes

    def _decode(self, write: Decode, file: ShardFile) -> None:
        target = write.target
        for bits in self.reader.rows(write.weight, 1):
            piece = self._take(target, bits.nbytes // 2)
            self.loops.to_bfloat16(bits.view(np.float32), piece.view(np.uint16).reshape(bits.shape))
            self.buffers[0].send(file, piece, target)
            target += piece.nbytes

    def _decode_transposed(self, write: Decode, file: ShardFile) -> None:
        """Decode the weight of one expert of a stack [experts, in, out], and write its transpose."""
        transposed = np.empty(write.weight.shape[::-1], np.uint16)
        low = 0
        for bits in self.reader.rows(write.weight, 1):
            rows = np.empty(bits.shape, np.uint16)
            self.loops.to_bfloat16(bits.view(np.float32), rows)
            transposed[:, low : low + len(bits)] = rows.T
            low += len(bits)
        file.write(transposed, write.target)

    def _encode(self, write: Encode, file: ShardFile) -> None:
        keeps_scale = not write.fused or self.reader.keeps_shared_scale(write.fused, write.scheme)

        if write.keeps and not keeps_scale:
            # vLLM rounds the codes of layers with one scale per tensor again as it loads them.
            if write.scheme.format.global_scale is not None:
                names = ", ".join(weight.global_scale.name for weight in write.fused if weight.global_scale)
                raise PlanError(
                    f"{names} are not equal, and engines take one global scale for all of these layers",
                    f"use --scheme {write.scheme.name}, which quantizes them again under one",
                )
            keeps_scale = True

        exact = shared_absmax = None
        if not keeps_scale:
            exact = self.reader.exact_global_scale(write.fused, write.scheme)
        if not keeps_scale and exact is None:
            shared_absmax = self._shared_absmax(write)

        for piece in write.pieces:
            if (piece.keeps_codes and keeps_scale) or exact is not None:
                self._copy_codes(piece, write.scheme, file, exact)
            else:
                self._quantize(piece, write.scheme, shared_absmax, file)

    def _copy_codes(self, piece: WeightPlace, scheme: Scheme, file: ShardFile, exact: Floats | None) -> None:
        """Write the source's codes unchanged, and its scales as the scheme has them; `exact`: the global scale."""
        weight = piece.weight
        scale_target = piece.scale_target
        zero_target = piece.zero_target

        assert weight.format is not None

        group = weight.format.group
        extent = weight.extent(self.reader.where)
        pitch = weight.row_bytes
        height = max(group[0] or 1, scheme.format.height)

        if weight.format.columns is not None:
            # In AutoAWQ's order several rows share a word.
            height = max(height, weight.format.number.run)
        step = max(1, reading.BUFFER // (pitch * height)) * height

        global_scale = self.reader.global_scale(weight) if exact is None else exact
        if scheme.format.global_scale is not None and piece.tied_target is not None:
            file.write(global_scale, piece.tied_target)

        with self.reader.open(extent.shard) as source:
            for low in range(0, weight.shape[0], step):
                count = min(step, weight.shape[0] - low)
                target = piece.target + low * pitch
                codes = self._take(target, count * pitch)

                self.reader.read_codes(source, weight, low, codes)
                powers = scheme.format.scale.power_of_two or exact is not None
                scale = self.reader.scales(weight, low, count, reading.SMALLEST_SCALE, powers)
                zero_point = self.reader.zero_points(weight, low, count)
                self.reader.check_codes(weight, low, codes, scale, zero_point)

                if exact is not None:
                    scale = reading.divided_scales(
                        scale, codes, scheme.format, scheme.format.scale.of_zeros / exact.item()
                    )

                self.buffers[0].send(file, codes, target)
                if low == 0 or group[0] is not None:
                    stored = stored_as(weight, scheme).encode_scales(scale, global_scale)
                    scale_target = file.write(stored, scale_target)

                if zero_target is not None:
                    if zero_point is None:
                        zero_point = np.zeros_like(scale)
                    zero_target = _write_zero_points(zero_point, scheme, file, zero_target)

    def _shared_absmax(self, write: Encode) -> Floats:
        """Return the largest absolute weight of fused layers, float32 [1, 1]."""
        largest = np.zeros((1, 1), np.float32)

        for weight in write.fused:
            is_zero = True

            for bits in self.reader.rows(weight, 1):
                absmax = self.kernels.absmax(bits, weight.dtype, (None, None))
                reading.require_finite(weight, absmax, self.reader.where)
                is_zero = is_zero and not absmax.any()
                largest = np.maximum(largest, absmax)
                self.conversion.advance(0)

            if is_zero:
                self.findings.zero_layers.add(weight.module)

        limit = write.scheme.largest
        if largest.item() > limit:
            names = ", ".join(weight.extent(self.reader.where).label for weight in write.fused)
            raise PlanError(
                f"{names}: a weight reaches {largest.item():g}, engines load at most {limit:g} under one scale",
                "a weight this large is mostly damage: compare it with another copy, or leave these layers as they are "
                "with --ignore",
            )

        return largest

    def _quantize(self, piece: WeightPlace, scheme: Scheme, shared_absmax: Floats | None, file: ShardFile) -> None:
        weight = piece.weight
        fmt = scheme.format
        target = piece.target
        scale_target = piece.scale_target
        zero_target = piece.zero_target

        importance = None if weight.transform is None else weight.transform.importance
        global_scale = None

        # Where there is a shared one, _shared_absmax has looked.
        is_zero = shared_absmax is None
        largest = 0.0
        lost = reading.LostWeights(fmt, weight.shape[0])

        if shared_absmax is not None and piece.tied_target is not None:
            shared_scale = choose_shared_scale(fmt, shared_absmax)
            if fmt.shared:
                file.write(fmt.encode_scales(shared_scale), piece.tied_target)
            else:
                file.write(shared_scale, piece.tied_target)
                global_scale = shared_scale

        for bits in self.reader.rows(weight, fmt.height):
            absmax = shared_absmax
            if absmax is None or not fmt.shared:
                absmax = self.kernels.absmax(bits, weight.dtype, fmt.group)
                reading.require_in_range(weight, absmax, scheme, self.reader.where)
            is_zero = is_zero and not absmax.any()
            largest = max(largest, float(absmax.max()))

            # Scales are chosen on the CPU whatever the device, so that all devices choose the same.
            scale, zero_point = choose_scales(scheme, bits, weight.dtype, absmax, global_scale, importance, self.loops)

            if shared_absmax is None or not fmt.shared:
                scale_target = file.write(fmt.encode_scales(scale, global_scale), scale_target)

            if zero_point is not None and zero_target is not None:
                zero_target = _write_zero_points(zero_point, scheme, file, zero_target)

            codes = self._take(target, len(bits) * fmt.number.nbytes(bits.shape[1]))
            out = codes.reshape(len(bits), -1)
            self.kernels.encode_stored(bits, weight.dtype, scale, fmt, out, zero_point)
            lost.look_at(out, zero_point, bits)
            self.buffers[0].send(file, codes, target)

            target += codes.nbytes

        if is_zero:
            self.findings.zero_layers.add(weight.module)
        elif lost.unusual or largest > IMPLAUSIBLE:
            self.findings.lost_layers.add(weight.module)


def _write_zero_points(zero_point: Floats, scheme: Scheme, file: ShardFile, target: int) -> int:
    """Write the zero points of some rows at an offset. Returns the offset for those of the next rows."""
    return file.write(pack_words(scheme.format.number.encode(zero_point), scheme.format.number), target)


def loops(fast: bool) -> Loops:
    """Return the numpy loops of formats/kernels.py, or if `fast` the compiled ones of formats/compiled.py.

    Args:
        fast: whether to use numba; where it cannot be imported, the numpy loops are returned all the same.

    Returns:
        The module, whose functions choose scales, encode and decode.
    """
    if fast:
        # numba may be installed and yet too old for this numpy.
        with suppress(ImportError, OSError):
            from ..formats import compiled

            return compiled
    return kernels


class TorchKernels:
    """Computes the same as formats/kernels.py on a torch device, by formats/reference.py. Each worker has its own.

    On a GPU its buffers are pinned, so that copies go by DMA, and it works on its own stream, so that one worker's
    copies overlap another worker's arithmetic and the reads and writes of all.

    Its methods raise UsageError if the device fails, as for too little memory.

    Args:
        device: a torch device name such as "cuda:0".
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        self.stream: Any = None
        self.loaded: tuple[Bits | None, Any] = None, None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Work on this worker's stream, and turn errors of the device, such as too little memory, into UsageError."""
        try:
            with self.torch.cuda.stream(self.stream):
                yield
        except RuntimeError as error:
            raise UsageError(
                f"{self.device} failed: {first_line(error)}", "use fewer --workers, or --device cpu"
            ) from error

    def memory(self, nbytes: int) -> Bytes:
        """Allocate a host buffer for weights or codes, uint8 [nbytes]; pinned if the device is a GPU."""
        with self._working():
            pinned = self.stream is not None
            return np.asarray(self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=pinned).numpy())

    def load(self, bits: Bits, dtype: str) -> Any:
        """Copy weights to the device, once for both `absmax` and `encode_stored`.

        Rows that are read into the same buffer are arrays of their own.
        """
        from ..formats.reference import TORCH_DTYPES

        if bits is not self.loaded[0]:
            signed = self.torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}"))
            self.loaded = bits, signed.to(self.device, non_blocking=True).view(TORCH_DTYPES[dtype])
        return self.loaded[1]

    def absmax(self, bits: Bits, dtype: str, group: Group) -> Floats:
        """Compute on the device what kernels.absmax does."""
        from ..formats.reference import group_absmax

        with self._working():
            return np.asarray(group_absmax(self.load(bits, dtype), group).cpu().numpy())

    def encode_stored(
        self, bits: Bits, dtype: str, scale: Floats, fmt: Format, out: Codes, zero_point: Floats | None = None
    ) -> None:
        """Compute on the device what kernels.encode_stored does."""
        from ..formats.reference import encode

        with self._working():
            zeros = None if zero_point is None else self.torch.from_numpy(zero_point).to(self.device)
            codes = encode(self.load(bits, dtype), self.torch.from_numpy(scale).to(self.device), fmt, zeros)
            self.torch.from_numpy(out).copy_(codes.view(self.torch.uint8), non_blocking=True)
            if self.stream is not None:
                # The codes must have arrived before they are written, and before the buffers are used again.
                self.stream.synchronize()

"""Tensors of a quantized directory read for `verify`: NaN among codes, unsound scales, differences from the source.

Threads read a bounded piece at a time, as a conversion does; nothing of a tensor's size is ever held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import Bytes
from ..files.tensors import TensorInfo
from ..formats.finite import NonFinite, count_non_finite
from ..formats.format import FLOATS
from ..formats.kernels import Bits, from_float32, to_bfloat16, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..threads import in_threads
from ..weights.quant_error import Comparison, ErrorSum, LayerError
from ..weights.reading import Reader
from ..weights.weight import Weight

PIECE = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorTask:
    """One tensor to be read.

    Attributes:
        info: the tensor.
        weight: what it is if it holds codes; None for one that must equal the source's.
        original: the source's weight, or the bytes that a fold makes of the source's tensor. One of codes without it is
            not decoded, any other tensor is held against the source's tensor of the same name.
        scheme: what it was quantized in, if quantizing the source again must give the same; None if others made it.
        weighed: whether its scales were searched for by what is not known here.
        scale: whether it is a scale by itself, of keys or values.
        alone: whether it is held against nothing, only looked at for NaN and infinity.
        gptq_rounded: whether GPTQ rounded it: then only its scales can be made again.
    """

    info: TensorInfo
    weight: Weight | None = None
    original: Weight | bytes | None = None
    scheme: Scheme | None = None
    weighed: bool = False
    gptq_rounded: bool = False
    scale: bool = False
    alone: bool = False


@dataclass
class TensorFindings:
    """What was found in the tensors that were read.

    Attributes:
        problems: what is off, in the order of the tasks.
        errors: of each layer that was decoded, in the same order.
        scales: the scales that are a single value, by name.
        equal: number of tensors that equal the source's.
        absmax: the largest absolute weight in the source of each layer whose scheme has one scale for several, by
            module.
        compared: number of codes that were made again from the source, under the scales that are there.
        same: how many of them are those that are there.
        not_finite: the NaN and infinities in each unquantized tensor that has some, by name.
        equal_names: which of these tensors equal the source's.
    """

    problems: list[str] = field(default_factory=list)
    errors: list[LayerError] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    equal: int = 0
    absmax: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    same: int = 0
    not_finite: dict[str, NonFinite] = field(default_factory=dict)
    equal_names: set[str] = field(default_factory=set)


def read_contents(
    checkpoint: Checkpoint,
    source: Checkpoint | None,
    tasks: Sequence[TensorTask],
    workers: int,
    progress: Progress | None,
) -> TensorFindings:
    """Read tensors on so many threads.

    Args:
        checkpoint: the directory they are in.
        source: what it was made from; needed for tasks other than weights that are not decoded.
        tasks: the tensors.
        workers: number of threads.
        progress: told the bytes read so far and in all, never from two threads at once.
    """
    return _Reading(checkpoint, source, tasks, progress).run(workers)


class _Reading:
    """One call of `read_contents`: the tasks still to do, and what was found so far."""

    def __init__(
        self, checkpoint: Checkpoint, source: Checkpoint | None, tasks: Sequence[TensorTask], progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.source = source
        self.tasks = iter(enumerate(tasks))
        self.total = sum(task.info.nbytes for task in tasks)
        self.done = 0
        self.progress = progress
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.found: list[tuple[int, str]] = []
        self.errors: list[tuple[int, LayerError]] = []
        self.contents = TensorFindings()

    def run(self, workers: int) -> TensorFindings:
        """What all tasks found, once the last is done; the first error of a worker is raised."""
        in_threads(self._work, workers, self.stopped)
        self.contents.problems = [message for _, message in sorted(self.found, key=lambda entry: entry[0])]
        self.contents.errors = [error for _, error in sorted(self.errors, key=lambda entry: entry[0])]
        return self.contents

    def _work(self) -> None:
        worker = _Worker(self)
        while not self.stopped.is_set():
            with self.lock:
                following = next(self.tasks, None)
            if following is None:
                break
            number, task = following
            try:
                if task.scale:
                    worker.check_scale(number, task.info)
                elif task.alone:
                    worker.check_finite(task.info)
                elif task.weight is not None:
                    assert not isinstance(task.original, bytes)
                    worker.check(number, task.weight, task.original, task.scheme, task.weighed, task.gptq_rounded)
                else:
                    worker.compare(number, task.info, task.original)
            except SourceError as error:
                self.say(number, error.message)

    def place(self, name: str) -> str:
        """A tensor for a message: "model.safetensors: lm_head.weight"."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def say(self, number: int, message: str) -> None:
        """Note a problem that one task found."""
        with self.lock:
            self.found.append((number, message))

    def check_finite(self, info: TensorInfo, data: Bytes) -> None:
        """Note NaN and infinity in a piece of an unquantized tensor."""
        if found := count_non_finite(data, info.dtype):
            with self.lock:
                so_far = self.contents.not_finite.get(info.name, NonFinite())
                self.contents.not_finite[info.name] = so_far + found

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes were read, and report all so far."""
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Worker:
    """One thread's buffers."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.checkpoint = reading.checkpoint
        self.output = _reader(reading.checkpoint)
        if reading.source is not None:
            self.source = _reader(reading.source)
        self._buffers: dict[str, Bytes] = {}

    def _buffer(self, name: str, nbytes: int) -> Bytes:
        if name not in self._buffers or self._buffers[name].size < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes]

    def compare(self, number: int, info: TensorInfo, original: Weight | bytes | None) -> None:
        """Hold a tensor against the source: against a weight of it, what it is folded to, or that of the same name."""
        place, low = self.checkpoint.where[info.name], 0
        with self.output.open(place.shard) as file:
            for wanted in self._wanted(info, original):
                if self.reading.stopped.is_set():
                    return
                part = self._buffer("output", wanted.size)
                file.read(part, place.offset + low, info.name)
                self.reading.check_finite(info, part)
                if not np.array_equal(part, wanted):
                    first = low + int((part != wanted).argmax())
                    name = original.rows(self.source.where).label if isinstance(original, Weight) else "the source's"
                    name = f"what folding makes of {name}" if _is_folded(original) else name
                    self.reading.say(
                        number,
                        f"{self.reading.place(info.name)} differs from {name}, first in byte {first} of {info.nbytes}",
                    )
                    return
                low += part.size
                self.reading.advance(part.size)
        with self.reading.lock:
            self.reading.contents.equal += not _is_folded(original)
            if info.name in self.reading.contents.not_finite and not _is_folded(original):
                self.reading.contents.equal_names.add(info.name)

    def check_finite(self, info: TensorInfo) -> None:
        """Look for NaN and infinity in a tensor that is held against nothing."""
        place = self.checkpoint.where[info.name]
        with self.output.open(place.shard) as file:
            for low in range(0, info.nbytes, PIECE):
                if self.reading.stopped.is_set():
                    return
                part = self._buffer("output", min(PIECE, info.nbytes - low))
                file.read(part, place.offset + low, info.name)
                self.reading.check_finite(info, part)
                self.reading.advance(part.size)

    def _wanted(self, info: TensorInfo, original: Weight | bytes | None) -> Iterator[Bytes]:
        """What must be there, in pieces."""
        if original is None:
            return self._tensor(info)
        if isinstance(original, bytes):
            return iter([np.frombuffer(original, np.uint8)])
        return self._weight(original)

    def _tensor(self, info: TensorInfo) -> Iterator[Bytes]:
        """The bytes of the source's tensor of the same name, in pieces."""
        place = self.source.where[info.name]
        with self.source.open(place.shard) as file:
            for low in range(0, info.nbytes, PIECE):
                part = self._buffer("source", min(PIECE, info.nbytes - low))
                file.read(part, place.offset + low, info.name)
                yield part

    def _weight(self, weight: Weight) -> Iterator[Bytes]:
        """The bytes of a weight of the source, in pieces."""
        for matrix in weight.matrices:
            for bits in self.source.rows(matrix, 1):
                if matrix.format is None:
                    plain = from_float32(bits.view(np.float32), matrix.source.dtype) if matrix.folded else bits
                    yield plain.reshape(-1).view(np.uint8)
                else:
                    plain = np.empty(bits.shape, np.uint16)
                    to_bfloat16(bits.view(np.float32), plain)
                    yield plain.reshape(-1).view(np.uint8)

    def check(
        self,
        number: int,
        weight: Weight,
        original: Weight | None,
        scheme: Scheme | None,
        weighed: bool,
        gptq_rounded: bool,
    ) -> None:
        """Look at a quantized weight's codes and scale; decode it, and quantize it again, if that is asked for."""
        if weight.format is not None and weight.format.columns is not None:
            self._check_columns(number, weight, original)
            return
        info, low = weight.codes, 0
        if weight.input_scale is not None:
            self._scale(number, weight.input_scale)
        scale = None if weight.scale is None else self._scale(number, weight.scale)
        divisor: Floats | None = None
        if weight.format is not None and weight.format.global_scale is not None:
            above = weight.global_scale and self._scale(number, weight.global_scale)
            divisor = None if above is None else above.reshape(1, 1)
            with np.errstate(over="ignore"):
                scale = None if scale is None or divisor is None else scale / divisor
        for known, data in weight.format.constant_tensors(weight.module, weight.shape) if weight.format else ():
            self._hold(number, known, data)
        place = self.checkpoint.where[info.name]
        comparison = None
        zeros = self.output.zeros(weight, 0, weight.shape[0])
        whole = weight.format is not None and (zeros is not None or weight.format.zero_point is None)
        if original is not None and scale is not None and weight.format and whole and weight.scale is not None:
            comparison = Comparison(
                original.shape, weight.format, scale, weight.scale.dtype, scheme, zeros, divisor, weighed
            )
        pitch = info.nbytes // math.prod(info.shape[:-1])
        broken: int | None = None
        with self.output.open(place.shard) as file:
            for count, bits in self._pieces(info, pitch, original if comparison else None):
                if self.reading.stopped.is_set():
                    return
                part = self._buffer("output", count * pitch)
                first = self.output.read_codes(file, weight, low, part)
                if broken is None and first is not None:
                    broken = low * pitch + first
                if comparison is not None and bits is not None and original is not None:
                    comparison.add(low, part.reshape(count, pitch), bits, original.dtype)
                low += count
                self.reading.advance(part.size)
        if broken is not None:
            index = [int(axis) for axis in np.unravel_index(broken, info.shape)]
            self.reading.say(number, f"{self.reading.place(info.name)} holds NaN, first at {index}")
            return
        if scale is not None and whole and weight.format is not None:
            self.output.check_values(weight, scale)
        if comparison is not None and original is not None:
            if not comparison.finite:
                extent = original.rows(self.source.where)
                self.reading.say(number, f"{extent.label} in the source's {extent.shard} holds NaN or infinity")
                return
            if scheme is not None:
                self._report_remade(number, weight, comparison, scheme, divisor, gptq_rounded)
            self._report(
                number, weight, comparison, bounded=scheme is None and not gptq_rounded, gptq_rounded=gptq_rounded
            )

    def _check_columns(self, number: int, weight: Weight, original: Weight | None) -> None:
        """Decode a weight whose codes lie in columns, which refuses what is unsound; hold it against the source's."""
        found, source = ErrorSum(), None if original is None else self.source.rows(original, 1)
        left = np.empty((0, weight.shape[1]), np.float32)
        for bits in self.output.rows(weight, 1):
            if self.reading.stopped.is_set():
                return
            while source is not None and original is not None and len(left) < len(bits):
                left = np.concatenate([left, to_float32(next(source), original.dtype)])
            if source is not None:
                found.add(left[: len(bits)], np.abs(bits.view(np.float32) - left[: len(bits)]))
                left = left[len(bits) :]
            self.reading.advance(len(bits) * weight.codes.nbytes // weight.shape[0])
        if source is not None:
            with self.reading.lock:
                self.reading.errors.append((number, found.of(weight.module, weight.shape)))

    def _pieces(self, info: TensorInfo, pitch: int, original: Weight | None) -> Iterator[tuple[int, Bits | None]]:
        """How many rows of codes to read next, and the source's weights of these, if they are held against it."""
        if original is not None:
            for bits in self.source.rows(original, 1):
                yield len(bits), bits
            return
        rows, step = info.nbytes // pitch, max(1, PIECE // pitch)
        for low in range(0, rows, step):
            yield min(step, rows - low), None

    def check_scale(self, number: int, info: TensorInfo) -> None:
        """Look at a scale that belongs to no weight."""
        if info.dtype in FLOATS:
            self._scale(number, info)
        self.reading.advance(info.nbytes)

    def _hold(self, number: int, wanted: TensorInfo, data: bytes) -> None:
        """Say so if a tensor of integers, which its weight's shape tells, holds others."""
        if self.checkpoint.tensors.get(wanted.name) != wanted:
            return  # which the headers showed
        raw = self.output.whole(wanted).tobytes()
        if raw != data:
            found, right = (np.frombuffer(held, "<i8").tolist() for held in (raw, data))
            self.reading.say(number, f"{self.reading.place(wanted.name)} is {found}, its codes are {right}")

    def _scale(self, number: int, info: TensorInfo) -> Floats | None:
        """The values of a scale, if all are finite and above zero."""
        values = self.output.values(info)
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            index = np.unravel_index(int(wrong.argmax()), info.shape)
            self.reading.say(
                number,
                f"{self.reading.place(info.name)} holds {float(values[index]):g}"
                f"{f' at {[int(axis) for axis in index]}' if info.shape else ''}: scales are finite and above zero",
            )
            return None
        if values.size == 1:
            with self.reading.lock:
                self.reading.contents.scales[info.name] = float(values.reshape(-1)[0])
        return values

    def _report_remade(
        self,
        number: int,
        weight: Weight,
        comparison: Comparison,
        scheme: Scheme,
        divisor: Floats | None,
        gptq_rounded: bool,
    ) -> None:
        """Note which codes and scales differ from those that quantizing the source again gives."""
        info, scale = weight.codes, weight.scale
        assert scale is not None
        if scheme.format.shares_scale:
            # It shares a scale with all layers it is joined with.
            with self.reading.lock:
                self.reading.contents.absmax[weight.module] = float(comparison.absmax.max())
        if not scheme.format.shared:
            made = comparison.made
            wrong = made != comparison.grid
            if wrong.any():
                place = np.unravel_index(int(wrong.argmax()), wrong.shape)
                # As they are stored, which FP8 is to few digits.
                factor, digits = (1.0, 9) if divisor is None else (float(divisor.item()), 6)
                self.reading.say(
                    number,
                    f"{self.reading.place(scale.name)} holds {float(comparison.grid[place]) * factor:.{digits}g} at "
                    f"{[int(axis) for axis in place]}, the source makes it {float(made[place]) * factor:.{digits}g} "
                    f"({int(wrong.sum())} of {wrong.size} scales differ)",
                )
            self._report_zeros(number, weight, comparison)
        if comparison.first is not None and not gptq_rounded:
            (row, col), found, made_code = comparison.first
            self.reading.say(
                number,
                f"{self.reading.place(info.name)} has the code 0x{found:02x} at [{row}, {col}], the source makes it "
                f"0x{made_code:02x} ({comparison.differing} of {math.prod(comparison.shape)} codes differ)",
            )

    def _report_zeros(self, number: int, weight: Weight, comparison: Comparison) -> None:
        """Note which zero points differ from those that quantizing the source again gives."""
        info, zeros, made = weight.zero_points, comparison.zeros, comparison.made_zeros
        if info is None or zeros is None or made is None or weight.format is None or np.array_equal(zeros, made):
            return
        wrong = zeros != made
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        found, right = (int(weight.format.number.encode(grid[place].reshape(1))[0]) for grid in (zeros, made))
        self.reading.say(
            number,
            f"{self.reading.place(info.name)} holds {found} at {[int(axis) for axis in place]}, the source makes it "
            f"{right} ({int(wrong.sum())} of {wrong.size} zero points differ)",
        )

    def _report(self, number: int, weight: Weight, comparison: Comparison, bounded: bool, gptq_rounded: bool) -> None:
        info = weight.codes
        if bounded and comparison.wrong is not None:
            (row, col), error, bound, count = comparison.wrong
            self.reading.say(
                number,
                f"{self.reading.place(info.name)} is off by {error:.3g} at [{row}, {col}], where rounding explains "
                f"{bound:.3g} ({count} of {math.prod(comparison.shape)} weights are off)",
            )
        found = comparison.error.of(weight.module, comparison.shape)
        with self.reading.lock:
            self.reading.errors.append((number, found))
            if not gptq_rounded:
                self.reading.contents.compared += math.prod(comparison.shape)
                self.reading.contents.same += math.prod(comparison.shape) - comparison.differing


def _is_folded(original: Weight | bytes | None) -> bool:
    return isinstance(original, bytes) or (original is not None and original.folded)


def _reader(checkpoint: Checkpoint) -> Reader:
    return Reader(checkpoint.where, lambda shard: checkpoint.root / shard, _memory)


def _memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)

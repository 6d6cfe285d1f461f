"""Tensors of an FP8 directory read for `verify`: NaN among codes, unsound scales, differences from the source.

Threads read a bounded piece at a time, as a conversion does; nothing of a tensor's size is ever held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import Bytes, SourceFile
from ..files.tensors import TensorInfo
from ..formats.format import Format, grid_of
from ..formats.kernels import (
    BITS_TYPE,
    CHUNK,
    Bits,
    absmax,
    decode,
    encode,
    encode_float32,
    first_unsound,
    scale_values,
    to_float32,
)
from ..formats.numbers import E4M3, Codes, Floats
from ..formats.schemes import Scheme
from ..threads import in_threads
from ..weights.weight import Extent, Weight

PIECE = 4 << 20
# A transposed matrix is read in columns: longer pieces of each stored row make fewer system calls.
TRANSPOSED_PIECE = 32 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Task:
    """One tensor to be read.

    Attributes:
        info: the tensor.
        weight: what it is if it holds codes; None for one that must equal the source's.
        original: the source's weight. One of codes without it is not decoded, any other tensor is held against the
            source's tensor of the same name.
        scheme: what it was quantized in, if quantizing the source again must give the same; None if others made it.
    """

    info: TensorInfo
    weight: Weight | None = None
    original: Weight | None = None
    scheme: Scheme | None = None


@dataclass(frozen=True)
class LayerError:
    """How far a quantized layer is from its source.

    Attributes:
        module: the layer.
        shape: (out, in).
        relative: Frobenius norm of the difference over that of the source's weight.
        sqnr_db: the same as a signal-to-noise ratio; None where there is no noise.
        largest: largest absolute difference.
    """

    module: str
    shape: tuple[int, int]
    relative: float
    sqnr_db: float | None
    largest: float


@dataclass
class Contents:
    """What reading found.

    Attributes:
        problems: what is off, in the order of the tasks.
        errors: of each layer that was decoded, in the same order.
        scales: the scales that are a single value, by name.
        equal: number of tensors that equal the source's.
        absmax: the largest absolute weight in the source of each layer whose scheme has one scale for several, by
            module.
        compared: number of codes that were made again from the source, under the scales that are there.
        same: how many of them are those that are there.
    """

    problems: list[str] = field(default_factory=list)
    errors: list[LayerError] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    equal: int = 0
    absmax: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    same: int = 0


def read_contents(
    checkpoint: Checkpoint, source: Checkpoint | None, tasks: Sequence[Task], workers: int, progress: Progress | None
) -> Contents:
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
    def __init__(
        self, checkpoint: Checkpoint, source: Checkpoint | None, tasks: Sequence[Task], progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.source = source
        self.tasks = iter(enumerate(tasks))
        self.total = sum(task.info.nbytes for task in tasks)
        self.done = 0
        self.progress = progress
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self.found: list[tuple[int, str]] = []
        self.errors: list[tuple[int, LayerError]] = []
        self.contents = Contents()

    def run(self, workers: int) -> Contents:
        """Until all is read, or something fails."""
        in_threads(self._work, workers, self.stopped)
        if self.failure is not None:
            raise self.failure
        self.contents.problems = [message for _, message in sorted(self.found, key=lambda entry: entry[0])]
        self.contents.errors = [error for _, error in sorted(self.errors, key=lambda entry: entry[0])]
        return self.contents

    def _work(self) -> None:
        worker = _Worker(self)
        try:
            while not self.stopped.is_set():
                with self.lock:
                    following = next(self.tasks, None)
                if following is None:
                    break
                number, task = following
                try:
                    if task.weight is not None:
                        worker.check(number, task.weight, task.original, task.scheme)
                    else:
                        worker.compare(number, task.info, task.original)
                except SourceError as error:
                    self.say(number, error.message)
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            self.stopped.set()

    def place(self, name: str) -> str:
        """A tensor for a message: its file and its name."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def say(self, number: int, message: str) -> None:
        """A problem of one task."""
        with self.lock:
            self.found.append((number, message))

    def advance(self, nbytes: int) -> None:
        """So many bytes more were read."""
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Worker:
    """One thread's buffers."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.checkpoint = reading.checkpoint
        self.source = reading.source
        self._buffers: dict[str, Bytes] = {}

    def _buffer(self, name: str, nbytes: int) -> Bytes:
        if name not in self._buffers or self._buffers[name].size < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes]

    def _rows(self, file: SourceFile, weight: Weight, extent: Extent, low: int, count: int) -> Bits:
        """Rows [low, low + count) of a plain weight of the source."""
        kind, cols = BITS_TYPE[weight.dtype], weight.shape[1]
        part = self._buffer("source", count * cols * kind.itemsize)
        if not weight.transposed:
            file.read(part, extent.offset + low * extent.pitch, extent.label)
            return part.view(kind).reshape(count, cols)
        width = count * kind.itemsize
        for col in range(cols):
            place = extent.offset + col * extent.pitch + low * kind.itemsize
            file.read(part[col * width : (col + 1) * width], place, extent.label)
        return part.view(kind).reshape(cols, count).T

    def compare(self, number: int, info: TensorInfo, weight: Weight | None) -> None:
        """Hold a copied tensor against the source: against a weight of it, or the tensor of the same name."""
        assert self.source is not None
        place = self.checkpoint.where[info.name]
        extent = weight.rows(self.source.where) if weight else None
        shard = extent.shard if extent else self.source.where[info.name].shard
        step = PIECE
        if weight is not None:
            row = info.nbytes // info.shape[0]
            step = max(1, (TRANSPOSED_PIECE if weight.transposed else PIECE) // row) * row
        with ExitStack() as stack:
            file = stack.enter_context(SourceFile(self.checkpoint.root / place.shard, place.shard))
            other = stack.enter_context(SourceFile(self.source.root / shard, shard))
            for low in range(0, info.nbytes, step):
                if self.reading.stopped.is_set():
                    return
                part = self._buffer("output", min(step, info.nbytes - low))
                file.read(part, place.offset + low, info.name)
                if weight is None or extent is None:
                    original = self._buffer("source", part.size)
                    other.read(original, self.source.where[info.name].offset + low, info.name)
                else:
                    rows = self._rows(other, weight, extent, low // row, part.size // row)
                    original = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                if not np.array_equal(part, original):
                    first = low + int((part != original).argmax())
                    name = extent.label if extent else "the source's"
                    self.reading.say(
                        number,
                        f"{self.reading.place(info.name)} differs from {name}, first in byte {first} of {info.nbytes}",
                    )
                    return
                self.reading.advance(part.size)
        with self.reading.lock:
            self.reading.contents.equal += 1

    def check(self, number: int, weight: Weight, original: Weight | None, scheme: Scheme | None) -> None:
        """Look at a quantized weight's codes and scale; decode it, and quantize it again, if that is asked for."""
        info = weight.codes
        if weight.input_scale is not None:
            self._scale(number, weight.input_scale)
        scale = None if weight.scale is None else self._scale(number, weight.scale)
        place = self.checkpoint.where[info.name]
        decoding = None
        extent = None if original is None or self.source is None else original.rows(self.source.where)
        if original is not None and scale is not None and weight.format is not None:
            assert weight.scale is not None
            decoding = _Decoding(original.shape, weight.format, scale, weight.scale.dtype)
        rows, cols = info.nbytes // info.shape[-1], info.shape[-1]
        wide = cols if decoding is None or original is None else cols * BITS_TYPE[original.dtype].itemsize
        step = max(1, (TRANSPOSED_PIECE if original is not None and original.transposed else PIECE) // wide)
        broken: int | None = None
        codes = weight.format.number if weight.format else E4M3
        with ExitStack() as stack:
            file = stack.enter_context(SourceFile(self.checkpoint.root / place.shard, place.shard))
            if decoding is not None and extent is not None and self.source is not None:
                other = stack.enter_context(SourceFile(self.source.root / extent.shard, extent.shard))
            for low in range(0, rows, step):
                if self.reading.stopped.is_set():
                    return
                count = min(step, rows - low)
                part = self._buffer("output", count * cols)
                file.read(part, place.offset + low * cols, info.name)
                if broken is None and (first := first_unsound(part, codes)) is not None:
                    broken = low * cols + first
                if decoding is not None and original is not None and extent is not None:
                    bits = self._rows(other, original, extent, low, count)
                    decoding.add(low, part.reshape(count, cols), bits, original.dtype)
                self.reading.advance(part.size)
        if broken is not None:
            index = [int(axis) for axis in np.unravel_index(broken, info.shape)]
            self.reading.say(number, f"{self.reading.place(info.name)} holds NaN, first at {index}")
        elif decoding is not None and not decoding.finite:
            assert extent is not None
            self.reading.say(number, f"{extent.label} in the source's {extent.shard} holds NaN or infinity")
        elif decoding is not None:
            assert weight.scale is not None
            if scheme is not None:
                self._report_remade(number, info, weight.scale, decoding, scheme)
            self._report(number, info, decoding, bounded=scheme is None)

    def _scale(self, number: int, info: TensorInfo) -> Floats | None:
        """The values of a scale, if all are finite and above zero."""
        place = self.checkpoint.where[info.name]
        raw = np.empty(info.nbytes, np.uint8)
        with SourceFile(self.checkpoint.root / place.shard, place.shard) as file:
            file.read(raw, place.offset, info.name)
        values = scale_values(raw, info.dtype).reshape(info.shape)
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
        self, number: int, info: TensorInfo, scale: TensorInfo, decoding: _Decoding, scheme: Scheme
    ) -> None:
        """What is not as quantizing the source again has it."""
        if scheme.format.shared:
            # Its scale is that of all layers it is joined with.
            with self.reading.lock:
                self.reading.contents.absmax[info.module] = float(decoding.absmax.max())
        else:
            made = scheme.format.scales(decoding.absmax)
            wrong = made != decoding.grid
            if wrong.any():
                place = np.unravel_index(int(wrong.argmax()), wrong.shape)
                self.reading.say(
                    number,
                    f"{self.reading.place(scale.name)} holds {float(decoding.grid[place]):.9g} at "
                    f"{[int(axis) for axis in place]}, the source makes it {float(made[place]):.9g} "
                    f"({int(wrong.sum())} of {wrong.size} scales differ)",
                )
        if decoding.first is not None:
            (row, col), found, made_code = decoding.first
            self.reading.say(
                number,
                f"{self.reading.place(info.name)} has the code 0x{found:02x} at [{row}, {col}], the source makes it "
                f"0x{made_code:02x} ({decoding.differing} of {info.nbytes} codes differ)",
            )

    def _report(self, number: int, info: TensorInfo, decoding: _Decoding, bounded: bool) -> None:
        if bounded and decoding.wrong is not None:
            (row, col), error, bound, count = decoding.wrong
            self.reading.say(
                number,
                f"{self.reading.place(info.name)} is off by {error:.3g} at [{row}, {col}], where rounding explains "
                f"{bound:.3g} ({count} of {info.nbytes} weights are off)",
            )
        relative = math.sqrt(decoding.noise / decoding.signal) if decoding.signal else float(decoding.noise > 0)
        sqnr = -20 * math.log10(relative) if relative else None
        found = LayerError(info.module, decoding.shape, relative, sqnr, decoding.largest)
        with self.reading.lock:
            self.reading.errors.append((number, found))
            self.reading.contents.compared += info.nbytes
            self.reading.contents.same += info.nbytes - decoding.differing


class _Decoding:
    """The difference between a quantized layer and its source, summed up piece by piece.

    A weight w under scale s becomes the code nearest to w / s, so that the difference is at most Number.bound. Where
    making the code again from the source gives the same one, that needs no looking at, unless the scale is too small
    for the weight.

    Attributes:
        grid: the scales, a row of them for each row of groups.
        absmax: the largest absolute weight of each group.
        finite: whether all weights of the source are.
        differing: number of codes that are not what the source makes under these scales.
        first: the first of them: where it is, the code and the other.
        wrong: the first weight that is farther off than rounding explains, how far, how far it could be, and how many
            there are; None if none is.
    """

    def __init__(self, shape: tuple[int, int], form: Format, scale: Floats, scale_dtype: str) -> None:
        self.shape = shape
        self.number = form.number
        height, width = form.group
        self.group = height, width if width is not None and width < shape[1] else None
        self.grid = scale.reshape(grid_of(self.group, shape))
        self.absmax = np.zeros(self.grid.shape, np.float32)
        # The scale may have been rounded once the codes were made; what float32 loses is nothing beside it.
        self.slack = 2.0**-8 if scale_dtype in ("BF16", "F16") else 2.0**-20
        self.signal = 0.0
        self.noise = 0.0
        self.largest = 0.0
        self.finite = True
        self.differing = 0
        self.first: tuple[tuple[int, int], int, int] | None = None
        self.wrong: tuple[tuple[int, int], float, float, int] | None = None

    def add(self, low: int, codes: Codes, bits: Bits, dtype: str) -> None:
        """Rows from `low` on: codes and the source's weights."""
        step = max(1, CHUNK // self.shape[1])
        # Where each row has scales of its own, any number of rows go together; else those of one row of groups.
        height = self.shape[0] if self.group[0] == 1 else self.group[0] or self.shape[0]
        top = low
        while top < low + len(codes) and self.finite:
            end = min(top + step, low + len(codes), (top // height + 1) * height)
            with np.errstate(over="ignore"):
                self._add(top, codes[top - low : end - low], np.ascontiguousarray(bits[top - low : end - low]), dtype)
            top = end

    def _add(self, top: int, codes: Codes, bits: Bits, dtype: str) -> None:
        cols, width = self.shape[1], self.group[1]
        group = (1 if self.group[0] == 1 else None, width)
        first = top // (self.group[0] or self.shape[0])
        rows = slice(first, first + (len(codes) if group[0] else 1))
        if width is not None and cols % width:
            # What fills the last group up changes nothing.
            bits = np.pad(bits, ((0, 0), (0, -cols % width)))
        largest, scale = absmax(bits, dtype, group), self.grid[rows]
        if not np.isfinite(largest).all():
            self.finite = False
            return
        np.maximum(self.absmax[rows], largest, out=self.absmax[rows])
        fits = bool((largest <= scale * np.float32(self.number.largest * (1 + 2.0**-20))).all())
        weight = to_float32(np.ascontiguousarray(bits[:, :cols]), dtype)
        spread = scale if width is None else np.repeat(scale, width, axis=1)[:, :cols]
        if fits:
            made = np.empty(bits.shape, np.uint8)
            encode(bits, dtype, scale, group, made, self.number)
            made = made[:, :cols]
        else:
            # The kernel counts on scales that are large enough.
            made = encode_float32(weight, spread, self.number)
        same = np.array_equal(made, codes)
        if not same:
            differs = made != codes
            self.differing += int(differs.sum())
            if self.first is None:
                row, col = (int(axis) for axis in np.unravel_index(int(differs.argmax()), differs.shape))
                self.first = (top + row, col), int(codes[row, col]), int(made[row, col])
        error = np.empty(codes.shape, np.float32)
        decode(codes, spread, error, self.number)
        error -= weight
        np.abs(error, out=error)
        self.signal += _energy(weight)
        self.noise += _energy(error)
        self.largest = max(self.largest, float(error.max()))
        if not (same and fits):
            self._bound(top, weight, error, spread)

    def _bound(self, top: int, weight: Floats, error: Floats, scale: Floats) -> None:
        """Look for weights that are farther off than rounding explains."""
        bound = self.number.bound(weight, scale, self.slack)
        off = ~(error <= bound)
        if off.any():
            row, col = (int(axis) for axis in np.unravel_index(int(off.argmax()), off.shape))
            first = ((top + row, col), float(error[row, col]), float(bound[row, col]), 0)
            place, by, bounded, count = self.wrong or first
            self.wrong = (place, by, bounded, count + int(off.sum()))


def _energy(values: Floats) -> float:
    """Sum of squares."""
    with np.errstate(over="ignore"):
        found = float(np.einsum("ij,ij->", values, values))
    if 1e-30 < found < math.inf:
        return found
    return float(np.square(values, dtype=np.float64).sum())

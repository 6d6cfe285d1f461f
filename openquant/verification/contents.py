"""Reads tensors of a quantized directory for `verify`: NaN in codes, bad scales, differences from the source.

Threads read a bounded piece at a time, as a conversion does. No whole tensor is held in memory.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..convert.conversion import WeightFindings
from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import Bytes, TensorInfo
from ..formats.format import FLOATS
from ..formats.kernels import Bits, from_float32, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..threads import in_threads
from ..weights.quant_error import MOVED, Comparison, ErrorSum, LayerError
from ..weights.reading import LostWeights, Reader
from ..weights.weight import Weight

# Bytes read at a time.
PIECE = 4 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorTask:
    """A tensor to be read and checked.

    Attributes:
        info: the tensor.
        weight: the quantized weight whose codes it holds; None for an unquantized tensor or a scale.
        original: the source's weight, or the expected bytes of a smoothed norm or bias. If None, codes are not
            compared with the source, and any other tensor must equal the source's tensor of the same name.
        scheme: the scheme, if quantizing the source again must give the same scales and codes; None if not.
        weighted_search: whether the scale search weighted errors by input statistics, which are not known here.
        gptq_rounded: whether GPTQ rounded it, or may have, so that its codes cannot be recomputed.
        foreign: whether it is not known what rounded it: the median of all such weights decides if GPTQ may have.
        kv_cache_scale: whether it is a KV-cache scale, which belongs to no weight.
        finite_only: whether it is only checked for NaN and infinity, and not compared with the source.
        kept: whether codes and scales must be those of the quantized source.
        by_decoding: whether the weight is checked as a Reader decodes it, because codes do not lie in rows or scales
            are not stored as engines multiply by them.
    """

    info: TensorInfo
    weight: Weight | None = None
    original: Weight | bytes | None = None
    scheme: Scheme | None = None
    weighted_search: bool = False
    gptq_rounded: bool = False
    foreign: bool = False
    kv_cache_scale: bool = False
    finite_only: bool = False
    kept: bool = False
    by_decoding: bool = False


@dataclass
class TensorFindings:
    """What was found in the tensors that were read.

    Attributes:
        problems: one line for each problem, in the order of the tasks.
        errors: quantization error of each layer that was compared with the source, in the same order.
        scales: the value of each scale that is a single number, by tensor name.
        equal_tensors: number of tensors that equal the source's.
        absmax: the largest absolute weight in the source, by module, of each layer whose scheme has a scale that fused
            layers share.
        compared_codes: number of codes that were recomputed from the source with the stored scales.
        equal_codes: number of these that equal the stored codes.
        unquantized: NaN, infinities, and matrices of nothing but zeros, among the unquantized tensors.
        as_in_source: names of the tensors with NaN or infinities that equal the source's.
        lost_layers: modules of which far more weights than usual became zero as they were quantized.
        zero_layers: modules of which nearly all codes stand for zero, whatever the source has.
    """

    problems: list[str] = field(default_factory=list)
    errors: list[LayerError] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    equal_tensors: int = 0
    absmax: dict[str, float] = field(default_factory=dict)
    compared_codes: int = 0
    equal_codes: int = 0
    unquantized: WeightFindings = field(default_factory=WeightFindings)
    as_in_source: set[str] = field(default_factory=set)
    lost_layers: set[str] = field(default_factory=set)
    zero_layers: set[str] = field(default_factory=set)


class Reading:
    """Reads tensors of a quantized directory and checks them: NaN in codes, bad scales, differences from the source.

    All threads share the remaining tasks and the findings so far.

    Args:
        checkpoint: the opened directory.
        source: the checkpoint it was made from. None is allowed if no task compares with it.
        tasks: the tensors to read, each with what it is compared with.
        progress: called with the bytes read so far and the total, never from two threads at once; None to call nothing.
    """

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

        # Each with the number of its task, by which they are sorted at the end.
        self.problems: list[tuple[int, str]] = []
        self.errors: list[tuple[int, LayerError]] = []
        # Of each weight of which it is not known what rounded it: the number of its task, its error relative to that of
        # the nearest codes, and what is wrong if codes are the nearest, or if GPTQ chose them.
        self.foreign: list[tuple[int, float, str | None, str | None]] = []
        self.findings = TensorFindings()

    def run(self, workers: int) -> TensorFindings:
        """Do all tasks. Raises the first error of a worker.

        Args:
            workers: number of threads.

        Returns:
            Problems, one line each; the quantization error of each layer; and counts of equal tensors and codes. A
            tensor that cannot be read is a problem.
        """
        in_threads(self._work, workers, self.stopped)
        self._judge_foreign()
        self.findings.problems = [message for _, message in sorted(self.problems, key=lambda entry: entry[0])]
        self.findings.errors = [error for _, error in sorted(self.errors, key=lambda entry: entry[0])]
        return self.findings

    def _judge_foreign(self) -> None:
        """Report weights of another tool that are farther from the source than its method explains."""
        # Nearest codes have no larger error than themselves, whatever the scales are.
        by_gptq = statistics.median([times for _, times, _, _ in self.foreign] or [0]) > MOVED
        for number, _, beyond_nearest, beyond_gptq in self.foreign:
            problem = beyond_nearest
            if by_gptq:
                problem = beyond_gptq
            if problem is not None:
                self.add_problem(number, problem)

    def _work(self) -> None:
        worker = _Worker(self)
        while not self.stopped.is_set():
            with self.lock:
                numbered_task = next(self.tasks, None)

            if numbered_task is None:
                break

            worker.number, task = numbered_task
            try:
                if task.kv_cache_scale:
                    # It is finite and above zero.
                    if task.info.dtype in FLOATS:
                        worker.read_scale(task.info)
                    self.advance(task.info.nbytes)
                elif task.finite_only:
                    worker.check_finite(task.info)
                elif task.weight is not None:
                    worker.check_weight(task, task.weight)
                else:
                    worker.compare(task.info, task.original)
            except SourceError as error:
                self.add_problem(worker.number, error.message)

    def add_problem(self, number: int, message: str) -> None:
        """Add a problem that the task of that number found."""
        with self.lock:
            self.problems.append((number, message))

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes were read."""
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Worker:
    """The readers and buffers of one thread."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.checkpoint = reading.checkpoint
        self._place = self.checkpoint.place
        self.output = Reader(self.checkpoint.where, self.checkpoint.root.joinpath)
        if reading.source is not None:
            self.source = Reader(reading.source.where, reading.source.root.joinpath)
        # Number of the current task.
        self.number = 0
        self._memory: Bytes = np.empty(0, np.uint8)

    def _problem(self, message: str) -> None:
        self.reading.add_problem(self.number, message)

    def _buffer(self, nbytes: int) -> Bytes:
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def compare(self, info: TensorInfo, original: Weight | bytes | None) -> None:
        """Compare an unquantized tensor with the source: see `TensorTask.original`."""
        place = self.checkpoint.where[info.name]

        low = 0
        with self.output.open(place.shard) as file:
            for expected in self._read_expected(info, original):
                if self.reading.stopped.is_set():
                    return
                piece = self._buffer(expected.size)
                file.read(piece, place.offset + low, info.name)
                self.reading.findings.unquantized.look_at(info, piece)

                if not np.array_equal(piece, expected):
                    first = low + int((piece != expected).argmax())
                    name = "the source's"
                    if isinstance(original, Weight):
                        name = original.extent(self.source.where).label
                    if _is_smoothed(original):
                        name += " after smoothing"
                    self._problem(
                        f"{self._place(info.name)} differs from {name}, first in byte {first} of {info.nbytes}"
                    )
                    return

                low += piece.size
                self.reading.advance(piece.size)

        with self.reading.lock:
            self.reading.findings.equal_tensors += not _is_smoothed(original)
            if info.name in self.reading.findings.unquantized.not_finite and not _is_smoothed(original):
                self.reading.findings.as_in_source.add(info.name)

    def check_finite(self, info: TensorInfo) -> None:
        """Check a tensor for NaN and infinity, without comparing it with the source."""
        for piece in self.output.pieces(info):
            if self.reading.stopped.is_set():
                return
            self.reading.findings.unquantized.look_at(info, piece)
            self.reading.advance(piece.size)

    def _read_expected(self, info: TensorInfo, original: Weight | bytes | None) -> Iterator[Bytes]:
        """The expected bytes of an unquantized tensor, in pieces."""
        if original is None:
            return self.source.pieces(info)
        if isinstance(original, bytes):
            return iter([np.frombuffer(original, np.uint8)])
        return self._source_weight(original)

    def _source_weight(self, weight: Weight) -> Iterator[Bytes]:
        """The bytes of a weight of the source, in pieces: decoded to bfloat16 if it is quantized there."""
        for matrix in weight.matrices:
            dtype = matrix.source.dtype
            for bits in self.source.rows(matrix, 1):
                if matrix.dtype != dtype:
                    bits = from_float32(bits.view(np.float32), dtype)
                yield bits.reshape(-1).view(np.uint8)

    def check_weight(self, task: TensorTask, weight: Weight) -> None:
        """Check the codes and scales of a quantized weight, and compare it with the source if the task has one."""
        assert not isinstance(task.original, bytes)
        original = task.original
        if task.by_decoding:
            self._check_decoded(weight, original)
            return

        fmt = weight.format
        scale, global_scale = self._read_scales(weight)
        for expected_info, data in fmt.constant_tensors(weight.module, weight.shape) if fmt else ():
            self._check_integers(expected_info, data)

        zeros = self.output.zero_points(weight, 0, weight.shape[0])
        decodable = fmt is not None and (zeros is not None or fmt.zero_point is None)
        comparison = None
        if original is not None and scale is not None and fmt and decodable and weight.scale is not None:
            comparison = Comparison(
                original.shape, fmt, scale, weight.scale.dtype, task.scheme, zeros, global_scale, task.weighted_search
            )
        lost = LostWeights(fmt, math.prod(weight.codes.shape[:-1])) if fmt and decodable else None
        if not self._read_codes(weight, original, comparison, lost, zeros):
            return

        if lost is not None and (lost.unusual or lost.nearly_zero):
            with self.reading.lock:
                findings = self.reading.findings
                is_lost = lost.unusual and comparison is not None
                (findings.lost_layers if is_lost else findings.zero_layers).add(weight.module)
        if scale is not None and decodable and fmt is not None:
            self.output.check_values(weight, scale)
        if comparison is None or original is None:
            return

        if comparison.finite:
            self._report_comparison(task, weight, comparison, global_scale)
        else:
            extent = original.extent(self.source.where)
            self._problem(f"{extent.label} in the source's {extent.shard} holds NaN or infinity")

    def _read_scales(self, weight: Weight) -> tuple[Floats | None, Floats | None]:
        """The scales, divided by the global scale, and the global scale; None for what is wrong or not there."""
        if weight.input_scale is not None:
            self.read_scale(weight.input_scale)

        signed = weight.format is not None and weight.format.signed_scales
        scale = weight.scale and self.read_scale(weight.scale, signed)
        if weight.format is None or weight.format.global_scale is None:
            return scale, None

        values = weight.global_scale and self.read_scale(weight.global_scale)
        if values is None:
            return None, None
        global_scale = values.reshape(1, 1)
        if scale is not None:
            with np.errstate(over="ignore"):
                scale = scale / global_scale
        return scale, global_scale

    def _read_codes(
        self,
        weight: Weight,
        original: Weight | None,
        comparison: Comparison | None,
        lost: LostWeights | None,
        zeros: Floats | None,
    ) -> bool:
        """Read the codes, into `comparison` and `lost`. False if they hold NaN or another thread has failed."""
        info = weight.codes
        pitch = info.nbytes // math.prod(info.shape[:-1])
        low = 0
        nan_at: int | None = None
        with self.output.open(self.checkpoint.where[info.name].shard) as file:
            for count, bits in self._pieces(info, pitch, original if comparison else None):
                if self.reading.stopped.is_set():
                    return False

                piece = self._buffer(count * pitch)
                first = self.output.read_codes_unchecked(file, weight, low, piece)
                if nan_at is None and first is not None:
                    nan_at = low * pitch + first

                codes = piece.reshape(count, pitch)
                if comparison is not None and bits is not None and original is not None:
                    comparison.add(low, codes, bits, original.dtype)
                if lost is not None:
                    lost.look_at(codes, None if zeros is None else zeros[low : low + count], bits)
                low += count
                self.reading.advance(piece.size)

        if nan_at is None:
            return True
        index = [int(axis) for axis in np.unravel_index(nan_at, info.shape)]
        self._problem(f"{self._place(info.name)} holds NaN, first at {index}")
        return False

    def _report_comparison(
        self, task: TensorTask, weight: Weight, comparison: Comparison, global_scale: Floats | None
    ) -> None:
        """Report how codes and scales differ from the source."""
        if task.scheme is not None:
            self._report_recomputed(weight, comparison, task.scheme, global_scale, task.gptq_rounded)
        if task.kept and comparison.error.largest > 0:
            self._problem(
                f"{self._place(weight.codes.name)} stands for other weights than the source's codes and scales"
            )
        self._report_error(weight, comparison, task)

    def _check_decoded(self, weight: Weight, original: Weight | None) -> None:
        """Check a weight by decoding it, and sum up its error if `original` is given."""
        fmt = weight.format
        assert fmt is not None

        # In columns and where a group of zeros has the scale 0, scales are only checked as they are decoded.
        plain = fmt.columns is None and fmt.scale.of_zeros > 0
        scales = [weight.input_scale]
        if plain:
            scales = [weight.scale, weight.global_scale, weight.input_scale]
        for info in scales:
            signed = fmt.signed_scales and info is weight.scale
            if info is not None and self.read_scale(info, signed) is None:
                return

        experts = len(weight.matrices)
        errors = ErrorSum()
        source_pieces = original and self.source.rows(original, 1)

        source_rows = np.empty((0, weight.shape[1]), np.float32)
        for bits in (piece for matrix in weight.matrices for piece in self.output.rows(matrix, 1)):
            if self.reading.stopped.is_set():
                return

            # The pieces of output and source have different numbers of rows.
            while source_pieces is not None and original is not None and len(source_rows) < len(bits):
                source_rows = np.concatenate([source_rows, to_float32(next(source_pieces), original.dtype)])
            if source_pieces is not None:
                current = source_rows[: len(bits)]
                error = bits.view(np.float32) - current
                errors.add(current, error, error)
                source_rows = source_rows[len(bits) :]

            self.reading.advance(len(bits) * weight.codes.nbytes // (weight.shape[0] * experts))

        if source_pieces is not None:
            if errors.excess is not None:
                self._problem(f"{self._place(weight.codes.name)} {errors.excess}")
            with self.reading.lock:
                self.reading.errors.append((self.number, errors.of(weight.module, weight.shape)))

    def _pieces(self, info: TensorInfo, pitch: int, original: Weight | None) -> Iterator[tuple[int, Bits | None]]:
        """Divide codes into pieces: the number of rows of each, and the source's bits of these rows [rows, in]."""
        if original is not None:
            for bits in self.source.rows(original, 1):
                yield len(bits), bits
            return
        rows = info.nbytes // pitch
        step = max(1, PIECE // pitch)
        for low in range(0, rows, step):
            yield min(step, rows - low), None

    def _check_integers(self, expected: TensorInfo, data: bytes) -> None:
        """Check a tensor of int64 whose values follow from the weight's shape, such as `weight_shape`."""
        if self.checkpoint.tensors.get(expected.name) != expected:
            return  # The headers' checks report it.
        raw = self.output.read_bytes(expected).tobytes()
        if raw != data:
            actual, right = (np.frombuffer(values, "<i8").tolist() for values in (raw, data))
            self._problem(f"{self._place(expected.name)} is {actual}, its codes are {right}")

    def read_scale(self, info: TensorInfo, signed: bool = False) -> Floats | None:
        """The values of a scale; None, and a problem, unless all are finite and above zero (`signed`: not zero)."""
        values = self.output.read_scale(info)
        allowed = "above zero"
        right = values > 0
        if signed:
            allowed = "not zero"
            right = values != 0
        wrong = ~(np.isfinite(values) & right)

        if wrong.any():
            index = np.unravel_index(int(wrong.argmax()), info.shape)
            held = f"{float(values[index]):g}"
            if info.shape:
                held += f" at {[int(axis) for axis in index]}"
            self._problem(f"{self._place(info.name)} holds {held}: scales are finite and {allowed}")
            return None

        if values.size == 1:
            with self.reading.lock:
                self.reading.findings.scales[info.name] = float(values.reshape(-1)[0])
        return values

    def _report_recomputed(
        self, weight: Weight, comparison: Comparison, scheme: Scheme, global_scale: Floats | None, gptq_rounded: bool
    ) -> None:
        """Report scales and codes that differ from those that quantizing the source again gives."""
        info = weight.codes
        scale = weight.scale
        assert scale is not None

        if scheme.format.shares_scale:
            # verify.py compares the scale that fused layers share once it knows the absmax of all of them.
            with self.reading.lock:
                self.reading.findings.absmax[weight.module] = float(comparison.absmax.max())

        if not scheme.format.shared:
            # Shown as stored: times the global scale, in FP8, which has few digits.
            factor = 1.0
            digits = 9
            if global_scale is not None:
                factor = float(global_scale.item())
                digits = 6
            self._report_differing(
                scale, "scales", comparison.scale * factor, comparison.expected_scale * factor, digits
            )
            zeros = weight.zero_points
            if zeros is not None and comparison.zeros is not None and comparison.expected_zeros is not None:
                encode = scheme.format.number.encode
                self._report_differing(
                    zeros, "zero points", encode(comparison.zeros), encode(comparison.expected_zeros)
                )

        if comparison.first_difference is not None and not gptq_rounded:
            (row, col), code, recomputed_code = comparison.first_difference
            self._problem(
                f"{self._place(info.name)} has the code 0x{code:02x} at [{row}, {col}], the source makes it "
                f"0x{recomputed_code:02x} ({comparison.differing} of {math.prod(comparison.shape)} codes differ)"
            )

    def _report_differing(
        self, info: TensorInfo, what: str, stored: npt.NDArray[Any], recomputed: npt.NDArray[Any], digits: int = 9
    ) -> None:
        """Report scales or zero points that differ from those that quantizing the source again gives."""
        wrong = stored != recomputed
        if wrong.any():
            index = np.unravel_index(int(wrong.argmax()), wrong.shape)
            self._problem(
                f"{self._place(info.name)} holds {stored[index]:.{digits}g} at {[int(axis) for axis in index]}, the "
                f"source makes it {recomputed[index]:.{digits}g} ({int(wrong.sum())} of {wrong.size} {what} differ)"
            )

    def _report_error(self, weight: Weight, comparison: Comparison, task: TensorTask) -> None:
        """Record a layer's error; report one larger than rounding explains, unless the codes were recomputed."""
        place = self._place(weight.codes.name)
        beyond_nearest = beyond_gptq = None
        if comparison.out_of_bound is not None:
            (row, col), error, bound, count = comparison.out_of_bound
            beyond_nearest = (
                f"{place} is off by {error:.3g} at [{row}, {col}], where rounding explains {bound:.3g} "
                f"({count} of {math.prod(comparison.shape)} weights are off)"
            )
        if comparison.excess is not None:
            beyond_gptq = f"{place} {comparison.excess}"

        if task.foreign:
            times_rounding = comparison.error.times_rounding
            with self.reading.lock:
                self.reading.foreign.append((self.number, times_rounding, beyond_nearest, beyond_gptq))
        elif task.gptq_rounded and beyond_gptq is not None:
            self._problem(beyond_gptq)
        elif task.scheme is None and not task.gptq_rounded and beyond_nearest is not None:
            self._problem(beyond_nearest)

        layer_error = comparison.error.of(weight.module, comparison.shape)
        with self.reading.lock:
            self.reading.errors.append((self.number, layer_error))
            if not task.gptq_rounded:
                codes = math.prod(comparison.shape)
                self.reading.findings.compared_codes += codes
                self.reading.findings.equal_codes += codes - comparison.differing


def _is_smoothed(original: Weight | bytes | None) -> bool:
    return isinstance(original, bytes) or (original is not None and original.smoothed)

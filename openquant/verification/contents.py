"""Reads tensors of a quantized directory for `verify`: NaN in codes, bad scales, differences from the source.

Threads read a bounded piece at a time, as a conversion does. No whole tensor is held in memory.

Recognizes smoothing (SmoothQuant, AWQ) in an output: powers of two by which its norms and projections are divided.

The output does not record the factors. Those of a norm follow from its elements, and those of a projection's rows from
their norms, which are compared with the source's. The columns of the balance layers must be multiplied by the same
factors.

    transforms, problems = recognize_smoothing(plan, checkpoint, weights, stated=True)
    make_plan(source, scheme, PlanOptions(transforms=transforms))     # the plan that makes this output
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..calibration.smoothing import (
    MOST,
    MappingTransforms,
    SmoothingMapping,
    apply_smoothing,
    combine_transforms,
    read_vector,
    usable_mappings,
)
from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import Bytes, TensorInfo
from ..formats.format import FLOATS
from ..formats.kernels import Bits, from_float32, to_float32
from ..formats.numbers import Floats, NonFinite, count_non_finite
from ..formats.schemes import Scheme
from ..plan.plan import Plan
from ..threads import in_threads
from ..weights.quant_error import MOVED, Comparison, ErrorSum, LayerError
from ..weights.reading import LostWeights, Reader
from ..weights.weight import Weight, WeightTransform, WeightTransforms

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


@dataclass(frozen=True)
class _ForeignError:
    """The error of a weight of which it is not known what rounded it.

    Attributes:
        number: number of its task.
        times_rounding: the error relative to that of the nearest codes.
        beyond_nearest: what is wrong if codes are the nearest; None if nothing is.
        beyond_gptq: what is wrong if GPTQ chose them; None if nothing is.
    """

    number: int
    times_rounding: float
    beyond_nearest: str | None
    beyond_gptq: str | None


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
        compensated: whether the weights of another tool have the errors of a method such as GPTQ.
        non_finite: number of NaN and infinities in each unquantized tensor that has some, by name.
        as_in_source: names of the tensors in `non_finite` that equal the source's.
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
    compensated: bool = False
    non_finite: dict[str, NonFinite] = field(default_factory=dict)
    as_in_source: set[str] = field(default_factory=set)
    lost_layers: set[str] = field(default_factory=set)
    zero_layers: set[str] = field(default_factory=set)


def read_contents(
    checkpoint: Checkpoint,
    source: Checkpoint | None,
    tasks: Sequence[TensorTask],
    workers: int,
    progress: Progress | None,
) -> TensorFindings:
    """Read tensors of a quantized directory and check them: NaN in codes, bad scales, differences from the source.

    Args:
        checkpoint: the opened directory.
        source: the checkpoint it was made from. None is allowed if no task compares with it.
        tasks: the tensors to read, each with what it is compared with.
        workers: number of threads.
        progress: called with the bytes read so far and the total, never from two threads at once; None to call nothing.

    Returns:
        Problems, one line each; the quantization error of each layer; and counts of equal tensors and codes. A tensor
        that cannot be read is a problem.
    """
    return _Reading(checkpoint, source, tasks, progress).run(workers)


class _Reading:
    """One call of `read_contents`: the remaining tasks and the findings so far, shared by all threads."""

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
        self.foreign: list[_ForeignError] = []
        self.findings = TensorFindings()

    def run(self, workers: int) -> TensorFindings:
        """Do all tasks and return what they found. Raises the first error of a worker."""
        in_threads(self._work, workers, self.stopped)
        self._judge_foreign()
        self.findings.problems = [message for _, message in sorted(self.problems, key=lambda entry: entry[0])]
        self.findings.errors = [error for _, error in sorted(self.errors, key=lambda entry: entry[0])]
        return self.findings

    def _judge_foreign(self) -> None:
        """Report weights of another tool that are farther from the source than its method explains."""
        if not self.foreign:
            return
        # Nearest codes have no larger error than themselves, whatever the scales are.
        self.findings.compensated = statistics.median(error.times_rounding for error in self.foreign) > MOVED
        for error in self.foreign:
            problem = error.beyond_nearest
            if self.findings.compensated:
                problem = error.beyond_gptq
            if problem is not None:
                self.add_problem(error.number, problem)

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
                    worker.check_kv_cache_scale(task.info)
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

    def add_non_finite(self, info: TensorInfo, data: Bytes) -> None:
        """Add the NaN and infinities in a piece of an unquantized tensor to the findings."""
        if count := count_non_finite(data, info.dtype):
            with self.lock:
                self.findings.non_finite[info.name] = self.findings.non_finite.get(info.name, NonFinite()) + count

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes were read."""
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Worker:
    """The readers and buffers of one thread."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.checkpoint = reading.checkpoint
        self._place = self.checkpoint.place
        self.output = Reader(self.checkpoint.where, self.checkpoint.root.joinpath)
        if reading.source is not None:
            self.source = Reader(reading.source.where, reading.source.root.joinpath)
        # Number of the current task.
        self.number = 0
        self._buffers: dict[str, Bytes] = {}

    def _problem(self, message: str) -> None:
        self.reading.add_problem(self.number, message)

    def _buffer(self, name: str, nbytes: int) -> Bytes:
        if name not in self._buffers or self._buffers[name].size < nbytes:
            self._buffers[name] = np.empty(nbytes, np.uint8)
        return self._buffers[name][:nbytes]

    def compare(self, info: TensorInfo, original: Weight | bytes | None) -> None:
        """Compare an unquantized tensor with the source: see `TensorTask.original`."""
        place = self.checkpoint.where[info.name]

        low = 0
        with self.output.open(place.shard) as file:
            for expected in self._read_expected(info, original):
                if self.reading.stopped.is_set():
                    return
                piece = self._buffer("output", expected.size)
                file.read(piece, place.offset + low, info.name)
                self.reading.add_non_finite(info, piece)

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
            if info.name in self.reading.findings.non_finite and not _is_smoothed(original):
                self.reading.findings.as_in_source.add(info.name)

    def check_finite(self, info: TensorInfo) -> None:
        """Check a tensor for NaN and infinity, without comparing it with the source."""
        for piece in self._tensor(info, self.output, "output"):
            if self.reading.stopped.is_set():
                return
            self.reading.add_non_finite(info, piece)
            self.reading.advance(piece.size)

    def _read_expected(self, info: TensorInfo, original: Weight | bytes | None) -> Iterator[Bytes]:
        """The expected bytes of an unquantized tensor, in pieces."""
        if original is None:
            return self._tensor(info, self.source, "source")
        if isinstance(original, bytes):
            return iter([np.frombuffer(original, np.uint8)])
        return self._source_weight(original)

    def _tensor(self, info: TensorInfo, reader: Reader, buffer: str) -> Iterator[Bytes]:
        """The bytes of the tensor of that name in the output or the source, in pieces."""
        place = reader.where[info.name]
        with reader.open(place.shard) as file:
            for low in range(0, info.nbytes, PIECE):
                piece = self._buffer(buffer, min(PIECE, info.nbytes - low))
                file.read(piece, place.offset + low, info.name)
                yield piece

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

        if lost is not None and lost.unusual:
            with self.reading.lock:
                findings = self.reading.findings
                layers = findings.zero_layers if comparison is None else findings.lost_layers
                layers.add(weight.module)
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
            self._read_scale(weight.input_scale)

        signed = weight.format is not None and weight.format.signed_scales
        scale = weight.scale and self._read_scale(weight.scale, signed)
        if weight.format is None or weight.format.global_scale is None:
            return scale, None

        values = weight.global_scale and self._read_scale(weight.global_scale)
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

                piece = self._buffer("output", count * pitch)
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
            if info is not None and self._read_scale(info, signed) is None:
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

    def check_kv_cache_scale(self, info: TensorInfo) -> None:
        """Check that a KV-cache scale is finite and above zero."""
        if info.dtype in FLOATS:
            self._read_scale(info)
        self.reading.advance(info.nbytes)

    def _check_integers(self, expected: TensorInfo, data: bytes) -> None:
        """Check a tensor of int64 whose values follow from the weight's shape, such as `weight_shape`."""
        if self.checkpoint.tensors.get(expected.name) != expected:
            return  # The headers' checks report it.
        raw = self.output.read_bytes(expected).tobytes()
        if raw != data:
            actual, right = (np.frombuffer(values, "<i8").tolist() for values in (raw, data))
            self._problem(f"{self._place(expected.name)} is {actual}, its codes are {right}")

    def _read_scale(self, info: TensorInfo, signed: bool = False) -> Floats | None:
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
            place = self._place(info.name)
            self._problem(f"{place} holds {held}: scales are finite and {allowed}")
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
            recomputed = comparison.expected_scale
            wrong = recomputed != comparison.scale
            if wrong.any():
                index = np.unravel_index(int(wrong.argmax()), wrong.shape)
                # Shown as stored: times the global scale, in FP8, which has few digits.
                factor = 1.0
                digits = 9
                if global_scale is not None:
                    factor = float(global_scale.item())
                    digits = 6
                self._problem(
                    f"{self._place(scale.name)} holds {float(comparison.scale[index]) * factor:.{digits}g} at "
                    f"{[int(axis) for axis in index]}, the source makes it "
                    f"{float(recomputed[index]) * factor:.{digits}g} "
                    f"({int(wrong.sum())} of {wrong.size} scales differ)"
                )
            self._report_zeros(weight, comparison)

        if comparison.first_difference is not None and not gptq_rounded:
            (row, col), code, recomputed_code = comparison.first_difference
            self._problem(
                f"{self._place(info.name)} has the code 0x{code:02x} at [{row}, {col}], the source makes it "
                f"0x{recomputed_code:02x} ({comparison.differing} of {math.prod(comparison.shape)} codes differ)"
            )

    def _report_zeros(self, weight: Weight, comparison: Comparison) -> None:
        """Report zero points that differ from those that quantizing the source again gives."""
        info = weight.zero_points
        zeros = comparison.zeros
        recomputed = comparison.expected_zeros

        if info is None or zeros is None or recomputed is None or weight.format is None:
            return

        wrong = zeros != recomputed
        if not wrong.any():
            return

        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        stored, right = (int(weight.format.number.encode(grid[index].reshape(1))[0]) for grid in (zeros, recomputed))
        self._problem(
            f"{self._place(info.name)} holds {stored} at {[int(axis) for axis in index]}, the source makes it "
            f"{right} ({int(wrong.sum())} of {wrong.size} zero points differ)"
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
                self.reading.foreign.append(_ForeignError(self.number, times_rounding, beyond_nearest, beyond_gptq))
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


# A column counts as a multiple of the source's column if their squared cosine exceeds this.
_EXPLAINED = 0.75


def recognize_smoothing(
    plan: Plan, output: Checkpoint, codes: Mapping[str, Weight], stated: bool
) -> tuple[WeightTransforms, list[str]]:
    """Recognize the smoothing factors of an output by comparing it with its source.

    Args:
        plan: the plan that makes the output of its source without smoothing.
        output: the opened output directory.
        codes: its quantized weights, by the tensor name that the weight has unquantized ("..up_proj.weight").
        stated: whether its journal says that it is smoothed. If not, a norm that no powers of two explain means
            that there is no smoothing, and is not a problem.

    Returns:
        The factors, as transforms that make the output's weights, norms and biases of the source's; and problems, one
        line for each norm that no powers of two explain, or whose balance layers do not match it.

    Raises:
        SourceError: a weight cannot be read.
    """
    return _Recognition(plan, output, codes, stated).run()


class _Recognition:
    """One call of `recognize_smoothing`."""

    def __init__(self, plan: Plan, output: Checkpoint, codes: Mapping[str, Weight], stated: bool) -> None:
        self.plan = plan
        self.checkpoint = output
        self._place = output.place
        self.codes = codes
        self.stated = stated
        self.source = Reader(plan.decoded.where, plan.decoded.root.joinpath)
        self.output = Reader(output.where, output.root.joinpath)
        self.problems: list[str] = []

    def run(self) -> tuple[WeightTransforms, list[str]]:
        mappings = [mapping for mapping in usable_mappings(self.plan).mappings if self._has_smooth_layer(mapping)]
        transforms = [
            self._norm_transforms(mapping) for mapping in mappings if mapping.smooth_layer not in self.plan.layers
        ]

        if not self.stated and (self.problems or all((part.scale == 1).all() for part in transforms)):
            return WeightTransforms(), []

        # The columns of a projection may be multiplied by the factors of the norm before it.
        from_norms = combine_transforms(transforms, self.plan).weights
        transforms += [
            self._row_transforms(mapping, from_norms.get(mapping.smooth_layer))
            for mapping in mappings
            if mapping.smooth_layer in self.plan.layers
        ]

        combined = combine_transforms(transforms, self.plan)
        for mapping_transforms in transforms:
            self._check_columns(mapping_transforms, combined.weights)

        return combined, self.problems

    def _has_smooth_layer(self, mapping: SmoothingMapping) -> bool:
        """Whether the output has the smooth layer in the source's shape, quantized if the plan quantizes it."""
        name = f"{mapping.smooth_layer}.weight"
        if mapping.smooth_layer in self.plan.layers:
            return self._has_codes(mapping.smooth_layer)
        return self.checkpoint.tensors.get(name) == self.plan.decoded.tensors[name]

    def _has_codes(self, module: str) -> bool:
        """Whether the output has a module's codes and scales, in the source's shape."""
        weight = self.codes.get(f"{module}.weight")
        return (
            weight is not None
            and weight.format is not None
            and weight.scale is not None
            and weight.shape == self.plan.layers[module].shape
        )

    def _norm_transforms(self, mapping: SmoothingMapping) -> MappingTransforms:
        """The transforms whose factors are the powers of two nearest to source norm / output norm."""
        info = self.plan.decoded.tensors[f"{mapping.smooth_layer}.weight"]
        source_norm, output_norm = (read_vector(info, reader) for reader in (self.source, self.output))

        before, after = (values + np.float32(mapping.offset) for values in (source_norm, output_norm))
        transforms = apply_smoothing(mapping, _nearest_powers(before, after), self.plan, self.source)

        raw = self.output.read_bytes(info)
        itemsize = len(raw) // len(source_norm)
        differing = (raw != np.frombuffer(transforms.tensors[info.name], np.uint8)).reshape(-1, itemsize).any(axis=1)

        if differing.any():
            index = int(differing.argmax())
            self.problems.append(
                f"{self._place(info.name)} holds {output_norm[index]:g} at [{index}], the source "
                f"{source_norm[index]:g}: their ratio is no power of two "
                f"({int(differing.sum())} of {len(differing)} elements have none)"
            )

        return transforms

    def _row_transforms(self, mapping: SmoothingMapping, before: WeightTransform | None) -> MappingTransforms:
        """The factors of rows: powers of two nearest to the ratios of row norms; `before`: its own transform."""
        rows = slice(mapping.first_row, mapping.first_row + mapping.channels)
        source_sizes = _row_norms(self.source, self.plan.layers[mapping.smooth_layer]._replace(transform=before))[rows]
        output_sizes = _row_norms(self.output, self.codes[f"{mapping.smooth_layer}.weight"])[rows]
        return apply_smoothing(mapping, _nearest_powers(source_sizes, output_sizes), self.plan, self.source)

    def _check_columns(self, mapping_transforms: MappingTransforms, transforms: Mapping[str, WeightTransform]) -> None:
        """Check the columns of one balance layer, by its first rows, against the factors of its smooth layer."""
        mapping = mapping_transforms.mapping
        balance_layers = (module for module in mapping.balance_layers if module in self.plan.layers)
        module = next((module for module in balance_layers if self._has_codes(module)), None)

        if module is None:
            return

        output_weight = self.codes[f"{module}.weight"]
        source_weight = self.plan.layers[module]._replace(transform=transforms[module])
        expected, actual = (
            next(reader.rows(weight, 1)).view(np.float32)
            for reader, weight in ((self.source, source_weight), (self.output, output_weight))
        )

        count = min(len(expected), len(actual))
        expected = expected[:count].astype(np.float64)
        actual = actual[:count].astype(np.float64)
        expected_energy = (expected * expected).sum(axis=0)
        products = (expected * actual).sum(axis=0)
        actual_energy = (actual * actual).sum(axis=0)

        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = products / expected_energy
            explained = products * products / (expected_energy * actual_energy)
            # A column that rounding has set to zero gives NaN, which is not above the limit.
            wrong = (explained > _EXPLAINED) & (np.rint(np.log2(np.abs(ratio))) != 0)

        # With two or three bits, rounding alone may make a column of small weights half as large again.
        wrong &= np.square(actual - expected).sum(axis=0) > self._rounding_energy(output_weight, count)

        if wrong.any():
            index = int(wrong.argmax())
            name = self._stored_name(mapping.smooth_layer)
            self.problems.append(
                f"{self._place(name)} does not match {module}, which reads its output: column {index} there is "
                f"{ratio[index]:.3g} times what it should be "
                f"({int(wrong.sum())} of {len(wrong)} columns are wrong)"
            )

    def _rounding_energy(self, weight: Weight, count: int) -> npt.NDArray[np.float64]:
        """The largest sum of squared rounding errors in each column of `count` rows, float64 [in]; 0 for floats."""
        fmt = weight.format
        cols = weight.shape[1]
        if fmt is None or fmt.number.normal:
            return np.zeros(cols)
        steps = self.output.scales(weight, 0, count).astype(np.float64)
        energy = np.square(np.broadcast_to(steps, (count, steps.shape[1])) / 2).sum(axis=0)
        return np.repeat(energy, fmt.group[1] or cols)[:cols]

    def _stored_name(self, module: str) -> str:
        """The name of the tensor that holds a smooth layer: a norm, or a projection's codes."""
        name = f"{module}.weight"
        return self.codes[name].codes.name if name in self.codes else name


def _nearest_powers(before: Floats, after: Floats) -> Floats:
    """The powers of two nearest to before / after; 1 where that is outside the range of smoothing factors."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponents = np.rint(np.log2(before.astype(np.float64) / after))
    return np.exp2(np.where(np.abs(exponents) <= MOST, exponents, 0)).astype(np.float32)


def _row_norms(reader: Reader, weight: Weight) -> Floats:
    """The L2 norm of each row, float32 [out]."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [np.square(to_float32(bits, weight.dtype)).sum(axis=1) for bits in reader.rows(weight, 1)]
    norms: Floats = np.sqrt(np.concatenate(sums))
    return norms

"""`openquant diagnose`: measures what quantizing does to each layer, from its weights alone.

Every weight is read: all scales are exact, and any NaN or infinity is found, also in tensors that stay unquantized. The
errors of schemes are measured on evenly spaced rows and on the row of the largest weight.
Errors of one layer are summed over pieces of it: scales come from all weights, errors from these rows.

    diagnose_layers(plan, provider, workers=2).layers
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..convert.conversion import ShardProvider, loops, worth_compiling
from ..files.shardfile import Location, TensorInfo
from ..formats.format import Format, Group, widen
from ..formats.kernels import BITS_TYPE, CHUNK, Bits, Loops, Scales, choose_scales, choose_shared_scale, to_float32
from ..formats.numbers import Floats, NonFinite, can_be_non_finite, count_non_finite
from ..formats.schemes import SCHEMES, Scheme
from ..plan.plan import Plan
from ..streaming.session import Stopped, work_as_shards_arrive
from ..weights.quant_error import relative_error, row_energies
from ..weights.reading import Reader, require_finite
from ..weights.weight import Weight
from .result import LayerDiagnosis

# About so many weights of a layer are sampled, and at least so many rows.
SAMPLE_WEIGHTS = 1 << 16
SAMPLE_ROWS = 32
# Of a layer with at most so many weights, all rows are.
MAX_UNSAMPLED = 1 << 18

Progress = Callable[[int, int], None]


def sample_step(shape: tuple[int, int]) -> int:
    """Return the distance in rows between sampled rows: 65 for a layer of 2048 x 2048, 1 (all rows) for 256 x 1024.

    It is odd, since heads have 64 or 128 rows: a step that divides these would sample the same rows of every head.

    Args:
        shape: (out, in) of the layer.
    """
    count = shape[0] * shape[1]
    if count <= MAX_UNSAMPLED:
        return 1
    return min(count // SAMPLE_WEIGHTS, shape[0] // SAMPLE_ROWS) | 1


# The layers, in the order of the plan; and NaN and infinities of tensors that stay unquantized, by name.
Measured = tuple[tuple[LayerDiagnosis, ...], dict[str, NonFinite]]
# Fused layers, which share per-tensor and global scales; or a tensor that stays unquantized.
Task = tuple[Weight, ...] | TensorInfo


def shards_to_read(plan: Plan) -> dict[str, list[str]]:
    """Find the shards that a diagnosis reads, in the order in which it reads them.

    Args:
        plan: the plan, which says what is measured.

    Returns:
        By file name of each shard: sorted file names of the shards that must be there when it is read. These are
        itself, and those that have other parts of its layers (scales) or layers that are fused with them.
    """
    needs: dict[str, set[str]] = {}
    for shard, task in _tasks(plan):
        needs.setdefault(shard, set()).add(shard)
        if isinstance(task, TensorInfo):
            continue
        for weight in task:
            parts = weight.parts or (weight.source,)
            needs[shard].update(plan.decoded.where[part.name].shard for part in parts)
    return {shard: sorted(names) for shard, names in needs.items()}


def diagnose_layers(plan: Plan, provider: ShardProvider, workers: int, progress: Progress | None = None) -> Measured:
    """Measure every layer that a plan quantizes, and look for NaN and infinity in all other tensors.

    Args:
        plan: the plan, whose quantized layers are measured.
        provider: makes the shards of `shards_to_read` available as local files.
        workers: number of threads.
        progress: called with the bytes read so far and their total, never from two threads at once. Quantized weights
            count as unquantized.

    Returns:
        Errors of each layer, in the order of the checkpoint; and by tensor name, the numbers of NaN and
        of infinite elements in tensors that stay unquantized.

    Raises:
        SourceError: NaN or infinity in a weight to be quantized, or a source that cannot be read or downloaded.
    """
    return _DiagnosisRun(plan, provider, progress).run(workers)


def _tasks(plan: Plan) -> list[tuple[str, Task]]:
    """All tasks, each with the shard of its tensor or of its first layer; tasks of one shard follow each other."""
    by_shard: dict[str, list[Task]] = {}
    for weight, _ in plan.decisions.quantized:
        modules = plan.decisions.fused.get(weight.module, (weight.module,))
        if modules[0] == weight.module:
            shard = weight.extent(plan.decoded.where).shard
            by_shard.setdefault(shard, []).append(tuple(plan.layers[module] for module in modules))

    # Tensors that the source stores as codes are checked where they are decoded with their scales.
    excluded = {weight.source.name for weight, _ in plan.decisions.quantized}
    excluded.update(weight.source.name for weight in plan.layers.values() if weight.format is not None)
    excluded.update(item.tensor.name for item in plan.decisions.passthrough if item.weight is not None)

    for info in plan.decoded.tensors.values():
        if info.name not in excluded and can_be_non_finite(info.dtype):
            by_shard.setdefault(plan.decoded.where[info.name].shard, []).append(info)
    return [(shard, task) for shard, tasks in by_shard.items() for task in tasks]


class _DiagnosisRun:
    """One call of `diagnose_layers`: the tasks still to do, and what was measured so far."""

    def __init__(self, plan: Plan, provider: ShardProvider, progress: Progress | None) -> None:
        self.plan = plan
        self.provider = provider
        self.progress = progress

        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.tasks = _tasks(plan)
        self.loops = loops(worth_compiling(plan))
        self.done = 0

        self.total = sum(
            task.nbytes if isinstance(task, TensorInfo) else sum(weight.nbytes for weight in task)
            for _, task in self.tasks
        )
        self.diagnoses: dict[str, LayerDiagnosis] = {}
        self.not_finite: dict[str, NonFinite] = {}

    def run(self, workers: int) -> Measured:
        work_as_shards_arrive(self.tasks, self.provider, self._begin, workers, self.stopped)
        layers = tuple(self.diagnoses[module] for module in self.plan.layers if module in self.diagnoses)
        return layers, dict(sorted(self.not_finite.items()))

    def _begin(self) -> Callable[[Task], None]:
        return partial(self._measure, Reader(self.plan.decoded.where, self.provider.path))

    def _measure(self, reader: Reader, task: Task) -> None:
        if isinstance(task, TensorInfo):
            self._check_finite(task, reader)
            return

        layers = _FusedLayers(self, reader, task).measure()
        with self.lock:
            self.diagnoses |= {layer.module: layer for layer in layers}

    def _check_finite(self, info: TensorInfo, reader: Reader) -> None:
        """Count NaN and infinities in a tensor that stays unquantized."""
        non_finite = NonFinite()
        for piece in reader.pieces(info):
            non_finite += count_non_finite(piece, info.dtype)
            self.advance(piece.size)
        if non_finite:
            with self.lock:
                self.not_finite[info.name] = non_finite

    def advance(self, nbytes: int) -> None:
        """Add bytes that were read, and report all so far."""
        if self.stopped.is_set():
            raise Stopped
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _FusedLayers:
    """Fused layers, which one thread measures together, since schemes with one scale per tensor share it among them."""

    def __init__(self, run: _DiagnosisRun, reader: Reader, weights: tuple[Weight, ...]) -> None:
        self.run = run
        self.reader = reader
        self.weights = weights

    def measure(self) -> list[LayerDiagnosis]:
        """Measure all of them."""
        layers = [self._read(weight) for weight in self.weights]
        shared_absmax = np.max([ranges.absmax for ranges, _ in layers], axis=0)
        return [self._diagnose(ranges, samples, shared_absmax) for ranges, samples in layers]

    def _read(self, weight: Weight) -> tuple[WeightRanges, list[RowSample]]:
        """Read all of a layer, and sample rows of it."""
        ranges = WeightRanges(weight, self.run.loops)
        samples = []
        low = 0
        step = sample_step(weight.shape)

        for bits in self.reader.rows(weight, ranges.height):
            ranges.add(low, bits, self.reader.where)

            first = (step // 2 - low) % step
            samples.append(RowSample(np.arange(low + first, low + len(bits), step), bits[first::step].copy()))
            low += len(bits)
            # In its unquantized dtype.
            self.run.advance(weight.nbytes // weight.shape[0] * len(bits))

        return ranges, samples

    def _diagnose(self, ranges: WeightRanges, samples: list[RowSample], shared_absmax: Floats) -> LayerDiagnosis:
        weight = ranges.weight

        usable = {
            name: scheme
            for name, scheme in ranges.schemes.items()
            if (shared_absmax if scheme.format.shares_scale else ranges.absmax).item() <= scheme.largest
        }

        count = 0
        energy = 0.0
        losses = {name: SchemeLoss() for name in usable}

        # Source codes that a scheme keeps lose nothing. Schemes that store weights in the same way share one loss.
        encoded: dict[object, str] = {}
        for name, scheme in usable.items():
            if not self._keeps_codes(scheme, weight):
                storage = scheme.format.weights_only, scheme.searches_scales, scheme.clip_ratios
                losses[name] = losses[encoded.setdefault(storage, name)]

        for rows in _sampled_rows(ranges, samples):
            values = to_float32(rows.bits, weight.dtype)
            energies = row_energies(values)
            count += len(energies)
            energy += rows.estimate_sum(energies)
            for name in encoded.values():
                scales = ranges.scales(usable[name], rows, shared_absmax)
                losses[name].add(usable[name], rows, values, energies, *scales)

        return LayerDiagnosis(
            module=weight.module,
            shape=weight.shape,
            rows=count,
            errors=_by_scheme({name: relative_error(energy, loss.noise) for name, loss in losses.items()}),
            row_errors=_by_scheme({name: math.sqrt(loss.row_noise / weight.shape[0]) for name, loss in losses.items()}),
        )

    def _keeps_codes(self, scheme: Scheme, weight: Weight) -> bool:
        """Whether the source is stored in the scheme already, and its codes stay."""
        kept = weight.is_stored_as(scheme.format) and (
            not scheme.format.shares_scale or self.reader.keeps_shared_scale(self.weights, scheme)
        )
        return kept or self.reader.exact_global_scale(self.weights, scheme) is not None


def _sampled_rows(ranges: WeightRanges, samples: list[RowSample]) -> Iterator[RowSample]:
    """The rows to be measured: that of the largest weight, for itself, then the sampled ones for all others."""
    outlier = ranges.absmax_row
    indices = np.concatenate([rows.indices for rows in samples])
    others = indices != outlier.indices
    indices = np.concatenate([outlier.indices, indices[others]])
    bits = np.concatenate([outlier.bits, np.concatenate([rows.bits for rows in samples])[others]])
    share = (ranges.weight.shape[0] - 1) / max(1, len(indices) - 1)
    step = -(-len(indices) // max(1, round(bits.size / CHUNK)))
    for start in range(0, len(indices), step):
        rows = slice(start, start + step)
        yield RowSample(indices[rows], bits[rows], share, first_is_outlier=not start)


Energies = npt.NDArray[np.float64]


class RowSample(NamedTuple):
    """Sampled rows of a layer.

    Attributes:
        indices: int64 [n], indices of the rows.
        bits: bits of their weights, uint16 or uint32 [n, in].
        share: number of the layer's rows that each of them stands for.
        first_is_outlier: whether the first stands for itself only.
    """

    indices: npt.NDArray[np.intp]
    bits: Bits
    share: float = 1.0
    first_is_outlier: bool = False

    def estimate_sum(self, of_rows: Energies) -> float:
        """Estimate the sum of a value over all rows, from its values for these, float64 [n]."""
        total = self.share * float(of_rows.sum())
        if self.first_is_outlier:
            total -= (self.share - 1) * float(of_rows[0])
        return total


class WeightRanges:
    """The largest magnitudes of a layer, over all of its weights.

    Args:
        weight: the layer's weight.
        loops: the kernels that go over every weight.

    Attributes:
        weight: the layer's weight.
        schemes: in what each scheme stores it, by the scheme's name: itself, or its fallback where its groups do not
            divide the layer's shape. Schemes that cannot store it are missing.
        absmax: float32 [1, 1], largest magnitude.
        absmax_row: the row that has it.
    """

    def __init__(self, weight: Weight, loops: Loops) -> None:
        self.weight = weight
        self._loops = loops
        stored = {name: _as_stored(scheme, weight) for name, scheme in SCHEMES.items()}
        self.schemes = {name: scheme for name, scheme in stored.items() if scheme is not None}
        self.absmax: Floats = np.zeros((1, 1), np.float32)
        self.absmax_row = RowSample(np.zeros(1, np.intp), np.zeros((1, weight.shape[1]), BITS_TYPE[weight.dtype]))
        # By format, the absmax of groups of several rows, piece by piece: sampled rows alone do not have it.
        self._grids: dict[Format, list[Floats]] = {
            scheme.format: []
            for scheme in self.schemes.values()
            if (scheme.format.group[0] or 1) > 1 and not weight.is_stored_as(scheme.format)
        }

    @property
    def height(self) -> int:
        """The number of rows of each piece but the last must be a multiple of this."""
        return math.lcm(*(fmt.group[0] or 1 for fmt in self._grids))

    def add(self, low: int, bits: Bits, where: Mapping[str, Location]) -> None:
        """Add the next piece of the layer; pieces come in the order of the rows.

        Args:
            low: index of its first row.
            bits: bits of its weights, uint16 or uint32 [n, in]; n is a multiple of `height`, except in the last piece.
            where: shard and offset of each tensor, by name.

        Raises:
            SourceError: it holds NaN or infinity.
        """
        dtype = self.weight.dtype
        for fmt, grid in self._grids.items():
            grid.append(self._loops.absmax(bits, dtype, fmt.group))
        grids = [grid[-1] for grid in self._grids.values()] or [self._loops.absmax(bits, dtype, (None, None))]
        largest = grids[0].max(keepdims=True)
        require_finite(self.weight, largest, where)
        if largest > self.absmax:
            self.absmax = largest
            row = int(self._loops.absmax(bits, dtype, (1, None)).argmax())
            self.absmax_row = RowSample(np.array([low + row]), bits[row : row + 1].copy())

    def scales(self, scheme: Scheme, rows: RowSample, shared_absmax: Floats) -> tuple[Group, Scales]:
        """Choose the scales of some rows, once all pieces are added.

        Args:
            scheme: a value of `schemes`, in which the layer is not stored already.
            rows: the rows.
            shared_absmax: float32 [1, 1], absmax of all fused layers, for schemes with a per-tensor or global scale.

        Returns:
            Height and width of a group among these rows, (1, 128) for blocks of 128 x 128; and the scales and zero
            points, float32 [n / height, in / width], [1, 1] for a scale per tensor. Zero points are None for symmetric
            formats.
        """
        fmt = scheme.format
        height, width = fmt.group
        group: Group = fmt.group

        if fmt.shared:
            absmax = shared_absmax
        elif fmt in self._grids:
            if len(self._grids[fmt]) > 1:
                self._grids[fmt] = [np.concatenate(self._grids[fmt])]
            group = (1, width)
            absmax = self._grids[fmt][0][rows.indices // (height or 1)]
        else:
            absmax = self._loops.absmax(rows.bits, self.weight.dtype, fmt.group)

        global_scale = None
        if fmt.global_scale is not None:
            global_scale = choose_shared_scale(fmt, shared_absmax)
        return group, choose_scales(scheme, rows.bits, self.weight.dtype, absmax, global_scale, loops=self._loops)


class SchemeLoss:
    """The loss of a layer in one scheme, estimated from sampled rows.

    Attributes:
        noise: sum of squares of the weights' errors.
        row_noise: sum over rows of the row's noise divided by its energy.
    """

    def __init__(self) -> None:
        self.noise = self.row_noise = 0.0

    def add(
        self, scheme: Scheme, rows: RowSample, values: Floats, energies: Energies, group: Group, scales: Scales
    ) -> None:
        """Add the loss of some rows.

        Args:
            scheme: the scheme.
            rows: the rows.
            values: float32 [n, in], their weights.
            energies: float64 [n], sum of squares of each row.
            group: height and width of a group among these rows.
            scales: the scales and zero points, float32 [n / height, in / width]; `WeightRanges.scales` returns both.
        """
        number = scheme.format.number
        scale, zero_point = (None if grid is None else widen(grid, group[1]) for grid in scales)
        assert scale is not None

        # Values of codes, not the codes themselves, which take longer to look up.
        if zero_point is None:
            quantized = number.nearest(values / scale)
        else:
            quantized = number.nearest(values / scale + zero_point)
            quantized -= zero_point

        quantized *= scale
        quantized -= values

        noise = row_energies(quantized)
        self.noise += rows.estimate_sum(noise)
        # A row of zeros has no noise.
        self.row_noise += rows.estimate_sum(noise / np.where(energies > 0, energies, 1))


@cache
def normal_row_error(scheme: Scheme) -> float:
    """Measure the row error of normally distributed weights in a scheme, such as 0.0262: 128 rows of 1024."""
    values = np.random.default_rng(0).standard_normal((128, 1024), np.float32)
    bits = values.view(np.uint32)
    loss = SchemeLoss()
    rows = RowSample(np.arange(len(bits)), bits)
    loss.add(scheme, rows, values, row_energies(values), scheme.format.group, choose_scales(scheme, bits, "F32"))
    return math.sqrt(loss.row_noise / len(bits))


def _as_stored(scheme: Scheme, weight: Weight) -> Scheme | None:
    """The scheme in which `compress` stores a weight for which another is requested; None if it cannot."""
    if weight.is_stored_as(scheme.format) or scheme.format.shape_error(weight.shape) is None:
        return scheme
    if scheme.fallback is None:
        return None
    return _as_stored(scheme.fallback, weight)


def _by_scheme(values: dict[str, float]) -> dict[str, float | None]:
    """The values in the order of SCHEMES, None for schemes that have none."""
    return {name: values.get(name) for name in SCHEMES}

"""`openquant diagnose`: what quantizing does to each layer, from its weights alone.

Every weight is read once: the largest, the mean, the deviation and all scales are the true ones, and NaN and infinity
are found wherever they are, in tensors that stay unquantized too. What schemes make of the weights is measured on rows
a fixed number apart and on the row of the largest weight, or with `full` on all.

    diagnose(plan, supply, workers=2).layers
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..convert.conversion import worth_compiling
from ..convert.devices import loops
from ..errors import SourceError
from ..files.tensors import TensorInfo
from ..formats.finite import NonFinite, can_be_non_finite, count_non_finite
from ..formats.kernels import CHUNK, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..plan.plan import Plan
from ..streaming.shard_provider import ShardProvider
from ..threads import in_threads
from ..weights.quant_error import row_energies
from ..weights.reading import Reader
from ..weights.weight import Weight
from .result import LayerDiagnosis
from .statistics import RowSample, RowSums, SchemeLoss, WeightTotals, layer_figures

# So many weights of a layer are measured, of at least so many rows; all of a layer that has no more than WHOLE.
SAMPLE_WEIGHTS, SAMPLE_ROWS, WHOLE = 1 << 16, 32, 1 << 18
# Bytes of a tensor that stays unquantized, read at a time.
PIECE = 4 << 20

Progress = Callable[[int, int], None]


def sample_step(shape: tuple[int, int]) -> int:
    """How far apart the measured rows of a layer [out, in] are: 65 for 2048 x 2048, 1 (all rows) for 256 x 1024.

    It is odd, since rows come in heads of 64 or 128: a step that divides these would see the same places of each.
    """
    count = shape[0] * shape[1]
    return 1 if count <= WHOLE else min(count // SAMPLE_WEIGHTS, shape[0] // SAMPLE_ROWS) | 1


class MeasuredCheckpoint(NamedTuple):
    """What was read of a checkpoint.

    Attributes:
        layers: the figures of every layer that a plan quantizes, in the order of the checkpoint.
        not_finite: the NaN and infinities in tensors that stay unquantized, by name.
    """

    layers: tuple[LayerDiagnosis, ...]
    not_finite: dict[str, NonFinite]


# Layers that share a scale where a scheme has one per tensor; or a tensor that stays unquantized.
Task = tuple[Weight, ...] | TensorInfo


def shards_to_read(plan: Plan) -> dict[str, list[str]]:
    """The shards with tensors to be read, and for each the source shards that these lie in, joined ones included."""
    where = plan.seen.where
    found: dict[str, set[str]] = {}
    for shard, task in _tasks(plan):
        found.setdefault(shard, set()).add(shard)
        for weight in () if isinstance(task, TensorInfo) else task:
            parts = weight.parts or (weight.source,)
            found[shard].update(where[part.name].shard for part in parts)
    return {shard: sorted(names) for shard, names in found.items()}


def diagnose_layers(
    plan: Plan, traffic: ShardProvider, workers: int, full: bool = False, progress: Progress | None = None
) -> MeasuredCheckpoint:
    """Measure every layer that a plan quantizes, and look for NaN and infinity in all other tensors.

    Args:
        plan: the plan; its scheme says which flags layers get.
        traffic: how the shards of `shards_to_read` come.
        workers: number of threads.
        full: measure all rows.
        progress: told the bytes read so far and in all, never from two threads at once.

    Raises:
        SourceError: NaN or infinity in a weight to be quantized, or a source that cannot be read.
    """
    return _Diagnosing(plan, traffic, full, progress).run(workers)


def _tasks(plan: Plan) -> list[tuple[str, Task]]:
    """All that is read, each with the shard that it, or the first of its layers, lies in.

    Those of one shard come together.
    """
    found: dict[str, list[Task]] = {}
    for weight, _ in plan.decisions.quantized:
        modules = plan.decisions.sets.get(weight.module, (weight.module,))
        if modules[0] == weight.module:
            shard = weight.rows(plan.seen.where).shard
            found.setdefault(shard, []).append(tuple(plan.layers[module] for module in modules))
    # What the source stores as codes is read with its scales by whoever decodes it.
    others = {weight.source.name for weight, _ in plan.decisions.quantized}
    others.update(weight.source.name for weight in plan.layers.values() if weight.format is not None)
    others.update(kept.tensor.name for kept in plan.decisions.kept if kept.weight is not None)
    for info in plan.seen.tensors.values():
        if info.name not in others and can_be_non_finite(info.dtype):
            found.setdefault(plan.seen.where[info.name].shard, []).append(info)
    return [(shard, task) for shard, tasks in found.items() for task in tasks]


class _Stopped(Exception):
    """Raised in a worker whose work is no longer wanted: another failed, or the user interrupted."""


class _Diagnosing:
    """One call of `diagnose_layers`: the layers still to do, and what was found so far."""

    def __init__(self, plan: Plan, traffic: ShardProvider, full: bool, progress: Progress | None) -> None:
        assert plan.scheme is not None
        self.plan = plan
        self.scheme = plan.scheme
        self.traffic = traffic
        self.full = full
        self.progress = progress
        self.lock = threading.Lock()
        # Another one, since a worker may wait long for its next task.
        self.task_lock = threading.Lock()
        self.stopped = threading.Event()
        tasks = _tasks(plan)
        self.left = Counter(shard for shard, _ in tasks)
        self.count = len(tasks)
        self.tasks = self._available(tasks)
        self.loops = loops(worth_compiling(plan))
        self.done = 0
        # With all rows the weights are read twice: the scale must be known first.
        layers = [weight for _, task in tasks if not isinstance(task, TensorInfo) for weight in task]
        self.total = sum(weight.nbytes for weight in layers) * (2 if full else 1)
        self.total += sum(task.nbytes for _, task in tasks if isinstance(task, TensorInfo))
        self.found: dict[str, LayerDiagnosis] = {}
        self.not_finite: dict[str, NonFinite] = {}

    def _available(self, tasks: Sequence[tuple[str, Task]]) -> Iterator[tuple[str, Task]]:
        last = None
        for shard, task in tasks:
            if shard != last:
                self.traffic.wait_for(shard, self.stopped.is_set)
                last = shard
            if self.stopped.is_set():
                return
            yield shard, task

    def run(self, workers: int) -> MeasuredCheckpoint:
        in_threads(self._work, min(workers, self.count), self.stopped)
        layers = tuple(self.found[module] for module in self.plan.layers if module in self.found)
        return MeasuredCheckpoint(layers, dict(sorted(self.not_finite.items())))

    def _work(self) -> None:
        reader = Reader(self.plan.seen.where, self.traffic.path, lambda nbytes: np.empty(nbytes, np.uint8))
        while True:
            with self.task_lock:
                following = next(self.tasks, None)
            if following is None:
                return
            shard, task = following
            try:
                layers = [] if isinstance(task, TensorInfo) else _Joined(self, reader, task).measure()
                if isinstance(task, TensorInfo):
                    self._check(task, reader)
            except _Stopped:
                return
            with self.lock:
                self.found |= {layer.module: layer for layer in layers}
                self.left[shard] -= 1
                last = not self.left[shard]
            if last:
                self.traffic.finished(shard)

    def _check(self, info: TensorInfo, reader: Reader) -> None:
        """Look for NaN and infinity in a tensor that stays unquantized."""
        place, found = self.plan.seen.where[info.name], NonFinite()
        buffer = np.empty(min(PIECE, info.nbytes), np.uint8)
        with reader.open(place.shard) as file:
            for low in range(0, info.nbytes, PIECE):
                part = buffer[: min(PIECE, info.nbytes - low)]
                file.read(part, place.offset + low, info.name)
                found += count_non_finite(part, info.dtype)
                self.advance(part.size)
        if found:
            with self.lock:
                self.not_finite[info.name] = found

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes of weights were read, and report all so far."""
        if self.stopped.is_set():
            raise _Stopped
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Joined:
    """Layers that share a scale where a scheme has one per tensor, as one thread measures them."""

    def __init__(self, diagnosing: _Diagnosing, reader: Reader, fused: tuple[Weight, ...]) -> None:
        self.diagnosing = diagnosing
        self.reader = reader
        self.fused = fused

    def measure(self) -> list[LayerDiagnosis]:
        """The figures of all of them."""
        read = [self._read(weight) for weight in self.fused]
        shared = np.max([whole.largest for whole, _ in read], axis=0)
        return [self._figures(whole, kept, shared) for whole, kept in read]

    def _read(self, weight: Weight) -> tuple[WeightTotals, list[RowSample]]:
        """Read all of a layer, and keep the rows to be measured; none if all are, which are read once more."""
        whole, kept, low, step = WeightTotals(weight, self.diagnosing.loops), [], 0, sample_step(weight.shape)
        for bits in self.reader.rows(weight, whole.height):
            if not whole.add(low, bits):
                extent = weight.rows(self.reader.where)
                raise SourceError(
                    f"{extent.label} in {extent.shard} holds NaN or infinity",
                    "the weights are damaged: download or save them again, or leave this layer as it is with --ignore",
                )
            if not self.diagnosing.full:
                first = (step // 2 - low) % step
                kept.append(RowSample(np.arange(low + first, low + len(bits), step), bits[first::step].copy()))
            low += len(bits)
            self.diagnosing.advance(_plain_bytes(weight, len(bits)))
        return whole, kept

    def _figures(self, whole: WeightTotals, kept: list[RowSample], shared: Floats) -> LayerDiagnosis:
        weight = whole.weight
        storing = [
            scheme
            for scheme in whole.schemes
            if (shared if scheme.format.shares_scale else whole.largest).item() <= scheme.largest
        ]
        sums, losses = RowSums(), {scheme.name: SchemeLoss() for scheme in storing}
        # Codes that stay as they are lose nothing, and where weights are stored alike one scheme tells what both lose.
        encoded: dict[object, Scheme] = {}
        for scheme in storing:
            if not self._keeps(scheme, weight):
                alike = encoded.setdefault(
                    (scheme.format.weights_only, scheme.searches_scales, scheme.clip_ratios), scheme
                )
                losses[scheme.name] = losses[alike.name]
        for rows in self._again(weight) if self.diagnosing.full else _chosen(whole, kept):
            values = to_float32(rows.bits, weight.dtype)
            energies = row_energies(values)
            sums.add(rows, values, energies)
            for scheme in encoded.values():
                losses[scheme.name].add(scheme, rows, values, energies, *whole.scales(scheme, rows, shared))
        return layer_figures(whole, sums, losses, self.diagnosing.scheme)

    def _again(self, weight: Weight) -> Iterator[RowSample]:
        """All rows of a layer, about CHUNK weights at a time."""
        low, step = 0, max(1, CHUNK // weight.shape[1])
        for bits in self.reader.rows(weight, 1):
            for start in range(0, len(bits), step):
                part = bits[start : start + step]
                yield RowSample(np.arange(low + start, low + start + len(part)), part)
            low += len(bits)
            self.diagnosing.advance(_plain_bytes(weight, len(bits)))

    def _keeps(self, scheme: Scheme, weight: Weight) -> bool:
        """Whether the source's codes are the scheme's own already, and stay."""
        return weight.is_held_by(scheme.format) and (
            not scheme.format.shares_scale or self.reader.keeps_scale(self.fused, scheme)
        )


def _chosen(whole: WeightTotals, kept: list[RowSample]) -> Iterator[RowSample]:
    """The rows to be measured, about CHUNK weights at a time: first that of the largest weight, which is like no other
    and stands for itself, then those kept, for the rest.
    """
    top, numbers = whole.top, np.concatenate([rows.numbers for rows in kept])
    others = numbers != top.numbers
    numbers = np.concatenate([top.numbers, numbers[others]])
    bits = np.concatenate([top.bits, np.concatenate([rows.bits for rows in kept])[others]])
    times = (whole.weight.shape[0] - 1) / max(1, len(numbers) - 1)
    step = -(-len(numbers) // max(1, round(bits.size / CHUNK)))
    for start in range(0, len(numbers), step):
        yield RowSample(numbers[start : start + step], bits[start : start + step], times, alone=not start)


def _plain_bytes(weight: Weight, rows: int) -> int:
    """What so many rows take unquantized."""
    return weight.nbytes // weight.shape[0] * rows

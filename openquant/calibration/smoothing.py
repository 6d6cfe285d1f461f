"""Folds of a plan: where inputs of its layers can be divided, and what dividing them by factors makes of the weights.

Factors are powers of two, so that norms, biases and routers in bfloat16 change exactly. Where a model adds one to a
norm's weight the columns are multiplied by what the rounded norm really lacks.

    places = usable(plan)
    parts = [fold(folding, live(folding, scale, plan, reader), plan, reader) for folding, scale in ..]
    tunings = together(parts)       # for Options(tunings=..)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..errors import SourceError
from ..files.tensors import TensorInfo
from ..formats.kernels import BITS_TYPE, from_float32, to_float32
from ..formats.numbers import Floats
from ..patterns import compile_any
from ..plan.config import has_fp8_cache
from ..plan.plan import Plan
from ..plan.tensor_parallel import text_config
from ..registry.architecture import absolute_patterns
from ..weights.reading import Reader
from ..weights.statistics import Calibration, InputStatistics
from ..weights.transform import WeightTransform, WeightTransforms
from ..weights.weight import Weight
from .mappings import SmoothingMapping, find_smoothing_mappings

# Factors are 2**-MOST to 2**MOST.
MOST = 8


class SmoothingPlaces(NamedTuple):
    """Where inputs can be divided.

    Attributes:
        mappings: these places, in the order of the checkpoint's shards.
        left: of places that the registry knows, the sources of those that are left out, by the reason.
    """

    mappings: tuple[SmoothingMapping, ...]
    left: dict[str, list[str]]


class MappingTransforms(NamedTuple):
    """What one fold changes.

    Attributes:
        mapping: where it is.
        scale: float32 [channels], what they are divided by.
        tensors: what the norm, or the biases of what makes the channels, then hold, by name.
    """

    mapping: SmoothingMapping
    scale: Floats
    tensors: Mapping[str, bytes]


def usable_mappings(plan: Plan) -> SmoothingPlaces:
    """The places of a plan where inputs can be divided: all that read them are quantized, or may be changed as routers.

    Those of values are left out where keys and values are cached in FP8, with scales of what they were.
    """
    seen, decisions = plan.seen, plan.decisions
    shapes = {info.module: info.shape for info in seen.tensors.values() if info.name != info.module and info.shape}
    shapes |= {module: weight.shape for module, weight in plan.layers.items()}
    kept = {item.tensor.module: item for item in decisions.kept}
    cached = [each.pattern for each in plan.model.cached] if has_fp8_cache(plan) else []
    values = compile_any(absolute_patterns(plan.model, cached))
    used: list[SmoothingMapping] = []
    left: dict[str, list[str]] = {}

    def problem(module: str, mapping: SmoothingMapping) -> str | None:
        """Why a module is not changed; None if it is."""
        weight, item = plan.layers.get(module), kept.get(module)
        if weight is not None:
            decision = decisions.of(module)
            if decision.scheme is None:
                return f"a layer stays as it is ({decision.why})"
            return "a layer is quantized in the source" if weight.format else None
        if item is None or item.weight is not None or item.tensor.dtype not in BITS_TYPE:
            return "a tensor is stored in a way that is not changed"
        if module == mapping.source:
            return None if len(item.tensor.shape) == 1 else f"a layer stays as it is ({item.why})"
        return f"a layer stays as it is ({item.why})" if item.why.startswith("--") else None

    for mapping in find_smoothing_mappings(plan.model, shapes, text_config(seen, plan.model)):
        members = (mapping.source, *mapping.readers)
        why = next(filter(None, (problem(module, mapping) for module in members)), None)
        if not all(_is_alike(seen.tensors[name], shapes[mapping.source]) for name in _small(mapping.source, plan)):
            why = "a tensor is stored in a way that is not changed"
        if values.fullmatch(mapping.source):
            why = "keys and values are cached in FP8"
        if why is not None:
            left.setdefault(why, []).append(mapping.source)
        else:
            used.append(mapping)
    shards = {shard: number for number, shard in enumerate(seen.shards)}
    used.sort(key=lambda mapping: min(shards[shard] for shard in mapping_shards(mapping, plan)))
    return SmoothingPlaces(tuple(used), left)


def mapping_shards(mapping: SmoothingMapping, plan: Plan) -> list[str]:
    """The source's shards in which the tensors of a fold lie."""
    names = _small(mapping.source, plan)
    for module in (mapping.source, *mapping.readers):
        weight = plan.layers.get(module)
        names.append(weight.source.name if weight is not None else f"{module}.weight")
    return sorted({plan.seen.where[name].shard for name in names})


def _is_alike(info: TensorInfo, shape: tuple[int, ...]) -> bool:
    """Whether a norm or a bias has plain numbers, one for each row of what it belongs to."""
    return info.dtype in BITS_TYPE and info.shape == shape[:1]


def _small(module: str, plan: Plan) -> list[str]:
    """The names of a module's tensors of fewer than two axes."""
    names = (f"{module}.{last}" for last in ("weight", "bias"))
    return [name for name in names if name in plan.seen.tensors and len(plan.seen.tensors[name].shape) < 2]


def statistics_of(weight: Weight, calibration: Calibration) -> InputStatistics | None:
    """What a calibration has seen go into a weight's layer, mean squares included; None where it has seen nothing.

    Raises:
        SourceError: it has no mean squares, or other inputs than the layer.
    """
    inputs = calibration.of(weight.source.name)
    if inputs is not None and (inputs.square is None or inputs.square.shape != (weight.shape[1],)):
        raise SourceError(
            f"the calibration has no mean squares of {weight.shape[1]} inputs of {weight.source.name}",
            "make it again: openquant calibrate MODEL -o FILE",
        )
    return inputs


def nearest_powers_of_two(ideal: Floats) -> Floats:
    """The powers of two nearest to factors [channels], in proportion to the middle one, which is 1; 1 where one is zero
    or not finite: of channels that nothing goes through.
    """
    alive = np.isfinite(ideal) & (ideal > 0)
    exponents = np.zeros(len(ideal), np.float64)
    if alive.any():
        logs = np.log2(ideal[alive].astype(np.float64))
        exponents[alive] = np.clip(np.rint(logs - np.median(logs)), -MOST, MOST)
    return np.exp2(exponents).astype(np.float32)


def without_zero_rows(mapping: SmoothingMapping, scale: Floats, plan: Plan, reader: Reader) -> Floats:
    """The scale, with 1 where a projection has a row of zeros only: nothing of it shows in what is written."""
    weight = plan.layers.get(mapping.source)
    if weight is None:
        return scale
    rows = np.concatenate([to_float32(bits, weight.dtype).any(axis=1) for bits in reader.rows(weight, 1)])
    return np.where(rows[mapping.first : mapping.first + mapping.channels], scale, np.float32(1))


def apply_smoothing(mapping: SmoothingMapping, scale: Floats, plan: Plan, reader: Reader) -> MappingTransforms:
    """What dividing channels by a scale [channels] of powers of two changes.

    Raises:
        SourceError: the norm or the bias cannot be read.
    """
    tensors: dict[str, bytes] = {}
    rows = slice(mapping.first, mapping.first + mapping.channels)
    for name in _small(mapping.source, plan):
        info = plan.seen.tensors[name]
        held = read_vector(info, reader)
        if name.endswith(".weight"):
            made, scale = divide_norm(held, scale, mapping.offset, info.dtype)
        else:
            made = held.copy()
            with np.errstate(over="ignore"):
                made[rows] /= scale
        tensors[name] = from_float32(made, info.dtype).tobytes()
    return MappingTransforms(mapping, scale, tensors)


def read_vector(info: TensorInfo, reader: Reader) -> Floats:
    """The values of a norm or a bias, float32.

    Raises:
        SourceError: it cannot be read.
    """
    return to_float32(reader.whole(info).view(BITS_TYPE[info.dtype]), info.dtype)


def divide_norm(held: Floats, scale: Floats, offset: float, dtype: str) -> tuple[Floats, Floats]:
    """A norm's weight divided by a scale and rounded to a dtype, and what its channels are then divided by.

    The weight stays where it, or what would become of it, lets nothing through.
    """
    whole = held.astype(np.float64) + offset
    with np.errstate(over="ignore"):
        wanted = from_float32((whole / scale - offset).astype(np.float32), dtype)
    made = to_float32(wanted, dtype)
    after = made.astype(np.float64) + offset
    same = (whole == 0) | (after == 0) | ~np.isfinite(after)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(same, 1.0, whole / after).astype(np.float32)
    return np.where(same, held, made), ratio


def combine_transforms(parts: Iterable[MappingTransforms], plan: Plan) -> WeightTransforms:
    """What several folds change, each of which multiplies columns of its readers and divides rows of its source."""
    columns: dict[str, Floats] = {}
    rows: dict[str, Floats] = {}
    tensors: dict[str, bytes] = {}
    for mapping, scale, changed in parts:
        tensors |= changed
        # Of experts they are many: one for all.
        by = mapping.columns(scale)
        for reader in mapping.readers:
            columns[reader] = columns[reader] * by if reader in columns else by
        source = plan.layers.get(mapping.source)
        if source is not None:
            whole = rows.setdefault(mapping.source, np.ones(source.shape[0], np.float32))
            whole[mapping.first : mapping.first + mapping.channels] *= scale
    modules = dict.fromkeys([*columns, *rows])
    return WeightTransforms(
        {module: WeightTransform(rows.get(module), columns.get(module)) for module in modules}, tensors
    )

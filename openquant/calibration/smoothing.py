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
from ..plan.plan import Plan
from ..plan.tensor_parallel import text_config
from ..registry.architecture import absolute
from ..weights.reading import Reader
from ..weights.statistics import Calibration, Inputs
from ..weights.transform import Tuning, Tunings
from ..weights.weight import Weight
from .mappings import Folding, foldings

# Factors are 2**-MOST to 2**MOST.
MOST = 8


class Places(NamedTuple):
    """Where inputs can be divided.

    Attributes:
        foldings: these places, in the order of the checkpoint's shards.
        left: of places that the registry knows, the sources of those that are left out, by the reason.
    """

    foldings: tuple[Folding, ...]
    left: dict[str, list[str]]


class Part(NamedTuple):
    """What one fold changes.

    Attributes:
        folding: where it is.
        scale: float32 [channels], what they are divided by.
        tensors: what the norm, or the biases of what makes the channels, then hold, by name.
    """

    folding: Folding
    scale: Floats
    tensors: Mapping[str, bytes]


def usable(plan: Plan) -> Places:
    """The places of a plan where inputs can be divided: all that read them are quantized, or may be changed as routers.

    Those of values are left out where keys and values are cached in FP8, with scales of what they were.
    """
    seen, fates = plan.seen, plan.fates
    shapes = {info.module: info.shape for info in seen.tensors.values() if info.name != info.module and info.shape}
    shapes |= {module: weight.shape for module, weight in plan.layers.items()}
    kept = {item.tensor.module: item for item in fates.kept}
    values = compile_any(absolute(plan.model, [each.pattern for each in plan.model.cached]) if plan.cached else [])
    used: list[Folding] = []
    left: dict[str, list[str]] = {}

    def problem(module: str, folding: Folding) -> str | None:
        """Why a module is not changed; None if it is."""
        weight, item = plan.layers.get(module), kept.get(module)
        if weight is not None:
            fate = fates.of(module)
            if fate.scheme is None:
                return f"a layer stays as it is ({fate.why})"
            return "a layer is quantized in the source" if weight.format else None
        if item is None or item.weight is not None or item.tensor.dtype not in BITS_TYPE:
            return "a tensor is stored in a way that is not changed"
        if module == folding.source:
            return None if len(item.tensor.shape) == 1 else f"a layer stays as it is ({item.why})"
        return f"a layer stays as it is ({item.why})" if item.why.startswith("--") else None

    for folding in foldings(plan.model, shapes, text_config(seen, plan.model)):
        members = (folding.source, *folding.readers)
        why = next(filter(None, (problem(module, folding) for module in members)), None)
        if not all(_is_alike(seen.tensors[name], shapes[folding.source]) for name in _small(folding.source, plan)):
            why = "a tensor is stored in a way that is not changed"
        if values.fullmatch(folding.source):
            why = "keys and values are cached in FP8"
        if why is not None:
            left.setdefault(why, []).append(folding.source)
        else:
            used.append(folding)
    shards = {shard: number for number, shard in enumerate(seen.shards)}
    used.sort(key=lambda folding: min(shards[shard] for shard in shards_of(folding, plan)))
    return Places(tuple(used), left)


def shards_of(folding: Folding, plan: Plan) -> list[str]:
    """The source's shards in which the tensors of a fold lie."""
    names = _small(folding.source, plan)
    for module in (folding.source, *folding.readers):
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


def inputs_of(weight: Weight, calibration: Calibration) -> Inputs | None:
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


def powers(ideal: Floats) -> Floats:
    """The powers of two nearest to factors [channels], in proportion to the middle one, which is 1; 1 where one is zero
    or not finite: of channels that nothing goes through.
    """
    alive = np.isfinite(ideal) & (ideal > 0)
    exponents = np.zeros(len(ideal), np.float64)
    if alive.any():
        logs = np.log2(ideal[alive].astype(np.float64))
        exponents[alive] = np.clip(np.rint(logs - np.median(logs)), -MOST, MOST)
    return np.exp2(exponents).astype(np.float32)


def live(folding: Folding, scale: Floats, plan: Plan, reader: Reader) -> Floats:
    """The scale, with 1 where a projection has a row of zeros only: nothing of it shows in what is written."""
    weight = plan.layers.get(folding.source)
    if weight is None:
        return scale
    rows = np.concatenate([to_float32(bits, weight.dtype).any(axis=1) for bits in reader.rows(weight, 1)])
    return np.where(rows[folding.first : folding.first + folding.channels], scale, np.float32(1))


def fold(folding: Folding, scale: Floats, plan: Plan, reader: Reader) -> Part:
    """What dividing channels by a scale [channels] of powers of two changes.

    Raises:
        SourceError: the norm or the bias cannot be read.
    """
    tensors: dict[str, bytes] = {}
    rows = slice(folding.first, folding.first + folding.channels)
    for name in _small(folding.source, plan):
        info = plan.seen.tensors[name]
        held = small(info, reader)
        if name.endswith(".weight"):
            made, scale = divided_norm(held, scale, folding.offset, info.dtype)
        else:
            made = held.copy()
            with np.errstate(over="ignore"):
                made[rows] /= scale
        tensors[name] = from_float32(made, info.dtype).tobytes()
    return Part(folding, scale, tensors)


def small(info: TensorInfo, reader: Reader) -> Floats:
    """The values of a norm or a bias, float32.

    Raises:
        SourceError: it cannot be read.
    """
    return to_float32(reader.whole(info).view(BITS_TYPE[info.dtype]), info.dtype)


def divided_norm(held: Floats, scale: Floats, offset: float, dtype: str) -> tuple[Floats, Floats]:
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


def together(parts: Iterable[Part], plan: Plan) -> Tunings:
    """What several folds change, each of which multiplies columns of its readers and divides rows of its source."""
    columns: dict[str, Floats] = {}
    rows: dict[str, Floats] = {}
    tensors: dict[str, bytes] = {}
    for folding, scale, changed in parts:
        tensors |= changed
        # Of experts they are many: one for all.
        by = folding.columns(scale)
        for reader in folding.readers:
            columns[reader] = columns[reader] * by if reader in columns else by
        source = plan.layers.get(folding.source)
        if source is not None:
            whole = rows.setdefault(folding.source, np.ones(source.shape[0], np.float32))
            whole[folding.first : folding.first + folding.channels] *= scale
    modules = dict.fromkeys([*columns, *rows])
    return Tunings({module: Tuning(rows.get(module), columns.get(module)) for module in modules}, tensors)

"""Folds recognized in an output: by which powers of two its norms, and the rows of its projections, are divided.

Nothing is written down of them. A norm tells its factors itself, rows of codes by the size of what they stand for; the
columns of the layers that read them must have been multiplied by as much.

    found = unfold(plan, checkpoint, codes, stated=True)
    make_plan(.., Options(tunings=found.tunings))       # the plan that makes such an output of the source
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..calibration.mappings import SmoothingMapping
from ..calibration.smoothing import (
    MOST,
    MappingTransforms,
    apply_smoothing,
    combine_transforms,
    read_vector,
    usable_mappings,
)
from ..files.checkpoint import Checkpoint
from ..formats.kernels import to_float32
from ..formats.numbers import Floats
from ..plan.plan import Plan
from ..weights.reading import Reader
from ..weights.transform import WeightTransform, WeightTransforms
from ..weights.weight import Weight

# A column is taken to be that of the source, or a multiple of it, where so much of its energy is what it should be.
_EXPLAINED = 0.75


class RecognizedSmoothing(NamedTuple):
    """What was recognized.

    Attributes:
        transforms: what makes the output's weights and norms of the source's.
        problems: norms that no factors explain, or others than the columns have.
    """

    transforms: WeightTransforms
    problems: list[str]


def recognize_smoothing(
    plan: Plan, output: Checkpoint, codes: Mapping[str, Weight], stated: bool
) -> RecognizedSmoothing:
    """The folds of an output.

    Args:
        plan: what makes it of its source, but for folds.
        output: the output.
        codes: its quantized weights, by tensor.
        stated: whether its card says that there are folds; if not, a norm that no powers of two explain shows that
            there are none.

    Raises:
        SourceError: a weight cannot be read.
    """
    return _Unfolding(plan, output, codes, stated).run()


class _Unfolding:
    """One call of `recognize_smoothing`."""

    def __init__(self, plan: Plan, output: Checkpoint, codes: Mapping[str, Weight], stated: bool) -> None:
        self.plan, self.checkpoint, self.codes, self.stated = plan, output, codes, stated
        self.source = Reader(plan.seen.where, lambda shard: plan.seen.root / shard, _memory)
        self.output = Reader(output.where, lambda shard: output.root / shard, _memory)
        self.problems: list[str] = []

    def run(self) -> RecognizedSmoothing:
        places = [each for each in usable_mappings(self.plan).mappings if self._is_there(each)]
        norms = [each for each in places if each.smooth_layer not in self.plan.layers]
        parts = [self._norm(mapping) for mapping in norms]
        if not self.stated and (self.problems or all((part.scale == 1).all() for part in parts)):
            return RecognizedSmoothing(WeightTransforms(), [])
        # What v reads is divided too.
        transforms = combine_transforms(parts, self.plan).weights
        parts += [
            self._rows(each, transforms.get(each.smooth_layer))
            for each in places
            if each.smooth_layer in self.plan.layers
        ]
        found = combine_transforms(parts, self.plan)
        for part in parts:
            self._check_columns(part, found.weights)
        return RecognizedSmoothing(found, self.problems)

    def _is_there(self, mapping: SmoothingMapping) -> bool:
        """Whether the output has what makes the channels in the source's shape, quantized where the plan says so."""
        name = f"{mapping.smooth_layer}.weight"
        if mapping.smooth_layer in self.plan.layers:
            return self._fits(mapping.smooth_layer)
        return self.checkpoint.tensors.get(name) == self.plan.seen.tensors[name]

    def _fits(self, module: str) -> bool:
        """Whether the output has codes of a module with scales, in the shape that the source has it."""
        stored = self.codes.get(f"{module}.weight")
        whole = stored is not None and stored.format is not None and stored.scale is not None
        return whole and stored is not None and stored.shape == self.plan.layers[module].shape

    def _norm(self, mapping: SmoothingMapping) -> MappingTransforms:
        """A fold of a norm: the powers of two nearest to what its elements are divided by."""
        info = self.plan.seen.tensors[f"{mapping.smooth_layer}.weight"]
        held, found = (read_vector(info, reader) for reader in (self.source, self.output))
        before, after = (values + np.float32(mapping.offset) for values in (held, found))
        part = apply_smoothing(mapping, _powers(before, after), self.plan, self.source)
        raw = self.output.whole(info)
        width = len(raw) // len(held)
        wrong = (raw != np.frombuffer(part.tensors[info.name], np.uint8)).reshape(-1, width).any(axis=1)
        if wrong.any():
            at = int(wrong.argmax())
            self.problems.append(
                f"{self._place(info.name)} holds {found[at]:g} at [{at}], the source {held[at]:g}: no power of two "
                f"is between them ({int(wrong.sum())} of {len(wrong)} differ so)"
            )
        return part

    def _rows(self, mapping: SmoothingMapping, known: WeightTransform | None) -> MappingTransforms:
        """A fold of rows: the powers of two nearest to what the sizes of rows are divided by."""
        rows = slice(mapping.first_row, mapping.first_row + mapping.channels)
        weight = self.plan.layers[mapping.smooth_layer]._replace(transform=known)
        before = _sizes(self.source, weight)[rows]
        after = _sizes(self.output, self.codes[f"{mapping.smooth_layer}.weight"])[rows]
        return apply_smoothing(mapping, _powers(before, after), self.plan, self.source)

    def _check_columns(self, part: MappingTransforms, transforms: Mapping[str, WeightTransform]) -> None:
        """Hold factors against the columns of a layer that reads them, as far as its first rows show these."""
        layers = (each for each in part.mapping.balance_layers if each in self.plan.layers)
        module = next((each for each in layers if self._fits(each)), None)
        if module is None:
            return
        stored, weight = self.codes[f"{module}.weight"], self.plan.layers[module]._replace(transform=transforms[module])
        wanted, found = (
            next(reader.rows(each, 1)).view(np.float32)
            for reader, each in ((self.source, weight), (self.output, stored))
        )
        count = min(len(wanted), len(found))
        wanted, found = wanted[:count].astype(np.float64), found[:count].astype(np.float64)
        energy, both = (wanted * wanted).sum(axis=0), (wanted * found).sum(axis=0)
        whole = (found * found).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            by, explained = both / energy, both * both / (energy * whole)
            # Of a column that rounding has left nothing of, nothing can be said.
            off = (explained > _EXPLAINED) & (np.rint(np.log2(np.abs(by))) != 0)
        if off.any():
            at = int(off.argmax())
            self.problems.append(
                f"{self._place(f'{part.mapping.smooth_layer}.weight')} does not fit {module}, which reads what it "
                f"makes: column {at} there is {by[at]:.3g} times what it should be ({int(off.sum())} of {len(off)} "
                "differ so)"
            )

    def _place(self, name: str) -> str:
        return f"{self.checkpoint.where[name].shard}: {name}"


def _powers(before: Floats, after: Floats) -> Floats:
    """The powers of two nearest to before / after, 1 where that is none that a fold has."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponents = np.rint(np.log2(before.astype(np.float64) / after))
    return np.exp2(np.where(np.abs(exponents) <= MOST, exponents, 0)).astype(np.float32)


def _sizes(reader: Reader, weight: Weight) -> Floats:
    """The root of the sum of squares of each row, float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [np.square(to_float32(bits, weight.dtype)).sum(axis=1) for bits in reader.rows(weight, 1)]
    found: Floats = np.sqrt(np.concatenate(sums))
    return found


def _memory(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.empty(nbytes, np.uint8)

"""Recognizes smoothing (SmoothQuant, AWQ) in an output: powers of two by which its norms and projections are divided.

The output does not record the factors. Those of a norm follow from its elements, and those of a projection's rows from
their norms, which are compared with the source's. The columns of the balance layers must be multiplied by the same
factors.

    smoothing = recognize_smoothing(plan, checkpoint, weights, stated=True)
    make_plan(source, scheme, PlanOptions(transforms=smoothing.transforms))     # the plan that makes this output
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
from ..files.checkpoint import Checkpoint
from ..formats.kernels import to_float32
from ..formats.numbers import Floats
from ..plan.plan import Plan
from ..weights.reading import Reader
from ..weights.weight import Weight, WeightTransform, WeightTransforms

# A column counts as a multiple of the source's column if their squared cosine exceeds this.
_EXPLAINED = 0.75


class RecognizedSmoothing(NamedTuple):
    """The smoothing of an output.

    Attributes:
        transforms: the weight transforms that make the output's weights, norms and biases of the source's.
        problems: one line for each norm that no powers of two explain, or whose balance layers do not match it.
    """

    transforms: WeightTransforms
    problems: list[str]


def recognize_smoothing(
    plan: Plan, output: Checkpoint, codes: Mapping[str, Weight], stated: bool
) -> RecognizedSmoothing:
    """Recognize the smoothing factors of an output by comparing it with its source.

    Args:
        plan: the plan that makes the output of its source without smoothing.
        output: the opened output directory.
        codes: its quantized weights, by the tensor name that the weight has unquantized ("..up_proj.weight").
        stated: whether its journal says that it is smoothed. If not, a norm that no powers of two explain means
            that there is no smoothing, and is not a problem.

    Returns:
        The factors, as transforms that make the output's weights, norms and biases of the source's; and problems, one
        line each.

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

    def run(self) -> RecognizedSmoothing:
        mappings = [mapping for mapping in usable_mappings(self.plan).mappings if self._has_smooth_layer(mapping)]
        transforms = [
            self._norm_transforms(mapping) for mapping in mappings if mapping.smooth_layer not in self.plan.layers
        ]

        if not self.stated and (self.problems or all((part.scale == 1).all() for part in transforms)):
            return RecognizedSmoothing(WeightTransforms(), [])

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

        return RecognizedSmoothing(combined, self.problems)

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

"""The result of a diagnosis: errors of each layer's weights, and what was measured to lose less on a real model.

No error of weights says how much a model's answers change (docs/diagnosis.md). What was measured on another model says
more: the options that help there are those to try.

    choices(make_plan(checkpoint, find_scheme("int4")))[0].options      # "--scheme nvfp4 --gptq"

Errors of one layer are summed over pieces of it: scales come from all weights, errors from sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PlanError, UsageError
from ..formats.format import Format, Group
from ..formats.kernels import BITS_TYPE, Bits, Loops, Scales, choose_scales, choose_shared_scale
from ..formats.numbers import Floats
from ..formats.schemes import (
    CHANNEL,
    INT4_SHIFTED,
    INT4_W4A16,
    INT4_W4A16_32,
    INT8_W8A8,
    INT8_W8A16,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_W4A4,
    SCHEMES,
    TENSOR,
    Scheme,
    find_scheme,
)
from ..plan import summary
from ..plan.plan import Plan, make_plan
from ..weights.quant_error import relative_error, row_energies
from ..weights.weight import Weight

# A layer is conspicuous if its error is more than so many times that of normally distributed weights. Layers of real
# models have 0.9 to 1.7 times as much (SmolLM2-135M, examples/tiny-qwen3).
CONSPICUOUS = 2.0


@dataclass(frozen=True)
class LayerDiagnosis:
    """Errors of the weights of one layer, estimated from `rows` rows.

    Attributes:
        module: module name of the layer.
        shape: (out, in).
        rows: number of rows measured.
        errors: relative quantization error by scheme, ||Q - W|| / ||W|| in the Frobenius norm, such as 0.0264; None if
            the scheme cannot store the layer, as with blocks that do not divide its shape, or a weight that is larger
            than engines load.
        row_errors: likewise, the root mean square over rows of each row's relative error. A large weight, which
            dominates ||W||, does not hide the errors of other rows here.
    """

    module: str
    shape: tuple[int, int]
    rows: int
    errors: Mapping[str, float | None]
    row_errors: Mapping[str, float | None]

    @property
    def is_zero(self) -> bool:
        """Whether no scheme changes a weight, as is the case if all are zero."""
        return set(self.errors.values()) - {None} == {0.0}


@dataclass(frozen=True)
class Choice:
    """A way to compress the model, and what it loses on another model, which is named above.

    Attributes:
        options: what to type after `compress MODEL`: "--scheme int4 --awq --gptq".
        kl: KL divergence from the source that was measured on that model, in nats.
        gain: the share of the requested scheme's KL that it takes away: 0.71.
        readings: how many times calibration texts run through the model.
        activations: what engines round activations to: "FP8", or "16 bits".
        bytes: size of the output's tensors for this model.
    """

    options: str
    kl: float
    gain: float
    readings: int
    activations: str
    bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """The result of diagnose().

    Attributes:
        model: the model as it was named.
        revision: its commit on the Hub; None for a local model.
        architecture: name of the architecture whose registry entry was used.
        scheme: name of the requested scheme.
        rows_read: share of all rows that was measured; 1.0 with `full`.
        layers: every layer that the scheme would quantize, in the order of the checkpoint.
        normal: row errors of normally distributed weights, by scheme.
        bytes: size of the output's tensors.
        kl: the requested scheme's KL divergence on the model of `choices`, in nats; None if it was not measured there.
        choices: what loses less there at about the same size, the least first.
        not_finite: NaN and infinities in tensors that stay unquantized, by tensor name:
            {"model.norm.weight": "NaN (3 values)"}.
    """

    model: str
    revision: str | None
    architecture: str
    scheme: str
    rows_read: float
    layers: tuple[LayerDiagnosis, ...]
    normal: Mapping[str, float]
    bytes: int
    kl: float | None = None
    choices: tuple[Choice, ...] = ()
    not_finite: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> list[LayerDiagnosis]:
        """The layers by falling row error in the requested scheme; first those that it cannot store."""
        return sorted(self.layers, key=lambda layer: -_or_infinite(layer.row_errors[self.scheme]))

    @property
    def conspicuous(self) -> list[LayerDiagnosis]:
        """The layers that cannot be stored, or whose row error is over twice that of normally distributed weights."""
        return [layer for layer in self.worst if self._is_conspicuous(layer, self.scheme)]

    @property
    def remedies(self) -> list[str]:
        """Schemes of the same numeric format in which none of these layers is conspicuous: ["channel"]."""
        number = SCHEMES[self.scheme].format.number
        layers = self.conspicuous
        return [
            name
            for name, scheme in SCHEMES.items()
            if scheme.format.number == number and not any(self._is_conspicuous(layer, name) for layer in layers)
        ]

    def _is_conspicuous(self, layer: LayerDiagnosis, scheme: str) -> bool:
        return _or_infinite(layer.row_errors[scheme]) > CONSPICUOUS * self.normal[scheme]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them, with the names of conspicuous layers."""
        # Not with asdict: it copies every value, which for many small experts takes as long as measuring them.
        return {
            **vars(self),
            "layers": tuple(vars(layer) for layer in self.layers),
            "choices": tuple(asdict(choice) for choice in self.choices),
            "conspicuous": [layer.module for layer in self.conspicuous],
        }


def _or_infinite(error: float | None) -> float:
    return float("inf") if error is None else error


MODEL = "SmolLM2-135M-Instruct"
"""The model of `MEASURED`."""

BROKEN = ("int3", "int2")
"""Schemes that broke it in groups of 64 (docs/results.md); in their own groups they were not measured."""

# Outputs of about the same size differ by less than this factor. What gains less than this share is not worth a change.
SAME_SIZE = 1.1
LEAST_GAIN = 0.1


class Measurement(NamedTuple):
    """A row of the table in docs/results.md, which benchmarks/results.py prints.

    Attributes:
        options: options of compress.
        scheme: the scheme that they name.
        kl: KL divergence from the source, in nats, with activations rounded as engines round them.
    """

    options: str
    scheme: Scheme
    kl: float

    @property
    def readings(self) -> int:
        """How many times calibration texts run through the model: for input statistics, and for Hessians."""
        return sum(option in self.options for option in ("--awq", "--smooth", "--gptq"))


MEASURED = (
    Measurement("--scheme int8-weights", INT8_W8A16, 0.0051),
    Measurement("--scheme int8 --smooth 0.5", INT8_W8A8, 0.0202),
    Measurement("--scheme int6", SCHEMES["int6"], 0.0229),
    Measurement("--scheme channel", CHANNEL, 0.0299),
    Measurement("--scheme tensor", TENSOR, 0.0355),
    Measurement("--scheme mxfp8", MXFP8, 0.0361),
    Measurement("--scheme int8", INT8_W8A8, 0.0370),
    Measurement("--scheme nvfp4 --gptq", NVFP4, 0.0730),
    Measurement("--scheme int5", SCHEMES["int5"], 0.0960),
    Measurement("--scheme int4 --awq --gptq", INT4_W4A16, 0.0975),
    Measurement("--scheme int4 --gptq", INT4_W4A16, 0.1146),
    Measurement("--scheme int4 --awq", INT4_W4A16, 0.1654),
    Measurement("--scheme nvfp4", NVFP4, 0.1780),
    Measurement("--scheme int4 --group-size 32", INT4_W4A16_32, 0.2825),
    Measurement("--scheme int4 --asymmetric", INT4_SHIFTED, 0.3101),
    Measurement("--scheme nvfp4-w4a4", NVFP4_W4A4, 0.3659),
    Measurement("--scheme int4 --group-size 64", find_scheme("int4", group_size="64"), 0.3679),
    Measurement("--scheme int4", INT4_W4A16, 0.3747),
    Measurement("--scheme mxfp4", MXFP4, 0.4563),
)


def measured_kl(scheme: Scheme) -> float | None:
    """Return the KL divergence that was measured of a scheme without a calibration, in nats; None if none was."""
    return next((row.kl for row in MEASURED if row.options == f"--scheme {scheme.name}"), None)


def choices(plan: Plan) -> tuple[Choice, ...]:
    """Find what was measured to lose less than a plan's scheme at about the same size.

    Args:
        plan: a plan with a scheme, and without a calibration.

    Returns:
        What the model can be compressed with, the least KL first; empty if the scheme was not measured, or nothing
        loses at least a tenth less (LEAST_GAIN).
    """
    assert plan.scheme is not None
    kl = measured_kl(plan.scheme)
    size = summary.output_bytes(plan)
    found = []

    for row in MEASURED:
        if kl is None or row.kl > (1 - LEAST_GAIN) * kl or (row.readings and summary.has_quantized_source(plan)):
            continue
        try:
            other = make_plan(plan.source, row.scheme, plan.options, architecture=plan.model)
        except (PlanError, UsageError):
            # Engines load none of the model's layers in it.
            continue

        nbytes = summary.output_bytes(other)
        if size / SAME_SIZE <= nbytes <= size * SAME_SIZE:
            found.append(Choice(row.options, row.kl, 1 - row.kl / kl, row.readings, activations(row.scheme), nbytes))

    return tuple(found)


def activations(scheme: Scheme) -> str:
    """Name the numeric format that engines round activations to: "FP8"; "16 bits" if they do not."""
    inputs = scheme.group.get("input_activations", {"type": "float", "num_bits": 8})
    if not inputs:
        return "16 bits"
    return f"INT{inputs['num_bits']}" if inputs["type"] == "int" else f"FP{inputs['num_bits']}"


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
        return total - (self.share - 1) * float(of_rows[0]) if self.first_is_outlier else total


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

    def add(self, low: int, bits: Bits) -> bool:
        """Add the next piece of the layer; pieces come in the order of the rows.

        Args:
            low: index of its first row.
            bits: bits of its weights, uint16 or uint32 [n, in]; n is a multiple of `height`, except in the last piece.

        Returns:
            Whether all weights are finite. If not, the ranges are incomplete and must not be used.
        """
        dtype = self.weight.dtype
        for fmt, grid in self._grids.items():
            grid.append(self._loops.absmax(bits, dtype, fmt.group))
        grids = [grid[-1] for grid in self._grids.values()] or [self._loops.absmax(bits, dtype, (None, None))]
        largest = grids[0].max(keepdims=True)
        if not np.isfinite(largest).all():
            return False
        if largest > self.absmax:
            self.absmax = largest
            row = int(self._loops.absmax(bits, dtype, (1, None)).argmax())
            self.absmax_row = RowSample(np.array([low + row]), bits[row : row + 1].copy())
        return True

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
        global_scale = choose_shared_scale(fmt, shared_absmax) if fmt.global_scale is not None else None
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
        scale, zero_point = (None if grid is None else _widen(grid, group[1]) for grid in scales)
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


class RowSums:
    """Sums over a layer's rows before quantization, estimated from sampled rows.

    Attributes:
        rows: number of sampled rows.
        energy: sum of squares of all weights.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.energy = 0.0

    def add(self, rows: RowSample, energies: Energies) -> None:
        """Add some rows, with the sums of squares of each, float64 [n]."""
        self.rows += len(energies)
        self.energy += rows.estimate_sum(energies)


def layer_diagnosis(weight: Weight, sums: RowSums, losses: Mapping[str, SchemeLoss]) -> LayerDiagnosis:
    """Make the diagnosis of a layer from its sums.

    Args:
        weight: the layer's weight.
        sums: sums over its rows before quantization.
        losses: for each scheme that can store the layer, by the scheme's name ("nvfp4"): sums of squares of errors.

    Returns:
        The relative errors in each scheme, None in those that `losses` lacks.
    """
    return LayerDiagnosis(
        module=weight.module,
        shape=weight.shape,
        rows=sums.rows,
        errors=_by_scheme({name: relative_error(sums.energy, loss.noise) for name, loss in losses.items()}),
        row_errors=_by_scheme({name: math.sqrt(loss.row_noise / weight.shape[0]) for name, loss in losses.items()}),
    )


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
    return None if scheme.fallback is None else _as_stored(scheme.fallback, weight)


def _by_scheme(values: dict[str, float]) -> dict[str, float | None]:
    """The values in the order of SCHEMES, None for schemes that have none."""
    return {name: values.get(name) for name in SCHEMES}


def _widen(grid: Floats, width: int | None) -> Floats:
    """Repeat each entry of [n, groups] over the `width` columns of its group; not if a row has one group."""
    return grid if width is None else np.repeat(grid, width, axis=1)

"""The result of a diagnosis: errors of each layer's weights, and what was measured to lose less on a real model.

No error of weights says how much a model's answers change (docs/diagnosis.md). What was measured on another model says
more: the options that help there are those to try.

    choices(make_plan(checkpoint, find_scheme("int4")))[0].options      # "--scheme nvfp4 --gptq"
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..errors import PlanError, UsageError
from ..formats.schemes import SCHEMES, Scheme, find_scheme
from ..plan import summary
from ..plan.plan import Plan, make_plan

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
        rows_read: share of all rows that was measured.
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
    Measurement("--scheme int8-weights", SCHEMES["int8-weights"], 0.0051),
    Measurement("--scheme int8 --smooth 0.5", SCHEMES["int8"], 0.0202),
    Measurement("--scheme int6", SCHEMES["int6"], 0.0229),
    Measurement("--scheme channel", SCHEMES["channel"], 0.0299),
    Measurement("--scheme tensor", SCHEMES["tensor"], 0.0355),
    Measurement("--scheme mxfp8", SCHEMES["mxfp8"], 0.0361),
    Measurement("--scheme int8", SCHEMES["int8"], 0.0370),
    Measurement("--scheme nvfp4 --gptq", SCHEMES["nvfp4"], 0.0730),
    Measurement("--scheme int5", SCHEMES["int5"], 0.0960),
    Measurement("--scheme int4 --awq --gptq", SCHEMES["int4"], 0.0975),
    Measurement("--scheme int4 --gptq", SCHEMES["int4"], 0.1146),
    Measurement("--scheme int4 --awq", SCHEMES["int4"], 0.1617),
    Measurement("--scheme nvfp4", SCHEMES["nvfp4"], 0.1780),
    Measurement("--scheme int4 --group-size 32", find_scheme("int4", group_size="32"), 0.2761),
    Measurement("--scheme int4 --asymmetric", find_scheme("int4", asymmetric=True), 0.2756),
    Measurement("--scheme nvfp4-w4a4", SCHEMES["nvfp4-w4a4"], 0.3659),
    Measurement("--scheme int4 --group-size 64", find_scheme("int4", group_size="64"), 0.3236),
    Measurement("--scheme int4", SCHEMES["int4"], 0.3284),
    Measurement("--scheme mxfp4", SCHEMES["mxfp4"], 0.4563),
)


def measured_kl(scheme: Scheme) -> float | None:
    """Return the KL divergence that was measured of a scheme without a calibration, in nats; None if none was."""
    return next((row.kl for row in MEASURED if row.options == f"--scheme {scheme.name}"), None)


# The first that a GPU multiplies is its fastest: outliers of activations harm INT8, and FP8 needs no calibration. FP4
# products are not here, because they double what is lost.
FASTEST = {"channel": "FP8", "int8": "INT8"}


def advise(
    schemes: Mapping[str, Collection[str]], calibrate: bool = True
) -> tuple[Measurement | None, Measurement | None]:
    """Say which scheme to take.

    Args:
        schemes: names of schemes to choose from, with the numbers that the GPU multiplies ("FP8", "16 bits" or
            "emulated", as in formats/hardware.py); nothing if these are not known.
        calibrate: whether a calibration is possible.

    Returns:
        The fastest, or None if nothing is multiplied in eight bits; and the closest, or None if none was measured. What
        is emulated is neither.
    """
    able = {name: numbers for name, numbers in schemes.items() if "emulated" not in numbers}

    losses = [least_loss(SCHEMES[name], calibrate) for name in able]
    closest = min(filter(None, losses), key=lambda row: row.kl, default=None)

    own = (name for name, numbers in FASTEST.items() if set(able.get(name, ())) == {numbers})
    fastest = next((least_loss(SCHEMES[name], calibrate) for name in own), None)
    return fastest, closest


def least_loss(scheme: Scheme, calibrate: bool = True) -> Measurement | None:
    """Find how a scheme lost least, with a calibration if one is possible; None if it was not measured."""
    rows = [row for row in MEASURED if row.scheme == scheme and (calibrate or not row.readings)]
    return min(rows, key=lambda row: row.kl, default=None)


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

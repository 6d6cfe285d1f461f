"""What schemes and calibrations lose on a real model, and which of them lose less than the one that a user asks for.

No error of weights says how much a model's answers change (docs/diagnosis.md). What was measured on another model says
more: the options that help there are those to try.

    choices(make_plan(checkpoint, find_scheme("int4")))[0].options      # "--scheme nvfp4 --gptq"
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import PlanError, UsageError
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
from .result import Choice

MODEL = "SmolLM2-135M-Instruct"
"""The model of `MEASURED`."""

BROKEN = ("int3", "int2")
"""Schemes that broke it in groups of 64 (docs/results.md); in their own groups they were not measured."""

# Outputs of about the same size differ by less than this factor. What gains less than this share is not worth a change.
SAME_SIZE, LEAST_GAIN = 1.1, 0.1


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
    kl, size = measured_kl(plan.scheme), summary.output_bytes(plan)
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
    return f"{'INT' if inputs['type'] == 'int' else 'FP'}{inputs['num_bits']}" if inputs else "16 bits"

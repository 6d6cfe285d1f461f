"""Which scheme for a GPU: the one rule of `openquant fit`, of its page, and of the tables in README and docs.

Closest is what lost least on a real model, with its calibration. Fastest is what the GPU multiplies in eight bits; no
speed was measured.

    advise({"channel": {"FP8"}, "int8-weights": {"16 bits"}})
    # (Measurement("--scheme channel", ...), Measurement("--scheme int8-weights", ...))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..diagnosis.result import MEASURED, Measurement
from ..formats.schemes import SCHEMES, Scheme

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

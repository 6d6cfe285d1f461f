"""Which scheme for a GPU: the one rule of `openquant fit`, of its page, and of the tables in README and docs.

Closest is what lost least on a real model, with its calibration. Fastest is what the GPU multiplies in eight bits; no
speed was measured.

    advise({"channel": {"FP8"}, "int8-weights": {"16 bits"}})
    # Advice(fastest=("--scheme channel", ...), closest=("--scheme int8-weights", ...))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..diagnosis.result import MEASURED, Measurement
from ..formats.schemes import SCHEMES, Scheme

# The first that a GPU multiplies is its fastest: outliers of activations harm INT8, and FP8 needs no calibration. FP4
# products are not here, because they double what is lost.
FASTEST = {"channel": "FP8", "int8": "INT8"}


class Advice(NamedTuple):
    """What to take of some schemes.

    Attributes:
        fastest: what is multiplied in numbers of eight bits; None if nothing is.
        closest: what lost least; None if none of them was measured.
    """

    fastest: Measurement | None
    closest: Measurement | None


def advise(schemes: Mapping[str, Collection[str]], calibrate: bool = True) -> Advice:
    """Say which scheme to take.

    Args:
        schemes: names of schemes to choose from, with the numbers that the GPU multiplies ("FP8", "16 bits" or
            "emulated", as in formats/hardware.py); nothing if these are not known.
        calibrate: whether a calibration is possible.

    Returns:
        The advice. What is emulated is not advised.
    """
    able = {name: numbers for name, numbers in schemes.items() if "emulated" not in numbers}

    losses = [least_loss(SCHEMES[name], calibrate) for name in able]
    closest = min(filter(None, losses), key=lambda row: row.kl, default=None)

    name = next((name for name, numbers in FASTEST.items() if able.get(name) and set(able[name]) == {numbers}), None)
    if name is None:
        return Advice(None, closest)
    return Advice(least_loss(SCHEMES[name], calibrate), closest)


def least_loss(scheme: Scheme, calibrate: bool = True) -> Measurement | None:
    """Find how a scheme lost least; None if it was not measured.

    Args:
        scheme: the scheme.
        calibrate: whether a calibration is possible.
    """
    rows = [row for row in MEASURED if row.scheme == scheme and (calibrate or not row.readings)]
    return min(rows, key=lambda row: row.kl, default=None)

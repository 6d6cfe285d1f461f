"""The layers of an output that are suspect. docs/evaluation.md has the limits.

A layer is suspect if it differs by more than rounding to its format explains, and by more than most other layers: a
change to all layers, such as GPTQ, makes none suspect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..weights.quant_error import ERROR_MOVED, MOVED, OTHER_WEIGHTS, ROUNDED
from .weight_changes import WeightChange

# Limit of a layer's error relative to its format's rounding error, and relative to the median layer's ratio of the two.
# weights/quant_error.py has the limits for methods that compensate errors.
ERROR = 1.5
# A layer is suspect if it adds JUMP times the median layer's distance and more than LEAST_JUMP, unless the floor grows
# there as suddenly.
JUMP = 8.0
LEAST_JUMP = 0.05
# Share of keys, values or activations that a static scale may clip: calibrations clip the largest few on purpose.
CLIPPED = 0.01
# Limits of the share of tokens routed to other experts: relative to the median layer's, and absolute.
ROUTED = 4.0
LEAST_ROUTED = 0.2


@dataclass(frozen=True)
class LayerFigures:
    """What an output's decoder layer does to the texts, compared with the source's.

    Attributes:
        name: name of the layer.
        distance: relative distance of the hidden states after the layer from the source's, mean over tokens.
        floor: the same distance of the source with rounding noise.
        routed_otherwise: share of tokens that are routed to other experts; None without experts.
        clipped: largest share of its activations, keys or values that a static scale clips.
    """

    name: str
    distance: float
    floor: float
    routed_otherwise: float | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class Suspect:
    """A part of an output that differs more than it should.

    Attributes:
        layer: name of the layer, module or file.
        why: the reason, with figures.
    """

    layer: str
    why: str


def suspects_by_weights(changes: Sequence[WeightChange], routers: Iterable[str], gptq: bool = False) -> list[Suspect]:
    """Find modules whose weights differ from the source's by more than rounding to their formats explains.

    Args:
        changes: changes of all weights, quantized or not.
        routers: names of quantized modules that every engine expects unquantized, such as routers. Those that `changes`
            lacks do not count.
        gptq: whether GPTQ rounded the weights.

    Returns:
        Name of each suspect module and the reason, as text: routers first, then the others by their error relative to
        what their format explains, the largest first.
    """
    quantized = [change for change in changes if change.quantized]
    unquantized = [change for change in changes if not change.quantized]
    median_ratio = statistics.median([_error_ratio(change) for change in quantized]) if quantized else 1.0

    # A method that compensates errors, as GPTQ does, moves weights in most layers.
    compensated = bool(quantized) and (
        gptq or median_ratio > MOVED or statistics.median([change.bad_groups for change in quantized]) > 0
    )
    limit = (ERROR_MOVED if compensated else ERROR) * max(1.0, median_ratio)

    ranked = []
    for change in quantized:
        ratio = _error_ratio(change)
        if ratio > limit or (compensated and change.error > OTHER_WEIGHTS):
            why = (
                f"relative error of its weights is {change.error:.3g}, its format explains {change.rounding_error:.3g}"
            )
        elif change.wrong_scales and compensated:
            why = f"in {_per_cent(change.wrong_scales)} of its groups weights or scales are not those of the source"
        elif change.bad_groups and not compensated:
            why = (
                f"in {_per_cent(change.bad_groups)} of its groups the weights are off by more than its format explains"
            )
        else:
            continue

        ranked.append((ratio, Suspect(change.name, why)))

    changed = [change for change in unquantized if change.bad_groups]
    # Smoothing changes most norms on purpose.
    if len(changed) <= len(unquantized) / 2:
        ranked += [
            (change.error / ROUNDED, Suspect(change.name, f"it is not quantized, but differs by {change.error:.2g}"))
            for change in changed
        ]

    quantized_names = {change.name for change in quantized}
    quantized_routers = [
        Suspect(name, "it is a router and must not be quantized") for name in routers if name in quantized_names
    ]

    return [*quantized_routers, *(suspect for _, suspect in sorted(ranked, key=lambda pair: -pair[0]))]


def _per_cent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _error_ratio(change: WeightChange) -> float:
    """Return a weight's error relative to the rounding error of its format."""
    return change.error / max(change.rounding_error, ROUNDED) if change.error else 1.0


def suspects_by_layers(layers: Sequence[LayerFigures]) -> list[Suspect]:
    """Find decoder layers in which hidden states, routing or static activation scales go wrong.

    Args:
        layers: figures of all decoder layers, in the order in which they run.

    Returns:
        Name of each suspect layer and the reason, as text, in the order of the layers; those by routing last.
    """
    suspects = []
    added = _added_distances([layer.distance for layer in layers])
    noise = _added_distances([layer.floor for layer in layers])

    # The first layer's inputs are small and exact, so it adds more than others in good models too.
    median_added, median_noise = (
        statistics.median(values[1:]) if len(layers) > 2 else math.inf for values in (added, noise)
    )

    for number, layer in enumerate(layers):
        # A layer in which the source's own noise grows as suddenly is not suspect.
        noise_growth = max(1.0, noise[number] / median_noise) if median_noise else 1.0
        before = layers[number - 1].distance if number else math.inf

        # If later layers reduce the distance, the median is small. Good layers still add less than all before them.
        if added[number] > max(LEAST_JUMP, JUMP * median_added * noise_growth, before):
            why = f"the distance from the source grows from {before:.3g} to {layer.distance:.3g} in it"
            suspects.append(Suspect(layer.name, why))

        if layer.clipped > CLIPPED:
            why = f"static scales clip {layer.clipped:.2g} of its activations"
            suspects.append(Suspect(layer.name, why))

    shares = [layer.routed_otherwise for layer in layers if layer.routed_otherwise is not None]
    median_share = statistics.median(shares) if len(shares) > 1 else 1.0
    for layer in layers:
        share = layer.routed_otherwise
        if share is not None and share > max(LEAST_ROUTED, ROUTED * median_share):
            suspects.append(Suspect(layer.name, f"{share:.2g} of its tokens are routed to other experts"))

    return suspects


def _added_distances(distances: Sequence[float]) -> list[float]:
    """Return the distance that each layer adds, if errors of layers are independent: then their squares add up."""
    squares = [0.0, *(distance**2 for distance in distances)]
    return [max(0.0, after - before) ** 0.5 for before, after in pairwise(squares)]


def suspects_by_config(source: Mapping[str, object], output: Mapping[str, object]) -> list[Suspect]:
    """Find settings of config.json that differ. A missing setting equals None.

    Args:
        source: the source's settings that change what a model computes, by dotted key:
            {"rope_parameters.rope_theta": 10000.0, ..}.
        output: the output's settings, by dotted key.

    Returns:
        A suspect for each key that differs, in the order of the keys: `layer` is "config.json", `why` names the key and
        both values.
    """
    names = sorted(name for name in {*source, *output} if source.get(name) != output.get(name))
    return [
        Suspect(
            "config.json", f"{name} is {_short_repr(output.get(name))}, the source has {_short_repr(source.get(name))}"
        )
        for name in names
    ]


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."

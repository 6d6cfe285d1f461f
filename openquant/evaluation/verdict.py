"""The verdict on an output in a word, and the layers that stand out. docs/evaluation.md has the limits.

The word comes from the KL and its floor alone. A layer is suspect where it differs from what its format explains, and
from its peers: what a maker did to all layers (a calibration that moves weights, say) singles none out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .weight_changes import ROUNDED, WeightChange

# A mean KL of so many times the floor's is the floor's: another program's rounding could do it.
AT_FLOOR = 2.0
# Beyond these, in nats. Of common 4-bit files of 8B models the best are at 0.05; at 0.5 texts turn out otherwise.
CLOSE = 0.05
BROKEN = 0.5

# How many times what its format explains a layer's error may be, and how many times its peers'.
ERROR = 1.5
# GPTQ moves weights farther than rounding to nearest does: where the median layer's error is more than so many times
# what its format explains, or the card says GPTQ, layers are held against the median with another limit.
MOVED = 1.1
ERROR_MOVED = 2.0
# How many times its peers' what a layer adds to the distance may be, and at least; beside the floor's.
JUMP = 8.0
LEAST_JUMP = 0.05
# Share of keys, values or static activations that may lie beyond the largest code: calibrations cut the last few off.
CLIPPED = 0.01
# How many times its peers' the share of tokens routed otherwise may be, and at least.
ROUTED = 4.0
LEAST_ROUTED = 0.2


@dataclass(frozen=True)
class LayerFigures:
    """What a decoder layer does to the texts.

    Attributes:
        name: the layer.
        distance: relative distance of its output's hidden states from the source's, mean over tokens.
        floor: that of the source with noise.
        routed_otherwise: share of tokens that other experts were chosen for; None without experts.
        clipped: share of its keys and values, or of the activations into it, beyond what the stored scale can hold.
    """

    name: str
    distance: float
    floor: float
    routed_otherwise: float | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class Suspect:
    """A part of an output that stands out.

    Attributes:
        layer: the layer or module, or the file.
        why: what it differs in, with figures.
    """

    layer: str
    why: str


def verdict_word(kl: float, floor: float) -> str:
    """The verdict on a mean KL, given the floor's: "same", "close", "changed" or "broken"."""
    if kl <= AT_FLOOR * floor:
        return "same"
    if kl <= CLOSE:
        return "close"
    return "changed" if kl <= BROKEN else "broken"


def suspects_by_weights(changes: Sequence[WeightChange], routers: Iterable[str], gptq: bool = False) -> list[Suspect]:
    """Modules whose weights differ from the source's by more than their formats explain, worst first.

    Args:
        changes: of all weights.
        routers: modules that no engine expects quantized weights of.
        gptq: whether the card says that GPTQ rounded weights.
    """
    quantized = [change for change in changes if change.quantized]
    plain = [change for change in changes if not change.quantized]
    usual = statistics.median([_ratio(change) for change in quantized]) if quantized else 1.0
    # Makers that move weights on purpose, to make up for one another, do so in most of their layers.
    moves = bool(quantized) and (gptq or usual > MOVED or statistics.median([change.off for change in quantized]) > 0)
    limit = (ERROR_MOVED if moves else ERROR) * max(1.0, usual)
    found = []
    for change in quantized:
        ratio = _ratio(change)
        if ratio > limit:
            why = f"its weights are {change.error:.3g} off, its format explains {change.explained:.3g}"
        elif change.wrong_scales and moves:
            why = f"{change.wrong_scales:.2g} of its scales or their weights are not those of the source"
        elif change.off and not moves:
            why = f"{change.off:.2g} of its scales or their weights are off by more than its format explains"
        else:
            continue
        found.append((ratio, Suspect(change.name, why)))
    changed = [change for change in plain if change.off]
    if len(changed) <= len(plain) / 2:
        found += [
            (change.error / ROUNDED, Suspect(change.name, f"it is not quantized, and {change.error:.2g} off"))
            for change in changed
        ]
    by_name = {change.name for change in quantized}
    kept = [Suspect(name, "it chooses experts, and is quantized") for name in routers if name in by_name]
    return [*kept, *(suspect for _, suspect in sorted(found, key=lambda each: -each[0]))]


def _ratio(change: WeightChange) -> float:
    return change.error / max(change.explained, ROUNDED) if change.error else 1.0


def suspects_by_layers(layers: Sequence[LayerFigures]) -> list[Suspect]:
    """Decoder layers that what they do to the texts singles out, in their order."""
    found = []
    added = _added([layer.distance for layer in layers])
    noise = _added([layer.floor for layer in layers])
    # What goes into the first layer is small and without any error: it adds more than others in sound models too.
    usual, own = (statistics.median(each[1:]) if len(layers) > 2 else math.inf for each in (added, noise))
    for number, layer in enumerate(layers):
        # Where the source's own noise grows as suddenly, a layer is no worse than others.
        sudden = max(1.0, noise[number] / own) if own else 1.0
        before = layers[number - 1].distance if number else math.inf
        # Where later layers take distance away, little is usual; sound layers still add less than all before them.
        if added[number] > max(LEAST_JUMP, JUMP * usual * sudden, before):
            why = f"the distance from the source grows from {before:.3g} to {layer.distance:.3g} in it"
            found.append(Suspect(layer.name, why))
        if layer.clipped > CLIPPED:
            why = f"{layer.clipped:.2g} of its activations lie beyond what their scale can hold"
            found.append(Suspect(layer.name, why))
    routed = [layer.routed_otherwise for layer in layers if layer.routed_otherwise is not None]
    usual = statistics.median(routed) if len(routed) > 1 else 1.0
    for layer in layers:
        share = layer.routed_otherwise
        if share is not None and share > max(LEAST_ROUTED, ROUTED * usual):
            found.append(Suspect(layer.name, f"{share:.2g} of its tokens go to other experts"))
    return found


def _added(distances: Sequence[float]) -> list[float]:
    """What each layer adds, as if errors of layers had nothing to do with one another: they add up as squares."""
    squares = [0.0, *(distance**2 for distance in distances)]
    return [max(0.0, after - before) ** 0.5 for before, after in pairwise(squares)]


def suspects_by_config(source: Mapping[str, object], output: Mapping[str, object]) -> list[Suspect]:
    """Settings of config.json that change what a model computes, where the output's differ."""
    names = sorted(name for name in {*source, *output} if source.get(name) != output.get(name))
    return [
        Suspect("config.json", f"{name} is {_shown(output.get(name))}, the source has {_shown(source.get(name))}")
        for name in names
    ]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."

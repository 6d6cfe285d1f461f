"""The word of the verdict, and which decoder layers are suspect. docs/figures.md has the limits.

The mean KL divergence decides the word. A layer is suspect if the distance from the source grows in it by more than in
most others: a change to all layers, such as GPTQ, makes none suspect. `verify` compares weights.

    verdict_word(0.05, floor=0.0004)      # "similar"
    suspects_by_layers(layers)      # [Suspect("model.layers.2", "the distance from the source grows from 0.03 ..")]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

# The content of an eval.json: docs/figures.md explains its keys, docs/schema/eval.json has their types.
OutputEvaluation: TypeAlias = dict[str, Any]


def counted_questions(count: int) -> str:
    """Return a number of questions in words: "1 question", "1,319 questions"."""
    return "1 question" if count == 1 else f"{count:,} questions"


# "same": mean KL up to this many times the floor's, which another program's rounding could cause.
AT_FLOOR = 2.0
# "close", "similar" and "changed": mean KL up to these, in nats. On two models and in all schemes the share of tokens
# that differ was half the square root of the KL (docs/results.md): one token in 18, in 6 and in 3.
CLOSE, SIMILAR, CHANGED = 0.01, 0.1, 0.5
# The interval of fewer texts than this says next to nothing: there are too few to draw anew from.
ENOUGH_TEXTS = 8


def verdict_word(kl: float, floor: float) -> str:
    """Return the verdict on an output: "same", "close", "similar", "changed" or "broken".

    Args:
        kl: mean KL divergence of the output from the source, in nats.
        floor: mean KL divergence of the noise floor, the source with rounding noise, in nats.
    """
    if kl <= AT_FLOOR * floor:
        return "same"
    limits = {"close": CLOSE, "similar": SIMILAR, "changed": CHANGED}
    return next((word for word, limit in limits.items() if kl <= limit), "broken")


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
        layer: name of the decoder layer, or "tokenizer".
        why: the reason, with figures.
    """

    layer: str
    why: str


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

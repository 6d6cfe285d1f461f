"""The scales of static activations that a calibration gives."""

from __future__ import annotations

from collections.abc import Mapping

from ..weights.calibration import Calibration, input_scale
from ..weights.weight import Weight
from .roles import Entry


def input_scales(
    calibration: Calibration,
    entry: Entry,
    layers: Mapping[str, Weight],
    sets: Mapping[str, tuple[str, ...]],
    most: float,
) -> dict[str, float]:
    """The scale of what goes into each layer, by module; nothing of layers that the calibration has not seen.

    Engines put scales together, and take the largest: of joined layers, which have one input, and over all experts of a
    layer (vLLM 0.32.0 layers/quantization/fp8.py:403-405, :739; fused_moe/routed_experts.py:823-833 refuses gate and up
    that differ). So an expert that no token was routed to has the scale of the others.

    Args:
        calibration: what was seen.
        entry: the registry's.
        layers: what could be quantized, by module.
        sets: the joined set, by module, of each that engines merge with others.
        most: the largest code of an activation.
    """
    together: dict[tuple[str, ...], list[float]] = {}
    keys: dict[str, tuple[str, ...]] = {}
    for module, weight in layers.items():
        experts, members = entry.experts(module), sets.get(module, (module,))
        # Of an expert the names of what it merges, in place of the modules: those of all experts are one.
        keys[module] = (experts, *(name.rpartition(".")[2] for name in members)) if experts else members
        seen = calibration.of(weight.source.name)
        if seen is not None:
            together.setdefault(keys[module], []).append(seen.largest)
    return {module: input_scale(together[key], most) for module, key in keys.items() if key in together}

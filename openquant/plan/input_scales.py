"""What a calibration says of the layers of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..errors import PlanError, SourceError
from ..formats.schemes import Scheme
from ..registry.rules import ModuleRules
from ..weights.statistics import Calibration, placeholder_calibration
from ..weights.weight import Weight
from .decisions import PlanOptions

# Layers of which a note says the experts.
MOST = 4


def expect_calibration(options: PlanOptions, tensors: Iterable[str], required: bool) -> PlanOptions:
    """Stand in for a calibration that is still to be made.

    Args:
        options: what the user asks for.
        tensors: names of the weights, all of which such a calibration will have seen.
        required: whether the scheme stores scales of activations, and the source has none.

    Returns:
        The options, with a stand-in where a calibration is needed and there is none.

    Raises:
        PlanError: one is required, and no texts are said to make it with.
    """
    if options.calibration is not None or not (required or options.calibrate):
        return options
    if options.texts is None:
        raise PlanError(
            "static activations need scales: those of a calibration, or the input_scale tensors of a quantized source, "
            "of which this one has none",
            "make one with openquant calibrate and give --calibration FILE, or leave --activation-scheme out: engines "
            "scale activations as they run",
        )
    return replace(options, calibration=placeholder_calibration(tensors, options.texts))


def require_widths(calibration: Calibration, layers: Iterable[Weight]) -> None:
    """Refuse a calibration that has seen another number of inputs than a layer has.

    Args:
        calibration: what was seen; anything goes of one that is still to be made.
        layers: what could be quantized.

    Raises:
        SourceError: it names the file and the layer.
    """
    by_name = {weight.source.name: weight for weight in layers} if calibration.model else {}
    for seen in calibration.inputs:
        found = [by_name[name] for name in seen.tensors if name in by_name]
        # Of experts one is enough: Ernie 4.5 VL has narrower ones for images, which transformers' module does not tell
        # from the others.
        if seen.tokens and found and all(seen.absmax.shape != (weight.shape[1],) for weight in found):
            raise SourceError(
                f"{calibration.file}: {found[0].source.name} has {found[0].shape[1]} inputs, and the calibration "
                f"{len(seen.absmax)}",
                "make it again: openquant calibrate MODEL -o FILE",
            )


def largest_inputs(
    calibration: Calibration, entry: ModuleRules, layers: Mapping[str, Weight], sets: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    """The largest magnitude that goes into each layer and what engines put together with it, by module; nothing of
    layers that the calibration has not seen.

    Engines have one scale, the largest, for joined layers, which have one input, and for all experts of a layer
    (vLLM layers/quantization/fp8.py:403-405, :739; fused_moe/routed_experts.py:823-833 refuses gate and up that
    differ). So an expert that no token was routed to has that of the others.

    Args:
        calibration: what was seen.
        entry: the registry's.
        layers: what could be quantized, by module.
        sets: the joined set, by module, of each that engines merge with others.
    """
    together: dict[tuple[str, ...], float] = {}
    keys: dict[str, tuple[str, ...]] = {}
    for module, weight in layers.items():
        experts, members = entry.experts(module), sets.get(module, (module,))
        # Of an expert the names of what it merges, in place of the modules: those of all experts are one.
        keys[module] = (experts, *(name.rpartition(".")[2] for name in members)) if experts else members
        seen = calibration.of(weight.source.name)
        if seen is not None:
            together[keys[module]] = max(seen.largest, together.get(keys[module], 0.0))
    return {module: together[key] for module, key in keys.items() if key in together}


def known_inputs(
    schemes: Iterable[Scheme],
    calibration: Calibration | None,
    entry: ModuleRules,
    layers: Mapping[str, Weight],
    sets: Mapping[str, tuple[str, ...]],
) -> dict[str, float]:
    """The largest magnitude that goes into each layer, as largest_inputs has it; nothing if no scheme stores scales of
    activations, or there is no calibration.
    """
    if calibration is None or not any(scheme.format.input_scale for scheme in schemes):
        return {}
    return largest_inputs(calibration, entry, layers, sets)


def unrouted_note(
    calibration: Calibration, entry: ModuleRules, modules: Iterable[str], layers: Mapping[str, Weight]
) -> list[str]:
    """A note of the experts that no token was routed to, whose scale is that of the others of their layer; none where
    each saw some.

    Args:
        calibration: what was seen.
        entry: the registry's.
        modules: those that have a scale of it.
        layers: the weights of these, by module.
    """
    found: dict[str, set[int]] = {}
    for module in modules:
        experts, seen = entry.experts(module), calibration.of(layers[module].source.name)
        if experts and seen is not None and seen.routed is not None:
            number = module.removeprefix(f"{experts}.").partition(".")[0]
            if number.isdecimal() and seen.routed[int(number) : int(number) + 1] == (0,):
                found.setdefault(experts, set()).add(int(number))
    if not found:
        return []
    said = [f"{experts}.{{{','.join(map(str, sorted(numbers)))}}}" for experts, numbers in list(found.items())[:MOST]]
    more = f" and in {len(found) - MOST} more layers" if len(found) > MOST else ""
    return [
        f"{sum(map(len, found.values()))} experts saw no token and have the scale of the others of their layer: "
        f"{', '.join(said)}{more}; more texts (--samples) would reach them"
    ]

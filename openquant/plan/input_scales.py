"""Static activation scales: the largest input magnitude of each layer, as a calibration observed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..errors import PlanError, SourceError
from ..formats.schemes import Scheme
from ..registry.rules import ModuleRules
from ..weights.statistics import Calibration, placeholder_calibration
from ..weights.weight import Weight
from .decisions import Decisions, PlanOptions

# How many layers a note names experts of.
_MOST_NAMED = 4


def expect_calibration(options: PlanOptions, tensors: Iterable[str], required: bool) -> PlanOptions:
    """Put a placeholder into the options if a calibration is needed and still to be made.

    Args:
        options: what the user asks for.
        tensors: full names of the source's tensors; the placeholder has statistics for all of them.
        required: whether the scheme has static activation scales and the source has none.

    Returns:
        The options, with the placeholder as `calibration` if one is needed: it is `required`, or the options ask for
        it, and they have none yet.

    Raises:
        PlanError: a calibration is needed, and there are no texts to make it with.
    """
    if options.calibration is not None or not (required or options.calibrate):
        return options
    if options.texts is None:
        raise PlanError(
            "static activation scales need a calibration, or the input_scale tensors of a quantized source, of which "
            "this one has none",
            "make one with openquant calibrate and give --calibration FILE, or leave --activation-scheme out for "
            "dynamic activation scales",
        )
    return replace(options, calibration=placeholder_calibration(tensors, options.texts))


def require_widths(calibration: Calibration, layers: Iterable[Weight]) -> None:
    """Refuse a calibration whose input statistics have another width than a layer.

    Args:
        calibration: statistics of the inputs of layers; a placeholder is accepted.
        layers: the weights [out, in] that may be quantized.

    Raises:
        SourceError: of the layers that share some statistics, none has their width; the message names the calibration
            file and the first of these layers.
    """
    by_name = {weight.source.name: weight for weight in layers} if calibration.model else {}
    for statistics in calibration.inputs:
        weights = [by_name[name] for name in statistics.tensors if name in by_name]
        # One matching expert is enough: in Ernie 4.5 VL the experts for images are narrower, and transformers' module
        # does not tell them from the others.
        if statistics.tokens and weights and all(statistics.absmax.shape != (weight.shape[1],) for weight in weights):
            raise SourceError(
                f"{calibration.file}: {weights[0].source.name} has {weights[0].shape[1]} inputs, and the calibration "
                f"{len(statistics.absmax)}",
                "make it again: openquant calibrate MODEL -o FILE",
            )


def find_input_absmax(
    schemes: Iterable[Scheme],
    calibration: Calibration | None,
    entry: ModuleRules,
    layers: Mapping[str, Weight],
    fused: Mapping[str, tuple[str, ...]],
) -> dict[str, float]:
    """Find the largest magnitude of each layer's input activations, shared where engines share a scale.

    Engines use one scale, the largest, for fused layers and for all experts of a layer (vLLM
    layers/quantization/fp8.py:403-405, :739; fused_moe/routed_experts.py:823-833 refuses gate and up that differ). So
    an expert that no token was routed to gets the value of the others.

    Args:
        schemes: all schemes of the plan.
        calibration: statistics of the inputs of layers; None without.
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        fused: for each module that engines fuse with others, the full names of all members, itself included.

    Returns:
        The largest absolute input, by full module name; layers that the calibration did not observe are absent. Empty
        without a calibration, or if no scheme stores activation scales.
    """
    if calibration is None or not any(scheme.format.input_scale for scheme in schemes):
        return {}
    shared_absmax: dict[tuple[str, ...], float] = {}
    keys = scale_sharing_keys(entry, layers, fused)
    for module, weight in layers.items():
        statistics = calibration.of(weight.source.name)
        if statistics is not None:
            shared_absmax[keys[module]] = max(statistics.largest, shared_absmax.get(keys[module], 0.0))
    return {module: shared_absmax[key] for module, key in keys.items() if key in shared_absmax}


def scale_sharing_keys(
    entry: ModuleRules, modules: Iterable[str], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return a key for each module, the same for those whose inputs engines scale by one number.

    Args:
        entry: what the registry says of each module of the architecture.
        modules: full names of modules.
        fused: for each module that engines fuse with others, the full names of all members, itself included.
    """
    keys: dict[str, tuple[str, ...]] = {}
    for module in modules:
        experts, members = entry.experts(module), fused.get(module, (module,))
        # Experts of a layer share a key: their path and the last segments of the fused projections.
        keys[module] = (experts, *(name.rpartition(".")[2] for name in members)) if experts else members
    return keys


def chosen_scales(decisions: Decisions, entry: ModuleRules) -> dict[str, float]:
    """Return the static scales of activations and of the KV cache that a plan has not from its source.

    Args:
        decisions: what becomes of each tensor.
        entry: what the registry says of each module of the architecture.

    Returns:
        Values by tensor name; of layers that share one, only the first.
    """
    scales = {kept.tensor.name: kept.value for kept in decisions.passthrough if isinstance(kept.value, float)}
    keys = scale_sharing_keys(entry, decisions.layers, decisions.fused)
    seen: set[tuple[str, ...]] = set()
    for weight, scheme in decisions.quantized:
        absmax, key = decisions.input_absmax.get(weight.module), keys[weight.module]
        of_source = absmax is None and weight.input_scale_for(scheme.format) is not None
        if scheme.format.input_scale is not None and not of_source and key not in seen:
            seen.add(key)
            # As it is stored.
            value = np.float32(scheme.input_scale(absmax))
            scales[f"{weight.module}.{scheme.format.input_scale}"] = float(value)
    return scales


def unrouted_note(
    calibration: Calibration, entry: ModuleRules, modules: Iterable[str], layers: Mapping[str, Weight]
) -> list[str]:
    """Return a note about experts that no token was routed to, which use their layer's scale.

    Args:
        calibration: statistics of the inputs of layers, with the tokens routed to each expert.
        entry: what the registry says of each module of the architecture.
        modules: full names of the modules with a static activation scale.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".

    Returns:
        A list of one sentence; empty if there are no such experts.
    """
    unrouted: dict[str, set[int]] = {}
    for module in modules:
        experts, statistics = entry.experts(module), calibration.of(layers[module].source.name)
        if experts and statistics is not None and statistics.routed is not None:
            number = module.removeprefix(f"{experts}.").partition(".")[0]
            if number.isdecimal() and statistics.routed[int(number) : int(number) + 1] == (0,):
                unrouted.setdefault(experts, set()).add(int(number))
    if not unrouted:
        return []
    names = [
        f"{experts}.{{{','.join(map(str, sorted(numbers)))}}}"
        for experts, numbers in list(unrouted.items())[:_MOST_NAMED]
    ]
    more = f" and in {len(unrouted) - _MOST_NAMED} more layers" if len(unrouted) > _MOST_NAMED else ""
    return [
        f"no token was routed to {sum(map(len, unrouted.values()))} experts, which use the scale of the others of "
        f"their layer: {', '.join(names)}{more}; more texts (--samples) would reach them"
    ]

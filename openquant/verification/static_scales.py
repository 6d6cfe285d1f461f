"""Checks static scales: those of activations (`input_scale`, `input_global_scale`) and of the KV cache.

Nothing in the weights says what they must be. The journal of an output has the values that its plan chose; layers that
engines fuse read the same input; and no model has activations beyond some range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..plan.input_scales import scale_sharing_keys
from .headers import Headers

# Values of float16, in which engines run models too, are 2^-24 to 2^16 in size. FP8 codes reach 2^9, so its scales are
# 2^-33 to 2^7; bfloat16 has larger values. A stored global scale is the reciprocal, so the range is symmetric.
SMALLEST, LARGEST = 2.0**-33, 2.0**33
# How many times larger one scale of fused layers may be if another tool chose it, which may have seen other tokens for
# each layer. openquant leaves as much room for activations that no text showed (Format.scale_inputs).
ROOM = 2.0


def check_static_scales(
    headers: Headers,
    values: Mapping[str, float],
    cache: Iterable[str],
    chosen: Mapping[str, float],
    of_source: Mapping[str, float],
) -> list[str]:
    """Find static scales that are not those that were chosen, differ in fused layers, or fit no activations.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        values: the value of each sound scale that is one number, by tensor name.
        cache: names of the scales of the KV cache.
        chosen: the values that the run chose, by the name of the first tensor of layers that share one; empty if
            another tool made the directory.
        of_source: the values that the run took from its source, by tensor name; empty without a source.

    Returns:
        One line for each problem.
    """
    modules = {
        weight.module: weight.input_scale.name
        for weight in headers.codes.values()
        if weight.input_scale is not None and weight.input_scale.name in values
    }
    names = [*modules.values(), *(name for name in cache if name in values)]
    chosen = {**chosen, **_shared_with(headers, modules, chosen)}
    expected = {**of_source, **chosen}
    others = {module: name for module, name in modules.items() if name not in expected}

    return [
        *(
            f"{headers.place(name)} is {values[name]:g}, "
            f"{'the run that made it chose' if name in chosen else 'the source has'} {expected[name]:g}"
            for name in names
            if name in expected and values[name] != expected[name]
        ),
        *_differing_in_fused(headers, values, others),
        *(
            f"{headers.place(name)} is {values[name]:g}, and activations need {SMALLEST:.1g} to {LARGEST:.1g}"
            for name in names
            if name not in expected and not SMALLEST <= values[name] <= LARGEST
        ),
    ]


def _shared_with(headers: Headers, modules: Mapping[str, str], chosen: Mapping[str, float]) -> dict[str, float]:
    """Return the values of all layers that share a chosen one, by tensor name."""
    entry = headers.entry
    if entry is None or not chosen:
        return {}
    keys = scale_sharing_keys(entry, modules, entry.fused_groups(headers.layers(entry)))
    value_of = {keys[module]: chosen[name] for module, name in modules.items() if name in chosen}
    return {modules[module]: value_of[key] for module, key in keys.items() if key in value_of}


def _differing_in_fused(headers: Headers, values: Mapping[str, float], modules: Mapping[str, str]) -> list[str]:
    """Report fused layers whose scales differ by more than ROOM."""
    entry = headers.entry
    if entry is None:
        return []
    problems = []
    for members in sorted(set(entry.fused_groups(headers.layers(entry)).values())):
        names = [modules[module] for module in members if module in modules]
        if not names:
            continue
        low, high = min(names, key=values.__getitem__), max(names, key=values.__getitem__)
        if values[high] > ROOM * values[low]:
            problems.append(
                f"{headers.place(low)} is {values[low]:g} and {high} is {values[high]:g}, but their layers read the "
                "same input"
            )
    return problems

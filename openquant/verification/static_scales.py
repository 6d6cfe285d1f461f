"""Checks static scales: those of activations (`input_scale`, `input_global_scale`) and of the KV cache.

Nothing in the weights says what they must be. The journal of an output has the values that its plan chose; layers that
engines fuse read the same input; and no model has activations beyond some range.

Checks the KV-cache scales of a quantized directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import PlanError, UsageError
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS
from ..formats.kv_cache import SCALES, cache_scales, says_fp8_cache
from ..plan.input_scales import scale_sharing_keys
from ..plan.kv_cache import find_cached_attentions
from ..plan.tensor_parallel import text_config
from .headers import Findings, Headers, described

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


# The values of "dynamic" and "strategy" in a kv_cache_scheme whose scales are stored and checked here.
_STATIC_PER_TENSOR = (False, "tensor")


def cached_in_fp8(headers: Headers) -> bool:
    """Return whether the config says that the KV cache is FP8. A kv_cache_scheme with invalid settings gives False.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
    """
    try:
        return says_fp8_cache(headers.quantization.settings)
    except UsageError:
        return False


def cache_tensors(headers: Headers) -> list[TensorInfo]:
    """Return all KV-cache scales of a directory, whether its config has a kv_cache_scheme or not.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.

    Returns:
        Name, dtype and shape of each tensor; the values are not read.
    """
    tensors = headers.checkpoint.tensors
    return [tensors[name] for name in _names(cache_scales(tensors))]


def check_cache(headers: Headers, findings: Findings) -> None:
    """Check, if the KV cache is FP8, that every layer with a KV cache of its own has valid scales.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems and notes, one line each, are added to it.
    """
    try:
        fp8_cache = says_fp8_cache(headers.quantization.settings)
    except UsageError as error:
        # Of other methods than those that openquant writes, engines may read what openquant does not.
        known = headers.quantization.checked_as_engines_load
        (findings.problems if known else findings.notes).append(error.message)
        return
    if not fp8_cache:
        return
    scheme = headers.quantization.settings.get("kv_cache_scheme")
    if (
        not findings.ours
        and isinstance(scheme, dict)
        and (scheme.get("dynamic"), scheme.get("strategy", "tensor")) != _STATIC_PER_TENSOR
    ):
        findings.notes.append("KV-cache scales are dynamic or per head: they are not checked")
        return
    for info in cache_tensors(headers):
        if info.dtype not in FLOATS or info.shape not in ((), (1,)):
            findings.problems.append(f"{headers.place(info.name)} is {described(info)}, a KV-cache scale is one number")
    try:
        layers = _cache_layers(headers)
    except PlanError as error:
        findings.notes.append(f"KV-cache scales are not checked: {error.message}")
        return
    names_by_layer = cache_scales(headers.checkpoint.tensors)
    for number, path in layers.items():
        for last, stored_name in zip(SCALES, names_by_layer.pop(number, (None, None)), strict=True):
            name = f"{path}.{last}"
            if stored_name is None:
                findings.problems.append(
                    f"{name} is missing: config.json says that the KV cache is FP8. Without the scale engines use 1, "
                    "and transformers an arbitrary value"
                )
            elif stored_name != name and findings.ours:
                findings.problems.append(f"{headers.place(stored_name)} must be called {name}")
    for name in _names(names_by_layer):
        findings.problems.append(f"{headers.place(name)} is a scale of a layer that has no KV cache of its own")


def _cache_layers(headers: Headers) -> dict[int, str]:
    """The attention module of each layer that has a KV cache of its own, by layer number.

    Raises:
        PlanError: the layers are not known.
    """
    names = (headers.stored[name].module if name in headers.stored else name for name in headers.checkpoint.tensors)
    modules = [name.removesuffix(".weight") for name in names]
    if headers.entry is None:
        raise PlanError(f"{headers.checkpoint.architecture} is not a known architecture", "")
    return find_cached_attentions(modules, headers.entry, text_config(headers.checkpoint, headers.entry.model))


def _names(scales: Mapping[int, tuple[str | None, str | None]]) -> list[str]:
    """The tensor names of KV-cache scales by layer, each once; keys and values may share a scale."""
    return list(dict.fromkeys(name for pair in scales.values() for name in pair if name))

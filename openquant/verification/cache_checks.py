"""Checks the KV-cache scales of a quantized directory."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PlanError, UsageError
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS
from ..formats.kv_cache import SCALES, cache_scales, says_fp8_cache
from ..plan.kv_cache import find_cached_attentions
from ..plan.tensor_parallel import text_config
from .headers import Findings, Headers, described

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

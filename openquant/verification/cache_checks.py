"""Checks of the scales of keys and values in a quantized directory."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PlanError, UsageError
from ..files.tensors import TensorInfo
from ..formats.format import FLOATS
from ..formats.kv_cache import SCALES, cache_scales, says_fp8_cache
from ..plan.kv_cache import cache_layers
from ..plan.tensor_parallel import text_config
from .headers import Findings, Headers, described

# Whether scales of a cache are found as they come, and what shares one, where the scales that are stored are checked.
_OF_TENSORS = (False, "tensor")


def cached_in_fp8(headers: Headers) -> bool:
    """Whether the config says that keys and values are cached in FP8; not where it says it wrongly."""
    try:
        return says_fp8_cache(headers.quantization.settings)
    except UsageError:
        return False


def cache_tensors(headers: Headers) -> list[TensorInfo]:
    """The scales of keys and values, whether the config speaks of a cache or not."""
    tensors = headers.checkpoint.tensors
    return [tensors[name] for name in _names(cache_scales(tensors))]


def check_cache(headers: Headers, findings: Findings) -> None:
    """Check the scales of keys and values of all layers that have a cache of their own, where it is in FP8.

    Args:
        headers: what is there.
        findings: gets what is off.
    """
    try:
        cached = says_fp8_cache(headers.quantization.settings)
    except UsageError as error:
        findings.problems.append(error.message)
        return
    if not cached:
        return
    scheme = headers.quantization.settings.get("kv_cache_scheme")
    if (
        not findings.ours
        and isinstance(scheme, dict)
        and (scheme.get("dynamic"), scheme.get("strategy")) != _OF_TENSORS
    ):
        findings.notes.append(
            "scales of keys and values are found as they come, or those of heads: they are not checked"
        )
        return
    for info in cache_tensors(headers):
        if info.dtype not in FLOATS or info.shape not in ((), (1,)):
            findings.problems.append(
                f"{headers.place(info.name)} is {described(info)}, scales of a cache are one number"
            )
    try:
        layers = _cache_layers(headers)
    except PlanError as error:
        findings.notes.append(f"not checked are the scales of keys and values: {error.message}")
        return
    known = cache_scales(headers.checkpoint.tensors)
    for number, path in layers.items():
        for last, found in zip(SCALES, known.pop(number, (None, None)), strict=True):
            name = f"{path}.{last}"
            if found is None:
                findings.problems.append(
                    f"{name} is missing: keys and values are cached in FP8, as config.json says, "
                    "by engines under a scale of 1 then, by transformers under anything"
                )
            elif found != name and findings.ours:
                findings.problems.append(f"{headers.place(found)} must be called {name}")
    for name in _names(known):
        findings.problems.append(f"{headers.place(name)} is the scale of a layer that has no cache of its own")


def _cache_layers(headers: Headers) -> dict[int, str]:
    """The attention of each layer that has a cache of its own, by number.

    Raises:
        PlanError: that is not known.
    """
    names = (headers.stored[name].module if name in headers.stored else name for name in headers.checkpoint.tensors)
    modules = [name.removesuffix(".weight") for name in names]
    if headers.entry is None:
        raise PlanError(f"{headers.checkpoint.architecture} is not a known architecture", "")
    return cache_layers(modules, headers.entry, text_config(headers.checkpoint, headers.entry.model))


def _names(scales: Mapping[int, tuple[str | None, str | None]]) -> list[str]:
    """The names of scales of keys and of values by layer, each once."""
    return list(dict.fromkeys(name for both in scales.values() for name in both if name))

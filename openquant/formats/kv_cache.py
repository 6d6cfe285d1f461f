"""The KV cache in FP8: how configs ask for it, and the names of its scales.

A stored code times its scale is a value, or a key as it is cached: after its norm and rotary embedding.

    cache_scales(["model.layers.0.self_attn.k_scale"])      # {0: ("model.layers.0.self_attn.k_scale", None)}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UsageError
from .numbers import E4M3

# Last parts of the scales' names, below a layer's attention module. vLLM layers/quantization/base_config.py:244 and
# SGLang model_loader/weight_utils.py:1812 put `.attn` before them.
SCALES = ("k_scale", "v_scale")
# The option for vLLM where it does not read the setting from the config.
FLAG = "--kv-cache-dtype fp8"
# By quant_method, the key and value that ask for an FP8 cache. The first: vLLM layers/attention/attention.py:287 and
# SGLang compressed_tensors.py:143; only SGLang reads the second (layers/quantization/fp8.py:366).
_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "compressed-tensors": (
        "kv_cache_scheme",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
    ),
    "fp8": ("kv_cache_quant_algo", "FP8"),
}
# The config of a checkpoint that has KV-cache scales and no quantized layer: for vLLM compressed_tensors.py:1018 and
# SGLang compressed_tensors.py:1171 it needs no ignore list.
DENSE: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
# Names of scales of keys, of values or of both, as vLLM renames them (layers/quantization/base_config.py:217-247).
_SCALE = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,9})\..*?(?:([kv])_scale|([kv])_proj\.output_scale|([kv])_cache\.scale|kv_scale)"
)


def with_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings`, a quantization_config, that also asks for a KV cache in FP8.

    Args:
        settings: the quantization_config of a config.json, of the method "compressed-tensors" or "fp8".
    """
    key, value = _SETTINGS[settings["quant_method"]]
    return {**settings, key: value}


def without_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings`, a quantization_config, without what `with_fp8_cache` adds.

    Args:
        settings: the quantization_config of a config.json, of any method. What other tools say of the KV cache stays.
    """
    key, value = _SETTINGS.get(str(settings.get("quant_method")), ("", None))
    return {name: setting for name, setting in settings.items() if name != key or setting != value}


def says_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` asks for a KV cache in FP8, in either way of saying so.

    Not every engine reads every way: with the method "fp8" vLLM also needs FLAG.

    Args:
        config: the quantization_config of a config.json, or what modelopt's hf_quant_config.json holds.

    Raises:
        UsageError: it asks for another numeric format.
    """
    inner = config.get("quantization")
    places = (config, inner) if isinstance(inner, dict) else (config,)
    for place in places:
        scheme, algorithm = place.get("kv_cache_scheme"), place.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
                raise UsageError(
                    f"config.json has a kv_cache_scheme of {scheme.get('num_bits')} bits, type {scheme.get('type')}",
                    "known is FP8",
                )
            return True
        if algorithm is not None:
            if algorithm != "FP8":
                raise UsageError(f"config.json has the kv_cache_quant_algo {algorithm}", "known is FP8")
            return True
    return False


def cache_scales(names: Iterable[str]) -> dict[int, tuple[str | None, str | None]]:
    """Find the tensors with the scales of the KV cache.

    Args:
        names: names of all tensors of a checkpoint.

    Returns:
        By number of the decoder layer, the names of the tensors with the scale of keys and of values; the same name
        twice if they share a scale, None where there is none. Layers without either are missing.
    """
    scales: dict[int, list[str | None]] = {}
    for name in sorted(names):
        match = _SCALE.fullmatch(name)
        if match is None:
            continue
        which = match[2] or match[3] or match[4]
        of_layer = scales.setdefault(int(match[1]), [None, None])
        for position, letter in enumerate("kv"):
            if which in (None, letter):
                of_layer[position] = name
    return {layer: (key, value) for layer, (key, value) in scales.items()}


def scale_for(largest: float) -> float:
    """Return the scale for keys or values: the smallest power of two that is at least largest / 448 and 2^-64.

    Other scales are no more exact, and in vLLM's CPU kernel a little less.

    Args:
        largest: largest absolute key or value; the scale is 1 if it is 0.
    """
    return 1.0 if largest <= 0 else 2.0 ** math.ceil(math.log2(max(2.0**-64, largest / E4M3.largest)))

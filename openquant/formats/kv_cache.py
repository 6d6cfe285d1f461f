"""The cache of keys and values in FP8: what a config says of it, and what tools call its scales.

A stored code times the scale is a key as it is cached, that is normed and rotated, or a value.

    cache_scales(["model.layers.0.self_attn.k_scale"])      # {0: ("model.layers.0.self_attn.k_scale", None)}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UsageError
from .numbers import E4M3

# By letter, the last part of what we call a scale, below its layer's attention: vLLM
# layers/quantization/base_config.py:244 and SGLang model_loader/weight_utils.py:1812 put `.attn` before it.
SCALES = ("k_scale", "v_scale")
# What vLLM is told where it does not read the config's word.
FLAG = "--kv-cache-dtype fp8"
# By quant_method, the key that says it and its value. For the first, vLLM layers/attention/attention.py:287 and
# SGLang compressed_tensors.py:143; the second only SGLang reads (layers/quantization/fp8.py:366).
_SAID: Mapping[str, tuple[str, Any]] = {
    "compressed-tensors": (
        "kv_cache_scheme",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
    ),
    "fp8": ("kv_cache_quant_algo", "FP8"),
}
# What stays as it is, beside scales of keys and values: vLLM compressed_tensors.py:1018 and SGLang
# compressed_tensors.py:1171 then look for no layer, and need no list of them.
DENSE: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
# Of keys, of values or of both, as vLLM renames them (layers/quantization/base_config.py:217-247).
_SCALE = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,9})\..*?(?:([kv])_scale|([kv])_proj\.output_scale|([kv])_cache\.scale|kv_scale)"
)


def with_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` that also says that keys and values are cached in FP8."""
    key, value = _SAID[settings["quant_method"]]
    return {**settings, key: value}


def without_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` without what `with_fp8_cache` adds; anything else stays."""
    key, value = _SAID.get(str(settings.get("quant_method")), ("", None))
    return {name: held for name, held in settings.items() if name != key or held != value}


def says_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Whether engines store keys and values in FP8 by themselves, since a `quantization_config` says so.

    Raises:
        UsageError: it says another number.
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
    """The tensors with the scales of keys and of values, by the layer's number; None where there is none.

    Args:
        names: of all tensors of a checkpoint.
    """
    found: dict[int, list[str | None]] = {}
    for name in sorted(names):
        match = _SCALE.fullmatch(name)
        if match is None:
            continue
        which = match[2] or match[3] or match[4]
        both = found.setdefault(int(match[1]), [None, None])
        for number, letter in enumerate("kv"):
            if which in (None, letter):
                both[number] = name
    return {layer: (key, value) for layer, (key, value) in found.items()}


def scale_for(largest: float) -> float:
    """The scale for keys or values of at most this magnitude: the power of two at or above largest / 448.

    One that is none is no more exact, and in vLLM's kernel for CPUs a little less.
    """
    return 1.0 if largest <= 0 else 2.0 ** math.ceil(math.log2(max(2.0**-64, largest / E4M3.largest)))

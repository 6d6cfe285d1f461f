"""Find values of a quantization_config that no engine reads, or that engines understand otherwise than stored.

`fp8`: vLLM layers/quantization/fp8.py:157-176, SGLang layers/quantization/fp8.py:340-380, transformers
FineGrainedFP8Config. `compressed-tensors`: the package's quantization/quant_args.py and quant_config.py, and
what vLLM makes a scheme of (compressed_tensors/compressed_tensors.py:582-616 and 783-950).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .quantization import IGNORE_KEYS
from .schemes import INTEGER_GROUPS, TRANSFORMERS_REFUSAL

# By key, the allowed values; None for keys that may have any value or are checked elsewhere.
_Allowed = Mapping[str, tuple[Any, ...] | None]

_LISTS: _Allowed = dict.fromkeys(IGNORE_KEYS)
_FP8: _Allowed = {
    **_LISTS,
    "quant_method": None,
    "activation_scheme": None,
    "weight_block_size": None,
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),
    "store_dtype": (None,),
    "expert_dtype": (None, "fp8"),
    "dequantize": (None, False, True),
    "modules_to_convert": (None, []),
    "packed_modules_mapping": None,
    "kv_cache_quant_algo": (None, "FP8"),
    "kv_cache_scheme": None,
}
_DTYPES = (None, *(f"torch.{name}" for name in ("float32", "bfloat16", "float16", "uint8", "int8", "float8_e4m3fn")))
_ARGUMENTS: _Allowed = {
    "symmetric": (True,),
    "strategy": None,
    "group_size": None,
    "block_structure": None,
    "actorder": (None, False),
    "observer": None,
    "observer_kwargs": None,
    "scale_dtype": _DTYPES,
    "zp_dtype": _DTYPES,
}
_WEIGHTS: _Allowed = {**_ARGUMENTS, "num_bits": (8, 4), "dynamic": (False,)}
# Integers may have zero points.
_INTEGERS: _Allowed = {**_WEIGHTS, "num_bits": (8, *INTEGER_GROUPS), "symmetric": (True, False)}
_CACHE: _Allowed = {**_ARGUMENTS, "num_bits": (8,), "dynamic": (False, True), "type": ("float",)}
# The formats that a config group may have, by type, bits and strategy of its weights; the strategy is "" unless scales
# belong to groups of a row.
_GROUP_FORMATS: Mapping[tuple[Any, Any, str], tuple[str, ...]] = {
    ("float", 8, ""): ("float-quantized", "naive-quantized"),
    ("float", 8, "group"): ("mxfp8-quantized", "float-quantized", "naive-quantized"),
    ("float", 4, "group"): ("mxfp4-pack-quantized",),
    ("float", 4, "tensor_group"): ("nvfp4-pack-quantized",),
    ("int", 8, ""): ("int-quantized", "naive-quantized", "pack-quantized"),
    ("int", 8, "group"): ("pack-quantized",),
} | {("int", bits, grouped): ("pack-quantized",) for bits in INTEGER_GROUPS for grouped in ("", "group")}
# Strategies of dynamic activations, by the type of weights.
_DYNAMIC: Mapping[str, tuple[str, ...]] = {"float": ("token", "tensor", "group"), "int": ("token",)}
# Formats of integers whose activations must be quantized too (vLLM asserts that).
_WITH_ACTIVATIONS = ("int-quantized", "naive-quantized")
_GROUP: _Allowed = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "format": None,
}
_COMPRESSED: _Allowed = {
    **_LISTS,
    "quant_method": None,
    "config_groups": None,
    "quantization_status": ("compressed", "frozen", "calibration", "initialized"),
    "format": None,
    "kv_cache_scheme": None,
    "sparsity_config": None,
    "transform_config": None,
    "moe_sparsity_config": (None,),
    "global_compression_ratio": None,
    "packed_modules_mapping": None,
    "version": None,
}


def check_config_values(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Check the values of a quantization_config.

    Args:
        settings: the quantization_config of a config.json, of any method. `read_quantization` must have accepted it.
            Ignore lists may be replaced by None.

    Returns:
        Problems with values, such as 'fmt is "e5m2", engines read null or "e4m3" or "float8_e4m3fn"'; and the keys that
        no engine reads, such as "config_groups.group_0.more". Both are empty for all methods but "fp8" and
        "compressed-tensors", of which reading has checked all keys that it reads.
    """
    if settings.get("quant_method") not in ("fp8", "compressed-tensors"):
        return [], []
    problems, unknown = [], []
    for path, mapping, allowed in _walk(settings):
        for key, value in mapping.items():
            name = ".".join((*path, key))
            values = allowed.get(key)
            if key not in allowed:
                unknown.append(name)
            elif values is not None and not _is_one_of(value, values):
                problems.append(f"{name} is {setting_repr(value)}, engines read {_either(values)}")
    problems += list(_contradictions(settings))
    return problems, unknown


def _walk(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], _Allowed]]:
    """Yield each dictionary of a config: its path, itself, and the values that its keys may have."""
    if settings.get("quant_method") == "fp8":
        # For one scale per tensor we write a value that makes transformers refuse the checkpoint.
        refusal = () if settings.get("weight_block_size") else (TRANSFORMERS_REFUSAL,)
        yield (), settings, {**_FP8, "scale_fmt": (None, "float", "ue8m0", *refusal)}
        return
    yield (), settings, _COMPRESSED
    for name, group in (settings.get("config_groups") or {}).items():
        path = "config_groups", name
        yield path, group, _GROUP
        weights = group["weights"]
        of_weights = _INTEGERS if weights.get("type") == "int" else _WEIGHTS
        for key, allowed in (("weights", of_weights), ("input_activations", _activations(weights))):
            if isinstance(group.get(key), dict):
                # Activations must have the type of the weights.
                yield (*path, key), group[key], {**allowed, "type": (weights.get("type"),)}
    cache = settings.get("kv_cache_scheme")
    if isinstance(cache, dict):
        yield ("kv_cache_scheme",), cache, _CACHE


def _activations(weights: Mapping[str, Any]) -> _Allowed:
    """Return the allowed settings of activations: as many bits as the weights or more."""
    bits = (8, 4) if weights.get("num_bits") == 4 else (8,)
    local = ("local",) if weights.get("strategy") == "tensor_group" else ()
    return {**_ARGUMENTS, "num_bits": bits, "dynamic": (False, True, *local)}


def _contradictions(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each group whose format or activations no engine has a scheme for."""
    cache = settings.get("kv_cache_scheme")
    if cache is not None and not isinstance(cache, dict):
        yield f"kv_cache_scheme is {setting_repr(cache)}, engines read null or an object"
    groups = settings.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        path, format = f"config_groups.{name}", group.get("format")
        if format is None:
            format = settings.get("format")
        kind, strategy = group["weights"].get("type"), group["weights"].get("strategy")
        grouped = strategy if strategy in ("group", "tensor_group") else ""
        formats = _GROUP_FORMATS[kind, group["weights"].get("num_bits"), grouped]
        if not _is_one_of(format, formats):
            yield f"{path} has the format {setting_repr(format)}, engines read {_either(formats)} for its weights"
        activations = group.get("input_activations")
        if not isinstance(activations, dict):
            if kind == "int" and format in _WITH_ACTIVATIONS:
                yield f"{path} has no input_activations, engines read that for pack-quantized weights"
            continue
        dynamic = activations.get("dynamic") is True
        strategies = _DYNAMIC[kind] if dynamic else ("tensor",)
        # NVFP4 has dynamic scales of groups under a static global scale.
        if grouped == "tensor_group":
            strategies, dynamic = (grouped,), activations.get("dynamic") == "local"
        if not _is_one_of(activations.get("strategy"), strategies):
            yield (
                f"{path}.input_activations.strategy is {setting_repr(activations.get('strategy'))}, engines read "
                f"{_either(strategies)} for {'dynamic' if dynamic else 'static'} activations"
            )


def setting_repr(value: Any) -> str:
    """Return `value`, anything that config.json may hold, as JSON for a message, shortened if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a value is allowed. Unlike in Python, 1 and True differ in JSON."""
    return any(type(value) is type(choice) and value == choice for choice in allowed)


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in values)

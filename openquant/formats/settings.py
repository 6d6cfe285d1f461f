"""Values in a quantization_config that nothing reads, or that engines read as something else than is stored.

`fp8`: vLLM layers/quantization/fp8.py:157-176, SGLang layers/quantization/fp8.py:340-380, transformers
FineGrainedFP8Config. `compressed-tensors`: the package's quantization/quant_args.py and quant_config.py, and
what vLLM makes a scheme of (compressed_tensors/compressed_tensors.py:582-616 and 783-950).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .quantization import IGNORE_KEYS, IN_COLUMNS
from .schemes import TRANSFORMERS_REFUSAL

# The values that each key may have; None for keys that are looked at elsewhere, or may have any.
_Known = Mapping[str, tuple[Any, ...] | None]

_LISTS: _Known = dict.fromkeys(IGNORE_KEYS)
_FP8: _Known = {
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
_ARGUMENTS: _Known = {
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
_WEIGHTS: _Known = {**_ARGUMENTS, "num_bits": (8, 4), "dynamic": (False,)}
# Integers may have zero points.
_INTEGERS: _Known = {**_WEIGHTS, "symmetric": (True, False)}
_CACHE: _Known = {**_ARGUMENTS, "num_bits": (8,), "dynamic": (False, True), "type": ("float",)}
# By the type of weights, their bits and the strategy of those that share scales in groups of a row: the formats that a
# config group may have.
_STORED: Mapping[tuple[Any, Any, str], tuple[str, ...]] = {
    ("float", 8, ""): ("float-quantized", "naive-quantized"),
    ("float", 8, "group"): ("mxfp8-quantized", "float-quantized", "naive-quantized"),
    ("float", 4, "group"): ("mxfp4-pack-quantized",),
    ("float", 4, "tensor_group"): ("nvfp4-pack-quantized",),
    ("int", 8, ""): ("int-quantized", "naive-quantized", "pack-quantized"),
    ("int", 8, "group"): ("pack-quantized",),
    ("int", 4, ""): ("pack-quantized",),
    ("int", 4, "group"): ("pack-quantized",),
}
# How activations may be quantized that are dynamic, by the type of weights.
_DYNAMIC: Mapping[str, tuple[str, ...]] = {"float": ("token", "tensor", "group"), "int": ("token",)}
# Formats of integers whose activations are quantized too (vLLM asserts that).
_BOTH = ("int-quantized", "naive-quantized")
_GROUP: _Known = {
    "targets": None,
    "weights": None,
    "input_activations": None,
    "output_activations": (None,),
    "format": None,
}
_COMPRESSED: _Known = {
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


def unread(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What is wrong with the values of a quantization_config, and the keys that nothing reads.

    Example: (['fmt is "e5m2", engines read null or "e4m3" or "float8_e4m3fn"'], ["config_groups.group_0.more"])
    """
    if settings.get("quant_method") in IN_COLUMNS:
        # What of it is read is known, or was refused (awq_gptq.py).
        return [], []
    problems, unknown = [], []
    for path, value, known in _walk(settings):
        for key, held in value.items():
            where = ".".join((*path, key))
            allowed = known.get(key)
            if key not in known:
                unknown.append(where)
            elif allowed is not None and not _is_one(held, allowed):
                problems.append(f"{where} is {setting_repr(held)}, engines read {_either(allowed)}")
    problems += list(_contradictions(settings))
    return problems, unknown


def _walk(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], _Known]]:
    """Every dictionary whose keys are known, where it is."""
    if settings.get("quant_method") == "fp8":
        # One scale per tensor is what transformers has to refuse.
        more = () if settings.get("weight_block_size") else (TRANSFORMERS_REFUSAL,)
        yield (), settings, {**_FP8, "scale_fmt": (None, "float", "ue8m0", *more)}
        return
    yield (), settings, _COMPRESSED
    for name, group in (settings.get("config_groups") or {}).items():
        path = "config_groups", name
        yield path, group, _GROUP
        weights = group["weights"]
        kind = _INTEGERS if weights.get("type") == "int" else _WEIGHTS
        for key, known in (("weights", kind), ("input_activations", _activations(weights))):
            if isinstance(group.get(key), dict):
                # Activations are of the kind that weights are.
                yield (*path, key), group[key], {**known, "type": (weights.get("type"),)}
    cache = settings.get("kv_cache_scheme")
    if isinstance(cache, dict):
        yield ("kv_cache_scheme",), cache, _CACHE


def _activations(weights: Mapping[str, Any]) -> _Known:
    """What the activations of layers with such weights may be: of as many bits, or of more."""
    bits = (8, 4) if weights.get("num_bits") == 4 else (8,)
    local = ("local",) if weights.get("strategy") == "tensor_group" else ()
    return {**_ARGUMENTS, "num_bits": bits, "dynamic": (False, True, *local)}


def _contradictions(settings: Mapping[str, Any]) -> Iterator[str]:
    """Formats of groups, and how activations are quantized, that no engine has a scheme for."""
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
        stored = _STORED[kind, group["weights"].get("num_bits"), grouped]
        if not _is_one(format, stored):
            yield f"{path} has the format {setting_repr(format)}, engines read {_either(stored)} for its weights"
        activations = group.get("input_activations")
        if not isinstance(activations, dict):
            if kind == "int" and format in _BOTH:
                yield f"{path} has no input_activations, engines read that for pack-quantized weights"
            continue
        dynamic = activations.get("dynamic") is True
        strategies = _DYNAMIC[kind] if dynamic else ("tensor",)
        # NVFP4: scales of groups as they come, under a global one that is stored.
        if grouped == "tensor_group":
            strategies, dynamic = (grouped,), activations.get("dynamic") == "local"
        if not _is_one(activations.get("strategy"), strategies):
            yield (
                f"{path}.input_activations.strategy is {setting_repr(activations.get('strategy'))}, engines read "
                f"{_either(strategies)} for {'dynamic' if dynamic else 'static'} activations"
            )


def setting_repr(value: Any) -> str:
    """A value of a config for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_one(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of some; 1 is not True, which JSON tells apart."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in values)

"""What a quantization_config promises of the tensors beside it, whichever tool wrote it.

`fp8` is read as vLLM reads it (layers/quantization/fp8.py:106-168), `compressed-tensors` likewise
(layers/quantization/compressed_tensors/compressed_tensors.py:581-616 and the package's own), `modelopt` from its
layers/quantization/modelopt.py:319-430, `mxfp4` from transformers integrations/mxfp4.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

from ..errors import UsageError
from .activations import ActivationQuantization, read_activation_quantization
from .awq_gptq import read_awq, read_gptq
from .format import INPUT_SCALE, Format, GlobalScale, Group
from .ignored import MEND, Expressions, Ignored, IgnoredParts
from .schemes import (
    ASYMMETRIC,
    BLOCK,
    BLOCK_COMPRESSED,
    CHANNEL,
    INT4_W4A16,
    INT8_W8A8,
    INT8_W8A16,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_W4A4,
    SCHEMES,
    STATIC,
    TENSOR,
    TENSOR_COMPRESSED,
    VARIANTS,
    ZERO_POINT,
    Scheme,
)

# What shares a scale in the MX formats (OCP Microscaling Formats 1.0, 5.2).
MX_GROUP = 32
# The largest block that is read: a common layer has no more rows or columns.
MAX_SIDE = 1 << 16
# FP8 activations, in the words of compressed-tensors.
_FP8 = {"type": "float", "num_bits": 8}
# Methods whose codes lie in columns.
IN_COLUMNS = ("awq", "gptq")
IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore")


@dataclass(frozen=True)
class Quantization:
    """One quantization_config.

    Attributes:
        method: its quant_method.
        groups: what layers are stored as, each with the targets it applies to; none where it says only that keys and
            values are cached in FP8.
        inputs: how the activations of each group's layers are quantized, in the words of compressed-tensors; None for
            those that stay as they are.
        expressions: those among the targets.
        ignored: what stays unquantized.
        settings: all of it, None in place of each list of unquantized modules.
        problems: what is wrong with it already.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Format], ...]
    inputs: tuple[Mapping[str, Any] | None, ...]
    expressions: Expressions
    ignored: Ignored
    settings: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def title(self) -> str:
        """What shares a scale in its groups: "one scale per channel and one scale per 128x128 block"."""
        return " and ".join(dict.fromkeys(fmt.label for _, fmt in self.groups)) or "weights as they are"

    @property
    def checkable(self) -> bool:
        """Whether `verify` knows what engines make of it."""
        written = {scheme.format.number for scheme in SCHEMES.values()}
        known = self.method in ("fp8", "compressed-tensors", *IN_COLUMNS)
        return known and all(fmt.number in written for _, fmt in self.groups)

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of ours in which all that no other group names is stored; None if none is."""
        fmt = self.groups[0][1] if self.groups else None
        return next(
            (
                scheme
                for scheme in (*VARIANTS, *ASYMMETRIC, *STATIC)
                if (scheme.method, scheme.format) == (self.method, fmt)
            ),
            None,
        )

    def format_of(self, module: str) -> Format | None:
        """What a quantized module is stored as; None if it is no group's target."""
        number = self._number(module)
        return None if number is None else self.groups[number][1]

    def inputs_of(self, module: str) -> ActivationQuantization | None:
        """How the activations of a quantized module are; None if they stay as they are.

        Raises:
            UsageError: in a way that is not known here.
        """
        number = self._number(module)
        return None if number is None else read_activation_quantization(self.inputs[number])

    def names(self, module: str) -> Format | None:
        """The Format of the group that names a module; None if groups name its class only, or nothing of it."""
        number = self._named(module)
        return None if number is None else self.groups[number][1]

    def _number(self, module: str) -> int | None:
        named = self._named(module)
        return self._by_name.get("Linear") if named is None else named

    def _named(self, module: str) -> int | None:
        named = self._by_name.get(module)
        return self._by_name.get(self.expressions.find(module) or "") if named is None else named

    @cached_property
    def _by_name(self) -> dict[str, int]:
        # The first group of several that have a target counts.
        numbered = reversed(tuple(enumerate(self.groups)))
        return {target: number for number, (targets, _) in numbered for target in targets}


def read_quantization(config: dict[str, Any]) -> Quantization:
    """Read the quantization_config of a config.json.

    Raises:
        UsageError: there is none, or it is of a kind that is not known here.
    """
    found = find_quantization(config)
    if found is None and quantization_places(config):
        raise UsageError("config.json has a quantization_config that is no JSON object", MEND)
    if found is None:
        raise UsageError("config.json has no quantization_config", "give a directory of quantized weights")
    method = str(found.get("quant_method"))
    if method not in _READERS:
        known = f"{', '.join(list(_READERS)[:-1])} and {list(_READERS)[-1]}"
        raise UsageError(
            f"config.json has the quant_method {json.dumps(found.get('quant_method'))}", f"known are {known}"
        )
    return _READERS[method](method, found)


def find_quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, by whichever name and at whichever place engines find it."""
    for place, key in quantization_places(config):
        if isinstance(place[key], dict):
            return dict(place[key])
    return None


def quantization_places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every dictionary and key of a config.json that holds a quantization_config."""
    text = config.get("text_config")
    return [
        (place, key)
        for place in (config, text if isinstance(text, dict) else {})
        for key in ("quantization_config", "compression_config")
        if place.get(key) is not None
    ]


def _read_fp8(method: str, found: dict[str, Any]) -> Quantization:
    problems = []
    activations = found.get("activation_scheme")
    if activations not in ("static", "dynamic"):
        problems.append(f"config.json: activation_scheme is {json.dumps(activations)}, neither dynamic nor static")
    size = found.get("weight_block_size")
    block = None
    if size is not None:
        if not _is_block(size):
            raise UsageError(
                f"config.json has the weight_block_size {json.dumps(size)}",
                f"it must be two numbers from 1 to {MAX_SIDE}",
            )
        block = size[0], size[1]
    fmt = BLOCK.format if block else TENSOR.format
    scale = replace(fmt.scale, power_of_two=found.get("scale_fmt") == "ue8m0")
    fmt = replace(fmt, group=block or fmt.group, scale=scale, static=activations == "static")
    lists = {key: _names(found, key) for key in IGNORE_KEYS[:2]}
    # vLLM falls back to the second where the first is missing or empty.
    key = next((key for key in lists if lists[key]), IGNORE_KEYS[0])
    if all(lists.values()):
        for one, other in (IGNORE_KEYS[:2], IGNORE_KEYS[1::-1]):
            names = set(lists[other])
            problems += [
                f"config.json: {one} lists {name}, {other} does not" for name in lists[one] if name not in names
            ]
    ignored = Ignored(key, lists[key], by_experts=True)
    # vLLM takes groups as wide as a block has rows, and with CUTLASS one scale for each token instead of one for
    # all (layers/quantization/fp8.py:262-282), which is the finer.
    inputs = {**_FP8, "strategy": "group", "group_size": block[0]} if block else {**_FP8, "strategy": "tensor"}
    inputs |= {"dynamic": not fmt.static, "ue8m0": scale.power_of_two}
    return Quantization(method, _all_of(fmt), (inputs,), Expressions(()), ignored, _settings(found), tuple(problems))


def _read_compressed_tensors(method: str, found: dict[str, Any]) -> Quantization:
    rotated, sparse = found.get("transform_config"), found.get("sparsity_config")
    if rotated and (not isinstance(rotated, dict) or rotated.get("config_groups")):
        raise UsageError("config.json has a transform_config: the weights are stored rotated", _KNOWN_GROUPS)
    if sparse and (not isinstance(sparse, dict) or sparse.get("format") not in (None, "dense")):
        raise UsageError("config.json has a sparsity_config: zeros are not stored", _KNOWN_GROUPS)
    groups, inputs = [], []
    config_groups = found.get("config_groups")
    for name, group in (config_groups if isinstance(config_groups, dict) else {}).items():
        parts = [group.get(key) or {} for key in ("weights", "input_activations")] if isinstance(group, dict) else []
        if not parts or not all(isinstance(part, dict) for part in parts):
            raise UsageError(f"config.json: {name} is not a config group", MEND)
        weights, activations = parts
        stored = group.get("format") or found.get("format")
        groups.append((tuple(_names(group, "targets")), _read_group(name, weights, stored, activations)))
        inputs.append(activations or None)
    if not groups and (config_groups or not found.get("kv_cache_scheme")):
        raise UsageError("config.json has no config_groups", _KNOWN_GROUPS)
    ignored = Ignored("ignore", _names(found, "ignore"), by_experts=False)
    expressions = Expressions(target for targets, _ in groups for target in targets)
    return Quantization(method, tuple(groups), tuple(inputs), expressions, ignored, _settings(found), ())


_KNOWN_GROUPS = (
    "known are FP8 weights by tensor, channel or block, MXFP8, MXFP4, NVFP4, symmetric int8 and int4 weights by "
    "tensor, channel or group, and asymmetric ones in words by channel or group"
)
# Integers, whatever shares a scale, by type, bits and the format that holds them; None for any other one.
_INTEGERS: tuple[tuple[tuple[object, ...], Format], ...] = (
    (("int", 4, None), INT4_W4A16.format),
    (("int", 8, INT8_W8A16.settings["format"]), INT8_W8A16.format),
    (("int", 8, None), INT8_W8A8.format),
)


def _read_group(name: str, weights: dict[str, Any], stored: object, activations: dict[str, Any]) -> Format:
    """The weights of one config group, which are stored in a format such as "int-quantized"."""
    static = bool(activations) and not activations.get("dynamic")
    strategy, kind = weights.get("strategy"), (weights.get("type"), weights.get("num_bits"))
    size, in_bytes = weights.get("group_size"), str(weights.get("scale_dtype")).endswith("uint8")
    shifted = not weights.get("symmetric", True)
    if kind == ("float", 8) and strategy in ("tensor", "channel") and not shifted:
        return replace((TENSOR_COMPRESSED if strategy == "tensor" else CHANNEL).format, static=static)
    if kind == ("float", 8) and strategy == "block" and not shifted:
        block = weights.get("block_structure")
        if not _is_block(block):
            raise UsageError(f"config.json: {name} has no block_structure of two numbers from 1 to {MAX_SIDE}", MEND)
        return replace(BLOCK_COMPRESSED.format, group=(block[0], block[1]), static=static)
    if strategy == "group" and size == MX_GROUP and in_bytes and kind in (("float", 8), ("float", 4)):
        return replace((MXFP8 if kind[1] == 8 else MXFP4).format, static=static)
    if strategy == "tensor_group" and size == NVFP4.format.group[1] and kind == ("float", 4):
        return (NVFP4_W4A4 if activations.get("dynamic") == "local" else NVFP4).format
    forms = [fmt for key, fmt in _INTEGERS if key in ((*kind, stored), (*kind, None))]
    # Zero points are stored beside words only.
    if forms and (not shifted or (forms[0].number.per_item > 1 and strategy != "tensor")):
        # Rows of whole words, whose length the packed tensor tells.
        whole = isinstance(size, int) and 0 < size <= MAX_SIDE and size % forms[0].number.per_item == 0
        groups: list[tuple[str, Group]] = [("channel", (1, None)), ("tensor", (None, None))]
        groups += [("group", (1, size))] if whole else []
        found = [group for known, group in groups if known == strategy]
        if found:
            return replace(forms[0], group=found[0], static=static, zero_point=ZERO_POINT if shifted else None)
    raise UsageError(
        f"config.json: {name} stores {'asymmetric ' if shifted else ''}{kind[0]}{kind[1]} weights by {strategy}",
        _KNOWN_GROUPS,
    )


# Its multiplier is what others divide by, one over that (vLLM layers/quantization/modelopt.py).
_MODELOPT_FP4 = replace(NVFP4.format, codes="weight", global_scale=GlobalScale("weight_scale_2", 0, divides=False))
# What weights and activations are stored as, by quant_algo (vLLM layers/quantization/modelopt.py).
_MODELOPT: dict[str, tuple[Format, Mapping[str, Any] | None]] = {
    "FP8": (replace(TENSOR.format, static=True), {**_FP8, "strategy": "tensor", "dynamic": False}),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL.format, CHANNEL.group["input_activations"]),
    "FP8_PB_WO": (BLOCK_COMPRESSED.format, BLOCK_COMPRESSED.group["input_activations"]),
    "MXFP8": (MXFP8.format, MXFP8.group["input_activations"]),
    "NVFP4": (
        replace(_MODELOPT_FP4, input_global_scale=GlobalScale(INPUT_SCALE, 0, divides=False)),
        NVFP4_W4A4.group["input_activations"],
    ),
    "W4A16_NVFP4": (_MODELOPT_FP4, None),
}


def _read_modelopt(method: str, found: dict[str, Any]) -> Quantization:
    # hf_quant_config.json has one level more.
    inner = found.get("quantization")
    found = inner if isinstance(inner, dict) else found
    algorithm = str(found.get("quant_algo", "")).upper()
    if algorithm not in _MODELOPT:
        raise UsageError(
            f"config.json has the quant_algo {json.dumps(found.get('quant_algo'))}", f"known are {', '.join(_MODELOPT)}"
        )
    fmt, inputs = _MODELOPT[algorithm]
    if fmt.global_scale is not None and found.get("group_size", fmt.group[1]) != fmt.group[1]:
        raise UsageError(
            f"config.json has NVFP4 with the group_size {json.dumps(found.get('group_size'))}", "known is 16"
        )
    return _alone(method, found, fmt, inputs)


def _read_mxfp4(method: str, found: dict[str, Any]) -> Quantization:
    scale = replace(MXFP4.format.scale, name="weight_scales")
    return _alone(method, found, replace(MXFP4.format, scale=scale, codes="weight"), None)


def _read_mxfp8(method: str, found: dict[str, Any]) -> Quantization:
    # As MiniMax M3 has it (vLLM layers/quantization/modelopt.py:1215, models/minimax_m3/nvidia/model.py:975).
    scale = replace(MXFP8.format.scale, name="weight_scale_inv")
    return _alone(method, found, replace(MXFP8.format, scale=scale), MXFP8.group["input_activations"])


def _read_awq(method: str, found: dict[str, Any]) -> Quantization:
    key = IGNORE_KEYS[1]
    return replace(_alone(method, found, read_awq(found), None), ignored=IgnoredParts(key, _names(found, key)))


def _alone(method: str, found: dict[str, Any], fmt: Format, inputs: Mapping[str, Any] | None) -> Quantization:
    """What stores all that it stores in one way; which modules it leaves out is not read, they show it themselves."""
    ignored = Ignored("ignore", (), by_experts=False)
    return Quantization(method, _all_of(fmt), (inputs,), Expressions(()), ignored, _settings(found), ())


def _all_of(fmt: Format) -> tuple[tuple[tuple[str, ...], Format], ...]:
    """The only group of a config: all layers are alike."""
    return ((("Linear",), fmt),)


_READERS: dict[str, Callable[[str, dict[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "modelopt_mxfp8": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "mxfp8": _read_mxfp8,
    "awq": _read_awq,
    "gptq": lambda method, found: _alone(method, found, read_gptq(found), None),
}


def _is_block(size: object) -> TypeGuard[list[int]]:
    return (
        isinstance(size, list) and len(size) == 2 and all(type(side) is int and 0 < side <= MAX_SIDE for side in size)
    )


def _names(found: dict[str, Any], key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"config.json: {key} is not a list of names", MEND)
    return names


def _settings(found: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key in IGNORE_KEYS else value for key, value in found.items()}

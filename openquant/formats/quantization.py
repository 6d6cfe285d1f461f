"""What a quantization_config promises of the tensors beside it, whichever tool wrote it.

`fp8` is read as vLLM 0.32.0 reads it (layers/quantization/fp8.py:106-168), `compressed-tensors` likewise
(layers/quantization/compressed_tensors/compressed_tensors.py:581-616 and the package's own 0.20), `modelopt` from its
layers/quantization/modelopt.py:319-430, `mxfp4` from transformers 5.23 integrations/mxfp4.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from ..errors import UsageError
from .ignored import MEND, Expressions, Ignored
from .schemes import CODE_DTYPE, Group

FP4, INT4 = "FP4", "INT4"
# What shares a scale in the MX formats (OCP Microscaling Formats 1.0, 5.2).
MX_GROUP = 32
# What scales that are no bare exponents may be stored as.
FLOATS = ("F32", "BF16", "F16")
# The largest block that is read: a common layer has no more rows or columns.
MAX_SIDE = 1 << 16
IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore")


@dataclass(frozen=True)
class Format:
    """How the layers of one group are stored.

    Attributes:
        strategy: what shares a scale: "tensor", "channel" or "block".
        block: rows and columns of a block; None for the other strategies.
        suffix: what the scale's name adds to the weight's.
        static: whether each layer also has an input_scale.
        number: what the codes are: CODE_DTYPE, FP4 (e2m1) or INT4 (from -8, two in a byte as FP4).
        power_of_two: whether scales are exponents in a byte, or float32 powers of two.
    """

    strategy: str
    block: tuple[int, int] | None
    suffix: str
    static: bool
    number: str = CODE_DTYPE
    power_of_two: bool = False

    @property
    def title(self) -> str:
        """In words."""
        if self.block is not None:
            return f"one scale per {self.block[0]}x{self.block[1]} block"
        return f"one scale per {self.strategy}"

    @property
    def group(self) -> Group:
        """Rows and columns that share a scale."""
        return self.block or ((1, None) if self.strategy == "channel" else (None, None))

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """The dtypes that scales may have."""
        exponents = ("U8", "F8_E8M0")
        if self.block == (1, MX_GROUP) and self.power_of_two:
            return exponents
        return (*FLOATS, *(exponents if self.power_of_two else ()))

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scale of a weight [..., out, in] may have."""
        *stack, rows, cols = shape
        if self.block is not None:
            # A block at the edge may be smaller.
            return ((*stack, -(-rows // self.block[0]), -(-cols // self.block[1])),)
        if self.strategy == "channel":
            return ((*stack, rows, 1),)
        # One for each expert of a stack, or for each half of gate and up side by side.
        return ((*stack, 1, 1), (*stack, 2, 1)) if stack else ((), (1,))


@dataclass(frozen=True)
class Quantization:
    """One quantization_config.

    Attributes:
        method: its quant_method.
        groups: what layers are stored as, each with the targets it applies to.
        expressions: those among the targets.
        ignored: what stays unquantized.
        settings: all of it, None in place of each list of unquantized modules.
        problems: what is wrong with it already.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Format], ...]
    expressions: Expressions
    ignored: Ignored
    settings: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def title(self) -> str:
        """In words."""
        return " and ".join(dict.fromkeys(form.title for _, form in self.groups))

    @property
    def checkable(self) -> bool:
        """Whether `verify` knows what engines make of it."""
        numbers = {form.number for _, form in self.groups}
        return self.method in ("fp8", "compressed-tensors") and numbers == {CODE_DTYPE}

    def format_of(self, module: str) -> Format | None:
        """What a quantized module is stored as; None if it is no group's target."""
        return self.names(module) or self._by_name.get("Linear")

    def names(self, module: str) -> Format | None:
        """What a module is stored as that a group's targets name; None if they only mean its class, if anything."""
        return self._by_name.get(module) or self._by_name.get(self.expressions.find(module) or "")

    @cached_property
    def _by_name(self) -> dict[str, Format]:
        # The first group of several that have a target counts.
        return {target: form for targets, form in reversed(self.groups) for target in targets}


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
    form = Format(
        "block" if block else "tensor",
        block,
        "_scale_inv" if block else "_scale",
        activations == "static",
        power_of_two=found.get("scale_fmt") == "ue8m0",
    )
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
    return Quantization(method, _all_of(form), Expressions(()), ignored, _settings(found), tuple(problems))


def _read_compressed_tensors(method: str, found: dict[str, Any]) -> Quantization:
    rotated, sparse = found.get("transform_config"), found.get("sparsity_config")
    if rotated and (not isinstance(rotated, dict) or rotated.get("config_groups")):
        raise UsageError("config.json has a transform_config: the weights are stored rotated", _KNOWN_GROUPS)
    if sparse and (not isinstance(sparse, dict) or sparse.get("format") not in (None, "dense")):
        raise UsageError("config.json has a sparsity_config: zeros are not stored", _KNOWN_GROUPS)
    groups = []
    config_groups = found.get("config_groups")
    for name, group in (config_groups if isinstance(config_groups, dict) else {}).items():
        parts = [group.get(key) or {} for key in ("weights", "input_activations")] if isinstance(group, dict) else []
        if not parts or not all(isinstance(part, dict) for part in parts):
            raise UsageError(f"config.json: {name} is not a config group", MEND)
        weights, activations = parts
        static = bool(activations) and not activations.get("dynamic")
        groups.append((tuple(_names(group, "targets")), _read_group(name, weights, static)))
    if not groups:
        raise UsageError("config.json has no config_groups", _KNOWN_GROUPS)
    ignored = Ignored("ignore", _names(found, "ignore"), by_experts=False)
    expressions = Expressions(target for targets, _ in groups for target in targets)
    return Quantization(method, tuple(groups), expressions, ignored, _settings(found), ())


_KNOWN_GROUPS = "known are FP8 weights by tensor, channel or block, MXFP8, MXFP4, and symmetric int4 weights by group"


def _read_group(name: str, weights: dict[str, Any], static: bool) -> Format:
    """The weights of one config group."""
    strategy, kind = weights.get("strategy"), (weights.get("type"), weights.get("num_bits"))
    size, in_bytes = weights.get("group_size"), str(weights.get("scale_dtype")).endswith("uint8")
    shifted = not weights.get("symmetric", True)
    if kind == ("float", 8) and strategy in ("tensor", "channel") and not shifted:
        return Format(strategy, None, "_scale", static)
    if kind == ("float", 8) and strategy == "block" and not shifted:
        block = weights.get("block_structure")
        if not _is_block(block):
            raise UsageError(f"config.json: {name} has no block_structure of two numbers from 1 to {MAX_SIDE}", MEND)
        return Format("block", (block[0], block[1]), "_scale", static)
    if strategy == "group" and size == MX_GROUP and in_bytes and kind in (("float", 8), ("float", 4)):
        number = CODE_DTYPE if kind[1] == 8 else FP4
        return Format("block", (1, MX_GROUP), "_scale", static, number, power_of_two=True)
    # Rows of whole words, whose length the packed tensor tells.
    known = kind == ("int", 4) and strategy == "group" and not shifted
    if known and isinstance(size, int) and 0 < size <= MAX_SIDE and size % 8 == 0:
        return Format("block", (1, size), "_scale", static, INT4)
    raise UsageError(
        f"config.json: {name} stores {'asymmetric ' if shifted else ''}{kind[0]}{kind[1]} weights by {strategy}",
        _KNOWN_GROUPS,
    )


_MODELOPT = {
    "FP8": Format("tensor", None, "_scale", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Format("channel", None, "_scale", static=False),
    "FP8_PB_WO": Format("block", (128, 128), "_scale", static=False),
    "MXFP8": Format("block", (1, MX_GROUP), "_scale", static=False, power_of_two=True),
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
    return _alone(method, found, _MODELOPT[algorithm])


def _read_mxfp4(method: str, found: dict[str, Any]) -> Quantization:
    return _alone(method, found, Format("block", (1, MX_GROUP), "_scales", False, FP4, power_of_two=True))


def _alone(method: str, found: dict[str, Any], form: Format) -> Quantization:
    """What stores all that it stores in one way; which modules it leaves out is not read, they show it themselves."""
    ignored = Ignored("ignore", (), by_experts=False)
    return Quantization(method, _all_of(form), Expressions(()), ignored, _settings(found), ())


def _all_of(form: Format) -> tuple[tuple[tuple[str, ...], Format], ...]:
    """The only group of a config: all layers are alike."""
    return ((("Linear",), form),)


_READERS: dict[str, Callable[[str, dict[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "modelopt_mxfp8": _read_modelopt,
    "mxfp4": _read_mxfp4,
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

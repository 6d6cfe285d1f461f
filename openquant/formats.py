"""What a quantization_config promises of the tensors beside it, whichever tool wrote it.

Two methods are read: `fp8` as vLLM 0.32.0 reads it (layers/quantization/fp8.py:106-168) and float-quantized
`compressed-tensors` (layers/quantization/compressed_tensors/compressed_tensors.py:581-616).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .errors import UsageError

_MEND = "mend quantization_config, or save the model again"
IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore")


@dataclass(frozen=True)
class Format:
    """How the layers of one group are stored.

    Attributes:
        strategy: what shares a scale: "tensor", "channel" or "block".
        block: rows and columns of a block; None for the other strategies.
        suffix: what the scale's name adds to the weight's.
        static: whether each layer also has an input_scale.
    """

    strategy: str
    block: tuple[int, int] | None
    suffix: str
    static: bool

    @property
    def title(self) -> str:
        """In words."""
        if self.block is not None:
            return f"one scale per {self.block[0]}x{self.block[1]} block"
        return f"one scale per {self.strategy}"

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


class Ignored:
    """The list of unquantized modules, matched as the engine matches it.

    Args:
        key: what the list is called.
        entries: module names; for compressed-tensors also `re:` and a regular expression.
        by_experts: one listed expert leaves all experts of its layer unquantized
            (vLLM 0.32.0 layers/quantization/utils/quant_utils.py:682-686).
    """

    def __init__(self, key: str, entries: Iterable[str], by_experts: bool) -> None:
        self.key = key
        self.entries = tuple(entries)
        self._exact = {entry: entry for entry in self.entries}
        self._patterns = [] if by_experts else _patterns(self.entries)
        self._experts = (
            {_experts_of(entry): entry for entry in self.entries if _experts_of(entry)} if by_experts else {}
        )

    def find(self, names: Iterable[str]) -> str | None:
        """The entry that covers a module, given the names it goes by; None if none does."""
        for name in names:
            found = self._exact.get(name) or self._experts.get(_experts_of(name))
            if found is None:
                found = next((entry for entry, pattern in self._patterns if pattern.match(name)), None)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class Quantization:
    """One quantization_config.

    Attributes:
        method: its quant_method.
        groups: what layers are stored as, each with the targets it applies to.
        ignored: what stays unquantized.
        settings: all of it, None in place of each list of unquantized modules.
        problems: what is wrong with it already.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Format], ...]
    ignored: Ignored
    settings: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def title(self) -> str:
        """In words."""
        return " and ".join(dict.fromkeys(form.title for _, form in self.groups))

    def format_of(self, module: str) -> Format | None:
        """What a quantized module is stored as; None if it is no group's target."""
        for targets, form in self.groups:
            if module in targets or any(pattern.match(module) for _, pattern in _patterns(targets)):
                return form
        return next((form for targets, form in self.groups if "Linear" in targets), None)


def read_quantization(config: dict[str, Any]) -> Quantization:
    """Read the quantization_config of a config.json.

    Raises:
        UsageError: there is none, or it is of a kind that is not known here.
    """
    found = _find(config)
    method = found.get("quant_method")
    if method == "fp8":
        return _read_fp8(method, found)
    if method == "compressed-tensors":
        return _read_compressed_tensors(method, found)
    raise UsageError(
        f"config.json has the quant_method {json.dumps(method)}",
        "known are fp8 and compressed-tensors with FP8 weights",
    )


def _find(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place.get(key), dict):
                return dict(place[key])
    raise UsageError("config.json has no quantization_config", "give a directory of quantized weights")


def _read_fp8(method: str, found: dict[str, Any]) -> Quantization:
    problems = []
    activations = found.get("activation_scheme")
    if activations not in ("static", "dynamic"):
        problems.append(f"config.json: activation_scheme is {json.dumps(activations)}, neither dynamic nor static")
    size = found.get("weight_block_size")
    block = None
    if size is not None:
        if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
            raise UsageError(f"config.json has the weight_block_size {json.dumps(size)}", "it must be two numbers")
        block = size[0], size[1]
    form = Format("block" if block else "tensor", block, "_scale_inv" if block else "_scale", activations == "static")
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
    return Quantization(method, ((("Linear",), form),), ignored, _settings(found), tuple(problems))


def _read_compressed_tensors(method: str, found: dict[str, Any]) -> Quantization:
    groups = []
    config_groups = found.get("config_groups")
    for name, group in (config_groups if isinstance(config_groups, dict) else {}).items():
        parts = [group.get(key) or {} for key in ("weights", "input_activations")] if isinstance(group, dict) else []
        if not parts or not all(isinstance(part, dict) for part in parts):
            raise UsageError(f"config.json: {name} is not a config group", _MEND)
        weights, activations = parts
        strategy, kind = weights.get("strategy"), (weights.get("type"), weights.get("num_bits"))
        if kind != ("float", 8) or strategy not in ("tensor", "channel", "block"):
            raise UsageError(
                f"config.json: {name} stores {kind[0]}{kind[1]} weights by {strategy}",
                "only FP8 weights by tensor, channel or block are known",
            )
        block = tuple(weights.get("block_structure") or ()) if strategy == "block" else None
        if block is not None and len(block) != 2:
            raise UsageError(f"config.json: {name} has no block_structure of two numbers", _MEND)
        static = bool(activations) and not activations.get("dynamic")
        groups.append((tuple(group.get("targets") or ()), Format(strategy, block, "_scale", static)))
    if not groups:
        raise UsageError("config.json has no config_groups", "only FP8 weights by tensor, channel or block are known")
    ignored = Ignored("ignore", _names(found, "ignore"), by_experts=False)
    return Quantization(method, tuple(groups), ignored, _settings(found), ())


def _names(found: dict[str, Any], key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"config.json: {key} is not a list of names", _MEND)
    return names


def _settings(found: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key in IGNORE_KEYS else value for key, value in found.items()}


@cache
def _patterns(entries: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """The regular expressions among entries; they match from the start."""
    try:
        return [(entry, re.compile(entry[3:])) for entry in entries if entry.startswith("re:")]
    except re.error as error:
        raise UsageError(f"config.json: {error.pattern!r} is no regular expression: {error}", _MEND) from None


def _experts_of(name: str) -> str:
    """The path of the routed experts that a name lies in; empty if it does not."""
    path, found, _ = f"{name}.".partition(".experts.")
    return f"{path}.experts" if found else ""

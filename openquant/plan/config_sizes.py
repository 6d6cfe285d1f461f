"""What config.json says of a class's tensors: which of them are there, and how large they are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..files.small_files import short_repr
from ..registry.class_tensors import ANY, ClassTensors

_KEY = re.compile(r"[A-Za-z_][\w.]*")
_BY_LAYER = re.compile(r"(.*?)([@<%]?)(\d?)")
_TIED = "tie_word_embeddings"


class ConfigSizes:
    """config.json as it decides about tensors.

    Args:
        config: its contents.
        text: the language model's part of it, as text_config returns it.
        text_path: where that part is in config.json, such as "text_config"; empty for the top level.
        known: what the class says of keys that are missing.
    """

    def __init__(self, config: Mapping[str, Any], text: Mapping[str, Any], text_path: str, known: ClassTensors) -> None:
        self._config, self._text, self._text_path, self._known = config, text, text_path, known
        self._sizes: dict[str, frozenset[int] | None] = {}

    def value(self, key: str) -> Any:
        """Return the value of a key, nested ones joined by dots; None if config.json does not say it."""
        value = self._said(key)
        if value is None and key in self._known.aliases:
            value = self._said(self._known.aliases[key])
        return value

    def _said(self, key: str) -> Any:
        value: Any = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None and key.startswith(self._text_path):
            # Older files have the language model's keys at the top level, or under other names.
            value = self._text.get(key.removeprefix(self._text_path).removeprefix("."))
        return value

    def holds(self, conditions: Iterable[tuple[str, bool]]) -> bool:
        """Whether conditions of a rule are met."""
        return all(self._truth(key) == truth for key, truth in conditions)

    def _truth(self, key: str) -> bool:
        if key.endswith(_TIED):
            said = {bool(part[_TIED]) for part in (self._config, self._text) if part.get(_TIED) is not None}
            return any(said) if said else self._known.defaults.get(key, False)
        value = self.value(key)
        # JSON's null is said, and false.
        return self._known.defaults.get(key, False) if value is None and not self._has_key(key) else bool(value)

    def _has_key(self, key: str) -> bool:
        """Whether config.json has the key, whatever its value."""
        parent, _, last = key.rpartition(".")
        part: Any = self._config
        for name in parent.split(".") if parent else ():
            part = part.get(name) if isinstance(part, Mapping) else None
        return isinstance(part, Mapping) and last in part

    def by_layer(self, key: str, length: int) -> list[str] | None:
        """Return what a key says of each layer, as LayerList.choices has keys; None if config.json does not say it."""
        path, kind, first = _BY_LAYER.fullmatch(key).groups()  # type: ignore[union-attr]
        said = self.value(path)
        if kind == "@" and isinstance(said, list):
            return [str(number + int(first) in said) for number in range(length)]
        if not kind and isinstance(said, (list, str)) and len(said) >= length:
            return list(map(str, said[:length]))
        count = max(self.size(path) or (0,)) if kind in ("<", "%") else 0
        if not count:
            return None
        return [str(number < count if kind == "<" else number % count == 0) for number in range(length)]

    def size(self, expression: str) -> frozenset[int] | None:
        """Return the numbers that a size may be; None if config.json does not say it."""
        if expression not in self._sizes:
            self._sizes[expression] = self._evaluate(expression)
        return self._sizes[expression]

    def _evaluate(self, expression: str) -> frozenset[int] | None:
        if expression.startswith(("?", ANY)):
            return None
        # A key may have a list with a number for each layer.
        choices: dict[str, list[int | float]] = {}
        for key in _KEY.findall(expression):
            value = self.value(key)
            if value is None and key in self._known.derived:
                value = sorted(self.size(self._known.derived[key]) or ())
            numbers = value if isinstance(value, list) else [value]
            if not numbers or not all(map(_is_size, numbers)):
                return None
            choices[key] = list(dict.fromkeys(numbers))

        sizes = (
            _calculate(expression, dict(zip(choices, numbers, strict=True)))
            for numbers in itertools.product(*choices.values())
        )
        return frozenset(size for size in sizes if size is not None) or None

    def describe(self, expression: str) -> str:
        """Say what config.json says of a size: "num_attention_heads is 16 and head_dim is 128"."""
        keys: dict[str, None] = {}
        for key in _KEY.findall(expression):
            is_derived = self.value(key) is None and key in self._known.derived
            keys |= dict.fromkeys(_KEY.findall(self._known.derived[key]) if is_derived else [key])
        return (
            " and ".join(f"{key} is {short_repr(self.value(key))}" for key in keys)
            or f"it is {expression} in the class"
        )


def _is_size(value: object) -> bool:
    return (type(value) is int and value >= 0) or (type(value) is float and 0 <= value < math.inf)


def _calculate(expression: str, numbers: Mapping[str, int | float]) -> int | None:
    """Calculate a sum of products; None if it is no whole number."""
    total = 0
    for term in expression.split("+"):
        above, *below = term.split("/")
        product = math.prod(_factor(factor, numbers) for factor in above.split("*"))
        divisor = math.prod(_factor(factor, numbers) for factor in below)
        if not divisor or product % divisor:
            return None
        total += int(product // divisor)
    return total


def _factor(factor: str, numbers: Mapping[str, int | float]) -> int | float:
    return numbers[factor] if factor in numbers else int(factor)

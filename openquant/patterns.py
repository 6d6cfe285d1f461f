"""Glob patterns over module names: `*` is one path segment, `**` a subtree, `{q,k,v}` alternatives.

Ignore lists of config.json are names and regular expressions instead, and are matched as engines match them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeVar

from .errors import UsageError

Key = TypeVar("Key")
Value = TypeVar("Value")

_TOKEN = re.compile(r"\*\*|\*|\{([^{}]*)\}|[^*{}]+|.", re.DOTALL)


def translate(pattern: str) -> str:
    """Translate a pattern to a regular expression.

    Args:
        pattern: a pattern of module names: "model.layers.*.self_attn.{q,k,v}_proj".

    Returns:
        A regular expression for `fullmatch`, in which each `*` and `**` is a capturing group, alternatives are not.

    Raises:
        UsageError: the pattern is empty, has an unmatched brace, or more than two stars in a row.
    """
    if not pattern:
        raise UsageError("an empty pattern matches nothing", "use a module name such as model.layers.0.**")
    if "***" in pattern:
        # Backtracking over many stars takes exponential time.
        raise UsageError(
            f"the pattern {pattern} has more than two stars in a row", "* is one part of a name, ** a subtree"
        )

    parts: list[str] = []
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        if text == "**":
            parts.append("(.+)")
        elif text == "*":
            parts.append(r"([^.]+)")
        elif token.group(1) is not None:
            parts.append("(?:" + "|".join(re.escape(choice) for choice in token.group(1).split(",")) + ")")
        elif text in "{}":
            raise UsageError(f"the pattern {pattern} has an unmatched brace", "write alternatives as {q,k,v}_proj")
        else:
            parts.append(re.escape(text))

    # "a.**" matches a itself too, and "**.a" matches a at the top too.
    expression = "".join(parts)
    if expression.endswith(r"\.(.+)"):
        expression = expression.removesuffix(r"\.(.+)") + r"(?:\.(.+))?"
    if expression.startswith(r"(.+)\."):
        expression = r"(?:(.+)\.)?" + expression.removeprefix(r"(.+)\.")
    return expression


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of module names, such as "model.layers.*.self_attn.{q,k,v}_proj".

    Returns:
        A regular expression for `fullmatch`; each `*` and `**` is a group.

    Raises:
        UsageError: the pattern is malformed.
    """
    return re.compile(translate(pattern))


def compile_any(patterns: Iterable[str]) -> re.Pattern[str]:
    """Compile one expression that matches what any of the patterns matches.

    Args:
        patterns: patterns of module names; without any, the expression matches nothing.

    Returns:
        A regular expression for `fullmatch`.

    Raises:
        UsageError: a pattern is malformed.
    """
    return re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns) or r"(?!)")


# Longer numbers are taken as names: no model counts so far, and int() refuses thousands of digits.
MAX_DIGITS = 18
_NUMBER = re.compile(rf"(?<=\.)\d{{1,{MAX_DIGITS}}}(?=\.|$)")


def template(name: str) -> str:
    """Replace the segments of a module's or tensor's name that are numbers by `*`, so that all layers give the same.

    Args:
        name: a name: "model.layers.7.mlp.up_proj".

    Returns:
        Its name template: "model.layers.*.mlp.up_proj".
    """
    return _NUMBER.sub("*", name)


def collapse(names: Iterable[str]) -> list[str]:
    """Write names that differ in numbers only as one, with ranges.

    Args:
        names: names of modules or tensors: "model.layers.0.mlp.up_proj".

    Returns:
        One text for each name template, for people: "model.layers.{0..3}.mlp.up_proj". Names that differ in several
        numbers show the range of each. Names with leading zeros in a number stand alone.
    """
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        texts = _NUMBER.findall(name)
        numbers = [int(text) for text in texts]
        # "00" and "0" are different names that a range cannot tell apart.
        parts = tuple(_NUMBER.split(name)) if texts == list(map(str, numbers)) else (name,)
        groups.setdefault(parts, []).append(numbers if len(parts) > 1 else [])
    result = []
    for parts, rows in groups.items():
        ranges = [_ranges(sorted(set(column))) for column in zip(*rows, strict=True)]
        result.append(parts[0] + "".join(text + part for text, part in zip(ranges, parts[1:], strict=True)))
    return result


def group_pairs(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in the order in which they come first."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    return texts[0] if texts == [str(numbers[0])] else "{" + ",".join(texts) + "}"


def list_first(names: Sequence[str], most: int, rest: str = "more") -> str:
    """List the first names, and count the others: "a, b and 3 more"."""
    listed = ", ".join(names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most} {rest}"
    return listed


def join_words(words: Sequence[str], last: str) -> str:
    """List words for a message: "a, b and c".

    Args:
        words: one or more.
        last: what stands before the last of them: "and", "or".
    """
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


MEND = "mend quantization_config, or save the model again"
# Beginnings of names of a language model's modules that mean the same (vLLM layers/quantization/modelopt.py:1802-1820).
_LANGUAGE_MODELS = ("language_model.model.", "model.language_model.")


def language_model_names(name: str) -> tuple[str, ...]:
    """Return a module's name, and the other name that it has if it is in the language model of a multimodal one.

    transformers 5 calls such modules otherwise than some checkpoints do.

    Args:
        name: full name of a module, as a config has it.
    """
    for first, second in (_LANGUAGE_MODELS, _LANGUAGE_MODELS[::-1]):
        if name.startswith(first):
            return name, second + name.removeprefix(first)
    return (name,)


class Expressions:
    """The regular expressions of a list ("re:" and an expression). They match a name from its start.

    Args:
        entries: names and expressions; names are ignored.

    Raises:
        UsageError: an entry is no valid regular expression.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._expressions = {entry: _compile(entry) for entry in entries if entry.startswith("re:")}

    def find(self, name: str) -> str | None:
        """Return the first entry that matches a name; None if none does."""
        return next((entry for entry, expression in self._expressions.items() if expression.match(name)), None)


def _compile(entry: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            # Python warns of expressions that other releases of it may read otherwise.
            warnings.simplefilter("ignore")
            return re.compile(entry.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        shown = entry if len(entry) <= 80 else f"{entry[:80]}..."
        raise UsageError(f"config.json: {shown!r} is no regular expression: {error}", MEND) from None


class Ignored:
    """An ignore list: the modules that a config names as not quantized.

    Args:
        key: the list's key in the config, such as "ignore".
        entries: module names; for compressed-tensors also "re:" and a regular expression.
        by_experts: whether one listed expert leaves all experts of its layer unquantized
            (vLLM layers/quantization/utils/quant_utils.py:682-686). Regular expressions are not read then.

    Raises:
        UsageError: a regular expression is invalid.
    """

    def __init__(self, key: str, entries: Iterable[str], by_experts: bool) -> None:
        self.key = key
        self.entries = tuple(entries)
        self._exact = {entry: entry for entry in self.entries}
        self._expressions = Expressions(() if by_experts else self.entries)
        self._experts: dict[str, str] = {}
        if by_experts:
            self._experts = {_experts_of(entry): entry for entry in self.entries if _experts_of(entry)}

    def find(self, names: Iterable[str]) -> str | None:
        """Return the entry that covers a module; None if none does.

        Args:
            names: all names by which engines look the module up.
        """
        for name in names:
            entry = self._exact.get(name) or self._experts.get(_experts_of(name)) or self._expressions.find(name)
            if entry is not None:
                return entry
        return None


class IgnoredParts(Ignored):
    """AutoAWQ's ignore list, whose entries match any part of a name (vLLM layers/quantization/auto_awq.py:294-299).

    Args:
        key: the list's key in the config.
        entries: parts of module names.
    """

    def __init__(self, key: str, entries: Iterable[str]) -> None:
        super().__init__(key, entries, by_experts=True)

    def find(self, names: Iterable[str]) -> str | None:
        """Return the entry that covers a module; None if none does.

        Args:
            names: all names by which engines look the module up.
        """
        lookup_names = tuple(names)
        return next((entry for entry in self.entries if any(entry in name for name in lookup_names)), None)


def _experts_of(name: str) -> str:
    """Return the path of the routed experts to which a module belongs; "" if it is in none."""
    path, separator, _ = f"{name}.".partition(".experts.")
    if not separator:
        return ""
    return f"{path}.experts"

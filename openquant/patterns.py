"""Glob patterns over module names: `*` is one path segment, `**` a subtree, `{q,k,v}` alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from .errors import UsageError

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


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    return texts[0] if texts == [str(numbers[0])] else "{" + ",".join(texts) + "}"

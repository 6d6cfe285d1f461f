"""Glob patterns over module names: `*` is one path segment, `**` a subtree, `{q,k,v}` alternatives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from .errors import UsageError

_TOKEN = re.compile(r"\*\*|\*|\{([^{}]*)\}|[^*{}]+|.", re.DOTALL)


def translate(pattern: str) -> str:
    """The regular expression of a pattern; each `*` and `**` is a capturing group, alternatives are not.

    Raises:
        UsageError: an empty pattern, a brace without its partner, or more than two stars in a row.
    """
    if not pattern:
        raise UsageError("an empty pattern matches nothing", "use a module name such as model.layers.0.**")
    if "***" in pattern:
        # To try every way of sharing a name among many stars takes for ever.
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
    # "a.**" is the subtree of a, a itself included; "**.a" is a anywhere, at the top included.
    fused = "".join(parts)
    if fused.endswith(r"\.(.+)"):
        fused = fused.removesuffix(r"\.(.+)") + r"(?:\.(.+))?"
    if fused.startswith(r"(.+)\."):
        fused = r"(?:(.+)\.)?" + fused.removeprefix(r"(.+)\.")
    return fused


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled form of one pattern; use with `fullmatch`."""
    return re.compile(translate(pattern))


def compile_any(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression that matches what any of the patterns matches."""
    return re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns) or r"(?!)")


# Longer numbers are names: nobody counts so far, and Python converts none of thousands of digits.
MAX_DIGITS = 18
_NUMBER = re.compile(rf"(?<=\.)\d{{1,{MAX_DIGITS}}}(?=\.|$)")


def template(name: str) -> str:
    """A name with `*` for its numbers, the same for the same tensor of all layers: "model.layers.*.mlp.up_proj"."""
    return _NUMBER.sub("*", name)


def collapse(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers only as one, with ranges: `model.layers.{0..3}.mlp.up_proj`.

    A template's names that differ in several numbers show the range of each.
    """
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        texts = _NUMBER.findall(name)
        numbers = [int(text) for text in texts]
        # "00" and "0" are different names, of which a range would say the same.
        parts = tuple(_NUMBER.split(name)) if texts == list(map(str, numbers)) else (name,)
        groups.setdefault(parts, []).append(numbers if len(parts) > 1 else [])
    result = []
    for parts, found in groups.items():
        ranges = [_ranges(sorted(set(column))) for column in zip(*found, strict=True)]
        result.append(parts[0] + "".join(text + part for text, part in zip(ranges, parts[1:], strict=True)))
    return result


def patterns_of(names: Iterable[str]) -> list[str]:
    """Patterns that match names of one template and no others of it: ["model.layers.{0,3}.mlp.up_proj"].

    Names that differ in several numbers have a pattern for all that are alike in all but the first.
    """
    groups: dict[tuple[str, ...], dict[str, None]] = {}
    for name in names:
        found = _NUMBER.search(name)
        if found is None:
            groups.setdefault((name,), {})
        else:
            groups.setdefault((name[: found.start()], name[found.end() :]), {})[found.group()] = None
    return [
        parts[0] if not numbers
        else f"{parts[0]}{next(iter(numbers)) if len(numbers) == 1 else '{' + ','.join(numbers) + '}'}{parts[1]}"
        for parts, numbers in groups.items()
    ]  # fmt: skip


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    return texts[0] if texts == [str(numbers[0])] else "{" + ",".join(texts) + "}"

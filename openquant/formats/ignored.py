"""Lists of module names in a `quantization_config`, matched as engines match them."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable
from math import prod

from ..errors import UsageError

# Whether a name matches, within so many seconds or a TimeoutError.
_Matcher = Callable[[str, float], bool]
# Of regular expressions in a list: how many, letters of each, and seconds for all names together. Counted repeats may
# be unrolled as they are compiled, so what they come to is bounded too.
MAX_EXPRESSIONS, MAX_LETTERS, MAX_SECONDS, MAX_REPEATS = 1000, 1000, 5.0, 1000
MEND = "mend quantization_config, or save the model again"


class Expressions:
    """The regular expressions among some entries (`re:` and an expression), which match a name from its start.

    Whoever wrote a config may have chosen one that backtracks for ever: compiling and matching have a budget of time.

    Args:
        entries: names and expressions.

    Raises:
        UsageError: one is no regular expression, or there is too much of them.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._left = MAX_SECONDS
        self._matchers: dict[str, _Matcher] = {}
        for entry in entries:
            if entry.startswith("re:") and entry not in self._matchers:
                begin = time.thread_time()
                self._matchers[entry] = _compile(entry)
                self._spend(begin)
        if len(self._matchers) > MAX_EXPRESSIONS:
            raise UsageError(f"config.json has {len(self._matchers)} regular expressions in one list", _TOO_MUCH)

    def find(self, name: str) -> str | None:
        """The first entry that matches a name; None if none does.

        Raises:
            UsageError: that takes too long.
        """
        found, begin = None, time.thread_time()
        for entry, matches in self._matchers.items():
            try:
                if matches(name, self._left):
                    found = entry
                    break
            except TimeoutError:
                raise UsageError(f"config.json: {_shown(entry)} takes too long to match", _TOO_MUCH) from None
        self._spend(begin)
        return found

    def _spend(self, begin: float) -> None:
        self._left -= time.thread_time() - begin
        if self._left <= 0:
            raise UsageError("config.json: its regular expressions take too long to match", _TOO_MUCH)


def _compile(entry: str) -> _Matcher:
    """A compiled expression: of the package `regex`, which can be told to give up, where that may backtrack long."""
    text = entry[3:]
    counts = [max(1, *(int(number or 1) for number in found)) for found in re.findall(r"{(\d*),?(\d*)}", text)]
    if len(text) > MAX_LETTERS or prod(counts) > MAX_REPEATS:
        raise UsageError(f"config.json: {_shown(entry)} is too large a regular expression", _TOO_MUCH)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What engines match with; `regex` takes what it does not.
            compiled = re.compile(text)
            # Two repeated characters and one group that is not repeated: as slow as the square of a name's length.
            hard = re.search(r"[{}]|\)[*+]|\(\?|\\\d", text)
            if not hard and len(re.findall(r"[*+]", text)) < 3 and text.count("?") < 3 and text.count("(") < 2:
                return lambda name, _: compiled.match(name) is not None
            # Only a few configs need it.
            import regex

            try:
                patient = regex.compile(text)
            except regex.error as error:
                raise re.error(str(error)) from None
            return lambda name, left: patient.match(name, timeout=left) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"config.json: {_shown(entry)} is no regular expression: {error}", MEND) from None


_TOO_MUCH = "list names, or fewer and simpler expressions"


def _shown(entry: str) -> str:
    """An entry of a list for a message."""
    return repr(entry if len(entry) <= 80 else f"{entry[:80]}...")


class Ignored:
    """The list of unquantized modules, matched as the engine matches it.

    Args:
        key: what the list is called.
        entries: module names; for compressed-tensors also `re:` and a regular expression.
        by_experts: one listed expert leaves all experts of its layer unquantized
            (vLLM layers/quantization/utils/quant_utils.py:682-686).
    """

    def __init__(self, key: str, entries: Iterable[str], by_experts: bool) -> None:
        self.key = key
        self.entries = tuple(entries)
        self._exact = {entry: entry for entry in self.entries}
        self._expressions = Expressions(() if by_experts else self.entries)
        self._experts = (
            {_experts_of(entry): entry for entry in self.entries if _experts_of(entry)} if by_experts else {}
        )

    def find(self, names: Iterable[str]) -> str | None:
        """The entry that covers a module, given the names it goes by; None if none does."""
        for name in names:
            found = self._exact.get(name) or self._experts.get(_experts_of(name)) or self._expressions.find(name)
            if found is not None:
                return found
        return None


class IgnoredParts(Ignored):
    """A list of parts of names, as AutoAWQ has it (vLLM layers/quantization/auto_awq.py:294-299).

    Args:
        key, entries: as for Ignored.
    """

    def __init__(self, key: str, entries: Iterable[str]) -> None:
        super().__init__(key, entries, by_experts=True)

    def find(self, names: Iterable[str]) -> str | None:
        """The entry that is part of a name that a module goes by; None if none is."""
        known = tuple(names)
        return next((entry for entry in self.entries if any(entry in name for name in known)), None)


def _experts_of(name: str) -> str:
    """The path of the routed experts that a name lies in; empty if it does not."""
    path, found, _ = f"{name}.".partition(".experts.")
    return f"{path}.experts" if found else ""

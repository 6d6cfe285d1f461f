"""A tokenizer.json tried in a process of its own, before this one loads it.

It is rules that run on every text: replacements that may multiply it, patterns that may take exponentially long. The
library that runs them has no bounds, and hears no signal meanwhile. What behaves on ordinary text, and on long runs of
one character, may still be made to fail on a text of somebody's choice; docs/evaluation.md says so.

    tried(data, "Qwen3-8B", ["Some text, 1 + 1"])     # nothing, or a SourceError
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SourceError
from .bounded import EndlessError, FailedError, ask, limit

# Seconds of a processor, and bytes: one of 262,000 tokens and 500,000 merges, 41 MB, takes 2.4 and 460 MB.
CPU, MEMORY = 20, 1 << 30
# Times that each character is repeated, and what ends it: patterns fail late.
_RUN, _END = 2000, "\x00"
# The rules of most tokenizers that work on bytes, which need no trial: none makes text longer but the last, which turns
# each byte into a character, and so may come once.
_HARMLESS = ("Sequence", "NFC", "Split", "Digits", "ByteLevel")
# Tokens of one byte of text: some replace a character by a few bytes.
_TOKENS = 16


def tried(data: bytes, where: str, texts: Sequence[str], cpu: int = CPU, memory: int = MEMORY) -> None:
    """Load a tokenizer, and have it encode and decode some texts, within bounds; not one that cannot need more.

    Args:
        data: tokenizer.json.
        where: the model, for messages.
        texts: what it is to encode, and runs of each of their characters.
        cpu: seconds of a processor that it may take.
        memory: bytes that it may take.

    Raises:
        SourceError: it takes more than it may. One that cannot be loaded at all raises nothing here.
    """
    if _harmless(data):
        return
    asked = {"json": data.decode(errors="replace"), "texts": list(texts), "cpu": cpu, "memory": memory}
    try:
        problem = ask(__name__, asked, cpu)["problem"]
    except EndlessError:
        problem = f"did not end within {cpu} seconds of processor time"
    except FailedError:
        # The library does not fail where it is given no memory: it aborts.
        problem = f"takes more than {memory >> 20} MiB of memory"
    if problem is not None:
        raise SourceError(
            f"the tokenizer of {where} {problem}",
            "tokenizer.json is damaged, or made to do that: copy it from the model it was made from",
        )


def _harmless(data: bytes) -> bool:
    """Whether no rule of a tokenizer makes text longer than a few times its size."""
    try:
        found = json.loads(data)
        parts = [found["normalizer"], found["pre_tokenizer"], found["decoder"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    kinds = [list(_kinds(part)) for part in parts]
    return all(set(each) <= {*_HARMLESS} and each.count(_HARMLESS[-1]) <= 1 for each in kinds)


def _kinds(part: object) -> Iterator[object]:
    """The types of a rule and of all in it."""
    if isinstance(part, dict):
        if "type" in part:
            yield str(part["type"])
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _kinds(inner)


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the process does: use the tokenizer, and say what is wrong with it."""
    from tokenizers import Tokenizer

    limit(asked["cpu"], asked["memory"])
    texts = asked["texts"]
    runs = [letter * _RUN + _END for letter in sorted(set("".join(texts)))]
    try:
        tokenizer = Tokenizer.from_str(asked["json"])
        for text in (*texts, *runs):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > _TOKENS * len(text.encode()):
                return {"problem": f"makes {len(ids):,} tokens of {len(text):,} characters"}
            tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        # One that fails says why when it is loaded or used; the library's panics are no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
    return {"problem": None}

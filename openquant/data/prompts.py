"""Prompts that source and output continue, side by side.

Those of a file, or a dozen of our own. A model with a chat template gets them as what a user says, any other one as the
beginning of a text:

    read(None, load(Path("Qwen3-8B")))[0].shown         # "Write a Python function that ..."
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import SourceError
from ..files.checkpoint import readable
from ..files.small_files import parse_json, read_small, short_repr
from .domains import chat_problem
from .sandbox import Message
from .tokenizer import Tokenizer

# More than these is a benchmark, which this is not.
MAX_PROMPTS = 256
MAX_TOKENS = 16_384
_MAX_FILE = 4 << 20
_LINES = "give a prompt in each line: text, or JSON with `prompt`, `messages` or `text` in a file .jsonl"

# What a user would say, and the beginning of a text that asks for the same: code, facts, reasoning, languages, prose.
BUILT_IN = (
    (
        "Write a Python function that returns the n-th Fibonacci number.",
        'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    ),
    (
        "Write a Python class for a stack with push, pop and len, with docstrings.",
        'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n',
    ),
    (
        "Fix the error in this code: for i in range(10) print(i)",
        "import os\nimport sys\n\n\ndef main(argv=None):\n    if argv is None:\n",
    ),
    (
        "Write a SQL query for the three customers with the most orders.",
        "-- The three customers with the most orders.\nSELECT customer_id,",
    ),
    ("What is the capital of Australia, and since when?", "The capital of Australia is"),
    ("Why is the sky blue? Answer in two sentences.", "The sky is blue because"),
    ("Name the planets of the solar system in their order.", "The planets of the solar system, in their order, are"),
    (
        "Translate into German: The train was late, so we took a taxi.",
        "English: The train was late, so we took a taxi.\nGerman:",
    ),
    ("Translate into Chinese: Good morning, how are you?", "English: Good morning, how are you?\nChinese:"),
    (
        "A train leaves at 14:10 and arrives at 17:45. How long does it take? Think step by step.",
        "Question: A train leaves at 14:10 and arrives at 17:45. How long does it take?\nAnswer: Step by step:",
    ),
    (
        "Anna is older than Ben, and Ben is older than Carl. Who is the youngest?",
        "Question: Anna is older than Ben, and Ben is older than Carl. Who is the youngest?\nAnswer:",
    ),
    ("Tell the beginning of a story about a lighthouse keeper.", "Once upon a time a lighthouse keeper"),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        shown: what to show of it, without what a template adds.
        ids: its tokens.
    """

    shown: str
    ids: tuple[int, ...]


class _Asked(NamedTuple):
    """A prompt before it is put into the model's form: a chat, or text as it is."""

    shown: str
    chat: Sequence[Message] | None
    where: str


def read_prompts(
    file: str | os.PathLike[str] | None, tokenizer: Tokenizer, vocabulary: int | None = None
) -> tuple[Prompt, ...]:
    """The prompts of a file, or our own.

    In a text each line is a prompt. In JSON lines each is an object with `prompt`, or with `messages` of a chat, or
    with `text`, which is continued as it is even by a model for chats.

    Args:
        file: the file; `.jsonl` says that it is JSON lines. Our own prompts if None.
        tokenizer: the model's.
        vocabulary: tokens that the model has, to hold ids against; not held against anything if None.

    Raises:
        SourceError: the file cannot be read or holds no prompts, a chat has no template, or a prompt is too long.
    """
    if file is None:
        chats = tokenizer.template is not None
        asked = [
            _said(said if chats else text, tokenizer, f"built-in prompt {number}")
            for number, (said, text) in enumerate(BUILT_IN, 1)
        ]
    else:
        asked = _of_file(Path(file), tokenizer)
    chats_at = [number for number, each in enumerate(asked) if each.chat is not None]
    rendered = dict(
        zip(
            chats_at,
            tokenizer.chats([asked[at].chat or () for at in chats_at], [asked[at].where for at in chats_at])
            if chats_at
            else (),
            strict=True,
        )
    )
    prompts = []
    for number, each in enumerate(asked):
        text = rendered.get(number)
        ids = (*tokenizer.prefix, *tokenizer.encode(each.shown)) if text is None else tuple(tokenizer.encode(text))
        if not 0 < len(ids) <= MAX_TOKENS:
            raise SourceError(f"{each.where} has {len(ids)} tokens", f"give prompts of 1 to {MAX_TOKENS:,} tokens")
        if vocabulary is not None and max(ids) >= vocabulary:
            raise SourceError(
                f"the tokenizer of {tokenizer.where} gives token {max(ids)}, the model has {vocabulary}",
                "copy the tokenizer's files from the model it was made from",
            )
        prompts.append(Prompt(each.shown, ids))
    return tuple(prompts)


def _said(text: str, tokenizer: Tokenizer, where: str) -> _Asked:
    return _Asked(text, None if tokenizer.template is None else [{"role": "user", "content": text}], where)


def _of_file(path: Path, tokenizer: Tokenizer) -> list[_Asked]:
    with readable():
        data = read_small(path, str(path), _MAX_FILE)
    found: list[_Asked] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        if len(found) == MAX_PROMPTS:
            raise SourceError(f"{path} has more than {MAX_PROMPTS} prompts", "give fewer")
        try:
            found.append(_of_line(line, path.suffix == ".jsonl", tokenizer, where))
        except UnicodeError:
            raise SourceError(f"{where} is not UTF-8", "convert it, with iconv say") from None
    if not found:
        raise SourceError(f"{path} has no prompts", _LINES)
    return found


def _of_line(line: bytes, is_json: bool, tokenizer: Tokenizer, where: str) -> _Asked:
    if not is_json:
        return _said(line.decode().rstrip("\r"), tokenizer, where)
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise SourceError(f"{where} is {short_repr(row)}, not an object", _LINES)
    prompt, messages, text = (row.get(key) for key in ("prompt", "messages", "text"))
    # Half of a surrogate pair, which JSON can hold, is no text.
    json.dumps([prompt, messages, text], ensure_ascii=False).encode()
    if messages is not None:
        problem = chat_problem(messages)
        if problem:
            raise SourceError(f"{where} has `messages` that {problem}", _LINES)
        said = [f"{message['role']}: {message.get('content', '')}" for message in messages]
        return _Asked("\n".join(said), messages, where)
    if isinstance(prompt, str):
        return _said(prompt, tokenizer, where)
    if isinstance(text, str):
        return _Asked(text, None, where)
    raise SourceError(
        f"{where} has none of `prompt`, `messages` and `text`, only {short_repr(', '.join(map(str, row)))}", _LINES
    )

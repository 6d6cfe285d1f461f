"""Reads the prompts that source and output continue side by side: those of a file, or four built-in ones.

A model with a chat template gets a prompt as a message of the user, any other model as the beginning of a text:

    read_prompts(None, load_tokenizer(Path("Qwen3-8B")))[0].text        # "Write a Python function that ..."
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
from ..files.model_files import parse_json, read_small, short_repr
from .domains import chat_problem
from .sandbox import Message
from .tokenizer import Tokenizer

# Most prompts of a file, and most tokens of a prompt.
MAX_PROMPTS = 256
MAX_TOKENS = 16_384
_MAX_FILE = 4 << 20
_LINES = "give a prompt in each line: text, or JSON with `prompt`, `messages` or `text` in a file .jsonl"

# A user's message, and the beginning of a text for the same.
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
)


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        text: the prompt as users see it, without what the chat template adds.
        ids: its token ids, with the chat template or the tokenizer's prefix.
    """

    text: str
    ids: tuple[int, ...]


class _RawPrompt(NamedTuple):
    """A prompt before the chat template is applied.

    Attributes:
        text: the prompt as users see it.
        chat: messages for the chat template; None for a text that is continued as it is.
        where: its place, for messages: "prompts.jsonl line 3".
    """

    text: str
    chat: Sequence[Message] | None
    where: str


def read_prompts(
    file: str | os.PathLike[str] | None, tokenizer: Tokenizer, vocabulary: int | None = None
) -> tuple[Prompt, ...]:
    """Read the prompts of a file, or the built-in ones.

    Each line of a text file is a prompt; empty lines are skipped. Each JSON line is an object with `prompt`, with
    `messages` of a chat, or with `text`, which is continued as it is even by a chat model.

    Args:
        file: the file, JSON lines if its name ends in `.jsonl`; None for the built-in prompts.
        tokenizer: the model's tokenizer.
        vocabulary: the model's vocabulary size, which token ids are checked against; None for no check.

    Returns:
        The prompts, in the order of the file.

    Raises:
        SourceError: the file cannot be read, or holds no prompts or more than MAX_PROMPTS; a chat has no template; a
            prompt has no tokens, more than MAX_TOKENS, or one that the model does not have; or the tokenizer or its
            chat template fails on it.
    """
    if file is None:
        has_template = tokenizer.template is not None
        raw_prompts = [
            _user_prompt(message if has_template else text, tokenizer, f"built-in prompt {number}")
            for number, (message, text) in enumerate(BUILT_IN, 1)
        ]
    else:
        raw_prompts = _read_file(Path(file), tokenizer)

    # All chats are rendered together, because the subprocess takes a second to start.
    chats = [prompt for prompt in raw_prompts if prompt.chat is not None]
    conversations = [prompt.chat or () for prompt in chats]
    rendered = iter(tokenizer.render_chats(conversations, [prompt.where for prompt in chats]) if chats else ())

    prompts = []
    for prompt in raw_prompts:
        if prompt.chat is None:
            ids = (*tokenizer.prefix, *tokenizer.encode(prompt.text))
        else:
            ids = tuple(tokenizer.encode(next(rendered)))

        if not 0 < len(ids) <= MAX_TOKENS:
            raise SourceError(f"{prompt.where} has {len(ids)} tokens", f"give prompts of 1 to {MAX_TOKENS:,} tokens")
        tokenizer.require_in_vocabulary(max(ids), vocabulary)
        prompts.append(Prompt(prompt.text, ids))

    return tuple(prompts)


def _user_prompt(text: str, tokenizer: Tokenizer, where: str) -> _RawPrompt:
    """A message of the user if there is a chat template, else a text."""
    return _RawPrompt(text, None if tokenizer.template is None else [{"role": "user", "content": text}], where)


def _read_file(path: Path, tokenizer: Tokenizer) -> list[_RawPrompt]:
    with readable():
        data = read_small(path, str(path), _MAX_FILE)

    prompts: list[_RawPrompt] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        if len(prompts) == MAX_PROMPTS:
            raise SourceError(f"{path} has more than {MAX_PROMPTS} prompts", "give fewer")

        try:
            prompts.append(_parse_line(line, path.suffix == ".jsonl", tokenizer, where))
        except UnicodeError:
            raise SourceError(f"{where} is not UTF-8", "convert it, with iconv say") from None

    if not prompts:
        raise SourceError(f"{path} has no prompts", _LINES)

    return prompts


def _parse_line(line: bytes, is_json: bool, tokenizer: Tokenizer, where: str) -> _RawPrompt:
    if not is_json:
        return _user_prompt(line.decode().rstrip("\r"), tokenizer, where)

    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise SourceError(f"{where} is {short_repr(row)}, not an object", _LINES)
    prompt, messages, text = (row.get(key) for key in ("prompt", "messages", "text"))

    # JSON may have half of a surrogate pair, which raises UnicodeError here.
    json.dumps([prompt, messages, text], ensure_ascii=False).encode()

    if messages is not None:
        problem = chat_problem(messages)
        if problem:
            raise SourceError(f"{where} has `messages` that {problem}", _LINES)
        lines = [f"{message['role']}: {message.get('content', '')}" for message in messages]
        return _RawPrompt("\n".join(lines), messages, where)

    if isinstance(prompt, str):
        return _user_prompt(prompt, tokenizer, where)
    if isinstance(text, str):
        return _RawPrompt(text, None, where)

    raise SourceError(
        f"{where} has none of `prompt`, `messages` and `text`, only {short_repr(', '.join(map(str, row)))}", _LINES
    )

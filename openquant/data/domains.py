"""Text sources (files, datasets, and texts of our own), each as blocks that can be read one by one.

Blocks with even numbers are for evaluation, those with odd numbers for calibration. Where a block begins depends on the
text alone, not on how many documents are wanted, so the two never overlap. Of our own texts each purpose has a file:

    file = open_file(Path("chats.jsonl"), "chats.jsonl")
    [file.read(number) for number in range(0, file.count, 2)]       # lists of LocatedText: texts, or messages of chats

Reads the prompts that source and output continue side by side: those of a file, or four built-in ones.

A model with a chat template gets a prompt as a message of the user, any other model as the beginning of a text:

    read_prompts(None, load_tokenizer(Path("Qwen3-8B")))[0].text        # "Write a Python function that ..."
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..errors import OpenQuantError, SourceError, UsageError
from ..files.checkpoint import readable
from ..files.model_files import open_regular, parse_json, read_small, short_repr
from ..machine import first_line
from ..patterns import group_pairs
from ..version import install_hint
from .tokenizer import Message, Tokenizer

# Bytes of a block. A text that is smaller than two blocks is divided in halves.
BLOCK = 256 << 10
# The texts that come with openquant, written for it: a file for each purpose.
OWN_TEXTS = Path(__file__).parent / "texts"
_ROWS = (
    "give `text`, a string, or `messages`, a list of objects with `role` and `content`, in each; or, in a file of "
    "prompts, `prompt`"
)

# A text, or the messages of a chat.
TextOrChat: TypeAlias = "str | Sequence[Message]"


@dataclass(frozen=True)
class FileLine:
    """A line of a file. `str()` gives "chats.jsonl line 3", for which it reads the file up to that line.

    Attributes:
        path: the file.
        offset: offset of the line in bytes.
    """

    path: Path
    offset: int

    def __str__(self) -> str:
        count = 1
        with readable(), open(self.path, "rb") as file:
            for start in range(0, self.offset, BLOCK):
                count += file.read(min(BLOCK, self.offset - start)).count(b"\n")
        return f"{self.path} line {count}"


@dataclass(frozen=True)
class LocatedText:
    """A text or a chat, and its place.

    Attributes:
        content: the text, or the messages of the chat.
        where: its place, whose `str()` is used in messages, such as a FileLine.
    """

    content: TextOrChat
    where: object

    @property
    def characters(self) -> int:
        """The length of the text, or of the messages as Python prints them."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(str(message)) for message in self.content)


@dataclass(frozen=True)
class Domain:
    """A text source, divided into blocks.

    Attributes:
        name: its name, such as "chats.jsonl".
        count: the number of its blocks.
        read: returns the texts and chats of the block of that number, in order. Raises SourceError if they are damaged.
        shared: whether evaluation and calibration each have every second block; if not, all are for one of them.
    """

    name: str
    count: int
    read: Callable[[int], list[LocatedText]]
    shared: bool = True


def open_file(path: Path, name: str) -> Domain:
    """Open a file as a domain: JSON lines if its name ends in `.jsonl`, else UTF-8 text.

    Args:
        path: the file.
        name: the name of the domain.

    Returns:
        A domain of two blocks or more, which are read later.

    Raises:
        SourceError: it is missing, empty, or no regular file.
    """
    files = "give files of text or JSON lines"
    with readable(f"{files}, not texts themselves"), open_regular(path, str(path), files) as opened:
        size = os.fstat(opened.fileno()).st_size
    if not size:
        raise SourceError(f"{path} is empty", "give a longer text")
    file = _File(path, size, max(2, -(-size // BLOCK)))
    return Domain(name, file.count, file.lines if path.suffix == ".jsonl" else file.text)


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    count: int

    def _bytes(self, start: int, end: int) -> bytes:
        with readable(), open(self.path, "rb") as file:
            return os.pread(file.fileno(), end - start, start)

    def _bounds(self, number: int) -> tuple[int, int]:
        return self.size * number // self.count, self.size * (number + 1) // self.count

    def text(self, number: int) -> list[LocatedText]:
        """The text of a block; it begins and ends with a line if lines are no longer than half a block."""
        start, end = self._bounds(number)
        data = self._bytes(start, end)
        if number:
            # The block may begin within a UTF-8 character.
            while data and data[0] & 0xC0 == 0x80:
                data, start = data[1:], start + 1
            line = data.find(b"\n", 0, len(data) // 2) + 1
            data, start = data[line:], start + line
        else:
            data = data.removeprefix(b"\xef\xbb\xbf")

        if number < self.count - 1:
            # The block may end within a character, with at most three of its bytes.
            cut = next((at for at in range(1, min(4, len(data)) + 1) if data[-at] & 0xC0 != 0x80), 0)
            data = data[:-cut] if cut and data[-cut] >= 0xC0 else data
            data = data[: data.rfind(b"\n", len(data) // 2) + 1] or data

        return [LocatedText(_decode(data, self.path, start), self.path)]

    def lines(self, number: int) -> list[LocatedText]:
        """The texts and chats of the JSON lines that begin in a block."""
        start, end = self._bounds(number)
        # The byte before the block says whether a line begins with the block.
        data = self._bytes(max(0, start - 1), end)
        first_line_start = 0 if not number else data.find(b"\n", 0, len(data) - 1) + 1

        if number and not first_line_start:
            return []

        at = max(0, start - 1) + first_line_start
        data = data[first_line_start:]
        while not data.endswith(b"\n") and (more := self._bytes(at + len(data), at + len(data) + BLOCK)):
            data += more.partition(b"\n")[0] + (b"\n" if b"\n" in more else b"")

        texts = []
        for line in data.split(b"\n"):
            if line.strip():
                json_line = line if at else line.removeprefix(b"\xef\xbb\xbf")
                texts.append(_parse_line(json_line, FileLine(self.path, at)))
            at += len(line) + 1

        return texts


def _decode(data: bytes, path: Path, start: int = 0) -> str:
    """Decode a file's text, of which these are the bytes from `start` on."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8: {error.reason} at byte {start + error.start:,}", "convert it, with iconv say"
        ) from None


def _parse_line(line: bytes, where: FileLine) -> LocatedText:
    try:
        row = parse_json(line, "")
    except SourceError as error:
        raise SourceError(f"{where}{error.message}", error.hint) from None
    return LocatedText(parse_row(row, where), where)


def parse_row(row: object, where: object) -> TextOrChat:
    """Return the text or the messages of a line of JSON or a row of a dataset.

    Args:
        row: the row.
        where: its place, whose `str()` is used in messages.

    Raises:
        SourceError: it has neither, or messages of another form.
    """
    if not isinstance(row, dict):
        raise SourceError(f"{where} is {short_repr(row)}, not an object", _ROWS)
    text, messages = row.get("text"), row.get("messages")
    if isinstance(text, str):
        return text
    if messages is None:
        columns = short_repr(", ".join(map(str, row)))
        raise SourceError(f"{where} has neither `text` nor `messages`, only {columns}", _ROWS)
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise SourceError(f"{where} has `messages` that are {short_repr(messages)}, not those of a chat", _ROWS)
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def open_dataset(name: str, count: int) -> Domain:
    """Read the first rows of a dataset as a domain, from its column `text` or `messages`.

    Only the rows that are needed are downloaded, and no code of a dataset is executed.

    Args:
        name: NAME[:SUBSET[:SPLIT]] on the Hub, or a directory. Without a split, `test`, `validation`, `train` or the
            first one is read.
        count: how many blocks to read, two or more.

    Returns:
        A domain of `count` blocks, or fewer if the dataset is shorter, but at least two. They are in memory.

    Raises:
        UsageError: `datasets` is not installed.
        SourceError: it cannot be read, or a row has neither column.
    """
    try:
        import datasets
    except ImportError:
        raise UsageError("--dataset needs datasets, which is not installed", install_hint("datasets")) from None

    path, _, rest = name.partition(":")
    subset, _, split = rest.partition(":")

    try:
        rows: Any = datasets.load_dataset(path, subset or None, split=split or None, streaming=True)
        if not split:
            split = next((name for name in ("test", "validation", "train") if name in rows), next(iter(rows)))
            rows = rows[split]
        blocks = _blocks(rows, f"dataset {name}", count)
    except OpenQuantError:
        raise
    except Exception as error:
        raise SourceError(
            f"dataset {name} cannot be read: {first_line(error)}", "check NAME:SUBSET:SPLIT, or give --text"
        ) from None

    return Domain(f"{path}:{subset}:{split}" if subset else f"{path}:{split}", len(blocks), blocks.__getitem__)


def _blocks(rows: Iterable[object], where: str, count: int) -> list[list[LocatedText]]:
    """Divide rows into `count` blocks of BLOCK characters, or into halves if they do not fill two."""
    blocks: list[list[LocatedText]] = [[]]
    size = 0
    for number, row in enumerate(rows):
        place = f"{where} row {number}"
        located = LocatedText(parse_row(row, place), place)
        if size >= BLOCK:
            if len(blocks) == count:
                break
            blocks.append([])
            size = 0

        blocks[-1].append(located)
        size += located.characters

    if len(blocks) == 1:
        middle = len(blocks[0]) // 2
        blocks = [blocks[0][: middle + 1], blocks[0][middle + 1 :]]

    return blocks


def own_texts(purpose: str) -> dict[str, list[TextOrChat]]:
    """Read the texts that come with openquant.

    Args:
        purpose: "evaluation" or "calibration".

    Returns:
        Its texts and chats by domain: "prose", "code", "chats" and "languages".
    """
    path = OWN_TEXTS / f"{purpose}.jsonl"
    rows = map(json.loads, path.read_bytes().splitlines())
    return group_pairs((row["domain"], parse_row(row, path)) for row in rows)


# Most tokens of a prompt.
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


def read_prompts(file: str | os.PathLike[str] | None, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Read the prompts of a file, or the built-in ones.

    Each line of a text file is a prompt; empty lines are skipped. Each JSON line is an object with `prompt`, with
    `messages` of a chat, or with `text`, which is continued as it is even by a chat model.

    Args:
        file: the file, JSON lines if its name ends in `.jsonl`; None for the built-in prompts.
        tokenizer: the model's tokenizer.

    Returns:
        The prompts, in the order of the file.

    Raises:
        SourceError: the file cannot be read, or holds no prompts; a chat has no template; a prompt has no tokens, or
            more than MAX_TOKENS; or the tokenizer or its chat template fails on it.
    """
    if file is not None:
        found = list(_read_file(Path(file), tokenizer))
    else:
        texts = [text if tokenizer.template is None else message for message, text in BUILT_IN]
        found = [_user_prompt(text, tokenizer, f"built-in prompt {at}") for at, text in enumerate(texts, 1)]

    prompts = []
    for raw in found:
        if raw.chat is None:
            ids = (*tokenizer.prefix, *tokenizer.encode(raw.text))
        else:
            ids = tuple(tokenizer.encode(tokenizer.render_chat(raw.chat, raw.where)))

        if not 0 < len(ids) <= MAX_TOKENS:
            raise SourceError(f"{raw.where} has {len(ids)} tokens", f"give prompts of 1 to {MAX_TOKENS:,} tokens")
        prompts.append(Prompt(raw.text, ids))

    return tuple(prompts)


def _user_prompt(text: str, tokenizer: Tokenizer, where: str) -> _RawPrompt:
    """A message of the user if there is a chat template, else a text."""
    return _RawPrompt(text, None if tokenizer.template is None else [{"role": "user", "content": text}], where)


def _read_file(path: Path, tokenizer: Tokenizer) -> Iterator[_RawPrompt]:
    with readable():
        data = read_small(path, str(path), _MAX_FILE)

    text = _decode(data.removeprefix(b"\xef\xbb\xbf"), path)
    if not text.strip():
        raise SourceError(f"{path} has no prompts", _LINES)

    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            yield _parse_prompt(parse_json(line.encode(), where), tokenizer, where)
        else:
            yield _user_prompt(line.rstrip("\r"), tokenizer, where)


def _parse_prompt(row: Any, tokenizer: Tokenizer, where: str) -> _RawPrompt:
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and "messages" not in row:
        return _user_prompt(row["prompt"], tokenizer, where)

    content = parse_row(row, where)
    if isinstance(content, str):
        return _RawPrompt(content, None, where)
    lines = [f"{message['role']}: {message.get('content', '')}" for message in content]
    return _RawPrompt("\n".join(lines), content, where)

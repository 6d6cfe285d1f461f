"""Tokens of a tokenizer that have no row in the input embedding, of which engines read whatever lies behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..errors import SourceError
from ..files.small_files import MAX_INDEX, parse_json, read_small, short_repr
from ..files.tensors import TensorInfo
from ..registry.architecture import EMBEDDING
from ..registry.rules import ModuleRules

# Text models keep the tokenizer of their multimodal sisters, whose tokens for images they never see.
_OTHER_MODALITY = re.compile("image|audio|video|vision|speech", re.IGNORECASE)
# The last token of a vocabulary, which stands before the merges.
_LAST_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")\s*:\s*(\d{1,9})\s*\}\s*,\s*$')
_LONGEST_TOKEN = 500


class Token(NamedTuple):
    """A token: its number, its text, and the file that says so."""

    number: int
    text: str
    file: str


def token_misfits(root: Path, entry: ModuleRules, tensors: Iterable[TensorInfo]) -> list[str]:
    """Compare the largest token of a tokenizer with the rows of the input embedding.

    Args:
        root: directory of the checkpoint.
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.

    Returns:
        One sentence if a token has no row; empty if all have one, or if there is no tokenizer.
    """
    tables = [info for info in tensors if len(info.shape) == 2 and entry.rule(info.module).keep == EMBEDDING.why]
    table = max(tables, key=lambda info: info.shape[0], default=None)
    try:
        tokens = [token for token in _tokens(root) if not _OTHER_MODALITY.search(token.text)]
    except SourceError:
        # Damaged files are found by those that read them.
        return []
    last = max(tokens, default=None)
    if table is None or last is None or last.number < table.shape[0]:
        return []
    return [
        f"{last.file} does not fit the tensors: token {short_repr(last.text)} has number {last.number}, and "
        f"{table.name} is {list(table.shape)}"
    ]


def _tokens(root: Path) -> Iterable[Token]:
    """The added tokens of a tokenizer, and the last one of its vocabulary; of a large file only these are parsed."""
    name = "tokenizer.json"
    if (root / name).is_file():
        data = read_small(root / name, name, MAX_INDEX)
        yield from _added_tokens(data, name)
        end = max(0, data.rfind(b'"merges"'))
        match = _LAST_TOKEN.search(data[max(0, end - _LONGEST_TOKEN) : end].decode(errors="replace"))
        if match:
            yield Token(int(match[2]), json.loads(match[1], strict=False), name)
        return

    name = "tokenizer_config.json"
    if (root / name).is_file():
        added = parse_json(read_small(root / name, name), name)
        decoder = added.get("added_tokens_decoder") if isinstance(added, dict) else None
        for number, token in decoder.items() if isinstance(decoder, dict) else ():
            if number.isdecimal() and len(number) < 10 and isinstance(token, dict):
                yield Token(int(number), str(token.get("content")), name)


def _added_tokens(data: bytes, name: str) -> Iterable[Token]:
    start = data.find(b'"added_tokens"')
    opened = data.find(b"[", start)
    end = data.find(b'"normalizer"', opened)
    if start < 0 or opened < 0:
        return
    try:
        added, _ = json.JSONDecoder().raw_decode(data[opened : end if end > 0 else None].decode(errors="replace"))
    except (ValueError, RecursionError):
        return
    for token in added:
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield Token(token["id"], str(token.get("content")), name)

"""Reads the texts of an evaluation or a calibration as documents of equally many tokens.

Documents for evaluation and for calibration never share text (domains.py). Only a few blocks of a large text are read,
spread over all of it, so that documents are independent and a confidence interval over them is meaningful.

    corpus = read_corpus(Texts(text=["wiki.txt"], samples=32, length=512), load_tokenizer(Path("Qwen3-8B")))
    len(corpus.documents), len(corpus.documents[0].ids)     # 32, 512
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import SourceError, UsageError
from ..options import Texts
from .domains import BLOCK, Domain, LocatedText, TextOrChat, open_dataset, open_file, own_texts
from .tokenizer import Tokenizer

Purpose = Literal["evaluation", "calibration"]
PURPOSES: tuple[Purpose, ...] = ("evaluation", "calibration")
# What the note on our own texts says of them.
_USES: dict[Purpose, str] = {"evaluation": "figures are for", "calibration": "the model is calibrated on"}

# The name of our own texts.
_OWN = "openquant texts"
# Blocks of a dataset that are read for one purpose. Each gives several documents, so more need not be downloaded.
_DATASET_BLOCKS = 16
# Characters that are encoded first for each wanted token; most tokenizers need 3 to 5.
_CHARACTERS = 8


@dataclass(frozen=True)
class Document:
    """A piece of text.

    Attributes:
        domain: the domain it is from: the name of a file or a dataset, or "prose", "code", "chats" or "languages".
        name: its domain and its number there, such as "wiki.txt 3".
        ids: its token ids.
    """

    domain: str
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """The documents that a model is run on.

    Attributes:
        documents: documents of equal length, sorted by domain.
        sha256: SHA-256 of their tokens as little-endian int32, hexadecimal.
        origin: their origin, as JSON: {"files": ["wiki.txt"]}, {"dataset": "org/name:test"} or
            {"builtin": "openquant texts for evaluation"}.
        notes: notes for the user.
    """

    documents: tuple[Document, ...]
    sha256: str
    origin: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens of each document."""
        return len(self.documents[0].ids)

    @property
    def described(self) -> str:
        """A description such as "32 documents of 512 tokens: wiki.txt (16), chats.jsonl (16)"."""
        kinds = ", ".join(f"{name} ({count})" for name, count in self.domains.items())
        return f"{len(self.documents)} documents of {self.length} tokens: {kinds}"

    @property
    def domains(self) -> dict[str, int]:
        """The number of documents of each domain."""
        return dict(Counter(document.domain for document in self.documents))

    @property
    def account(self) -> dict[str, Any]:
        """Origin, SHA-256, number and length of documents, and number of positions that have a next token, as JSON."""
        count = len(self.documents)
        return {
            **self.origin,
            "sha256": self.sha256,
            "documents": count,
            "length": self.length,
            "positions": count * (self.length - 1),
        }


def read_corpus(options: Texts, tokenizer: Tokenizer, purpose: Purpose = "evaluation") -> Corpus:
    """Read the documents that options ask for, the same each time.

    Args:
        options: the texts, and number and length of documents.
        tokenizer: the model's tokenizer.
        purpose: each purpose has its own half of the blocks of every text.

    Returns:
        `options.samples` documents of `options.length` tokens, or fewer and a note if texts are too short. Every text
        has at least one.

    Raises:
        UsageError: `options.length` has no room beside the tokenizer's prefix, or a dataset needs `datasets`.
        SourceError: a text cannot be read or is too short, or the tokenizer or its chat template fails on one.
    """
    if options.length <= len(tokenizer.prefix):
        raise UsageError(f"samples of {options.length} tokens have no room for text", "give a larger --length")

    domains, origin, notes = _domains(options, purpose, tokenizer)
    documents: list[Document] = []
    for number, domain in enumerate(domains):
        count = options.samples // len(domains) + (number < options.samples % len(domains))
        pieces = _documents(domain, count, options.length, tokenizer, purpose)
        if len(pieces) < count:
            notes.append(
                f"{domain.name} has {len(pieces)} documents of {options.length} tokens for {purpose}, not {count}"
            )
        documents += (Document(domain.name, f"{domain.name} {at}", ids) for at, ids in enumerate(pieces, 1))

    ids = np.array([document.ids for document in documents], dtype="<i4")
    return Corpus(tuple(documents), hashlib.sha256(ids.tobytes()).hexdigest(), origin, tuple(notes))


def _domains(
    options: Texts, purpose: Purpose, tokenizer: Tokenizer
) -> tuple[Sequence[Domain], dict[str, Any], list[str]]:
    """The domains that options name, their origin as JSON, and notes for the user."""
    if options.text:
        paths = [Path(text) for text in options.text]
        names = options.names
        return [open_file(path, name) for path, name in zip(paths, names, strict=True)], {"files": names}, []

    if options.dataset:
        # A document lies within one block, so this many of them fit.
        documents_per_block = max(1, BLOCK // (_CHARACTERS * options.length))
        blocks = max(min(options.samples, _DATASET_BLOCKS), -(-options.samples // documents_per_block))
        dataset = open_dataset(options.dataset, len(PURPOSES) * blocks)
        return [dataset], {"dataset": dataset.name}, []

    note = (
        f"no text was given: {_USES[purpose]} openquant's own prose, code, chats and ten languages; --text FILE or "
        "--dataset NAME has yours"
    )
    return _own_domains(options, purpose, tokenizer), {"builtin": f"{_OWN} for {purpose}"}, [note]


def _own_domains(options: Texts, purpose: Purpose, tokenizer: Tokenizer) -> list[Domain]:
    """Open our own texts: fewer domains if fewer samples are wanted, in blocks of a document's length or more."""
    domains = []
    for name, texts in list(own_texts(purpose).items())[: options.samples]:
        blocks = [""]
        for text in _write_out(texts, tokenizer):
            if len(blocks[-1]) >= _CHARACTERS * options.length:
                blocks.append("")
            blocks[-1] += text

        located = [[LocatedText(block, _OWN)] for block in blocks]
        domains.append(Domain(name, len(blocks), located.__getitem__, shared=False))
    return domains


def _write_out(texts: Sequence[TextOrChat], tokenizer: Tokenizer) -> list[str]:
    """Return our own texts as they follow upon each other, chats in the model's template.

    Chats are dialogues in plain text if the model has no template, or one that refuses them, or leaves out what they
    say, as those of some multimodal models do with what is no list of parts.
    """
    chats = [text for text in texts if not isinstance(text, str)]
    dialogues = ["\n\n".join(f"{message['role']}: {message['content']}" for message in chat) + "\n\n" for chat in chats]

    if chats and tokenizer.template is not None:
        with suppress(SourceError):
            rendered = [tokenizer.render_chat(chat, _OWN, answered=True) for chat in chats]
            if all(chat[0]["content"] in text for chat, text in zip(chats, rendered, strict=True)):
                dialogues = rendered

    written = iter(dialogues)
    return [f"{text}\n\n" if isinstance(text, str) else next(written) for text in texts]


def _documents(
    domain: Domain, count: int, length: int, tokenizer: Tokenizer, purpose: Purpose
) -> list[tuple[int, ...]]:
    """Token ids of up to `count` documents of a domain, from as many of its blocks as possible.

    Raises:
        SourceError: there is none.
    """
    order = list(range(domain.count))
    if domain.shared:
        order = order[PURPOSES.index(purpose) :: len(PURPOSES)]
    random.Random(0).shuffle(order)

    # Documents that are taken from a block; doubled as long as all blocks together give too few.
    per_block = -(-count // max(1, len(order)))

    while True:
        documents: list[tuple[int, ...]] = []
        longest, exhausted, remaining = 0, True, order
        while remaining and len(documents) < count:
            needed = -(-(count - len(documents)) // per_block)
            numbers, remaining = remaining[:needed], remaining[needed:]
            blocks = [domain.read(number) for number in numbers]
            for ids, complete in _tokenize(blocks, per_block * length, tokenizer):
                pieces = _cut(ids, length, tokenizer.prefix)
                longest, exhausted = max(longest, len(ids)), exhausted and complete and len(pieces) <= per_block
                if len(pieces) > per_block:
                    # Pieces are taken at equal distances.
                    indices = ((2 * at + 1) * len(pieces) // (2 * per_block) for at in range(per_block))
                    pieces = [pieces[index] for index in indices]
                documents += pieces

        if len(documents) >= count or exhausted:
            break
        per_block *= 2

    if not documents:
        [other] = (name for name in PURPOSES if name != purpose)
        raise SourceError(
            f"{domain.name} has {longest} tokens in one piece for {purpose} (the other half is for {other}), "
            f"fewer than --length {length}",
            f"give a longer text, or --length {longest} or less" if longest > 1 else "give a longer text",
        )

    return documents[:count]


def _tokenize(blocks: Sequence[list[LocatedText]], count: int, tokenizer: Tokenizer) -> list[tuple[list[int], bool]]:
    """For each block at least `count` token ids if it has so many, and whether they are all of its tokens."""
    tokens = []
    for limit in (_CHARACTERS * count, None):
        tokens = [_encode(block, limit, tokenizer) for block in blocks]
        if all(complete or len(ids) >= count for ids, complete in tokens):
            break
    return tokens


def _encode(block: Sequence[LocatedText], limit: int | None, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    """Token ids of about the first `limit` characters of a block, and whether they are all of its tokens."""
    ids: list[int] = []
    complete = True
    characters = 0

    for number, located in enumerate(block):
        if limit is not None and characters >= limit:
            return ids, False
        characters += located.characters

        text = located.content
        if not isinstance(text, str):
            text = tokenizer.render_chat(text, located.where, answered=True)
        elif number:
            ids += tokenizer.encode("\n\n")

        # A block of a text file is a single text, and mostly longer than the limit.
        complete = complete and (limit is None or len(text) <= limit)
        ids += tokenizer.encode(text[:limit])

    return ids, complete


def _cut(ids: Sequence[int], length: int, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cut token ids into pieces of `length` tokens, each of which begins with the tokenizer's prefix."""
    pieces, at = [], 0
    while at < len(ids):
        missing_prefix = () if tuple(ids[at : at + len(prefix)]) == prefix else prefix
        piece = (*missing_prefix, *ids[at : at + length - len(missing_prefix)])
        if len(piece) == length:
            pieces.append(piece)
        at += length - len(missing_prefix)
    return pieces

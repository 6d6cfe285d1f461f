"""Texts that a model is run on, as documents of equally many tokens.

Those for evaluation and those for calibration never share any text (domains.py). Of a large text a few blocks are read,
spread over all of it, so that documents are independent of each other and an interval over them means something.

    corpus = read(Texts(text=["wiki.txt"], samples=32, length=512), load(Path("Qwen3-8B")))
    len(corpus.documents), len(corpus.documents[0].ids)     # 32, 512
"""

from __future__ import annotations

import hashlib
import platform
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import SourceError, UsageError
from ..options import Texts
from .domains import BLOCK, Domain, LocatedText, open_dataset, open_file, standard_library
from .tokenizer import Tokenizer

Purpose = Literal["evaluation", "calibration"]
PURPOSES: tuple[Purpose, ...] = ("evaluation", "calibration")
# What becomes of built-in texts.
_TOLD: dict[Purpose, str] = {"evaluation": "figures are for", "calibration": "the model is calibrated on"}

# Blocks of a dataset for one purpose, from each of which several documents come; more would only be downloaded.
_DATASET_BLOCKS = 16
# Letters that are tried first for each token that is wanted; most tokenizers need 3 to 5.
_LETTERS = 8


@dataclass(frozen=True)
class Document:
    """A piece of text.

    Attributes:
        domain: what kind of text it is: the name of a file or a dataset, "code" or "docs".
        name: its place there, such as "wiki.txt 3", its third.
        ids: its tokens.
    """

    domain: str
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Documents.

    Attributes:
        documents: all equally long, those of a domain together.
        sha256: of their tokens, hexadecimal.
        origin: where they come from, as JSON: {"files": ["wiki.txt"]}, {"dataset": "org/name:test"} or
            {"builtin": "Python 3.12.4"}.
        notes: what the user should know of them.
    """

    documents: tuple[Document, ...]
    sha256: str
    origin: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of each document."""
        return len(self.documents[0].ids)

    @property
    def described(self) -> str:
        """Such as "32 documents of 512 tokens: wiki.txt (16), chats.jsonl (16)"."""
        kinds = ", ".join(f"{name} ({count})" for name, count in self.domains.items())
        return f"{len(self.documents)} documents of {self.length} tokens: {kinds}"

    @property
    def domains(self) -> dict[str, int]:
        """The number of documents of each domain."""
        return dict(Counter(document.domain for document in self.documents))

    @property
    def account(self) -> dict[str, Any]:
        """What was read, as JSON: origin, sha256, documents, length and positions, of which each has a next token."""
        count = len(self.documents)
        return {
            **self.origin,
            "sha256": self.sha256,
            "documents": count,
            "length": self.length,
            "positions": count * (self.length - 1),
        }


def read_corpus(
    options: Texts, tokenizer: Tokenizer, purpose: Purpose = "evaluation", vocabulary: int | None = None
) -> Corpus:
    """The documents that options ask for, the same each time.

    Args:
        options: what to read, and how much of it.
        tokenizer: what makes tokens of it.
        purpose: what for; each has texts of its own.
        vocabulary: tokens that the model has, to hold ids against; not held against anything if None.

    Raises:
        UsageError: fewer documents than texts are asked for.
        SourceError: a text cannot be read, is too short, or gives tokens that the model does not have.
    """
    if options.length <= len(tokenizer.prefix):
        raise UsageError(f"samples of {options.length} tokens have no room for text", "give a larger --length")
    domains, origin, notes = _domains(options, purpose)
    if options.samples < len(domains):
        raise UsageError(
            f"--samples {options.samples} is fewer than the {len(domains)} kinds of text",
            f"give --samples {len(domains)} or more",
        )
    documents: list[Document] = []
    for number, domain in enumerate(domains):
        count = options.samples // len(domains) + (number < options.samples % len(domains))
        found = _documents(domain, count, options.length, tokenizer, PURPOSES.index(purpose), purpose)
        if len(found) < count:
            notes.append(
                f"{domain.name} has {len(found)} documents of {options.length} tokens for {purpose}, not {count}"
            )
        documents += (Document(domain.name, f"{domain.name} {at}", ids) for at, ids in enumerate(found, 1))
    ids = np.array([document.ids for document in documents], dtype="<i4")
    if vocabulary is not None and ids.max() >= vocabulary:
        raise SourceError(
            f"the tokenizer of {tokenizer.where} gives token {ids.max()}, the model has {vocabulary}",
            "copy the tokenizer's files from the model it was made from",
        )
    return Corpus(tuple(documents), hashlib.sha256(ids.tobytes()).hexdigest(), origin, tuple(notes))


def _domains(options: Texts, purpose: Purpose) -> tuple[Sequence[Domain], dict[str, Any], list[str]]:
    """What to read, where it comes from, and what to say of it."""
    if options.text:
        paths = [Path(text) for text in options.text]
        names = [path.name for path in paths]
        if len(set(paths)) < len(paths):
            raise UsageError("a text is given twice", "give each once")
        # Files of one name in several directories are told apart.
        names = names if len(set(names)) == len(names) else [str(path) for path in paths]
        return [open_file(*each) for each in zip(paths, names, strict=True)], {"files": names}, []
    if options.dataset:
        # What is left of a block when it gives no more documents, is none.
        whole = max(1, BLOCK // (_LETTERS * options.length))
        wanted = 2 * max(min(options.samples, _DATASET_BLOCKS), -(-options.samples // whole))
        dataset = open_dataset(options.dataset, wanted)
        return [dataset], {"dataset": dataset.name}, []
    python = f"Python {platform.python_version()}"
    note = (
        f"no text was given: {_TOLD[purpose]} the source and the documentation strings of {python}'s standard library, "
        "which say little of chats or other languages; --text FILE or --dataset NAME has yours"
    )
    return standard_library(), {"builtin": python}, [note]


def _documents(
    domain: Domain, count: int, length: int, tokenizer: Tokenizer, first: int, purpose: Purpose
) -> list[tuple[int, ...]]:
    """Up to so many documents of a domain, from as many of its blocks as can be.

    Raises:
        SourceError: there is none.
    """
    order = list(range(first, domain.count, len(PURPOSES)))
    random.Random(0).shuffle(order)
    # Of each block; more if that is too few in all.
    each = -(-count // max(1, len(order)))
    while True:
        found: list[tuple[int, ...]] = []
        most, whole, left = 0, True, order
        while left and len(found) < count:
            # Chats are rendered together, since each time takes a second.
            needed = -(-(count - len(found)) // each)
            numbers, left = left[:needed], left[needed:]
            for ids, complete in _tokens([domain.read(number) for number in numbers], each * length, tokenizer):
                cut = _cut(ids, length, tokenizer.prefix)
                most, whole = max(most, len(ids)), whole and complete and len(cut) <= each
                # Spread over the block.
                found += (cut[(2 * at + 1) * len(cut) // (2 * each)] for at in range(each)) if len(cut) > each else cut
        if len(found) >= count or whole:
            break
        each *= 2
    if not found:
        raise SourceError(
            f"{domain.name} has {most} tokens in one piece for {purpose} (half of a text is for the other), fewer than "
            f"--length {length}",
            f"give a longer text, or --length {most} or less" if most > 1 else "give a longer text",
        )
    return found[:count]


def _tokens(blocks: Sequence[list[LocatedText]], wanted: int, tokenizer: Tokenizer) -> list[tuple[list[int], bool]]:
    """Of each block its tokens, so many if it has them, and whether these are all."""
    found = []
    for share in (_LETTERS * wanted, None):
        found = [_encoded(each, tokenizer) for each in _rendered(blocks, share, tokenizer)]
        if all(complete or len(ids) >= wanted for ids, complete in found):
            break
    return found


def _rendered(
    blocks: Sequence[list[LocatedText]], share: int | None, tokenizer: Tokenizer
) -> list[tuple[list[tuple[str, LocatedText]], bool]]:
    """Of each block its texts, of which the first `share` letters if any, and whether that is all."""
    taken = []
    for block in blocks:
        letters, kept = 0, []
        for named in block:
            if share is not None and letters >= share:
                break
            kept.append(named)
            letters += len(named.part) if isinstance(named.part, str) else sum(len(str(each)) for each in named.part)
        taken.append((kept, len(kept) == len(block)))
    chats = [named for kept, _ in taken for named in kept if not isinstance(named.part, str)]
    conversations = [named.part for named in chats if not isinstance(named.part, str)]
    texts = iter(tokenizer.chats(conversations, [named.where for named in chats], answered=True) if chats else ())
    rendered = []
    for kept, whole in taken:
        parts = [(named.part if isinstance(named.part, str) else next(texts), named) for named in kept]
        # A file's block of text is one part, and mostly more than is wanted.
        whole = whole and (share is None or all(len(text) <= share for text, _ in parts))
        rendered.append(([(text[:share], named) for text, named in parts], whole))
    return rendered


def _encoded(block: tuple[list[tuple[str, LocatedText]], bool], tokenizer: Tokenizer) -> tuple[list[int], bool]:
    parts, whole = block
    ids: list[int] = []
    for number, (text, named) in enumerate(parts):
        if number and isinstance(named.part, str):
            ids += tokenizer.encode("\n\n")
        if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise SourceError(f"{named.where} holds half of a surrogate pair, which is no text", "leave it out")
        ids += tokenizer.encode(text)
    return ids, whole


def _cut(ids: Sequence[int], length: int, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Pieces of equally many tokens, each with what the tokenizer sets before every text."""
    pieces, at = [], 0
    while at < len(ids):
        begun = () if tuple(ids[at : at + len(prefix)]) == prefix else prefix
        piece = (*begun, *ids[at : at + length - len(begun)])
        if len(piece) == length:
            pieces.append(piece)
        at += length - len(begun)
    return pieces

"""Turns the requests of tasks into token ids, exactly as lm-eval's backend for transformers does (HFLM, 0.4.13).

requests = encode_requests([("Question: ...\nAnswer:", " Mars")], tokenizer, max_length=8192, vocabulary=151936)
requests[0].choice      # (21048,)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..data.questions import Tasks
from ..data.tokenizer import Tokenizer
from ..errors import SourceError
from ..files.small_files import short_repr
from ..streaming.packing import ChoiceRequest

# Keys of config.json that say the longest sequence; and its length if nothing says it: lm_eval/models/huggingface.py.
_LENGTH_KEYS = ("n_positions", "max_position_embeddings", "n_ctx")
_DEFAULT_LENGTH = 2048
# Tokenizers without a maximum have a number near 1e30.
_NO_MAXIMUM = 1 << 32


@dataclass(frozen=True)
class TaskRequests:
    """The questions of all tasks, tokenized.

    Attributes:
        tasks: the questions, which score answers.
        requests: the token ids of their requests for probabilities.
        named: what the user named: tasks and names of files.
        limit: the most questions of a task; None for all.
        length: the most tokens of a pack.
    """

    tasks: Tasks
    requests: tuple[ChoiceRequest, ...]
    named: tuple[str, ...]
    limit: int | None
    length: int

    @property
    def longest(self) -> int:
        """The most tokens that a model reads for one request."""
        return max((len(request.inputs) for request in self.requests), default=0)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads at most: those of all requests, each by itself."""
        return sum(len(request.inputs) for request in self.requests)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the token ids of all requests, hexadecimal."""
        digest = hashlib.sha256()
        for request in self.requests:
            for ids in (request.context, request.choice):
                digest.update(np.array([len(ids), *ids], "<i4").tobytes())
        return digest.hexdigest()


def longest_sequence(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return the most tokens that a model is given at once.

    Args:
        config: its config.json.
        tokenizer: its tokenizer, whose maximum counts if the config has none.
    """
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _LENGTH_KEYS:
            if isinstance(value := part.get(key), int) and value > 0:
                return value
    maximum = getattr(tokenizer.inner, "model_max_length", None)
    return maximum if isinstance(maximum, int) and 0 < maximum < _NO_MAXIMUM else _DEFAULT_LENGTH


def encode_requests(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_length: int, vocabulary: int | None
) -> tuple[ChoiceRequest, ...]:
    """Tokenize requests.

    Spaces at the end of a context belong to the continuation. A continuation's tokens are those that follow the
    context's tokens in the tokens of both together. An empty context is the BOS token, or else the EOS token.

    Args:
        pairs: context and continuation of each.
        tokenizer: the source's tokenizer.
        max_length: the most tokens that the model reads. Contexts are shortened to that at their beginning.
        vocabulary: the model's vocabulary size, which token ids are checked against; None for no check.

    Raises:
        SourceError: a continuation has no token or too many, or the model does not have a token.
    """
    inner: Any = tokenizer.inner
    prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
    first = tokenizer.decode([prefix]) if prefix is not None else None
    encoded: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        special = not (first and text.startswith(first))
        return tokenizer.encode(text, special=special)

    requests = []
    for context, choice in pairs:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + choice
        if not stripped:
            ids = tokenizer.encode(continuation)
            if prefix is None:
                raise SourceError(
                    f"{tokenizer.where} has neither a BOS nor an EOS token, which a question without a prompt needs",
                    "leave that task out",
                )
            before, after = ([prefix], ids) if ids[:1] != [prefix] else (ids[:1], ids[1:])
        else:
            if stripped not in encoded:
                # Requests of one question follow one another.
                encoded.clear()
                encoded[stripped] = encode(stripped)
            before = encoded[stripped]
            after = encode(stripped + continuation)[len(before) :]
        if not before or not 0 < len(after) <= max_length:
            raise SourceError(
                f"the tokenizer of {tokenizer.where} makes {len(before)} and {len(after)} tokens of a prompt and its "
                f"choice {short_repr(continuation)}; both need one at least, and a choice {max_length} at most",
                "leave that task out",
            )
        kept = max_length + 1 - len(after)
        requests.append(ChoiceRequest(tuple(before[-kept:]), tuple(after)))
    highest = max((max(request.context + request.choice) for request in requests), default=0)
    if vocabulary is not None and highest >= vocabulary:
        raise SourceError(
            f"the tokenizer of {tokenizer.where} gives token {highest}, the model has {vocabulary}",
            "copy the tokenizer's files from the model it was made from",
        )
    return tuple(requests)

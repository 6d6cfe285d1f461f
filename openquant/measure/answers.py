"""What models answer to prompts, the source and its outputs one after the other, each all in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ..files.checkpoint import Checkpoint
from ..machine import available_memory
from .forward import StreamedModel
from .generate import continued, ends, side_by_side
from .products import products_in_float32
from .prompts import read
from .served import Served
from .tokenizer import Tokenizer

# The largest model, in bytes, that answers without being asked: each token takes a reading of all weights.
UNASKED = 4 << 30
# Of the built-in prompts, those that are answered.
BUILT_IN = 4


def fits(nbytes: int, asked: bool) -> bool:
    """Whether a model of so many bytes is to answer prompts, which were asked for or not."""
    return nbytes <= available_memory() // 2 and (asked or nbytes <= UNASKED)


def answers(
    source: StreamedModel,
    checkpoint: Checkpoint,
    outputs: Sequence[Served],
    tokenizer: Tokenizer,
    prompts: str | os.PathLike[str] | None,
) -> list[list[dict[str, Any]]]:
    """The texts of eval.json, for each output.

    Args:
        source: the source.
        checkpoint: what it was made of, which says where answers end.
        outputs: the outputs; their activations are rounded.
        tokenizer: the source's.
        prompts: a file of prompts; some built-in ones if None.

    Raises:
        SourceError: a prompt or a weight cannot be read.
    """
    asked = read(prompts, tokenizer)[: None if prompts is not None else BUILT_IN]
    last = ends(checkpoint.root, checkpoint.config)

    def answered(model: StreamedModel, around: Callable[[], AbstractContextManager[Any]]) -> list[tuple[int, ...]]:
        return continued(model, asked, last, around=around)

    plain = partial(products_in_float32, source.device)
    ours = answered(source, plain)
    return [side_by_side(asked, ours, answered(each.model, each.around), tokenizer) for each in outputs]

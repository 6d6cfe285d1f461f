"""What models answer to prompts, the source and its outputs one after the other, each all in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..data.prompts import Prompt, read_prompts
from ..data.tokenizer import Tokenizer
from ..files.checkpoint import Checkpoint
from ..machine import available_memory
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
from .as_served import ServedModel
from .generate import continue_prompts, end_tokens, side_by_side

# The largest model, in bytes, that answers without being asked: each token takes a reading of all weights.
UNASKED = 2 << 30
# Of the built-in prompts, those that are answered.
BUILT_IN = 4


def fits_in_memory(nbytes: int, asked: bool, room: int | None = None) -> bool:
    """Whether a model of so many bytes is to answer prompts, which were asked for or not, in so much memory."""
    free = available_memory() // 2
    return nbytes <= (free if room is None else min(free, room)) and (asked or nbytes <= UNASKED)


def prompts_to_answer(
    file: str | os.PathLike[str] | None, tokenizer: Tokenizer, vocabulary: int, nbytes: int, room: int | None = None
) -> tuple[Prompt, ...]:
    """The prompts to answer; none where a model of so many bytes has no room, or would take long without being asked.

    Args:
        file: a file of them, which is read in any case, so that a mistake shows before hours of work; some built-in
            ones if None.
        tokenizer: the source's.
        vocabulary: tokens that the model has.
        nbytes: size of the largest model.
        room: bytes that it may take; None where only the machine counts.

    Raises:
        SourceError: they cannot be read.
    """
    fitting = fits_in_memory(nbytes, file is not None, room)
    if file is None and not fitting:
        return ()
    found = read_prompts(file, tokenizer, vocabulary)[: None if file is not None else BUILT_IN]
    return found if fitting else ()


def compare_answers(
    source: StreamedModel,
    checkpoint: Checkpoint,
    outputs: Sequence[ServedModel],
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    progress: Callable[[int, int], None] | None = None,
) -> list[list[dict[str, Any]]]:
    """The texts of eval.json, for each output.

    Args:
        source: the source.
        checkpoint: what it was made of, which says where answers end.
        outputs: the outputs; their activations are rounded, and keys and values if they are in FP8.
        tokenizer: the source's.
        prompts: what `prompts_to_answer` gave.
        progress: told which model answered, 0 for the source, and how many prompts it has answered.

    Raises:
        SourceError: a weight cannot be read.
    """
    last = end_tokens(checkpoint.root, checkpoint.config)

    def answered(model: int) -> Callable[[int], None] | None:
        return None if progress is None else partial(progress, model)

    around = partial(products_in_float32, source.device)
    ours = continue_prompts(source, prompts, last, around=around, progress=answered(0))
    theirs = (
        continue_prompts(each.model, prompts, last, around=each.around, cache=each.cache, progress=answered(number))
        for number, each in enumerate(outputs, 1)
    )
    return [side_by_side(prompts, ours, continuations, tokenizer) for continuations in theirs]

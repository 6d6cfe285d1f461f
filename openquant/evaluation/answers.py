"""Answers to prompts by the source and its outputs, one model after the other, each loaded as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..data.prompts import Prompt, read_prompts
from ..data.tokenizer import Tokenizer
from ..machine import available_memory
from ..streaming.model import StreamedModel, products_in_float32
from .as_served import ServedModel
from .generate import continue_prompts, end_tokens, side_by_side

# The largest model, in bytes, that answers built-in prompts: each token takes a reading of all weights.
LARGEST_BY_DEFAULT = 2 << 30
# Number of built-in prompts that are answered.
BUILT_IN = 4


def fits_in_memory(nbytes: int, requested: bool, room: int | None = None) -> bool:
    """Return whether a model is small enough to answer prompts: at most half of the free memory.

    Args:
        nbytes: size of its weights in bytes.
        requested: whether the user gave prompts; without that it may also have no more than LARGEST_BY_DEFAULT.
        room: bytes that the weights may take, as a further limit; None for no other.
    """
    free = available_memory() // 2
    return nbytes <= (free if room is None else min(free, room)) and (requested or nbytes <= LARGEST_BY_DEFAULT)


def prompts_to_answer(
    file: str | os.PathLike[str] | None, tokenizer: Tokenizer, vocabulary: int, nbytes: int, room: int | None = None
) -> tuple[Prompt, ...]:
    """Read the prompts that the models are to answer.

    Args:
        file: a file of prompts; None for a few built-in ones. A file is read in any case, so that a mistake in it is
            an error before hours of work.
        tokenizer: the source's tokenizer.
        vocabulary: size of the model's vocabulary in tokens.
        nbytes: size of the largest model's weights in bytes.
        room: bytes that the weights may take; None if only the machine's memory limits them.

    Returns:
        The prompts, each with its text and its token ids; none if a model does not fit into memory, or is large and the
        user gave no file.

    Raises:
        SourceError: the prompts cannot be read, are too long, or do not fit the tokenizer or its chat template.
    """
    fits = fits_in_memory(nbytes, file is not None, room)
    if file is None and not fits:
        return ()
    prompts = read_prompts(file, tokenizer, vocabulary)[: None if file is not None else BUILT_IN]
    return prompts if fits else ()


def compare_answers(
    source: StreamedModel,
    outputs: Sequence[ServedModel],
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    progress: Callable[[int, int], None] | None = None,
) -> list[list[dict[str, Any]]]:
    """Have the source and then each output answer prompts greedily.

    Args:
        source: the source's model.
        outputs: the outputs as engines serve them: with rounded activations and KV cache.
        tokenizer: the source's tokenizer.
        prompts: the prompts, each with its text and its token ids.
        progress: called with the number of the model, 0 for the source, and the number of prompts that it has answered.

    Returns:
        For each output a list with a dictionary for each prompt, as eval.json has them in `texts`: `prompt`, `source`
        and `output` as text, and `differs_at`, the index of the first token that differs, None if all are equal.

    Raises:
        SourceError: a weight or generation_config.json cannot be read.
    """
    ends = end_tokens(source.checkpoint.root, source.checkpoint.config)

    def answered(model: int) -> Callable[[int], None] | None:
        return None if progress is None else partial(progress, model)

    around = partial(products_in_float32, source.device)
    source_answers = continue_prompts(source, prompts, ends, around=around, progress=answered(0))
    output_answers = (
        continue_prompts(
            output.model, prompts, ends, around=output.around, cache=output.cache, progress=answered(number)
        )
        for number, output in enumerate(outputs, 1)
    )
    return [side_by_side(prompts, source_answers, answers, tokenizer) for answers in output_answers]

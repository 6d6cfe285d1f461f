"""Greedy continuations of prompts by two models, side by side, and the token from which they differ.

Source and outputs answer one after the other, each loaded as a whole (`compare_answers`).

Of a checkpoint's generation settings only the end tokens are used: there is no sampling. If a model does not fit into
memory, `teacher_forced` shows its most probable next token at each position of a given text instead.

    ends = end_tokens(checkpoint.root, checkpoint.config)
    source_answers, output_answers = (continue_prompts(model, prompts, ends) for model in (source, output))
    side_by_side(prompts, source_answers, output_answers, tokenizer)[0]["differs_at"]     # 12
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..data.prompts import Prompt, read_prompts
from ..data.tokenizer import Tokenizer
from ..files.checkpoint import readable
from ..files.model_files import parse_json, read_small
from ..machine import available_memory
from ..streaming import transformers_internals
from ..streaming.model import StreamedModel, products_in_float32
from ..streaming.session import config_levels
from .as_served import ServedModel

# Most tokens of an answer.
TOKENS = 64
# Tokens of the document that are shown as the prompt of `teacher_forced`.
_CONTEXT = 48


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the ids of the tokens that end an answer, from generation_config.json or else config.json.

    Args:
        directory: the checkpoint's directory.
        config: its config.json, parsed.

    Returns:
        The token ids; empty if neither file has any.

    Raises:
        SourceError: generation_config.json cannot be read.
    """
    values: list[object] = []
    if (directory / "generation_config.json").exists():
        with readable():
            data = read_small(directory / "generation_config.json", "generation_config.json")
        settings = parse_json(data, "generation_config.json")
        values.append(settings.get("eos_token_id") if isinstance(settings, dict) else None)
    values += [level.get("eos_token_id") for level in config_levels(config)]

    for value in values:
        ids = value if isinstance(value, list) else [value]
        valid = [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
        if valid:
            return tuple(valid)

    return ()


def continue_prompts(
    streamed: StreamedModel,
    prompts: Sequence[Prompt],
    ends: Sequence[int],
    tokens: int = TOKENS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    cache: Callable[[], Any] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> list[tuple[int, ...]]:
    """Continue each prompt greedily. All weights of the model are loaded meanwhile.

    Prompts are computed one at a time, as padding would change how sums are rounded.

    Args:
        streamed: the model.
        prompts: the prompts, each with its text and its token ids.
        ends: ids of the tokens that end an answer; none if only `tokens` ends it.
        tokens: most tokens of an answer.
        around: makes the context in which the model runs, such as `ServedModel.round_inputs`, which rounds activations.
        cache: makes the KV cache of a prompt; if it returns None, transformers makes its own.
        progress: called after each prompt.

    Returns:
        The token ids of each prompt's continuation, without the prompt and with the end token if there is one.

    Raises:
        SourceError: a weight is missing or cannot be read.
    """
    generation_config: Any = GenerationConfig
    config = generation_config(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ends) or None,
        # Required, but never used: there is one prompt at a time.
        pad_token_id=ends[0] if ends else 0,
    )

    continuations = []

    with streamed.resident() as resident:
        model: Any = resident
        # generate() would take settings that we leave open from the model's own.
        own_config, model.generation_config = model.generation_config, generation_config()
        try:
            for prompt in prompts:
                ids = torch.tensor([prompt.ids], device=streamed.device)
                kv_cache = cache()
                options = {} if kv_cache is None else {transformers_internals.cache_argument(resident): kv_cache}
                with around():
                    generated = model.generate(
                        ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
                    )
                continuations.append(tuple(generated[0, len(prompt.ids) :].tolist()))
                progress()
        finally:
            model.generation_config = own_config

    return continuations


def side_by_side(
    prompts: Sequence[Prompt],
    source: Sequence[Sequence[int]],
    output: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Put two models' continuations side by side, in the form of eval.json's `texts`.

    Args:
        prompts: the prompts, each with its text and its token ids.
        source: token ids of the source's continuation of each prompt.
        output: token ids of the output's continuation of each prompt.
        tokenizer: decodes both.

    Returns:
        For each prompt: `prompt`, `source` and `output` as text, and `differs_at`, the index of the first token that
        differs, None if all are equal. If one continuation begins with all of the other, it is the other's length.
    """
    return [
        {
            "prompt": prompt.text,
            "source": tokenizer.decode(source_ids),
            "output": tokenizer.decode(output_ids),
            "differs_at": _differs_at(source_ids, output_ids),
        }
        for prompt, source_ids, output_ids in zip(prompts, source, output, strict=True)
    ]


def teacher_forced(
    ids: Sequence[int], source: Sequence[int], output: Sequence[int], tokenizer: Tokenizer, tokens: int = TOKENS
) -> dict[str, Any]:
    """Show two models' most probable next token at each position of a text (teacher-forced).

    Args:
        ids: token ids of the text [length], at least two.
        source: the source's most probable next token at each position [length].
        output: the output's most probable next token at each position [length].
        tokenizer: decodes all of them.
        tokens: most positions to show. They begin after the first 48 tokens, or after the first half of a short text.

    Returns:
        The keys of side_by_side(), with `text`, the text itself at these positions, and `"along": True`, which says
        that the tokens of `source` and `output` are not a continuous text.
    """
    start = max(1, min(_CONTEXT, len(ids) // 2))
    positions = slice(start - 1, min(start - 1 + tokens, len(ids) - 1))
    source_ids, output_ids = list(source)[positions], list(output)[positions]
    return {
        "prompt": tokenizer.decode(ids[:start]),
        "source": tokenizer.decode(source_ids),
        "output": tokenizer.decode(output_ids),
        "differs_at": _differs_at(source_ids, output_ids),
        "text": tokenizer.decode(ids[start : start + len(source_ids)]),
        "along": True,
    }


def _differs_at(source: Sequence[int], output: Sequence[int]) -> int | None:
    pairs = zip(source, output, strict=False)
    index = next((at for at, (before, after) in enumerate(pairs) if before != after), None)
    # One may have ended before the other.
    return min(len(source), len(output)) if index is None and len(source) != len(output) else index


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
    progress: Callable[[], None] = lambda: None,
) -> list[list[dict[str, Any]]]:
    """Have the source and then each output answer prompts greedily.

    Args:
        source: the source's model.
        outputs: the outputs as engines serve them: with rounded activations and KV cache.
        tokenizer: the source's tokenizer.
        prompts: the prompts, each with its text and its token ids.
        progress: called after each prompt of each model.

    Returns:
        For each output a list with a dictionary for each prompt, as eval.json has them in `texts`: `prompt`, `source`
        and `output` as text, and `differs_at`, the index of the first token that differs, None if all are equal.

    Raises:
        SourceError: a weight or generation_config.json cannot be read.
    """
    ends = end_tokens(source.checkpoint.root, source.checkpoint.config)

    around = partial(products_in_float32, source.device)
    source_answers = continue_prompts(source, prompts, ends, around=around, progress=progress)
    output_answers = (
        continue_prompts(output.model, prompts, ends, around=output.round_inputs, cache=output.cache, progress=progress)
        for output in outputs
    )
    return [side_by_side(prompts, source_answers, answers, tokenizer) for answers in output_answers]

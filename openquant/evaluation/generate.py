"""What models write, side by side: greedy continuations of prompts, and where they begin to differ.

Nothing of a checkpoint says how: no sampling, no code of its own, only the tokens at which it ends. Where a model does
not fit into memory, `teacher_forced` shows what it would have written next at each place of a given text instead.

    ours, theirs = (continued(model, prompts, ends(checkpoint.root, checkpoint.config)) for model in (source, output))
    side_by_side(prompts, ours, theirs, tokenizer)[0]["differs_at"]     # 12
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..data.prompts import Prompt
from ..data.tokenizer import Tokenizer
from ..files.checkpoint import readable
from ..files.small_files import parse_json, read_small
from ..streaming import transformers_internals
from ..streaming.model import StreamedModel

# Tokens that each prompt is continued by.
TOKENS = 64
# Of a text that is shown: where it begins in the document.
_BEFORE = 48


def end_tokens(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, as generation_config.json says, or else config.json.

    Raises:
        SourceError: generation_config.json cannot be read.
    """
    said: list[object] = []
    if (directory / "generation_config.json").exists():
        with readable():
            data = read_small(directory / "generation_config.json", "generation_config.json")
        found = parse_json(data, "generation_config.json")
        said.append(found.get("eos_token_id") if isinstance(found, dict) else None)
    inner = config.get("text_config")
    said += [config.get("eos_token_id"), inner.get("eos_token_id") if isinstance(inner, dict) else None]
    for value in said:
        ids = value if isinstance(value, list) else [value]
        whole = [each for each in ids if isinstance(each, int) and not isinstance(each, bool) and each >= 0]
        if whole:
            return tuple(whole)
    return ()


def continue_prompts(
    streamed: StreamedModel,
    prompts: Sequence[Prompt],
    ends: Sequence[int],
    tokens: int = TOKENS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    cache: Callable[[], Any] = lambda: None,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[int, ...]]:
    """The most likely continuation of each prompt, token by token, with all weights in memory meanwhile.

    Each is computed alone: padding would change the sums.

    Args:
        streamed: the model.
        prompts: what it continues.
        ends: tokens at which an answer ends; they are the last of it.
        tokens: at which it is cut off.
        around: what the model is computed in, such as activations rounded.
        cache: makes what keys and values are kept in; for None, as transformers does.
        progress: told how many prompts are done.

    Raises:
        SourceError: a weight is missing or cannot be read.
    """
    # Whether it is one of the ends or not, padding is never used: there is one prompt.
    make: Any = GenerationConfig
    config = make(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )
    found = []
    with streamed.resident() as resident:
        model: Any = resident
        # What it was made with would fill in what we leave open.
        theirs, model.generation_config = model.generation_config, make()
        try:
            for number, prompt in enumerate(prompts, 1):
                ids = torch.tensor([prompt.ids], device=streamed.device)
                kept = cache()
                options = {} if kept is None else {transformers_internals.cache_argument(resident): kept}
                with around():
                    written = model.generate(
                        ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
                    )
                found.append(tuple(written[0, len(prompt.ids) :].tolist()))
                if progress is not None:
                    progress(number)
        finally:
            model.generation_config = theirs
    return found


def side_by_side(
    prompts: Sequence[Prompt],
    source: Sequence[Sequence[int]],
    output: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Two models' continuations, as eval.json has them.

    Returns:
        For each prompt `prompt`, `source` and `output` as text, and `differs_at`: the number of the first token that
        is another one, counted from 0, None if they are equal.
    """
    return [
        {
            "prompt": prompt.text,
            "source": tokenizer.decode(ours),
            "output": tokenizer.decode(theirs),
            "differs_at": _differs_at(ours, theirs),
        }
        for prompt, ours, theirs in zip(prompts, source, output, strict=True)
    ]


def teacher_forced(
    ids: Sequence[int], source: Sequence[int], output: Sequence[int], tokenizer: Tokenizer, tokens: int = TOKENS
) -> dict[str, Any]:
    """What two models would have written next at each place of a text, given the text up to there.

    Args:
        ids: the text's tokens.
        source: at each of them, the token that the source finds most likely to come next.
        output: the same of the output.
        tokenizer: the model's.
        tokens: places that are shown.

    Returns:
        As one of side_by_side(), with `text`, what does come next there, and `"along": True`, which says that the
        tokens of `source` and `output` are no continuous text.
    """
    start = max(1, min(_BEFORE, len(ids) // 2))
    places = slice(start - 1, min(start - 1 + tokens, len(ids) - 1))
    ours, theirs = list(source)[places], list(output)[places]
    return {
        "prompt": tokenizer.decode(ids[:start]),
        "source": tokenizer.decode(ours),
        "output": tokenizer.decode(theirs),
        "differs_at": _differs_at(ours, theirs),
        "text": tokenizer.decode(ids[start : start + len(ours)]),
        "along": True,
    }


def _differs_at(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = zip(ours, theirs, strict=False)
    found = next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), None)
    # One may have ended before the other.
    return min(len(ours), len(theirs)) if found is None and len(ours) != len(theirs) else found

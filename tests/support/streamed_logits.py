"""A checkpoint's logits by the streamed pass and by transformers alone, on texts shorter and longer than its windows.

streamed.py DIRECTORY...      in a process of its own, with whichever transformers is there; a line of JSON each
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.interleaved import ForwardPass, run_interleaved
from openquant.streaming.model import StreamedModel


def text_of(length: int) -> torch.Tensor:
    return torch.randint(10, 500, (1, length), generator=torch.Generator().manual_seed(length))


# The second is longer than what small models pick from or take at a time (64).
SHORT, LONG = text_of(32), text_of(96)
BATCHES = (SHORT, LONG)
# In config.json of those that look no farther than a window, and of those that take 256 at a time.
WINDOWS = ("sliding_window", "attention_chunk_size")
CHUNKED = ("mamba_d_head", "mamba_head_dim")


def batches_for(directory: Path) -> Sequence[torch.Tensor]:
    """Texts for a checkpoint: in bfloat16 a processor takes a second for those beyond a window."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    reaches = [config[key] for key in WINDOWS if config.get(key)] + [256 for key in CHUNKED if config.get(key)]
    return SHORT, text_of(max(reaches) + 64) if reaches else LONG


def streamed_logits(model: StreamedModel, batches: Sequence[torch.Tensor] = BATCHES, **options) -> list[torch.Tensor]:
    """The logits of each batch, in a group of its own."""
    found: dict[int, torch.Tensor] = {}
    run_interleaved(
        [[forward(model, batch)] for batch in batches],
        finished=lambda group, _, value: found.__setitem__(group, value),
        **options,
    )
    return [found[number] for number in range(len(batches))]


def forward(model: StreamedModel, batch: torch.Tensor, **options) -> ForwardPass[torch.Tensor]:
    return ForwardPass(model, lambda: model.model(input_ids=batch, use_cache=False).logits, **options)


def plain_logits(directory: Path, kind: type, batches: Sequence[torch.Tensor] = BATCHES) -> list[torch.Tensor]:
    """As that class of transformers loads and computes them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model, report = kind.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
        assert not report["missing_keys"], report["missing_keys"]
        return [model.eval()(input_ids=batch, use_cache=False).logits for batch in batches]


def all_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


class _InOrder:
    """Shards that lie in a directory, whose model must ask for each unit once, and in this order."""

    def __init__(self, root: Path, order: Sequence[str]) -> None:
        self.root, self.left = root, list(order)

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        del stopped
        assert what in self.left, f"{what} comes after those that it was to come before: {self.left}"
        del self.left[: self.left.index(what) + 1]

    def path(self, name: str) -> Path:
        return self.root / name

    def release(self, what: str) -> None:
        assert what not in self.left


def computes_the_same(source: Path, plain: Path | None = None, long: bool = True) -> bool:
    """Whether a checkpoint's logits are those of transformers alone, to the last bit; where it is quantized, of another
    directory that has its weights decoded. Of a short text, and if `long` also of one longer than its windows.
    """
    model = StreamedModel(open_checkpoint(source))
    model.shard_provider = _InOrder(source, model.order)
    batches = batches_for(source) if long else (SHORT,)
    found = streamed_logits(model, batches)
    return not any(map(torch.isnan, map(torch.sum, found))) and all_equal(
        found, plain_logits(plain or source, type(model.model), batches)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for directory in sys.argv[1:]:
        print(json.dumps([directory, computes_the_same(Path(directory))]), flush=True)

"""tiny-qwen3 with outliers: the same function, with some inputs of each layer sixteen times as large as they were.

Models of billions of weights have such channels. Powers of two are exact in bfloat16, so the twin answers as the model
does: rounding it is what is hard.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from support import small_checkpoints

# Of the inputs made by a norm, by v and by up those that are made larger, of 256, 128 and 768.
NORM, VALUE, UP = 8, 4, 24
HEADS, KV_HEADS, HEAD = 4, 2, 64


def twin(example: Path, root: Path, factor: float = 16, seed: int = 0) -> Path:
    """A directory with the twin of tiny-qwen3, tokenizer included."""
    shutil.copytree(example, root, copy_function=shutil.copyfile)
    small_checkpoints.change_weights(root, lambda weights: inject(weights, factor, seed))
    return root


def inject(weights: dict[str, torch.Tensor], factor: float, seed: int) -> None:
    """Make inputs larger where they are made, and divide the columns of all that read them."""
    generator = torch.Generator().manual_seed(seed)

    def picked(size: int, count: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)[:count]

    for layer in range(4):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for norm, readers in (
            ("input_layernorm", [f"{attention}.{name}_proj.weight" for name in "qkv"]),
            ("post_attention_layernorm", [f"{mlp}.{name}_proj.weight" for name in ("gate", "up")]),
        ):
            channels = picked(256, NORM)
            weights[f"model.layers.{layer}.{norm}.weight"][channels] *= factor
            for name in readers:
                weights[name][:, channels] /= factor
        channels = picked(KV_HEADS * HEAD, VALUE)
        weights[f"{attention}.v_proj.weight"][channels] *= factor
        for head in range(HEADS):
            # Heads of queries that read the same head of values.
            read = channels[channels // HEAD == head * KV_HEADS // HEADS] % HEAD
            weights[f"{attention}.o_proj.weight"][:, head * HEAD + read] /= factor
        channels = picked(768, UP)
        weights[f"{mlp}.up_proj.weight"][channels] *= factor
        weights[f"{mlp}.down_proj.weight"][:, channels] /= factor

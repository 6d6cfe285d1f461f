"""How long an evaluation takes, reckoned before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..forward.products import products_in_float32

# Seconds for each logit of a pair of models, and for each weight that is decoded and held against the source's.
LOGIT, WEIGHT = 2e-8, 2e-8
_SIDE, _TOKENS = 1024, 256


@dataclass(frozen=True)
class Work:
    """What there is to compute.

    Attributes:
        nbytes: of the source's weights.
        itemsize: bytes of each.
        vocabulary: tokens that a model knows.
        passes: how often texts go through a model: the source's own, the floor's, one or two of each output.
        outputs: number of outputs.
    """

    nbytes: int
    itemsize: int
    vocabulary: int
    passes: int
    outputs: int

    def seconds(self, tokens: int, device: str) -> float:
        """About how long it takes, by the speed of a product on this device now."""
        weights = self.nbytes / self.itemsize
        products = 2 * weights * tokens * self.passes / _speed(device)
        return products + LOGIT * self.vocabulary * tokens * (self.passes - 1) + WEIGHT * weights * self.outputs


def _speed(device: str) -> float:
    """Floating-point operations in a second, in products of bfloat16."""
    x, weight = (torch.ones(size, _SIDE, dtype=torch.bfloat16, device=device) for size in (_TOKENS, _SIDE))
    best = float("inf")
    with torch.inference_mode(), products_in_float32(device):
        for _ in range(5):
            begin = time.perf_counter()
            functional.linear(x, weight).float().sum().item()
            best = min(best, time.perf_counter() - begin)
    return 2 * _TOKENS * _SIDE * _SIDE / best


def spoken(seconds: float) -> str:
    """A time for people: "5 seconds", "3 minutes", "2.5 hours"."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 90:
        return f"{round(seconds)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"

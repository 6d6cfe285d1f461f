"""Limits the number of threads that torch computes a model's layers with.

with limited_threads(threads_for(streamed, tokens=512)):
    run_interleaved(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..machine import available_cpus
from .model import StreamedModel

# Multiplications of a layer below which one thread is faster: about ten milliseconds of one core. For layers of 200,000
# weights and 512 tokens, two threads took longer than one, and more processor time.
LEAST_PRODUCTS = 1 << 29


def threads_for(model: StreamedModel, tokens: int) -> int:
    """Return how many threads are fastest for a model.

    Args:
        model: the model.
        tokens: tokens of each text.

    Returns:
        1 if its layers are small; else torch's number of threads, at most the CPUs that this process may use.
    """
    layers = [model.units[unit] for unit in model.layers]
    largest = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0)
    return 1 if largest * tokens < LEAST_PRODUCTS else min(torch.get_num_threads(), available_cpus())


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads, 1 or more, inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""How many threads torch computes a model's layers with.

with limited_threads(threads_for(streamed, tokens=512)):
    ...         # the layers are computed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..machine import available_cpus
from . import transformers_internals
from .model import StreamedModel

# Products of a layer's weights with tokens below which one thread is quicker: about ten milliseconds of one core. Of
# layers of 200,000 weights on texts of 512 tokens two threads took longer than one, and more processor time.
LEAST_PRODUCTS = 1 << 29


def threads_for(model: StreamedModel, tokens: int) -> int:
    """The number of threads for texts of so many tokens: as many as torch has, at most the CPUs that this process may
    use, and one where layers are small."""
    head = transformers_internals.output_head(model.model)
    layers = [module for module in model.units.values() if module is not head and not isinstance(module, nn.Embedding)]
    largest = max((sum(each.numel() for each in layer.parameters()) for layer in layers), default=0)
    return 1 if largest * tokens < LEAST_PRODUCTS else min(torch.get_num_threads(), available_cpus())


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Have torch use so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

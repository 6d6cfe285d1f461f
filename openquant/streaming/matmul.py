"""Multiplies bfloat16 matrices in float32 on CPUs without bfloat16 instructions, and rounds the products to bfloat16.

On such CPUs torch takes eight times as long for bfloat16 as for float32. CPUs with the instructions also sum in float32
and round, so results are the same up to the order of sums.

    with products_in_float32():
        model(input_ids=ids, use_cache=False)

Limits the number of threads that torch computes a model's layers with.

with limited_threads(threads_for(streamed, tokens=512)):
    run_interleaved(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..machine import available_cpus
from .model import StreamedModel

# Weights that are converted to float32 at once: 2 MB. That is small beside a large layer, and little enough for malloc
# to reuse the memory for the next piece; the system would zero fresh memory first.
PIECE = 1 << 19


def products_in_float32(device: str = "cpu") -> AbstractContextManager[Any]:
    """Return a context manager in which this thread multiplies bfloat16 matrices in float32, if that is faster.

    Args:
        device: the device that computes. Nothing changes on others than "cpu", and on CPUs with bfloat16 instructions.
    """
    return nullcontext() if device != "cpu" or _multiplies_bfloat16() else Float32Products()


def _multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 with oneDNN. Without that library it multiplies slowly."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


class Float32Products(TorchFunctionMode):
    """Computes matrix products and attention of bfloat16 tensors in float32 and rounds the results to bfloat16."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bfloat16:
            return product(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _whole(func: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A product of activations only, which are small enough to be converted whole."""
    product: torch.Tensor = func(*map(_to_float32, args), **{name: _to_float32(kwargs[name]) for name in kwargs})
    return product.bfloat16()


def _linear(
    _func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    x32 = x.float()
    if weight.numel() <= PIECE:
        return functional.linear(x32, weight.float(), _to_float32(bias)).bfloat16()
    product = x.new_empty(*x.shape[:-1], weight.shape[0])
    step = max(1, PIECE // weight.shape[1])
    for low in range(0, weight.shape[0], step):
        rows = slice(low, low + step)
        part = functional.linear(x32, weight[rows].float(), None if bias is None else bias[rows].float())
        product[..., rows] = part
    return product


def _grouped(
    _func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_other: Any
) -> torch.Tensor:
    """As torch._grouped_mm: rows of x up to each offset in `offs` [experts], times that expert's weight [in, out]."""
    product = x.new_zeros(x.shape[0], weight.shape[-1])
    low = 0
    for expert, high in enumerate(offs.tolist()):
        if high > low:
            product[low:high] = x[low:high].float() @ weight[expert].float()
        low = high
    return product


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


_PRODUCTS: Mapping[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.linear: _linear,
    torch._grouped_mm: _grouped,
    **dict.fromkeys(
        (
            functional.scaled_dot_product_attention,
            *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
            *(getattr(torch.Tensor, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__")),
        ),
        _whole,
    ),
}


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

"""Products of bfloat16 matrices on processors without instructions for them, where torch takes eight times as long as
in float32: they are computed in float32 and rounded, as such instructions do it.

    with products_in_float32():
        model(input_ids=ids, use_cache=False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Weights of a matrix that are in float32 at once: 2 MB, a small part of a large layer, and little enough for malloc to
# keep the memory for the next piece (memory.py), where fresh memory would be zeroed first.
PIECE = 1 << 19


def products_in_float32(device: str = "cpu") -> AbstractContextManager[Any]:
    """Meanwhile products of bfloat16 on this thread are computed in float32, where that is quicker.

    Args:
        device: what computes; on anything but a CPU, and on CPUs that multiply bfloat16, nothing changes.
    """
    return nullcontext() if device != "cpu" or _multiplies_bfloat16() else Float32Products()


def _multiplies_bfloat16() -> bool:
    """As torch itself decides it; where it was built without that library it multiplies slowly."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and bool(asked())


class Float32Products(TorchFunctionMode):
    """Products of bfloat16 are computed in float32 and rounded; what else torch does is as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = _PRODUCTS.get(func)
        if own is not None and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bfloat16:
            return own(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _whole(func: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of activations alone, which are small."""
    made: torch.Tensor = func(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})
    return made.bfloat16()


def _linear(
    _func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    wide = x.float()
    if weight.numel() <= PIECE:
        return functional.linear(wide, weight.float(), _wide(bias)).bfloat16()
    made = x.new_empty(*x.shape[:-1], weight.shape[0])
    step = max(1, PIECE // weight.shape[1])
    for low in range(0, weight.shape[0], step):
        rows = slice(low, low + step)
        made[..., rows] = functional.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return made


def _grouped(
    _func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_other: Any
) -> torch.Tensor:
    """Rows of tokens up to each of `offs` times the matrix of one expert."""
    made = x.new_zeros(x.shape[0], weight.shape[-1])
    low = 0
    for expert, high in enumerate(offs.tolist()):
        if high > low:
            made[low:high] = x[low:high].float() @ weight[expert].float()
        low = high
    return made


def _wide(value: Any) -> Any:
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

"""The noise floor: what bfloat16 rounding alone changes. The source runs again with rounding noise after each layer.

Two programs that compute the same model in bfloat16 add in different orders, so their results are sometimes rounded to
different neighbours. A difference between two models that is no larger than this noise means nothing.

Each layer's output is in bfloat16 already. Its value before rounding is taken to lie anywhere within half a step of it,
and is rounded stochastically: one value in eight moves a step up, one a step down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RoundingNoise:
    """Adds bfloat16 rounding noise to the outputs of modules, while a context of `drawn_from` is entered.

    Args:
        modules: the decoder layers of a model. Their `forward` is replaced.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._generator: torch.Generator | None = None
        for module in modules:
            # Not a hook: hidden states must have the noise before other hooks compare them.
            module.forward = self._noisy(module.forward)

    def drawn_from(self, generator: torch.Generator) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes contexts in which noise is added, for `ForwardPass.around`.

        Args:
            generator: draws the noise, on the CPU. Give each pass its own: then its noise depends on the generator's
                seed alone, not on other passes.
        """

        @contextmanager
        def on() -> Iterator[None]:
            self._generator = generator
            try:
                yield
            finally:
                self._generator = None

        return on

    def _noisy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noisy(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._generator is None:
                return output
            if isinstance(output, tuple):
                return (stochastic_round(output[0], self._generator), *output[1:])
            return stochastic_round(output, self._generator)

        return noisy


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round values stochastically to bfloat16.

    A value between two bfloat16 numbers becomes either; the nearer it is to one, the more probable is that one. Values
    of dtype bfloat16 have been rounded already: each moves a step up with a probability of 1/8, and a step down with
    1/8. Zeros, infinities and NaN stay, and so do values that would become infinite.

    Args:
        values: any shape, any floating dtype.
        generator: torch's generator of the noise, on the CPU; the device of `values` does not matter.

    Returns:
        The rounded values, with the shape and dtype of `values`.
    """
    bits = values.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32).to(bits.device)
    if values.dtype == torch.bfloat16:
        rounded_off = torch.randint(-(1 << 15), 1 << 15, bits.shape, generator=generator, dtype=torch.int32)
        noise += rounded_off.to(bits.device)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    rounded_values = rounded.to(values.dtype)
    # A step below zero would be NaN, a step above the largest value infinity, and one above a NaN could be a number.
    valid = (values != 0) & values.isfinite() & rounded_values.isfinite()
    return torch.where(valid, rounded_values, values)

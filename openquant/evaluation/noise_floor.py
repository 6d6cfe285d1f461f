"""The floor: what rounding alone changes. Each layer's output is rounded to bfloat16 once more, by chance.

Two programs that compute the same model in bfloat16 differ so: they add in another order, and where a result lies
between two values they round it the other way. No figure of an output means anything below that of its source beside
itself with this noise.

A layer gives bfloat16 already. Its value before rounding is taken to lie anywhere within half a step of that, and from
there goes up or down with a chance that grows with how near it is: one value in eight goes a step up, one a step down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RoundingNoise:
    """Rounds what modules give, while it is on.

    Args:
        modules: the decoder layers of a model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._chance: torch.Generator | None = None
        for module in modules:
            # Not a hook: outputs must have the noise by the time they are compared.
            module.forward = self._noisy(module.forward)

    def source(self, seed: int) -> Callable[[], Any]:
        """What a pass computes in, as Pass.around: one seed, one noise, whatever else is computed in between."""
        chance = torch.Generator().manual_seed(seed)

        @contextmanager
        def on() -> Iterator[None]:
            self._chance = chance
            try:
                yield
            finally:
                self._chance = None

        return on

    def _noisy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noisy(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._chance is None:
                return output
            if isinstance(output, tuple):
                return (stochastic_round(output[0], self._chance), *output[1:])
            return stochastic_round(output, self._chance)

        return noisy


def stochastic_round(values: Tensor, chance: torch.Generator) -> Tensor:
    """Values rounded to bfloat16 by chance, of their shape and dtype; those of bfloat16 may go a step up or down."""
    bits = values.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32).to(bits.device)
    if values.dtype == torch.bfloat16:
        within = torch.randint(-(1 << 15), 1 << 15, bits.shape, generator=chance, dtype=torch.int32)
        noise += within.to(bits.device)
    made = ((bits + noise) & -(1 << 16)).view(torch.float32)
    # A step below zero would be NaN, and one above the largest value infinity.
    sound = (values != 0) & made.isfinite()
    return torch.where(sound, made, values.float()).to(values.dtype)

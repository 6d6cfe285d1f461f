"""How far a pass through a model's layers is, in tokens, and how long the rest will take.

progress = PassProgress(layer_costs(streamed, layers), tokens=16 * 512, advanced=advanced, remaining=remaining)
run(passes, progress=progress.layer_done)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .forecast import Forecast
from .model import StreamedModel

# Told how many tokens are through all layers, counting those that are through some in part, and how many there are.
Advanced = Callable[[int, int], None]
# Told about how many seconds are left.
Remaining = Callable[[float], None]


def layer_costs(model: StreamedModel, layers: Iterable[str]) -> dict[str, float]:
    """About how many products each layer computes for a token: its weights, of routed experts those of one token."""
    config = model.model.config.get_text_config()
    routed = next((count for name in ("num_experts_per_tok", "moe_topk") if (count := getattr(config, name, None))), 1)
    routed = routed if isinstance(routed, int) else 1
    return {
        layer: float(
            sum(
                # Stacked experts have three axes.
                each.numel() if each.ndim < 3 else each[0].numel() * min(routed, len(each))
                for each in model.units[layer].parameters()
            )
        )
        for layer in layers
    }


class PassProgress:
    """Counts the tokens of a pass.

    Args:
        costs: of each layer, in order, what it takes in proportion to others.
        tokens: of all texts, in all models.
        advanced: told of each text that is through a layer.
        remaining: told about how many seconds are left, from the first layer on.
        more: tokens that are computed after the layers.

    Attributes:
        forecast: how long the rest takes; what is computed beside layers can be added.
    """

    def __init__(
        self,
        costs: Mapping[str, float],
        tokens: int,
        advanced: Advanced | None,
        remaining: Remaining | None,
        more: int = 0,
    ) -> None:
        self.forecast = Forecast(costs)
        self._numbers = {layer: number for number, layer in enumerate(costs)}
        self._first: int | None = None
        self._tokens, self._more, self._done = tokens, more, 0
        self._advanced, self._remaining = advanced, remaining

    def layer_done(self, unit: str, group: int, groups: int) -> None:
        """A group of texts is through a unit; group 0 where they will go through it once more."""
        number = self._numbers.get(unit)
        if number is None:
            # An embedding table, or a layer that an earlier run was through.
            self.forecast.restart()
        elif group:
            if self._first is None:
                # Layers before it are those of towers for images, which no text goes through.
                self._first = number
            layers = len(self._numbers) - self._first
            self._done = int(self._tokens * (number - self._first + group / groups) / layers)
            if group == groups:
                self.forecast.done(unit)
        self._report()

    def more_done(self, tokens: int) -> None:
        """So many of the tokens that come after the layers are computed."""
        self._done += tokens
        self._report()

    def _report(self) -> None:
        if self._advanced is not None:
            self._advanced(min(self._done, self._tokens + self._more), self._tokens + self._more)
        left = self.forecast.remaining()
        if self._remaining is not None and left is not None:
            self._remaining(left)

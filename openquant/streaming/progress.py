"""Reports the progress of forward passes through a model's layers, in tokens, and the estimated remaining time.

progress = PassProgress(layer_costs(streamed, layers), tokens=16 * 512, advanced=advanced, remaining=remaining)
run_interleaved(passes, progress=progress.layer_done, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .forecast import Forecast
from .model import StreamedModel

# Called with the number of tokens that are done, where a token that is through half of the layers counts half, and the
# number of all tokens.
Advanced = Callable[[int, int], None]
# Called with the estimated remaining seconds.
Remaining = Callable[[float], None]


def layer_costs(model: StreamedModel, layers: Iterable[str]) -> dict[str, float]:
    """Estimate the multiplications of each layer for a token: its weights, and of experts those that a token goes to.

    Args:
        model: the model.
        layers: names of its units.

    Returns:
        For each, the number of weights that a token is multiplied with.
    """
    return {layer: sum(products(model, layer, 1).values()) for layer in layers}


def products(model: StreamedModel, layer: str, tokens: int) -> dict[int, float]:
    """Count the multiplications of a layer for a token.

    Args:
        model: the model.
        layer: name of its unit.
        tokens: tokens of a text.

    Returns:
        The number of weights that a token is multiplied with, by the number of tokens that such a weight is multiplied
        with at once: of a text all, of an expert those that go to it on average, at least one.
    """
    config = model.model.config.get_text_config()
    routed = next((count for name in ("num_experts_per_tok", "moe_topk") if (count := getattr(config, name, None))), 1)
    experts_per_token = routed if isinstance(routed, int) else 1
    counts: dict[int, float] = {}
    for weight in model.units[layer].parameters():
        at_once, count = tokens, float(weight.numel())
        # Stacked experts have three axes.
        if weight.ndim >= 3:
            experts = min(experts_per_token, len(weight))
            at_once, count = max(1, tokens * experts // len(weight)), float(weight[0].numel() * experts)
        counts[at_once] = counts.get(at_once, 0.0) + count
    return counts


class PassProgress:
    """Counts the tokens of forward passes and forecasts the remaining time.

    Args:
        costs: relative cost of each layer, in the order they are computed.
        tokens: the number of tokens of all texts, in all models.
        advanced: called whenever a batch is through a layer; None for no call.
        remaining: called with the remaining seconds, from the end of the first layer on; None for no call.
        more: the number of tokens that are computed before or after, such as those of answers to prompts.

    Attributes:
        forecast: estimates the remaining time; other steps can be added to it.
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
        # Number of the first layer that text goes through: layers of vision towers come before it.
        self._first: int | None = None
        self._tokens, self._more, self._done, self._more_done = tokens, more, 0, 0
        self._advanced, self._remaining = advanced, remaining

    def layer_done(self, unit: str, done: int, batches: int) -> None:
        """Note that batches are through a unit; for `run_interleaved`'s `progress`.

        Args:
            unit: name of the unit.
            done: how many batches are through it; 0 if they will be computed once more.
            batches: the number of batches.
        """
        number = self._numbers.get(unit)
        if number is None:
            # An embedding table, or a layer that an earlier run computed.
            self.forecast.restart()
        elif done:
            if self._first is None:
                self._first = number
            layers = len(self._numbers) - self._first
            self._done = int(self._tokens * (number - self._first + done / batches) / layers)
            if done == batches:
                self.forecast.done(unit)
        self._report()

    def more_done(self, tokens: int) -> None:
        """Note that so many of the tokens before or after the layers are computed."""
        self._more_done += tokens
        self._report()

    def _report(self) -> None:
        if self._advanced is not None:
            total = self._tokens + self._more
            self._advanced(min(self._done + self._more_done, total), total)
        seconds = self.forecast.remaining()
        if self._remaining is not None and seconds is not None:
            self._remaining(seconds)

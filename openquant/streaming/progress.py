"""Reports the progress of forward passes through a model's layers, in tokens, weighted by the cost of layers.

progress = PassProgress(layer_costs(streamed, layers), tokens=16 * 512, advanced=advanced)
run_interleaved(passes, progress=progress.layer_done, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from .model import StreamedModel

# Called with the number of tokens that are done and of all tokens.
Advanced = Callable[[int, int], None]


def layer_costs(model: StreamedModel, layers: Iterable[str]) -> dict[str, float]:
    """Estimate the multiplications of each layer for a token: its weights, and of experts those that a token goes to.

    Args:
        model: the model.
        layers: names of its units.

    Returns:
        For each, the number of weights that a token is multiplied with.
    """
    config = model.model.config.get_text_config()
    routed = next((count for name in ("num_experts_per_tok", "moe_topk") if (count := getattr(config, name, None))), 1)
    experts_per_token = routed if isinstance(routed, int) else 1

    def multiplied(weight: Tensor) -> float:
        # Stacked experts have three axes.
        if weight.ndim < 3:
            return float(weight.numel())
        return float(weight[0].numel() * min(experts_per_token, len(weight)))

    return {layer: sum(map(multiplied, model.units[layer].parameters())) for layer in layers}


class PassProgress:
    """Counts the tokens of forward passes. A token that is through layers of half the cost counts half.

    Args:
        costs: relative cost of each layer, in the order they are computed.
        tokens: the number of tokens of all texts, in all models.
        advanced: called whenever a batch is through a layer; None for no call.
        more: the number of tokens that are computed before or after, such as those of answers to prompts.
    """

    def __init__(self, costs: Mapping[str, float], tokens: int, advanced: Advanced | None, more: int = 0) -> None:
        self._left, self._tokens, self._more = dict(costs), tokens, more
        # Cost of the layers that are done, and of all that text goes through; what is done of the others.
        self._cost = self._total = 0.0
        self._more_done = 0
        self._advanced = advanced

    def layer_done(self, unit: str, done: int, batches: int) -> None:
        """Note that batches are through a unit; for `run_interleaved`'s `progress`.

        Args:
            unit: name of the unit.
            done: how many batches are through it; 0 if they will be computed once more.
            batches: the number of batches.
        """
        cost = self._left.get(unit, 0.0)
        if not cost or not done:
            # An embedding table, a layer that an earlier run computed, or one that is computed once more.
            self._report(0.0)
            return
        if not self._total:
            # Layers of vision towers come before the first one that text goes through.
            names = list(self._left)
            self._left = {name: self._left[name] for name in names[names.index(unit) :]}
            self._total = sum(self._left.values())

        if done == batches:
            self._cost += self._left.pop(unit)
            self._report(0.0)
        else:
            self._report(cost * done / batches)

    def more_done(self, tokens: int) -> None:
        """Note that so many of the tokens before or after the layers are computed."""
        self._more_done += tokens
        self._report(0.0)

    def _report(self, of_layer: float) -> None:
        """Say how far the passes are; of_layer: cost of what is done of a layer that is not."""
        if self._advanced is None:
            return
        share = (self._cost + of_layer) / self._total if self._total else 0.0
        total = self._tokens + self._more
        self._advanced(min(int(self._tokens * share) + self._more_done, total), total)

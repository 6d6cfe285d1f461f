"""What is counted as texts go through models, by layer and pass, and put together where several processes count.

Nothing depends on the order in which documents come: numbers are added as integers, and distances are kept by document
and added without rounding in between.

    mine.add_counts(theirs.counts())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..streaming.hooks import holds_experts

# As JSON has them.
Counts = list[list[Any]]


class HiddenStateDistances:
    """Relative distances of hidden states, by layer and pass: the mean over all tokens.

    Attributes:
        layers: in the order in which texts go through them.
    """

    def __init__(self) -> None:
        self.layers: dict[str, None] = {}
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._tokens: dict[tuple[str, int], int] = {}
        self._source: Tensor | None = None

    def add(self, layer: str, number: int, hidden: Tensor) -> None:
        """Add what a layer gave in a pass; that of the source, number 0, comes first."""
        self.layers[layer] = None
        states = hidden.reshape(-1, hidden.shape[-1]).float()
        if number == 0:
            self._source = states
            return
        assert self._source is not None
        norms = self._source.norm(dim=-1)
        apart = (states - self._source).norm(dim=-1) / norms.clamp(min=torch.finfo(torch.float32).tiny)
        self._add(layer, number, [float(apart.double().sum())], len(apart))

    def _add(self, layer: str, number: int, sums: Iterable[float], tokens: int) -> None:
        self._sums.setdefault((layer, number), []).extend(sums)
        self._tokens[layer, number] = self._tokens.get((layer, number), 0) + tokens

    def of(self, layer: str, number: int) -> float:
        """The distance after a layer in a pass."""
        return math.fsum(self._sums[layer, number]) / self._tokens[layer, number]

    def counts(self) -> Counts:
        """What `add_counts` of another process takes: layer, pass, sum of each document, tokens."""
        return [[*key, sums, self._tokens[key]] for key, sums in self._sums.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add what another process has counted."""
        for layer, number, sums, tokens in counts:
            self._add(layer, number, sums, tokens)


def _chosen(
    module: Any, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
) -> Tensor:
    """The experts of each token [tokens, ..], equal for equal choices, of what a module of stacked experts is given."""
    del top_k_weights
    if top_k_index is not None:
        return top_k_index.sort(-1).values
    # Llama 4 gives every expert all tokens, as zeros where it was not chosen.
    return hidden_states.view(module.num_experts, -1, hidden_states.shape[-1]).any(-1).T


class RouteCounts:
    """Which experts tokens go to, by module and pass.

    Attributes:
        number: the pass that is computed now; that of the source, 0, comes first. None while it is none of a text's.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._source: dict[str, Tensor] = {}
        self._counts: dict[tuple[str, int], list[int]] = {}

    def watch(self, model: nn.Module) -> None:
        """Look at all modules of stacked experts of a model."""
        for name, module in model.named_modules():
            if holds_experts(module):
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.number is None:
                return
            chosen = _chosen(module, *args, **kwargs)
            if self.number == 0:
                self._source[name] = chosen
                return
            self._add(name, self.number, int((chosen != self._source[name]).any(-1).sum()), len(chosen))

        return before

    def _add(self, name: str, number: int, otherwise: int, tokens: int) -> None:
        counts = self._counts.setdefault((name, number), [0, 0])
        counts[0] += otherwise
        counts[1] += tokens

    def of(self, layer: str, number: int) -> float | None:
        """The share of tokens that go to other experts than the source's in a layer; None where it has no experts."""
        found = [
            otherwise / total
            for (name, at), (otherwise, total) in self._counts.items()
            if at == number and name.startswith(f"{layer}.")
        ]
        return max(found, default=None)

    def counts(self) -> Counts:
        """What `add_counts` of another process takes: module, pass, tokens that go elsewhere, all tokens."""
        return [[*key, *counts] for key, counts in self._counts.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add what another process has counted."""
        for each in counts:
            self._add(*each)

"""Counters of hidden-state distances and expert routing, by layer and pass; those of several processes add up.

The results do not depend on the order of documents or on the number of processes: counts are integers, and distances
are kept for each document and summed exactly (math.fsum).

    counter.add_counts(other_process.counts())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..streaming.hooks import holds_experts

# Rows that JSON can hold.
Counts = list[list[Any]]


class HiddenStateDistances:
    """Relative distances of hidden states from the source's, ||h' - h|| / ||h||, averaged over all tokens.

    Attributes:
        layers: names of the decoder layers as keys, in the order in which they run.
    """

    def __init__(self) -> None:
        self.layers: dict[str, None] = {}
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._tokens: dict[tuple[str, int], int] = {}
        self._source: Tensor | None = None

    def add(self, layer: str, number: int, hidden: Tensor) -> None:
        """Add the hidden states of one document after a layer.

        Args:
            layer: name of the layer.
            number: number of the pass. Pass 0 is the source's; it must come first for each layer and document.
            hidden: hidden states [..., hidden], any floating dtype.
        """
        states = hidden.reshape(-1, hidden.shape[-1]).float()
        if number == 0:
            self._source = states
            return
        assert self._source is not None
        norms = self._source.norm(dim=-1)
        distances = (states - self._source).norm(dim=-1) / norms.clamp(min=torch.finfo(torch.float32).tiny)
        self._add(layer, number, [float(distances.double().sum())], len(distances))

    def _add(self, layer: str, number: int, sums: Iterable[float], tokens: int) -> None:
        self.layers[layer] = None
        self._sums.setdefault((layer, number), []).extend(sums)
        self._tokens[layer, number] = self._tokens.get((layer, number), 0) + tokens

    def mean(self, layer: str, number: int) -> float:
        """Return the mean relative distance of all tokens after a layer in a pass.

        Args:
            layer: name of the layer.
            number: number of the pass, from 1; the source's has no distances.

        Raises:
            KeyError: no document went through that layer in that pass.
        """
        return math.fsum(self._sums[layer, number]) / self._tokens[layer, number]

    def counts(self) -> Counts:
        """Return rows for `add_counts` of another process: layer, pass, list of each document's sum, tokens."""
        return [[*key, sums, self._tokens[key]] for key, sums in self._sums.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add the rows that `counts` of another process returned."""
        for layer, number, sums, tokens in counts:
            self._add(layer, number, sums, tokens)


def _expert_choice(
    module: Any, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
) -> Tensor:
    """Return [tokens, ...], rows that are equal if two passes send a token to the same experts.

    The parameters are those of the forward of transformers' modules of stacked experts.
    """
    del top_k_weights
    if top_k_index is not None:
        return top_k_index.sort(-1).values
    # Llama 4 passes all tokens to every expert, as zeros to those that were not chosen.
    return hidden_states.view(module.num_experts, -1, hidden_states.shape[-1]).any(-1).T


class RouteCounts:
    """Counts tokens that are routed to other experts than in the source, by module and pass.

    Attributes:
        pass_number: number of the pass that runs now, set by the caller. Pass 0 is the source's and must come first.
            None if nothing is to be counted, such as while prompts are answered.
    """

    def __init__(self) -> None:
        self.pass_number: int | None = None
        self._source: dict[str, Tensor] = {}
        self._counts: dict[tuple[str, int], list[int]] = {}

    def register_hooks(self, model: nn.Module) -> None:
        """Register hooks on all modules of stacked experts of a model."""
        for name, module in model.named_modules():
            if holds_experts(module):
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.pass_number is None:
                return
            experts = _expert_choice(module, *args, **kwargs)
            if self.pass_number == 0:
                self._source[name] = experts
                return
            self._add(name, self.pass_number, int((experts != self._source[name]).any(-1).sum()), len(experts))

        return before

    def _add(self, name: str, number: int, rerouted: int, tokens: int) -> None:
        counts = self._counts.setdefault((name, number), [0, 0])
        counts[0] += rerouted
        counts[1] += tokens

    def share(self, layer: str, number: int) -> float | None:
        """Return the share of tokens of a pass that a layer routes to other experts than in the source.

        Args:
            layer: name of the decoder layer.
            number: number of the pass, from 1.

        Returns:
            The largest share in any of its modules of experts, 0 to 1; None if it has none or nothing was counted.
        """
        shares = [
            rerouted / total
            for (name, counted_pass), (rerouted, total) in self._counts.items()
            if counted_pass == number and name.startswith(f"{layer}.")
        ]
        return max(shares, default=None)

    def counts(self) -> Counts:
        """Return rows for `add_counts` of another process: module, pass, rerouted tokens, all tokens."""
        return [[*key, *counts] for key, counts in self._counts.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add the rows that `counts` of another process returned."""
        for row in counts:
            self._add(*row)

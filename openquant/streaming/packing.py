"""Packs continuations of contexts into sequences, so that tokens that several of them begin with are computed once.

A pack is a tree of tokens that is flattened to one sequence. Each token attends to its ancestors, and its position is
their number, so it is computed as if its request were alone. Requests of models for which that is not so (see
`packing_of`) are sequences of their own, mostly padded at the end and several to a batch.

    packs = make_packs([ChoiceRequest((1, 2, 3), (4,)), ChoiceRequest((1, 2, 3), (5, 6))], length=512, packing="tree")
    packs[0].ids        # [[1, 2, 3, 5]]: the last token of a choice is predicted and need not be computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..registry.architecture import Architecture
from . import transformers_internals

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Kinds of decoder layers that read a mask of four axes: attention over all tokens, a window or a chunk.
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
# Keys of config.json that hold the tokens of a window or a chunk.
_WINDOWS = ("sliding_window", "attention_chunk_size")

# How requests are computed: as trees that share tokens, several to a batch, or each in a pass of its own.
Packing = Literal["tree", "batch", "alone"]


@dataclass(frozen=True)
class ChoiceRequest:
    """A continuation whose probability is asked for.

    Attributes:
        context: token ids before it, at least one.
        choice: its token ids, at least one.
    """

    context: tuple[int, ...]
    choice: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The token ids that a model must read: all but the last, which is only predicted."""
        return (self.context + self.choice)[:-1]


@dataclass(frozen=True)
class Pack:
    """Requests that are computed in one forward pass.

    Attributes:
        ids: token ids [batch, tokens].
        positions: position of each token in its request [batch, tokens].
        parents: for each token of the only sequence the index of the token before it, -1 if none [tokens]; None if each
            sequence is one request.
        rows: indices of the tokens whose predictions are needed, ascending, in the flattened ids.
        requests: numbers of the pack's requests.
        predictions: for each token of each choice [n, 3]: index into `requests`, index into `rows`, the token's id.
    """

    ids: Integers
    positions: Integers
    parents: Integers | None
    rows: Integers
    requests: tuple[int, ...]
    predictions: Integers

    def visible(self) -> Flags:
        """Return which tokens each token attends to [tokens, tokens], if requests are packed."""
        assert self.parents is not None
        visible = np.eye(len(self.parents), dtype=np.bool_)
        for token, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                visible[token] |= visible[parent]
        return visible


def packing_of(model: PreTrainedModel, entry: Architecture | None, longest: int) -> Packing:
    """Choose how requests are computed, so that each gets the logits that it would get alone.

    A tree takes a model whose layers are all attention, which reads positions, and whose windows and chunks hold the
    longest request. A batch takes a causal model: what follows a request does not change it.

    Args:
        model: the model.
        entry: the registry's entry of its class; None if it has none. The entries' classes are tested, others are not.
        longest: the most tokens that a request has.
    """
    if entry is None or entry.attends_ahead:
        return "alone"

    config: Any = model.config
    parts = [config, config.get_text_config()]
    kinds = {kind for part in parts for kind in getattr(part, "layer_types", None) or ()}
    windows = [size for part in parts for name in _WINDOWS if isinstance(size := getattr(part, name, None), int)]
    is_tree = (
        kinds <= _ATTENTION
        and all(longest <= size for size in windows if size > 0)
        and "position_ids" in signature(model.forward).parameters
        # Biases by distance are made from the order of tokens.
        and not any(getattr(part, "alibi", False) for part in parts)
        and not transformers_internals.is_stateful(model)
    )
    return "tree" if is_tree else "batch"


def make_packs(requests: Sequence[ChoiceRequest], length: int, packing: Packing) -> list[Pack]:
    """Divide requests among packs.

    Args:
        requests: the requests; those with the same beginning should follow one another.
        length: the most tokens of a pack, unless a single request has more.
        packing: how requests are computed.
    """
    if packing == "tree":
        return _trees(requests, length)
    return _batches(requests, length if packing == "batch" else 0)


class _Tree:
    """Tokens of a pack that is being filled; equal beginnings are one path from the root."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.parents: list[int] = []
        self.children: dict[tuple[int, int], int] = {}
        self.requests: list[int] = []
        # ChoiceRequest's index in the pack, token that predicts, token that is predicted.
        self.predictions: list[tuple[int, int, int]] = []

    def missing(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a sequence the tree lacks."""
        node = -1
        for number, token in enumerate(ids):
            child = self.children.get((node, token))
            if child is None:
                return len(ids) - number
            node = child
        return 0

    def add(self, number: int, request: ChoiceRequest) -> None:
        """Add a request, with its number."""
        node = -1
        path = []
        for position, token in enumerate(request.inputs):
            child = self.children.get((node, token))
            if child is None:
                child = self.children[node, token] = len(self.ids)
                self.ids.append(token)
                self.positions.append(position)
                self.parents.append(node)
            node = child
            path.append(node)

        at = len(self.requests)
        self.requests.append(number)
        self.predictions += (
            (at, predictor, token)
            for predictor, token in zip(path[len(request.context) - 1 :], request.choice, strict=True)
        )

    def pack(self) -> Pack:
        """Return the filled pack."""
        ids = np.array([self.ids], np.int64)
        positions = np.array([self.positions], np.int64)
        return _pack(ids, positions, np.array(self.parents, np.int64), self.requests, self.predictions)


def _trees(requests: Sequence[ChoiceRequest], length: int) -> list[Pack]:
    packs = []
    tree = _Tree()
    for number, request in enumerate(requests):
        if tree.requests and len(tree.ids) + tree.missing(request.inputs) > length:
            packs.append(tree.pack())
            tree = _Tree()
        tree.add(number, request)
    return [*packs, tree.pack()] if tree.requests else packs


def _batches(requests: Sequence[ChoiceRequest], length: int) -> list[Pack]:
    # Requests of about the same length need little padding.
    order = sorted(range(len(requests)), key=lambda number: len(requests[number].inputs))
    groups: list[list[int]] = []
    for number in order:
        if groups and (len(groups[-1]) + 1) * len(requests[number].inputs) <= length:
            groups[-1].append(number)
        else:
            groups.append([number])

    packs = []
    for group in groups:
        width = len(requests[group[-1]].inputs)
        # What follows a request does not change it. Its last token is repeated, as some models have no padding token.
        inputs = [requests[number].inputs for number in group]
        ids = np.array([ids + ids[-1:] * (width - len(ids)) for ids in inputs], np.int64)
        predictions = [
            (at, at * width + len(requests[number].context) - 1 + offset, token)
            for at, number in enumerate(group)
            for offset, token in enumerate(requests[number].choice)
        ]
        packs.append(_pack(ids, np.tile(np.arange(width), (len(group), 1)), None, group, predictions))
    return packs


def _pack(
    ids: Integers,
    positions: Integers,
    parents: Integers | None,
    requests: Sequence[int],
    predictions: Sequence[tuple[int, int, int]],
) -> Pack:
    """Make a pack; `predictions` have the request's index, the token that predicts, and the token that is predicted."""
    table = np.array(predictions, np.int64)
    rows, table[:, 1] = np.unique(table[:, 1], return_inverse=True)
    return Pack(ids, positions, parents, rows, tuple(requests), table)


def packed_logits(model: PreTrainedModel, pack: Pack, device: str, cache: Any = None) -> Tensor:
    """Compute the logits of a pack's predictions; to be called inside of a ForwardPass.

    Args:
        model: the model; if the pack has parents, one for which `packing_of` is "tree".
        pack: the pack.
        device: the model's device.
        cache: KV cache of transformers, such as Fp8Cache; None for none.

    Returns:
        The logits [rows, vocabulary] in the model's dtype.
    """
    options: dict[str, Any] = {"input_ids": torch.from_numpy(pack.ids).to(device), "use_cache": cache is not None}
    rows = torch.from_numpy(pack.rows).to(device)
    if cache is not None:
        options[transformers_internals.cache_argument(model)] = cache

    if pack.parents is not None:
        options["position_ids"] = torch.from_numpy(pack.positions).to(device)
        # A copy, because torch cannot move a tensor to the scratch file that numpy made.
        visible = torch.from_numpy(pack.visible()).to(device, copy=True)[None, None]
        options["attention_mask"] = transformers_internals.tree_mask(model, visible)
        if "logits_to_keep" in signature(model.forward).parameters:
            options["logits_to_keep"] = rows

    logits: Tensor = model(**options).logits
    flat = logits.flatten(0, 1)
    return flat if len(flat) == len(rows) else flat[rows]

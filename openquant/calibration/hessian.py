"""Gram matrices of what goes into the layers of a model, added up as texts run through it.

Joined layers have one input, and one matrix. Each routed expert has two, of the tokens that come to it: of what goes
into gate and up, and into down. All of a layer's may be more than memory has room for, so that they are added up in
parts, for each of which the texts go through the layer once more.

    units = find_grams(model, plan)             # {"model.layers.0": Unit(..), ..}
    summing = Summing(model.model, units.values())
    for part in units["model.layers.0"].parts(room):
        ...                                     # with summing.on() and part.open: texts go through the layer
        part[0].take()                          # [in, in]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..files.tensors import TensorInfo
from ..formats.schemes import Scheme
from ..plan.gptq import made_of
from ..plan.plan import Plan
from ..registry.rules import Entry
from ..streaming.hooks import Experts, Interception
from ..streaming.model import StreamedModel
from ..weights.weight import Weight
from .observers import Seen, decoder_layers, find_sites

# Columns that are multiplied with those from them on: a Gram matrix is the same on both sides of its diagonal.
PANEL = 256
# Tokens' worth of what goes into all experts of a layer that counts beside what goes into each: gate and up of those
# that few tokens come to are rounded by that.
BESIDE = 64


@dataclass(eq=False)
class Gram:
    """The Gram matrix of what goes into some layers, so far.

    Attributes:
        width: how many inputs they have.
        weights: what is multiplied by it and will be rounded, each with its scheme.
        beside: of what goes into all experts of the layer, where it is that of one; None where there is no such thing.
        open: whether it is being added up.
        tokens: how many there were.
        sums: float32 [in, in], what is on and above the diagonal; None before the first text.
    """

    width: int
    weights: list[tuple[Weight, Scheme]] = field(default_factory=list)
    beside: Gram | None = None
    open: bool = False
    tokens: int = 0
    sums: Tensor | None = None

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """What becomes of its weights."""
        for weight, scheme in self.weights:
            yield from made_of(weight, scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of it and of what becomes of its weights."""
        return 4 * self.width**2 + sum(info.nbytes for info in self.tensors)

    def add(self, values: Tensor) -> None:
        """Add activations [..., in], if it is being added up."""
        tokens = values.reshape(-1, self.width).float()
        if not self.open or not len(tokens):
            return
        if self.sums is None:
            self.sums = torch.zeros(self.width, self.width, device=tokens.device)
        self.tokens += len(tokens)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            self.sums[low:high, low:].addmm_(tokens[:, low:high].T, tokens[:, low:])

    def take(self) -> Tensor:
        """The whole matrix, with its share of what goes into all experts; here it is nothing any more."""
        sums, self.sums, self.open = self.sums, None, False
        if sums is None:
            sums = torch.zeros(self.width, self.width)
        if self.beside is not None and self.beside.sums is not None:
            sums = sums.to(self.beside.sums.device).add_(self.beside.sums, alpha=BESIDE / self.beside.tokens)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            sums[high:, low:high] = sums[low:high, high:].T
        return sums


@dataclass(frozen=True, eq=False)
class Stack:
    """What goes into gate and up of a layer's experts, or into down.

    Attributes:
        grams: by expert.
        whole: of all tokens, as they are before they are routed; None for down, whose inputs come sorted by experts.
    """

    grams: Mapping[int, Gram]
    whole: Gram | None


@dataclass(frozen=True, eq=False)
class Unit:
    """The Gram matrices of a decoder layer.

    Attributes:
        layers: of its Linears, by module; joined ones have one.
        experts: of its modules of stacked experts.
    """

    layers: dict[str, Gram] = field(default_factory=dict)
    experts: dict[str, Experts[Stack]] = field(default_factory=dict)

    @property
    def stacks(self) -> list[Stack]:
        """Those of all its modules of experts."""
        return [each for both in self.experts.values() for each in (both.first, both.down) if each is not None]

    @property
    def grams(self) -> list[Gram]:
        """Each once, but for what stands beside others."""
        found = [*self.layers.values(), *(gram for stack in self.stacks for gram in stack.grams.values())]
        return [gram for gram in dict.fromkeys(found) if gram.weights]

    @property
    def wholes(self) -> list[Gram]:
        """Those that stand beside others."""
        return [stack.whole for stack in self.stacks if stack.whole is not None]


def parts_of(grams: Sequence[Gram], room: int) -> list[list[Gram]]:
    """Gram matrices in parts that take so many bytes each, with what becomes of their weights; at least one in each."""
    parts: list[list[Gram]] = []
    held = room
    for gram in grams:
        if held + gram.nbytes > room:
            parts.append([])
            held = 0
        parts[-1].append(gram)
        held += gram.nbytes
    return parts


class Summing(Interception[Gram | Stack]):
    """Adds up Gram matrices of what goes into layers, while it is on."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        layers: dict[str, Gram | Stack] = {}
        experts: dict[str, Experts[Gram | Stack]] = {}
        for unit in units:
            layers.update(unit.layers)
            experts.update({name: Experts(both.first, both.down) for name, both in unit.experts.items()})
        super().__init__(model, layers, experts)

    def put(self, values: Tensor, into: Gram | Stack, place: str) -> Tensor:
        """Activations, which stay as they are."""
        if isinstance(into, Gram):
            self._once(id(into), values, lambda: into.add(values))
        elif (routing := self._routed[place]) is not None:
            rows = values.reshape(-1, values.shape[-1])
            if into.whole is None:
                for expert, own in routing.of_sorted(rows):
                    if expert in into.grams:
                        into.grams[expert].add(own)
                return values
            into.whole.add(rows)
            for expert, gram in into.grams.items():
                if gram.open:
                    gram.add(routing.of(expert, rows))
        return values


def find_grams(model: StreamedModel, plan: Plan) -> dict[str, Unit]:
    """The Gram matrices of each decoder layer that has any, by its name."""
    wanted: dict[str, list[tuple[Weight, Scheme]]] = {}
    for weight, scheme in plan.carried:
        wanted.setdefault(weight.source.name, []).append((weight, scheme))
    units: dict[str, Unit] = {}
    together: dict[tuple[str, ...], Gram] = {}
    layers, experts = find_sites(model)

    def gram_of(found: list[tuple[Weight, Scheme]], beside: Gram | None = None) -> Gram:
        """The one of weights that have one input, beside others that are joined with them."""
        weight = found[0][0]
        key = plan.fates.sets.get(weight.module, (weight.module,))
        gram = together.setdefault(key, Gram(weight.shape[1], beside=beside))
        gram.weights += found
        return gram

    def stack_of(seen: Seen | None, first: bool) -> Stack | None:
        """Those of the experts of a layer; None where nothing of them is rounded."""
        found: dict[int, list[tuple[Weight, Scheme]]] = {}
        for each in (each for tensor in (seen.tensors if seen is not None else ()) for each in wanted.get(tensor, ())):
            if seen is not None and each[0].shape[1] == seen.width:
                found.setdefault(expert_of(each[0], plan.entry), []).append(each)
        if not found or seen is None:
            return None
        whole = Gram(seen.width) if first else None
        return Stack({expert: gram_of(each, whole) for expert, each in found.items()}, whole)

    for name, seen in layers.items():
        found = [each for tensor in seen.tensors for each in wanted.get(tensor, ())]
        if found and all(weight.shape[1] == seen.width for weight, _ in found):
            units.setdefault(model.unit_of(name), Unit()).layers[name] = gram_of(found)
    for name, both in experts.items():
        stacks = Experts(stack_of(both.first, first=True), stack_of(both.down, first=False))
        if stacks.first is not None or stacks.down is not None:
            units.setdefault(model.unit_of(name), Unit()).experts[name] = stacks
    # Of a scale that joined layers share all parts are made here, or none.
    for key, gram in together.items():
        modules = {weight.module for weight, _ in gram.weights}
        gram.weights = [each for each in gram.weights if not each[1].format.tied or modules.issuperset(key)]
    order = decoder_layers(model)
    return {unit: units[unit] for unit in sorted(units, key=order.index)}


def expert_of(weight: Weight, entry: Entry) -> int:
    """The number of the expert that a weight is of: 7 of "model.layers.0.mlp.experts.7.up_proj"."""
    if weight.expert >= 0:
        return weight.expert
    path = entry.experts(weight.module)
    assert path is not None
    return int(weight.module.removeprefix(f"{path}.").partition(".")[0])

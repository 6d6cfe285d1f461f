"""Gram matrices of what goes into the layers of a model, added up as texts run through it.

Joined layers have one input, and one matrix. Each routed expert has two, of the tokens that come to it: of what goes
into gate and up, and into down. All of a layer's may be more than memory has room for, so that they are added up in
parts, for each of which the texts go through the layer once more.

    units = find_grams(model, plan)             # {"model.layers.0": LayerHessians(..), ..}
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
from ..plan.gptq import rounded_tensors
from ..plan.plan import Plan
from ..registry.rules import ModuleRules
from ..streaming.hooks import ExpertWeights, ModuleHooks
from ..streaming.model import StreamedModel
from ..weights.weight import Weight
from .observers import RunningStatistics, decoder_layers, find_hook_points

# Columns that are multiplied with those from them on: a Gram matrix is the same on both sides of its diagonal.
PANEL = 256
# Tokens' worth of what goes into all experts of a layer that counts beside what goes into each: gate and up of those
# that few tokens come to are rounded by that.
BESIDE = 64


@dataclass(eq=False)
class Hessian:
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
    beside: Hessian | None = None
    open: bool = False
    tokens: int = 0
    sums: Tensor | None = None

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """What becomes of its weights."""
        for weight, scheme in self.weights:
            yield from rounded_tensors(weight, scheme)

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
class ExpertInputs:
    """What goes into gate and up of a layer's experts, or into down.

    Attributes:
        hessians: by expert.
        whole: of all tokens, as they are before they are routed; None for down, whose inputs come sorted by experts.
    """

    hessians: Mapping[int, Hessian]
    whole: Hessian | None


@dataclass(frozen=True, eq=False)
class LayerHessians:
    """The Gram matrices of a decoder layer.

    Attributes:
        layers: of its Linears, by module; joined ones have one.
        experts: of its modules of stacked experts.
    """

    layers: dict[str, Hessian] = field(default_factory=dict)
    experts: dict[str, ExpertWeights[ExpertInputs]] = field(default_factory=dict)

    @property
    def stacks(self) -> list[ExpertInputs]:
        """Those of all its modules of experts."""
        return [each for both in self.experts.values() for each in (both.first, both.down) if each is not None]

    @property
    def hessians(self) -> list[Hessian]:
        """Each once, but for what stands beside others."""
        found = [*self.layers.values(), *(hessian for stack in self.stacks for hessian in stack.hessians.values())]
        return [hessian for hessian in dict.fromkeys(found) if hessian.weights]

    @property
    def wholes(self) -> list[Hessian]:
        """Those that stand beside others."""
        return [stack.whole for stack in self.stacks if stack.whole is not None]


def in_memory_parts(hessians: Sequence[Hessian], room: int) -> list[list[Hessian]]:
    """Gram matrices in parts that take so many bytes each, with what becomes of their weights; at least one in each."""
    parts: list[list[Hessian]] = []
    held = room
    for hessian in hessians:
        if held + hessian.nbytes > room:
            parts.append([])
            held = 0
        parts[-1].append(hessian)
        held += hessian.nbytes
    return parts


class HessianObserver(ModuleHooks[Hessian | ExpertInputs]):
    """Adds up Gram matrices of what goes into layers, while it is on."""

    def __init__(self, model: nn.Module, units: Iterable[LayerHessians]) -> None:
        layers: dict[str, Hessian | ExpertInputs] = {}
        experts: dict[str, ExpertWeights[Hessian | ExpertInputs]] = {}
        for unit in units:
            layers.update(unit.layers)
            experts.update({name: ExpertWeights(both.first, both.down) for name, both in unit.experts.items()})
        super().__init__(model, layers, experts)

    def put(self, values: Tensor, into: Hessian | ExpertInputs, place: str) -> Tensor:
        """Activations, which stay as they are."""
        if isinstance(into, Hessian):
            self._once(id(into), values, lambda: into.add(values))
        elif (routing := self._routed[place]) is not None:
            rows = values.reshape(-1, values.shape[-1])
            if into.whole is None:
                for expert, own in routing.of_sorted(rows):
                    if expert in into.hessians:
                        into.hessians[expert].add(own)
                return values
            into.whole.add(rows)
            for expert, hessian in into.hessians.items():
                if hessian.open:
                    hessian.add(routing.of(expert, rows))
        return values


def find_hessians(model: StreamedModel, plan: Plan) -> dict[str, LayerHessians]:
    """The Gram matrices of each decoder layer that has any, by its name."""
    wanted: dict[str, list[tuple[Weight, Scheme]]] = {}
    for weight, scheme in plan.gptq_rounded:
        wanted.setdefault(weight.source.name, []).append((weight, scheme))
    units: dict[str, LayerHessians] = {}
    together: dict[tuple[str, ...], Hessian] = {}
    layers, experts = find_hook_points(model)

    def gram_of(found: list[tuple[Weight, Scheme]], beside: Hessian | None = None) -> Hessian:
        """The one of weights that have one input, beside others that are joined with them."""
        weight = found[0][0]
        key = plan.decisions.sets.get(weight.module, (weight.module,))
        hessian = together.setdefault(key, Hessian(weight.shape[1], beside=beside))
        hessian.weights += found
        return hessian

    def stack_of(seen: RunningStatistics | None, first: bool) -> ExpertInputs | None:
        """Those of the experts of a layer; None where nothing of them is rounded."""
        found: dict[int, list[tuple[Weight, Scheme]]] = {}
        for each in (each for tensor in (seen.tensors if seen is not None else ()) for each in wanted.get(tensor, ())):
            if seen is not None and each[0].shape[1] == seen.width:
                found.setdefault(expert_number(each[0], plan.entry), []).append(each)
        if not found or seen is None:
            return None
        whole = Hessian(seen.width) if first else None
        return ExpertInputs({expert: gram_of(each, whole) for expert, each in found.items()}, whole)

    for name, seen in layers.items():
        found = [each for tensor in seen.tensors for each in wanted.get(tensor, ())]
        if found and all(weight.shape[1] == seen.width for weight, _ in found):
            units.setdefault(model.unit_of(name), LayerHessians()).layers[name] = gram_of(found)
    for name, both in experts.items():
        stacks = ExpertWeights(stack_of(both.first, first=True), stack_of(both.down, first=False))
        if stacks.first is not None or stacks.down is not None:
            units.setdefault(model.unit_of(name), LayerHessians()).experts[name] = stacks
    # Of a scale that joined layers share all parts are made here, or none.
    for key, hessian in together.items():
        modules = {weight.module for weight, _ in hessian.weights}
        hessian.weights = [
            each for each in hessian.weights if not each[1].format.shares_scale or modules.issuperset(key)
        ]
    order = decoder_layers(model)
    return {unit: units[unit] for unit in sorted(units, key=order.index)}


def expert_number(weight: Weight, entry: ModuleRules) -> int:
    """The number of the expert that a weight is of: 7 of "model.layers.0.mlp.experts.7.up_proj"."""
    if weight.expert >= 0:
        return weight.expert
    path = entry.experts(weight.module)
    assert path is not None
    return int(weight.module.removeprefix(f"{path}.").partition(".")[0])

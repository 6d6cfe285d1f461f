"""Hessians of a model's layers, accumulated while texts run through it.

The Hessian of a layer is H = X'X, where the rows of X [tokens, in] are the inputs of all tokens that go into the layer.
Fused layers have the same inputs and share one. A routed expert has two: over the inputs of gate and up, and over those
of down, of the tokens that are routed to it. All Hessians of a decoder layer may not fit in memory. They are then
accumulated in parts, and texts run through the layer once for each part.

    units = find_hessians(model, plan)             # {"model.layers.0": LayerHessians(..), ..}
    observer = HessianObserver(model.model, units.values())
    for part in in_memory_parts(units["model.layers.0"].hessians, max_bytes):
        ...                                        # set `accumulating` of the part, run texts with observer.on()
        part[0].pop_matrix()                       # float32 [in, in]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..files.shardfile import TensorInfo
from ..formats.schemes import Scheme
from ..plan.decisions import rounded_tensors
from ..plan.plan import Plan
from ..registry.architecture import ModuleRules
from ..streaming.hooks import ExpertWeights, ModuleHooks
from ..streaming.model import StreamedModel
from ..weights.weight import Weight
from .observers import RunningStatistics, find_hook_points

# Rows of the upper triangle that one product computes: a Hessian is symmetric, its lower triangle is copied at the end.
PANEL = 256
# How many tokens the Hessian of the MoE layer counts for in that of each expert's gate and up: it decides how experts
# that few tokens are routed to are rounded.
MOE_TOKENS = 64


@dataclass(eq=False)
class Hessian:
    """The Hessian of layers that have the same inputs, as far as it is accumulated.

    Attributes:
        width: number of inputs.
        weights: the weights that GPTQ rounds with it, each with its scheme.
        moe_hessian: for gate and up of an expert: the Hessian over all tokens of its MoE layer. None for down and for
            dense layers.
        accumulating: whether `add` adds.
        tokens: number of tokens added.
        upper: float32 [in, in], whose upper triangle, with the diagonal, is the sum; None before the first token.
    """

    width: int
    weights: list[tuple[Weight, Scheme]] = field(default_factory=list)
    moe_hessian: Hessian | None = None
    accumulating: bool = False
    tokens: int = 0
    upper: Tensor | None = None

    @property
    def output_tensors(self) -> Iterator[TensorInfo]:
        """Codes, scales and zero points that rounding its weights makes."""
        for weight, scheme in self.weights:
            yield from rounded_tensors(weight, scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of its output tensors."""
        return 4 * self.width**2 + sum(info.nbytes for info in self.output_tensors)

    def add(self, inputs: Tensor) -> None:
        """Add inputs [..., in] of any float dtype, if it is accumulating."""
        tokens = inputs.reshape(-1, self.width).float()
        if not self.accumulating or not len(tokens):
            return
        if self.upper is None:
            self.upper = torch.zeros(self.width, self.width, device=tokens.device)
        self.tokens += len(tokens)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            self.upper[low:high, low:].addmm_(tokens[:, low:high].T, tokens[:, low:])

    def pop_matrix(self) -> Tensor:
        """Return the symmetric matrix, float32 [in, in], including the share of the MoE layer, and free it here."""
        matrix, self.upper, self.accumulating = self.upper, None, False
        if matrix is None:
            matrix = torch.zeros(self.width, self.width)
        if self.moe_hessian is not None and self.moe_hessian.upper is not None:
            upper = self.moe_hessian.upper
            matrix = matrix.to(upper.device).add_(upper, alpha=MOE_TOKENS / self.moe_hessian.tokens)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            matrix[high:, low:high] = matrix[low:high, high:].T
        return matrix


@dataclass(frozen=True, eq=False)
class ExpertHessians:
    """The Hessians of gate and up of an MoE layer's experts, or of down.

    Attributes:
        by_expert: Hessian of each expert, by its index.
        moe_hessian: the Hessian over all tokens before routing; None for down, whose inputs come sorted by expert.
    """

    by_expert: Mapping[int, Hessian]
    moe_hessian: Hessian | None


@dataclass(frozen=True, eq=False)
class LayerHessians:
    """All Hessians of one decoder layer.

    Attributes:
        linears: Hessian of each nn.Linear, by module name; fused layers have the same object.
        experts: Hessians of each module of stacked experts, by module name.
    """

    linears: dict[str, Hessian] = field(default_factory=dict)
    experts: dict[str, ExpertWeights[ExpertHessians]] = field(default_factory=dict)

    @property
    def _expert_hessians(self) -> list[ExpertHessians]:
        return [stack for points in self.experts.values() for stack in (points.first, points.down) if stack is not None]

    @property
    def hessians(self) -> list[Hessian]:
        """The Hessians that weights are rounded with, each once; without those of MoE layers."""
        experts = (hessian for stack in self._expert_hessians for hessian in stack.by_expert.values())
        return [hessian for hessian in dict.fromkeys([*self.linears.values(), *experts]) if hessian.weights]

    @property
    def moe_hessians(self) -> list[Hessian]:
        """The Hessians over all tokens of MoE layers."""
        return [stack.moe_hessian for stack in self._expert_hessians if stack.moe_hessian is not None]


def in_memory_parts(hessians: Sequence[Hessian], max_bytes: int) -> list[list[Hessian]]:
    """Divide Hessians into consecutive parts that fit in memory, so that texts run through the layer once for each.

    Args:
        hessians: Hessians of one decoder layer, each with the weights that are rounded with it.
        max_bytes: bytes that the matrices and output tensors of a part may take; a larger Hessian is a part alone.

    Returns:
        The parts, in the order of `hessians`.
    """
    parts: list[list[Hessian]] = []
    nbytes = max_bytes
    for hessian in hessians:
        if nbytes + hessian.nbytes > max_bytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(hessian)
        nbytes += hessian.nbytes
    return parts


class HessianObserver(ModuleHooks[Hessian | ExpertHessians]):
    """Adds the inputs of layers to their Hessians while it is on.

    Args:
        model: the transformers model.
        units: Hessians of its decoder layers.
    """

    def __init__(self, model: nn.Module, units: Iterable[LayerHessians]) -> None:
        linears: dict[str, Hessian | ExpertHessians] = {}
        experts: dict[str, ExpertWeights[Hessian | ExpertHessians]] = {}
        for unit in units:
            linears.update(unit.linears)
            experts.update({name: ExpertWeights(points.first, points.down) for name, points in unit.experts.items()})
        super().__init__(model, linears, experts)

    def on_input(self, values: Tensor, into: Hessian | ExpertHessians, place: str) -> Tensor:
        """Add the inputs of a module to its Hessians, those of them that accumulate.

        Args:
            values: the inputs, [..., in]; for down of stacked experts the rows are sorted by expert.
            into: the Hessian of a Linear, or those of a module of stacked experts.
            place: the module's name.

        Returns:
            `values`, unchanged.
        """
        if isinstance(into, Hessian):
            self._once(id(into), values, lambda: into.add(values))
        elif (routing := self._routed[place]) is not None:
            rows = values.reshape(-1, values.shape[-1])
            if into.moe_hessian is None:
                for expert, expert_rows in routing.split_sorted(rows):
                    if expert in into.by_expert:
                        into.by_expert[expert].add(expert_rows)
                return values
            into.moe_hessian.add(rows)
            for expert, hessian in into.by_expert.items():
                # Selecting an expert's rows takes time.
                if hessian.accumulating:
                    hessian.add(routing.rows_of(expert, rows))
        return values


def find_hessians(model: StreamedModel, plan: Plan) -> dict[str, LayerHessians]:
    """Find the Hessians that GPTQ needs for a plan, none of them accumulated yet.

    Args:
        model: the model that texts run through.
        plan: says which weights GPTQ rounds, and which layers are fused.

    Returns:
        The Hessians of each decoder layer that has any, by its full module name ("model.layers.0"), in the order in
        which layers are computed.
    """
    rounded: dict[str, list[tuple[Weight, Scheme]]] = {}
    for weight, scheme in plan.gptq_rounded:
        rounded.setdefault(weight.source.name, []).append((weight, scheme))
    units: dict[str, LayerHessians] = {}
    by_fused_group: dict[tuple[str, ...], Hessian] = {}
    linears, experts = find_hook_points(model)

    def hessian_of(weights: list[tuple[Weight, Scheme]], moe_hessian: Hessian | None = None) -> Hessian:
        """The Hessian of weights that have the same inputs, shared with the layers that they are fused with."""
        weight = weights[0][0]
        group = plan.decisions.fused.get(weight.module, (weight.module,))
        hessian = by_fused_group.setdefault(group, Hessian(weight.shape[1], moe_hessian=moe_hessian))
        hessian.weights += weights
        return hessian

    def expert_hessians(statistics: RunningStatistics | None, gate_up: bool) -> ExpertHessians | None:
        """The Hessians of one projection of all experts; None if GPTQ rounds none of its weights."""
        if statistics is None:
            return None
        weights: dict[int, list[tuple[Weight, Scheme]]] = {}
        for tensor in statistics.tensors:
            for weight, scheme in rounded.get(tensor, ()):
                if weight.shape[1] == statistics.width:
                    weights.setdefault(expert_index(weight, plan.entry), []).append((weight, scheme))
        if not weights:
            return None
        moe_hessian = Hessian(statistics.width) if gate_up else None
        return ExpertHessians(
            {expert: hessian_of(pairs, moe_hessian) for expert, pairs in weights.items()}, moe_hessian
        )

    for name, statistics in linears.items():
        weights = [pair for tensor in statistics.tensors for pair in rounded.get(tensor, ())]
        if weights and all(weight.shape[1] == statistics.width for weight, _ in weights):
            units.setdefault(model.unit_of(name), LayerHessians()).linears[name] = hessian_of(weights)
    for name, points in experts.items():
        stacks = ExpertWeights(expert_hessians(points.first, gate_up=True), expert_hessians(points.down, gate_up=False))
        if stacks.first is not None or stacks.down is not None:
            units.setdefault(model.unit_of(name), LayerHessians()).experts[name] = stacks
    # Fused layers that share a scale are rounded together: all of them, or none.
    for group, hessian in by_fused_group.items():
        modules = {weight.module for weight, _ in hessian.weights}
        hessian.weights = [
            pair for pair in hessian.weights if not pair[1].format.shares_scale or modules.issuperset(group)
        ]
    return {unit: units[unit] for unit in sorted(units, key=model.layers.index)}


def expert_index(weight: Weight, entry: ModuleRules) -> int:
    """Return the index of the expert that a weight belongs to: 7 for "model.layers.0.mlp.experts.7.up_proj".

    Args:
        weight: a weight of an expert.
        entry: rules of the architecture, which name its modules of experts.
    """
    if weight.expert >= 0:
        return weight.expert
    path = entry.experts(weight.module)
    assert path is not None
    return int(weight.module.removeprefix(f"{path}.").partition(".")[0])

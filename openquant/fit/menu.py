"""What `--fit` can choose: units of layers, each with its size in every scheme, and the best mixtures by scores.

A unit is a group of layers that need one scheme, such as q, k and v.

    units = units_of(plans)
    units[0].modules                     # ("model.layers.0.self_attn.q_proj", ..k_proj, ..v_proj)
    units[0].choices["nvfp4"].nbytes     # 995_328

The frontier has every mixture that no other beats in both size and predicted KL divergence.

    frontier = find_frontier([[(995_328, 0.004), (1_769_472, 0.0001)], ...])
    frontier.within(70_000_000)          # index of the best mixture of at most so many bytes
    frontier.choices(index)              # [0, 1, 1, ...]: the choice of each unit
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import PlanError, UsageError
from ..formats.hardware import ENGINES_FOR, GPU, schemes_on
from ..formats.schemes import Scheme, find_scheme
from ..job import Opened
from ..patterns import group_pairs
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.engines import sglang_refusal
from ..plan.layout import written_bytes
from ..plan.plan import Plan, make_plan
from ..registry.architecture import Architecture
from ..weights.weight import Weight

# Schemes that are chosen from if none are named: weights only, of all sizes from four bits on.
CANDIDATES = ("int4", "nvfp4", "int5", "int6", "int8-weights")


@dataclass(frozen=True, eq=False)
class Menu:
    """What can be chosen: a plan for each scheme, and the units with their choices.

    Attributes:
        plans: by name of the scheme.
        units: the units.
        fixed: bytes of everything else in the output.
    """

    plans: Mapping[str, Plan]
    units: Sequence[Unit]
    fixed: int

    @property
    def plan(self) -> Plan:
        """One of the plans, for what they have in common."""
        return next(iter(self.plans.values()))

    @property
    def smallest(self) -> int:
        """Bytes of all weights of the smallest output."""
        return self.fixed + sum(min(choice.nbytes for choice in unit.choices.values()) for unit in self.units)

    @property
    def largest(self) -> int:
        """Bytes of all weights with all units unquantized."""
        return self.fixed + sum(unit.choices[UNQUANTIZED].nbytes for unit in self.units)

    def bytes_of_bits(self, bits: float) -> int:
        """Bytes of all weights if those of the units have so many bits each."""
        # Two decimals are meant: nvfp4 has a little more than 4.5 bits.
        return self.fixed + int((bits + 0.005) * sum(unit.elements for unit in self.units) / 8)

    def size(self, mixture: Mixture) -> int:
        """Bytes of all weights of the output with a mixture."""
        return self.fixed + sum(unit.choices[mixture[number]].nbytes for number, unit in enumerate(self.units))

    def uniform(self, name: str) -> Mixture:
        """The mixture in which each unit has one scheme, as far as it can."""
        return {number: name if name in unit.choices else UNQUANTIZED for number, unit in enumerate(self.units)}


class BestMixtures:
    """The best mixtures of all sizes, by their predicted KL divergence.

    Args:
        menu: the units and their choices.
        scores: KL divergence of each unit in each of its choices.
    """

    def __init__(self, menu: Menu, scores: Scores) -> None:
        self.menu, self.scores = menu, scores
        self._names = [list(unit.choices) for unit in menu.units]
        self.frontier = find_frontier(
            [
                [(unit.choices[name].nbytes, kl[name]) for name in names]
                for unit, names, kl in zip(menu.units, self._names, scores, strict=True)
            ]
        )

    def best(self, nbytes: int) -> Mixture:
        """Return the mixture with the least KL divergence of which all weights take at most so many bytes."""
        index = self.frontier.within(nbytes - self.menu.fixed)
        assert index is not None, "the smallest mixture is larger"
        return self._mixture(index)

    def smallest(self, kl: float) -> Mixture:
        """Return the smallest mixture with at most so large a KL divergence."""
        index = self.frontier.at_most(kl)
        assert index is not None, "unquantized weights lose nothing"
        return self._mixture(index)

    def _mixture(self, index: int) -> Mixture:
        chosen = self.frontier.choices(index)
        return {number: names[at] for number, (names, at) in enumerate(zip(self._names, chosen, strict=True))}

    def predict(self, mixture: Mixture) -> float:
        """Return the predicted KL divergence of a mixture: the sum over its units."""
        return sum(self.scores[number][name] for number, name in mixture.items())

    def best_uniform(self, nbytes: int) -> str | None:
        """Return the scheme with the least KL divergence that fits if all units have it; None if none fits."""
        mixtures = {name: self.menu.uniform(name) for name in self.menu.plans}
        fitting = [name for name, mixture in mixtures.items() if self.menu.size(mixture) <= nbytes]
        return min(fitting, key=lambda name: self.predict(mixtures[name]), default=None)


def make_menu(
    opened: Opened,
    options: PlanOptions,
    names: Sequence[str],
    engines: str,
    gpu: GPU | None,
    entry: Architecture | str | None,
) -> Menu:
    """Make a plan for each scheme that engines load for a model, and have kernels for on a GPU.

    Args:
        opened: the model.
        options: what the plans are made with besides the scheme.
        names: schemes that may be chosen; those of CANDIDATES that can be used if empty.
        engines: "vllm", "sglang" or "both".
        gpu: the GPU; None for any.
        entry: the registry's entry, or its name; None for the one of the model's class.

    Raises:
        UsageError: a name is no scheme, or one that does not mix with others.
        PlanError: a named scheme, or all of those that are not named, cannot be used.
    """
    plans: dict[str, Plan] = {}
    problem: PlanError | None = None

    for scheme in _schemes(names):
        try:
            plan = make_plan(opened.checkpoint, scheme, options, opened.source.identity, entry)
            _require_engines(plan, engines, gpu)
        except PlanError as error:
            problem = error
            if names:
                raise
        else:
            plans[scheme.name] = plan

    units = units_of(plans) if plans else []
    if not units:
        raise problem or PlanError("no scheme of weights alone fits this model", "choose one with --scheme")

    first = next(iter(plans))
    if plans[first].model.repeats:
        raise PlanError(
            f"{plans[first].model.name} runs its layers several times, and --fit measures a layer after its first pass",
            "choose a scheme with --scheme",
        )

    of_units = sum(unit.choices[first if first in unit.choices else UNQUANTIZED].nbytes for unit in units)
    return Menu(plans, units, summary.output_bytes(plans[first]) - of_units)


def _schemes(names: Sequence[str]) -> list[Scheme]:
    """The schemes that may be chosen.

    Raises:
        UsageError: a name is no scheme, or one that does not mix with others.
    """
    schemes = [find_scheme(name) for name in names or CANDIDATES]
    for scheme in schemes:
        if scheme.method == "fp8":
            raise UsageError(
                f"--candidates names {scheme.name}, whose `fp8` config has one scheme for all layers", "name channel"
            )
    return schemes


def _require_engines(plan: Plan, engines: str, gpu: GPU | None) -> None:
    """Raise PlanError unless the engines load a plan's output, and compute it on a GPU."""
    assert plan.decisions.scheme is not None
    name = plan.decisions.scheme.name
    refusal = None if engines == "vllm" else sglang_refusal(plan.entry, plan.decisions)
    if refusal is not None:
        raise PlanError(
            f"SGLang does not load {name} of this model: {refusal.why}", "give --for vllm, or other schemes"
        )
    if gpu is not None:
        experts = any(plan.entry.experts(module) for module in plan.decisions.layers)
        lacking = [one for one in ENGINES_FOR[engines] if name not in schemes_on((one,), gpu.hardware, experts)]
        if lacking:
            message = f"{lacking[0]} has no kernel for {name} on {gpu.name}"
            raise PlanError(message, "name another GPU, or give --for vllm")


# Mixtures that are kept after each unit. With more, of those whose sizes are closest only the best is kept.
MOST = 1 << 16


@dataclass(frozen=True, eq=False)
class Frontier:
    """Mixtures, smallest first: each one has a smaller KL divergence than all smaller ones.

    Attributes:
        nbytes: size of each mixture, int64 [n], ascending.
        kl: predicted KL divergence of each, in nats, float64 [n], descending.
    """

    nbytes: npt.NDArray[np.int64]
    kl: npt.NDArray[np.float64]
    _steps: tuple[tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]], ...]

    def within(self, nbytes: int) -> int | None:
        """Return the index of the mixture with the smallest KL divergence of at most so many bytes; None if all are
        larger."""
        index = int(np.searchsorted(self.nbytes, nbytes, "right")) - 1
        return index if index >= 0 else None

    def at_most(self, kl: float) -> int | None:
        """Return the index of the smallest mixture with at most so large a KL divergence; None if there is none."""
        index = int(np.searchsorted(-self.kl, -kl))
        return index if index < len(self.kl) else None

    def choices(self, index: int) -> list[int]:
        """Return the index of each unit's choice in a mixture."""
        chosen: list[int] = []
        for choice, parent in reversed(self._steps):
            chosen.append(int(choice[index]))
            index = int(parent[index])
        return chosen[::-1]


def find_frontier(units: Sequence[Sequence[tuple[int, float]]], most: int = MOST) -> Frontier:
    """Find the best mixtures of all sizes by dynamic programming over units.

    Args:
        units: for each unit its choices: size in bytes and KL divergence.
        most: the number of mixtures that are kept after each unit. Below it the result is exact.

    Returns:
        The mixtures that no other beats in size and KL divergence.
    """
    nbytes, kl = np.zeros(1, np.int64), np.zeros(1)
    steps = []

    for choices in units:
        sizes, costs = np.array([size for size, _ in choices]), np.array([cost for _, cost in choices])
        all_bytes = (nbytes[:, None] + sizes).reshape(-1)
        all_kl = (kl[:, None] + costs).reshape(-1)

        # Only mixtures that no smaller one beats are kept.
        order = np.lexsort((all_kl, all_bytes))
        running = np.minimum.accumulate(all_kl[order])
        best = np.r_[True, running[1:] < running[:-1]]
        kept = order[best]

        if len(kept) > most:
            # The last of each bin of sizes has the least KL divergence of it.
            bins = (all_bytes[kept] - all_bytes[kept[0]]) * most // (all_bytes[kept[-1]] - all_bytes[kept[0]] + 1)
            kept = kept[np.r_[bins[1:] != bins[:-1], True] | np.r_[True, np.zeros(len(kept) - 1, bool)]]

        nbytes, kl = all_bytes[kept], all_kl[kept]
        parent, choice = np.divmod(kept, len(choices))
        steps.append((choice.astype(np.int8), parent.astype(np.int32)))
    return Frontier(nbytes, kl, tuple(steps))


# The name of the choice that leaves a unit in 16 bits.
UNQUANTIZED = "unquantized"


# Of each unit, or of those that are measured together: the choice by the unit's number.
Mixture = Mapping[int, str]


@dataclass(frozen=True)
class UnitChoice:
    """A scheme for a unit.

    Attributes:
        schemes: the scheme of each module; None for those that stay unquantized. A scheme may fall back to another one
            for layers that it does not fit, such as INT4 to smaller groups.
        nbytes: bytes that the unit takes in the output.
    """

    schemes: Mapping[str, Scheme | None]
    nbytes: int

    @property
    def scheme_name(self) -> str:
        """Name of its scheme, or UNQUANTIZED. Embeddings may have another than the one that was asked for."""
        return next((scheme.name for scheme in self.schemes.values() if scheme is not None), UNQUANTIZED)


@dataclass(frozen=True)
class Unit:
    """A group of layers that need one scheme: layers that engines fuse, or all experts of a layer.

    Attributes:
        weights: the layers, by full module name.
        patterns: patterns of module names that match these layers and no others.
        choices: by name of the scheme, or UNQUANTIZED. Of two with the same effect only the first is here.
    """

    weights: Mapping[str, Weight]
    patterns: tuple[str, ...]
    choices: Mapping[str, UnitChoice]

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of its modules."""
        return tuple(self.weights)

    @property
    def elements(self) -> int:
        """The number of its weights."""
        return sum(weight.shape[0] * weight.shape[1] for weight in self.weights.values())


# For each unit the KL divergence of each of its choices in nats, the other units unquantized; 0 for UNQUANTIZED.
Scores = Sequence[Mapping[str, float]]


def units_of(plans: Mapping[str, Plan]) -> list[Unit]:
    """Find the units of a model, and what each takes in each scheme.

    Args:
        plans: a plan of the same source for each scheme, by its name.

    Returns:
        The units in the order of the source. Layers that none of the plans quantizes are in none.
    """
    first = next(iter(plans.values()))
    decisions, entry = first.decisions, first.entry

    groups: dict[str, dict[str, Weight]] = {}
    for module, weight in decisions.layers.items():
        key = entry.experts(module) or decisions.fused.get(module, (module,))[0]
        groups.setdefault(key, {})[module] = weight

    units = []
    for key, weights in groups.items():
        choices: dict[str, UnitChoice] = {}
        for name, plan in plans.items():
            schemes = {module: plan.decisions.of(module).scheme for module in weights}
            if any(schemes.values()) and all(choice.schemes != schemes for choice in choices.values()):
                choices[name] = _choice(weights, schemes)

        if choices:
            choices[UNQUANTIZED] = _choice(weights, dict.fromkeys(weights))
            is_experts = entry.experts(next(iter(weights))) == key
            units.append(Unit(weights, (f"{key}.**",) if is_experts else _patterns(weights), choices))

    return units


def _patterns(modules: Iterable[str]) -> tuple[str, ...]:
    """A pattern for the modules of each parent: ("model.layers.0.self_attn.{q_proj,k_proj,v_proj}",)."""
    parts = (module.rpartition(".") for module in modules)
    by_parent = group_pairs((parent + dot, last) for parent, dot, last in parts)
    return tuple(
        parent + (names[0] if len(names) == 1 else f"{{{','.join(names)}}}") for parent, names in by_parent.items()
    )


def _choice(weights: Mapping[str, Weight], schemes: Mapping[str, Scheme | None]) -> UnitChoice:
    nbytes = sum(written_bytes(weight, schemes[module]) for module, weight in weights.items())
    return UnitChoice(schemes, nbytes)


def bits_per_weight(units: Sequence[Unit], nbytes: int) -> float:
    """Return how many bits a weight of these units has on average, if they take so many bytes."""
    return 8 * nbytes / sum(unit.elements for unit in units)

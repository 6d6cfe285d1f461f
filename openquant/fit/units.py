"""Units: groups of layers that need one scheme, such as q, k and v, with their size in every scheme.

units = units_of(plans)
units[0].modules                     # ("model.layers.0.self_attn.q_proj", ..k_proj, ..v_proj)
units[0].choices["nvfp4"].nbytes     # 995_328
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..formats.schemes import Scheme
from ..plan.layout import output_tensors
from ..plan.plan import Plan
from ..weights.weight import Weight

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


@dataclass(frozen=True)
class Scores:
    """KL divergence of each unit in each of its schemes, the others unquantized.

    Attributes:
        kl: for each unit, by name of the choice, in nats; 0 for UNQUANTIZED.
    """

    kl: Sequence[Mapping[str, float]]


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
    by_parent: dict[str, list[str]] = {}
    for module in modules:
        parent, dot, last = module.rpartition(".")
        by_parent.setdefault(parent + dot, []).append(last)
    return tuple(
        parent + (names[0] if len(names) == 1 else f"{{{','.join(names)}}}") for parent, names in by_parent.items()
    )


def _choice(weights: Mapping[str, Weight], schemes: Mapping[str, Scheme | None]) -> UnitChoice:
    return UnitChoice(
        schemes,
        sum(info.nbytes for module, weight in weights.items() for info in output_tensors(weight, schemes[module])),
    )


def bits_per_weight(units: Sequence[Unit], nbytes: int) -> float:
    """Return how many bits a weight of these units has on average, if they take so many bytes."""
    return 8 * nbytes / sum(unit.elements for unit in units)

"""What `--fit` can choose: a plan for each scheme, the units with their choices, and the best mixtures by scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import PlanError, UsageError
from ..formats.hardware import ENGINES_FOR, GPU, schemes_on
from ..formats.schemes import Scheme, find_scheme
from ..job import Opened
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.engines import sglang_refusal
from ..plan.plan import Plan, make_plan
from ..registry.architecture import Architecture
from .allocation import find_frontier
from .units import UNQUANTIZED, Mixture, Scores, Unit, units_of

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
                for unit, names, kl in zip(menu.units, self._names, scores.kl, strict=True)
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

    def predicted(self, mixture: Mixture) -> float:
        """Return the predicted KL divergence of a mixture: the sum over its units."""
        return sum(self.scores.kl[number][name] for number, name in mixture.items())

    def best_uniform(self, nbytes: int) -> str | None:
        """Return the scheme with the least KL divergence that fits if all units have it; None if none fits."""
        mixtures = {name: self.menu.uniform(name) for name in self.menu.plans}
        fitting = [name for name, mixture in mixtures.items() if self.menu.size(mixture) <= nbytes]
        return min(fitting, key=lambda name: self.predicted(mixtures[name]), default=None)


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
        if name not in schemes_on(ENGINES_FOR[engines], gpu.hardware, experts):
            raise PlanError(f"{gpu.name} has no kernel for {name}", "name another GPU, or give --for vllm")

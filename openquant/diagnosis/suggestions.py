"""Where another scheme halves a layer's row error, and the options of compress that ask for it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import PlanError, UsageError
from ..formats.schemes import CHANNEL, MIXED, SCHEMES, Scheme
from ..patterns import patterns_of, template
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.layout import output_tensors
from ..plan.plan import Plan, make_plan
from ..weights.weight import Weight
from .result import Advice, Diagnosis, LayerDiagnosis

# FP8 rounds normal weights by 0.026 of their size, whatever shares a scale. Layers that no scheme brings below this
# stay unquantized.
MOST_ERROR = 0.05


class _Unit(NamedTuple):
    """Layers that engines store alike: one, a joined set, or the experts of a layer.

    Attributes:
        path: of what holds them: "model.layers.0.self_attn".
        rest: the pattern of their names below: ".{q_proj,k_proj,v_proj}".
        layers: all of them.
    """

    path: str
    rest: str
    layers: tuple[Weight, ...]

    @property
    def kind(self) -> tuple[str, str]:
        """What units of other decoder layers have in common with it."""
        return template(self.path), self.rest


@dataclass(frozen=True)
class _Remedy:
    """Units of one kind that another scheme serves better.

    Attributes:
        units: those units.
        patterns: over the names of their layers.
        scheme: which; None to leave them as they are.
        before: the worst error of their layers in the scheme that was asked for.
        after: in the other.
    """

    units: tuple[_Unit, ...]
    patterns: tuple[str, ...]
    scheme: Scheme | None
    before: float
    after: float

    @property
    def layers(self) -> tuple[Weight, ...]:
        """All layers of the units."""
        return tuple(layer for unit in self.units for layer in unit.layers)


def with_advice(found: Diagnosis, plan: Plan, ignore: Sequence[str]) -> Diagnosis:
    """A diagnosis with the options of compress that halve the errors of layers, as far as engines load the result.

    Args:
        found: the figures of the layers.
        plan: what they were found by.
        ignore: patterns of layers that were asked to stay as they are.
    """
    found = replace(found, bytes_before=summary.output_bytes(plan), bytes_after=summary.output_bytes(plan))
    remedies = _remedies(plan, {layer.module: layer for layer in found.layers})
    refusal = ""
    for base in _bases(plan, remedies) if remedies else ():
        options = PlanOptions(
            ignore=(*ignore, *(text for remedy in remedies if remedy.scheme is None for text in remedy.patterns)),
            scheme_for=tuple(
                (text, remedy.scheme)
                for remedy in remedies
                if remedy.scheme is not None and remedy.scheme != base
                for text in remedy.patterns
            ),
        )
        try:
            better = make_plan(plan.source, base, options, architecture=plan.model)
        except (PlanError, UsageError) as error:
            refusal = refusal or error.message
            continue
        if all(
            better.decisions.of(layer.module).scheme == remedy.scheme for remedy in remedies for layer in remedy.layers
        ):
            return _advised(found, plan, better, remedies, ignore)
        refusal = refusal or "engines cannot load all of these layers so"
    return replace(found, notes=(f"no options can be told: {refusal}",)) if remedies else found


def _remedies(plan: Plan, figures: Mapping[str, LayerDiagnosis]) -> list[_Remedy]:
    """What other schemes do better, the worst layers first."""
    assert plan.scheme is not None
    kinds: dict[tuple[str, str], list[_Unit]] = {}
    for unit in _units(plan):
        kinds.setdefault(unit.kind, []).append(unit)
    remedies = []
    for (path, rest), units in kinds.items():
        chosen: dict[Scheme | None, list[_Unit]] = {}
        for unit in units:
            scheme = _choose(plan.scheme, unit, figures)
            if scheme != plan.scheme:
                chosen.setdefault(scheme, []).append(unit)
        for scheme, those in chosen.items():
            paths = [path] if len(those) == len(units) else patterns_of(unit.path for unit in those)
            worst = [_worst(unit, plan.scheme, figures) for unit in those]
            after = [_worst(unit, scheme, figures) for unit in those]
            remedies.append(
                _Remedy(tuple(those), tuple(f"{each}{rest}" for each in paths), scheme, max(worst), max(after))
            )
    return sorted(remedies, key=lambda remedy: -remedy.before)


def _units(plan: Plan) -> list[_Unit]:
    """What moves together, of all layers that are quantized."""
    together: dict[tuple[str, str], list[Weight]] = {}
    for weight, _ in plan.decisions.quantized:
        experts, (path, _, last) = plan.entry.experts(weight.module), weight.module.rpartition(".")
        fused = plan.decisions.sets.get(weight.module, (weight.module,))
        if experts is not None:
            place = experts, ".**"
        elif not path:
            place = last, ""
        elif len(fused) == 1:
            place = path, f".{last}"
        else:
            path = weight.module.rsplit(".", plan.entry.rule(weight.module).under)[0]
            place = path, f".{{{','.join(module.removeprefix(path)[1:] for module in fused)}}}"
        together.setdefault(place, []).append(weight)
    return [_Unit(path, rest, tuple(layers)) for (path, rest), layers in together.items()]


def _worst(unit: _Unit, scheme: Scheme | None, figures: Mapping[str, LayerDiagnosis]) -> float:
    """The largest row error of some layers in a scheme: infinity where it cannot store one, zero without a scheme."""
    if scheme is None:
        return 0.0
    found = [figures[layer.module].row_errors[scheme.name] for layer in unit.layers]
    return max(math.inf if error is None else error for error in found)


def _choose(scheme: Scheme, unit: _Unit, figures: Mapping[str, LayerDiagnosis]) -> Scheme | None:
    """What some layers are better stored in: the scheme itself where none halves their error; None to leave them."""
    chosen, error = scheme, _worst(unit, scheme, figures)
    mixes = any(other.name == scheme.name for other in MIXED)
    for other in MIXED if mixes else ():
        # INT8 halves the error of nearly every layer, and is another arithmetic: no remedy for a few of them.
        if other.format.number == scheme.format.number and other.name != scheme.name and not other.format.shared:
            finer = _worst(unit, other, figures)
            if finer < math.inf and error and finer <= error / 2:
                chosen, error = other, finer
    return None if error > MOST_ERROR else chosen


def _bases(plan: Plan, remedies: Sequence[_Remedy]) -> list[Scheme]:
    """The schemes that the plan's other layers may have beside remedies, in the order to be tried."""
    scheme = plan.scheme
    assert scheme is not None
    if all(remedy.scheme is None for remedy in remedies):
        return [scheme]
    mixed = [other for other in MIXED if other.name == scheme.name]
    # Engines load no experts per tensor in the compressed-tensors format, in which alone layers may differ.
    return list(dict.fromkeys([*mixed, CHANNEL]))


def _advised(
    found: Diagnosis, plan: Plan, better: Plan, remedies: Sequence[_Remedy], ignore: Sequence[str]
) -> Diagnosis:
    """The diagnosis with remedies as advice, and the command of the plan that was made of them."""
    base = better.scheme
    assert base is not None
    words = ["--scheme", base.name] if base.name != "tensor" else []
    words += ["--format", base.method] if base.method != SCHEMES[base.name].method else []
    for pattern in ignore:
        words += ["--ignore", pattern]
    advice = []
    for remedy in remedies:
        if remedy.scheme is None:
            option = [word for pattern in remedy.patterns for word in ("--ignore", pattern)]
        elif remedy.scheme == base:
            option = []
        else:
            option = [
                word for pattern in remedy.patterns for word in ("--scheme-for", f"{pattern}={remedy.scheme.name}")
            ]
        words += option
        grown = sum(
            _size(layer, remedy.scheme) - _size(layer, plan.decisions.of(layer.module).scheme)
            for layer in remedy.layers
        )
        advice.append(
            Advice(
                layers=tuple(layer.module for layer in remedy.layers),
                scheme=None if remedy.scheme is None else remedy.scheme.name,
                error_before=None if math.isinf(remedy.before) else remedy.before,
                error_after=remedy.after,
                bytes=grown,
                option=shlex.join(option or ["--scheme", base.name]),
            )
        )
    return replace(
        found,
        advice=tuple(advice),
        options=tuple(words),
        bytes_after=summary.output_bytes(better),
        notes=tuple(note for note in better.notes if note not in plan.notes),
    )


def _size(layer: Weight, scheme: Scheme | None) -> int:
    """Bytes of what a layer becomes."""
    return sum(info.nbytes for info in output_tensors(layer, scheme))

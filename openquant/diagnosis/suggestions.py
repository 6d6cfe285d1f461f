"""Advice: where another scheme halves a layer's row error, and the options of compress that ask for it."""

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

# The relative error of normally distributed weights in FP8 is 0.026, whatever the group. Layers for which no scheme is
# below this limit stay unquantized.
MAX_ERROR = 0.05


class _LayerGroup(NamedTuple):
    """Layers that must have the same scheme: a single one, fused layers, or the experts of an MoE layer.

    Attributes:
        path: module that holds them: "model.layers.0.self_attn".
        rest: pattern of their names below it: ".{q_proj,k_proj,v_proj}".
        layers: their weights.
    """

    path: str
    rest: str
    layers: tuple[Weight, ...]

    @property
    def kind(self) -> tuple[str, str]:
        """Name template and pattern, which the same layers of other decoder layers share."""
        return template(self.path), self.rest


@dataclass(frozen=True)
class _Change:
    """Groups of one kind that another scheme stores better.

    Attributes:
        groups: the groups.
        patterns: patterns that match the names of their layers.
        scheme: the other scheme; None to leave them unquantized.
        error_before: largest row error of their layers in the requested scheme.
        error_after: the same in the other scheme.
    """

    groups: tuple[_LayerGroup, ...]
    patterns: tuple[str, ...]
    scheme: Scheme | None
    error_before: float
    error_after: float

    @property
    def layers(self) -> tuple[Weight, ...]:
        """The weights of all groups."""
        return tuple(layer for group in self.groups for layer in group.layers)


def with_advice(diagnosis: Diagnosis, plan: Plan, ignore: Sequence[str]) -> Diagnosis:
    """Add advice to a diagnosis: options of compress that halve errors of layers, if engines can load the result.

    Args:
        diagnosis: the diagnosis of all layers, without advice.
        plan: the plan that it was made of.
        ignore: the patterns of --ignore, over full module names.

    Returns:
        The diagnosis with advice, options, sizes and notes. If no plan is possible, a note says why.
    """
    diagnosis = replace(diagnosis, bytes_before=summary.output_bytes(plan), bytes_after=summary.output_bytes(plan))
    changes = _find_changes(plan, {layer.module: layer for layer in diagnosis.layers})
    refusal = ""
    for base in _base_schemes(plan, changes) if changes else ():
        options = PlanOptions(
            ignore=(*ignore, *(pattern for change in changes if change.scheme is None for pattern in change.patterns)),
            scheme_for=tuple(
                (pattern, change.scheme)
                for change in changes
                if change.scheme is not None and change.scheme != base
                for pattern in change.patterns
            ),
        )
        try:
            better = make_plan(plan.source, base, options, architecture=plan.model)
        except (PlanError, UsageError) as error:
            refusal = refusal or error.message
            continue
        if all(
            better.decisions.of(layer.module).scheme == change.scheme for change in changes for layer in change.layers
        ):
            return _advised(diagnosis, plan, better, changes, ignore)
        refusal = refusal or "engines cannot load these layers in the schemes that would be better"
    return replace(diagnosis, notes=(f"no options can be suggested: {refusal}",)) if changes else diagnosis


def _find_changes(plan: Plan, diagnoses: Mapping[str, LayerDiagnosis]) -> list[_Change]:
    """Where other schemes are better, largest error first."""
    assert plan.scheme is not None
    kinds: dict[tuple[str, str], list[_LayerGroup]] = {}
    for group in _layer_groups(plan):
        kinds.setdefault(group.kind, []).append(group)
    changes = []
    for (path, rest), groups in kinds.items():
        by_scheme: dict[Scheme | None, list[_LayerGroup]] = {}
        for group in groups:
            scheme = _choose_scheme(plan.scheme, group, diagnoses)
            if scheme != plan.scheme:
                by_scheme.setdefault(scheme, []).append(group)
        for scheme, changed in by_scheme.items():
            paths = [path] if len(changed) == len(groups) else patterns_of(group.path for group in changed)
            before = max(_row_error(group, plan.scheme, diagnoses) for group in changed)
            after = max(_row_error(group, scheme, diagnoses) for group in changed)
            changes.append(_Change(tuple(changed), tuple(f"{path}{rest}" for path in paths), scheme, before, after))
    return sorted(changes, key=lambda change: -change.error_before)


def _layer_groups(plan: Plan) -> list[_LayerGroup]:
    """All quantized layers of a plan, in groups that must have the same scheme."""
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight, _ in plan.decisions.quantized:
        experts, (path, _, last) = plan.entry.experts(weight.module), weight.module.rpartition(".")
        fused = plan.decisions.fused.get(weight.module, (weight.module,))
        if experts is not None:
            key = experts, ".**"
        elif not path:
            key = last, ""
        elif len(fused) == 1:
            key = path, f".{last}"
        else:
            path = weight.module.rsplit(".", plan.entry.rule(weight.module).fused_depth)[0]
            key = path, f".{{{','.join(module.removeprefix(path)[1:] for module in fused)}}}"
        groups.setdefault(key, []).append(weight)
    return [_LayerGroup(path, rest, tuple(layers)) for (path, rest), layers in groups.items()]


def _row_error(group: _LayerGroup, scheme: Scheme | None, diagnoses: Mapping[str, LayerDiagnosis]) -> float:
    """The largest row error of a group's layers: infinity if the scheme cannot store one, 0 if unquantized."""
    if scheme is None:
        return 0.0
    errors = [diagnoses[layer.module].row_errors[scheme.name] for layer in group.layers]
    return max(math.inf if error is None else error for error in errors)


def _choose_scheme(scheme: Scheme, group: _LayerGroup, diagnoses: Mapping[str, LayerDiagnosis]) -> Scheme | None:
    """The best scheme for a group: the requested one if none halves its error; None to leave it unquantized."""
    chosen, error = scheme, _row_error(group, scheme, diagnoses)
    mixes = any(other.name == scheme.name for other in MIXED)
    for other in MIXED if mixes else ():
        # Only schemes of the same numeric format: INT8 halves the error of nearly every FP8 layer.
        if other.format.number == scheme.format.number and other.name != scheme.name and not other.format.shared:
            other_error = _row_error(group, other, diagnoses)
            if other_error < math.inf and error and other_error <= error / 2:
                chosen, error = other, other_error
    return None if error > MAX_ERROR else chosen


def _base_schemes(plan: Plan, changes: Sequence[_Change]) -> list[Scheme]:
    """The schemes that the other layers may have once these change, in the order in which to try them."""
    scheme = plan.scheme
    assert scheme is not None
    if all(change.scheme is None for change in changes):
        return [scheme]
    mixed = [other for other in MIXED if other.name == scheme.name]
    # Layers may differ only in the compressed-tensors format, in which engines load no experts with per-tensor scales.
    return list(dict.fromkeys([*mixed, CHANNEL]))


def _advised(
    diagnosis: Diagnosis, plan: Plan, better: Plan, changes: Sequence[_Change], ignore: Sequence[str]
) -> Diagnosis:
    """The diagnosis with changes as advice, and the arguments of compress that make the better plan."""
    base = better.scheme
    assert base is not None
    words = ["--scheme", base.name] if base.name != "tensor" else []
    words += ["--format", base.method] if base.method != SCHEMES[base.name].method else []
    for pattern in ignore:
        words += ["--ignore", pattern]
    advice = []
    for change in changes:
        if change.scheme is None:
            option = [word for pattern in change.patterns for word in ("--ignore", pattern)]
        elif change.scheme == base:
            option = []
        else:
            option = [
                word for pattern in change.patterns for word in ("--scheme-for", f"{pattern}={change.scheme.name}")
            ]
        words += option
        grown = sum(
            _output_bytes(layer, change.scheme) - _output_bytes(layer, plan.decisions.of(layer.module).scheme)
            for layer in change.layers
        )
        advice.append(
            Advice(
                layers=tuple(layer.module for layer in change.layers),
                scheme=None if change.scheme is None else change.scheme.name,
                error_before=None if math.isinf(change.error_before) else change.error_before,
                error_after=change.error_after,
                bytes=grown,
                option=shlex.join(option or ["--scheme", base.name]),
            )
        )
    return replace(
        diagnosis,
        advice=tuple(advice),
        options=tuple(words),
        bytes_after=summary.output_bytes(better),
        notes=tuple(note for note in better.notes if note not in plan.notes),
    )


def _output_bytes(layer: Weight, scheme: Scheme | None) -> int:
    """Bytes of a layer's output tensors in a scheme."""
    return sum(info.nbytes for info in output_tensors(layer, scheme))

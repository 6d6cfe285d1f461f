"""Settle what becomes of the weights that could be quantized: in the plan's scheme, in another, or not at all.

The user's options and the schemes' shapes have their say. What engines join moves together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import PlanError, UsageError
from ..formats.format import FLOATS, Format
from ..formats.schemes import Scheme
from ..patterns import collapse, compile_pattern
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_head
from ..weights.statistics import Calibration
from ..weights.weight import Weight
from .decisions import Decision, PassthroughTensor, PlanOptions, StoredLayout
from .tensor_parallel import fused_parts, why_indivisible, why_not_reordered

_SHARES = "shares its status with "


def require_sound(options: PlanOptions) -> None:
    """Refuse options that are wrong for any model.

    Raises:
        UsageError: a pattern that is malformed, or a tensor-parallel size below 1.
    """
    for pattern in (*options.ignore, *(pattern for pattern, _ in options.scheme_for)):
        compile_pattern(pattern)
    if options.tp is not None and options.tp < 1:
        raise UsageError(f"--tp {options.tp} is no number of ranks", "give --tp 1 or more")


def refuse_size(entry: ModuleRules, layers: dict[str, Weight], config: dict[str, Any], size: int) -> None:
    """Raise a PlanError where layers do not divide by a tensor-parallel size, whatever they are stored as."""
    for layer in {(layer.alike, layer.shape): layer for layer in layers.values()}.values():
        problem = why_indivisible(layer.shape, entry.rule(layer.module).split, config, (1, 1), size)
        if problem:
            raise PlanError(
                f"--tp {size} cannot serve this model: {layer.alike}: {problem}",
                "no scheme helps: give a size by which its heads and layers divide; --dry-run lists some",
            )


def problem_finder(
    entry: ModuleRules,
    layers: dict[str, Weight],
    sets: dict[str, tuple[str, ...]],
    config: dict[str, Any],
    size: int | None,
    no_scale: Callable[[Weight], str | None],
) -> Callable[[Weight, Scheme], str | None]:
    """A function from a layer and a scheme to why engines cannot load it so; None if they can.

    Args:
        entry: the entry.
        layers: all layers, by module.
        sets: for each that is joined with others, all of its set.
        config: the part of config.json with the language model's sizes.
        size: also on that many ranks.
        no_scale: why a layer's activations cannot be static; None if they can.
    """
    problems: dict[tuple[str, tuple[int, int], str, bool], str | None] = {}

    def look(layer: Weight, scheme: Scheme) -> str | None:
        if not scheme.head and is_head(layer.module):
            return "engines load no output head that is stored so"
        rule = entry.rule(layer.module)
        if not scheme.follows_rows and rule.reordered:
            return "engines reorder its rows but not its scales"
        split, problem = rule.split, None
        # What the source has so, engines load so: also blocks that are smaller at the edges.
        for rows, _ in (
            ()
            if layer.is_held_by(scheme.format)
            else ((layer.shape[0], None), *fused_parts(layer.shape, split, config))
        ):
            problem = problem or scheme.format.shape_error((rows, layer.shape[1]))
            if not rows and scheme.format.indivisible[0] not in (1, None):
                problem = problem or "config.json does not tell the sizes of what it holds"
        problem = problem or why_not_reordered(layer.shape, split, config, scheme.format)
        if problem is None and size is not None:
            problem = why_indivisible(layer.shape, split, config, scheme.format.indivisible, size)
            return problem and f"--tp {size}: {problem}"
        return problem

    def find(layer: Weight, scheme: Scheme) -> str | None:
        if scheme.format.static and (problem := no_scale(layer)):
            return problem
        key = layer.alike, layer.shape, scheme.suffix, layer.is_held_by(scheme.format)
        if key not in problems:
            problems[key] = look(layer, scheme)
        return problems[key] or straddles(layer, scheme)

    def straddles(layer: Weight, scheme: Scheme) -> str | None:
        # Of a joined set only the last may end within a block (vLLM, layers/quantization/utils/fp8_utils.py:
        # 1329-1344), as kv_a_proj_with_mqa does.
        height = scheme.format.group[0] or 1
        if layer.shape[0] % height == 0:
            return None
        ragged = [module for module in sets.get(layer.module, ()) if layers[module].shape[0] % height]
        return "engines join it with others, and its rows end within a block" if len(ragged) > 1 else None

    return find


def scale_problem_finder(
    form: Format, calibration: Calibration | None, inputs: Mapping[str, float], found: StoredLayout | None
) -> Callable[[Weight], str | None]:
    """A function from a layer to why its activations cannot be static; None if they can.

    Args:
        form: what layers are stored as.
        calibration: how large activations are; None for the source's own scales.
        inputs: the largest magnitude that goes into each layer, by module, where the calibration says it.
        found: the fates of a written directory, whose layers have scales of their own; None to decide anew.
    """

    def find(layer: Weight) -> str | None:
        if found is not None or layer.module in inputs:
            return None
        return why_no_input_scale(layer, form) if calibration is None else "the calibration has seen nothing of it"

    return find


def why_no_input_scale(layer: Weight, form: Format) -> str | None:
    """Why a layer's activations cannot be static, as those of the source; None if they can.

    Args:
        layer: the layer.
        form: what it would be stored as.
    """
    found = layer.input_scale_for(form)
    if found is None:
        return "the source has no input_scale for it"
    if found.dtype not in (*FLOATS, "F64") or math.prod(found.shape) != 1:
        return f"its input_scale is {found.dtype} {list(found.shape)}, not a single float"
    return None


class RequestedSchemes(NamedTuple):
    """The layers that shall not simply have the plan's scheme, by module, each with what says so.

    Attributes:
        ignored: those that stay unquantized: {"model.layers.0.mlp.up_proj": "--ignore **.up_proj"}.
        mixed: those of another scheme.
        schemes: of what says so there, in the order that counts where one is to be chosen.
        copies: whether a plan that quantizes nothing will do.
    """

    ignored: dict[str, str]
    mixed: dict[str, str]
    schemes: dict[str, Scheme]
    copies: bool


def requested_schemes(
    options: PlanOptions, layers: dict[str, Weight], kept: Iterable[PassthroughTensor]
) -> RequestedSchemes:
    """What the user's options ask for.

    Args:
        options: as given.
        layers: what can be quantized, by module.
        kept: the other tensors, whose modules --ignore may name to no effect.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    known = [keep.tensor.module for keep in kept] if options.ignore else []
    ignored = _matches({f"--ignore {text}": text for text in options.ignore}, layers, known)
    wanted = [(f"--scheme-for {text}={other.name}", text, other) for text, other in options.scheme_for]
    mixed = _matches({option: text for option, text, _ in wanted}, layers, None)
    return RequestedSchemes(ignored, mixed, {option: other for option, _, other in wanted}, bool(options.ignore))


def schemes_of_output(found: StoredLayout, layers: dict[str, Weight]) -> RequestedSchemes:
    """What to ask for so that layers come out as a written directory has them."""
    ignored, mixed = {}, {}
    for module, layer in layers.items():
        if module in found.unquantized or layer.alike in found.unquantized:
            ignored[module] = "the directory has it unquantized"
        for name in (module, layer.alike):
            if name in found.schemes:
                mixed[module] = found.schemes[name].suffix
    return RequestedSchemes(ignored, mixed, {scheme.suffix: scheme for scheme in found.schemes.values()}, copies=True)


def assign_schemes(
    entry: ModuleRules,
    scheme: Scheme,
    layers: dict[str, Weight],
    find_problem: Callable[[Weight, Scheme], str | None],
    sets: dict[str, tuple[str, ...]],
    asked: RequestedSchemes,
    left: Collection[str],
    size: int | None,
) -> tuple[dict[str, Decision], list[str]]:
    """The fates of the layers that are not stored in the scheme, by module, and notes for the user.

    What engines join moves together: joined sets, and all experts of a layer.

    Args:
        entry: the registry's.
        scheme: the plan's own, of all layers that have no other.
        layers: all of them, by module.
        find_problem: see problem_finder.
        sets: for each that is joined with others, all of its set.
        asked: what shall be otherwise.
        left: the modules that a source which is in the scheme already has unquantized.
        size: the number of ranks that find_problem asks for, for a note.

    Raises:
        PlanError: nothing would be quantized.
    """
    ignored, mixed, schemes, _ = asked
    chosen_by_hand = bool(ignored or mixed or left)
    if layers and not chosen_by_hand and not any(find_problem(layer, scheme) for layer in layers.values()):
        return {}, []
    together: dict[str, list[str]] = {}
    for module in layers:
        together.setdefault(entry.experts(module) or sets.get(module, (module,))[0], []).append(module)
    decisions: dict[str, Decision] = {}
    widened: dict[str, list[str]] = {}
    fallen: dict[str, list[str]] = {}
    unfit: list[list[str]] = []
    for modules in together.values():
        own = {module: ignored[module] for module in modules if module in ignored}
        if own:
            decisions |= _alike(None, _spread(modules, own, widened))
            continue
        own = {module: "the source has it unquantized" for module in modules if module in left}
        if own:
            decisions |= _alike(None, _spread(modules, own))
            continue
        chosen = scheme
        own = {module: mixed[module] for module in modules if module in mixed}
        if own:
            option = min(own.values(), key=list(schemes).index)
            chosen = schemes[option]
            own = _spread(modules, {module: option for module in modules if own.get(module) == option}, widened)
        problems = _look_at(modules, layers, chosen, find_problem)
        if problems and chosen.fallback is not None:
            own, chosen = problems, chosen.fallback
            problems = _look_at(modules, layers, chosen, find_problem)
            if not problems:
                fallen.setdefault(chosen.title, []).extend(modules)
        if problems:
            decisions |= _alike(None, problems)
            unfit.append(modules)
        elif chosen != scheme:
            decisions |= _alike(chosen, own)
    notes = [
        f"{option} widened to what engines join with it: {', '.join(collapse(modules))}"
        for option, modules in widened.items()
    ]
    for title, modules in fallen.items():
        notes.append(f"{title} instead for {_share(modules, layers)}: {', '.join(collapse(modules))}")
    reasons = [decision.why for decision in decisions.values() if decision.scheme is None]
    if len(reasons) == len(layers):
        _refuse_nothing(entry.model, reasons, asked)
        notes.append("nothing is quantized")
    share = _share([module for modules in unfit for module in modules], layers) if unfit else ""
    if unfit and scheme.format.static:
        notes.append(f"no usable input_scale is known for {share}, which stay unquantized")
    elif unfit:
        ranks = f" on {size} ranks" if size is not None else ""
        parts = "blocks" if (scheme.format.group[0] or 1) > 1 else "groups"
        splits = [[split for each in modules if (split := entry.rule(each).split) is not None] for modules in unfit]
        turns = all(any(split.turns for split in each) for each in splits)
        strict = any(split.turns_all or split.turns_rows for each in splits for split in each)
        others = "channel" if strict else "tensor or channel"
        notes.append(
            f"{'engines sort rows by heads' if turns else f'{parts} do not divide{ranks}'}, which leaves "
            f"{share} unquantized; --scheme {others} quantizes them too"
        )
    return decisions, notes


def _alike(scheme: Scheme | None, reasons: dict[str, str]) -> dict[str, Decision]:
    """The fate of each module: one scheme for all, each with its own reason."""
    return {module: Decision(scheme, why) for module, why in reasons.items()}


def _refuse_nothing(model: Architecture, reasons: Iterable[str], asked: RequestedSchemes) -> None:
    """A plan that quantizes nothing is an error, unless --ignore says so."""
    causes = Counter(reason for reason in reasons if not reason.startswith(_SHARES))
    if asked.copies and causes.keys() <= set(asked.ignored.values()):
        return
    found = [f"{cause} ({count} layers)" for cause, count in causes.most_common(3)]
    raise PlanError(
        f"nothing would be quantized: {'; '.join(found) or f'{model.name} has no layer here that could be'}",
        "choose other options, or say --ignore '**' if a copy is what you want",
    )


def _matches(patterns: dict[str, str], layers: dict[str, Weight], known: Iterable[str] | None) -> dict[str, str]:
    """The first option that names each layer, by module.

    Args:
        patterns: by option, as the user typed it.
        layers: what can be quantized.
        known: other modules, which an option may name to no effect; None if it may not.
    """
    found: dict[str, str] = {}
    for option, text in patterns.items():
        pattern = compile_pattern(text.removesuffix(".weight"))
        matched = [
            layer.module
            for layer in layers.values()
            if pattern.fullmatch(layer.module) or pattern.fullmatch(layer.source.module)
        ]
        if not matched and not any(pattern.fullmatch(module) for module in known or ()):
            raise UsageError(
                f"{option} matches no module{'' if known is not None else ' that can be quantized'}",
                "modules are named like tensors, without .weight; ** is any part; compress --dry-run -v lists them",
            )
        for module in matched:
            found.setdefault(module, option)
    return found


def _spread(modules: list[str], own: dict[str, str], widened: dict[str, list[str]] | None = None) -> dict[str, str]:
    """The reason of each of the modules that share their status: its own, or another's."""
    first = next(module for module in modules if module in own)
    shared = f"{_SHARES}{first.rsplit('.', 1)[-1]} ({own[first]})"
    if widened is not None and len(own) < len(modules):
        widened.setdefault(own[first], []).extend(module for module in modules if module not in own)
    return {module: own.get(module, shared) for module in modules}


def _look_at(
    modules: list[str], layers: dict[str, Weight], scheme: Scheme, find_problem: Callable[[Weight, Scheme], str | None]
) -> dict[str, str]:
    """Why modules that share their status cannot be stored in a scheme, each of them; empty if they can."""
    own = {module: problem for module in modules if (problem := find_problem(layers[module], scheme))}
    return _spread(modules, own) if own else {}


def _share(modules: list[str], layers: dict[str, Weight]) -> str:
    """How many layers these are, and their share of all that could be quantized: "12 of 28 layers (40.0 % ...)"."""
    share = sum(layers[module].nbytes for module in modules) / sum(layer.nbytes for layer in layers.values())
    return f"{len(modules)} of {len(layers)} layers ({100 * share:.1f} % of their bytes)"

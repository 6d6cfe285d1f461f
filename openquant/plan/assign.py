"""Assign a scheme to each weight that may be quantized: the plan's scheme, another one, or none.

The user's options and the shapes that schemes need are considered. Fused layers, and all experts of a layer, get the
same scheme.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import PlanError, UsageError
from ..formats.format import FLOATS, Format
from ..formats.schemes import INT8_W8A16, Scheme
from ..patterns import collapse, compile_pattern
from ..registry.architecture import Architecture, ModuleRules, is_embedding, is_head
from ..weights.statistics import Calibration
from ..weights.weight import Weight
from .architecture import fused_parts, why_indivisible, why_not_reordered
from .decisions import Decision, Decisions, PassthroughTensor, PlanOptions, StoredLayout

_SAME_SCHEME = "same as "


def check_options(options: PlanOptions) -> None:
    """Refuse options that are wrong for every model.

    Args:
        options: what the user asks for; its patterns and tensor-parallel size are checked.

    Raises:
        UsageError: a pattern is malformed, or the tensor-parallel size is below 1.
    """
    for pattern in (*options.ignore, *(pattern for pattern, _ in options.scheme_for)):
        compile_pattern(pattern)
    if options.tp is not None and options.tp < 1:
        raise UsageError(f"--tp {options.tp} is no number of ranks", "give --tp 1 or more")


def refuse_size(entry: ModuleRules, layers: dict[str, Weight], config: dict[str, Any], size: int) -> None:
    """Refuse a tensor-parallel size by which layers do not divide, whatever their scheme.

    Args:
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        config: the language model's part of config.json, as text_config returns it.
        size: the number of ranks.

    Raises:
        PlanError: a layer does not divide.
    """
    for layer in {(layer.name_template, layer.shape): layer for layer in layers.values()}.values():
        problem = why_indivisible(layer.shape, entry.rule(layer.module).split, config, (1, 1), size)
        if problem:
            raise PlanError(
                f"--tp {size} cannot serve this model: {layer.name_template}: {problem}",
                "no scheme helps: give a size by which its heads and layers divide; --dry-run lists some",
            )


def problem_finder(
    entry: ModuleRules,
    layers: dict[str, Weight],
    fused: dict[str, tuple[str, ...]],
    config: dict[str, Any],
    size: int | None,
    find_scale_problem: Callable[[Weight], str | None],
) -> Callable[[Weight, Scheme], str | None]:
    """Return a function that says why engines cannot load a layer in a scheme.

    Args:
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        fused: for each module that engines fuse with others, the full names of all members, itself included.
        config: the language model's part of config.json, as text_config returns it.
        size: the number of tensor-parallel ranks that must be able to load it; None for any.
        find_scale_problem: says why a layer's activation scale cannot be static; None if it can.

    Returns:
        A function of a weight and a scheme that returns the reason, "28 heads do not divide by 8"; None if they can.
    """
    problems: dict[tuple[str, tuple[int, int], str, bool], str | None] = {}

    def find_kind_problem(layer: Weight, scheme: Scheme) -> str | None:
        if not scheme.head and is_head(layer.module):
            return "engines load no output head in this scheme"

        rule = entry.rule(layer.module)
        if not scheme.follows_rows and rule.reordered:
            return "engines reorder its rows but not its scales"

        split = rule.split
        problem = None

        # Engines load what the source has in this format already, also with smaller blocks at the edges.
        for rows, _ in (
            ()
            if layer.is_stored_as(scheme.format)
            else ((layer.shape[0], None), *fused_parts(layer.shape, split, config))
        ):
            problem = problem or scheme.format.shape_error((rows, layer.shape[1]))
            if not rows and scheme.format.indivisible[0] not in (1, None):
                problem = problem or "config.json does not say how many rows each of its parts has"

        problem = problem or why_not_reordered(layer.shape, split, config, scheme.format)

        if problem is None and size is not None:
            problem = why_indivisible(layer.shape, split, config, scheme.format.indivisible, size)
            return problem and f"--tp {size}: {problem}"

        return problem

    def find_problem(layer: Weight, scheme: Scheme) -> str | None:
        if scheme.format.static and (problem := find_scale_problem(layer)):
            return problem
        key = layer.name_template, layer.shape, scheme.suffix, layer.is_stored_as(scheme.format)
        if key not in problems:
            problems[key] = find_kind_problem(layer, scheme)
        return problems[key] or find_ragged_problem(layer, scheme)

    def find_ragged_problem(layer: Weight, scheme: Scheme) -> str | None:
        # Of fused layers only the last may end within a block (vLLM, layers/quantization/utils/fp8_utils.py:
        # 1329-1344), as kv_a_proj_with_mqa does.
        height = scheme.format.group[0] or 1
        if layer.shape[0] % height == 0:
            return None
        ragged = [module for module in fused.get(layer.module, ()) if layers[module].shape[0] % height]
        if len(ragged) < 2:
            return None
        return "engines fuse it with other layers, and its rows end within a block"

    return find_problem


def scale_problem_finder(
    form: Format, calibration: Calibration | None, input_absmax: Mapping[str, float], decided: bool
) -> Callable[[Weight], str | None]:
    """Return a function that says why a layer's activation scale cannot be static.

    Args:
        form: the format that layers get.
        calibration: ranges of activations; None to use the source's own scales.
        input_absmax: largest magnitude of each layer's input activations by full module name, as calibrated.
        decided: whether schemes are those of an existing directory or of the source, whose layers have scales.

    Returns:
        A function of a weight that returns the reason; None if its scale can be static.
    """

    def find_problem(layer: Weight) -> str | None:
        if decided or layer.module in input_absmax:
            return None
        if calibration is None:
            return why_no_input_scale(layer, form)
        return "the calibration observed no inputs of it"

    return find_problem


def why_no_input_scale(layer: Weight, form: Format) -> str | None:
    """Say why the source has no usable static activation scale for a layer.

    Args:
        layer: the layer's weight.
        form: the format that it would get.

    Returns:
        The reason, "the source has no input_scale for it"; None if it has one.
    """
    scale = layer.input_scale_for(form)
    if scale is None:
        return "the source has no input_scale for it"
    if scale.dtype not in (*FLOATS, "F64") or math.prod(scale.shape) != 1:
        return f"its input_scale is {scale.dtype} {list(scale.shape)}, not a single float"
    return None


class RequestedSchemes(NamedTuple):
    """The layers for which options ask for another scheme than the plan's, or for none.

    Attributes:
        ignored: for each module that is not quantized, the option that says so:
            {"model.layers.0.mlp.up_proj": "--ignore **.up_proj"}.
        mixed: for each module with another scheme, the option that says so.
        schemes: the scheme of each option in `mixed`. If options disagree about fused layers, the first here counts.
        copies: whether the plan may quantize nothing at all.
    """

    ignored: dict[str, str]
    mixed: dict[str, str]
    schemes: dict[str, Scheme]
    copies: bool


def requested_schemes(
    scheme: Scheme, options: PlanOptions, layers: dict[str, Weight], passthrough: Iterable[PassthroughTensor]
) -> RequestedSchemes:
    """Find the layers that the user's options name.

    With --quantize-embeddings the embedding gets INT8 weights if engines load no embedding in the plan's scheme.

    Args:
        scheme: the plan's own scheme.
        options: the options; `ignore` and `scheme_for` are read.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        passthrough: the tensors that are not quantized; --ignore may name their modules, to no effect.

    Returns:
        By full module name the option ("--ignore **.up_proj") that leaves it unquantized (`ignored`) or gives it
        another scheme (`mixed`), and the scheme of each option (`schemes`). The plan may quantize nothing (`copies`) if
        there is an --ignore.

    Raises:
        UsageError: a pattern matches nothing, or is malformed.
    """
    passthrough_modules = [kept.tensor.module for kept in passthrough] if options.ignore or options.scheme_for else []
    ignored = _match_options({f"--ignore {text}": text for text in options.ignore}, layers, passthrough_modules, True)
    scheme_for = [(f"--scheme-for {text}={other.name}", text, other) for text, other in options.scheme_for]
    mixed = _match_options({option: text for option, text, _ in scheme_for}, layers, passthrough_modules, False)
    schemes = {option: other for option, _, other in scheme_for}
    if options.embedding and not scheme.embedding:
        schemes["--quantize-embeddings"] = INT8_W8A16
        for module in filter(is_embedding, layers):
            mixed.setdefault(module, "--quantize-embeddings")
    return RequestedSchemes(ignored, mixed, schemes, bool(options.ignore))


def schemes_of_output(stored: StoredLayout, layers: dict[str, Weight]) -> RequestedSchemes:
    """Return the request that gives layers the schemes they have in an existing directory.

    Args:
        stored: schemes of that directory.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".

    Returns:
        By full module name the reason why it is unquantized (`ignored`), or the suffix of a scheme that is not that of
        most layers (`mixed`); and the schemes by suffix (`schemes`).
    """
    ignored = {}
    mixed = {}
    for module, layer in layers.items():
        if module in stored.unquantized or layer.name_template in stored.unquantized:
            ignored[module] = "the directory has it unquantized"
        for name in (module, layer.name_template):
            if name in stored.schemes:
                mixed[module] = stored.schemes[name].suffix
    return RequestedSchemes(ignored, mixed, {scheme.suffix: scheme for scheme in stored.schemes.values()}, copies=True)


def schemes_of_source(keeps: Mapping[Format, Scheme], scheme: Scheme, layers: dict[str, Weight]) -> RequestedSchemes:
    """Return the request that leaves all layers as a quantized source has them.

    Args:
        keeps: the scheme of each format of the source's weights.
        scheme: the plan's own scheme.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".

    Returns:
        By full module name the reason why it is unquantized (`ignored`), or why it has another scheme than the plan's
        (`mixed`); and the schemes by reason (`schemes`).
    """
    schemes = {f"the source has it so ({kept.suffix[1:]})": kept for kept in dict.fromkeys(keeps.values())}
    reasons = {kept: reason for reason, kept in schemes.items()}
    ignored = {}
    mixed = {}
    for module, layer in layers.items():
        if layer.format is None:
            ignored[module] = "the source has it unquantized"
        elif keeps[layer.format] != scheme:
            mixed[module] = reasons[keeps[layer.format]]
    return RequestedSchemes(ignored, mixed, schemes, copies=False)


def refuse_changes(decisions: Decisions, keeps: Mapping[Format, Scheme]) -> None:
    """Refuse a plan that does not keep all codes and scales of a quantized source.

    Args:
        decisions: the scheme of each weight, and the tensors that are not quantized.
        keeps: the scheme of each format of the source's weights.

    Raises:
        PlanError: it names the modules that would change, and says why.
    """
    changed = {
        layer.module: decision.why
        for layer, decision in decisions.iter_decisions()
        if layer.format is not None and decision.scheme != keeps[layer.format]
    }
    changed |= {kept.tensor.module: kept.why for kept in decisions.passthrough if kept.weight is not None}
    if changed:
        reasons = ", ".join(dict.fromkeys(changed.values()))
        raise PlanError(
            f"{', '.join(collapse(changed))}: its codes cannot be kept: {reasons}",
            "choose another scheme, which quantizes or decodes it, or dequantize the source",
        )


def assign_schemes(
    entry: ModuleRules,
    scheme: Scheme,
    layers: dict[str, Weight],
    find_problem: Callable[[Weight, Scheme], str | None],
    fused: dict[str, tuple[str, ...]],
    requested: RequestedSchemes,
    unquantized: Collection[str],
    size: int | None,
) -> tuple[dict[str, Decision], list[str]]:
    """Decide about the layers that do not get the plan's scheme.

    Fused layers, and all experts of a layer, get the same scheme.

    Args:
        entry: what the registry says of each module of the architecture.
        scheme: the plan's own scheme.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        find_problem: says why engines cannot load a layer in a scheme; None if they can.
        fused: for each module that engines fuse with others, the full names of all members, itself included.
        requested: the modules for which options ask for another scheme, or for none.
        unquantized: full names of modules that are unquantized in a source that is in the scheme already, and stay so.
        size: the number of tensor-parallel ranks that find_problem considers, for a note; None for any.

    Returns:
        For each layer without the plan's scheme, by full module name: its scheme (None if it is not quantized) and the
        reason. Then notes for the user.

    Raises:
        PlanError: nothing would be quantized, and `requested` does not ask for that.
    """
    ignored, mixed, schemes, _ = requested
    chosen_by_hand = bool(ignored or mixed or unquantized)

    if layers and not chosen_by_hand and not any(find_problem(layer, scheme) for layer in layers.values()):
        return {}, []

    groups: dict[str, list[str]] = {}
    for module in layers:
        groups.setdefault(entry.experts(module) or fused.get(module, (module,))[0], []).append(module)

    decisions: dict[str, Decision] = {}
    widened: dict[str, list[str]] = {}
    with_fallback: dict[tuple[str, str], dict[str, str]] = {}
    unfit: list[list[str]] = []

    for modules in groups.values():
        reasons = {module: ignored[module] for module in modules if module in ignored}
        if reasons:
            decisions |= _decide(None, _spread(modules, reasons, widened))
            continue

        reasons = {module: "the source has it unquantized" for module in modules if module in unquantized}
        if reasons:
            decisions |= _decide(None, _spread(modules, reasons))
            continue

        chosen = scheme
        reasons = {module: mixed[module] for module in modules if module in mixed}
        if reasons:
            option = min(reasons.values(), key=list(schemes).index)
            chosen = schemes[option]
            named = {module: option for module in modules if reasons.get(module) == option}
            reasons = _spread(modules, named, widened)

        problems = _find_problems(modules, layers, chosen, find_problem)
        if problems and chosen.fallback is not None:
            reasons = problems
            coarse = chosen.title
            chosen = chosen.fallback
            problems = _find_problems(modules, layers, chosen, find_problem)
            if not problems:
                with_fallback.setdefault((chosen.title, coarse), {}).update(reasons)

        if problems:
            decisions |= _decide(None, problems)
            unfit.append(modules)
        elif chosen != scheme:
            decisions |= _decide(chosen, reasons)

    notes = _widening_notes(widened) + _fallback_notes(with_fallback, layers)
    unquantized_reasons = [decision.why for decision in decisions.values() if decision.scheme is None]
    if len(unquantized_reasons) == len(layers):
        _refuse_nothing(entry.model, unquantized_reasons, requested)
        notes.append("nothing is quantized")
    if unfit:
        notes.append(_unfit_note(entry, scheme, layers, unfit, size))
    return decisions, notes


def _widening_notes(widened: Mapping[str, list[str]]) -> list[str]:
    """Notes about options that apply to more layers than they name."""
    return [
        f"{option} also applies to the layers fused with it: {', '.join(collapse(modules))}"
        for option, modules in widened.items()
    ]


def _fallback_notes(with_fallback: Mapping[tuple[str, str], dict[str, str]], layers: dict[str, Weight]) -> list[str]:
    """Notes about layers that get the fallback of their scheme, by titles of both, with reasons."""
    notes = []
    for (title, coarse), why in with_fallback.items():
        names = ", ".join(collapse(why))
        # Others say "same as k_proj (..)".
        reason = min(why.values(), key=len)
        notes.append(f"{title} instead of {coarse} for {_share(why, layers)}: {names}; {reason}")
    return notes


def _unfit_note(
    entry: ModuleRules, scheme: Scheme, layers: dict[str, Weight], unfit: list[list[str]], size: int | None
) -> str:
    """A note about groups of layers that cannot have the scheme."""
    share = _share([module for modules in unfit for module in modules], layers)
    if scheme.format.static:
        return f"no static activation scale is known for {share}, which stay unquantized"
    splits = [[split for module in modules if (split := entry.rule(module).split)] for modules in unfit]
    interleaved = all(any(split.interleaved for split in group) for group in splits)
    strict = any(split.interleaved_all or split.interleaved_rows for group in splits for split in group)

    unit = "groups"
    if (scheme.format.group[0] or 1) > 1:
        unit = "blocks"
    reason = f"{unit} do not divide"
    if size is not None:
        reason += f" on {size} ranks"
    if interleaved:
        reason = "engines sort rows by heads"
    others = "tensor or channel"
    if strict:
        others = "channel"
    return f"{reason}, which leaves {share} unquantized; --scheme {others} quantizes them too"


def _decide(scheme: Scheme | None, reasons: dict[str, str]) -> dict[str, Decision]:
    """A decision for each module: one scheme for all, each with its own reason."""
    return {module: Decision(scheme, why) for module, why in reasons.items()}


def _refuse_nothing(model: Architecture, reasons: Iterable[str], requested: RequestedSchemes) -> None:
    """Refuse a plan that quantizes nothing, unless --ignore alone says so."""
    causes = Counter(reason for reason in reasons if not reason.startswith(_SAME_SCHEME))
    if requested.copies and causes.keys() <= set(requested.ignored.values()):
        return
    texts = [f"{cause} ({count} layers)" for cause, count in causes.most_common(3)]
    raise PlanError(
        f"nothing would be quantized: {'; '.join(texts) or f'{model.name} has no layer here that could be'}",
        "choose other options, or say --ignore '**' if a copy is what you want",
    )


def _match_options(
    patterns: dict[str, str], layers: dict[str, Weight], others: Collection[str], harmless: bool
) -> dict[str, str]:
    """Find the first option that names each layer, by module; `harmless`: it may name modules of `others` alone."""
    options: dict[str, str] = {}
    for option, text in patterns.items():
        pattern = compile_pattern(text.removesuffix(".weight"))
        matched = [
            layer.module
            for layer in layers.values()
            if pattern.fullmatch(layer.module) or pattern.fullmatch(layer.source.module)
        ]

        kept = [module for module in others if pattern.fullmatch(module)] if not matched else []

        if not matched and not (kept and harmless):
            hint = "modules are named like tensors, without .weight; ** is any part; compress --dry-run -v lists them"
            if any(map(is_head, kept)):
                hint = "the output head is quantized with --quantize-lm-head only: give that too"
            elif any(map(is_embedding, kept)):
                hint = "the input embedding is quantized with --quantize-embeddings only: give that too"
            raise UsageError(f"{option} matches no module{'' if harmless else ' that can be quantized'}", hint)

        for module in matched:
            options.setdefault(module, option)

    return options


def _spread(modules: list[str], reasons: dict[str, str], widened: dict[str, list[str]] | None = None) -> dict[str, str]:
    """A reason for each module of a group: its own, or that of the first with one, then also in `widened`."""
    first = next(module for module in modules if module in reasons)
    shared = f"{_SAME_SCHEME}{first.rsplit('.', 1)[-1]} ({reasons[first]})"
    if widened is not None and len(reasons) < len(modules):
        widened.setdefault(reasons[first], []).extend(module for module in modules if module not in reasons)
    return {module: reasons.get(module, shared) for module in modules}


def _find_problems(
    modules: list[str], layers: dict[str, Weight], scheme: Scheme, find_problem: Callable[[Weight, Scheme], str | None]
) -> dict[str, str]:
    """Why each module of a group cannot have a scheme; empty if all can."""
    problems = {module: problem for module in modules if (problem := find_problem(layers[module], scheme))}
    if not problems:
        return {}
    return _spread(modules, problems)


def _share(modules: Collection[str], layers: dict[str, Weight]) -> str:
    """How many layers these are, and their part of all that may be quantized: "12 of 28 layers (40.0 % ...)"."""
    share = sum(layers[module].nbytes for module in modules) / sum(layer.nbytes for layer in layers.values())
    return f"{len(modules)} of {len(layers)} layers ({100 * share:.1f} % of their bytes)"

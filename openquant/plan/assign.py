"""Assign a scheme to each weight that may be quantized: the plan's scheme, another one, or none.

The user's options and the shapes that schemes need are considered. Fused layers, and all experts of a layer, get the
same scheme.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..errors import PlanError, UsageError
from ..formats.format import FLOATS, Format
from ..formats.schemes import INT8_W8A16, Scheme
from ..patterns import collapse, compile_pattern, group_pairs
from ..registry.architecture import Architecture, ModuleRules, is_embedding, is_head
from ..weights.weight import Weight
from .architecture import fused_parts, why_indivisible, why_not_reordered
from .decisions import Decision, Decisions, PlanOptions

_SAME_SCHEME = "same as "
# A hint for a name or pattern that matches no module.
NO_MODULE = "modules are named like tensors, without .weight; ** is any part; compress --dry-run -v lists them"


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


@dataclass(frozen=True)
class EngineLimits:
    """What engines cannot load of a model's layers.

    Attributes:
        decisions: the layers, the groups that engines fuse, and ranges of activations.
        entry: what the registry says of each module of the architecture.
        config: the language model's part of config.json, as text_config returns it.
        options: what the user asks for; `tp` ranks must be able to load the layers.
        has_scales: whether layers in static schemes have activation scales anyway.
    """

    decisions: Decisions
    entry: ModuleRules
    config: dict[str, Any]
    options: PlanOptions
    has_scales: bool
    _problems: dict[tuple[object, ...], str | None] = field(default_factory=dict)

    def why_not(self, layer: Weight, scheme: Scheme) -> str | None:
        """Return why engines cannot load a layer in a scheme, "28 heads do not divide by 8"; None if they can."""
        if scheme.format.static and (problem := self._why_not_static(layer, scheme.format)):
            return problem

        key = layer.name_template, layer.shape, scheme.suffix, layer.is_stored_as(scheme.format)
        if key not in self._problems:
            self._problems[key] = self._why_not_kind(layer, scheme)
        return self._problems[key] or self._why_ragged(layer, scheme)

    def group_layers(self) -> Collection[list[str]]:
        """Return groups of modules that get the same scheme: fused layers, and all experts of a layer."""
        fused = self.decisions.fused
        return group_pairs(
            (self.entry.experts(module) or fused.get(module, (module,))[0], module) for module in self.decisions.layers
        ).values()

    def why_none_of(self, modules: list[str], scheme: Scheme) -> dict[str, str]:
        """Return why each module of a group cannot have a scheme; empty if all can."""
        problems = {module: self.why_not(self.decisions.layers[module], scheme) for module in modules}
        reasons = {module: problem for module, problem in problems.items() if problem}
        if not reasons:
            return {}
        return _spread(modules, reasons)

    def _why_not_static(self, layer: Weight, form: Format) -> str | None:
        if self.has_scales or layer.module in self.decisions.input_absmax:
            return None
        if self.options.calibration is None:
            return why_no_input_scale(layer, form)
        return "the calibration observed no inputs of it"

    def _why_not_kind(self, layer: Weight, scheme: Scheme) -> str | None:
        """Return what is the same for all layers of a name template, shape and scheme."""
        if not scheme.head and is_head(layer.module):
            return "engines load no output head in this scheme"
        rule = self.entry.rule(layer.module)
        if not scheme.follows_rows and rule.reordered:
            return "engines reorder its rows but not its scales"

        problem = None
        # Engines load what the source has in this format already, also with smaller blocks at the edges.
        if not layer.is_stored_as(scheme.format):
            problem = self._why_misshapen(layer, scheme.format)
        problem = problem or why_not_reordered(layer.shape, rule.split, self.config, scheme.format)

        size = self.options.tp
        if problem is None and size is not None:
            problem = why_indivisible(layer.shape, rule.split, self.config, scheme.format.indivisible, size)
            return problem and f"--tp {size}: {problem}"
        return problem

    def _why_misshapen(self, layer: Weight, form: Format) -> str | None:
        for rows, _ in (
            (layer.shape[0], None),
            *fused_parts(layer.shape, self.entry.rule(layer.module).split, self.config),
        ):
            if problem := form.shape_error((rows, layer.shape[1])):
                return problem
            if not rows and form.indivisible[0] not in (1, None):
                return "config.json does not say how many rows each of its parts has"
        return None

    def _why_ragged(self, layer: Weight, scheme: Scheme) -> str | None:
        # Of fused layers only the last may end within a block (vLLM, layers/quantization/utils/fp8_utils.py:
        # 1329-1344), as kv_a_proj_with_mqa does.
        height = scheme.format.group[0] or 1
        if layer.shape[0] % height == 0:
            return None

        fused = self.decisions.fused.get(layer.module, ())
        ragged = [module for module in fused if self.decisions.layers[module].shape[0] % height]
        if len(ragged) < 2:
            return None
        return "engines fuse it with other layers, and its rows end within a block"


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


@dataclass(frozen=True)
class LayerChoice:
    """Which layers get which scheme, as the user's options say.

    Attributes:
        options: what the user asks for; `ignore`, `scheme_for` and `embedding` are read.
        is_decided: whether the choice was made before, so that layers have their activation scales.
    """

    options: PlanOptions

    is_decided: ClassVar[bool] = False

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of layers besides the plan's own, if they were chosen before."""
        return ()

    def is_unquantized(self, module: str) -> bool:
        """Return whether a module stays unquantized, whatever the registry says of it."""
        return self.options.ignored.fullmatch(module) is not None

    def request(self, decisions: Decisions) -> RequestedSchemes:
        """Find the layers that get another scheme than the plan's, or none.

        With --quantize-embeddings the embedding gets INT8 weights if engines load no embedding in the plan's scheme.

        Raises:
            UsageError: a pattern matches nothing, or is malformed.
        """
        options = self.options
        layers = decisions.layers
        # --ignore may name these, to no effect.
        others = [kept.tensor.module for kept in decisions.passthrough]
        ignored = _match_options({f"--ignore {text}": text for text in options.ignore}, layers, others, True)
        scheme_for = [(f"--scheme-for {text}={other.name}", text, other) for text, other in options.scheme_for]
        mixed = _match_options({option: text for option, text, _ in scheme_for}, layers, others, False)
        schemes = {option: other for option, _, other in scheme_for}
        if options.embedding and decisions.scheme and not decisions.scheme.embedding:
            schemes["--quantize-embeddings"] = INT8_W8A16
            for module in filter(is_embedding, layers):
                mixed.setdefault(module, "--quantize-embeddings")
        return RequestedSchemes(ignored, mixed, schemes, copies=bool(options.ignore))


@dataclass(frozen=True)
class DirectoryChoice(LayerChoice):
    """Which layers have which scheme in an existing output directory, to make the same plan again.

    Attributes:
        unquantized: modules that are not quantized.
        by_module: the scheme of each module whose scheme is not that of most layers; when fused layers need one scheme,
            the one that comes first here is chosen.
    """

    unquantized: set[str]
    by_module: dict[str, Scheme]

    is_decided: ClassVar[bool] = True

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of layers besides the plan's own."""
        return self.by_module.values()

    def is_unquantized(self, module: str) -> bool:
        """Return whether a module is not quantized in the directory."""
        return module in self.unquantized

    def request(self, decisions: Decisions) -> RequestedSchemes:
        """Give layers the schemes that they have in the directory."""
        ignored = {
            module: "the directory has it unquantized" for module in decisions.layers if module in self.unquantized
        }
        mixed = {module: self.by_module[module].suffix for module in decisions.layers if module in self.by_module}
        return RequestedSchemes(ignored, mixed, {scheme.suffix: scheme for scheme in self.schemes}, copies=True)


@dataclass(frozen=True)
class SourceChoice(LayerChoice):
    """The schemes that a quantized source has, for --scheme keep: all codes and scales stay as they are.

    Attributes:
        by_format: the scheme of each format of the source's weights.
    """

    by_format: Mapping[Format, Scheme]

    is_decided: ClassVar[bool] = True

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of the source's layers."""
        return self.by_format.values()

    def request(self, decisions: Decisions) -> RequestedSchemes:
        """Leave all layers as the source has them."""
        schemes = {f"the source has it so ({kept.suffix[1:]})": kept for kept in dict.fromkeys(self.schemes)}
        reasons = {kept: reason for reason, kept in schemes.items()}
        ignored = {}
        mixed = {}
        for module, layer in decisions.layers.items():
            if layer.format is None:
                ignored[module] = "the source has it unquantized"
            elif self.by_format[layer.format] != decisions.scheme:
                mixed[module] = reasons[self.by_format[layer.format]]
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
    limits: EngineLimits, requested: RequestedSchemes, unquantized: Collection[str]
) -> tuple[dict[str, Decision], list[str]]:
    """Decide about the layers that do not get the plan's scheme.

    Fused layers, and all experts of a layer, get the same scheme.

    Args:
        limits: the layers and the plan's own scheme, and what engines cannot load of them.
        requested: the modules for which options ask for another scheme, or for none.
        unquantized: full names of modules that are unquantized in a source that is in the scheme already, and stay so.

    Returns:
        For each layer without the plan's scheme, by full module name: its scheme (None if it is not quantized) and the
        reason. Then notes for the user.

    Raises:
        PlanError: nothing would be quantized, and `requested` does not ask for that.
    """
    layers = limits.decisions.layers
    scheme = limits.decisions.scheme
    assert scheme is not None
    ignored, mixed, schemes, _ = requested
    chosen_by_hand = bool(ignored or mixed or unquantized)

    if layers and not chosen_by_hand and not any(limits.why_not(layer, scheme) for layer in layers.values()):
        return {}, []

    decisions: dict[str, Decision] = {}
    widened: dict[str, list[str]] = {}
    with_fallback: dict[tuple[str, str], dict[str, str]] = {}
    unfit: list[list[str]] = []

    for modules in limits.group_layers():
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

        problems = limits.why_none_of(modules, chosen)
        if problems and chosen.fallback is not None:
            reasons = problems
            coarse = chosen.title
            chosen = chosen.fallback
            problems = limits.why_none_of(modules, chosen)
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
        _refuse_nothing(limits.entry.model, unquantized_reasons, requested)
        notes.append("nothing is quantized")
    if unfit:
        notes.append(_unfit_note(scheme, limits, unfit))
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


def _unfit_note(scheme: Scheme, limits: EngineLimits, unfit: list[list[str]]) -> str:
    """A note about groups of layers that cannot have the scheme."""
    share = _share([module for modules in unfit for module in modules], limits.decisions.layers)
    if scheme.format.static:
        return f"no static activation scale is known for {share}, which stay unquantized"
    unit = "groups"
    if (scheme.format.group[0] or 1) > 1:
        unit = "blocks"
    reason = f"{unit} do not divide"
    if limits.options.tp is not None:
        reason += f" on {limits.options.tp} ranks"
    return f"{reason}, which leaves {share} unquantized; --scheme channel quantizes them too"


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

        kept: list[str] = []
        if not matched:
            kept = [module for module in others if pattern.fullmatch(module)]

        if not matched and not (kept and harmless):
            hint = NO_MODULE
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


def _share(modules: Collection[str], layers: dict[str, Weight]) -> str:
    """How many layers these are, and their part of all that may be quantized: "12 of 28 layers (40.0 % ...)"."""
    share = sum(layers[module].nbytes for module in modules) / sum(layer.nbytes for layer in layers.values())
    return f"{len(modules)} of {len(layers)} layers ({100 * share:.1f} % of their bytes)"

"""A plan: what becomes of every tensor of a checkpoint, decided from names, shapes and dtypes alone.

    plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))

All decisions are made here, and no tensor is read for them. `--dry-run` prints the plan (report/text.py),
the conversion carries it out (convert/conversion.py), the output's config.json says it, and a resumed run continues it.

Three plans choose no scheme: `make_plain_plan` dequantizes, `make_unchanged_plan` copies all weights and adds the
scales of an FP8 KV cache (--scheme none), and `make_kept_plan` keeps codes and scales of a quantized source, and writes
them as compressed-tensors (--scheme keep).

    make_plain_plan(open_checkpoint(Path("DeepSeek-V3"))).quantization_config     # {}
    make_kept_plan(open_checkpoint(Path("Qwen3-8B-NVFP4")), PlanOptions()).quantization_config["quant_method"]
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.destination import Provenance
from ..files.model_files import is_adapter
from ..files.shardfile import TensorPlace
from ..formats.format import FLOATS, ActivationQuantization, Format, read_activation_quantization
from ..formats.hardware import UNCHANGED
from ..formats.numbers import DENSE, says_fp8_cache, with_fp8_cache
from ..formats.quantization import Quantization, read_quantization
from ..formats.schemes import KEPT_SCHEMES, Scheme
from ..models import GENERIC
from ..patterns import template
from ..registry.architecture import EMBEDDING, HEAD, Architecture, ModuleRules, is_head
from ..version import __version__
from ..weights.find import decoded_view, with_tool_config, without_cache_scales
from ..weights.weight import Weight
from . import assign, engines, serving
from .architecture import check_parallel_sizes, find_architecture, known_architecture, sort_tensors, text_config
from .completeness import NOT_CHECKED, check_layer_count, completeness_notes, token_misfits
from .decisions import (
    FEW_AXES,
    Decisions,
    Item,
    Lack,
    PassthroughTensor,
    PlanOptions,
    StackedTensor,
    apply_transforms,
    gptq_weights,
    quantization_config,
    refuse_repeats,
)
from .layout import Layout, PlanLine, plan_lines


@dataclass(frozen=True)
class Plan:
    """What a run will write.

    Attributes:
        source: the opened source.
        decoded: the source's headers with quantized weights as the bfloat16 tensors that they decode to.
        entry: what the registry says of each module of the architecture.
        options: what the user asked for besides the scheme.
        decisions: what becomes of each tensor: its scheme, or that it is copied or decoded.
        quantization_config: that of the output's config.json; empty if it has none.
        parallel: tensor-parallel sizes, each with the reason for which it cannot serve the output, if any.
        notes: lines for the user.
        source_notes: those of `notes` that are about the source, which the output's card repeats.
        identity: text that tells the source from another with the same headers.
        provenance: how the user asked for the output, which is recorded in it.
    """

    source: Checkpoint
    decoded: Checkpoint
    entry: ModuleRules
    options: PlanOptions
    decisions: Decisions
    quantization_config: dict[str, Any]
    parallel: Mapping[int, str | None]
    notes: tuple[str, ...]
    source_notes: tuple[str, ...] = ()
    identity: str = ""
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def model(self) -> Architecture:
        """The registry's entry of the architecture."""
        return self.entry.model

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the source, as far as its notes say so."""
        return [note for note in self.source_notes if not note.startswith(NOT_CHECKED)]

    @property
    def scheme(self) -> Scheme | None:
        """The plan's own scheme, of all layers that have no other; None if nothing is quantized."""
        return self.decisions.scheme

    @property
    def lacks(self) -> frozenset[Lack]:
        """What a calibration must still find before the plan can be carried out."""
        if self.decisions.rounded is None:
            return self.options.lacks
        return self.options.lacks - {"Hessians"}

    @property
    def layers(self) -> dict[str, Weight]:
        """The weights that may be quantized, by module."""
        return self.decisions.layers

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes of the other files that are copied, by name."""
        return self.decoded.files

    @property
    def is_tuned(self) -> bool:
        """Whether GPTQ weighs tokens and outputs by how much the model's answers depend on them."""
        return bool(self.options.gptq and self.options.gptq.get("tuned"))

    @cached_property
    def gptq_rounded(self) -> list[tuple[Weight, Scheme]]:
        """The weights that GPTQ rounds, each with its scheme."""
        if self.options.gptq is None:
            return []
        return gptq_weights(self.decisions)

    @cached_property
    def layout(self) -> Layout:
        """The output's shards, and the positions of the tensors in each."""
        return Layout(self.decisions, self.decoded.where)

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        """The printed plan: a line for all tensors of the same name template, source dtype, shape and decision."""
        return plan_lines(self.decisions)

    def with_rounded(self, places: Mapping[str, TensorPlace]) -> Plan:
        """Return the plan with tensors that GPTQ has rounded, which are only copied.

        Args:
            places: the file and offset of each such tensor, by name.
        """
        return replace(self, decisions=replace(self.decisions, rounded=places))

    @cached_property
    def digest(self) -> str:
        """A SHA-256 hash that guards a resumed run: equal for the same source, options, version and entry only."""
        options = self.options
        decisions = self.decisions

        facts: list[Any] = [
            __version__,
            repr(self.model),
            [asdict(scheme) for scheme in decisions.schemes],
            # The model card has these reasons.
            sorted({decision.why for decision in decisions.overrides.values()}),
            self.source.config,
            self.quantization_config,
            self.source.files,
            self.source.shards,
            self.source.headers,
            self.identity,
        ]
        if decisions.input_absmax:
            facts.append(dict(decisions.input_absmax))
        if options.transforms:
            facts.append(options.transforms.sha256)
        if options.gptq:
            facts.append(["GPTQ", options.gptq])
        if decisions.keeps:
            facts.append(["keep"])
        if says_fp8_cache(self.quantization_config):
            facts.append([repr(kept) for kept in decisions.passthrough if kept.value is not None])

        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def make_plan(
    checkpoint: Checkpoint,
    scheme: Scheme,
    options: PlanOptions | None = None,
    identity: str = "",
    architecture: str | Architecture | None = None,
    choice: assign.LayerChoice | None = None,
) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: the opened source.
        scheme: the scheme of all layers that have no other.
        options: what the user asks for besides the scheme; defaults if None.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.
        choice: what says which layers get which scheme; the options if None.

    Returns:
        The decision about each tensor, quantization_config and notes. Its shards are laid out on demand.

    Raises:
        SourceError: scales of a quantized source do not fit its codes, the calibration does not fit its layers, or
            config.json gives no number of layers.
        PlanError: the source is quantized in an unknown way, its architecture is unknown, no pattern matches a tensor,
            nothing would be quantized, a calibration is needed and cannot be made, engines cannot load the output, or
            codes and scales must be kept and cannot.
        UsageError: a pattern matches nothing or is malformed, or the tensor-parallel size is below 1.
    """
    return Planner(checkpoint, identity, architecture, choice).make(scheme, options or PlanOptions())


class _Sorted(NamedTuple):
    """Tensors of a source as an entry sorts them: what all schemes share."""

    entry: ModuleRules
    items: dict[str, list[Item]]
    layers: dict[str, Weight]
    fused: dict[str, tuple[str, ...]]


@dataclass(eq=False)
class Planner:
    """Makes plans of one checkpoint, as `make_plan` does, and finds what they share only once.

    Args:
        checkpoint: the opened source.
        identity: text that tells this source from another with the same headers; it is part of the plans' digests.
        architecture: as for `make_plan`.
        choice: what says which layers get which scheme; the options of each plan if None.
    """

    checkpoint: Checkpoint
    identity: str = ""
    architecture: str | Architecture | None = None
    choice: assign.LayerChoice | None = None
    # By entry, --ignore, and whether the source is in the scheme already.
    _sorted: dict[tuple[Architecture, tuple[str, ...], bool], _Sorted] = field(default_factory=dict)

    @cached_property
    def _model(self) -> Architecture:
        return find_architecture(self.checkpoint, self.architecture)

    @cached_property
    def _decoded(self) -> tuple[Checkpoint, dict[str, Weight]]:
        return decoded_view(self.checkpoint)

    def _sort(self, model: Architecture, choice: assign.LayerChoice, in_scheme: bool) -> _Sorted:
        """Sort the tensors, in containers that the caller may change."""
        key = model, choice.options.ignore, in_scheme
        if key not in self._sorted:
            entry = ModuleRules(model)
            items, layers = sort_tensors(*self._decoded, entry, choice.is_unquantized, in_scheme)
            self._sorted[key] = _Sorted(entry, items, layers, entry.fused_groups(layers))

        entry, items, layers, fused = self._sorted[key]
        return _Sorted(entry, {shard: list(tensors) for shard, tensors in items.items()}, dict(layers), fused)

    def notes_on_source(self) -> tuple[str, ...]:
        """Return notes on what the source lacks, and what does not fit in it. They take as long as a plan."""
        return _notes_on_source(self.checkpoint, self._decoded[0], ModuleRules(self._model))

    def make(self, scheme: Scheme, options: PlanOptions, with_notes: bool = True) -> Plan:
        """Decide what becomes of every tensor.

        Args:
            scheme: the scheme of all layers that have no other.
            options: what the user asks for besides the scheme.
            with_notes: whether the plan gets notes for the user, which take as long as all else.

        Raises:
            OpenQuantError: as `make_plan`.
        """
        checkpoint = self.checkpoint
        model = self._model
        choice = self.choice or assign.LayerChoice(options)
        of_layers = [scheme, *choice.schemes]
        schemes = [*of_layers, *(other for _, other in options.scheme_for)]
        engines.refuse_schemes(model, schemes)
        if options.gptq:
            refuse_repeats(model)

        # Open: quantized weights of the source appear as the bfloat16 tensors that they decode to.
        decoded, weights = self._decoded
        assign.check_options(options)
        model = _add_tables(model, decoded, scheme, options)

        has_input_scales = choice.is_decided or any(
            weight.input_scale_for(scheme.format) for weight in weights.values()
        )
        options = serving.expect_calibration(
            options, decoded.tensors, required=scheme.format.static and not has_input_scales
        )

        config = text_config(decoded, model)
        check_layer_count(config)

        # Sort. A source that is in the scheme already keeps its choice of layers, whatever the registry says, except
        # for embeddings, output heads and routers.
        in_scheme = isinstance(choice, assign.SourceChoice) or _all_in_scheme(weights.values(), of_layers)
        entry, items, layers, fused = self._sort(model, choice, in_scheme)
        if options.transforms is not None:
            apply_transforms(items, layers, options.transforms)

        cache_notes = _add_cache_scales(items, decoded, entry, options) if options.fp8_kv_cache else []
        if options.tp is not None:
            assign.refuse_size(entry, layers, config, options.tp)

        # Decide.
        decisions = Decisions(scheme, items, layers, fused, keeps=isinstance(choice, assign.SourceChoice))
        input_absmax = serving.find_input_absmax(schemes, options.calibration, entry, decisions)
        decisions = replace(decisions, input_absmax=input_absmax)
        limits = assign.EngineLimits(decisions, entry, config, options, choice.is_decided)
        decisions, scheme_notes = _assign_layers(limits, choice, in_scheme)

        # Describe.
        formats = ((layer, chosen.scheme and chosen.scheme.format) for layer, chosen in decisions.iter_decisions())
        parallel = check_parallel_sizes(decoded, entry, formats, options.tp)
        settings = quantization_config(entry, decisions, options.fp8_kv_cache)
        head_notes = engines.check_task_head(checkpoint.architecture)
        plan = Plan(checkpoint, decoded, entry, options, decisions, settings, parallel, (), (), self.identity)
        if not with_notes:
            return plan

        about_source = _notes_on_source(checkpoint, decoded, entry)
        about_output = engines.output_notes(checkpoint, weights.values(), entry, decisions, options)
        notes = (*engines.entry_notes(model), *head_notes, *scheme_notes, *about_source, *cache_notes, *about_output)
        return replace(plan, notes=notes, source_notes=about_source)


def _all_in_scheme(weights: Collection[Weight], schemes: Iterable[Scheme]) -> bool:
    """Return whether a source is quantized, and all its weights are stored as one of some schemes does."""
    formats = [scheme.format for scheme in schemes]
    return bool(weights) and all(any(map(weight.is_stored_as, formats)) for weight in weights)


def _add_cache_scales(
    items: dict[str, list[Item]], decoded: Checkpoint, entry: ModuleRules, options: PlanOptions
) -> list[str]:
    """Add scales of an FP8 KV cache to the tensors; with notes."""
    modules = (info.module for info in decoded.tensors.values())
    attentions = serving.find_cached_attentions(modules, entry, text_config(decoded, entry.model))
    return serving.add_scales(items, decoded, attentions, options.calibration)


def _notes_on_source(checkpoint: Checkpoint, decoded: Checkpoint, entry: ModuleRules) -> tuple[str, ...]:
    """Notes on what the source lacks, what does not fit in it, and what of it is left out."""
    tensors = decoded.tensors.values()
    adapters = [name for name in checkpoint.left_out if is_adapter(name)]
    unmerged = [f"{adapters[0]}: the adapter beside the model is not merged into it"] if adapters else []
    return (
        *engines.source_notes(checkpoint, entry.model),
        *unmerged,
        *completeness_notes(entry, tensors, decoded.config, text_config(decoded, entry.model)),
        *token_misfits(checkpoint.root, entry, tensors),
    )


def _add_tables(model: Architecture, decoded: Checkpoint, scheme: Scheme, options: PlanOptions) -> Architecture:
    """The entry with the output head and the embedding among the quantized layers, where the options ask for them."""
    if options.head:
        engines.refuse_head(decoded, model, scheme)
        model = model.with_quantized(HEAD)
    if options.embedding:
        engines.refuse_embedding(decoded, model, scheme)
        model = model.with_quantized(EMBEDDING)
    return model


def _assign_layers(
    limits: assign.EngineLimits, choice: assign.LayerChoice, in_scheme: bool
) -> tuple[Decisions, list[str]]:
    """Decide the scheme of each layer, and refuse what no engine loads; with notes."""
    decisions = limits.decisions
    requested = choice.request(decisions)
    unquantized: set[str] = set()
    if in_scheme and not choice.is_decided:
        unquantized = {module for module, layer in decisions.layers.items() if layer.format is None}
    overrides, scheme_notes = assign.assign_schemes(limits, requested, unquantized)
    decisions = replace(decisions, overrides=overrides)

    if isinstance(choice, assign.SourceChoice):
        assign.refuse_changes(decisions, choice.by_format)
    engines.refuse_experts(limits.entry, decisions)
    engines.refuse_embedding_schemes(decisions)
    engines.refuse_nameless(limits.entry, decisions)
    return decisions, scheme_notes


_COMPRESSED_TENSORS = "compressed-tensors"


def output_config(plan: Plan) -> dict[str, Any]:
    """Return the output's config.json.

    Args:
        plan: what a run will write.

    Returns:
        The content of the source's config.json, with the plan's quantization_config in place of its own, or none; and
        the other keys that the entry says an output has (Architecture.extra_config).
    """
    extra = plan.model.extra_config(plan.scheme and plan.scheme.name, plan.decoded.config)
    config = {**plan.decoded.config, **extra}
    if plan.quantization_config:
        config["quantization_config"] = plan.quantization_config
    return config


def ignored_layers(plan: Plan) -> list[str]:
    """Return the output's ignore list.

    Args:
        plan: what a run will write.

    Returns:
        Names of unquantized modules, under every name that engines look up, and regular expressions ("re:..."); empty
        without a scheme.
    """
    if plan.scheme is None:
        return []
    return list(plan.quantization_config[plan.scheme.ignored_keys[0]])


def has_fp8_cache(plan: Plan) -> bool:
    """Return whether a plan's output has an FP8 KV cache, with scales for it."""
    return says_fp8_cache(plan.quantization_config)


def required_package(plan: Plan) -> str | None:
    """Return the package that transformers needs to load a plan's output, "compressed-tensors"; None if none."""
    if plan.quantization_config.get("quant_method") != _COMPRESSED_TENSORS:
        return None
    return _COMPRESSED_TENSORS


def make_plain_plan(checkpoint: Checkpoint, identity: str = "") -> Plan:
    """Plan to decode all quantized weights, whatever the registry says of them, and to leave out KV-cache scales.

    Args:
        checkpoint: the opened source.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.

    Returns:
        What a run will write, with no scheme and an empty quantization_config.

    Raises:
        SourceError: scales do not fit their codes.
        PlanError: no weight is quantized, or openquant does not know the format.
    """
    decoded, weights = decoded_view(checkpoint)

    # A source with scales of an FP8 KV cache alone counts as quantized.
    if not weights and decoded.config == checkpoint.config:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "there is nothing to dequantize")
    decoded = without_cache_scales(decoded)

    items: dict[str, list[Item]] = {shard: [] for shard in decoded.shards}

    for info in decoded.tensors.values():
        weight = weights.get(info.name)
        if len(info.shape) < 2:
            kept = PassthroughTensor(info, template(info.name) if weight else info.name, FEW_AXES, weight)
        else:
            kept = PassthroughTensor(info, template(info.module), "" if weight else "not quantized", weight)
        items[decoded.where[info.name].shard].append(kept)

    entry = ModuleRules(known_architecture(checkpoint) or replace(GENERIC, name=checkpoint.architecture))
    about_source = _notes_on_source(checkpoint, decoded, entry)
    notes = (*about_source, *engines.left_behind(checkpoint, weights.values()))
    decisions = Decisions(None, items)
    return Plan(checkpoint, decoded, entry, PlanOptions(), decisions, {}, {}, notes, about_source, identity)


_WHY = f"--scheme {UNCHANGED}"


def make_unchanged_plan(
    checkpoint: Checkpoint, options: PlanOptions, identity: str = "", architecture: str | Architecture | None = None
) -> Plan:
    """Plan to copy every tensor and add scales of the KV cache.

    Args:
        checkpoint: the opened source.
        options: what the user asks for; only the calibration, or what it takes to make one, and the tensor-parallel
            size are used.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.

    Returns:
        What a run will write, without a scheme.

    Raises:
        PlanError: weights of the source are quantized, its architecture is unknown, no pattern matches a tensor, it is
            not known which layers have a KV cache, engines load no scales for it, the calibration lacks a layer or
            cannot be made, or the tensor-parallel size does not divide the layers.
        SourceError: scales of a quantized source do not fit its codes, or the calibration does not fit its layers.
        UsageError: the tensor-parallel size is below 1.
    """
    assign.check_options(options)
    model = find_architecture(checkpoint, architecture)
    decoded, weights = decoded_view(checkpoint)

    if weights:
        raise PlanError(
            f"{len(weights)} weights of {checkpoint.root} are quantized, and {_WHY} writes unquantized ones",
            "give --kv-cache fp8 with the scheme that they have, which keeps their codes, or dequantize it first",
        )

    entry = ModuleRules(model)
    config = text_config(decoded, model)
    sorted_items, layers = sort_tensors(decoded, {}, entry, lambda _: True, in_scheme=False)

    options = serving.expect_calibration(options, decoded.tensors, required=False)
    items: dict[str, list[Item]] = {
        shard: [_passthrough(item) for item in shard_items] for shard, shard_items in sorted_items.items()
    }

    cache_notes = _add_cache_scales(items, decoded, entry, options)

    if options.tp is not None:
        assign.refuse_size(entry, layers, config, options.tp)

    decisions = Decisions(None, items)
    about_source = _notes_on_source(checkpoint, decoded, entry)
    notes = (
        *engines.entry_notes(model),
        *about_source,
        *cache_notes,
        *serving.serving_notes(model, decisions),
        *engines.engine_notes(entry, decisions),
    )
    parallel = check_parallel_sizes(decoded, entry, ((layer, None) for layer in layers.values()), options.tp)
    settings = with_fp8_cache(DENSE)
    return Plan(checkpoint, decoded, entry, options, decisions, settings, parallel, notes, about_source, identity)


def _passthrough(item: Item) -> PassthroughTensor:
    """The tensor to be copied, even if it may be quantized."""
    if isinstance(item, PassthroughTensor):
        return item
    source = item.tensor if isinstance(item, StackedTensor) else item.source
    return PassthroughTensor(source, template(source.module), _WHY)


_OTHERS = "choose another scheme, which quantizes its weights again, or dequantize the source"


def make_kept_plan(
    checkpoint: Checkpoint, options: PlanOptions, identity: str = "", architecture: str | Architecture | None = None
) -> Plan:
    """Plan to keep all codes and scales of a quantized source, and what is not quantized.

    Args:
        checkpoint: the opened source.
        options: what the user asks for; only the FP8 KV cache and the tensor-parallel size are used.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.

    Returns:
        What a run will write. Its own scheme is that of most quantized weights. The KV cache is in FP8 if the source's
        config says so and engines can load its scales.

    Raises:
        PlanError: nothing in the source is quantized, compressed-tensors has no layout for some of it, engines cannot
            load it so, or what `make_plan` refuses.
        SourceError: scales of the source do not fit its codes.
        UsageError: the source quantizes activations or the KV cache in an unknown way.
    """
    decoded, weights = decoded_view(checkpoint)

    if not weights:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "choose a scheme to quantize it with")

    quantization = read_quantization(with_tool_config(checkpoint.config, checkpoint.root))
    keeps = _find_schemes(weights.values(), quantization)
    counts = Counter(keeps[weight.format] for weight in weights.values() if weight.format is not None)
    scheme = counts.most_common(1)[0][0]

    notes = []

    if not options.fp8_kv_cache and says_fp8_cache(quantization.settings):
        model = find_architecture(checkpoint, architecture)
        modules = (info.module for info in decoded.tensors.values())
        try:
            serving.find_cached_attentions(modules, ModuleRules(model), text_config(decoded, model))
            options = replace(options, fp8_kv_cache=True)
        except PlanError as error:
            notes.append(f"the FP8 KV cache of the source is not in the output's config: {error.message}")

    options = replace(options, head=any(is_head(weight.module) for weight in weights.values()))
    if any(fmt.global_scale is not None and not fmt.global_scale.divides for fmt in keeps):
        notes.append(
            "global scales are one over those of the source, rounded to float32 (by 6e-8 of them at most); codes and "
            "scales of groups are the source's bytes"
        )

    plan = make_plan(checkpoint, scheme, options, identity, architecture, assign.SourceChoice(options, keeps))
    return replace(plan, notes=(*plan.notes, *notes))


def _find_schemes(weights: Iterable[Weight], quantization: Quantization) -> dict[Format, Scheme]:
    """Find the scheme that stores the codes and scales of each weight, by format; of stacks, also the transposed."""
    schemes: dict[Format, Scheme] = {}
    for weight in weights:
        fmt = weight.format
        assert fmt is not None
        inputs = quantization.inputs_of(weight.module)
        turned = replace(fmt, group=fmt.group[::-1]) if len(weight.source.shape) == 3 else fmt

        scheme = next((one for one in KEPT_SCHEMES if _keeps(one, weight, {fmt, turned}, inputs)), None)
        if scheme is None:
            name = weight.codes.name
            raise PlanError(f"compressed-tensors has no layout for {name}: {_describe_stored(weight, inputs)}", _OTHERS)
        if scheme.format.input_scale is not None and (problem := assign.why_no_input_scale(weight, scheme.format)):
            raise PlanError(f"{weight.module} has static activations: {problem}", _OTHERS)

        schemes |= {fmt: scheme, turned: scheme}
    return schemes


def _keeps(scheme: Scheme, weight: Weight, formats: set[Format], inputs: ActivationQuantization | None) -> bool:
    """Return whether a scheme stores a weight's codes and scales as they are, and its activations alike."""
    own = scheme.format
    scale = weight.scale
    activations = read_activation_quantization(scheme.group["input_activations"])
    return (
        weight.rank_rows is None
        and any(own.holds(fmt) for fmt in formats)
        and all((own.static, own.input_global_scale is None) == (fmt.static, fmt.input_global_scale is None)
                for fmt in formats)
        and _alike(activations) == _alike(inputs)
        # Scales in float32 would be rounded.
        and not (own.scale.dtype == "BF16" and scale is not None and scale.dtype == FLOATS[0])
    )  # fmt: skip


def _alike(inputs: ActivationQuantization | None) -> tuple[object, ...] | None:
    """Return what must be equal of how activations are quantized; what shares a dynamic scale may differ."""
    return inputs and (inputs.number, inputs.static, inputs.has_global_scale)


def _describe_stored(weight: Weight, inputs: ActivationQuantization | None) -> str:
    """Say how a weight is stored: "FP8 with one scale per 64x64 block, F32 scales, FP8 activations"."""
    fmt = weight.format
    scale = weight.scale
    assert fmt is not None

    parts = [f"{fmt.number.title} with {fmt.label}"]
    if scale is not None:
        parts.append(f"{scale.dtype} scales")
    if fmt.columns and fmt.columns.act_order:
        parts.append("inputs in any order (act-order)")
    if weight.rank_rows is not None:
        parts.append("stored per tensor-parallel rank")
    if inputs is None:
        parts.append("activations as they are")
    else:
        parts.append(f"{inputs.number.title} activations")
    return ", ".join(parts)

"""A plan: what becomes of every tensor of a checkpoint, decided from names, shapes and dtypes alone.

    plan = make_plan(open_checkpoint(Path("Qwen3-8B")), find_scheme("tensor"))

All decisions are made here, and no tensor is read for them. `--dry-run` prints the plan (printed.py, summary.py), the
conversion carries it out (layout.py), the output's config.json says it (config.py), and a resumed run continues it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from ..files.checkpoint import Checkpoint
from ..files.journal import Provenance
from ..files.layer_store import TensorPlace
from ..formats.format import Format
from ..formats.numbers import says_fp8_cache
from ..formats.schemes import Scheme
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules
from ..version import __version__
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .architecture import find_architecture
from .assign import (
    assign_schemes,
    check_options,
    problem_finder,
    refuse_changes,
    refuse_size,
    requested_schemes,
    scale_problem_finder,
    schemes_of_output,
    schemes_of_source,
)
from .completeness import check_layer_count, completeness_notes
from .decisions import Decisions, Lack, PlanOptions, StoredLayout
from .engines import (
    check_task_head,
    refuse_embedding,
    refuse_embedding_schemes,
    refuse_experts,
    refuse_head,
    refuse_nameless,
    refuse_schemes,
)
from .gptq import gptq_weights, refuse_repeats
from .ignore_list import quantization_config
from .input_scales import expect_calibration, find_input_absmax, require_widths
from .kv_cache import add_scales, find_cached_attentions
from .layout import Layout
from .notes import entry_notes, output_notes, source_notes
from .printed import PlanLine, plan_lines
from .sort import sort_tensors
from .tensor_parallel import ParallelSize, check_parallel_sizes, text_config
from .token_ids import token_misfits
from .transforms import apply_transforms


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
        identity: text that tells the source from another with the same headers.
        provenance: how the user asked for the output, which is recorded in it.
    """

    source: Checkpoint
    decoded: Checkpoint
    entry: ModuleRules
    options: PlanOptions
    decisions: Decisions
    quantization_config: dict[str, Any]
    parallel: tuple[ParallelSize, ...]
    notes: tuple[str, ...]
    identity: str = ""
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def model(self) -> Architecture:
        """The registry's entry of the architecture."""
        return self.entry.model

    @property
    def scheme(self) -> Scheme | None:
        """The plan's own scheme, of all layers that have no other; None if nothing is quantized."""
        return self.decisions.scheme

    @property
    def lacks(self) -> frozenset[Lack]:
        """What a calibration must still find before the plan can be carried out."""
        return self.options.lacks if self.decisions.rounded is None else self.options.lacks - {"Hessians"}

    @property
    def layers(self) -> dict[str, Weight]:
        """The weights that may be quantized, by module."""
        return self.decisions.layers

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes of the other files that are copied, by name."""
        return self.decoded.files

    @cached_property
    def gptq_rounded(self) -> list[tuple[Weight, Scheme]]:
        """The weights that GPTQ rounds, each with its scheme."""
        return [] if self.options.gptq is None else gptq_weights(self.decisions)

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
        options, decisions = self.options, self.decisions
        added_scales = [repr(kept) for kept in decisions.passthrough if kept.value is not None]
        facts = [
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
            *([dict(decisions.input_absmax)] if decisions.input_absmax else []),
            *([options.transforms.sha256] if options.transforms else []),
            *([["GPTQ", options.gptq]] if options.gptq else []),
            *([["keep"]] if decisions.keeps else []),
            *([added_scales] if says_fp8_cache(self.quantization_config) else []),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def make_plan(
    checkpoint: Checkpoint,
    scheme: Scheme,
    options: PlanOptions | None = None,
    identity: str = "",
    architecture: str | Architecture | None = None,
    stored: StoredLayout | None = None,
    keeps: Mapping[Format, Scheme] | None = None,
) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: the opened source.
        scheme: the scheme of all layers that have no other.
        options: what the user asks for besides the scheme; defaults if None.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.
        stored: schemes of an existing directory, to make its plan again; they replace those of the options.
        keeps: for --scheme keep, the scheme of each format of the source's weights; all codes and scales are kept.

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
    options = options or PlanOptions()
    model = find_architecture(checkpoint, architecture)
    of_layers = [scheme, *(stored.schemes.values() if stored else ()), *(keeps.values() if keeps else ())]
    schemes = [*of_layers, *(other for _, other in options.scheme_for)]
    refuse_schemes(model, schemes)
    if options.gptq:
        refuse_repeats(model)

    # Open: quantized weights of the source appear as the bfloat16 tensors that they decode to.
    decoded, weights = decoded_view(checkpoint)
    check_options(options)
    if options.head:
        refuse_head(decoded, model, scheme)
        model = model.with_head()
    if options.embedding:
        refuse_embedding(decoded, model, scheme)
        model = model.with_embedding()
    has_input_scales = stored or any(weight.input_scale_for(scheme.format) for weight in weights.values())
    options = expect_calibration(options, decoded.tensors, required=scheme.format.static and not has_input_scales)
    entry, config = ModuleRules(model), text_config(decoded, model)
    check_layer_count(config)

    # Sort. A source that is in the scheme already keeps its choice of layers, whatever the registry says, except for
    # embeddings, output heads and routers.
    in_scheme = keeps is not None or (
        bool(weights) and all(any(weight.is_stored_as(one.format) for one in of_layers) for weight in weights.values())
    )
    is_ignored = stored.is_unquantized if stored else options.ignores()
    items, layers = sort_tensors(decoded, weights, entry, is_ignored, in_scheme)
    if options.calibration is not None:
        require_widths(options.calibration, layers.values())
    if options.transforms is not None:
        apply_transforms(items, layers, options.transforms)
    cache_notes: list[str] = []
    if options.fp8_kv_cache:
        attentions = find_cached_attentions((info.module for info in decoded.tensors.values()), entry, config)
        cache_notes = add_scales(items, decoded, attentions, options.calibration)
    if options.tp is not None:
        refuse_size(entry, layers, config, options.tp)

    # Decide.
    fused = entry.fused_groups(layers)
    input_absmax = find_input_absmax(schemes, options.calibration, entry, layers, fused)
    decisions = Decisions(scheme, items, layers, fused, input_absmax=input_absmax, keeps=keeps is not None)
    if stored:
        requested = schemes_of_output(stored, layers)
    elif keeps is not None:
        requested = schemes_of_source(keeps, scheme, layers)
    else:
        requested = requested_schemes(scheme, options, layers, decisions.passthrough)
    asked = not stored and keeps is None
    unquantized = {module for module, layer in layers.items() if asked and in_scheme and layer.format is None}
    find_scale_problem = scale_problem_finder(scheme.format, options.calibration, input_absmax, not asked)
    find_problem = problem_finder(entry, layers, fused, config, options.tp, find_scale_problem)
    overrides, scheme_notes = assign_schemes(
        entry, scheme, layers, find_problem, fused, requested, unquantized, options.tp
    )
    decisions = replace(decisions, overrides=overrides)
    if keeps is not None:
        refuse_changes(decisions, keeps)
    refuse_experts(entry, decisions)
    refuse_embedding_schemes(decisions)
    refuse_nameless(entry, decisions)

    # Describe.
    formats = ((layer, chosen.scheme.format if chosen.scheme else None) for layer, chosen in decisions.decided())
    parallel = check_parallel_sizes(decoded, entry, formats, options.tp)
    notes = [
        *entry_notes(model),
        *check_task_head(checkpoint.architecture),
        *source_notes(checkpoint, model),
        *scheme_notes,
        *completeness_notes(entry, decoded.tensors.values(), decoded.config, config),
        *token_misfits(checkpoint.root, entry, decoded.tensors.values()),
        *cache_notes,
        *output_notes(checkpoint, weights.values(), entry, decisions, options),
    ]
    settings = quantization_config(entry, decisions, options.fp8_kv_cache)
    return Plan(checkpoint, decoded, entry, options, decisions, settings, parallel, tuple(notes), identity)

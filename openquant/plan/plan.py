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
from ..formats.kv_cache import says_fp8_cache
from ..formats.schemes import Scheme
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules
from ..version import __version__
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .architecture import find_architecture
from .assign import (
    assign_schemes,
    problem_finder,
    refuse_size,
    requested_schemes,
    require_sound,
    scale_problem_finder,
    schemes_of_output,
)
from .decisions import Decisions, Lack, PlanOptions, StoredLayout
from .engines import refuse_experts, refuse_head, refuse_nameless, refuse_schemes
from .gptq import gptq_weights, refuse_repeats
from .ignore_list import quantization_config
from .input_scales import expect_calibration, known_inputs, require_widths
from .kv_cache import add_scales, cache_layers
from .layout import Layout
from .missing import missing_notes
from .notes import entry_notes, output_notes
from .printed import PlanLine, plan_lines
from .sort import sort_tensors
from .tensor_parallel import ParallelSize, parallel_sizes, text_config
from .transforms import apply_transforms


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        source: the opened source.
        seen: the source with quantized weights as the bfloat16 tensors they stand for.
        entry: the registry's entry of the architecture.
        options: what the user asked for beside the scheme.
        decisions: what becomes of each tensor.
        quantization_config: what the output's config.json says of the fates; empty without a scheme.
        parallel: for each tensor-parallel size, why it cannot serve the output, or that it can.
        notes: lines for the user.
        identity: text that tells the source from another with the same headers.
        provenance: how the output was asked for, which it records.
    """

    source: Checkpoint
    seen: Checkpoint
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
        """What the registry holds of the architecture."""
        return self.entry.model

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of all layers that have no other; None if nothing is to be quantized."""
        return self.decisions.scheme

    @property
    def lacks(self) -> frozenset[Lack]:
        """What must be found by running texts through the model before the plan can be carried out."""
        return self.options.lacks - {"Hessians"} if self.decisions.rounded else self.options.lacks

    @property
    def layers(self) -> dict[str, Weight]:
        """The weights that could be quantized, by module; each knows where it lies in the source."""
        return self.decisions.layers

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes of the other files that are copied, by name."""
        return self.seen.files

    @cached_property
    def gptq_rounded(self) -> list[tuple[Weight, Scheme]]:
        """The weights that GPTQ rounds, each with its scheme."""
        return [] if self.options.gptq is None else gptq_weights(self.decisions)

    @cached_property
    def layout(self) -> Layout:
        """The output's shards, and where the tensors lie in each."""
        return Layout(self.decisions, self.seen.where)

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        """The printed plan: a line for all tensors that are alike in name, shape and fate."""
        return plan_lines(self.decisions)

    def with_rounded(self, places: Mapping[str, TensorPlace]) -> Plan:
        """The same plan, of which these tensors are rounded already, and only copied."""
        return replace(self, decisions=replace(self.decisions, rounded=places))

    @cached_property
    def digest(self) -> str:
        """Guards a resumed run: equal for the same source, options, version and registry's entry, and only then."""
        options, decisions = self.options, self.decisions
        made_scales = [repr(kept) for kept in decisions.kept if kept.made is not None]
        facts = [
            __version__,
            repr(self.model),
            [asdict(scheme) for scheme in decisions.schemes],
            # The model card says them.
            sorted({decision.why for decision in decisions.others.values()}),
            self.source.config,
            self.quantization_config,
            self.source.files,
            self.source.shards,
            self.source.headers,
            self.identity,
            *([dict(decisions.inputs)] if decisions.inputs else []),
            *([options.transforms.sha256] if options.transforms else []),
            *([["GPTQ", options.gptq]] if options.gptq else []),
            *([made_scales] if says_fp8_cache(self.quantization_config) else []),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def make_plan(
    checkpoint: Checkpoint,
    scheme: Scheme,
    options: PlanOptions | None = None,
    identity: str = "",
    architecture: str | Architecture | None = None,
    found: StoredLayout | None = None,
) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: the opened source.
        scheme: the scheme of all layers that have no other.
        options: what the user asks for beside it; nothing if None.
        identity: text that tells this source from another with the same headers; it goes into the plan's digest.
        architecture: the registry's entry to go by, "auto" or "generic", or an entry, as find_model takes it.
        found: the fates that a written directory has its modules in, to be had again, in place of what options ask for.

    Returns:
        The plan, of which nothing is laid out yet.

    Raises:
        SourceError: the source is quantized, and its scales do not belong to its codes.
        PlanError: it is quantized in an unknown way, an unknown architecture, tensors no rule covers, or what engines
            cannot load.
        UsageError: a pattern that matches nothing or is malformed, or a size that is none.
    """
    options = options or PlanOptions()
    model = find_architecture(checkpoint, architecture)
    schemes = [scheme, *(other for _, other in options.scheme_for), *(found.schemes.values() if found else ())]
    refuse_schemes(model, schemes)
    if options.gptq:
        refuse_repeats(model)

    # Open: quantized weights of the source are seen as the bfloat16 tensors they stand for.
    seen, weights = decoded_view(checkpoint)
    require_sound(options)
    if options.head:
        refuse_head(seen, model, scheme)
        model = model.with_head()
    scaled = found or any(weight.input_scale_for(scheme.format) for weight in weights.values())
    options = expect_calibration(options, seen.tensors, required=scheme.format.static and not scaled)
    entry, config = ModuleRules(model), text_config(seen, model)

    # Sort. A source that is quantized in the scheme already keeps its choice of layers, whatever the registry says,
    # but for embeddings, output heads and routers.
    settled = bool(weights) and all(weight.is_held_by(scheme.format) for weight in weights.values())
    items, layers = sort_tensors(seen, weights, entry, found.stays if found else options.stays, settled)
    if options.calibration is not None:
        require_widths(options.calibration, layers.values())
    if options.transforms is not None:
        apply_transforms(items, layers, options.transforms)
    scales: list[str] = []
    if options.cached:
        cached = cache_layers((info.module for info in seen.tensors.values()), entry, config)
        scales = add_scales(items, seen, cached, options.calibration)
    if options.tp is not None:
        refuse_size(entry, layers, config, options.tp)

    # Decide.
    sets = entry.fused_groups(layers)
    inputs = known_inputs(schemes, options.calibration, entry, layers, sets)
    decisions = Decisions(scheme, items, layers, sets, {}, inputs)
    asked = schemes_of_output(found, layers) if found else requested_schemes(options, layers, decisions.kept)
    left = {module for module, layer in layers.items() if settled and layer.format is None}
    find_scale_problem = scale_problem_finder(scheme.format, options.calibration, inputs, found)
    find_problem = problem_finder(entry, layers, sets, config, options.tp, find_scale_problem)
    others, moved = assign_schemes(entry, scheme, layers, find_problem, sets, asked, left, options.tp)
    decisions = replace(decisions, others=others)
    refuse_experts(entry, decisions)
    refuse_nameless(entry, decisions)

    # Describe. Where a layer stays unquantized, any part of it can be split off.
    groups = (
        (layer, decision.scheme.format.indivisible if decision.scheme else (1, 1))
        for layer, decision in decisions.each()
    )
    parallel = parallel_sizes(seen, entry, groups, options.tp)
    notes = [*moved, *missing_notes(entry.model, layers, decisions.kept, sets, config), *scales]
    notes = [*entry_notes(model), *notes, *output_notes(checkpoint, weights.values(), entry, decisions, options)]
    settings = quantization_config(entry, decisions, options.cached)
    return Plan(checkpoint, seen, entry, options, decisions, settings, parallel, tuple(notes), identity)

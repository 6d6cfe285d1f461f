"""Plan a conversion from names, shapes and dtypes alone: what becomes of every tensor, and what config.json says.

All decisions are made here. `--dry-run` prints the plan, the conversion carries it out, a resumed run continues it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import PlanError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.layer_store import TensorPlace
from ..files.tensors import TensorInfo
from ..formats.kv_cache import says_fp8_cache, with_fp8_cache
from ..formats.names import UNCHANGED
from ..formats.quantization import find_quantization
from ..formats.schemes import Scheme
from ..models import GENERIC, MODELS
from ..patterns import collapse, compile_pattern, template
from ..registry.architecture import Architecture, Refusal
from ..registry.rules import ModuleRules
from ..version import SGLANG, __version__
from ..weights.find import decoded_view, unread_tensors, without_cache_scales
from ..weights.transform import WeightTransforms
from ..weights.weight import Weight
from . import layout
from .architecture import find_architecture
from .assign import (
    assign_schemes,
    problem_finder,
    refuse_size,
    requested_schemes,
    schemes_of_output,
    why_no_input_scale,
)
from .decisions import FEW_AXES, Decisions, Item, Lack, PassthroughTensor, PlanOptions, StoredLayout
from .engines import refuse_experts, refuse_head, refuse_nameless, unread_by_sglang
from .gptq import gptq_notes, gptq_weights
from .ignore_list import ignored_names, targets
from .input_scales import expect_calibration, largest_inputs, require_widths, unrouted_note
from .kv_cache import add_scales, cache_layers, serving_notes
from .layout import Layout, Shard
from .missing import missing_notes
from .printed import PlanLine, plan_lines
from .serving import Serving, serving
from .sort import sort_tensors
from .tensor_parallel import ParallelSize, parallel_sizes, text_config
from .transforms import apply_transforms


@dataclass(frozen=True)
class Plan:
    """What a run will do; a shard is laid out when its turn comes.

    Attributes:
        source: the opened source.
        seen: the source with quantized weights as the bfloat16 tensors they stand for.
        entry: the registry's entry it was made by.
        decisions: what becomes of each tensor.
        quantization_config: what the output's config.json says of the fates; empty without a scheme.
        parallel: what each tensor-parallel size meets.
        notes: for the user.
        identity: what tells the source from another with the same headers.
        transforms: what a calibration changes about weights before they are rounded, and other tensors.
        gptq: the texts by which GPTQ rounds; None if weights are rounded to nearest.
        recipe: the options that it was made with, as the output has them; None if nobody asks for them again.
        unlisted: the entry that it was made by, as the output has it; None where that is the registry's.
        lacks: what is still to be found by running texts through the model before it can be carried out.
    """

    source: Checkpoint
    seen: Checkpoint
    entry: ModuleRules
    decisions: Decisions
    quantization_config: dict[str, Any]
    parallel: tuple[ParallelSize, ...]
    notes: tuple[str, ...]
    identity: str
    transforms: WeightTransforms | None = None
    gptq: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] | None = None
    unlisted: Mapping[str, Any] | None = None
    lacks: frozenset[Lack] = frozenset()

    @property
    def model(self) -> Architecture:
        """What the registry holds of the architecture."""
        return self.entry.model

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of all layers that have no other; None if nothing is to be quantized."""
        return self.decisions.scheme

    @property
    def config(self) -> dict[str, Any]:
        """The output's config.json."""
        ours = {"quantization_config": self.quantization_config} if self.quantization_config else {}
        written = self.model.written(self.scheme.name if self.scheme else None, self.seen.config)
        return {**self.seen.config, **written, **ours}

    @property
    def files(self) -> dict[str, int]:
        """Sizes of the other files that are copied, by name."""
        return self.seen.files

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the source is not copied: "pytorch_model.bin", say."""
        return self.seen.left_out

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        """The printed plan: a line for all tensors that are alike in name, shape and fate."""
        return plan_lines(self.decisions)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output's weight files, which have the names of the source's."""
        return layout.shards(self.decisions)

    @property
    def source_bytes(self) -> int:
        """Size of the source's tensors."""
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def output_bytes(self) -> int:
        """Size of the output's tensors."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def source_weight_bytes_quantized(self) -> int:
        """Bytes in the source of all that is quantized in the output."""
        return sum(line.bytes_before for line in self.lines if line.quantized)

    @property
    def quantized_tensors(self) -> int:
        """How many layers are quantized."""
        return sum(self.schemes.values())

    @property
    def decoded_tensors(self) -> int:
        """How many weights are quantized in the source, and not in the output."""
        return sum(len(line.names) for line in self.lines if line.decoded)

    @property
    def decodes(self) -> bool:
        """Whether any weight is quantized in the source."""
        return any(kept.weight for kept in self.decisions.kept) or any(layer.format for layer in self.layers.values())

    @cached_property
    def schemes(self) -> dict[Scheme, int]:
        """How many layers each scheme has, the plan's own first."""
        counts = dict.fromkeys(self.decisions.schemes, 0)
        for line in self.lines:
            if line.scheme is not None:
                counts[line.scheme] += len(line.names)
        return counts

    @property
    def scheme_names(self) -> dict[str, int]:
        """How many layers each scheme has, by what the user types, the plan's own first."""
        counts = Counter[str]()
        for scheme, count in self.schemes.items():
            counts[scheme.name] += count
        return dict(counts)

    @property
    def title(self) -> str:
        """What shares a scale: "one scale per tensor, 16 of 28 layers one scale per output row"."""
        if self.scheme is None:
            return "weights as they are" if self.quantization_config else "bfloat16 weights"
        most, *others = self.schemes
        total = self.quantized_tensors
        found = [most.title]
        for other in others:
            number = f"{other.format.number.name}, " if other.format.number.name != most.format.number.name else ""
            found.append(f"{self.schemes[other]} of {total} layers {number}{other.title}")
        return ", ".join(found)

    @property
    def description(self) -> str:
        """What the weights are: "float8_e4m3fn, one scale per tensor"."""
        return self.title if self.scheme is None else f"{self.scheme.format.number.name}, {self.title}"

    @property
    def suffix(self) -> str:
        """What the output's name ends in if the user gives none: "-FP8"."""
        own = self.scheme.suffix if self.scheme else "" if self.quantization_config else "-BF16"
        return f"{own}-KV8" if self.cached else own

    @property
    def cached(self) -> bool:
        """Whether engines cache keys and values in FP8, for which there are scales."""
        return bool(self.quantization_config) and says_fp8_cache(self.quantization_config)

    @property
    def cache_layers(self) -> int:
        """How many layers have scales of keys and values that the plan makes."""
        return sum(kept.made is not None for kept in self.decisions.kept) // 2

    @property
    def numbers(self) -> str:
        """What the weights are called: "FP8", "FP8 and INT8", or "BF16"; "unchanged" where all of them are."""
        titles = dict.fromkeys(scheme.format.number.title for scheme in self.schemes)
        return (" and ".join(titles) or "unchanged") if self.quantization_config else "BF16"

    @property
    def package(self) -> str | None:
        """What transformers needs to read the output; None for nothing else."""
        name = "compressed-tensors"
        return name if self.quantization_config.get("quant_method") == name else None

    @property
    def scheme_name(self) -> str:
        """What the user calls the scheme of most: "tensor", "none" where weights stay as they are, "bf16" without."""
        if self.scheme is None:
            return UNCHANGED if self.quantization_config else "bf16"
        return self.scheme.name

    @cached_property
    def unread_by_sglang(self) -> Refusal | None:
        """Why SGLang does not load the output, and what it loads instead; None if it does."""
        return unread_by_sglang(self.entry, self.decisions)

    @property
    def engines(self) -> tuple[str, ...]:
        """Who serves the output: ("vLLM", "SGLang")."""
        return ("vLLM", "SGLang") if self.unread_by_sglang is None else ("vLLM",)

    @property
    def expert_schemes(self) -> dict[str, Scheme]:
        """The schemes that quantized experts are stored in, by suffix."""
        return {scheme.suffix: scheme for layer, scheme in self.decisions.kinds if self.entry.experts(layer.module)}

    @property
    def ignored_layers(self) -> list[str]:
        """Modules left unquantized, in every name the engines look them up under."""
        return [] if self.scheme is None else list(self.quantization_config[self.scheme.ignored_keys[0]])

    @property
    def parallel_sizes(self) -> list[int]:
        """The tensor-parallel sizes that can serve the result: [1, 2, 4]."""
        return [entry.size for entry in self.parallel if entry.problem is None]

    @cached_property
    def serving(self) -> tuple[Serving, Serving] | None:
        """What it takes to serve the source, and the output; None for one to decode, of which no entry is asked."""
        if not self.quantization_config:
            return None
        groups = ((layer, layer.format.whole if layer.format else (1, 1)) for layer in self.layers.values())
        before = [one.size for one in parallel_sizes(self.seen, self.entry, groups, None) if one.problem is None]
        if self.scheme is None:
            before = self.parallel_sizes
        config = text_config(self.seen, self.model)
        return (
            serving(self.lines, self.entry, config, before, output=False),
            serving(self.lines, self.entry, config, self.parallel_sizes, output=True),
        )

    @property
    def layers(self) -> dict[str, Weight]:
        """The weights that could be quantized, by module; each knows where it lies in the source."""
        return self.decisions.layers

    @cached_property
    def gptq_rounded(self) -> list[tuple[Weight, Scheme]]:
        """The weights that GPTQ rounds, each with its scheme."""
        return [] if self.gptq is None else gptq_weights(self.decisions)

    def with_rounded(self, places: Mapping[str, TensorPlace]) -> Plan:
        """The same plan, of which these tensors are rounded already, and only copied."""
        return replace(self, decisions=replace(self.decisions, rounded=places), lacks=self.lacks - {"Hessians"})

    @property
    def weight_kinds(self) -> list[Weight]:
        """One weight of each dtype, shape and format, among all that are read by rows."""
        return layout.weight_kinds(self.decisions)

    def sources(self, shard: str) -> set[str]:
        """The source shards that an output shard is made from."""
        return layout.sources(shard, self.decisions, self.seen.where)

    def consumed(self, shard: str) -> int:
        """Bytes of the source that an output shard is made from, whichever shard they lie in."""
        return layout.source_bytes_of(self.decisions.items[shard], self.decisions)

    def outputs(self, shard: str) -> list[TensorInfo]:
        """The tensors of an output shard, in file order."""
        return layout.outputs(self.decisions.items[shard], self.decisions)

    def lay_out(self, shard: str) -> Layout:
        """The header, offsets and jobs of an output shard."""
        return layout.lay_out(shard, self.decisions, self.seen.where)

    @cached_property
    def digest(self) -> str:
        """Guards a resumed run: equal for the same source, options, version and registry's entry, and only then."""
        facts = [
            __version__,
            repr(self.model),
            [asdict(scheme) for scheme in self.decisions.schemes],
            # The model card says them.
            sorted({decision.why for decision in self.decisions.others.values()}),
            self.source.config,
            self.quantization_config,
            self.source.files,
            self.source.shards,
            self.source.headers,
            self.identity,
            *([dict(self.decisions.inputs)] if self.decisions.inputs else []),
            *([self.transforms.sha256] if self.transforms else []),
            *([["GPTQ", self.gptq]] if self.gptq else []),
            *([[repr(kept) for kept in self.decisions.kept if kept.made is not None]] if self.cached else []),
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
        identity: what tells this source from another with the same headers; it goes into the plan's digest.
        architecture: the registry's entry to go by, "auto" or "generic", or an entry, as find_model takes it.
        found: the fates that a written directory has its modules in, to be had again, in place of what options ask for.

    Raises:
        SourceError: the source is quantized, and its scales do not belong to its codes.
        PlanError: it is quantized in an unknown way, an unknown architecture, tensors no rule covers, or what engines
            cannot load.
        UsageError: a pattern that matches nothing or is malformed, or a size that is none.
    """
    options = options or PlanOptions()
    model = find_architecture(checkpoint, architecture)
    others = [other for _, other in options.scheme_for] + list(found.schemes.values() if found else ())
    for asked in dict.fromkeys([scheme, *others]):
        refusal = model.refusal(asked.name, asked.method)
        if refusal is not None:
            raise PlanError(f"{model.name} cannot be served with {asked.title}: {refusal.why}", refusal.hint)
    if options.gptq and model.repeats:
        raise PlanError(
            f"{model.name} runs its layers several times, and GPTQ rounds a layer once texts are through it",
            "leave --gptq out",
        )
    seen, weights = decoded_view(checkpoint)
    for pattern in (*options.ignore, *(pattern for pattern, _ in options.scheme_for)):
        compile_pattern(pattern)
    if options.tp is not None and options.tp < 1:
        raise UsageError(f"--tp {options.tp} is no number of ranks", "give --tp 1 or more")
    if options.head:
        refuse_head(seen, model, scheme)
        model = model.with_head()
    scaled = found or any(weight.input_scale_for(scheme.format) for weight in weights.values())
    options = expect_calibration(options, seen.tensors, required=scheme.format.static and not scaled)
    entry = ModuleRules(model)
    decisions, notes = _decide(seen, weights, entry, scheme, options, found)
    unread = unread_by_sglang(entry, decisions)
    if unread is not None:
        notes.append(f"{SGLANG} does not load this output: {unread.why}; {unread.hint}")
    if options.cached:
        notes += serving_notes(model, decisions)
    elif weights and (find_quantization(checkpoint.config) or {}).get("kv_cache_scheme"):
        notes.append(
            "kv_cache_scheme is left out; its scales stay, and engines use them with --kv-cache-dtype fp8, "
            "or by themselves with --kv-cache fp8 here"
        )
    notes += [*_left_behind(checkpoint, weights), *_made_anew(decisions)]
    notes += dict.fromkeys(note for scheme in decisions.schemes for note in scheme.notes)
    if options.calibration is not None and decisions.inputs:
        notes.append(
            f"scales of activations are those of a calibration with {options.calibration.described}, twice as large: "
            "headroom costs nothing, and what lies beyond is cut off"
        )
        notes += unrouted_note(options.calibration, entry, decisions.inputs, decisions.layers)
    notes += options.transforms.notes if options.transforms else ()
    notes += gptq_notes(decisions, entry, options.gptq) if options.gptq else ()
    notes[:0] = [model.decided] if model.decided else []
    # Where a layer stays unquantized, any part of it can be split off.
    groups = (
        (layer, decision.scheme.format.whole if decision.scheme else (1, 1)) for layer, decision in decisions.each()
    )
    parallel = parallel_sizes(seen, entry, groups, options.tp)
    settings = scheme.config(ignored_names(entry, decisions), targets(entry, decisions))
    if options.cached:
        settings = with_fp8_cache(settings)
    return Plan(
        checkpoint,
        seen,
        entry,
        decisions,
        settings,
        parallel,
        tuple(notes),
        identity,
        options.transforms,
        options.gptq,
        lacks=options.lacks,
    )


def _decide(
    checkpoint: Checkpoint,
    weights: dict[str, Weight],
    entry: ModuleRules,
    scheme: Scheme,
    options: PlanOptions,
    found: StoredLayout | None,
) -> tuple[Decisions, list[str]]:
    """What becomes of each tensor, and notes for the user.

    A source that is quantized in the scheme already keeps its choice of layers, whatever the registry says, but for
    embeddings, output heads and routers.
    """
    settled = bool(weights) and all(weight.is_held_by(scheme.format) for weight in weights.values())
    items, layers = sort_tensors(checkpoint, weights, entry, found.stays if found else options.stays, settled)
    if options.calibration is not None:
        require_widths(options.calibration, layers.values())
    if options.transforms is not None:
        apply_transforms(items, layers, options.transforms)
    sets, config = entry.fused_groups(layers), text_config(checkpoint, entry.model)
    scales: list[str] = []
    if options.cached:
        cached = cache_layers((info.module for info in checkpoint.tensors.values()), entry, config)
        scales = add_scales(items, checkpoint, cached, options.calibration)
    if options.tp is not None:
        refuse_size(entry, layers, config, options.tp)
    decisions = Decisions(scheme, items, layers, sets, {})
    if found is None:
        asked = requested_schemes(
            options, layers, [kept.tensor.module for kept in decisions.kept] if options.ignore else []
        )
    else:
        asked = schemes_of_output(found, layers)
    left = {module for module, layer in layers.items() if settled and layer.format is None}
    inputs: dict[str, float] = {}
    scaled = any(each.format.input_scale for each in (scheme, *(other for _, other in options.scheme_for)))
    if options.calibration is not None and scaled:
        inputs = largest_inputs(options.calibration, entry, layers, sets)

    def no_scale(layer: Weight) -> str | None:
        # What was written has its own.
        if found is not None or layer.module in inputs:
            return None
        return (
            "the calibration has seen nothing of it"
            if options.calibration
            else why_no_input_scale(layer, scheme.format)
        )

    find_problem = problem_finder(entry, layers, sets, config, options.tp, no_scale)
    others, notes = assign_schemes(entry, scheme, layers, find_problem, sets, asked, left, options.tp)
    decisions = replace(decisions, others=others, inputs=inputs)
    notes += [*missing_notes(entry.model, layers, decisions.kept, sets, config), *scales]
    refuse_experts(entry, decisions)
    refuse_nameless(entry, decisions)
    return decisions, notes


def make_plain_plan(checkpoint: Checkpoint, identity: str = "") -> Plan:
    """Decide to decode whatever is quantized and to leave all else as it is; the registry has no say in that.

    Args:
        checkpoint: the opened source.
        identity: as for make_plan.

    Raises:
        SourceError: its scales do not belong to its codes.
        PlanError: nothing is quantized, or in an unknown way.
    """
    seen, weights = decoded_view(checkpoint)
    # With scales of keys and values alone it is as good as quantized: engines cache them in FP8.
    if not weights and seen.config == checkpoint.config:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "there is nothing to dequantize")
    seen = without_cache_scales(seen)
    items: dict[str, list[Item]] = {shard: [] for shard in seen.shards}
    for info in seen.tensors.values():
        stored = weights.get(info.name)
        if len(info.shape) < 2:
            kept = PassthroughTensor(info, info.name, FEW_AXES)
        else:
            kept = PassthroughTensor(info, template(info.module), "" if stored else "not quantized", stored)
        items[seen.where[info.name].shard].append(kept)
    entry = ModuleRules(MODELS.get(checkpoint.architecture, replace(GENERIC, name=checkpoint.architecture)))
    notes = tuple(_left_behind(checkpoint, weights))
    return Plan(checkpoint, seen, entry, Decisions(None, items, {}, {}, {}), {}, (), notes, identity)


def _left_behind(checkpoint: Checkpoint, weights: dict[str, Weight]) -> list[str]:
    """A note of the tensors that no output gets."""
    found = unread_tensors(checkpoint.tensors, weights.values())
    return [f"left out, as engines refuse them: {', '.join(collapse(found))}"] if found else []


def _made_anew(decisions: Decisions) -> list[str]:
    """Notes of layers whose codes would be the scheme's own but for what it has no place for."""
    shifted = act_order = 0
    for layer, scheme in decisions.quantized:
        form = layer.format
        if form is None or (form.number, form.group) != (scheme.format.number, scheme.format.group):
            continue
        if form.columns is not None and form.columns.act_order:
            act_order += 1
        elif form.zero_point is not None and not scheme.asymmetric and scheme.group_size is not None:
            shifted += 1
    notes = []
    if shifted:
        notes.append(
            f"{shifted} layers have zero points, which --asymmetric keeps with their codes: they are quantized again"
        )
    if act_order:
        notes.append(f"{act_order} layers have their groups in an order of their own: they are quantized again")
    return notes

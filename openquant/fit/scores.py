"""What each choice costs: the KL divergence of the model with a single unit quantized.

One pass runs the source over a few texts, layer by layer. In each layer, each unit is quantized in every scheme, and
the change of the hidden state after this layer is measured. In one scheme, the unit's variant of the hidden state then
goes on through all later layers to the logits, whose KL divergence is measured. The KL divergence of its other schemes
follows from their changes. Units of the output head have no later layers, so all of their schemes are measured.

`measure_mixtures` runs whole mixtures in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.corpus import Corpus
from ..evaluation.kl import DocumentRecord, ModelNames, compare_logits
from ..formats.kernels import Loops
from ..streaming import transformers_internals
from ..streaming.interleaved import ForwardPass, hidden_state, run_interleaved
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.progress import Advanced, PassProgress, Remaining, layer_costs
from ..streaming.torch_threads import limited_threads, threads_for
from ..weights.find import decoded_view
from ..weights.reading import Reader
from .rounding import replaced_tensors
from .units import UNQUANTIZED, Unit, UnitChoice

# A unit's variant that goes on through the later layers is quantized to about so many bits a weight, if it can be.
CARRIED_BITS = 4.5
# Of each unit, or of units that are measured together: the choice by the unit's number.
Mixture = Mapping[int, str]


@dataclass(frozen=True)
class Scores:
    """KL divergence of each unit in each of its schemes, the others unquantized.

    Attributes:
        kl: for each unit, by name of the choice, in nats; 0 for UNQUANTIZED.
    """

    kl: tuple[Mapping[str, float], ...]


@dataclass
class _Variant:
    """A pass in which some units are quantized.

    Attributes:
        choices: the choice of each quantized unit, by number.
        first: number of the first layer that has one of them; layers before it give what they give the source.
    """

    choices: Mixture
    first: int


@dataclass
class _Changes:
    """Squared changes of hidden states relative to the source's, added over tokens, by unit and choice."""

    sums: dict[tuple[int, str], float] = field(default_factory=dict)

    def add(self, number: int, name: str, source: Tensor, changed: Tensor) -> None:
        difference = (changed.double() - source.double()).square().sum(-1)
        relative = difference / source.double().square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        self.sums[number, name] = self.sums.get((number, name), 0.0) + float(relative.sum())


def places_of(model: StreamedModel, units: Sequence[Unit]) -> list[str]:
    """Return the unit of the streamed model, a layer or the output head, that each unit is in."""
    targets = {tensor: parameter for parameter, tensors in model.made_of.items() for tensor in tensors}
    return [model.unit_of(targets[next(iter(unit.weights.values())).source.name]) for unit in units]


class _Variants:
    """Runs a source and its variants over documents, on one streamed model.

    Args:
        model: the source's model.
        units: the units.
        fused: groups of layers that engines fuse, by module.
        loops: kernels that choose scales.
    """

    def __init__(
        self,
        model: StreamedModel,
        units: Sequence[Unit],
        fused: Mapping[str, tuple[str, ...]],
        loops: Loops,
    ) -> None:
        self.model, self.units, self.fused = model, units, fused
        decoded, _ = decoded_view(model.checkpoint)
        self.make_reader = lambda: Reader(decoded.where, lambda shard: model.shard_provider.path(shard), loops=loops)
        self.places = places_of(model, units)
        self.order = {name: number for number, name in enumerate(model.units)}
        # Choices that are needed of each unit, and the rounded parameters of the loaded one.
        self.needed: dict[int, set[str]] = {}
        self.parameters: dict[tuple[int, str], Mapping[str, Tensor]] = {}
        self.loaded = ""

    def require(self, mixtures: Sequence[Mixture]) -> None:
        """Note which choices are needed."""
        for mixture in mixtures:
            for number, name in mixture.items():
                if name != UNQUANTIZED:
                    self.needed.setdefault(number, set()).add(name)

    def at(self, place: str) -> Iterator[int]:
        """Numbers of the units in a unit of the streamed model."""
        return (number for number in self.needed if self.places[number] == place)

    def enter(self, place: str) -> None:
        """Quantize the units of a loaded unit of the model, once."""
        if place == self.loaded:
            return
        self.loaded = place
        self.parameters.clear()
        for number in self.at(place):
            unit = self.units[number]
            for name in sorted(self.needed[number]):
                choice: UnitChoice = unit.choices[name]
                replaced = replaced_tensors(unit.weights, choice.schemes, self.fused, self.make_reader)
                self.parameters[number, name] = self.model.load_with(place, replaced)

    @contextmanager
    def quantized(self, place: str, choices: Mixture) -> Iterator[None]:
        """Have the units of a loaded unit of the model quantized inside this context."""
        parameters: dict[str, Tensor] = {}
        for number in self.at(place):
            name = choices.get(number, UNQUANTIZED)
            if name != UNQUANTIZED:
                parameters |= self.parameters[number, name]
        with self.model.with_parameters(parameters):
            yield


def measure_mixtures(
    model: StreamedModel,
    units: Sequence[Unit],
    fused: Mapping[str, tuple[str, ...]],
    corpus: Corpus,
    mixtures: Sequence[Mixture],
    loops: Loops,
    *,
    changes: Mapping[int, Sequence[str]] | None = None,
    scratch: OffloadFile | None = None,
    progress: Advanced | None = None,
    remaining: Remaining | None = None,
) -> tuple[list[list[DocumentRecord]], dict[tuple[int, str], float]]:
    """Run the source and mixtures of it over texts, in one pass.

    Args:
        model: the source's model.
        units: its units.
        fused: for each module that engines fuse with others, all members of its group.
        corpus: the texts, as tokens.
        mixtures: the choice of each unit, by its number; units that are missing stay unquantized.
        loops: the module that chooses scales: formats.kernels (numpy) or formats.compiled (numba).
        changes: units whose layer also runs with each of these choices, for the change of the hidden state after it.
        scratch: file for hidden states that exceed its budget of memory; None to keep all in memory.
        progress: called with the number of tokens that are done and of all tokens.
        remaining: called with the estimated seconds left.

    Returns:
        For each mixture the figures of each document; and the mean squared change of the hidden state relative to the
        source's, by number of the unit and choice.

    Raises:
        SourceError: a weight cannot be read, or a logit is NaN or infinite.
        PlanError: a weight is too large for its scheme.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    variants = _Variants(model, units, fused, loops)
    variants.require(mixtures)
    changes = changes or {}
    variants.require([{number: name} for number, names in changes.items() for name in names])
    run = _Run(variants, corpus, mixtures, changes)
    with limited_threads(threads_for(model, corpus.length)), run.wrapped_layers():
        head = [name for name in model.units if name not in model.layers and name in variants.places]
        costs = layer_costs(model, [*model.layers, *head])
        passes = 1 + len(mixtures)
        done = PassProgress(costs, passes * len(corpus.documents) * corpus.length, progress, remaining)
        run_interleaved(
            [run.passes_of(number) for number in range(len(corpus.documents))],
            finished=run.finished,
            scratch=scratch,
            progress=done.layer_done,
        )
    tokens = len(corpus.documents) * corpus.length
    return run.records, {key: total / tokens for key, total in run.changed.sums.items()}


class _Run:
    """One call of `measure_mixtures`."""

    def __init__(
        self,
        variants: _Variants,
        corpus: Corpus,
        mixtures: Sequence[Mixture],
        changes: Mapping[int, Sequence[str]],
    ) -> None:
        self.variants, self.corpus, self.changes = variants, corpus, changes
        self.model = variants.model
        self.mixtures = list(mixtures)
        self.records: list[list[DocumentRecord]] = [[] for _ in mixtures]
        self.changed = _Changes()
        self.source_logits: Tensor | None = None
        # The pass that is being computed: None for the source.
        self.current: _Variant | None = None
        # What the source's pass of the current document gave for the loaded unit, and those of variants made with it.
        self.source_output: Any = None
        self.outputs: dict[tuple[int, str], Any] = {}
        # Before its own layer a variant gives what the source gives, and is not computed. Not so where layers read
        # keys and values that earlier layers of the same pass have left.
        config = self.model.model.config.get_text_config()
        self.repeats_source = not getattr(config, "num_kv_shared_layers", None)

    def passes_of(self, document: int) -> list[ForwardPass[Tensor]]:
        """The passes of a document: the source, then each mixture."""
        ids = torch.tensor(self.corpus.documents[document].ids, device=self.model.device)
        passes = [ForwardPass(self.model, partial(self._logits, ids), partial(self._around, None))]
        for mixture in self.mixtures:
            order = self.variants.order
            places = [self.variants.places[number] for number, name in mixture.items() if name != UNQUANTIZED]
            variant = _Variant(mixture, min((order[place] for place in places), default=len(order)))
            passes.append(ForwardPass(self.model, partial(self._logits, ids), partial(self._around, variant)))
        return passes

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model.model(input_ids=ids[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _around(self, variant: _Variant | None) -> Iterator[None]:
        self.current = variant
        with products_in_float32(self.model.device):
            yield

    @contextmanager
    def wrapped_layers(self) -> Iterator[None]:
        """Have layers and output head computed as the pass wants it, inside this context."""
        wrapped = [name for name in self.model.units if name in self.model.layers or name in self.variants.places]
        for name in wrapped:
            module = self.model.units[name]
            module.forward = partial(self._compute, name, module.forward)
        try:
            yield
        finally:
            for name in wrapped:
                del self.model.units[name].__dict__["forward"]

    def _compute(self, place: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        variant, number = self.current, self.variants.order[place]
        self.variants.enter(place)
        if variant is None:
            self.source_output = forward(*args, **kwargs)
            self._measure_changes(place, forward, args, kwargs)
            return self.source_output
        if number < variant.first and self.repeats_source:
            return self.source_output
        if number == variant.first and len(variant.choices) == 1 and self.repeats_source:
            made = self.outputs.pop(next(iter(variant.choices.items())), None)
            if made is not None:
                return made
        with self.variants.quantized(place, variant.choices):
            return forward(*args, **kwargs)

    def _measure_changes(
        self, place: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.outputs.clear()
        carried = {next(iter(mixture.items())) for mixture in self.mixtures if len(mixture) == 1}
        for number in self.variants.at(place):
            for name in self.changes.get(number, ()):
                with self.variants.quantized(place, {number: name}):
                    output = forward(*args, **kwargs)
                self.changed.add(number, name, hidden_state(self.source_output), hidden_state(output))
                if (number, name) in carried:
                    self.outputs[number, name] = output

    def finished(self, document: int, number: int, logits: Tensor) -> None:
        """Compare a variant's logits with the source's, which come first."""
        if number == 0:
            self.source_logits = logits
            return
        assert self.source_logits is not None
        piece = self.corpus.documents[document]
        ids = torch.tensor(piece.ids)
        names = ModelNames("the source", "a mixture")
        self.records[number - 1].append(
            compare_logits(self.source_logits, logits, ids, piece.domain, piece.name, names)
        )


def find_variants(model: StreamedModel, units: Sequence[Unit]) -> tuple[list[Mixture], dict[int, list[str]]]:
    """Decide which choices are measured by their own pass, and which by the change after their layer.

    Args:
        model: the source's model.
        units: its units.

    Returns:
        Mixtures of one unit each, for `measure_mixtures`: of units in layers the choice whose size is closest to
        CARRIED_BITS, of the output head all. And by number of the unit the choices whose change is measured.
    """
    head = transformers_internals.output_head(model.model)
    mixtures: list[Mixture] = []
    changes: dict[int, list[str]] = {}
    for number, (unit, place) in enumerate(zip(units, places_of(model, units), strict=True)):
        names = [name for name in unit.choices if name != UNQUANTIZED]
        if model.units.get(place) is head:
            mixtures += [{number: name} for name in names]
            continue
        carried = min(names, key=lambda name: abs(8 * unit.choices[name].nbytes / unit.elements - CARRIED_BITS))
        mixtures.append({number: carried})
        changes[number] = names
    return mixtures, changes


def scores_of(
    units: Sequence[Unit],
    mixtures: Sequence[Mixture],
    changes: Mapping[int, Sequence[str]],
    records: Sequence[Sequence[DocumentRecord]],
    changed: Mapping[tuple[int, str], float],
) -> Scores:
    """Compute the scores from what `measure_mixtures` has measured of `find_variants`.

    Args:
        units: the units.
        mixtures: mixtures of one unit each.
        changes: by number of the unit, the choices whose change was measured.
        records: figures of each document, for each mixture.
        changed: mean squared changes of hidden states, by number of the unit and choice.

    Returns:
        The KL divergence of each choice: measured, or that of the measured choice times the ratio of their changes.
    """
    kl: list[dict[str, float]] = [{UNQUANTIZED: 0.0} for _ in units]
    for mixture, documents in zip(mixtures, records, strict=True):
        [(number, name)] = mixture.items()
        measured = sum(float(record.kl.sum()) for record in documents) / sum(len(record.kl) for record in documents)
        own = changed.get((number, name), 0.0)
        for other in changes.get(number, (name,)):
            kl[number][other] = measured if other == name else measured * changed[number, other] / own if own else 0.0
    return Scores(tuple(kl))

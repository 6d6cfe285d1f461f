"""What each choice costs: the KL divergence of the model with a single unit quantized.

One pass runs the source over a few texts, layer by layer. In each layer, each unit is quantized in every scheme, and
the change of the hidden state after this layer is measured. In one scheme, the unit's variant of the hidden state then
goes on through all later layers to the logits, whose KL divergence is measured. The KL divergence of its other schemes
follows from their changes. Units of the output head have no later layers, so all of their schemes are measured.

`measure_mixtures` runs whole mixtures in the same way. The model runs with the values that codes stand for:

    make = replaced_tensors(unit.weights, choice.schemes, fused, make_reader)
    make["model.layers.0.mlp.up_proj.weight"]()     # bfloat16 [out, in]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..calibration.gptq_pass import shared_absmax
from ..data.corpus import Corpus
from ..errors import PlanError
from ..evaluation.as_served import ActivationRounding, QuantizedInputs, inputs_of_experts
from ..evaluation.kl import DocumentRecord, compare_logits
from ..formats.format import read_activation_quantization
from ..formats.kernels import Loops, choose_scales, choose_shared_scale
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..streaming.interleaved import ForwardPass, TextRun, hidden_state, holds_experts, run_interleaved
from ..streaming.meta_model import write_bfloat16
from ..streaming.model import PassProgress, StreamedModel, limited_threads, products_in_float32
from ..weights.find import decoded_view
from ..weights.reading import Reader, require_in_range
from ..weights.weight import Weight
from .menu import UNQUANTIZED, Mixture, Scores, Unit, UnitChoice

# A unit's variant that goes on through the later layers is quantized to about so many bits a weight, if it can be.
CARRIED_BITS = 4.5


# By mixture the figures of each document; and by unit and choice the mean relative squared change of hidden states.
Measured = tuple[Sequence[Sequence[DocumentRecord]], Mapping[tuple[int, str], float]]


@dataclass(frozen=True)
class _Pass:
    """A pass of one document, in which some units are quantized.

    Attributes:
        document: number of the document.
        mixture: number of the mixture; None for the source.
        choices: the choice of each quantized unit, by number.
        first: number of the first layer that has one of them; layers before it give what they give the source.
    """

    document: int
    mixture: int | None
    choices: Mixture
    first: int


def places_of(model: StreamedModel, units: Sequence[Unit]) -> list[str]:
    """Return the unit of the streamed model, a layer or the output head, that each unit is in."""
    targets = _targets(model)
    return [model.unit_of(targets[next(iter(unit.weights.values())).source.name]) for unit in units]


def _targets(model: StreamedModel) -> dict[str, str]:
    """The parameter that each tensor of the checkpoint goes into."""
    return {tensor: parameter for parameter, tensors in model.made_of.items() for tensor in tensors}


@dataclass
class _Quantizer:
    """Runs parts of a streamed model with some units quantized.

    Attributes:
        model: the source's model.
        units: the units.
        fused: groups of layers that engines fuse, by module.
        loops: kernels that choose scales.
        keeps: whether the quantized parameters of a layer are kept until the next layer. Else they are made whenever
            the choices change, and a layer is in memory at most twice.
    """

    model: StreamedModel
    units: Sequence[Unit]
    fused: Mapping[str, tuple[str, ...]]
    loops: Loops
    keeps: bool

    def __post_init__(self) -> None:
        decoded, _ = decoded_view(self.model.checkpoint)
        self.make_reader = lambda: Reader(decoded.where, self.model.shard_provider.path, loops=self.loops)
        self.places = places_of(self.model, self.units)
        self.targets = _targets(self.model)
        self.parameters: dict[tuple[int, str], Mapping[str, Tensor]] = {}
        # What rounds the inputs of a unit in a choice; None if these stay as they are.
        self.rounding: dict[tuple[int, str], ActivationRounding | None] = {}

    def at(self, place: str) -> list[int]:
        """Numbers of the units in a unit of the streamed model."""
        return [number for number, its_place in enumerate(self.places) if its_place == place]

    @contextmanager
    def quantize(self, place: str, choices: Mixture) -> Iterator[None]:
        """Have the units of a loaded unit of the model quantized inside this context."""
        wanted = [(number, choices.get(number, UNQUANTIZED)) for number in self.at(place)]
        wanted = [(number, name) for number, name in wanted if name != UNQUANTIZED]
        if not self.keeps:
            self.parameters = {key: found for key, found in self.parameters.items() if key in wanted}
        parameters: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for number, name in wanted:
                parameters |= self._parameters(place, number, name)
                rounding = self._rounding(number, name)
                if rounding is not None:
                    stack.enter_context(rounding.on())
            stack.enter_context(self.model.with_parameters(parameters))
            yield

    def _parameters(self, place: str, number: int, name: str) -> Mapping[str, Tensor]:
        if (number, name) not in self.parameters:
            unit = self.units[number]
            replaced = replaced_tensors(unit.weights, unit.choices[name].schemes, self.fused, self.make_reader)
            self.parameters[number, name] = self.model.load_with(place, replaced)
        return self.parameters[number, name]

    def _rounding(self, number: int, name: str) -> ActivationRounding | None:
        if (number, name) not in self.rounding:
            self.rounding[number, name] = self._make_rounding(self.units[number], self.units[number].choices[name])
        return self.rounding[number, name]

    def _make_rounding(self, unit: Unit, choice: UnitChoice) -> ActivationRounding | None:
        layers: dict[str, QuantizedInputs] = {}
        stacks: dict[str, dict[str, QuantizedInputs]] = {}

        for module, scheme in choice.schemes.items():
            inputs = None if scheme is None else _inputs_of(scheme)
            if inputs is None:
                continue

            owner, _, last = self.targets[unit.weights[module].source.name].rpartition(".")
            if last == "weight":
                layers[owner] = inputs
            else:
                stacks.setdefault(owner, {})[last] = inputs

        for owner in stacks:
            module = self.model.model.get_submodule(owner)
            if not holds_experts(module):
                raise PlanError(
                    f"activations inside {type(module).__name__} cannot be rounded, which {choice.scheme_name} needs",
                    "name only schemes of weights: --candidates int4,nvfp4,int8-weights",
                )

        if not layers and not stacks:
            return None
        return ActivationRounding(self.model.model, layers, inputs_of_experts(stacks))


def _inputs_of(scheme: Scheme) -> QuantizedInputs | None:
    """How engines round the inputs of layers in a scheme, as compress writes it without a calibration."""
    inputs = read_activation_quantization(scheme.group.get("input_activations"))
    if inputs is None or not inputs.has_global_scale:
        return None if inputs is None else QuantizedInputs(inputs)
    local, stored = scheme.format.input_global_scale, scheme.default_input_global_scale
    assert local is not None and stored is not None
    scale = stored if local.divides else 1 / stored
    return QuantizedInputs(inputs, lambda: scale)


def measure_mixtures(
    texts: TextRun,
    units: Sequence[Unit],
    fused: Mapping[str, tuple[str, ...]],
    mixtures: Sequence[Mixture],
    loops: Loops,
    changes: Mapping[int, Sequence[str]] | None = None,
) -> Measured:
    """Run the source and mixtures of it over texts, in one pass.

    Args:
        texts: the texts and the source's model. With `changes`, all hidden states are kept in memory or its file.
        units: the model's units.
        fused: for each module that engines fuse with others, all members of its group.
        mixtures: the choice of each unit, by its number; units that are missing stay unquantized.
        loops: the module that chooses scales: formats.kernels (numpy) or formats.compiled (numba).
        changes: units whose layer also runs with each of these choices, for the change of the hidden state after it.
            All documents then go through a layer together.

    Returns:
        What was measured.

    Raises:
        SourceError: a weight cannot be read, or a logit is NaN or infinite.
        OutputError: hidden states or the checkpoint cannot be written.
        PlanError: a weight is too large for its scheme, or activations of a layer cannot be rounded.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    changes = changes or {}
    model = texts.model
    run = _Run(_Quantizer(model, units, fused, loops, keeps=not changes), texts.corpus, mixtures, changes)

    if texts.checkpoint is not None:
        # It saves what is measured in layers, and has what an earlier run saved.
        texts.checkpoint.extra = lambda: run.changed
        run.changed.update(texts.checkpoint.saved or {})

    with limited_threads(model, texts.corpus.length), run.wrapped_layers():
        head = [name for name in model.units if name not in model.layers and name in run.quantizer.places]
        done = PassProgress([*model.layers, *head], (1 + len(mixtures)) * run.tokens, texts.progress)
        run_interleaved(
            run.batches(),
            finished=run.compare,
            scratch=texts.scratch,
            progress=done.layer_done,
            checkpoint=texts.checkpoint,
        )

    return run.records, {key: total / run.tokens for key, total in run.changed.items()}


@dataclass
class _Run:
    """One call of `measure_mixtures`."""

    quantizer: _Quantizer
    corpus: Corpus
    mixtures: Sequence[Mixture]
    changes: Mapping[int, Sequence[str]]

    def __post_init__(self) -> None:
        self.model = self.quantizer.model
        self.order = {name: number for number, name in enumerate(self.model.units)}
        self.tokens = len(self.corpus.documents) * self.corpus.length
        # Whether a variant gives before its own layer what the source gives, and need not be computed there.
        config = self.model.model.config.get_text_config()
        self.repeats_source = not getattr(config, "num_kv_shared_layers", None)
        self.carried = {next(iter(mixture.items())) for mixture in self.mixtures if len(mixture) == 1}

        self.records: list[list[DocumentRecord]] = [[] for _ in self.mixtures]
        # Relative squared changes of hidden states, added over tokens, by unit and choice.
        self.changed: dict[tuple[int, str], float] = {}

        self.passes: list[list[_Pass]] = []
        self.source_logits: dict[int, Tensor] = {}
        # The pass that is being computed, and the unit of the model that is loaded.
        self.current: _Pass | None = None
        self.place = ""
        # Of the loaded unit, by document: arguments and outputs of the source's passes; and by unit, choice and
        # document outputs of the variants that are made there.
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.source_outputs: dict[int, Any] = {}
        self.outputs: dict[tuple[int, str, int], Any] = {}

    def batches(self) -> list[list[ForwardPass[Tensor]]]:
        """The passes of each document: the source, then each mixture; or of all documents, if changes are measured."""
        documents = range(len(self.corpus.documents))
        for together in [documents] if self.changes else [[document] for document in documents]:
            sources = [_Pass(document, None, {}, len(self.order)) for document in together]
            mixed = [
                _Pass(document, number, mixture, self._first(mixture))
                for number, mixture in enumerate(self.mixtures)
                for document in together
            ]
            self.passes.append([*sources, *mixed])
        return [[self._forward(one) for one in batch] for batch in self.passes]

    def _first(self, mixture: Mixture) -> int:
        places = [self.quantizer.places[number] for number, name in mixture.items() if name != UNQUANTIZED]
        return min((self.order[place] for place in places), default=len(self.order))

    def _forward(self, one: _Pass) -> ForwardPass[Tensor]:
        ids = torch.tensor(self.corpus.documents[one.document].ids, device=self.model.device)
        return ForwardPass(self.model, partial(self.model.logits, ids), partial(self._quantize_around, one))

    @contextmanager
    def _quantize_around(self, one: _Pass) -> Iterator[None]:
        self.current = one
        with products_in_float32(self.model.device):
            yield

    @contextmanager
    def wrapped_layers(self) -> Iterator[None]:
        """Have layers and output head computed as the pass wants it, inside this context."""
        wrapped = [name for name in self.model.units if name in self.model.layers or name in self.quantizer.places]
        for name in wrapped:
            module = self.model.units[name]
            module.forward = partial(self._compute, name, module.forward)
        try:
            yield
        finally:
            for name in wrapped:
                del self.model.units[name].__dict__["forward"]

    def _compute(self, place: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        one, number = self.current, self.order[place]
        assert one is not None

        if place != self.place:
            self.place = place
            for kept in (self.quantizer.parameters, self.calls, self.source_outputs, self.outputs):
                kept.clear()

        if one.mixture is None:
            output = self.source_outputs[one.document] = forward(*args, **kwargs)
            if self.changes:
                self.calls[one.document] = args, kwargs
                if len(self.calls) == len(self.corpus.documents):
                    self._measure_changes(forward)
            return output

        if self.repeats_source and number < one.first:
            return self.source_outputs[one.document]

        if self.repeats_source and number == one.first and len(one.choices) == 1:
            [choice] = one.choices.items()
            made = self.outputs.pop((*choice, one.document), None)
            if made is not None:
                return made

        with self.quantizer.quantize(place, one.choices):
            return forward(*args, **kwargs)

    def _measure_changes(self, forward: Callable[..., Any]) -> None:
        for number in self.quantizer.at(self.place):
            for name in self.changes.get(number, ()):
                with self.quantizer.quantize(self.place, {number: name}):
                    for document, (args, kwargs) in self.calls.items():
                        output = forward(*args, **kwargs)
                        change = _relative_change(self.source_outputs[document], output)
                        self.changed[number, name] = self.changed.get((number, name), 0.0) + change
                        if (number, name) in self.carried:
                            self.outputs[number, name, document] = output
        if not self.repeats_source:
            # Later layers of the source's passes read its own keys and values.
            for args, kwargs in self.calls.values():
                forward(*args, **kwargs)
        self.calls.clear()

    def compare(self, batch: int, number: int, logits: Tensor) -> None:
        """Compare a variant's logits with the source's, which come first."""
        one = self.passes[batch][number]
        if one.mixture is None:
            if not self.changes:
                self.source_logits.clear()
            self.source_logits[one.document] = logits
            return
        document = self.corpus.documents[one.document]
        names = ("the source", "a mixture")
        self.records[one.mixture].append(compare_logits(self.source_logits[one.document], logits, document, names))


def _relative_change(source: Any, output: Any) -> float:
    """Squared changes of a hidden state relative to the source's, added over tokens."""
    before, after = hidden_state(source).double(), hidden_state(output).double()
    smallest = torch.finfo(torch.float32).tiny
    return float(((after - before).square().sum(-1) / before.square().sum(-1).clamp(min=smallest)).sum())


def find_variants(model: StreamedModel, units: Sequence[Unit]) -> tuple[list[Mixture], dict[int, list[str]]]:
    """Decide which choices are measured by their own pass, and which by the change after their layer.

    Args:
        model: the source's model.
        units: its units.

    Returns:
        Mixtures of one unit each, for `measure_mixtures`: of units in layers the choice whose size is closest to
        CARRIED_BITS, of the output head all. And by number of the unit the choices whose change is measured.
    """
    mixtures: list[Mixture] = []
    changes: dict[int, list[str]] = {}
    for number, (unit, place) in enumerate(zip(units, places_of(model, units), strict=True)):
        names = [name for name in unit.choices if name != UNQUANTIZED]
        if model.units.get(place) is model.head:
            mixtures += [{number: name} for name in names]
            continue
        carried = min(names, key=lambda name: abs(8 * unit.choices[name].nbytes / unit.elements - CARRIED_BITS))
        mixtures.append({number: carried})
        changes[number] = names
    return mixtures, changes


def scores_of(
    units: Sequence[Unit], mixtures: Sequence[Mixture], changes: Mapping[int, Sequence[str]], measured: Measured
) -> Scores:
    """Compute the scores from what `measure_mixtures` has measured of `find_variants`.

    Args:
        units: the units.
        mixtures: mixtures of one unit each.
        changes: by number of the unit, the choices whose change was measured.
        measured: the figures of each mixture, and the changes.

    Returns:
        The KL divergence of each choice: measured, or that of the measured choice times the ratio of their changes.
    """
    records, changed = measured
    kl: list[dict[str, float]] = [{UNQUANTIZED: 0.0} for _ in units]
    for mixture, documents in zip(mixtures, records, strict=True):
        [(number, name)] = mixture.items()
        own_kl = sum(float(record.kl.sum()) for record in documents) / sum(len(record.kl) for record in documents)
        own = changed.get((number, name), 0.0)
        for other in changes.get(number, (name,)):
            ratio = changed[number, other] / own if own else 0.0
            kl[number][other] = own_kl if other == name else own_kl * ratio
    return kl


def replaced_tensors(
    weights: Mapping[str, Weight],
    schemes: Mapping[str, Scheme | None],
    fused: Mapping[str, tuple[str, ...]],
    make_reader: Callable[[], Reader],
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what makes each tensor of a unit as its schemes round it.

    Args:
        weights: the layers of the unit, by module.
        schemes: the scheme of each; None for those that stay as they are.
        fused: for each module that engines fuse with others, all members of its group, which share some scales.
        make_reader: makes a reader of the source's weights, for each call, since transformers loads in threads.

    Returns:
        By name of the source's unquantized tensor, a function that returns it, bfloat16, rounded to what its codes
        stand for. A stack of experts has all of its experts rounded.
    """
    tensors: dict[str, list[_Rounded]] = {}
    shared: dict[str, Floats] = {}
    for module, weight in weights.items():
        scheme, group = schemes[module], fused.get(module, (module,))
        if scheme is not None:
            if group[0] not in shared:
                members = [(weights[member], scheme) for member in group]
                shared[group[0]] = shared_absmax(members, make_reader())
            tensors.setdefault(weight.source.name, []).append((weight, scheme, shared[group[0]]))
    return {name: partial(_rounded_tensor, rounded, make_reader) for name, rounded in tensors.items()}


# A weight, its scheme, and the largest absolute weight of all that share its per-tensor or global scale.
_Rounded = tuple[Weight, Scheme, Floats]


def _rounded_tensor(weights: list[_Rounded], make_reader: Callable[[], Reader]) -> torch.Tensor:
    reader = make_reader()
    tensor = torch.empty(weights[0][0].source.shape, dtype=torch.bfloat16)
    stored = tensor.view(torch.int16).numpy().view(np.uint16)
    for weight, scheme, absmax in weights:
        write_bfloat16(rounded_rows(weight, scheme, absmax, reader), _rows_of(weight, stored))
    return tensor


def _rows_of(weight: Weight, tensor: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """The part of its tensor that a weight is, as a view [out, in]."""
    matrix = tensor if weight.expert < 0 else tensor[weight.expert]
    if weight.transposed or weight.decodes_transposed:
        matrix = matrix.T
    first = weight.part * weight.shape[0]
    return matrix[first : first + weight.shape[0]]


def rounded_rows(weight: Weight, scheme: Scheme, absmax: Floats, reader: Reader) -> Iterator[Floats]:
    """Yield the rows of a weight as a scheme rounds them to the nearest code, with the scales that it chooses.

    Args:
        weight: the weight [out, in].
        scheme: its scheme.
        absmax: float32 [1, 1], the largest absolute weight of all that share a per-tensor or global scale.
        reader: reads the weight.

    Yields:
        float32 [n, in], the values that codes and scales stand for.

    Raises:
        SourceError: the weight cannot be read, or holds NaN or infinity.
        PlanError: a weight is too large for the scheme.
    """
    fmt = scheme.format
    global_scale = choose_shared_scale(fmt, absmax) if fmt.global_scale is not None else None
    for bits in reader.rows(weight, fmt.height):
        group_absmax = absmax
        if not fmt.shared:
            group_absmax = reader.loops.absmax(bits, weight.dtype, fmt.group)
            require_in_range(weight, group_absmax, scheme, reader.where)
        chosen = choose_scales(scheme, bits, weight.dtype, group_absmax, global_scale, None, reader.loops)

        # Codes are made as a conversion writes them, and decoded as a reader of its output does.
        codes = np.empty((len(bits), fmt.number.nbytes(bits.shape[1])), np.uint8)
        reader.loops.encode_stored(bits, weight.dtype, chosen.scale, fmt, codes, chosen.zero_point)

        values = np.empty(bits.shape, np.float32)
        reader.loops.decode_rows(codes, fmt.number, chosen.scale, fmt.group, 0, values, chosen.zero_point)
        yield values

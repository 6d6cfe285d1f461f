"""Observers: hooks that record the input statistics of a model's layers while texts run through it layer by layer.

Each weight is read once, and only one decoder layer is in memory, so the model may be larger than memory.

    inputs, kv_absmax = observe_inputs(TextRun(StreamedModel(checkpoint), corpus))
    inputs[0].largest       # 21.5
    kv_absmax[0]            # largest magnitudes of keys and values in layer 0: (14.25, 3.5)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..distributed import Ranks
from ..errors import SourceError
from ..plan.architecture import known_architecture
from ..streaming.interleaved import DOWN, FIRST, ExpertWeights, ModuleHooks, TextCache, TextRun, holds_experts
from ..streaming.model import StreamedModel
from ..streaming.pass_checkpoint import dump, load
from ..streaming.session import documents_of_rank
from ..weights.statistics import InputStatistics


@dataclass
class RunningStatistics:
    """Statistics of the inputs of one layer, or of stacked experts, over the tokens that an observer has recorded.

    Attributes:
        tensors: names in the checkpoint of the weights that the inputs are multiplied by; for keys and values of a KV
            cache, one name for messages.
        width: number of inputs; 0 for keys and values, whose number is not checked.
        absmax: float32 [in], largest magnitude of each input; None before the first token, as the sums.
        total: float64 [in], sum of magnitudes.
        squares: float64 [in], sum of squares.
        tokens: number of tokens.
        counts_routing: whether `routed` is counted: true for gate and up of stacked experts.
        routed: int64 [experts], number of tokens routed to each expert; None if not known.
    """

    tensors: tuple[str, ...]
    width: int
    absmax: Tensor | None = None
    total: Tensor | None = None
    squares: Tensor | None = None
    tokens: int = 0
    counts_routing: bool = False
    routed: Tensor | None = None

    def add_routed(self, counts: Tensor) -> None:
        """Add the tokens that a batch routes to each expert, int64 [experts]."""
        self.routed = counts if self.routed is None else self.routed + counts

    def add(self, absmax: Tensor, total: Tensor, squares: Tensor, tokens: int) -> None:
        """Add the statistics of a batch, on the device of those before.

        Args:
            absmax: float32 [in], largest magnitude of each input.
            total: float64 [in], sum of magnitudes.
            squares: float64 [in], sum of squares.
            tokens: number of tokens of the batch.
        """
        self.absmax = absmax if self.absmax is None else torch.maximum(self.absmax, absmax)
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += tokens

    def state(self) -> dict[str, Any]:
        """Return all that was recorded, for `merge`."""
        return {name: getattr(self, name) for name in ("absmax", "total", "squares", "tokens", "routed")}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another process, or an interrupted one, has recorded of the same layer: its `state()`."""
        if state["routed"] is not None:
            self.add_routed(state["routed"])
        if state["absmax"] is not None:
            device = "cpu" if self.absmax is None else self.absmax.device
            absmax, total, squares = (state[name].to(device) for name in ("absmax", "total", "squares"))
            self.add(absmax, total, squares, state["tokens"])

    @property
    def largest(self) -> float:
        """The largest magnitude of all inputs; 0 before the first token."""
        return 0.0 if self.absmax is None else float(self.absmax.max())

    def to_input_statistics(self) -> InputStatistics:
        """Return means in place of sums, in the form that a calibration stores; zeros if no token was recorded."""
        if self.absmax is None or self.total is None or self.squares is None:
            zeros = np.zeros(self.width, np.float32)
            return InputStatistics(self.tensors, zeros, zeros, 0, zeros)
        routed = None if self.routed is None else tuple(self.routed.tolist())
        # The square of a bfloat16 number may be larger than float32 can be.
        largest = float(np.finfo(np.float32).max)
        means = [(sums / max(1, self.tokens)).clamp(max=largest) for sums in (self.total, self.squares)]
        mean, square = (values.float().cpu().numpy() for values in means)
        return InputStatistics(self.tensors, self.absmax.cpu().numpy(), mean, self.tokens, square, routed)


def _batch_statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The arguments of `RunningStatistics.add` for values [..., in]."""
    magnitudes = values.reshape(-1, values.shape[-1]).abs().float()
    absmax, total = magnitudes.amax(0), magnitudes.sum(0).double()
    return absmax, total, magnitudes.square_().sum(0).double(), len(magnitudes)


class Observer(ModuleHooks[RunningStatistics]):
    """Records statistics of the inputs of layers while it is on."""

    def on_input(self, values: Tensor, into: RunningStatistics, place: str) -> Tensor:
        """Record the inputs of a module.

        Args:
            values: the inputs, [..., in].
            into: where they are recorded.
            place: the module's name.

        Returns:
            `values`, unchanged.
        """
        routing = self._routed[place] if into.counts_routing else None
        if routing is not None and (counts := routing.counts()) is not None:
            into.add_routed(counts)
        if values.numel():
            into.add(*self._once(None, values, lambda: _batch_statistics(values)))
        return values


class CacheObserver(TextCache):
    """A KV cache for one forward pass over a whole text: records statistics of keys and values, and stores neither.

    Args:
        config: the model's config.
        statistics: where keys and values are recorded, by index of the decoder layer.
    """

    def __init__(self, config: Any, statistics: Mapping[int, tuple[RunningStatistics, RunningStatistics]]) -> None:
        super().__init__(config)
        self._statistics = statistics

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record keys and values [batch, heads, length, dim], if `statistics` has the layer; return them unchanged."""
        del args, kwargs
        for states, statistics in zip((key_states, value_states), self._statistics.get(layer_idx, ()), strict=False):
            statistics.add(*_batch_statistics(states))
        return key_states, value_states


class InputRecorder:
    """Records the inputs of a model's decoder layers, while texts run through it.

    Statistics that the pass checkpoint has saved are added to.

    Args:
        run: the calibration texts and the source model, whose weights are loaded one decoder layer at a time.

    Raises:
        SourceError: the model runs its layers several times.
    """

    def __init__(self, run: TextRun) -> None:
        self.model = model = run.model
        entry = known_architecture(model.checkpoint)
        if entry is not None and entry.repeats:
            raise SourceError(
                f"{entry.name} runs its layers several times, and a calibration observes each layer once",
                "convert it without one",
            )
        linears, experts = find_hook_points(model)
        self.observer = Observer(model.model, linears, experts)
        layers = model.layers
        # With latent attention (MLA), engines cache latents where transformers caches keys and values.
        latent = getattr(model.model.config.get_text_config(), "kv_lora_rank", None)
        cached = range(0 if latent else len(layers))
        self.caches = {number: _cache_statistics(number) for number in cached}

        # Each with its layer, in the order of layers.
        self._inputs = [(model.unit_of(name), statistics) for name, statistics in linears.items()]
        for name, points in experts.items():
            self._inputs += [(model.unit_of(name), one) for one in (points.first, points.down) if one is not None]
        self._inputs.sort(key=lambda pair: layers.index(pair[0]))
        of_caches = [(layers[number], one) for number, both in self.caches.items() for one in both]
        self._observed = [*self._inputs, *of_caches]

        if run.checkpoint is not None:
            self.merge(run.checkpoint.saved or ())
            run.checkpoint.extra = self.states

    def states(self) -> list[dict[str, Any]]:
        """Return all that was recorded, for `merge`."""
        return [statistics.state() for _, statistics in self._observed]

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what another process, or an interrupted one, has recorded of the same model, if it has."""
        for (_, statistics), state in zip(self._observed, states, strict=False):
            statistics.merge(state)

    def compute(self, ids: Tensor) -> Tensor:
        """Compute the logits of token ids, int64 [length], with caches that are recorded; the body of a pass."""
        return self.model.logits(ids, CacheObserver(self.model.model.config, self.caches) if self.caches else None)

    def check(self, unit: str) -> None:
        """Refuse activations of a decoder layer that are not finite.

        Raises:
            SourceError: there are some.
        """
        for layer, statistics in self._observed:
            if layer == unit and statistics.absmax is not None:
                require_finite_inputs(statistics.absmax, statistics.tensors[0])

    def inputs(self, unit: str | None = None) -> tuple[InputStatistics, ...]:
        """Return the input statistics of a decoder layer, or of all layers."""
        return tuple(statistics.to_input_statistics() for layer, statistics in self._inputs if unit in (None, layer))

    @property
    def kv_absmax(self) -> dict[int, tuple[float, float]]:
        """The largest magnitudes of keys and values, by index of each decoder layer that has a KV cache of its own."""
        return {number: (keys.largest, values.largest) for number, (keys, values) in self.caches.items() if keys.tokens}


def _cache_statistics(layer: int) -> tuple[RunningStatistics, RunningStatistics]:
    """Empty statistics of the keys and the values of a layer."""
    name = f"the KV cache of layer {layer}"
    return RunningStatistics((f"{name} (keys)",), 0), RunningStatistics((f"{name} (values)",), 0)


def observe_inputs(
    run: TextRun, ranks: Ranks | None = None
) -> tuple[tuple[InputStatistics, ...], dict[int, tuple[float, float]]]:
    """Run texts through a model, and record the inputs of its decoder layers' Linears and experts.

    Args:
        run: the calibration texts and the source model, whose weights are loaded one decoder layer at a time.
        ranks: the processes that share the documents; None for this one alone. The first gets the statistics of all,
            each other one only those of its own documents.

    Returns:
        The input statistics of each layer (absmax, mean magnitude and mean square of each channel), those of all
        experts in one, zeros for a layer that no token went into; and the largest magnitudes of keys and of values, by
        index of each decoder layer that has a KV cache of its own. With latent attention (MLA) there are none.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, or the model runs its layers several times.
        OutputError: hidden states or the pass checkpoint cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    ranks = ranks or Ranks()
    recorder = InputRecorder(run)

    documents = documents_of_rank(len(run.corpus.documents), ranks)
    run.run(
        documents, recorder.compute, [recorder.observer], run.model.layers[-1], lambda unit, *_: recorder.check(unit)
    )

    # The first rank gets what the others have recorded; the others get nothing.
    if ranks.size > 1:
        for data in ranks.gather(bytes(dump(recorder.states()))):
            recorder.merge(load(data))
    return recorder.inputs(), recorder.kv_absmax


def require_finite_inputs(values: Tensor, name: str) -> None:
    """Refuse infinity and NaN in what was computed from the inputs of a tensor.

    Raises:
        SourceError: there is one.
    """
    if not torch.isfinite(values).all():
        raise SourceError(
            f"the inputs of {name} are not finite on these texts",
            "the model overflows there: look at its weights with openquant diagnose",
        )


def find_hook_points(
    model: StreamedModel,
) -> tuple[dict[str, RunningStatistics], dict[str, ExpertWeights[RunningStatistics]]]:
    """Find the modules whose inputs observers can record, with empty statistics for each.

    Args:
        model: the source model; its weights are not loaded.

    Returns:
        Statistics of the input of each Linear of decoder layers, by full module name; and for each module of stacked
        experts, by full module name, statistics of the inputs of gate and up (`first`) and of down, None where it has
        no such weights.
    """
    linears: dict[str, RunningStatistics] = {}
    experts: dict[str, ExpertWeights[RunningStatistics]] = {}
    layers = set(model.layers)

    for name, module in model.model.named_modules():
        if model.unit_of(name) not in layers:
            continue

        if isinstance(module, nn.Linear) and (tensors := model.made_of.get(f"{name}.weight")):
            linears[name] = RunningStatistics(tensors, module.in_features)
        elif holds_experts(module):
            first, down = (_expert_statistics(model, name, module, parameters) for parameters in (FIRST, DOWN))
            experts[name] = ExpertWeights(first, down)
    return linears, experts


def _expert_statistics(
    model: StreamedModel, name: str, module: nn.Module, parameters: tuple[str, ...]
) -> RunningStatistics | None:
    """Empty statistics for the inputs of those parameters of stacked experts that exist; None if none does."""
    existing = [parameter for parameter in parameters if getattr(module, parameter, None) is not None]
    tensors = [tensor for parameter in existing for tensor in model.made_of.get(f"{name}.{parameter}", ())]
    if not tensors:
        return None
    # [experts, out, in], or [experts, in, out] if transposed.
    axis = 1 if getattr(module, "is_transposed", False) else 2
    width = getattr(module, existing[0]).shape[axis]
    return RunningStatistics(tuple(dict.fromkeys(tensors)), width, counts_routing=parameters == FIRST)

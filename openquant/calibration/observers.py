"""The calibration: texts go through a model layer by layer, and what goes into each of its weights is looked at.

Every weight is read once, and only a layer's are in memory: a model larger than that is calibrated as any other.

    inputs, cached = calibrate(StreamedModel(checkpoint), corpus)
    inputs[0].largest       # 21.5
    cached[0]               # of keys and of values in the first layer: (14.25, 3.5)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..data.corpus import Corpus
from ..errors import SourceError
from ..models import MODELS
from ..streaming import transformers_internals
from ..streaming.documents import DocumentRanks, documents_of_rank
from ..streaming.hooks import DOWN, FIRST, ExpertWeights, ModuleHooks, holds_experts
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..streaming.progress import Advanced, PassProgress, Remaining, layer_costs
from ..streaming.torch_threads import limited_threads, threads_for
from ..weights.statistics import InputStatistics

# Tokens that any pass reads, of which float64 holds every number.
MOST = 1 << 53
Statistics = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass
class RunningStatistics:
    """What went into weights so far.

    Attributes:
        tensors: the weights, as the checkpoint names them.
        width: how many inputs they have; 0 of keys and values, where nobody asks.
        absmax: float32 [in].
        total: float64 [in], the sum of magnitudes.
        squares: float64 [in], the sum of squares.
        tokens: how many.
        told: whether it is what goes into the experts of a module, which is told which of them each token goes to.
        routed: int64 [experts], how many tokens were routed to each; None where that is not known.
    """

    tensors: tuple[str, ...]
    width: int
    absmax: Tensor | None = None
    total: Tensor | None = None
    squares: Tensor | None = None
    tokens: int = 0
    told: bool = False
    routed: Tensor | None = None

    def add_routed(self, counts: Tensor) -> None:
        """Add how many other tokens were routed to each expert."""
        self.routed = counts if self.routed is None else self.routed + counts

    def add(self, absmax: Tensor, total: Tensor, squares: Tensor, tokens: int) -> None:
        """Add what other tokens are: their largest magnitudes, the sums of these and of squares, and how many."""
        self.absmax = absmax if self.absmax is None else torch.maximum(self.absmax, absmax)
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += tokens

    @property
    def largest(self) -> float:
        """The largest magnitude of all."""
        return 0.0 if self.absmax is None else float(self.absmax.max())

    def inputs(self) -> InputStatistics:
        """The same as a calibration has it."""
        if self.absmax is None or self.total is None or self.squares is None:
            none = np.zeros(self.width, np.float32)
            return InputStatistics(self.tensors, none, none, 0, none)
        routed = None if self.routed is None else tuple(self.routed.tolist())
        # Squares of what bfloat16 holds may be more than float32 does.
        largest = float(np.finfo(np.float32).max)
        means = [(sums / max(1, self.tokens)).clamp(max=largest) for sums in (self.total, self.squares)]
        mean, square = (each.float().cpu().numpy() for each in means)
        return InputStatistics(self.tensors, self.absmax.cpu().numpy(), mean, self.tokens, square, routed)


def _magnitudes(values: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of values [..., in] the largest magnitudes [in], the sums of them and of squares, and how many there are."""
    magnitudes = values.reshape(-1, values.shape[-1]).abs().float()
    largest, sums = magnitudes.amax(0), magnitudes.sum(0).double()
    return largest, sums, magnitudes.square_().sum(0).double(), len(magnitudes)


class Observer(ModuleHooks[RunningStatistics]):
    """Looks at what goes into layers, while it is on."""

    def put(self, values: Tensor, into: RunningStatistics, place: str) -> Tensor:
        """Activations, which stay as they are."""
        if into.told and (routing := self._routed[place]) is not None and (counts := routing.counts()) is not None:
            into.add_routed(counts)
        if values.numel():
            into.add(*self._once(None, values, lambda: _magnitudes(values)))
        return values


class CacheObserver(DynamicCache):  # type: ignore[misc]  # mypy does not read transformers
    """A cache of a single pass over a whole text, that looks at keys and values, and keeps nothing.

    Args:
        config: of the model.
        seen: where to put what keys and values are, by the layer's number.
    """

    # For streaming/pass_checkpoint.py: a pass that goes on has another.
    holds_nothing = True

    def __init__(self, config: Any, seen: Mapping[int, tuple[RunningStatistics, RunningStatistics]]) -> None:
        super().__init__(config=config.get_text_config())
        self._seen = seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, length, dim], as they are."""
        del args, kwargs
        for states, into in zip((key_states, value_states), self._seen.get(layer_idx, ()), strict=False):
            into.add(*_magnitudes(states))
        return key_states, value_states

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """What the layer computes with. A text that waits for its next layer would hold the states of all before."""
        found: Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.conv_states = dict.fromkeys(layer.conv_states)
        layer.is_conv_states_initialized = dict.fromkeys(layer.conv_states, False)
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """The state as it is."""
        del layer_idx, args, kwargs
        return recurrent_states


def observe_inputs(
    model: StreamedModel,
    corpus: Corpus,
    *,
    scratch: OffloadFile | None = None,
    team: DocumentRanks | None = None,
    progress: Advanced | None = None,
    remaining: Remaining | None = None,
    kept: PassCheckpoint | None = None,
) -> tuple[tuple[InputStatistics, ...], dict[int, tuple[float, float]]]:
    """What goes into each Linear of a model's decoder layers, and into the experts of each; and the largest magnitudes
    of keys and of values as they are cached, by the number of each layer that caches some of its own.

    Args:
        model: the model.
        corpus: the texts.
        scratch: where hidden states go beyond a budget; None for nowhere.
        team: the processes that share the documents; None for this one alone. Only its first gets what all have seen.
        progress: told how many tokens are through all layers, and how many there are.
        remaining: told about how many seconds are left, from the first layer on.
        kept: where what was seen so far is kept now and then, and gone on from.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, or texts go through layers several times.
        OutputError: hidden states found no room on disk.
    """
    entry = MODELS.get(model.checkpoint.architecture)
    if entry is not None and entry.repeats:
        raise SourceError(
            f"{entry.name} runs its layers several times, and a calibration sees what goes into them once",
            "convert it without one",
        )
    layers, experts = find_hook_points(model)
    observer = Observer(model.model, layers, experts)
    decoding = decoder_layers(model)
    seen: dict[str, list[RunningStatistics]] = {unit: [] for unit in decoding}
    for name, layer in layers.items():
        seen[model.unit_of(name)].append(layer)
    for name, both in experts.items():
        seen[model.unit_of(name)] += [each for each in (both.first, both.down) if each is not None]
    # Of latent attention engines cache something else than transformers does.
    latent = getattr(model.model.config.get_text_config(), "kv_lora_rank", None)
    caches: dict[int, tuple[RunningStatistics, RunningStatistics]] = {}
    for number, unit in enumerate(() if latent else decoding):
        keys, values = (
            RunningStatistics((f"the cache of layer {number} as {kind}",), 0) for kind in ("keys", "values")
        )
        caches[number] = keys, values
        seen[unit] += [keys, values]
    every = [each for found in seen.values() for each in found]
    if kept is not None:
        kept.own = lambda: _packed(every)
        if kept.found is not None:
            with kept.sound():
                _add(every, bytes(kept.found))
                _require_done(seen, kept.done)

    @contextmanager
    def around() -> Iterator[None]:
        with products_in_float32(model.device), observer.on():
            yield

    def after_unit(unit: str, group: int, number: int, hidden: Tensor) -> None:
        del group, number, hidden
        for each in seen.get(unit, ()):
            if each.absmax is not None and not torch.isfinite(each.absmax).all():
                raise SourceError(
                    f"what goes into {each.tensors[0]} is not finite on these texts",
                    "the model overflows there: look at its weights with openquant diagnose",
                )

    def body(ids: Tensor) -> None:
        cache = CacheObserver(model.model.config, caches) if caches else None
        model.model(
            input_ids=ids[None],
            use_cache=cache is not None,
            **{transformers_internals.cache_argument(model.model): cache},
        )

    mine = documents_of_rank(len(corpus.documents), team)
    texts = [torch.tensor(corpus.documents[number].ids, device=model.device) for number in mine]
    resumed = frozenset() if kept is None else kept.done
    costs = layer_costs(model, [unit for unit in decoding if unit not in resumed])
    counted = PassProgress(costs, len(mine) * corpus.length, progress, remaining)
    with limited_threads(threads_for(model, corpus.length)):
        run_interleaved(
            [[ForwardPass(model, partial(body, ids), around)] for ids in texts],
            finished=lambda *_: None,
            after_unit=after_unit,
            scratch=scratch,
            until=decoding[-1],
            progress=counted.layer_done,
            kept=kept,
        )
    if team is not None:
        # Of the others: the first has its own already.
        for data in team.gather(_packed(every)):
            _add(every, data)
    cached = {number: (keys.largest, values.largest) for number, (keys, values) in caches.items() if keys.tokens}
    apart = {id(each) for both in caches.values() for each in both}
    return _together(each.inputs() for each in every if id(each) not in apart), cached


def _together(inputs: Iterable[InputStatistics]) -> tuple[InputStatistics, ...]:
    """Layers with one input, such as q, k and v, are one."""
    found: dict[tuple[bytes, bytes, int, str], InputStatistics] = {}
    for each in inputs:
        # What nothing went into is not known to have the same.
        apart = "" if each.tokens else each.tensors[0]
        key = each.absmax.tobytes(), each.mean.tobytes(), each.tokens, apart
        other = found.get(key)
        if other is not None:
            each = replace(each, tensors=(*other.tensors, *each.tensors), routed=other.routed or each.routed)
        found[key] = each
    return tuple(found.values())


def decoder_layers(model: StreamedModel) -> list[str]:
    """The decoder layers of a model, in the order in which they are computed."""
    head = transformers_internals.output_head(model.model)
    return [
        unit
        for unit in model.order
        if unit and model.units[unit] is not head and not isinstance(model.units[unit], nn.Embedding)
    ]


def find_hook_points(
    model: StreamedModel,
) -> tuple[dict[str, RunningStatistics], dict[str, ExpertWeights[RunningStatistics]]]:
    """Where to look: the Linears of a model's decoder layers by name, and its modules of stacked experts."""
    layers: dict[str, RunningStatistics] = {}
    experts: dict[str, ExpertWeights[RunningStatistics]] = {}
    decoding = set(decoder_layers(model))
    for name, module in model.model.named_modules():
        if model.unit_of(name) not in decoding:
            continue
        if isinstance(module, nn.Linear) and (tensors := model.made_of.get(f"{name}.weight")):
            layers[name] = RunningStatistics(tensors, module.in_features)
        elif holds_experts(module):
            first = _stack(model, name, module, FIRST)
            experts[name] = ExpertWeights(
                None if first is None else replace(first, told=True), _stack(model, name, module, DOWN)
            )
    return layers, experts


def _stack(model: StreamedModel, name: str, module: nn.Module, parameters: tuple[str, ...]) -> RunningStatistics | None:
    """What goes into stacked experts: the weights of all these parameters; None where there is none of them."""
    held = [parameter for parameter in parameters if getattr(module, parameter, None) is not None]
    tensors = [tensor for parameter in held for tensor in model.made_of.get(f"{name}.{parameter}", ())]
    if not tensors:
        return None
    # The experts, their outputs and their inputs, or the last two the other way round.
    sizes = getattr(module, held[0]).shape[1:]
    return RunningStatistics(
        tuple(dict.fromkeys(tensors)), sizes[0] if getattr(module, "is_transposed", False) else sizes[1]
    )


def _packed(seen: list[RunningStatistics]) -> bytes:
    """What a process has seen, for another one."""
    arrays: dict[str, Statistics] = {}
    for number, each in enumerate(seen):
        rows = torch.zeros(4, 0, dtype=torch.float64)
        if each.absmax is not None and each.total is not None and each.squares is not None:
            tokens = torch.full_like(each.total, each.tokens)
            rows = torch.stack([each.absmax.double(), each.total, each.squares, tokens])
        arrays[str(number)] = rows.cpu().numpy()
        if each.routed is not None:
            arrays[f"{number} routed"] = each.routed.double().numpy()
    return save(arrays)


def _add(seen: list[RunningStatistics], data: bytes) -> None:
    """Add what another process has seen of the same model.

    Raises:
        ValueError: it is of another model, or no process sees that.
        SafetensorError: nothing at all can be read.
    """
    arrays = load(data)
    if {name.removesuffix(" routed") for name in arrays} != {str(number) for number in range(len(seen))}:
        raise ValueError("it has statistics of other layers")
    for name, array in arrays.items():
        each, routed = seen[int(name.removesuffix(" routed"))], name.endswith(" routed")
        sound = array.dtype == np.float64 and array.ndim == 2 - routed and (np.isfinite(array) & (array >= 0)).all()
        # The last row, as all of routed, are numbers of tokens; the first are float32.
        counts = array if routed or not sound else array[3:]
        if not sound or (counts != np.floor(counts)).any() or counts.max(initial=0) > MOST:
            raise ValueError(f"its statistics of {each.tensors[0]} are none")
        if routed:
            if not each.told or (each.routed is not None and len(each.routed) != len(array)):
                raise ValueError(f"its statistics of {each.tensors[0]} are of other experts")
            each.add_routed(torch.from_numpy(array.astype(np.int64)))
            continue
        if len(array) != 4 or array.shape[1] not in (0, each.width or array.shape[1]):
            raise ValueError(f"its statistics of {each.tensors[0]} are of another width")
        if array.shape[1]:
            if array[0].max() > np.finfo(np.float32).max or (array[3] != array[3, 0]).any():
                raise ValueError(f"its statistics of {each.tensors[0]} are none")
            absmax, total, squares, tokens = (torch.from_numpy(row) for row in array)
            device = "cpu" if each.absmax is None else each.absmax.device
            each.add(absmax.float().to(device), total.to(device), squares.to(device), int(tokens[0]))


def _require_done(seen: Mapping[str, Sequence[RunningStatistics]], done: Set[str]) -> None:
    """Refuse statistics of layers that texts will go through again, and layers that are done without any.

    Raises:
        ValueError: there are such.
    """
    for unit, found in seen.items():
        # Of keys and values the largest counts, which may come twice; towers for images shift their layers' numbers.
        sites = [site for site in found if site.width]
        if sites and any(site.absmax is not None for site in sites) != (unit in done):
            raise ValueError(f"it has {'no ' if unit in done else ''}statistics of {unit}")

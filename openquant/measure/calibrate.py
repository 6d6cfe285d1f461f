"""The calibration: texts go through a model layer by layer, and what goes into each of its weights is looked at.

Every weight is read once, and only a layer's are in memory: a model larger than that is calibrated as any other.

    calibrate(StreamedModel(checkpoint), corpus)[0].largest     # 21.5
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..forward import library
from ..forward.kept import Kept
from ..forward.products import products_in_float32
from ..forward.scratch import Scratch
from ..forward.streamed import Pass, StreamedModel, run
from ..texts.corpus import Corpus
from ..weights.calibration import Inputs
from .interception import DOWN, FIRST, Experts, Interception, holds_experts
from .shares import Team, share


@dataclass
class Seen:
    """What went into weights so far.

    Attributes:
        tensors: the weights, as the checkpoint names them.
        width: how many inputs they have.
        absmax: float32 [in].
        total: float64 [in], the sum of magnitudes.
        tokens: how many.
    """

    tensors: tuple[str, ...]
    width: int
    absmax: Tensor | None = None
    total: Tensor | None = None
    tokens: int = 0

    def add(self, absmax: Tensor, total: Tensor, tokens: int) -> None:
        """Add what other tokens are: their largest magnitudes, the sum of them, and how many there are."""
        self.absmax = absmax if self.absmax is None else torch.maximum(self.absmax, absmax)
        self.total = total if self.total is None else self.total + total
        self.tokens += tokens

    def inputs(self) -> Inputs:
        """The same as a calibration has it."""
        if self.absmax is None or self.total is None:
            none = np.zeros(self.width, np.float32)
            return Inputs(self.tensors, none, none, 0)
        mean = self.total / max(1, self.tokens)
        return Inputs(self.tensors, self.absmax.cpu().numpy(), mean.float().cpu().numpy(), self.tokens)


class Observer(Interception[Seen]):
    """Looks at what goes into layers, while it is on."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Seen], experts: Mapping[str, Experts[Seen]]) -> None:
        super().__init__(model, layers, experts)
        # Of the last activations: q, k and v have the same, gate and up too.
        self._last: tuple[Tensor, tuple[Tensor, Tensor, int]] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look meanwhile; for Pass.around."""
        try:
            with super().on():
                yield
        finally:
            self._last = None

    def put(self, values: Tensor, into: Seen, place: str) -> Tensor:
        """Activations, which stay as they are."""
        del place
        if self._last is None or self._last[0] is not values:
            magnitudes = values.reshape(-1, values.shape[-1]).abs()
            if len(magnitudes) == 0:
                return values
            sums = magnitudes.sum(0, dtype=torch.float32).double()
            self._last = values, (magnitudes.amax(0).float(), sums, len(magnitudes))
        into.add(*self._last[1])
        return values


def calibrate(
    model: StreamedModel,
    corpus: Corpus,
    *,
    scratch: Scratch | None = None,
    team: Team | None = None,
    progress: Callable[[int, int], None] | None = None,
    kept: Kept | None = None,
) -> tuple[Inputs, ...]:
    """What goes into each Linear of a model's decoder layers, and into the experts of each.

    Args:
        model: the model.
        corpus: the texts.
        scratch: where hidden states go beyond a budget; None for nowhere.
        team: the processes that share the documents; None for this one alone. Only its first gets what all have seen.
        progress: told bytes of weights that texts are through, and how many there are.
        kept: where what was seen so far is kept now and then, and gone on from.

    Raises:
        SourceError: a weight cannot be read, or activations are not finite.
        OutputError: hidden states found no room on disk.
    """
    layers, experts = find_sites(model)
    observer = Observer(model.model, layers, experts)
    decoding = decoder_layers(model)
    seen: dict[str, list[Seen]] = {unit: [] for unit in decoding}
    for name, layer in layers.items():
        seen[model.unit_of(name)].append(layer)
    for name, both in experts.items():
        seen[model.unit_of(name)] += [each for each in (both.first, both.down) if each is not None]
    every = [each for found in seen.values() for each in found]
    if kept is not None:
        kept.own = lambda: _packed(every)
        if kept.found is not None:
            _add(every, kept.found)
    done = 0

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

    def advanced(unit: str, group: int, groups: int) -> None:
        nonlocal done
        del unit, group
        done += 1
        if progress is not None:
            progress(int(model.nbytes * min(1.0, done / (groups * len(model.units)))), model.nbytes)

    def body(ids: Tensor) -> None:
        model.model(input_ids=ids[None], use_cache=False)

    mine = share(len(corpus.documents), team)
    texts = [torch.tensor(corpus.documents[number].ids, device=model.device) for number in mine]
    run(
        [[Pass(model, partial(body, ids), around)] for ids in texts],
        finished=lambda *_: None,
        after_unit=after_unit,
        scratch=scratch,
        until=decoding[-1],
        progress=advanced,
        kept=kept,
    )
    if team is not None:
        for data in team.gather(_packed(every))[1:]:
            _add(every, data)
    return tuple(each.inputs() for each in every)


def decoder_layers(model: StreamedModel) -> list[str]:
    """The decoder layers of a model, in the order in which they are computed."""
    head = library.output_head(model.model)
    return [
        unit
        for unit in model.order
        if unit and model.units[unit] is not head and not isinstance(model.units[unit], nn.Embedding)
    ]


def find_sites(model: StreamedModel) -> tuple[dict[str, Seen], dict[str, Experts[Seen]]]:
    """Where to look: the Linears of a model's decoder layers by name, and its modules of stacked experts."""
    layers: dict[str, Seen] = {}
    experts: dict[str, Experts[Seen]] = {}
    decoding = set(decoder_layers(model))
    for name, module in model.model.named_modules():
        if model.unit_of(name) not in decoding:
            continue
        if isinstance(module, nn.Linear) and (tensors := model.made_of.get(f"{name}.weight")):
            layers[name] = Seen(tensors, module.in_features)
        elif holds_experts(module):
            experts[name] = Experts(_stack(model, name, module, FIRST), _stack(model, name, module, DOWN))
    return layers, experts


def _stack(model: StreamedModel, name: str, module: nn.Module, parameters: tuple[str, ...]) -> Seen | None:
    """What goes into stacked experts: the weights of all these parameters; None where there is none of them."""
    held = [parameter for parameter in parameters if getattr(module, parameter, None) is not None]
    tensors = [tensor for parameter in held for tensor in model.made_of.get(f"{name}.{parameter}", ())]
    if not tensors:
        return None
    # The experts, their outputs and their inputs, or the last two the other way round.
    sizes = getattr(module, held[0]).shape[1:]
    return Seen(tuple(dict.fromkeys(tensors)), sizes[0] if getattr(module, "is_transposed", False) else sizes[1])


def _packed(seen: list[Seen]) -> bytes:
    """What a process has seen, for another one."""
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for number, each in enumerate(seen):
        if each.absmax is not None and each.total is not None:
            tokens = torch.full_like(each.total, each.tokens)
            arrays[str(number)] = torch.stack([each.absmax.double(), each.total, tokens]).cpu().numpy()
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _add(seen: list[Seen], data: bytes) -> None:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for number in arrays.files:
            absmax, total, tokens = (torch.from_numpy(row.copy()) for row in arrays[number])
            each = seen[int(number)]
            device = "cpu" if each.absmax is None else each.absmax.device
            each.add(absmax.float().to(device), total.to(device), int(tokens[0]))

"""GPTQ's pass: texts go through a model layer by layer, and each layer's weights are rounded by what went into them.

As a decoder layer is through all texts, the Gram matrices of its inputs are there: its weights are read, rounded and
written to a file of their own, which the conversion copies from, and the matrices are given back.

    places = round_layers(StreamedModel(checkpoint), plan, corpus, folder)
    places["model.layers.0.mlp.up_proj.weight_packed"]      # Place(.../000.safetensors, 1152)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..files.rounded import Place, RoundedFolder
from ..files.shardfile import Bytes
from ..files.tensors import TensorInfo
from ..formats.kernels import BITS_TYPE, Bits, Loops, absmax, pack, pack_words, to_float32
from ..formats.numbers import Floats
from ..formats.ranges import ranged
from ..formats.schemes import Scheme
from ..formats.search import searched
from ..forward.kept import Kept
from ..forward.products import products_in_float32
from ..forward.scratch import Scratch
from ..forward.streamed import Pass, StreamedModel, run
from ..measure.calibrate import by_bytes, decoder_layers, find_sites
from ..measure.interception import Interception
from ..plan.carried import made_of
from ..plan.plan import Plan
from ..texts.corpus import Corpus
from ..weights.reading import Reader, require_small
from ..weights.weight import Weight
from .carried import Feedback, carried, find_feedback

# Weights of a layer that are rounded together, all of some rows.
AT_ONCE = 1 << 24
# Columns that are multiplied with those from them on: a Gram matrix is the same on both sides of its diagonal.
PANEL = 256


@dataclass
class Gram:
    """The Gram matrix of what goes into some layers, so far.

    Attributes:
        weights: what is multiplied by it and will be rounded, each with its scheme.
        sums: float32 [in, in], what is on and above the diagonal; None before the first text.
    """

    weights: list[tuple[Weight, Scheme]]
    sums: Tensor | None = None

    @property
    def tensors(self) -> Iterator[TensorInfo]:
        """What becomes of its weights."""
        for weight, scheme in self.weights:
            yield from made_of(weight, scheme)

    def add(self, values: Tensor) -> None:
        """Add activations [..., in]."""
        tokens = values.reshape(-1, values.shape[-1]).float()
        width = tokens.shape[1]
        if self.sums is None:
            self.sums = torch.zeros(width, width, device=tokens.device)
        for low in range(0, width, PANEL):
            high = min(low + PANEL, width)
            self.sums[low:high, low:].addmm_(tokens[:, low:high].T, tokens[:, low:])

    def take(self) -> Tensor:
        """The whole matrix, which is nothing any more here."""
        sums, self.sums = self.sums, None
        if sums is None:
            # No text went there.
            width = self.weights[0][0].shape[1]
            return torch.zeros(width, width)
        for low in range(0, len(sums), PANEL):
            high = min(low + PANEL, len(sums))
            sums[high:, low:high] = sums[low:high, high:].T
        return sums


class Summing(Interception[Gram]):
    """Adds up Gram matrices of what goes into layers, while it is on."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Gram]) -> None:
        super().__init__(model, layers, {})

    def put(self, values: Tensor, into: Gram, place: str) -> Tensor:
        """Activations, which stay as they are."""
        del place
        # Joined layers have one input, and one matrix.
        self._once(id(into), values, lambda: into.add(values))
        return values


def round_layers(
    model: StreamedModel,
    plan: Plan,
    corpus: Corpus,
    folder: RoundedFolder,
    loops: Loops,
    *,
    scratch: Scratch | None = None,
    progress: Callable[[int, int], None] | None = None,
    kept: Kept | None = None,
) -> dict[str, Place]:
    """Round the weights of a plan that GPTQ rounds, as far as they are Linears of the model.

    Args:
        model: the source's.
        plan: what becomes of its weights.
        corpus: the texts.
        folder: where each decoder layer's weights are written; those that are there are not rounded again.
        loops: what searches for scales.
        scratch: where hidden states go beyond a budget; None for nowhere.
        progress: told bytes of weights that texts are through, and how many there are.
        kept: where passes are kept now and then, and gone on from.

    Returns:
        Where each tensor of them lies, by name.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, or a file in the folder is damaged.
        PlanError: a weight is too large for its scheme.
        OutputError: a layer's file cannot be written, or hidden states found no room on disk.
    """
    decoding = decoder_layers(model)
    units = _find_grams(model, plan)
    places: dict[str, Place] = {}
    left = dict(units)
    for unit in units:
        found = folder.read(decoding.index(unit))
        if found is None:
            continue
        if found.keys() != {info for gram in _each(left.pop(unit)) for info in gram.tensors}:
            raise folder.damaged(decoding.index(unit))
        places |= {info.name: place for info, place in found.items()}
    if not left:
        return places
    if kept is not None and kept.done & left.keys():
        raise SourceError(
            f"{kept.path} goes on after layers whose files are gone from {folder.path}", "remove it to begin again"
        )
    summing = Summing(model.model, {name: gram for grams in left.values() for name, gram in grams.items()})
    reader = Reader(plan.seen.where, lambda shard: model.traffic.path(shard), _memory, loops)

    @contextmanager
    def around() -> Iterator[None]:
        with products_in_float32(model.device), summing.on():
            yield

    texts = [torch.tensor(document.ids, device=model.device) for document in corpus.documents]

    def after_unit(unit: str, group: int, number: int, hidden: Tensor) -> None:
        del number, hidden
        if unit not in left or group + 1 < len(texts):
            return
        tensors = [each for gram in _each(left[unit]) for each in _rounded(gram, reader)]
        places.update({info.name: place for info, place in folder.write(decoding.index(unit), tensors).items()})

    def body(ids: Tensor) -> None:
        model.model(input_ids=ids[None], use_cache=False)

    run(
        [[Pass(model, partial(body, ids), around)] for ids in texts],
        finished=lambda *_: None,
        after_unit=after_unit,
        scratch=scratch,
        until=list(left)[-1],
        progress=by_bytes(model, progress),
        kept=kept,
    )
    return places


def _memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _each(grams: Mapping[str, Gram]) -> Iterator[Gram]:
    """Each Gram matrix of a unit once."""
    return iter({id(gram): gram for gram in grams.values()}.values())


def _find_grams(model: StreamedModel, plan: Plan) -> dict[str, dict[str, Gram]]:
    """The Gram matrices of each decoder layer, by the module that its inputs go into; joined layers have one."""
    wanted = {weight.source.name: (weight, scheme) for weight, scheme in plan.carried}
    units: dict[str, dict[str, Gram]] = {}
    together: dict[tuple[str, ...], Gram] = {}
    for name, seen in find_sites(model)[0].items():
        found = [wanted[tensor] for tensor in seen.tensors if tensor in wanted]
        if not found or any(weight.shape[1] != seen.width for weight, _ in found):
            continue
        module = found[0][0].module
        gram = together.setdefault(plan.fates.sets.get(module, (module,)), Gram([]))
        gram.weights += found
        units.setdefault(model.unit_of(name), {})[name] = gram
    # Of a scale that joined layers share all parts are made here, or none.
    for key, gram in together.items():
        modules = {weight.module for weight, _ in gram.weights}
        gram.weights = [each for each in gram.weights if not each[1].format.tied or modules.issuperset(key)]
    return units


def _rounded(gram: Gram, reader: Reader) -> Iterator[tuple[TensorInfo, Bytes]]:
    """The tensors of all weights that go with a Gram matrix."""
    sums = gram.take()
    if not torch.isfinite(sums).all():
        raise SourceError(
            f"what goes into {gram.weights[0][0].source.name} is not finite on these texts",
            "the model overflows there: look at its weights with openquant diagnose",
        )
    known: dict[bytes, Feedback] = {}
    largest = _largest(gram, reader)
    for weight, scheme in gram.weights:
        columns = weight.tuning.columns if weight.tuning is not None else None
        key = b"" if columns is None else columns.tobytes()
        if key not in known:
            known = {key: _feedback(sums, columns)}
        yield from _round(weight, scheme, known[key], largest, reader)


def _feedback(sums: Tensor, columns: Floats | None) -> Feedback:
    """What is carried where inputs are divided by what columns are multiplied with."""
    if columns is None:
        return find_feedback(sums)
    factors = torch.from_numpy(columns).to(sums.device)
    return find_feedback(sums / factors / factors[:, None])


def _largest(gram: Gram, reader: Reader) -> Floats:
    """float32 [1, 1], the largest magnitude of weights that share a scale; 0 where none do."""
    found = np.zeros((1, 1), np.float32)
    for weight, scheme in gram.weights:
        if scheme.format.tied:
            for bits in reader.rows(weight, 1):
                largest = absmax(bits, weight.dtype, (None, None))
                require_small(weight, largest, scheme, reader.where)
                found = np.maximum(found, largest)
    return found


def _round(
    weight: Weight, scheme: Scheme, feedback: Feedback, largest: Floats, reader: Reader
) -> Iterator[tuple[TensorInfo, Bytes]]:
    """The tensors of one weight: codes, scales, a global scale and zero points, as its format has them."""
    form, loops, device = scheme.format, reader.loops, feedback.shares.device
    divisor = form.divisor(largest) if form.global_scale is not None else None
    codes: list[Any] = []
    scales: list[Any] = []
    zeros: list[Any] = []
    importance = None if weight.tuning is None else weight.tuning.importance
    for bits in _pieces(reader, weight, form.height):
        zero = None
        if form.shared:
            scale = form.scales(largest)
        else:
            amax = loops.absmax(bits, weight.dtype, form.group)
            require_small(weight, amax, scheme, reader.where)
            if form.zero_point is not None:
                scale, zero = ranged(bits, weight.dtype, form, scheme.ratios, importance)
                zeros.append(pack_words(form.number.encode(zero), form.number))
            elif scheme.ratios:
                scale = searched(bits, weight.dtype, amax, form, scheme.ratios, divisor, loops, importance)
            else:
                scale = loops.scales(form, amax, divisor)
        if not form.shared or not scales:
            scales.append(np.asarray(form.stored(scale, divisor)))
        values = torch.from_numpy(to_float32(bits, weight.dtype)).to(device)
        shift = None if zero is None else torch.from_numpy(zero).to(device)
        found = carried(values, torch.from_numpy(scale).to(device), feedback, form, shift)
        each = form.number.encode(found.cpu().numpy())
        if form.number.per_byte > 1:
            packed = np.empty((len(each), each.shape[1] // form.number.per_byte), np.uint8)
            pack(each, packed)
            each = packed
        codes.append(each)
    made = {form.codes: codes, form.scale.name: scales}
    if form.zero_point is not None:
        made[form.zero_point] = zeros
    if form.global_scale is not None and divisor is not None:
        made[form.global_scale.name] = [divisor]
    for info in made_of(weight, scheme):
        parts = made[info.name.removeprefix(f"{weight.module}.")]
        yield info, np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])


def _pieces(reader: Reader, weight: Weight, multiple: int) -> Iterator[Bits]:
    """The weight in runs of as many rows as are rounded together, multiples of `multiple`."""
    rows, cols = weight.shape
    step = min(rows, max(1, AT_ONCE // (cols * multiple)) * multiple)
    piece = np.empty((step, cols), BITS_TYPE[weight.dtype])
    filled = 0
    for bits in reader.rows(weight, multiple):
        while len(bits):
            count = min(len(bits), step - filled)
            piece[filled : filled + count] = bits[:count]
            bits, filled = bits[count:], filled + count
            if filled == step:
                yield piece
                filled = 0
    if filled:
        yield piece[:filled]

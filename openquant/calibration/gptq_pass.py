"""GPTQ's pass: texts go through a model layer by layer, and each layer's weights are rounded by what went into them.

As a decoder layer is through all texts, the Gram matrices of its inputs are there: its weights are read, rounded and
written to a file of their own, which the conversion copies from, and the matrices are given back.

    places = round_layers(StreamedModel(checkpoint), plan, corpus, folder)
    places["model.layers.0.mlp.up_proj.weight_packed"]      # Place(.../000.safetensors, 1152)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..convert.checks import has_sound_scales, is_scale_tensor
from ..data.corpus import Corpus
from ..errors import SourceError
from ..files.layer_store import LayerStore, TensorPlace, damaged_file
from ..files.shardfile import Bytes
from ..files.tensors import TensorInfo
from ..formats.kernels import BITS_TYPE, Bits, Loops, absmax, pack, pack_words, to_float32
from ..formats.numbers import Floats
from ..formats.scales import choose_scales, choose_shared_scale
from ..formats.schemes import Scheme
from ..plan.gptq import rounded_tensors
from ..plan.plan import Plan
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.matmul import products_in_float32
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..streaming.progress import Advanced, PassProgress, Remaining, layer_costs
from ..streaming.torch_threads import limited_threads, threads_for
from ..weights.reading import Reader, require_small
from ..weights.weight import Weight
from .gptq import ErrorPropagation, find_error_propagation, round_columns
from .hessian import Hessian, HessianObserver, find_hessians, in_memory_parts
from .observers import decoder_layers

# Weights of a layer that are rounded together, all of some rows.
AT_ONCE = 1 << 24
# Tokens below which an expert is told to have seen few.
FEW = 256


def round_layers(
    model: StreamedModel,
    plan: Plan,
    corpus: Corpus,
    folder: LayerStore,
    loops: Loops,
    *,
    room: int,
    scratch: OffloadFile | None = None,
    progress: Advanced | None = None,
    remaining: Remaining | None = None,
    kept: PassCheckpoint | None = None,
    say: Callable[[str], object] = str,
) -> dict[str, TensorPlace]:
    """Round the weights of a plan that GPTQ rounds, as far as they are Linears of the model or experts that are seen.

    Args:
        model: the source's.
        plan: what becomes of its weights.
        corpus: the texts.
        folder: where weights are written, layer by layer; those that are there are not rounded again.
        loops: what searches for scales.
        room: bytes of Gram matrices at a time; a layer with more of them is computed several times.
        scratch: where hidden states go beyond a budget; None for nowhere.
        progress: told how many tokens are through all layers, and how many there are.
        remaining: told about how many seconds are left, from the first layer on.
        kept: where passes are kept now and then, and gone on from.
        say: is told in a line to how many experts few tokens came.

    Returns:
        Where each tensor of them lies, by name.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, or a file in the folder is damaged.
        PlanError: a weight is too large for its scheme.
        OutputError: a layer's file cannot be written, or hidden states found no room on disk.
    """
    decoding = decoder_layers(model)
    units = find_hessians(model, plan)
    places: dict[str, TensorPlace] = {}
    left: dict[str, list[Hessian]] = {}
    for unit, found in units.items():
        rest = found.hessians
        for path, tensors in folder.read(decoding.index(unit)).items():
            there = [hessian for hessian in rest if not tensors.keys().isdisjoint(hessian.tensors)]
            scales = [(info, place) for info, place in tensors.items() if is_scale_tensor(info)]
            if tensors.keys() != {info for hessian in there for info in hessian.tensors} or not all(
                has_sound_scales(path, place.offset, info) for info, place in scales
            ):
                raise damaged_file(path)
            places |= {info.name: place for info, place in tensors.items()}
            rest = [hessian for hessian in rest if hessian not in there]
        if rest:
            left[unit] = rest
    if not left:
        return places
    if kept is not None and kept.done & left.keys():
        raise SourceError(
            f"{kept.path} goes on after layers whose files are gone from {folder.path}", "remove it to begin again"
        )
    summing = HessianObserver(model.model, units.values())
    reader = Reader(plan.seen.where, lambda shard: model.traffic.path(shard), _memory, loops)
    parts = {unit: in_memory_parts(hessians, room) for unit, hessians in left.items()}

    @contextmanager
    def around() -> Iterator[None]:
        with products_in_float32(model.device), summing.on():
            yield

    texts = [torch.tensor(document.ids, device=model.device) for document in corpus.documents]

    seen: list[int] = []

    def finish(unit: str, part: list[Hessian]) -> None:
        """Round what texts were through, and write it."""
        seen.extend(hessian.tokens for hessian in part if hessian.beside is not None)
        number, hessians = decoding.index(unit), units[unit].hessians
        tensors = [each for hessian in part for each in _rounded(hessian, reader)]
        written = folder.write(number, tensors, None if part == hessians else hessians.index(part[0]))
        places.update({info.name: place for info, place in written.items()})

    def again(unit: str) -> bool:
        """Whether texts go through a layer once more after this time, which is for the next part of its matrices."""
        if unit not in parts:
            return False
        begun = parts[unit][0][0].open
        if begun:
            finish(unit, parts[unit].pop(0))
        for hessian in units[unit].wholes:
            hessian.open = not begun
        for hessian in parts[unit][0]:
            hessian.open = True
        return len(parts[unit]) > 1

    def after_unit(unit: str, group: int, number: int, hidden: Tensor) -> None:
        del number, hidden
        if unit in parts and group + 1 == len(texts):
            finish(unit, parts[unit].pop(0))
            for hessian in units[unit].wholes:
                hessian.sums = None

    def body(ids: Tensor) -> None:
        model.model(input_ids=ids[None], use_cache=False)

    last = list(parts)[-1]
    resumed = frozenset() if kept is None else kept.done
    costs = layer_costs(model, [unit for unit in decoding[: decoding.index(last) + 1] if unit not in resumed])
    # Texts go through a layer once for each part of its matrices, and rounding takes about as long as a part.
    costs = {unit: cost * (1 + len(parts.get(unit, ()))) for unit, cost in costs.items()}
    counted = PassProgress(costs, len(texts) * corpus.length, progress, remaining)
    with limited_threads(threads_for(model, corpus.length)):
        run_interleaved(
            [[ForwardPass(model, partial(body, ids), around)] for ids in texts],
            finished=lambda *_: None,
            after_unit=after_unit,
            scratch=scratch,
            until=last,
            progress=counted.layer_done,
            kept=kept,
            again=again,
        )
    if any(tokens < FEW for tokens in seen):
        few, none = (sum(tokens < most for tokens in seen) for most in (FEW, 1))
        say(f"fewer than {FEW} tokens came to {few} of {len(seen)} experts, none to {none}: more texts may help")
    return places


def _memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _rounded(hessian: Hessian, reader: Reader) -> Iterator[tuple[TensorInfo, Bytes]]:
    """The tensors of all weights that go with a Gram matrix."""
    sums = hessian.take()
    if not torch.isfinite(sums).all():
        raise SourceError(
            f"what goes into {hessian.weights[0][0].source.name} is not finite on these texts",
            "the model overflows there: look at its weights with openquant diagnose",
        )
    known: dict[bytes, ErrorPropagation] = {}
    largest = _largest(hessian, reader)
    for weight, scheme in hessian.weights:
        columns = weight.transform.columns if weight.transform is not None else None
        key = b"" if columns is None else columns.tobytes()
        if key not in known:
            known = {key: _feedback(sums, columns)}
        yield from _round(weight, scheme, known[key], largest, reader)


def _feedback(sums: Tensor, columns: Floats | None) -> ErrorPropagation:
    """What is carried where inputs are divided by what columns are multiplied with."""
    if columns is None:
        return find_error_propagation(sums)
    factors = torch.from_numpy(columns).to(sums.device)
    return find_error_propagation(sums / factors / factors[:, None])


def _largest(hessian: Hessian, reader: Reader) -> Floats:
    """float32 [1, 1], the largest magnitude of weights that share a scale; 0 where none do."""
    found = np.zeros((1, 1), np.float32)
    for weight, scheme in hessian.weights:
        if scheme.format.shares_scale:
            for bits in reader.rows(weight, 1):
                largest = absmax(bits, weight.dtype, (None, None))
                require_small(weight, largest, scheme, reader.where)
                found = np.maximum(found, largest)
    return found


def _round(
    weight: Weight, scheme: Scheme, feedback: ErrorPropagation, largest: Floats, reader: Reader
) -> Iterator[tuple[TensorInfo, Bytes]]:
    """The tensors of one weight: codes, scales, a global scale and zero points, as its format has them."""
    form, loops, device = scheme.format, reader.loops, feedback.shares.device
    global_scale = choose_shared_scale(form, largest) if form.global_scale is not None else None
    codes: list[Any] = []
    scales: list[Any] = []
    zeros: list[Any] = []
    importance = None if weight.transform is None else weight.transform.importance
    for bits in _pieces(reader, weight, form.height):
        largest_weights = largest
        if not form.shared:
            largest_weights = loops.absmax(bits, weight.dtype, form.group)
            require_small(weight, largest_weights, scheme, reader.where)
        scale, zero = choose_scales(scheme, bits, weight.dtype, largest_weights, global_scale, importance, loops)
        if not form.shared or not scales:
            scales.append(np.asarray(form.stored(scale, global_scale)))
        if zero is not None:
            zeros.append(pack_words(form.number.encode(zero), form.number))
        values = torch.from_numpy(to_float32(bits, weight.dtype)).to(device)
        shift = None if zero is None else torch.from_numpy(zero).to(device)
        found = round_columns(values, torch.from_numpy(scale).to(device), feedback, form, shift)
        each = form.number.encode(found.cpu().numpy())
        if form.number.per_byte > 1:
            packed = np.empty((len(each), each.shape[1] // form.number.per_byte), np.uint8)
            pack(each, packed)
            each = packed
        codes.append(each)
    made = {form.codes: codes, form.scale.name: scales}
    if form.zero_point is not None:
        made[form.zero_point] = zeros
    if form.global_scale is not None:
        made[form.global_scale.name] = [global_scale]
    for info in rounded_tensors(weight, scheme):
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

"""GPTQ's pass: runs texts through a model layer by layer, and rounds each layer with its Hessians.

Once all texts are through a decoder layer, its Hessians are complete. Its weights are then read, rounded and written to
a file of the layer store, from which the conversion copies them, and the Hessians are freed.

    places = round_layers(StreamedModel(checkpoint), plan, corpus, store, kernels, max_hessian_bytes=1 << 30)
    places["model.layers.0.mlp.up_proj.weight_packed"]      # TensorPlace(.../000.safetensors, 1152)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..convert.conversion import has_sound_scales, is_scale_tensor
from ..data.corpus import Corpus
from ..errors import SourceError
from ..files.shardfile import Bytes, LayerStore, TensorInfo, TensorPlace, damaged_file
from ..formats.kernels import (
    BITS_TYPE,
    Bits,
    Loops,
    absmax,
    choose_scales,
    choose_shared_scale,
    pack,
    pack_words,
    to_float32,
)
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..plan.decisions import rounded_tensors
from ..plan.plan import Plan
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.model import (
    Advanced,
    PassProgress,
    StreamedModel,
    layer_costs,
    limited_threads,
    products_in_float32,
    threads_for,
)
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..weights.reading import Reader, require_in_range
from ..weights.weight import Weight
from .gptq import ErrorPropagation, find_error_propagation, round_columns
from .hessian import Hessian, HessianObserver, LayerHessians, find_hessians, in_memory_parts

# Weights that are rounded at a time, whole rows of a layer.
WEIGHTS_AT_ONCE = 1 << 24
# The user is told how many experts fewer tokens were routed to.
FEW_TOKENS = 256


def round_layers(
    model: StreamedModel,
    plan: Plan,
    corpus: Corpus,
    store: LayerStore,
    loops: Loops,
    *,
    max_hessian_bytes: int,
    scratch: OffloadFile | None = None,
    progress: Advanced | None = None,
    pass_checkpoint: PassCheckpoint | None = None,
    note: Callable[[str], object] = str,
) -> dict[str, TensorPlace]:
    """Round the weights that a plan gives to GPTQ: Linears of decoder layers, and experts whose inputs are observed.

    Args:
        model: the source model, whose weights are loaded one decoder layer at a time.
        plan: says which weights are rounded, and in which schemes.
        corpus: the calibration texts, as tokens.
        store: where rounded layers are written; a layer that is there already is not rounded again.
        loops: the module that chooses scales: formats.kernels (numpy) or formats.compiled (numba).
        max_hessian_bytes: bytes of memory for Hessians and the tensors rounded with them; texts run several times
            through a layer whose Hessians take more.
        scratch: file for hidden states that exceed its budget of memory; None to keep all in memory.
        progress: called with the number of tokens that are done and of all tokens. A token that is through half of the
            layers counts half.
        pass_checkpoint: file from which an interrupted pass continues; None for none.
        note: called with a line for the user if few tokens were routed to some experts.

    Returns:
        Path of a file and byte offset in it of each rounded tensor (codes, scales, global scales, zero points), by the
        tensor's full name in the output. Those of an earlier run are among them.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, a file of the store is damaged, or the pass
            checkpoint cannot be continued.
        OpenQuantError: transformers' model fails on these weights or texts.
        PlanError: a weight is too large for its scheme.
        OutputError: a layer's file cannot be written, or hidden states do not fit on disk.
    """
    layers = model.layers
    units = find_hessians(model, plan)
    places, pending = _read_store(store, units, layers)
    if not pending:
        return places
    if pass_checkpoint is not None and pass_checkpoint.done & pending.keys():
        raise SourceError(
            f"{pass_checkpoint.path} continues after layers whose files are gone from {store.path}",
            "remove it to begin again",
        )
    observer = HessianObserver(model.model, units.values())
    reader = Reader(plan.decoded.where, model.shard_provider.path, loops=loops)
    parts = {unit: in_memory_parts(hessians, max_hessian_bytes) for unit, hessians in pending.items()}
    texts = [torch.tensor(document.ids, device=model.device) for document in corpus.documents]
    rounder = _Rounder(units, parts, layers, len(texts), reader, store)

    @contextmanager
    def observe() -> Iterator[None]:
        with products_in_float32(model.device), observer.on():
            yield

    def body(ids: Tensor) -> None:
        model.model(input_ids=ids[None], use_cache=False)

    last = list(parts)[-1]
    resumed = frozenset() if pass_checkpoint is None else pass_checkpoint.done
    costs = layer_costs(model, [unit for unit in layers[: layers.index(last) + 1] if unit not in resumed])
    # Texts run through a layer once for each part, and rounding takes about as long as one of these.
    costs = {unit: cost * (1 + len(parts.get(unit, ()))) for unit, cost in costs.items()}
    pass_progress = PassProgress(costs, len(texts) * corpus.length, progress)

    with limited_threads(threads_for(model, corpus.length)):
        run_interleaved(
            [[ForwardPass(model, partial(body, ids), observe)] for ids in texts],
            finished=lambda *_: None,
            after_unit=rounder.after_unit,
            scratch=scratch,
            until=last,
            progress=pass_progress.layer_done,
            checkpoint=pass_checkpoint,
            recompute=rounder.begin_part,
        )

    _note_few_tokens(rounder.expert_tokens, note)
    return places | rounder.places


class _Rounder:
    """Rounds the weights of a layer whenever a part of its Hessians is complete.

    Args:
        units: all Hessians, by layer.
        parts: those that are still to be rounded, in parts that fit in memory, by layer.
        layers: names of the decoder layers, in order.
        texts: how many texts run through each layer.
        reader: reads the weights.
        store: where rounded layers are written.
    """

    def __init__(
        self,
        units: Mapping[str, LayerHessians],
        parts: dict[str, list[list[Hessian]]],
        layers: Sequence[str],
        texts: int,
        reader: Reader,
        store: LayerStore,
    ) -> None:
        self.units = units
        self.parts = parts
        self.layers = layers
        self.texts = texts
        self.reader = reader
        self.store = store
        self.places: dict[str, TensorPlace] = {}
        self.expert_tokens: list[int] = []

    def begin_part(self, unit: str) -> bool:
        """Begin the next part of a layer's Hessians. True if texts run through the layer once more for another part."""
        if unit not in self.parts:
            return False

        started = self.parts[unit][0][0].accumulating
        if started:
            self._finish(unit)
        # The Hessian of an MoE layer is complete after the first time.
        for hessian in self.units[unit].moe_hessians:
            hessian.accumulating = not started
        for hessian in self.parts[unit][0]:
            hessian.accumulating = True
        return len(self.parts[unit]) > 1

    def after_unit(self, unit: str, group: int, number: int, hidden: Tensor) -> None:
        """Round the last part of a layer after the last text."""
        del number, hidden
        if unit in self.parts and group + 1 == self.texts:
            self._finish(unit)
            for hessian in self.units[unit].moe_hessians:
                hessian.upper = None

    def _finish(self, unit: str) -> None:
        """Round the weights of a part's complete Hessians, and write them."""
        part = self.parts[unit].pop(0)
        self.expert_tokens += [hessian.tokens for hessian in part if hessian.moe_hessian is not None]
        hessians = self.units[unit].hessians
        tensors = [tensor for hessian in part for tensor in _round_weights(hessian, self.reader)]
        first = None if part == hessians else hessians.index(part[0])
        written = self.store.write(self.layers.index(unit), tensors, first)
        self.places.update({info.name: place for info, place in written.items()})


def _note_few_tokens(expert_tokens: Sequence[int], note: Callable[[str], object]) -> None:
    """Say how many experts few tokens were routed to."""
    few = sum(tokens < FEW_TOKENS for tokens in expert_tokens)
    none = expert_tokens.count(0)
    if few:
        note(
            f"fewer than {FEW_TOKENS} tokens were routed to {few} of {len(expert_tokens)} experts, none to {none}: "
            "more texts may help"
        )


def _read_store(
    store: LayerStore, units: Mapping[str, LayerHessians], layers: Sequence[str]
) -> tuple[dict[str, TensorPlace], dict[str, list[Hessian]]]:
    """Where tensors that are rounded already lie, by name, and the Hessians that each layer still needs."""
    places: dict[str, TensorPlace] = {}
    pending: dict[str, list[Hessian]] = {}
    for unit, unit_hessians in units.items():
        missing = unit_hessians.hessians
        for path, tensors in store.read(layers.index(unit)).items():
            stored = [hessian for hessian in missing if not tensors.keys().isdisjoint(hessian.output_tensors)]
            signed = {weight.module: scheme.format.signed_scales for one in stored for weight, scheme in one.weights}
            scales = [(info, place) for info, place in tensors.items() if is_scale_tensor(info)]
            if tensors.keys() != {info for hessian in stored for info in hessian.output_tensors} or not all(
                has_sound_scales(path, place.offset, info, signed[info.name.rpartition(".")[0]])
                for info, place in scales
            ):
                raise damaged_file(path)
            places |= {info.name: place for info, place in tensors.items()}
            missing = [hessian for hessian in missing if hessian not in stored]
        if missing:
            pending[unit] = missing
    return places, pending


def _round_weights(hessian: Hessian, reader: Reader) -> Iterator[tuple[TensorInfo, Bytes]]:
    """Round all weights of a complete Hessian, which is freed; yield the tensors of each."""
    matrix = hessian.pop_matrix()
    if not torch.isfinite(matrix).all():
        raise SourceError(
            f"the inputs of {hessian.weights[0][0].source.name} are not finite on these texts",
            "the model overflows there: look at its weights with openquant diagnose",
        )
    # Only the last is kept, which is as large as the Hessian: fused layers are smoothed by the same factors.
    propagations: dict[bytes, ErrorPropagation] = {}
    shared_absmax = _shared_absmax(hessian, reader)
    for weight, scheme in hessian.weights:
        columns = weight.transform.columns if weight.transform is not None else None
        key = b"" if columns is None else columns.tobytes()
        if key not in propagations:
            propagations = {key: _smoothed_propagation(matrix, columns)}
        factors = np.float32(1) if columns is None else columns
        importance = (matrix.diagonal().cpu().numpy() / factors / factors).astype(np.float32)
        yield from _round_weight(weight, scheme, propagations[key], shared_absmax, importance, reader)


def _smoothed_propagation(matrix: Tensor, columns: Floats | None) -> ErrorPropagation:
    """Error propagation of inputs that are divided by smoothing factors [in], which multiply the weight's columns."""
    if columns is None:
        return find_error_propagation(matrix)
    factors = torch.from_numpy(columns).to(matrix.device)
    return find_error_propagation(matrix / factors / factors[:, None])


def _shared_absmax(hessian: Hessian, reader: Reader) -> Floats:
    """float32 [1, 1], the absmax of all weights that share a per-tensor or global scale; 0 if none do."""
    absmax_of_all = np.zeros((1, 1), np.float32)
    for weight, scheme in hessian.weights:
        if scheme.format.shares_scale:
            for bits in reader.rows(weight, 1):
                largest = absmax(bits, weight.dtype, (None, None))
                require_in_range(weight, largest, scheme, reader.where)
                absmax_of_all = np.maximum(absmax_of_all, largest)
    return absmax_of_all


def _round_weight(
    weight: Weight,
    scheme: Scheme,
    propagation: ErrorPropagation,
    shared_absmax: Floats,
    importance: Floats,
    reader: Reader,
) -> Iterator[tuple[TensorInfo, Bytes]]:
    """Round one weight; yield its codes, scales, global scale and zero points, as its format has them.

    `importance`, float32 [in], are the sums of squares of the inputs, by which the search for scales weights errors.
    """
    fmt, loops, device = scheme.format, reader.loops, propagation.coefficients.device
    global_scale = choose_shared_scale(fmt, shared_absmax) if fmt.global_scale is not None else None
    codes: list[Any] = []
    scales: list[Any] = []
    zero_points: list[Any] = []
    for bits in _row_blocks(reader, weight, fmt.height):
        group_absmax = shared_absmax
        if not fmt.shared:
            group_absmax = loops.absmax(bits, weight.dtype, fmt.group)
            require_in_range(weight, group_absmax, scheme, reader.where)
        scale, zero_point = choose_scales(scheme, bits, weight.dtype, group_absmax, global_scale, importance, loops)
        if not fmt.shared or not scales:
            scales.append(np.asarray(fmt.encode_scales(scale, global_scale)))
        if zero_point is not None:
            zero_points.append(pack_words(fmt.number.encode(zero_point), fmt.number))
        values = torch.from_numpy(to_float32(bits, weight.dtype)).to(device)
        shift = None if zero_point is None else torch.from_numpy(zero_point).to(device)
        quotients = round_columns(values, torch.from_numpy(scale).to(device), propagation, fmt, shift)
        block = fmt.number.encode(quotients.cpu().numpy())
        stored = np.empty((len(block), fmt.number.nbytes(block.shape[1])), np.uint8)
        pack(block, stored, fmt.number)
        codes.append(stored)
    arrays = {fmt.codes: codes, fmt.scale.name: scales}
    if fmt.zero_point is not None:
        arrays[fmt.zero_point] = zero_points
    if fmt.global_scale is not None:
        arrays[fmt.global_scale.name] = [global_scale]
    for info in rounded_tensors(weight, scheme):
        blocks = arrays[info.name.removeprefix(f"{weight.module}.")]
        yield info, np.concatenate([block.reshape(-1).view(np.uint8) for block in blocks])


def _row_blocks(reader: Reader, weight: Weight, multiple: int) -> Iterator[Bits]:
    """The weight in blocks of rows that are rounded together, each but the last a multiple of `multiple` rows.

    The blocks share one buffer: each is valid until the next.
    """
    rows, cols = weight.shape
    step = min(rows, max(1, WEIGHTS_AT_ONCE // (cols * multiple)) * multiple)
    block = np.empty((step, cols), BITS_TYPE[weight.dtype])
    filled = 0
    for bits in reader.rows(weight, multiple):
        while len(bits):
            count = min(len(bits), step - filled)
            block[filled : filled + count] = bits[:count]
            bits, filled = bits[count:], filled + count
            if filled == step:
                yield block
                filled = 0
    if filled:
        yield block[:filled]

"""GPTQ's pass: runs texts through a model layer by layer, and rounds each layer with its Hessians.

Once all texts are through a decoder layer, its Hessians are complete. Its weights are then read, rounded and written to
a file of the layer store, from which the conversion copies them, and the Hessians are freed.

    round_layers(TextRun(StreamedModel(checkpoint), corpus), plan, store, kernels, max_hessian_bytes=1 << 30)
    store.places()["model.layers.0.mlp.up_proj.weight_packed"]      # TensorPlace(.../5f70-000-0.safetensors, 1152)

Hessians of a model's layers, accumulated while texts run through it.

The Hessian of a layer is H = X'X, where the rows of X [tokens, in] are the inputs of all tokens that go into the layer.
Fused layers have the same inputs and share one. A routed expert has two: over the inputs of gate and up, and over those
of down, of the tokens that are routed to it. All Hessians of a decoder layer may not fit in memory. They are then
accumulated in parts: the first while texts run through the layer, the others from inputs that a file has kept.

    units = find_hessians(model, plan)             # {"model.layers.0": LayerHessians(..), ..}
    observer = HessianObserver(model.model, units.values())
    first, *others = in_memory_parts(units["model.layers.0"].hessians, max_bytes)
    ...                                            # set `accumulating` of the first part and `kept` of the others, and
                                                   # run texts with observer.on()
    first[0].pop_matrix()                          # float32 [in, in]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..distributed import Ranks
from ..errors import SourceError
from ..files.shardfile import Bytes, LayerStore, TensorInfo
from ..formats import kernels
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..plan.decisions import rounded_tensors
from ..plan.plan import Plan
from ..registry.architecture import ModuleRules
from ..streaming.interleaved import ExpertWeights, ModuleHooks, TextRun
from ..streaming.memory import BLOCK, ROWS, hessian_nbytes
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile, view_bytes
from ..threads import in_parallel
from ..weights.reading import Reader, require_in_range
from ..weights.statistics import InputStatistics
from ..weights.weight import Weight, WeightTransform
from .gptq import ErrorPropagation, Tuning, damp, find_error_propagation, round_columns
from .observers import InputRecorder, RunningStatistics, find_hook_points, require_finite_inputs
from .sensitivity import Sensitivities

# Weights that are rounded at a time, whole rows of a layer.
WEIGHTS_AT_ONCE = 1 << 24

# Chooses how weights of a decoder layer are smoothed, by module, from the statistics of its inputs.
ChooseTransforms = Callable[[tuple[InputStatistics, ...], Set[str], Reader], Mapping[str, WeightTransform]]


def round_layers(
    run: TextRun,
    plan: Plan,
    store: LayerStore,
    loops: kernels.Loops,
    max_hessian_bytes: int,
    ranks: Ranks | None = None,
    sensitivities: Sensitivities | None = None,
    recorder: InputRecorder | None = None,
    choose_transforms: ChooseTransforms | None = None,
) -> None:
    """Round the weights that a plan gives to GPTQ: Linears of decoder layers, and experts whose inputs are observed.

    Args:
        run: the calibration texts and the source model, whose weights are loaded one decoder layer at a time.
        plan: says which weights are rounded, and in which schemes.
        store: where rounded layers are written; a layer that is there already is not rounded again.
        loops: the module that chooses scales and rounds: formats.kernels (numpy) or formats.compiled (numba).
        max_hessian_bytes: bytes of memory for Hessians and the tensors rounded with them; a layer whose Hessians take
            more has its inputs in a file beside the store, and one part of them in memory at a time.
        ranks: the processes that share the layers: rank 1 of 4 rounds layers 1, 5, 9, ...; None for this one alone.
        sensitivities: how much tokens count in the Hessians of Linears, by group (`hessian_groups`), and outputs in the
            errors; all count alike where nothing is said of them, as of experts. None if no scale and code moves.
        recorder: records the inputs of all layers while texts run, for a calibration; None if there is one.
        choose_transforms: chooses how the weights of a layer are smoothed before they are rounded, from what the
            recorder says of it; None if the plan says how.

    Raises:
        SourceError: a weight cannot be read, activations are not finite, a file of the store is damaged, or the pass
            checkpoint cannot be continued.
        OpenQuantError: transformers' model fails on these weights or texts.
        PlanError: a weight is too large for its scheme.
        OutputError: a layer's file cannot be written, or hidden states do not fit on disk.
    """
    model = run.model
    layers = model.layers
    ranks = ranks or Ranks()
    units = find_hessians(model, plan)
    units = {unit: found for unit, found in units.items() if layers.index(unit) % ranks.size == ranks.rank}
    pending = _missing_hessians(store, units, layers)
    if not pending and recorder is None:
        return
    if run.checkpoint is not None and run.checkpoint.done & pending.keys():
        raise SourceError(
            f"{run.checkpoint.path} continues after layers whose files are gone from {store.path}",
            "remove it to begin again",
        )
    tokens, outputs = sensitivities or Sensitivities({}, {})
    for name, group in hessian_groups(units.values(), plan.entry).items():
        hessian = units[model.unit_of(name)].linears[name]
        hessian.sensitivity = tokens.get(group)
        hessian.outputs = {module: outputs[linear] for module, linear in hessian.linears.items() if linear in outputs}
    if sensitivities is not None:
        alike = torch.eye(BLOCK)
        for hessian in itertools.chain.from_iterable(found.hessians for found in units.values()):
            for weight, _ in hessian.weights:
                hessian.outputs.setdefault(weight.module, alike.expand(-(-weight.shape[0] // BLOCK), -1, -1))
    observer = HessianObserver(model.model, units.values())
    reader = Reader(plan.decoded.where, model.shard_provider.path, loops=loops)
    parts = {unit: in_memory_parts(hessians, max_hessian_bytes) for unit, hessians in pending.items()}

    with OffloadFile(store.path.parent, 0) as file:
        documents = range(len(run.corpus.documents))
        kept = KeptInputs(file, model.device)
        for unit, (first, *others) in parts.items():
            for hessian in [*units[unit].moe_hessians, *first]:
                hessian.accumulating = True
            for hessian in itertools.chain(*others):
                hessian.kept = kept

        def after_unit(unit: str, group: int, *_: object) -> None:
            """Round a layer after the last text."""
            if recorder is not None:
                recorder.check(unit)
            if unit not in parts or group + 1 < len(documents):
                return

            hessians = units[unit].hessians
            if choose_transforms is not None and recorder is not None:
                modules = {weight.module for hessian in hessians for weight, _ in hessian.weights}
                transforms = choose_transforms(recorder.inputs(unit), modules, reader)
                for hessian in hessians:
                    hessian.weights = [
                        (weight._replace(transform=transforms.get(weight.module)), scheme)
                        for weight, scheme in hessian.weights
                    ]
            for part in parts[unit]:
                for hessian in part:
                    kept.move_to(hessian)
                tensors = [tensor for hessian in part for tensor in _round_weights(hessian, reader)]
                store.write(layers.index(unit), tensors, hessians.index(part[0]))
                # Those of the next part take their place in memory.
                del tensors

            kept.clear()
            for hessian in units[unit].moe_hessians:
                hessian.accumulating = False
                hessian.upper = None

        if recorder is None:
            run.run(documents, model.logits, [observer], list(parts)[-1], after_unit)
        else:
            run.run(documents, recorder.compute, [recorder.observer, observer], layers[-1], after_unit)


def _missing_hessians(
    store: LayerStore, units: Mapping[str, LayerHessians], layers: Sequence[str]
) -> dict[str, list[Hessian]]:
    """The Hessians that each layer still needs, without those whose weights an earlier run has rounded."""
    pending: dict[str, list[Hessian]] = {}
    for unit, unit_hessians in units.items():
        stored = store.stored(layers.index(unit))
        missing = [hessian for hessian in unit_hessians.hessians if stored.isdisjoint(hessian.output_tensors)]
        if missing:
            pending[unit] = missing
    return pending


def _round_weights(hessian: Hessian, reader: Reader) -> Iterator[tuple[TensorInfo, Bytes]]:
    """Round all weights of a complete Hessian, which is freed; yield the tensors of each."""
    matrix = hessian.pop_matrix()
    require_finite_inputs(matrix, hessian.weights[0][0].source.name)

    # Only the last is kept, which is larger than the Hessian: fused layers are smoothed by the same factors.
    inputs_of: dict[bytes, _Inputs] = {}
    absmax_of_all = shared_absmax(hessian.weights, reader)

    for weight, scheme in hessian.weights:
        columns = weight.transform.columns if weight.transform is not None else None
        key = b"" if columns is None else columns.tobytes()
        if key not in inputs_of:
            inputs_of.clear()
            inputs_of[key] = _smoothed_inputs(matrix, columns, is_tuned=bool(hessian.outputs))
        outputs = hessian.outputs.get(weight.module)
        if outputs is not None and weight.transform is not None and weight.transform.rows is not None:
            outputs = scaled_outputs(outputs, weight.transform.rows)
        yield from _round_weight(weight, scheme, inputs_of[key], outputs, absmax_of_all, reader)


def scaled_outputs(outputs: Tensor, rows: Floats) -> Tensor:
    """Return the curvature over outputs that are multiplied by factors.

    Args:
        outputs: float32 [blocks, BLOCK, BLOCK].
        rows: float32 [out].
    """
    factors = torch.ones(outputs.shape[:2])
    factors.view(-1)[: len(rows)] = torch.from_numpy(rows)
    return outputs / factors[:, :, None] / factors[:, None]


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What a Hessian says of the inputs of weights.

    Attributes:
        importance: float32 [in], sums of squares of the inputs, by which the search for scales weights errors.
        propagation: how errors of columns go to later ones.
        hessian: float32 [in, in], damped, its diagonal's mean one; on the CPU. None if no weight is tuned with it.
    """

    importance: Floats
    propagation: ErrorPropagation
    hessian: Tensor | None


def _smoothed_inputs(matrix: Tensor, columns: Floats | None, is_tuned: bool) -> _Inputs:
    """The inputs of a Hessian, divided by smoothing factors [in], which multiply the weight's columns."""
    if columns is not None:
        factors = torch.from_numpy(columns).to(matrix.device)
        matrix = matrix / factors / factors[:, None]

    importance = matrix.diagonal().cpu().numpy().astype(np.float32)
    propagation = find_error_propagation(matrix)
    if not is_tuned:
        return _Inputs(importance, propagation, None)
    damped = matrix.to("cpu", copy=True)
    damp(damped)
    damped /= damped.diagonal().mean()
    return _Inputs(importance, propagation, damped)


def shared_absmax(weights: Iterable[tuple[Weight, Scheme]], reader: Reader) -> Floats:
    """Return the absmax of all weights that share a per-tensor or global scale, float32 [1, 1]; 0 if none do.

    Args:
        weights: the weights, each with its scheme.
        reader: reads them.

    Raises:
        SourceError: a weight cannot be read, or holds NaN or infinity.
        PlanError: a weight is too large for its scheme.
    """
    largest = np.zeros((1, 1), np.float32)
    for weight, scheme in weights:
        if scheme.format.shares_scale:
            for bits in reader.rows(weight, 1):
                of_rows = reader.loops.absmax(bits, weight.dtype, (None, None))
                require_in_range(weight, of_rows, scheme, reader.where)
                largest = np.maximum(largest, of_rows)
    return largest


def _round_weight(
    weight: Weight, scheme: Scheme, inputs: _Inputs, outputs: Tensor | None, absmax_of_all: Floats, reader: Reader
) -> Iterator[tuple[TensorInfo, Bytes]]:
    """Round one weight; yield its codes, scales, global scale and zero points, as its format has them."""
    fmt = scheme.format
    global_scale = kernels.choose_shared_scale(fmt, absmax_of_all) if fmt.global_scale is not None else None
    rounder = _RowRounder(weight, scheme, inputs, outputs, absmax_of_all, global_scale, reader)

    arrays: dict[str, list[Any]] = {}
    first = 0
    for bits in _row_blocks(reader, weight, rounder.rows_together):
        for found in rounder.round_in_threads(bits, first):
            for name, array in found.items():
                arrays.setdefault(name, []).append(array)
        first += len(bits)

    if fmt.shared:
        # All rows have found the same.
        del arrays[fmt.scale.name][1:]
    if fmt.global_scale is not None:
        arrays[fmt.global_scale.name] = [global_scale]

    for info in rounded_tensors(weight, scheme):
        blocks = arrays[info.name.removeprefix(f"{weight.module}.")]
        yield info, np.concatenate([block.reshape(-1).view(np.uint8) for block in blocks])


@dataclass(frozen=True, eq=False)
class _RowRounder:
    """Rounds rows of a weight, which do not depend on each other.

    Attributes:
        weight: the weight.
        scheme: its scheme.
        inputs: what the Hessian says.
        outputs: the curvature over all outputs, float32 [blocks, BLOCK, BLOCK], with which rows are tuned; None if they
            are not.
        absmax_of_all: the largest absolute weight of all that share a scale, float32 [1, 1].
        global_scale: float32 of one element; None if the format has none.
        reader: has the loops that round.
    """

    weight: Weight
    scheme: Scheme
    inputs: _Inputs
    outputs: Tensor | None
    absmax_of_all: Floats
    global_scale: Floats | None
    reader: Reader

    @property
    def rows_together(self) -> int:
        """How many rows are rounded together at least; more are a multiple of it."""
        height = self.scheme.format.height
        return height if self.outputs is None else math.lcm(height, BLOCK)

    def round_in_threads(self, bits: kernels.Bits, first: int) -> Iterator[dict[str, Any]]:
        """Round rows in as many threads as torch has; yield what `round` returns of each thread's, in order.

        On a GPU, and with numpy's loops, which keep the interpreter lock, it is a single one.
        """
        threads = torch.get_num_threads()
        if threads == 1 or self.reader.loops is kernels or self.inputs.propagation.coefficients.is_cuda:
            yield self.round(bits, first)
            return

        step = -(-len(bits) // (threads * self.rows_together)) * self.rows_together
        # Each works for itself.
        torch.set_num_threads(1)
        try:
            yield from in_parallel(
                lambda low: self.round(bits[low : low + step], first + low), range(0, len(bits), step), threads
            )
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def round(self, bits: kernels.Bits, first: int) -> dict[str, Any]:
        """Round rows of the weight.

        Args:
            bits: the rows, in the weight's dtype.
            first: number of the first of them.

        Returns:
            Their codes, scales and zero points as they are stored, by the last part of the tensor's name.
        """
        weight, fmt, loops = self.weight, self.scheme.format, self.reader.loops
        absmax = self.absmax_of_all
        if not fmt.shared:
            absmax = loops.absmax(bits, weight.dtype, fmt.group)
            require_in_range(weight, absmax, self.scheme, self.reader.where)
        scale, zero_point = kernels.choose_scales(
            self.scheme, bits, weight.dtype, absmax, self.global_scale, self.inputs.importance, loops
        )

        values = torch.from_numpy(kernels.to_float32(bits, weight.dtype))
        quotients, scale = self._round(values, scale, zero_point, first)
        codes = fmt.number.encode(quotients)
        stored = np.empty((len(codes), fmt.number.nbytes(codes.shape[1])), np.uint8)
        kernels.pack(codes, stored, fmt.number)

        arrays = {fmt.codes: stored, fmt.scale.name: np.asarray(fmt.encode_scales(scale, self.global_scale))}
        if fmt.zero_point is not None and zero_point is not None:
            arrays[fmt.zero_point] = kernels.pack_words(fmt.number.encode(zero_point), fmt.number)
        return arrays

    def _round(self, values: Tensor, scale: Floats, zero_point: Floats | None, first: int) -> tuple[Floats, Floats]:
        """The values of the codes of rows, and the scales, which move if the rows are tuned."""
        fmt, inputs = self.scheme.format, self.inputs
        device = inputs.propagation.coefficients.device
        scales = torch.from_numpy(scale)
        shift = None if zero_point is None else torch.from_numpy(zero_point)

        on_device = None if shift is None else shift.to(device)
        loops = self.reader.loops
        quotients = round_columns(values.to(device), scales.to(device), inputs.propagation, fmt, on_device, loops).cpu()
        if self.outputs is None or inputs.hessian is None:
            return quotients.numpy(), scale

        outputs = self.outputs[first // BLOCK : first // BLOCK + -(-len(values) // BLOCK)]
        tuning = Tuning(values, quotients, scales, shift, inputs.hessian, outputs, fmt, self.global_scale)
        quotients, scales = tuning.run()
        return quotients.numpy(), scales.numpy()


def _row_blocks(reader: Reader, weight: Weight, multiple: int) -> Iterator[kernels.Bits]:
    """The weight in blocks of rows that are rounded together, each but the last a multiple of `multiple` rows.

    The blocks share one buffer: each is valid until the next.
    """
    rows, cols = weight.shape
    step = min(rows, max(1, WEIGHTS_AT_ONCE // (cols * multiple)) * multiple)
    block = np.empty((step, cols), kernels.BITS_TYPE[weight.dtype])
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


# Rows of the upper triangle that one product computes: a Hessian is symmetric, its lower triangle is copied at the end.
PANEL = 256
# How many tokens the Hessian of the MoE layer counts for in that of each expert's gate and up: it decides how experts
# that few tokens are routed to are rounded.
MOE_TOKENS = 64


@dataclass(eq=False)
class Hessian:
    """The Hessian of layers that have the same inputs, as far as it is accumulated.

    Attributes:
        width: number of inputs.
        weights: the weights that GPTQ rounds with it, each with its scheme.
        moe_hessian: for gate and up of an expert: the Hessian over all tokens of its MoE layer. None for down and for
            dense layers.
        linears: names of the Linears that hold one of the weights and no other, by the weight's module.
        sensitivity: float32 [documents, tokens], by which squared inputs are weighed; None if all tokens count alike.
        outputs: the curvature over a weight's outputs, float32 [blocks, BLOCK, BLOCK], by its module; none if weights
            are not tuned.
        accumulating: whether `add` adds.
        kept: where `add` keeps inputs of a Hessian that accumulates later; None if it does not.
        tokens: number of tokens added.
        upper: float32 [in, in], whose upper triangle, with the diagonal, is the sum; None before the first token.
        waiting: inputs that are not in the sum yet, each float32 [tokens, in], together fewer than ROWS tokens.
    """

    width: int
    weights: list[tuple[Weight, Scheme]] = field(default_factory=list)
    moe_hessian: Hessian | None = None
    linears: dict[str, str] = field(default_factory=dict)
    sensitivity: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    accumulating: bool = False
    kept: KeptInputs | None = None
    tokens: int = 0
    upper: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def output_tensors(self) -> Iterator[TensorInfo]:
        """Codes, scales and zero points that rounding its weights makes."""
        for weight, scheme in self.weights:
            yield from rounded_tensors(weight, scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, of inputs that wait, and of its output tensors."""
        return hessian_nbytes(self.width) + sum(info.nbytes for info in self.output_tensors)

    @property
    def wants_inputs(self) -> bool:
        """Whether `add` does anything with inputs."""
        return self.accumulating or self.kept is not None

    def add(self, inputs: Tensor, document: int = 0) -> None:
        """Add inputs [..., in] of any float dtype if it is accumulating, or keep them.

        With a sensitivity they are those of all tokens of a document, in order, with equally many rows for each.
        """
        if not self.wants_inputs or not inputs.numel():
            return
        if self.kept is not None:
            self.kept.keep(self, inputs, document)
            return

        tokens = inputs.reshape(-1, self.width)
        # What waits is a copy: the model may change its inputs, or move them to a file.
        tokens = tokens.to(torch.float32, copy=len(tokens) < ROWS)
        if self.sensitivity is not None:
            weights = self.sensitivity[document].to(tokens.device)
            # A Linear of several groups, as in DeepSeek-V4, has a row for each group.
            weights = weights.repeat_interleave(len(tokens) // len(weights))
            tokens = tokens * weights[:, None].sqrt()

        self.tokens += len(tokens)
        self.waiting.append(tokens)
        if sum(map(len, self.waiting)) >= ROWS:
            self.add_waiting_rows()

    def add_waiting_rows(self) -> None:
        """Add the rows that wait to the sum."""
        tokens = torch.cat(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        self.waiting.clear()
        if self.upper is None:
            self.upper = torch.zeros(self.width, self.width, device=tokens.device)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            self.upper[low:high, low:].addmm_(tokens[:, low:high].T, tokens[:, low:])

    def pop_matrix(self) -> Tensor:
        """Return the symmetric matrix, float32 [in, in], including the share of the MoE layer, and free it here."""
        for hessian in (self, self.moe_hessian):
            if hessian is not None and hessian.waiting:
                hessian.add_waiting_rows()
        matrix, self.upper, self.accumulating = self.upper, None, False
        if matrix is None:
            matrix = torch.zeros(self.width, self.width)
        if self.moe_hessian is not None and self.moe_hessian.upper is not None:
            upper = self.moe_hessian.upper
            matrix = matrix.to(upper.device).add_(upper, alpha=MOE_TOKENS / self.moe_hessian.tokens)
        for low in range(0, self.width, PANEL):
            high = min(low + PANEL, self.width)
            matrix[high:, low:high] = matrix[low:high, high:].T
        return matrix


class KeptInputs:
    """Inputs of a layer's later parts of Hessians. They wait in a file until the earlier parts are rounded.

    Args:
        file: where they are written; it has nothing else.
        device: where Hessians are.
    """

    def __init__(self, file: OffloadFile, device: str) -> None:
        self._file = file
        self._device = device
        # By Hessian, number of the document, offset in the file, shape and dtype of the inputs of each call.
        self._calls: dict[Hessian, list[tuple[int, int, torch.Size, torch.dtype]]] = {}

    def keep(self, hessian: Hessian, inputs: Tensor, document: int) -> None:
        """Write inputs [..., in] of a document.

        Raises:
            OutputError: the disk is full or fails.
        """
        offset = self._file.write(view_bytes(inputs.cpu().contiguous()))
        self._calls.setdefault(hessian, []).append((document, offset, inputs.shape, inputs.dtype))

    def move_to(self, hessian: Hessian) -> None:
        """Add all inputs that were kept of a Hessian to it, in their order; none if it accumulated them itself.

        Raises:
            OutputError: the disk fails.
        """
        if hessian.kept is None:
            return
        hessian.kept = None
        hessian.accumulating = True
        for document, offset, shape, dtype in self._calls.pop(hessian, ()):
            inputs = torch.empty(shape, dtype=dtype)
            self._file.read(view_bytes(inputs), offset)
            hessian.add(inputs.to(self._device), document)

    def clear(self) -> None:
        """Empty the file."""
        self._calls.clear()
        self._file.clear()


@dataclass(frozen=True, eq=False)
class ExpertHessians:
    """The Hessians of gate and up of an MoE layer's experts, or of down.

    Attributes:
        by_expert: Hessian of each expert, by its index.
        moe_hessian: the Hessian over all tokens before routing; None for down, whose inputs come sorted by expert.
    """

    by_expert: Mapping[int, Hessian]
    moe_hessian: Hessian | None


@dataclass(frozen=True, eq=False)
class LayerHessians:
    """All Hessians of one decoder layer.

    Attributes:
        linears: Hessian of each nn.Linear, by module name; fused layers have the same object.
        experts: Hessians of each module of stacked experts, by module name.
    """

    linears: dict[str, Hessian] = field(default_factory=dict)
    experts: dict[str, ExpertWeights[ExpertHessians]] = field(default_factory=dict)

    @property
    def _expert_hessians(self) -> list[ExpertHessians]:
        return [stack for points in self.experts.values() for stack in (points.first, points.down) if stack is not None]

    @property
    def hessians(self) -> list[Hessian]:
        """The Hessians that weights are rounded with, each once; without those of MoE layers."""
        experts = (hessian for stack in self._expert_hessians for hessian in stack.by_expert.values())
        return [hessian for hessian in dict.fromkeys([*self.linears.values(), *experts]) if hessian.weights]

    @property
    def moe_hessians(self) -> list[Hessian]:
        """The Hessians over all tokens of MoE layers."""
        return [stack.moe_hessian for stack in self._expert_hessians if stack.moe_hessian is not None]


def in_memory_parts(hessians: Sequence[Hessian], max_bytes: int) -> list[list[Hessian]]:
    """Divide Hessians into consecutive parts that fit in memory.

    Args:
        hessians: Hessians of one decoder layer, each with the weights that are rounded with it.
        max_bytes: bytes that the matrices and output tensors of a part may take; a larger Hessian is a part alone.

    Returns:
        The parts, in the order of `hessians`.
    """
    parts: list[list[Hessian]] = []
    nbytes = max_bytes
    for hessian in hessians:
        if nbytes + hessian.nbytes > max_bytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(hessian)
        nbytes += hessian.nbytes
    return parts


class HessianObserver(ModuleHooks[Hessian | ExpertHessians]):
    """Adds the inputs of layers to their Hessians while it is on.

    Args:
        model: the transformers model.
        units: Hessians of its decoder layers.
    """

    def __init__(self, model: nn.Module, units: Iterable[LayerHessians]) -> None:
        linears: dict[str, Hessian | ExpertHessians] = {}
        experts: dict[str, ExpertWeights[Hessian | ExpertHessians]] = {}
        for unit in units:
            linears.update(unit.linears)
            experts.update({name: ExpertWeights(points.first, points.down) for name, points in unit.experts.items()})
        super().__init__(model, linears, experts)

    def on_input(self, values: Tensor, into: Hessian | ExpertHessians, place: str) -> Tensor:
        """Add the inputs of a module to those of its Hessians that accumulate, and keep them for others.

        Args:
            values: the inputs, [..., in]; for down of stacked experts the rows are sorted by expert.
            into: the Hessian of a Linear, or those of a module of stacked experts.
            place: the module's name.

        Returns:
            `values`, unchanged.
        """
        if isinstance(into, Hessian):
            self._once(id(into), values, lambda: into.add(values, self.document))

        elif (routing := self._routed[place]) is not None:
            rows = values.reshape(-1, values.shape[-1])
            if into.moe_hessian is None:
                for expert, expert_rows in routing.split_sorted(rows):
                    if expert in into.by_expert:
                        into.by_expert[expert].add(expert_rows)
                return values

            into.moe_hessian.add(rows)
            for expert, hessian in into.by_expert.items():
                # Selecting an expert's rows takes time.
                if hessian.wants_inputs:
                    hessian.add(routing.rows_of(expert, rows))
        return values


def find_hessians(model: StreamedModel, plan: Plan) -> dict[str, LayerHessians]:
    """Find the Hessians that GPTQ needs for a plan, none of them accumulated yet.

    Args:
        model: the model that texts run through.
        plan: says which weights GPTQ rounds, and which layers are fused.

    Returns:
        The Hessians of each decoder layer that has any, by its full module name ("model.layers.0"), in the order in
        which layers are computed.
    """
    rounded: dict[str, list[tuple[Weight, Scheme]]] = {}
    for weight, scheme in plan.gptq_rounded:
        rounded.setdefault(weight.source.name, []).append((weight, scheme))
    units: dict[str, LayerHessians] = {}
    by_fused_group: dict[tuple[str, ...], Hessian] = {}
    linears, experts = find_hook_points(model)

    def hessian_of(weights: list[tuple[Weight, Scheme]], moe_hessian: Hessian | None = None) -> Hessian:
        """The Hessian of weights that have the same inputs, shared with the layers that they are fused with."""
        weight = weights[0][0]
        group = plan.decisions.fused.get(weight.module, (weight.module,))
        hessian = by_fused_group.setdefault(group, Hessian(weight.shape[1], moe_hessian=moe_hessian))
        hessian.weights += weights
        return hessian

    def expert_hessians(statistics: RunningStatistics | None, gate_up: bool) -> ExpertHessians | None:
        """The Hessians of one projection of all experts; None if GPTQ rounds none of its weights."""
        if statistics is None:
            return None
        weights: dict[int, list[tuple[Weight, Scheme]]] = {}
        for tensor in statistics.tensors:
            for weight, scheme in rounded.get(tensor, ()):
                if weight.shape[1] == statistics.width:
                    weights.setdefault(expert_index(weight, plan.entry), []).append((weight, scheme))
        if not weights:
            return None
        moe_hessian = Hessian(statistics.width) if gate_up else None
        return ExpertHessians(
            {expert: hessian_of(pairs, moe_hessian) for expert, pairs in weights.items()}, moe_hessian
        )

    for name, statistics in linears.items():
        weights = [pair for tensor in statistics.tensors for pair in rounded.get(tensor, ())]
        if weights and all(weight.shape[1] == statistics.width for weight, _ in weights):
            hessian = hessian_of(weights)
            units.setdefault(model.unit_of(name), LayerHessians()).linears[name] = hessian
            if len(weights) == 1:
                hessian.linears[weights[0][0].module] = name
    for name, points in experts.items():
        stacks = ExpertWeights(expert_hessians(points.first, gate_up=True), expert_hessians(points.down, gate_up=False))
        if stacks.first is not None or stacks.down is not None:
            units.setdefault(model.unit_of(name), LayerHessians()).experts[name] = stacks
    # Fused layers that share a scale are rounded together: all of them, or none.
    for group, hessian in by_fused_group.items():
        modules = {weight.module for weight, _ in hessian.weights}
        hessian.weights = [
            pair for pair in hessian.weights if not pair[1].format.shares_scale or modules.issuperset(group)
        ]
    return {unit: units[unit] for unit in sorted(units, key=model.layers.index)}


def hessian_groups(units: Iterable[LayerHessians], entry: ModuleRules) -> dict[str, str]:
    """Return the Linears that compute all tokens, by module name, each with the first of those that share its Hessian.

    Args:
        units: the Hessians of decoder layers.
        entry: rules of the architecture, which name its modules of experts.
    """
    groups: dict[str, str] = {}
    for unit in units:
        firsts: dict[Hessian, str] = {}
        for name, hessian in unit.linears.items():
            if not any(entry.experts(weight.module) for weight, _ in hessian.weights):
                groups[name] = firsts.setdefault(hessian, name)
    return groups


def expert_index(weight: Weight, entry: ModuleRules) -> int:
    """Return the index of the expert that a weight belongs to: 7 for "model.layers.0.mlp.experts.7.up_proj".

    Args:
        weight: a weight of an expert.
        entry: rules of the architecture, which name its modules of experts.
    """
    if weight.expert >= 0:
        return weight.expert
    path = entry.experts(weight.module)
    assert path is not None
    return int(weight.module.removeprefix(f"{path}.").partition(".")[0])

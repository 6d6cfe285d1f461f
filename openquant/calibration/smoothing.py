"""Smoothing: where inputs of layers can be divided and the layers' columns multiplied, and what that changes.

The output activations of a smooth_layer are the input activations of its balance_layers. Dividing the former by a scale
and multiplying the columns of the latter by it leaves the model's output as it is, while rounding loses less when no
input is far larger than the others.

    [mapping, *_] = find_smoothing_mappings(MODELS["Qwen3ForCausalLM"], {tensor.module: tensor.shape, ..}, text_config)
    mapping.smooth_layer        # "model.layers.0.input_layernorm"
    mapping.balance_layers      # ("model.layers.0.self_attn.q_proj", ..)

SmoothQuant chooses scales so: INT8 activations have a scale per token, so a few inputs that are far larger than the
others leave these a coarse grid. A channel's scale is max|x|^a / max|w|^(1 - a), where x are the inputs of the
balance_layers and w the columns that read the channel (Xiao et al., SmoothQuant, equation 4). awq.py chooses others.

Scales are powers of two, so that norms, biases and routers in bfloat16 change exactly. Where a model adds one to a
norm's weight, the rounded norm is not divided exactly; the columns are then multiplied by what it was divided by.

    scale = smoothquant_scale(mapping, plan, reader, calibration, 0.5)     # float32 [channels], or why there is none
    parts = [apply_smoothing(mapping, scale, plan, reader)]
    transforms = combine_transforms(parts, plan)       # for PlanOptions(transforms=..)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import SourceError
from ..files.shardfile import TensorInfo
from ..formats.kernels import BITS_TYPE, absmax, from_float32, to_float32
from ..formats.numbers import Floats
from ..patterns import compile_any, compile_pattern
from ..plan.architecture import text_config
from ..plan.plan import Plan, has_fp8_cache
from ..registry.architecture import Architecture, ParallelSplit, SmoothingRule, absolute_patterns
from ..weights.reading import Reader
from ..weights.statistics import Calibration, InputStatistics
from ..weights.weight import Weight, WeightTransform, WeightTransforms

# Scales are 2**-MOST to 2**MOST.
MOST = 8
_UNKNOWN_STORAGE = "smoothing cannot change the dtype or shape of a tensor"


class UsableMappings(NamedTuple):
    """The smoothing mappings of a plan.

    Attributes:
        mappings: those that can be used, in the order of the checkpoint's shards.
        unused: smooth_layers of those that cannot, by the reason.
    """

    mappings: tuple[SmoothingMapping, ...]
    unused: dict[str, list[str]]


class MappingTransforms(NamedTuple):
    """What one smoothing mapping changes.

    Attributes:
        mapping: the mapping.
        scale: float32 [channels], by which the smooth_layer's outputs are divided.
        tensors: new bytes of the norm, or of the smooth_layer's bias, by tensor name, in their dtype and shape.
    """

    mapping: SmoothingMapping
    scale: Floats
    tensors: Mapping[str, bytes]


def usable_mappings(plan: Plan) -> UsableMappings:
    """Find the smoothing mappings of a plan that can be used.

    The smooth_layer must be a norm, or a projection that the plan quantizes. The balance_layers must be quantized, or
    be kept by a rule, as routers are, and not by --ignore. Weights that are quantized in the source cannot change.
    Mappings through values are not usable with an FP8 KV cache: its scales belong to the values as they were.

    Args:
        plan: what becomes of each tensor, without smoothing.

    Returns:
        The usable mappings, in the order of the checkpoint's shards; and the smooth_layers of the others, by
        the reason.
    """
    headers, decisions = plan.decoded, plan.decisions
    shapes = {info.module: info.shape for info in headers.tensors.values() if info.name != info.module and info.shape}
    shapes |= {module: weight.shape for module, weight in plan.layers.items()}
    passthrough = {item.tensor.module: item for item in decisions.passthrough}
    cached = [rule.pattern for rule in plan.model.cached] if has_fp8_cache(plan) else []
    cached_values = compile_any(absolute_patterns(plan.model, cached))
    usable: list[SmoothingMapping] = []
    unused: dict[str, list[str]] = {}

    def problem(module: str, mapping: SmoothingMapping) -> str | None:
        """Why a module cannot be changed; None if it can."""
        weight, item = plan.layers.get(module), passthrough.get(module)
        if weight is not None:
            decision = decisions.of(module)
            if decision.scheme is None:
                return f"a layer is not quantized ({decision.why})"
            return "a layer is quantized in the source" if weight.format else None
        if item is None or item.weight is not None or item.tensor.dtype not in BITS_TYPE:
            return _UNKNOWN_STORAGE
        if module == mapping.smooth_layer:
            return None if len(item.tensor.shape) == 1 else f"a layer is not quantized ({item.why})"
        return f"a layer is not quantized ({item.why})" if item.why.startswith("--") else None

    for mapping in find_smoothing_mappings(plan.model, shapes, text_config(headers, plan.model)):
        modules, vectors = (mapping.smooth_layer, *mapping.balance_layers), _vectors(mapping.smooth_layer, plan)
        reason = next(filter(None, (problem(module, mapping) for module in modules)), None)
        if not all(_is_plain(headers.tensors[name], shapes[mapping.smooth_layer]) for name in vectors):
            reason = _UNKNOWN_STORAGE
        if cached_values.fullmatch(mapping.smooth_layer):
            reason = "the KV cache is in FP8"
        if reason is not None:
            unused.setdefault(reason, []).append(mapping.smooth_layer)
        else:
            usable.append(mapping)
    shards = {shard: number for number, shard in enumerate(headers.shards)}
    usable.sort(key=lambda mapping: min(shards[shard] for shard in mapping_shards(mapping, plan)))
    return UsableMappings(tuple(usable), unused)


def mapping_shards(mapping: SmoothingMapping, plan: Plan) -> list[str]:
    """Find the shards that hold the tensors of a mapping.

    Args:
        mapping: a smooth_layer and its balance_layers.
        plan: the plan that the mapping was found for.

    Returns:
        File names of shards of the source, sorted.
    """
    names = _vectors(mapping.smooth_layer, plan)
    for module in (mapping.smooth_layer, *mapping.balance_layers):
        weight = plan.layers.get(module)
        names.append(weight.source.name if weight is not None else f"{module}.weight")
    return sorted({plan.decoded.where[name].shard for name in names})


def _is_plain(info: TensorInfo, shape: tuple[int, ...]) -> bool:
    """Whether a norm or a bias is in a float dtype, with an element for each row of its module."""
    return info.dtype in BITS_TYPE and info.shape == shape[:1]


def _vectors(module: str, plan: Plan) -> list[str]:
    """The names of a module's weight and bias, as far as they exist and have fewer than two axes."""
    names = (f"{module}.{last}" for last in ("weight", "bias"))
    return [name for name in names if name in plan.decoded.tensors and len(plan.decoded.tensors[name].shape) < 2]


def statistics_of(weight: Weight, calibration: Calibration) -> InputStatistics | None:
    """Return the input statistics of a weight's layer, with mean squares.

    Args:
        weight: the weight [out, in], by whose tensor name they are found.
        calibration: statistics of the inputs of layers.

    Returns:
        absmax, mean magnitude and mean square of each input, float32 [in], and the number of tokens; None if no token
        went into the layer, or the calibration does not have it.

    Raises:
        SourceError: the calibration has no mean squares, or another number of inputs.
    """
    inputs = calibration.of(weight.source.name)
    if inputs is not None and (inputs.square is None or inputs.square.shape != (weight.shape[1],)):
        raise SourceError(
            f"the calibration has no mean squares of {weight.shape[1]} inputs of {weight.source.name}",
            "make it again: openquant calibrate MODEL -o FILE",
        )
    return inputs


def nearest_powers_of_two(ideal: Floats) -> Floats:
    """Divide a scale by its median over the channels that change, and round it to powers of two.

    Args:
        ideal: float32 [channels]; channels that are 0, negative or not finite stay as they are.

    Returns:
        float32 [channels], powers of two from 2**-8 to 2**8 (2**MOST); 1 for channels that stay.
    """
    changed = np.isfinite(ideal) & (ideal > 0)
    exponents = np.zeros(len(ideal), np.float64)
    if changed.any():
        logs = np.log2(ideal[changed].astype(np.float64))
        exponents[changed] = np.clip(np.rint(logs - np.median(logs)), -MOST, MOST)
    return np.exp2(exponents).astype(np.float32)


def without_zero_rows(mapping: SmoothingMapping, scale: Floats, plan: Plan, reader: Reader) -> Floats:
    """Return `scale` with 1 for channels whose row in the smooth_layer is all zeros.

    `verify` recognizes scales by the sizes of rows in the output, which says nothing of a row of zeros.

    Args:
        mapping: a smooth_layer and its balance_layers.
        scale: float32 [channels], by which the outputs of the smooth_layer are divided.
        plan: the plan that the mapping was found for.
        reader: reads weights and tensors of the source checkpoint.

    Returns:
        float32 [channels]; `scale` itself if the smooth_layer is a norm.

    Raises:
        SourceError: the smooth_layer's weight cannot be read.
    """
    weight = plan.layers.get(mapping.smooth_layer)
    if weight is None:
        return scale
    nonzero = np.concatenate([to_float32(bits, weight.dtype).any(axis=1) for bits in reader.rows(weight, 1)])
    return np.where(nonzero[mapping.first_row : mapping.first_row + mapping.channels], scale, np.float32(1))


def apply_smoothing(mapping: SmoothingMapping, scale: Floats, plan: Plan, reader: Reader) -> MappingTransforms:
    """Divide a smooth_layer's bias, and its weight if it is a norm, by a scale. `combine_transforms` does the rest.

    Args:
        mapping: a smooth_layer and its balance_layers.
        scale: float32 [channels] of powers of two.
        plan: the plan that the mapping was found for.
        reader: reads weights and tensors of the source checkpoint.

    Returns:
        The mapping; the scale by which columns of balance_layers are to be multiplied, float32 [channels], which for a
        rounded norm may differ a little from `scale`; and the new bytes of the norm and bias by full tensor name, {}
        for a projection without bias.

    Raises:
        SourceError: the norm or the bias cannot be read.
    """
    tensors: dict[str, bytes] = {}
    rows = slice(mapping.first_row, mapping.first_row + mapping.channels)
    for name in _vectors(mapping.smooth_layer, plan):
        info = plan.decoded.tensors[name]
        values = read_vector(info, reader)
        if name.endswith(".weight"):
            divided, scale = divide_norm(values, scale, mapping.offset, info.dtype)
        else:
            divided = values.copy()
            with np.errstate(over="ignore"):
                divided[rows] /= scale
        tensors[name] = from_float32(divided, info.dtype).tobytes()
    return MappingTransforms(mapping, scale, tensors)


def read_vector(info: TensorInfo, reader: Reader) -> Floats:
    """Read a norm or a bias.

    Args:
        info: name, dtype ("BF16", "F16" or "F32") and shape [n] of the tensor.
        reader: reads weights and tensors of the source checkpoint.

    Returns:
        float32 [n].

    Raises:
        SourceError: it cannot be read.
    """
    return to_float32(reader.read_bytes(info).view(BITS_TYPE[info.dtype]), info.dtype)


def divide_norm(weight: Floats, scale: Floats, offset: float, dtype: str) -> tuple[Floats, Floats]:
    """Divide a norm's weight by a scale, and round it to its dtype.

    Elements stay as they are if their factor, before or after, is 0 or not finite.

    Args:
        weight: float32 [channels].
        scale: float32 [channels], the divisors.
        offset: what the model adds to the weight: its factors are weight + offset.
        dtype: dtype of the checkpoint: "BF16", "F16" or "F32".

    Returns:
        The new weight, float32 [channels]; and by what the norm's outputs are then divided, float32 [channels].
    """
    factors = weight.astype(np.float64) + offset
    with np.errstate(over="ignore"):
        bits = from_float32((factors / scale - offset).astype(np.float32), dtype)
    rounded = to_float32(bits, dtype)
    new_factors = rounded.astype(np.float64) + offset
    unchanged = (factors == 0) | (new_factors == 0) | ~np.isfinite(new_factors)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(unchanged, 1.0, factors / new_factors).astype(np.float32)
    return np.where(unchanged, weight, rounded), ratio


def combine_transforms(parts: Iterable[MappingTransforms], plan: Plan) -> WeightTransforms:
    """Combine what several mappings change: columns of balance_layers are multiplied, rows of smooth_layers divided.

    Args:
        parts: scale and changed tensors of each mapping, as `apply_smoothing` returns them.
        plan: the plan that the mappings were found for.

    Returns:
        Factors of rows and columns of weights by full module name, and new bytes of norms and biases by tensor name,
        without notes and title. Weights may share one array of factors.
    """
    columns: dict[str, Floats] = {}
    rows: dict[str, Floats] = {}
    tensors: dict[str, bytes] = {}
    for mapping, scale, new_tensors in parts:
        tensors |= new_tensors
        # One array for all balance_layers: a layer may have hundreds of experts.
        factors = mapping.column_factors(scale)
        for module in mapping.balance_layers:
            columns[module] = columns[module] * factors if module in columns else factors
        weight = plan.layers.get(mapping.smooth_layer)
        if weight is not None:
            divisors = rows.setdefault(mapping.smooth_layer, np.ones(weight.shape[0], np.float32))
            divisors[mapping.first_row : mapping.first_row + mapping.channels] *= scale
    modules = dict.fromkeys([*columns, *rows])
    return WeightTransforms(
        {module: WeightTransform(rows.get(module), columns.get(module)) for module in modules}, tensors
    )


@dataclass(frozen=True)
class SmoothingMapping:
    """A smooth_layer, and all layers whose inputs are its outputs.

    Attributes:
        smooth_layer: module name of a norm, or of a projection.
        balance_layers: module names of the layers that read its outputs; their columns are multiplied.
        channels: number of outputs that a scale divides.
        first_row: row of the projection, or element of the norm, that makes the first channel.
        offset: what the model adds to the norm's weight before it multiplies by it.
        head_dim: channels of a head; all channels if balance_layers read each channel once.
        repeats: how many heads of the balance_layers' inputs are copies of each head (grouped-query attention).
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    channels: int
    first_row: int
    offset: float
    head_dim: int
    repeats: int

    def column_factors(self, scale: Floats) -> Floats:
        """Return the factors [in] of the balance_layers' columns for a scale [channels]."""
        return np.repeat(scale.reshape(-1, self.head_dim), self.repeats, axis=0).reshape(-1)

    def channel_max(self, values: Floats) -> Floats:
        """Return the largest of the balance_layers' column values [in] for each channel, [channels]."""
        largest: Floats = values.reshape(-1, self.repeats, self.head_dim).max(axis=1).reshape(-1)
        return largest


def find_smoothing_mappings(
    model: Architecture, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> tuple[SmoothingMapping, ...]:
    """Find all smoothing mappings of a checkpoint, except those whose modules are missing or have unexpected shapes.

    Args:
        model: the architecture's entry in the registry, which has the rules.
        shapes: shape of each module's weight by full module name, embeddings and norms included.
        config: the language model's part of the parsed config.json.

    Returns:
        Each smooth_layer with its balance_layers, by full module name, and number of channels.
    """
    mappings = []
    for rule in model.smoothing:
        [pattern] = absolute_patterns(model, [rule.smooth_layer])
        smooth_layer = compile_pattern(pattern)
        # By the parts of a name that `*` stands for, as many as the smooth_layer's pattern has.
        balance_layers: dict[tuple[str, ...], list[str]] = {}
        expressions = [compile_pattern(pattern) for pattern in absolute_patterns(model, rule.balance_layers)]
        for module in shapes:
            for expression in expressions:
                if match := expression.fullmatch(module):
                    balance_layers.setdefault(match.groups()[: smooth_layer.groups], []).append(module)
        for module in shapes:
            match = smooth_layer.fullmatch(module)
            if match and (readers := balance_layers.get(match.groups())):
                mapping = _make_mapping(model, rule, module, tuple(readers), shapes, config)
                mappings += [mapping] if mapping else []
    return tuple(mappings)


def _make_mapping(
    model: Architecture,
    rule: SmoothingRule,
    smooth_layer: str,
    balance_layers: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> SmoothingMapping | None:
    """The mapping of a rule's modules; None if their shapes do not fit."""
    rows, width = shapes[smooth_layer][0], shapes[balance_layers[0]][-1]
    if any(len(shapes[layer]) != 2 or shapes[layer][1] != width for layer in balance_layers):
        return None
    channels = rows
    if rule.last:
        splits = (
            split
            for split in model.splits
            if compile_any(absolute_patterns(model, [split.pattern])).fullmatch(smooth_layer)
        )
        share = _last_part(next(splits), config)
        if share is None or rows % share[1]:
            return None
        channels = rows // share[1] * share[0]
    head_dim, repeats = channels, 1
    if rule.heads is not None:
        heads = config.get(rule.heads) or config.get("num_attention_heads")
        if type(heads) is not int or heads < 1 or channels % heads or width % channels:
            return None
        head_dim, repeats = channels // heads, width // channels
    if channels * repeats != width:
        return None
    return SmoothingMapping(smooth_layer, balance_layers, channels, rows - channels, rule.offset, head_dim, repeats)


def _last_part(split: ParallelSplit, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Relative rows of the last part of a fused tensor, and of all its parts; None if config.json does not say."""
    sizes = [1 if part is None else config.get(part) for part in split.parts]
    if any(type(size) is not int or size < 1 for size in sizes):
        return None
    parts = [size for size in sizes if size is not None]
    return parts[-1], sum(parts)


class _BalanceLayer(NamedTuple):
    """One balance_layer of a mapping.

    Attributes:
        weight: its weight [out, in].
        inputs: its input statistics.
        column_absmax: float32 [in], largest magnitude of each column.
        column_energy: float64 [in], sum of squares of each column.
        row_absmax_squares: sum of squares of the largest magnitudes of all rows.
    """

    weight: Weight
    inputs: InputStatistics
    column_absmax: Floats
    column_energy: np.ndarray[tuple[int], np.dtype[np.float64]]
    row_absmax_squares: float

    def error(self, factors: Floats, row_absmax_squares: float) -> float:
        """Estimate the squared error of the layer's outputs for one token, times 12 and 127 squared.

        A weight is off by up to half a step of its row, which is the row's absmax / 127; an input by up to half a step
        of its token, which is taken to be the absmax of all inputs / 127.

        Args:
            factors: float32 [in], by which columns are multiplied and inputs divided.
            row_absmax_squares: as the attribute, once columns are multiplied.
        """
        assert self.inputs.square is not None
        squares = np.square(factors, dtype=np.float64)
        absmax = float((self.inputs.absmax / factors).max())
        weight_error = row_absmax_squares * float((self.inputs.square / squares).sum())
        return weight_error + absmax**2 * float((self.column_energy * squares).sum())


def smoothquant_scale(
    mapping: SmoothingMapping, plan: Plan, reader: Reader, calibration: Calibration, exponent: float
) -> Floats | str:
    """Choose SmoothQuant's scale for a mapping.

    Args:
        mapping: one of `usable_mappings(plan)`.
        plan: what becomes of each tensor, without smoothing.
        reader: reads weights and tensors of the source checkpoint.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.
        exponent: migration strength, 0 to 1: how much of the difficulty moves from activations to weights.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; or a text for a note
        that says why the mapping is not used.

    Raises:
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
    """
    layers = []
    for module in mapping.balance_layers:
        # Unquantized ones, such as a router, lose nothing.
        if (weight := plan.layers.get(module)) is None:
            continue
        inputs = statistics_of(weight, calibration)
        scheme = plan.decisions.of(module).scheme
        if scheme is None or scheme.name != "int8":
            return "a layer is stored in another scheme"
        if inputs is None:
            return "the calibration has no inputs of a layer"
        layers.append(_read_layer(weight, inputs, reader))
    if not layers:
        return "no balance layer is quantized"
    input_absmax = mapping.channel_max(np.max([layer.inputs.absmax for layer in layers], axis=0))
    weight_absmax = mapping.channel_max(np.max([layer.column_absmax for layer in layers], axis=0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ideal = input_absmax**exponent / weight_absmax ** (1 - exponent)
    ideal[(input_absmax == 0) | (weight_absmax == 0)] = 0
    scale = without_zero_rows(mapping, nearest_powers_of_two(ideal), plan, reader)
    if (scale == 1).all():
        return "all scales would be 1"
    factors = mapping.column_factors(scale)
    before = sum(layer.error(np.ones_like(factors), layer.row_absmax_squares) for layer in layers)
    after = sum(layer.error(factors, _row_absmax_squares(layer.weight, factors, reader)) for layer in layers)
    # False for NaN too.
    return scale if after < before else "the layers' estimated error would not be lower"


def _read_layer(weight: Weight, inputs: InputStatistics, reader: Reader) -> _BalanceLayer:
    column_absmax, column_energy = np.zeros(weight.shape[1], np.float32), np.zeros(weight.shape[1], np.float64)
    row_absmax_squares = 0.0
    for bits in reader.rows(weight, 1):
        magnitudes = np.abs(to_float32(bits, weight.dtype))
        np.maximum(column_absmax, magnitudes.max(axis=0), out=column_absmax)
        row_absmax_squares += float(np.square(magnitudes.max(axis=1), dtype=np.float64).sum())
        # The conversion refuses weights that are too large.
        with np.errstate(over="ignore"):
            column_energy += np.square(magnitudes, out=magnitudes).sum(axis=0)
    return _BalanceLayer(weight, inputs, column_absmax, column_energy, row_absmax_squares)


def _row_absmax_squares(weight: Weight, factors: Floats, reader: Reader) -> float:
    """The sum of squares of the rows' largest magnitudes, once columns are multiplied by factors [in]."""
    total = 0.0
    for bits in reader.rows(weight._replace(transform=WeightTransform(columns=factors)), 1):
        row_absmax = absmax(bits, "F32", (1, None))
        total += float(np.square(row_absmax, dtype=np.float64).sum())
    return total

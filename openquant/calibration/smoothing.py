"""Smoothing: where inputs of layers can be divided and the layers' columns multiplied, and what that changes.

The output activations of a smooth_layer are the input activations of its balance_layers. Dividing the former by a scale
and multiplying the columns of the latter by it leaves the model's output as it is, while rounding loses less when no
input is far larger than the others.

    [mapping, *_] = find_smoothing_mappings(MODELS["Qwen3ForCausalLM"], {tensor.module: tensor.shape, ..}, text_config)
    mapping.smooth_layer        # "model.layers.0.input_layernorm"
    mapping.balance_layers      # ("model.layers.0.self_attn.q_proj", ..)

SmoothQuant chooses scales so: INT8 activations have a scale per token, so a few inputs that are far larger than the
others leave these a coarse grid. A channel's scale is max|x|^a / max|w|^(1 - a), where x are the inputs of the
balance_layers and w the columns that read the channel (Xiao et al., SmoothQuant, equation 4).

Scales are powers of two, so that norms, biases and routers in bfloat16 change exactly. Where a model adds one to a
norm's weight, the rounded norm is not divided exactly; the columns are then multiplied by what it was divided by.

    scale = smoothquant_scale(mapping, reader, plan, calibration, 0.5)     # float32 [channels], or why there is none
    parts = [apply_smoothing(mapping, scale, plan, reader)]
    transforms = combine_transforms(parts, plan)       # for PlanOptions(transforms=..)

AWQ: scales that give finer steps to the weights of the most important input channels.

A column that is multiplied by a scale has finer steps than the others of its group (Lin et al., "AWQ: Activation-aware
Weight Quantization", arXiv 2306.00978). Scales grow with the mean magnitude of the inputs and shrink with that of the
weights, as in AutoAWQ (quantize/quantizer.py:399-408). Of twenty exponents the one with the lowest estimated error is
chosen. Scales are powers of two here, which costs nothing on twins of examples/tiny-qwen3 with outliers of 11.3 and 16
times.

    scale = awq_scale(mapping, reader, plan, calibration)     # float32 [channels], or why there is none
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from ..files.shardfile import TensorInfo
from ..formats.kernels import BITS_TYPE, absmax, choose_scales, from_float32, to_float32
from ..formats.numbers import Floats
from ..formats.schemes import Scheme
from ..patterns import compile_any
from ..plan.architecture import text_config
from ..plan.plan import Plan, has_fp8_cache
from ..registry.architecture import Architecture, ParallelSplit, SmoothingRule
from ..weights.reading import Reader, memory_of
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
        chosen: the scale that was asked for, as `scale_text` writes it.
    """

    mapping: SmoothingMapping
    scale: Floats
    tensors: Mapping[str, bytes]
    chosen: str


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
    cached_values = compile_any(map(plan.model.absolute, cached))
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

    Nothing goes through such a channel, so that no scale is better than another.

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
    chosen = scale_text(scale)
    rows = slice(mapping.first_row, mapping.first_row + mapping.channels)
    for name in _vectors(mapping.smooth_layer, plan):
        info = plan.decoded.tensors[name]
        values = to_float32(reader.read_bytes(info).view(BITS_TYPE[info.dtype]), info.dtype)
        if name.endswith(".weight"):
            divided, scale = divide_norm(values, scale, mapping.offset, info.dtype)
        else:
            divided = values.copy()
            with np.errstate(over="ignore"):
                divided[rows] /= scale
        tensors[name] = from_float32(divided, info.dtype).tobytes()
    return MappingTransforms(mapping, scale, tensors, chosen)


# The letter of the scale 1; those before and after it are of smaller and larger powers of two.
_ONE = ord("i")


def scale_text(scale: Floats) -> str:
    """Write a scale as a journal has it: a letter for each channel, "hij" for 0.5, 1 and 2.

    Args:
        scale: float32 [channels] of powers of two.
    """
    return (np.log2(scale) + _ONE).astype(np.uint8).tobytes().decode()


def repeat_smoothing(chosen: Mapping[str, str], plan: Plan) -> WeightTransforms:
    """Make the transforms of an earlier run anew.

    Args:
        chosen: its scale for each smooth_layer, as `scale_text` writes it. What does not fit the plan is left out.
        plan: the plan of its source, without smoothing.

    Raises:
        SourceError: a norm or a bias cannot be read.
    """
    reader = Reader(plan.decoded.where, plan.decoded.root.joinpath)
    parts = []
    for mapping in usable_mappings(plan).mappings:
        letters = np.frombuffer(chosen.get(mapping.smooth_layer, "").encode(), np.uint8)
        if len(letters) == mapping.channels:
            scale = np.exp2(letters.astype(np.float32) - _ONE)
            parts.append(apply_smoothing(mapping, scale, plan, reader))
    return combine_transforms(parts, plan)


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

    scales: dict[str, str] = {}

    for mapping, scale, new_tensors, chosen in parts:
        scales[mapping.smooth_layer] = chosen
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
        {module: WeightTransform(rows.get(module), columns.get(module)) for module in modules}, tensors, scales=scales
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
        smooth_layer = model.compile(rule.smooth_layer)

        # By the parts of a name that `*` stands for, as many as the smooth_layer's pattern has.
        balance_layers: dict[tuple[str, ...], list[str]] = {}
        expressions = list(map(model.compile, rule.balance_layers))

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
        splits = (split for split in model.splits if model.compile(split.pattern).fullmatch(smooth_layer))
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
    mapping: SmoothingMapping, reader: Reader, plan: Plan, calibration: Calibration, exponent: float
) -> Floats | str:
    """Choose SmoothQuant's scale for a mapping.

    Args:
        mapping: one of `usable_mappings(plan)`.
        reader: reads weights and tensors of the source checkpoint.
        plan: what becomes of each tensor, without smoothing.
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


# Of the inputs in a scale: with 0 it is made of the weights alone, with 1 it would be of the inputs alone.
EXPONENTS = tuple(number / 20 for number in range(20))
# Rows that are sampled of a layer, and of all balance_layers of a mapping, such as a hundred experts. On
# examples/tiny-qwen3 all rows choose the same scales as these; with 64 rows answers are 1 % farther off.
ROWS, ALL_ROWS = 256, 4096


@dataclass(frozen=True)
class SampledRows:
    """Rows that represent a balance_layer.

    Attributes:
        rows: float32 [n, in].
        square: float32 [in], mean square of each input.
        scheme: an integer scheme in groups along rows, in which the layer is stored.
        share: number of the layer's rows that each of these stands for.
    """

    rows: Floats
    square: Floats
    scheme: Scheme
    share: float

    @property
    def group_size(self) -> int:
        """How many columns share a scale."""
        return self.scheme.format.group[1] or self.rows.shape[1]

    def output_error(self, factors: Floats) -> float:
        """Estimate the squared error of the layer's outputs, as if its inputs were uncorrelated.

        Args:
            factors: float32 [in], by which columns are multiplied and inputs divided.

        Returns:
            The sum over all outputs of the layer, mean over tokens. Infinite or NaN if a weight is, or becomes so.
        """
        rows = self.rows * factors
        scale, zero_point = choose_scales(self.scheme.unsearched, rows.view(np.uint32), "F32")
        groups = rows.reshape(-1, self.group_size)
        groups /= scale.reshape(-1, 1)
        if zero_point is not None:
            groups += zero_point.reshape(-1, 1)
        groups -= self.scheme.format.number.nearest(groups)
        groups *= scale.reshape(-1, 1)
        noise = np.square(groups, out=groups).reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return self.share * float(noise @ (self.square / np.square(factors, dtype=np.float64)))

    def relative_magnitudes(self) -> npt.NDArray[np.float64]:
        """Sum |w| / absmax of its group over the rows of the layer, for each column, float64 [in]."""
        groups = np.abs(self.rows).reshape(-1, self.group_size)
        # The smallest normal number keeps groups of zeros at 0.
        groups /= np.maximum(groups.max(axis=1, keepdims=True), np.float32(2.0**-126))
        sums: npt.NDArray[np.float64] = groups.reshape(self.rows.shape).sum(axis=0, dtype=np.float64)
        return sums * self.share


def awq_scale(mapping: SmoothingMapping, reader: Reader, plan: Plan, calibration: Calibration) -> Floats | str:
    """Choose AWQ's scale for a mapping.

    Args:
        mapping: one of `usable_mappings(plan)`.
        reader: reads weights and tensors of the source checkpoint.
        plan: what becomes of each tensor, without smoothing.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; or a text for a note
        that says why the mapping is not used.

    Raises:
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
    """
    weights = [plan.layers[module] for module in mapping.balance_layers if module in plan.layers]
    if not weights:
        return "no balance layer is quantized"

    max_rows = rows_per_layer(len(weights))
    samples, means = [], []

    for weight in weights:
        scheme, inputs = plan.decisions.of(weight.module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.group_size is None:
            return "a layer is stored in another scheme"
        if inputs is None or inputs.square is None:
            return "the calibration has no inputs of a layer"
        rows = sample_rows(weight, reader, max_rows)
        samples.append(SampledRows(rows, inputs.square, scheme, weight.shape[0] / len(rows)))
        means.append(inputs.mean)

    # Weights that are, or become, infinite or NaN have no lower error, so that no scale is chosen for them.
    with np.errstate(over="ignore", invalid="ignore"):
        scale = search_scale(mapping, samples, np.mean(means, axis=0))

    if scale is None:
        return "the layers' estimated error would not be lower"
    return without_zero_rows(mapping, scale, plan, reader)


def rows_per_layer(layers: int) -> int:
    """Return the largest number of rows to sample of each of a mapping's balance_layers.

    Args:
        layers: number of balance_layers.
    """
    return max(16, min(ROWS, ALL_ROWS // max(1, layers)))


def search_memory(plan: Plan) -> int:
    """Estimate the bytes that one thread needs to choose AWQ's scale for the largest usable mapping.

    Args:
        plan: what becomes of each tensor, without smoothing.

    Returns:
        The most bytes at a time; 0 if no mapping is usable.
    """
    largest = 0
    for mapping in usable_mappings(plan).mappings:
        weights = [plan.layers[module] for module in mapping.balance_layers if module in plan.layers]
        sizes = [4 * min(weight.shape[0], rows_per_layer(len(weights))) * weight.shape[1] for weight in weights]
        # The samples of all layers, six arrays for one while scales are tried, and what is read of a weight at a time.
        read = max((sum(memory_of(weight, 1)) for weight in weights), default=0)
        largest = max(largest, sum(sizes) + 6 * max(sizes, default=0) + 4 * read)
    return largest


def sample_rows(weight: Weight, reader: Reader, max_rows: int) -> Floats:
    """Read evenly spaced rows of a weight.

    Args:
        weight: the weight [out, in].
        reader: reads it from the source checkpoint.
        max_rows: largest number of rows to return; all rows if the weight has no more.

    Returns:
        float32 [n, in], decoded if the weight is quantized, and smoothed if it has a transform.

    Raises:
        SourceError: it cannot be read.
    """
    rows, cols = weight.shape
    indices = np.arange(min(rows, max_rows)) * rows // min(rows, max_rows)
    sample, low = np.empty((len(indices), cols), np.float32), 0
    for bits in reader.rows(weight, 1):
        in_piece = (indices >= low) & (indices < low + len(bits))
        sample[in_piece] = to_float32(np.ascontiguousarray(bits[indices[in_piece] - low]), weight.dtype)
        low += len(bits)
    return sample


def search_scale(mapping: SmoothingMapping, samples: Sequence[SampledRows], mean: Floats) -> Floats | None:
    """Search the exponent of AWQ whose scale has the lowest estimated error of the outputs of balance_layers.

    Args:
        mapping: a smooth_layer and its balance_layers.
        samples: for each balance_layer that is quantized: sampled rows float32 [n, in], mean squares of inputs, and
            scheme.
        mean: float32 [in], mean magnitude of each input of the balance_layers.

    Returns:
        float32 [channels] of powers of two, by which the outputs of the smooth_layer are divided; None if no scale is
        better than none.
    """

    def channel_means(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = values.reshape(-1, mapping.repeats, mapping.head_dim).mean(
            axis=1, dtype=np.float64
        )
        return means.reshape(-1)

    rows = sum(len(sample.rows) * sample.share for sample in samples)
    inputs = channel_means(mean)
    weights = channel_means(np.sum([sample.relative_magnitudes() for sample in samples], axis=0) / rows)
    best, least_error = None, sum(sample.output_error(np.ones_like(mean)) for sample in samples)
    tried = {np.ones(mapping.channels, np.float32).tobytes()}
    for exponent in EXPONENTS:
        ideal = inputs**exponent / (weights ** (1 - exponent) + 1e-4)
        # Channels that were zero in all texts stay as they are.
        scale = nearest_powers_of_two(np.where(inputs > 0, ideal, 0).astype(np.float32))
        if scale.tobytes() not in tried:
            tried.add(scale.tobytes())
            error = sum(sample.output_error(mapping.column_factors(scale)) for sample in samples)
            best, least_error = (scale, error) if error < least_error else (best, least_error)
    return best


def with_importance(transforms: WeightTransforms, plan: Plan, calibration: Calibration) -> WeightTransforms:
    """Add the importance of columns, which weighs errors in the search for scales, to the transforms of integer layers.

    It is the mean square of the column's inputs after smoothing. Queries and keys that are fused with a smooth_layer of
    values are left out, as in AWQ's clipping: attention multiplies their outputs with each other.

    Args:
        transforms: what smoothing changes, with the column factors of each layer.
        plan: what becomes of each tensor; its layers of integers in groups are given an importance.
        calibration: statistics of the inputs of layers, with mean squares.

    Returns:
        A copy of `transforms` with `importance`, float32 [in], for those of these layers that tokens went into, and one
        more note.

    Raises:
        SourceError: the calibration has no mean squares of a layer's inputs, or another number of inputs.
    """
    excluded, weights = _queries_and_keys(plan), dict(transforms.weights)
    for module, weight in plan.layers.items():
        scheme, inputs = plan.decisions.of(module).scheme, statistics_of(weight, calibration)
        if scheme is None or scheme.group_size is None or module in excluded:
            continue
        if inputs is None or inputs.square is None:
            continue

        transform = weights.get(module, WeightTransform())
        factors = np.ones(1) if transform.columns is None else transform.columns.astype(np.float64)
        square = np.minimum(inputs.square / factors**2, np.finfo(np.float32).max)
        weights[module] = replace(transform, importance=square.astype(np.float32))

    weighed = replace(transforms, weights=weights)
    note = f"the search for scales of {weighed.weighed} layers weighs errors by the mean squares of inputs"
    return replace(weighed, notes=(*transforms.notes, note))


def _queries_and_keys(plan: Plan) -> set[str]:
    """Modules that are fused with values: the smooth_layers whose rule says how many heads they have."""
    values = compile_any(plan.model.absolute(rule.smooth_layer) for rule in plan.model.smoothing if rule.heads)
    fused_groups = plan.entry.fused_groups(plan.layers)
    return {
        module
        for value in plan.layers
        if values.fullmatch(value)
        for module in fused_groups.get(value, ())
        if module != value
    }

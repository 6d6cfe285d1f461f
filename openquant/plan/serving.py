"""The memory that GPUs need to serve a plan's source and output, or a checkpoint: weights and KV cache.

How much a layer caches for a token follows from its projections' shapes. Which layers have sliding windows, and what
ranks divide, follows from config.json and the registry. What neither says is not guessed: then token counts are None,
and `unknown` says why.

Scales that do not follow from weights are here too: those of the FP8 KV cache, and of activations as a calibration
observed them. An output has scales for all layers that have a cache of their own, as the registry says, because
transformers leaves missing ones uninitialized (compressed-tensors).

    find_cached_attentions(["model.layers.0.self_attn.k_proj"], entry, config)    # {0: "model.layers.0.self_attn"}
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.model_files import short_repr
from ..files.shardfile import TensorInfo
from ..formats.format import FLOATS
from ..formats.numbers import E4M3, FLAG, SCALES, cache_scales, scale_for
from ..formats.schemes import Scheme
from ..models import config_value
from ..patterns import MAX_DIGITS, compile_pattern, template
from ..registry.architecture import MTP_LAYER, Architecture, CachedRows, ModuleRules, RecurrentState
from ..registry.parts import HEADS
from ..version import SGLANG
from ..weights.statistics import Calibration, placeholder_calibration
from ..weights.weight import Weight
from .architecture import fused_parts, mtp_layer_finder, text_config
from .decisions import Decisions, Item, PassthroughTensor, PlanOptions, tokens_of
from .layout import PlanLine

if TYPE_CHECKING:
    from .plan import Plan

# GPU memory in units of 10^9 bytes, which is at most what such a GPU has.
GPU_GB = (24, 48, 80, 96, 141, 192)
GPUS = (1, 2, 4, 8)
# vLLM config/cache.py:102, gpu_memory_utilization.
UTILIZATION = 0.92
# Assumed bytes of it on each GPU for activations, CUDA graphs and libraries.
OVERHEAD = 2 * 10**9
# With less context than this a model does not count as served.
FEWEST_TOKENS = 8192
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Config keys.
LAYERS = "num_hidden_layers"
TYPES = "layer_types"
SHARED = "num_kv_shared_layers"
LENGTH = "max_position_embeddings"
WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class CachedLayers:
    """The cache of all decoder layers that have the same size, window and heads.

    Attributes:
        bf16: bytes of a token in a bfloat16 cache, summed over the layers.
        fp8: bytes of a token in an FP8 cache, summed over the layers.
        window: how many tokens are cached at most; None for all.
        heads: number of heads that ranks divide; 1 if every rank caches everything, None if it is not known.
    """

    bf16: int
    fp8: int
    window: int | None
    heads: int | None

    def row_bytes(self, fp8: bool) -> int:
        """Return the bytes that a token takes."""
        if fp8:
            return self.fp8
        return self.bf16


@final
@dataclass(frozen=True)
class SequenceMemory:
    """The memory of an engine's caches.

    Attributes:
        layers: the cache of each token.
        state: bytes of a sequence of any length (recurrent states), which ranks divide.
        length: the longest sequence in tokens that config.json allows; None if it does not say.
    """

    layers: tuple[CachedLayers, ...]
    state: int
    length: int | None

    def sequence(self, tokens: int, fp8: bool, gpus: int = 1) -> int:
        """Return the bytes of one sequence on each GPU.

        Args:
            tokens: length of the sequence.
            fp8: whether the cache is FP8 rather than bfloat16.
            gpus: number of tensor-parallel ranks; 1 if the heads of some layers are not known.
        """
        total = self.state // gpus
        for layers in self.layers:
            nbytes = layers.row_bytes(fp8) * min(tokens, layers.window or tokens)
            assert layers.heads or gpus == 1, "not known how to divide"
            total += nbytes // min(gpus, layers.heads or 1)
        return total

    def divides(self, gpus: int) -> bool:
        """Whether it is known how so many tensor-parallel ranks divide the cache."""
        return gpus == 1 or all(layers.heads is not None for layers in self.layers)

    def per_token(self, fp8: bool) -> int:
        """Return the bytes that one more token of a long sequence takes on a single GPU; full windows do not grow."""
        return sum(layers.row_bytes(fp8) for layers in self.layers if layers.window is None)

    def per_sequence(self, fp8: bool) -> int:
        """Return the bytes that a long sequence takes on a single GPU besides: recurrent states, and full windows."""
        windows = (layers.row_bytes(fp8) * layers.window for layers in self.layers if layers.window)
        return self.state + sum(windows)

    def tokens(self, room: int, fp8: bool, gpus: int) -> int:
        """Return how many tokens fit, in sequences as long as the model allows, or in one shorter sequence.

        Args:
            room: bytes on each GPU.
            fp8: whether the cache is FP8 rather than bfloat16.
            gpus: number of tensor-parallel ranks; 1 if the heads of some layers are not known.

        Returns:
            The number of tokens; 0 if none fits, or caches take no memory.
        """
        if self.length is not None:
            whole = self.sequence(self.length, fp8, gpus)
            if whole == 0:
                return 0
            if whole <= room:
                return room * self.length // whole
        return self.longest(room, fp8, gpus)

    def longest(self, room: int, fp8: bool, gpus: int) -> int:
        """Return the length in tokens of the longest sequence that fits and that the model allows.

        Args:
            room: bytes on each GPU.
            fp8: whether the cache is FP8 rather than bfloat16.
            gpus: number of tensor-parallel ranks; 1 if the heads of some layers are not known.
        """
        low = 0
        high = self.length or room
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence(middle, fp8, gpus) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def at_once(self, tokens: int, context: int, fp8: bool, gpus: int) -> int:
        """Return how many sequences of a length fit where so many `tokens` do."""
        length = min(tokens, self.length or tokens)
        room = self.sequence(length, fp8, gpus) * tokens // max(1, length)
        return room // max(1, self.sequence(context, fp8, gpus))


@dataclass(frozen=True)
class LoadedWeights:
    """Bytes of the weights that engines load, without MTP layers.

    Attributes:
        divided: what tensor-parallel ranks divide.
        copied: what each rank has whole.
    """

    divided: int
    copied: int

    def room(self, memory: int, gpus: int) -> int:
        """Return the bytes that are left for KV cache on each GPU; below zero if the weights do not fit.

        Args:
            memory: bytes of each GPU.
            gpus: number of tensor-parallel ranks.
        """
        return int(memory * UTILIZATION) - OVERHEAD - self.divided // gpus - self.copied


@dataclass(frozen=True)
class Fit:
    """How many GPUs of one size a checkpoint needs, and the tokens of all sequences together that they then hold.

    Attributes:
        gpu_gb: memory of each GPU in 10^9 bytes.
        gpus: the fewest GPUs that serve the checkpoint; None if 8 are too few, or it does not divide.
        tokens_bf16: tokens that fit into a bfloat16 cache, those of all sequences together; None if that is not known.
        tokens_fp8: likewise for an FP8 cache; None if that is not known.
    """

    gpu_gb: int
    gpus: int | None
    tokens_bf16: int | None
    tokens_fp8: int | None


@dataclass(frozen=True)
class Serving:
    """What it takes to serve a checkpoint.

    Attributes:
        weights_bytes: size of the weights that engines load, without MTP layers.
        cache: memory of the caches; None if it is not known.
        unknown: why it is not known; None if it is.
        fits: one for each GPU size.
    """

    weights_bytes: int
    cache: SequenceMemory | None
    unknown: str | None
    fits: tuple[Fit, ...]

    @property
    def fewest(self) -> Fit | None:
        """The fewest and smallest GPUs that serve it; None if 8 are too few, or it does not divide."""
        fits = [fit for fit in self.fits if fit.gpus is not None]
        return min(fits, key=lambda fit: (fit.gpus, fit.gpu_gb), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them; those of an unknown cache are None."""

        def by_cache(size: Callable[[bool], int]) -> dict[str, int]:
            return {"bf16": size(False), "fp8": size(True)}

        return {
            "weights_bytes": self.weights_bytes,
            "kv_bytes_per_token": self.cache and by_cache(self.cache.per_token),
            "kv_bytes_per_sequence": self.cache and by_cache(self.cache.per_sequence),
            "unknown": self.unknown,
            "fits": [asdict(fit) for fit in self.fits],
        }


def serving_to_json(source: Serving, output: Serving) -> dict[str, Any]:
    """Return both as `--json` prints them; docs/serving.md explains the keys.

    Args:
        source: what it takes to serve the source.
        output: what it takes to serve the output.

    Returns:
        Figures of both ("source", "output"), the part of a GPU's memory that engines use ("gpu_memory_utilization"),
        and bytes on each GPU for everything but weights and caches ("overhead_bytes_per_gpu").
    """
    return {
        "gpu_memory_utilization": UTILIZATION,
        "overhead_bytes_per_gpu": OVERHEAD,
        "source": source.to_json(),
        "output": output.to_json(),
    }


def estimate_serving(plan: Plan, parallel: Mapping[int, str | None], output: bool) -> Serving:
    """Compute what it takes to serve a plan's output, or its source.

    Args:
        plan: the plan.
        parallel: tensor-parallel sizes in ascending order, each with the reason for which it cannot serve it, if any.
        output: True for the output, False for the source.

    Returns:
        Bytes of the weights, memory of the caches, and for each GPU size how many GPUs it needs and the tokens that
        they hold.
    """
    weights = loaded_weights(plan, output)
    try:
        cache = find_cache(plan)
        unknown = None
    except UnknownCache as problem:
        cache = None
        unknown = str(problem)
    allowed = [size for size, problem in parallel.items() if problem is None and size in GPUS]
    fits = tuple(_fit(gpu_gb, weights, cache, allowed) for gpu_gb in GPU_GB)
    return Serving(weights.divided + weights.copied, cache, unknown, fits)


def loaded_weights(plan: Plan, output: bool) -> LoadedWeights:
    """Add up the weights that engines load.

    Args:
        plan: the plan.
        output: True for the output, False for the source.

    Returns:
        Bytes of what ranks divide, and of what each has whole.
    """
    nbytes = {True: 0, False: 0}
    for line in plan.lines:
        if line.why != MTP_LAYER:
            nbytes[plan.entry.rule(line.names[0]).divided] += line.bytes_after if output else line.bytes_before
    return LoadedWeights(nbytes[True], nbytes[False])


def _fit(gpu_gb: int, weights: LoadedWeights, cache: SequenceMemory | None, allowed: Iterable[int]) -> Fit:
    for gpus in allowed:
        room = weights.room(gpu_gb * 10**9, gpus)
        if room <= 0:
            continue
        if cache is None or not cache.divides(gpus):
            return Fit(gpu_gb, gpus, None, None)
        tokens = cache.tokens(room, False, gpus)
        if tokens >= min(FEWEST_TOKENS, cache.length or FEWEST_TOKENS):
            return Fit(gpu_gb, gpus, tokens, cache.tokens(room, True, gpus))
    return Fit(gpu_gb, None, None, None)


class UnknownCache(Exception):
    """The figures cannot be computed; the text says what is not known."""


def find_cache(plan: Plan) -> SequenceMemory:
    """Compute the memory of an engine's caches.

    Args:
        plan: the plan.

    Returns:
        Bytes of a token in each layer's KV cache, bytes of a sequence's recurrent states, and the longest sequence in
        tokens.

    Raises:
        UnknownCache: config.json or the registry does not say enough.
    """
    entry = plan.entry
    model = entry.model
    config = text_config(plan.decoded, model)
    layer_pattern = compile_pattern(f"{model.layers}.**")
    cached = [(model.compile(kind.pattern), kind) for kind in model.cached]
    states = [(model.compile(kind.pattern), kind) for kind in model.states]

    # For each layer and each kind of cached projections in it, the cached rows of each projection.
    row_counts: dict[tuple[int, CachedRows], list[int]] = {}

    state = 0

    for line in (line for line in plan.lines if line.why != MTP_LAYER and len(line.shape) > 1):
        first = line.names[0]
        for pattern, cached_rows in cached:
            if pattern.fullmatch(first):
                counts = _cached_rows(line, cached_rows, entry, config)
                for name in line.names:
                    key = _layer_number(layer_pattern.fullmatch(name)), cached_rows
                    row_counts.setdefault(key, []).extend(counts)
        for pattern, kind in states:
            if pattern.fullmatch(first):
                state += len(line.names) * _state_bytes(line, kind, config)

    if not row_counts and not state:
        raise UnknownCache(f"what {model.name} caches for a token")

    windows = _windows(entry, config)
    if model.rest and _count(config, LAYERS) != len({layer for layer, _ in row_counts}):
        raise UnknownCache("what some of its layers cache for a token")

    with_cache = layers_with_cache(config)

    times: Counter[CachedLayers] = Counter()
    for (layer, cached_rows), counts in row_counts.items():
        if with_cache is None or layer < with_cache:
            memory = _layer_memory(layer, cached_rows, counts, windows(layer), config)
            passes = _passes(cached_rows, config)
            if cached_rows.later_window and passes > 1:
                times[memory] += 1
                times[replace(memory, window=_window(config, cached_rows.later_window))] += passes - 1
            else:
                times[memory] += passes

    layers = (
        CachedLayers(memory.bf16 * count, memory.fp8 * count, memory.window, memory.heads)
        for memory, count in times.items()
    )

    return SequenceMemory(tuple(layers), state, _count(config, LENGTH))


def _layer_number(match: re.Match[str] | None) -> int:
    if match is None or not match[1].isdecimal() or len(match[1]) > MAX_DIGITS:
        raise UnknownCache("which layer is which")
    return int(match[1])


def layers_with_cache(config: Mapping[str, Any]) -> int | None:
    """Return how many decoder layers have a KV cache of their own.

    Those are the first ones; later layers may read the cache of earlier ones.

    Args:
        config: the language model's part of config.json.

    Returns:
        The number of layers; None if config.json does not say.
    """
    count = _count(config, LAYERS)
    return count and count - (_count(config, SHARED) or 0)


def _count(config: Mapping[str, Any], key: str | None) -> int | None:
    """A positive count from config.json; None if it is absent or implausible."""
    value = config_value(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**12:
        return None
    return value


def _cached_rows(line: PlanLine, cached: CachedRows, entry: ModuleRules, config: Mapping[str, Any]) -> list[int]:
    """How many rows of a projection are cached; of a fused projection, those of keys and of values."""
    split = entry.rule(line.names[0]).split
    if cached.equal_parts:
        return [line.shape[0] // cached.equal_parts] * 2
    if split is None or not split.parts:
        return [line.shape[0]]
    counts = [rows for rows, _ in fused_parts((line.shape[0], line.shape[1]), split, dict(config))[-2:]]
    if not all(counts):
        raise UnknownCache(f"what {line.names[0]} holds: config.json does not count its heads")
    return counts


def _passes(cached: CachedRows, config: Mapping[str, Any]) -> int:
    """How often a token runs through a layer."""
    counts = [_count(config, key) for key in cached.passes]
    if None in counts:
        raise UnknownCache(f"how often a token runs through a layer: config.json's {', '.join(cached.passes)}")
    return prod(count for count in counts if count is not None)


def _layer_memory(
    layer: int, cached: CachedRows, counts: list[int], window: int | None, config: Mapping[str, Any]
) -> CachedLayers:
    """The cache of one layer, given the cached rows of each of its projections."""
    if cached.heads and len(counts) == 1:
        if not (cached.keys_as_values and config.get(cached.keys_as_values)):
            raise UnknownCache(f"what layer {layer} caches: it has keys and no values")
        counts = counts * 2
    heads: int | None = 1
    if cached.heads:
        full_heads = _count(config, cached.full_heads) if window is None else None
        # Without a key for KV heads there are as many as query heads, as vLLM transformers_utils/
        # model_arch_config_convertor.py:150 counts them.
        heads = full_heads or _count(config, cached.heads) or _count(config, HEADS)
    return CachedLayers(cached.bf16 or 2 * sum(counts), cached.fp8 or sum(counts), window, heads)


def _state_bytes(line: PlanLine, kind: RecurrentState, config: Mapping[str, Any]) -> int:
    """Bytes that a layer caches for a sequence: bfloat16 inputs of its convolution, and its recurrent state."""
    sizes = [_count(config, key) for key in kind.sizes]
    itemsize = DTYPE_BYTES.get(str(config.get(kind.dtype or "", kind.default_dtype)))
    if None in sizes or itemsize is None:
        raise UnknownCache(f"the size of a state: config.json's {', '.join(filter(None, (*kind.sizes, kind.dtype)))}")

    nbytes = 0
    if kind.has_convolution:
        nbytes += 2 * line.shape[0] * (line.shape[-1] - 1)
    if sizes:
        nbytes += itemsize * prod(filter(None, sizes))
    return nbytes


def _windows(entry: ModuleRules, config: Mapping[str, Any]) -> Callable[[int], int | None]:
    """Return a function from a layer's number to its sliding window in tokens; None for full attention."""
    rule = entry.model.windows
    types = config.get(TYPES)
    if isinstance(types, list):
        keys = {layer: WINDOWED[str(kind)] for layer, kind in enumerate(types) if str(kind) in WINDOWED}
        return lambda layer: _window(config, keys[layer]) if layer in keys else None

    if not config.get(rule.size) or config.get("use_sliding_window") is False:
        return lambda _: None
    if entry.model.rest or rule.enabled_by:
        if rule.enabled_by and not config.get(rule.enabled_by):
            return lambda _: None
        raise UnknownCache("which layers have a window: config.json has no layer_types")
    size = _window(config, rule.size)
    flags = config.get(rule.flags or "")
    every = rule.every
    if isinstance(flags, list) and flags:
        return lambda layer: size if layer < len(flags) and flags[layer] else None
    period = config.get(rule.key or "")
    if isinstance(period, str):
        every = len(period)
    elif period is not None:
        every = _count(config, rule.key)
    if not every:
        return lambda _: size
    unlimited = 0 if rule.first else every - 1
    return lambda layer: None if layer % every == unlimited else size


def _window(config: Mapping[str, Any], key: str) -> int:
    tokens = _count(config, key)
    if tokens is None:
        raise UnknownCache(f"the window: config.json's {key} is {short_repr(config.get(key))}")
    return tokens


# Why a plan has such a scale, as it prints it.
CACHED = "FP8 KV cache"
_NO_CACHE = "leave --kv-cache out"


def find_cached_attentions(modules: Iterable[str], entry: ModuleRules, config: dict[str, Any]) -> dict[int, str]:
    """Find the attention modules that have a KV cache of their own.

    Args:
        modules: full names of all modules of a checkpoint: "model.layers.0.self_attn.k_proj".
        entry: what the registry says of each module of the architecture.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        The full name of each such decoder layer's attention module, by layer number:
        {0: "model.layers.0.self_attn"}.

    Raises:
        PlanError: engines load no scales for this architecture, its cache does not hold keys and values, or it is not
            known which layers have a cache.
    """
    model = entry.model

    if model.cache_refused is not None:
        raise PlanError(f"{model.name}: no engine loads scales of the KV cache: {model.cache_refused}", _NO_CACHE)

    patterns = [(model.compile(rows.pattern), rows) for rows in model.cached]
    layer_pattern = compile_pattern(f"{model.layers}.**")
    is_mtp_layer = mtp_layer_finder(model, config)
    count = layers_with_cache(config)

    attentions: dict[int, str] = {}

    for module in modules:
        rows = next((rows for pattern, rows in patterns if pattern.fullmatch(module)), None)
        if rows is None or is_mtp_layer(module):
            continue

        if rows.heads is None:
            raise PlanError(
                f"{model.name} has multi-head latent attention (MLA), whose cache has no scales for keys and values",
                _NO_CACHE,
            )

        match = layer_pattern.fullmatch(module)
        if match is None or not match[1].isdecimal() or len(match[1]) > MAX_DIGITS:
            raise PlanError(
                f"it is not known which layer {module} belongs to, nor whether it has a KV cache", _NO_CACHE
            )

        if count is None or int(match[1]) < count:
            attentions[int(match[1])] = module.rpartition(".")[0]

    if not attentions or (model.rest and len(attentions) != count):
        raise PlanError(f"it is not known which layers of {model.name} have a KV cache", _NO_CACHE)

    return dict(sorted(attentions.items()))


def add_scales(
    items: dict[str, list[Item]], source: Checkpoint, attentions: Mapping[int, str], calibration: Calibration | None
) -> list[str]:
    """Add KV-cache scales to the shards that hold the layers' projections, in place of the source's scales.

    Args:
        items: all tensors, by file name of the shard; changed in place.
        source: the opened source.
        attentions: full names of attention modules, by number of the decoder layer.
        calibration: ranges of keys and values; None to keep the source's scales, and use 1 where it has none.

    Returns:
        Notes for the user that say where the scales come from.

    Raises:
        PlanError: the calibration lacks a layer, or a scale of the source is not a single number.
    """
    source_scales = cache_scales(source.tensors)
    replaced = {name for pair in source_scales.values() for name in pair if name is not None}

    for shard, tensors in items.items():
        items[shard] = [
            item for item in tensors if not (isinstance(item, PassthroughTensor) and item.tensor.name in replaced)
        ]

    paths = set(attentions.values())
    shard_of = dict[str, str]()
    for info in source.tensors.values():
        path = info.module.rpartition(".")[0]
        if path in paths and info.name not in replaced:
            shard_of.setdefault(path, source.where[info.name].shard)

    for number, path in attentions.items():
        absmax = _absmax(calibration, number) if calibration is not None else None

        for place, last in enumerate(SCALES):
            name = f"{path}.{last}"
            source_name = source_scales.get(number, (None, None))[place]

            value: float | TensorInfo = 1.0
            if absmax is not None:
                value = scale_for(absmax[place])
            elif source_name is not None:
                value = _require_scalar(source.tensors[source_name])
            items[shard_of[path]].append(
                PassthroughTensor(TensorInfo(name, "F32", (1,)), template(name), CACHED, value=value)
            )

    if calibration is not None:
        return [f"scales of the KV cache are powers of two, from a calibration with {tokens_of(calibration.texts)}"]

    count = sum(name is not None for number in attentions for name in source_scales.get(number, (None, None)))
    if count:
        return [f"{count} of {2 * len(attentions)} scales of the KV cache are the source's, all others 1"]

    return [
        f"scales of the KV cache are 1 in all of {len(attentions)} layers, which fits magnitudes up to "
        f"{E4M3.largest:g} and is precise for those above {2.0**-6:g}, as in nearly every model"
    ]


def _absmax(calibration: Calibration, number: int) -> tuple[float, float]:
    """The largest magnitudes of a layer's keys and values."""
    absmax = calibration.cached.get(number)
    if absmax is None:
        raise PlanError(
            f"the calibration did not observe keys and values of layer {number}",
            "make it again: openquant calibrate MODEL -o FILE; or leave --calibration out for scales of 1",
        )
    return absmax


def _require_scalar(info: TensorInfo) -> TensorInfo:
    if info.dtype not in FLOATS or math.prod(info.shape) != 1:
        raise PlanError(
            f"{info.name} is {info.dtype} {list(info.shape)}, not a single scale of the KV cache",
            "give --calibration FILE to replace the scales, or leave --kv-cache out",
        )
    return info


def serving_notes(model: Architecture, decisions: Decisions) -> list[str]:
    """Return notes on how engines use an FP8 KV cache.

    Args:
        model: the registry's entry of the architecture.
        decisions: the plan's scheme, and the tensors that are not quantized, cache scales among them.

    Returns:
        One sentence each: options that engines need, and scales that they ignore.
    """
    notes = []
    if decisions.scheme is not None and decisions.scheme.method == "fp8":
        notes.append(
            f"vLLM does not take an FP8 KV cache from a config in this format: serve with {FLAG}; fp8_e5m2 is refused"
        )
    if model.sglang.ignores_cache_scales and any(kept.value not in (None, 1.0) for kept in decisions.passthrough):
        notes.append(f"{SGLANG} silently uses 1 in place of these scales of the KV cache")
    return notes


def expect_calibration(options: PlanOptions, tensors: Iterable[str], required: bool) -> PlanOptions:
    """Put a placeholder into the options if a calibration is needed and still to be made.

    Args:
        options: what the user asks for.
        tensors: full names of the source's tensors; the placeholder has statistics for all of them.
        required: whether the scheme has static activation scales and the source has none.

    Returns:
        The options, with the placeholder as `calibration` if one is needed: it is `required`, or the options ask for
        it, and they have none yet.

    Raises:
        PlanError: a calibration is needed, and there are no texts to make it with.
    """
    if options.calibration is not None or not (required or options.calibrate):
        return options
    if options.texts is None:
        raise PlanError(
            "static activation scales need a calibration, or the input_scale tensors of a quantized source, of which "
            "this one has none",
            "make one with openquant calibrate and give --calibration FILE, or leave --activation-scheme out for "
            "dynamic activation scales",
        )
    return replace(options, calibration=placeholder_calibration(tensors, options.texts))


def find_input_absmax(
    schemes: Iterable[Scheme], calibration: Calibration | None, entry: ModuleRules, decisions: Decisions
) -> dict[str, float]:
    """Find the largest magnitude of each layer's input activations, shared where engines share a scale.

    Engines use one scale, the largest, for fused layers and for all experts of a layer (vLLM
    layers/quantization/fp8.py:403-405, :739; fused_moe/routed_experts.py:823-833 refuses gate and up that differ). So
    an expert that no token was routed to gets the value of the others.

    Args:
        schemes: all schemes of the plan.
        calibration: statistics of the inputs of layers; None without.
        entry: what the registry says of each module of the architecture.
        decisions: the weights that may be quantized, and which of them engines fuse.

    Returns:
        The largest absolute input, by full module name; layers that the calibration did not observe are absent. Empty
        without a calibration, or if no scheme stores activation scales.
    """
    if calibration is None or not any(scheme.format.input_scale for scheme in schemes):
        return {}
    shared_absmax: dict[tuple[str, ...], float] = {}
    keys = scale_sharing_keys(entry, decisions.layers, decisions.fused)
    for module, weight in decisions.layers.items():
        statistics = calibration.of(weight.source.name)
        if statistics is not None:
            shared_absmax[keys[module]] = max(statistics.largest, shared_absmax.get(keys[module], 0.0))
    return {module: shared_absmax[key] for module, key in keys.items() if key in shared_absmax}


def scale_sharing_keys(
    entry: ModuleRules, modules: Iterable[str], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return a key for each module, the same for those whose inputs engines scale by one number.

    Args:
        entry: what the registry says of each module of the architecture.
        modules: full names of modules.
        fused: for each module that engines fuse with others, the full names of all members, itself included.
    """
    keys: dict[str, tuple[str, ...]] = {}
    for module in modules:
        experts = entry.experts(module)
        members = fused.get(module, (module,))
        # Experts of a layer share a key: their path and the last segments of the fused projections.
        keys[module] = (experts, *(name.rpartition(".")[2] for name in members)) if experts else members
    return keys


def chosen_scales(decisions: Decisions, entry: ModuleRules) -> dict[str, float]:
    """Return the static scales of activations and of the KV cache that a plan has not from its source.

    Args:
        decisions: what becomes of each tensor.
        entry: what the registry says of each module of the architecture.

    Returns:
        Values by tensor name; of layers that share one, only the first.
    """
    scales = {kept.tensor.name: kept.value for kept in decisions.passthrough if isinstance(kept.value, float)}
    keys = scale_sharing_keys(entry, decisions.layers, decisions.fused)
    seen: set[tuple[str, ...]] = set()
    for weight, scheme in decisions.quantized:
        absmax = decisions.input_absmax.get(weight.module)
        key = keys[weight.module]
        of_source = absmax is None and weight.input_scale_for(scheme.format) is not None
        if scheme.format.input_scale is not None and not of_source and key not in seen:
            seen.add(key)
            # As it is stored.
            scales[f"{weight.module}.{scheme.format.input_scale}"] = float(np.float32(scheme.input_scale(absmax)))
    return scales


def unrouted_note(
    calibration: Calibration, entry: ModuleRules, modules: Iterable[str], layers: Mapping[str, Weight]
) -> list[str]:
    """Return a note about experts that no token was routed to, which use their layer's scale.

    Args:
        calibration: statistics of the inputs of layers, with the tokens routed to each expert.
        entry: what the registry says of each module of the architecture.
        modules: full names of the modules with a static activation scale.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".

    Returns:
        A list of one sentence; empty if there are no such experts.
    """
    unrouted: dict[str, int] = {}

    for module in modules:
        experts = entry.experts(module)
        statistics = calibration.of(layers[module].source.name)
        if experts and statistics is not None and statistics.routed is not None:
            unrouted[experts] = statistics.routed.count(0)

    count = sum(unrouted.values())
    if not count:
        return []
    return [
        f"no token was routed to {count} experts, which use the scale of the others of their layer; more texts "
        "(--samples) would reach them"
    ]

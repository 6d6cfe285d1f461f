"""The memory that GPUs need to serve a plan's source and output, or a checkpoint: weights and KV cache.

How much a layer caches for a token follows from its projections' shapes. Which layers have sliding windows, and what
ranks divide, follows from config.json and the registry. What neither says is not guessed: then token counts are None,
and `unknown` says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypedDict, final

from ..files.checkpoint import Checkpoint
from ..files.model_files import short_repr
from ..formats.format import Format
from ..models import GENERIC
from ..patterns import MAX_DIGITS, compile_pattern
from ..registry.architecture import MTP_LAYER, CachedRows, ModuleRules, RecurrentState, absolute_patterns
from ..registry.parts import HEADS
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .architecture import (
    ParallelSize,
    check_parallel_sizes,
    config_value,
    fused_parts,
    known_architecture,
    mtp_layer_finder,
    text_config,
)
from .decisions import FEW_AXES, Decisions, Item, PassthroughTensor
from .layout import PlanLine, plan_lines

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


class BytesByCache(TypedDict):
    """Bytes with a bfloat16 cache, and with an FP8 cache."""

    bf16: int
    fp8: int


class FitFigures(TypedDict):
    """A `Fit` as `--json` prints it."""

    gpu_gb: int
    gpus: int | None
    tokens_bf16: int | None
    tokens_fp8: int | None


class CheckpointServing(TypedDict):
    """A `Serving` as `--json` prints it."""

    weights_bytes: int
    kv_bytes_per_token: BytesByCache | None
    kv_bytes_per_sequence: BytesByCache | None
    unknown: str | None
    fits: list[FitFigures]


class ServingFigures(TypedDict):
    """What it takes to serve a source and an output, as `--json` prints it; docs/serving.md explains the keys."""

    gpu_memory_utilization: float
    overhead_bytes_per_gpu: int
    source: CheckpointServing
    output: CheckpointServing


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

    def to_json(self) -> FitFigures:
        """Return the fields by name, as `--json` prints them."""
        return {
            "gpu_gb": self.gpu_gb,
            "gpus": self.gpus,
            "tokens_bf16": self.tokens_bf16,
            "tokens_fp8": self.tokens_fp8,
        }


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

    def to_json(self) -> CheckpointServing:
        """Return the figures as `--json` prints them; those of an unknown cache are None."""

        def by_cache(size: Callable[[bool], int]) -> BytesByCache:
            return {"bf16": size(False), "fp8": size(True)}

        return {
            "weights_bytes": self.weights_bytes,
            "kv_bytes_per_token": self.cache and by_cache(self.cache.per_token),
            "kv_bytes_per_sequence": self.cache and by_cache(self.cache.per_sequence),
            "unknown": self.unknown,
            "fits": [fit.to_json() for fit in self.fits],
        }


def serving_to_json(source: Serving, output: Serving) -> ServingFigures:
    """Return both as `--json` prints them.

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


def estimate_serving(
    lines: Sequence[PlanLine],
    entry: ModuleRules,
    config: Mapping[str, Any],
    parallel: Iterable[ParallelSize],
    output: bool,
) -> Serving:
    """Compute what it takes to serve a plan's output, or its source.

    Args:
        lines: the printed plan's lines, which have the bytes of all tensors before and after.
        entry: what the registry says of each module of the architecture.
        config: the language model's part of config.json, as text_config returns it.
        parallel: tensor-parallel sizes in ascending order, each with the reason for which it cannot serve it, if any.
        output: True for the output, False for the source.

    Returns:
        Bytes of the weights, memory of the caches, and for each GPU size how many GPUs it needs and the tokens that
        they hold.
    """
    weights = loaded_weights(lines, entry, output)
    try:
        cache = find_cache(lines, entry, config)
        unknown = None
    except UnknownCache as problem:
        cache = None
        unknown = str(problem)
    allowed = [size.size for size in parallel if size.problem is None and size.size in GPUS]
    fits = tuple(_fit(gpu_gb, weights, cache, allowed) for gpu_gb in GPU_GB)
    return Serving(weights.divided + weights.copied, cache, unknown, fits)


def loaded_weights(lines: Iterable[PlanLine], entry: ModuleRules, output: bool) -> LoadedWeights:
    """Add up the weights that engines load.

    Args:
        lines: the printed plan's lines, which have the bytes of all tensors before and after.
        entry: what the registry says of each module of the architecture.
        output: True for the output, False for the source.

    Returns:
        Bytes of what ranks divide, and of what each has whole.
    """
    nbytes = {True: 0, False: 0}
    for line in lines:
        if line.why != MTP_LAYER:
            nbytes[entry.rule(line.names[0]).divided] += line.bytes_after if output else line.bytes_before
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


def find_cache(lines: Iterable[PlanLine], entry: ModuleRules, config: Mapping[str, Any]) -> SequenceMemory:
    """Compute the memory of an engine's caches.

    Args:
        lines: the printed plan's lines, which have the shapes of all modules.
        entry: what the registry says of each module of the architecture.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        Bytes of a token in each layer's KV cache, bytes of a sequence's recurrent states, and the longest sequence in
        tokens.

    Raises:
        UnknownCache: config.json or the registry does not say enough.
    """
    model = entry.model
    layer_pattern = compile_pattern(f"{model.layers}.**")
    cached = [(compile_pattern(absolute_patterns(model, [kind.pattern])[0]), kind) for kind in model.cached]
    states = [(compile_pattern(absolute_patterns(model, [kind.pattern])[0]), kind) for kind in model.states]

    # For each layer and each kind of cached projections in it, the cached rows of each projection.
    row_counts: dict[tuple[int, CachedRows], list[int]] = {}

    state = 0

    for line in (line for line in lines if line.why != MTP_LAYER and len(line.shape) > 1):
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
    bf16 = cached.bf16 or 2 * sum(counts)
    return CachedLayers(bf16, cached.fp8 or sum(counts), window, heads)


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

        def window_by_type(layer: int) -> int | None:
            if layer >= len(types):
                return None
            key = WINDOWED.get(str(types[layer]))
            if key is None:
                return None
            return _window(config, key)

        return window_by_type
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


def stored_serving(checkpoint: Checkpoint) -> Serving:
    """Compute what it takes to serve a checkpoint as it is.

    Args:
        checkpoint: the opened checkpoint, quantized or not.

    Returns:
        Bytes of its weights, memory of the caches, and for each GPU size how many GPUs it needs and which context fits.

    Raises:
        PlanError: it is quantized in an unknown way.
        SourceError: its scales do not fit its codes.
    """
    decoded, weights = decoded_view(checkpoint)
    entry = ModuleRules(known_architecture(checkpoint) or replace(GENERIC, name=checkpoint.architecture))
    config = text_config(decoded, entry.model)
    is_mtp_layer = mtp_layer_finder(entry.model, config)

    items: list[Item] = []
    layers: list[tuple[Weight, Format | None]] = []

    for info in decoded.tensors.values():
        rule = entry.rule(info.module)
        weight = weights.get(info.name)

        in_mtp_layer = is_mtp_layer(info.module) or rule.keep == MTP_LAYER
        if len(info.shape) < 2:
            items.append(PassthroughTensor(info, info.name, FEW_AXES, weight))
            continue

        items.append(PassthroughTensor(info, rule.name_template, MTP_LAYER if in_mtp_layer else "", weight))
        if not in_mtp_layer and rule.split is not None:
            shape = (info.shape[-2], info.shape[-1])
            layers.append((Weight(info.module, rule.name_template, info, shape), weight and weight.format))

    lines = plan_lines(Decisions(None, {"": items}))
    return estimate_serving(lines, entry, config, check_parallel_sizes(decoded, entry, layers, None), output=False)

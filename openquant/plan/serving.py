"""What it takes to serve a plan's source and its output: weights, the cache of keys and values, GPUs.

How many numbers a layer keeps of a token is read off its projections' shapes; which layers forget, and what ranks
divide, off config.json, as the registry says. What neither says is not guessed: then tokens are None, and `unknown`
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypedDict

from ..files.small_files import short_repr
from ..patterns import MAX_DIGITS, compile_pattern
from ..registry.architecture import DRAFT, CachedRows, RecurrentState, absolute_patterns
from ..registry.parts import HEADS
from ..registry.rules import ModuleRules
from .printed import PlanLine
from .tensor_parallel import config_value, fused_parts

# What GPUs hold, in units of 10^9 bytes, so that none is promised more than it has.
GPU_GB = (24, 48, 80, 96, 141, 192)
GPUS = (1, 2, 4, 8)
# vLLM config/cache.py:102, gpu_memory_utilization.
UTILIZATION = 0.92
# Of it, on each GPU, what is neither weights nor cache: activations, CUDA graphs, the libraries. An assumption.
OVERHEAD = 2 * 10**9
# A model that has not even so many tokens of context does not count as served.
FEWEST_TOKENS = 8192
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Config keys that count layers, and say what each is.
LAYERS, TYPES, SHARED, LENGTH = ("num_hidden_layers", "layer_types", "num_kv_shared_layers", "max_position_embeddings")
WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class BytesByCache(TypedDict):
    """Bytes with a cache in bfloat16, and with one in FP8."""

    bf16: int
    fp8: int


class FitFigures(TypedDict):
    """A `Fit` as `--json` has it."""

    gpu_gb: int
    gpus: int | None
    tokens_bf16: int | None
    tokens_fp8: int | None


class CheckpointServing(TypedDict):
    """A `Serving` as `--json` has it."""

    weights_bytes: int
    kv_bytes_per_token: BytesByCache | None
    kv_bytes_per_sequence: BytesByCache | None
    unknown: str | None
    fits: list[FitFigures]


class ServingFigures(TypedDict):
    """What it takes to serve a source and an output, as `--json` has it; docs/serving.md says what each key means."""

    gpu_memory_utilization: float
    overhead_bytes_per_gpu: int
    source: CheckpointServing
    output: CheckpointServing


@dataclass(frozen=True)
class CachedLayers:
    """What decoder layers that are alike keep, all of them together.

    Attributes:
        bf16: bytes of a token in a bfloat16 cache.
        fp8: bytes of a token in an FP8 cache.
        window: how many tokens they keep at most; None for all.
        heads: what ranks divide; 1 where each of them keeps everything, None if it is not known.
    """

    bf16: int
    fp8: int
    window: int | None
    heads: int | None


@dataclass(frozen=True)
class SequenceMemory:
    """What an engine keeps of the sequences it serves.

    Attributes:
        layers: of each token.
        state: bytes of each sequence, however long it is, which ranks divide.
        length: the longest sequence that config.json allows; None if it does not say.
    """

    layers: tuple[CachedLayers, ...]
    state: int
    length: int | None

    def sequence(self, tokens: int, fp8: bool, gpus: int = 1) -> int:
        """Bytes of one sequence on each of so many GPUs."""
        found = self.state // gpus
        for each in self.layers:
            nbytes = (each.fp8 if fp8 else each.bf16) * (min(tokens, each.window) if each.window else tokens)
            assert each.heads or gpus == 1, "not known how to divide"
            found += nbytes // min(gpus, each.heads or 1)
        return found

    def per_token(self, fp8: bool) -> int:
        """Bytes of one token more in a long sequence, on all GPUs together: layers with windows do not grow."""
        return sum(each.fp8 if fp8 else each.bf16 for each in self.layers if each.window is None)

    def per_sequence(self, fp8: bool) -> int:
        """Bytes of a sequence beside: states, and windows that are full."""
        windows = ((each.fp8 if fp8 else each.bf16) * each.window for each in self.layers if each.window)
        return self.state + sum(windows)

    def tokens(self, room: int, fp8: bool, gpus: int) -> int:
        """How many tokens so many bytes on each GPU hold, in sequences as long as the model allows.

        If not one of these fits, then in one that is shorter.
        """
        if self.length is not None:
            whole = self.sequence(self.length, fp8, gpus)
            if whole <= room:
                return room * self.length // whole if whole else 0
        low, high = 0, self.length or room
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequence(middle, fp8, gpus) <= room else (low, middle - 1)
        return low


@dataclass(frozen=True)
class Fit:
    """What GPUs of one size make of a checkpoint.

    Attributes:
        gpu_gb: what each holds, in 10^9 bytes.
        gpus: the fewest that serve it; None if 8 do not, or it does not divide.
        tokens_bf16: tokens of context that are left, with a bfloat16 cache; None if that is not known.
        tokens_fp8: likewise with an FP8 cache.
    """

    gpu_gb: int
    gpus: int | None
    tokens_bf16: int | None
    tokens_fp8: int | None

    def to_json(self) -> FitFigures:
        """The fields by name, as `--json` prints them."""
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
        weights_bytes: of the weights that engines load, draft layers left out.
        cache: what is kept of sequences; None if that is not known.
        unknown: why it is not; None if it is.
        fits: for each size of GPU.
    """

    weights_bytes: int
    cache: SequenceMemory | None
    unknown: str | None
    fits: tuple[Fit, ...]

    def to_json(self) -> CheckpointServing:
        """As `--json` prints it; of a cache that is not known, None."""

        def by_cache(size: Callable[[bool], int]) -> BytesByCache:
            return {"bf16": size(False), "fp8": size(True)}

        return {
            "weights_bytes": self.weights_bytes,
            "kv_bytes_per_token": by_cache(self.cache.per_token) if self.cache else None,
            "kv_bytes_per_sequence": by_cache(self.cache.per_sequence) if self.cache else None,
            "unknown": self.unknown,
            "fits": [fit.to_json() for fit in self.fits],
        }


def serving_to_json(source: Serving, output: Serving) -> ServingFigures:
    """Both as `--json` prints them, beside what they rest on."""
    return {
        "gpu_memory_utilization": UTILIZATION,
        "overhead_bytes_per_gpu": OVERHEAD,
        "source": source.to_json(),
        "output": output.to_json(),
    }


def serving(
    lines: Sequence[PlanLine], entry: ModuleRules, config: Mapping[str, Any], sizes: Iterable[int], output: bool
) -> Serving:
    """What it takes to serve a plan's output, or its source.

    Args:
        lines: the plan's.
        entry: the registry's entry.
        config: the language model's part of config.json.
        sizes: the tensor-parallel sizes that can serve it.
        output: whether what is written is meant, or what is read.
    """
    weights = [(line, line.bytes_after if output else line.bytes_before) for line in lines if line.why != DRAFT]
    divided = [(entry.rule(line.names[0]).divided, nbytes) for line, nbytes in weights]
    try:
        cache, unknown = find_cache(lines, entry, config), None
    except _Unknown as problem:
        cache, unknown = None, str(problem)

    def rank_bytes(gpus: int) -> int:
        return sum(nbytes // gpus if parts else nbytes for parts, nbytes in divided)

    fits = tuple(_fit(size, rank_bytes, cache, [gpus for gpus in GPUS if gpus in set(sizes)]) for size in GPU_GB)
    return Serving(sum(nbytes for _, nbytes in weights), cache, unknown, fits)


def _fit(gpu_gb: int, rank_bytes: Callable[[int], int], cache: SequenceMemory | None, allowed: Iterable[int]) -> Fit:
    for gpus in allowed:
        room = int(gpu_gb * 10**9 * UTILIZATION) - OVERHEAD - rank_bytes(gpus)
        if room <= 0:
            continue
        if cache is None or (gpus > 1 and any(each.heads is None for each in cache.layers)):
            return Fit(gpu_gb, gpus, None, None)
        tokens = cache.tokens(room, False, gpus)
        if tokens >= min(FEWEST_TOKENS, cache.length or FEWEST_TOKENS):
            return Fit(gpu_gb, gpus, tokens, cache.tokens(room, True, gpus))
    return Fit(gpu_gb, None, None, None)


class _Unknown(Exception):
    """What is not known, as text."""


def find_cache(lines: Iterable[PlanLine], entry: ModuleRules, config: Mapping[str, Any]) -> SequenceMemory:
    """What is kept of sequences.

    Raises:
        _Unknown: it is not known.
    """
    model = entry.model
    layer_of = compile_pattern(f"{model.layers}.**")
    cached = [(compile_pattern(absolute_patterns(model, [what.pattern])[0]), what) for what in model.cached]
    states = [(compile_pattern(absolute_patterns(model, [kind.pattern])[0]), kind) for kind in model.states]
    # Of each layer and each thing kept there, the numbers of each projection's rows.
    rows: dict[tuple[int, CachedRows], list[int]] = {}
    state = 0
    for line in (line for line in lines if line.why != DRAFT and len(line.shape) > 1):
        first = line.names[0]
        for pattern, what in cached:
            if pattern.fullmatch(first):
                numbers = _cached_rows(line, what, entry, config)
                for name in line.names:
                    rows.setdefault((_number(layer_of.fullmatch(name)), what), []).extend(numbers)
        for pattern, kind in states:
            if pattern.fullmatch(first):
                state += len(line.names) * _state_bytes(line, kind, config)
    if not rows and not state:
        raise _Unknown(f"what {model.name} keeps of a token")
    windows = _windows(entry, config)
    count = _count(config, LAYERS)
    if model.rest and count != len({layer for layer, _ in rows}):
        raise _Unknown("what some of its layers keep of a token")
    own = own_layers(config)
    found: dict[CachedLayers, int] = {}
    for (layer, what), numbers in rows.items():
        if own is None or layer < own:
            each = _kept(layer, what, numbers, windows(layer), config)
            passes = _times(what, config)
            alike = 1 if what.again else passes
            found[each] = found.get(each, 0) + alike
            if what.again and passes > alike:
                again = replace(each, window=_window(config, what.again))
                found[again] = found.get(again, 0) + passes - alike
    layers = (
        CachedLayers(each.bf16 * times, each.fp8 * times, each.window, each.heads) for each, times in found.items()
    )
    return SequenceMemory(tuple(layers), state, _count(config, LENGTH))


def _number(found: Any) -> int:
    if found is None or not found[1].isdecimal() or len(found[1]) > MAX_DIGITS:
        raise _Unknown("which layer is which")
    return int(found[1])


def own_layers(config: Mapping[str, Any]) -> int | None:
    """How many decoder layers, the first ones, have a cache of their own; None if config.json does not say.

    The last may read that of earlier ones.
    """
    count = _count(config, LAYERS)
    return count - (_count(config, SHARED) or 0) if count else None


def _count(config: Mapping[str, Any], key: str | None) -> int | None:
    """A number that config.json says, if it is one that can be right."""
    value = config_value(config, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12 else None


def _cached_rows(line: PlanLine, what: CachedRows, entry: ModuleRules, config: Mapping[str, Any]) -> list[int]:
    """How many numbers a projection makes for the cache: of a fused one, keys and values."""
    split = entry.rule(line.names[0]).split
    if what.two_of:
        return [line.shape[0] // what.two_of] * 2
    if split is None or not split.parts:
        return [line.shape[0]]
    shape = (line.shape[0], line.shape[1])
    found = [rows for rows, _ in fused_parts(shape, split, dict(config))[-2:]]
    if not all(found):
        raise _Unknown(f"what {line.names[0]} holds: config.json does not count its heads")
    return found


def _times(what: CachedRows, config: Mapping[str, Any]) -> int:
    """How often a token goes through a layer."""
    counts = [_count(config, key) for key in what.times]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        raise _Unknown(f"how often a token goes through a layer: config.json's {', '.join(what.times)}")
    return prod(known)


def _kept(
    layer: int, what: CachedRows, numbers: list[int], window: int | None, config: Mapping[str, Any]
) -> CachedLayers:
    """What one layer keeps."""
    if what.heads and len(numbers) == 1:
        if not (what.keys_as_values and config.get(what.keys_as_values)):
            raise _Unknown(f"what layer {layer} keeps: it has keys and no values")
        numbers = numbers * 2
    heads: int | None = 1
    if what.heads:
        own = _count(config, what.full_heads) if window is None else None
        # Those of queries where they have no key of their own, as vLLM transformers_utils/
        # model_arch_config_convertor.py:150 counts them.
        heads = own or _count(config, what.heads) or _count(config, HEADS)
    bf16 = what.bf16 or 2 * sum(numbers)
    return CachedLayers(bf16, what.fp8 or sum(numbers), window, heads)


def _state_bytes(line: PlanLine, kind: RecurrentState, config: Mapping[str, Any]) -> int:
    """What a layer keeps of a sequence: the inputs of its convolution, in bfloat16, and its recurrent state."""
    inputs = 2 * line.shape[0] * (line.shape[-1] - 1) if kind.convolved else 0
    sizes = [_count(config, key) for key in kind.sizes]
    named = config.get(kind.dtype, kind.usual) if kind.dtype else kind.usual
    width = DTYPE_BYTES.get(named) if isinstance(named, str) else None
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or width is None:
        raise _Unknown(f"the size of a state: config.json's {', '.join(filter(None, (*kind.sizes, kind.dtype)))}")
    return inputs + (width * prod(known) if known else 0)


def _windows(entry: ModuleRules, config: Mapping[str, Any]) -> Callable[[int], int | None]:
    """A function of a layer's number: how many tokens it keeps at most, None for all.

    Raises:
        _Unknown: config.json says that there are windows, but not where.
    """
    rule = entry.model.windows
    types = config.get(TYPES)
    if isinstance(types, list):

        def listed(layer: int) -> int | None:
            key = WINDOWED.get(types[layer]) if layer < len(types) and isinstance(types[layer], str) else None
            return _window(config, key) if key else None

        return listed
    if not config.get(rule.size) or config.get("use_sliding_window") is False:
        return lambda _: None
    if entry.model.rest or rule.asked:
        if rule.asked and not config.get(rule.asked):
            return lambda _: None
        raise _Unknown("which layers have a window: config.json has no layer_types")
    size, flags, every = _window(config, rule.size), config.get(rule.flags or ""), rule.every
    if isinstance(flags, list) and flags:
        return lambda layer: size if layer < len(flags) and flags[layer] else None
    said = config.get(rule.key or "")
    if isinstance(said, str):
        every = len(said)
    elif said is not None:
        every = _count(config, rule.key)
    if not every:
        return lambda _: size
    return lambda layer: None if (layer if rule.first else layer + 1) % every == 0 else size


def _window(config: Mapping[str, Any], key: str) -> int:
    found = _count(config, key)
    if found is None:
        raise _Unknown(f"the window: config.json's {key} is {short_repr(config.get(key))}")
    return found

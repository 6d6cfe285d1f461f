"""Estimates the memory of a command's steps before they run, from the shapes in the shards' headers.

Each estimate is an upper bound of what a step adds to the memory of the process; docs/evaluation.md has measured peaks.

    steps = calibration_steps(checkpoint, length=512)
    rest = memory_left(2 << 30, steps)      # bytes for hidden states; a UsageError if a step does not fit
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, naming
from ..files.checkpoint import Checkpoint
from ..files.shardfile import DTYPE_BITS, TensorInfo
from ..machine import COMPILED_MEMORY, resident
from ..plan.decisions import rounded_tensors
from ..plan.plan import Plan
from ..weights.find import decoded_view

# Bytes of importing torch, transformers and the class of one model; and bytes that still come when torch and
# transformers are imported: the class, and code that its first forward pass loads.
IMPORTS, FIRST_PASS = 400 << 20, 64 << 20
# Most bytes of a mapped embedding table that looking up tokens reads, and bytes of one piece of an output head.
LOOKUP, HEAD = 64 << 20, 48 << 20
# float32 values per token and output of a layer's widest matrix that exist at once: gate, up, their product, a rounded
# or observed copy of it, and the bfloat16 copies of all these.
WIDTHS = 5
# The same of a layer that gradients flow through; and bytes per logit: itself, its probability, a random number, their
# product and its gradient.
GRADIENT_WIDTHS, GRADIENT_LOGITS = 16, 18
# Bytes of comparing pieces of weights and heads with the source's, in float32 and float64: 170 MB for qwen3-1.7b.
COMPARISON = 224 << 20
# Bytes per weight that GPTQ rounds: as float32, its error, the value of its code, and copies in act-order; and the
# number of weights that it rounds at once.
ROUNDED, AT_ONCE = 26, 1 << 24
# The same of weights that are tuned then: as float32, its code, its error, that times the Hessian, and what is added.
TUNED = 24
# Tokens that are added to a Hessian at once, if fewer come in a call, as to an expert's: 16 at a time take one and a
# half times as long.
ROWS = 128
# Outputs of a layer whose errors are weighed together, with gradients.
BLOCK = 256
# Bytes that the allocator keeps of pieces that were freed while units are scored: one run of many took 13 MB more than
# all that is counted.
FREED = 32 << 20
# Bytes of a pass that waits for a unit, besides its hidden states: its stack, and tables of positions.
SUSPENDED = 96 << 10
# The name of a module in a list, up to its number: model.layers.0
_LIST_ITEM = re.compile(r"(.*?\.\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def config_levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a parsed config.json and, of a multimodal model, its `text_config`: a key may be in either."""
    text_config = config.get("text_config")
    return [config, text_config] if isinstance(text_config, dict) else [config]


def vocabulary_of(checkpoint: Checkpoint) -> int | None:
    """Return the vocabulary size in config.json, in tokens; None if it has none."""
    sizes = (config.get("vocab_size") for config in config_levels(checkpoint.config))
    return next((size for size in sizes if isinstance(size, int)), None)


def hidden_bytes(checkpoint: Checkpoint, tokens: int) -> int:
    """Return the bytes of bfloat16 hidden states and embeddings of so many tokens; 0 if config.json has no size.

    Embeddings count, because some models use them again in later layers. Some have several residual streams (DeepSeek
    V4, Gemma 3n).
    """
    levels = config_levels(checkpoint.config)
    sizes = (config.get("hidden_size") for config in levels)
    counts = (config.get(key) for config in levels for key in ("hc_mult", "altup_num_inputs"))
    streams = next((count for count in counts if isinstance(count, int)), 1)
    return 2 * tokens * next((size for size in sizes if isinstance(size, int)), 0) * (1 + streams)


@dataclass(frozen=True)
class MemoryStep:
    """The memory of a step of a command.

    Attributes:
        name: the step, for messages: "calibrating".
        nbytes: bytes that it adds at most to the memory of the process.
        hint: what the user can do to reduce them: "leave --gptq out"; "" if nothing.
        models: whether it runs a model, so that torch and transformers are imported.
    """

    name: str
    nbytes: int
    hint: str = ""
    models: bool = True

    @property
    def needed(self) -> int:
        """Most bytes of the whole process during the step, if it began now."""
        imports = 0
        if self.models:
            imports = FIRST_PASS if "transformers.modeling_utils" in sys.modules else IMPORTS
        return resident() + imports + self.nbytes


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a checkpoint's weights while a model is streamed.

    Attributes:
        layers: the number of decoder layers, those of vision towers included.
        layer: bytes of the largest decoder layer.
        table: bytes in memory of the embedding table while tokens are looked up.
        head: bytes in memory of the output head while logits are computed.
        whole_head: bytes of the whole output head, which is in memory if one of the compared heads is quantized.
        rest: bytes of all other weights.
        width: the longest axis of a matrix in a layer, times the experts of a token if the matrix is an expert's.
    """

    layers: int
    layer: int
    table: int
    head: int
    whole_head: int
    rest: int
    width: int


def weight_memory(checkpoint: Checkpoint) -> WeightMemory:
    """Estimate the memory of a checkpoint's weights while its model is streamed.

    Args:
        checkpoint: the opened checkpoint; only its config and the names, dtypes and shapes of its tensors are used.

    Returns:
        Bytes of the largest decoder layer, the embedding table, the output head (in pieces and whole) and all other
        weights, with copies made of them; and the longest axis of a layer's matrices, in elements.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    decoded, quantized = decoded_view(checkpoint)
    dtype = compute_dtype(decoded)
    vocabulary = vocabulary_of(checkpoint)
    experts = _experts_of_token(checkpoint)

    def count_loaded(info: TensorInfo) -> int:
        """Bytes of a tensor with copies of it: in another dtype, decoded, or stacked if it is an expert's."""
        count = info.nbytes * 8 // DTYPE_BITS[info.dtype]
        computed = count * DTYPE_BITS[dtype] // 8
        copies = (info.dtype != dtype and info.name not in quantized) + 2 * bool(_EXPERT.search(info.name))
        return (computed if info.name in quantized else info.nbytes) + copies * computed

    layers: dict[str, int] = {}
    tables: list[TensorInfo] = []
    rest = 0
    width = 0
    for info in decoded.tensors.values():
        if (match := _LIST_ITEM.match(info.name)) is not None:
            layers[match[1]] = layers.get(match[1], 0) + count_loaded(info)
            if len(info.shape) > 1:
                width = max(width, max(info.shape[-2:]) * (experts if ".experts" in info.name else 1))
        elif len(info.shape) == 2 and info.shape[0] == vocabulary:
            tables.append(info)
        else:
            rest += info.nbytes + count_loaded(info)

    # A mapped table is looked up and multiplied in pieces.
    table = 0
    head = 0
    for info in tables:
        nbytes = count_loaded(info)
        is_mapped = info.dtype == dtype and info.name not in quantized
        table = max(table, min(nbytes, LOOKUP) if is_mapped else nbytes)
        head = max(head, HEAD if is_mapped else nbytes)
    whole_head = max(map(count_loaded, tables), default=0)
    return WeightMemory(len(layers), max(layers.values(), default=0), table, head, whole_head, rest, width)


def compute_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype that a checkpoint's model computes in: "F32" if most bytes are in float32, else "BF16".

    Args:
        checkpoint: the checkpoint as it would be unquantized, made by `decoded_view`.
    """
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    # Never float16, which takes fifteen times as long as bfloat16 on CPUs.
    return "F32" if max(sizes, key=lambda name: sizes[name]) == "F32" else "BF16"


def _experts_of_token(checkpoint: Checkpoint) -> int:
    """The number of experts per token in config.json; 1 if it has none."""
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")
    counts = (config.get(key) for config in config_levels(checkpoint.config) for key in keys)
    return max((count for count in counts if isinstance(count, int)), default=1)


def pass_memory(checkpoint: Checkpoint, length: int) -> int:
    """Estimate the bytes of a forward pass: its largest unit, with the activations of a text of `length` tokens.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    weights = weight_memory(checkpoint)
    computed = 4 * WIDTHS * weights.width * length + hidden_bytes(checkpoint, length)
    return weights.rest + max(weights.layer + computed, weights.table)


def calibration_steps(checkpoint: Checkpoint, length: int) -> list[MemoryStep]:
    """Return the steps of a calibration with texts of `length` tokens.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    return [MemoryStep("calibrating", pass_memory(checkpoint, length), _length_hint(length))]


def gptq_steps(checkpoint: Checkpoint, plan: Plan, length: int) -> list[MemoryStep]:
    """Return the steps of GPTQ with texts of `length` tokens, if one Hessian is in memory at a time.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    collecting = pass_memory(checkpoint, length) + hessian_memory(plan)
    name, option = "rounding layers by GPTQ", "--gptq"
    hessians, rows_at_once, per_weight = 1, 1, ROUNDED
    if plan.is_tuned:
        name, option = "rounding and tuning layers", "--tune"
        collecting += curvature_memory(plan) + COMPILED_MEMORY
        hessians, rows_at_once, per_weight = 3, BLOCK, ROUNDED + TUNED

    widest = 0
    for weight, _ in plan.gptq_rounded:
        rows, cols = weight.shape
        hessian = 4 * cols**2
        # A copy of the Hessian in act-order and in float64; and one that is divided by smoothing factors, if any.
        copies = hessian * (3 if plan.options.transforms is None else 4)
        rounding = per_weight * min(rows * cols, max(AT_ONCE, cols * rows_at_once))
        widest = max(widest, copies, hessians * hessian + rounding)
    return [MemoryStep(name, collecting + widest, f"leave {option} out")]


def sensitivity_steps(checkpoint: Checkpoint, plan: Plan, length: int) -> list[MemoryStep]:
    """Return the steps of weighing tokens and outputs with texts of `length` tokens, one in memory at a time.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    weights = weight_memory(checkpoint)
    inputs = weights.layers * hidden_bytes(checkpoint, length)
    # Gradients keep all that a layer computes, and on some CPUs its weights in float32.
    layer = 3 * weights.layer + 4 * GRADIENT_WIDTHS * weights.width * length
    logits = GRADIENT_LOGITS * length * (vocabulary_of(checkpoint) or 0)
    nbytes = weights.rest + inputs + curvature_memory(plan) + max(layer, 3 * weights.whole_head + logits)
    return [MemoryStep("weighing tokens and outputs", nbytes, "leave --tune out")]


def curvature_memory(plan: Plan) -> int:
    """Return the bytes of the curvatures over the outputs of all layers, in blocks on their diagonals."""
    rows = (weight.shape[0] for weight, _ in plan.gptq_rounded if not plan.entry.experts(weight.module))
    return sum(-(-count // BLOCK) * 4 * BLOCK**2 for count in rows)


def hessian_nbytes(width: int) -> int:
    """Return the bytes of a float32 Hessian [width, width], and of inputs that wait to be added to it."""
    return 4 * width * (width + ROWS)


def hessian_memory(plan: Plan) -> int:
    """Return the bytes of the largest Hessian [in, in] in float32, with the outputs of all layers that share it.

    For experts the Hessian of all tokens of their MoE layer is added. 0 if GPTQ rounds no weight.
    """
    fused: dict[tuple[str, ...], list[int]] = {}
    for weight, scheme in plan.gptq_rounded:
        key = tuple(plan.decisions.fused.get(weight.module, (weight.module,)))
        sizes = fused.setdefault(key, [hessian_nbytes(weight.shape[1])])
        sizes.append(sum(info.nbytes for info in rounded_tensors(weight, scheme)))
    all_tokens = max(
        (hessian_nbytes(weight.shape[1]) for weight, _ in plan.gptq_rounded if plan.entry.experts(weight.module)),
        default=0,
    )
    return max(map(sum, fused.values()), default=0) + all_tokens


def evaluation_steps(models: Sequence[tuple[str, Checkpoint]], length: int) -> list[MemoryStep]:
    """Return the steps of an evaluation.

    Args:
        models: names and checkpoints: the source, then the outputs.
        length: tokens of each text.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises; the message names the
            model.
        PlanError: the quantization of a model is not supported, or its config.json does not describe it.
    """
    checkpoints = [checkpoint for _, checkpoint in models]
    weights = []
    for name, checkpoint in models:
        with naming(name):
            weights.append(weight_memory(checkpoint))

    # Passes of a batch: the source twice, each output up to twice.
    hidden = 2 * len(checkpoints) * hidden_bytes(checkpoints[0], length)
    computed = 4 * WIDTHS * max(memory.width for memory in weights) * length
    rest = sum(memory.rest for memory in weights)
    layers = sum(memory.layer for memory in weights) + computed + COMPARISON
    tables = sum(memory.table for memory in weights)
    # Logits of two models in bfloat16, and their copies in float32 for the KL divergence.
    logits = 12 * length * (vocabulary_of(checkpoints[0]) or 0)
    quantized_head = any(memory.head > HEAD for memory in weights)
    heads = sum(memory.whole_head if quantized_head else memory.head for memory in weights) + COMPARISON

    nbytes = rest + hidden + max(layers, tables, heads + logits)
    return [MemoryStep(f"evaluating {len(checkpoints)} models", nbytes, _length_hint(length))]


def scoring_step(checkpoint: Checkpoint, passes: int, documents: int, length: int, head: bool) -> MemoryStep:
    """Return the step of a pass in which all documents go through a layer together, with one part of it quantized.

    Args:
        checkpoint: the source.
        passes: forward passes of each document. The hidden states of all are in memory.
        documents: the number of documents.
        length: tokens of each.
        head: whether the output head is quantized too.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    tokens = documents * length
    hidden = hidden_bytes(checkpoint, passes * tokens) + passes * documents * SUSPENDED
    # Logits of the source for all documents, and those of one more pass with copies in float32.
    logits = (2 * tokens + 12 * length) * (vocabulary_of(checkpoint) or 0)
    return MemoryStep("scoring units", hidden + _quantized_pass(checkpoint, 2, length, logits, head))


def mixtures_step(checkpoint: Checkpoint, mixtures: int, copies: int, length: int, head: bool) -> MemoryStep:
    """Return the step of a pass in which documents go through a layer one by one, each in the source and in mixtures.

    Args:
        checkpoint: the source.
        mixtures: the number of mixtures.
        copies: in how many schemes, at most, a weight is in memory besides the source's.
        length: tokens of each document.
        head: whether the output head is quantized too.

    Raises:
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
        PlanError: the quantization is not supported, or config.json does not describe it.
    """
    hidden = hidden_bytes(checkpoint, (1 + mixtures) * length)
    logits = 12 * length * (vocabulary_of(checkpoint) or 0)
    nbytes = hidden + _quantized_pass(checkpoint, 1 + copies, length, logits, head)
    return MemoryStep(f"comparing {mixtures + 1} models", nbytes)


def _quantized_pass(checkpoint: Checkpoint, copies: int, length: int, logits: int, head: bool) -> int:
    """Bytes of a pass with so many copies of its quantized weights in memory, without its hidden states."""
    weights = weight_memory(checkpoint)
    computed = 4 * WIDTHS * weights.width * length + COMPARISON
    heads = max(weights.head, copies * weights.whole_head if head else 0)
    return weights.rest + computed + FREED + max(copies * weights.layer, weights.table, heads + logits)


def _length_hint(length: int) -> str:
    return f"give texts of fewer than {length} tokens with --length"


def memory_left(max_memory: int | None, steps: Sequence[MemoryStep], refuse: bool = True) -> int | None:
    """Return the bytes of a memory limit that the largest step leaves free; None without a limit.

    Args:
        max_memory: the limit in bytes, or None.
        steps: one step or more.
        refuse: whether a limit that is too small is an error. False after steps that took hours; 0 is returned then.

    Raises:
        UsageError: a step needs more than the limit.
    """
    if max_memory is None:
        return None
    needed, step = max(((step.needed, step) for step in steps), key=lambda pair: pair[0])
    if refuse and max_memory < needed:
        enough = f"give --max-memory {rounded_up(needed)} or more"
        raise UsageError(
            f"a memory of {max_memory:,} bytes is too little: {step.name} takes up to {needed:,}",
            f"{enough}, or {step.hint}" if step.hint else enough,
        )
    return max(0, max_memory - needed)


def answer_memory(max_memory: int | None) -> int | None:
    """Return the bytes that a model's weights may take while it answers prompts, 0 or more; None without a limit.

    Args:
        max_memory: the limit of the process in bytes, or None.
    """
    return memory_left(max_memory, [MemoryStep("answering prompts", COMPARISON)], refuse=False)


def rounded_up(nbytes: int) -> str:
    """Format bytes, two percent more and rounded up, as a value for --max-memory: "890MB", "1.4GB"."""
    megabytes = -(-nbytes * 51 // (50 * 10**7)) * 10
    if megabytes < 1000:
        return f"{megabytes}MB"
    return f"{-(-megabytes // 100) / 10:g}GB"

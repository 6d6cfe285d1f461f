"""How much memory the steps of a command take, from the shapes in headers, before any of them is run.

Each is an upper bound of what a step adds to what the process holds already; docs/evaluation.md has measured peaks.

    steps = calibration_steps(checkpoint, length=512)
    rest = memory_left(2 << 30, steps)      # for hidden states that wait; a UsageError where a step has no room
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError, naming
from ..files.checkpoint import Checkpoint
from ..files.tensors import DTYPE_BITS, TensorInfo
from ..machine import resident
from ..plan.gptq import rounded_tensors
from ..plan.plan import Plan
from ..weights.find import decoded_view
from .session import hidden_bytes, vocabulary_of

# What importing torch and transformers takes, with the class of one model; and what is left of that once they are
# there: the class, and code that its first pass brings in.
IMPORTS, FIRST_PASS = 400 << 20, 64 << 20
# What looking up tokens in an embedding table brings in at most, and what one piece of an output head takes.
LOOKUP, HEAD = 64 << 20, 48 << 20
# float32 numbers of each token that a layer computes with at a time, for each output of its widest matrix: gate, up,
# their product, what is rounded or observed of it, and the bfloat16 halves of all these.
WIDTHS = 5
# Pieces of weights that are held against the source's, in float32 and float64, and of both heads: 170 MB of qwen3-1.7b.
COMPARISON = 224 << 20
# Bytes of each weight that GPTQ rounds at a time: as float32, its errors, the values of its codes, and copies as they
# are put in order; and how many weights that are.
ROUNDED, AT_ONCE = 26, 1 << 24
# Of a module in a list: its list and its number.
_NUMBERED = re.compile(r"(.*?\.\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class MemoryStep:
    """A step of a command.

    Attributes:
        name: what is done, for messages: "calibrating".
        nbytes: bytes that it takes at most, beside what the process holds before.
        shorter: what makes it take less, for a hint: "a shorter --length"; empty where nothing does.
        models: whether it runs models, for which torch and transformers are imported.
    """

    name: str
    nbytes: int
    shorter: str = ""
    models: bool = True

    @property
    def needed(self) -> int:
        """Bytes that the process holds at most while it is done."""
        imports = 0
        if self.models:
            imports = FIRST_PASS if "transformers.modeling_utils" in sys.modules else IMPORTS
        return resident() + imports + self.nbytes


@dataclass(frozen=True)
class WeightMemory:
    """What the weights of a checkpoint take as they are computed with, in bytes but for the last.

    Attributes:
        layer: the largest decoder layer.
        table: what is in memory of an embedding table as tokens are looked up.
        head: what is in memory of an output head as it is computed with.
        whole_head: all of it, which is there where it is held against one that is quantized.
        rest: what lies outside of all these.
        width: outputs of the widest matrix of a layer, those of all experts that a token goes to counted.
    """

    layer: int
    table: int
    head: int
    whole_head: int
    rest: int
    width: int


def weight_memory(checkpoint: Checkpoint) -> WeightMemory:
    """What the weights of a checkpoint take."""
    seen, quantized = decoded_view(checkpoint)
    sizes: dict[str, int] = {}
    for info in seen.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    # As StreamedModel chooses it.
    dtype = "F32" if max(sizes, key=lambda name: sizes[name], default="") == "F32" else "BF16"
    vocabulary = vocabulary_of(checkpoint)
    experts = _experts_of_token(checkpoint)

    def loaded(info: TensorInfo) -> int:
        """A mapped tensor, and copies of it: in another dtype, decoded, and as experts are put together in stacks."""
        count = info.nbytes * 8 // DTYPE_BITS[info.dtype]
        computed = count * DTYPE_BITS[dtype] // 8
        copies = (info.dtype != dtype and info.name not in quantized) + 2 * bool(_EXPERT.search(info.name))
        return (computed if info.name in quantized else info.nbytes) + copies * computed

    layers: dict[str, int] = {}
    tables: list[TensorInfo] = []
    rest, width = 0, 0
    for info in seen.tensors.values():
        if (found := _NUMBERED.match(info.name)) is not None:
            layers[found[1]] = layers.get(found[1], 0) + loaded(info)
            if len(info.shape) > 1:
                width = max(width, max(info.shape[-2:]) * (experts if ".experts" in info.name else 1))
        elif len(info.shape) == 2 and info.shape[0] == vocabulary:
            tables.append(info)
        else:
            rest += info.nbytes + loaded(info)
    # One that is mapped is looked up and multiplied in pieces.
    table = max(
        (min(loaded(info), LOOKUP) if _is_mapped(info, dtype, quantized) else loaded(info) for info in tables),
        default=0,
    )
    head = max((HEAD if _is_mapped(info, dtype, quantized) else loaded(info) for info in tables), default=0)
    whole = max(map(loaded, tables), default=0)
    return WeightMemory(max(layers.values(), default=0), table, head, whole, rest, width)


def _is_mapped(info: TensorInfo, dtype: str, quantized: Iterable[str]) -> bool:
    return info.dtype == dtype and info.name not in quantized


def _experts_of_token(checkpoint: Checkpoint) -> int:
    """The number of experts per token in config.json; 1 if it has none."""
    inner = checkpoint.config.get("text_config")
    places = (checkpoint.config, inner if isinstance(inner, dict) else {})
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")
    counts = (place.get(key) for place in places for key in keys)
    return max((count for count in counts if isinstance(count, int)), default=1)


def pass_memory(checkpoint: Checkpoint, length: int) -> int:
    """Bytes that a layer of a model takes with a text of so many tokens that goes through it."""
    weights = weight_memory(checkpoint)
    computed = 4 * WIDTHS * weights.width * length + hidden_bytes(checkpoint, length)
    return weights.rest + max(weights.layer + computed, weights.table)


def calibration_steps(checkpoint: Checkpoint, length: int) -> list[MemoryStep]:
    """The steps of a calibration with texts of so many tokens."""
    return [MemoryStep("calibrating", pass_memory(checkpoint, length), _shorter(length))]


def gptq_steps(checkpoint: Checkpoint, plan: Plan, length: int) -> list[MemoryStep]:
    """The steps of rounding by GPTQ with texts of so many tokens; every Gram matrix may come by itself."""
    found = pass_memory(checkpoint, length) + hessian_memory(plan)
    widest = 0
    for weight, _ in plan.gptq_rounded:
        rows, cols = weight.shape
        square = 4 * cols**2
        # The matrix once more in order and in float64; and divided, where inputs of layers are.
        feedback = square * (3 if plan.options.transforms is None else 4)
        widest = max(widest, feedback, square + ROUNDED * min(rows * cols, max(AT_ONCE, cols)))
    return [MemoryStep("rounding layers by GPTQ", found + widest, "leave --gptq out")]


def hessian_memory(plan: Plan) -> int:
    """Bytes of the largest Gram matrix, with what becomes of its weights and what stands beside it for experts."""
    sets: dict[tuple[str, ...], list[int]] = {}
    for weight, scheme in plan.gptq_rounded:
        key = tuple(plan.decisions.fused.get(weight.module, (weight.module,)))
        sizes = sets.setdefault(key, [4 * weight.shape[1] ** 2])
        sizes.append(sum(info.nbytes for info in rounded_tensors(weight, scheme)))
    beside = max(
        (4 * weight.shape[1] ** 2 for weight, _ in plan.gptq_rounded if plan.entry.experts(weight.module)), default=0
    )
    return max(map(sum, sets.values()), default=0) + beside


def evaluation_steps(models: Sequence[tuple[str, Checkpoint]], length: int) -> list[MemoryStep]:
    """The steps of an evaluation of outputs, after their source, each with its name, on texts of so many tokens.

    Raises:
        SourceError: a weight of one is damaged; says of which.
    """
    checkpoints, weights = [checkpoint for _, checkpoint in models], []
    for name, checkpoint in models:
        with naming(name):
            weights.append(weight_memory(checkpoint))
    # The source twice, each output up to twice, all of them side by side.
    hidden = 2 * len(checkpoints) * hidden_bytes(checkpoints[0], length)
    computed = 4 * WIDTHS * max(each.width for each in weights) * length
    rest, them = sum(each.rest for each in weights), f"{len(checkpoints)} models"
    layers = sum(each.layer for each in weights) + computed + COMPARISON
    tables = sum(each.table for each in weights)
    # Two models' logits in bfloat16, and what their divergence is computed from in float32.
    logits = 12 * length * (vocabulary_of(checkpoints[0]) or 0)
    decoded = any(each.head > HEAD for each in weights)
    heads = sum(each.whole_head if decoded else each.head for each in weights) + COMPARISON
    return [
        MemoryStep(f"evaluating layers of {them}", rest + hidden + max(layers, tables), _shorter(length)),
        MemoryStep(f"comparing what {them} answer", rest + hidden + heads + logits, _shorter(length)),
    ]


def _shorter(length: int) -> str:
    return f"give texts of fewer than {length} tokens with --length"


def memory_left(max_memory: int | None, steps: Sequence[MemoryStep], refuse: bool = True) -> int | None:
    """Bytes of the memory that no step takes; None where there is no limit.

    Args:
        max_memory: the limit.
        steps: at least one.
        refuse: whether a limit that is too little is an error; what earlier steps took hours for is not thrown away.

    Raises:
        UsageError: a step takes more.
    """
    if max_memory is None:
        return None
    needed, step = max(((step.needed, step) for step in steps), key=lambda each: each[0])
    if refuse and max_memory < needed:
        hint = f"give --max-memory {rounded_up(needed)} or more"
        raise UsageError(
            f"a memory of {max_memory:,} bytes is too little: {step.name} takes up to {needed:,}",
            f"{hint}, or {step.shorter}" if step.shorter else hint,
        )
    return max(0, max_memory - needed)


def answer_memory(max_memory: int | None) -> int | None:
    """Bytes that the weights of a model which answers prompts may take; None where there is no limit."""
    return memory_left(max_memory, [MemoryStep("answering prompts", COMPARISON)], refuse=False)


def rounded_up(nbytes: int) -> str:
    """A size as --max-memory takes it, a fiftieth larger: "890MB", "1.4GB"."""
    megabytes = -(-nbytes * 51 // (50 * 10**7)) * 10
    return f"{megabytes}MB" if megabytes < 1000 else f"{-(-megabytes // 100) / 10:g}GB"

"""Figures of a plan: sizes, counts and titles for the terminal, the model card and `--json`.

    summary.title(plan)             # "one scale per tensor, 16 of 28 layers one scale per output row"
    summary.output_bytes(plan)      # 9434513408, before anything is read

Nothing is decided here, and the conversion does not use it.
"""

from __future__ import annotations

from collections import Counter

from ..formats.names import KEPT, KEPT_SUFFIX, UNCHANGED
from ..formats.schemes import Scheme
from .architecture import ParallelSize, check_parallel_sizes, text_config
from .engines import sglang_refusal
from .plan import Plan, has_fp8_cache
from .serving import Serving, estimate_serving


def source_bytes(plan: Plan) -> int:
    """Return the size of the tensors of a plan's source in bytes."""
    return sum(info.nbytes for info in plan.source.tensors.values())


def output_bytes(plan: Plan) -> int:
    """Return the size of the tensors of a plan's output in bytes."""
    return sum(shard.nbytes for shard in plan.layout.shards)


def quantized_bytes(plan: Plan) -> int:
    """Return the size in the source, in bytes, of the weights that are quantized in the output."""
    return sum(line.bytes_before for line in plan.lines if line.quantized)


def quantized_tensors(plan: Plan) -> int:
    """Count the layers that are quantized in the output."""
    return sum(schemes(plan).values())


def decoded_tensors(plan: Plan) -> int:
    """Count the weights that are quantized in the source, but not in the output."""
    return sum(len(line.names) for line in plan.lines if line.decoded)


def has_quantized_source(plan: Plan) -> bool:
    """Whether any weight is quantized in the source."""
    return any(kept.weight for kept in plan.decisions.passthrough) or any(
        layer.format for layer in plan.layers.values()
    )


def schemes(plan: Plan) -> dict[Scheme, int]:
    """Count the layers of each scheme.

    Args:
        plan: what a run will write.

    Returns:
        The number of layers, by scheme, the plan's own first.
    """
    counts = dict.fromkeys(plan.decisions.schemes, 0)
    for line in plan.lines:
        if line.scheme is not None:
            counts[line.scheme] += len(line.names)
    return counts


def scheme_names(plan: Plan) -> dict[str, int]:
    """Count the layers of each scheme.

    Args:
        plan: what a run will write.

    Returns:
        The number of layers, by the name that the user types: {"tensor": 196}; the plan's own first.
    """
    counts = Counter[str]()
    for scheme, count in schemes(plan).items():
        counts[scheme.name] += count
    return dict(counts)


def scheme_name(plan: Plan) -> str:
    """Return the name of the plan's own scheme: "tensor"; "none" if weights are copied, "bf16" if they are decoded,
    "keep" if codes and scales of the source are kept.
    """
    if plan.decisions.keeps:
        return KEPT
    if plan.scheme is None:
        return UNCHANGED if plan.quantization_config else "bf16"
    return plan.scheme.name


def title(plan: Plan) -> str:
    """Say what shares a scale: "one scale per tensor, 16 of 28 layers one scale per output row".

    Without a scheme: "weights as they are" if they are copied, "bfloat16 weights" if they are decoded.
    """
    if plan.scheme is None:
        return "weights as they are" if plan.quantization_config else "bfloat16 weights"
    counts = schemes(plan)
    most, *others = counts
    total = sum(counts.values())
    titles = [most.title]
    for other in others:
        number = f"{other.format.number.name}, " if other.format.number.name != most.format.number.name else ""
        titles.append(f"{counts[other]} of {total} layers {number}{other.title}")
    return ", ".join(titles)


def description(plan: Plan) -> str:
    """Describe the weights that a plan writes.

    Args:
        plan: what a run will write.

    Returns:
        Numeric format, and what shares a scale: "float8_e4m3fn, one scale per tensor"; layers of other schemes follow.
        "bfloat16 weights" or "weights as they are" if nothing is quantized.
    """
    return title(plan) if plan.scheme is None else f"{plan.scheme.format.number.name}, {title(plan)}"


def numbers(plan: Plan) -> str:
    """Name the weights' numeric formats: "FP8", "FP8 and INT8" or "BF16"; "unchanged" if none is quantized here."""
    titles = dict.fromkeys(scheme.format.number.title for scheme in plan.decisions.schemes)
    return (" and ".join(titles) or "unchanged") if plan.quantization_config else "BF16"


def suffix(plan: Plan) -> str:
    """Return the suffix of the output's default name: "-FP8", or "-BF16" if weights are decoded. With an FP8 KV cache
    "-KV8" follows, and stands alone if weights are copied. What keeps the source's codes and scales has "-CT" alone.
    """
    if plan.decisions.keeps:
        return KEPT_SUFFIX
    cache_suffix = "-KV8" if has_fp8_cache(plan) else ""
    if plan.scheme:
        return plan.scheme.suffix + cache_suffix
    return cache_suffix if plan.quantization_config else f"-BF16{cache_suffix}"


def cache_layers(plan: Plan) -> int:
    """Count the layers for which the plan adds scales of the KV cache."""
    return sum(kept.value is not None for kept in plan.decisions.passthrough) // 2


def engines(plan: Plan) -> tuple[str, ...]:
    """Return the engines that can serve the output: ("vLLM", "SGLang")."""
    return ("vLLM", "SGLang") if sglang_refusal(plan.entry, plan.decisions) is None else ("vLLM",)


def parallel_sizes(plan: Plan) -> list[int]:
    """Return the tensor-parallel sizes that can serve the output: [1, 2, 4]."""
    return [parallel.size for parallel in plan.parallel if parallel.problem is None]


def source_parallel(plan: Plan) -> tuple[ParallelSize, ...]:
    """Return tensor-parallel sizes, each with the reason for which it cannot serve the plan's source, if any."""
    if plan.scheme is None:
        return plan.parallel
    formats = ((layer, layer.format) for layer in plan.layers.values())
    return check_parallel_sizes(plan.decoded, plan.entry, formats, None)


def serving(plan: Plan) -> tuple[Serving, Serving] | None:
    """Compute what it takes to serve the source and the output.

    Args:
        plan: what a run will write.

    Returns:
        Bytes of weights and caches and the GPUs needed, of the source, then of the output; None for a plan to
        dequantize.
    """
    if not plan.quantization_config:
        return None
    config = text_config(plan.decoded, plan.model)
    return (
        estimate_serving(plan.lines, plan.entry, config, source_parallel(plan), output=False),
        estimate_serving(plan.lines, plan.entry, config, plan.parallel, output=True),
    )

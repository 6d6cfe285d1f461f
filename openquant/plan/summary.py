"""What is said of a plan: sizes, counts and titles for terminals, the model card and `--json`.

    summary.title(plan)             # "one scale per tensor, 16 of 28 layers one scale per output row"
    summary.output_bytes(plan)      # 9434513408, before anything is read

Nothing is decided here, and the conversion needs none of it.
"""

from __future__ import annotations

from collections import Counter

from ..formats.names import UNCHANGED
from ..formats.schemes import Scheme
from . import tensor_parallel
from .config import has_fp8_cache
from .engines import unread_by_sglang
from .plan import Plan
from .serving import Serving
from .serving import serving as serving_of
from .tensor_parallel import text_config


def source_bytes(plan: Plan) -> int:
    """Size in bytes of the source's tensors."""
    return sum(info.nbytes for info in plan.source.tensors.values())


def output_bytes(plan: Plan) -> int:
    """Size in bytes of the output's tensors."""
    return sum(shard.nbytes for shard in plan.layout.shards)


def quantized_bytes(plan: Plan) -> int:
    """Bytes in the source of all that is quantized in the output."""
    return sum(line.bytes_before for line in plan.lines if line.quantized)


def quantized_tensors(plan: Plan) -> int:
    """How many layers are quantized."""
    return sum(schemes(plan).values())


def decoded_tensors(plan: Plan) -> int:
    """How many weights are quantized in the source, and not in the output."""
    return sum(len(line.names) for line in plan.lines if line.decoded)


def has_quantized_source(plan: Plan) -> bool:
    """Whether any weight is quantized in the source."""
    return any(kept.weight for kept in plan.decisions.kept) or any(layer.format for layer in plan.layers.values())


def schemes(plan: Plan) -> dict[Scheme, int]:
    """How many layers each scheme has, the plan's own first."""
    counts = dict.fromkeys(plan.decisions.schemes, 0)
    for line in plan.lines:
        if line.scheme is not None:
            counts[line.scheme] += len(line.names)
    return counts


def scheme_names(plan: Plan) -> dict[str, int]:
    """How many layers each scheme has, by what the user types, the plan's own first."""
    counts = Counter[str]()
    for scheme, count in schemes(plan).items():
        counts[scheme.name] += count
    return dict(counts)


def scheme_name(plan: Plan) -> str:
    """What the user calls the scheme of most: "tensor", "none" where weights stay as they are, "bf16" without."""
    if plan.scheme is None:
        return UNCHANGED if plan.quantization_config else "bf16"
    return plan.scheme.name


def title(plan: Plan) -> str:
    """What shares a scale: "one scale per tensor, 16 of 28 layers one scale per output row"."""
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
    """What the weights are: "float8_e4m3fn, one scale per tensor"."""
    return title(plan) if plan.scheme is None else f"{plan.scheme.format.number.name}, {title(plan)}"


def numbers(plan: Plan) -> str:
    """What the weights are called: "FP8", "FP8 and INT8", or "BF16"; "unchanged" where all of them are."""
    titles = dict.fromkeys(scheme.format.number.title for scheme in plan.decisions.schemes)
    return (" and ".join(titles) or "unchanged") if plan.quantization_config else "BF16"


def suffix(plan: Plan) -> str:
    """What the output's name ends in if the user gives none: "-FP8"."""
    own = plan.scheme.suffix if plan.scheme else "" if plan.quantization_config else "-BF16"
    return f"{own}-KV8" if has_fp8_cache(plan) else own


def cache_layers(plan: Plan) -> int:
    """How many layers have scales of keys and values that the plan makes."""
    return sum(kept.made is not None for kept in plan.decisions.kept) // 2


def engines(plan: Plan) -> tuple[str, ...]:
    """Who serves the output: ("vLLM", "SGLang")."""
    return ("vLLM", "SGLang") if unread_by_sglang(plan.entry, plan.decisions) is None else ("vLLM",)


def parallel_sizes(plan: Plan) -> list[int]:
    """The tensor-parallel sizes that can serve the output: [1, 2, 4]."""
    return [entry.size for entry in plan.parallel if entry.problem is None]


def serving(plan: Plan) -> tuple[Serving, Serving] | None:
    """What it takes to serve the source, and the output; None for one to decode, of which no entry is asked."""
    if not plan.quantization_config:
        return None
    sizes = before = parallel_sizes(plan)
    if plan.scheme is not None:
        groups = ((layer, layer.format.indivisible if layer.format else (1, 1)) for layer in plan.layers.values())
        stored = tensor_parallel.parallel_sizes(plan.seen, plan.entry, groups, None)
        before = [entry.size for entry in stored if entry.problem is None]
    config = text_config(plan.seen, plan.model)
    return (
        serving_of(plan.lines, plan.entry, config, before, output=False),
        serving_of(plan.lines, plan.entry, config, sizes, output=True),
    )

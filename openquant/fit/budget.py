"""The budget of `--fit`: how large the output may be, or how much it may lose.

read_budget("2x24GB")     # Budget("gpu", 24e9, 2)
read_budget("5.0bits")    # Budget("bits", 5.0)
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import PlanError, UsageError
from ..files.small_files import short_repr
from ..options import nats, size
from ..plan.plan import Plan
from ..plan.serving import OVERHEAD, UTILIZATION, UnknownCache, find_cache

FORMS = "give --fit 24GB or 2x24GB (GPUs), size=12.5GB (all weights), 5.0bits (a weight), or kl=0.02"


@dataclass(frozen=True)
class Budget:
    """What an output may take, or lose.

    Attributes:
        kind: "gpu" for the memory of each GPU, "size" for bytes of all weights, "bits" for bits of each weight that may
            be quantized, "kl" for the largest KL divergence.
        value: bytes, bits, or nats.
        gpus: the number of GPUs.
    """

    kind: Literal["gpu", "size", "bits", "kl"]
    value: float
    gpus: int = 1


def read_budget(text: str) -> Budget:
    """Read a budget from the command line.

    Args:
        text: "24GB", "2x24GB", "size=12.5GB", "5.0bits" or "kl=0.02".

    Raises:
        UsageError: it is no budget.
    """
    try:
        if text.startswith("kl="):
            return Budget("kl", _positive(nats(text[3:])))
        if text.startswith("size="):
            return Budget("size", _positive(size(text[5:])))
        if found := re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?) ?bits?", text):
            return Budget("bits", _positive(float(found[1])))
        if found := re.fullmatch(r"(?:(\d{1,4})x)?(\d.*[A-Za-z])", text):
            gpus = int(found[1] or 1)
            return Budget("gpu", _positive(size(found[2])), int(_positive(gpus)))
    except argparse.ArgumentTypeError:
        pass
    raise UsageError(f"--fit {short_repr(text)} is no size", FORMS)


def _positive(number: float) -> float:
    if not number > 0:
        raise argparse.ArgumentTypeError("it is zero")
    return number


def weights_on_gpus(budget: Budget, plan: Plan, config: Mapping[str, Any], context: int, fp8_cache: bool) -> int:
    """Return how many bytes of weights fit on GPUs beside the KV cache of one sequence.

    Args:
        budget: memory and number of the GPUs.
        plan: a plan of the model.
        config: the language model's part of config.json.
        context: tokens of the sequence.
        fp8_cache: whether the cache is FP8 rather than bfloat16.

    Returns:
        Bytes of all weights together, those of MTP layers left out.

    Raises:
        PlanError: the size of the cache is not known, the model's layers do not divide among so many GPUs, or the cache
            leaves no memory.
    """
    problems = {size.size: size.problem for size in plan.parallel}
    problem = problems.get(budget.gpus, "they do not divide it")
    if problem is not None:
        possible = ", ".join(str(gpus) for gpus, problem in problems.items() if problem is None)
        raise PlanError(f"{budget.gpus} GPUs cannot share this model: {problem}", f"name one of {possible} GPUs")
    try:
        cache = find_cache(plan.lines, plan.entry, config)
    except UnknownCache as error:
        raise PlanError(f"it is not known {error}", "give the bytes of the weights: --fit size=12.5GB") from None
    if budget.gpus > 1 and any(layers.heads is None for layers in cache.layers):
        raise PlanError(
            "it is not known how GPUs divide this model's KV cache", "give the bytes of the weights: --fit size=12.5GB"
        )
    cached = cache.sequence(context, fp8_cache, budget.gpus)
    room = int(budget.value * UTILIZATION) - OVERHEAD - cached
    if room <= 0:
        raise PlanError(
            f"{budget.value / 1e9:g} GB of GPU memory leave nothing for weights: a KV cache of {context:,} tokens "
            f"takes {cached / 1e9:.1f} GB, and engines take {OVERHEAD / 1e9:g} GB",
            "name more memory, or a smaller --context",
        )
    whole = sum(line.bytes_after for line in plan.lines if not plan.entry.rule(line.names[0]).divided)
    return (room - whole) * budget.gpus + whole

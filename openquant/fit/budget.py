"""The budget of `--fit`: how large the output may be, or how much it may lose.

read_budget("2x24GB")     # Budget("gpu", 24e9, 2)
read_budget("2x4090")     # Budget("gpu", 25232932864, 2, GPU("RTX 4090", ...))
read_budget("5.0bits")    # Budget("bits", 5.0)
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError, UsageError
from ..fields import flags_of, options_of, size
from ..files.model_files import short_repr
from ..formats.hardware import GPU, find_gpu, is_apple, nearest_gpus
from ..options import Recipe
from ..plan.plan import Plan
from ..plan.serving import FEWEST_TOKENS, OVERHEAD, LoadedWeights, UnknownCache, find_cache, loaded_weights
from ..registry.architecture import MTP_LAYER

# Options of a recipe that --fit decides.
CHOSEN = (
    *("scheme", "scheme_for", "format", "scale_format", "activation_scheme", "group_size", "asymmetric", "no_search"),
    *("smooth", "awq"),
)
FORMS = "give --fit 24GB, 2x24GB or 4090 (GPUs), size=12.5GB (all weights), 5.0bits (a weight), or kl=0.02"
ON_APPLE = "serve it with mlx-lm or llama.cpp, which have formats of their own"


@dataclass(frozen=True)
class Budget:
    """What an output may take, or lose.

    Attributes:
        kind: "gpu" for the memory of each GPU, "size" for bytes of all weights, "bits" for bits of each weight that may
            be quantized, "kl" for the largest KL divergence.
        value: bytes, bits, or nats.
        gpus: the number of GPUs.
        gpu: the GPU that was named; None if only memory was.
    """

    kind: Literal["gpu", "size", "bits", "kl"]
    value: float
    gpus: int = 1
    gpu: GPU | None = None


def read_budget(text: str) -> Budget:
    """Read a budget from the command line.

    Args:
        text: "24GB", "2x24GB", "4090", "2xA100-80", "size=12.5GB", "5.0bits" or "kl=0.02".

    Raises:
        UsageError: it is no budget, or the CPU, whose memory is not known.
    """
    try:
        if text.startswith("kl="):
            return Budget("kl", _positive(float(text[3:])))
        if text.startswith("size="):
            return Budget("size", _positive(size(text[5:])))
        if found := re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?) ?bits?", text):
            return Budget("bits", _positive(float(found[1])))
    except (argparse.ArgumentTypeError, ValueError):
        pass

    budget = _read_gpus(text, "--fit", "no size", FORMS)
    if not budget.value:
        raise UsageError("how much memory a CPU has for weights is not known", "give --fit size=12.5GB")
    return budget


def refuse_options(recipe: Recipe) -> None:
    """Refuse options that --fit decides.

    Args:
        recipe: options of the output.

    Raises:
        UsageError: one of CHOSEN is given.
    """
    given = [name for name in CHOSEN if getattr(recipe, name) != getattr(Recipe(), name)]
    flag = next((flags_of(name, options_of(Recipe)[name])[0] for name in given), None)
    if flag is not None:
        raise UsageError(f"--fit chooses the schemes, and {flag} is given", "leave one of them out")


def read_gpus(text: str) -> Budget:
    """Read GPUs from the command line.

    Args:
        text: "24GB", "2x24GB", "4090", "2xA100-80" or "cpu".

    Returns:
        A budget of the kind "gpu"; its `value` is 0 for the CPU, whose memory is not known.

    Raises:
        UsageError: it is no GPU, and no size.
    """
    return _read_gpus(text, "--gpu", "no GPU that is known", "give its memory: --gpu 24GB or 2x24GB")


def _read_gpus(text: str, flag: str, what: str, forms: str) -> Budget:
    """Read number and name or memory of GPUs: "2x4090", "7900xtx" or "24GB"; an error names the flag."""
    count = 1
    name = text
    found = re.fullmatch(r"(\d{1,4}) ?[xX] ?(.+)", text)
    if found is not None and find_gpu(text) is None:
        count = int(found[1])
        name = found[2]

    gpu = find_gpu(name)
    try:
        if gpu is not None:
            return Budget("gpu", gpu.memory or 0, int(_positive(count)), gpu)
        # "2080Ti" is a card that is not known, and no 2080 TiB. Alone, a number is no size.
        if re.search("[A-Za-z]$", name) and not re.search(r"\d ?ti$", name, re.IGNORECASE):
            return Budget("gpu", _positive(size(name)), int(_positive(count)))
    except argparse.ArgumentTypeError:
        pass

    if is_apple(name):
        raise UsageError(f"{flag} {short_repr(text)}: vLLM and SGLang have no kernels for Apple's GPUs", ON_APPLE)
    nearest = nearest_gpus(name)
    near = f"did you mean {' or '.join(nearest)}? Otherwise " if nearest else ""
    raise UsageError(f"{flag} {short_repr(text)} is {what}", f"{near}{forms}")


def _positive(number: float) -> float:
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("it is zero or infinite")
    return number


def weights_on_gpus(budget: Budget, plan: Plan, context: int, fp8_cache: bool) -> int:
    """Return how many bytes of weights fit on GPUs beside the KV cache of one sequence.

    Args:
        budget: memory and number of the GPUs.
        plan: a plan of the model.
        context: tokens of the sequence.
        fp8_cache: whether the cache is FP8 rather than bfloat16.

    Returns:
        Bytes of all weights together. Those of MTP layers, which GPUs do not load, come on top.

    Raises:
        PlanError: the context is longer than the model allows, the size of the cache is not known, the model's layers
            do not divide among so many GPUs, or the cache leaves no memory.
    """
    problem = plan.parallel.get(budget.gpus, "they do not divide it")
    if problem is not None:
        possible = ", ".join(str(gpus) for gpus, problem in plan.parallel.items() if problem is None)
        raise PlanError(f"{budget.gpus} GPUs cannot share this model: {problem}", f"name one of {possible} GPUs")

    try:
        cache = find_cache(plan)
    except UnknownCache as error:
        raise PlanError(f"it is not known {error}", "give the bytes of the weights: --fit size=12.5GB") from None

    if not cache.divides(budget.gpus):
        raise PlanError(
            "it is not known how GPUs divide this model's KV cache", "give the bytes of the weights: --fit size=12.5GB"
        )

    weights = loaded_weights(plan, output=True)
    cached = cache.sequence(allowed_context(context, cache.length), fp8_cache, budget.gpus)
    room = LoadedWeights(0, 0).room(int(budget.value), budget.gpus) - cached

    if room <= 0:
        raise PlanError(
            f"{budget.value / 1e9:g} GB of GPU memory leave nothing for weights: a KV cache of {context:,} tokens "
            f"takes {cached / 1e9:.1f} GB, and engines take {OVERHEAD / 1e9:g} GB",
            "name more memory, or a smaller --context",
        )

    unloaded = sum(line.bytes_after for line in plan.lines if line.why == MTP_LAYER)
    return (room - weights.copied) * budget.gpus + weights.copied + unloaded


def allowed_context(context: int, length: int | None) -> int:
    """Return the length of a sequence that the model allows.

    Args:
        context: tokens of `--context`.
        length: the longest sequence that config.json allows; None if it does not say.

    Returns:
        The context; or if the model is made for less than the default of `--context`, what it is made for.

    Raises:
        PlanError: the context is longer.
    """
    if length is None or context <= length:
        return context
    if context <= FEWEST_TOKENS:
        return length
    raise PlanError(
        f"--context {context} is more than the model allows: max_position_embeddings is {length:,}",
        f"give --context {length} or less, or first change config.json as the model's makers say",
    )

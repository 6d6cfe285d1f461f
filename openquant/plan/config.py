"""The output's config.json, and questions about it."""

from __future__ import annotations

from typing import Any

from ..formats.numbers import says_fp8_cache
from .plan import Plan

_COMPRESSED_TENSORS = "compressed-tensors"


def output_config(plan: Plan) -> dict[str, Any]:
    """Return the output's config.json.

    Args:
        plan: what a run will write.

    Returns:
        The content of the source's config.json, with the plan's quantization_config in place of its own, or none; and
        the other keys that the entry says an output has (Architecture.extra_config).
    """
    quantization = {"quantization_config": plan.quantization_config} if plan.quantization_config else {}
    extra = plan.model.extra_config(plan.scheme.name if plan.scheme else None, plan.decoded.config)
    return {**plan.decoded.config, **extra, **quantization}


def ignored_layers(plan: Plan) -> list[str]:
    """Return the output's ignore list.

    Args:
        plan: what a run will write.

    Returns:
        Names of unquantized modules, under every name that engines look up, and regular expressions ("re:..."); empty
        without a scheme.
    """
    return [] if plan.scheme is None else list(plan.quantization_config[plan.scheme.ignored_keys[0]])


def has_fp8_cache(plan: Plan) -> bool:
    """Return whether a plan's output has an FP8 KV cache, with scales for it."""
    return says_fp8_cache(plan.quantization_config)


def required_package(plan: Plan) -> str | None:
    """Return the package that transformers needs to load a plan's output, "compressed-tensors"; None if none."""
    return _COMPRESSED_TENSORS if plan.quantization_config.get("quant_method") == _COMPRESSED_TENSORS else None

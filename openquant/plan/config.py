"""What an output's config.json says, and what follows from it."""

from __future__ import annotations

from typing import Any

from ..formats.kv_cache import says_fp8_cache
from .plan import Plan

_COMPRESSED_TENSORS = "compressed-tensors"


def output_config(plan: Plan) -> dict[str, Any]:
    """The output's config.json: the source's, with the plan's quantization_config in place of its own."""
    ours = {"quantization_config": plan.quantization_config} if plan.quantization_config else {}
    written = plan.model.written(plan.scheme.name if plan.scheme else None, plan.seen.config)
    return {**plan.seen.config, **written, **ours}


def ignored_layers(plan: Plan) -> list[str]:
    """Modules left unquantized, in every name the engines look them up under; empty without a scheme."""
    return [] if plan.scheme is None else list(plan.quantization_config[plan.scheme.ignored_keys[0]])


def has_fp8_cache(plan: Plan) -> bool:
    """Whether engines cache keys and values in FP8, for which the output has scales."""
    return says_fp8_cache(plan.quantization_config)


def required_package(plan: Plan) -> str | None:
    """The package that transformers needs to read the output; None for nothing else."""
    return _COMPRESSED_TENSORS if plan.quantization_config.get("quant_method") == _COMPRESSED_TENSORS else None

"""What engines do not load of a plan: some of it stops the plan, the rest is printed with it."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..formats.schemes import Scheme
from ..patterns import collapse
from ..registry.architecture import Architecture, Refusal, SGLangLimits
from ..registry.rules import ModuleRules, is_head
from ..version import VLLM
from .decisions import Decisions
from .tensor_parallel import text_config

# Codes in int32.
WORDS = "pack-quantized"
_NO_HEAD = "leave --quantize-lm-head out"


def unread_by_sglang(entry: ModuleRules, decisions: Decisions) -> Refusal | None:
    """Why SGLang does not load what is decided, and what it loads instead; None if it does or nothing is quantized."""
    scheme, sglang = decisions.scheme, entry.model.sglang
    if scheme is None:
        return _unread_cache(sglang, decisions)
    quantized = [(weight.module, scheme) for weight, scheme in decisions.kinds if not is_head(weight.module)]
    for module, chosen in quantized:
        if "SGLang" not in chosen.engines:
            return Refusal(None, None, f"it knows no {chosen.name}", "try another scheme")
        if "SGLang" not in chosen.expert_engines and entry.experts(module):
            hint = "give them another scheme with --scheme-for, or leave them as they are with --ignore"
            points = " with zero points" if chosen.asymmetric else ""
            return Refusal(None, None, f"it loads no experts in {chosen.name}{points}", hint)
        refusal = sglang.refusal(chosen.name, chosen.method)
        if refusal is not None:
            return refusal
    if any(entry.rule(module).plain for module, _ in quantized):
        return Refusal(None, None, f"it builds {_named(sglang.plain)} in bfloat16", "with --ignore for that it loads")
    packed = (module for module, chosen in quantized if chosen.format.codes == "weight_packed")
    if any(entry.rule(module).unpacked for module in packed):
        why = f"it takes no packed codes for {_named(sglang.unpacked)}"
        return Refusal(None, None, why, "with --ignore for that it loads")
    if sglang.head is not None and len(quantized) < len(decisions.kinds):
        return Refusal(None, None, sglang.head, "without --quantize-lm-head it loads")
    uneven = any(decision.scheme is None or not is_head(module) for module, decision in decisions.others.items())
    if quantized and uneven and scheme.method in sglang.alike:
        return Refusal(None, None, "it finds none of these layers by name", "with all layers alike it loads")
    unread = _unread_cache(sglang, decisions)
    if unread is not None:
        return unread
    # Such experts ask the whole config for its format (compressed_tensors_wNa16_moe.py:75-84).
    mixed = len({chosen.settings.get("format") for _, chosen in decisions.kinds}) > 1
    words = (module for module, chosen in quantized if chosen.settings.get("format") == WORDS and entry.experts(module))
    if mixed and any(words):
        hint = "give the experts --scheme-for nvfp4, or all layers the same"
        return Refusal(None, None, "it loads experts in words only where all layers are in words", hint)
    # It asks the group of all Linear layers for the size of blocks (compressed_tensors.py:272-279).
    blocks = (module for module, chosen in quantized if chosen.name == "block" and not entry.experts(module))
    if scheme.name != "block" and any(blocks):
        return Refusal(None, None, "it loads blocks only where most layers have them", "-w 128 with --scheme-for loads")
    return None


def _unread_cache(sglang: SGLangLimits, decisions: Decisions) -> Refusal | None:
    """Why it does not load an output for its scales of keys and values; None if it does or there are none."""
    made = [kept.made for kept in decisions.kept if kept.made is not None] if sglang.cache is not None else []
    if sglang.cache is None or not (any(each != 1.0 for each in made) if sglang.cache_of_ones else made):
        return None
    hint = "without --calibration it loads" if sglang.cache_of_ones else "without --kv-cache it loads"
    return Refusal(None, None, sglang.cache, hint)


def _named(patterns: tuple[str, ...]) -> str:
    return ", ".join(f"**{pattern}" for pattern in patterns)


def refuse_schemes(model: Architecture, schemes: Iterable[Scheme]) -> None:
    """Stop where engines do not load an architecture in one of the schemes that are asked for.

    Raises:
        PlanError: it says why, and what is loaded instead.
    """
    for scheme in dict.fromkeys(schemes):
        refusal = model.refusal(scheme.name, scheme.method)
        if refusal is not None:
            raise PlanError(f"{model.name} cannot be served with {scheme.title}: {refusal.why}", refusal.hint)


def refuse_experts(entry: ModuleRules, decisions: Decisions) -> None:
    """Stop where experts have a scheme in which engines load none."""
    if all(scheme.expert_engines for scheme in decisions.schemes):
        return
    refused: dict[str, Scheme] = {}
    for weight, scheme in decisions.quantized:
        if not scheme.expert_engines and (path := entry.experts(weight.module)):
            refused[path] = scheme
    if refused:
        scheme = next(iter(refused.values()))
        raise PlanError(
            f"{', '.join(collapse(refused))}: engines load no experts with {scheme.title} in the {scheme.method} "
            "format",
            "use --scheme channel or --format fp8, give them another scheme with --scheme-for, or leave them as they "
            "are with --ignore",
        )


def refuse_nameless(entry: ModuleRules, decisions: Decisions) -> None:
    """Stop where a module that vLLM builds without a name is stored otherwise than it takes it to be."""
    others = {module: decision.why for module, decision in decisions.others.items() if entry.rule(module).nameless}
    if others:
        why = next(iter(others.values()))
        raise PlanError(
            f"{', '.join(collapse(others))}: {VLLM} builds it without a name to find its scheme by, so it is read "
            f"as most layers are stored ({why})",
            "leave it out of --ignore and --scheme-for, or use --scheme channel, which fits any shape",
        )


def refuse_head(checkpoint: Checkpoint, model: Architecture, scheme: Scheme) -> None:
    """Stop where the output head is to be quantized, and engines load none that is, or the source has none."""
    if scheme.method == "fp8":
        raise PlanError(
            "engines load no quantized output head in the fp8 format",
            "use --scheme channel or --format compressed-tensors",
        )
    if model.head_refused is not None:
        raise PlanError(f"{model.name}: its output head stays as it is: {model.head_refused}", _NO_HEAD)
    tied = any(
        place.get("tie_word_embeddings") is True for place in (checkpoint.config, text_config(checkpoint, model))
    )
    if tied:
        raise PlanError("the output head is the embedding (tie_word_embeddings), which stays as it is", _NO_HEAD)
    if not any(is_head(info.module) for info in checkpoint.tensors.values()):
        raise PlanError("the source has no lm_head.weight: its output head is the embedding", _NO_HEAD)

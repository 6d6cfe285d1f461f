"""Which weights of a plan GPTQ rounds, and what is said of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from ..files.tensors import TensorInfo
from ..formats.schemes import Scheme
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_head
from ..weights.weight import Weight
from .decisions import Decisions


def refuse_repeats(model: Architecture) -> None:
    """Stop where GPTQ is asked for, and a model runs its layers several times.

    Raises:
        PlanError: it does.
    """
    if model.repeats:
        raise PlanError(
            f"{model.name} runs its layers several times, and GPTQ rounds a layer once texts are through it",
            "leave --gptq out",
        )


def gptq_weights(decisions: Decisions) -> list[tuple[Weight, Scheme]]:
    """The weights that GPTQ rounds where it is asked for, each with its scheme.

    The output head is no decoder layer: it is rounded to nearest. What the source has in the scheme already keeps its
    codes, which are nearest and on its own grid.
    """
    return [
        (weight, scheme)
        for weight, scheme in decisions.quantized
        if not is_head(weight.module) and not weight.is_held_by(scheme.format)
    ]


def rounded_tensors(weight: Weight, scheme: Scheme) -> list[TensorInfo]:
    """The tensors of a weight that rounding makes: codes, scales, a global scale and zero points."""
    form = scheme.format
    above = form.global_scale.name if form.global_scale else None
    names = {f"{weight.module}.{last}" for last in (form.codes, form.scale.name, form.zero_point, above)}
    return [info for info in form.parts(weight.module, weight.shape) if info.name in names]


def rounded_bytes(gptq_rounded: list[tuple[Weight, Scheme]]) -> int:
    """Bytes that they take until the output has them."""
    return sum(info.nbytes for weight, scheme in gptq_rounded for info in rounded_tensors(weight, scheme))


def tokens_of(texts: Mapping[str, Any]) -> str:
    """How much was read: "128 x 512 tokens"."""
    return f"{texts.get('documents')} x {texts.get('length')} tokens"


def gptq_notes(decisions: Decisions, entry: ModuleRules, texts: Mapping[str, Any]) -> list[str]:
    """What the user is told of GPTQ."""
    found = gptq_weights(decisions)
    notes = [f"{len(found)} layers are rounded by GPTQ, with the inputs that {tokens_of(texts)} give them"]
    experts = sum(bool(entry.experts(weight.module)) for weight, _ in found)
    if experts:
        notes.append(
            f"{experts} of them are experts, each rounded with the tokens that come to it; those without any with "
            "what goes into their layer, but for down, to nearest"
        )
    return notes

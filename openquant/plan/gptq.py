"""GPTQ's part of a plan: which weights it rounds, and notes about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from ..files.tensors import TensorInfo
from ..formats.schemes import Scheme
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_table
from ..weights.weight import Weight
from .decisions import Decisions


def refuse_repeats(model: Architecture) -> None:
    """Refuse GPTQ for a model that runs its layers several times.

    Args:
        model: the registry's entry of the architecture.

    Raises:
        PlanError: the model does.
    """
    if model.repeats:
        raise PlanError(
            f"{model.name} runs its layers several times, and GPTQ rounds a layer after its first pass",
            "leave --gptq out",
        )


def gptq_weights(decisions: Decisions) -> list[tuple[Weight, Scheme]]:
    """Return the weights that GPTQ rounds.

    Output head and embedding are rounded to nearest, since they are not in a decoder layer. Weights that the source has
    in the scheme already keep their codes.

    Args:
        decisions: the scheme of each weight.

    Returns:
        The weights, each with its scheme.
    """
    return [
        (weight, scheme)
        for weight, scheme in decisions.quantized
        if not is_table(weight.module) and not weight.is_stored_as(scheme.format)
    ]


def rounded_tensors(weight: Weight, scheme: Scheme) -> list[TensorInfo]:
    """Return the tensors that rounding a weight makes.

    Args:
        weight: a weight [out, in].
        scheme: the scheme it is rounded in.

    Returns:
        Name, dtype and shape of its codes, stored scales and, if the format has them, global scale and zero points.
    """
    form = scheme.format
    global_scale = form.global_scale.name if form.global_scale else None
    names = {f"{weight.module}.{last}" for last in (form.codes, form.scale.name, form.zero_point, global_scale)}
    return [info for info in form.parts(weight.module, weight.shape) if info.name in names]


def rounded_bytes(gptq_rounded: list[tuple[Weight, Scheme]]) -> int:
    """Return the size of the scratch files that rounded tensors take until they are in the output.

    Args:
        gptq_rounded: the weights that GPTQ rounds, each with its scheme.

    Returns:
        The size in bytes.
    """
    return sum(info.nbytes for weight, scheme in gptq_rounded for info in rounded_tensors(weight, scheme))


def tokens_of(texts: Mapping[str, Any]) -> str:
    """Say how much calibration text there is.

    Args:
        texts: the calibration texts, {"documents": 128, "length": 512}: the number of documents and of tokens in each.

    Returns:
        "128 x 512 tokens".
    """
    return f"{texts.get('documents')} x {texts.get('length')} tokens"


def gptq_notes(decisions: Decisions, entry: ModuleRules, texts: Mapping[str, Any]) -> list[str]:
    """Return notes about GPTQ for the user.

    Args:
        decisions: the scheme of each weight.
        entry: what the registry says of each module of the architecture.
        texts: the calibration texts, {"documents": 128, "length": 512}: the number of documents and of tokens in each.

    Returns:
        One sentence each: how many layers are rounded, whether the texts are too few, and how experts are rounded.
    """
    weights = gptq_weights(decisions)
    notes = [f"GPTQ rounds {len(weights)} layers with their Hessians over {tokens_of(texts)}"]
    documents, length = texts["documents"], texts["length"]
    inputs = max((weight.shape[1] for weight, _ in weights if not entry.experts(weight.module)), default=0)
    if documents * length < inputs:
        # Such a Hessian has no full rank, and nothing holds the weights of inputs that no token had.
        notes.append(
            f"these are fewer tokens than a layer has inputs ({inputs:,}), and GPTQ may change single groups of it a "
            f"lot: --samples {-(-inputs // length)} gives enough"
        )
    experts = sum(bool(entry.experts(weight.module)) for weight, _ in weights)
    if experts:
        notes.append(
            f"{experts} of them are experts, each rounded with the Hessian over the tokens routed to it; without any "
            "tokens gate and up use the Hessian over all tokens of their layer, and down is rounded to nearest"
        )
    return notes

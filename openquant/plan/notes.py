"""Notes of a plan for the user: what its output does not have of the source, and who does not load it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..files.checkpoint import Checkpoint
from ..formats.quantization import find_quantization
from ..patterns import collapse
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules
from ..version import SGLANG
from ..weights.find import unread_tensors
from ..weights.weight import Weight
from .decisions import Decisions, PlanOptions
from .engines import unread_by_sglang
from .gptq import gptq_notes
from .input_scales import unrouted_note
from .kv_cache import serving_notes


def entry_notes(model: Architecture) -> list[str]:
    """A note of how a registry's entry was decided on; none of the registry's own."""
    return [model.decided] if model.decided else []


def engine_notes(entry: ModuleRules, decisions: Decisions) -> list[str]:
    """A note of why SGLang does not load the output; none where it does."""
    unread = unread_by_sglang(entry, decisions)
    return [] if unread is None else [f"{SGLANG} does not load this output: {unread.why}; {unread.hint}"]


def output_notes(
    checkpoint: Checkpoint, weights: Collection[Weight], entry: ModuleRules, decisions: Decisions, options: PlanOptions
) -> list[str]:
    """Notes of what the output is, once all is decided.

    Args:
        checkpoint: the opened source.
        weights: what of it is quantized there.
        entry: the registry's.
        decisions: what becomes of each tensor.
        options: what the user asks for.
    """
    notes = engine_notes(entry, decisions)
    if options.cached:
        notes += serving_notes(entry.model, decisions)
    elif weights and (find_quantization(checkpoint.config) or {}).get("kv_cache_scheme"):
        notes.append(
            "kv_cache_scheme is left out; its scales stay, and engines use them with --kv-cache-dtype fp8, "
            "or by themselves with --kv-cache fp8 here"
        )
    notes += [*left_behind(checkpoint, weights), *_made_anew(decisions)]
    notes += dict.fromkeys(note for scheme in decisions.schemes for note in scheme.notes)
    if options.calibration is not None and decisions.inputs:
        notes.append(
            f"scales of activations are those of a calibration with {options.calibration.described}, twice as large: "
            "headroom costs nothing, and what lies beyond is cut off"
        )
        notes += unrouted_note(options.calibration, entry, decisions.inputs, decisions.layers)
    notes += options.transforms.notes if options.transforms else ()
    notes += gptq_notes(decisions, entry, options.gptq) if options.gptq else ()
    return notes


def left_behind(checkpoint: Checkpoint, weights: Iterable[Weight]) -> list[str]:
    """A note of the tensors that no output gets; none where it gets all.

    Args:
        checkpoint: the opened source.
        weights: what of it is quantized there.
    """
    found = unread_tensors(checkpoint.tensors, weights)
    return [f"left out, as engines refuse them: {', '.join(collapse(found))}"] if found else []


def _made_anew(decisions: Decisions) -> list[str]:
    """Notes of layers whose codes would be the scheme's own but for what it has no place for."""
    shifted = act_order = 0
    for layer, scheme in decisions.quantized:
        form = layer.format
        if form is None or (form.number, form.group) != (scheme.format.number, scheme.format.group):
            continue
        if form.columns is not None and form.columns.act_order:
            act_order += 1
        elif form.zero_point is not None and not scheme.asymmetric and scheme.group_size is not None:
            shifted += 1
    notes = []
    if shifted:
        notes.append(
            f"{shifted} layers have zero points, which --asymmetric keeps with their codes: they are quantized again"
        )
    if act_order:
        notes.append(f"{act_order} layers have their groups in an order of their own: they are quantized again")
    return notes

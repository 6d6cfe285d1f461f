"""Find the registry's entry for a plan: that of the class, one that the user names, or a generic one.

find_architecture(checkpoint).name             # "Qwen3ForCausalLM"
find_architecture(unknown, "auto").name        # "generic"
"""

from __future__ import annotations

import difflib
import re

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..models import GENERIC, MODELS, find_body, find_entry, fit_prefix
from ..registry.architecture import Architecture
from .tensor_parallel import config_value, text_config

# More layers are nonsense, and would each cost a name.
MOST_LAYERS = 10_000
# The class's own entry if there is one, else the generic one.
AUTO = "auto"
# Classes of draft models in vLLM (models/registry.py:625-704) and SGLang (models/llama_eagle.py, dflash.py, *_mtp.py,
# *_nextn.py). Eagle2_5_VL is none.
_DRAFT_CLASS = re.compile(
    r"P?[Ee]agle3?[A-Z].*|.*(?:Eagle3?|NextN|MTP(?:Model)?|DFlash|DSpark|Speculator)|"
    r".*(?:Medusa|DFlash|DSpark|LiLiCorr|Draft|Assistant|MLPSpeculator|MTP).*(?:Model|ForCausalLM)"
)
# Tensors of EAGLE drafts, whose config.json may name the class of a language model.
_OF_DRAFTS = ("d2t", "t2d", "mask_hidden", "midlayer")


def find_architecture(checkpoint: Checkpoint, requested: str | Architecture | None = None) -> Architecture:
    """Return the entry by which a checkpoint is planned.

    Args:
        checkpoint: the opened source.
        requested: a class that has an entry ("Qwen3ForCausalLM"), "auto" or "generic"; None for the checkpoint's own
            class. An Architecture is returned as it is.

    Returns:
        The registry's entry: patterns that say which modules are quantized, kept, fused and divided among ranks. For
        "auto" that of the checkpoint's class, or the generic entry if the class has none.

    Raises:
        PlanError: there is no such entry, or it is a draft model.
    """
    if isinstance(requested, Architecture):
        return requested
    modules = [info.module for info in checkpoint.tensors.values()]
    if requested in MODELS:
        return with_layer_counts(fit_prefix(MODELS[requested], modules), checkpoint)
    _refuse_draft(checkpoint)
    known = known_architecture(checkpoint)
    if requested == GENERIC.name or (requested == AUTO and known is None):
        return GENERIC
    if known is None or requested not in (None, AUTO):
        raise _unknown(requested or checkpoint.architecture, checkpoint)
    return with_layer_counts(known, checkpoint)


def known_architecture(checkpoint: Checkpoint) -> Architecture | None:
    """Return the registry's entry of a checkpoint's class, or of the class whose body it has; None if there is none.

    Args:
        checkpoint: an opened checkpoint, quantized or not.
    """
    modules = [info.module for info in checkpoint.tensors.values()]
    return find_entry(checkpoint.architecture, checkpoint.config, modules)


def _refuse_draft(checkpoint: Checkpoint) -> None:
    """Refuse a draft model. vLLM numbers its layers on from the target's, so that no ignore list can name them
    (models/llama_eagle3.py:202, 325)."""
    name = checkpoint.architecture
    starts = {tensor.partition(".")[0]: tensor for tensor in checkpoint.tensors}
    of_drafts = (*_OF_DRAFTS, "fc") if "layers" in starts else _OF_DRAFTS
    found = next((starts[start] for start in of_drafts if start in starts), None)
    if _DRAFT_CLASS.fullmatch(name) is None and found is None:
        return
    because = f" ({found})" if found else ""
    raise PlanError(
        f"{name} is a draft model for speculative decoding{because}, which is not converted",
        "convert its target, and serve the draft as it is beside it: vLLM takes it in --speculative-config, SGLang as "
        "--speculative-draft-model-path",
    )


def _unknown(name: str, checkpoint: Checkpoint) -> PlanError:
    """The error for a class without an entry."""
    body = find_body(name, checkpoint.config)[0]
    if body is not None:
        return PlanError(
            f"{name} is not a known architecture; its body is that of {body.name}, and its head is not known",
            f"--architecture {body.name} plans the body; leave the head as it is with --ignore",
        )
    near = difflib.get_close_matches(name, MODELS)
    nearest = f"the nearest are {', '.join(near)}" if near else "none has a name like it"
    return PlanError(
        f"{name} is not a known architecture; of {len(MODELS)} that are, {nearest}",
        "if it is one of them by another name, say which with --architecture; --architecture auto goes "
        "by names and shapes alone; or add an entry to openquant/registry (docs/adding-an-architecture.md)",
    )


def with_layer_counts(model: Architecture, checkpoint: Checkpoint) -> Architecture:
    """Return the entry with engine names that depend on config.json's layer count.

    Args:
        model: the registry's entry of the architecture.
        checkpoint: the opened source, whose config.json has num_hidden_layers.

    Returns:
        The entry with those names filled in; the same entry if it has none, or the count is nonsense.
    """
    layers = config_value(text_config(checkpoint, model), "num_hidden_layers") if model.beyond else 0
    return model.with_layer_count(layers) if isinstance(layers, int) and layers <= MOST_LAYERS else model

"""The memory that serving an existing checkpoint takes, without a plan for it."""

from __future__ import annotations

from dataclasses import replace

from ..files.checkpoint import Checkpoint
from ..formats.format import Format
from ..models import GENERIC
from ..registry.architecture import MTP_LAYER
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .architecture import known_architecture
from .decisions import FEW_AXES, Decisions, Item, PassthroughTensor
from .printed import plan_lines
from .serving import Serving, estimate_serving
from .sort import mtp_layer_finder
from .tensor_parallel import check_parallel_sizes, text_config


def stored_serving(checkpoint: Checkpoint) -> Serving:
    """Compute what it takes to serve a checkpoint as it is.

    Args:
        checkpoint: the opened checkpoint, quantized or not.

    Returns:
        Bytes of its weights, memory of the caches, and for each GPU size how many GPUs it needs and which context fits.

    Raises:
        PlanError: it is quantized in an unknown way.
        SourceError: its scales do not fit its codes.
    """
    decoded, weights = decoded_view(checkpoint)
    entry = ModuleRules(known_architecture(checkpoint) or replace(GENERIC, name=checkpoint.architecture))
    config = text_config(decoded, entry.model)
    is_mtp_layer = mtp_layer_finder(entry.model, config)
    items: list[Item] = []
    layers: list[tuple[Weight, Format | None]] = []
    for info in decoded.tensors.values():
        rule, weight = entry.rule(info.module), weights.get(info.name)
        in_mtp_layer = is_mtp_layer(info.module) or rule.keep == MTP_LAYER
        small = len(info.shape) < 2
        why = FEW_AXES if small else MTP_LAYER if in_mtp_layer else ""
        items.append(PassthroughTensor(info, info.name if small else rule.name_template, why, weight))
        if not small and not in_mtp_layer and rule.split is not None:
            shape = (info.shape[-2], info.shape[-1])
            layers.append((Weight(info.module, rule.name_template, info, shape), weight and weight.format))
    lines = plan_lines(Decisions(None, {"": items}))
    return estimate_serving(lines, entry, config, check_parallel_sizes(decoded, entry, layers, None), output=False)

"""What it takes to serve a checkpoint as it lies, whoever made it; nothing is planned for it."""

from __future__ import annotations

from dataclasses import replace

from ..files.checkpoint import Checkpoint
from ..formats.format import Group
from ..models import GENERIC, MODELS
from ..registry.architecture import DRAFT
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .decisions import FEW_AXES, Decisions, Item, PassthroughTensor
from .printed import plan_lines
from .serving import Serving, serving
from .sort import mtp_layer_finder
from .tensor_parallel import parallel_sizes, text_config


def stored_serving(checkpoint: Checkpoint) -> Serving:
    """What it takes to serve a checkpoint, quantized or not.

    Raises:
        PlanError: it is quantized in an unknown way.
        SourceError: its scales do not belong to its codes.
    """
    seen, weights = decoded_view(checkpoint)
    entry = ModuleRules(MODELS.get(checkpoint.architecture, replace(GENERIC, name=checkpoint.architecture)))
    config = text_config(seen, entry.model)
    drafted = mtp_layer_finder(entry.model, config)
    items: list[Item] = []
    layers: list[tuple[Weight, Group]] = []
    for info in seen.tensors.values():
        rule, weight = entry.rule(info.module), weights.get(info.name)
        draft = drafted(info.module) or rule.keep == DRAFT
        small = len(info.shape) < 2
        why = FEW_AXES if small else DRAFT if draft else ""
        items.append(PassthroughTensor(info, info.name if small else rule.alike, why, weight))
        if not small and not draft and rule.split is not None:
            form = weight.format if weight else None
            shape = (info.shape[-2], info.shape[-1])
            layers.append((Weight(info.module, rule.alike, info, shape), form.indivisible if form else (1, 1)))
    lines = plan_lines(Decisions(None, {"": items}, {}, {}, {}))
    sizes = [one.size for one in parallel_sizes(seen, entry, layers, None) if one.problem is None]
    return serving(lines, entry, config, sizes, output=False)

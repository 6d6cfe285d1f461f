"""What it takes to serve a checkpoint as it lies, whoever made it; nothing is planned for it."""

from __future__ import annotations

from dataclasses import replace

from ..files.checkpoint import Checkpoint
from ..formats.format import Group
from ..models import GENERIC, MODELS
from ..registry.architecture import DRAFT
from ..registry.rules import Entry
from ..weights.find import decoded_view
from ..weights.weight import Weight
from .decisions import FEW_AXES, Fates, Item, Kept
from .printed import lines_of
from .serving import Serving, serving
from .sort import draft_finder
from .tensor_parallel import parallel_sizes, text_config


def stored_serving(checkpoint: Checkpoint) -> Serving:
    """What it takes to serve a checkpoint, quantized or not.

    Raises:
        PlanError: it is quantized in an unknown way.
        SourceError: its scales do not belong to its codes.
    """
    seen, weights = decoded_view(checkpoint)
    entry = Entry(MODELS.get(checkpoint.architecture, replace(GENERIC, name=checkpoint.architecture)))
    config = text_config(seen, entry.model)
    drafted = draft_finder(entry.model, config)
    items: list[Item] = []
    layers: list[tuple[Weight, Group]] = []
    for info in seen.tensors.values():
        role, weight = entry.role(info.module), weights.get(info.name)
        draft = drafted(info.module) or role.keep == DRAFT
        small = len(info.shape) < 2
        why = FEW_AXES if small else DRAFT if draft else ""
        items.append(Kept(info, info.name if small else role.alike, why, weight))
        if not small and not draft and role.split is not None:
            form = weight.format if weight else None
            shape = (info.shape[-2], info.shape[-1])
            layers.append((Weight(info.module, role.alike, info, shape), form.whole if form else (1, 1)))
    lines = lines_of(Fates(None, {"": items}, {}, {}, {}))
    sizes = [one.size for one in parallel_sizes(seen, entry, layers, None) if one.problem is None]
    return serving(lines, entry, config, sizes, output=False)

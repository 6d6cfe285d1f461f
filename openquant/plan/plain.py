"""Plan to decode the weights that a source has quantized, and to copy all else.

make_plain_plan(open_checkpoint(Path("DeepSeek-V3"))).quantization_config     # {}
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..models import GENERIC, MODELS
from ..patterns import template
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view, without_cache_scales
from .decisions import FEW_AXES, Decisions, Item, PassthroughTensor, PlanOptions
from .notes import left_behind
from .plan import Plan


def make_plain_plan(checkpoint: Checkpoint, identity: str = "") -> Plan:
    """Decide to decode whatever is quantized and to leave all else as it is; the registry has no say in that.

    Args:
        checkpoint: the opened source.
        identity: text that tells this source from another with the same headers; it goes into the plan's digest.

    Returns:
        The plan, with no scheme and an empty quantization_config.

    Raises:
        SourceError: its scales do not belong to its codes.
        PlanError: nothing is quantized, or in an unknown way.
    """
    seen, weights = decoded_view(checkpoint)
    # With scales of keys and values alone it is as good as quantized: engines cache them in FP8.
    if not weights and seen.config == checkpoint.config:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "there is nothing to dequantize")
    seen = without_cache_scales(seen)
    items: dict[str, list[Item]] = {shard: [] for shard in seen.shards}
    for info in seen.tensors.values():
        stored = weights.get(info.name)
        if len(info.shape) < 2:
            kept = PassthroughTensor(info, info.name, FEW_AXES)
        else:
            kept = PassthroughTensor(info, template(info.module), "" if stored else "not quantized", stored)
        items[seen.where[info.name].shard].append(kept)
    entry = ModuleRules(MODELS.get(checkpoint.architecture, replace(GENERIC, name=checkpoint.architecture)))
    notes = tuple(left_behind(checkpoint, weights.values()))
    return Plan(checkpoint, seen, entry, PlanOptions(), Decisions(None, items, {}, {}, {}), {}, (), notes, identity)

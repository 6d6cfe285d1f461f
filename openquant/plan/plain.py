"""Plan to dequantize: decode the source's quantized weights and copy all other tensors.

make_plain_plan(open_checkpoint(Path("DeepSeek-V3"))).quantization_config     # {}
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..models import GENERIC
from ..patterns import template
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view, without_cache_scales
from .architecture import known_architecture
from .decisions import FEW_AXES, Decisions, Item, PassthroughTensor, PlanOptions
from .notes import left_behind
from .plan import Plan


def make_plain_plan(checkpoint: Checkpoint, identity: str = "") -> Plan:
    """Plan to decode all quantized weights, whatever the registry says of them, and to leave out KV-cache scales.

    Args:
        checkpoint: the opened source.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.

    Returns:
        What a run will write, with no scheme and an empty quantization_config.

    Raises:
        SourceError: scales do not fit their codes.
        PlanError: nothing is quantized, or in an unknown way.
    """
    decoded, weights = decoded_view(checkpoint)
    # A source with scales of an FP8 KV cache alone counts as quantized.
    if not weights and decoded.config == checkpoint.config:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "there is nothing to dequantize")
    decoded = without_cache_scales(decoded)
    items: dict[str, list[Item]] = {shard: [] for shard in decoded.shards}
    for info in decoded.tensors.values():
        weight = weights.get(info.name)
        if len(info.shape) < 2:
            kept = PassthroughTensor(info, template(info.name) if weight else info.name, FEW_AXES, weight)
        else:
            kept = PassthroughTensor(info, template(info.module), "" if weight else "not quantized", weight)
        items[decoded.where[info.name].shard].append(kept)
    entry = ModuleRules(known_architecture(checkpoint) or replace(GENERIC, name=checkpoint.architecture))
    notes = tuple(left_behind(checkpoint, weights.values()))
    return Plan(checkpoint, decoded, entry, PlanOptions(), Decisions(None, items), {}, (), notes, identity)

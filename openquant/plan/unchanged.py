"""Plan to leave all weights as they are, and to add the scales of keys and values that an FP8 cache needs.

make_unchanged_plan(open_checkpoint(Path("Qwen3-8B")), Options(cached=True))
"""

from __future__ import annotations

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..formats.kv_cache import DENSE, with_fp8_cache
from ..formats.names import UNCHANGED
from ..patterns import template
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view
from .architecture import find_architecture
from .assign import refuse_size
from .decisions import Decisions, Item, PassthroughTensor, PlanOptions, StackedTensor
from .input_scales import expect_calibration, require_widths
from .kv_cache import add_scales, cache_layers, serving_notes
from .notes import engine_notes, entry_notes
from .plan import Plan
from .sort import sort_tensors
from .tensor_parallel import parallel_sizes, text_config

_WHY = f"--scheme {UNCHANGED}"


def make_unchanged_plan(
    checkpoint: Checkpoint, options: PlanOptions, identity: str = "", architecture: str | Architecture | None = None
) -> Plan:
    """Decide to copy every tensor, and where the scales of keys and values go.

    Args:
        checkpoint: the opened source.
        options: of which the calibration counts, and the tensor-parallel size.
        identity: as for make_plan.
        architecture: likewise.

    Raises:
        PlanError: weights of the source are quantized, which layers cache keys and values is not known, or engines load
            no scales of theirs.
        SourceError: the source is quantized, and its scales do not belong to its codes.
        UsageError: a size that is none.
    """
    model = find_architecture(checkpoint, architecture)
    seen, stored = decoded_view(checkpoint)
    if stored:
        raise PlanError(
            f"{len(stored)} weights of {checkpoint.root} are quantized, and {_WHY} writes unquantized ones",
            "give --kv-cache fp8 with the scheme that they have, which keeps their codes, or dequantize it first",
        )
    entry, config = ModuleRules(model), text_config(seen, model)
    sorted_, layers = sort_tensors(seen, {}, entry, lambda _: True, settled=False)
    options = expect_calibration(options, seen.tensors, required=False)
    if options.calibration is not None:
        require_widths(options.calibration, layers.values())
    items: dict[str, list[Item]] = {shard: [_kept(item) for item in held] for shard, held in sorted_.items()}
    cached = cache_layers((info.module for info in seen.tensors.values()), entry, config)
    scales = add_scales(items, seen, cached, options.calibration)
    if options.tp is not None:
        refuse_size(entry, layers, config, options.tp)
    decisions = Decisions(None, items, {}, {}, {})
    notes = (*entry_notes(model), *scales, *serving_notes(model, decisions), *engine_notes(entry, decisions))
    parallel = parallel_sizes(seen, entry, ((layer, (1, 1)) for layer in layers.values()), options.tp)
    return Plan(checkpoint, seen, entry, options, decisions, with_fp8_cache(DENSE), parallel, notes, identity)


def _kept(item: Item) -> PassthroughTensor:
    """A tensor as it is, whatever could be made of it."""
    if isinstance(item, PassthroughTensor):
        return item
    source = item.tensor if isinstance(item, StackedTensor) else item.source
    return PassthroughTensor(source, template(source.module), _WHY)

"""Plan to copy all weights, and to add the scales that an FP8 KV cache needs (--scheme none).

make_unchanged_plan(open_checkpoint(Path("Qwen3-8B")), PlanOptions(fp8_kv_cache=True))
"""

from __future__ import annotations

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..formats.names import UNCHANGED
from ..formats.numbers import DENSE, with_fp8_cache
from ..patterns import template
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules
from ..weights.find import decoded_view
from .architecture import find_architecture
from .assign import check_options, refuse_size
from .decisions import Decisions, Item, PassthroughTensor, PlanOptions, StackedTensor
from .input_scales import expect_calibration, require_widths
from .kv_cache import add_scales, find_cached_attentions, serving_notes
from .notes import engine_notes, entry_notes
from .plan import Plan
from .sort import sort_tensors
from .tensor_parallel import check_parallel_sizes, text_config

_WHY = f"--scheme {UNCHANGED}"


def make_unchanged_plan(
    checkpoint: Checkpoint, options: PlanOptions, identity: str = "", architecture: str | Architecture | None = None
) -> Plan:
    """Plan to copy every tensor and add scales of the KV cache.

    Args:
        checkpoint: the opened source.
        options: what the user asks for; only the calibration, or what it takes to make one, and the tensor-parallel
            size are used.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.

    Returns:
        What a run will write, without a scheme.

    Raises:
        PlanError: weights of the source are quantized, its architecture is unknown, no pattern matches a tensor, it is
            not known which layers have a KV cache, engines load no scales for it, the calibration lacks a layer or
            cannot be made, or the tensor-parallel size does not divide the layers.
        SourceError: scales of a quantized source do not fit its codes, or the calibration does not fit its layers.
        UsageError: the tensor-parallel size is below 1.
    """
    check_options(options)
    model = find_architecture(checkpoint, architecture)
    decoded, weights = decoded_view(checkpoint)
    if weights:
        raise PlanError(
            f"{len(weights)} weights of {checkpoint.root} are quantized, and {_WHY} writes unquantized ones",
            "give --kv-cache fp8 with the scheme that they have, which keeps their codes, or dequantize it first",
        )
    entry, config = ModuleRules(model), text_config(decoded, model)
    sorted_items, layers = sort_tensors(decoded, {}, entry, lambda _: True, in_scheme=False)
    options = expect_calibration(options, decoded.tensors, required=False)
    if options.calibration is not None:
        require_widths(options.calibration, layers.values())
    items: dict[str, list[Item]] = {
        shard: [_passthrough(item) for item in shard_items] for shard, shard_items in sorted_items.items()
    }
    attentions = find_cached_attentions((info.module for info in decoded.tensors.values()), entry, config)
    cache_notes = add_scales(items, decoded, attentions, options.calibration)
    if options.tp is not None:
        refuse_size(entry, layers, config, options.tp)
    decisions = Decisions(None, items)
    notes = (*entry_notes(model), *cache_notes, *serving_notes(model, decisions), *engine_notes(entry, decisions))
    parallel = check_parallel_sizes(decoded, entry, ((layer, None) for layer in layers.values()), options.tp)
    return Plan(checkpoint, decoded, entry, options, decisions, with_fp8_cache(DENSE), parallel, notes, identity)


def _passthrough(item: Item) -> PassthroughTensor:
    """The tensor to be copied, even if it may be quantized."""
    if isinstance(item, PassthroughTensor):
        return item
    source = item.tensor if isinstance(item, StackedTensor) else item.source
    return PassthroughTensor(source, template(source.module), _WHY)

"""Tunings put into a plan: each weight gets its own, and tensors that folds change are written so."""

from __future__ import annotations

from ..weights.transform import Tunings
from ..weights.weight import Weight
from .decisions import Item, Kept, Stack


def tune(items: dict[str, list[Item]], layers: dict[str, Weight], tunings: Tunings) -> None:
    """Give the tensors of a plan, by shard, and its weights, by module, what a calibration changes about them."""
    for found in items.values():
        found[:] = (_tuned(item, tunings) for item in found)
    layers |= {module: _with(weight, tunings) for module, weight in layers.items()}


def _tuned(item: Item, tunings: Tunings) -> Item:
    if isinstance(item, Weight):
        return _with(item, tunings)
    if isinstance(item, Stack):
        return item._replace(layers=tuple(_with(weight, tunings) for weight in item.layers))
    return item._replace(changed=_changed(item, tunings))


def _changed(kept: Kept, tunings: Tunings) -> bytes | Weight | None:
    info = kept.tensor
    if info.name in tunings.tensors:
        data = tunings.tensors[info.name]
        assert len(data) == info.nbytes
        return data
    tuning = tunings.weights.get(info.module)
    if tuning is None or not tuning.folds:
        return None
    return Weight(info.module, kept.alike, info, (info.shape[0], info.shape[1]), tuning=tuning)


def _with(weight: Weight, tunings: Tunings) -> Weight:
    tuning = tunings.weights.get(weight.module)
    return weight if tuning is None else weight._replace(tuning=tuning)

"""Tunings put into a plan: each weight gets its own, and tensors that folds change are written so."""

from __future__ import annotations

from ..weights.transform import WeightTransforms
from ..weights.weight import Weight
from .decisions import Item, PassthroughTensor, StackedTensor


def apply_transforms(items: dict[str, list[Item]], layers: dict[str, Weight], transforms: WeightTransforms) -> None:
    """Give the tensors of a plan, by shard, and its weights, by module, what a calibration changes about them."""
    for found in items.values():
        found[:] = (_tuned(item, transforms) for item in found)
    layers |= {module: _with(weight, transforms) for module, weight in layers.items()}


def _tuned(item: Item, transforms: WeightTransforms) -> Item:
    if isinstance(item, Weight):
        return _with(item, transforms)
    if isinstance(item, StackedTensor):
        return item._replace(layers=tuple(_with(weight, transforms) for weight in item.layers))
    return item._replace(changed=_changed(item, transforms))


def _changed(kept: PassthroughTensor, transforms: WeightTransforms) -> bytes | Weight | None:
    info = kept.tensor
    if info.name in transforms.tensors:
        data = transforms.tensors[info.name]
        assert len(data) == info.nbytes
        return data
    transform = transforms.weights.get(info.module)
    if transform is None or not transform.folds:
        return None
    return Weight(info.module, kept.alike, info, (info.shape[0], info.shape[1]), transform=transform)


def _with(weight: Weight, transforms: WeightTransforms) -> Weight:
    transform = transforms.weights.get(weight.module)
    return weight if transform is None else weight._replace(transform=transform)

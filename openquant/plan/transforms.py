"""Put the weight transforms of SmoothQuant or AWQ into a plan."""

from __future__ import annotations

from ..weights.weight import Weight, WeightTransforms
from .decisions import Item, PassthroughTensor, StackedTensor


def apply_transforms(items: dict[str, list[Item]], layers: dict[str, Weight], transforms: WeightTransforms) -> None:
    """Add transforms to the weights of a plan, and new values to the norms and biases that smoothing changes.

    Args:
        items: all tensors, by file name of the shard; changed in place.
        layers: the weights that may be quantized, by full module name; changed in place.
        transforms: what the calibration changes: factors of matrices by full module name, and new bytes of norms and
            biases by tensor name.
    """
    for shard_items in items.values():
        shard_items[:] = (_transform_item(item, transforms) for item in shard_items)
    layers |= {module: _with_transform(weight, transforms) for module, weight in layers.items()}


def _transform_item(item: Item, transforms: WeightTransforms) -> Item:
    if isinstance(item, Weight):
        return _with_transform(item, transforms)
    if isinstance(item, StackedTensor):
        return item._replace(layers=tuple(_with_transform(weight, transforms) for weight in item.layers))
    return item._replace(smoothed=_smoothed(item, transforms))


def _smoothed(kept: PassthroughTensor, transforms: WeightTransforms) -> bytes | Weight | None:
    info = kept.tensor
    if info.name in transforms.tensors:
        data = transforms.tensors[info.name]
        assert len(data) == info.nbytes
        return data
    transform = transforms.weights.get(info.module)
    if transform is None or not transform.smooths:
        return None
    return Weight(info.module, kept.name_template, info, (info.shape[0], info.shape[1]), transform=transform)


def _with_transform(weight: Weight, transforms: WeightTransforms) -> Weight:
    transform = transforms.weights.get(weight.module)
    return weight if transform is None else weight._replace(transform=transform)

"""Projections that a file holds as one tensor, in a part for each of some ranks, as MiMo V2.5 has q, k and v in FP8.

A part has the rows of its queries, keys and values one below the other, and blocks of scales that begin with it: where
its rows are no whole number of blocks, the tensor has more scales than blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SourceError
from ..files.tensors import TensorInfo
from ..formats.format import Format, grid_of
from ..patterns import template
from ..registry.architecture import PerRankTensor
from .weight import Weight


def per_rank_projections(
    module: str, codes: TensorInfo, scale: TensorInfo, form: Format, held: PerRankTensor, config: Mapping[str, Any]
) -> list[Weight]:
    """The projections that such a tensor holds, as weights of their own.

    Args:
        module: its own name.
        codes: the tensor.
        scale: its scales.
        form: how it is stored.
        held: what the registry says of it.
        config: config.json, where it has the sizes.

    Raises:
        SourceError: config.json says no sizes that account for its rows, or it has other scales than these parts have.
    """
    ranks = _count(config, held.ranks)
    known = [[_rows(config, ranks, *keys) for keys in sizes] for sizes in held.sizes]
    fitting = [sizes for sizes in known if all(sizes) and sum(sizes) * ranks == codes.shape[0]]
    if not fitting or any(sizes != fitting[0] for sizes in fitting):
        raise SourceError(
            f"{codes.name} is {list(codes.shape)}, and config.json has no heads that make as many rows, in a part for "
            f"each of {held.ranks}",
            "put back the config.json that belongs to these weights",
        )
    rows, cols = sum(fitting[0]), codes.shape[1]
    down, along = grid_of(form.group, (rows, cols))
    # As many in a row of blocks, whether they begin with each part or the parts are whole blocks.
    if scale.shape != (ranks * down, along):
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {ranks} parts of {[rows, cols]} with {form.label} it must be "
            f"{[ranks * down, along]}",
            "download it again: it is damaged or incomplete",
        )
    parts = codes._replace(shape=(ranks, rows, cols)), scale._replace(shape=(ranks, down, along))
    found, first = [], 0
    for name, size in zip(held.members, fitting[0], strict=True):
        own = f"{module.rpartition('.')[0]}.{name}"
        shape = ranks * size, cols
        source = TensorInfo(f"{own}.weight", "BF16", shape)
        within = (first, first + size)
        found.append(Weight(own, template(own), source, shape, format=form, parts=parts, within=within))
        first += size
    return found


def _rows(config: Mapping[str, Any], ranks: int, heads: str, size: str) -> int:
    """Rows that a part has of heads, so many for each; 0 if config.json does not tell."""
    count = _count(config, heads)
    return count // ranks * _count(config, size) if ranks and count % ranks == 0 else 0


def _count(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) and found > 0 else 0

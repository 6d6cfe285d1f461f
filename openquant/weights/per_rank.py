"""Projections that one tensor stores per tensor-parallel rank, as MiMo V2.5 has q, k and v in FP8.

The rows of such a tensor are the queries, keys and values of rank 0, then those of rank 1, and so on. Blocks of scales
begin anew at each rank: where a rank's rows are no whole number of blocks, the tensor has more scales than blocks.
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
    module: str, codes: TensorInfo, scale: TensorInfo, fmt: Format, tensor: PerRankTensor, config: Mapping[str, Any]
) -> list[Weight]:
    """Split a tensor that is stored per rank into its projections.

    Args:
        module: module of the tensor, such as "model.layers.0.self_attn.qkv_proj".
        codes: name, dtype and shape of the codes, FP8 [ranks * rows, in].
        scale: name, dtype and shape of the scales, [ranks * rows of blocks, columns of blocks].
        fmt: the format of the codes.
        tensor: the registry's description of the tensor: its projections, and where config.json has their sizes.
        config: the parsed config.json, which holds numbers and sizes of heads.

    Returns:
        One weight for each projection, with `rank_rows`.

    Raises:
        SourceError: the sizes of config.json do not account for the rows, or the scales have another shape.
    """
    ranks = _positive(config, tensor.ranks)
    candidates = [[_rows(config, ranks, *keys) for keys in sizes] for sizes in tensor.sizes]
    fitting = [sizes for sizes in candidates if all(sizes) and sum(sizes) * ranks == codes.shape[0]]
    if not fitting or any(sizes != fitting[0] for sizes in fitting):
        raise SourceError(
            f"{codes.name} is {list(codes.shape)}, and config.json has no heads that give so many rows, in a part for "
            f"each of {tensor.ranks}",
            "put back the config.json that belongs to these weights",
        )
    rows, cols = sum(fitting[0]), codes.shape[1]
    grid_rows, grid_cols = grid_of(fmt.group, (rows, cols))
    # The same number of columns whether blocks begin anew at each rank or not.
    if scale.shape != (ranks * grid_rows, grid_cols):
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {ranks} parts of {[rows, cols]} with {fmt.label} it must be "
            f"{[ranks * grid_rows, grid_cols]}",
            "download it again: it is damaged or incomplete",
        )
    parts = codes._replace(shape=(ranks, rows, cols)), scale._replace(shape=(ranks, grid_rows, grid_cols))
    weights, first = [], 0
    for name, size in zip(tensor.members, fitting[0], strict=True):
        projection = f"{module.rpartition('.')[0]}.{name}"
        shape, end = (ranks * size, cols), first + size
        source = TensorInfo(f"{projection}.weight", "BF16", shape)
        weights.append(
            Weight(projection, template(projection), source, shape, format=fmt, parts=parts, rank_rows=(first, end))
        )
        first = end
    return weights


def _rows(config: Mapping[str, Any], ranks: int, heads: str, size: str) -> int:
    """Return the rows of one rank: its heads times the rows of a head; 0 if config.json does not say."""
    count = _positive(config, heads)
    return count // ranks * _positive(config, size) if ranks and count % ranks == 0 else 0


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0

"""A checkpoint's model of which one unit's weights are in memory at a time; interleaved.py takes passes through it.

streamed = StreamedModel(open_checkpoint(path))
streamed.load("model.layers.0")         # and with free() they are given back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..files.checkpoint import Checkpoint
from ..weights.find import decoded_view
from ..weights.weight import Weight
from . import transformers_internals
from .lazy_tensors import LazyTensors
from .meta_model import REST, MetaModel
from .shard_provider import LocalShards, ShardProvider

# Bytes of an embedding table that is looked into piece by piece, and tokens of a piece; and of an output head that is
# multiplied in pieces of half as many.
LARGE_TABLE = 1 << 26
LOOKUPS = 64


class StreamedModel:
    """A checkpoint's model, of which only the weights that are being computed with are in memory.

    Args:
        checkpoint: plain or quantized; what is stored in a Format is decoded into bfloat16.
        dtype: what is computed in; if None float32 for a checkpoint of float32, else bfloat16.
        device: where.

    Attributes:
        checkpoint: what was given.
        traffic: how its shards come, asked by units; set it before anything is loaded. They lie in the checkpoint's
            directory unless it says otherwise.
        model: transformers' own model, on placeholders outside of `run` and `resident`. Pass it `use_cache=False`.
        units: its embedding tables, decoder layers and output head, by module name. Those of towers for images are
            among them, and never called.
        quantized: weights that the checkpoint stores in a Format, by the module of `model` they are the weight of:
            "model.layers.0.mlp.up_proj". Where several become one parameter, such as the experts of a layer, that
            parameter's name has the first of them: "model.layers.0.mlp.experts.gate_up_proj".
        made_of: the tensors of the checkpoint that each parameter is made of, as they would be unquantized.
        order: its units as they are likely called: REST, embedding tables, all others as models list them.
        following: the unit that is likely called after each; REST after the last.
        unexpected: tensors of the checkpoint that the model has no place for: draft layers, scales of the KV cache.
        nbytes: what all weights take when they are loaded.

    Raises:
        SourceError: transformers has no such model, or refuses its config.json.
        PlanError: it is quantized in a way that is not read here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        seen, weights = decoded_view(checkpoint)
        self.checkpoint = checkpoint
        self.traffic: ShardProvider = LocalShards(checkpoint.root)
        self.dtype = dtype or _compute_dtype(seen)
        self.device = device
        slices = LazyTensors(seen, weights, lambda shard: self.traffic.path(shard))
        self._skeleton = MetaModel(seen, slices, self.dtype, device)
        self.model: PreTrainedModel = self._skeleton.model
        self.units: Mapping[str, nn.Module] = MappingProxyType(self._skeleton.units)
        self.order = (REST, *sorted(self.units, key=lambda unit: not isinstance(self.units[unit], nn.Embedding)))
        self.following: Mapping[str, str] = dict(zip(self.order[1:], (*self.order[2:], REST), strict=True))
        self.unexpected = self._skeleton.unexpected
        self.nbytes = self._skeleton.nbytes
        made_of: dict[str, tuple[str, ...]] = {}
        for tensor, target in self._skeleton.targets.items():
            made_of[target] = (*made_of.get(target, ()), *self._skeleton.slices.pieces(tensor))
        self.made_of: Mapping[str, tuple[str, ...]] = MappingProxyType(made_of)
        self.quantized: Mapping[str, Weight] = MappingProxyType(
            {
                target.removesuffix(".weight"): weights[tensors[0]]
                for target, tensors in made_of.items()
                if tensors[0] in weights
            }
        )

    def unit_of(self, name: str) -> str:
        """The unit that a parameter or module belongs to; REST outside of all."""
        return self._skeleton.unit_of(name)

    def load(self, unit: str) -> None:
        """Put the weights of a unit in their places; of what lies outside of all units with REST.

        Raises:
            SourceError: one is missing, does not fit or cannot be read.
        """
        self.traffic.wait_for(unit, lambda: False)
        with torch.inference_mode():
            self._skeleton.load(unit)
        if unit == REST:
            self.traffic.finished(unit)

    def free(self, unit: str) -> None:
        """Give the weights of a unit back."""
        self._skeleton.free(unit)
        if unit != REST:
            self.traffic.finished(unit)

    def shards(self, unit: str, more: Iterable[str] = ()) -> set[str]:
        """The shards that a unit is loaded from, and those of more tensors."""
        parts = self._skeleton.slices.parts(self._skeleton.needs[unit].tensors)
        return {*parts, *(self.checkpoint.where[name].shard for name in more)}

    def units_beside(self, names: Iterable[str]) -> dict[str, str]:
        """For tensors that the model has no place for, the unit of those that lie nearest to each by name."""
        return self._skeleton.units_beside(names)

    def look_up(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the input embedding's `forward` gives, a few tokens at a time where its table is large.

        With each row that is looked at, the system brings in up to a megabyte of the mapped file around it.
        """
        table = self.model.get_input_embeddings().weight
        if len(args) != 1 or kwargs or args[0].dim() != 2 or table.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)
        found = []
        for ids in args[0].split(max(1, LOOKUPS // args[0].shape[0]), dim=1):
            found.append(forward(ids))
            self._skeleton.slices.let_go()
        return torch.cat(found, dim=1)

    def project(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the output head's `forward` gives, some rows of its weight at a time where that is large.

        Multiplied at once, a mapped weight would come into memory whole: 1.2 GB for Qwen3-8B.
        """
        head = transformers_internals.output_head(self.model)
        if not isinstance(head, nn.Linear) or getattr(forward, "__func__", None) is not nn.Linear.forward:
            return forward(*args, **kwargs)
        if len(args) != 1 or kwargs or self.device != "cpu" or head.weight.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)
        found = args[0].new_empty(*args[0].shape[:-1], len(head.weight))
        step = max(1, LARGE_TABLE // 2 // head.weight[0].nbytes)
        for low in range(0, len(head.weight), step):
            rows = slice(low, low + step)
            found[..., rows] = functional.linear(
                args[0], head.weight[rows], None if head.bias is None else head.bias[rows]
            )
            self._skeleton.slices.let_go()
        return found

    def rest(self) -> None:
        """Have nothing of the files in memory until it is computed with again, while another model computes."""
        self._skeleton.slices.let_go()

    def expect(self, unit: str) -> None:
        """Have the system read the weights of a unit ahead, without waiting for it."""
        self._skeleton.slices.expect(self._skeleton.needs[unit].tensors)

    @contextmanager
    def resident(self) -> Iterator[PreTrainedModel]:
        """Meanwhile all weights are in memory, and the model is one like any other; for `generate`.

        Raises:
            SourceError: as for `load`.
        """
        units = (REST, *self.units)
        try:
            for unit in units:
                self.load(unit)
            with transformers_internals.quiet_transformers(), torch.inference_mode():
                yield self.model
        finally:
            for unit in units:
                self.free(unit)


def _compute_dtype(checkpoint: Checkpoint) -> torch.dtype:
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    # float16 is never computed in: on CPUs it takes fifteen times as long as bfloat16.
    return torch.float32 if max(sizes, key=lambda name: sizes[name]) == "F32" else torch.bfloat16


def shards_by_unit(model: StreamedModel, scales: Mapping[str, Sequence[str]] | None = None) -> dict[str, list[str]]:
    """The shards of each unit of a model, with those of further tensors by unit."""
    return {unit: sorted(model.shards(unit, (scales or {}).get(unit, ()))) for unit in model.order}

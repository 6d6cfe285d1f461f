"""A checkpoint's model of which one unit's weights are in memory at a time; interleaved.py runs forward passes on it.

streamed = StreamedModel(open_checkpoint(path))
streamed.load("model.layers.0")
streamed.free("model.layers.0")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from .lazy_tensors import TORCH_DTYPES, LazyTensors
from .memory import compute_dtype
from .meta_model import REST, MetaModel
from .session import LocalShards, ShardProvider

# Bytes above which embeddings are looked up in pieces of LOOKUPS tokens, and the output head is multiplied in pieces of
# half as many bytes.
LARGE_TABLE = 1 << 26
LOOKUPS = 64


class StreamedModel:
    """A checkpoint's model, of which only the weights that are being computed with are in memory.

    Args:
        checkpoint: the checkpoint; quantized weights are decoded to bfloat16.
        dtype: the dtype it computes in; None for float32 if most of the checkpoint is, else bfloat16.
        device: the device it computes on, such as "cpu".

    Attributes:
        checkpoint: the checkpoint.
        dtype, device: what it computes in and on.
        shard_provider: provides the shards of each unit; by default from the checkpoint's directory. Set another
            before anything is loaded.
        model: transformers' model, whose weights are placeholders while they are not loaded. Call it with
            `use_cache=False`.
        units: its embedding tables, decoder layers and output head, by module name. Layers of vision towers are among
            them, but text does not go through them.
        quantized: the checkpoint's quantized weights, by module of `model`: "model.layers.0.mlp.up_proj". Stacked
            experts have the parameter's name, "model.layers.0.mlp.experts.gate_up_proj", and the first expert's weight.
        made_of: for each parameter, the tensors of the checkpoint that it is made of, by their unquantized names.
        layers: names of the decoder layers, layers of vision towers included, in the order they are computed: the units
            without embedding tables and the output head.
        order: names of the units in the order they are probably called: REST, embedding tables, the others.
        next_unit: for each unit, the one that is probably called next; REST after the last.
        unexpected: tensors of the checkpoint that the model has no parameter for, such as MTP layers and KV cache
            scales.
        nbytes: bytes of all weights when they are loaded.

    Raises:
        SourceError: transformers has no such model, or refuses its config.json.
        PlanError: the checkpoint is quantized in a format that cannot be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        decoded, weights = decoded_view(checkpoint)
        self.checkpoint = checkpoint
        self.shard_provider: ShardProvider = LocalShards(checkpoint.root)
        self.dtype = dtype or TORCH_DTYPES[compute_dtype(decoded)]
        self.device = device
        self._tensors = LazyTensors(decoded, weights, lambda shard: self.shard_provider.path(shard))
        self._meta = MetaModel(decoded, self._tensors, self.dtype, device)
        self.model: PreTrainedModel = self._meta.model
        self.units: Mapping[str, nn.Module] = MappingProxyType(self._meta.units)
        head = transformers_internals.output_head(self.model)
        self.layers = [
            unit for unit, module in self.units.items() if module is not head and not isinstance(module, nn.Embedding)
        ]
        self.order = (REST, *sorted(self.units, key=lambda unit: not isinstance(self.units[unit], nn.Embedding)))
        self.next_unit: Mapping[str, str] = dict(zip(self.order[1:], (*self.order[2:], REST), strict=True))
        self.unexpected = self._meta.unexpected
        self.nbytes = self._meta.nbytes
        made_of: dict[str, tuple[str, ...]] = {}
        for tensor, target in self._meta.targets.items():
            made_of[target] = (*made_of.get(target, ()), *self._tensors.pieces(tensor))
        self.made_of: Mapping[str, tuple[str, ...]] = MappingProxyType(made_of)
        self.quantized: Mapping[str, Weight] = MappingProxyType(
            {
                target.removesuffix(".weight"): weights[tensors[0]]
                for target, tensors in made_of.items()
                if tensors[0] in weights
            }
        )

    def unit_of(self, name: str) -> str:
        """Return the unit that a parameter or module belongs to; REST if none."""
        return self._meta.unit_of(name)

    def load(self, unit: str) -> None:
        """Load the weights of a unit, or with REST those outside of all units, once the shards of it are on disk.

        Raises:
            SourceError: a weight is missing, has the wrong shape, or cannot be read or downloaded.
            OutputError: shards cannot be written, or another rank has failed.
        """
        self.shard_provider.wait_for(unit, lambda: False)
        with torch.inference_mode():
            self._meta.load(unit)
        if unit == REST:
            self.shard_provider.release(unit)

    def load_with(self, unit: str, replaced: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Make the parameters of a loaded unit from other tensors, and leave the unit as it is.

        Args:
            unit: its name.
            replaced: what makes a tensor of the checkpoint in place of reading it, by its unquantized name.

        Returns:
            The parameters that are made of these tensors, by name.

        Raises:
            SourceError: a weight cannot be read.
        """
        with torch.inference_mode():
            return self._meta.load_with(unit, replaced)

    def with_parameters(self, parameters: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which these parameters are in the model, by name."""
        return self._meta.with_parameters(parameters)

    def free(self, unit: str) -> None:
        """Replace the weights of a unit, or of REST, by placeholders. Streamed shards of it may then be deleted."""
        self._meta.free(unit)
        if unit != REST:
            self.shard_provider.release(unit)

    def shards(self, unit: str, more: Iterable[str] = ()) -> set[str]:
        """Return file names of the shards that a unit is loaded from, and of those that have further tensors.

        Args:
            unit: its name, or REST.
            more: names of further tensors of the checkpoint.
        """
        ranges = self._tensors.byte_ranges(self._meta.needs[unit].tensors)
        return {*ranges, *(self.checkpoint.where[name].shard for name in more)}

    def nearest_units(self, names: Iterable[str]) -> dict[str, str]:
        """Find units for tensors of the checkpoint that the model has no parameter for, such as KV cache scales.

        Args:
            names: the tensors.

        Returns:
            For each, the unit whose tensors share the longest prefix of modules with it; REST if none do.
        """
        return self._meta.nearest_units(names)

    def embed_in_pieces(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the input embedding's `forward`, with a few tokens at a time if its table is large.

        For each row that is read, the system reads up to a megabyte of the mapped file around it.

        Args:
            forward: the module's `forward`.
            args: its arguments: token ids [batch, tokens].
            kwargs: its keyword arguments.

        Returns:
            The embeddings [batch, tokens, hidden].
        """
        table = self.model.get_input_embeddings().weight
        if len(args) != 1 or kwargs or args[0].dim() != 2 or table.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)
        embeddings = []
        for ids in args[0].split(max(1, LOOKUPS // args[0].shape[0]), dim=1):
            embeddings.append(forward(ids))
            self.release_pages()
        return torch.cat(embeddings, dim=1)

    def project_in_pieces(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the output head's `forward`, with some rows of its weight at a time if that is large.

        Multiplied at once, all of the mapped weight would come into memory: 1.2 GB for Qwen3-8B.

        Args:
            forward: the module's `forward`.
            args: its arguments: hidden states [..., hidden].
            kwargs: its keyword arguments.

        Returns:
            The logits [..., vocabulary].
        """
        head = transformers_internals.output_head(self.model)
        if not isinstance(head, nn.Linear) or getattr(forward, "__func__", None) is not nn.Linear.forward:
            return forward(*args, **kwargs)
        if len(args) != 1 or kwargs or self.device != "cpu" or head.weight.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)
        logits = args[0].new_empty(*args[0].shape[:-1], len(head.weight))
        step = max(1, LARGE_TABLE // 2 // head.weight[0].nbytes)
        for low in range(0, len(head.weight), step):
            rows = slice(low, low + step)
            logits[..., rows] = functional.linear(
                args[0], head.weight[rows], None if head.bias is None else head.bias[rows]
            )
            self.release_pages()
        return logits

    def release_pages(self) -> None:
        """Drop the pages of mapped weights from memory, such as while another model computes."""
        self._tensors.release_pages()

    def prefetch(self, unit: str) -> None:
        """Ask the system to read the weights of a unit in the background."""
        self._tensors.prefetch(self._meta.needs[unit].tensors)

    @contextmanager
    def resident(self) -> Iterator[PreTrainedModel]:
        """Load all weights inside this context, in which the model is one like any other; for `generate`.

        Raises:
            SourceError: a weight is missing, has the wrong shape or cannot be read.
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


def shards_by_unit(model: StreamedModel, scales: Mapping[str, Sequence[str]] | None = None) -> dict[str, list[str]]:
    """Return file names of the shards of each unit and of REST, sorted.

    Args:
        model: the model.
        scales: by unit, names of further tensors that are read with it, such as scales of inputs.
    """
    return {unit: sorted(model.shards(unit, (scales or {}).get(unit, ()))) for unit in model.order}

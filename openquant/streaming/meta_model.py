"""A model without weights: transformers' own class on placeholders, and what of a checkpoint each part of it takes.

A unit is what weights are loaded for and given back with: an embedding table, a decoder layer, the output head. What
lies outside of units (final norms, projections of images) is the rest, a few megabytes, and is loaded once, into
memory: its shards are not needed while units are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from . import transformers_internals
from .expert_stacks import find_expert_stacks
from .lazy_tensors import LazyTensors

# What lies outside of all units.
REST = ""

# How config.json calls the number of layers, and how the names of sizes end.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "depth")
_AXES = ("_dim", "_dims", "_rank", "_heads", "hidden_size")
_LONGEST_AXIS = 1 << 22
_OTHER_WEIGHTS = "config.json belongs to other weights: download or copy the checkpoint again"


class UnitTensors(NamedTuple):
    """What a unit takes.

    Attributes:
        tensors: names in the checkpoint.
        own: the unit's parameters and stored buffers, by their names in the model.
        borrowed: those of them that are another one, which the checkpoint holds in their place: own name -> other name.
    """

    tensors: tuple[str, ...]
    own: tuple[str, ...]
    borrowed: Mapping[str, str]


class MetaModel:
    """A model on placeholders, and the units of it.

    Args:
        checkpoint: as `decoded_view` has it.
        slices: its tensors.
        dtype: what is computed in.
        device: where.

    Attributes:
        model: the model. Its placeholders have the shape, dtype and device of what they stand for, and are NaN.
        units: its units by module name, in the order of the model's modules.
        targets: the parameter that each tensor of the checkpoint becomes or is a part of; where it holds experts one
            by one and the model stacked, by the name of the stack.
        unexpected: tensors of the checkpoint that the model has no place for, such as draft layers.
        nbytes: what all weights take when they are loaded.

    Raises:
        SourceError: transformers has no such model, refuses config.json, or a weight is missing.
    """

    def __init__(self, checkpoint: Checkpoint, slices: LazyTensors, dtype: torch.dtype, device: str) -> None:
        self.slices, self.dtype, self.device = slices, dtype, device
        kind = transformers_internals.model_class(checkpoint.architecture, checkpoint.config.get("model_type"))
        _refuse_more_than_there_is(checkpoint)
        config = transformers_internals.make_config(kind, checkpoint.config, dtype)
        self.model: PreTrainedModel = transformers_internals.empty_model(kind, config, dtype, device)
        self.units = find_units(self.model)
        owners = {unit.rpartition(".")[0] for unit in self.units}
        modules = {name: self.model.get_submodule(name) for name in owners}
        # Of those that hold units alone; what else lies in a list is a part of the rest.
        self._lists = {
            name: module
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and all(f"{name}.{last}" in self.units for last in module._modules)
        }
        self._initial: dict[str, torch.Tensor] = dict.fromkeys(
            transformers_internals.stored_buffers(self.model), torch.empty(0)
        )
        for name in self._initial:
            self._initial[name] = self.model.get_buffer(name)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self._initial[name] = _placeholder(parameter, device)
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self._initial.values())
        for name in self._initial:
            self._put(name, self._initial[name])
        self.targets = transformers_internals.parameter_targets(self.model, checkpoint.tensors)
        lost = {name: info for name, info in checkpoint.tensors.items() if name not in self.targets}
        stacks = find_expert_stacks(checkpoint.architecture, lost) if lost else {}
        restacked = transformers_internals.parameter_targets(self.model, stacks) if stacks else {}
        self.targets |= restacked
        slices.stacks.update({name: stacks[name] for name in restacked})
        placed = {piece for name in restacked for piece in slices.pieces(name)}
        self.unexpected = tuple(name for name in lost if name not in placed)
        self.needs = self._find_needs()

    def _find_needs(self) -> dict[str, UnitTensors]:
        made_of: dict[str, list[str]] = {}
        for tensor, target in self.targets.items():
            made_of.setdefault(target, []).append(tensor)
        tied = transformers_internals.tied_names(self.model)
        # One converter makes several parameters, and is listed under the first of them.
        partners: dict[str, list[str]] = {}
        for name, other in tied.items():
            partners.setdefault(name, []).append(other)
            partners.setdefault(other, []).append(name)
        own: dict[str, list[str]] = {unit: [] for unit in (REST, *self.units)}
        for name in self._initial:
            own[self.unit_of(name)].append(name)
        found = {}
        for unit, names in own.items():
            borrowed = {}
            for name in names:
                if name not in made_of:
                    others = (other for partner in partners.get(name, ()) for other in (partner, *partners[partner]))
                    source = next((other for other in others if other in made_of), None)
                    if source is not None and source not in names:
                        borrowed[name] = source
            tensors = [tensor for name in (*names, *borrowed.values()) for tensor in made_of.get(name, ())]
            found[unit] = UnitTensors(tuple(dict.fromkeys(tensors)), tuple(names), borrowed)
        return found

    def unit_of(self, name: str) -> str:
        """The unit that a parameter or module belongs to; REST outside of all."""
        while name and name not in self.units:
            name = name.rpartition(".")[0]
        return name

    def units_beside(self, names: Iterable[str]) -> dict[str, str]:
        """For tensors of the checkpoint that the model has no place for, such as scales of the KV cache, the unit of
        those that lie nearest to each by name."""
        owners: dict[str, str] = {}
        for tensor, target in self.targets.items():
            owner = tensor
            while (owner := owner.rpartition(".")[0]) and owner not in owners:
                owners[owner] = self.unit_of(target)
        found = {}
        for name in names:
            owner = name
            while owner and owner not in owners:
                owner = owner.rpartition(".")[0]
            found[name] = owners.get(owner, REST)
        return found

    def load(self, unit: str) -> None:
        """Put the weights of a unit in their places.

        Raises:
            SourceError: one is missing, does not fit or cannot be read.
        """
        needs = self.needs[unit]
        slices = self.slices.of(needs.tensors)
        before = {other: self._get(other) for other in needs.borrowed.values()}
        try:
            with self._only(unit, *map(self.unit_of, needs.borrowed.values())):
                transformers_internals.load_tensors(self.model, slices, self.dtype, self.device)
        finally:
            for piece in slices.values():
                if piece.error is not None:
                    raise piece.error
        for name, other in needs.borrowed.items():
            self._put(name, self._get(other))
        for other, value in before.items():
            self._put(other, value)
        for name in needs.own:
            value = self._get(name)
            if value is self._initial[name] and not transformers_internals.may_lack(self.model, name) and value.numel():
                raise SourceError(
                    f"{name} of {type(self.model).__name__} is missing from the checkpoint",
                    "download or copy it again; a converted model must hold every weight that transformers' class has",
                )
            if unit == REST and value is not self._initial[name]:
                value.data = value.data.clone()
            value.requires_grad_(False)

    @contextmanager
    def _only(self, *units: str) -> Iterator[None]:
        """Meanwhile lists of layers hold these units alone: for each load transformers walks all of the model it sees,
        which for all units of a model of many layers would be their number squared.
        """
        whole = {name: layers._modules for name, layers in self._lists.items()}
        for name, layers in self._lists.items():
            lasts = [unit.rpartition(".")[2] for unit in units if unit.rpartition(".")[0] == name]
            layers._modules = {last: whole[name][last] for last in lasts}
        try:
            yield
        finally:
            for name, layers in self._lists.items():
                layers._modules = whole[name]

    def free(self, unit: str) -> None:
        """Put placeholders where the weights of a unit are."""
        for name in self.needs[unit].own:
            self._put(name, self._initial[name])

    def _get(self, name: str) -> torch.Tensor:
        owner, _, last = name.rpartition(".")
        found: torch.Tensor = getattr(self.model.get_submodule(owner), last)
        return found

    def _put(self, name: str, value: torch.Tensor) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(owner), last, value)


def find_units(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Embedding tables, decoder layers and the output head, by module name."""
    head = transformers_internals.output_head(model)
    found: dict[str, nn.Module] = {}
    inside = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if transformers_internals.is_layer(model, name, module) or isinstance(module, nn.Embedding) or module is head:
            found[name] = module
            inside = f"{name}."
    return found


def _placeholder(parameter: nn.Parameter, device: str) -> nn.Parameter:
    """What stands for a weight: some models ask one for its device, and what is computed with it by mistake shows."""
    value = math.nan if parameter.is_floating_point() else 0
    one = torch.full((), value, dtype=parameter.dtype, device=device)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=False)


def _refuse_more_than_there_is(checkpoint: Checkpoint) -> None:
    """Making a model takes time and memory for each layer, of which a checkpoint has no more than tensors, and for each
    place along an axis, of which rotary tables are made before any weight is asked for."""
    parts = [part for part in (checkpoint.config, *checkpoint.config.values()) if isinstance(part, dict)]
    for key, count in ((key, count) for part in parts for key, count in part.items() if isinstance(count, int)):
        if key in _LAYERS and count > 2 * len(checkpoint.tensors) + 100:
            raise SourceError(
                f"config.json has {count} layers, the checkpoint only {len(checkpoint.tensors)} tensors", _OTHER_WEIGHTS
            )
        if key.endswith(_AXES) and count > _LONGEST_AXIS:
            raise SourceError(f"config.json has {key} {count}, which no weight is", _OTHER_WEIGHTS)

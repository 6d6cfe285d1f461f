"""A model without weights: transformers' own class on placeholders, and the tensors that each unit of it needs.

A unit is the part of the model that is loaded and freed at once: an embedding table, a decoder layer or the output
head. All other weights (final norms, projectors of vision towers) are REST. They are a few megabytes, and are copied
into memory once, so their shards are not needed while units are computed.

Lazy tensors of a checkpoint, as transformers' loader takes them: `tensor[...]` reads one.

A plain tensor is a view of the memory-mapped file, of which only the pages that are computed with are read. A quantized
tensor is decoded to bfloat16, to the values that `openquant dequantize` writes.

Stacks the experts that a checkpoint has one by one, as transformers' classes have them.

Engines load quantized experts one by one, so openquant writes them one by one even if the source has them stacked. The
registry has the layout of each stack. transformers' loader stacks only experts that were published one by one.
"""

from __future__ import annotations

import math
import mmap
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import OpenQuantError, SourceError
from ..files.checkpoint import Checkpoint
from ..files.model_files import open_regular
from ..files.shardfile import TensorInfo
from ..formats import kernels
from ..formats.numbers import Floats
from ..formats.reference import TORCH_DTYPES
from ..models import MODELS
from ..patterns import group_pairs
from ..plan.architecture import known_architecture
from ..registry.architecture import StackedExperts
from ..weights.reading import Reader
from ..weights.weight import Weight
from . import transformers_internals

# Name of the weights outside of all units.
REST = ""


class UnitTensors(NamedTuple):
    """The tensors of a unit.

    Attributes:
        tensors: names of the checkpoint's tensors that it is loaded from.
        parameters: names of its parameters and stored buffers in the model.
        tied: for each tied parameter that the checkpoint does not have, the parameter of another unit that it has,
            such as lm_head.weight -> model.embed_tokens.weight.
    """

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    tied: Mapping[str, str]


class MetaModel:
    """A model on placeholders, whose units can be loaded and freed.

    Args:
        checkpoint: the checkpoint as it would be unquantized, made by `decoded_view`.
        tensors: its lazy tensors.
        dtype: the dtype it computes in.
        device: the device it computes on, such as "cpu".

    Attributes:
        dtype, device: what it computes in and on.
        tensors: the lazy tensors.
        model: transformers' model; call it with `use_cache=False`. Placeholders have the shape, dtype and device of the
            weight and are NaN.
        units: its embedding tables, decoder layers and output head by module name, in the order of the model's modules.
            Layers of vision towers are among them, but text does not go through them.
        needs: the tensors of each unit and of REST.
        targets: for each tensor of the checkpoint, the parameter that it becomes or is a part of. Experts that the
            checkpoint has one by one and the model stacked are listed under the name of the stack.
        nbytes: bytes of all weights when they are loaded.

    Raises:
        SourceError: transformers has no such model, refuses config.json, or a weight is missing.
    """

    def __init__(self, checkpoint: Checkpoint, tensors: LazyTensors, dtype: torch.dtype, device: str) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.device = device

        architecture, settings = _with_output_head(checkpoint)
        kind = transformers_internals.model_class(architecture, settings.get("model_type"))
        config = transformers_internals.make_config(kind, settings, dtype)
        self.model: PreTrainedModel = transformers_internals.empty_model(kind, config, dtype, device)

        self.units = find_units(self.model)
        owners = {unit.rpartition(".")[0] for unit in self.units}
        modules = {name: self.model.get_submodule(name) for name in owners}
        # Lists that contain units only. Other modules in lists belong to REST.
        self._unit_lists = {
            name: module
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and all(f"{name}.{last}" in self.units for last in module._modules)
        }

        self._placeholders: dict[str, torch.Tensor] = {
            name: self.model.get_buffer(name) for name in transformers_internals.stored_buffers(self.model)
        }
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self._placeholders[name] = _placeholder(parameter, device)
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self._placeholders.values())
        for name, placeholder in self._placeholders.items():
            self._set(name, placeholder)

        self.targets = transformers_internals.parameter_targets(self.model, checkpoint.tensors)
        unplaced = {name: info for name, info in checkpoint.tensors.items() if name not in self.targets}
        stacks = find_expert_stacks(architecture, unplaced) if unplaced else {}
        stack_targets = transformers_internals.parameter_targets(self.model, stacks) if stacks else {}
        self.targets |= stack_targets
        tensors.stacks.update({name: stacks[name] for name in stack_targets})
        self.needs = self._find_needs()

    def _find_needs(self) -> dict[str, UnitTensors]:
        made_of = group_pairs((target, tensor) for tensor, target in self.targets.items())

        # Parameters that are tied to each one.
        partners: dict[str, list[str]] = {}
        for name, other in transformers_internals.tied_names(self.model).items():
            partners.setdefault(name, []).append(other)
            partners.setdefault(other, []).append(name)

        parameters: dict[str, list[str]] = {unit: [] for unit in (REST, *self.units)}
        for name in self._placeholders:
            parameters[self.unit_of(name)].append(name)

        needs = {}
        for unit, names in parameters.items():
            tied = {}
            for name in names:
                # Not all that are missing are tied: one converter of transformers may make several parameters.
                if name not in made_of:
                    others = (other for partner in partners.get(name, ()) for other in (partner, *partners[partner]))
                    stored = next((other for other in others if other in made_of), None)
                    if stored is not None and stored not in names:
                        tied[name] = stored
            tensors = [tensor for name in (*names, *tied.values()) for tensor in made_of.get(name, ())]
            needs[unit] = UnitTensors(tuple(dict.fromkeys(tensors)), tuple(names), tied)
        return needs

    def unit_of(self, name: str) -> str:
        """Return the unit that a parameter or module belongs to; REST if none."""
        while name and name not in self.units:
            name = name.rpartition(".")[0]
        return name

    def nearest_units(self, names: Iterable[str]) -> dict[str, str]:
        """Find units for tensors of the checkpoint that the model has no parameter for, such as KV cache scales.

        Args:
            names: the tensors.

        Returns:
            For each, the unit whose tensors share the longest prefix of modules with it; REST if none do.
        """
        units: dict[str, str] = {}
        for tensor, target in self.targets.items():
            module = tensor
            while (module := module.rpartition(".")[0]) and module not in units:
                units[module] = self.unit_of(target)

        nearest = {}
        for name in names:
            module = name
            while module and module not in units:
                module = module.rpartition(".")[0]
            nearest[name] = units.get(module, REST)
        return nearest

    @torch.no_grad()
    def load_weights(self, unit: str) -> None:
        """Load the weights of a unit, or of REST. Its shards must be on disk.

        Raises:
            SourceError: a weight is missing, has the wrong shape or cannot be read.
        """
        needs = self.needs[unit]
        tensors = self.tensors.select(needs.tensors)
        before = {other: self._get(other) for other in needs.tied.values()}
        try:
            with self._only(unit, *map(self.unit_of, needs.tied.values())):
                transformers_internals.load_tensors(self.model, tensors, self.dtype, self.device)
        finally:
            for tensor in tensors.values():
                if tensor.error is not None:
                    raise tensor.error

        # Tied parameters get the other unit's weight, which is then freed there again.
        for name, other in needs.tied.items():
            self._set(name, self._get(other))
        for other, value in before.items():
            self._set(other, value)

        for name in needs.parameters:
            value = self._get(name)
            is_missing = value is self._placeholders[name]
            if is_missing and not transformers_internals.may_lack(self.model, name) and value.numel():
                raise SourceError(
                    f"{name} of {type(self.model).__name__} is missing from the checkpoint",
                    "download or copy it again; a converted model must hold every weight that transformers' class has",
                )
            # A copy, because the shards of REST may be deleted once it is loaded.
            if unit == REST and not is_missing:
                value.data = value.data.clone()
            value.requires_grad_(False)

    def load_with(self, unit: str, replaced: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Make the parameters of a loaded unit from other tensors, and leave the unit as it is.

        Args:
            unit: its name.
            replaced: what makes a tensor of the checkpoint in place of reading it, by name.

        Returns:
            The parameters that are made of these tensors, by name.

        Raises:
            SourceError: a weight cannot be read.
        """
        names = self.needs[unit].parameters
        changed = {
            self.targets[name] for name in self.needs[unit].tensors if replaced.keys() & self.tensors.pieces(name)
        }
        self.tensors.replaced = replaced
        try:
            # At its end the unit has its own parameters again.
            with self.with_parameters({name: self._get(name) for name in names}):
                self.load_weights(unit)
                return {name: self._get(name) for name in names if name in changed}
        finally:
            self.tensors.replaced = {}

    @contextmanager
    def with_parameters(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put these parameters into the model inside this context, by name."""
        before = {name: self._get(name) for name in parameters}
        for name, value in parameters.items():
            self._set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self._set(name, value)

    @contextmanager
    def _only(self, *units: str) -> Iterator[None]:
        """Hide all other units in lists of layers inside this context.

        transformers' loader walks the whole model for each load, so loading all units would take quadratic time.
        """
        all_layers = {name: layers._modules for name, layers in self._unit_lists.items()}
        for name, layers in self._unit_lists.items():
            indices = [unit.rpartition(".")[2] for unit in units if unit.rpartition(".")[0] == name]
            layers._modules = {index: all_layers[name][index] for index in indices}
        try:
            yield
        finally:
            for name, layers in self._unit_lists.items():
                layers._modules = all_layers[name]

    def free(self, unit: str) -> None:
        """Replace the weights of a unit, or of REST, by placeholders."""
        for name in self.needs[unit].parameters:
            self._set(name, self._placeholders[name])

    def _get(self, name: str) -> torch.Tensor:
        owner, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.model.get_submodule(owner), last)
        return tensor

    def _set(self, name: str, value: torch.Tensor) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(owner), last, value)


def find_units(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Find embedding tables, layers and the output head of a model, by module name; layers of vision towers too."""
    head = transformers_internals.output_head(model)
    units: dict[str, nn.Module] = {}
    unit_prefix = None
    for name, module in model.named_modules():
        if unit_prefix is not None and name.startswith(unit_prefix):
            continue
        if transformers_internals.is_layer(model, name, module) or isinstance(module, nn.Embedding) or module is head:
            units[name] = module
            unit_prefix = f"{name}."
    return units


def _with_output_head(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """The class that a checkpoint is run as, and its config.json.

    A model without an output head is run with its embedding as the head, so that its outputs can be compared.
    """
    entry = known_architecture(checkpoint)
    # The class with an output head attends to earlier tokens only.
    if entry is None or entry.has_head or "Bidirectional" in checkpoint.architecture:
        return checkpoint.architecture, checkpoint.config
    return entry.name, {**checkpoint.config, "tie_word_embeddings": True}


def _placeholder(parameter: nn.Parameter, device: str) -> nn.Parameter:
    """A parameter of one value on the device, because some models ask a weight for it. NaN shows in any result."""
    value = math.nan if parameter.is_floating_point() else 0
    scalar = torch.full((), value, dtype=parameter.dtype, device=device)
    return nn.Parameter(scalar.expand(parameter.shape), requires_grad=False)


CHANGED = "the source changed while it was being read: run again"


class LazyTensors:
    """Makes lazy tensors of a checkpoint.

    Args:
        checkpoint: the checkpoint as it would be unquantized, made by `decoded_view`.
        weights: its quantized weights, by tensor name.
        path: returns the path of a shard, by file name.

    Attributes:
        stacks: stacks of experts that the checkpoint has one by one, by the name of the stack. MetaModel adds them.
        replaced: what makes a tensor of the checkpoint in place of reading it, by name.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Mapping[str, Weight], path: Callable[[str], Path]) -> None:
        self.checkpoint = checkpoint
        self.weights = weights
        self.path = path
        self.stacks: dict[str, ExpertStack] = {}
        self.replaced: Mapping[str, Callable[[], torch.Tensor]] = {}
        self._open_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def pieces(self, name: str) -> tuple[str, ...]:
        """Return the names of the checkpoint's tensors that a tensor is made of: its own, or those of a stack."""
        stack = self.stacks.get(name)
        return tuple(member.name for member in stack.members) if stack is not None else (name,)

    def select(self, names: Iterable[str]) -> dict[str, LazyTensor]:
        """Return a lazy tensor for each name. Files stay mapped until the last of their tensors is freed.

        Args:
            names: names of the checkpoint's tensors or of `stacks`. Their shards must be on disk.

        Raises:
            SourceError: a file cannot be read.
        """
        files: dict[str, mmap.mmap] = {}
        tensors: dict[str, LazyTensor] = {}
        for name in names:
            readers = {piece: self._reader(piece, files) for piece in self.pieces(name)}
            if name in self.stacks:
                stack = self.stacks[name]
                tensors[name] = LazyTensor(stack.info, partial(stack.make, readers))
            else:
                tensors[name] = LazyTensor(self.checkpoint.tensors[name], readers[name])
        return tensors

    def _reader(self, name: str, files: dict[str, mmap.mmap]) -> Callable[[], torch.Tensor]:
        """A function that reads a tensor of the checkpoint; its shard is mapped now and added to `files`."""
        if name in self.replaced:
            return self.replaced[name]
        weight = self.weights.get(name)
        if weight is not None:
            return partial(self._decode, weight)
        shard, offset = self.checkpoint.where[name]
        if shard not in files:
            files[shard] = self._map_shard(shard)
        return partial(_plain, self.checkpoint.tensors[name], files[shard], offset)

    def shards(self, names: Iterable[str]) -> set[str]:
        """Return file names of the shards that hold all stored tensors that these are made of."""
        shards: set[str] = set()
        for piece in (piece for name in names for piece in self.pieces(name)):
            weight = self.weights.get(piece)
            stored = (self.checkpoint.tensors[piece],) if weight is None else weight.parts
            shards.update(self.checkpoint.where[info.name].shard for info in stored)
        return shards

    def release_pages(self) -> None:
        """Drop the pages of mapped files from this process's memory; the next access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._open_maps:
                file.madvise(mmap.MADV_DONTNEED)

    def _map_shard(self, shard: str) -> mmap.mmap:
        try:
            with open_regular(self.path(shard), shard, CHANGED) as file:
                # Private pages, because torch warns of buffers that are not writable. Nothing writes to them.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise SourceError(f"{shard} cannot be read: {error.strerror}", CHANGED) from None
        self._open_maps.add(mapped)
        return mapped

    def _decode(self, weight: Weight) -> torch.Tensor:
        """Decode a quantized weight to bfloat16 [out, in], or [experts, out, in]."""
        decoded = torch.empty(weight.source.shape, dtype=torch.bfloat16)
        matrices = weight.matrices
        out = decoded.view(torch.int16).numpy().view(np.uint16).reshape(len(matrices), *(1, *decoded.shape)[-2:])

        reader = Reader(self.checkpoint.where, self.path)
        for target, matrix in zip(out, matrices, strict=True):
            rows = (bits.view(np.float32) for bits in reader.rows(matrix, 1))
            write_bfloat16(rows, target.T if matrix.decodes_transposed else target)
        return decoded


def write_bfloat16(rows: Iterable[Floats], target: npt.NDArray[np.uint16]) -> None:
    """Round rows of a matrix to bfloat16.

    Args:
        rows: float32 [n, in], which follow on one another.
        target: the bits of the matrix [out, in], which are written.
    """
    low = 0
    for values in rows:
        rounded = np.empty(values.shape, np.uint16)
        kernels.to_bfloat16(values, rounded)
        target[low : low + len(rounded)] = rounded
        low += len(rounded)


class LazyTensor:
    """One tensor, read when it is indexed. It has the interface of a slice of safetensors' `safe_open`.

    Args:
        info: its name, dtype and shape.
        read: returns the tensor.

    Attributes:
        error: the error of reading it, of which transformers' loader keeps only the text; None if there was none.
    """

    def __init__(self, info: TensorInfo, read: Callable[[], torch.Tensor]) -> None:
        self.info = info
        self.error: OpenQuantError | None = None
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            return self._read()[index]
        except OpenQuantError as error:
            self.error = error
            raise

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.info.shape)

    def get_dtype(self) -> str:
        """Return its dtype as safetensors names it, such as "BF16"."""
        return self.info.dtype


def _plain(info: TensorInfo, file: mmap.mmap, offset: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[info.dtype]
    count = info.nbytes // dtype.itemsize
    return torch.frombuffer(file, dtype=dtype, count=count, offset=offset).reshape(info.shape)


class StackMember(NamedTuple):
    """One projection of one expert.

    Attributes:
        expert: number of the expert.
        part: number of the projection among the stack's `layout.parts`, such as 1 for up in gate_up.
        name: name of its tensor.
    """

    expert: int
    part: int
    name: str


class ExpertStack(NamedTuple):
    """A stacked tensor whose experts a checkpoint has one by one.

    Attributes:
        info: its name, shape [experts, out, in] or transposed [experts, in, out], and the dtype of its first member.
        layout: its layout in the registry.
        members: the projections it is made of, by expert and part.
    """

    info: TensorInfo
    layout: StackedExperts
    members: tuple[StackMember, ...]

    def make(self, readers: Mapping[str, Callable[[], torch.Tensor]]) -> torch.Tensor:
        """Make the stacked tensor, of shape `info.shape`.

        Args:
            readers: what reads the tensor [out, in] of each of `members`, by name; the first gives the dtype.
        """
        stacked = None
        for member in self.members:
            matrix = readers[member.name]()
            if stacked is None:
                stacked = torch.empty(self.info.shape, dtype=matrix.dtype)
            rows = stacked[member.expert].T if self.layout.transposed else stacked[member.expert]
            rows[member.part * len(matrix) : (member.part + 1) * len(matrix)] = matrix
        assert stacked is not None
        return stacked


def find_expert_stacks(architecture: str, tensors: Mapping[str, TensorInfo]) -> dict[str, ExpertStack]:
    """Find the stacks that a checkpoint's experts belong to.

    Args:
        architecture: the class that config.json names.
        tensors: the checkpoint's tensors that the model has no parameter for, by name.

    Returns:
        Each complete stack under both names it may have: of a parameter, and of a module's weight. Stacks that lack a
        projection are left out.
    """
    stacks: dict[str, ExpertStack] = {}
    for experts in MODELS[architecture].experts if architecture in MODELS else ():
        for layout in experts.stacked:
            parts = "|".join(map(re.escape, layout.parts))
            pattern = re.compile(rf"(.*){re.escape(experts.path)}\.(\d{{1,6}})\.({parts})\.weight")
            members_of: dict[str, list[StackMember]] = {}
            for name in tensors:
                match = pattern.fullmatch(name)
                if match:
                    module = match[1] + experts.place
                    member = StackMember(int(match[2]), layout.parts.index(match[3]), name)
                    members_of.setdefault(module, []).append(member)

            for module, members in members_of.items():
                for name in (f"{module}.{layout.name}", f"{module}.{layout.name}.weight"):
                    stack = _stack(name, layout, sorted(members), tensors)
                    if stack is not None:
                        stacks[name] = stack
    return stacks


def _stack(
    name: str, layout: StackedExperts, members: list[StackMember], tensors: Mapping[str, TensorInfo]
) -> ExpertStack | None:
    """The stack of these members; None if some are missing."""
    count = members[-1].expert + 1
    complete = [(member.expert, member.part) for member in members] == [
        (expert, part) for expert in range(count) for part in range(len(layout.parts))
    ]
    if not complete:
        return None
    rows, cols = tensors[members[0].name].shape
    rows *= len(layout.parts)
    shape = (count, cols, rows) if layout.transposed else (count, rows, cols)
    return ExpertStack(TensorInfo(name, tensors[members[0].name].dtype, shape), layout, tuple(members))

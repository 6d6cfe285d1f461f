"""Where every output tensor goes: the shards, their headers and offsets, and the jobs that fill them.

plan.layout.shards                                       # names and sizes
plan.layout.lay_out("model-00001-of-00005.safetensors").jobs

Output shards correspond to the source's one to one and keep their names, so a finished one never depends on
another one's output. A shard is laid out when its turn comes: its offsets and jobs are many.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..files.tensors import DTYPE_BITS, Location, TensorInfo, make_header
from ..formats.format import Format
from ..formats.schemes import Scheme
from ..weights.weight import Weight
from .decisions import Decisions, Item, PassthroughTensor, StackedTensor


@dataclass(frozen=True, slots=True)
class CopyBytes:
    """Bytes of the source that go to the output as they are: `nbytes` from `offset` of a shard on, to `target`.

    They are elements of `dtype`.
    """

    label: str
    shard: str
    offset: int
    nbytes: int
    target: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CopyRounded:
    """A tensor of a weight that was rounded before: `nbytes` from `offset` of a file on, to `target`.

    `consumed` bytes of the source have become it.
    """

    label: str
    path: Path
    offset: int
    nbytes: int
    target: int
    consumed: int


@dataclass(frozen=True, slots=True)
class CopyScale:
    """The scale of a layer's activations, keys or values: one number, of `dtype` in the source, as float32.

    Attributes:
        inverse: whether one over it is.
    """

    label: str
    shard: str
    offset: int
    nbytes: int
    dtype: str
    target: int
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class PutBytes:
    """Bytes that the plan knows, such as `weight_shape` of a weight whose words of codes do not tell its shape.

    `nbytes` of the source have become them.
    """

    label: str
    data: bytes
    target: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Unstack:
    """One expert's part of a stack, to be written unquantized."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class TransformWeight:
    """A plain weight to be written unquantized in its own dtype, with its rows and columns multiplied."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class Decode:
    """A weight that the source has as codes, to be written unquantized."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """One weight to be quantized, and where its codes and its scales go.

    `passes` says that its codes are those of the scheme already, and go to the output as they are. `tied_target` is
    where the scale goes that it shares with what it is joined with, where the scheme has one; `zero_target` likewise
    where its zero points go.
    """

    weight: Weight
    target: int
    scale_target: int
    passes: bool
    tied_target: int | None = None
    zero_target: int | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """Weights of one output shard to be quantized, and everything that shares their scale.

    Attributes:
        scheme: what they are stored in.
        pieces: what this job writes.
        fused: the whole joined set, members in other shards included; empty unless a scale is shared.
    """

    scheme: Scheme
    pieces: tuple[WeightPlace, ...]
    fused: tuple[Weight, ...]


# The unit of work.
Job = CopyBytes | CopyRounded | CopyScale | PutBytes | Unstack | TransformWeight | Decode | Encode


@dataclass(frozen=True, slots=True)
class Shard:
    """One output shard: its name, which is the source shard's, and the bytes of its tensors."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """What an output shard is made of.

    Attributes:
        name: file name.
        header: everything before the first tensor.
        size: size of the file in bytes.
        jobs: what fills it.
        tensors: every tensor, in file order.
    """

    name: str
    header: bytes
    size: int
    jobs: tuple[Job, ...]
    tensors: tuple[TensorInfo, ...]


def weights_of_tensor(item: Item) -> tuple[Weight, ...]:
    """The weights made from a tensor that could be quantized; none for one that could not."""
    if isinstance(item, PassthroughTensor):
        return ()
    return item.layers if isinstance(item, StackedTensor) else (item,)


def output_tensors(weight: Weight, scheme: Scheme | None) -> tuple[TensorInfo, ...]:
    """The tensors that a weight becomes: "X.weight" and "X.weight_scale", say; "X.weight" alone without a scheme."""
    if scheme is None:
        return (TensorInfo(f"{weight.module}.weight", weight.source.dtype, weight.shape),)
    return stored_as(weight, scheme).parts(weight.module, weight.shape)


def stored_as(weight: Weight, scheme: Scheme) -> Format:
    """The scheme's format; where the source's codes pass under scales of float16, which bfloat16 would round, with such
    scales.
    """
    form, scale = scheme.format, weight.scale
    if form.scale.dtype == "BF16" and scale is not None and scale.dtype == "F16" and weight.is_held_by(form):
        return replace(form, scale=replace(form.scale, dtype="F16"))
    return form


def source_bytes(kept: PassthroughTensor) -> int:
    """Bytes that the source has for a tensor which is not quantized."""
    if kept.made is not None:
        return kept.made.nbytes if isinstance(kept.made, TensorInfo) else 0
    return kept.weight.stored if kept.weight else kept.tensor.nbytes


@dataclass(frozen=True)
class Layout:
    """The output's shards, and where the tensors lie in each.

    Attributes:
        decisions: what becomes of each tensor.
        where: the shard and offset of each tensor of the source, by name.
    """

    decisions: Decisions
    where: Mapping[str, Location]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output's shards; a source shard that holds nothing but scales has none."""
        decisions = self.decisions
        # Weights of one size are many.
        sizes: dict[tuple[str, tuple[int, int], Format | None], int] = {}

        def size(weight: Weight) -> int:
            decision = decisions.others.get(weight.module)
            scheme = decisions.scheme if decision is None else decision.scheme
            key = weight.source.dtype, weight.shape, None if scheme is None else stored_as(weight, scheme)
            if key not in sizes:
                sizes[key] = sum(info.nbytes for info in output_tensors(weight, scheme))
            return sizes[key]

        found = {name: 0 for name, items in decisions.items.items() if items}
        for name in found:
            for item in decisions.items[name]:
                if isinstance(item, Weight):
                    found[name] += size(item)
                elif isinstance(item, StackedTensor):
                    found[name] += sum(map(size, item.layers))
                else:
                    found[name] += item.tensor.nbytes
        return tuple(Shard(name, nbytes) for name, nbytes in found.items())

    def sources(self, shard: str) -> set[str]:
        """The source shards that an output shard is made from: that of its name, those with scales and shapes, and
        those with members of its joined sets.

        Args:
            shard: the output shard's file name.
        """
        decisions, where = self.decisions, self.where
        found = {shard}
        for item in decisions.items[shard]:
            if isinstance(item, PassthroughTensor) and item.weight:
                found |= {where[part.name].shard for part in item.weight.parts}
            elif isinstance(item, PassthroughTensor) and isinstance(item.made, TensorInfo):
                found.add(where[item.made.name].shard)
            for weight in weights_of_tensor(item):
                scale, scheme = _input_scale(weight, decisions), decisions.of(weight.module).scheme
                if scale is not None:
                    found.add(where[scale.name].shard)
                shared = (
                    decisions.sets.get(weight.module, ()) if scheme is not None and scheme.format.shares_scale else ()
                )
                for member in (weight, *(decisions.layers[module] for module in shared)):
                    found |= {where[part.name].shard for part in member.parts or (member.source,)}
        return found

    def consumed(self, shard: str) -> int:
        """Bytes of the source that an output shard is made from with scales, whichever shards they lie in.

        Args:
            shard: the output shard's file name.
        """
        total = 0
        for item in self.decisions.items[shard]:
            if isinstance(item, PassthroughTensor):
                total += source_bytes(item)
            for weight in weights_of_tensor(item):
                scale = _input_scale(weight, self.decisions)
                total += weight.stored + (scale.nbytes if scale else 0)
        return total

    def outputs(self, shard: str) -> list[TensorInfo]:
        """The tensors of an output shard, in file order.

        Args:
            shard: its file name.
        """
        found: list[TensorInfo] = []
        for item in self.decisions.items[shard]:
            if isinstance(item, PassthroughTensor):
                found.append(item.tensor)
            for weight in weights_of_tensor(item):
                found += output_tensors(weight, self.decisions.of(weight.module).scheme)
        # Wide dtypes first, as the safetensors library writes them: every tensor is aligned to its element.
        return sorted(found, key=lambda info: -DTYPE_BITS[info.dtype])

    def lay_out(self, shard: str) -> ShardLayout:
        """The header, offsets and jobs of an output shard.

        Args:
            shard: its file name.
        """
        tensors = self.outputs(shard)
        header, start = make_header(tensors)
        places: dict[str, int] = {}
        for info in tensors:
            places[info.name] = start
            start += info.nbytes
        done: set[str] = set()
        jobs = [
            job for item in self.decisions.items[shard] for job in _jobs(item, self.decisions, self.where, places, done)
        ]
        return ShardLayout(shard, header, start, tuple(jobs), tuple(tensors))


def _jobs(
    item: Item, decisions: Decisions, where: Mapping[str, Location], places: dict[str, int], done: set[str]
) -> Iterator[Job]:
    """The jobs for a tensor; `done` has the modules whose joined set an earlier job wrote, and gets those of this."""
    if isinstance(item, PassthroughTensor):
        target = places[item.tensor.name]
        if isinstance(item.made, TensorInfo):
            place, made = where[item.made.name], item.made
            yield CopyScale(made.name, place.shard, place.offset, made.nbytes, made.dtype, target)
            return
        if item.made is not None:
            yield PutBytes(item.tensor.name, struct.pack("<f", item.made), target)
            return
        if isinstance(item.changed, bytes):
            yield PutBytes(item.tensor.name, item.changed, target, item.tensor.nbytes)
            return
        if item.changed is not None:
            yield TransformWeight(item.changed, target)
            return
        place = where[item.tensor.name]
        if item.weight is None:
            yield CopyBytes(item.tensor.name, place.shard, place.offset, item.tensor.nbytes, target, item.tensor.dtype)
            return
        # Each matrix of a stack by itself.
        for number, matrix in enumerate(item.weight.matrices):
            size = TensorInfo("", item.tensor.dtype, matrix.shape).nbytes
            yield Decode(matrix, target + number * size)
    for weight in weights_of_tensor(item):
        scheme, name = decisions.of(weight.module).scheme, f"{weight.module}.weight"
        if scheme is None and weight.format is None and weight.folded:
            yield TransformWeight(weight, places[name])
        elif scheme is None and weight.format is None and weight.expert < 0:
            place = where[name]
            yield CopyBytes(name, place.shard, place.offset, weight.nbytes, places[name], weight.source.dtype)
        elif scheme is None:
            kind = Unstack if weight.format is None else Decode
            yield kind(weight, places[name])
        elif f"{weight.module}.{scheme.format.codes}" in decisions.rounded:
            stored = weight.stored
            for info in output_tensors(weight, scheme):
                if file := decisions.rounded.get(info.name):
                    yield CopyRounded(info.name, file.path, file.offset, info.nbytes, places[info.name], stored)
                    stored = 0
        elif weight.module not in done:
            fused = [decisions.layers[module] for module in decisions.sets.get(weight.module, (weight.module,))]
            here = [member for member in fused if where[member.source.name].shard == where[weight.source.name].shard]
            done.update(member.module for member in here)
            pieces = (
                WeightPlace(
                    member,
                    places[f"{member.module}.{scheme.format.codes}"],
                    places[f"{member.module}.{scheme.format.scale.name}"],
                    member.is_held_by(scheme.format),
                    places[scheme.format.shared_scale_name(member.module)] if scheme.format.shares_scale else None,
                    places[f"{member.module}.{scheme.format.zero_point}"] if scheme.format.zero_point else None,
                )
                for member in here
            )
            yield Encode(scheme, tuple(pieces), tuple(fused) if scheme.format.shares_scale else ())
        scale = _input_scale(weight, decisions)
        name = f"{weight.module}.{scheme.format.input_scale}" if scheme else ""
        if scale is not None:
            place, known = where[scale.name], None if weight.format is None else weight.format.input_global_scale
            yield CopyScale(
                scale.name,
                place.shard,
                place.offset,
                scale.nbytes,
                scale.dtype,
                places[name],
                inverse=known is not None and not known.divides,
            )
        elif scheme is not None and name in places:
            largest = decisions.inputs.get(weight.module)
            found = scheme.default_input_global_scale if largest is None else scheme.format.scale_inputs(largest)
            assert found is not None
            yield PutBytes(name, struct.pack("<f", found), places[name])
        for info, data in scheme.format.constant_tensors(weight.module, weight.shape) if scheme else ():
            yield PutBytes(info.name, data, places[info.name])


def _input_scale(weight: Weight, decisions: Decisions) -> TensorInfo | None:
    """The scale of a layer's activations in the source, if the output keeps it."""
    scheme = decisions.of(weight.module).scheme
    if scheme is None or weight.module in decisions.inputs:
        return None
    return weight.input_scale_for(scheme.format)


def weight_kinds(decisions: Decisions) -> list[Weight]:
    """One weight of each dtype, shape and format, among all that are read by rows."""
    kinds = {weight.kind: weight for weight in decisions.layers.values()}
    kinds |= {kept.weight.kind: kept.weight for kept in decisions.kept if kept.weight}
    kinds |= {kept.changed.kind: kept.changed for kept in decisions.kept if isinstance(kept.changed, Weight)}
    return list(kinds.values())

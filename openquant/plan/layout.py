"""Where every output tensor goes: shards, their headers and offsets, and the writes that fill them; the printed lines.

    plan.layout.shards                                       # names and sizes
    plan.layout.lay_out("model-00001-of-00005.safetensors").writes

Each source shard becomes one output shard of the same name, so a finished shard never depends on another. A shard is
laid out only when it is written, because it may have many thousands of writes. The plan is printed with a line for all
tensors of the same name template, source dtype, shape and decision.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from ..files.shardfile import DTYPE_BITS, Location, TensorInfo, TensorPlace, make_header
from ..formats.format import Format
from ..formats.schemes import Scheme
from ..weights.weight import Weight
from .decisions import Decisions, Item, PassthroughTensor, StackedTensor


@dataclass(frozen=True, slots=True)
class CopyTensor:
    """Copy a tensor of the source unchanged.

    Attributes:
        tensor: its name, dtype and shape.
        location: where it lies in the source.
        target: position in the output shard.
    """

    tensor: TensorInfo
    location: Location
    target: int


@dataclass(frozen=True, slots=True)
class CopyRounded:
    """Copy a tensor of a weight that GPTQ has already rounded.

    Attributes:
        tensor: its name, dtype and shape.
        place: where it lies.
        target: position in the output shard.
        zero: the byte that packed codes of zero repeat; None if there is no such byte, or it holds no codes.
    """

    tensor: TensorInfo
    place: TensorPlace
    target: int
    zero: int | None


@dataclass(frozen=True, slots=True)
class CopyScale:
    """Convert a scale of the source, of a layer's activations or the KV cache, to float32.

    Attributes:
        tensor: its name, dtype and shape in the source.
        location: where it lies in the source.
        target: position in the output shard.
        inverse: whether 1 / scale is written.
    """

    tensor: TensorInfo
    location: Location
    target: int
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class PutBytes:
    """Write bytes that the plan knows, such as the `weight_shape` of int32-packed codes.

    Attributes:
        data: the bytes.
        target: position in the output shard.
    """

    data: bytes
    target: int


@dataclass(frozen=True, slots=True)
class _WriteWeight:
    """Write a weight unquantized at `target`, a position in the output shard."""

    weight: Weight
    target: int


class Unstack(_WriteWeight):
    """Write one expert's slice of a stacked tensor."""


class TransformWeight(_WriteWeight):
    """Write an unquantized weight in its own dtype, with the factors of smoothing applied."""


class Decode(_WriteWeight):
    """Write a weight that the source has quantized as bfloat16."""


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """One weight to be quantized, and the positions of its tensors in the output shard.

    Attributes:
        weight: the weight.
        target: position of its codes.
        scale_target: position of its scales.
        keeps_codes: whether the source's codes are in the scheme's format already and are copied.
        tied_target: position of the scale that fused layers share; None if the scheme has none.
        zero_target: position of its zero points; None if the scheme has none.
    """

    weight: Weight
    target: int
    scale_target: int
    keeps_codes: bool
    tied_target: int | None = None
    zero_target: int | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """Quantize a weight, or the fused layers of one output shard.

    Attributes:
        scheme: their scheme.
        pieces: the weights that it writes.
        fused: all fused layers, those in other shards included, if they share a scale; empty if not.
        keeps: whether all codes and scales must stay as they are (--scheme keep).
    """

    scheme: Scheme
    pieces: tuple[WeightPlace, ...]
    fused: tuple[Weight, ...]
    keeps: bool = False


# The unit of work.
Write = CopyTensor | CopyRounded | CopyScale | PutBytes | Unstack | TransformWeight | Decode | Encode


@dataclass(frozen=True, slots=True)
class Shard:
    """One output shard: its file name, which is the source shard's, and the size of its tensors in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """The content of an output shard.

    Attributes:
        name: file name.
        header: the safetensors header, everything before the first tensor.
        size: size of the file in bytes.
        writes: the writes that write its tensors.
        tensors: all tensors, in file order.
    """

    name: str
    header: bytes
    size: int
    writes: tuple[Write, ...]
    tensors: tuple[TensorInfo, ...]


def weights_of_tensor(item: Item) -> tuple[Weight, ...]:
    """Return the weights of a tensor that may be quantized.

    Args:
        item: a tensor of the source.

    Returns:
        The weight itself, one weight for each expert and projection of a stack, or none for a passthrough tensor.
    """
    if isinstance(item, PassthroughTensor):
        return ()
    if isinstance(item, StackedTensor):
        return item.layers
    return (item,)


def output_tensors(weight: Weight, scheme: Scheme | None) -> tuple[TensorInfo, ...]:
    """Return the tensors written for a weight.

    Args:
        weight: a weight [out, in].
        scheme: its scheme; None if it is not quantized.

    Returns:
        Name, dtype and shape of each: "X.weight" and "X.weight_scale" for module X, or "X.weight" without a scheme.
    """
    if scheme is None:
        return (TensorInfo(f"{weight.module}.weight", weight.source.dtype, weight.shape),)
    return stored_as(weight, scheme).parts(weight.module, weight.shape)


def written_bytes(weight: Weight, scheme: Scheme | None) -> int:
    """Return how many bytes the tensors take that are written for a weight."""
    if scheme is None:
        return weight.nbytes
    return _format_bytes(stored_as(weight, scheme), weight.shape)


@lru_cache(maxsize=256)
def _format_bytes(fmt: Format, shape: tuple[int, int]) -> int:
    return sum(info.nbytes for info in fmt.parts("", shape))


def stored_as(weight: Weight, scheme: Scheme) -> Format:
    """Return the format in which a weight is written.

    If the source's codes are copied and its scales are float16, so are the output's: bfloat16 would round them.

    Args:
        weight: the weight.
        scheme: its scheme.

    Returns:
        The scheme's format, with float16 scales in that case.
    """
    form = scheme.format
    scale = weight.scale
    if form.scale.dtype == "BF16" and scale is not None and scale.dtype == "F16" and weight.is_stored_as(form):
        return replace(form, scale=replace(form.scale, dtype="F16"))
    return form


def passthrough_source_bytes(kept: PassthroughTensor) -> int:
    """Return the size of what a passthrough tensor is made from.

    Args:
        kept: a tensor that is not quantized.

    Returns:
        Bytes of the source's tensor of its name, of the codes and scales that it is decoded from, or of the scale of
        another name that it is copied from; 0 for a KV-cache scale whose number the plan chose.
    """
    if isinstance(kept.value, TensorInfo):
        return kept.value.nbytes
    if kept.value is not None:
        return 0
    if kept.weight:
        return kept.weight.stored_nbytes
    return kept.tensor.nbytes


@dataclass(frozen=True)
class Layout:
    """The output's shards, and the positions of the tensors in each.

    Attributes:
        decisions: what becomes of each tensor: its scheme, or that it is copied or decoded.
        where: shard and offset of each tensor of the source, by name.
    """

    decisions: Decisions
    where: Mapping[str, Location]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output's shards; none for a source shard that holds nothing but scales."""
        decisions = self.decisions
        nbytes = {name: 0 for name, items in decisions.items.items() if items}
        for name in nbytes:
            for item in decisions.items[name]:
                if isinstance(item, PassthroughTensor):
                    nbytes[name] += item.tensor.nbytes
                for weight in weights_of_tensor(item):
                    nbytes[name] += written_bytes(weight, decisions.of(weight.module).scheme)
        return tuple(Shard(name, total) for name, total in nbytes.items())

    def sources(self, shard: str) -> set[str]:
        """Return the source shards that an output shard is made from.

        Those are the shard of its name, shards with scales of its weights, activations or KV cache, and shards with
        layers that share a scale with one of its layers.

        Args:
            shard: the output shard's file name.

        Returns:
            File names of the source's shards.
        """
        decisions = self.decisions
        where = self.where

        sources = {shard}
        for item in decisions.items[shard]:
            if isinstance(item, PassthroughTensor) and item.weight:
                sources |= {where[part.name].shard for part in item.weight.parts}
            elif isinstance(item, PassthroughTensor) and isinstance(item.value, TensorInfo):
                sources.add(where[item.value.name].shard)

            for weight in weights_of_tensor(item):
                scale = _input_scale(weight, decisions)
                scheme = decisions.of(weight.module).scheme
                if scale is not None:
                    sources.add(where[scale.name].shard)

                members = [weight]
                if scheme is not None and scheme.format.shares_scale:
                    members += [decisions.layers[module] for module in decisions.fused.get(weight.module, ())]
                for member in members:
                    sources |= {where[part.name].shard for part in member.parts or (member.source,)}

        return sources

    def outputs(self, shard: str) -> list[TensorInfo]:
        """Return the tensors of an output shard, in file order.

        Args:
            shard: its file name.
        """
        tensors: list[TensorInfo] = []
        for item in self.decisions.items[shard]:
            if isinstance(item, PassthroughTensor):
                tensors.append(item.tensor)
            for weight in weights_of_tensor(item):
                tensors += output_tensors(weight, self.decisions.of(weight.module).scheme)
        # Wide dtypes come first, as the safetensors library writes them, so that every tensor is aligned to its dtype.
        return sorted(tensors, key=lambda info: -DTYPE_BITS[info.dtype])

    def lay_out(self, shard: str) -> ShardLayout:
        """Make the header and the writes of an output shard.

        Args:
            shard: its file name.
        """
        tensors = self.outputs(shard)
        header = make_header(tensors)
        targets: dict[str, int] = {}
        end = len(header)
        for info in tensors:
            targets[info.name] = end
            end += info.nbytes

        writes = _ShardWrites(self.decisions, self.where, targets)
        made = [write for item in self.decisions.items[shard] for write in writes.make(item)]
        return ShardLayout(shard, header, end, tuple(made), tuple(tensors))


@dataclass
class _ShardWrites:
    """Makes the writes of an output shard.

    Attributes:
        decisions, where: see Layout.
        targets: position of each tensor in the shard, by name.
        encoded: modules for which there is a write already, since they are fused with an earlier one.
    """

    decisions: Decisions
    where: Mapping[str, Location]
    targets: Mapping[str, int]
    encoded: set[str] = field(default_factory=set)

    def make(self, item: Item) -> Iterator[Write]:
        """Yield the writes for a tensor of the source."""
        if isinstance(item, PassthroughTensor):
            yield from self._pass_through(item)

        for weight in weights_of_tensor(item):
            scheme = self.decisions.of(weight.module).scheme
            if scheme is None:
                yield self._keep_unquantized(weight)
            else:
                yield from self._quantize(weight, scheme)

    def _pass_through(self, item: PassthroughTensor) -> Iterator[Write]:
        """The writes for a tensor that may not be quantized."""
        info = item.tensor
        target = self.targets[info.name]

        if isinstance(item.value, TensorInfo):
            yield CopyScale(item.value, self.where[item.value.name], target)
        elif item.value is not None:
            yield PutBytes(struct.pack("<f", item.value), target)
        elif isinstance(item.smoothed, bytes):
            yield PutBytes(item.smoothed, target)
        elif item.smoothed is not None:
            yield TransformWeight(item.smoothed, target)
        elif item.weight is None:
            yield CopyTensor(info, self.where[info.name], target)
        else:
            for number, matrix in enumerate(item.weight.matrices):
                size = TensorInfo("", info.dtype, matrix.shape).nbytes
                yield Decode(matrix, target + number * size)

    def _keep_unquantized(self, weight: Weight) -> Write:
        """The write for a layer's weight that is not quantized."""
        [info] = output_tensors(weight, None)
        target = self.targets[info.name]

        if weight.format is not None:
            return Decode(weight, target)
        if weight.smoothed:
            return TransformWeight(weight, target)
        if weight.expert >= 0:
            return Unstack(weight, target)
        return CopyTensor(info, self.where[info.name], target)

    def _quantize(self, weight: Weight, scheme: Scheme) -> Iterator[Write]:
        """The writes for a layer's weight, and for what the format stores beside it."""
        fmt = scheme.format
        rounded = self.decisions.rounded or {}
        if f"{weight.module}.{fmt.codes}" in rounded:
            yield from self._copy_rounded(weight, scheme, rounded)
        elif weight.module not in self.encoded:
            yield self._encode(weight, scheme)

        name = f"{weight.module}.{fmt.input_scale}"
        scale = _input_scale(weight, self.decisions)
        if scale is not None:
            dynamic = weight.format and weight.format.input_global_scale
            is_inverse = dynamic is not None and not dynamic.divides
            yield CopyScale(scale, self.where[scale.name], self.targets[name], is_inverse)
        elif name in self.targets:
            absmax = self.decisions.input_absmax.get(weight.module)
            yield PutBytes(struct.pack("<f", scheme.input_scale(absmax)), self.targets[name])

        for info, data in fmt.constant_tensors(weight.module, weight.shape):
            yield PutBytes(data, self.targets[info.name])

    def _copy_rounded(
        self, weight: Weight, scheme: Scheme, rounded: Mapping[str, TensorPlace]
    ) -> Iterator[CopyRounded]:
        """Copies of the codes and scales that GPTQ wrote."""
        fmt = scheme.format
        codes = f"{weight.module}.{fmt.codes}"
        for info in output_tensors(weight, scheme):
            if place := rounded.get(info.name):
                zero = fmt.number.zero_byte if info.name == codes and fmt.zero_point is None else None
                yield CopyRounded(info, place, self.targets[info.name], zero)

    def _encode(self, weight: Weight, scheme: Scheme) -> Encode:
        """The write that quantizes a weight, and those fused with it that lie in its shard."""
        fmt = scheme.format
        decisions = self.decisions
        targets = self.targets
        fused = [decisions.layers[module] for module in decisions.fused.get(weight.module, (weight.module,))]
        shard = self.where[weight.source.name].shard
        members = [member for member in fused if self.where[member.source.name].shard == shard]
        self.encoded.update(member.module for member in members)

        pieces = [
            WeightPlace(
                weight=member,
                target=targets[f"{member.module}.{fmt.codes}"],
                scale_target=targets[f"{member.module}.{fmt.scale.name}"],
                keeps_codes=member.is_stored_as(fmt),
                tied_target=targets[fmt.shared_scale_name(member.module)] if fmt.shares_scale else None,
                zero_target=targets[f"{member.module}.{fmt.zero_point}"] if fmt.zero_point else None,
            )
            for member in members
        ]
        return Encode(scheme, tuple(pieces), tuple(fused) if fmt.shares_scale else (), decisions.keeps)


def _input_scale(weight: Weight, decisions: Decisions) -> TensorInfo | None:
    """The source's scale of a layer's activations, if the output keeps it."""
    scheme = decisions.of(weight.module).scheme
    if scheme is None or weight.module in decisions.input_absmax:
        return None
    return weight.input_scale_for(scheme.format)


def weight_kinds(decisions: Decisions) -> list[Weight]:
    """Return one weight of each kind (`Weight.kind`) among all that may be read row by row, to size buffers.

    Those are the weights that may be quantized, and the others that are decoded or smoothed.

    Args:
        decisions: what becomes of each tensor.

    Returns:
        The weights.
    """
    kinds = {weight.kind: weight for weight in decisions.layers.values()}
    kinds |= {kept.weight.kind: kept.weight for kept in decisions.passthrough if kept.weight}
    kinds |= {kept.smoothed.kind: kept.smoothed for kept in decisions.passthrough if isinstance(kept.smoothed, Weight)}
    return list(kinds.values())


@dataclass(frozen=True)
class PlanLine:
    """A line of the printed plan: tensors of the same name template, dtype in the source, shape and decision.

    For tensors that are quantized in the source, the dtype is that of their codes.

    Attributes:
        names: the modules, or the tensors if they have fewer than two axes.
        shape: shape of each.
        scheme: their scheme; None if they are not quantized.
        decoded: whether they are quantized in the source, but not in the output.
        why: why they are not quantized ("router"), or have another scheme than most
            ("channel: --scheme-for **.down_proj=channel"); empty for the plan's own scheme.
        bytes_before: size of all of them in the source.
        bytes_after: size of all of them in the output.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    scheme: Scheme | None
    decoded: bool
    why: str
    bytes_before: int
    bytes_after: int

    @property
    def quantized(self) -> bool:
        """Whether they are quantized in the output."""
        return self.scheme is not None


# Name template, dtype in the source, shape, whether quantized, and why.
_Kind = tuple[str, str, tuple[int, ...], bool, str]


@dataclass(slots=True)
class _Group:
    """Tensors that become a line: their scheme, whether they are decoded, names, total size before and after."""

    scheme: Scheme | None
    decoded: bool
    names: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0

    def add(self, name: str, before: int, after: int) -> None:
        self.names.append(name)
        self.before += before
        self.after += after


def plan_lines(decisions: Decisions) -> tuple[PlanLine, ...]:
    """Return the lines of a printed plan.

    Args:
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        One line for all tensors of the same name template, dtype in the source, shape and decision, with names, shape,
        scheme, reason, and bytes before and after. First come weights that may be quantized, then other matrices, then
        tensors of fewer than two axes.
    """
    groups: dict[_Kind, _Group] = {}
    kind: _Kind

    for layer, (scheme, why) in decisions.iter_decisions():
        stored = layer.format is not None
        if scheme is not None and why:
            why = f"{scheme.name}: {why}"
        dtype = layer.codes.dtype if stored else layer.source.dtype
        kind = layer.name_template, dtype, layer.shape, scheme is not None, why
        group = groups.setdefault(kind, _Group(scheme, stored and scheme is None))
        group.add(layer.module, layer.stored_nbytes, written_bytes(layer, scheme))

    for kept in sorted(decisions.passthrough, key=lambda kept: kept.small):
        tensor = kept.tensor
        weight = kept.weight
        kind = kept.name_template, weight.codes.dtype if weight else tensor.dtype, tensor.shape, False, kept.why
        group = groups.setdefault(kind, _Group(None, weight is not None))
        name = tensor.name if kept.small else tensor.module
        group.add(name, passthrough_source_bytes(kept), tensor.nbytes)

    return tuple(
        PlanLine(tuple(group.names), shape, group.scheme, group.decoded, why, group.before, group.after)
        for (_, _, shape, _, why), group in groups.items()
    )

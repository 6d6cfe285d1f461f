"""The printed plan: a line for all tensors of the same name template, source dtype, shape and decision."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.schemes import Scheme
from .decisions import Decisions
from .layout import output_tensors, passthrough_source_bytes


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
    """Tensors that become a line: their scheme, whether they are decoded, the size of each before and after, names."""

    scheme: Scheme | None
    decoded: bool
    before: int
    after: int
    names: list[str]
    # Total size in the source of those that are quantized there, each of which may be stored in another format.
    stored: int = 0


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
    for layer, (scheme, why) in decisions.decided():
        stored = layer.format is not None
        if scheme is not None and why:
            why = f"{scheme.name}: {why}"
        dtype = layer.codes.dtype if stored else layer.source.dtype
        kind = layer.name_template, dtype, layer.shape, scheme is not None, why
        group = groups.get(kind)
        if group is None:
            after = sum(info.nbytes for info in output_tensors(layer, scheme))
            group = groups[kind] = _Group(scheme, stored and scheme is None, 0 if stored else layer.nbytes, after, [])
        group.names.append(layer.module)
        group.stored += layer.stored_nbytes if stored else 0
    for kept in sorted(decisions.passthrough, key=lambda kept: kept.small):
        tensor, weight = kept.tensor, kept.weight
        kind = kept.name_template, weight.codes.dtype if weight else tensor.dtype, tensor.shape, False, kept.why
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = _Group(None, weight is not None, 0, tensor.nbytes, [])
        group.names.append(tensor.name if kept.small else tensor.module)
        group.stored += passthrough_source_bytes(kept)
    lines = []
    for (_, _, shape, _, why), group in groups.items():
        before, after = group.stored + len(group.names) * group.before, len(group.names) * group.after
        lines.append(PlanLine(tuple(group.names), shape, group.scheme, group.decoded, why, before, after))
    return tuple(lines)

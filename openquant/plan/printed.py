"""The printed plan: a line for all tensors that are alike in name, shape and fate."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.schemes import Scheme
from .decisions import Decisions
from .layout import output_tensors, source_bytes


@dataclass(frozen=True)
class PlanLine:
    """Tensors alike in name, shape and fate: a line of the printed plan.

    Attributes:
        names: of all of them: modules, or tensors where they have fewer than two axes.
        shape: of each.
        scheme: what they are stored in; None if they are not quantized.
        decoded: whether they are quantized in the source, but not in the output.
        why: why they are not quantized ("router"), or not as most are ("channel: --scheme-for **.down_proj=channel").
        bytes_before: what all of them take in the source.
        bytes_after: what all of them take in the output.
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


# Name but for numbers, dtype in the source, shape, whether quantized, and why not or not as most.
_Kind = tuple[str, str, tuple[int, ...], bool, str]


@dataclass(slots=True)
class _Alike:
    """What becomes a line: the scheme, whether decoded, bytes of each before and after, and who belongs to it."""

    scheme: Scheme | None
    decoded: bool
    before: int
    after: int
    names: list[str]
    # What is quantized in the source may be stored in several ways.
    stored: int = 0


def plan_lines(decisions: Decisions) -> tuple[PlanLine, ...]:
    """A plan in lines: weights that could be quantized, other matrices, and tensors of fewer than two axes."""
    found: dict[_Kind, _Alike] = {}
    kind: _Kind
    for layer, (scheme, why) in decisions.each():
        stored = layer.format is not None
        if scheme is not None and why:
            why = f"{scheme.name}: {why}"
        dtype = layer.codes.dtype if stored else layer.source.dtype
        kind = layer.alike, dtype, layer.shape, scheme is not None, why
        alike = found.get(kind)
        if alike is None:
            after = sum(info.nbytes for info in output_tensors(layer, scheme))
            alike = found[kind] = _Alike(scheme, stored and scheme is None, 0 if stored else layer.nbytes, after, [])
        alike.names.append(layer.module)
        alike.stored += layer.stored if stored else 0
    # Those of fewer axes last.
    for kept in sorted(decisions.kept, key=lambda kept: kept.small):
        tensor, weight = kept.tensor, kept.weight
        kind = kept.alike, weight.codes.dtype if weight else tensor.dtype, tensor.shape, False, kept.why
        alike = found.get(kind)
        if alike is None:
            alike = found[kind] = _Alike(None, weight is not None, 0, tensor.nbytes, [])
        alike.names.append(tensor.name if kept.small else tensor.module)
        alike.stored += source_bytes(kept)
    lines = []
    for (_, _, shape, _, why), alike in found.items():
        before, after = alike.stored + len(alike.names) * alike.before, len(alike.names) * alike.after
        lines.append(PlanLine(tuple(alike.names), shape, alike.scheme, alike.decoded, why, before, after))
    return tuple(lines)

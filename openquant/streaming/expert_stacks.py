"""Experts that a checkpoint holds one by one, put back into the stacks that transformers' classes have.

Engines load quantized experts one by one, so that is how they are written, also where the source has them stacked. The
registry says how such a stack is laid out; transformers itself puts only those together that were published split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..files.tensors import TensorInfo
from ..models import MODELS
from ..registry.architecture import StackedExperts


class StackMember(NamedTuple):
    """One projection of one expert: which expert, which part of the stack, the name of its tensor."""

    expert: int
    part: int
    name: str


class ExpertStack(NamedTuple):
    """A tensor that a checkpoint holds in pieces.

    Attributes:
        info: what it would be; of the dtype of its first member.
        layout: how it is laid out.
        members: what it is made of.
    """

    info: TensorInfo
    layout: StackedExperts
    members: tuple[StackMember, ...]

    def make(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The stack, of tensors [out, in] that `read` gives by name."""
        made = None
        for member in self.members:
            piece = read(member.name)
            if made is None:
                made = torch.empty(self.info.shape, dtype=piece.dtype)
            rows = made[member.expert].T if self.layout.transposed else made[member.expert]
            rows[member.part * len(piece) : (member.part + 1) * len(piece)] = piece
        assert made is not None
        return made


def find_expert_stacks(architecture: str, tensors: Mapping[str, TensorInfo]) -> dict[str, ExpertStack]:
    """The stacks that tensors are pieces of, by each name that the stack may have.

    Args:
        architecture: as in config.json.
        tensors: those of the checkpoint that the model has no place for, by name.
    """
    found: dict[str, ExpertStack] = {}
    for experts in MODELS[architecture].experts if architecture in MODELS else ():
        for layout in experts.stacked:
            parts = "|".join(map(re.escape, layout.parts))
            pattern = re.compile(rf"(.*){re.escape(experts.path)}\.(\d{{1,6}})\.({parts})\.weight")
            places: dict[str, list[StackMember]] = {}
            for name in tensors:
                match = pattern.fullmatch(name)
                if match:
                    place = match[1] + experts.place
                    places.setdefault(place, []).append(StackMember(int(match[2]), layout.parts.index(match[3]), name))
            for place, members in places.items():
                # Some are a module's weight.
                for name in (f"{place}.{layout.name}", f"{place}.{layout.name}.weight"):
                    stack = _stack(name, layout, sorted(members), tensors)
                    if stack is not None:
                        found[name] = stack
    return found


def _stack(
    name: str, layout: StackedExperts, members: list[StackMember], tensors: Mapping[str, TensorInfo]
) -> ExpertStack | None:
    """A stack of members; None where some are missing or of another shape, whose places then stay empty."""
    count = members[-1].expert + 1
    shapes = {tensors[member.name].shape for member in members}
    complete = [(member.expert, member.part) for member in members] == [
        (expert, part) for expert in range(count) for part in range(len(layout.parts))
    ]
    if not complete or len(shapes) != 1:
        return None
    [(rows, cols)] = shapes
    rows *= len(layout.parts)
    shape = (count, cols, rows) if layout.transposed else (count, rows, cols)
    return ExpertStack(TensorInfo(name, tensors[members[0].name].dtype, shape), layout, tuple(members))

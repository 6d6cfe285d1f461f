"""Stacks the experts that a checkpoint has one by one, as transformers' classes have them.

Engines load quantized experts one by one, so openquant writes them one by one even if the source has them stacked. The
registry has the layout of each stack. transformers' loader stacks only experts that were published one by one.
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

    def make(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the stacked tensor, of shape `info.shape`.

        Args:
            read: returns the tensor [out, in] of a name. It is called for each of `members`; the first gives the dtype.
        """
        stacked = None
        for member in self.members:
            matrix = read(member.name)
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
        projection, or whose projections have different shapes, are left out.
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
    """The stack of these members; None if some are missing or have another shape."""
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

"""The small models of zoo.py convert: what is quantized stands for its source, all else is the source's."""

from __future__ import annotations

import pytest
import torch

import tiny
import zoo
from converted import Shelf
from openquant.formats.reference import decode
from openquant.formats.schemes import SCHEMES, Scheme
from openquant.models import MODELS, Model


def split(weights: dict[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """Weights with each stack of experts taken apart."""
    stacks = {stacked.name: (experts, stacked) for experts in model.experts for stacked in experts.stacked}
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        path, last = module.rsplit(".", 1) if "." in module else ("", module)
        if weight.dim() != 3 or last not in stacks:
            found[name] = weight
            continue
        experts, stacked = stacks[last]
        path += "." + experts.path.rsplit(".", 1)[1] if experts.beside else ""
        for number, expert in enumerate(weight.mT if stacked.transposed else weight):
            for part, matrix in zip(stacked.parts, expert.chunk(len(stacked.parts)), strict=True):
                found[f"{path}.{number}.{part}.weight"] = matrix
    return found


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("architecture", zoo.ZOO)
def test_converts(shelf: Shelf, architecture: str, scheme: Scheme) -> None:
    model = MODELS[architecture]
    if model.refusal(scheme.name, scheme.method) is not None:
        return
    made = shelf.converted(architecture, scheme)
    weights, found = split(tiny.read(made.source), model), tiny.read(made.output)
    codes = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    scales = {f"{name.removesuffix('.weight')}.{scheme.format.scale.name}" for name in codes}
    assert codes
    assert set(found) == {*weights, *scales}
    for name, weight in weights.items():
        if name not in codes:
            assert torch.equal(found[name], weight), name
            continue
        scale = found[f"{name.removesuffix('.weight')}.{scheme.format.scale.name}"]
        error = (decode(found[name], scale, scheme.format) - weight.float()).abs()
        # Half a step of the three mantissa bits, or of the subnormals.
        assert (error <= weight.float().abs() / 16 + scale.max() * 2.0**-10).all(), name

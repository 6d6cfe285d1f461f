"""The tiny architectures convert: what is quantized stands for its source, all else is the source's."""

from __future__ import annotations

import pytest
import torch

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.format import Format
from openquant.formats.reference import decode
from openquant.formats.schemes import Scheme
from openquant.models import MODELS
from openquant.plan.tensor_parallel import why_not_reordered
from openquant.registry.architecture import Architecture
from openquant.registry.rules import ModuleRules
from openquant.verification.verify import model_problems
from support import small_checkpoints, tiny_architectures
from support.conversions import Shelf, covering


def split(weights: dict[str, torch.Tensor], model: Architecture) -> dict[str, torch.Tensor]:
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


CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "U8": torch.uint8}


def scales(found: dict[str, torch.Tensor], module: str, form: Format) -> torch.Tensor:
    """What a module's scales stand for, float32."""
    scale = found[f"{module}.{form.scale.name}"]
    values = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    return values if form.global_scale is None else values / found[f"{module}.{form.global_scale.name}"]


@pytest.mark.parametrize("architecture", small_checkpoints.ARCHITECTURES)
def test_a_whole_model_lacks_nothing(shelf: Shelf, architecture: str) -> None:
    """Neither is a part missing, nor does a size in config.json differ from the tensors."""
    checkpoint = open_checkpoint(shelf.source(architecture))
    assert model_problems(ModuleRules(MODELS[architecture]), checkpoint.tensors.values(), checkpoint) == []


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [(name, scheme) for name, scheme in covering() if name in tiny_architectures.ZOO],
    ids=lambda value: getattr(value, "suffix", value),
)
def test_converts(shelf: Shelf, architecture: str, scheme: Scheme) -> None:
    model = MODELS[architecture]
    made = shelf.converted(architecture, scheme)
    weights, found = split(small_checkpoints.read(made.source), model), small_checkpoints.read(made.output)
    form, dtype = scheme.format, CODES[scheme.format.number.dtype]
    ending = f".{form.codes}"
    named = {name: tensor for name, tensor in found.items() if name.endswith(ending)}
    modules = [name.removesuffix(ending) for name, tensor in named.items() if tensor.dtype == dtype]
    codes = {f"{module}.weight": module for module in modules}
    assert codes
    # What does not divide, or is sorted by heads, and all it is joined with has what the scheme falls back to.
    entry, config = ModuleRules(model), small_checkpoints.config(architecture)
    sets = entry.fused_groups(modules)
    shape_errors = set()
    for name, module in codes.items():
        rows, columns = weights[name].shape
        if form.shape_error((rows, columns)) or why_not_reordered(
            (rows, columns), entry.rule(module).split, config, form
        ):
            shape_errors |= {f"{other}.weight" for other in sets.get(module, (module,))}
    forms = dict.fromkeys(codes, form)
    for name in shape_errors:
        assert scheme.fallback
        forms[name] = scheme.fallback.format
    parts = {
        info.name: info
        for name, module in codes.items()
        for info in forms[name].parts(module, tuple(weights[name].shape))
    }
    assert set(found) == {*(weights.keys() - codes.keys()), *parts}
    assert all(tuple(found[name].shape) == info.shape for name, info in parts.items())
    for name, weight in weights.items():
        if name not in codes:
            assert torch.equal(found[name], weight), name
            continue
        form = forms[name]
        scale = scales(found, codes[name], form)
        error = (decode(found[f"{codes[name]}.{form.codes}"], scale, form) - weight.float()).abs()
        slack = 2.0**-8 if form.scale.dtype == "BF16" else 2.0**-20
        bound = form.number.bound(weight.float().numpy(), scale.abs().max().numpy(), slack)
        # The largest weights may be clipped.
        clipped = 1 - min(scheme.clip_ratios) if scheme.searches_scales else 0
        bound = bound + clipped * weight.abs().float().numpy()
        assert (error.numpy() <= bound).all(), name

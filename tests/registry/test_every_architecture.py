"""Each architecture once, from its source to its figures: converted, compared, verified, planned as stored, run, observed.

The steps are subtests, so that a failure names the architecture and the step. Mechanisms are tested on representatives. Of
architectures whose entries are alike one is run by day, all at night.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from conftest import everything
from openquant import diagnose, verify
from openquant.calibration.observers import observe_inputs
from openquant.data.corpus import Corpus, Document
from openquant.errors import PlanError, SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.format import Format
from openquant.formats.numbers import E2M1, E4M3
from openquant.formats.reference import decode
from openquant.formats.schemes import CHANNEL, INTEGER_GROUPS, Scheme
from openquant.models import MODELS
from openquant.plan import summary
from openquant.plan.architecture import why_not_reordered
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_plan
from openquant.registry.architecture import Architecture, ModuleRules
from openquant.streaming.interleaved import TextRun
from openquant.streaming.model import StreamedModel
from openquant.streaming.packing import packing_of
from openquant.verification.verify import model_problems
from openquant.weights.statistics import Calibration
from support import small_checkpoints
from support.conversions import Converted, Shelf, walks
from support.representatives import REPRESENTATIVES, expected_packing, features, representatives
from support.streamed_logits import computes_the_same, plain_logits

CODES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "U8": torch.uint8}
# The relative errors that numeric formats have. Each bit of integers in groups halves the error.
ERRORS = {E4M3: (0.02, 0.03), E2M1: (0.08, 0.14)} | {
    groups[0].format.number: (0.075 * 2.0 ** (4 - bits), 0.13 * 2.0 ** (4 - bits))
    for bits, groups in INTEGER_GROUPS.items()
}
# Dense, fused on disk, stacked, with latent attention, and with rows by heads.
DIAGNOSED = ("Phi3ForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM", "BloomForCausalLM")
# Two short texts, which reach all experts.
TEXTS = [tuple((7 * at * at + 31 * number) % 500 for at in range(40)) for number in range(2)]
# The first of those whose features are the same.
FIRST = {frozenset(features(name)): name for name in reversed(small_checkpoints.RUNNABLE)}
RUN = {*small_checkpoints.RUNNABLE} if everything() else {*FIRST.values(), *REPRESENTATIVES}


@pytest.mark.parametrize("architecture", small_checkpoints.ARCHITECTURES)
def test_an_architecture_from_its_source_to_its_figures(
    shelf: Shelf, subtests: pytest.Subtests, architecture: str
) -> None:
    source = shelf.source(architecture)
    with subtests.test("config.json fits the tensors"):
        checkpoint = open_checkpoint(source)
        assert model_problems(ModuleRules(MODELS[architecture]), checkpoint.tensors.values(), checkpoint) == []

    if architecture in small_checkpoints.FAILING:
        with subtests.test("a class that fails in transformers itself is refused"):
            with pytest.raises(AttributeError):
                plain_logits(source, getattr(transformers, architecture))
            with pytest.raises(SourceError, match=rf"^{architecture} of transformers \S+ cannot be run: "):
                StreamedModel(open_checkpoint(source))

    for scheme in walks()[architecture]:
        with subtests.test(scheme.suffix):
            converted = shelf.converted(architecture, scheme)
            assert_codes_stand_for_weights(architecture, scheme, converted)
            assert_verified(scheme, converted)

    if architecture in RUN:
        with subtests.test("the streamed logits are those of from_pretrained"):
            assert computes_the_same(source, long=architecture in representatives())
        with subtests.test("a calibration observes every layer"):
            assert_all_observed(architecture, source)

    # It takes as long as all the rest, and goes by the same plan.
    if (everything() or architecture in DIAGNOSED) and not small_checkpoints.refused(architecture, CHANNEL):
        with subtests.test("diagnose measures every layer"):
            assert_all_diagnosed(source)


def test_every_feature_has_a_representative() -> None:
    represented = set().union(*map(features, REPRESENTATIVES))
    assert {
        name: features(name) - represented for name in small_checkpoints.RUNNABLE if features(name) - represented
    } == {}
    assert {*REPRESENTATIVES} <= {*small_checkpoints.RUNNABLE}


# Steps.


def split(weights: dict[str, torch.Tensor], model: Architecture) -> dict[str, torch.Tensor]:
    """Weights with each stack of experts taken apart."""
    entry = ModuleRules(model)
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        stack = entry.rule(module).stack
        if weight.dim() != 3 or stack is None:
            found[name] = weight
            continue
        experts, stacked = stack
        path = module.rpartition(".")[0]
        path += "." + experts.path.rsplit(".", 1)[1] if experts.beside else ""
        for number, expert in enumerate(weight.mT if stacked.transposed else weight):
            for part, matrix in zip(stacked.parts, expert.chunk(len(stacked.parts)), strict=True):
                found[f"{path}.{number}.{part}.weight"] = matrix
    return found


def scales(found: dict[str, torch.Tensor], module: str, form: Format) -> torch.Tensor:
    """What a module's scales stand for, float32."""
    scale = found[f"{module}.{form.scale.name}"]
    values = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    return values if form.global_scale is None else values / found[f"{module}.{form.global_scale.name}"]


def assert_codes_stand_for_weights(architecture: str, scheme: Scheme, converted: Converted) -> None:
    """Each code is within its rounding bound of the source's weight, and all else is the source's."""
    model = MODELS[architecture]
    weights, found = split(small_checkpoints.read(converted.source), model), small_checkpoints.read(converted.output)
    form, dtype = scheme.format, CODES[scheme.format.number.dtype]
    ending = f".{form.codes}"
    named = {name: tensor for name, tensor in found.items() if name.endswith(ending)}
    modules = [name.removesuffix(ending) for name, tensor in named.items() if tensor.dtype == dtype]
    codes = {f"{module}.weight": module for module in modules}
    assert codes

    # What does not divide, or is sorted by heads, and all it is fused with has what the scheme falls back to.
    entry, config = ModuleRules(model), small_checkpoints.config(architecture)
    sets = entry.fused_groups(modules)
    forms = dict.fromkeys(codes, form)
    for name, module in codes.items():
        shape = tuple(weights[name].shape)
        if form.shape_error(shape) or why_not_reordered(shape, entry.rule(module).split, config, form):
            assert scheme.fallback
            forms |= {f"{other}.weight": scheme.fallback.format for other in sets.get(module, (module,))}

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


def assert_verified(scheme: Scheme, converted: Converted) -> None:
    """verify finds nothing, and counts what compress counted."""
    source, output, result = converted
    full = verify(output, source, full=True)
    assert (full.problems, full.notes) == ((), ())
    assert full.quantized == result.quantized_tensors == len(full.errors)
    assert full.nbytes == result.output_bytes
    assert full.equal_tensors + full.quantized * len(scheme.format.parts("", (128, 128))) == full.tensors
    assert full.equal_files == 1
    least, most = ERRORS.get(scheme.format.number, (0.004, 0.012))
    assert all(least < error.relative < most for error in full.errors)


def assert_all_observed(architecture: str, source: Path) -> None:
    """However transformers computes it, experts and what it merges or splits among them; keys and values too."""
    scheme = small_checkpoints.served_in(architecture, "channel", "block")
    plan = make_plan(open_checkpoint(source), scheme)
    corpus = Corpus(tuple(Document("some", f"some {at}", ids) for at, ids in enumerate(TEXTS)), "", {})
    model = StreamedModel(open_checkpoint(source))
    assert packing_of(model.model, MODELS[architecture], 40) == expected_packing(architecture)
    inputs, cached = observe_inputs(TextRun(model, corpus))
    calibration = Calibration(inputs, "this", {}, cached)
    assert [layer.module for layer, _ in plan.decisions.quantized if calibration.of(layer.source.name) is None] == []

    try:
        options = PlanOptions(fp8_kv_cache=True, calibration=calibration)
        plan = make_plan(open_checkpoint(source), scheme, options)
    except PlanError as error:
        # Of one transformers caches latents, vLLM keys and values.
        unseen = "the calibration did not observe keys and values of layer 0"
        assert "(MLA)" in error.message or "no engine loads" in error.message or error.message == unseen
        assert cached == {} or "(MLA)" not in error.message
    else:
        assert 0 < summary.cache_layers(plan) == len(cached)


def assert_all_diagnosed(source: Path) -> None:
    found = diagnose(source, "channel")
    plan = make_plan(open_checkpoint(source), CHANNEL)
    assert [layer.module for layer in found.layers] == [weight.module for weight, _ in plan.decisions.quantized]
    for layer in found.layers:
        assert layer.errors["channel"] == pytest.approx(0.0262, rel=0.1)

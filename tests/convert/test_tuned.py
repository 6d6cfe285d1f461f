"""Plans with tunings: weights are rounded with their rows and columns multiplied, and small tensors are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from openquant.files.checkpoint import open_checkpoint
from openquant.formats.kernels import choose_scales
from openquant.formats.schemes import SCHEMES, TENSOR, Scheme, find_scheme
from openquant.job import connect_ranks, open_source, prepare
from openquant.options import Run
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, make_plan
from openquant.result import Reporter
from openquant.run import carry_out
from openquant.weights.weight import WeightTransform, WeightTransforms
from support import small_checkpoints
from support.conversions import Shelf
from support.rows import for_each

Weights = dict[str, torch.Tensor]
RANDOM = np.random.default_rng(5)


def carried_out(root: Path, out: Path, scheme: Scheme, options: PlanOptions) -> Plan:
    """What compress() does with a plan of these options."""
    run = Run(root, out, workers=2)
    with connect_ranks(None) as ranks:
        opened = open_source(run, ranks, Reporter())
        plan = make_plan(opened.checkpoint, scheme, options, opened.source.identity)
        carry_out(prepare(opened, plan))
    return plan


def powers(count: int) -> np.ndarray:
    return np.exp2(RANDOM.integers(-4, 5, count)).astype(np.float32)


def tuned(weights: Weights, modules: dict[str, bool]) -> tuple[WeightTransforms, Weights]:
    """Random factors for these modules, with or without rows, and norms of the first layer halved; and both done."""
    found, expected = {}, dict(weights)
    for module, rows in modules.items():
        name = f"{module}.weight"
        out, width = weights[name].shape
        found[module] = WeightTransform(powers(out) if rows else None, powers(width))
        values = weights[name].float().numpy().copy()
        found[module].apply(values, 0)
        expected[name] = torch.from_numpy(values).to(weights[name].dtype)
    norm = "model.layers.0.input_layernorm.weight"
    expected[norm] = weights[norm] / 2
    data = expected[norm].view(torch.int16).numpy().tobytes()
    return WeightTransforms(found, {norm: data}, ("folded by hand",)), expected


MOE = {
    "model.layers.0.self_attn.v_proj": True,
    "model.layers.0.self_attn.o_proj": False,
    # A router, which stays unquantized.
    "model.layers.1.mlp.gate": False,
    "model.layers.1.mlp.experts.0.up_proj": True,
}


@for_each("scheme", [SCHEMES["tensor"], SCHEMES["int4"]])
def test_weights_are_rounded_as_they_are_folded(shelf: Shelf, tmp_path: Path, scheme: Scheme) -> None:
    source = shelf.source("Qwen3MoeForCausalLM")
    weights = small_checkpoints.read(source)
    transforms, expected = tuned(weights, MOE)
    plan = carried_out(source, tmp_path / "out", scheme, PlanOptions(transforms=transforms))
    assert "folded by hand" in plan.notes
    found = small_checkpoints.read(tmp_path / "out")
    # As if the source were the folded model.
    (tmp_path / "folded").mkdir()
    for path in source.iterdir():
        (tmp_path / "folded" / path.name).write_bytes(path.read_bytes())
    small_checkpoints.change_weights(
        tmp_path / "folded", lambda held: held.update({name: expected[name] for name in held})
    )
    carried_out(tmp_path / "folded", tmp_path / "plain", scheme, PlanOptions())
    other = small_checkpoints.read(tmp_path / "plain")
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name
    assert not torch.equal(found["model.layers.1.mlp.gate.weight"], weights["model.layers.1.mlp.gate.weight"])


@for_each("ignored", ["**.o_proj", "**.experts.**"])
def test_what_stays_unquantized_is_folded_too(shelf: Shelf, tmp_path: Path, ignored: str) -> None:
    source = shelf.source("Qwen3MoeForCausalLM")
    transforms, expected = tuned(small_checkpoints.read(source), MOE)
    carried_out(source, tmp_path / "out", SCHEMES["int8"], PlanOptions((ignored,), transforms=transforms))
    found = small_checkpoints.read(tmp_path / "out")
    for name in (f"{module}.weight" for module in MOE):
        if found[name].dtype == torch.bfloat16:
            assert torch.equal(found[name], expected[name]), name


def test_stacks_are_folded_by_expert(shelf: Shelf, tmp_path: Path) -> None:
    source = shelf.source("Llama4ForCausalLM")
    module, columns = "model.layers.1.feed_forward.experts.2.up_proj", powers(small_checkpoints.HIDDEN)
    found = []
    for number, transforms in enumerate([None, WeightTransforms({module: WeightTransform(columns=columns)})]):
        out = tmp_path / str(number)
        carried_out(source, out, SCHEMES["int8"], PlanOptions(("**.experts.**",), transforms=transforms))
        found.append(small_checkpoints.read(out)[f"{module}.weight"])
    assert torch.equal(found[1], (found[0].float() * torch.from_numpy(columns)).bfloat16())


def test_a_plan_is_known_by_its_tunings(shelf: Shelf) -> None:
    checkpoint = open_checkpoint(shelf.source("Qwen3ForCausalLM"))
    module, norm = "model.layers.0.self_attn.q_proj", "model.norm.weight"
    ones = np.ones(small_checkpoints.HIDDEN, np.float32)
    kinds = [
        WeightTransforms(),
        WeightTransforms({module: WeightTransform(rows=ones)}),
        WeightTransforms({module: WeightTransform(columns=ones)}),
        WeightTransforms({module: WeightTransform(columns=2 * ones)}),
        WeightTransforms({module: WeightTransform(importance=ones)}),
        WeightTransforms({module.replace("q", "k"): WeightTransform(columns=ones)}),
        WeightTransforms({}, {norm: bytes(2 * small_checkpoints.HIDDEN)}),
        WeightTransforms({}, {norm: b"1" * 2 * small_checkpoints.HIDDEN}),
    ]
    plans = [make_plan(checkpoint, SCHEMES["int8"], PlanOptions(transforms=each)) for each in (None, *kinds)]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert len({summary.output_bytes(plan) for plan in plans}) == 1


@for_each("asymmetric", [False, True])
def test_scales_are_searched_for_by_what_goes_in(shelf: Shelf, tmp_path: Path, asymmetric: bool) -> None:
    source, scheme = shelf.source("Qwen3ForCausalLM"), find_scheme("int4", asymmetric=asymmetric)
    module = "model.layers.0.self_attn.o_proj"
    weight = small_checkpoints.read(source)[f"{module}.weight"]
    importance = np.exp(RANDOM.standard_normal(weight.shape[1])).astype(np.float32)
    transforms = WeightTransforms({module: WeightTransform(importance=importance)})
    carried_out(source, tmp_path / "out", scheme, PlanOptions(transforms=transforms))
    bits, scales = weight.view(torch.int16).numpy().view(np.uint16), []
    for counts in (importance, None):
        scales.append(choose_scales(scheme, bits, "BF16", importance=counts).scale)
    assert not np.array_equal(*scales)
    assert np.array_equal(small_checkpoints.read(tmp_path / "out")[f"{module}.weight_scale"].float().numpy(), scales[0])


def test_codes_of_a_source_do_not_pass_folded(shelf: Shelf, tmp_path: Path) -> None:
    """All three would keep the scale that they share."""
    source = shelf.converted("Qwen3ForCausalLM", TENSOR).output
    path = "model.layers.0.self_attn"
    columns = powers(small_checkpoints.HIDDEN)
    transforms = WeightTransforms({f"{path}.{name}_proj": WeightTransform(columns=columns) for name in "qkv"})
    carried_out(source, tmp_path / "out", TENSOR, PlanOptions(transforms=transforms))
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    for name in (f"{path}.{each}_proj.weight" for each in "qkv"):
        wanted = stored[name].float() * stored[f"{name}_scale"] * torch.from_numpy(columns)
        made = found[name].float() * found[f"{name}_scale"]
        assert (made - wanted).norm() < 0.04 * wanted.norm()
    other = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(stored[other].view(torch.uint8), found[other].view(torch.uint8))

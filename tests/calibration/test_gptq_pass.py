"""GPTQ's pass: each layer is rounded by the inputs that an ordinary forward pass of transformers gives it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import EXAMPLE, everything
from openquant import dequantize
from openquant.calibration.gptq_pass import find_hessians, round_layers
from openquant.calibration.sensitivity import Sensitivities
from openquant.data.corpus import Corpus, Document
from openquant.distributed import Ranks
from openquant.errors import PlanError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import LayerStore
from openquant.formats import compiled, kernels
from openquant.formats.kernels import ColumnRounding, choose_scales
from openquant.formats.schemes import SCHEMES, Scheme, find_scheme
from openquant.job import connect_ranks, open_source, prepare
from openquant.options import Run
from openquant.plan.decisions import PlanOptions, rounded_tensors
from openquant.plan.plan import Plan, make_plan
from openquant.result import Reporter
from openquant.run import carry_out
from openquant.streaming.interleaved import TextRun
from openquant.streaming.memory import BLOCK
from openquant.streaming.model import StreamedModel
from openquant.weights.weight import WeightTransform, WeightTransforms
from support import small_checkpoints
from support.conversions import Shelf
from support.representatives import representatives

IDS = [tuple((7 * at * at + 31 * number) % 500 for at in range(150)) for number in range(4)]
CORPUS = Corpus(tuple(Document("some", f"some {at}", each) for at, each in enumerate(IDS)), "", {})
NAMES = ("int4", "nvfp4", "block")
WANTED = [*(SCHEMES[name] for name in NAMES), find_scheme("int4", asymmetric=True)]


def compressed(root: Path, out: Path, scheme: Scheme, gptq: bool, transforms: WeightTransforms | None = None) -> Plan:
    """What compress() does, by GPTQ with the texts above or not; the plan, for what it says."""
    run, options = Run(root, out), PlanOptions(transforms=transforms, gptq=CORPUS.account if gptq else None)
    with connect_ranks(None) as ranks:
        opened = open_source(run, ranks, Reporter())
        plan = make_plan(opened.checkpoint, scheme, options, opened.source.identity)
        carry_out(prepare(opened, plan), CORPUS if gptq else None)
    return plan


def hessians(root: Path) -> dict[str, Tensor]:
    """Of an ordinary model's Linears, float64, by the name of the weight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
    found: dict[str, Tensor] = {}

    def hook(name: str):
        def before(_: object, args: tuple[Tensor]) -> None:
            values = args[0].reshape(-1, args[0].shape[-1]).double()
            found[name] = found.get(name, 0) + values.T @ values

        return before

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.inference_mode():
        for ids in IDS:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    return found


def losses(root: Path, out: Path, found: dict[str, Tensor]) -> dict[str, float]:
    """The squared error of each layer's outputs, by the name of the weight."""
    dequantize(out, out.with_name(f"{out.name}-plain"))
    before, after = small_checkpoints.read(root), small_checkpoints.read(out.with_name(f"{out.name}-plain"))
    errors = {name: (after[name].double() - before[name].double()) for name in found if ".layers." in name}
    return {name: float((error @ found[name] * error).sum()) for name, error in errors.items()}


@pytest.fixture(scope="module")
def found(all_converted: Shelf) -> dict[str, Tensor]:
    return hessians(all_converted.source("Qwen3ForCausalLM"))


def test_gptq_lowers_the_error_of_all_layers(
    shelf: Shelf, tmp_path: Path, found: dict[str, Tensor], subtests: pytest.Subtests
) -> None:
    source = shelf.source("Qwen3ForCausalLM")
    layers = 7 * small_checkpoints.LAYERS
    for scheme in WANTED:
        with subtests.test(scheme=scheme.suffix):
            root = tmp_path / scheme.suffix
            root.mkdir()
            plan = compressed(source, root / "gptq", scheme, gptq=True)
            compressed(source, root / "nearest", scheme, gptq=False)
            assert f"GPTQ rounds {layers} layers with their Hessians over 4 x 150 tokens" in plan.notes
            assert [path.name for path in root.glob("*.rounded")] == []
            one, other = small_checkpoints.read(root / "gptq"), small_checkpoints.read(root / "nearest")
            assert {name: (tensor.dtype, tensor.shape) for name, tensor in one.items()} == {
                name: (tensor.dtype, tensor.shape) for name, tensor in other.items()
            }
            # All codes of rounded layers change, their scales and zero points only where they are searched for, and
            # nothing else.
            for name, tensor in one.items():
                same = torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
                if name.endswith(f"_proj.{scheme.format.codes}") and ".layers." in name:
                    assert not same, name
                elif not (scheme.searches_scales and "_proj." in name and ".layers." in name):
                    assert same, name
            before, after = (losses(source, root / kind, found) for kind in ("nearest", "gptq"))
            assert len(after) == layers
            assert all(after[name] < before[name] for name in before)
            assert sum(after.values()) < 0.8 * sum(before.values())


def test_the_search_for_scales_is_weighted_by_the_hessian(
    shelf: Shelf, tmp_path: Path, found: dict[str, Tensor]
) -> None:
    source, scheme, layer = shelf.source("Qwen3ForCausalLM"), SCHEMES["int4"], "model.layers.0.mlp.down_proj"
    compressed(source, tmp_path / "gptq", scheme, gptq=True)
    compressed(source, tmp_path / "nearest", scheme, gptq=False)
    bits = small_checkpoints.read(source)[f"{layer}.weight"].view(torch.uint16).numpy()
    importance = found[f"{layer}.weight"].diagonal().float().numpy()
    for kind, weighting in (("gptq", importance), ("nearest", None)):
        stored = small_checkpoints.read(tmp_path / kind)[f"{layer}.weight_scale"].float().numpy()
        assert np.array_equal(stored, choose_scales(scheme, bits, "BF16", importance=weighting).scale), kind


# What comes last in one of the experts of images, the latter four of eight: a text is sent to none, and what is known of
# their inputs is the layer's only.
UNCALLED = {"Ernie4_5_VLMoeForConditionalGeneration": r"[.]experts[.][4-7][.]down_proj$"}


def test_layers_that_run_several_times_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        compressed(shelf.source("HrmTextForCausalLM"), tmp_path / "out", SCHEMES["int4"], True)
    assert caught.value.message == (
        "HrmTextForCausalLM runs its layers several times, and GPTQ rounds a layer after its first pass"
    )
    assert not (tmp_path / "out").exists()


# Of each kind of layer in every run; the others are rounded with OPENQUANT_ALL=1.
ROUNDED = ("Phi3ForCausalLM", "DeepseekV3ForCausalLM")


def test_all_layers_of_an_architecture_have_a_hessian(shelf: Shelf, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in representatives():
        with subtests.test(name):
            scheme = small_checkpoints.served_in(name, "int8", "channel", "tensor", "block", "mxfp8")
            checkpoint = open_checkpoint(shelf.source(name))
            plan = make_plan(checkpoint, scheme, PlanOptions(gptq=CORPUS.account))
            units = find_hessians(StreamedModel(checkpoint), plan).values()
            known = {info.name for unit in units for hessian in unit.hessians for info in hessian.output_tensors}
            uncalled = UNCALLED.get(name)
            called = [
                weight for weight, _ in plan.gptq_rounded if not (uncalled and re.search(uncalled, weight.module))
            ]
            assert known == {info.name for weight in called for info in rounded_tensors(weight, scheme)} != set()
            if not everything() and name not in ROUNDED:
                continue
            folder = LayerStore(tmp_path / name, "0" * 64)
            folder.claim()
            few = Corpus(CORPUS.documents[:1], "", {})
            round_layers(TextRun(StreamedModel(checkpoint), few), plan, folder, kernels, 1 << 30)
            assert folder.places().keys() == known


def test_ranks_share_the_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(EXAMPLE)
    plan = make_plan(checkpoint, SCHEMES["int4"], PlanOptions(gptq=CORPUS.account))
    written = []
    for size in (1, 3):
        store = LayerStore(tmp_path / str(size), "0" * 64)
        store.claim()
        for rank in range(size):
            run = TextRun(StreamedModel(checkpoint), CORPUS)
            round_layers(run, plan, store, kernels, 1 << 30, Ranks(rank, size))
            numbers = {int(place.path.stem.split("-")[1]) for place in store.places().values()}
            assert numbers == {layer for layer in range(4) if layer % size <= rank}
        written.append([path.read_bytes() for path in sorted(store.path.iterdir())])
    assert written[0] == written[1]


@pytest.mark.parametrize("tuned", [False, True])
def test_threads_share_the_rows_of_a_weight(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    # Small models have a single thread otherwise.
    monkeypatch.setattr("openquant.streaming.model.LEAST_PRODUCTS", 0)
    monkeypatch.setattr("openquant.streaming.model.available_cpus", lambda: 2)
    before = torch.get_num_threads()
    checkpoint = open_checkpoint(shelf.source("Qwen3ForCausalLM"))
    few = Corpus(CORPUS.documents[:1], "", {})
    for scheme in WANTED[-1:] if tuned else WANTED[-2:]:
        plan = make_plan(checkpoint, scheme, PlanOptions(gptq=CORPUS.account))
        curvature = {name: torch.eye(BLOCK).expand(2, BLOCK, BLOCK) for name in plan.layers} if tuned else {}
        written = []
        for threads in (1, 2):
            store = LayerStore(tmp_path / f"{scheme.name}{scheme.asymmetric}{threads}", "0" * 64)
            store.claim()
            rows: list[int] = []

            def round_panel(weight: ColumnRounding, *rest: Any, rows: list[int] = rows) -> None:
                rows.append(weight.columns.shape[1])
                kernels.round_panel(weight, *rest)

            monkeypatch.setattr(compiled, "round_panel", round_panel)
            torch.set_num_threads(threads)
            try:
                run = TextRun(StreamedModel(checkpoint), few)
                round_layers(run, plan, store, compiled, 1 << 30, sensitivities=Sensitivities({}, curvature))
                assert torch.get_num_threads() == threads
            finally:
                torch.set_num_threads(before)
            assert max(rows) == small_checkpoints.MLP // threads
            written.append(
                np.frombuffer(b"".join(path.read_bytes() for path in sorted(store.path.iterdir())), np.uint8)
            )
        # Products of other shapes may add in another order.
        assert (written[0] != written[1]).mean() < 1e-3


def test_smoothed_weights_are_rounded_by_divided_inputs(shelf: Shelf, tmp_path: Path, found: dict[str, Tensor]) -> None:
    source, name = shelf.source("Qwen3ForCausalLM"), "model.layers.0.mlp.down_proj.weight"
    columns = np.exp2(np.random.default_rng(5).integers(-3, 4, small_checkpoints.MLP)).astype(np.float32)
    transforms = WeightTransforms({name.removesuffix(".weight"): WeightTransform(columns=columns)})
    lost = []
    for gptq in (False, True):
        out = tmp_path / str(gptq)
        compressed(source, out, SCHEMES["int4"], gptq, transforms)
        dequantize(out, tmp_path / f"{gptq}-plain")
        factors = torch.from_numpy(columns).double()
        error = (
            small_checkpoints.read(tmp_path / f"{gptq}-plain")[name].double()
            - small_checkpoints.read(source)[name].double() * factors
        )
        lost.append(float((error @ (found[name] / factors / factors[:, None]) * error).sum()))
    assert lost[1] < 0.7 * lost[0]


def test_a_quantized_source_is_rounded_again_or_keeps_its_codes(shelf: Shelf, tmp_path: Path) -> None:
    source = tmp_path / "source"
    compressed(shelf.source("Qwen3ForCausalLM"), source, SCHEMES["channel"], gptq=False)
    compressed(source, tmp_path / "kept", SCHEMES["channel"], gptq=True)
    codes = small_checkpoints.read(source)
    assert all(
        torch.equal(tensor.view(torch.uint8), codes[name].view(torch.uint8))
        for name, tensor in small_checkpoints.read(tmp_path / "kept").items()
    )
    for gptq in (True, False):
        compressed(source, tmp_path / str(gptq), SCHEMES["int4"], gptq)
    one, other = (small_checkpoints.read(tmp_path / str(gptq)) for gptq in (True, False))
    name = "model.layers.1.mlp.up_proj.weight_packed"
    assert not torch.equal(one[name], other[name])

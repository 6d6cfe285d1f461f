"""Mixtures that run without being written answer as the outputs that compress writes do, to the last bit."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import everything
from openquant import compress
from openquant.data.corpus import Corpus, Document
from openquant.evaluation.as_served import ServedModel
from openquant.evaluation.kl import DocumentRecord, compare_logits
from openquant.files.checkpoint import open_checkpoint
from openquant.fit.menu import UNQUANTIZED, Mixture, units_of
from openquant.fit.scores import Measured, _Quantizer, find_variants, measure_mixtures, scores_of
from openquant.formats import kernels
from openquant.formats.schemes import find_scheme
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, make_plan
from openquant.streaming.interleaved import ForwardPass, TextRun, run_interleaved
from openquant.streaming.model import StreamedModel, products_in_float32
from support import small_checkpoints
from support.conversions import Shelf
from support.streamed_logits import streamed_logits

# One of each kind: fused, in one tensor for all experts ([in, out] too), latent attention; the next test has experts one
# by one, and layers that read the keys of earlier ones.
KINDS = ("Phi3ForCausalLM", "GraniteMoeForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM")
BATCH = torch.randint(10, 500, (2, 24), generator=torch.Generator().manual_seed(5))
CORPUS = Corpus(
    tuple(Document("random", f"random {number}", tuple(ids.tolist())) for number, ids in enumerate(BATCH)),
    hashlib.sha256(BATCH.numpy().tobytes()).hexdigest(),
    {},
)


def plans_of(source: Path, *names: str, **options: Any) -> dict[str, Plan]:
    checkpoint = open_checkpoint(source)
    return {name: make_plan(checkpoint, find_scheme(name), PlanOptions(**options)) for name in names}


def measured(
    source: Path, plans: dict[str, Plan], mixtures: list[Mixture], corpus: Corpus = CORPUS, **options: Any
) -> Measured:
    plan = next(iter(plans.values()))
    changes = options.pop("changes", None)
    run = TextRun(StreamedModel(open_checkpoint(source)), corpus, **options)
    return measure_mixtures(run, units_of(plans), plan.decisions.fused, mixtures, kernels, changes)


def written(source: Path, output: Path) -> list[np.ndarray]:
    """The KL divergence at each position of each document, of an output that lies on disk."""
    # As mixtures are measured, whatever this processor multiplies in.
    with products_in_float32():
        before, after = (
            streamed_logits(StreamedModel(open_checkpoint(root)), [ids[None] for ids in BATCH])
            for root in (source, output)
        )
    return [
        compare_logits(plain[0], rounded[0], Document("", "", (*ids.tolist(),)), ("", "")).kl
        for plain, rounded, ids in zip(before, after, BATCH, strict=True)
    ]


def same(records: list[DocumentRecord], expected: list[np.ndarray]) -> bool:
    assert all(kl.max() > 0 for kl in expected)
    return all(np.array_equal(record.kl, kl) for record, kl in zip(records, expected, strict=True))


def test_a_single_scheme_answers_as_its_output(
    shelf: Shelf, tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    for architecture in KINDS:
        with subtests.test(architecture=architecture):
            root = tmp_path_factory.mktemp("row")
            source = shelf.source(architecture)
            name = small_checkpoints.served_in(architecture, "nvfp4", "int8-weights").name
            compress(source, root / "out", name)
            plans = plans_of(source, name)
            uniform = {number: name for number, unit in enumerate(units_of(plans)) if name in unit.choices}
            [records] = measured(source, plans, [uniform])[0]
            assert same(records, written(source, root / "out"))


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Gemma3nForCausalLM"])
def test_each_unit_alone_answers_as_an_output_in_which_only_it_is_quantized(
    shelf: Shelf, tmp_path: Path, architecture: str
) -> None:
    source = shelf.source(architecture)
    plans = plans_of(source, "int8-weights")
    units = units_of(plans)
    mixtures, changes = find_variants(StreamedModel(open_checkpoint(source)), units)
    records = measured(source, plans, mixtures, changes=changes)[0]
    # The last one, so that all layers before it are those of the source.
    number = len(units) - 1
    others = [pattern for at, unit in enumerate(units) if at != number for pattern in unit.patterns]
    compress(source, tmp_path / "out", "int8-weights", ignore=others)
    at = mixtures.index({number: "int8-weights"})
    assert same(records[at], written(source, tmp_path / "out"))


def test_the_head_is_a_unit_and_all_its_schemes_are_measured(example: Path, tmp_path: Path) -> None:
    plans = plans_of(example, "int8-weights", "int4", head=True)
    units = units_of(plans)
    [head] = [number for number, unit in enumerate(units) if unit.modules == ("lm_head",)]
    mixtures, changes = find_variants(StreamedModel(open_checkpoint(example)), units)
    assert [mixture for mixture in mixtures if head in mixture] == [{head: "int8-weights"}, {head: "int4"}]
    assert head not in changes
    scores = scores_of(units, mixtures, changes, measured(example, plans, mixtures, changes=changes))
    compress(example, tmp_path / "out", "int4", quantize_lm_head=True, ignore=["model.**"])
    expected = np.concatenate(written(example, tmp_path / "out"))
    assert scores[head]["int4"] == pytest.approx(expected.mean(), rel=1e-12)
    assert scores[head]["int4"] > scores[head]["int8-weights"] > scores[head][UNQUANTIZED] == 0


def test_other_schemes_follow_from_the_change_after_their_layer(example: Path) -> None:
    """In the last layer nothing comes after it but the head, so that they are nearly what is measured."""
    plans = plans_of(example, "nvfp4", "int4")
    units = units_of(plans)
    mixtures, changes = find_variants(StreamedModel(open_checkpoint(example)), units)
    assert all(set(mixture.values()) == {"nvfp4"} for mixture in mixtures)
    direct: list[Mixture] = [{len(units) - 1: "int4"}]
    found = measured(example, plans, [*mixtures, *direct], changes=changes)
    scores = scores_of(units, mixtures, changes, (found[0][:-1], found[1]))
    kl = np.concatenate([record.kl for record in found[0][-1]]).mean()
    assert scores[-1]["int4"] == pytest.approx(kl, rel=0.3)


def test_units_are_what_engines_load_in_one_scheme(shelf: Shelf) -> None:
    units = units_of(plans_of(shelf.source("Qwen3MoeForCausalLM"), "int8-weights"))
    attention = next(unit for unit in units if unit.modules[0].endswith("q_proj"))
    assert attention.patterns == ("model.layers.0.self_attn.{q_proj,k_proj,v_proj}",)
    experts = next(unit for unit in units if "experts" in unit.modules[0])
    assert experts.patterns == ("model.layers.1.mlp.experts.**",)
    assert len(experts.modules) == 3 * small_checkpoints.EXPERTS


def test_units_have_the_bytes_that_compress_writes(example: Path, tmp_path: Path) -> None:
    plans = plans_of(example, "nvfp4", "int8-weights")
    units = units_of(plans)
    fixed = sum(info.nbytes for info in open_checkpoint(example).tensors.values())
    fixed -= sum(unit.choices[UNQUANTIZED].nbytes for unit in units)
    for name in plans:
        compress(example, tmp_path / name, name)
        stored = sum(info.nbytes for info in open_checkpoint(tmp_path / name).tensors.values())
        assert fixed + sum(unit.choices[name].nbytes for unit in units) == stored


@pytest.mark.parametrize(
    ("architecture", "name"), [("Qwen3MoeForCausalLM", "channel"), ("Qwen3ForCausalLM", "nvfp4-w4a4")]
)
def test_activations_are_rounded_as_eval_rounds_those_of_the_output(
    shelf: Shelf, tmp_path: Path, architecture: str, name: str
) -> None:
    source = shelf.source(architecture)
    compress(source, tmp_path / "out", name)
    plans = plans_of(source, name)
    [records] = measured(source, plans, [dict.fromkeys(range(len(units_of(plans))), name)])[0]
    served = ServedModel(StreamedModel(open_checkpoint(tmp_path / "out")))
    plain = StreamedModel(open_checkpoint(source))
    found: list[torch.Tensor] = []
    passes = [[ForwardPass(plain, partial(plain.logits, ids)), served.passes(ids)[1]] for ids in BATCH]
    with products_in_float32():
        run_interleaved(passes, finished=lambda *value: found.append(value[2]))
    expected = [
        compare_logits(before, after, Document("", "", (*ids.tolist(),)), ("", "")).kl
        for before, after, ids in zip(found[::2], found[1::2], BATCH, strict=True)
    ]
    assert same(records, expected)
    [weights_alone] = measured(source, plans_of(source, "nvfp4"), [{}])[0]
    assert not any(record.kl.any() for record in weights_alone)


def test_each_choice_of_a_unit_is_made_once_and_alone_in_memory(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the layer of a large model would be in memory once for each scheme."""
    made, held = [], set()
    make = _Quantizer._parameters

    def counted(self: _Quantizer, place: str, number: int, name: str) -> Any:
        if (number, name) not in self.parameters:
            made.append((number, name))
        found = make(self, place, number, name)
        held.add(len(self.parameters))
        return found

    monkeypatch.setattr(_Quantizer, "_parameters", counted)
    plans = plans_of(example, "nvfp4", "int4", "int8-weights", head=True)
    units = units_of(plans)
    mixtures, changes = find_variants(StreamedModel(open_checkpoint(example)), units)
    measured(example, plans, mixtures, changes=changes)
    assert sorted(made) == sorted(
        (number, name) for number, unit in enumerate(units) for name in unit.choices if name != UNQUANTIZED
    )
    assert held == {1}


# Stacks and shared keys in every run, all with OPENQUANT_ALL=1.
ALL = small_checkpoints.RUNNABLE if everything() else ("Llama4ForCausalLM", "Gemma3nForCausalLM")


def test_every_unit_has_a_score_in_every_scheme(shelf: Shelf, subtests: pytest.Subtests) -> None:
    for architecture in ALL:
        with subtests.test(architecture=architecture):
            source = shelf.source(architecture)
            plans = plans_of(
                source, small_checkpoints.served_in(architecture, "nvfp4", "int8-weights", "channel", "block").name
            )
            units = units_of(plans)
            mixtures, changes = find_variants(StreamedModel(open_checkpoint(source)), units)
            scores = scores_of(units, mixtures, changes, measured(source, plans, mixtures, changes=changes))
            # An indexer of sparse attention changes nothing where all tokens are attended to.
            for unit, found in zip(units, scores, strict=True):
                least = 0 if "indexer" in unit.modules[0] else 1e-9
                assert all(least <= kl < 10 for name, kl in found.items() if name != UNQUANTIZED), unit

"""Outputs held against their source in one pass, on the trained example."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import EXAMPLE, change_json
from openquant import compress
from openquant.data.corpus import Corpus, Document
from openquant.errors import SourceError
from openquant.evaluation.compare import RoundingNoise, compare_outputs, stochastic_round
from openquant.evaluation.results import Evaluation, EvaluationSettings, ModelUnderTest
from openquant.files.cards import check_evaluation
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.offload import OffloadFile
from support import small_checkpoints

Tensors = dict[str, torch.Tensor]
SCHEMES = ("tensor", "channel", "block", "int8-weights", "nvfp4-w4a4")


def corpus(low: int = 4, high: int = 2048, count: int = 4, length: int = 64) -> Corpus:
    """Those of tests/serve/engine.py: random tokens, the same for every model."""
    chosen = random.Random(1234)
    documents = [tuple(chosen.randrange(low, high) for _ in range(length)) for _ in range(count)]
    return Corpus(
        tuple(Document(f"domain {number % 2}", f"text {number}", ids) for number, ids in enumerate(documents)), "0", {}
    )


def subject(path: Path) -> ModelUnderTest:
    return ModelUnderTest(path.name, open_checkpoint(path))


def judge(source: Path, *outputs: Path, texts: Corpus | None = None, **settings: Any) -> Evaluation:
    return compare_outputs(
        subject(source), [subject(each) for each in outputs], texts or corpus(), EvaluationSettings(**settings)
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    for scheme in SCHEMES:
        compress(EXAMPLE, root / scheme, scheme)
    return {scheme: root / scheme for scheme in SCHEMES}


@pytest.fixture(scope="module")
def found(converted: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """What is found of the example's outputs, all in one pass."""
    outputs = judge(EXAMPLE, *converted.values()).outputs
    return dict(zip(converted, outputs, strict=True))


# Of vLLM, whose CPU kernels round activations for one scale per row alone, with the plugin of tests/serve/shim
# for FP4 too: the mean over the same positions.
@pytest.mark.parametrize(
    ("scheme", "whole", "kl"),
    [("tensor", False, 0.0013), ("channel", True, 0.0030), ("block", False, 0.0012), ("nvfp4-w4a4", True, 0.0364)],
)
def test_the_kl_is_that_of_an_engine(found: Mapping[str, Any], scheme: str, whole: bool, kl: float) -> None:
    one = found[scheme]
    assert (one["kl"]["mean"] if whole else one["weights_only"]["kl"]) == pytest.approx(kl, rel=0.05)


def test_perplexity_is_that_of_a_plain_loop(found: Mapping[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.bfloat16)
    total = count = 0
    with torch.inference_mode():
        for document in corpus().documents:
            logits = model(torch.tensor([document.ids])).logits[0].double()
            for position, token in enumerate(document.ids[1:]):
                total -= float(logits[position].log_softmax(-1)[token])
                count += 1
    # Sums in another order, where bfloat16 is multiplied in float32.
    assert found["tensor"]["perplexity"]["source"] == pytest.approx(math.exp(total / count), rel=0.01)


def test_what_is_found_is_what_eval_json_holds(found: Mapping[str, Any]) -> None:
    for one in found.values():
        check_evaluation(json.loads(json.dumps(one, allow_nan=False)))
    layers = found["tensor"]["layers"]
    assert [layer["layer"] for layer in layers] == [f"model.layers.{number}" for number in range(4)]
    assert all(0 < layer["floor"] < layer["distance"] < 0.1 for layer in layers)
    assert found["tensor"]["sizes"]["output"] < 0.7 * found["tensor"]["sizes"]["source"]
    assert found["tensor"]["kl_by_domain"][1]["domain"] == "domain 1"
    assert sum(found["tensor"]["kl_histogram"]["floor"]) == pytest.approx(1)


def test_the_floor_lies_below_all_and_a_source_beside_itself_is_the_same(found: Mapping[str, Any]) -> None:
    assert 0 < found["tensor"]["floor"]["kl"] < found["int8-weights"]["kl"]["mean"]
    itself = judge(EXAMPLE, EXAMPLE).outputs[0]
    assert (itself["kl"]["mean"], itself["top1"], itself["verdict"], itself["suspects"]) == (0, 1, "same", [])
    # What rounded activations cost comes on top, where they are rounded.
    assert found["channel"]["weights_only"]["kl"] < 0.6 * found["channel"]["kl"]["mean"]
    assert found["int8-weights"]["weights_only"]["kl"] == found["int8-weights"]["kl"]["mean"]


def test_it_is_the_same_again_alone_and_from_a_scratch_file(
    found: Mapping[str, Any], converted: Mapping[str, Path], tmp_path: Path
) -> None:
    with OffloadFile(tmp_path, 0) as scratch:
        again = judge(EXAMPLE, converted["channel"], streamed=lambda *_: nullcontext(scratch)).outputs[0]
    assert json.dumps(again) == json.dumps(found["channel"])
    other = judge(EXAMPLE, converted["channel"], seed=1).outputs[0]
    assert other["floor"] != again["floor"]
    assert other["kl"]["mean"] == again["kl"]["mean"]


def spoilt(
    base: Path, target: Path, change: Callable[[Tensors], Any], config: Callable[[dict[str, Any]], Any] | None = None
) -> Path:
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors*", ".openquant.json"))
    tensors = small_checkpoints.read(base)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    if config is not None:
        change_json(target / "config.json", config)
    return target


def test_experts_of_which_each_gets_all_tokens(tmp_path: Path) -> None:
    """Llama 4's, whose stacks are [experts, in, out]: an input that all of them weigh much is in the scale of each row."""
    weights = small_checkpoints.tensors("Llama4ForCausalLM")
    weights["model.layers.1.feed_forward.experts.gate_up_proj"][:, 3] *= 100
    source = small_checkpoints.write(tmp_path / "source", "Llama4ForCausalLM", weights=weights)
    compress(source, tmp_path / "out", "int8")

    def rerouted(tensors: Tensors) -> None:
        """The next expert for every token."""
        name = "model.layers.1.feed_forward.router.weight"
        tensors[name] = tensors[name].roll(1, 0)

    found = judge(
        source, tmp_path / "out", spoilt(tmp_path / "out", tmp_path / "other", rerouted), texts=corpus(10, 500)
    )
    sound, elsewhere = found.outputs
    assert sound["suspects"] == []
    assert all(note.startswith(("the source does little better", "an interval from")) for note in found.notes)
    # Found: 0.02 and 0.99.
    assert 0 < sound["layers"][1]["routed_otherwise"] < 0.1
    assert elsewhere["layers"][1]["routed_otherwise"] > 0.9
    assert "routed_otherwise" not in sound["layers"][0]


def test_nan_names_the_text(converted: Mapping[str, Path], tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> None:
        # Only the last text has this token. Attention takes it to the text's beginning: nothing times NaN is NaN.
        token = corpus().documents[3].ids[40]
        assert sum(document.ids.count(token) for document in corpus().documents) == 1
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.embed_tokens.weight"][token] = math.nan

    spoilt(converted["tensor"], tmp_path / "out", poison)
    with pytest.raises(SourceError, match=r"^out answers with NaN or infinity at position \d+ of text 3"):
        judge(EXAMPLE, tmp_path / "out")


def test_a_source_whose_answers_overflow_is_not_called_the_same(tmp_path: Path) -> None:
    source = small_checkpoints.changed_copy(
        EXAMPLE, tmp_path / "source", lambda weights: weights["model.embed_tokens.weight"].mul_(1e30)
    )
    compress(source, tmp_path / "out", "channel")
    with pytest.raises(
        SourceError, match=r"^hidden states of out after model\.layers\.0, or those of its source, are too large"
    ):
        judge(source, tmp_path / "out")


def test_another_architecture_has_no_suspects(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Gemma3ForConditionalGeneration")
    compress(source, tmp_path / "out", "channel")
    found = judge(source, tmp_path / "out", texts=corpus(10, 500, count=2, length=24))
    assert found.outputs[0]["suspects"] == []
    # Its weights are random.
    assert found.notes[0].startswith("the source does little better than guess among its ")
    # Layers of towers for images, which no text goes through, are not among them.
    assert len(found.outputs[0]["layers"]) == small_checkpoints.LAYERS


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_of_eight_values_in_bfloat16_one_goes_a_step_up_and_one_down() -> None:
    values = torch.full((100_000,), 1.5).bfloat16()
    made = stochastic_round(values, chance())
    assert made.dtype == torch.bfloat16
    steps = (made - values) / 2**-7
    assert set(steps.tolist()) == {-1, 0, 1}
    for step in (-1, 1):
        assert (steps == step).float().mean() == pytest.approx(1 / 8, abs=0.005)


def test_float32_values_go_to_either_neighbour_by_how_near_they_are() -> None:
    values = torch.full((100_000,), 1 + 0.3 * 2**-7)
    made = stochastic_round(values, chance())
    assert made.dtype == torch.float32
    assert set(made.tolist()) == {1, 1 + 2**-7}
    assert (made > 1).float().mean() == pytest.approx(0.3, abs=0.01)


def test_zero_stays_nothing_becomes_infinite_and_nan_no_number() -> None:
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, largest, -largest]).repeat(1000).bfloat16()
    made = stochastic_round(values, chance())
    assert made.isfinite().all()
    assert (made.reshape(-1, 4)[:, :2] == 0).all()
    assert stochastic_round(torch.full((4096,), 65504.0).half(), chance()).isfinite().all()
    nan = torch.full((4096,), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    assert stochastic_round(nan, chance()).isnan().all()


def test_modules_are_noisy_while_it_is_on_and_the_same_by_the_seed() -> None:
    module = nn.Identity()
    noise = RoundingNoise([module])
    x = torch.randn(1000, generator=chance()).bfloat16()

    def noisy(seed: int) -> list[torch.Tensor]:
        source = partial(noise.drawn_from, chance(seed))
        with source():
            first = module(x)
        # Something else is computed in between.
        with noise.drawn_from(chance(99)):
            module(x)
        with source():
            return [first, module(x)]

    first, second = noisy(1)
    assert not torch.equal(first, x)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(noisy(1), (first, second), strict=True))
    assert not torch.equal(noisy(2)[0], first)
    assert torch.equal(module(x), x)


def test_a_token_without_a_row_is_named(converted: dict[str, Path]) -> None:
    with pytest.raises(SourceError, match=r"^a text has token \d{4}, and the input embedding 2048 rows"):
        judge(EXAMPLE, converted["tensor"], texts=corpus(2048, 4096))

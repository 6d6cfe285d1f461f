"""How much tokens and outputs count: by gradients that run back through a streamed model, in `compress --gptq --tune`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import EXAMPLE, everything
from openquant import compress
from openquant.calibration.gptq import Tuning
from openquant.calibration.gptq_pass import Hessian, find_hessians, hessian_groups, round_layers
from openquant.calibration.observers import find_hook_points
from openquant.calibration.sensitivity import Sensitivities, draw_gradient, find_sensitivities
from openquant.data.corpus import Corpus, Document
from openquant.distributed import Ranks
from openquant.errors import OpenQuantError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.shardfile import LayerStore
from openquant.formats import kernels
from openquant.formats.schemes import SCHEMES
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import make_plan
from openquant.streaming.interleaved import TextRun
from openquant.streaming.model import StreamedModel
from openquant.streaming.pass_checkpoint import PassCheckpoint
from support import small_checkpoints, starting
from support.conversions import Shelf
from support.reporters import Told
from support.starting import Job

IDS = [tuple((7 * at * at + 31 * number) % 500 for at in range(40)) for number in range(3)]
CORPUS = Corpus(tuple(Document("some", f"some {at}", each) for at, each in enumerate(IDS)), "", {})
SMALL: dict[str, Any] = {"gptq": True, "tune": True, "samples": 4, "length": 64}
WORDS = ("--scheme", "int4", "--gptq", "--tune", "--samples", "4", "--length", "64")


def linears_of(model: StreamedModel) -> dict[str, str]:
    """Each Linear that computes all tokens, in a group of its own."""
    return {name: name for name in find_hook_points(model)[0] if ".experts." not in name}


def by_autograd(root: Path, model: StreamedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an ordinary model of transformers has, all of whose weights are in memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ordinary: Any = type(model.model).from_pretrained(root, dtype=torch.float32).eval().requires_grad_(False)
    found = {name: torch.zeros(len(IDS), len(IDS[0])) for name in linears_of(model)}
    curvatures: dict[str, Tensor] = {}

    def followed(name: str, number: int, _module: object, inputs: tuple[Tensor, ...], output: Any) -> None:
        def add(gradient: Tensor) -> None:
            rows = gradient.reshape(len(IDS[0]), -1)
            found[name][number] += rows.square().sum(-1)
            squares = inputs[0].detach().reshape(len(IDS[0]), -1).square().mean(-1)
            curvatures[name] = curvatures.get(name, 0) + rows.T @ (squares[:, None] * rows)

        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(add)

    for number, ids in enumerate(IDS):
        hooks = [ordinary.get_submodule(name).register_forward_hook(partial(followed, name, number)) for name in found]
        embeddings = ordinary.get_input_embeddings().register_forward_hook(
            lambda *call: call[2].requires_grad_().clone()
        )
        logits = ordinary(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        torch.autograd.backward(logits, draw_gradient(logits, number))
        for hook in (*hooks, embeddings):
            hook.remove()
    return found, curvatures


def weights(squares: Tensor) -> Tensor:
    return squares**0.7 / (squares**0.7).mean()


# Of each kind of layer in every run; all with OPENQUANT_ALL=1.
DIFFERENTIATED = (
    "Qwen3ForCausalLM",
    "Llama4ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Gemma3nForCausalLM",
    "NemotronH_Omni_Reasoning_V3",
)


@pytest.mark.parametrize("architecture", small_checkpoints.STREAMED if everything() else DIFFERENTIATED)
def test_gradients_are_those_of_an_ordinary_model(shelf: Shelf, architecture: str) -> None:
    if architecture == "Llama4ForConditionalGeneration":
        pytest.skip("transformers 5.24 does not run it")
    root = shelf.source(architecture)
    model = StreamedModel(open_checkpoint(root), dtype=torch.float32)
    linears = linears_of(model)
    # As many documents at once as there are, and one.
    together, one_by_one = (find_sensitivities(TextRun(model, CORPUS), linears, budget) for budget in (1 << 30, 0))
    for found, alone in zip(together, one_by_one, strict=True):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in found)

    all_squares, curvatures = by_autograd(root, model)
    expected = {name: squares for name, squares in all_squares.items() if squares.any()}
    assert together.tokens.keys() == expected.keys()
    for name, squares in expected.items():
        torch.testing.assert_close(together.tokens[name], weights(squares), rtol=1e-3, atol=1e-3)

    assert together.outputs
    for name, blocks in together.outputs.items():
        rows = len(curvatures[name])
        assert blocks.shape == (-(-rows // 256), 256, 256)
        for number, block in enumerate(blocks):
            part = curvatures[name][number * 256 :, number * 256 :][:256, :256]
            inside = len(part)
            limit = 1e-3 * float(part.abs().max())
            torch.testing.assert_close(block[:inside, :inside], part, rtol=1e-3, atol=limit)
            assert not block[inside:].any() and not block[:, inside:].any()


def test_a_group_has_the_sum_of_its_layers(shelf: Shelf) -> None:
    model = StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")), dtype=torch.float32)
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    together = find_sensitivities(TextRun(model, CORPUS), dict.fromkeys(names, "all"), 0)
    assert together.outputs.keys() == set(names)
    squares, _ = by_autograd(shelf.source("Qwen3ForCausalLM"), model)
    expected = sum(squares[name] for name in names)
    torch.testing.assert_close(together.tokens["all"], weights(expected), rtol=1e-3, atol=1e-3)


def test_the_curvature_of_the_kl_is_the_covariance_of_what_is_drawn() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]]).expand(200_000, 3)
    drawn = draw_gradient(logits, seed=0)
    chances = torch.softmax(logits[0], -1)
    torch.testing.assert_close(drawn.T @ drawn / len(drawn), chances.diag() - chances.outer(chances), rtol=0, atol=3e-3)
    assert torch.equal(drawn, draw_gradient(logits, seed=0))
    assert not torch.equal(drawn, draw_gradient(logits, seed=1))


def test_a_hessian_weighs_its_tokens() -> None:
    inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    sensitivity = torch.tensor([[0.0, 1.0, 2.0, 0.5, 0.0], [3.0, 0.0, 0.0, 1.0, 0.25]])
    hessian = Hessian(8, sensitivity=sensitivity, accumulating=True)
    for document in (0, 1):
        hessian.add(inputs[document, None], document)
    rows = inputs.reshape(10, 8)
    torch.testing.assert_close(hessian.pop_matrix(), rows.T @ (sensitivity.reshape(10, 1) * rows))

    # The grouped output projection of DeepSeek-V4 has several rows for each token.
    grouped = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(8, sensitivity=sensitivity, accumulating=True)
    hessian.add(grouped)
    rows = grouped.reshape(10, 8)
    weights = sensitivity[0].repeat_interleave(2)[:, None]
    torch.testing.assert_close(hessian.pop_matrix(), rows.T @ (weights * rows))


def test_a_document_that_counts_nothing_changes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shelf.source("Qwen3MoeForCausalLM"))
    plan = make_plan(checkpoint, SCHEMES["channel"], PlanOptions(ignore=("**.experts.**",), gptq=CORPUS.account))

    def rounded(name: str, count: int, weighed: bool) -> list[bytes]:
        model = StreamedModel(checkpoint)
        corpus = Corpus(CORPUS.documents[:count], "", {})
        weights = torch.zeros(count, len(IDS[0]))
        weights[0] = 1
        groups = hessian_groups(find_hessians(model, plan).values(), plan.entry)
        store = LayerStore(tmp_path / name, "0" * 64)
        store.claim()
        sensitivities = Sensitivities(dict.fromkeys(groups.values(), weights) if weighed else {}, {})
        round_layers(TextRun(model, corpus), plan, store, kernels, 1 << 30, sensitivities=sensitivities)
        return [path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))]

    assert rounded("alone", 1, weighed=False) == rounded("weighed", 3, weighed=True)
    assert rounded("alike", 3, weighed=False) != rounded("again", 3, weighed=True)


def test_each_weight_is_tuned_by_the_curvature_of_its_own_outputs(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts, for whose outputs none was found, each output counts by itself."""
    root = shelf.source("Qwen3MoeForCausalLM")
    checkpoint, weights = open_checkpoint(root), small_checkpoints.read(root)
    plan = make_plan(checkpoint, SCHEMES["channel"], PlanOptions(gptq=CORPUS.account))
    model = StreamedModel(checkpoint)
    names = list(hessian_groups(find_hessians(model, plan).values(), plan.entry))
    outputs = {name: torch.rand(-(-len(weights[f"{name}.weight"]) // 256), 256, 256) for name in names}
    found = {}

    class Unmoved(Tuning):
        def __post_init__(self) -> None:
            [name] = [name for name in plan.layers if weights[f"{name}.weight"].float().equal(self.weight)]
            found[name] = self.outputs

        def run(self) -> tuple[Tensor, Tensor]:
            return self.quotients, self.scale

    monkeypatch.setattr("openquant.calibration.gptq_pass.Tuning", Unmoved)
    store = LayerStore(tmp_path / "store", "0" * 64)
    store.claim()
    sensitivities = Sensitivities({}, outputs)
    round_layers(TextRun(model, CORPUS), plan, store, kernels, 1 << 30, sensitivities=sensitivities)
    assert found.keys() == plan.layers.keys() > outputs.keys()
    for name, blocks in found.items():
        alike = torch.eye(256).expand(-(-len(weights[f"{name}.weight"]) // 256), 256, 256)
        assert torch.equal(blocks, outputs.get(name, alike))


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.safetensors")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with a few texts."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    compress(EXAMPLE, out, "int4", **SMALL)
    return out


def test_the_output_says_how_it_was_made(made: Path, tmp_path: Path) -> None:
    texts = "4 x 64 tokens (openquant texts for calibration)"
    assert (
        f"| rounded by | GPTQ, {texts}, tokens and outputs by how much answers depend on them |\n"
        in (made / "README.md").read_text()
    )
    compress(EXAMPLE, tmp_path / "alike", "int4", **{**SMALL, "tune": False})
    assert shards(tmp_path / "alike") != shards(made)


class Stopped(Exception):
    """Ends a run."""


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("steps", [2, 6] if everything() else [6])
def test_a_stopped_run_goes_on(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr("openquant.streaming.session.BUDGET", 0)

    def stop(done: int, total: int) -> None:
        del done, total
        if len(stopped.steps) == steps:
            raise Stopped

    stopped = Told(stop)
    with pytest.raises(Stopped):
        compress(EXAMPLE, tmp_path / "out", "int4", reporter=stopped, **SMALL)
    assert stopped.steps[:4] == [(64, 256), (128, 256), (192, 256), (256, 256)][:steps]

    going_on = Told()
    compress(EXAMPLE, tmp_path / "out", "int4", reporter=going_on, **SMALL)
    assert going_on.notes[0].startswith("weighing 4 documents of 64 tokens: ")
    assert going_on.notes[0].endswith("; an earlier run is continued")
    # The second document was not kept yet.
    assert going_on.steps[0] == ((128, 256) if steps == 2 else stopped.steps[4])
    assert shards(tmp_path / "out") == shards(made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def job() -> Iterator[Job]:
    with starting.job() as found:
        yield found


def test_several_ranks_round_to_the_same_bytes(made: Path, job: Job, tmp_path: Path) -> None:
    done = job.finish(2, "-m", EXAMPLE, "-o", tmp_path / "out", *WORDS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("weighing 4 documents of 64 tokens") == 1
    assert shards(tmp_path / "out") == shards(made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_each_rank_weighs_its_part(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")), dtype=torch.float32)
    run, linears = TextRun(model, CORPUS), linears_of(model)
    alone = find_sensitivities(run, linears, 0)

    def open_part(number: int) -> PassCheckpoint:
        return PassCheckpoint(tmp_path / f"{number}.part", {})

    def wait(ranks: Ranks, _: object) -> None:
        if ranks.rank:
            raise Stopped

    monkeypatch.setattr(Ranks, "agree", wait)
    with pytest.raises(Stopped):
        find_sensitivities(run, linears, 0, Ranks(1, 2), open_part)
    assert [path.name for path in tmp_path.iterdir()] == ["1.part"]
    shared = find_sensitivities(run, linears, 0, Ranks(0, 2), open_part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.part", "1.part", "2.part"]
    for found, expected in zip(shared, alone, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_it_cannot_be_used_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"tune": True}, "--tune says how GPTQ weighs tokens and outputs"),
        ({**SMALL, "stream": True}, "--tune reads shards several times, which --stream deletes"),
    ):
        with pytest.raises(UsageError) as caught:
            compress(EXAMPLE, tmp_path / "out", "int4", **options)
        assert caught.value.message == message
    monkeypatch.setattr("openquant.api.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="^--tune needs numba"):
        compress(EXAMPLE, tmp_path / "out", "int4", **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_differentiated_is_named(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")))
    norm = type(model.model.model.layers[0].input_layernorm)
    monkeypatch.setattr(norm, "forward", lambda _, hidden: hidden.detach().mul_(2))
    with pytest.raises(OpenQuantError) as caught:
        find_sensitivities(TextRun(model, CORPUS), linears_of(model), 0)
    assert caught.value.message.startswith("Qwen3ForCausalLM cannot be differentiated: ")
    assert caught.value.hint == "leave --tune out"


def test_gradients_that_overflow_are_refused(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")))
    monkeypatch.setattr(
        "openquant.calibration.sensitivity.draw_gradient", lambda logits, _: torch.full_like(logits, torch.inf)
    )
    with pytest.raises(OpenQuantError, match=r"^gradients at the outputs of .* are not finite"):
        find_sensitivities(TextRun(model, CORPUS), linears_of(model), 0)

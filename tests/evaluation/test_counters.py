"""What is counted as texts go through models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openquant.evaluation.results import HiddenStateDistances, RouteCounts
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import StreamedModel
from support import small_checkpoints


# One gives experts the numbers of those that were chosen, the other every token, as zeros where it was not.
@pytest.mark.parametrize(
    ("architecture", "router"), [("Qwen3MoeForCausalLM", "mlp.gate"), ("Llama4ForCausalLM", "feed_forward.router")]
)
def test_tokens_that_go_to_other_experts_are_counted(architecture: str, router: str, tmp_path: Path) -> None:
    streamed = StreamedModel(open_checkpoint(small_checkpoints.write(tmp_path / "source", architecture)))
    routes = RouteCounts()
    routes.register_hooks(streamed.model)
    ids = torch.randint(0, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    chosen: list[list[list[int]]] = []

    def note(module: Any, args: tuple[torch.Tensor, ...], output: object) -> None:
        del output
        logits = torch.nn.functional.linear(args[0].reshape(-1, module.weight.shape[1]), module.weight)
        chosen.append(logits.topk(module.top_k).indices.sort(-1).values.tolist())

    with streamed.resident() as model:
        gate = model.get_submodule(f"model.layers.1.{router}")
        gate.register_forward_hook(note)
        for number in range(3):
            routes.pass_number = number
            model(input_ids=ids, use_cache=False)
            # The second pass goes as the first did, the third otherwise.
            if number == 1:
                gate.weight.data = gate.weight.flip(0).clone()
    before, same, after = chosen
    expected = sum(mine != theirs for mine, theirs in zip(before, after, strict=True)) / 40
    assert (before == same, expected > 0.2) == (True, True)
    assert [routes.share("model.layers.1", number) for number in (1, 2)] == [0, expected]
    assert routes.share("model.layers.0", 1) is None
    # As another process that counted the same adds it.
    routes.merge(dict(routes.counts))
    assert routes.share("model.layers.1", 2) == expected


def test_distances_are_the_mean_over_all_tokens_of_all_documents() -> None:
    mine, other = HiddenStateDistances(), HiddenStateDistances()
    source = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [6.0, 8.0]]])
    # One token 0.2 off, one not at all, one 1 off; then a document of one token, 2 off.
    output = torch.tensor([[[4.0, 4.0], [0.0, 2.0], [0.0, 0.0]]])
    for number, hidden in ((0, source), (1, output), (2, source)):
        mine.add("layers.0", number, hidden)
    for number, hidden in ((0, source[:, :1]), (1, source[:, :1] * 3), (2, source[:, :1])):
        other.add("layers.0", number, hidden)
    assert mine.mean("layers.0", 1) == pytest.approx(1.2 / 3)
    assert other.mean("layers.0", 1) == 2
    mine.merge(other.sums)
    assert mine.mean("layers.0", 1) == pytest.approx(3.2 / 4)
    assert mine.mean("layers.0", 2) == 0
    mine.add("layers.0", 0, source)
    mine.add("layers.0", 1, source)
    assert mine.mean("layers.0", 1) == pytest.approx(3.2 / 7)
    assert list(mine.layers) == ["layers.0"]


def test_what_is_far_from_nothing_is_finite() -> None:
    distances = HiddenStateDistances()
    distances.add("layers.0", 0, torch.zeros(1, 1, 2))
    distances.add("layers.0", 1, torch.zeros(1, 1, 2))
    assert distances.mean("layers.0", 1) == 0

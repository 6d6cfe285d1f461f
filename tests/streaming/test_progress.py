"""How far a pass is: tokens through layers."""

from __future__ import annotations

from conftest import EXAMPLE
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import PassProgress, StreamedModel, layer_costs


def test_tokens_count_once_they_are_through_all_layers() -> None:
    told: list[tuple[int, int]] = []
    progress = PassProgress({"tower": 1.0, "a": 1.0, "b": 3.0}, 100, lambda *step: told.append(step), more=7)
    # An embedding, then two texts in each layer, of which the first goes through once before; a tower has none.
    for unit, group in (("embedding", 2), ("a", 0), ("a", 1), ("a", 2), ("b", 1), ("b", 2)):
        progress.layer_done(unit, group, 2)
    progress.more_done(7)
    assert told == [(0, 107), (0, 107), (12, 107), (25, 107), (62, 107), (100, 107), (107, 107)]


def test_layers_of_one_size_are_of_one_kind() -> None:
    model = StreamedModel(open_checkpoint(EXAMPLE))
    layers = [unit for unit in model.units if ".layers." in unit]
    costs = layer_costs(model, layers)
    assert list(costs) == layers
    assert len(set(costs.values())) == 1 and len(costs) == 4

"""Shards that are there only while a unit is computed that asked for them: nothing else is read, and nothing twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import change_json
from openquant import compress
from openquant.data.corpus import Corpus, Document
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.hub.source import Needs
from openquant.streaming.meta_model import REST
from openquant.streaming.model import StreamedModel
from support import small_checkpoints
from support.quantized_checkpoints import PER_TENSOR, STATIC, by_tensor, store

IDS = tuple(range(10, 42))
CORPUS = Corpus((Document("a", "a", IDS), Document("a", "b", IDS[::-1])), "0", {})


class Passing:
    """Has the shards of a unit in a directory while it is computed.

    Args:
        root: where all lie.
        needs: of each unit.
        place: the directory.
    """

    def __init__(self, root: Path, needs: Needs, place: Path) -> None:
        self.root, self.needs, self.place = root, needs, place
        self.left = list(needs)
        self.now: str | None = None

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        del stopped
        assert self.now is None, f"{what} is loaded while {self.now} is"
        # Those of towers are passed over; none is asked for twice, or after a later one.
        del self.left[: self.left.index(what) + 1]
        self.now = what
        for shard in self.needs[what]:
            os.link(self.root / shard, self.place / shard)

    def path(self, name: str) -> Path:
        return self.place / name

    def release(self, what: str) -> None:
        assert what == self.now
        self.now = None
        # What is mapped still takes its room on disk when it has no name any more.
        maps = Path("/proc/self/maps")
        assert not maps.exists() or f" {self.place}/" not in maps.read_text()
        for shard in self.needs[what]:
            (self.place / shard).unlink()


def found_of(source: Path, output: Path, place: Path | None, **settings: Any) -> tuple[dict[str, Any], list[Needs]]:
    """What is found of an output whose shards come below a directory, and what it was found to need."""
    seen: list[Needs] = []

    @contextmanager
    def streamed(models: Sequence[StreamedModel]) -> Iterator[None]:
        assert place is not None
        seen.extend(model.shards_by_unit() for model in models)
        for number, (root, wanted, model) in enumerate(zip((source, output), seen, models, strict=True)):
            (place / str(number)).mkdir(parents=True)
            model.shard_provider = Passing(root, wanted, place / str(number))
        yield

    subjects = [ModelUnderTest(path.name, open_checkpoint(path)) for path in (source, output)]
    if place is not None:
        settings["streamed"] = streamed
    asked = EvaluationSettings(**settings)
    return compare_outputs(subjects[0], subjects[1:], CORPUS, asked).to_json(), seen


# A tower and a table that is listed after the layers; stacks that outputs have in pieces.
@pytest.mark.parametrize("architecture", ["Gemma4ForCausalLM", "GraniteMoeForCausalLM"])
def test_units_need_what_they_ask_for_and_no_more(architecture: str, tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", architecture, shards=5)
    output = Path(compress(source, tmp_path / "out", "channel").output)
    found, (mine, theirs) = found_of(source, output, tmp_path / "passing")
    assert found == found_of(source, output, None)[0]
    assert list(mine) == list(theirs)
    assert next(iter(mine)) == REST


def test_scales_of_activations_and_of_the_cache_come_with_their_layer(tmp_path: Path) -> None:
    root = store(tmp_path / "static", by_tensor(**STATIC), PER_TENSOR)
    change_json(root / "config.json", lambda found: found["quantization_config"].update(kv_cache_quant_algo="FP8"))
    weights = small_checkpoints.read(root)
    (root / "model.safetensors").unlink()
    for number in range(small_checkpoints.LAYERS):
        weights |= {f"model.layers.{number}.self_attn.{part}_scale": torch.tensor(0.01) for part in "kv"}
    scales = {name: weights[name] for name in weights if is_scale(name)}
    others = {name: weights[name] for name in weights if name not in scales}
    small_checkpoints.write_shards(root, [others, scales])
    found, (mine, theirs) = found_of(root, root, tmp_path / "passing")
    assert found == found_of(root, root, None)[0]
    assert found["outputs"][0]["kv_cache"] == "fp8"
    # What 448 times 0.01 does not hold is counted.
    assert [len(theirs[unit]) for unit in theirs if "layers" in unit] == [2] * small_checkpoints.LAYERS
    assert {len(shards) for shards in mine.values()} == {len(theirs[REST])} == {1}


def is_scale(name: str) -> bool:
    return name.endswith(("input_scale", "k_scale", "v_scale"))

"""An evaluation of repositories whose shards come and go: what it finds, what is on disk meanwhile, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import EXAMPLE, change_json
from openquant import compress, evaluate
from openquant.errors import UsageError
from openquant.evaluation import as_served
from openquant.files.model_files import EVAL_FILE
from openquant.hub.source import AHEAD
from openquant.options import Evaluate
from support import small_checkpoints, starting
from support.loopback_hub import Fault, LoopbackHub
from support.starting import Command, Job

OPENQUANT = """
import os, sys
from openquant.cli.commands import main
os.chdir(os.environ["HERE"])
"""
RUN = "sys.exit(main())\n"
SMALL = ("--samples", "2", "--length", "32")
# And a directory.
FROM_HUB = ("--source", "org/name", "--stream", "--scratch")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    """A Hub that the processes of this module know from their first line on."""
    root = tmp_path_factory.mktemp("hub")
    with LoopbackHub(root / "hub") as server, pytest.MonkeyPatch.context() as patch:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_XET": "1"}
        for name, value in settings.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(autouse=True)
def sound(hub: LoopbackHub) -> Iterator[None]:
    """Faults are of one test."""
    yield
    hub.faults.clear()


@pytest.fixture
def job() -> Iterator[Job]:
    with starting.job() as found:
        yield found


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """For `--scratch`."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


LAYERS, SHARDS = 8, 10


def deep(root: Path) -> Path:
    """The example with each of its layers twice, in a shard each, layer after layer."""
    shutil.copytree(EXAMPLE, root, ignore=shutil.ignore_patterns("*.safetensors*"))
    change_json(root / "config.json", lambda found: found.update(num_hidden_layers=LAYERS, layer_types=None))
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    for name, tensor in small_checkpoints.read(EXAMPLE).items():
        first, _, rest = name.removeprefix("model.layers.").partition(".")
        if "layers" in name:
            for number in range(int(first), LAYERS, 4):
                parts[1 + number][f"model.layers.{number}.{rest}"] = tensor
        else:
            # The final norm, which is needed first, lies in the last.
            parts[0 if "embed" in name else -1][name] = tensor
    small_checkpoints.write_shards(root, parts)
    return root


@pytest.fixture(scope="module")
def source(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hub.repositories["org/name"] = deep(tmp_path_factory.mktemp("source") / "name")
    return hub.repositories["org/name"]


@pytest.fixture(scope="module")
def output(hub: LoopbackHub, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hub.repositories["org/out"] = root = tmp_path_factory.mktemp("output") / "out"
    compress(source, root, "channel")
    return root


# However long a run takes, passes are not saved.
UNSAVED = "from openquant.streaming import pass_checkpoint\npass_checkpoint.EVERY = 1e9\n"


def begin(job: Job, tmp_path: Path, *words: object, rank: int = 0, size: int = 1, first: str = "") -> Command:
    """The command, in an empty directory."""
    (tmp_path / "here").mkdir(exist_ok=True)
    given = ["eval", *words, *SMALL]
    return job.start(rank, *given, size=size, first=OPENQUANT + UNSAVED + first + RUN, HERE=str(tmp_path / "here"))


def end(process: Command) -> tuple[int | None, str, str]:
    out, err = process.communicate(120)
    return process.returncode, out, err


def cached() -> list[str]:
    """Shards in the Hub's cache."""
    return [path.name for path in Path(os.environ["HF_HOME"]).rglob("*.safetensors")]


def held(place: Path) -> list[int]:
    """How many shards, whole or not, each model has below a directory that may be changing."""
    folders = [folder for root in place.iterdir() for folder in root.iterdir()]
    shards = [
        [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".incomplete")] for folder in folders
    ]
    return list(map(len, shards))


def named(found: object, source: str, output: str) -> Any:
    """The same with other names of the source and of the output, and without stamps: a repository's are its commit's."""
    told = json.loads(json.dumps(found).replace("org/name", source).replace("org/out", output))
    for each in (told, *told.get("outputs", ())):
        for of in ("source", "output"):
            each.get(of, {}).pop("stamp", None)
    return told


@pytest.fixture
def expected(source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is found of the files themselves, with texts along a document, as where a model has no room."""
    monkeypatch.setattr(as_served, "available_memory", lambda: 1000)
    found = evaluate([output], source, samples=2, length=32, out=tmp_path / "local.json").to_json()
    return dict(named(found, "name", "out"))


def test_repositories_are_evaluated_through_a_few_shards_of_disk(hub, job, expected, there, tmp_path):
    marks: list[int] = []

    def measure() -> None:
        with suppress(FileNotFoundError):
            marks.extend(held(there))

    hub.faults.append(Fault(r"\.safetensors$", "GET", times=None, call=measure))
    file = tmp_path / "hub.json"
    code, out, err = end(begin(job, tmp_path, "org/out", *FROM_HUB, there, "--json", "--out", file))
    assert code == 0, err
    assert not re.search("error|warning|Traceback", err, re.IGNORECASE)
    assert named(json.loads(out), "name", "out") == expected
    assert named(json.loads(file.read_text()), "name", "out") == expected["outputs"][0]
    assert expected["outputs"][0]["texts"] == []
    assert len(marks) > SHARDS
    # A shard that is renamed meanwhile is seen under both names.
    assert max(marks) <= 1 + 2 * AHEAD + 1 < SHARDS
    assert list(there.iterdir()) == list((tmp_path / "here").iterdir()) == cached() == []


def test_ranks_stream_each_for_itself_beside_an_output_of_this_machine(job, output, expected, tmp_path):
    here = shutil.copytree(output, tmp_path / "there" / "out")
    ranks = [begin(job, tmp_path, here, *FROM_HUB[:-1], rank=rank, size=2) for rank in range(2)]
    assert [end(rank)[0] for rank in ranks] == [0, 0]
    assert named(json.loads((here / EVAL_FILE).read_text()), "name", "out") == expected["outputs"][0]
    assert [path.name for path in here.parent.iterdir()] == ["out"]
    assert list((tmp_path / "here").iterdir()) == cached() == []


def paused(hub: LoopbackHub, there: Path, process: Command) -> threading.Event:
    """Wait until a shard in the middle does not come; what is returned lets it."""
    reached, release = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        release.wait(60)

    hub.faults.append(Fault(r"name/resolve/.*model-00006-of", "GET", after=1, call=hang))
    assert reached.wait(60), process.communicate(1)
    assert max(held(there)) > 1
    return release


def test_nothing_is_left_of_what_is_interrupted(hub, job, output, there, tmp_path):
    process = begin(job, tmp_path, output, *FROM_HUB, there, "--out", tmp_path / "eval.json")
    release = paused(hub, there, process)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    release.set()
    assert (code, out) == (130, "")
    assert err.endswith("error: interrupted\nhint: run the same command again to continue\n")
    assert list(there.iterdir()) == list((tmp_path / "here").iterdir()) == []
    assert not (tmp_path / "eval.json").exists()


def test_what_cannot_be_streamed_is_refused(output: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Evaluate([output], "org/name", stream=True, prompts="prompts.txt")
    assert (caught.value.message, caught.value.hint) == (
        "--prompts takes all weights once more, which --stream has let go of by then",
        "give one of them",
    )

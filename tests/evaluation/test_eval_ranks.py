"""Several processes at one evaluation: what one process writes, byte for byte, and the end of all with that of any."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE
from openquant import calibrate, compress, evaluate
from openquant.data.corpus import Corpus, Document
from openquant.distributed import Ranks
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import Evaluation, EvaluationSettings, ModelUnderTest
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.session import documents_of_rank
from support import small_checkpoints, starting
from support.outlier_channels import twin
from support.starting import Job

# `openquant`, rather than what ranks are otherwise.
OPENQUANT = """
import sys
from openquant.cli.commands import main
"""
RUN = "sys.exit(main())\n"
SHORT = "import pytest\nfrom conftest import shorten_answers\nshorten_answers(pytest.MonkeyPatch())\n"


@pytest.fixture
def job() -> Iterator[Job]:
    with starting.job() as found:
        yield found


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(compress(EXAMPLE, tmp_path_factory.mktemp("made") / "out").output)


def words(output: Path, *more: object) -> list[object]:
    return ["eval", output, "--source", EXAMPLE, "--samples", "3", "--length", "64", *more]


# Keeps passes after every layer; the second rank is killed as it does so for the second time, and the first has too.
KILLED = """
import os, signal, time
from openquant.streaming import pass_checkpoint
pass_checkpoint.EVERY = pass_checkpoint.TIMES = 0
replace, left = os.replace, [2]
def replaced(old, new):
    left[0] -= 1
    if not left[0] and os.environ["RANK"] == "1":
        while not os.path.exists(str(new).replace("part-1", "part-0")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
os.replace = replaced
"""


@pytest.mark.usefixtures("short_answers")
def test_ranks_evaluate_and_go_on_together(output: Path, tmp_path: Path) -> None:
    given = words(output, "--scratch", tmp_path, "--out", tmp_path / "many.json")
    kept = {"out.many.json.part-0", "out.many.json.part-1"}
    with starting.job() as job:
        first, second = (job.start(rank, *given, first=SHORT + KILLED + OPENQUANT + RUN) for rank in range(2))
        assert second.wait(120) == -signal.SIGKILL
        # As a launcher does.
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
    assert kept < {path.name for path in tmp_path.iterdir()} <= {*kept, *(f"{each}.new" for each in kept)}
    with starting.job() as job:
        done = job.finish(2, *given, first=SHORT + OPENQUANT + RUN)
    assert done.returncode == 0, done.stderr
    assert "; an earlier run is continued\n" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"many.json"}
    evaluate([output], EXAMPLE, samples=3, length=64, out=tmp_path / "one.json")
    assert (tmp_path / "many.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_ranks_calibrate_and_go_on_together(tmp_path: Path) -> None:
    name = "tiny-qwen3.calibration.safetensors"
    given = ("-m", EXAMPLE, "-o", tmp_path / "out", "--activation-scheme", "static", "--samples", "3", "--length", "64")
    with starting.job() as job:
        first, second = (job.start(rank, *given, first=KILLED) for rank in range(2))
        assert second.wait(120) == -signal.SIGKILL
        # As a launcher does.
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
    kept = {f"{name}.part-0", f"{name}.part-1"}
    assert kept < {path.name for path in tmp_path.iterdir()} <= {*kept, *(f"{each}.new" for each in kept)}
    with starting.job() as job:
        done = job.finish(2, *given)
    assert done.returncode == 0, done.stderr
    assert "; an earlier run is continued; kept in " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {name, "out"}
    one = calibrate(EXAMPLE, tmp_path / "one", samples=3, length=64)
    assert (tmp_path / name).read_bytes() == one.read_bytes()


def test_ranks_calibrate_and_fold_alike(tmp_path: Path) -> None:
    source = twin(EXAMPLE, tmp_path / "twin")
    texts = ("--samples", 2, "--length", 64)
    given = ("-m", source, "-o", tmp_path / "out", "--scheme", "int8", "--smooth", "0.5", *texts)
    with starting.job() as job:
        done = job.finish(2, *map(str, given))
    assert done.returncode == 0, done.stderr
    calibration = tmp_path / "twin.calibration.safetensors"
    assert calibration.read_bytes() == calibrate(source, tmp_path / "alone", samples=2, length=64).read_bytes()
    compress(source, tmp_path / "one", "int8", smooth=0.5, calibration=calibration)
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_ranks_must_read_the_same_texts(job: Job, output: Path, tmp_path: Path) -> None:
    given = words(output, "--out", tmp_path / "eval.json")
    begun = [job.start(rank, *given, "--samples", 2 + rank, first=OPENQUANT + RUN) for rank in range(2)]
    printed = "".join(rank.communicate(60)[1] for rank in begun)
    assert [rank.returncode for rank in begun] == [2, 2]
    message = "error: ranks see different texts or checkpoints\nhint: let all of them read the same files\n"
    assert re.sub(r"(?m)^rank \d waits for [^,\n]*\n", "", printed) == message


@dataclass
class First(Ranks):
    """The first of two processes, which gets what the other gave."""

    size: int = 2
    data: bytes = b""

    def gather(self, data: bytes) -> list[bytes]:
        del data
        return [self.data]

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        del error
        return [fact, None]


class Given(Exception):
    """Has what the other process gave, which is as far as that one goes."""


@dataclass
class Second(Ranks):
    """The other."""

    rank: int = 1
    size: int = 2

    def gather(self, data: bytes) -> list[bytes]:
        raise Given(data)

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        raise AssertionError(error, fact)


def test_every_document_is_one_process_s() -> None:
    assert list(documents_of_rank(5, Ranks())) == [0, 1, 2, 3, 4]
    assert list(documents_of_rank(5, First())) == [0, 2, 4]
    assert list(documents_of_rank(5, Second())) == [1, 3]
    assert list(documents_of_rank(1, Second())) == []


def test_what_two_processes_find_is_what_one_finds(tmp_path: Path) -> None:
    """With experts that tokens go to, and values that an FP8 cache does not hold."""
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    weights["model.layers.1.self_attn.v_proj.weight"] = weights["model.layers.1.self_attn.v_proj.weight"] * 600
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", weights=weights)
    compress(source, tmp_path / "out", "channel")
    ids = [(3,) * 32, tuple(7 * at * at % 500 for at in range(32)), tuple(range(32))]
    texts = tuple(Document(f"domain {at}", f"text {at}", each) for at, each in enumerate(ids))

    def found(team: Ranks, count: int) -> Evaluation:
        corpus = Corpus(texts[:count], "", {})
        subjects = [ModelUnderTest(path.name, open_checkpoint(path)) for path in (source, tmp_path / "out")]
        return compare_outputs(subjects[0], subjects[1:], corpus, EvaluationSettings(kv_cache="fp8", ranks=team))

    # Of a single text the second has nothing to run.
    for count in (1, 3):
        with pytest.raises(Given) as given:
            found(Second(), count)
        alone = found(Ranks(), count)
        assert found(First(data=given.value.args[0]), count) == alone
    assert alone.outputs[0]["layers"][1]["routed_otherwise"] > 0
    assert any("static scales clip" in each for each in alone.outputs[0]["reasons"])


def test_ranks_must_be_calibrated_on_the_same_texts(job: Job, tmp_path: Path) -> None:
    begun = []
    for rank, words in enumerate(("one two three ", "other words here ")):
        text = tmp_path / str(rank) / "mine.txt"
        text.parent.mkdir()
        text.write_text(words * 2000)
        given = ("-m", EXAMPLE, "-o", tmp_path / "out", "--samples", 2, "--length", 16, "-q")
        given += ("--activation-scheme", "static")
        begun.append(job.start(rank, *given, "--text", text))
    printed = "".join(rank.communicate(60)[1] for rank in begun)
    assert [rank.returncode for rank in begun] == [2, 2]
    assert printed == "error: ranks see different texts or checkpoints\nhint: let all of them read the same files\n"

"""Several processes at one evaluation: what one process writes, byte for byte, and the end of all with that of any."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from openquant import calibrate, compress, evaluate
from support import mixture_of_experts, starting
from support.starting import Job

# `openquant`, rather than what ranks are otherwise.
OPENQUANT = """
import sys
from openquant.cli.commands import main
"""
RUN = "sys.exit(main())\n"


@pytest.fixture
def job() -> Iterator[Job]:
    with starting.job() as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The example with experts that tokens go to, and its output."""
    root = tmp_path_factory.mktemp("made")
    source = mixture_of_experts.make(root / "source")
    return source, Path(compress(source, root / "out", "channel").output)


def words(made: tuple[Path, Path], *more: object) -> list[object]:
    source, output = made
    given = ["--samples", "2", "--length", "32", "--kv-cache", "fp8", "--no-prompts"]
    return ["eval", output, "--source", source, *given, *more]


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


def test_ranks_evaluate_and_go_on_together(made: tuple[Path, Path], tmp_path: Path) -> None:
    given = words(made, "--scratch", tmp_path, "--out", tmp_path / "many.json")
    kept = {"out.many.json.part-0", "out.many.json.part-1"}
    with starting.job() as job:
        first, second = (job.start(rank, *given, first=KILLED + OPENQUANT + RUN) for rank in range(2))
        assert second.wait(120) == -signal.SIGKILL
        # As a launcher does.
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
    assert kept < {path.name for path in tmp_path.iterdir()} <= {*kept, *(f"{each}.new" for each in kept)}
    with starting.job() as job:
        done = job.finish(2, *given, first=OPENQUANT + RUN)
    assert done.returncode == 0, done.stderr
    assert "; an earlier run is continued\n" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"many.json"}
    source, output = made
    evaluate([output], source, samples=2, length=32, kv_cache="fp8", no_prompts=True, out=tmp_path / "one.json")
    assert (tmp_path / "many.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_ranks_calibrate_and_fold_alike(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, texts = made[0], ("--samples", 2, "--length", 32)
    given = ("-m", source, "-o", tmp_path / "out", "--scheme", "int8", "--smooth", "0.5", *texts)
    with starting.job() as job:
        done = job.finish(2, *map(str, given))
    assert done.returncode == 0, done.stderr
    calibration = tmp_path / "source.calibration.safetensors"
    assert calibration.read_bytes() == calibrate(source, tmp_path / "alone", samples=2, length=32).read_bytes()
    compress(source, tmp_path / "one", "int8", smooth=0.5, calibration=calibration)
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_ranks_must_read_the_same_texts(job: Job, made: tuple[Path, Path], tmp_path: Path) -> None:
    given = words(made, "--out", tmp_path / "eval.json")
    begun = [job.start(rank, *given, "--samples", 2 + rank, first=OPENQUANT + RUN) for rank in range(2)]
    printed = "".join(rank.communicate(60)[1] for rank in begun)
    assert [rank.returncode for rank in begun] == [2, 2]
    message = "error: ranks see different texts or checkpoints\nhint: let all of them read the same files\n"
    assert re.sub(r"(?m)^rank \d waits for [^,\n]*\n", "", printed) == message

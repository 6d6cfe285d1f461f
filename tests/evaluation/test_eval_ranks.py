"""Several processes at one evaluation: what one process writes, byte for byte, and the end of all with that of any."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE, ROOT
from openquant import calibrate, compress, evaluate
from openquant.evaluation import as_served
from support import forked_ranks, small_checkpoints
from support.forked_ranks import Job, Rank
from support.outlier_channels import twin

# `openquant`, rather than what ranks are otherwise.
OPENQUANT = """
import sys
from openquant.cli.commands import main
"""
RUN = "sys.exit(main())\n"
ONE_PROMPT = "from openquant.evaluation import as_served\nas_served.BUILT_IN = 1\n"


@pytest.fixture
def job() -> Iterator[Job]:
    with forked_ranks.job() as found:
        yield found


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(compress(EXAMPLE, tmp_path_factory.mktemp("made") / "out").output)


def words(output: Path, *more: object) -> list[object]:
    return ["eval", output, "--source", EXAMPLE, "--samples", "3", "--length", "64", *more]


def told(stderr: str) -> str:
    """What ranks have printed, but that they wait, as they say where that takes long."""
    return re.sub(r"(?m)^rank \d waits for [^,\n]*\n", "", stderr)


def test_ranks_of_accelerate_launch_write_the_bytes_of_one_process(output: Path, tmp_path: Path) -> None:
    found = evaluate([output], EXAMPLE, samples=3, length=64, no_prompts=True, out=tmp_path / "one.json")
    script = tmp_path / "script.py"
    script.write_text(f"import os\n{OPENQUANT}assert os.environ['WORLD_SIZE'] == '2'\n{RUN}")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", script]
    given = words(output, "--no-prompts", "--json", "--out", tmp_path / "many.json", "--fail-above", "0.0000001")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [str(word) for word in (*command, *given)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 1, done.stderr
    # One of them speaks.
    assert json.loads(done.stdout) == found.to_json()
    assert (tmp_path / "many.json").read_bytes() == (tmp_path / "one.json").read_bytes()


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


def test_ranks_calibrate_and_go_on_together(tmp_path: Path) -> None:
    name = "tiny-qwen3.calibration.safetensors"
    given = ("-m", EXAMPLE, "-o", tmp_path / "out", "--activation-scheme", "static", "--samples", "3", "--length", "64")
    with forked_ranks.job() as job:
        first, second = (job.start(rank, *given, first=KILLED) for rank in range(2))
        assert second.wait(120) == -signal.SIGKILL
        # As a launcher does.
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
    kept = {f"{name}.part-0", f"{name}.part-1"}
    assert kept < {path.name for path in tmp_path.iterdir()} <= {*kept, *(f"{each}.new" for each in kept)}
    with forked_ranks.job() as job:
        done = job.finish(2, *given)
    assert done.returncode == 0, done.stderr
    assert "; an earlier run is continued; kept in " in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {name, "out"}
    one = calibrate(EXAMPLE, tmp_path / "one", samples=3, length=64)
    assert (tmp_path / name).read_bytes() == one.read_bytes()


def test_ranks_evaluate_and_go_on_together(output: Path, tmp_path: Path) -> None:
    given = words(output, "--scratch", tmp_path, "--out", tmp_path / "many.json")
    kept = {"out.many.json.part-0", "out.many.json.part-1"}
    with forked_ranks.job() as job:
        first, second = (job.start(rank, *given, first=ONE_PROMPT + KILLED + OPENQUANT + RUN) for rank in range(2))
        assert second.wait(120) == -signal.SIGKILL
        # As a launcher does.
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
    assert kept < {path.name for path in tmp_path.iterdir()} <= {*kept, *(f"{each}.new" for each in kept)}
    with forked_ranks.job() as job:
        done = job.finish(2, *given, first=ONE_PROMPT + OPENQUANT + RUN)
    assert done.returncode == 0, done.stderr
    assert "; an earlier run is continued\n" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"many.json"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(as_served, "BUILT_IN", 1)
        evaluate([output], EXAMPLE, samples=3, length=64, out=tmp_path / "one.json")
    assert (tmp_path / "many.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_ranks_fold_alike(tmp_path: Path) -> None:
    source = twin(EXAMPLE, tmp_path / "twin")
    texts = ("--samples", 2, "--length", 64)
    given = ("-m", source, "-o", tmp_path / "out", "--scheme", "int8", "--smooth", "0.5", *texts)
    with forked_ranks.job() as job:
        done = job.finish(2, *map(str, given))
    assert done.returncode == 0, done.stderr
    compress(source, tmp_path / "one", "int8", smooth=0.5, calibration=tmp_path / "twin.calibration.safetensors")
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


# With experts, and a cache and activations that stored scales do not hold.
WITHIN = """
import json, os, sys
from pathlib import Path
from openquant.distributed import Ranks
from openquant.files.checkpoint import open_checkpoint
from openquant.evaluation.compare import compare_outputs
from openquant.evaluation.results import EvaluationSettings, ModelUnderTest
from openquant.data.corpus import Corpus, Document

ids = [(3,) * 32, tuple(7 * at * at % 500 for at in range(32))]
corpus = Corpus(tuple(Document(f"domain {at}", f"text {at}", each) for at, each in enumerate(ids)), "", {})
source, output = (ModelUnderTest(Path(path).name, open_checkpoint(Path(path))) for path in sys.argv[1:3])
with Ranks.from_environment(os.environ) as ranks:
    settings = EvaluationSettings(kv_cache="fp8", ranks=ranks)
    found = compare_outputs(source, [output], corpus, settings)
    ranks.agree(None)
print(json.dumps([found.to_json(), found.notes]))
sys.exit()
"""


def test_more_ranks_than_texts_count_experts_and_what_is_clipped(job: Job, tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3MoeForCausalLM")
    # Of the second layer's values many are beyond what FP8 holds, of the first text 0.23, of the other 0.17.
    weights["model.layers.1.self_attn.v_proj.weight"] = weights["model.layers.1.self_attn.v_proj.weight"] * 600
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", weights=weights)
    compress(source, tmp_path / "out", "channel")
    alone = job.start(0, source, tmp_path / "out", size=1, first=WITHIN)
    printed, trouble = alone.communicate(120)
    assert (alone.wait(0), trouble) == (0, "")
    found = json.loads(printed)[0]["outputs"][0]
    assert found["layers"][1]["routed_otherwise"] > 0
    (beyond,) = (each for each in found["reasons"] if "activations" in each)
    said = beyond.split()
    assert 0.18 < float(said.pop(4)) < 0.22
    assert " ".join(said) == "model.layers.1: static scales clip of its activations"
    begun = [job.start(rank, source, tmp_path / "out", size=3, first=WITHIN) for rank in range(3)]
    # All of them know what was found.
    assert [rank.communicate(120) for rank in begun] == [(printed, "")] * 3


BUSY = """
import time
from openquant.evaluation import compare
def busy(source, outputs, corpus, settings, begun, progress):
    print("busy", flush=True)
    while True:
        progress(1, 2)
        time.sleep(0.01)
compare.compare_outputs = busy
"""
FAILS = """
from openquant.errors import SourceError
from openquant.evaluation import compare
def fails(*_):
    raise SourceError("a weight is damaged", "download it again")
compare.compare_logits = fails
"""
AGAIN = "hint: run the same command again\n"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_the_others_soon(job: Job, output: Path, tmp_path: Path, failing: int) -> None:
    given = words(output, "--json", "--out", tmp_path / "eval.json")
    # The first hears of it while it waits for what the other has found, the second in the middle of its work.
    others = "" if failing else BUSY
    firsts = [OPENQUANT + (FAILS if rank == failing else others) + RUN for rank in range(2)]
    begun = [job.start(rank, *given, first=first) for rank, first in enumerate(firsts)]
    (stdout, stderr), (_, other) = [rank.communicate(60) for rank in begun]
    assert [rank.returncode for rank in begun] == [2, 2]
    named = "rank 1 failed: " if failing else ""
    message = {"error": f"{named}a weight is damaged", "hint": "download it again"}
    assert json.loads(stdout) == message
    assert told(stderr).splitlines()[-2:] == [f"error: {message['error']}", f"hint: {message['hint']}"]
    assert told(other) == ""
    assert not (tmp_path / "eval.json").exists()


def test_an_error_that_all_see_is_told_once(job: Job, output: Path, tmp_path: Path) -> None:
    done = job.finish(2, *words(output, "--text", tmp_path / "nowhere.txt"), first=OPENQUANT + RUN)
    assert (done.returncode, done.stdout, done.stderr.count("error: ")) == (2, "", 1)


def is_busy(rank: Rank) -> None:
    assert rank.stdout.readline() == "busy\n"


def test_an_interrupted_rank_ends_the_others(job: Job, output: Path, tmp_path: Path) -> None:
    given = words(output, "--json", "--out", tmp_path / "eval.json")
    begun = [job.start(rank, *given, first=OPENQUANT + BUSY + RUN) for rank in range(2)]
    for rank in begun:
        is_busy(rank)
    begun[1].send_signal(signal.SIGINT)
    _, stderr = begun[0].communicate(60)
    assert begun[0].returncode == 2 and told(stderr).endswith(f"error: rank 1 was interrupted\n{AGAIN}")
    assert begun[1].wait(60) == 130


def test_ranks_must_read_the_same_texts(job: Job, output: Path, tmp_path: Path) -> None:
    given = words(output, "--out", tmp_path / "eval.json")
    begun = [job.start(rank, *given, "--samples", 2 + rank, first=OPENQUANT + RUN) for rank in range(2)]
    printed = "".join(rank.communicate(60)[1] for rank in begun)
    assert [rank.returncode for rank in begun] == [2, 2]
    message = "error: ranks see different texts or checkpoints\nhint: let all of them read the same files\n"
    assert told(printed) == message


def test_a_rank_on_its_own_waits_as_long_as_is_said(job: Job, output: Path) -> None:
    waiting = job.start(1, *words(output, "--rendezvous-timeout", "1"), first=OPENQUANT + RUN)
    _, stderr = waiting.communicate(60)
    assert waiting.returncode == 2
    assert told(stderr).startswith(
        f"error: rank 1 waits for localhost:{job.port} (Connection refused), for 1 seconds now\n"
    )

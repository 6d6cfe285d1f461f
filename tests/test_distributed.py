"""Several processes at one job, started by torchrun: the bytes of one process, also when a rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from conftest import ROOT, Run, tree
from openquant import compress
from openquant.distributed import Ranks, Rendezvous
from openquant.errors import OpenQuantError, UsageError
from openquant.plan.layout import Shard
from support import small_checkpoints, starting
from support.loopback_hub import LoopbackHub
from support.starting import Command, Job


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that only read it."""
    return small_checkpoints.write(tmp_path_factory.mktemp("kept") / "source", "Qwen3MoeForCausalLM", shards=6)


@pytest.fixture(scope="module")
def one(source: Path) -> dict[str, bytes]:
    """What one process writes of the source."""
    compress(source, source.parent / "one")
    return tree(source.parent / "one")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=6)


@pytest.fixture
def job() -> Iterator[Job]:
    """A job without torchrun."""
    with starting.job() as found:
        yield found


RUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(
    ranks: int, *arguments: object, script: Path = ROOT / "compress_fp8.py", **more: str
) -> subprocess.CompletedProcess[str]:
    command = [*RUN, str(ranks), str(script), *map(str, arguments)]
    environment = {**os.environ, **more}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=script.parent)


def test_ranks_write_the_bytes_of_one_process(job: Job, tmp_path: Path, source: Path, one: dict[str, bytes]) -> None:
    out = tmp_path / "many"
    done = job.finish(4, "-m", source, "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    assert tree(out) == one
    # One of them speaks.
    assert json.loads(done.stdout)["shards"] == 6

    again = job.finish(4, "-m", source, "-o", out)
    assert again.returncode == 0
    assert again.stdout.count("is already complete; nothing was written") == 1


DIES = """
import os, signal
from openquant.files import output
publish = output.OutputDirectory.publish
def dies(self, name):
    if name.endswith('.safetensors'):
        os.kill(os.getpid(), signal.SIGKILL)
    publish(self, name)
"""


def test_a_killed_rank_fails_the_job_and_running_again_continues(job, tmp_path, source, one):
    script = tmp_path / "dies.py"
    script.write_text(
        f"{DIES}if os.environ['RANK'] == '1':\n    output.OutputDirectory.publish = dies\n"
        "import sys\nfrom openquant.cli.commands import compress_main\nsys.exit(compress_main())\n"
    )
    broken = torchrun(2, "-m", source, "-o", tmp_path / "1", script=script, PYTHONPATH=str(ROOT))
    assert broken.returncode != 0
    assert "rank      : 1 (local_rank: 1)" in broken.stderr

    assert not (tmp_path / "1" / "config.json").exists()
    done = job.finish(2, "-m", source, "-o", tmp_path / "1", "--json")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "1") == one


def test_shards_are_shared_out_by_size() -> None:
    shards = [Shard(str(number), size) for number, size in enumerate((5, 9, 1, 1, 3, 3, 2))]
    shares = [[shard.nbytes for shard in Ranks(rank, 3).share(shards)] for rank in range(3)]
    assert shares == [[9], [5, 1, 2], [1, 3, 3]]
    assert Ranks().share(shards) == shards


def test_max_memory_counts_what_ranks_need_to_talk(job: Job, tmp_path: Path, source: Path) -> None:
    done = job.finish(2, "-m", source, "-o", tmp_path / "out", "--max-memory", "100MB")
    assert done.returncode != 0
    assert done.stderr.count("error: a memory of 100,000,000 bytes is too little") == 1
    assert not (tmp_path / "out").exists()


TOLD = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
TOLD["MASTER_PORT"] = "1"


def test_the_environment_of_torchrun_is_understood() -> None:
    assert Ranks.from_environment(TOLD) == Ranks(5, 8, 1, 4, Rendezvous("a", 1))
    agent = {**TOLD, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Ranks.from_environment(agent) == Ranks(5, 8, 1, 4, Rendezvous("a", 1, True, "2"))
    bare = {name: TOLD[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert Ranks.from_environment(bare) == Ranks(5, 8, 5, 8, Rendezvous("a", 1))
    for changes in (
        {"WORLD_SIZE": ""}, {"RANK": ""}, {"RANK": "", "WORLD_SIZE": "0"}, {"WORLD_SIZE": "1", "RANK": "0"}
    ):  # fmt: skip
        assert Ranks.from_environment({**TOLD, **changes, "MASTER_PORT": "abc"}) == Ranks(), changes


WRONG = [
    ({"RANK": "8"}, "RANK is 8 of 8, LOCAL_RANK 1 of 4"),
    ({"WORLD_SIZE": "two"}, "invalid literal for int() with base 10: 'two'"),
    ({"LOCAL_RANK": "4"}, "RANK is 5 of 8, LOCAL_RANK 4 of 4"),
    ({"MASTER_PORT": "abc"}, "invalid literal for int() with base 10: 'abc'"),
]


def test_an_environment_that_makes_no_sense_is_refused() -> None:
    for changes, message in WRONG:
        with pytest.raises(UsageError) as caught:
            Ranks.from_environment({**TOLD, **changes})
        assert caught.value.message == f"the environment of ranks makes no sense: {message}"
        assert caught.value.hint == "start ranks with torchrun; to run as one process, unset RANK and WORLD_SIZE"


def test_ranks_need_a_place_to_meet(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^2 ranks have no place to meet"):
        compress(source, tmp_path / "out", ranks=Ranks(1, 2))


def test_no_rank_that_is_none_ends_silently(run: Run, source: Path, tmp_path: Path) -> None:
    """What starts no job (one variable left in a shell) is a process on its own, which speaks."""
    done = run("-m", source, "-o", tmp_path / "out", RANK="1", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: the environment of ranks makes no sense: RANK is 1 of 1, LOCAL_RANK 0 of 1\nhint: "
    )
    assert not (tmp_path / "out").exists()
    alone = run("-m", source, "-o", tmp_path / "out", RANK="1")
    assert (alone.returncode, alone.stderr) == (0, "")


def test_a_rank_that_waits_says_so_and_hears_signals(job: Job, source: Path, tmp_path: Path) -> None:
    waiting = job.start(1, "-m", source, "-o", tmp_path / "out")
    assert waiting.stderr.readline() == f"rank 1 waits for localhost:{job.port} (Connection refused)\n"
    waiting.send_signal(signal.SIGTERM)
    _, stderr = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert stderr == "error: interrupted\nhint: run the same command again to continue\n"


GIVEN_UP = "hint: start all ranks, with one MASTER_ADDR and MASTER_PORT; --rendezvous-timeout gives them longer\n"


def test_a_rank_waits_for_minutes_not_for_ever(job: Job, source: Path, tmp_path: Path) -> None:
    arguments = ["-m", source, "-o", tmp_path / "out", "--rendezvous-timeout", "3"]
    waiting = job.start(1, *arguments, MASTER_ADDR="nowhere.invalid")
    _, stderr = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    why = r"\((Name or service not known|Temporary failure in name resolution)\)"
    what = rf"rank 1 waits for nowhere\.invalid:{job.port} {why}"
    assert re.fullmatch(f"{what}\nerror: {what}, for 3 seconds now\n{GIVEN_UP}", stderr)
    assert not (tmp_path / "out").exists()


def test_bytes_of_all_ranks_come_to_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = Rendezvous("127.0.0.1", free.getsockname()[1])
    # Not a whole number of pieces, nothing at all, and less than one.
    given = [b"of the first", bytes(range(256)) * 10000, b"", b"ab"]
    got: dict[int, list[list[bytes]]] = {}

    def work(rank: int) -> None:
        with Ranks(rank, 4, rendezvous=rendezvous) as ranks:
            got[rank] = [ranks.gather(given[rank]), ranks.gather(given[rank][::-1])]
            ranks.agree(None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {0: [given[1:], [data[::-1] for data in given[1:]]], 1: [[], []], 2: [[], []], 3: [[], []]}
    assert Ranks().gather(b"alone") == []


# A rank that has much to do, and stops only when it hears of others.
BUSY = """
import time
from openquant import run
def convert(conversion, workers):
    print("busy\\n", end="", flush=True)
    while True:
        conversion.progress(1)
        time.sleep(0.01)
run.Conversion.run = convert
"""
FAILS = """
from openquant import run
from openquant.errors import SourceError
def convert(*_):
    raise SourceError("a weight is damaged", "download it again")
run.Conversion.run = convert
"""
AGAIN = "hint: run the same command again: it continues\n"


def are_busy(*ranks: subprocess.Popen[str] | Command) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "busy\n"


Begin = Callable[..., list[Command]]


@pytest.fixture
def begin(source: Path, tmp_path: Path) -> Iterator[Begin]:
    """Starts jobs of two ranks, each of which does something first."""
    with ExitStack() as stack:

        def two(*firsts: str) -> list[Command]:
            job = stack.enter_context(starting.job())
            arguments = ("-m", source, "-o", tmp_path / str(job.port), "-q")
            begun = [job.start(rank, *arguments, first=first) for rank, first in enumerate(firsts)]
            if FAILS not in firsts:
                are_busy(*begun)
            return begun

        yield two


def test_an_error_or_an_interrupt_ends_the_others_soon(begin: Begin) -> None:
    for firsts, named in (((FAILS, BUSY), ""), ((BUSY, FAILS), "rank 1 failed: ")):
        begun = begin(*firsts)
        told = [rank.communicate(timeout=60)[1] for rank in begun]
        assert [rank.returncode for rank in begun] == [2, 2]
        assert told == [f"error: {named}a weight is damaged\nhint: download it again\n", ""]

    begun = begin(BUSY, BUSY)
    begun[1].send_signal(signal.SIGINT)
    _, stderr = begun[0].communicate(timeout=60)
    assert (begun[0].returncode, stderr) == (2, f"error: rank 1 was interrupted\n{AGAIN}")
    assert begun[1].wait(60) == 130


def test_a_killed_first_rank_is_missed_without_a_launcher(begin: Begin) -> None:
    begun = begin(BUSY, BUSY)
    begun[0].kill()
    _, stderr = begun[1].communicate(timeout=60)
    assert begun[1].returncode == 2
    assert re.fullmatch(rf"error: rank 1 lost localhost:\d+: .*\n{AGAIN}", stderr), stderr


def test_ranks_do_not_outlive_torchrun(source: Path, tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        BUSY + "import sys\nfrom openquant.cli.commands import compress_main\nsys.exit(compress_main())\n"
    )
    launcher = subprocess.Popen(
        [*RUN, "2", str(script), "-m", str(source), "-o", str(tmp_path / "out"), "-q"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    are_busy(launcher, launcher)
    launcher.kill()
    # Both ranks hold the other ends of the pipes.
    _, stderr = launcher.communicate(timeout=60)
    told = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert sorted(line.split(" lost ")[0] for line in told) == ["error: rank 0", "error: rank 1"]
    assert "Traceback" not in stderr
    # Nor does torch say it in its own words.
    assert "TCPStore.cpp" not in stderr


def test_ranks_stream_and_publish(job: Job, tmp_path: Path, source: Path, one: dict[str, bytes]) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = source
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        arguments = ["-m", "org/name", "-o", tmp_path / "out", "--stream", "--push-to-hub", "user/name", "--push-only"]
        done = job.finish(2, *arguments, "--json", **settings, HF_TOKEN="hf_x")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["repository"] == "user/name"
        found = {name: path.read_bytes() for name, path in hub.files("user/name").items()}
        assert set(hub.uploads.values()) == {1}
        assert len(hub.commits("user/name")) == 2
    assert {name for name in one if found.get(name) != one[name]} == {"README.md", ".openquant.json"}
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_ranks_must_see_the_same_source(job: Job, source: Path, tmp_path: Path) -> None:
    other = small_checkpoints.write(tmp_path / "other", shards=2)
    begun = [job.start(rank, "-m", root, "-o", tmp_path / "out", "-q") for rank, root in enumerate((source, other))]
    printed = "".join(rank.communicate(60)[1] for rank in begun)
    assert [rank.returncode for rank in begun] == [2, 2]
    assert printed == "error: ranks see different sources\nhint: let all of them read the same files\n"
    assert not (tmp_path / "out").exists()


def test_of_the_ranks_that_came_the_first_tells_who_did_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = Rendezvous("127.0.0.1", free.getsockname()[1])
    caught: dict[int, OpenQuantError] = {}
    spoke: dict[int, bool] = {}

    def wait(rank: int, patience: float) -> None:
        ranks = Ranks(rank, 3, rendezvous=rendezvous, patience=patience)
        try:
            with ranks:
                ranks.agree(None)
        except OpenQuantError as error:
            caught[rank], spoke[rank] = error, ranks.speaks

    threads = [threading.Thread(target=wait, args=each) for each in ((0, 2.0), (1, 60.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    told = f"rank 0 waits for rank 2 at {rendezvous}, for 2 seconds now"
    assert {rank: error.message for rank, error in caught.items()} == {0: told, 1: f"rank 0 failed: {told}"}
    assert spoke == {0: True, 1: False}


def test_the_first_rank_names_layers_of_zeros_of_all(job: Job, tmp_path: Path, own: Path) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        for name, weight in held.items():
            if name.endswith(".o_proj.weight") or ".experts.1." in name:
                weight.zero_()

    small_checkpoints.change_weights(own, change)
    notes = compress(own, tmp_path / "one").notes
    experts = ", ".join(f"model.layers.1.mlp.experts.1.{part}" for part in ("down_proj", "gate_proj", "up_proj"))
    assert notes[-1] == f"all weights are zero: model.layers.{{0..1}}.self_attn.o_proj, {experts}"
    done = job.finish(3, "-m", own, "-o", tmp_path / "many", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == notes
    assert done.stderr.count("all weights are zero") == 1

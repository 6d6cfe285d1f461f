"""Several processes at one job, started by torchrun: the bytes of one process, also when a rank is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from conftest import ROOT, Run, tree
from loopback_hub import LoopbackHub
from openquant import compress
from openquant.plan import Shard
from openquant.ranks import Ranks


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=6)


def torchrun(
    ranks: int, *arguments: object, script: Path = ROOT / "compress_fp8.py", **more: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=script.parent,
    )


def test_ranks_read_a_quantized_source(tmp_path: Path, source: Path) -> None:
    compress(source, tmp_path / "fp8", "block")
    quantized = tiny.write(tmp_path / "quantized", shards=7, weights=tiny.read(tmp_path / "fp8"))
    (quantized / "config.json").write_bytes((tmp_path / "fp8" / "config.json").read_bytes())
    compress(quantized, tmp_path / "one")
    done = torchrun(2, "-m", quantized, "-o", tmp_path / "many")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_the_bytes_of_one_process(tmp_path: Path, source: Path, ranks: int) -> None:
    compress(source, tmp_path / "one")
    done = torchrun(ranks, "-m", source, "-o", tmp_path / "many", "--json")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
    # One of them speaks.
    assert json.loads(done.stdout)["shards"] == 6
    again = torchrun(ranks, "-m", source, "-o", tmp_path / "many")
    assert again.returncode == 0
    assert again.stdout.count("is already complete; nothing was written") == 1


def test_accelerate_launch_starts_ranks_too(tmp_path: Path, source: Path) -> None:
    compress(source, tmp_path / "one")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "compress_fp8.py")]
    command += ["-m", str(source), "-o", str(tmp_path / "many"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
    assert json.loads(done.stdout)["shards"] == 6


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_fails_the_job_and_running_again_continues(tmp_path: Path, source: Path, victim: int) -> None:
    compress(source, tmp_path / "one")
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, sys\n"
        "from openquant import output\n"
        "from openquant.cli import compress_main\n"
        "publish = output.OutputDirectory.publish\n"
        "def dies(self, name):\n"
        "    if name.endswith('.safetensors'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    publish(self, name)\n"
        f"if os.environ['RANK'] == '{victim}':\n"
        "    output.OutputDirectory.publish = dies\n"
        "sys.exit(compress_main())\n"
    )
    broken = torchrun(2, "-m", source, "-o", tmp_path / "many", script=script)
    assert broken.returncode != 0
    assert f"rank      : {victim} (local_rank: {victim})" in broken.stderr
    assert not (tmp_path / "many" / "config.json").exists()
    done = torchrun(2, "-m", source, "-o", tmp_path / "many", "--json")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def test_the_first_rank_tells_of_another_s_error(tmp_path: Path) -> None:
    weights = tiny.tensors("Qwen3ForCausalLM")
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    source = tiny.write(tmp_path / "source", shards=2, weights=weights)
    done = torchrun(2, "-m", source, "-o", tmp_path / "out")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "model.layers.1.mlp.down_proj.weight in model-0000" in told[0]
    assert "holds NaN or infinity" in told[0]
    assert not (tmp_path / "out" / "config.json").exists()


def test_ranks_share_what_is_held_against_a_source_that_moved(tmp_path: Path, source: Path) -> None:
    compress(source, tmp_path / "out")
    whole = tree(tmp_path / "out")
    (tmp_path / "out" / "model-00004-of-00006.safetensors").unlink()
    for path in source.glob("*.safetensors"):
        os.utime(path, (1, 1))
    done = torchrun(2, "-m", source, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert {name for name, data in tree(tmp_path / "out").items() if data != whole.get(name)} == {".openquant.json"}
    shard = source / "model-00005-of-00006.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10000] + bytes(10000))
    done = torchrun(2, "-m", source, "-o", tmp_path / "out")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert "model-00005-of-00006.safetensors" in done.stderr
    assert " changed since " in done.stderr


def test_an_error_all_ranks_see_is_told_once(tmp_path: Path) -> None:
    done = torchrun(3, "-m", tmp_path / "nowhere" / "at" / "all")
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1


def test_shards_are_shared_out_by_size() -> None:
    shards = [Shard(str(number), size) for number, size in enumerate((5, 9, 1, 1, 3, 3, 2))]
    shares = [[shard.nbytes for shard in Ranks(rank, 3).share(shards)] for rank in range(3)]
    assert shares == [[9], [5, 1, 2], [1, 3, 3]]
    assert Ranks().share(shards) == shards


def test_max_memory_counts_what_ranks_need_to_talk(tmp_path: Path, source: Path) -> None:
    done = torchrun(2, "-m", source, "-o", tmp_path / "out", "--max-memory", "100MB")
    assert done.returncode != 0
    assert done.stderr.count("error: a memory of 100,000,000 bytes is too little") == 1
    assert not (tmp_path / "out").exists()


def test_half_of_torchrun_s_environment_makes_no_rank(run: Run, tmp_path: Path) -> None:
    done = run("-m", tmp_path / "nowhere" / "at" / "all", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_a_caller_s_process_group_stays(tmp_path: Path, source: Path) -> None:
    code = (
        "import sys, torch.distributed as d; from openquant import compress; from openquant.ranks import Ranks;"
        "d.init_process_group('gloo'); r = d.get_rank();"
        "compress(*sys.argv[1:], ranks=Ranks(r, 2, r, 2)); d.barrier(); d.destroy_process_group()"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = torchrun(2, source, tmp_path / "out", script=script, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


def test_the_environment_of_torchrun_is_understood() -> None:
    told = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert Ranks.from_environment(told) == Ranks(5, 8, 1, 4)
    assert Ranks.from_environment({"RANK": "5"}) == Ranks()


def test_ranks_stream_and_publish(tmp_path: Path, source: Path) -> None:
    """Each fetches and uploads for its own shards; the first one commits."""
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = source
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        arguments = ["-m", "org/name", "-o", tmp_path / "out", "--stream", "--push-to-hub", "user/name", "--push-only"]
        done = torchrun(2, *arguments, "--json", **settings, HF_TOKEN="hf_x")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["repository"] == "user/name"
        found = {name: path.read_bytes() for name, path in hub.files("user/name").items()}
        assert set(hub.uploads.values()) == {1}
        assert len(hub.commits("user/name")) == 2
    compress(source, tmp_path / "one")
    expected = tree(tmp_path / "one")
    assert {name for name in expected if found.get(name) != expected[name]} == {"README.md", ".openquant.json"}
    assert not list((tmp_path / "out").rglob("*.safetensors"))

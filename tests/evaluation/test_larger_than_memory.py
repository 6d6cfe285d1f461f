"""A model larger than the memory that is there is evaluated.

It takes a minute of a CPU and 4 GB of disk, so it is run only where OPENQUANT_LARGE says so, as .ci/run does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from openquant import compress

# Half of the layers: of their number only how long it takes depends.
LAYERS = "14"
MEMORY = 1_200_000_000
WEIGHTS = 2_000_000_000
GROUPS = Path("/sys/fs/cgroup")

pytestmark = pytest.mark.skipif(
    "OPENQUANT_LARGE" not in os.environ, reason="OPENQUANT_LARGE is not set: a minute of a CPU, 4 GB of disk"
)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of processes that have MEMORY together, pages of files included, and no swap."""
    first = (GROUPS / "cgroup.controllers").exists()
    found = (GROUPS if first else GROUPS / "memory") / f"openquant-{os.getpid()}"
    # Of the second version, and of the first one.
    limits = ("memory.max", "memory.swap.max") if first else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    try:
        found.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        for name, value in zip(limits, (MEMORY, 0 if first else MEMORY), strict=True):
            # Where the system has no account of swap there is no such file, and opening must not try to make it.
            with open(os.open(found / name, os.O_WRONLY), "w") as file:
                file.write(str(value))
        yield found
    except OSError as error:
        pytest.skip(f"a control group takes no limit: {error}")
    finally:
        found.rmdir()


@pytest.fixture
def models(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A source in the shapes of Qwen3 1.7B with the example's tokenizer, and its output in blocks."""
    source = tmp_path / "source"
    make = ROOT / "benchmarks" / "make_checkpoint.py"
    subprocess.run([sys.executable, make, "qwen3-1.7b", source, "--layers", LAYERS], check=True, timeout=600)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, source / name)
    compress(source, tmp_path / "out", "block")
    yield source, tmp_path / "out"
    shutil.rmtree(tmp_path)


def drop_from_cache(directory: Path) -> None:
    """Leave no page of a directory's files in memory: those that others read first would not count for the group."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_model_larger_than_memory_is_evaluated(group: Path, models: tuple[Path, Path], tmp_path: Path) -> None:
    source, output = models
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > WEIGHTS
    drop_from_cache(source)
    drop_from_cache(output)
    entered = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group]
    words = ["eval", output, "--source", source, "--samples", "2", "--length", "32"]
    command = [sys.executable, "-m", "openquant", *words]
    done = subprocess.run([*entered, *command], cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    found = json.loads((output / "eval.json").read_text())
    assert found["suspects"] == [] and found["verdict"] in ("same", "close")
    # It was in the group: more was read than there was room for.
    assert most(group) > 0.9 * MEMORY


def most(group: Path) -> int:
    """Bytes that the processes of a group had at most."""
    names = ("memory.peak", "memory.max_usage_in_bytes", "memory.current")
    return next(int((group / name).read_text()) for name in names if (group / name).exists())

"""Convert a model from repository to repository within the limits of a free machine, and end the machine on the way.

    sudo python benchmarks/free_machine.py DIR --size 60 --memory 16 --disk 50

The disk is a loop device and the memory that of a control group, both of the sizes given in GB; the Hub is
tests/support/loopback_hub.py in a process of its own on the same CPUs. It keeps the beginning of each upload only. The
model has the shapes of qwen3-32b: zeros, and noise at the beginning of each shard. After half of the shards the process
is killed and its disk emptied; a second machine continues from the branch in the target repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from compare import ROOT
from make_checkpoint import MODELS, SHARD_BYTES, write

GROUPS = Path("/sys/fs/cgroup/memory")
SOURCE, TARGET, TOKEN = "org/name", "you/name", "hf_benchmark"
NOISE = 100_000_000
# Bytes of an upload that the Hub keeps: more than a header.
KEPT = 16_000_000


def make_model(root: Path, size: float, shard_bytes: int) -> None:
    """Write a model of about `size` GB that takes little disk."""
    shape = MODELS["qwen3-32b"]
    layer = 2 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600)
    write(root, shape, max(1, round((size * 1e9 - 4 * 5120 * shape.vocab) / layer)), shard_bytes, headers_only=True)
    generator = np.random.default_rng(0)
    for path in root.glob("*.safetensors"):
        with path.open("r+b") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            file.seek(start)
            noise = generator.standard_normal(NOISE // 2, dtype=np.float32) * np.float32(0.02)
            file.write((noise.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def serve(source: Path, directory: Path) -> None:
    """Answer until stdin ends; says where, and then for each line how many uploads there were."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.loopback_hub import LoopbackHub

    with LoopbackHub(directory, token=TOKEN) as hub:
        hub.kept_bytes = KEPT
        hub.repositories[SOURCE] = source
        for name, path in hub.files(SOURCE).items():
            hub.describe(name, path)
        print(hub.endpoint, flush=True)
        for _ in sys.stdin:
            print(sum(hub.uploads.values()), flush=True)


@contextmanager
def disk(image: Path, place: Path, size: float) -> Iterator[None]:
    """A file system of `size` GB at a place."""
    image.unlink(missing_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(int(size * 1e9))
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop,discard", str(image), str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)
        image.unlink()


class Machine:
    """A control group, and what the run in it took.

    Attributes:
        wall: seconds.
        peak_disk: the most bytes that were used on its disk.
        peak_memory: the most bytes of the group, page cache of its files included.
    """

    def __init__(self, place: Path, memory: float) -> None:
        self.place = place
        self.group = GROUPS / f"openquant-{os.getpid()}"
        self.group.mkdir()
        (self.group / "memory.limit_in_bytes").write_text(str(int(memory * 1e9)))
        self.wall, self.peak_disk, self.peak_memory = 0.0, 0, 0

    def run(self, command: list[str], environment: dict[str, str], ends: threading.Event) -> int:
        """Run a command in it until it ends, or is killed because `ends` is set."""
        enter = f'echo $$ > {self.group}/cgroup.procs; exec "$@"'
        start = time.monotonic()
        process = subprocess.Popen(["sh", "-c", enter, "sh", *command], env=environment, cwd=self.place)
        while process.poll() is None:
            used = shutil.disk_usage(self.place)
            self.peak_disk = max(self.peak_disk, used.used)
            if ends.is_set():
                process.kill()
            time.sleep(0.1)
        self.wall += time.monotonic() - start
        self.peak_memory = int((self.group / "memory.max_usage_in_bytes").read_text())
        return process.returncode

    def close(self) -> None:
        """Remove the group."""
        self.group.rmdir()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=float, default=60, help="GB of the model")
    parser.add_argument("--memory", type=float, default=16, help="GB of memory")
    parser.add_argument("--disk", type=float, default=50, help="GB of disk")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--scheme", default="channel")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source = options.directory.absolute() / "source"
    if options.serve:
        return serve(source, options.serve)
    if not source.exists():
        make_model(source, options.size, options.shard_bytes)
    shards = len(list(source.glob("*.safetensors")))
    hub_directory = options.directory.absolute() / "hub"
    shutil.rmtree(hub_directory, ignore_errors=True)
    command = [sys.executable, __file__, str(options.directory), "--serve", str(hub_directory)]
    hub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hub.stdin is not None
    assert hub.stdout is not None
    asks, answers = hub.stdin, hub.stdout
    endpoint = answers.readline().strip()

    def uploads() -> int:
        print(file=asks, flush=True)
        return int(answers.readline())

    image, place = options.directory.absolute() / "disk.img", options.directory.absolute() / "disk"
    ours = [
        sys.executable,
        "-m",
        "openquant",
        "compress",
        SOURCE,
        "--scheme",
        options.scheme,
        "--stream",
        "--push-only",
    ]
    ours += ["--push-to-hub", TARGET, "-q"]
    print("| | wall s | shards uploaded | peak disk GB | peak memory of the group GB |\n|---|---|---|---|---|")
    for name in ("killed after half of the shards", "on an empty disk, continued"):
        ends, done = threading.Event(), threading.Event()
        before = uploads()

        def watch(ends: threading.Event = ends, done: threading.Event = done) -> None:
            while not done.wait(1):
                if uploads() >= shards // 2:
                    # The branch is written once a minute.
                    done.wait(70)
                    ends.set()
                    return

        with disk(image, place, options.disk):
            environment = {
                **os.environ,
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(place / "hf"),
                "HF_TOKEN": TOKEN,
                "HF_HUB_DISABLE_XET": "1",
                "PYTHONPATH": str(ROOT),
            }
            machine = Machine(place, options.memory)
            watcher = threading.Thread(target=watch)
            if name.startswith("killed"):
                watcher.start()
            code = machine.run(ours, environment, ends)
            done.set()
            if watcher.ident:
                watcher.join()
            machine.close()
        if not ends.is_set() and code:
            raise SystemExit(f"the run ended with {code}")
        print(
            f"| {name} | {machine.wall:.0f} | {uploads() - before} of {shards} | {machine.peak_disk / 1e9:.1f} "
            f"| {machine.peak_memory / 1e9:.2f} |",
            flush=True,
        )
    hub.communicate()


if __name__ == "__main__":
    main()

"""Time whole conversions from a Hub on this machine against `hf download` alone, in turns.

    python benchmarks/make_checkpoint.py qwen3-1.7b --layers 10 --shard-bytes 100000000 DIR
    python benchmarks/hub.py DIR --turns 5

Each turn runs every command once, throttled (each connection 50 MB/s, each answer after 40 ms) and unthrottled, with an
empty cache. The Hub is tests/support/loopback_hub.py in a process of its own; it sends files within the kernel, from
the page cache, and redirects to signed addresses as huggingface.co does. Ratios are of each turn to that
turn's `hf download`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from compare import ROOT, Measured, back_memory, measure, ratios, warm_cache

REPO = "org/name"


def serve(source: Path, directory: Path, latency: float, rate: float) -> None:
    """Answer until stdin ends; says where, and at the end how many requests there were since the last line read."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.loopback_hub import LoopbackHub

    with LoopbackHub(directory) as hub:
        hub.repositories[REPO] = source
        hub.storage = f"http://localhost:{hub.port}"
        hub.latency, hub.rate = latency, rate or None
        for name, path in hub.files(REPO).items():
            hub.describe(name, path)
        print(hub.endpoint, flush=True)
        for _ in sys.stdin:
            print(sum(hub.requests.values()), flush=True)
            hub.requests.clear()


class Hub:
    """The Hub in its own process."""

    def __init__(self, source: Path, directory: Path, latency: float, rate: float) -> None:
        command = [sys.executable, __file__, str(source), "--serve", str(directory), str(latency), str(rate)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def requests(self) -> int:
        """How many there were since this was last asked."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where downloads and outputs go (default: beside the source)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        directory, latency, rate = options.serve
        return serve(options.source, Path(directory), float(latency), float(rate))
    scratch = (options.scratch or options.source.parent) / "benchmark-hub"
    shutil.rmtree(scratch, ignore_errors=True)
    hubs = {
        "throttled": Hub(options.source, scratch / "throttled", 0.04, 50e6),
        "unthrottled": Hub(options.source, scratch / "unthrottled", 0, 0),
    }
    ours = [sys.executable, str(ROOT / "compress_fp8.py"), "-m", REPO, "-o", str(scratch / "output"), "-q"]
    commands = {
        "`hf download`": [str(Path(sys.executable).with_name("hf")), "download", REPO],
        "openquant": ours,
        "openquant --stream": [*ours, "--stream"],
    }
    os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(scratch / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    size = sum(path.stat().st_size for path in options.source.iterdir())
    runs: dict[tuple[str, str], list[Measured]] = {(kind, name): [] for kind in hubs for name in commands}
    requests: dict[tuple[str, str], int] = {}
    for turn in range(options.turns):
        for kind, name in runs:
            for used in ("home", "output"):
                shutil.rmtree(scratch / used, ignore_errors=True)
            os.sync()
            warm_cache(options.source)
            back_memory(size + (1 << 30))
            os.environ["HF_ENDPOINT"] = hubs[kind].endpoint
            hubs[kind].requests()
            runs[kind, name].append(measure(commands[name], scratch / "log"))
            requests[kind, name] = hubs[kind].requests()
            print(f"turn {turn + 1} {kind} {name}: {runs[kind, name][-1].wall:.2f} s", file=sys.stderr, flush=True)
    for hub in hubs.values():
        hub.close()
    shutil.rmtree(scratch)
    shards = len(list(options.source.glob("*.safetensors")))
    print(f"\n{size / 1e9:.2f} GB in {shards} shards, {options.turns} turns, {os.cpu_count()} CPUs\n")
    print("| | command | wall s | CPU s | peak RSS MB | requests | wall / `hf download` (min, median, max) |")
    print("|---|---|---|---|---|---|---|")
    for (kind, name), found in runs.items():
        print(
            f"| {kind} | {name} | {statistics.median(run.wall for run in found):.2f} "
            f"| {statistics.median(run.cpu for run in found):.2f} | {max(run.peak for run in found) / 1e6:.0f} "
            f"| {requests[kind, name]} | {ratios(found, runs[kind, '`hf download`'])} |"
        )


if __name__ == "__main__":
    main()

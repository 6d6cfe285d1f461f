"""CPU time of a diagnosis beside that of a conversion with the default scheme, whole processes in turns.

    python benchmarks/make_checkpoint.py qwen3-1.7b DIR/q1.7 && python benchmarks/diagnose.py DIR/q1.7

The source is read once before each turn. CPU and wall seconds and peak memory are medians, ratios those of CPU seconds
to the same turn's conversion.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path

from compare import ROOT, Measured, measure, warm_cache


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where outputs go (default: beside the source)")
    parser.add_argument("--full", action="store_true", help="also time --full")
    options = parser.parse_args()
    scratch = options.scratch or options.source.parent
    output, log = scratch / "benchmark-output", scratch / "benchmark-log"
    source = str(options.source)
    diagnose = [sys.executable, "-m", "openquant", "diagnose", source, "--json"]
    commands = {
        "compress": [sys.executable, str(ROOT / "compress_fp8.py"), "-m", source, "-o", str(output), "-q"],
        "diagnose": diagnose,
    }
    if options.full:
        commands["diagnose --full"] = [*diagnose, "--full"]
    found: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(options.turns):
        warm_cache(options.source)
        for name, command in commands.items():
            shutil.rmtree(output, ignore_errors=True)
            found[name].append(measure(command, log))
    shutil.rmtree(output, ignore_errors=True)
    log.unlink()
    print("| command | CPU s | wall s | peak RSS MB | CPU / compress (min, median, max) |\n|---|---|---|---|---|")
    for name, runs in found.items():
        ratios = sorted(run.cpu / other.cpu for run, other in zip(runs, found["compress"], strict=True))
        cpu, wall = (statistics.median(getattr(run, field) for run in runs) for field in ("cpu", "wall"))
        peak = statistics.median(run.peak for run in runs) / 1e6
        shown = f"{ratios[0]:.2f}, {statistics.median(ratios):.2f}, {ratios[-1]:.2f}"
        print(f"| {name} | {cpu:.2f} | {wall:.2f} | {peak:.0f} | {shown} |")


if __name__ == "__main__":
    main()

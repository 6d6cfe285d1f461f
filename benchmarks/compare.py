"""Time whole processes in turns: this program's schemes, `cp -r` of the source, the floor, and peers given as command
lines.

    python benchmarks/compare.py SOURCE --turns 5
    python benchmarks/compare.py SOURCE --scheme mxfp8 --scheme 'int4 --no-search'
    python benchmarks/compare.py SOURCE --peer 'model_free_ptq=VENV/bin/python peer.py {source} {output}'

Each turn runs every command once, in order, so drift of the machine falls on all alike. Outputs are removed, the disk
is synced and free memory is used once between runs, outside the measured time. openquant syncs what it writes before it
ends; `cp -r` does not, and `cp -r, synced` is followed by an fsync of each file inside the measured time. `floor` is
floor.py: the source read, and as many bytes written as the output has, directly and synced, on as many threads; outputs
within a tenth of each other share one. Ratios are of each turn to that turn's `cp -r` and `floor`; the latter depend
less on the state of the memory.
The medians of all turns are printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from openquant.machine import available_cpus

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Measured:
    """One run of one command."""

    wall: float
    cpu: float
    peak: int


def measure(command: list[str], log: Path) -> Measured:
    """Run a command; wall and CPU seconds, and the largest resident memory of a single process in bytes."""
    begin = time.monotonic()
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
        _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed with {process.returncode}; see {log}")
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def drop_cache(directory: Path) -> None:
    """Let the system forget a directory's contents, so that the next run reads the disk."""
    for path in directory.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def warm_cache(directory: Path) -> None:
    """Read a directory once."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def back_memory(nbytes: int) -> None:
    """Use and free memory, so that no run pays for pages that a virtual machine's host has yet to hand out."""
    code = (
        "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"
    )
    subprocess.run([sys.executable, "-c", code, str(nbytes)], check=True)


def planned_bytes(command: list[str]) -> int:
    """Size of the weights that a command of openquant leaves of its source."""
    found = json.loads(subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True).stdout)
    return int(found["output_bytes"])


def floors(commands: dict[str, list[str]], floor: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The floors of some commands of openquant, one for all whose outputs are within a tenth of each other.

    Args:
        commands: by name.
        floor: what runs floor.py but for the bytes.

    Returns:
        the command of each floor, and the floor of each command, by name.
    """
    sizes: dict[str, int] = {}
    of: dict[str, str] = {}
    for name, command in commands.items():
        size = planned_bytes(command)
        near = [known for known, other in sizes.items() if 0.9 < size / other < 1.1]
        of[name] = near[0] if near else f"floor, {size / 1e9:.1f} GB"
        sizes.setdefault(of[name], size)
    return {name: [*floor, "--bytes", str(size)] for name, size in sizes.items()}, of


def ratios(found: list[Measured], reference: list[Measured]) -> str:
    """Least, median and most of wall times over those of the same turns."""
    each = sorted(mine.wall / theirs.wall for mine, theirs in zip(found, reference, strict=True))
    return f"{each[0]:.2f}, {statistics.median(each):.2f}, {each[-1]:.2f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where outputs go (default: beside the source)")
    parser.add_argument("--cold", action="store_true", help="forget the source before each run (default: read it once)")
    parser.add_argument(
        "--scheme", action="append", default=[], help="with options of its own, if any; repeatable (tensor and block)"
    )
    parser.add_argument("--workers", type=int, help="for openquant")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="with {source} and {output}; repeatable"
    )
    options = parser.parse_args()
    scratch = options.scratch or options.source.parent
    output, log = scratch / "benchmark-output", scratch / "benchmark-log"
    places = {"source": str(options.source), "output": str(output)}
    ours = [sys.executable, str(ROOT / "compress_fp8.py"), "-m", str(options.source), "-o", str(output), "-q"]
    ours += ["--workers", str(options.workers)] if options.workers else []
    # No more than openquant takes by itself.
    workers = options.workers or min(16, available_cpus())
    floor = [sys.executable, str(ROOT / "benchmarks" / "floor.py"), str(options.source), str(output)]
    floor += ["--workers", str(workers)]
    named = options.scheme or ["tensor", "block"]
    schemes = {f"openquant, {name}": [*ours, "--scheme", *shlex.split(name)] for name in named}
    least, floor_of = floors(schemes, floor)
    commands = {
        "`cp -r`": ["cp", "-r", str(options.source), str(output)],
        "`cp -r`, synced": ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(options.source), str(output)],
        **least,
        **schemes,
    }
    for peer in options.peer:
        name, _, command = peer.partition("=")
        commands[name] = [word.format(**places) for word in shlex.split(command)]
    size = sum(path.stat().st_size for path in options.source.iterdir())
    runs: dict[str, list[Measured]] = {name: [] for name in commands}
    for turn in range(options.turns):
        for name, command in commands.items():
            shutil.rmtree(output, ignore_errors=True)
            os.sync()
            (drop_cache if options.cold else warm_cache)(options.source)
            back_memory(size + (1 << 30))
            runs[name].append(measure(command, log))
            print(f"turn {turn + 1} {name}: {runs[name][-1].wall:.2f} s", file=sys.stderr, flush=True)
    shutil.rmtree(output, ignore_errors=True)
    cache = "cold" if options.cold else "warm"
    print(
        f"\n{options.source.name}, {size / 1e9:.2f} GB, {options.turns} turns, {cache} cache, {os.cpu_count()} CPUs\n"
    )
    columns = ("command", "wall s", "CPU s", "peak RSS MB", "wall / `cp -r` (min, median, max)", "wall / floor")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, found in runs.items():
        print(
            f"| {name} | {statistics.median(run.wall for run in found):.2f} "
            f"| {statistics.median(run.cpu for run in found):.2f} | {max(run.peak for run in found) / 1e6:.0f} "
            f"| {ratios(found, runs['`cp -r`'])} | {ratios(found, runs[floor_of.get(name, next(iter(least)))])} |"
        )


if __name__ == "__main__":
    main()

"""Run an evaluation alone, then beside processes that compute, and print the ratio of what it takes.

    python benchmarks/beside.py SOURCE OUTPUT --load 8 --turns 1

Threads that spin while they wait take many times the processor seconds beside other work. A thread count of 1
(`OMP_NUM_THREADS=1`) is what the ratio of processor seconds should be near to, since a thread alone waits for none.
Each process of the load multiplies matrices on one thread until the evaluation is done.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPUTE = "import numpy\na = numpy.ones((512, 512))\nwhile True: a @ a"


@contextmanager
def load(count: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", COMPUTE], env=environment) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(command: list[str], environment: Mapping[str, str], limit: float) -> tuple[float, float]:
    """Processor seconds and seconds of a command, which is killed after so many of these."""
    begin = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, stdout=sys.stderr)
    reaped = 0
    while not reaped:
        time.sleep(0.05)
        if time.monotonic() - begin > limit:
            os.kill(process.pid, signal.SIGKILL)
        reaped, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, time.monotonic() - begin


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--load", type=int, default=8, help="processes that compute")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a run is killed")
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    print("| | CPU s alone | beside | ratio | wall s alone | beside | ratio |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "openquant", "eval", str(options.output), "--source", str(options.source)]
        command += ["--samples", str(options.samples), "--length", str(options.length), "--json"]
        command += ["--out", f"{scratch}/eval.json"]
        for _ in range(options.turns):
            for name, environment in (("as it is", {}), ("one thread", {"OMP_NUM_THREADS": "1"})):
                alone = measure(command, environment, options.limit)
                with load(options.load):
                    beside = measure(command, environment, options.limit)
                figures = [each for pair in zip(alone, beside, strict=True) for each in (*pair, pair[1] / pair[0])]
                print(f"| {name} | {' | '.join(f'{each:.1f}' for each in figures)} |", flush=True)


if __name__ == "__main__":
    main()

"""Run an evaluation and watch its memory: the most it has resident, and the most of that which is not files.

    python benchmarks/make_checkpoint.py qwen3-1.7b DIR/q17
    python benchmarks/evaluation.py DIR/q17 DIR/q17-fp8 --samples 4 --length 512

The output is made by `openquant compress` where it is missing. Both get the tokenizer of examples/tiny-qwen3, as text
has to become tokens; weights are random, so the figures that are found say nothing. Pages of mapped files count as
resident while they are used, and are given up when memory is asked for; the part that is not files is never.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def memory(process: int) -> dict[str, int]:
    """Bytes that a process has resident: {"VmRSS": ..., "RssAnon": ..., "RssFile": ...}; empty once it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile")))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in fields}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "openquant"]
    if not options.output.exists():
        subprocess.run(
            [*command, "compress", "-m", options.source, "-o", options.output, "-q"], check=True, env=environment
        )
    for directory in (options.source, options.output):
        for name in TOKENIZER:
            shutil.copy(ROOT / "examples" / "tiny-qwen3" / name, directory)
    sizes = ["--samples", str(options.samples), "--length", str(options.length)]
    begin, most, reaped = time.monotonic(), {"VmRSS": 0, "RssAnon": 0, "RssFile": 0}, 0
    process = subprocess.Popen([*command, "eval", options.output, "--source", options.source, *sizes], env=environment)
    while not reaped:
        time.sleep(0.05)
        for name, nbytes in memory(process.pid).items():
            most[name] = max(most[name], nbytes)
        reaped, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the evaluation failed with {process.returncode}")
    figures = {
        "CPU s": usage.ru_utime + usage.ru_stime,
        "wall s": time.monotonic() - begin,
        "peak RSS MB": usage.ru_maxrss * 1024 / 1e6,
        "of what is not files": most["RssAnon"] / 1e6,
        "of files": most["RssFile"] / 1e6,
    }
    print(f"| {' | '.join(figures)} |\n|{'---|' * len(figures)}")
    print(f"| {' | '.join(f'{figure:.0f}' for figure in figures.values())} |")


if __name__ == "__main__":
    main()

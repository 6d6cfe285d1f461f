"""Processor time and memory of `compress --fit` beside one evaluation, whole processes in one turn.

    python benchmarks/make_checkpoint.py qwen3-0.6b --layers 6 DIR/q06l6 && python benchmarks/fit_cost.py DIR/q06l6

A checkpoint without a tokenizer is given that of examples/tiny-qwen3. Ratios are of CPU seconds to the evaluation,
which has its default texts and compares one output. "With scores" starts from the scores of the first `--fit`: it is
the check on other texts, and the conversion. One thread each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from compare import ROOT, Measured, measure, warm_cache

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--fit", default="5.0bits")
    options = parser.parse_args()
    source: Path = options.source
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in TOKENIZER:
        if not (source / name).exists():
            shutil.copy(ROOT / "examples" / "tiny-qwen3" / name, source / name)
    work = source.with_name(f"{source.name}-fit")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    openquant = [sys.executable, "-m", "openquant"]
    compress = [*openquant, "compress", "-m", str(source), "-q"]
    fit = [*compress, "--for", "vllm", "--fit", options.fit, "-o"]
    commands = {
        "eval": [*openquant, "eval", str(work / "nvfp4"), "--source", str(source)],
        f"compress --fit {options.fit}": [*fit, str(work / "first")],
        "with scores": [*fit, str(work / "again")],
    }
    measure([*compress, "--scheme", "nvfp4", "-o", str(work / "nvfp4")], work / "log")
    found: dict[str, Measured] = {}
    for name, command in commands.items():
        warm_cache(source)
        found[name] = measure(command, work / "log")
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    shutil.rmtree(work)
    print("| command | CPU s | wall s | peak RSS MB | CPU / eval |\n|---|---|---|---|---|")
    for name, run in found.items():
        ratio = run.cpu / found["eval"].cpu
        print(f"| openquant {name} | {run.cpu:.0f} | {run.wall:.0f} | {run.peak / 1e6:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

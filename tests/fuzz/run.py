"""Fuzzing by hand: `python tests/fuzz/run.py --cases 100000`; README.md beside this tells more."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cases import SHM, Base, play, warm

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, which is its seed")
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--where", type=Path, default=SHM, help="below what to write")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every case, not only those that fail")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openquant-fuzz-", dir=options.where) as root:
        return fuzz(options, Path(root))


def read_bases(root: Path) -> list[Base]:
    """What bases.make() makes, by another process: what has imported torch is too large to be forked for each case."""
    root.mkdir()
    code = "import bases, pathlib, sys; bases.main(pathlib.Path(sys.argv[1]))"
    paths = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code, root], check=True, env=environment)
    listed = json.loads((root / "bases.json").read_text())
    return [Base(Path(one), source and Path(source)) for one, source in listed]


def fuzz(options: argparse.Namespace, root: Path) -> int:
    """Play cases and tell what did not hold; whether anything did not."""
    bases = read_bases(root / "bases")
    warm(next(base for base in bases if base.source))
    codes: Counter[int | None] = Counter()
    kinds: Counter[str] = Counter()
    begin = time.monotonic()
    for number in range(options.first, options.first + options.cases):
        if time.monotonic() - begin > options.seconds:
            break
        here = root / "case"
        here.mkdir()
        told = play(random.Random(number), bases, here)
        shutil.rmtree(here)
        codes[told.outcome.code] += 1
        kinds.update(told.problems)
        if told.problems or options.verbose:
            print(f"case {number}: {'; '.join(told.problems) or 'holds'}")
            print(f"  damage: {'; '.join(told.damage)}\n  openquant {' '.join(told.words)}")
            print(f"  exit {told.outcome.code}, {told.outcome.seconds:.1f} s, {told.outcome.memory >> 20} MiB")
            print("  " + told.outcome.err.strip()[-1500:].replace("\n", "\n  "), flush=True)
        if (number + 1) % 1000 == 0:
            print(
                f"{sum(codes.values())} cases, exit codes {dict(codes)}, {time.monotonic() - begin:.0f} s", flush=True
            )
    print(f"{sum(codes.values())} cases in {time.monotonic() - begin:.0f} s, exit codes {dict(codes)}")
    for kind, count in kinds.most_common():
        print(f"  {count} x {kind}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())

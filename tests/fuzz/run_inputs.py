"""Fuzzing of what a command is given beside a model, by hand: `python tests/fuzz/run_inputs.py --cases 100000`.

Most cases call what reads a file, in this process. The others run a command with it, in a fork, as cases.py does.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import MEMORY, SHM, Outcome, problems, run  # noqa: E402
from inputs import KINDS, WAITED, Case, Sound, contents, make  # noqa: E402

# Seconds of a processor that a case may take.
SECONDS = 10


class Report(NamedTuple):
    """A case in words: what was damaged, what was run, what did not hold, and the outcome of a command."""

    damage: list[str]
    words: list[str]
    problems: list[str]
    outcome: Outcome | None = None


# Running cases.


class Hung(BaseException):
    """Something took too long."""


def refused(do: Callable[[], object]) -> str | None:
    """What is wrong with how something ends: it gives something, or raises an OpenQuantError within seconds."""
    from openquant.errors import OpenQuantError

    def stop(*_: object) -> None:
        raise Hung

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_REAL, WAITED)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            do()
    except OpenQuantError as error:
        return None if error.message.strip() and error.hint.strip() else "an error without words"
    except Hung:
        return f"still running: {traceback.format_exc()[-1500:]}"
    except Exception:
        return traceback.format_exc()[-2500:]
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in before:
            signal.signal(number, handler)
    return None


def play(rng: random.Random, sound: Sound, here: Path, only: list[str] | None = None, commands: float = 0.1) -> Report:
    """One case from beginning to end; `here` is an empty directory."""
    kind = rng.choice(only or list(KINDS))
    case = Case(rng, sound, here, rng.random() < commands)
    trial = KINDS[kind](case)
    if not case.runs:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        problem = refused(trial.read)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        more = [f"{grown >> 20} MiB of memory"] if grown > MEMORY else []
        return Report([kind, *case.done], [], [problem, *more] if problem else more)
    if "--json" not in trial.words and rng.random() < 0.2:
        trial.words.append("--json")
    before, model = contents(here), contents(sound.model)
    outcome = run(trial.words, here, WAITED)
    wrong = problems(outcome, trial.words)
    after = contents(here)
    makes = tuple(each.rstrip("/") for each in trial.makes)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name) and not any(
            name == each or name.startswith(f"{each}/") for each in makes
        ):
            wrong.append(f"{name!r} was changed")
    if contents(sound.model) != model:
        wrong.append("the model was changed")
    if any(".partial" in name for name in after.keys() - before.keys()):
        wrong.append("something half-written is left")
    if not wrong and outcome.code is not None:
        worse = trial.holds(outcome.code)
        wrong += [worse] if worse else []
    return Report([kind, *case.done], trial.words, wrong, outcome)


def main() -> int:
    """The command line. Returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, which is its seed")
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many seconds")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="kind of file")
    parser.add_argument("--commands", type=float, default=0.05, help="share of cases that run a command")
    parser.add_argument("--where", type=Path, default=SHM, help="below what to write")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openquant-fuzz-", dir=options.where) as root:
        return fuzz(options, Path(root))


def fuzz(options: argparse.Namespace, root: Path) -> int:
    """Play cases and tell what did not hold; whether anything did not."""
    import torch

    torch.set_num_threads(1)
    # Nothing is asked of the Hub, whatever a recipe names.
    os.environ["HF_HUB_OFFLINE"] = "1"
    sound = make(root)
    counts: Counter[str] = Counter()
    failed, begin = 0, time.monotonic()
    for number in range(options.first, options.first + options.cases):
        if time.monotonic() - begin > options.seconds:
            break
        here = root / "case"
        here.mkdir()
        report = play(random.Random(number), sound, here, options.only, options.commands)
        for path in here.glob("closed"):
            path.chmod(0o700)
        shutil.rmtree(here)
        counts[f"{report.damage[0]}{' by commands' if report.words else ''}"] += 1
        failed += bool(report.problems)
        if report.problems or options.verbose:
            print(f"case {number}: {'; '.join(report.problems) or 'holds'}\n  {str(report.damage)[:500]}")
            if report.outcome is not None:
                print(
                    f"  openquant {' '.join(report.words)[:300]!r}\n  exit {report.outcome.code}, {report.outcome.seconds:.1f} s"
                )
                print("  " + ascii(report.outcome.err[-1500:]))
            sys.stdout.flush()
        if (number + 1) % 1000 == 0:
            print(f"{sum(counts.values())} cases, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{sum(counts.values())} cases in {time.monotonic() - begin:.0f} s, {failed} failed")
    for kind, count in counts.most_common():
        print(f"  {count} x {kind}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

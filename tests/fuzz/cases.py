"""Cases: a damaged directory and a command, run as a user would run it, in a forked process with limits.

Whatever the damage, the command ends with 0, 1 or 2, within SECONDS and MEMORY, without a traceback, and what it left
behind looks finished only if it said 0. `problems()` of an outcome are what did not hold.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError, safe_open

from damage import JOURNAL, damage
from openquant.cli.commands import main

SECONDS = 20
MEMORY = 1 << 30
# Where nothing waits for a disk, if there is such a place.
SHM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
# What a process may take at most, so that a fault here does not become one of the machine.
_CEILING = 4 << 30


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (None: it was still running), what it printed, and what it took."""

    code: int | None
    out: str
    err: str
    seconds: float
    memory: int


@dataclass(frozen=True)
class Base:
    """A sound directory to damage; `source` is what it was made from, if it is an output of ours."""

    root: Path
    source: Path | None = None


def run(words: list[str], where: Path, seconds: float = SECONDS) -> Outcome:
    """`openquant WORDS` in a child of this process, which has imported everything already."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        before, begin = _resident(), time.monotonic()
        child = os.fork()
        if child == 0:
            _child(words, where, out.fileno(), err.fileno())
        ended = os.pidfd_open(child)
        in_time = bool(select.select([ended], [], [], seconds)[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
        os.close(ended)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace"))
        code = os.waitstatus_to_exitcode(status) if in_time else None
        return Outcome(code, *texts, time.monotonic() - begin, max(0, usage.ru_maxrss * 1024 - before))


def _child(words: list[str], where: Path, out: int, err: int) -> NoReturn:
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        with Path("/proc/self/statm").open() as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _CEILING, size + _CEILING))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(where)
        code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Without what Python does at its end, which is this process's parent's to do.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 255)


def _resident() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# What did not hold.


def problems(outcome: Outcome, words: list[str]) -> list[str]:
    """What a user would call a bug, whatever the input."""
    found = []
    allowed = (0, 1, 2) if words[0] == "verify" else (0, 2)
    if outcome.code is None:
        found.append(f"still running after {SECONDS} s")
    elif outcome.code not in allowed:
        found.append(f"exit code {outcome.code}")
    if outcome.memory > MEMORY:
        found.append(f"{outcome.memory >> 20} MiB of memory")
    if "Traceback (most recent" in outcome.err or "Warning" in outcome.err:
        found.append("a traceback or warning")
    if any(unicodedata.category(letter) == "Cc" and letter != "\n" for letter in outcome.out + outcome.err):
        found.append("control characters on the terminal")
    lines = outcome.err.rstrip("\n").split("\n")
    if outcome.code == 2 and not (
        len(lines) > 1 and lines[-2].startswith("error: ") and lines[-1].startswith("hint: ")
    ):
        found.append("exit code 2 without two lines that say why")
    if "--json" in words and outcome.code in allowed:
        try:
            json.loads(outcome.out)
        except ValueError:
            found.append("stdout is not one JSON object")
    return found


def looks_finished(output: Path) -> bool:
    """Whether a loader or a later run would take an output for a whole model."""
    try:
        done = json.loads((output / JOURNAL).read_bytes())["done"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        done = False
    return bool(done) or (output / "config.json").is_file()


def unreadable(root: Path) -> str | None:
    """The first weight file that the safetensors library refuses."""
    for path in sorted(root.glob("*.safetensors")):
        # A pipe would be waited for; beside an index engines open none of its name.
        if not path.is_file():
            continue
        try:
            with safe_open(path, "np") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            return f"{path.name}: {error}"
    return None


# Cases.

SCHEMES = [
    [], ["-w", "128"], ["--scheme", "channel"], ["--scheme", "mxfp8"], ["--format", "compressed-tensors"],
    ["--scheme", "int8"], ["--scheme", "int8-weights"], ["--scheme", "int4"],
    ["--scheme", "int4", "--group-size", "32"], ["--scheme", "int4", "--group-size", "32", "--asymmetric"],
    ["--scheme", "mxfp4"], ["--scheme", "nvfp4"], ["--scheme", "nvfp4-w4a4"], ["--scheme", "keep"],
    ["-w", "128", "--format", "compressed-tensors"], ["-w", "128", "--scale-format", "ue8m0"],
    ["--activation-scheme", "static"], ["--activation-scheme", "static", "--format", "compressed-tensors"],
    ["--scheme", "int4", "--awq"], ["--scheme", "int8", "--smooth", "0.5"], ["--scheme", "int4", "--gptq"],
]  # fmt: skip
OPTIONS = [
    *[[]] * 12, ["--architecture", "generic"], ["--architecture", "LlamaForCausalLM"], ["--tp", "2"], ["--tp", "3"],
    ["--ignore", "**.mlp.**"], ["--ignore", "{a,b"], ["--ignore", "**"], ["--quantize-lm-head"], ["--quantize-embeddings"], ["--workers", "3"],
    ["--max-memory", "100MB"], ["--scheme-for", "**.o_proj=channel"], ["--scheme-for", "**=block"], ["-q"], ["-v"],
    ["--ignore", "*" * 50 + "x"], ["--tp", "99999999999999999999"], ["--revision", "main"], ["--json"],
]  # fmt: skip


def play(rng: random.Random, bases: list[Base], here: Path) -> list[str]:
    """One case from beginning to end in an empty directory; what did not hold, with what was damaged and run."""
    base = rng.choice(bases)
    root = here / "model"
    shutil.copytree(base.root, root)
    if base.source is not None and rng.random() < 0.7:
        return _output(rng, base, root, here)
    done = damage(rng, root)
    return _compress(rng, root, here, done)


def tell(problems: list[str], done: list[str], words: list[str], outcome: Outcome) -> list[str]:
    """Problems with what is needed to understand them."""
    return [f"{each}\n{done}\nopenquant {' '.join(words)}\n{outcome}" for each in problems]


def _compress(rng: random.Random, root: Path, here: Path, done: list[str]) -> list[str]:
    output = here / "output"
    if rng.random() < 0.15:
        words = ["dequantize", "model", "-o", "output"]
    else:
        words = ["compress", "-m", "model", "-o", "output", *rng.choice(SCHEMES), *rng.choice(OPTIONS)]
    dry = rng.random() < 0.4
    words += ["--dry-run"] if dry else []
    outcome = run(words, here)
    found = problems(outcome, words)
    if dry and output.exists():
        found.append("a dry run wrote something")
    elif outcome.code != 0 and looks_finished(output):
        found.append("the output looks finished")
    elif outcome.code == 0 and not dry:
        if not looks_finished(output):
            found.append("the output does not look finished")
        if words[0] == "compress" and not found:
            checked = run(["verify", "output"], here)
            found += [f"verify of the output: {problem}" for problem in problems(checked, ["verify"])]
            # By another architecture than its own, or by none, engines may build other layers as FP8.
            if checked.code == 1 and "--architecture" not in words and not _as_told(outcome, checked):
                found.append(f"verify of the output finds problems: {checked.out[-300:]}")
    return tell(found, done, words, outcome)


def _as_told(outcome: Outcome, checked: Outcome) -> bool:
    """Whether verify finds only what the source lacks, contradicts or holds, and the run has said so."""
    told = " ".join(f"{outcome.out} {outcome.err}".split())
    problems = [" ".join(problem.split()) for problem in checked.out.split("\nproblem: ")[1:]]
    known = {
        "the shards lack": "the source lacks",
        "config.json does not fit the tensors": "config.json does not fit the tensors",
        "answers NaN where it is used": "a model answers NaN",
    }
    return all(any(found in problem and said in told for found, said in known.items()) for problem in problems)


def _output(rng: random.Random, base: Base, root: Path, here: Path) -> list[str]:
    """Something done with a damaged output: verify it, or run over it again."""
    again = rng.random() < 0.3
    done = damage(rng, root)
    if again:
        words = ["compress", "-m", str(base.source), "-o", "model", *(["--overwrite"] if rng.random() < 0.6 else [])]
    else:
        words = ["verify", "model"]
        words += ["--source", str(base.source)] if rng.random() < 0.5 else []
        words += rng.choice([[], [], ["--full"], ["--json"], ["--full", "--workers", "2"]])
    outcome = run(words, here)
    found = problems(outcome, words)
    if not again and outcome.code == 0 and (broken := unreadable(root)):
        found.append(f"verify finds no problem, safetensors does: {broken}")
    return tell(found, done, words, outcome)

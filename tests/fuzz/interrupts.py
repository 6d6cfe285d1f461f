"""Commands that run models, interrupted at random bytecodes: they end within seconds, and the next run gives the same bytes.

python interrupts.py [--first N] [--cases N] calibrate|gptq|eval...
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
EXAMPLE = ROOT / "examples" / "tiny-qwen3"
TEXTS = ("--samples", "2", "--length", "32")
# Seconds in which an interrupted command must have ended.
LIMIT = 5.0
# Where signals are placed: bytecodes of these, in the main thread, whichever greenlet runs there.
TRACED = (str(ROOT / "openquant"), "threading.py", "contextlib.py")


def words(verb: str, folder: Path) -> list[str]:
    """The command line of a verb, which writes into a folder."""
    return {
        "calibrate": ["calibrate", str(EXAMPLE), "-o", str(folder / "out"), *TEXTS],
        "gptq": ["compress", "-m", str(EXAMPLE), "-o", str(folder / "out"), "--scheme", "int4", "--gptq", *TEXTS],
        "eval": ["eval", str(EXAMPLE), "--source", str(EXAMPLE), "--out", str(folder / "out"), *TEXTS],
    }[verb]


def contents(folder: Path) -> dict[str, bytes]:
    """All that a command wrote, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def preload() -> None:
    """Import what commands import, so that each fork need not."""
    import torch

    torch.set_num_threads(1)
    import openquant.api
    import openquant.calibration
    import openquant.cli
    import openquant.evaluation
    import openquant.gptq
    import openquant.improve.gptq
    import openquant.measure.calibrate
    import openquant.measure.evaluate  # noqa: F401
    from openquant.files.checkpoint import open_checkpoint
    from openquant.forward.streamed import StreamedModel

    StreamedModel(open_checkpoint(EXAMPLE))


def forked(do: Callable[[], int], log: Path, limit: float) -> int | None:
    """The exit code of a function in a fork; None if it was still alive after so many seconds."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = do()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def command(verb: str, folder: Path, at: int, number: int) -> tuple[int, int]:
    """Run a verb, with a signal at a bytecode. Returns the exit code and how many bytecodes there were."""
    from openquant.cli import main

    count = 0

    def opcode(frame, event, argument):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                # What follows is to take the time that it takes.
                sys.settrace(None)
                Path(folder / "../sent").write_text("")
                os.kill(os.getpid(), number)
        return opcode

    def call(frame, event, argument):
        if not frame.f_code.co_filename.startswith(TRACED[0]) and not frame.f_code.co_filename.endswith(TRACED[1:]):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return opcode

    if at:
        sys.settrace(call)
    code = main(words(verb, folder))
    sys.settrace(None)
    return code, count


def measured(verb: str, scratch: Path) -> tuple[dict[str, bytes], int]:
    """What an uninterrupted run writes, and its number of bytecodes."""
    folder, total = scratch / "folder", scratch / "total"

    def do() -> int:
        code, count = command(verb, folder, -1, 0)
        total.write_text(str(count))
        return code

    fresh(folder)
    code = forked(do, scratch / "log", 300)
    assert code == 0, (code, (scratch / "log").read_text())
    return contents(folder), int(total.read_text())


def fresh(folder: Path) -> None:
    """Have an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def case(verb: str, seed: int, expected: dict[str, bytes], total: int, scratch: Path) -> str | None:
    """One interrupt; what is wrong with it, if anything is."""
    dice = random.Random(f"{verb} {seed}")
    at, number = dice.randrange(1, total + 1), dice.choice((signal.SIGINT, signal.SIGTERM))
    folder, sent, log = scratch / "folder", scratch / "sent", scratch / "log"
    fresh(folder)
    sent.unlink(missing_ok=True)
    begin = time.monotonic()
    code = forked(lambda: command(verb, folder, at, number)[0], log, 300) if False else _interrupted(
        lambda: command(verb, folder, at, number)[0], log, sent
    )
    told = f"{verb} {seed}: {signal.Signals(number).name} at {at} of {total}, {time.monotonic() - begin:.1f} s"
    if code is None:
        return f"{told}: still alive"
    if code not in (0, 130):
        return f"{told}: exit code {code}\n{log.read_text()}"
    if code == 130 and "interrupted" not in log.read_text():
        return f"{told}: nothing was said"
    again = forked(lambda: command(verb, folder, 0, 0)[0], log, 60)
    if again != 0:
        return f"{told}: the next run ends with {again}\n{log.read_text()}"
    if contents(folder) != expected:
        return f"{told}: the next run gives other bytes"
    return None

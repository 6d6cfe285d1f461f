"""Commands that run models, interrupted at random bytecodes: they end within seconds, and the next run gives the same bytes.

python interrupts.py [--first N] [--cases N] [--only openquant/streaming/interleaved.py] calibrate|gptq|eval...
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
EXAMPLE = ROOT / "examples" / "tiny-qwen3"
TEXTS = ("--samples", "2", "--length", "32")
# Seconds in which an interrupted command must have ended.
LIMIT = 5.0
# Where signals are placed, unless --only says otherwise: bytecodes of files with this in their paths, in the main thread,
# whichever greenlet runs there.
TRACED = ("/openquant/", "/threading.py", "/contextlib.py")


def write_model(root: Path, layers: int = 1) -> None:
    """Write the example with its first decoder layers alone, with which a case takes seconds."""
    import torch
    from safetensors.torch import load_file, save_file

    root.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EXAMPLE / name, root / name)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    (root / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for path in EXAMPLE.glob("*.safetensors"):
        tensors |= load_file(path)
    left_out = tuple(f"model.layers.{number}." for number in range(layers, 100))
    save_file(
        {name: each for name, each in tensors.items() if not name.startswith(left_out)}, root / "model.safetensors"
    )


def words(verb: str, scratch: Path) -> list[str]:
    """The command line of a verb, which reads `model` and writes into `folder`."""
    model, out = str(scratch / "model"), str(scratch / "folder" / "out")
    return {
        "calibrate": ["calibrate", model, "-o", out, *TEXTS],
        "gptq": ["compress", "-m", model, "-o", out, "--scheme", "int4", "--gptq", *TEXTS],
        "eval": ["eval", model, "--source", model, "--out", out, *TEXTS],
    }[verb]


def contents(folder: Path) -> dict[str, bytes]:
    """All that a command wrote, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def preload() -> None:
    """Import what commands import, so that each fork need not."""
    import torch

    torch.set_num_threads(1)
    from openquant.files.checkpoint import open_checkpoint
    from openquant.streaming.model import StreamedModel

    StreamedModel(open_checkpoint(EXAMPLE))


def forked(do: Callable[[], int], log: Path, limit: float, since: Path | None = None) -> int | None:
    """The exit code of a function in a fork; None if it was still alive after so many seconds, or after so many since a
    file appeared."""
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
    waiting, end = since is not None, time.monotonic() + (limit if since is None else 300)
    while time.monotonic() < end:
        if waiting and since is not None and since.exists():
            waiting, end = False, time.monotonic() + limit
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def command(verb: str, scratch: Path, at: int, number: int, traced: Sequence[str]) -> tuple[int, int]:
    """Run a verb, with a signal at a bytecode. Returns the exit code and how many bytecodes there were."""
    from openquant.cli.commands import main

    count = 0

    def opcode(frame, event, argument):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                # What follows is to take the time that it takes.
                sys.settrace(None)
                (scratch / "sent").write_text("")
                os.kill(os.getpid(), number)
        return opcode

    def call(frame, event, argument):
        if not any(each in frame.f_code.co_filename for each in traced):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return opcode

    sys.argv = ["openquant", *words(verb, scratch)]
    if at:
        sys.settrace(call)
    code = main()
    sys.settrace(None)
    return code, count


def measured(verb: str, scratch: Path, traced: Sequence[str]) -> tuple[dict[str, bytes], int]:
    """What an uninterrupted run writes, and its number of bytecodes."""
    folder, total = scratch / "folder", scratch / "total"

    def do() -> int:
        code, count = command(verb, scratch, -1, 0, traced)
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


def case(
    verb: str, seed: int, expected: dict[str, bytes], total: int, scratch: Path, traced: Sequence[str]
) -> str | None:
    """One interrupt; what is wrong with it, if anything is."""
    dice = random.Random(f"{verb} {seed}")
    at, number = dice.randrange(1, total + 1), dice.choice((signal.SIGINT, signal.SIGTERM))
    folder, sent, log = scratch / "folder", scratch / "sent", scratch / "log"
    fresh(folder)
    sent.unlink(missing_ok=True)
    begin = time.monotonic()
    code = forked(lambda: command(verb, scratch, at, number, traced)[0], log, LIMIT, sent)
    told = f"{verb} {seed}: {signal.Signals(number).name} at {at} of {total}, {time.monotonic() - begin:.1f} s"
    if code is None:
        return f"{told}: still alive"
    if code not in (0, 130):
        return f"{told}: exit code {code}\n{log.read_text()}"
    if code == 130 and "interrupted" not in log.read_text():
        return f"{told}: nothing was said"
    if code == 130 and not contents(folder):
        # The next run finds what the first one found.
        return None
    again = forked(lambda: command(verb, scratch, 0, 0, ())[0], log, 300)
    if again != 0:
        return f"{told}: the next run ends with {again}\n{log.read_text()}"
    if contents(folder) != expected:
        return f"{told}: the next run gives other bytes"
    return None


def main() -> int:
    """The command line. Returns how many cases failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="+", choices=("calibrate", "gptq", "eval"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--only", action="append", help="part of the path of files that signals are placed in")
    asked = parser.parse_args()
    traced = asked.only or TRACED
    preload()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_model(scratch / "model")
        for verb in asked.verbs:
            expected, total = measured(verb, scratch, traced)
            print(f"{verb}: {total} bytecodes", flush=True)
            for seed in range(asked.first, asked.first + asked.cases):
                if seed % 100 == 0:
                    print(f"{verb}: at {seed}", flush=True)
                problem = case(verb, seed, expected, total, scratch, traced)
                if problem is not None:
                    failed += 1
                    print(problem, flush=True)
        print(f"{failed} failed of {asked.cases * len(asked.verbs)}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

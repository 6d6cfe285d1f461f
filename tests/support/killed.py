"""A command that a kill ends while it saves passes, and the file that it leaves, changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from openquant.streaming import pass_checkpoint

_ROOT = Path(__file__).parent.parent.parent
# Saves passes after every layer, and is killed as a file gets its name for the time that the first argument says.
_PROGRAM = """
import os, signal, sys
from openquant.evaluation import generate
from openquant.streaming import pass_checkpoint
from openquant.cli.commands import main
generate.BUILT_IN = 1
pass_checkpoint.EVERY = pass_checkpoint.TIMES = 0
replace, left = os.replace, [int(sys.argv[1])]
def replaced(old, new, **more):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new, **more)
os.replace = replaced
main(sys.argv[2:])
"""


def run_killed(saves: int, *words: object, cwd: Path | None = None) -> str:
    """Run `openquant` until it is killed, and return what it said.

    Args:
        saves: as a file gets its name for the so-manieth time, the process is killed.
        words: words of the command line. One prompt is answered at most.
        cwd: the working directory.
    """
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", _PROGRAM, str(saves), *map(str, words)]
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stderr


def parts_of_passes(data: bytes) -> list[bytes]:
    """The parts of a file of passes: its state, further bytes, and the arguments of each pass."""
    file, parts = BytesIO(data[len(pass_checkpoint._KIND) : -32]), []
    while len(part := pass_checkpoint._read_part(file)) or file.tell() < len(file.getbuffer()):
        parts.append(part)
    return parts


def sealed_passes(parts: Iterable[bytes | memoryview]) -> bytes:
    """A file of passes of these parts, with its digest."""
    return b"".join(pass_checkpoint._pieces(parts))


def change_passes(
    path: Path,
    state: Callable[[dict[str, Any]], object] = dict,
    own: Callable[[bytes], bytes] = bytes,
    calls: Callable[[list[Any]], object] = list,
) -> None:
    """Change what a file of passes says and has, and give it the digest of that.

    Args:
        path: the file.
        state: changes what it says of its run. A list that it returns takes the place of that.
        own: returns other further bytes.
        calls: changes the arguments of the passes.
    """
    said, further, *arguments = parts_of_passes(path.read_bytes())
    facts, values = pass_checkpoint._load(said), [pass_checkpoint._load(each) for each in arguments]
    listed = state(facts)
    calls(values)
    changed = listed if isinstance(listed, list) else facts
    dump = pass_checkpoint._dump
    path.write_bytes(sealed_passes([dump(changed), own(further), *map(dump, values)]))

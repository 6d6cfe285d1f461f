"""A command that a kill ends while it saves passes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from . import starting

_ROOT = Path(__file__).parent.parent.parent
# Saves passes after every layer, and is killed as a file gets its name for the time that the first argument says.
_PROGRAM = """
import os, signal, sys
from openquant.evaluation import as_served
from openquant.streaming import pass_checkpoint
from openquant.cli.commands import main
as_served.BUILT_IN = 1
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
    ended = starting.run(["-c", _PROGRAM, saves, *words], cwd=cwd or Path.cwd(), env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stderr

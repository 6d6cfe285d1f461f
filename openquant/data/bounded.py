"""Programs that came with a model, run in a process of their own: with little of everything, and told of nothing else.

ask("openquant.data.templates", {"template": "{{ 1 + 1 }}", ..}, cpu=10)     # what its answer() returns
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class EndlessError(Exception):
    """It took the time that it may, and the system ended it."""


class FailedError(Exception):
    """It ended without an answer; says how."""


def ask(module: str, asked: Mapping[str, Any], cpu: int) -> Any:
    """What a module's `answer(asked)` returns in a process of its own, where it is to call `limit` soon.

    Args:
        module: by its full name.
        asked: as JSON has it, and so is what comes back.
        cpu: seconds of a processor that it will allow itself.

    Raises:
        EndlessError: it was ended by the system.
        FailedError: it gave no answer.
    """
    # The directory somebody stands in is no place to import from, so Python looks only where this one does.
    script = f"import sys; sys.path[:] = sys.argv[1:]; import {module} as m, {__name__} as b; b.serve(m.answer)"
    # More threads would only reserve memory.
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, *map(os.path.abspath, sys.path)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env={**os.environ, **alone, "HF_HUB_OFFLINE": "1"},
            timeout=60 + 4 * cpu,
        )
    except subprocess.TimeoutExpired:
        raise EndlessError from None
    # The kernel's own ends: of processor time, and by a machine that has no memory left.
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise EndlessError
    try:
        return json.loads(done.stdout)
    except ValueError:
        told = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise FailedError(f"exit code {done.returncode}, {told}") from None


def serve(answer: Callable[[Any], Any]) -> None:
    """What the process does: answer what stdin asks for."""
    # What a library prints must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    found = answer(json.load(sys.stdin))
    with os.fdopen(out, "w") as stream:
        json.dump(found, stream)


def limit(cpu: int, memory: int) -> None:
    """Bound this process from here on.

    Args:
        cpu: seconds of a processor.
        memory: bytes beside what it has already.
    """
    import resource

    def bound(what: int, most: int) -> None:
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # Some systems know the limit and refuse to set it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))

    bound(resource.RLIMIT_CORE, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)

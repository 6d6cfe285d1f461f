"""A command from its first line to its last: signals at any moment, and what it does where the system gives it little."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT, heed_ctrl_c
from openquant.errors import OutputError
from openquant.machine import without_memory

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python that heeds Ctrl-C."""
    command, env = [sys.executable, *map(str, words)], {**ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=heed_ctrl_c, env=env)


def started(*words: object) -> subprocess.Popen[str]:
    command, pipes = [sys.executable, *map(str, words)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes, text=True, preexec_fn=heed_ctrl_c)


def test_the_installed_commands_end_in_two_lines_while_they_import(tmp_path: Path) -> None:
    """What pip writes for an entry point."""
    written = (ROOT / "pyproject.toml").read_text()
    for name, number in (("compress-fp8", "SIGTERM"), ("openquant", "SIGINT")):
        (tmp_path / "argparse.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.{number})\n")
        [(module, function)] = re.findall(rf'^{name} = "(.*):(.*)"$', written, re.MULTILINE)
        script = tmp_path / name
        script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        done = python(script, "--version")
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "error: interrupted\nhint: run the same command again\n"
        # Programs get the same as JSON.
        told = json.loads(python(script, "verify", "x", "--json").stdout)
        assert told == {"error": "interrupted", "hint": "run the same command again"}


def test_the_package_sets_no_environment_variable() -> None:
    code = "import os; before = dict(os.environ); import openquant.api, openquant.cli.commands; assert os.environ == before"
    assert python("-c", code).returncode == 0


def test_memory_that_ran_out_is_found_behind_other_errors() -> None:
    assert not without_memory(OutputError("the disk is full", "free some space"))
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise OutputError("a file cannot be written", "try again") from None
    except OutputError as error:
        assert without_memory(error)
    # As the system's loader says it of a library.
    assert without_memory(ImportError("libblas.so: failed to map segment from shared object"))


# A verb whose cleanup never ends, in a C library that starts its wait again after each signal.
STUCK = """
import ctypes, sys, time
from openquant.cli import commands

def stuck(call):
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    try:
        print("busy", file=sys.stderr, flush=True)
        time.sleep(300)
    finally:
        print("cleanup", file=sys.stderr, flush=True)
        library.pthread_mutex_lock(mutex)

commands.VERBS["verify"] = stuck
sys.exit(commands.main(["verify", "x", "--json"]))
"""


def test_a_second_signal_ends_a_command_that_is_stuck_in_its_cleanup() -> None:
    process = started("-c", STUCK)
    try:
        assert process.stderr is not None
        for line, number in (("busy", signal.SIGINT), ("cleanup", signal.SIGTERM)):
            assert process.stderr.readline() == f"{line}\n"
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (-signal.SIGTERM, "", "")


def test_a_job_in_the_background_keeps_ignoring_ctrl_c(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from openquant.cli import commands\n"
        "def verify(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "commands.VERBS['verify'] = verify\n"
        "commands.main(['verify', 'x'])\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (130, "still here\n")
    assert done.stderr == "error: interrupted\nhint: run the same command again: it starts from the beginning\n"


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP than GCC's")
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(subtests: pytest.Subtests) -> None:
    for environment, spins in [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")]:
        with subtests.test(environment=environment, spins=spins):
            words = ["eval", EXAMPLE, "--source", EXAMPLE, "--samples", "1", "--length", "16", "--text", "missing"]
            # OpenMP prints its settings as it is loaded.
            done = python("-m", "openquant", *words, OMP_DISPLAY_ENV="verbose", **environment)
            assert done.returncode == 2
            assert re.findall("GOMP_SPINCOUNT *= *'(.*)'", done.stderr) == [spins]

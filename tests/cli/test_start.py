"""A command from its first line to its last: signals at any moment, and what it does where the system gives it little."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT, heed_ctrl_c
from openquant.errors import OutputError
from openquant.machine import reached_limit
from support import small_checkpoints

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def python(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python that heeds Ctrl-C."""
    command, env = [sys.executable, *map(str, words)], {**ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=heed_ctrl_c, env=env)


def started(*words: object) -> subprocess.Popen[str]:
    command, pipes = [sys.executable, *map(str, words)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes, text=True, preexec_fn=heed_ctrl_c)


INTERRUPTED = {"error": "interrupted", "hint": "run the same command again to continue"}

# Runs the command once for each line of ours that it goes through, and once more for its end, and sends itself a signal
# there. Forked, since what takes long is to start Python and load numpy.
AT_EACH_LINE = """
import atexit, json, os, runpy, signal, sys
import numpy, argparse

OURS = ("compress_fp8.py", *(f"openquant/{name}.py" for name in ("cli/start", "options", "cli/arguments", "cli/console", "cli/commands")))
script, folder, source = sys.argv[1:]

def command(moment):
    # Of the many lines that only set things up fewer than of the others.
    count, lines = 0, 0
    number = signal.SIGTERM if moment % 2 else signal.SIGINT
    def at_line(frame, event, argument):
        nonlocal count, lines
        handler = getattr(signal.getsignal(signal.SIGTERM), "__name__", None)
        if event == "line" and handler is not None:
            lines += 1
            if lines % (SETTING_UP if handler == "leave" else OTHERS) == 1:
                count += 1
                if count == moment:
                    os.kill(os.getpid(), number)
        return at_line
    def at_call(frame, event, argument):
        return at_line if frame.f_code.co_filename.endswith(OURS) else None
    def at_end():
        sys.settrace(None)
        if count < moment:
            with open(f"{folder}/last", "w"):
                os.kill(os.getpid(), number)
    atexit.register(at_end)
    sys.argv = [script, "-m", source, "-o", f"{folder}/out{moment}", "--json", "--workers", "1"]
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}{moment}", os.O_CREAT | os.O_WRONLY), stream)
    sys.settrace(at_call)
    runpy.run_path(script, run_name="__main__")

moment = 0
while not os.path.exists(f"{folder}/last"):
    moment += 1
    child = os.fork()
    if child == 0:
        command(moment)
        os._exit(99)
    status = os.waitpid(child, 0)[1]
    ends = os.waitstatus_to_exitcode(status)
    said = [open(f"{folder}/{name}{moment}").read() for name in ("stdout", "stderr")]
    print(json.dumps([ends, *said]))
"""


def test_a_signal_at_any_line_of_the_command_ends_it_in_two_lines(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", shards=2)
    code = AT_EACH_LINE.replace("SETTING_UP", "293").replace("OTHERS", "11")
    done = python("-c", code, ROOT / "compress_fp8.py", tmp_path, source, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) > 30
    for code, stdout, stderr in ends:
        # One object, or at the moment when it was about to be written none; never two.
        assert stdout.count("\n") == 1 or (stdout == "" and code == 130), stderr
        told = json.loads(stdout or json.dumps(INTERRUPTED))
        if code == 130:
            assert told == INTERRUPTED or told["shards"] == 2
            assert stderr == "error: interrupted\nhint: run the same command again to continue\n"
        else:
            assert (code, stderr, told["shards"]) == (0, "", 2)
    # At the end, when Python takes itself down, nothing changes any more.
    assert ends[-1][0] == 0
    assert ends[0][0] == 130


CONTINUE, BEGIN = " to continue", ": it starts from the beginning"
LISTENING = {
    "compress-fp8 --version": CONTINUE,
    "openquant --version": CONTINUE,
    "openquant eval": CONTINUE,
    "openquant verify": BEGIN,
    "openquant fit": BEGIN,
    "openquant fit --search": CONTINUE,
    "openquant push": CONTINUE,
    "openquant calibrate": CONTINUE,
    "openquant dequantize": CONTINUE,
}


def test_the_installed_commands_listen_first(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """What pip writes for an entry point, interrupted while it imports the command line."""
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    written = (ROOT / "pyproject.toml").read_text()
    for command, hint in LISTENING.items():
        with subtests.test(command):
            name, *words = command.split()
            [(module, function)] = re.findall(rf'^{name} = "(.*):(.*)"$', written, re.MULTILINE)
            script = tmp_path / name
            script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
            done = python(script, *words)
            assert (done.returncode, done.stdout) == (130, "")
            assert done.stderr == f"error: interrupted\nhint: run the same command again{hint}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP than GCC's")
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(subtests: pytest.Subtests) -> None:
    for environment, spins in [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")]:
        with subtests.test(environment=environment, spins=spins):
            words = ["eval", EXAMPLE, "--source", EXAMPLE, "--samples", "1", "--length", "16", "--text", "missing"]
            # OpenMP prints its settings as it is loaded.
            done = python("-m", "openquant", *words, OMP_DISPLAY_ENV="verbose", **environment)
            assert done.returncode == 2
            assert re.findall("GOMP_SPINCOUNT *= *'(.*)'", done.stderr) == [spins]


def test_the_package_sets_no_environment_variable() -> None:
    code = "import os; before = dict(os.environ); import openquant.api, openquant.cli.commands; assert os.environ == before"
    assert python("-c", code).returncode == 0


def limited(kind: int, value: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "compress_fp8.py"), *map(str, arguments)],
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_too_little_memory_is_an_error_that_names_the_limit(subtests, tmp_path, source):
    for number, kilobytes in enumerate([60_000, 80_000, 100_000, 130_000, 160_000]):
        with subtests.test(kilobytes=kilobytes):
            here = tmp_path / str(number)
            done = limited(resource.RLIMIT_AS, kilobytes << 10, "-m", source, "-o", here / "out", "-q")
            if done.returncode != 0:
                assert done.returncode == 2
                error, hint = done.stderr.splitlines()
                assert error.endswith(f"memory ran out: ulimit -v is {kilobytes}")
                assert hint == "hint: raise that limit, or use fewer --workers"
            assert kilobytes > 100_000 or done.returncode == 2
            assert (here / "out" / "config.json").exists() == (done.returncode == 0)


def test_too_few_files_are_an_error_that_names_the_limit(subtests, tmp_path, source):
    for number, files in enumerate([6, 7, 8]):
        with subtests.test(files=files):
            here = tmp_path / str(number)
            done = limited(resource.RLIMIT_NOFILE, files, "-m", source, "-o", here / "out", "-q")
            assert done.returncode == 2
            error, hint = done.stderr.splitlines()
            assert f"no more files can be opened: ulimit -n is {files}" in error
            assert hint == "hint: raise that limit, then run the same command again"
            assert not (here / "out" / "config.json").exists()


def test_limits_behind_errors() -> None:
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = reached_limit(RuntimeError("can't start new thread"))
    assert found is not None
    if processes != resource.RLIM_INFINITY:
        assert found.message.startswith(f"no thread can be started: ulimit -u is {processes}")
    assert reached_limit(RuntimeError("another")) is None
    assert reached_limit(OutputError("the disk is full", "free some space")) is None
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise OutputError("a file cannot be written", "try again") from None
    except OutputError as error:
        told = reached_limit(error)
    assert told is not None
    assert told.message.startswith("a file cannot be written (memory ran out: ")
    # As the system's loader says it of a library.
    loading = ImportError("libblas.so: failed to map segment from shared object")
    assert reached_limit(loading) is not None


def test_a_job_in_the_background_keeps_ignoring_ctrl_c(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from openquant.cli.start import listen\n"
        "listen()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('still here', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (130, "still here\n")
    assert done.stderr == "error: interrupted\nhint: run the same command again to continue\n"


# A verb whose cleanup never ends: in Python, or in a C library that starts its wait again after each signal.
STUCK = """
import ctypes, sys, time
from openquant.cli.start import listen
listen()
from openquant.cli import commands

def stuck(call):
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    try:
        print("busy", file=sys.stderr, flush=True)
        time.sleep(300)
    finally:
        print("cleanup", file=sys.stderr, flush=True)
        if sys.argv[1] == "python":
            time.sleep(300)
        library.pthread_mutex_lock(mutex)

commands.VERBS["verify"] = stuck
sys.exit(commands.main(["verify", "x", "--json"]))
"""


def test_a_second_signal_ends_a_command_that_is_stuck_in_its_cleanup(subtests: pytest.Subtests) -> None:
    for where in ["python", "library"]:
        with subtests.test(where=where):
            process = started("-c", STUCK, where)
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


def test_a_signal_after_the_result_ends_a_command_that_python_waits_for() -> None:
    code = (
        "import sys, threading, time\n"
        "from openquant.cli.start import listen\n"
        "listen()\n"
        "from openquant.cli import commands\n"
        "commands.VERBS['verify'] = lambda *_: 1\n"
        "code = commands.main(['verify', 'x'])\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "print('done', flush=True)\n"
        "sys.exit(code)\n"
    )
    process = started("-c", code)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=60), process.returncode) == (("", ""), 1)
    finally:
        process.kill()
        process.wait()

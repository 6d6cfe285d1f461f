"""Starts commands as forks of a process that has imported torch and transformers, which takes a start from seconds to tenths.

The process is started once for all that run tests at the same time (a worker of pytest-xdist), and imports openquant too,
but for mutants, which each change it. A command whose environment differs in what those imports read is started as usual.

    starting.run([ROOT / "compress_fp8.py", "-m", source], cwd=here, env=os.environ)
    python tests/support/starting.py SOCKET MODULE...     # the process
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# Names the socket of a process that runs already.
ADDRESS = "OPENQUANT_STARTER"
IMPORTED = (
    *("numpy", "torch", "tqdm", "jinja2", "yaml", "huggingface_hub", "safetensors.torch", "tokenizers"),
    *(
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.tokenization_utils_tokenizers",
    ),
)
OURS = ("openquant.api", "openquant.cli.start", "openquant.cli.commands")
# Processes that outlive the tests they work for, which count with all that they have started.
others: set[int] = set()
# Processor seconds of the commands that were run to their end, which are nobody's children here.
seconds = 0.0
_processes: list[subprocess.Popen[bytes]] = []  # Kept, since the process ends with its stdin.
# What Python and these modules read as they start: another value needs a start of its own.
READ_AT_IMPORT = re.compile(r"(PYTHON(?!PATH|DONTWRITEBYTECODE)|HF_|HUGGINGFACE|TRANSFORMERS|TORCH|OMP_|MKL_|OPENBLAS|NUMBA|TQDM|LC_|LANG).*|SSL_.*|HOME|.*_(PROXY|proxy)")  # fmt: skip

# What commands set as they start: one that ran in this process leaves it here.
SET_BY_COMMANDS = {("HF_HUB_DISABLE_XET", "1"), ("HF_HUB_VERBOSITY", "error"), ("TORCH_CPP_LOG_LEVEL", "FATAL")}


def run(
    arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS...` to its end, with nothing on stdin; its first argument is a script, `-m` and a module, or `-c` and code."""
    words = [str(argument) for argument in arguments]
    server_address = address()
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    customized = any(Path(part, "sitecustomize.py").exists() for part in path if part)
    if customized or _read_at_import(env) != json.loads(Path(f"{server_address}.json").read_text()):
        return subprocess.run(
            [sys.executable, *words],
            cwd=cwd,
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, socket.socket(socket.AF_UNIX) as server:
        server.connect(server_address)
        request = json.dumps({"words": words, "cwd": str(cwd), "env": dict(env)}).encode()
        descriptors = array.array("i", [out.fileno(), err.fileno()])
        server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        server.sendall(request)
        child = int.from_bytes(server.recv(8), "little")

        server.settimeout(timeout)
        try:
            code, microseconds = struct.unpack("<qq", server.recv(16))
        except TimeoutError:
            os.killpg(child, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout) from None

        global seconds
        seconds += microseconds / 1e6
        out.seek(0), err.seek(0)
        texts = [file.read().decode().replace("\r\n", "\n").replace("\r", "\n") for file in (out, err)]
        return subprocess.CompletedProcess([sys.executable, *words], code, *texts)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if READ_AT_IMPORT.fullmatch(name)}
    return dict(found.items() - SET_BY_COMMANDS)


def address(imported: Sequence[str] = (*IMPORTED, *OURS)) -> str:
    """The socket of the process, which is started if nobody has; what it read of the environment is beside it."""
    if ADDRESS not in os.environ:
        socket_path = f"{tempfile.mkdtemp(prefix='openquant-starter-')}/socket"
        Path(f"{socket_path}.json").write_text(json.dumps(_read_at_import(os.environ)))
        process = subprocess.Popen(
            [sys.executable, __file__, socket_path, *imported],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        _processes.append(process)
        while not Path(socket_path).exists():
            assert process.poll() is None, "the process that starts commands has ended"
            time.sleep(0.02)
        os.environ[ADDRESS] = socket_path
    return os.environ[ADDRESS]


# The process.


def serve(address: str, *imported: str) -> None:
    """Wait for commands on a socket, and start each in a fork, until stdin ends."""
    for name in imported:
        importlib.import_module(name)
    # Nobody waits for those that wait for a command.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Else each fork goes through all that was imported, again and again.
    gc.freeze()
    atexit.register(shutil.rmtree, Path(address).parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        Path(f"{address}.new").rename(address)
        while server in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork() == 0:
                atexit.unregister(shutil.rmtree)
                server.close()
                _attend(client)
            client.close()


def _attend(client: socket.socket) -> NoReturn:
    """Start a command, and tell its client its process and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size = array.array("i", [0, 0]).itemsize * 2
    head, [(_, _, descriptors)], _, _ = client.recvmsg(8, socket.CMSG_SPACE(size))
    request = json.loads(client.makefile("rb").read(int.from_bytes(head, "little")))
    child = os.fork()
    if child == 0:
        client.close()
        _become(request, array.array("i", descriptors))

    client.sendall(child.to_bytes(8, "little"))
    _, status, usage = os.wait4(child, 0)
    microseconds = int(1e6 * (usage.ru_utime + usage.ru_stime))
    with suppress(BrokenPipeError):
        client.sendall(struct.pack("<qq", os.waitstatus_to_exitcode(status), microseconds))
    os._exit(0)


def _become(request: dict[str, object], descriptors: Sequence[int]) -> NoReturn:
    """Run a command in this process as Python would."""
    code = 1
    try:
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for descriptor, place in zip(descriptors, (1, 2), strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        code = _run(request["words"])  # type: ignore[arg-type]
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    """The exit code of `python WORDS...`."""
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"} & {*os.environ}:
        importlib.import_module("coverage").process_startup()
    try:
        if words[0] == "-c":
            sys.path[:1] = ["", *path]
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.path[:1] = [str(Path.cwd()), *path]
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:1] = [str(Path(words[0]).parent), *path]
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


if __name__ == "__main__":
    serve(*sys.argv[1:])

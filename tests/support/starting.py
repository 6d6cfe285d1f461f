"""Starts commands, and ranks without a launcher, as forks of a process that has imported torch and transformers.

That takes a start from seconds to hundredths. All that run tests at the same time share the process (conftest.py), which
imports nothing before the first command.

    starting.run([ROOT / "compress_fp8.py", "-m", source], cwd=here, env=os.environ)
    python tests/support/starting.py SOCKET MODULE...     # the process
"""

from __future__ import annotations

import array
import atexit
import functools
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
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

ROOT = Path(__file__).parents[2]
# Names the socket of a process that runs already.
ADDRESS = "OPENQUANT_STARTER"
IMPORTED = (
    "pytest", "asyncio", "filelock", "httpx2", "httpx", "numpy", "torch", "torch.distributed", "tqdm.auto", "jinja2", "yaml",
    "huggingface_hub.hf_api", "huggingface_hub._snapshot_download", "huggingface_hub.community", "safetensors.torch",
    "tokenizers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers",
    "openquant.api", "openquant.__main__", "openquant.cli.commands", "openquant.streaming.model",
)  # fmt: skip
# As it was before any test changed it: the process is started by whichever test needs it first.
ENVIRONMENT = dict(os.environ)
# Processes that outlive the tests they work for, which count with all that they have started.
others: set[int] = set()
# Processor seconds of the commands that have ended, which are nobody's children here.
seconds = 0.0
# What Python and these modules read as they start: another value needs a start of its own. The Hub's client reads its
# settings again in each fork.
READ_AT_IMPORT = re.compile(r"(PYTHON(?!PATH|DONTWRITEBYTECODE)|TRANSFORMERS|TORCH(?!_CPP)|OMP_|MKL_|OPENBLAS|NUMBA|TQDM|LC_|LANG).*|SSL_.*|HOME|.*_(PROXY|proxy)")  # fmt: skip


class Command:
    """`python WORDS...` in a fork, to be used like a subprocess.Popen whose streams are pipes.

    Its first word is a script, `-m` before a module, or `-c` before code. It has nothing on stdin.
    """

    def __init__(self, words: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> None:
        self.args = [str(word) for word in words]
        pipes = os.pipe(), os.pipe()
        self.stdout, self.stderr = (open(end) for end, _ in pipes)  # noqa: SIM115
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address())
        request = json.dumps({"words": self.args, "cwd": str(cwd), "env": dict(environment)}).encode()
        descriptors = array.array("i", [its_end for _, its_end in pipes])
        self._server.sendmsg(
            [len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        self._server.sendall(request)
        for its_end in descriptors:
            os.close(its_end)

        self.pid = int.from_bytes(self._server.recv(8), "little")
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self, timeout: float = 0) -> int | None:
        """Its exit code, once it has ended, for which this waits so many seconds."""
        global seconds
        if self._returncode is None and select.select([self._server], [], [], timeout)[0]:
            self._returncode, microseconds = struct.unpack("<qq", self._server.recv(16))
            seconds += microseconds / 1e6
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it prints that was not read yet."""
        read = ["", ""]

        def drain(number: int, stream: TextIO) -> None:
            read[number] = stream.read()

        threads = [threading.Thread(target=drain, args=each) for each in enumerate((self.stdout, self.stderr))]
        for thread in threads:
            thread.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        finally:
            for thread in threads:
                thread.join()
        return read[0], read[1]

    def close(self) -> None:
        self.kill()
        self.poll(60)
        for each in (self.stdout, self.stderr, self._server):
            each.close()


def finish(command: Command, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    with closing(command):
        out, err = command.communicate(timeout)
        return subprocess.CompletedProcess(command.args, command.wait(0), out, err)


def run(
    arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS...` to its end; where the environment differs in what is read at import, not as a fork."""
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    customized = any(Path(part, "sitecustomize.py").exists() for part in path if part)
    if customized or _read_at_import(env) != json.loads(Path(f"{address()}.json").read_text()):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return finish(Command(arguments, cwd, env), timeout)


def forked(script: Path, *arguments: object, cwd: Path, environment: Mapping[str, str], before: str = "") -> Command:
    """`python SCRIPT ARGUMENTS`, where that is openquant/__main__.py or compress_fp8.py; `before` is run first."""
    environment = {"SSL_CERT_FILE": str(one_certificate()), **environment}
    main = "compress_main" if script.stem == "compress_fp8" else "main"
    code = f"import sys\nsys.argv[0] = {str(script)!r}\n{before}\nfrom openquant.__main__ import {main}\nsys.exit({main}())\n"
    return Command(["-c", FROM_ROOT + code, *arguments], cwd, environment)


# What a command that is given as code imports first.
FROM_ROOT = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"


def compressing(arguments: Sequence[object], environment: Mapping[str, str], first: str = "") -> Command:
    """`compress_fp8.py ARGUMENTS`, after the code `first`."""
    code = f"sys.argv[0] = 'compress_fp8.py'\n{first}\nfrom openquant.cli.commands import compress_main\nsys.exit(compress_main())\n"
    return Command(["-c", FROM_ROOT + code, *arguments], Path.cwd(), environment)


@functools.cache
def one_certificate() -> Path:
    """Enough for a client that asks a server on this machine; reading all of them takes as long as many a command."""
    import certifi

    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = Path(tempfile.mkdtemp(prefix="certificate-")) / "one.pem"
    atexit.register(shutil.rmtree, path.parent)
    path.write_text(first + end)
    return path


class Job:
    """Ranks that meet at one port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.begun: list[Command] = []

    def start(self, rank: int, *arguments: object, size: int = 2, first: str = "", **more: str) -> Command:
        """One rank; `first` is run before the command."""
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
        environment |= {"MASTER_PORT": str(self.port), **more}
        self.begun.append(compressing(arguments, environment, first))
        return self.begun[-1]

    def finish(self, size: int, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        """All of a job to their end, as one process: the worst exit code and what all have printed."""
        ranks = [self.start(rank, *arguments, size=size, **more) for rank in range(size)]
        printed = [rank.communicate(120) for rank in ranks]
        out, err = ("".join(texts) for texts in zip(*printed, strict=True))
        return subprocess.CompletedProcess(arguments, max(rank.wait(0) for rank in ranks), out, err)


@contextmanager
def job() -> Iterator[Job]:
    """A job whose ranks do not outlive the block."""
    found = Job()
    try:
        yield found
    finally:
        for rank in found.begun:
            rank.close()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_IMPORT.fullmatch(name)}


def address() -> str:
    """The socket of the process, which is started if nobody has; what it read of the environment is beside it."""
    if ADDRESS not in os.environ:
        socket_path = f"{tempfile.mkdtemp(prefix='openquant-starter-')}/socket"
        Path(f"{socket_path}.json").write_text(json.dumps(_read_at_import(ENVIRONMENT)))
        process = subprocess.Popen(
            [sys.executable, __file__, socket_path, *IMPORTED],
            # torch logs as it does for the command, which sets this before it imports torch.
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(_end, process)
        while not Path(socket_path).exists():
            assert process.poll() is None, "the process that starts commands has ended"
            time.sleep(0.02)
        os.environ[ADDRESS] = socket_path
    return os.environ[ADDRESS]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process ends with its stdin."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


# The process.


def serve(address: str, *imported: str) -> None:
    """Wait for commands on a socket, and start each in a fork, until stdin ends."""
    atexit.register(shutil.rmtree, Path(address).parent)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        Path(f"{address}.new").rename(address)
        if sys.stdin in select.select([server, sys.stdin], [], [])[0]:
            return
        _import(imported)
        while True:
            ready = select.select([server, sys.stdin, ended], [], [])[0]
            if sys.stdin in ready:
                return
            if ended in ready:
                os.read(ended, 4096)
                _tell(clients)
            if server in ready:
                client, _ = server.accept()
                clients[_start(client, [server, *clients.values()])] = client


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    # What torch's 176 libraries and its compiler do at exit took longer than many a command.
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)
    # Else each fork goes through all that was imported, again and again.
    gc.freeze()


def _start(client: socket.socket, inherited: Sequence[socket.socket]) -> int:
    """Start a command, tell its client its process, and return that."""
    size = array.array("i", [0, 0]).itemsize * 2
    head, [(_, _, sent)], _, _ = client.recvmsg(8, socket.CMSG_SPACE(size))
    request = json.loads(client.makefile("rb").read(int.from_bytes(head, "little")))
    descriptors = array.array("i", sent)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        atexit.unregister(shutil.rmtree)
        for each in (client, *inherited):
            each.close()
        _become(request, descriptors)

    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(BrokenPipeError):
        client.sendall(child.to_bytes(8, "little"))
    return child


def _tell(clients: dict[int, socket.socket]) -> None:
    """Tell the clients of commands that have ended their exit codes, and the processor time they took."""
    while clients:
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child == 0:
            return
        microseconds = int(1e6 * (usage.ru_utime + usage.ru_stime))
        with clients.pop(child) as client, suppress(BrokenPipeError):
            client.sendall(struct.pack("<qq", os.waitstatus_to_exitcode(status), microseconds))


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
        # The streams of the process wrote to files, and these are pipes.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        # A shell has its background jobs ignore it, and this run may be one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        importlib.reload(importlib.import_module("huggingface_hub.constants"))
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

"""Ranks without a launcher, and commands, forked from a process that has imported what they need.

Each would take longer for that than for all else.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .starting import others

ROOT = Path(__file__).parents[2]
FORKS = get_context("forkserver")
# What a conversion imports. The Hub's client takes its settings from the environment as it is imported, so each process
# has it take its own; httpx2 or httpx, whichever it has.
COMMANDS = (
    "pytest", "numpy", "openquant.api", "openquant.cli.commands", "asyncio", "filelock", "httpx2", "httpx", "tqdm.auto",
    "yaml", "huggingface_hub.hf_api", "huggingface_hub._snapshot_download", "huggingface_hub.community",
)  # fmt: skip
# What running a model does too: the larger a process, the longer a fork takes.
MODELS = (
    *COMMANDS, "torch.distributed", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers", "openquant.streaming.model",
)  # fmt: skip


class Rank:
    """A started process, to be used like a subprocess.Popen whose streams are pipes."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], first: str, imported: Sequence[str] = COMMANDS
    ) -> None:
        self.args = list(words)
        ready(imported)
        out, its_out = FORKS.Pipe(duplex=False)
        err, its_err = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=_run, args=(words, dict(environment), first, its_out, its_err))
        self.process.start()
        its_out.close()
        its_err.close()
        self._ends = out, err
        self.stdout, self.stderr = (open(end.fileno(), closefd=False) for end in self._ends)  # noqa: SIM115

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has printed that was not read yet, which must fit into pipes."""
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def close(self) -> None:
        self.kill()
        self.process.join()
        for each in (self.stdout, self.stderr, *self._ends):
            each.close()


def _run(words: Sequence[str], environment: dict[str, str], first: str, out: Connection, err: Connection) -> None:
    # Else each goes through all that was imported, again and again.
    gc.freeze()
    for stream, end in enumerate((out, err), 1):
        os.dup2(end.fileno(), stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.reload(importlib.import_module("huggingface_hub.constants"))
    sys.argv = ["compress_fp8.py", *words]
    exec(first, {"__name__": "__main__"})
    from openquant.cli.commands import compress_main

    sys.exit(compress_main())


def forked(
    script: Path,
    *arguments: object,
    cwd: Path,
    environment: Mapping[str, str],
    before: str = "",
    imported: Sequence[str] = COMMANDS,
) -> Rank:
    """`python SCRIPT ARGUMENTS`, where that is openquant/__main__.py or compress_fp8.py; `before` is run first."""
    name = "compress_main" if script.stem == "compress_fp8" else "main"
    first = f"""
import os, sys
from openquant.cli.start import {name}
{before}
os.chdir({str(cwd)!r})
sys.argv[0] = {str(script)!r}
sys.exit({name}())
"""
    environment = {"SSL_CERT_FILE": str(one_certificate()), **environment}
    return Rank([str(argument) for argument in arguments], environment, first, imported)


@functools.cache
def one_certificate() -> Path:
    """Enough for a client that asks a server on this machine; reading all of them takes as long as many a command."""
    import certifi

    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = Path(tempfile.mkdtemp(prefix="certificate-")) / "one.pem"
    atexit.register(shutil.rmtree, path.parent)
    path.write_text(first + end)
    return path


def finish(process: Rank, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    try:
        out, err = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        process.close()


class Job:
    """Ranks that meet at one port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.begun: list[Rank] = []

    def start(self, rank: int, *arguments: object, size: int = 2, first: str = "", **more: str) -> Rank:
        """One rank; `first` is run before the command."""
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
        environment |= {"MASTER_PORT": str(self.port), **more}
        self.begun.append(Rank([str(argument) for argument in arguments], environment, first, MODELS))
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


def ready(imported: Sequence[str]) -> None:
    """Have a process from which to fork that has imported these, in place of one that has imported others."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        if list(imported) == server._preload_modules:
            return
        others.discard(server._forkserver_pid)
        server._stop()
    FORKS.set_forkserver_preload(list(imported))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # As the command has it before it imports torch.
    with patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="FATAL", PYTHONPATH=path):
        forkserver.ensure_running()
    others.add(server._forkserver_pid)

"""The runs of the page: one at a time, each a subprocess of the command line, others in a queue.

A run has a directory of its own, in which its commands work. It holds the run's journal (`run.json`), the log of its
commands, and what they write, until the output is finished and moves beside it. So a cancelled run leaves nothing, and
a server that starts again finds every run: those that still compute go on, and those that ended can be continued.

    runs = Runs(Path("models"))
    run = runs.add(owner, "Qwen/Qwen3-8B", choice.steps(roots), token=None)
    runs.status(run)            # its state, place, progress, memory

Tokens are kept in memory, and given to a command in its environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import OutputError, UsageError
from ..files.destination import write_atomic
from .choices import OUTPUT, shown

FOLDER = ".openquant-web"
# Begins the line of a log that has a command.
PROMPT = "$ "
JOURNAL, LOG, LOCK, REPORT = "run.json", "log", "lock", "report.html"
# Seconds between two looks at a process, and for which one that is cancelled may still run.
PAUSE, GRACE = 0.1, 10.0
# Bytes at the end of a log that the page shows.
SHOWN_LOG = 1 << 16
MOST_RUNS = 200
WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
# What huggingface.co's tokens look like.
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")


@dataclass(frozen=True)
class PageRun:
    """A run, as its journal has it.

    Attributes:
        id: name of its directory.
        owner: digest of the browser that started it.
        model: the model, for the list of runs.
        steps: its commands, as words after `openquant`.
        state: WAITING, RUNNING, DONE, FAILED, or STOPPED if it ended with the server or the machine.
        step: the index of the command that runs, or ran last.
        own_token: whether it needs a token that was typed.
        created: seconds since 1970.
        shards: shards of the output; 0 if not known.
        error: why it failed, and what to do next; else empty.
        output: where its output lies now; "" if it has none here.
        process: the id of its process while it runs.
    """

    id: str
    owner: str
    model: str
    steps: tuple[tuple[str, ...], ...]
    state: str = WAITING
    step: int = 0
    own_token: bool = False
    created: float = 0.0
    shards: int = 0
    error: tuple[str, str] = ("", "")
    output: str = ""
    process: int = 0


@dataclass(frozen=True)
class Status:
    """What the page shows of a run.

    Attributes:
        run: the run.
        place: how many runs are before it in the queue.
        progress: the last line of `--progress json`; empty if there is none.
        memory: bytes of resident memory of its process; 0 if it does not run.
        disk: bytes that are free where it writes.
        log: what its commands said.
    """

    run: PageRun
    place: int
    progress: dict[str, Any] = field(default_factory=dict)
    memory: int = 0
    disk: int = 0
    log: str = ""


class Runs:
    """The runs of one directory, which one server holds at a time.

    Args:
        root: directory in which outputs are written. Runs are kept below it, in FOLDER.

    Raises:
        UsageError: another server holds it, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / FOLDER
        self._changed = threading.Condition()
        self._runs: dict[str, PageRun] = {}
        self._tokens: dict[str, str] = {}
        self._cancelled: set[str] = set()
        self._closing = False
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # Closed when the process ends.
            self._lock = (self.folder / LOCK).open("ab")
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written: {error.strerror}", "give another --root") from None
        if not _take(self._lock):
            self._lock.close()
            raise UsageError(f"another openquant web serves {root}", "use that one, or give another --root")
        self._read()
        self._worker = threading.Thread(target=self._work, name="openquant-runs", daemon=True)
        self._worker.start()

    def add(
        self, owner: str, model: str, steps: Sequence[Sequence[str]], token: str | None = None, shards: int = 0
    ) -> PageRun:
        """Put a run at the end of the queue.

        Args:
            owner: digest of the browser that starts it.
            model: the model's name, for the list of runs.
            steps: its commands, as words after `openquant`.
            token: a token that was typed; None for the login of this machine.
            shards: shards of the output; 0 if not known.

        Raises:
            UsageError: there are too many runs.
        """
        commands = tuple(tuple(words) for words in steps)
        run = PageRun(secrets.token_hex(8), owner, model, commands, own_token=token is not None, created=time.time())
        run = replace(run, shards=shards)
        with self._changed:
            if len(self._runs) >= MOST_RUNS:
                raise UsageError(f"there are {MOST_RUNS} runs", "remove some")
            (self.folder / run.id).mkdir(mode=0o700)
            if token is not None:
                self._tokens[run.id] = token
            self._keep(run)
            self._changed.notify_all()
        return run

    def of(self, owner: str) -> list[PageRun]:
        """Return the runs of a browser, the newest first."""
        with self._changed:
            return sorted((run for run in self._runs.values() if run.owner == owner), key=lambda run: -run.created)

    def find(self, owner: str, name: str | None) -> PageRun | None:
        """Return a run of a browser by its id; None if it has none of that id."""
        return next((run for run in self.of(owner) if run.id == name), None)

    def proceed(self, run: PageRun, token: str | None) -> None:
        """Continue a run that was stopped or failed, at the end of the queue.

        Args:
            run: the run.
            token: a token that was typed; None for the login of this machine.

        Raises:
            UsageError: it needs a token.
        """
        if run.own_token and token is None:
            raise UsageError("this run needs your token, which was kept in memory alone", "type it once more")
        with self._changed:
            now = self._runs.get(run.id)
            if now is None or now.state not in (STOPPED, FAILED):
                return
            if token is not None:
                self._tokens[run.id] = token
            run = replace(now, state=WAITING, error=("", ""), own_token=token is not None, created=time.time())
            self._keep(run)
            self._changed.notify_all()

    def remove(self, run: PageRun) -> None:
        """Cancel a run, and remove all that it wrote; of one that is done, everything but the finished output."""
        with self._changed:
            self._cancelled.add(run.id)
            self._changed.notify_all()
            # The thread that runs it removes it.
            if self._runs[run.id].state != RUNNING:
                self._forget(run.id)
            else:
                self._changed.wait_for(lambda: run.id not in self._runs, timeout=2 * GRACE)

    def close(self) -> None:
        """End the command that runs. A later server can continue the run."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join(2 * GRACE)
        self._lock.close()

    def status(self, run: PageRun) -> Status:
        """Return what the page shows of a run."""
        with self._changed:
            waiting = [
                one for one in self._runs.values() if one.state in (WAITING, RUNNING) and one.created < run.created
            ]
        directory = self.folder / run.id
        lines = [] if not directory.is_dir() else _tail(directory / LOG).split("\n")
        progress: dict[str, Any] = {}
        for line in reversed(lines):
            if line.startswith(PROMPT):
                break
            if line.startswith("{"):
                with suppress(ValueError):
                    progress = json.loads(line)
                    break
        text = "\n".join(line for line in lines if not line.startswith("{"))
        memory = _memory(run.process) if run.state == RUNNING else 0
        return Status(run, len(waiting), progress, memory, shutil.disk_usage(self.root).free, without_tokens(text))

    def result(self, run: PageRun, step: int) -> dict[str, Any]:
        """Return what a command of a run printed as JSON; empty if there is nothing yet."""
        return _result(self.folder / run.id, step)

    def report(self, run: PageRun) -> Path | None:
        """Return the page of a run's evaluation; None if there is none."""
        path = self.folder / run.id / REPORT
        return path if path.is_file() else None

    def _read(self) -> None:
        """Find the runs of earlier servers."""
        for path in sorted(self.folder.glob(f"*/{JOURNAL}")):
            try:
                known = json.loads(path.read_text())
                known |= {"steps": tuple(map(tuple, known["steps"])), "error": tuple(known["error"])}
                run = PageRun(**known)
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if run.id != path.parent.name:
                continue
            self._runs[run.id] = run
            if run.state == WAITING or (run.state == RUNNING and not _held(path.parent)):
                self._keep(replace(run, state=STOPPED))

    def _keep(self, run: PageRun) -> None:
        self._runs[run.id] = run
        write_atomic(self.folder / run.id / JOURNAL, json.dumps(asdict(run)).encode())

    def _forget(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        self._runs.pop(name, None)
        self._tokens.pop(name, None)
        self._cancelled.discard(name)
        self._changed.notify_all()

    def _next(self) -> PageRun | None:
        running = [run for run in self._runs.values() if run.state == RUNNING]
        waiting = sorted((run for run in self._runs.values() if run.state == WAITING), key=lambda run: run.created)
        return next(iter([*running, *waiting]), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                run = self._next()
                if self._closing or run is None:
                    return
            run = replace(run, state=RUNNING)
            try:
                with self._changed:
                    self._keep(run)
                run = self._run(run)
            except (OSError, OutputError) as error:
                run = replace(run, state=FAILED, error=(f"the run cannot be kept: {error}", "continue it once it can"))
            with self._changed:
                if run.id in self._cancelled:
                    self._forget(run.id)
                else:
                    self._tokens.pop(run.id, None)
                    with suppress(OutputError):
                        self._keep(run)
                self._changed.notify_all()

    def _run(self, run: PageRun) -> PageRun:
        directory = self.folder / run.id
        for step in range(run.step, len(run.steps)):
            run = replace(run, step=step)
            if not _held(directory):
                process = self._start(run, directory)
                run = replace(run, process=process.pid)
                with self._changed:
                    self._keep(run)
                self._wait(run, directory, process)
            else:
                self._wait(run, directory, None)
            found = _result(directory, step)
            if run.id in self._cancelled:
                return run
            if "error" in found and found["error"] != "interrupted":
                return replace(run, state=FAILED, process=0, error=(str(found["error"]), str(found.get("hint", ""))))
            if not found or "error" in found:
                text = "the command ended before it was done"
                return replace(run, state=STOPPED, process=0, error=(text, "its log may say why; the run can continue"))
        return self._finish(replace(run, state=DONE, process=0), directory)

    def _start(self, run: PageRun, directory: Path) -> subprocess.Popen[bytes]:
        words = [self._output(run) if word == OUTPUT else word for word in run.steps[run.step]]
        words += ["--json"] if words[0] == "push" else ["--json", "--progress", "json"]
        if words[0] == "eval" and find_spec("matplotlib"):
            words += ["--report", REPORT]
        with (
            (directory / LOG).open("ab") as log,
            (directory / LOCK).open("ab") as lock,
            (directory / f"{run.step}.json").open("wb") as result,
        ):
            log.write(f"{PROMPT}{shown(run.steps[run.step])}\n".encode())
            log.flush()
            _take(lock)
            # The process holds the lock as long as it lives, also beyond this server.
            return subprocess.Popen(
                [sys.executable, "-m", "openquant", *words],
                cwd=directory,
                env=environment(self._tokens.get(run.id)),
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )

    def _wait(self, run: PageRun, directory: Path, process: subprocess.Popen[bytes] | None) -> None:
        """Wait until the command of a run ends, which this server need not have started."""
        until = None
        while (process.poll() is None) if process else _held(directory):
            # Without an id the server was killed in the moment in which it started the process, which goes on alone.
            if run.process and (run.id in self._cancelled or self._closing):
                until = until or time.monotonic() + GRACE
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.process, signal.SIGTERM if time.monotonic() < until else signal.SIGKILL)
            time.sleep(PAUSE)

    def _output(self, run: PageRun) -> str:
        """What the first command wrote: a directory beside the journal, or a repository."""
        found = _result(self.folder / run.id, 0)
        if found.get("repository"):
            revision = found.get("pushed_revision")
            return f"{found['repository']}@{revision}" if revision else str(found["repository"])
        return str(found["output"])

    def _finish(self, run: PageRun, directory: Path) -> PageRun:
        """Move the finished output out of the run's directory."""
        found = _result(directory, 0)
        made = directory / Path(str(found.get("output", ""))).name
        if run.steps[0][0] != "compress" or found.get("repository") or not made.is_dir():
            return run
        place = self.root / made.name
        for number in range(2, 1000):
            if not place.exists() and not place.is_symlink():
                break
            place = self.root / f"{made.name}-{number}"
        made.rename(place)
        return replace(run, output=str(place))


def environment(token: str | None) -> dict[str, str]:
    """Return the environment of a command.

    Args:
        token: a token that was typed; None for the login of this machine.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # The working directory, which holds files of others, is no place to import from.
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return settings if token is None else {**settings, "HF_TOKEN": token}


def without_tokens(text: str) -> str:
    """Replace what looks like a token of huggingface.co."""
    return _TOKEN.sub("hf_...", text)


def _take(lock: BinaryIO) -> bool:
    """Take a lock, unless another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(directory: Path) -> bool:
    """Whether a process of a run still lives."""
    with (directory / LOCK).open("ab") as lock:
        return not _take(lock)


def _tail(path: Path) -> str:
    """The end of a file, from the beginning of a line on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SHOWN_LOG))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= SHOWN_LOG else text.partition("\n")[2]


def _result(directory: Path, step: int) -> dict[str, Any]:
    try:
        found = json.loads((directory / f"{step}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _memory(process: int) -> int:
    """Bytes of resident memory; 0 if it is not known."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

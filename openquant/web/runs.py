"""The runs of the page: a table in memory and one thread, which runs one `openquant` at a time as a child process.

The commands work in the first root. When the server ends, so does the command that runs. The same command continues
what an earlier one left, since `compress` resumes by its journal: nothing about a run is kept on disk.

    runs = Runs(Path("models"))
    run = runs.add("Qwen/Qwen3-8B", choice.steps(roots))
    status_html(run)
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import OpenQuantError
from ..files.cards import COMMANDS, commands_in, published_card
from ..report.cells import gigabytes, optional, spoken
from .choices import OUTPUT, shown
from .view import command_html, text_html

# Seconds for which a command that is told to end may still run when the server ends.
GRACE = 10.0
# Lines at the end of a log that the page shows, and letters of a line.
MOST_LINES = 200
MOST_LETTERS = 2000
# Bytes of a card that are shown.
MOST_CARD = 1 << 18
WAITING = "waiting"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"


@dataclass(eq=False)
class PageRun:
    """A run, which its thread changes while the page shows it.

    Attributes:
        model: the model, for the list of runs.
        steps: its commands, as words after `openquant`.
        step: the index of the command that runs, or ran last.
        error: why it failed; else None.
        progress: the last line of `--progress json`; empty if there is none.
        results: what each finished command printed.
        output: where its output lies; "" if it has none here.
        report: the page of its evaluation; None if there is none.
        card: the model card of its output; "" until it is done.
        serving: the commands by which vLLM and SGLang serve its output; "" if one does not, or until it is done.
    """

    model: str
    steps: Sequence[Sequence[str]]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = WAITING
    step: int = 0
    error: OpenQuantError | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    results: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    report: Path | None = None
    card: str = ""
    serving: tuple[str, str] = ("", "")
    process: subprocess.Popen[str] | None = None
    is_told_to_stop: bool = False

    def fail(self, error: str, hint: str) -> None:
        """End with an error."""
        self.error = OpenQuantError(error, hint)
        self.state = FAILED


class Runs:
    """The runs of a server.

    Args:
        root: directory in which commands work, and outputs are written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: list[PageRun] = []
        self._queue: queue.SimpleQueue[PageRun | None] = queue.SimpleQueue()
        # Held while a run begins, starts a command, or is told to stop.
        self._lock = threading.Lock()
        self._reports = tempfile.TemporaryDirectory(prefix="openquant-web-")
        self._worker = threading.Thread(target=self._work, name="openquant-runs", daemon=True)
        self._worker.start()

    def add(self, model: str, steps: Sequence[Sequence[str]]) -> PageRun:
        """Put a run at the end of the queue. The arguments are those of PageRun."""
        run = PageRun(model=model, steps=steps)
        self._runs.append(run)
        self._queue.put(run)
        return run

    def newest_first(self) -> list[PageRun]:
        """Return all runs."""
        return self._runs[::-1]

    def find(self, name: str | None) -> PageRun | None:
        """Return a run by its id; None if there is none."""
        return next((run for run in self._runs if run.id == name), None)

    def stop(self, run: PageRun) -> None:
        """End a run. What it wrote stays, and the same command continues it."""
        with self._lock:
            if run.state == WAITING:
                run.state = STOPPED
            elif run.state == RUNNING:
                run.is_told_to_stop = True
                if run.process is not None:
                    run.process.terminate()

    def close(self) -> None:
        """End the command that runs, and all that wait."""
        self._queue.put(None)
        for run in self._runs:
            self.stop(run)

        self._worker.join(GRACE)
        for run in self._runs:
            if run.process is not None and run.process.poll() is None:
                run.process.kill()

        self._worker.join(GRACE)
        self._reports.cleanup()

    def _work(self) -> None:
        """Run what waits, one run at a time."""
        while (run := self._queue.get()) is not None:
            with self._lock:
                if run.state != WAITING:
                    continue
                run.state = RUNNING

            # No memory or disk for a process, or no directory any more: the next run may find them.
            try:
                self._run_steps(run)
            except OSError as error:
                run.fail(f"openquant cannot be started: {error}", "begin the run again once it can")

    def _run_steps(self, run: PageRun) -> None:
        """Run the commands of a run up to the first that fails."""
        for step in range(len(run.steps)):
            run.step = step
            run.progress = {}
            result = self._run_command(run)

            if run.is_told_to_stop or result.get("error") == "interrupted":
                run.state = STOPPED
                return
            if not result:
                run.fail("the command ended before it was done", "its log may say why; the same button continues it")
                return
            if "error" in result:
                run.fail(str(result["error"]), str(result.get("hint", "")))
                return

            run.results.append(result)
            if run.steps[step][0] in ("compress", "push") and not result.get("repository"):
                run.output = str(self.root / str(result["output"]))

        result = run.results[0]
        run.card = read_card(self.root / result["output"])
        place = result.get("repository") or run.output
        commands = commands_in(published_card(run.card, place, result.get("pushed_revision")))
        # SGLang's is the last.
        vllm, command, sglang = commands.partition(COMMANDS["SGLang"])
        run.serving = (vllm.rstrip(), command + sglang)
        run.state = DONE

    def _run_command(self, run: PageRun) -> dict[str, Any]:
        """Run a command to its end, and return what it printed as JSON; empty if it printed none."""
        words = self._words(run)
        run.log.append(f"$ {shown(words)}")
        with self._lock:
            if run.is_told_to_stop:
                return {}
            process = subprocess.Popen(
                [sys.executable, "-m", "openquant", *words],
                cwd=self.root,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
            run.process = process

        # The JSON of the progress, texts, and the JSON of the result: each is a line.
        result: dict[str, Any] = {}
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                found = _read_json(line)
                if found is None:
                    run.log.append(line.rstrip()[:MOST_LETTERS])
                elif "stage" in found:
                    run.progress = found
                else:
                    result = found
        return result

    def _words(self, run: PageRun) -> list[str]:
        """Return the words of the command that is next."""
        words = list(run.steps[run.step])
        if OUTPUT in words:
            words[words.index(OUTPUT)] = _written(run.results[0])

        words.append("--json")
        if words[0] != "push":
            words += ["--progress", "json"]
        if words[0] == "eval" and find_spec("matplotlib"):
            run.report = Path(self._reports.name) / f"{run.id}.html"
            words += ["--report", str(run.report)]
        return words


def environment() -> dict[str, str]:
    """Return the environment of a command."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # The working directory, which holds files of others, is no place to import from.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}


def run_title(run: PageRun) -> str:
    """Say in a line which run it is: "org/name: int4 (done)"."""
    words = run.steps[0]
    what = next((word for flag, word in pairwise(words) if flag in ("--scheme", "--fit")), words[0])
    return f"{run.model}: {what} ({run.state})"


def status_html(run: PageRun) -> str:
    """Show state, progress and commands of a run.

    Args:
        run: the run.
    """
    parts = ['<section class="oq">', f'<p role="status"><strong>{text_html(_state(run))}</strong></p>']
    if run.state == RUNNING:
        parts.append(_progress_html(run))
    # Above the page it is gone with the next action.
    if run.error is not None:
        parts.append(f"<p>{text_html(run.error.message)}</p>")

    # What a command leaves to the next one is known when it is done.
    parts.append("<p>The same on a command line:</p>")
    output = _written(run.results[0]) if run.results else "OUTPUT"
    parts += [command_html(shown([output if word == OUTPUT else word for word in words])) for words in run.steps]
    return "".join([*parts, "</section>"])


def read_card(directory: Path) -> str:
    """Return the model card of an output; "" if it has none."""
    try:
        with (directory / "README.md").open("rb") as file:
            return file.read(MOST_CARD).decode("utf-8", "replace")
    except OSError:
        return ""


def result_html(run: PageRun) -> str:
    """Show the evaluation and the card of an output that is done, where it is, and what `verify` says of it."""
    result = run.results[0]
    parts = ['<section class="oq">']
    if "source_bytes" in result:
        parts.append(f"<p>{gigabytes(result['source_bytes'])} before, {gigabytes(result['output_bytes'])} after.</p>")

    pushed = str(result.get("pushed_to") or "")
    if pushed.startswith(("https://", "http://")):
        link = text_html(pushed)
        parts.append(f'<p>Published: <a href="{link}" rel="noreferrer noopener">{link}</a></p>')

    if run.report is not None:
        address = f"/report/{run.id}"
        parts.append("<h3>Evaluation</h3>")
        parts.append(f'<iframe class="oq-report" src="{address}" title="Evaluation of the output"></iframe>')
        parts.append(
            f'<p><a href="{address}" target="_blank" rel="noopener">The evaluation on a page of its own</a></p>'
        )

    if run.output and run.card:
        parts.append("<details><summary>The model card as it will be published</summary>")
        parts.append(f'<pre class="oq-command">{text_html(run.card)}</pre></details>')
    if run.output:
        parts.append(f"<p>The files are in <code>{text_html(run.output)}</code>.</p>")

    for words, found in zip(run.steps, run.results, strict=True):
        if words[0] != "verify":
            continue
        if not found["problems"]:
            parts.append("<p>openquant verify: no problems</p>")
            continue
        problems = text_html("; ".join(found["problems"]))
        parts.insert(1, f'<div class="oq-problem" role="alert"><p>openquant verify: {problems}</p></div>')
    return "".join([*parts, "</section>"])


def _read_json(line: str) -> dict[str, Any] | None:
    """Read an object of JSON; None if a line is something else."""
    if not line.startswith("{"):
        return None
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found


def _written(result: dict[str, Any]) -> str:
    """What a compress command wrote: a directory, or a repository at its new commit."""
    repository = result.get("repository")
    if not repository:
        return str(result["output"])
    return f"{repository}{optional('@{}', result.get('pushed_revision'))}"


def _state(run: PageRun) -> str:
    """Say in a sentence how far a run is."""
    if run.state == RUNNING:
        begun = "uploading" if run.steps[run.step][0] == "push" else "starting"
        return f"Step {run.step + 1} of {len(run.steps)}: {run.progress.get('stage', begun)}"
    return {
        WAITING: "Waiting for the runs before this one.",
        DONE: "The run is done.",
        FAILED: "The run failed.",
        STOPPED: "The run was stopped. The same button continues it.",
    }[run.state]


def _progress_html(run: PageRun) -> str:
    """The bar of a command that runs, and what is known of it."""
    facts = []
    bar = '<progress aria-label="progress"></progress>'

    done = run.progress.get("done")
    total = run.progress.get("total")
    if done is not None and total:
        bar = f'<progress aria-label="progress" value="{done}" max="{total}">{100 * done // total} %</progress>'
        unit = run.progress["unit"]
        if unit == "bytes":
            facts.append(("Converted", f"{gigabytes(done)} of {gigabytes(total)}"))
        else:
            facts.append(("Done", f"{done:,} of {total:,} {unit}"))

    left = run.progress.get("seconds_left")
    if left is not None:
        facts.append(("Left", f"about {spoken(left)}"))

    rows = "".join(f"<div><dt>{name}</dt><dd>{text_html(value)}</dd></div>" for name, value in facts)
    return f"{bar}<dl>{rows}</dl>"

"""What the page shows of a run and of its result, as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from typing import Any

from ..report.cells import gigabytes, spoken
from .choices import shown
from .runs import DONE, FAILED, RUNNING, STOPPED, WAITING, PageRun, Status
from .view import command_html, text_html

_STATES = {
    WAITING: "waits",
    RUNNING: "runs",
    DONE: "is done",
    FAILED: "failed",
    STOPPED: "was stopped",
}


def run_title(run: PageRun) -> str:
    """Say in a line which run it is: "org/name: int4 (is done)"."""
    words = run.steps[0]
    what = next((word for flag, word in pairwise(words) if flag in ("--scheme", "--fit")), words[0])
    return f"{run.model}: {what} ({_STATES[run.state]})"


def status_html(status: Status) -> str:
    """Show state, progress and command of a run.

    Args:
        status: what is known of it now.
    """
    run = status.run
    parts = ['<section class="oq">', f'<p role="status"><strong>{text_html(_state(status))}</strong></p>']
    if run.state == RUNNING:
        parts.append(_progress(status))
    if run.error[0]:
        parts.append(f'<div class="oq-problem" role="alert"><p><strong>error:</strong> {text_html(run.error[0])}</p>')
        parts.append(f"<p><strong>hint:</strong> {text_html(run.error[1])}</p></div>")
    parts.append("<p>The same on a command line:</p>")
    # What a command leaves to the next one is known when it is done.
    parts += [command_html(shown(words).replace("'{output}'", "OUTPUT")) for words in run.steps]
    return "".join([*parts, "</section>"])


def _state(status: Status) -> str:
    run = status.run
    if run.state == WAITING:
        return f"Waiting: {status.place} {'run is' if status.place == 1 else 'runs are'} before this one."
    if run.state == RUNNING:
        doing = status.progress.get("stage") or {"push": "uploading"}.get(run.steps[run.step][0], "starting")
        return f"Step {run.step + 1} of {len(run.steps)}: {doing}"
    return f"The run {_STATES[run.state]}."


def _progress(status: Status) -> str:
    found = status.progress
    facts = []
    bar = '<progress aria-label="progress"></progress>'
    done, total, left = found.get("done"), found.get("total"), found.get("seconds_left")
    if isinstance(done, int) and isinstance(total, int) and total > 0:
        bar = f'<progress aria-label="progress" value="{done}" max="{total}">{100 * done // total} %</progress>'
        if found.get("unit") == "bytes":
            facts.append(("Converted", f"{gigabytes(done)} of {gigabytes(total)}"))
            if status.run.shards:
                shard = min(status.run.shards, max(1, ceil(done / total * status.run.shards)))
                facts.append(("Shard", f"about {shard} of {status.run.shards}"))
        else:
            facts.append(("Done", f"{done:,} of {total:,} {found.get('unit')}"))
    if isinstance(left, (int, float)):
        facts.append(("Left", f"about {spoken(left)}"))
    if status.memory:
        facts.append(("Memory", gigabytes(status.memory)))
    facts.append(("Free disk", gigabytes(status.disk)))
    rows = "".join(f"<div><dt>{name}</dt><dd>{text_html(value)}</dd></div>" for name, value in facts)
    return f"{bar}<dl>{rows}</dl>"


def result_html(run: PageRun, compressed: Mapping[str, Any], card: str, pushed: str, report: bool) -> str:
    """Show where the output is, its evaluation and its card.

    Args:
        run: a run that is done.
        compressed: what its first command printed.
        card: the text of the output's README.md; "" if it is not here.
        pushed: address where the output was published; "" if it was not.
        report: whether there is a page of its evaluation.
    """
    parts = ['<section class="oq">']
    before, after = compressed.get("source_bytes"), compressed.get("output_bytes")
    if isinstance(before, int) and isinstance(after, int):
        parts.append(f"<p>{gigabytes(before)} before, {gigabytes(after)} after.</p>")
    if run.output:
        parts.append(f"<p>The output is in <code>{text_html(run.output)}</code>.</p>")
    if pushed.startswith(("https://", "http://")):
        parts.append(
            f'<p>Published: <a href="{text_html(pushed)}" rel="noreferrer noopener">{text_html(pushed)}</a></p>'
        )
    if report:
        address = f"/report/{run.id}"
        parts.append("<h3>Evaluation</h3>")
        parts.append(f'<iframe class="oq-report" src="{address}" title="Evaluation of the output"></iframe>')
        parts.append(
            f'<p><a href="{address}" target="_blank" rel="noopener">The evaluation on a page of its own</a></p>'
        )
    if card:
        parts.append("<details><summary>The model card as it will be published</summary>")
        parts.append(f'<pre class="oq-command">{text_html(card)}</pre></details>')
    return "".join([*parts, "</section>"])

"""Runs the chat template that comes with a model in a subprocess with limited time and memory.

transformers renders chat templates in jinja's sandbox, which keeps them from files and from Python, but lets them loop
for hours and fill the memory.

    render("{% for m in messages %}{{ m.content }}{% endfor %}", [[{"role": "user", "content": "Hi"}]], ["a test"])
    # ["Hi"]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..files.model_files import short_repr

# The date that templates get. A real date would change figures from day to day.
TODAY = date(2026, 1, 1)
Message = Mapping[str, Any]


# Most seconds for all conversations, to which one is added for each hundred of them; and most bytes of memory beyond
# those of Python and transformers.
SECONDS, MEMORY = 30, 512 << 20


def render(
    template: str,
    conversations: Sequence[Sequence[Message]],
    names: Sequence[object],
    variables: Mapping[str, str] | None = None,
    answered: bool = False,
) -> list[str]:
    """Render conversations with a chat template, as transformers' `apply_chat_template` does.

    Args:
        template: the Jinja template.
        conversations: lists of messages, dicts with a `role` and mostly a `content`.
        names: name of each conversation in error messages, such as "prompts.jsonl line 3"; `str()` is taken of it.
        variables: further variables of the template: special tokens, such as {"bos_token": "<s>"}.
        answered: whether the conversations are complete. If not, the template's generation prompt is added.

    Returns:
        The text of each conversation; [] for none.

    Raises:
        SourceError: the template is broken, refuses a conversation, or exceeds its limits.
    """
    if not conversations:
        return []

    seconds = SECONDS + len(conversations) // 100
    task = {
        "template": template,
        "conversations": [[_without_nulls(message) for message in messages] for messages in conversations],
        "variables": {**(variables or {}), "add_generation_prompt": not answered},
        "seconds": seconds,
    }

    answer = _run(task)
    if "problem" in answer:
        where = f" for {names[answer['at']]}" if "at" in answer else ""
        raise SourceError(
            f"the model's chat template fails{where}: {short_repr(answer['problem'])}",
            "see which messages it takes, or give texts without messages",
        )

    return [str(text) for text in answer["rendered"]]


def _without_nulls(message: Message) -> dict[str, Any]:
    """A message without keys whose value is null, which templates would print as None."""
    return {key: value for key, value in message.items() if value is not None}


def _run(task: Mapping[str, Any]) -> Any:
    """Render in a subprocess.

    Args:
        task: the argument of `_render`, as JSON.

    Returns:
        Its result, as JSON.
    """
    # Python would import from the current directory, so the subprocess gets this process's path.
    script = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import serve; serve()"
    # More threads would only reserve memory.
    single_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")

    process = subprocess.run(
        [sys.executable, "-c", script, *map(os.path.abspath, sys.path)],
        input=json.dumps(task).encode(),
        capture_output=True,
        env={**os.environ, **single_thread, "HF_HUB_OFFLINE": "1"},
    )
    if process.returncode == -signal.SIGALRM:
        raise SourceError(
            f"the model's chat template did not end within {task['seconds']} seconds",
            "it may never end; give texts without messages, or a model whose template works",
        )
    try:
        return json.loads(process.stdout)
    except ValueError:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SourceError(
            f"the chat template could not be rendered: {short_repr(f'exit code {process.returncode}, {last_line}')}",
            "give texts without messages, or a model whose template works",
        ) from None


def serve() -> None:
    """Render in the subprocess: read the task from stdin and write the result to stdout, both as JSON."""
    # Output of libraries goes to stderr, so that it does not mix with the result.
    out = os.dup(1)
    os.dup2(2, 1)
    answer = _render(json.load(sys.stdin))
    with os.fdopen(out, "w") as stream:
        json.dump(answer, stream)


def _limit(seconds: int) -> None:
    """Have the system end this process after so many seconds, and limit it to MEMORY further bytes."""
    import resource

    signal.alarm(seconds)
    # Some systems have the limit but refuse to set it; others have a lower one.
    with contextlib.suppress(ValueError, OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _render(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the subprocess: render conversations. Returns {"rendered": texts}, or {"problem": text, "at": number}."""
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Today
    _limit(task["seconds"])
    rendered: list[str] = []
    for number, messages in enumerate(task["conversations"]):
        try:
            result: Any = chat_template_utils.render_jinja_template(
                [messages], chat_template=task["template"], **task["variables"]
            )
        except MemoryError:
            return {"problem": "it takes more memory than it may", "at": number}
        except Exception as error:
            return {"problem": f"{error}"[:1000] or type(error).__name__, "at": number}
        rendered.append(result[0][0])
    return {"rendered": rendered}

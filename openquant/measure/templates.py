"""Chat templates, which are programs that came with a model: run in a process of their own, with little of everything.

transformers renders them in jinja's sandbox, which keeps them from files and from Python, and lets them loop for hours
and fill the memory. So what they get here is a process that has a bounded time and memory and is told of nothing else:

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
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..files.inputs import shown

# Some templates tell the model what day it is. It is always this one, or figures would change overnight.
TODAY = date(2026, 1, 1)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Bounds:
    """What rendering may take.

    Attributes:
        cpu: seconds of a processor for one conversation, and for all of them another one for each hundred.
        memory: bytes beside what Python and transformers take.
        letters: in all that is rendered.
    """

    cpu: int = 10
    memory: int = 512 << 20
    letters: int = 64 << 20


def render(
    template: str,
    conversations: Sequence[Sequence[Message]],
    names: Sequence[object],
    variables: Mapping[str, str] | None = None,
    answered: bool = False,
    bounds: Bounds = Bounds(),
) -> list[str]:
    """Conversations as text in a model's own form, as transformers' `apply_chat_template` has it.

    Args:
        template: the template.
        conversations: messages, objects with a `role` and mostly a `content`, as JSON has them.
        names: what messages call each conversation, as text, such as "prompts.jsonl line 3".
        variables: what else the template is told: special tokens, such as {"bos_token": "<s>"}.
        answered: whether they are complete; else the model's answer is to come next.
        bounds: what it may take.

    Raises:
        SourceError: the template is broken, refuses a conversation, or takes more than its bounds.
    """
    if not conversations:
        return []
    cpu = bounds.cpu + len(conversations) // 100
    asked = {
        "template": template,
        "conversations": [[_given(message) for message in messages] for messages in conversations],
        "variables": {**(variables or {}), "add_generation_prompt": not answered},
        "cpu": cpu,
        "memory": bounds.memory,
        "letters": bounds.letters,
    }
    # The directory somebody stands in is no place to import from, so Python looks only where this one does.
    script = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import answer; answer()"
    # More threads would only reserve memory.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, *map(os.path.abspath, sys.path)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env=environment,
            timeout=60 + 4 * cpu,
        )
    except subprocess.TimeoutExpired:
        raise _endless(cpu) from None
    # The kernel's own ends: of processor time, and by a machine that has no memory left.
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _endless(cpu)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        told = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SourceError(
            f"the chat template could not be rendered: exit code {done.returncode}, {shown(told)}",
            "give texts without messages, or a model whose template works",
        ) from None
    if "problem" in found:
        where = f" for {names[found['at']]}" if "at" in found else ""
        raise SourceError(
            f"the model's chat template fails{where}: {shown(found['problem'])}",
            "see which messages it takes, or give texts without messages",
        )
    return [str(text) for text in found["rendered"]]


def _given(message: Message) -> dict[str, Any]:
    """A message without what is null in it, which templates would print as None."""
    return {key: value for key, value in message.items() if value is not None}


def _endless(cpu: int) -> SourceError:
    return SourceError(
        f"the model's chat template did not end within {cpu} seconds of processor time",
        "it may never end; give texts without messages, or a model whose template works",
    )


def answer() -> None:
    """What the process does: render what stdin asks for, and print the result."""
    # What a library prints must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Today
    _limit(asked["cpu"], asked["memory"])
    found: dict[str, Any] = {"rendered": []}
    letters = 0
    for number, messages in enumerate(asked["conversations"]):
        try:
            made: Any = chat_template_utils.render_jinja_template(
                [messages], chat_template=asked["template"], **asked["variables"]
            )
        except MemoryError:
            found = {"problem": "it takes more memory than it may", "at": number}
            break
        except Exception as error:
            found = {"problem": f"{error}"[:1000] or type(error).__name__, "at": number}
            break
        text = made[0][0]
        letters += len(text)
        if letters > asked["letters"]:
            found = {"problem": f"it makes more than {asked['letters']:,} letters", "at": number}
            break
        found["rendered"].append(text)
    with os.fdopen(out, "w") as stream:
        json.dump(found, stream)


def _limit(cpu: int, memory: int) -> None:
    """Bound this process from here on."""
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

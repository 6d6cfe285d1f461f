"""The programs that come with a model, its chat template and the rules of its tokenizer, run in a process with limits.

transformers renders chat templates in jinja's sandbox, which keeps them from files and from Python, and lets them loop
for hours and fill the memory. A tokenizer.json is rules that run on every text: replacements that may multiply it,
patterns that may take exponentially long. The library that runs them has no bounds, and hears no signal meanwhile. So
both run in a process of their own, with bounded time and memory, that is given nothing else. A tokenizer that behaves
on ordinary text, and on long runs of one character, may still be made to fail on a text of somebody's choice;
docs/evaluation.md says so.

    render("{% for m in messages %}{{ m.content }}{% endfor %}", [[{"role": "user", "content": "Hi"}]], ["a test"])
    # ["Hi"]
    check_tokenizer(data, "Qwen3-8B", ["Some text, 1 + 1"])     # nothing, or a SourceError
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..files.small_files import short_repr

# Some templates tell the model what day it is. It is always this one, or figures would change overnight.
TODAY = date(2026, 1, 1)
# Seconds of a processor, and bytes, that a tokenizer may take to be tried: one of 262,000 tokens and 500,000 merges,
# 41 MB, takes 2.4 and 460 MB.
_CPU, _MEMORY = 20, 1 << 30
# Times that each character is repeated, and what ends it: patterns fail late.
_RUN, _END = 2000, "\x00"
# The rules of most tokenizers that work on bytes, which need no trial: none makes text longer but the last, which turns
# each byte into a character, and so may come once.
_HARMLESS = ("Sequence", "NFC", "Split", "Digits", "ByteLevel")
# Tokens of one byte of text: some replace a character by a few bytes.
_TOKENS = 16

Message = Mapping[str, Any]


class _EndlessError(Exception):
    """The process took the time that it may, and the system ended it."""


class _FailedError(Exception):
    """The process ended without an answer; says how."""


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
    try:
        found = _run("template", asked, cpu)
    except _EndlessError:
        raise SourceError(
            f"the model's chat template did not end within {cpu} seconds of processor time",
            "it may never end; give texts without messages, or a model whose template works",
        ) from None
    except _FailedError as error:
        raise SourceError(
            f"the chat template could not be rendered: {short_repr(str(error))}",
            "give texts without messages, or a model whose template works",
        ) from None
    if "problem" in found:
        where = f" for {names[found['at']]}" if "at" in found else ""
        raise SourceError(
            f"the model's chat template fails{where}: {short_repr(found['problem'])}",
            "see which messages it takes, or give texts without messages",
        )
    return [str(text) for text in found["rendered"]]


def _given(message: Message) -> dict[str, Any]:
    """A message without what is null in it, which templates would print as None."""
    return {key: value for key, value in message.items() if value is not None}


def check_tokenizer(data: bytes, where: str, texts: Sequence[str], cpu: int = _CPU, memory: int = _MEMORY) -> None:
    """Load a tokenizer, and have it encode and decode some texts, within bounds; not one that cannot need more.

    Args:
        data: tokenizer.json.
        where: the model, for messages.
        texts: what it is to encode, and runs of each of their characters.
        cpu: seconds of a processor that it may take.
        memory: bytes that it may take.

    Raises:
        SourceError: it takes more than it may. One that cannot be loaded at all raises nothing here.
    """
    if _harmless(data):
        return
    asked = {"json": data.decode(errors="replace"), "texts": list(texts), "cpu": cpu, "memory": memory}
    try:
        problem = _run("tokenizer", asked, cpu)
    except _EndlessError:
        problem = f"did not end within {cpu} seconds of processor time"
    except _FailedError:
        # The library does not fail where it is given no memory: it aborts.
        problem = f"takes more than {memory >> 20} MiB of memory"
    if problem is not None:
        raise SourceError(
            f"the tokenizer of {where} {problem}",
            "tokenizer.json is damaged, or made to do that: copy it from the model it was made from",
        )


def _harmless(data: bytes) -> bool:
    """Whether no rule of a tokenizer makes text longer than a few times its size."""
    try:
        found = json.loads(data)
        parts = [found["normalizer"], found["pre_tokenizer"], found["decoder"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    kinds = [list(_kinds(part)) for part in parts]
    return all(set(each) <= {*_HARMLESS} and each.count(_HARMLESS[-1]) <= 1 for each in kinds)


def _kinds(part: object) -> Iterator[object]:
    """The types of a rule and of all in it."""
    if isinstance(part, dict):
        if "type" in part:
            yield str(part["type"])
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _kinds(inner)


def _run(program: str, asked: Mapping[str, Any], cpu: int) -> Any:
    """Have a process of its own run one of `_PROGRAMS`.

    Args:
        program: its name.
        asked: what the program is given, as JSON has it.
        cpu: seconds of a processor that the program allows itself.

    Returns:
        What the program returns, as JSON has it.

    Raises:
        _EndlessError: the system ended the process.
        _FailedError: the process gave no answer.
    """
    # The directory somebody stands in is no place to import from, so Python looks only where this one does.
    script = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import serve; serve(sys.argv[1])"
    # More threads would only reserve memory.
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, program, *map(os.path.abspath, sys.path)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env={**os.environ, **alone, "HF_HUB_OFFLINE": "1"},
            timeout=60 + 4 * cpu,
        )
    except subprocess.TimeoutExpired:
        raise _EndlessError from None
    # The kernel's own ends: of processor time, and by a machine that has no memory left.
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _EndlessError
    try:
        return json.loads(done.stdout)
    except ValueError:
        told = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _FailedError(f"exit code {done.returncode}, {told}") from None


def serve(program: str) -> None:
    """What the process does: run a program on what stdin has, and write what it returns to stdout."""
    # What a library prints must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    answer = _PROGRAMS[program](json.load(sys.stdin))
    with os.fdopen(out, "w") as stream:
        json.dump(answer, stream)


def _limit(cpu: int, memory: int) -> None:
    """Bound this process from here on.

    Args:
        cpu: seconds of a processor.
        memory: bytes beside what it has already.
    """
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


def _render(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Render conversations, in the process; what came of it."""
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Today
    _limit(asked["cpu"], asked["memory"])
    rendered: list[str] = []
    letters = 0
    for number, messages in enumerate(asked["conversations"]):
        try:
            made: Any = chat_template_utils.render_jinja_template(
                [messages], chat_template=asked["template"], **asked["variables"]
            )
        except MemoryError:
            return {"problem": "it takes more memory than it may", "at": number}
        except Exception as error:
            return {"problem": f"{error}"[:1000] or type(error).__name__, "at": number}
        text = made[0][0]
        letters += len(text)
        if letters > asked["letters"]:
            return {"problem": f"it makes more than {asked['letters']:,} letters", "at": number}
        rendered.append(text)
    return {"rendered": rendered}


def _use_tokenizer(asked: Mapping[str, Any]) -> str | None:
    """Encode and decode some texts, in the process; what is wrong with the tokenizer."""
    from tokenizers import Tokenizer

    _limit(asked["cpu"], asked["memory"])
    texts = asked["texts"]
    runs = [letter * _RUN + _END for letter in sorted(set("".join(texts)))]
    try:
        tokenizer = Tokenizer.from_str(asked["json"])
        for text in (*texts, *runs):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > _TOKENS * len(text.encode()):
                return f"makes {len(ids):,} tokens of {len(text):,} characters"
            tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        # One that fails says why when it is loaded or used; the library's panics are no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
    return None


_PROGRAMS = {"template": _render, "tokenizer": _use_tokenizer}

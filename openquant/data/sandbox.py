"""Runs the chat template and the tokenizer that come with a model in a subprocess with limited time and memory.

transformers renders chat templates in jinja's sandbox, which keeps them from files and from Python, but lets them loop
for hours and fill the memory. A tokenizer.json has rules that run on every text: replacements that may multiply it, and
patterns that may take exponential time. The library that runs them has no limits, and does not react to signals
meanwhile. A tokenizer that works on ordinary text and on long runs of one character may still fail on a text that was
made for it; docs/evaluation.md says so.

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

# The date that templates get. A real date would change figures from day to day.
TODAY = date(2026, 1, 1)
# CPU seconds and bytes of memory for trying a tokenizer. One of 262,000 tokens and 500,000 merges (41 MB) takes 2.4 s
# and 460 MB.
_CPU, _MEMORY = 20, 1 << 30
# How often each character is repeated, and what follows: a pattern that backtracks fails only at the end of a run.
_RUN, _END = 2000, "\x00"
# Rules of most byte-level tokenizers, which need no trial. Only the last makes text longer, as it turns each byte into
# a character, so it may occur once.
_HARMLESS = ("Sequence", "NFC", "Split", "Digits", "ByteLevel")
# Most tokens per byte of text. It is more than 1, because some tokenizers replace a character by several bytes.
_MAX_TOKENS_PER_BYTE = 16

Message = Mapping[str, Any]


class _EndlessError(Exception):
    """The subprocess reached its time limit and was ended."""


class _FailedError(Exception):
    """The subprocess ended without an answer; the message has its exit code and last line of stderr."""


@dataclass(frozen=True)
class Bounds:
    """Limits of rendering.

    Attributes:
        cpu: CPU seconds for all conversations; one more is added for each hundred of them.
        memory: bytes of memory beyond those of Python and transformers.
        characters: characters of all rendered texts together.
    """

    cpu: int = 10
    memory: int = 512 << 20
    characters: int = 64 << 20


def render(
    template: str,
    conversations: Sequence[Sequence[Message]],
    names: Sequence[object],
    variables: Mapping[str, str] | None = None,
    answered: bool = False,
    bounds: Bounds = Bounds(),
) -> list[str]:
    """Render conversations with a chat template, as transformers' `apply_chat_template` does.

    Args:
        template: the Jinja template.
        conversations: lists of messages, dicts with a `role` and mostly a `content`.
        names: name of each conversation in error messages, such as "prompts.jsonl line 3"; `str()` is taken of it.
        variables: further variables of the template: special tokens, such as {"bos_token": "<s>"}.
        answered: whether the conversations are complete. If not, the template's generation prompt is added.
        bounds: limits of time, memory and size.

    Returns:
        The text of each conversation; [] for none.

    Raises:
        SourceError: the template is broken, refuses a conversation, or exceeds its limits.
    """
    if not conversations:
        return []
    cpu = bounds.cpu + len(conversations) // 100
    task = {
        "template": template,
        "conversations": [[_without_nulls(message) for message in messages] for messages in conversations],
        "variables": {**(variables or {}), "add_generation_prompt": not answered},
        "cpu": cpu,
        "memory": bounds.memory,
        "characters": bounds.characters,
    }
    try:
        answer = _run("template", task, cpu)
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


def check_tokenizer(data: bytes, where: str, texts: Sequence[str], cpu: int = _CPU, memory: int = _MEMORY) -> None:
    """Let a tokenizer encode and decode texts within limits. Tokenizers of harmless rules only are not tried.

    Args:
        data: contents of tokenizer.json.
        where: the model, for messages.
        texts: texts to encode; long runs of each of their characters are encoded too.
        cpu: CPU seconds that it may take.
        memory: bytes of memory that it may take.

    Raises:
        SourceError: it exceeds the limits, or makes too many tokens. A tokenizer that cannot be loaded raises nothing.
    """
    if _is_harmless(data):
        return
    task = {"json": data.decode(errors="replace"), "texts": list(texts), "cpu": cpu, "memory": memory}
    try:
        problem = _run("tokenizer", task, cpu)
    except _EndlessError:
        problem = f"did not end within {cpu} seconds of processor time"
    except _FailedError:
        # The library aborts the process when it gets no memory.
        problem = f"takes more than {memory >> 20} MiB of memory"
    if problem is not None:
        raise SourceError(
            f"the tokenizer of {where} {problem}",
            "tokenizer.json is damaged, or made to do that: copy it from the model it was made from",
        )


def _is_harmless(data: bytes) -> bool:
    """Whether a tokenizer has only rules that make text at most a few times longer."""
    try:
        tokenizer = json.loads(data)
        rules = [tokenizer["normalizer"], tokenizer["pre_tokenizer"], tokenizer["decoder"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    types = [list(_rule_types(rule)) for rule in rules]
    return all(set(names) <= {*_HARMLESS} and names.count(_HARMLESS[-1]) <= 1 for names in types)


def _rule_types(rule: object) -> Iterator[object]:
    """The types of a rule and of all rules in it."""
    if isinstance(rule, dict):
        if "type" in rule:
            yield str(rule["type"])
        rule = list(rule.values())
    for inner in rule if isinstance(rule, list) else ():
        yield from _rule_types(inner)


def _run(program: str, task: Mapping[str, Any], cpu: int) -> Any:
    """Run one of `_PROGRAMS` in a subprocess.

    Args:
        program: its name.
        task: its argument, as JSON.
        cpu: CPU seconds that the program limits itself to.

    Returns:
        The program's result, as JSON.

    Raises:
        _EndlessError: the system ended the process.
        _FailedError: the process gave no answer.
    """
    # Python would import from the current directory, so the subprocess gets this process's path.
    script = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import serve; serve(sys.argv[1])"
    # More threads would only reserve memory.
    single_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    try:
        process = subprocess.run(
            [sys.executable, "-c", script, program, *map(os.path.abspath, sys.path)],
            input=json.dumps(task).encode(),
            capture_output=True,
            env={**os.environ, **single_thread, "HF_HUB_OFFLINE": "1"},
            timeout=60 + 4 * cpu,
        )
    except subprocess.TimeoutExpired:
        raise _EndlessError from None
    # The kernel sends SIGXCPU at the CPU limit, and SIGKILL if the machine runs out of memory.
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _EndlessError
    try:
        return json.loads(process.stdout)
    except ValueError:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _FailedError(f"exit code {process.returncode}, {last_line}") from None


def serve(program: str) -> None:
    """Run a program in the subprocess: read its task from stdin and write its result to stdout, both as JSON."""
    # Output of libraries goes to stderr, so that it does not mix with the result.
    out = os.dup(1)
    os.dup2(2, 1)
    answer = _PROGRAMS[program](json.load(sys.stdin))
    with os.fdopen(out, "w") as stream:
        json.dump(answer, stream)


def _limit(cpu: int, memory: int) -> None:
    """Limit this process from now on.

    Args:
        cpu: further CPU seconds.
        memory: further bytes of memory.
    """
    import resource

    def set_limit(kind: int, limit: int) -> None:
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # Some systems have the limit but refuse to set it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))

    set_limit(resource.RLIMIT_CORE, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)


def _render(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the subprocess: render conversations. Returns {"rendered": texts}, or {"problem": text, "at": number}."""
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Today
    _limit(task["cpu"], task["memory"])
    rendered: list[str] = []
    characters = 0
    for number, messages in enumerate(task["conversations"]):
        try:
            result: Any = chat_template_utils.render_jinja_template(
                [messages], chat_template=task["template"], **task["variables"]
            )
        except MemoryError:
            return {"problem": "it takes more memory than it may", "at": number}
        except Exception as error:
            return {"problem": f"{error}"[:1000] or type(error).__name__, "at": number}
        text = result[0][0]
        characters += len(text)
        if characters > task["characters"]:
            return {"problem": f"it makes more than {task['characters']:,} characters", "at": number}
        rendered.append(text)
    return {"rendered": rendered}


def _use_tokenizer(task: Mapping[str, Any]) -> str | None:
    """In the subprocess: encode and decode texts. Returns what is wrong with the tokenizer, None if nothing."""
    from tokenizers import Tokenizer

    _limit(task["cpu"], task["memory"])
    texts = task["texts"]
    runs = [character * _RUN + _END for character in sorted(set("".join(texts)))]
    try:
        tokenizer = Tokenizer.from_str(task["json"])
        for text in (*texts, *runs):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > _MAX_TOKENS_PER_BYTE * len(text.encode()):
                return f"makes {len(ids):,} tokens of {len(text):,} characters"
            tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        # Its error will be reported when it is loaded or used. The library's panics are not Exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
    return None


_PROGRAMS = {"template": _render, "tokenizer": _use_tokenizer}

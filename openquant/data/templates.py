"""Chat templates, which are programs that came with a model: run in a process of their own, with little of everything.

transformers renders them in jinja's sandbox, which keeps them from files and from Python, and lets them loop for hours
and fill the memory. So what they get here is a process that has a bounded time and memory and is told of nothing else:

    render("{% for m in messages %}{{ m.content }}{% endfor %}", [[{"role": "user", "content": "Hi"}]], ["a test"])
    # ["Hi"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from ..errors import SourceError
from ..files.small_files import short_repr
from .bounded import EndlessError, FailedError, ask, limit

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
    try:
        found = ask(__name__, asked, cpu)
    except EndlessError:
        raise SourceError(
            f"the model's chat template did not end within {cpu} seconds of processor time",
            "it may never end; give texts without messages, or a model whose template works",
        ) from None
    except FailedError as error:
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


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the process does: render what is asked for, and say what came of it."""
    from transformers.utils import chat_template_utils

    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Today:
            return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Today
    limit(asked["cpu"], asked["memory"])
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

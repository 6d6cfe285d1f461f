"""Loads the tokenizer of a checkpoint, without executing code that comes with it and without downloads.

transformers gets copies of the tokenizer's files in a temporary directory: no weights, pickles, code or pipes, and no
settings that name other files.

    tokenizer = load_tokenizer(Path("Qwen3-8B"))
    tokenizer.decode(tokenizer.encode("Hello"))         # "Hello"

Chat templates run as in transformers, in jinja's sandbox, which keeps them from files and from Python, and for so many
seconds at most.

    tokenizer.render_chat([{"role": "user", "content": "Hi"}], "a test")     # "<|im_start|>user\nHi<|im_end|>\n..."
"""

from __future__ import annotations

import hashlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..files.checkpoint import read_config, readable
from ..files.destination import output_errors
from ..files.model_files import parse_json, read_small, short_repr
from ..machine import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Files that tokenizers of transformers are loaded from. The largest known has 35 MB.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model", "spiece.model", "spm.model",
    "sentencepiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
# Which of them a tokenizer needs depends on its class, but settings alone are never enough.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_MAX_FILE = 256 << 20
# Seconds that a chat may take: a template may have a loop that never ends.
SECONDS = 30
# Keys of config.json that AutoTokenizer chooses the class by.
_CONFIG_KEYS = ("model_type", "tokenizer_class", "transformers_version")

# Text by which two tokenizers are compared: scripts, digits, spaces, code, and characters that only bytes can encode.
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 1234567.89 times; isn't it?\n\n\tdef f(x):\n        return {x: [31]}"
    "  # done\r\nGröße naïve cœur Ελληνικά Русский עברית العربية हिन्दी 日本語 한국어 中文 🙂👩\u200d👧 \u202e\x00\ufffd"
)

# A message of a chat, with a `role` and mostly a `content`.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        inner: the tokenizer of transformers.
        where: the model's name in messages.
        prefix: token ids that it puts before every text, such as (2,) for a BOS token.
        template: its chat template; None if it has none.
        digest: SHA-256 over its files, hexadecimal.
    """

    inner: PreTrainedTokenizerBase
    where: str
    prefix: tuple[int, ...]
    template: str | None
    digest: str

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            special: whether the tokenizer adds its special tokens, such as a BOS token.

        Raises:
            SourceError: the tokenizer fails.
        """
        return _encode(self.inner, text, self.where, special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(self, messages: Sequence[Message], name: object, answered: bool = False) -> str:
        """Render a conversation with the model's chat template, as transformers' `apply_chat_template` does.

        Args:
            messages: its messages. Values that are null are left out, which templates would print as None.
            name: the conversation in error messages, such as "prompts.jsonl line 3"; `str()` is taken of it.
            answered: whether the conversation is complete. If not, the template's generation prompt is added.

        Raises:
            SourceError: the model has no template, or the template fails.
        """
        from unittest.mock import patch

        from transformers.utils import chat_template_utils

        if self.template is None:
            raise SourceError(
                f"{self.where} has no chat template, which {name} needs", "give plain text: `text` or `prompt`"
            )
        variables: Any = {
            name: str(token) for name, token in self.inner.special_tokens_map.items() if isinstance(token, str)
        }
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            with _at_most(SECONDS), patch.dict(vars(chat_template_utils), datetime=_Today):
                [text], _ = chat_template_utils.render_jinja_template(
                    [plain], chat_template=self.template, add_generation_prompt=not answered, **variables
                )
        except Exception as error:
            raise SourceError(
                f"the model's chat template fails for {name}: {short_repr(str(error) or type(error).__name__)}",
                "see which messages it takes, or give texts without messages",
            ) from None
        return str(text)

    def differences(self, other: Tokenizer) -> tuple[str, ...]:
        """Compare this tokenizer with another by what they do; other spaces in JSON do not count.

        Returns:
            What differs, such as "the chat template"; empty if nothing does.

        Raises:
            SourceError: one of them fails on a text that both are tried with.
        """
        if self.digest == other.digest:
            return ()

        probes = [PROBE, *map(str, self.inner.special_tokens_map.values())]

        def behave(tokenizer: Tokenizer) -> dict[str, object]:
            inner: Any = tokenizer.inner
            backend = getattr(inner, "backend_tokenizer", None)
            return {
                "the vocabulary": inner.get_vocab(),
                "how text becomes tokens": (
                    [tokenizer.encode(text, special=True) for text in probes],
                    None if backend is None else backend.to_str(),
                ),
                "the special tokens": inner.special_tokens_map,
                "the chat template": tokenizer.template,
            }

        ours, theirs = behave(self), behave(other)
        return tuple(what for what, behaviour in ours.items() if theirs[what] != behaviour)


def load_tokenizer(directory: Path, where: str | None = None, like: Tokenizer | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        directory: the checkpoint's directory, with config.json.
        where: the model's name in messages; None for the directory's path.
        like: a tokenizer that is already loaded, and is used again if its files are the same.

    Raises:
        SourceError: there is none, its files or config.json are damaged, or transformers cannot load it without
            other code.
    """
    where = where or str(directory)
    files = _read(directory)
    if not files.keys() - {*SETTINGS, *TEMPLATES}:
        raise SourceError(
            f"{where} has no tokenizer: none of {', '.join(FILES[:1] + FILES[4:9])} is there",
            "copy the tokenizer's files from the model it was made from",
        )

    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    if like is not None and like.digest == digest.hexdigest():
        return replace(like, where=where)

    inner = _load(directory, files, where)
    # Engines and the processors of transformers read chat_template.json too.
    template: Any = inner.chat_template or _object(files, "chat_template.json").get("chat_template")
    if isinstance(template, dict):
        # Several named templates, such as for tool use and for RAG.
        template = template.get("default")
    if not isinstance(template, str):
        template = None

    text = _encode(inner, "a", where, special=False)
    added = _encode(inner, "a", where)
    prefix = next((added[:at] for at in range(len(added)) if added[at : at + len(text)] == text), [])

    return Tokenizer(inner, where, tuple(prefix), template, digest.hexdigest())


def _read(directory: Path) -> dict[str, bytes]:
    """Contents of the tokenizer's files, by name."""
    files = {}
    for name in (*FILES, *TEMPLATES):
        path = directory / name
        with readable():
            if path.exists():
                files[name] = read_small(path, str(path), _MAX_FILE)
    return files


def _object(files: dict[str, bytes], name: str) -> dict[str, Any]:
    settings = parse_json(files[name], name) if name in files else {}
    if not isinstance(settings, dict):
        raise SourceError(f"{name} is not a JSON object", "download or copy it again")
    return settings


def _load(directory: Path, files: dict[str, bytes], where: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    temporary = tempfile.gettempdir()
    with output_errors(temporary), tempfile.TemporaryDirectory(prefix="openquant-tokenizer-") as folder:
        for name, data in files.items():
            if name in _CONFIGS:
                data = json.dumps(_safe_settings(_object(files, name))).encode()
            (Path(folder) / name).write_bytes(data)
        config = _safe_settings(read_config(directory))
        config = {key: config[key] for key in _CONFIG_KEYS if isinstance(config.get(key), str)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, token=False)
            if not isinstance(inner, PreTrainedTokenizerBase):
                raise TypeError(f"{type(inner).__name__} is no tokenizer")
        except Exception as error:
            raise _source_error(error, f"the tokenizer of {where} cannot be loaded") from None
    return inner


def _safe_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a tokenizer without code and file names, which transformers would open."""
    return {
        key: value
        for key, value in settings.items()
        if not key.endswith(("_file", "_files", "_path"))
        and key not in ("auto_map", "init_inputs", "subfolder", "revision", "trust_remote_code")
    }


def _encode(inner: PreTrainedTokenizerBase, text: str, where: str, special: bool = True) -> list[int]:
    try:
        return list(inner(text, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception as error:
        raise _source_error(error, f"the tokenizer of {where} fails on {short_repr(text)}") from None


def _source_error(error: Exception, what: str) -> SourceError:
    return SourceError(
        f"{what}: {type(error).__name__}: {short_repr(first_line(error))}",
        "see that transformers' AutoTokenizer loads it without trust_remote_code",
    )


class _Today(datetime):
    """The clock of chat templates, which stands still: a real date would change figures from day to day."""

    @classmethod
    def now(cls, tz: Any = None) -> _Today:
        """Return the same day always."""
        return cls(2026, 1, 1, tzinfo=tz)


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise an error in the block after so many seconds; in the main thread, which alone hears of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

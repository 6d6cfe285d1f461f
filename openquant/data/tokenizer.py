"""Loads the tokenizer of a checkpoint, without executing code that comes with it and without downloads.

transformers gets copies of the tokenizer's files in a temporary directory: no weights, pickles, code or pipes, and no
settings that name other files.

    tokenizer = load_tokenizer(Path("Qwen3-8B"))
    tokenizer.decode(tokenizer.encode("Hello"))         # "Hello"

Runs the chat template that comes with a model in a subprocess with limited time and memory.

transformers renders chat templates in jinja's sandbox, which keeps them from files and from Python, but lets them loop
for hours and fill the memory.

    render("{% for m in messages %}{{ m.content }}{% endfor %}", [[{"role": "user", "content": "Hi"}]], ["a test"])
    # ["Hi"]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..files.checkpoint import read_config, readable
from ..files.model_files import parse_json, read_small, short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Files that tokenizers of transformers are loaded from. The largest known has 35 MB.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model", "spiece.model", "spm.model",
    "sentencepiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_CLASS = re.compile(r"(?!Auto)\w+(Tokenizer(Fast)?|Backend)", re.ASCII)
_MAX_FILE = 256 << 20
_MAX_TEMPLATE = 1 << 20
# Keys of config.json that AutoTokenizer chooses the class by.
_CONFIG_KEYS = ("model_type", "tokenizer_class", "transformers_version")

# Text by which two tokenizers are compared: scripts, digits, spaces, code, and characters that only bytes can encode.
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 1234567.89 times; isn't it?\n\n\tdef f(x):\n        return {x: [31]}"
    "  # done\r\nGröße naïve cœur Ελληνικά Русский עברית العربية हिन्दी 日本語 한국어 中文 🙂👩\u200d👧 \u202e\x00\ufffd"
)


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

    def render_chats(
        self, conversations: Sequence[Sequence[Message]], names: Sequence[object], answered: bool = False
    ) -> list[str]:
        """Render conversations with the model's chat template.

        Args:
            conversations: lists of messages, dicts with a `role` and mostly a `content`.
            names: name of each conversation in error messages, such as "prompts.jsonl line 3"; at least one.
            answered: whether the conversations are complete. If not, the template's generation prompt is added.

        Returns:
            The text of each conversation.

        Raises:
            SourceError: the model has no template, or the template fails.
        """
        if self.template is None:
            raise SourceError(
                f"{self.where} has no chat template, which {names[0]} needs", "give plain text: `text` or `prompt`"
            )
        variables = {
            name: str(token) for name, token in self.inner.special_tokens_map.items() if isinstance(token, str)
        }
        return render(self.template, conversations, names, variables, answered)

    def require_in_vocabulary(self, token: int, vocabulary: int | None) -> None:
        """Require that the model has a token.

        Args:
            token: the largest token id of some texts.
            vocabulary: the model's vocabulary size; None for no check.

        Raises:
            SourceError: the model has fewer tokens.
        """
        if vocabulary is not None and token >= vocabulary:
            raise SourceError(
                f"the tokenizer of {self.where} gives token {token}, the model has {vocabulary}",
                "copy the tokenizer's files from the model it was made from",
            )

    def differences(self, other: Tokenizer) -> tuple[str, ...]:
        """Compare this tokenizer with another by what they do; other spaces in JSON do not count.

        Returns:
            What differs, such as "the chat template"; empty if nothing does.

        Raises:
            SourceError: one of them fails on a text that both are tried with.
        """
        if self.digest == other.digest:
            return ()

        differences = []
        ours, theirs = self.inner.get_vocab(), other.inner.get_vocab()
        if ours != theirs:
            count = sum(theirs.get(token) != number for token, number in ours.items()) + len(
                theirs.keys() - ours.keys()
            )
            differences.append(f"{count} of {len(ours)} tokens")

        probes = [PROBE, *map(str, self.inner.special_tokens_map.values())]
        encoded = [(_encode(tokenizer.inner, text, tokenizer.where) for text in probes) for tokenizer in (self, other)]
        if any(mine != yours for mine, yours in zip(*encoded, strict=True)) or _backend_json(self) != _backend_json(
            other
        ):
            differences.append("how text becomes tokens")

        if self.inner.special_tokens_map != other.inner.special_tokens_map:
            differences.append("the special tokens")
        if self.template != other.template:
            differences.append("the chat template")

        return tuple(differences)


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
    # Which files a tokenizer needs depends on its class, but settings alone are never enough.
    if not files.keys() - {*_CONFIGS, *TEMPLATES, "added_tokens.json"}:
        raise SourceError(
            f"{where} has no tokenizer: none of {', '.join(FILES[:1] + FILES[4:9])} is there",
            "copy the tokenizer's files from the model it was made from",
        )

    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    if like is not None and like.digest == digest.hexdigest():
        return replace(like, where=where)

    template = _template(files)
    inner = _load(directory, files, where)
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
                files[name] = read_small(path, str(path), _MAX_TEMPLATE if name in TEMPLATES else _MAX_FILE)
    return files


def _object(files: dict[str, bytes], name: str) -> dict[str, Any]:
    value = parse_json(files[name], name) if name in files else {}
    if not isinstance(value, dict):
        raise SourceError(f"{name} is {short_repr(value)}, not a JSON object", "download or copy it again")
    return value


def _template(files: dict[str, bytes]) -> str | None:
    """The chat template, from any of the files that transformers and engines read one from; None without one."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"chat_template.jinja is not UTF-8: {error}", "download or copy it again") from None

    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _object(files, name).get("chat_template")
        if isinstance(template, list):
            # Several named templates, such as for tool use and for RAG.
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")

        if isinstance(template, str):
            return template

    return None


def _load(directory: Path, files: dict[str, bytes], where: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with tempfile.TemporaryDirectory(prefix="openquant-tokenizer-") as folder:
        for name, data in files.items():
            if name in _CONFIGS:
                data = json.dumps(_safe_settings(_object(files, name), name)).encode()
            if name not in TEMPLATES:
                (Path(folder) / name).write_bytes(data)
        config = _safe_settings(read_config(directory), "config.json")
        config = {key: config[key] for key in _CONFIG_KEYS if isinstance(config.get(key), str)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, token=False)
            if not isinstance(inner, PreTrainedTokenizerBase):
                raise TypeError(f"{type(inner).__name__} is no tokenizer")
        except BaseException as error:
            raise _as_source_error(error, f"the tokenizer of {where} cannot be loaded") from None
    return inner


def _safe_settings(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings of a tokenizer without code, file names (which transformers would open) and templates."""
    class_name = settings.get("tokenizer_class")
    # transformers would accept any name it exports, also of a model or a function.
    if class_name is not None and not (isinstance(class_name, str) and _CLASS.fullmatch(class_name)):
        raise SourceError(f"{name} has tokenizer_class {short_repr(class_name)}", "download or copy it again")
    return {
        key: value
        for key, value in settings.items()
        if not key.endswith(("_file", "_files", "_path"))
        and key not in ("auto_map", "init_inputs", "chat_template", "subfolder", "revision", "trust_remote_code")
    }


def _encode(inner: PreTrainedTokenizerBase, text: str, where: str, special: bool = True) -> list[int]:
    try:
        return list(inner(text, add_special_tokens=special, verbose=False)["input_ids"])
    except BaseException as error:
        raise _as_source_error(error, f"the tokenizer of {where} fails on {short_repr(text)}") from None


def _as_source_error(error: BaseException, what: str) -> BaseException:
    """The SourceError for an error or a Rust panic of transformers' tokenizers; an interrupt is returned as it is."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    first_line = str(error).strip().partition("\n")[0]
    return SourceError(
        f"{what}: {type(error).__name__}: {short_repr(first_line)}",
        "see that transformers' AutoTokenizer loads it without trust_remote_code",
    )


def _backend_json(tokenizer: Tokenizer) -> object:
    """The JSON that defines a tokenizer of the Rust library; None for other tokenizers."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else None


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

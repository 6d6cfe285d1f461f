"""The tokenizer of a checkpoint, of which nothing is executed and nothing fetched.

transformers is given copies of the files that say what a tokenizer is, in a directory of their own: no weights, no
pickles, no code, no pipes, and nothing that could name a file elsewhere. Chat templates are rendered by sandbox.py.

    tokenizer = load(Path("Qwen3-8B"))
    tokenizer.decode(tokenizer.encode("Hello"))         # "Hello"
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..files.checkpoint import read_config, readable
from ..files.small_files import parse_json, read_small, short_repr
from .sandbox import Message, check_tokenizer, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What any tokenizer of transformers is made from; the largest known is 35 MB.
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
# Of a config.json: which classes there are for it, nothing that could be large.
_OF_CONFIG = ("model_type", "tokenizer_class", "transformers_version")

# Held against another tokenizer's: scripts, digits, spaces, code, what only bytes can say.
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 1234567.89 times; isn't it?\n\n\tdef f(x):\n        return {x: [31]}"
    "  # done\r\nGröße naïve cœur Ελληνικά Русский עברית العربية हिन्दी 日本語 한국어 中文 🙂👩\u200d👧 \u202e\x00\ufffd"
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.

    Attributes:
        inner: transformers' own.
        where: its directory, as messages name it.
        prefix: ids that it sets before every text, such as [2] where there is a token for the beginning.
        template: its chat template, None if it has none.
        digest: SHA-256 of the files it was made from, hexadecimal.
    """

    inner: PreTrainedTokenizerBase
    where: str
    prefix: tuple[int, ...]
    template: str | None
    digest: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any that the tokenizer would add.

        Raises:
            SourceError: it cannot.
        """
        return _encode(self.inner, text, self.where, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text that ids stand for, special tokens included."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def chats(
        self, conversations: Sequence[Sequence[Message]], names: Sequence[object], answered: bool = False
    ) -> list[str]:
        """Conversations in the model's own form; sandbox.render() has the arguments.

        Raises:
            SourceError: the model has no template, or it fails.
        """
        if self.template is None:
            raise SourceError(
                f"{self.where} has no chat template, which {names[0]} needs", "give plain text: `text` or `prompt`"
            )
        variables = {
            name: str(token) for name, token in self.inner.special_tokens_map.items() if isinstance(token, str)
        }
        return render(self.template, conversations, names, variables, answered)

    def differences(self, other: Tokenizer) -> tuple[str, ...]:
        """In what another tokenizer does something else than this one, such as "the chat template"; mostly nothing.

        A tokenizer that is only written otherwise, with other spaces in its JSON say, does the same.
        """
        if self.digest == other.digest:
            return ()
        found = []
        ours, theirs = self.inner.get_vocab(), other.inner.get_vocab()
        if ours != theirs:
            count = sum(theirs.get(token) != number for token, number in ours.items()) + len(
                theirs.keys() - ours.keys()
            )
            found.append(f"{count} of {len(ours)} tokens")
        probes = [PROBE, *map(str, self.inner.special_tokens_map.values())]
        encoded = [(_encode(each.inner, text, each.where) for text in probes) for each in (self, other)]
        if any(mine != yours for mine, yours in zip(*encoded, strict=True)) or _defined(self) != _defined(other):
            found.append("how text becomes tokens")
        if self.inner.special_tokens_map != other.inner.special_tokens_map:
            found.append("the special tokens")
        if self.template != other.template:
            found.append("the chat template")
        return tuple(found)


def load_tokenizer(directory: Path, where: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint's directory.

    Args:
        directory: where its files lie.
        where: what messages call it; the directory's path if None.

    Raises:
        SourceError: there is none, its files are damaged, it is one that transformers cannot load alone, or it takes
            more time or memory than any that is known.
    """
    where = where or str(directory)
    files = _read(directory)
    # Some tokenizers are a vocabulary of fewer kinds of files; settings alone are none.
    if not files.keys() - {*_CONFIGS, *TEMPLATES, "added_tokens.json"}:
        raise SourceError(
            f"{where} has no tokenizer: none of {', '.join(FILES[:1] + FILES[4:9])} is there",
            "copy the tokenizer's files from the model it was made from",
        )
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    template = _template(files)
    if "tokenizer.json" in files:
        check_tokenizer(files["tokenizer.json"], where, [PROBE])
    inner = _load(directory, files, where)
    text = _encode(inner, "a", where, special=False)
    added = _encode(inner, "a", where)
    prefix = next((added[:at] for at in range(len(added)) if added[at : at + len(text)] == text), [])
    return Tokenizer(inner, where, tuple(prefix), template, digest.hexdigest())


def _read(directory: Path) -> dict[str, bytes]:
    """The files of a tokenizer that are there."""
    files = {}
    for name in (*FILES, *TEMPLATES):
        path = directory / name
        with readable():
            if path.exists():
                files[name] = read_small(path, str(path), _MAX_TEMPLATE if name in TEMPLATES else _MAX_FILE)
    return files


def _object(files: dict[str, bytes], name: str) -> dict[str, Any]:
    found = parse_json(files[name], name) if name in files else {}
    if not isinstance(found, dict):
        raise SourceError(f"{name} is {short_repr(found)}, not a JSON object", "download or copy it again")
    return found


def _template(files: dict[str, bytes]) -> str | None:
    """The chat template, from wherever transformers and engines look for one."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"chat_template.jinja is not UTF-8: {error}", "download or copy it again") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _object(files, name).get("chat_template")
        if isinstance(found, list):
            # Several, by name: for tools, for documents to quote.
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _load(directory: Path, files: dict[str, bytes], where: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with tempfile.TemporaryDirectory(prefix="openquant-tokenizer-") as folder:
        for name, data in files.items():
            if name in _CONFIGS:
                data = json.dumps(_harmless(_object(files, name), name)).encode()
            if name not in TEMPLATES:
                (Path(folder) / name).write_bytes(data)
        config = _harmless(read_config(directory), "config.json")
        config = {key: config[key] for key in _OF_CONFIG if isinstance(config.get(key), str)}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, token=False)
            if not isinstance(inner, PreTrainedTokenizerBase):
                raise TypeError(f"{type(inner).__name__} is no tokenizer")
        except BaseException as error:
            raise _failed(error, f"the tokenizer of {where} cannot be loaded") from None
    return inner


def _harmless(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings of a tokenizer without code, without names of files, which would be opened wherever they are, and
    without templates."""
    chosen = settings.get("tokenizer_class")
    # transformers would take any of its names for one, models and functions too.
    if chosen is not None and not (isinstance(chosen, str) and _CLASS.fullmatch(chosen)):
        raise SourceError(f"{name} has tokenizer_class {short_repr(chosen)}", "download or copy it again")
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
        raise _failed(error, f"the tokenizer of {where} fails on {short_repr(text)}") from None


def _failed(error: BaseException, what: str) -> BaseException:
    """What to raise in place of an error of transformers or of the Rust below it, whose panics are no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    told = str(error).strip().partition("\n")[0]
    return SourceError(
        f"{what}: {type(error).__name__}: {short_repr(told)}",
        "see that transformers' AutoTokenizer loads it without trust_remote_code",
    )


def _defined(tokenizer: Tokenizer) -> object:
    """All that a tokenizer does, where it is one of those that are written in one JSON."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else None

"""What a visitor chose on the page, checked, and the words of the command lines that do it.

Only options of an allow list go into a command, and none that names a file.

    choice = Chosen(model="Qwen/Qwen3-8B", scheme="int4", gptq=True)
    choice.compress(Roots((Path.cwd(),)))       # ["compress", "-m", "Qwen/Qwen3-8B", "--scheme", "int4", "--gptq", ..]
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files.small_files import short_repr
from ..options import CalibrationTexts, FitOptions, Option, Recipe, Run, flags_of, options_of

# Options behind the page's fold, by the class that has them.
_ADVANCED: Mapping[type, tuple[str, ...]] = {
    Recipe: (
        *("kv_cache", "quantize_lm_head", "quantize_embeddings", "ignore", "group_size", "asymmetric", "awq", "smooth"),
        *("calibrate", "activation_scheme", "no_search", "format", "scale_format", "tp"),
    ),
    FitOptions: ("engines", "candidates"),
    CalibrationTexts: ("samples", "length"),
    Run: ("revision", "workers", "max_memory"),
}
ADVANCED: Mapping[str, Option] = {name: options_of(kind)[name] for kind, names in _ADVANCED.items() for name in names}
# In a command, what the one before it wrote.
OUTPUT = "{output}"
MOST_LETTERS = 1000
# Of a directory that a visitor names, more files are not looked at.
MOST_FILES = 10_000
_REPOSITORY = re.compile(r"(?!-)[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,200})?", re.ASCII)
_NAME = re.compile(r"(?!-)([\w.-]{1,96}/)?[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True)
class Roots:
    """The directories that the page may read and write.

    Attributes:
        paths: the directories with links resolved. Runs are kept in the first.
    """

    paths: tuple[Path, ...]

    def find(self, text: str) -> Path:
        """Find what a visitor names.

        Args:
            text: an absolute path, or one that begins with "./" and is relative to the first directory.

        Returns:
            The path with all links resolved.

        Raises:
            UsageError: it, or a file in it, lies outside of the directories, or is missing.
        """
        hint = f"name one below {' or '.join(map(str, self.paths))}; openquant web --root DIR allows others"
        try:
            path = Path(os.path.realpath(self.paths[0] / text, strict=True))
            inside = self._holds(path)
            # Small files are copied into outputs, which may be published.
            for number, found in enumerate(path.rglob("*") if inside and path.is_dir() else ()):
                if number > MOST_FILES:
                    raise UsageError(f"{path} has more than {MOST_FILES:,} files", "name the model's own directory")
                inside = inside and (not found.is_symlink() or self._holds(Path(os.path.realpath(found))))
        except (OSError, ValueError):
            raise UsageError(f"{short_repr(text)} is no directory or file that can be read", hint) from None
        if not inside:
            raise UsageError(f"{short_repr(text)} is outside of the directories of this page", hint)
        return path

    def _holds(self, path: Path) -> bool:
        return any(path == root or root in path.parents for root in self.paths)


def is_local(model: str) -> bool:
    """Whether a visitor names a directory or file, and not a repository: a path begins with "/" or "."."""
    return model.startswith(("/", "."))


def checked_model(model: str, roots: Roots) -> str:
    """Check the model that a visitor names.

    Args:
        model: "org/name", "org/name@revision", or a path.
        roots: the directories that may be read.

    Returns:
        The word for `-m`: the repository as it is, or an absolute path.

    Raises:
        UsageError: it is neither, or the path is not allowed.
    """
    if is_local(model):
        return str(roots.find(model))
    if not _REPOSITORY.fullmatch(model):
        raise UsageError(
            f"{short_repr(model)} is no model" if model else "no model is named",
            "name a repository on the Hub, such as Qwen/Qwen3-8B, or a directory that begins with / or ./",
        )
    return model


@dataclass(frozen=True)
class Chosen:
    """What a visitor chose.

    Attributes:
        model: repository or path.
        scheme: the scheme of all layers; not used with `fit`.
        fit: the size that a mixture of schemes is to have, as --fit takes it; "" for a single scheme.
        context: tokens of KV cache beside a mixture, as --context takes it; "" for the default.
        gptq: whether GPTQ rounds the weights.
        push: repository that the output goes to, shard by shard, so that none is kept here; "" to keep it here.
        private: whether that repository becomes private if it is created.
        create_pr: whether a pull request is opened there.
        evaluate: whether the output is measured at the end.
        advanced: values of options in ADVANCED, by name, as texts; switches are "1".
    """

    model: str
    scheme: str = "tensor"
    fit: str = ""
    context: str = ""
    gptq: bool = False
    push: str = ""
    private: bool = False
    create_pr: bool = False
    evaluate: bool = False
    advanced: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.advanced if name not in ADVANCED]
        if unknown:
            raise UsageError(f"{short_repr(unknown[0])} is no option of this page", "use the command line")
        for text in (self.model, self.scheme, self.fit, self.context, self.push, *self.advanced.values()):
            if len(text) > MOST_LETTERS or not text.replace("\n", "").isprintable():
                raise UsageError(f"{short_repr(text)} has control characters, or is too long", "write it anew")
        if self.push:
            _checked_name(self.push)

    def steps(self, roots: Roots) -> list[list[str]]:
        """Return the commands of a run: compress, and eval if it is wanted, as words after `openquant`."""
        compress = self.compress(roots)
        if not self.evaluate:
            return [compress]
        model = checked_model(self.model, roots)
        stream = [] if is_local(model) else ["--stream"]
        return [compress, ["eval", OUTPUT, "--source", model, *stream]]

    def compress(self, roots: Roots) -> list[str]:
        """Return the words of the compress command.

        Args:
            roots: the directories that may be read.

        Raises:
            UsageError: the model is not allowed.
        """
        model = checked_model(self.model, roots)
        words = ["compress", *_pair("-m", model)]
        words += _pair("--fit", self.fit) if self.fit else _pair("--scheme", self.scheme)
        words += _pair("--context", self.context) if self.fit and self.context else []
        words += ["--gptq"] if self.gptq else []
        for name, option in ADVANCED.items():
            flag = flags_of(name, option)[-1]
            for value in self._values(name):
                words += [flag] if option.value is None else _pair(flag, value)
        words += [] if is_local(model) else ["--stream"]
        if self.push:
            words += [*_pair("--push-to-hub", self.push), "--push-only", *_published(self.private, self.create_pr)]
        return words

    def keywords(self, roots: Roots) -> dict[str, Any]:
        """Return the same as arguments of `openquant.compress`, without where it is published."""
        values = {name: self._values(name) for name in ADVANCED}
        chosen: dict[str, Any] = {
            name: value if ADVANCED[name].repeated else True if ADVANCED[name].value is None else value[0]
            for name, value in values.items()
            if value
        }
        chosen |= {"model": checked_model(self.model, roots), "gptq": self.gptq}
        return chosen | ({"fit": self.fit} if self.fit else {"scheme": self.scheme})

    def _values(self, name: str) -> list[str]:
        """The values of an advanced option: one a line if it is repeatable, none if it has its default."""
        option, text = ADVANCED[name], self.advanced.get(name, "").strip()
        lines = [line.strip() for line in text.split("\n")] if option.repeated else [text]
        return [line for line in lines if line and line != str(option.default)]


def push_words(directory: Path, name: str, private: bool, create_pr: bool) -> list[str]:
    """Return the words of the push command.

    Args:
        directory: the output.
        name: the repository, with or without a namespace.
        private: whether it becomes private if it is created.
        create_pr: whether a pull request is opened.

    Raises:
        UsageError: it is no name of a repository.
    """
    return ["push", str(directory), _checked_name(name), *_published(private, create_pr)]


def shown(words: Sequence[str]) -> str:
    """Return a command as one line for a shell.

    Args:
        words: the words after `openquant`.
    """
    return shlex.join(["openquant", *words])


def _pair(flag: str, value: str) -> list[str]:
    """An option and its value, which may begin with a dash and still is no option."""
    return [f"{flag}={value}"] if value.startswith("-") and flag.startswith("--") else [flag, value]


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{short_repr(name)} is no name of a repository" if name else "no repository is named",
            "name one such as you/Qwen3-8B-INT4, or Qwen3-8B-INT4 in your own namespace",
        )
    return name


def _published(private: bool, create_pr: bool) -> list[str]:
    return [*(["--private"] if private else []), *(["--create-pr"] if create_pr else [])]

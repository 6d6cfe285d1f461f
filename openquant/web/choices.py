"""What a visitor chose on the page, checked, the words of the command lines that do it, and its plan.

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

from ..errors import OpenQuantError, UsageError
from ..fields import Option, options_of, values_for, words_of
from ..files.model_files import short_repr
from ..options import CalibrationTexts, FitOptions, Recipe, Run
from .view import fit_html, plan_html, problem_html

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
_OPTIONS: Mapping[str, Option] = {name: option for kind in _ADVANCED for name, option in options_of(kind).items()}
ADVANCED: Mapping[str, Option] = {name: _OPTIONS[name] for names in _ADVANCED.values() for name in names}
# In a command, what the one before it wrote.
OUTPUT = "{output}"
_REPOSITORY = re.compile(r"(?!-)[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,200})?", re.ASCII)
_NAME = re.compile(r"(?!-)([\w.-]{1,96}/)?[\w.-]{1,96}", re.ASCII)
_DIRECTORY = re.compile(r"[\w][\w.-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Roots:
    """The directories that the page may read and write.

    Attributes:
        paths: the directories with links resolved. Outputs are written in the first.
    """

    paths: tuple[Path, ...]

    def find(self, text: str) -> Path:
        """Find what a visitor names.

        Args:
            text: an absolute path, or one that is relative to the first directory that has it, such as a bare name.

        Returns:
            The path with all links resolved.

        Raises:
            UsageError: it lies outside of the directories, or is missing.
        """
        roots = " or ".join(map(str, self.paths))
        hint = f"name one below {roots}, or a repository such as Qwen/Qwen3-8B; openquant web --root DIR allows others"
        try:
            root = next((root for root in self.paths if (root / text).exists()), self.paths[0])
            path = Path(os.path.realpath(root / text, strict=True))
            is_inside = self._holds(path)
        except (OSError, ValueError):
            raise UsageError(f"{short_repr(text)} is no directory or file that can be read", hint) from None

        if not is_inside:
            raise UsageError(f"{short_repr(text)} is outside of the directories of this page", hint)
        return path

    def models(self) -> list[str]:
        """Return the models of the directories, down to the second level, each as `find` takes it."""
        patterns = ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors")
        found = {file.parent for root in self.paths for pattern in patterns for file in root.glob(pattern)}
        found = {path for path in found if self._holds(Path(os.path.realpath(path))) and path.name[:1] != "."}
        return sorted({path.name if path.parent in self.paths else str(path) for path in found})

    def _holds(self, path: Path) -> bool:
        """Whether a resolved path lies in one of the directories."""
        return any(path == root or root in path.parents for root in self.paths)


def is_local(model: str) -> bool:
    """Whether a visitor names a directory or file: a path begins with "/" or ".", and a bare name has no slash."""
    return model.startswith(("/", ".")) or "/" not in model


def check_model(model: str, roots: Roots) -> str:
    """Check the model that a visitor names.

    Args:
        model: "org/name", "org/name@revision", a path, or the bare name of a directory.
        roots: the directories that may be read.

    Returns:
        The word for `-m`: the repository as it is, or an absolute path.

    Raises:
        UsageError: it is neither, or the path is not allowed.
    """
    hint = "name a repository on the Hub, such as Qwen/Qwen3-8B, or a directory of the list"
    if not model:
        raise UsageError("no model is named", hint)
    if is_local(model):
        return str(roots.find(model))

    if not _REPOSITORY.fullmatch(model):
        raise UsageError(f"{short_repr(model)} is no model", hint)
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
        output: name of the directory in the first root that the output goes to; "" for that of `compress`.
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
    output: str = ""
    push: str = ""
    private: bool = False
    create_pr: bool = False
    evaluate: bool = False
    advanced: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.output and not _DIRECTORY.fullmatch(self.output):
            raise UsageError(
                f"{short_repr(self.output)} is no name of a directory", "name one without slashes, such as Qwen3-8B-A"
            )
        if self.push:
            _check_name(self.push)

    def steps(self, roots: Roots) -> list[list[str]]:
        """Return the commands of a run as words after `openquant`: compress, verify of what stays here, and eval."""
        steps = [self.compress(roots)]
        if not self.push:
            steps.append(["verify", OUTPUT])
        if self.evaluate:
            steps.append(["eval", OUTPUT, "--source", check_model(self.model, roots), *self._stream()])
        return steps

    def compress(self, roots: Roots) -> list[str]:
        """Return the words of the compress command.

        Args:
            roots: the directories that may be read.

        Raises:
            UsageError: the model is not allowed.
        """
        words = ["compress", *words_of(_OPTIONS, self.keywords(roots)), *self._stream()]
        if self.push:
            words += ["--push-to-hub", self.push, "--push-only", *_visibility(self.private, self.create_pr)]
        return words

    def keywords(self, roots: Roots) -> dict[str, Any]:
        """Return the same as arguments of `openquant.compress`, without where it is published."""
        schemes = {"scheme": self.scheme}
        if self.fit:
            schemes = {"fit": self.fit, "context": self.context}
        chosen: dict[str, Any] = {"model": check_model(self.model, roots), "output": self.output, **schemes}
        chosen["gptq"] = self.gptq

        for name, option in ADVANCED.items():
            values = self._values(name)
            if option.repeated:
                chosen[name] = values
            elif values:
                chosen[name] = option.value is None or values[0]
        return {name: value for name, value in chosen.items() if value or name == "scheme"}

    def _stream(self) -> list[str]:
        """The option by which a model of the Hub does not stay here."""
        if is_local(self.model):
            return []
        return ["--stream"]

    def _values(self, name: str) -> list[str]:
        """The values of an advanced option: one a line if it is repeatable, none if it has its default."""
        option = ADVANCED[name]
        text = self.advanced.get(name, "").strip()
        lines = [text]
        if option.repeated:
            lines = [line.strip() for line in text.split("\n")]
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
    return ["push", str(directory), _check_name(name), *_visibility(private, create_pr)]


def shown(words: Sequence[str]) -> str:
    """Return a command, without the word `openquant`, as one line for a shell."""
    return shlex.join(["openquant", *words])


def make_sections(compress: Mapping[str, Any] | None, fit: Mapping[str, Any]) -> dict[str, str]:
    """Make what the page shows of a model. Headers are read, and no weights.

    Args:
        compress: arguments of openquant.compress; without a `scheme`, the plan has the best that fits the GPU. None for
            a mixture, which is planned only when it is measured.
        fit: arguments of openquant.fit_table.

    Returns:
        "html": the sections; "problem": the error of a command that would be refused, as HTML; "scheme" of the plan.
    """
    from ..api import check_request, find_space, plan_of
    from ..distributed import Ranks
    from ..fit.table import fit_table
    from ..result import Reporter

    answer: dict[str, str] = {"html": "", "problem": "", "scheme": ""}
    try:
        found = fit_table(**fit)
        answer["html"] = fit_html(found)

        if compress is not None:
            chosen = dict(compress)
            chosen["scheme"] = chosen.get("scheme") or found.uncalibrated or "tensor"
            answer["html"] = fit_html(found, chosen["scheme"])

            chosen["dry_run"] = True
            run = Run(**values_for(Run, chosen))
            recipe = Recipe(**values_for(Recipe, chosen))
            wanted = check_request(run, recipe, CalibrationTexts(**values_for(CalibrationTexts, chosen)))
            job = plan_of(wanted, Ranks(), Reporter())
            # A directory that the run would refuse is refused now.
            find_space(job, wanted.texts)

            answer["html"] += plan_html(job.plan, str(chosen["model"]))
            answer["scheme"] = chosen["scheme"]
    except OpenQuantError as problem:
        answer["problem"] = problem_html(problem)

    return answer


def _check_name(name: str) -> str:
    """Refuse what is no name of a repository."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{short_repr(name)} is no name of a repository" if name else "no repository is named",
            "name one such as you/Qwen3-8B-INT4, or Qwen3-8B-INT4 in your own namespace",
        )
    return name


def _visibility(private: bool, create_pr: bool) -> list[str]:
    """The options that say how a repository is published."""
    words = []
    if private:
        words.append("--private")
    if create_pr:
        words.append("--create-pr")
    return words

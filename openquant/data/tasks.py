"""Reads the tasks that the user names: files of questions, and tasks of lm-eval.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) makes the prompts and scores the answers. It runs with a
model that records what it is asked, and again with one that replays given answers; in between, our own forward passes
compute probabilities. Only its public functions are used.

    tasks = read_tasks(["my.jsonl", "arc_easy"], limit=200)
    tasks.questions         # 400
"""

from __future__ import annotations

import io
import logging
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from ..errors import OpenQuantError, SourceError, UsageError
from ..files.checkpoint import readable
from ..files.small_files import read_small, short_repr
from ..version import install_hint
from .questions import Figures, Flags, SeveralTasks, TaskAnswers, Tasks, read_questions

# The metrics of lm-eval that say of each question whether the answer is right.
METRICS = ("acc", "acc_norm", "exact_match")
# Names that end in these are files.
_FILES, _YAML = (".json", ".jsonl"), (".yaml", ".yml")
# What lm-eval calls answers that no filter changed.
_UNFILTERED = "none"
# Answers to requests for probabilities: that of the continuation as a logarithm, and whether each token is the top one.
_Probabilities = list[tuple[float, bool]]
# What lm-eval says of the machine after each run: it lists its packages with pip, three seconds, and asks git.
_DESCRIPTIONS = dict.fromkeys(("add_env_info", "get_git_commit_hash"), lambda *_: None)
# The samples of a task by filter, one for each question.
_Samples = Mapping[str, list[dict[str, Any]]]


def read_tasks(names: Sequence[str | os.PathLike[str]], limit: int | None) -> Tasks:
    """Read tasks.

    Args:
        names: paths of files (docs/evaluation.md says which), and names of tasks of lm-eval; at least one.
        limit: the most questions of each task; None for all.

    Raises:
        SourceError: a file or a task cannot be read.
        UsageError: lm-eval is needed and not installed, a task asks for something that cannot be computed, two have
            the same name, or they have no metric in common.
    """
    parts: list[Tasks] = []
    for_lm_eval: list[str] = []
    task_names: list[str] = []
    for name in names:
        path = Path(name)
        # Unlike Path.is_file(), this does not raise if a name is longer than that of a file may be.
        is_file = os.path.isfile(path)  # noqa: PTH113
        if path.suffix in _YAML and is_file:
            for_lm_eval.append(str(path))
        elif is_file:
            task = read_questions(path, limit)
            task_names.append(task.name)
            parts.append(task)
        elif path.suffix in (*_FILES, *_YAML) or os.path.exists(path) or isinstance(name, os.PathLike):  # noqa: PTH110
            raise SourceError(f"{path} is not a file", "give a .jsonl, .json or .yaml file, or a task of lm-eval")
        else:
            for_lm_eval.append(str(name))

    if for_lm_eval:
        from_lm_eval = read_lm_eval_tasks(for_lm_eval, limit)
        task_names += from_lm_eval.metrics
        parts.append(from_lm_eval)

    if len(set(task_names)) < len(task_names):
        twice = next(name for name in task_names if task_names.count(name) > 1)
        raise UsageError(f"two tasks are named {twice}", "give each once, or rename a file")

    tasks = parts[0] if len(parts) == 1 else SeveralTasks(parts)
    if not set.intersection(*map(set, tasks.metrics.values())):
        listed = ", ".join(f"{name} has {' and '.join(metrics)}" for name, metrics in tasks.metrics.items())
        raise UsageError(f"the tasks have no metric in common: {listed}", "evaluate them one after the other")
    return tasks


def read_lm_eval_tasks(names: Sequence[str], limit: int | None) -> LMEvalTasks:
    """Read tasks of lm-eval.

    Args:
        names: names of tasks or groups, and paths of YAML files that define one.
        limit: the most questions of each task; None for all.

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: lm-eval is not installed, or a task asks for something that cannot be computed.
    """
    try:
        with _quiet():
            import lm_eval  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{names[0]} is not a file, and lm-eval, which has tasks, is not installed", install_hint("tasks")
        ) from None

    tasks: list[str] = []
    files: dict[str, Path] = {}
    for name in names:
        path = Path(name)
        task = name
        if path.suffix == ".yml":
            raise SourceError(f"{path.name} is no YAML that lm-eval finds", f"rename it to {path.stem}.yaml")
        if path.suffix == ".yaml":
            task = _name_in(path)
            files.setdefault(task, path)
        if task in tasks:
            raise UsageError(f"two tasks are named {task}", "give each once, or rename one in its file")
        tasks.append(task)
    return LMEvalTasks(tasks, files, limit)


class LMEvalTasks:
    """Tasks of lm-eval.

    Args:
        tasks: their names, or the names of groups of them.
        files: the YAML file of each task that is not lm-eval's own, by name.
        limit: the most questions of each task; None for all.

    Attributes:
        metrics: the metrics of all tasks, those of groups included, by their names. If answers are filtered, the filter
            follows the metric, as lm-eval writes it: "exact_match,strict-match".

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: a task asks for something that cannot be computed.
    """

    def __init__(self, tasks: Sequence[str], files: Mapping[str, Path], limit: int | None) -> None:
        from lm_eval.tasks import TaskManager

        self._tasks = list(tasks)
        self._limit = limit
        with _quiet():
            # Listing all of its own tasks takes seconds.
            folders = list(dict.fromkeys(str(path.parent) for path in files.values()))
            self._manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
        for task, path in files.items():
            self._require_file(task, path)

        asked: list[Any] = []

        def record(instances: list[Any]) -> _Probabilities:
            asked.extend(instances)
            return [(0.0, False)] * len(instances)

        samples = self._run(record)
        self.requests: Sequence[tuple[str, str]] = [_texts(instance) for instance in asked]
        self._requests_of: dict[str, list[int]] = {}
        for number, instance in enumerate(asked):
            self._requests_of.setdefault(instance.task_name, []).append(number)

        self.questions = sum(len(_questions(of_task)) for of_task in samples.values())
        metrics = {name: list(_scores(of_task, name)) for name, of_task in samples.items()}
        for name, of_task in metrics.items():
            if not of_task:
                raise UsageError(
                    f"{name} of lm-eval has no accuracy",
                    f"choose tasks with {', '.join(METRICS[:-1])} or {METRICS[-1]}",
                )
        self.metrics: Mapping[str, Sequence[str]] = metrics

    def _require_file(self, task: str, path: Path) -> None:
        """Refuse a file if lm-eval would take the task from another one, which has the same name of a task."""
        entry: Any = self._manager.task_index.get(task)
        # Older versions have dicts.
        taken = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
        if isinstance(taken, (str, os.PathLike)) and Path(taken).resolve() != path.resolve():
            raise UsageError(
                f"{path.name} and {Path(taken).name} in its directory both define the task {task}", "rename one of them"
            )

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers; see `questions.Tasks`."""

        def replay(instances: list[Any]) -> _Probabilities:
            if [_texts(instance) for instance in instances] != self.requests:
                raise SourceError("lm-eval asks other questions than before", "see that no file of a task changes")
            return [(float(value), bool(top)) for value, top in zip(loglikelihoods, greedy, strict=True)]

        return [
            TaskAnswers(
                name,
                _scores(of_task, name),
                np.array([_picked(sample) for sample in _questions(of_task)], np.int64),
                np.array(self._requests_of.get(name, ()), np.int64),
            )
            for name, of_task in self._run(replay).items()
        ]

    def _run(self, answer: Callable[[list[Any]], _Probabilities]) -> Mapping[str, _Samples]:
        """Run lm-eval with a model that answers by a function; return the samples of each task."""
        import lm_eval

        try:
            with _quiet():
                results: Any = lm_eval.simple_evaluate(
                    model=_backend(answer),
                    tasks=self._tasks,
                    limit=self._limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    task_manager=self._manager,
                )
        except OpenQuantError:
            raise
        except Exception as error:
            first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise SourceError(
                f"lm-eval cannot make the questions of {', '.join(self._tasks)}: {short_repr(first_line)}",
                "`lm-eval ls tasks` lists its tasks; their data comes from the Hub",
            ) from error

        samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, of_task in results["samples"].items():
            by_filter = samples.setdefault(name, {})
            for sample in sorted(of_task, key=lambda sample: sample["doc_id"]):
                by_filter.setdefault(sample["filter"], []).append(sample)
        return samples


def _backend(answer: Callable[[list[Any]], _Probabilities]) -> Any:
    """Return a model of lm-eval that computes nothing itself."""
    from lm_eval.api.model import LM

    class Backend(LM):  # type: ignore[misc]  # mypy does not read lm-eval
        """Answers by a function."""

        def loglikelihood(self, requests: list[Any]) -> _Probabilities:
            return answer(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise UsageError(
                f"{requests[0].task_name} of lm-eval asks for the probability of whole texts",
                "choose tasks whose answers are right or wrong; --text measures the perplexity of texts",
            )

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise UsageError(
                f"{requests[0].task_name} of lm-eval asks for generated texts, which an engine generates",
                "start `vllm serve`, and run lm-eval with its model local-completions (docs/evaluation.md)",
            )

    return Backend()


class _Loader(yaml.SafeLoader):
    """Reads the YAML of lm-eval, which names functions, without running them."""


def _nothing(*of_tag: Any) -> None:
    """Construct the value of a YAML tag such as `!function`: None."""
    del of_tag


_Loader.add_multi_constructor("!", _nothing)


def _name_in(path: Path) -> str:
    """Return the name of the task that a YAML file defines."""
    with readable():
        data = read_small(path, path.name)

    try:
        value = yaml.load(data, _Loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML raises some of these for values such as `!!bool x`.
        raise SourceError(
            f"{path.name} is not YAML: {short_repr(str(error))}", "give the YAML of an lm-eval task"
        ) from None

    name = value.get("task", value.get("group")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise SourceError(f"{path.name} has no name of a task", "give it a line such as `task: mine`")

    return name


def _texts(instance: Any) -> tuple[str, str]:
    """Context and continuation of a request."""
    context, continuation = instance.args
    return str(context), str(continuation)


def _questions(samples: _Samples) -> list[dict[str, Any]]:
    """Return one sample of each question of a task; filters give further ones."""
    return next(iter(samples.values()), [])


def _scores(samples: _Samples, task: str) -> dict[str, Figures]:
    """Return the scores of each question of a task, by metric and filter."""
    return {
        metric if name == _UNFILTERED else f"{metric},{name}": np.array(
            [_score(sample, metric, task) for sample in of_filter], np.float64
        )
        for name, of_filter in samples.items()
        for metric in METRICS
        if metric in of_filter[0]
    }


def _score(sample: Mapping[str, Any], metric: str, task: str) -> float:
    """Return a question's score, which functions of a YAML may compute."""
    try:
        score = float(sample[metric])
    except (LookupError, TypeError, ValueError):
        score = math.nan
    if not 0 <= score <= 1:
        raise SourceError(
            f"{task} of lm-eval has a question whose {metric} is {short_repr(sample.get(metric))}, "
            "not a number from 0 to 1",
            "leave that task out",
        )
    return score


def _picked(sample: Mapping[str, Any]) -> int:
    """Return which of a question's requests has the highest probability; of one request, whether it is greedy."""
    values = [response[0] for response in sample["filtered_resps"]]
    contexts = [request[0] for request in sample["arguments"]]
    half = len(values) // 2
    if not any(contexts[half:]) and all(contexts[:half]):
        # For acc_mutual_info the choices are asked for once more, without the question.
        values = values[:half]
    return int(np.argmax(values)) if len(values) > 1 else int(sample["filtered_resps"][0][1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval from logging, printing, warning, describing this machine, and moving on random numbers."""
    import lm_eval.evaluator

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    states = random.getstate(), np.random.get_state()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            patch.dict(vars(lm_eval.evaluator), _DESCRIPTIONS),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])

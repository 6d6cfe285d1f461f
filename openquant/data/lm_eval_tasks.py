"""Runs lm-eval with a model that records what it is asked, and again with one that replays given answers.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) makes the prompts and scores the answers; in between our
own forward passes compute all requests of all models at once. Only its public functions are used.
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

import numpy as np
import yaml

from ..errors import OpenQuantError, SourceError, UsageError
from ..files.checkpoint import readable
from ..files.small_files import read_small, short_repr
from ..version import install_hint
from .questions import Figures, Flags, TaskAnswers

# The metrics of lm-eval that are a score for each question.
METRICS = ("acc", "acc_norm")


class LMEvalTasks:
    """Tasks of lm-eval.

    Args:
        tasks: their names, or the names of groups of them.
        files: the YAML file of each task that is not lm-eval's own, by name.
        limit: the most questions of each task; None for all.

    Attributes:
        metrics: the metrics of all tasks, those of groups included, by their names.

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: a task asks for something else than probabilities of choices.
    """

    def __init__(self, tasks: Sequence[str], files: Mapping[str, Path], limit: int | None) -> None:
        from lm_eval.tasks import TaskManager

        self._tasks, self._limit = list(tasks), limit
        with _quiet():
            # Listing all of its own tasks takes seconds.
            folders = list(dict.fromkeys(str(path.parent) for path in files.values()))
            self._manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
        for task, path in files.items():
            self._require_file(task, path)
        asked: list[Any] = []

        def record(instances: list[Any]) -> list[tuple[float, bool]]:
            asked.extend(instances)
            return [(0.0, False)] * len(instances)

        samples = self._run(record)
        self.requests: Sequence[tuple[str, str]] = [_texts(instance) for instance in asked]
        self._requests_of: dict[str, list[int]] = {}
        for number, instance in enumerate(asked):
            self._requests_of.setdefault(instance.task_name, []).append(number)
        self.questions = sum(len(of_task) for of_task in samples.values())
        for name, of_task in samples.items():
            if not of_task or not any(metric in of_task[0] for metric in METRICS):
                raise UsageError(f"{name} of lm-eval has no accuracy", f"choose tasks with {' or '.join(METRICS)}")
        self.metrics: Mapping[str, Sequence[str]] = {
            name: [metric for metric in METRICS if metric in of_task[0]] for name, of_task in samples.items()
        }
        for name, metrics in self.metrics.items():
            for sample in samples[name]:
                for metric in metrics:
                    _score(sample, metric, name)

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

        def replay(instances: list[Any]) -> list[tuple[float, bool]]:
            if [_texts(instance) for instance in instances] != self.requests:
                raise SourceError("lm-eval asks other questions than before", "see that no file of a task changes")
            return [(float(value), bool(top)) for value, top in zip(loglikelihoods, greedy, strict=True)]

        return [
            TaskAnswers(
                name,
                {
                    metric: np.array([_score(sample, metric, name) for sample in of_task], np.float64)
                    for metric in self.metrics[name]
                },
                np.array([_picked(sample) for sample in of_task], np.int64),
                np.array(self._requests_of[name], np.int64),
            )
            for name, of_task in self._run(replay).items()
        ]

    def _run(self, answer: Callable[[list[Any]], list[tuple[float, bool]]]) -> Mapping[str, list[dict[str, Any]]]:
        """Run lm-eval with a model that answers by `answer`; return the samples of each task, one for each question."""
        import lm_eval
        from lm_eval.api.model import LM

        class Backend(LM):  # type: ignore[misc]  # mypy does not read lm-eval
            """A model that computes nothing itself."""

            def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
                return answer(requests)

            def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
                raise UsageError(
                    f"{requests[0].task_name} of lm-eval asks for the probability of whole texts",
                    "choose multiple-choice tasks; --text measures the perplexity of texts",
                )

            def generate_until(self, requests: list[Any]) -> list[str]:
                raise UsageError(
                    f"{requests[0].task_name} of lm-eval asks for generated texts",
                    "choose multiple-choice tasks; lm-eval runs this one itself, with a server of vLLM or SGLang",
                )

        try:
            with _quiet():
                results: Any = lm_eval.simple_evaluate(
                    model=Backend(),
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
        # Filters give further samples of the same question; the first is what is reported.
        samples: dict[str, list[dict[str, Any]]] = {}
        for name, of_task in results["samples"].items():
            first = of_task[0]["filter"] if of_task else None
            samples[name] = sorted(
                (sample for sample in of_task if sample["filter"] == first), key=lambda sample: sample["doc_id"]
            )
        return samples


def read_lm_eval_tasks(names: Sequence[str], limit: int | None) -> LMEvalTasks:
    """Read tasks of lm-eval.

    Args:
        names: names of tasks or groups, and paths of YAML files that define one.
        limit: the most questions of each task; None for all.

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: lm-eval is not installed, or a task is no multiple-choice task.
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
    context, continuation = instance.args
    return str(context), str(continuation)


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
    """Keep lm-eval from logging, printing, warning, and changing the state of random numbers."""
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
            _quiet_subprocesses(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _quiet_subprocesses() -> Iterator[None]:
    """Send the stderr of subprocesses nowhere: lm-eval runs git, which complains outside of a repository."""
    try:
        saved = os.dup(2)
    except OSError:
        # It is closed.
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)

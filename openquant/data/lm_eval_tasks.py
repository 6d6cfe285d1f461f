"""Runs lm-eval with a model that records what it is asked, and again with one that replays given answers.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) makes the prompts and scores the answers; in between our
own forward passes compute all requests of all models at once. Only its public functions are used.
"""

from __future__ import annotations

import io
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
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
        folders: directories in which lm-eval looks for tasks beside its own.
        has_own: whether some of the tasks are lm-eval's own.
        limit: the most questions of each task; None for all.

    Attributes:
        names: names of all tasks, those of groups included.

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: a task asks for something else than probabilities of choices.
    """

    def __init__(self, tasks: Sequence[str], folders: Sequence[str], has_own: bool, limit: int | None) -> None:
        from lm_eval.tasks import TaskManager

        self._tasks, self._limit = list(tasks), limit
        with _quiet():
            # Listing all of its own tasks takes seconds.
            self._manager = TaskManager(include_path=list(folders) or None, include_defaults=has_own)
        asked: list[Any] = []

        def record(instances: list[Any]) -> list[tuple[float, bool]]:
            asked.extend(instances)
            return [(0.0, False)] * len(instances)

        samples = self._run(record)
        self.requests: Sequence[tuple[str, str]] = [_texts(instance) for instance in asked]
        self._requests_of: dict[str, list[int]] = {}
        for number, instance in enumerate(asked):
            self._requests_of.setdefault(instance.task_name, []).append(number)
        self.names = list(samples)
        self.questions = sum(len(of_task) for of_task in samples.values())
        for name, of_task in samples.items():
            if not of_task or not any(metric in of_task[0] for metric in METRICS):
                raise UsageError(f"{name} of lm-eval has no accuracy", f"choose tasks with {' or '.join(METRICS)}")

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
                    metric: np.array([float(sample[metric]) for sample in of_task], np.float64)
                    for metric in METRICS
                    if metric in of_task[0]
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
    tasks, folders = [], []
    for name in names:
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            tasks.append(_name_in(path))
            folders.append(str(path.parent))
        else:
            tasks.append(name)
    return LMEvalTasks(tasks, list(dict.fromkeys(folders)), len(folders) < len(tasks), limit)


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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


def _picked(sample: Mapping[str, Any]) -> int:
    """Return which of a question's requests has the highest probability; of one request, whether it is greedy."""
    values = [response[0] for response in sample["filtered_resps"]]
    return int(np.argmax(values)) if len(values) > 1 else int(sample["filtered_resps"][0][1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval from logging, showing progress bars, warning, and changing the state of random numbers."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    states = random.getstate(), np.random.get_state()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])

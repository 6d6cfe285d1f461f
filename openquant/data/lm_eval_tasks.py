"""Runs lm-eval with a model that records what it is asked, and again with one that replays given answers.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) makes the prompts and scores the answers. In between, our
own forward passes compute probabilities, and servers generate texts. Only its public functions are used.
"""

from __future__ import annotations

import hashlib
import io
import json
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
from .questions import Figures, Flags, GenerationRequest, TaskAnswers

# The metrics of lm-eval that say of each question whether the answer is right.
METRICS = ("acc", "acc_norm", "exact_match", "em", "prompt_level_strict_acc", "prompt_level_loose_acc")
# The most tokens of a generated text if the task does not say it, as in lm-eval's models for APIs; and of any text.
_DEFAULT_TOKENS, _MOST_TOKENS = 256, 1 << 20
# What lm-eval calls answers that no filter changed.
_UNFILTERED = "none"
# Answers to requests for probabilities: that of the continuation as a logarithm, and whether each token is the top one.
_Probabilities = list[tuple[float, bool]]
# What lm-eval says of the machine after each run: it lists its packages with pip, three seconds, and asks git.
_DESCRIPTIONS = dict.fromkeys(("add_env_info", "get_git_commit_hash"), lambda *_: None)
# The samples of a task by filter, one for each question.
_Samples = Mapping[str, list[dict[str, Any]]]


class LMEvalTasks:
    """Tasks of lm-eval.

    Args:
        tasks: their names, or the names of groups of them.
        files: the YAML file of each task that is not lm-eval's own, by name.
        limit: the most questions of each task; None for all.
        generates: whether texts can be generated.
        is_chat: whether prompts are chats, each example and answer a message of its own.

    Attributes:
        metrics: the metrics of all tasks, those of groups included, by their names. If answers are filtered, the filter
            follows the metric, as lm-eval writes it: "exact_match,strict-match".

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: a task asks for something that cannot be computed.
    """

    def __init__(
        self, tasks: Sequence[str], files: Mapping[str, Path], limit: int | None, generates: bool, is_chat: bool = False
    ) -> None:
        from lm_eval.tasks import TaskManager

        self._tasks, self._limit, self._generates, self._is_chat = list(tasks), limit, generates, is_chat
        with _quiet():
            # Listing all of its own tasks takes seconds.
            folders = list(dict.fromkeys(str(path.parent) for path in files.values()))
            self._manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
        for task, path in files.items():
            self._require_file(task, path)
        asked: list[Any] = []
        generations: list[GenerationRequest] = []

        def record(instances: list[Any]) -> _Probabilities:
            asked.extend(instances)
            return [(0.0, False)] * len(instances)

        def record_generations(instances: list[Any]) -> list[str]:
            generations.extend(_generation(instance, is_chat) for instance in instances)
            return [""] * len(instances)

        samples = self._run(record, record_generations)
        self.generations: Sequence[GenerationRequest] = generations
        self.requests: Sequence[tuple[str, str]] = [_texts(instance) for instance in asked]
        self._requests_of: dict[str, list[int]] = {}
        for number, instance in enumerate(asked):
            self._requests_of.setdefault(instance.task_name, []).append(number)
        self.questions = sum(len(_questions(of_task)) for of_task in samples.values())
        scores = {name: _scores(of_task, name) for name, of_task in samples.items()}
        for name, of_task in scores.items():
            if not of_task:
                raise UsageError(
                    f"{name} of lm-eval has no accuracy",
                    f"choose tasks with {', '.join(METRICS[:-1])} or {METRICS[-1]}",
                )
        self.metrics: Mapping[str, Sequence[str]] = {name: list(of_task) for name, of_task in scores.items()}

    def _require_file(self, task: str, path: Path) -> None:
        """Refuse a file if lm-eval would take the task from another one, which has the same name of a task."""
        entry: Any = self._manager.task_index.get(task)
        # Older versions have dicts.
        taken = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
        if isinstance(taken, (str, os.PathLike)) and Path(taken).resolve() != path.resolve():
            raise UsageError(
                f"{path.name} and {Path(taken).name} in its directory both define the task {task}", "rename one of them"
            )

    def answers(self, loglikelihoods: Figures, greedy: Flags, texts: Sequence[str] = ()) -> list[TaskAnswers]:
        """Score a model's answers; see `questions.Tasks`."""

        def require_same(asked: Sequence[Any], before: Sequence[Any]) -> None:
            if asked != before:
                raise SourceError("lm-eval asks other questions than before", "see that no file of a task changes")

        def replay(instances: list[Any]) -> _Probabilities:
            require_same([_texts(instance) for instance in instances], self.requests)
            return [(float(value), bool(top)) for value, top in zip(loglikelihoods, greedy, strict=True)]

        def replay_generations(instances: list[Any]) -> list[str]:
            require_same([_generation(instance, self._is_chat) for instance in instances], self.generations)
            return list(texts)

        return [
            TaskAnswers(
                name,
                _scores(of_task, name),
                np.array([_picked(sample) for sample in _questions(of_task)], np.int64),
                np.array(self._requests_of.get(name, ()), np.int64),
            )
            for name, of_task in self._run(replay, replay_generations).items()
        ]

    def _run(
        self, answer: Callable[[list[Any]], _Probabilities], generate: Callable[[list[Any]], list[str]]
    ) -> Mapping[str, _Samples]:
        """Run lm-eval with a model that answers by these functions; return the samples of each task."""
        import lm_eval
        from lm_eval.api.model import LM

        generates = self._generates

        class Backend(LM):  # type: ignore[misc]  # mypy does not read lm-eval
            """A model that computes nothing itself."""

            tokenizer_name = "openquant"

            def apply_chat_template(self, chat_history: list[dict[str, str]], **_: Any) -> str:
                return json.dumps(chat_history, ensure_ascii=False)

            def loglikelihood(self, requests: list[Any]) -> _Probabilities:
                return answer(requests)

            def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
                raise UsageError(
                    f"{requests[0].task_name} of lm-eval asks for the probability of whole texts",
                    "choose tasks whose answers are right or wrong; --text measures the perplexity of texts",
                )

            def generate_until(self, requests: list[Any]) -> list[str]:
                if not generates:
                    raise UsageError(
                        f"{requests[0].task_name} of lm-eval asks for generated texts, which an engine generates",
                        "start `vllm serve` for the source and for each output, and give each one's URL with --server",
                    )
                return generate(requests)

        try:
            with _quiet():
                results: Any = lm_eval.simple_evaluate(
                    model=Backend(),
                    tasks=self._tasks,
                    limit=self._limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    task_manager=self._manager,
                    apply_chat_template=self._is_chat,
                    fewshot_as_multiturn=self._is_chat,
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


def read_lm_eval_tasks(names: Sequence[str], limit: int | None, generates: bool, is_chat: bool = False) -> LMEvalTasks:
    """Read tasks of lm-eval.

    Args:
        names: names of tasks or groups, and paths of YAML files that define one.
        limit: the most questions of each task; None for all.
        generates: whether texts can be generated.
        is_chat: whether prompts are chats.

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
    return LMEvalTasks(tasks, files, limit, generates, is_chat)


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


def _generation(instance: Any, is_chat: bool) -> GenerationRequest:
    """Return the request of an instance of lm-eval, with the defaults of its models for APIs."""
    task = f"{instance.task_name} of lm-eval"
    if len(instance.args) != 2:
        raise UsageError(f"{task} asks about images or sounds", "choose tasks of texts alone")
    prompt, given = instance.args
    settings = dict(given)
    do_sample, temperature = settings.pop("do_sample", None), settings.pop("temperature", None)
    # The default temperature is 1 if the task says that it samples, else 0.
    is_greedy = not temperature if do_sample is None else not do_sample or temperature == 0
    if not is_greedy:
        raise UsageError(f"{task} samples its answers", "choose a task whose answers are greedy")
    until = settings.pop("until", None) or []
    stop = (until,) if isinstance(until, str) else until
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
        raise SourceError(f"{task}: `until` is {short_repr(until)}, not a list of texts", "correct its file")
    limits = [limit for name in ("max_tokens", "max_gen_toks") if (limit := settings.pop(name, None)) is not None]
    most = limits[0] if limits else _DEFAULT_TOKENS
    if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= _MOST_TOKENS:
        raise SourceError(
            f"{task}: `max_gen_toks` is {short_repr(most)}, not a number from 1 to {_MOST_TOKENS:,}", "correct its file"
        )
    # Its model for chats sends four stops at most, which is the limit of OpenAI's API.
    if is_chat:
        return GenerationRequest(json.loads(prompt), tuple(stop[:4]), most, settings)
    return GenerationRequest(str(prompt), tuple(stop), most, settings)


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
    """Return which of a question's requests has the highest probability; of one request, whether it is greedy.

    For a generated text, return a hash of it.
    """
    text = sample["resps"][0][0]
    if isinstance(text, str):
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
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

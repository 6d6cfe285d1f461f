"""Reads the tasks that the user names: multiple-choice questions from files of one's own, and tasks of lm-eval.

A question becomes requests: its prompt, and each of its choices as a continuation whose probability is asked for. The
choice with the highest probability is the model's answer. Files are JSON Lines, or the JSON of BIG-bench.

    tasks = read_tasks(["my.jsonl", "arc_easy"], limit=200)
    tasks.questions         # 400
    tasks.requests[0]       # ("Question: Which is a planet?\nAnswer:", " Mars")

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) makes the prompts and scores the answers of its tasks. It
runs with a model that records what it is asked, and again with one that replays given answers; in between, our own
forward passes compute probabilities. Only its public functions are used.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from ..errors import OpenQuantError, SourceError, UsageError
from ..files.checkpoint import readable
from ..files.model_files import parse_json, read_small, short_repr
from ..machine import first_line
from ..patterns import group_pairs
from ..version import install_hint

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
        names: paths of files (docs/tasks.md says which), and names of tasks of lm-eval; at least one.
        limit: the most questions of each task; None for all.

    Raises:
        SourceError: a file or a task cannot be read.
        UsageError: lm-eval is needed and not installed, a task asks for something that cannot be computed, two have
            the same name, or they have no metric in common.
    """
    parts: list[QuestionTask | LMEvalTasks] = []
    for_lm_eval: list[str] = []
    for name in names:
        path = Path(name)
        is_file = path.is_file()
        if path.suffix in _YAML and is_file:
            for_lm_eval.append(str(path))
        elif is_file:
            parts.append(read_questions(path, limit))
        elif path.suffix in (*_FILES, *_YAML) or path.exists() or isinstance(name, os.PathLike):
            raise SourceError(f"{path} is not a file", "give a .jsonl, .json or .yaml file, or a task of lm-eval")
        else:
            for_lm_eval.append(str(name))

    if for_lm_eval:
        parts.append(LMEvalTasks(for_lm_eval, limit))
    task_names = [name for part in parts for name in part.metrics]
    twice = next((name for name in task_names if task_names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two tasks are named {twice}", "give each once, or rename a file")

    tasks = Tasks(parts)
    if not set.intersection(*map(set, tasks.metrics.values())):
        listed = ", ".join(f"{name} has {' and '.join(metrics)}" for name, metrics in tasks.metrics.items())
        raise UsageError(f"the tasks have no metric in common: {listed}", "evaluate them one after the other")
    return tasks


class Tasks:
    """Tasks from files and from lm-eval, one after the other.

    Args:
        parts: the tasks, at least one.

    Attributes:
        requests: context and continuation of each request for a probability, as text.
        questions: the number of questions.
        metrics: the metrics of each task, by its name.
    """

    def __init__(self, parts: Sequence[QuestionTask | LMEvalTasks]) -> None:
        self._parts = parts
        self.requests = [request for part in parts for request in part.requests]
        self.questions = sum(part.questions for part in parts)
        self.metrics = {task: metrics for part in parts for task, metrics in part.metrics.items()}

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers.

        Args:
            loglikelihoods: log-probability of each request's continuation, in nats [requests].
            greedy: whether each token of it is the most probable one [requests].
        """
        answers = []
        start = 0
        for part in self._parts:
            end = start + len(part.requests)
            for of_task in part.answers(loglikelihoods[start:end], greedy[start:end]):
                answers.append(replace(of_task, requests=of_task.requests + start))
            start = end
        return answers


class LMEvalTasks:
    """Tasks of lm-eval.

    Args:
        tasks: names of tasks or groups, and paths of YAML files that define one.
        limit: the most questions of each task; None for all.

    Attributes:
        metrics: the metrics of all tasks, those of groups included, by their names. If answers are filtered, the filter
            follows the metric, as lm-eval writes it: "exact_match,strict-match".

    Raises:
        SourceError: lm-eval fails on a task.
        UsageError: lm-eval is not installed, or a task asks for something that cannot be computed.
    """

    def __init__(self, tasks: Sequence[str], limit: int | None) -> None:
        try:
            with _quiet():
                from lm_eval.tasks import TaskManager
        except ImportError:
            raise UsageError(
                f"{tasks[0]} is not a file, and lm-eval, which has tasks, is not installed", install_hint("tasks")
            ) from None

        self._tasks = list(tasks)
        self._limit = limit
        with _quiet():
            # Listing all of its own tasks takes seconds.
            self._manager = TaskManager(include_defaults=not all(task.endswith(_YAML) for task in tasks))

        asked: list[Any] = []

        def record(instances: list[Any]) -> _Probabilities:
            asked.extend(instances)
            return [(0.0, False)] * len(instances)

        samples = self._run(record)
        self.requests = [_texts(instance) for instance in asked]
        self._requests_of = group_pairs((instance.task_name, number) for number, instance in enumerate(asked))
        self.questions = sum(len(_questions(of_task)) for of_task in samples.values())
        self.metrics = {name: list(_scores(of_task)) for name, of_task in samples.items()}

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers; see `Tasks`."""

        def replay(instances: list[Any]) -> _Probabilities:
            if [_texts(instance) for instance in instances] != self.requests:
                raise SourceError("lm-eval asks other questions than before", "see that no file of a task changes")
            return [(float(value), bool(top)) for value, top in zip(loglikelihoods, greedy, strict=True)]

        return [
            TaskAnswers(
                name,
                _scores(of_task),
                np.array([_pick(sample) for sample in _questions(of_task)], np.int64),
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
            raise SourceError(
                f"lm-eval cannot make the questions of {', '.join(self._tasks)}: {short_repr(first_line(error))}",
                "`lm-eval ls tasks` lists its tasks; their data comes from the Hub",
            ) from error

        return {
            name: group_pairs((sample["filter"], sample) for sample in sorted(of_task, key=itemgetter("doc_id")))
            for name, of_task in results["samples"].items()
        }


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
                "start `vllm serve`, and run lm-eval with its model local-completions (docs/tasks.md)",
            )

    return Backend()


def _texts(instance: Any) -> tuple[str, str]:
    """Context and continuation of a request."""
    context, continuation = instance.args
    return str(context), str(continuation)


def _questions(samples: _Samples) -> list[dict[str, Any]]:
    """Return one sample of each question of a task; filters give further ones."""
    return next(iter(samples.values()), [])


def _scores(samples: _Samples) -> dict[str, Figures]:
    """Return the scores of each question of a task, by metric and filter."""
    return {
        metric if name == _UNFILTERED else f"{metric},{name}": np.array(
            [sample[metric] for sample in of_filter], np.float64
        )
        for name, of_filter in samples.items()
        for metric in METRICS
        if metric in of_filter[0]
    }


def _pick(sample: Mapping[str, Any]) -> int:
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
    """Keep lm-eval from logging, printing, warning, and describing this machine."""
    import lm_eval.evaluator

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
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
        logging.disable(disabled)


Figures = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

# Largest file of questions in bytes.
_MAX_FILE = 256 << 20
# Seed of the order in which BIG-bench's prompts list the choices (bigbench/api/json_task.py of bigbench 1.0.0).
_SEED = 42
_LINES_HINT = 'each line is {"question": "..", "choices": ["..", ".."], "answer": 0}'
_BIG_BENCH_HINT = "give the task.json of a BIG-bench task that has examples with target_scores"


@dataclass(frozen=True)
class TaskAnswers:
    """A model's answers to the questions of one task.

    Attributes:
        task: name of the task.
        scores: for each metric ("acc", "acc_norm") the score of each question, from 0 to 1 [questions].
        picked: for each question the index of the choice that the model prefers [questions].
        requests: numbers of all requests of the task for the probability of a choice.
    """

    task: str
    scores: Mapping[str, Figures]
    picked: Numbers
    requests: Numbers


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with its choices.

    Attributes:
        prompt: the text before a choice.
        choices: the choices, without a space before them.
        grades: what each choice scores, from 0 to 1.
    """

    prompt: str
    choices: tuple[str, ...]
    grades: tuple[float, ...]


class QuestionTask:
    """The questions of one task, asked without examples.

    Args:
        name: name of the task.
        questions: its questions, at least one.
        space: what stands between a prompt and a choice.
        has_norm: whether it has `acc_norm` too, which divides log-probabilities by the characters of the choices.
    """

    def __init__(self, name: str, questions: Sequence[ChoiceQuestion], space: str, has_norm: bool) -> None:
        self.name, self._questions, self._has_norm = name, questions, has_norm
        self.questions = len(questions)
        self.metrics = {name: ["acc", "acc_norm"] if has_norm else ["acc"]}
        self.requests = [(question.prompt, f"{space}{choice}") for question in questions for choice in question.choices]

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers; see `Tasks`."""
        del greedy
        scores: dict[str, list[float]] = {metric: [] for metric in self.metrics[self.name]}
        picked, start = [], 0

        for question in self._questions:
            of_choices = loglikelihoods[start : start + len(question.choices)]
            start += len(question.choices)
            picked.append(int(of_choices.argmax()))
            scores["acc"].append(question.grades[picked[-1]])
            if self._has_norm:
                lengths = np.array([len(choice) for choice in question.choices])
                scores["acc_norm"].append(question.grades[int((of_choices / lengths).argmax())])

        by_metric = {metric: np.array(values, np.float64) for metric, values in scores.items()}
        return [TaskAnswers(self.name, by_metric, np.array(picked, np.int64), np.arange(len(self.requests)))]


def read_questions(path: Path, limit: int | None) -> QuestionTask:
    """Read a task from a file.

    Args:
        path: a .json file of BIG-bench, or a file of JSON Lines. A line has `question`, `choices` (two texts or more)
            and `answer`, the index or the text of a choice.
        limit: read only so many questions; None for all.

    Raises:
        SourceError: it cannot be read, or is not such a file; the message names the line or the example.
    """
    with readable():
        data = read_small(path, path.name, _MAX_FILE)
    if path.suffix == ".json":
        name = path.stem
        if path.name == "task.json" and path.parent.name:
            name = path.parent.name
        return QuestionTask(name, _examples(data, path.name, limit), "", has_norm=False)
    return QuestionTask(path.stem, _lines(data, path.name, limit), " ", has_norm=True)


def _lines(data: bytes, file: str, limit: int | None) -> list[ChoiceQuestion]:
    """Questions of a file of JSON Lines."""
    questions: list[ChoiceQuestion] = []
    for number, line in enumerate(data.splitlines(), 1):
        if len(questions) == limit:
            break
        if not line.strip():
            continue

        where = f"{file} line {number}"
        row = parse_json(line, where)
        question = _to_question(row)
        if question is None:
            raise SourceError(f"{where} is {short_repr(row)}, not a question with choices and an answer", _LINES_HINT)
        questions.append(question)

    if not questions:
        raise SourceError(f"{file} has no questions", _LINES_HINT)
    return questions


def _to_question(row: Any) -> ChoiceQuestion | None:
    """The question in a line; None if it is none."""
    match row:
        case {"question": str(text), "choices": [_, _, *_] as choices, "answer": answer}:
            pass
        case _:
            return None

    if not all(isinstance(choice, str) and choice.strip() for choice in choices) or len(set(choices)) < len(choices):
        return None
    right = choices.index(answer) if answer in choices else answer
    if type(right) is not int or not 0 <= right < len(choices):
        return None

    grades = tuple(float(at == right) for at in range(len(choices)))
    return ChoiceQuestion(f"Question: {text}\nAnswer:", tuple(choices), grades)


def _examples(data: bytes, file: str, limit: int | None) -> list[ChoiceQuestion]:
    """Questions of a task of BIG-bench: its examples with `target_scores`."""
    task = parse_json(data, file)
    examples = task.get("examples") if isinstance(task, dict) else None
    if not isinstance(examples, list):
        raise SourceError(f"{file} has no list of examples", _BIG_BENCH_HINT)

    before = task.get("example_input_prefix", "\nQ: ")
    after = task.get("example_output_prefix", "\nA: ")
    choice_prefix = task.get("choice_prefix", "\n  choice: ")
    task_prefix = task.get("task_prefix", "")

    questions: list[ChoiceQuestion] = []
    for number, example in enumerate(examples, 1):
        if len(questions) == limit:
            break
        match example:
            case {"input": str(text), "target_scores": dict(grades)} if _are_grades(grades):
                pass
            case {"target_scores": _}:
                raise SourceError(
                    f"{file} example {number} is {short_repr(example)}, not a text and choices with scores from 0 to 1",
                    _BIG_BENCH_HINT,
                )
            case _:
                # It asks for a text, and has no choices.
                continue

        if task.get("append_choices_to_input", True):
            # In random order, since in many files the right choice comes first; drawn anew for each example, as there.
            order = np.random.RandomState(_SEED).permutation(len(grades))
            text += "".join(f"{choice_prefix}{sorted(grades)[at]}" for at in order)

        scores = tuple(float(grade) for grade in grades.values())
        questions.append(ChoiceQuestion(f"{task_prefix}{before}{text}{after}", tuple(grades), scores))

    if not questions:
        raise SourceError(f"{file} has no example with target_scores: it is no multiple-choice task", _BIG_BENCH_HINT)
    return questions


def _are_grades(grades: Mapping[str, Any]) -> bool:
    """Whether these are scores of several choices."""
    return len(grades) > 1 and all(type(grade) in (int, float) and 0 <= grade <= 1 for grade in grades.values())

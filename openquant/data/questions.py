"""The questions of tasks; reads multiple-choice ones from files: JSON Lines of one's own, and the JSON of BIG-bench.

A question becomes requests: its prompt, and each of its choices as a continuation whose probability is asked for. The
choice with the highest probability is the model's answer.

    tasks = read_questions(Path("my.jsonl"), limit=None)
    tasks.requests[0]       # ("Question: Which is a planet?\nAnswer:", " Mars")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from ..files.checkpoint import readable
from ..files.small_files import parse_json, read_small, short_repr

Figures = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

# Largest file of questions in bytes, most characters of a prompt, and most choices of a question.
_MAX_FILE, _MAX_TEXT, _MAX_CHOICES = 256 << 20, 1 << 18, 1000
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


class Tasks(Protocol):
    """Questions of one or more tasks, from a file or from lm-eval.

    Attributes:
        requests: context and continuation of each request for a probability, as text.
        questions: the number of questions.
        metrics: the metrics of each task, by its name.
    """

    requests: Sequence[tuple[str, str]]
    questions: int
    metrics: Mapping[str, Sequence[str]]

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers.

        Args:
            loglikelihoods: log-probability of each request's continuation, in nats [requests].
            greedy: whether each token of it is the most probable one [requests].
        """


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
        self.metrics: Mapping[str, Sequence[str]] = {name: ("acc", "acc_norm") if has_norm else ("acc",)}
        self.requests: Sequence[tuple[str, str]] = [
            (question.prompt, f"{space}{choice}") for question in questions for choice in question.choices
        ]

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
        name = path.parent.name if path.name == "task.json" and path.parent.name else path.stem
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
        value = parse_json(line, where)
        if not isinstance(value, dict):
            raise SourceError(f"{where} is {short_repr(value)}, not a JSON object", _LINES_HINT)

        text = _text(value.get("question"), f"{where}: question", _LINES_HINT)

        choices = value.get("choices")
        if not isinstance(choices, list) or not 2 <= len(choices) <= _MAX_CHOICES:
            raise SourceError(
                f"{where}: choices is {short_repr(choices)}, not a list of 2 to {_MAX_CHOICES} texts", _LINES_HINT
            )
        texts = tuple(_filled(choice, f"{where}: a choice", _LINES_HINT) for choice in choices)
        if len(set(texts)) < len(texts):
            raise SourceError(f"{where}: two choices are equal", _LINES_HINT)

        answer = value.get("answer")
        right = texts.index(answer) if isinstance(answer, str) and answer in texts else answer
        if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(texts):
            raise SourceError(
                f"{where}: answer is {short_repr(answer)}, neither a choice nor the index of one", _LINES_HINT
            )

        grades = tuple(float(at == right) for at in range(len(texts)))
        questions.append(ChoiceQuestion(f"Question: {text}\nAnswer:", texts, grades))

    if not questions:
        raise SourceError(f"{file} has no questions", _LINES_HINT)

    return questions


def _examples(data: bytes, file: str, limit: int | None) -> list[ChoiceQuestion]:
    """Questions of a task of BIG-bench: its examples with `target_scores`."""
    task = parse_json(data, file)
    examples = task.get("examples") if isinstance(task, dict) else None
    if not isinstance(examples, list):
        raise SourceError(f"{file} has no list of examples", _BIG_BENCH_HINT)

    def setting(key: str, default: str) -> str:
        return _text(task.get(key, default), f"{file}: {key}", _BIG_BENCH_HINT)

    before, after = setting("example_input_prefix", "\nQ: "), setting("example_output_prefix", "\nA: ")
    choice_prefix, task_prefix = setting("choice_prefix", "\n  choice: "), setting("task_prefix", "")
    lists_choices = task.get("append_choices_to_input", True)
    if not isinstance(lists_choices, bool):
        raise SourceError(
            f"{file}: append_choices_to_input is {short_repr(lists_choices)}, not true or false", _BIG_BENCH_HINT
        )

    questions: list[ChoiceQuestion] = []
    for number, example in _scored(examples, file):
        if len(questions) == limit:
            break
        where = f"{file} example {number}"

        text = _text(example.get("input"), f"{where}: input", _BIG_BENCH_HINT)
        grades = example["target_scores"]
        if not isinstance(grades, dict) or not 2 <= len(grades) <= _MAX_CHOICES:
            raise SourceError(
                f"{where}: target_scores is {short_repr(grades)}, not 2 to {_MAX_CHOICES} choices with scores",
                _BIG_BENCH_HINT,
            )

        choices = tuple(_filled(choice, f"{where}: a choice", _BIG_BENCH_HINT) for choice in grades)
        for choice, grade in grades.items():
            if isinstance(grade, bool) or not isinstance(grade, (int, float)) or not 0 <= grade <= 1:
                raise SourceError(
                    f"{where}: the score of {short_repr(choice)} is {short_repr(grade)}, not a number from 0 to 1",
                    _BIG_BENCH_HINT,
                )

        if lists_choices:
            # In random order, since in many files the right choice comes first; drawn anew for each example, as there.
            order = np.random.RandomState(_SEED).permutation(len(choices))
            text += "".join(f"{choice_prefix}{sorted(choices)[at]}" for at in order)

        prompt = _text(f"{task_prefix}{before}{text}{after}", f"{where}: its prompt", _BIG_BENCH_HINT)
        questions.append(ChoiceQuestion(prompt, choices, tuple(float(grades[choice]) for choice in choices)))

    if not questions:
        raise SourceError(f"{file} has no example with target_scores: it is no multiple-choice task", _BIG_BENCH_HINT)

    return questions


def _scored(examples: Sequence[Any], file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and value of each example that has `target_scores`; the others have no choices."""
    for number, example in enumerate(examples, 1):
        if not isinstance(example, dict):
            raise SourceError(f"{file} example {number} is {short_repr(example)}, not a JSON object", _BIG_BENCH_HINT)
        if "target_scores" in example:
            yield number, example


def _text(value: object, where: str, hint: str) -> str:
    if not isinstance(value, str):
        raise SourceError(f"{where} is {short_repr(value)}, not a text", hint)
    if len(value) > _MAX_TEXT:
        raise SourceError(f"{where} has more than {_MAX_TEXT:,} characters", hint)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SourceError(f"{where} is {short_repr(value)}, which is no Unicode text", hint) from None
    return value


def _filled(value: object, where: str, hint: str) -> str:
    text = _text(value, where, hint)
    if not text.strip():
        raise SourceError(f"{where} is {short_repr(value)}, which is empty", hint)
    return text


class SeveralTasks:
    """Tasks from several files, and from lm-eval, one after the other.

    Args:
        parts: the tasks, at least one.
    """

    def __init__(self, parts: Sequence[Tasks]) -> None:
        self._parts = parts
        self.requests: Sequence[tuple[str, str]] = [request for part in parts for request in part.requests]
        self.questions = sum(part.questions for part in parts)
        self.metrics: Mapping[str, Sequence[str]] = {
            task: metrics for part in parts for task, metrics in part.metrics.items()
        }

    def answers(self, loglikelihoods: Figures, greedy: Flags) -> list[TaskAnswers]:
        """Score a model's answers; see `Tasks`."""
        answers = []
        start = 0
        for part in self._parts:
            end = start + len(part.requests)
            for of_task in part.answers(loglikelihoods[start:end], greedy[start:end]):
                answers.append(replace(of_task, requests=of_task.requests + start))
            start = end
        return answers

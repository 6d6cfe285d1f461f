"""Files of multiple-choice questions: what is read of them, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openquant.data.tasks import read_questions, read_tasks
from openquant.errors import OpenQuantError, SourceError, UsageError
from support.task_files import write_big_bench, write_lines

NO_FLAGS = np.zeros(99, bool)


def test_a_line_is_a_question_as_lm_evals_arc_asks_it(tmp_path: Path) -> None:
    file = tmp_path / "planets.jsonl"
    lines = [
        {"question": "Which is a planet?", "choices": ["Mars", "The Moon"], "answer": 0},
        {"question": "Which is red?", "choices": ["a", "b", "Mars"], "answer": "Mars"},
    ]
    file.write_text("\n" + "\n".join(map(json.dumps, lines)))
    task = read_questions(file, None)
    assert (task.name, task.questions) == ("planets", 2)
    assert list(task.requests) == [
        ("Question: Which is a planet?\nAnswer:", " Mars"),
        ("Question: Which is a planet?\nAnswer:", " The Moon"),
        ("Question: Which is red?\nAnswer:", " a"),
        ("Question: Which is red?\nAnswer:", " b"),
        ("Question: Which is red?\nAnswer:", " Mars"),
    ]
    # A longer choice has more to lose: by the character "The Moon" is more probable.
    [answers] = task.answers(np.array([-4.0, -5, -3, -1, -2]), NO_FLAGS)
    assert answers.picked.tolist() == [0, 1]
    assert {metric: values.tolist() for metric, values in answers.scores.items()} == {"acc": [1, 0], "acc_norm": [0, 1]}
    assert read_questions(file, 1).questions == 1


def test_an_example_of_big_bench_is_asked_as_it_defines_it(tmp_path: Path) -> None:
    file = tmp_path / "some_task" / "task.json"
    file.parent.mkdir()
    examples = [
        {"input": "1 + 1?", "target_scores": {"2": 1, "3": 0}},
        {"input": "Say anything.", "target": "anything"},
        {"input": "2 + 2?", "target_scores": {"5": 0, "4": 1, "four": 0.5}},
        {"input": "3 + 3?", "target_scores": {"d": 0, "b": 0, "a": 1, "c": 0}},
    ]
    file.write_text(json.dumps({"examples": examples, "task_prefix": "Sums."}))
    task = read_questions(file, None)
    assert (task.name, task.questions) == ("some_task", 3)
    # The order of RandomState(42).permutation, drawn anew for each example.
    assert task.requests[0][0] == "Sums.\nQ: 1 + 1?\n  choice: 3\n  choice: 2\nA: "
    assert task.requests[-1][0] == "Sums.\nQ: 3 + 3?\n  choice: b\n  choice: d\n  choice: a\n  choice: c\nA: "
    assert [choice for _, choice in task.requests] == ["2", "3", "5", "4", "four", "d", "b", "a", "c"]
    [answers] = task.answers(np.array([-1.0, -2, -3, -3, -2, -3, -2, -1, -4]), NO_FLAGS)
    assert {metric: values.tolist() for metric, values in answers.scores.items()} == {"acc": [1, 0.5, 1]}
    plain = write_big_bench(tmp_path / "plain.json", append_choices_to_input=False, example_input_prefix="")
    assert read_questions(plain, None).requests[0][0].endswith("arguments?\nA: ")
    assert read_questions(plain, None).name == "plain"


LINE = {"question": "Why?", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    "changed",
    [
        {"question": 3},
        {"choices": ["a"]},
        {"choices": ["a", 7]},
        {"choices": ["a", "a"]},
        {"answer": 2},
        {"answer": "c"},
    ],
)
def test_errors_name_the_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n{json.dumps(LINE | changed)}")
    with pytest.raises(SourceError, match=r"^t\.jsonl line 2 is \{.*\}, not a question with choices and an answer"):
        read_questions(file, None)


EXAMPLE = {"input": "Why?", "target_scores": {"a": 1, "b": 0}}


def test_errors_name_the_example(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    for task, says in (
        ([], "t.json has no list of examples"),
        ({"examples": [{"input": "Why?", "target": "a"}]}, "t.json has no example with target_scores: "),
        ({"examples": [EXAMPLE, EXAMPLE | {"input": None}]}, "t.json example 2 is {'input': None, "),
        ({"examples": [EXAMPLE | {"target_scores": {"a": 1}}]}, "t.json example 1 is "),
        ({"examples": [EXAMPLE | {"target_scores": {"a": 1, "b": "0"}}]}, "t.json example 1 is "),
    ):
        file.write_text(json.dumps(task))
        with pytest.raises(SourceError) as caught:
            read_questions(file, None)
        assert str(caught.value).startswith(says)


def test_a_pipe_is_no_file_of_questions(tmp_path: Path) -> None:
    (tmp_path / "here.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "here.jsonl", tmp_path / "nowhere.json", tmp_path / "pipe"):
        with pytest.raises(OpenQuantError, match=rf"^{path} is not a file"):
            read_tasks([str(path)], None)


def test_several_files_are_one_list_of_requests(tmp_path: Path) -> None:
    first, second = write_lines(tmp_path / "a.jsonl", 3), write_big_bench(tmp_path / "b" / "task.json", 2)
    tasks = read_tasks([first, second], None)
    assert tasks.questions == 5
    values = -np.arange(len(tasks.requests), dtype=float)
    answers = tasks.answers(values, NO_FLAGS[: len(values)])
    assert [each.task for each in answers] == ["a", "b"]
    assert [number for each in answers for number in each.requests] == list(range(len(tasks.requests)))
    with pytest.raises(UsageError, match=r"^two tasks are named a"):
        read_tasks([first, write_lines(tmp_path / "a.txt")], None)

"""Files of tasks for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ("def", "return", "import", "class", "self", "None", "True", "raise", "yield", "with", "lambda", "for")


def questions(count: int = 12) -> list[dict[str, Any]]:
    """Questions about Python, which the example was trained on; their answers are not meant to be right."""
    found = []
    for number in range(count):
        choices = [
            WORDS[(number + at) % len(WORDS)] + (" self.value" if at == 1 else "") for at in range(2 + number % 3)
        ]
        question = f"Which comes after line {number} of a function that has {'many ' * (number % 4)}arguments?"
        found.append({"question": question, "choices": choices, "answer": number % len(choices)})
    return found


def write_lines(path: Path, count: int = 12) -> Path:
    path.write_text("".join(f"{json.dumps(question)}\n" for question in questions(count)))
    return path


def write_big_bench(path: Path, count: int = 6, **settings: Any) -> Path:
    examples = [
        {
            "input": question["question"],
            "target_scores": {choice: int(at == question["answer"]) for at, choice in enumerate(question["choices"])},
        }
        for question in questions(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "foreign", "examples": examples, **settings}))
    return path


def write_lm_eval(folder: Path, name: str = "mine", **settings: Any) -> Path:
    """A task of lm-eval with its data in the same directory, without a network."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_lines(folder / "data.jsonl")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
        **settings,
    }
    # JSON is YAML.
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return path

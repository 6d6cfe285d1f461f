"""Reads the tasks that the user names: files of questions, and tasks of lm-eval.

tasks = read_tasks(["my.jsonl", "arc_easy"], limit=200)
tasks.questions         # 400
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import SourceError, UsageError
from .lm_eval_tasks import read_lm_eval_tasks
from .questions import SeveralTasks, Tasks, read_questions

# Names that end in these are files.
_FILES, _YAML = (".json", ".jsonl"), (".yaml", ".yml")


def read_tasks(
    names: Sequence[str | os.PathLike[str]], limit: int | None, generates: bool = False, is_chat: bool = False
) -> Tasks:
    """Read tasks.

    Args:
        names: paths of files (docs/evaluation.md says which), and names of tasks of lm-eval; at least one.
        limit: the most questions of each task; None for all.
        generates: whether there are servers, which generate texts; at least one task must then ask for texts.
        is_chat: whether servers apply a chat template to prompts; no task may then ask for the probability of choices.

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
        from_lm_eval = read_lm_eval_tasks(for_lm_eval, limit, generates, is_chat)
        task_names += from_lm_eval.metrics
        parts.append(from_lm_eval)
    if len(set(task_names)) < len(task_names):
        twice = next(name for name in task_names if task_names.count(name) > 1)
        raise UsageError(f"two tasks are named {twice}", "give each once, or rename a file")
    tasks = parts[0] if len(parts) == 1 else SeveralTasks(parts)
    if generates and not tasks.generations:
        raise UsageError(
            f"{', '.join(task_names)}: no question asks for a generated text, which is what --server is for",
            "leave --server out",
        )
    if is_chat and tasks.requests:
        raise UsageError(
            f"{', '.join(task_names)}: choices of multiple-choice tasks are not asked for in a chat",
            "leave those tasks out, or --apply-chat-template",
        )
    if not set.intersection(*map(set, tasks.metrics.values())):
        listed = ", ".join(f"{name} has {' and '.join(metrics)}" for name, metrics in tasks.metrics.items())
        raise UsageError(f"the tasks have no metric in common: {listed}", "evaluate them one after the other")
    return tasks

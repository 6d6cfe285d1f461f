"""What `openquant eval` writes beside an output, with figures that were measured on the example model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from openquant.files.cards import check_evaluation
from openquant.files.checkpoint import Fingerprint, open_checkpoint
from openquant.files.model_files import EVAL_FILE


def evaluation(digest: str = "0" * 64) -> dict[str, Any]:
    """An eval.json, of an output with that fingerprint."""
    found = yaml.safe_load(Path(__file__).with_name("evaluation.yaml").read_text())
    found["output"]["digest"] = digest
    return check_evaluation(found)


def several() -> list[dict[str, Any]]:
    """Evaluations of three outputs of one source, not in the order of their KL."""
    figures = {"tiny-INT4": (3_700_000, 0.009), "tiny-FP8": (5_249_280, 0.00129), "tiny-INT8": (5_299_280, 0.0004)}
    found = []
    for number, (name, (nbytes, kl)) in enumerate(figures.items()):
        one = evaluation(str(number) * 64)
        one["kl"] |= {"mean": kl, "interval": [0.9 * kl, 1.1 * kl]}
        one["sizes"]["output"], one["output"]["name"] = nbytes, name
        found.append(one)
    return found


def of_scores(source: float, output: float, metric: str = "acc") -> dict[str, Any]:
    """Figures of a metric, with intervals of 4 points to each side."""
    recovery = output / source if source else None
    return {
        "metric": metric,
        "source": source,
        "output": output,
        "difference": output - source,
        "difference_interval": [output - source - 0.04, output - source + 0.04],
        "recovery": recovery,
        "recovery_interval": None if recovery is None else [recovery - 0.04 / source, recovery + 0.04 / source],
    }


def with_tasks(
    found: dict[str, Any], scores: Sequence[tuple[float, float]] = ((0.5, 0.48), (0.4, 0.42))
) -> dict[str, Any]:
    """Add tasks to an evaluation, each with a right share of the source and of the output."""

    def figures(name: str, questions: int, source: float, output: float) -> dict[str, Any]:
        metrics = [
            {**of_scores(source, output, metric), "p": 0.77, "lost": 7, "gained": 5} for metric in ("acc", "acc_norm")
        ]
        return {"task": name, "questions": questions, "metrics": metrics, "answered_otherwise": 0.094, "kl": 0.0213}

    source, output = (sum(score[model] for score in scores) / len(scores) for model in (0, 1))
    questions = 50 * len(scores)
    found["tasks"] = {
        "named": ["task.json"],
        "limit": 50,
        "questions": questions,
        "tasks": [figures(f"task-{number}", 50, *each) for number, each in enumerate(scores)],
        "pooled": figures("all questions", questions, source, output),
        "mean": [{**of_scores(source, output, metric), "tasks": len(scores)} for metric in ("acc", "acc_norm")],
        "reading": f"of {questions} questions 12 went from right to wrong or back",
    }
    return check_evaluation(found)


def evaluate(output: Path, /, **changed: object) -> dict[str, Any]:
    """Put an evaluation beside an output, and return it."""
    found = {**evaluation(Fingerprint(open_checkpoint(output)).hexdigest()), **changed}
    (output / EVAL_FILE).write_text(json.dumps(found, indent=1))
    return found


EVIL = (
    "</script><script>window.pwned = 1</script><!-- <img src=http://127.0.0.1:9/x onerror='window.pwned = 1'> "
    '" onclick="window.pwned = 1" javascript:window.pwned=1 {{ 7 * 7 }} ${{1}} \x1b[31m\u202e &lt; $\\frac{1}{0}$'
)


def hostile() -> dict[str, Any]:
    """An evaluation in which every text is an attack."""

    def spoiled(value: Any) -> Any:
        if isinstance(value, str):
            return EVIL
        if isinstance(value, dict):
            return {key: spoiled(inner) for key, inner in value.items()}
        return [spoiled(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = spoiled({**evaluation(), "suspects": ["x"]})
    return check_evaluation(found)

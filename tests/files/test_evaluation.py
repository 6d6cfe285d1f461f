"""eval.json, which anybody may have written: its figures are finite, and of the model it lies beside."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from conftest import tree
from openquant import compress, dequantize, verify
from openquant.errors import SourceError
from openquant.files.cards import (
    MAX_ITEMS,
    FoundEvaluation,
    check_evaluation,
    evaluation_digest,
    find_evaluation,
)
from openquant.files.checkpoint import open_checkpoint
from openquant.files.model_files import EVALUATION_FILES
from support import small_checkpoints
from support.evaluation_files import evaluate, evaluation


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path, source: Path) -> Path:
    compress(source, tmp_path / "out")
    return tmp_path / "out"


def found(directory: Path) -> FoundEvaluation | None:
    return find_evaluation(open_checkpoint(directory))


BROKEN = [
    (lambda one: one.clear(), "has no kl"),
    (lambda one: one["kl"].pop("mean"), "has no kl.mean"),
    (lambda one: one["kl"].update(mean="0.1"), "kl.mean is '0.1', which"),
    (lambda one: one["kl"].update(mean=math.nan), "kl.mean is nan, which"),
    (lambda one: one["kl"].update(mean=10**400), "kl.mean is 1000"),
    (lambda one: one["kl"].update(interval=[0.1, None]), "kl.interval[1] is None, which"),
    (lambda one: one["kl_by_domain"].append({"domain": 5}), "kl_by_domain[2].domain is 5, which"),
    (lambda one: one["kl_by_domain"][0].update(positions=-1), "kl_by_domain[0].positions is -1, which"),
    (lambda one: one.update(verdict="x" * (1 << 20) + "x"), "verdict is 'xxx"),
    (lambda one: one.update(reasons=[""] * (MAX_ITEMS + 1)), "reasons is ['', "),
    (lambda one: one["texts"][0].update(differs_at=-1), "texts[0].differs_at is -1, which"),
    (lambda one: one["kl"].update(interval=[0.1]), "kl.interval is [0.1], which"),
    (lambda one: one["kl_histogram"]["floor"].pop(), "kl_histogram.floor is [0.03, "),
    (lambda one: one["kl_histogram"].update(edges=[1.0, 0.5]), "kl_histogram.edges is [1.0, 0.5], which"),
    (lambda one: one["kl_by_domain"][0].update(kl=1e308), "kl_by_domain[0].kl is 1e+308, which"),
]


def test_what_is_no_evaluation_is_named(subtests: pytest.Subtests) -> None:
    for change, said in BROKEN:
        with subtests.test(said):
            damaged = evaluation()
            change(damaged)
            with pytest.raises(SourceError) as raised:
                check_evaluation(damaged)
            assert raised.value.message.startswith(f"eval.json{'' if said.startswith('has') else ':'} {said}")
            assert raised.value.hint == "run openquant eval again, or remove it"


def test_an_evaluation_is_found_beside_the_model_it_is_of(out: Path) -> None:
    assert found(out) is None
    written = evaluate(out)
    assert found(out) == FoundEvaluation(written, ["eval.json"])
    # What shows another evaluation is not taken along.
    (out / "eval.html").write_text(f"<meta content={evaluation_digest(written)}>")
    (out / "eval.png").write_bytes(b"other")
    assert found(out) == FoundEvaluation(written, ["eval.json", "eval.html"])
    (out / "eval.html").unlink()
    (out / "eval.html").symlink_to(out / "config.json")
    assert found(out) == FoundEvaluation(written, ["eval.json"])


def put_all(out: Path) -> None:
    evaluate(out)
    for name in EVALUATION_FILES[1:]:
        (out / name).write_text("shown")


def test_an_evaluated_output_is_complete_and_verified(source: Path, out: Path) -> None:
    put_all(out)
    before = tree(out)
    assert compress(source, out).resumed
    assert tree(out) == before
    report = verify(out, source)
    assert report.problems == ()
    assert not any("eval" in note for note in report.notes)
    (out / "eval.json").write_text("{}")
    assert "eval.json has no kl" in verify(out).notes
    assert verify(out).problems == ()


def test_figures_of_tasks_are_checked_and_have_a_mean() -> None:
    figures = {"difference": 0, "difference_interval": [0, 0], "recovery": None, "recovery_interval": None}
    mean = {"metric": "acc", "tasks": 1, "source": 0, "output": 0, **figures}
    metric = {"metric": "acc", "source": 0, "output": 0, **figures, "p": 1, "lost": 0, "gained": 0}
    task = {"task": "mine", "questions": 1, "metrics": [metric], "answered_otherwise": 0, "kl": 0}
    tasks = {"named": ["mine.jsonl"], "limit": None, "questions": 1, "tasks": [task], "pooled": task, "reading": ""}
    assert check_evaluation({**evaluation(), "tasks": {**tasks, "mean": [mean]}})
    for damaged, said in (
        ({"mean": []}, "mean is [], "),
        ({"mean": [mean], "pooled": {**task, "metrics": []}}, "tasks[].metrics is [], "),
        ({"mean": [{**mean, "recovery": 1e300}]}, "mean[0].recovery"),
    ):
        with pytest.raises(SourceError, match=rf"^eval.json: tasks.{re.escape(said)}"):
            check_evaluation({**evaluation(), "tasks": {**tasks, **damaged}})


def test_an_evaluation_of_the_source_is_neither_copied_nor_kept(source: Path, out: Path, tmp_path: Path) -> None:
    put_all(out)
    dequantize(out, tmp_path / "back")
    assert not set(tree(tmp_path / "back")) & set(EVALUATION_FILES)
    compress(source, out, "block", overwrite=True)
    assert not set(tree(out)) & set(EVALUATION_FILES)

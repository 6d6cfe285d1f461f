"""eval.json, which anybody may have written: its figures are finite, and of the model it lies beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import tree
from openquant import compress, dequantize, verify
from openquant.errors import SourceError
from openquant.files.cards import FoundEvaluation, check_evaluation, evaluation_digest, find_evaluation
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


def test_what_lacks_a_key_of_an_evaluation_is_none() -> None:
    for damaged in ([], {name: value for name, value in evaluation().items() if name != "kl"}):
        with pytest.raises(SourceError) as raised:
            check_evaluation(damaged)
        assert (raised.value.message, raised.value.hint) == (
            "eval.json has no kl",
            "run openquant eval again, or remove it",
        )


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


def test_an_evaluation_of_the_source_is_neither_copied_nor_kept(source: Path, out: Path, tmp_path: Path) -> None:
    put_all(out)
    dequantize(out, tmp_path / "back")
    assert not set(tree(tmp_path / "back")) & set(EVALUATION_FILES)
    compress(source, out, "block", overwrite=True)
    assert not set(tree(out)) & set(EVALUATION_FILES)

"""Which models answer to prompts, and to which."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant.data.tokenizer import load_tokenizer
from openquant.errors import SourceError
from openquant.evaluation import as_served
from openquant.evaluation.as_served import LARGEST_BY_DEFAULT, fits_in_memory, prompts_to_answer


def test_models_answer_in_half_of_the_free_memory_and_large_ones_if_asked(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for nbytes, memory, by_user, answers_it in [
        (500, 1000, True, True),
        (501, 1000, True, False),
        (501, 1000, False, False),
        (LARGEST_BY_DEFAULT, 1 << 40, False, True),
        (LARGEST_BY_DEFAULT + 1, 1 << 40, False, False),
        (LARGEST_BY_DEFAULT + 1, 1 << 40, True, True),
    ]:
        with subtests.test(nbytes=nbytes, memory=memory, by_user=by_user, answers_it=answers_it):
            monkeypatch.setattr(as_served, "available_memory", lambda memory=memory: memory)
            assert fits_in_memory(nbytes, by_user) is answers_it


def test_prompts_of_the_users_own_are_all_answered(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(EXAMPLE)
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"import number{number}\n" for number in range(6)))
    assert len(prompts_to_answer(file, tokenizer, 2048, 1000)) == 6
    assert len(prompts_to_answer(None, tokenizer, 2048, 1000)) == 4
    assert prompts_to_answer(None, tokenizer, 2048, LARGEST_BY_DEFAULT + 1) == ()


def test_a_file_of_prompts_is_read_even_where_no_model_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(as_served, "available_memory", lambda: 1000)
    tokenizer, file = load_tokenizer(EXAMPLE), tmp_path / "prompts.txt"
    with pytest.raises(SourceError, match=r"prompts\.txt"):
        prompts_to_answer(file, tokenizer, 2048, 501)
    file.write_text("import\n")
    assert prompts_to_answer(file, tokenizer, 2048, 501) == ()

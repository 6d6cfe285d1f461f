"""Continuations are those of transformers' own `generate`, and nothing of a checkpoint decides how they are made."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE, change_json
from openquant.data.domains import Prompt, read_prompts
from openquant.data.tokenizer import load_tokenizer
from openquant.errors import SourceError
from openquant.evaluation import as_served
from openquant.evaluation.as_served import (
    LARGEST_BY_DEFAULT,
    continue_prompts,
    end_tokens,
    prompts_to_answer,
    side_by_side,
)
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming.model import StreamedModel
from support import small_checkpoints

IDS = (Prompt("a", (5, 6, 7, 8, 9)), Prompt("b", tuple(range(20, 61))), Prompt("c", (300,)))


def plain(directory: Path, prompts: tuple[Prompt, ...], tokens: int) -> list[tuple[int, ...]]:
    """As transformers loads and continues them."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        model.generation_config = GenerationConfig(pad_token_id=0)
        written = [model.generate(torch.tensor([each.ids]), max_new_tokens=tokens, do_sample=False) for each in prompts]
    return [tuple(ids[0, len(each.ids) :].tolist()) for ids, each in zip(written, prompts, strict=True)]


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Gemma3ForCausalLM"])
def test_continuations_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    source = small_checkpoints.write(tmp_path / "source", architecture)
    model = StreamedModel(open_checkpoint(source))
    told: list[str] = []
    found = continue_prompts(model, IDS, (), 12, progress=lambda: told.append("one"))
    assert found == plain(source, IDS, 12)
    assert [len(ids) for ids in found] == [12, 12, 12]
    assert told == ["one"] * 3


def test_an_answer_ends_where_the_model_says() -> None:
    prompt = (Prompt("", tuple(load_tokenizer(EXAMPLE).encode("def f(x):\n"))),)
    model = StreamedModel(open_checkpoint(EXAMPLE))
    whole = continue_prompts(model, prompt, (), 12)[0]
    assert len(whole) == 12
    end = whole.index(whole[4])
    assert continue_prompts(model, prompt, (whole[4], 1), 12)[0] == whole[: end + 1]


def test_nothing_of_the_checkpoint_says_how_it_is_continued(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    settings = {
        "do_sample": True, "temperature": 9.0, "num_beams": 4, "max_new_tokens": 3, "min_new_tokens": 200, "top_k": 1,
        "repetition_penalty": 9.0, "suppress_tokens": list(range(2000)), "cache_implementation": "offloaded",
        "custom_generate": "nobody/nothing", "prompt_lookup_num_tokens": 3, "eos_token_id": [0, 7], "forced_bos_token_id": 3,
    }  # fmt: skip
    (source / "generation_config.json").write_text(json.dumps(settings))
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    change_json(source / "config.json", lambda found: found.update(do_sample=True, num_beams=4, repetition_penalty=9.0))
    prompts = read_prompts(None, load_tokenizer(source))[:2]
    ours = continue_prompts(StreamedModel(open_checkpoint(source)), prompts, (0,), 16)
    assert ours == continue_prompts(StreamedModel(open_checkpoint(EXAMPLE)), prompts, (0,), 16)
    assert not (tmp_path / "planted").exists()
    assert end_tokens(source, {}) == (0, 7)


@pytest.mark.parametrize(
    ("said", "config", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 4}, (3,)),
        ({}, {"eos_token_id": [4, "x", -1, True]}, (4,)),
        ([], {"text_config": {"eos_token_id": 5}}, (5,)),
        (None, {}, ()),
    ],
)
def test_where_answers_end(tmp_path: Path, said: object, config: dict[str, object], expected: tuple[int, ...]) -> None:
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert end_tokens(tmp_path, config) == expected


def test_one_that_ends_sooner_differs_there() -> None:
    tokenizer = load_tokenizer(EXAMPLE)
    prompts = (Prompt("a", (1,)),) * 3
    found = side_by_side(prompts, [(5, 6), (5,), ()], [(5,), (5, 6), ()], tokenizer)
    assert [each["differs_at"] for each in found] == [1, 1, None]


def test_a_file_of_prompts_is_read_even_where_no_model_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(as_served, "available_memory", lambda: 1000)
    tokenizer, file = load_tokenizer(EXAMPLE), tmp_path / "prompts.txt"
    with pytest.raises(SourceError, match=r"prompts\.txt"):
        prompts_to_answer(file, tokenizer, 501)
    file.write_text("import\n" * 6)
    assert prompts_to_answer(file, tokenizer, 501) == ()
    assert len(prompts_to_answer(file, tokenizer, 500)) == 6
    # Large models answer only if asked.
    monkeypatch.setattr(as_served, "available_memory", lambda: 1 << 40)
    assert len(prompts_to_answer(None, tokenizer, LARGEST_BY_DEFAULT)) == 4
    assert prompts_to_answer(None, tokenizer, LARGEST_BY_DEFAULT + 1) == ()
    assert len(prompts_to_answer(file, tokenizer, LARGEST_BY_DEFAULT + 1)) == 6

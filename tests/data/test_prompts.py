"""Prompts of a file, or our own, in the model's own form."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant.data.domains import BUILT_IN, read_prompts
from openquant.data.tokenizer import Tokenizer, load_tokenizer
from openquant.errors import SourceError

TEMPLATE = "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return replace(load_tokenizer(EXAMPLE), prefix=(5,))


@pytest.fixture(scope="module")
def chatty(plain: Tokenizer) -> Tokenizer:
    return replace(plain, template=TEMPLATE)


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_there_are_four_of_our_own(plain: Tokenizer, chatty: Tokenizer) -> None:
    for tokenizer in (plain, chatty):
        found = read_prompts(None, tokenizer)
        assert len(found) == len({prompt.ids for prompt in found}) == 4
        for prompt, (said, text) in zip(found, BUILT_IN, strict=True):
            if tokenizer is chatty:
                assert prompt.text == said
                assert tokenizer.decode(prompt.ids) == f"<|endoftext|>[user] {said}\n[assistant]"
            else:
                assert (prompt.text, prompt.ids[0], tokenizer.decode(prompt.ids[1:])) == (text, 5, text)


def test_each_line_of_a_text_is_a_prompt(tmp_path: Path, plain: Tokenizer, chatty: Tokenizer) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffWhat is this?\r\n\n  indented {{ 1 + 1 }}\n".encode())
    assert [plain.decode(each.ids[1:]) for each in read_prompts(path, plain)] == [
        "What is this?",
        "  indented {{ 1 + 1 }}",
    ]
    assert [chatty.decode(each.ids) for each in read_prompts(path, chatty)] == [
        "<|endoftext|>[user] What is this?\n[assistant]",
        "<|endoftext|>[user]   indented {{ 1 + 1 }}\n[assistant]",
    ]


def test_lines_of_json_are_prompts_chats_or_texts(tmp_path: Path, plain: Tokenizer, chatty: Tokenizer) -> None:
    chat = '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}'
    path = written(tmp_path / "prompts.jsonl", f'{{"prompt": "one"}}\n{{"text": "two"}}\n{chat}\n')
    found = read_prompts(path, chatty)
    assert [each.text for each in found] == ["one", "two", "system: Be brief.\nuser: Hi"]
    assert [chatty.decode(each.ids) for each in found] == [
        "<|endoftext|>[user] one\n[assistant]",
        chatty.decode([5, *chatty.encode("two")]),
        "<|endoftext|>[system] Be brief.\n[user] Hi\n[assistant]",
    ]
    with pytest.raises(
        SourceError, match=f"tiny-qwen3 has no chat template, which {re.escape(str(path))} line 3 needs"
    ):
        read_prompts(path, plain)


def test_a_file_that_holds_no_prompts(tmp_path: Path, plain: Tokenizer, subtests: pytest.Subtests) -> None:
    for content, message in [
        ("\n\n", "FILE has no prompts"),
        ('\n{"prompt": "x"\n', "FILE line 2 is not valid JSON: "),
        ('{"question": "x"}', "FILE line 1 has neither `text` nor `messages`, only 'question'"),
        ('{"prompt": 1}', "FILE line 1 has neither `text` nor `messages`, only 'prompt'"),
        ('{"messages": [1]}', "FILE line 1 has `messages` that are [1], not those of a chat"),
        ('{"prompt": "\\ud800"}', "the tokenizer of "),
        ('{"text": "' + "x" * 100_000 + '"}', "FILE line 1 has "),
    ]:
        with subtests.test(message):
            path = written(tmp_path / "prompts.jsonl", content)
            with pytest.raises(SourceError) as caught:
                read_prompts(path, plain)
            assert caught.value.message.replace(str(path), "FILE").startswith(message)


def test_files_that_are_none(tmp_path: Path, plain: Tokenizer) -> None:
    with pytest.raises(SourceError, match=r"nothing cannot be read: No such file or directory"):
        read_prompts(tmp_path / "nothing", plain)
    (tmp_path / "latin.txt").write_bytes(b"fine\nGr\xf6\xdfe")
    with pytest.raises(SourceError, match=r"latin\.txt is not UTF-8: invalid start byte at byte 7"):
        read_prompts(tmp_path / "latin.txt", plain)

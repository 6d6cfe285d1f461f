"""Documents are equally long, the same each time, and never those of another purpose."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE, change_json
from openquant.data.corpus import Corpus, read_corpus
from openquant.data.tokenizer import Tokenizer, load_tokenizer
from openquant.errors import OpenQuantError
from openquant.options import Texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EXAMPLE)


def write(path: Path, words: int, start: int = 0) -> Path:
    path.write_text("".join(f"word {number} of many\n" for number in range(start, start + words)))
    return path


def pieces(corpus: Corpus, tokenizer: Tokenizer) -> set[str]:
    """Whole lines of its documents."""
    found = set()
    for document in corpus.documents:
        found |= set(tokenizer.decode(document.ids).split("\n")[1:-1])
    return found


def test_documents_are_pieces_of_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = write(tmp_path / "a.txt", 30_000)
    corpus = read_corpus(Texts(text=[text], samples=9, length=64), tokenizer)
    assert [len(document.ids) for document in corpus.documents] == [64] * 9
    assert all(tokenizer.decode(document.ids) in text.read_text() for document in corpus.documents)
    assert len({document.ids for document in corpus.documents}) == 9
    assert {document.domain for document in corpus.documents} == {"a.txt"}
    assert corpus.documents[2].name == "a.txt 3"
    assert corpus.described == "9 documents of 64 tokens: a.txt (9)"
    assert corpus.account == {
        "files": ["a.txt"], "sha256": corpus.sha256, "documents": 9, "length": 64, "positions": 9 * 63,
    }  # fmt: skip
    assert corpus.notes == ()


@pytest.mark.parametrize("words", [300, 20_000])
def test_purposes_share_no_text_however_much_is_read(tmp_path: Path, tokenizer: Tokenizer, words: int) -> None:
    text = [write(tmp_path / "a.txt", words)]
    many = pieces(read_corpus(Texts(text=text, samples=200, length=50), tokenizer, "calibration"), tokenizer)
    for samples, length in ((3, 16), (64, 100), (1, 700)):
        options = Texts(text=text, samples=samples, length=length)
        lines = pieces(read_corpus(options, tokenizer), tokenizer)
        theirs = pieces(read_corpus(options, tokenizer, "calibration"), tokenizer)
        assert many and theirs and lines and not (many | theirs) & lines, (samples, length)


def test_the_same_is_read_each_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    options = Texts(text=[write(tmp_path / "a.txt", 9_000)], samples=5, length=32)
    corpus = read_corpus(options, tokenizer)
    assert read_corpus(options, tokenizer) == corpus
    assert read_corpus(replace(options, samples=6), tokenizer).sha256 != corpus.sha256
    assert corpus.sha256 == "daf49fcf5590043f8f23efe115b5690b5f54ac4b060684fdf9ff44e1bcdc7304"


def test_domains_are_balanced_and_told_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "b").mkdir()
    texts = [write(tmp_path / "a.txt", 9_000), write(tmp_path / "b" / "a.txt", 900, 9_000), write(tmp_path / "c", 900)]
    corpus = read_corpus(Texts(text=texts, samples=7, length=32), tokenizer)
    assert corpus.domains == {str(texts[0]): 3, str(texts[1]): 2, str(texts[2]): 2}


def test_a_short_text_gives_what_it_has(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = write(tmp_path / "a.txt", 40)
    corpus = read_corpus(Texts(text=[text], samples=32, length=16), tokenizer)
    assert len(corpus.documents) == len(tokenizer.encode("".join(text.read_text().splitlines(True)[:20]))) // 16
    assert corpus.notes == (f"a.txt has {len(corpus.documents)} documents of 16 tokens for evaluation, not 32",)


def test_a_text_shorter_than_the_length(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("word " * 60)
    with pytest.raises(OpenQuantError) as caught:
        read_corpus(Texts(text=[tmp_path / "a.txt"], length=512), tokenizer)
    assert re.fullmatch(r"a\.txt has (\d+) tokens in one piece for .*, fewer than --length 512", caught.value.message)
    assert re.fullmatch(r"give a longer text, or --length \d+ or less", caught.value.hint)


def test_what_a_tokenizer_sets_before_a_text_begins_every_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = write(tmp_path / "a.txt", 900)
    corpus = read_corpus(Texts(text=[text], samples=8, length=32), replace(tokenizer, prefix=(7, 8)))
    assert {document.ids[:2] for document in corpus.documents} == {(7, 8)}
    assert {len(document.ids) for document in corpus.documents} == {32}
    assert all(tokenizer.decode(document.ids[2:]) in text.read_text() for document in corpus.documents)
    with pytest.raises(OpenQuantError, match="^samples of 2 tokens have no room for text"):
        read_corpus(Texts(text=[text], length=2), replace(tokenizer, prefix=(7, 8)))


@pytest.fixture
def chatty(tmp_path: Path) -> Tokenizer:
    """The example's tokenizer with a template that begins with a token."""
    directory = tmp_path / "chatty"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, directory)
    template = "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    change_json(directory / "tokenizer_config.json", lambda found: found.update(chat_template=template))
    return replace(load_tokenizer(directory), prefix=(0,))


def chats(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_chats_are_put_into_the_model_s_own_form(tmp_path: Path, chatty: Tokenizer) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"question {n} "}, {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(40)
    ]
    corpus = read_corpus(Texts(text=[chats(tmp_path / "a.jsonl", rows)], samples=4, length=100), chatty)
    text = chatty.decode(corpus.documents[0].ids)
    assert text.startswith("<|endoftext|>[user] question 0 \n[assistant] answer 0\n<|endoftext|>[user] question 1 ")
    assert {document.ids[:1] for document in corpus.documents} == {(0,)}
    assert all(document.ids[1] != 0 for document in corpus.documents)
    assert not any(
        re.search(r"\[assistant\](?! ans)", chatty.decode(document.ids)[:-12]) for document in corpus.documents
    )


def test_our_own_chats_are_complete(chatty: Tokenizer) -> None:
    corpus = read_corpus(Texts(samples=16, length=512), chatty)
    text = "".join(chatty.decode(document.ids) for document in corpus.documents if document.domain == "chats")
    assert "\n[assistant] " in text and "\n<|endoftext|>[user] " in text
    # None asks for an answer.
    assert "[assistant]<|endoftext|>" not in text


def test_a_chat_that_the_template_refuses_is_named(tmp_path: Path, chatty: Tokenizer) -> None:
    refusing = replace(chatty, template="{{ raise_exception('no users') }}")
    rows = [{"text": "a text"}, {"messages": [{"role": "user", "content": "x"}]}]
    path = chats(tmp_path / "a.jsonl", [*rows, *rows])
    with pytest.raises(OpenQuantError) as caught:
        read_corpus(Texts(text=[path]), refusing)
    assert caught.value.message == f"the model's chat template fails for {path} line 2: 'no users'"


def test_without_a_text_they_are_our_own_and_it_says_so(tokenizer: Tokenizer) -> None:
    corpus = read_corpus(Texts(samples=9, length=32), tokenizer)
    other = read_corpus(Texts(samples=9, length=32), tokenizer, "calibration")
    assert corpus.domains == {"prose": 3, "code": 2, "chats": 2, "languages": 2}
    assert corpus.account["builtin"] == "openquant texts for evaluation"
    assert corpus.notes == (
        "no text was given: figures are for openquant's own prose, code, chats and ten languages; --text FILE or "
        "--dataset NAME has yours",
    )
    assert not {document.ids for document in corpus.documents} & {document.ids for document in other.documents}
    # Fewer samples are of fewer domains; many and long ones are there too.
    assert read_corpus(Texts(samples=1, length=32), tokenizer).domains == {"prose": 1}
    assert len(read_corpus(Texts(samples=128, length=512), tokenizer, "calibration").documents) == 128
    assert len(read_corpus(Texts(samples=4, length=4096), tokenizer).documents) == 4


# The user's first words are left out by those who iterate over parts, which a string has not.
NO_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content if p.type is defined %}{{ p }}{% endfor %}{% endfor %}"
)
TEMPLATES = [
    (None, "user: "),
    (NO_PARTS, "user: "),
    ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>"),
]


@pytest.mark.parametrize("template, begin", TEMPLATES)
def test_our_own_chats_are_in_the_template_where_it_has_what_they_say(
    tokenizer: Tokenizer, template: str | None, begin: str
) -> None:
    other = replace(tokenizer, template=template)
    corpus = read_corpus(Texts(samples=32, length=256), other)
    said = [tokenizer.decode(document.ids) for document in corpus.documents if document.domain == "chats"]
    assert len(said) == 8
    assert sum(begin in text for text in said) >= 2
    assert begin == "<|user|>" or not any("<|" in text for text in said)


def test_a_dataset_is_one_domain(tmp_path: Path, tokenizer: Tokenizer) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    chats(directory / "test.jsonl", [{"text": f"row {number} is about something"} for number in range(400)])
    corpora = [
        read_corpus(Texts(dataset=str(directory), samples=20, length=50), tokenizer, purpose)
        for purpose in ("evaluation", "calibration")
    ]
    assert corpora[0].account["dataset"] == f"{directory}:test" and corpora[0].domains == {f"{directory}:test": 20}
    assert not pieces(corpora[0], tokenizer) - {""} & pieces(corpora[1], tokenizer)

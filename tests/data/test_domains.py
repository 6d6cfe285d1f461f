"""Files and datasets are read a block at a time, and what is wrong with them is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from openquant.data import domains
from openquant.data.domains import open_dataset, open_file
from openquant.errors import SourceError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]


def parts(path: Path) -> list[list[Any]]:
    domain = open_file(path, "text")
    return [[named.content for named in domain.read(number)] for number in range(domain.count)]


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        parts(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def in_order(text: str, pieces: list[str]) -> bool:
    """Whether these are parts of a text that do not overlap."""
    at = 0
    for piece in pieces:
        at = text.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return True


lines = st.lists(st.text(st.sampled_from("aé語🙂 ."), max_size=90), min_size=1, max_size=20)


@given(lines)
def test_blocks_of_a_text_share_nothing_and_hold_most_of_it(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    text = "\n".join(lines) + "."
    path = tmp_path_factory.getbasetemp() / "property.txt"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domains, "BLOCK", 64)
        pieces = [part for block in parts(path) for part in block]
    assert in_order(text, pieces)
    # A line that lies in two blocks may be in neither, if it is short, and of a long one only letters are lost.
    assert len("".join(pieces).encode()) >= len(text.encode()) / 4 - 8


@given(lines)
def test_every_line_of_json_is_in_one_block(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domains, "BLOCK", 64)
        assert [part for block in parts(path) for part in block] == lines


def test_lines_of_json_hold_texts_or_chats(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\n'
        + json.dumps({"messages": CHAT}).encode()
        + b'\n{"text": "", "messages": 3}'
    )
    assert [part for block in parts(path) for part in block] == ["one", CHAT, ""]


def test_a_broken_line_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for line, message in [
        (b"{", "a.jsonl line 3 is not valid JSON: Expecting property name"),
        (b"[1]", "a.jsonl line 3 is [1], not an object"),
        (b'{"prompt": "x"}', "a.jsonl line 3 has neither `text` nor `messages`, only 'prompt'"),
        (b'{"messages": "x"}', "a.jsonl line 3 has `messages` that are 'x', not those of a chat"),
        (b'{"messages": [{"content": "x"}]}', "a.jsonl line 3 has `messages` that are [{'content': 'x'}], not those"),
        (b'{"text": "\xff"}', "a.jsonl line 3 is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
    ]:
        with subtests.test(line=line, message=message):
            path = tmp_path / "a.jsonl"
            path.write_bytes(b'{"text": "' + b"x" * 600_000 + b'"}\n\n' + line + b"\n")
            assert refusal(path).startswith(message)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Gr\xf6\xdfe".encode("latin-1"))
    assert refusal(latin) == "latin.txt is not UTF-8: invalid start byte at byte 2"
    latin.write_bytes(b"a" * 300_000 + b"\xf6\xdf" + b"a" * 500_000)
    assert refusal(latin) == "latin.txt is not UTF-8: invalid start byte at byte 300,000"
    (tmp_path / "empty.txt").touch()
    assert refusal(tmp_path / "empty.txt") == "empty.txt is empty"
    assert refusal(tmp_path / "missing.txt") == "missing.txt cannot be read: No such file or directory"
    with pytest.raises(SourceError) as caught:
        open_file(tmp_path / "missing.txt", "missing.txt")
    assert caught.value.hint == "give files of text or JSON lines, not texts themselves"
    (tmp_path / "directory").mkdir()
    assert refusal(tmp_path / "directory") == "directory is not a regular file"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "pipe is not a regular file"
    assert refusal(Path("/dev/zero")) == "zero is not a regular file"


def test_of_a_large_file_only_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.write(b"first line\n")
        file.truncate(1 << 40)
    domain = open_file(path, "large")
    assert domain.count == 1 << 22
    assert domain.read(0)[0].content.startswith("first line\n")
    assert len(domain.read(domain.count - 1)[0].content) == domains.BLOCK


PURPOSES = ("evaluation", "calibration")


def test_documents_say_what_our_own_texts_are() -> None:
    page = (ROOT / "docs" / "how-to" / "calibration-texts.md").read_text()
    for purpose in PURPOSES:
        data = (domains.OWN_TEXTS / f"{purpose}.jsonl").read_bytes()
        assert (
            f"| {purpose} | {len(data.splitlines())} | {len(data) // 1000} KB | `{hashlib.sha256(data).hexdigest()[:16]}` |"
            in page
        )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A directory that is a dataset of two splits."""
    directory = tmp_path / "data"
    directory.mkdir()
    for split, count in (("train", 40), ("test", 30)):
        rows = ({"text": f"{split} {number} " + "x" * 20_000} for number in range(count))
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def test_a_dataset_is_read_as_far_as_needed(dataset: Path) -> None:
    domain = open_dataset(str(dataset), 2)
    assert (domain.name, domain.count) == (f"{dataset}:test", 2)
    # 20,000 letters each, and 262,144 in a block.
    numbers = [[named.content.split()[1] for named in domain.read(number)] for number in range(2)]
    assert numbers == [[str(number) for number in range(14)], [str(number) for number in range(14, 28)]]
    assert str(domain.read(1)[0].where) == f"dataset {dataset} row 14"
    train = open_dataset(f"{dataset}::train", 100)
    assert (train.name, train.count) == (f"{dataset}:train", 3)


def test_a_small_dataset_is_halved(dataset: Path) -> None:
    for split in ("train", "test"):
        (dataset / f"{split}.jsonl").unlink()
    (dataset / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHAT}) for _ in range(7)))
    domain = open_dataset(str(dataset), 64)
    assert [len(domain.read(number)) for number in range(domain.count)] == [4, 3]
    assert [message["content"] for message in domain.read(0)[0].content] == ["Hi", None]


def test_a_dataset_that_cannot_be_read(dataset: Path) -> None:
    with pytest.raises(SourceError, match=f"^dataset {dataset}::nothing cannot be read: "):
        open_dataset(f"{dataset}::nothing", 2)


def test_a_dataset_without_text_is_named_with_its_columns(dataset: Path) -> None:
    (dataset / "train.jsonl").unlink()
    (dataset / "test.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    with pytest.raises(SourceError) as caught:
        open_dataset(f"{dataset}::test", 2)
    assert (
        str(caught.value) == f"dataset {dataset}::test row 0 has neither `text` nor `messages`, only 'question, answer'"
    )

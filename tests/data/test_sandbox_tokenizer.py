"""Tokenizers that take more than they may are refused before this process loads them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from conftest import EXAMPLE
from openquant.data.sandbox import check_tokenizer
from openquant.data.tokenizer import PROBE
from openquant.errors import SourceError


def changed(**parts: Any) -> bytes:
    return json.dumps({**json.loads((EXAMPLE / "tokenizer.json").read_text()), **parts}).encode()


def replacing(pattern: dict[str, str], content: str, times: int = 1) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


A, ANY = {"String": "a"}, {"Regex": "."}


def test_one_that_takes_more_than_it_may_is_refused(subtests: pytest.Subtests) -> None:
    for parts, problem in [
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10_000_000}}, "takes more than 256 MiB of memory"),
        ({"normalizer": {"type": "Sequence", "normalizers": replacing(ANY, "b" * 2000, 3)}}, "takes more than 256 MiB"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}}, "takes more than 256 MiB"),
        ({"normalizer": replacing(ANY, "b" * 2000)[0]}, r"makes [\d,]+ tokens of [\d,]+ characters"),
        ({"decoder": {"type": "Sequence", "decoders": replacing(A, "aa", 20)}}, "did not end within 1 seconds"),
    ]:
        with subtests.test(problem):
            begun = time.monotonic()
            with pytest.raises(SourceError, match=f"^the tokenizer of a model {problem}") as caught:
                check_tokenizer(changed(**parts), "a model", [PROBE], cpu=1, memory=256 << 20)
            assert caught.value.hint.startswith("tokenizer.json is damaged, or made to do that")
            assert time.monotonic() - begun < 40


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# The library gives up on a pattern after so many steps, which whoever uses it is told.
@pytest.mark.parametrize("parts", [{}, {"model": {}}, {"pre_tokenizer": split("(a+)+$")}])
def test_others_say_later_what_is_wrong_with_them(parts: dict[str, Any]) -> None:
    check_tokenizer(changed(**parts, decoder=replacing(A, "a")[0]), "a model", [PROBE])


def test_one_whose_rules_do_not_multiply_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    several = {"type": "Sequence", "pretokenizers": [split(r"\p{L}+"), {"type": "ByteLevel"}]}
    check_tokenizer(changed(normalizer={"type": "NFC"}, pre_tokenizer=several), "a model", [PROBE])
    with pytest.raises(OSError):
        check_tokenizer(changed(normalizer={"type": "NFKC"}), "a model", [PROBE])


def test_no_bytes_upset_it() -> None:
    check_tokenizer(b"\xff\x00", "a model", [PROBE])

"""A checkpoint's tokenizer is loaded, with nothing of the checkpoint executed, opened elsewhere or waited for."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import EXAMPLE, change_json
from openquant.data.tokenizer import PROBE, load_tokenizer
from openquant.errors import OutputError, SourceError

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the example's tokenizer."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, directory)
    return directory


def configure(model: Path, **settings: Any) -> None:
    change_json(model / "tokenizer_config.json", lambda found: found.update(settings))


def refusal(model: Path) -> str:
    with pytest.raises(SourceError) as caught:
        load_tokenizer(model)
    return str(caught.value).replace(str(model), "DIR")


def test_a_tokenizer_is_that_of_transformers(model: Path) -> None:
    tokenizer, plain = load_tokenizer(model), AutoTokenizer.from_pretrained(EXAMPLE, local_files_only=True)
    ids = plain(PROBE, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(PROBE) == ids
    assert tokenizer.decode(ids) == PROBE
    assert (tokenizer.prefix, tokenizer.template, len(tokenizer.digest)) == ((), None, 64)
    assert tokenizer.decode([0]) == "<|endoftext|>"


def test_equal_files_are_loaded_once(model: Path, tmp_path: Path) -> None:
    first = load_tokenizer(model, "source")
    again = load_tokenizer(shutil.copytree(model, tmp_path / "copy"), "output", like=first)
    assert again.inner is first.inner
    assert again == replace(first, where="output")
    configure(model, eos_token="changed")
    assert load_tokenizer(model, like=first).inner is not first.inner


def test_what_a_tokenizer_sets_before_a_text_is_known(model: Path) -> None:
    def with_beginning(found: dict[str, Any]) -> None:
        piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        found["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [piece, text, piece],
            "pair": [piece, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }

    change_json(model / "tokenizer.json", with_beginning)
    tokenizer = load_tokenizer(model)
    assert tokenizer.prefix == (0,)
    assert tokenizer.encode("Hello") == load_tokenizer(EXAMPLE).encode("Hello")


def test_the_template_is_found_wherever_it_is(model: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    for place in ("jinja", "config", "named", "processor"):
        with subtests.test(place=place):
            copy = Path(shutil.copytree(model, tmp_path / place))
            if place == "jinja":
                (copy / "chat_template.jinja").write_text(template)
                configure(copy, chat_template="another")
            elif place == "config":
                configure(copy, chat_template=template)
            elif place == "named":
                several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
                configure(copy, chat_template=several)
            else:
                (copy / "chat_template.json").write_text(json.dumps({"chat_template": template}))
            found = load_tokenizer(copy)
            assert found.template == template
    assert found.render_chat(CHAT, "a") == "Hi<|endoftext|>"


def test_a_model_without_a_template_takes_no_chats(model: Path) -> None:
    with pytest.raises(SourceError, match=r"model has no chat template, which chats\.jsonl line 1 needs"):
        load_tokenizer(model).render_chat(CHAT, "chats.jsonl line 1")


CHATML = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ eos_token }}{% if tools is none %}{{ messages | tojson }}{% endif %}"""


def test_templates_render_as_in_transformers_on_the_same_day_always() -> None:
    tokenizer = replace(load_tokenizer(EXAMPLE), template=CHATML)
    chat = [{"role": "system", "content": "Be <brief> & \u202e\x1b[0m é"}, {"role": "user", "content": "語"}]
    plain = AutoTokenizer.from_pretrained(EXAMPLE, local_files_only=True)
    whole = plain.apply_chat_template(chat, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat([*chat[:1], {**chat[1], "name": None}], "a") == whole
    dated = replace(tokenizer, template="{{ strftime_now('%d %b %Y') }}")
    assert dated.render_chat(chat, "a") == "01 Jan 2026"


def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openquant.data.tokenizer.SECONDS", 1)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(SourceError, match="fails for a: .*it did not end within 1 seconds"):
        replace(load_tokenizer(EXAMPLE), template=loop).render_chat(CHAT, "a")


@pytest.mark.parametrize(
    "template, problem",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception('only\x1b[2J \u202eusers') }}", "'only\\x1b[2J \\u202eusers'"),
    ],
)
def test_a_template_that_fails_is_named(template: str, problem: str) -> None:
    with pytest.raises(SourceError) as caught:
        replace(load_tokenizer(EXAMPLE), template=template).render_chat(CHAT, "prompts.jsonl line 7")
    said = str(caught.value)
    assert said.startswith("the model's chat template fails for prompts.jsonl line 7: ")
    assert problem in said and said.isprintable() and len(said) < 200


def test_nothing_of_a_checkpoint_is_executed_or_opened_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"open({str(tmp_path / 'planted')!r}, 'w')\nclass Mine: pass\n"
    for name in ("tokenization_mine.py", "tokenizer.py", "sitecustomize.py"):
        (model / name).write_text(code)
    (model / "tokenizer.pkl").write_bytes(b"cos\nsystem\n(S'touch planted'\ntR.")
    os.mkfifo(model / "vocab_elsewhere")
    mine = {"AutoTokenizer": ["tokenization_mine.Mine", "tokenization_mine.Mine"]}
    elsewhere = str(model / "vocab_elsewhere")
    configure(model, auto_map=mine, vocab_file=elsewhere, tokenizer_file=elsewhere, merges_file=elsewhere)
    change_json(model / "config.json", lambda found: found.update(auto_map={"AutoConfig": "tokenization_mine.Mine"}))
    special = {"eos_token": "<|endoftext|>", "vocab_file": elsewhere, "tokenizer_file": elsewhere}
    (model / "special_tokens_map.json").write_text(json.dumps(special))

    def connect(*_: object) -> None:
        raise AssertionError("it goes to the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr("builtins.input", connect)
    assert load_tokenizer(model).encode(PROBE) == load_tokenizer(EXAMPLE).encode(PROBE)
    assert not (tmp_path / "planted").exists()


def test_a_directory_without_a_tokenizer_says_so(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert refusal(model).startswith("DIR has no tokenizer: none of tokenizer.json, ")


def damaged(name: str, data: bytes | None) -> Any:
    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        if data is None:
            os.mkfifo(model / name)
        else:
            (model / name).write_bytes(data)

    return damage


DAMAGE: list[tuple[Any, str]] = [
    (damaged("tokenizer.json", None), "DIR/tokenizer.json is not a regular file"),
    (damaged("tokenizer.json", b"{}"), "the tokenizer of DIR cannot be loaded: "),
    (damaged("tokenizer.json", b'{"a":' * 100_000), "the tokenizer of DIR cannot be loaded: "),
    (damaged("tokenizer_config.json", b"{"), "tokenizer_config.json is not valid JSON: "),
    (damaged("tokenizer_config.json", b"[1]"), "tokenizer_config.json is not a JSON object"),
    (damaged("chat_template.json", b"null"), "chat_template.json is not a JSON object"),
    (partial(configure, tokenizer_class="AutoModelForCausalLM"), "the tokenizer of DIR cannot be loaded: "),
    (partial(configure, tokenizer_class=["LlamaTokenizer"]), "the tokenizer of DIR cannot be loaded: "),
]


def test_a_damaged_tokenizer_is_an_error(model: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (damage, message) in enumerate(DAMAGE):
        with subtests.test(message):
            copy = Path(shutil.copytree(model, tmp_path / str(number)))
            damage(copy)
            said = refusal(copy)
            assert said.startswith(message) and said.isprintable() and len(said) < 400


def test_a_full_temporary_directory_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError) as caught:
        load_tokenizer(model)
    assert caught.value.message == f"{tempfile.gettempdir()} cannot be written: No space left on device"


def swap(found: dict[str, Any]) -> None:
    vocab = found["model"]["vocab"]
    first, second = list(vocab)[1000:1002]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def test_a_changed_tokenizer_is_noticed(model: Path, subtests: pytest.Subtests) -> None:
    ours = load_tokenizer(EXAMPLE)
    rows: list[tuple[str, Any, tuple[str, ...] | None]] = [
        ("tokenizer.json", dict, ()),
        ("tokenizer.json", swap, ("the vocabulary", "how text becomes tokens")),
        ("tokenizer.json", lambda found: found["model"]["merges"].pop(), ("how text becomes tokens",)),
        ("tokenizer_config.json", lambda found: found.update(eos_token="the"), None),
        ("tokenizer_config.json", lambda found: found.update(chat_template="x"), ("the chat template",)),
    ]
    for file, change, differences in rows:
        with subtests.test(file=file, differences=differences):
            change_json(model / file, change)
            changed = load_tokenizer(model)
            found = ours.differences(changed)
            assert "the special tokens" in found if differences is None else found == differences
            assert changed.differences(load_tokenizer(model)) == ()
            shutil.copy(EXAMPLE / file, model)


def test_what_a_tokenizer_cannot_encode_is_an_error() -> None:
    with pytest.raises(SourceError, match=re.escape(f"the tokenizer of {EXAMPLE} fails on 'a\\ud800': ")):
        load_tokenizer(EXAMPLE).encode("a\ud800")

"""Chat templates render as in transformers, and none takes more than it may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from conftest import EXAMPLE
from openquant.data import tokenizer as module
from openquant.data.tokenizer import render
from openquant.errors import SourceError

CHATML = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ eos_token }}{% if tools is none %}{{ messages | tojson }}{% endif %}"""
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief> & \u202e\x1b[0m é"}, {"role": "user", "content": "語", "name": None}],
]


def rendered(template: str) -> list[str]:
    return render(template, CHATS[:1], ["prompts.jsonl line 7"])


def refusal(template: str) -> str:
    with pytest.raises(SourceError) as caught:
        rendered(template)
    return str(caught.value)


def test_templates_render_as_in_transformers() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EXAMPLE, local_files_only=True)
    whole = tokenizer.apply_chat_template(CHATS, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    assert render(CHATML, CHATS, ["a", "b"], {"eos_token": "<|endoftext|>"}) == whole


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 3)
    begun = time.monotonic()
    assert refusal("{% set x = 9 ** (9 ** 9) %}") == "the model's chat template did not end within 3 seconds"
    assert time.monotonic() - begun < 40


def test_a_template_that_fails_is_named(subtests: pytest.Subtests) -> None:
    for template, problem in [
        (
            "{% set x = namespace(s='a' * 1000) %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
            "more memory",
        ),
        ("{{ 'a' * 10**12 }}", "it takes more memory than it may"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception('only\x1b[2J \u202eusers') }}", "'only\\x1b[2J \\u202eusers'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ]:
        with subtests.test(template[:60]):
            said = refusal(template)
            assert said.startswith(
                ("the model's chat template fails for prompts.jsonl line 7: ", "the chat template could not")
            )
            assert problem in said
            assert said.isprintable() and len(said) < 200


def test_no_module_of_the_working_directory_is_imported(tmp_path: Path) -> None:
    for name in ("json", "jinja2", "transformers", "contextlib"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('planted').touch(); raise ImportError")
    script = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from openquant.data.tokenizer import render\n"
        "print(render('{{ messages[0].content }}', [[{'role': 'user', 'content': 'Hi'}]], ['a']))"
    )
    path = [str(Path(__file__).parents[2]), *(each for each in sys.path if each)]
    done = subprocess.run([sys.executable, "-c", script, *path], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['Hi']\n", "")
    assert not (tmp_path / "planted").exists()


def test_what_comes_out_is_json_whatever_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "debug")
    template = "{{ messages }}\n{{ messages | tojson }}\n{{ strftime_now('%d %b %Y') }}"
    plain, as_json, today = rendered(template)[0].splitlines()
    assert (plain, json.loads(as_json)) == (str(CHATS[0]), CHATS[0])
    # It is always the same day.
    assert today == "01 Jan 2026"
    assert os.environ.get("HF_HUB_OFFLINE") != "1"


def test_nothing_to_render_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert render("", [], []) == []

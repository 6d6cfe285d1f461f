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
from openquant.data import tokenizer as sandbox
from openquant.data.tokenizer import render
from openquant.errors import SourceError

CHATML = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ eos_token }}{% if tools is none %}{{ messages | tojson }}{% endif %}"""
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief> & \u202e\x1b[0m é"}, {"role": "user", "content": "語", "name": None}],
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 3)


def rendered(template: str) -> list[str]:
    return render(template, CHATS[:1], ["prompts.jsonl line 7"])


def refusal(template: str) -> str:
    with pytest.raises(SourceError) as caught:
        rendered(template)
    return str(caught.value)


@pytest.mark.parametrize("answered", [False, True])
def test_templates_render_as_in_transformers(answered: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EXAMPLE, local_files_only=True)
    whole = tokenizer.apply_chat_template(
        CHATS, chat_template=CHATML, tokenize=False, add_generation_prompt=not answered
    )
    assert render(CHATML, CHATS, ["a", "b"], {"eos_token": "<|endoftext|>"}, answered) == whole


def test_it_is_always_the_same_day() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == ["01 Jan 2026"]


def test_a_template_that_does_not_end_is_ended() -> None:
    begun = time.monotonic()
    assert refusal("{% set x = 9 ** (9 ** 9) %}") == "the model's chat template did not end within 3 seconds"
    assert time.monotonic() - begun < 40


def test_a_template_that_fails_is_named(subtests: pytest.Subtests) -> None:
    for template, problem in [
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big. The sandbox blocks ranges larger than MAX_RANGE"),
        (
            "{% set x = namespace(s='a' * 1000) %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
            "more memory",
        ),
        ("{{ 'a' * 10**12 }}", "it takes more memory than it may"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ raise_exception('only\x1b[2J \u202eusers') }}", "'only\\x1b[2J \\u202eusers'"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
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
    plain, as_json = rendered("{{ messages }}\n{{ messages | tojson }}")[0].splitlines()
    assert (plain, json.loads(as_json)) == (str(CHATS[0]), CHATS[0])
    assert os.environ.get("HF_HUB_OFFLINE") != "1"


def test_nothing_to_render_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert render("", [], []) == []

"""Tasks that generate texts: what servers are asked, what is made of their answers, and what goes wrong with them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE
from openquant import compress, evaluate
from openquant.cli.commands import main
from openquant.data.tasks import read_tasks
from openquant.errors import OpenQuantError, UsageError
from openquant.evaluation import answers, task_servers
from openquant.files.evaluation import check_evaluation
from openquant.options import server_url
from openquant.report.card import evaluated_card
from openquant.report.text import evaluation_text
from support.loopback_engine import Answer, LoopbackEngine, message, text
from support.task_files import questions, write_generation, write_lines, write_lm_eval

SMALL: dict[str, Any] = {"samples": 2, "length": 48}
QUICK: dict[str, Any] = {**SMALL, "no_prompts": True}
Complete = Callable[[dict[str, Any]], Answer]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of our own take most of the time, and so do retries."""
    monkeypatch.setattr(answers, "BUILT_IN", 1)
    monkeypatch.setattr(task_servers, "_WAITS", (0.01, 0.01))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(compress(EXAMPLE, tmp_path_factory.mktemp("made") / "tiny-INT4", "int4").output)


# By prompt.
RIGHT = {f"Question: {each['question']}\nAnswer:": f" {each['choices'][each['answer']]}" for each in questions()}


def knows(count: int, wrong: str = " x") -> Complete:
    """Answers the first questions rightly, the last of them in a sentence."""
    prompts = list(RIGHT)

    def complete(body: dict[str, Any]) -> Answer:
        number = prompts.index(body["prompt"])
        right = RIGHT[body["prompt"]]
        return text(f"{right}!" if number == count - 1 else right if number < count else wrong)

    return complete


@contextmanager
def servers(output: Path, source: Complete, made: Complete) -> Iterator[tuple[LoopbackEngine, LoopbackEngine]]:
    with LoopbackEngine({"a-name": EXAMPLE}, source) as first, LoopbackEngine({str(output): output}, made) as second:
        yield first, second


def test_answers_of_servers_are_compared(output: Path, tmp_path: Path) -> None:
    task = write_generation(tmp_path / "tasks", generation_kwargs={"until": ["\n"], "max_gen_toks": 8, "top_k": 3})
    told: list[str] = []
    steps: list[tuple[int, int]] = []
    with servers(output, knows(8), knows(6, " y")) as (first, second):
        urls = [f"{second.url}/", f"{first.url}/v1"]
        found = evaluate(
            output, EXAMPLE, **SMALL, tasks=task, server=urls, limit=10, begun=told.append,
            progress=lambda *step: steps.append(step),
        )  # fmt: skip
    assert len(first.asked) == len(second.asked) == 10
    assert sorted(first.asked, key=lambda body: list(RIGHT).index(body["prompt"]))[3] == {
        "model": "a-name", "prompt": list(RIGHT)[3], "max_tokens": 8, "temperature": 0, "stop": ["\n"], "top_k": 3
    }  # fmt: skip
    assert {body["model"] for body in second.asked} == {str(output)}
    assert told == [
        "2 documents of 48 tokens: code (1), docs (1); 3 passes; "
        f"10 questions of tasks, answered by {first.url}, {second.url} with 160 tokens at most"
    ]
    done, total = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    assert (done[0], done[-1], set(total)) == (8, total[0], {160 + 3 * 2 * 48 + 2 * 64})
    [one] = found.outputs
    assert json.loads((output / "eval.json").read_bytes()) == one == check_evaluation(json.loads(json.dumps(one)))
    of_tasks = one["tasks"]
    assert (of_tasks["questions"], of_tasks["requests"], of_tasks["tokens"], of_tasks["packed"]) == (10, 10, 0, False)
    pooled = of_tasks["pooled"]
    strict, flexible = pooled["metrics"]
    assert (strict["metric"], strict["source"], strict["output"]) == ("exact_match,strict-match", 0.7, 0.5)
    assert (strict["lost"], strict["gained"], strict["p"]) == (2, 0, 0.5)
    assert (flexible["metric"], flexible["source"], flexible["output"]) == ("exact_match,flexible-extract", 0.8, 0.6)
    assert flexible["recovery"] == pytest.approx(0.75)
    # Two wrong ones of both are other texts, as are the sentence of each and one more lost answer.
    assert (pooled["answered_otherwise"], pooled["kl"]) == (0.5, None)
    shown = evaluation_text(found.to_json(), found.notes)
    assert "recovery  lost  gained   other\n" in shown
    assert "  made, exact_match,strict-match " in shown
    card = evaluated_card("# A card\n", "me/it", one)
    assert "70.0 % -> 50.0 %, recovery 71.4 %" in card and "10 questions of made (exact" in card
    assert "--tasks made.yaml --server URL --server URL --limit 10" in card
    assert first.url not in json.dumps(one)


def test_probabilities_stay_in_our_pass_beside_generated_texts(output: Path, tmp_path: Path) -> None:
    match = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    generated = write_generation(tmp_path / "a", filter_list=None, metric_list=match)
    # A choice's exact match is whether it is greedy; there is one metric for both.
    choices = write_lm_eval(tmp_path / "b", "chosen", metric_list=[{"metric": "acc"}, *match])
    with servers(output, knows(8), knows(8)) as (first, second):
        urls = [first.url, second.url]
        found = evaluate(output, EXAMPLE, **QUICK, tasks=[choices, generated], server=urls, out=tmp_path / "e.json")
    tasks = {each["task"]: each for each in found.outputs[0]["tasks"]["tasks"]}
    assert tasks["made"]["kl"] is None and tasks["chosen"]["kl"] == found.outputs[0]["tasks"]["pooled"]["kl"] > 0
    assert tasks["made"]["answered_otherwise"] == 0
    assert found.outputs[0]["tasks"]["packed"]


def test_a_single_question_and_files_as_they_are_typed(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_generation(tmp_path / "tasks")
    told: list[str] = []
    with servers(output, knows(2), knows(2)) as (first, second):
        found = evaluate(output, EXAMPLE, **QUICK, tasks="tasks/made.yaml", server=[first.url, second.url], limit=1,
                         begun=told.append, out="e.json")  # fmt: skip
    [one] = found.outputs
    assert f"; 1 question of tasks, answered by {first.url}, " in told[0]
    assert one["tasks"]["reading"].startswith("of 1 question none went from right to wrong or back; ")
    card = evaluated_card("# A card\n", "me/it", one)
    assert ", 1 question of made (" in card
    assert "--tasks tasks/made.yaml --server URL --server URL --limit 1" in card


def test_prompts_are_chats_to_which_servers_apply_their_template(output: Path, tmp_path: Path) -> None:
    task = write_generation(
        tmp_path / "tasks",
        description="Answer.",
        num_fewshot=1,
        fewshot_config={"sampler": "first_n"},
        generation_kwargs={"until": ["\n", "a", "b", "c", "d"], "max_gen_toks": 8},
    )
    with servers(output, lambda _: message(" None"), lambda _: message(None)) as (first, second):
        found = evaluate(output, EXAMPLE, **QUICK, tasks=task, server=[first.url, second.url], limit=3,
                         apply_chat_template=True, out=tmp_path / "e.json")  # fmt: skip
    example, *_ = questions()
    asked = {body["messages"][-1]["content"]: body for body in first.asked}
    assert sorted(asked) == sorted(list(RIGHT)[:3])
    assert asked[list(RIGHT)[1]] == {
        "model": "a-name",
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": next(iter(RIGHT))},
            {"role": "assistant", "content": example["choices"][example["answer"]]},
            {"role": "user", "content": list(RIGHT)[1]},
        ],
        "max_tokens": 8,
        "temperature": 0,
        # OpenAI's API takes no more.
        "stop": ["\n", "a", "b", "c"],
    }
    [one] = found.outputs
    # A model that is stopped while it thinks has no text.
    assert (one["tasks"]["chat"], one["tasks"]["pooled"]["answered_otherwise"]) == (True, 1)
    assert "--server URL --server URL --limit 3" in (card := evaluated_card("# A card\n", "me/it", one))
    assert "--apply-chat-template" in card


def test_choices_are_not_asked_for_in_a_chat(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"^--apply-chat-template is for --server$"):
        evaluate(output, EXAMPLE, tasks="x", apply_chat_template=True)
    tasks = f"{write_lines(tmp_path / 'mine.jsonl')},{write_generation(tmp_path / 'tasks')}"
    with servers(output, knows(1), knows(1)) as (first, second):
        said = run(capsys, output, tasks, first.url, second.url, "--apply-chat-template")
    assert said == "mine, made: choices of multiple-choice tasks are not asked for in a chat"


def test_servers_are_sent_the_key_of_the_environment(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_generation(tmp_path / "tasks")
    sent: list[set[str | None]] = []
    for key in (None, "", "sk-secret"):
        if key is not None:
            monkeypatch.setenv("OPENAI_API_KEY", key)
        with servers(output, knows(2), knows(2)) as (first, second):
            found = evaluate(output, EXAMPLE, **QUICK, tasks=task, server=[first.url, second.url], limit=2,
                             out=tmp_path / "e.json")  # fmt: skip
        assert len(first.authorized) == len(second.authorized) == 3
        sent.append({*first.authorized, *second.authorized})
        assert "sk-secret" not in found.to_json()
    assert sent == [{None}, {None}, {"Bearer sk-secret"}]


def test_a_key_is_never_shown(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_generation(tmp_path / "tasks")
    for key in ("sk-secret\r\nX: y", "sk-secr\u00e9t"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        assert run(capsys, output, task, "http://127.0.0.1:1") == "OPENAI_API_KEY is no key of a server"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    echo = {"error": {"message": "Incorrect API key: sk-secret"}}
    for status, says in ((401, "refuses the key in OPENAI_API_KEY (HTTP 401)"), (400, "fails: HTTP 400")):
        with LoopbackEngine({}, listed=(status, echo, {})) as engine:
            assert run(capsys, output, task, engine.url) == f"{engine.url}/v1/models {says}"


def run(capsys: pytest.CaptureFixture[str], output: Path, task: object, *urls: str) -> str:
    """The error of a command, which ends with two lines; nothing is written."""
    before = sorted(path.name for path in output.iterdir())
    words = [word for url in urls for word in (("--server", url) if "://" in url else (url,))]
    code = main(["eval", str(output), "--source", str(EXAMPLE), "--samples", "2", "--length", "48",
                 "--tasks", str(task), *words])  # fmt: skip
    stdout, stderr = capsys.readouterr()
    assert (code, stdout) == (2, "")
    assert "sk-secr" not in stderr
    assert sorted(path.name for path in output.iterdir()) == before
    message, hint = stderr.splitlines()[-2:]
    assert message.startswith("error: ")
    assert hint.startswith("hint: ")
    return message.removeprefix("error: ")


def test_other_urls_are_refused_and_not_shown() -> None:
    for url, says in {
        "ftp://host": "--server is no URL of http or https",
        "host:8000": "--server is no URL of http or https",
        "http://": "--server is no URL of http or https",
        "http://host:99999": "--server is no URL of http or https",
        "http://ho st": "--server is no URL of http or https",
        "http://host\r\nX: y": "--server is no URL of http or https",
        "http://[::1": "--server is no URL of http or https",
        "file:///etc/passwd": "--server is no URL of http or https",
        "http://me:secret@host": "--server has a user name or a password",
        "http://host/v1?key=secret": "--server has more than the address of a server",
    }.items():
        with pytest.raises(UsageError) as caught:
            server_url(url)
        assert str(caught.value) == says, url
        assert "secret" not in caught.value.hint


def test_a_server_is_for_tasks_that_generate(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"^--server is for --tasks$"):
        evaluate(output, EXAMPLE, server="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=r"^a server is given twice$"):
        evaluate(output, EXAMPLE, tasks="x", server=["http://h:1", "http://h:1/v1/"])
    with servers(output, knows(1), knows(1)) as (first, second):
        message = run(capsys, output, write_lines(tmp_path / "mine.jsonl"), first.url, second.url)
    assert message == "mine: no question asks for a generated text, which is what --server is for"


def test_servers_are_found_by_directory_repository_or_name(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_generation(tmp_path / "tasks")
    with ExitStack() as stack:

        def engine(**models: str | Path) -> str:
            return stack.enter_context(LoopbackEngine(models)).url

        source, other = engine(mine=EXAMPLE), engine(other="org/other")
        assert run(capsys, output, task, source) == (f"no --server serves tiny-INT4: {source} serves 'mine'")
        assert run(capsys, output, task, source, other) == (
            f"no --server serves tiny-INT4: {source} serves 'mine'; {other} serves 'other'"
        )
        # Elsewhere the directory has another path.
        made, again = engine(any="/elsewhere/tiny-INT4"), engine(**{"tiny-INT4": "/elsewhere"})
        assert run(capsys, output, task, source, made, again) == (
            f"several servers serve tiny-INT4: {source} serves 'mine'; {made} serves 'any'; {again} serves 'tiny-INT4'"
        )
        assert run(capsys, output, task, source, made, other) == (
            f"{other} serves 'other', which is neither the source nor an output"
        )
        # The same server is not compared with itself.
        copy = shutil.copytree(output, tmp_path / "tiny-qwen3")
        named = engine(any="/elsewhere/tiny-qwen3")
        assert run(capsys, copy, task, named) == (
            f"{named} serves '/elsewhere/tiny-qwen3', which may be both {EXAMPLE} and {copy}"
        )


LISTS: dict[str, tuple[Answer, str]] = {
    "not json": ((200, b"<html>", {}), "{}/v1/models is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    "deep": ((200, b"[" * 9000, {}), "{}/v1/models is not valid JSON: "),
    "other json": ((200, {"data": [{"id": 1}]}, {}), "{}/v1/models is no list of models"),
    "a list": ((200, [], {}), "{}/v1/models is no list of models"),
    "missing": ((404, b"", {}), "{}/v1/models is not there (HTTP 404)"),
    "key": ((401, {"error": "Unauthorized"}, {}), "{}/v1/models asks for a key (HTTP 401)"),
    "elsewhere": ((307, b"", {"Location": "http://127.0.0.1:1/secret"}), "{}/v1/models redirects elsewhere (HTTP 307)"),
    "too large": ((200, b" " * ((16 << 20) + 1), {}), "{}/v1/models answers with more than 16,777,216 bytes"),
    "cut off": ((200, b"{", {"Content-Length": "9"}), "{}/v1/models does not answer: "),
}  # fmt: skip


def test_a_server_without_models_is_an_error(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    task = write_generation(tmp_path / "tasks")
    for case, (listed, says) in LISTS.items():
        with subtests.test(case), LoopbackEngine({}, listed=listed) as engine:
            assert run(capsys, output, task, engine.url).startswith(says.format(engine.url))
    # It has ended by now.
    assert run(capsys, output, task, engine.url) == f"{engine.url}/v1/models does not answer: 'Connection refused'"


ANSWERS: dict[str, tuple[Answer, str]] = {
    "no text": ((200, {"choices": []}, {}), "answers without a text: {'choices': []}"),
    "null": ((200, {"choices": [{"text": None}]}, {}), "answers without a text: {'choices': [{'text': None}]}"),
    "not json": ((200, b"\xff", {}), "is not valid JSON: "),
    "too long": (
        (400, {"error": {"message": "This model's maximum context length is 9 tokens."}}, {}),
        'fails: HTTP 400, "This model\'s maximum context length is 9 tokens."',
    ),
    "broken": ((500, b"[1]", {}), "fails: HTTP 500"),
    "busy": ((503, b"", {}), "fails: HTTP 503"),
    "elsewhere": ((308, b"", {"Location": "/v1/models"}), "redirects elsewhere (HTTP 308)"),
    "hangs up": (None, "does not answer: 'Remote end closed connection without response'"),
}


def test_a_server_that_fails_half_way_is_an_error(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    task = write_generation(tmp_path / "tasks")
    for case, (answer, says) in ANSWERS.items():
        asked = iter(range(10**6))

        def complete(_: object, asked: Iterator[int] = asked, answer: Answer = answer) -> Answer:
            return text("") if next(asked) < 5 else answer

        with subtests.test(case), servers(output, knows(9), complete) as (first, second):
            message = run(capsys, output, task, first.url, second.url)
            assert message.startswith(f"{second.url}/v1/completions {says}")


def test_a_request_is_sent_again_if_the_connection_breaks_or_the_server_is_busy(output: Path, tmp_path: Path) -> None:
    lock, failed = threading.Lock(), set[str]()

    def complete(body: dict[str, Any]) -> Answer:
        with lock:
            if body["prompt"] not in failed:
                failed.add(body["prompt"])
                return None if len(failed) % 2 else (429, b"", {})
        return text("\ud800")

    with servers(output, knows(9), complete) as (first, second):
        found = evaluate(output, EXAMPLE, **QUICK, tasks=write_generation(tmp_path / "tasks"),
                         server=[first.url, second.url], out=tmp_path / "e.json")  # fmt: skip
    assert len(second.asked) == 24
    assert found.outputs[0]["tasks"]["pooled"]["answered_otherwise"] == 1


def test_a_server_that_is_silent_is_an_error(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_servers, "_ANSWER_SECONDS", 0.2)
    ended = threading.Event()

    def wait(body: dict[str, Any]) -> Answer:
        ended.wait(60)
        return None

    with servers(output, knows(9), wait) as (first, second):
        message = run(capsys, output, write_generation(tmp_path / "tasks"), first.url, second.url)
        ended.set()
    assert message == f"{second.url}/v1/completions has not answered for 0 seconds"


def test_tasks_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"do_sample": True}, "made of lm-eval samples its answers"),
        ({"temperature": 0.7}, "made of lm-eval samples its answers"),
        ({"do_sample": False, "until": [7]}, "made of lm-eval: `until` is [7], not a list of texts"),
        ({"do_sample": False, "max_gen_toks": 0}, "made of lm-eval: `max_gen_toks` is 0, not a number from 1 to 1,048,576"),
        ({"do_sample": False, "max_tokens": "x"}, "made of lm-eval: `max_gen_toks` is 'x', not a number from 1 to 1,048,576"),
    ]  # fmt: skip
    for number, (settings, says) in enumerate(rows):
        task = write_generation(tmp_path / str(number), generation_kwargs=settings)
        with pytest.raises(OpenQuantError) as caught:
            read_tasks([task], None, generates=True)
        assert str(caught.value) == says


def test_settings_have_the_defaults_of_lm_eval(tmp_path: Path) -> None:
    settings = {"until": "\n", "do_sample": True, "temperature": 0.0}
    [request] = read_tasks([write_generation(tmp_path / "tasks", generation_kwargs=settings)], 1, True).generations
    assert (request.stop, request.max_tokens, request.settings) == (("\n",), 256, {})

"""Tasks in an evaluation: what lm-eval's own model finds, what is the same and what is damaged, errors, ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import EXAMPLE, change_json
from openquant import compress, evaluate
from openquant.cli.commands import main
from openquant.data.tasks import read_questions, read_tasks
from openquant.data.tokenizer import load_tokenizer
from openquant.distributed import Ranks
from openquant.errors import OpenQuantError, SourceError, UsageError
from openquant.evaluation.as_served import ServedModel
from openquant.evaluation.results import Evaluation
from openquant.evaluation.task_passes import TaskPasses, TaskRequests, encode_requests, longest_sequence
from openquant.files.cards import check_evaluation
from openquant.files.checkpoint import open_checkpoint
from openquant.report.card import evaluated_card
from openquant.report.text import evaluation_text
from openquant.streaming.interleaved import run_interleaved
from openquant.streaming.model import StreamedModel
from support import small_checkpoints, starting
from support.reporters import Told
from support.task_files import questions, write_big_bench, write_lines, write_lm_eval

# What ranks run, rather than what they run otherwise.
OPENQUANT = "import sys\nfrom openquant.cli.commands import main\n"
SMALL: dict[str, Any] = {"samples": 2, "length": 48}
pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(compress(EXAMPLE, tmp_path_factory.mktemp("made") / "tiny-INT4", "int4").output)


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float32") / "tiny"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: each.float() for name, each in small_checkpoints.read(EXAMPLE).items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    change_json(folder / "config.json", lambda found: found.update(dtype="float32"))
    return folder


def scored(folder: Path, pairs: Sequence[tuple[str, str]], length: int = 512) -> TaskPasses:
    """The requests through a model and through itself as an output."""
    tokenizer, checkpoint = load_tokenizer(folder), open_checkpoint(folder)
    requests = encode_requests(pairs, tokenizer, longest_sequence(checkpoint.config, tokenizer))
    task = read_questions(write_lines(folder.parent / "any.jsonl", 1), None)
    model = StreamedModel(checkpoint)
    served = ServedModel(StreamedModel(checkpoint))
    tasks = TaskRequests(task, requests, ("any",), None, length)
    passes = TaskPasses(tasks, model, [served], ["tiny", "itself"], Ranks())
    run_interleaved([passes.of_pack(number) for number in range(len(passes.packs))], finished=passes.score)
    return passes


# Contexts that end in spaces, that are empty, that begin with the first special token, and that are too long.
PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("def add(a, b):\n    return", " a"),
    ("import os\nimport ", "sys"),
    ("import os\nimport  ", "json\n"),
    ("", "class Numbers:"),
    ("x = 1\n" * 900, "x = 2\n"),
    ("<|endoftext|>import", " re"),
]  # fmt: skip


def test_log_probabilities_are_those_of_lm_evals_own_model(in_float32: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    asked_of_tasks = [
        (f"Question: {each['question']}\nAnswer:", f" {choice}") for each in questions() for choice in each["choices"]
    ]
    pairs = [*PAIRS, *asked_of_tasks]
    theirs = HFLM(pretrained=str(in_float32), device="cpu", dtype="float32", batch_size=4)
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    found = scored(in_float32, pairs, 128)
    assert found.packed and len(found.packs) < len(pairs) / 3
    assert found.scores.loglikelihoods[0] == pytest.approx([value for value, _ in expected], rel=1e-4, abs=1e-3)
    assert found.scores.greedy[0].tolist() == [top for _, top in expected]
    assert np.array_equal(found.scores.loglikelihoods[1], found.scores.loglikelihoods[0])
    assert set(found.scores.kl[1]) == {0}


def easy(path: Path, folder: Path, count: int = 40) -> Path:
    """Questions with four choices, whose answers are those that a model gives."""
    generator = np.random.default_rng(0)
    words = [word for word in (EXAMPLE / "README.md").read_text().split() if word.isalpha()]
    asked = [
        {"question": " ".join(generator.choice(words, 8)), "choices": sorted(set(generator.choice(words, 12)))[:4]}
        for _ in range(count)
    ]
    pairs = [(f"Question: {each['question']}\nAnswer:", f" {choice}") for each in asked for choice in each["choices"]]
    picked = scored(folder, pairs).scores.loglikelihoods[0].reshape(-1, 4).argmax(1)
    lines = [{**each, "answer": int(right)} for each, right in zip(asked, picked, strict=True)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_an_output_that_is_its_source_answers_alike_and_a_damaged_one_guesses(tmp_path: Path, in_float32: Path) -> None:
    same, damaged = tmp_path / "same", tmp_path / "damaged"
    shutil.copytree(in_float32, same)
    shutil.copytree(in_float32, damaged)
    tensors = small_checkpoints.read(in_float32)
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(each.shape, generator=generator) * each.std()
        for name, each in tensors.items()
        if each.ndim > 1
    }
    save_file({**tensors, **noise}, damaged / "model.safetensors", {"format": "pt"})
    task = easy(tmp_path / "easy.jsonl", in_float32)
    found = evaluate([same, damaged], in_float32, **SMALL, tasks=task, no_prompts=True)
    unchanged, guessed = (one["tasks"]["pooled"] for one in found.outputs)
    metric = unchanged["metrics"][0]
    assert (metric["metric"], metric["source"], metric["output"]) == ("acc", 1, 1)
    assert (metric["recovery"], metric["recovery_interval"]) == (1, [1, 1])
    assert (metric["difference"], metric["difference_interval"], metric["p"]) == (0, [0, 0], 1)
    assert (metric["lost"], metric["gained"], unchanged["answered_otherwise"], unchanged["kl"]) == (0, 0, 0, 0)
    assert "none went from right to wrong or back; a loss of 19.8 points" in found.outputs[0]["tasks"]["reading"]
    # One of four choices is right.
    metric = guessed["metrics"][0]
    assert metric["output"] == pytest.approx(0.25, abs=0.2)
    assert metric["lost"] == round(40 * (1 - metric["output"])) == round(40 * guessed["answered_otherwise"])
    assert metric["p"] < 1e-6 and guessed["kl"] > 0.5
    assert "more than chance" in found.outputs[1]["tasks"]["reading"]


def without_tasks(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "tasks"} for one in evaluation.outputs]


def test_tasks_are_announced_written_and_shown_and_texts_stay_as_they_are(output: Path, tmp_path: Path) -> None:
    tasks = [write_lines(tmp_path / "mine.jsonl"), write_big_bench(tmp_path / "theirs" / "task.json")]
    seen = Told()
    found = evaluate(output, EXAMPLE, **SMALL, tasks=tasks, limit=5, reporter=seen)
    [one] = found.outputs
    of_tasks = one["tasks"]
    assert seen.notes == [
        "2 documents of 48 tokens: prose (1), code (1); 3 passes; "
        f"10 questions of tasks, {of_tasks['tokens']:,} tokens in 2 passes"
    ]
    done, total = zip(*seen.steps, strict=True)
    assert list(done) == sorted(done)
    assert (done[-1], set(total)) == (total[0], {3 * 2 * 48 + 2 * of_tasks["tokens"] + 2 * 8})
    assert json.loads((output / "eval.json").read_bytes()) == one == check_evaluation(json.loads(json.dumps(one)))
    assert (of_tasks["named"], of_tasks["limit"], of_tasks["questions"]) == (["mine.jsonl", "task.json"], 5, 10)
    assert of_tasks["packed"] and of_tasks["requests"] == 2 * sum(2 + number % 3 for number in range(5))
    assert [(each["task"], each["questions"], [metric["metric"] for metric in each["metrics"]]) for each in of_tasks["tasks"]] == [
        ("mine", 5, ["acc", "acc_norm"]), ("theirs", 5, ["acc"])
    ]  # fmt: skip
    assert [(each["metric"], each["tasks"]) for each in of_tasks["mean"]] == [("acc", 2), ("acc_norm", 1)]
    assert 0 < of_tasks["pooled"]["kl"] < 1
    # What is measured on texts is the same without tasks.
    assert without_tasks(evaluate(output, EXAMPLE, **SMALL, out=tmp_path / "e.json")) == without_tasks(found)
    text = evaluation_text(found.to_json(), found.notes)
    rows = [r"mine, acc +5 +\d+\.0 % .*", "mine, acc_norm .*", "theirs, acc +5 .*", "all questions, acc +10 .*"]
    assert re.search("^  " + r"\n  ".join(rows) + "$", text, re.M)
    assert of_tasks["reading"] in text
    card = evaluated_card("# A card\n", "me/it", one)
    assert re.search(r"^\| accuracy on tasks \| .*, 10 questions of mine, theirs \(acc\) \|$", card, re.M)
    # The files are nobody else's; a task of lm-eval is everybody's.
    assert f"--source {EXAMPLE.name} --samples 2" in card.replace(str(EXAMPLE), EXAMPLE.name)
    named = {**one, "tasks": {**of_tasks, "named": ["arc_easy", "mine.jsonl", "my.yaml"]}}
    assert " --tasks arc_easy --limit 5 --samples 2" in evaluated_card("# A card\n", "me/it", named)


def test_an_fp8_cache_and_rounded_activations_apply_to_tasks(tmp_path: Path) -> None:
    rounded = Path(compress(EXAMPLE, tmp_path / "out", "channel").output)
    weights = Path(compress(EXAMPLE, tmp_path / "weights", "int8-weights").output)
    task = write_lines(tmp_path / "t.jsonl", 4)
    given: dict[str, Any] = {**SMALL, "no_prompts": True, "tasks": task, "out": tmp_path / "e.json"}
    lossy, plain = (one["tasks"] for one in evaluate([rounded, weights], EXAMPLE, **given).outputs)
    lossier = evaluate(rounded, EXAMPLE, **given, kv_cache="fp8").outputs[0]["tasks"]
    assert plain["pooled"]["kl"] < lossy["pooled"]["kl"] < lossier["pooled"]["kl"]
    assert "of 4 questions " in plain["reading"] and "; so few questions show no loss, " in plain["reading"]


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["eval", *map(str, words), "--source", str(EXAMPLE), "--samples", "2", "--length", "48"])
    return code, *capsys.readouterr()


def test_errors_are_two_lines_and_nothing_is_written(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("[1]")
    copy = shutil.copytree(output, tmp_path / "copy", ignore=shutil.ignore_patterns("eval.json"))
    for words, says in (
        (["--tasks", "bad.jsonl"], "error: bad.jsonl line 1 is [1], not a question with choices and an answer"),
        (["--tasks", "nowhere.jsonl"], "error: nowhere.jsonl is not a file"),
        (["--tasks", "bad.jsonl", "--limit", "0"], "error: 0 questions"),
        (["--limit", "3"], "error: --limit is for --tasks"),
    ):
        code, stdout, stderr = command(capsys, copy, *words)
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 2), words
        assert stderr.startswith(f"{says}\nhint: ")
        assert not (copy / "eval.json").exists()


def test_a_task_of_lm_eval_asks_for_lm_eval(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, stderr = command(capsys, output, "--tasks", "arc_easy")
    assert code == 2
    assert stderr == (
        "error: arc_easy is not a file, and lm-eval, which has tasks, is not installed\n"
        "hint: pip install 'openquant-llm[tasks]'\n"
    )


def test_a_task_of_lm_eval_has_the_accuracy_that_lm_eval_finds(in_float32: Path, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    yaml = write_lm_eval(tmp_path / "tasks")
    given: dict[str, Any] = {**SMALL, "no_prompts": True, "limit": 10, "out": tmp_path / "e.json"}
    found = evaluate(in_float32, in_float32, **given, tasks=[yaml]).outputs[0]["tasks"]
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(in_float32), device="cpu", dtype="float32"), tasks=["mine"], limit=10, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(yaml.parent), include_defaults=False),
    )["results"]["mine"]  # fmt: skip
    [task] = found["tasks"]
    assert (task["task"], task["questions"], found["named"]) == ("mine", 10, ["mine.yaml"])
    assert {metric["metric"]: metric["source"] for metric in task["metrics"]} == pytest.approx(
        {name: theirs[f"{name},none"] for name in ("acc", "acc_norm")}
    )
    # The same questions from our own format, whose prompt is the same.
    own = evaluate(in_float32, in_float32, **given, tasks=yaml.parent / "data.jsonl")
    assert own.outputs[0]["tasks"]["tasks"] == [{**task, "task": "data"}]
    assert own.outputs[0]["tasks"]["sha256"] == found["sha256"]


def test_other_tasks_of_lm_eval_are_refused(tmp_path: Path) -> None:
    generated = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    whole = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{question}}"}
    generates = {**generated, "metric_list": [{"metric": "exact_match"}]}
    rows: list[tuple[dict[str, Any], str]] = [
        (generates, "mine of lm-eval asks for generated texts, which an engine generates"),
        ({**whole, "metric_list": [{"metric": "word_perplexity"}]}, "mine of lm-eval asks for the probability of whole texts"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "lm-eval cannot make the questions of "),
    ]  # fmt: skip
    for number, (settings, says) in enumerate(rows):
        with pytest.raises(OpenQuantError) as caught:
            read_tasks([write_lm_eval(tmp_path / str(number), **settings)], None)
        assert str(caught.value).startswith(says)
        assert caught.value.hint


def test_tasks_have_a_metric_in_common(tmp_path: Path) -> None:
    yaml = write_lm_eval(tmp_path / "tasks", metric_list=[{"metric": "acc_norm"}])
    assert read_tasks([yaml, write_lines(tmp_path / "lines.jsonl")], 1).metrics == {
        "lines": ["acc", "acc_norm"],
        "mine": ["acc_norm"],
    }
    with pytest.raises(UsageError, match=r"no metric in common: foreign has acc, mine has acc_norm"):
        read_tasks([yaml, write_big_bench(tmp_path / "foreign.json")], 1)


def test_lm_eval_prints_nothing_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # It would run git, which complains outside of a repository, and pip.
    monkeypatch.delattr(subprocess, "Popen")
    read_tasks([write_lm_eval(tmp_path / "tasks")], 1)
    print("seen", file=sys.stderr)
    assert tuple(capfd.readouterr()) == ("", "seen\n")


def test_a_choice_without_its_question_is_no_answer(tmp_path: Path) -> None:
    metrics = [{"metric": "acc"}, {"metric": "acc_mutual_info"}]
    tasks = read_tasks([write_lm_eval(tmp_path / "tasks", metric_list=metrics)], 1)
    assert [context == "" for context, _ in tasks.requests] == [False, False, True, True]
    [answers] = tasks.answers(np.array([-3.0, -2.0, -1.0, -9.0]), np.zeros(4, bool))
    assert answers.picked.tolist() == [1]


def test_a_choice_without_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(EXAMPLE)
    with pytest.raises(SourceError, match=r"makes \d+ and 0 tokens of a prompt and its choice ''"):
        encode_requests([("a", "")], tokenizer, 100)
    with pytest.raises(SourceError, match=r"and a choice 2 at most"):
        encode_requests([("a", " b c d e f")], tokenizer, 2)


def test_ranks_share_the_packs_and_write_what_one_process_writes(output: Path, tmp_path: Path) -> None:
    tasks = [write_lines(tmp_path / "lines.jsonl"), write_lm_eval(tmp_path / "tasks")]
    one = evaluate(output, EXAMPLE, **SMALL, tasks=tasks, no_prompts=True, out=tmp_path / "one.json")
    given = ["eval", output, "--source", EXAMPLE, "--samples", "2", "--length", "48", "--no-prompts"]
    given += [word for task in tasks for word in ("--tasks", task)]
    with starting.job() as job:
        done = job.finish(2, *given, "--json", "--out", tmp_path / "many.json", first=f"{OPENQUANT}sys.exit(main())\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one.to_json()
    assert (tmp_path / "many.json").read_bytes() == (tmp_path / "one.json").read_bytes()

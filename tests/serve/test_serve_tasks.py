"""A task that generates texts, answered by `vllm serve` of a source and of an output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_client import complete, find_engine

from conftest import EXAMPLE
from openquant import compress
from openquant.cli.commands import main
from support.task_files import questions, write_generation

pytestmark = pytest.mark.serve

PROMPTS = [
    "import os\nimport ",
    "def __init__(self, name):\n    self.name = ",
    "if __name__ == ",
    "try:\n    pass\nexcept ",
    "for key, value in ",
    "class Error(",
]


def test_a_generation_task_is_answered_by_served_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, output = find_engine(), Path(compress(EXAMPLE, tmp_path / "tiny-INT4", "int4").output)
    task = write_generation(
        tmp_path / "tasks",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        # The stop is at the end of the text that `complete` gets without one.
        generation_kwargs={"until": ["</never>"], "max_gen_toks": 8, "do_sample": False},
        filter_list=None,
    )
    with engine.serve(EXAMPLE, tmp_path / "first.log", shim=True) as source:
        answers = [complete(source, EXAMPLE, prompt)["choices"][0]["text"] for prompt in PROMPTS]
        # The source answers all but the first rightly.
        right = ["not this", *answers[1:]]
        lines = [
            {**line, "question": prompt, "answer": answer}
            for line, prompt, answer in zip(questions(len(PROMPTS)), PROMPTS, right, strict=True)
        ]
        (task.parent / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
        with engine.serve(output, tmp_path / "second.log", shim=True) as made:
            made_answers = [complete(made, output, prompt)["choices"][0]["text"] for prompt in PROMPTS]
            capsys.readouterr()
            code = main(["eval", str(output), "--source", str(EXAMPLE), "--samples", "2", "--length", "48", "--json",
                         "--tasks", str(task), "--server", made, "--server", f"{source}/v1"])  # fmt: skip
    assert code == 0
    [one] = json.loads(capsys.readouterr().out)["outputs"]
    pooled = one["tasks"]["pooled"]
    [metric] = pooled["metrics"]
    same = sum(before == after for before, after in zip(answers, made_answers, strict=True))
    assert (metric["metric"], pooled["questions"], pooled["kl"]) == ("exact_match", 6, None)
    assert metric["source"] == pytest.approx(5 / 6)
    assert metric["output"] == pytest.approx(sum(map(str.__eq__, made_answers, right)) / 6)
    assert pooled["answered_otherwise"] == pytest.approx(1 - same / 6)
    assert json.loads((output / "eval.json").read_bytes()) == one

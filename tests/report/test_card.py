"""The output's README.md."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from conftest import EXAMPLE
from openquant import __version__, compress, dequantize, verify
from openquant.api import push_notes
from openquant.files.checkpoint import open_checkpoint
from openquant.files.destination import Provenance
from openquant.formats.schemes import TENSOR
from openquant.models import find_entry
from openquant.plan.plan import Plan, make_plan
from openquant.registry.architecture import ModuleRules
from openquant.report.card import evaluated_card, model_card
from openquant.version import SGLANG
from openquant.weights.statistics import Calibration
from support import small_checkpoints
from support.evaluation_files import evaluation
from support.random_calibrations import Planned

BASE = """---
license: llama3.1
license_link: https://example.org/terms   # as is
language:
- en
- no
base_model: org/pretrained
base_model_relation: finetune
tags: [chat, "fp8"]
datasets:
    - a/b
inference: false
new_version: org/newer
model-index:
- name: x
  results:
  - task:
      type: text
---
# A model

Some *text* with --- in it.

---

More.
"""


def card(tmp_path: Path, base: str | None, **options: object) -> str:
    source = small_checkpoints.write(tmp_path / "mymodel", **options)  # type: ignore[arg-type]
    if base is not None:
        (source / "README.md").write_text(base, encoding="utf-8")
    compress(source, tmp_path / "out", "block")
    return (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(open_checkpoint(EXAMPLE), TENSOR)


def card_of(plan: Plan, base: str) -> str:
    """The card of an output whose source has this one."""
    return model_card(base, plan, "m", None, None, "out")


def as_class(plan: Plan, name: str) -> Plan:
    """The plan of a model of another class."""
    model = find_entry(name, {}, list(plan.layers))
    assert model is not None
    return replace(plan, entry=ModuleRules(model))


OURS = {"library_name": "vllm", "pipeline_tag": "text-generation"}


def metadata(text: str) -> dict[str, object]:
    return yaml.load(text.split("---\n")[1], Loader=yaml.BaseLoader)


def test_base_text_and_metadata_are_kept(tmp_path: Path) -> None:
    text = card(tmp_path, BASE)
    assert text.startswith(
        "---\nlicense: llama3.1\nlicense_link: https://example.org/terms   # as is\nlanguage:\n- en\n- no\n"
        "datasets:\n    - a/b\ninference: false\nlibrary_name: vllm\npipeline_tag: text-generation\n"
        "tags:\n- chat\n- fp8\n- vllm\n- quantized\n- fp8-block\n---\n\n# out\n\nmymodel with FP8 weights and activations. "
    )
    assert text.endswith(
        "\n```\n\n## Model card of the source\n\n# A model\n\nSome *text* with --- in it.\n\n---\n\nMore.\n"
    )
    # The folder's own repository is unknown, so the base's base is not claimed for it.
    assert "base_model" not in metadata(text)


def test_section_says_what_was_done_and_nothing_of_this_machine(tmp_path: Path) -> None:
    text = card(tmp_path, None, architecture="Qwen3MoeForCausalLM")
    assert metadata(text) == {**OURS, "tags": ["fp8", "vllm", "quantized", "fp8-block"]}
    assert "license" not in text
    assert str(tmp_path) not in text
    assert "| source | mymodel |" in text
    command = "openquant compress -m mymodel --scheme block"
    assert f"\nMade with openquant {__version__}:\n\n```\n{command}\n```\n" in text
    assert "Model card of the source" not in text
    assert "one scale per 128x128 block" in text
    assert "- model.layers.1.mlp.gate (router)" in text
    assert "\n- transformers loads it too\n" in text
    assert "\nvllm serve out\n" in text


SERVED = "\nvllm serve out\npython -m sglang.launch_server --model-path out\n"
# What is said of outputs by architecture and options, and what is not.
SAID = [
    ("Qwen3ForCausalLM", {}, ["Do not load it with transformers"], ["pip install humming-kernels"]),
    ("Qwen3ForCausalLM", {"scheme": "channel"},
     ["one scale per output row, dynamic activations (`quant_method: compressed-tensors`)", SERVED,
      "\n- transformers loads it too, with compressed-tensors installed\n"], []),
    ("LlamaForCausalLM", {"scheme": "block"},
     [f"\n- {SGLANG} does not load it: it silently drops the scales of blocks\n- transformers loads it too\n",
      "\nvllm serve out\n"], ["sglang.launch_server", "to SGLang's"]),
    ("Qwen3MoeForCausalLM", {"scheme": "block", "format": "compressed-tensors"},
     ["transformers, which does not multiply experts by the scales of blocks\n", "\nvllm serve out\n"], []),
    ("Llama4ForCausalLM", {"scheme": "block"},
     ["Do not load it with transformers, which does not find all of its weights under these names\n"], []),
    ("Qwen3ForCausalLM", {"scheme": "channel", "quantize_embeddings": True},
     [f"\n- {SGLANG} does not load it: it loads no quantized embedding\n- Do not load it with transformers, which "
      "does not read its quantized embedding\n"], []),
    ("Qwen3ForCausalLM", {"scheme": "int4"}, [], ["pip install humming-kernels"]),
    # What vLLM does not bring is installed before it serves.
    ("", {"scheme": "int5"}, ["```\npip install humming-kernels\nvllm serve out\n```"], []),
]  # fmt: skip


def test_the_card_says_who_serves_the_output(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, (architecture, options, said, unsaid) in enumerate(SAID):
        with subtests.test(architecture=architecture, options=options):
            source = small_checkpoints.write(tmp_path / f"m{number}", architecture) if architecture else EXAMPLE
            planned = Planned()
            compress(source, dry_run=True, reporter=planned, **options)  # type: ignore[arg-type]
            text = model_card(None, planned.plan, "m", None, None, "out")
            assert [each for each in said if each not in text] == []
            assert [each for each in unsaid if each in text] == []
            if options == {"scheme": "channel"}:
                assert metadata(text)["tags"] == ["fp8", "vllm", "quantized", "compressed-tensors", "fp8-channel"]


# Whether there is a chat template, the class, and the request that the card shows.
REQUESTS = [
    (False, "Qwen3ForCausalLM", "/v1/completions "),
    (True, "Qwen3ForCausalLM", "/v1/chat/completions "),
    (False, "Qwen3Model", "/v1/embeddings "),
]


def test_the_card_has_a_request_that_the_model_answers(subtests: pytest.Subtests, plan: Plan) -> None:
    for has_template, architecture, request in REQUESTS:
        with subtests.test(architecture=architecture, has_template=has_template):
            text = model_card("", as_class(plan, architecture), "m", None, None, "out", has_template)
            assert request in text and "\nMemory: one 24 GB GPU: " in text
            json.loads(re.findall("^curl .* -d '(.*)'$", text, re.MULTILINE)[0])
    assert "curl" not in card_of(as_class(plan, "Qwen3ForSequenceClassification"), "")


def test_a_card_names_texts_without_their_directories(plan: Plan) -> None:
    calibration = Calibration((), "", {"files": ["/home/me/a.txt"]})
    options = replace(plan.options, calibration=calibration)
    made = Provenance(recipe={"options": {"scheme": "int4", "calibrate": True}})
    assert " --text a.txt" in card_of(replace(plan, options=options, provenance=made), "")


def test_a_chat_template_is_found_in_any_of_its_files(subtests: pytest.Subtests, tmp_path: Path) -> None:
    files = {
        "chat_template.jinja": ("x", True),
        "tokenizer_config.json": ('{"chat_template": "x"}', True),
        "special_tokens_map.json": ('{"chat_template": "x"}', False),
    }
    for name, (content, has_template) in files.items():
        with subtests.test(name):
            (tmp_path / name).mkdir()
            source = small_checkpoints.write(tmp_path / name / "m")
            (source / "tokenizer_config.json").write_text("{}")
            (source / name).write_text(content)
            compress(source, tmp_path / name / "out")
            assert ("/v1/chat/" in (tmp_path / name / "out" / "README.md").read_text()) == has_template


def test_known_repository_becomes_the_base_model(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    source = small_checkpoints.write(tmp_path / "models--org--my--model" / "snapshots" / commit)
    (source / "README.md").write_text(BASE)
    compress(source, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    found = metadata(text)
    assert found["base_model"] == "org/my--model"
    assert found["base_model_relation"] == "quantized"
    assert text.count("base_model:") == 1
    address = "https://huggingface.co/org/my--model"
    assert f"\n[org/my--model]({address}) with FP8 weights" in text
    assert f"| source | [org/my--model]({address}/tree/{commit}) at `{commit[:12]}` |" in text
    assert f"\nopenquant compress -m org/my--model --revision {commit} --scheme tensor\n" in text
    assert "\nvllm serve out\n" in text
    assert text.endswith(
        f"\n## Model card of the source\n\n[The card of org/my--model]({address}) says more of the model.\n"
    )


NO_METADATA = [
    "---\nlicense: [\n---\ntext\n", "---\njust text\n---\ntext\n", "---\nno end\n",
]  # fmt: skip


def test_metadata_that_is_none_stays_text(subtests: pytest.Subtests, plan: Plan) -> None:
    for base in NO_METADATA:
        with subtests.test(base[:40]):
            text = card_of(plan, base)
            assert metadata(text) == {**OURS, "tags": ["fp8", "vllm", "quantized", "fp8-tensor"]}
            assert base.strip() in text


AWKWARD = [
    "tags: [\n  a,\n  b\n]\nlicense: mit",
    "{license: mit, tags: [a, b]}",
    "tags:\n- a\n# a comment\n- b\nlicense: mit",
    "\"license\": mit\n'tags': [a, b]",
]


def test_awkward_metadata_keeps_its_entries(subtests: pytest.Subtests, plan: Plan) -> None:
    for front in AWKWARD:
        with subtests.test(front):
            text = card_of(plan, f"---\n{front}\n---\ntext\n")
            found = metadata(text)
            assert found["license"] == "mit"
            assert found["tags"] == ["a", "b", "fp8", "vllm", "quantized", "fp8-tensor"]


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
MERGES = "b0: &b0 {x: 1}\n" + "".join(f"b{n}: &b{n}\n  <<: [{', '.join([f'*b{n - 1}'] * 10)}]\n" for n in range(1, 12))
HOSTILE = {
    "references to lists": BOMB,
    "references to itself": "a: &a [*a]",
    "merged mappings": MERGES,
    "nesting": "a: " + "[" * 10_000,
    "two documents": "a: b\n--- {c: d}",
}


def test_hostile_metadata_is_text(subtests: pytest.Subtests, plan: Plan) -> None:
    for what, front in HOSTILE.items():
        with subtests.test(what=what):
            base = f"---\nlicense: mit\n{front}\n---\ntext\n"
            found = card_of(plan, base)
            assert metadata(found) == {**OURS, "tags": ["fp8", "vllm", "quantized", "fp8-tensor"]}
            assert base.strip() in found

    # As long as published ones are, it is kept.
    results = "".join(f"- name: ä{n}\n  metrics:\n  - {{type: map, value: {n}.5}}\n" for n in range(500))
    base = f"---\nlicense: mit\nmodel-index:\n{results}since: 2024-01-31\ntime: 12:30\nempty:\n---\ntext\n"
    kept = "---\nlicense: mit\nsince: 2024-01-31\ntime: 12:30\nempty:\nlibrary_name: vllm\n"
    assert card_of(plan, base).startswith(kept)


def test_entries_that_are_empty_say_nothing(plan: Plan) -> None:
    found = metadata(card_of(plan, "---\nlicense: mit\ntags:\npipeline_tag: [a]\n---\n"))
    assert found == {**OURS, "license": "mit", "tags": ["fp8", "vllm", "quantized", "fp8-tensor"]}
    assert card_of(plan, "---\n---\ntext\n").endswith("\n\ntext\n")


def test_a_model_without_an_output_head_has_another_task(plan: Plan) -> None:
    for name, task in (("Qwen3Model", "feature-extraction"), ("Qwen3ForSequenceClassification", "text-classification")):
        card = card_of(as_class(plan, name), "")
        assert metadata(card)["pipeline_tag"] == task
        assert "\nvllm serve out --runner pooling\n" in card


def test_a_card_that_is_none_is_left_out_and_the_plan_says_so(tmp_path, run):
    source = small_checkpoints.write(tmp_path / "m")
    os.mkfifo(source / "README.md")
    done = run("-m", source, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "left out: README.md\n" in done.stdout
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name: vllm\n")
    assert verify(tmp_path / "out", source).problems == ()


def test_a_name_that_a_shell_would_take_apart_is_quoted(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "-my `model` | x")
    out = tmp_path / "-my `model` | x-FP8"
    compress(source, out)
    text = (out / "README.md").read_text()
    assert "\nvllm serve './-my `model` | x-FP8'\n" in text
    assert "| source | &#45;my &#96;model&#96; &#124; x |" in text
    assert "\n# &#45;my &#96;model&#96; &#124; x-FP8\n" in text


def test_the_card_of_a_directory_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_checkpoints.write(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    compress(source)
    compress(source, tmp_path / "deep" / "er")
    compress(source, "link")
    for name, directory in (("m-FP8", "m-FP8"), ("er", "deep/er"), ("here", "link")):
        text = (tmp_path / directory / "README.md").read_text()
        assert f"\nvllm serve {name}\npython -m sglang.launch_server --model-path {name}\n" in text


EVALUATED = """## Measured against the source

![KL divergence of each position from the source](eval.png)

| | |
|---|---|
| verdict | close: one token in 47 differs |
| mean KL to the source | 0.00129 nats [0.00121, 0.00137] (bfloat16's own noise 7e-05) |
| same most probable token | 97.86 % (with bfloat16's own noise 99.61 %) |
| perplexity | 12.31 -> 12.34, times 1.0021 [1.0008, 1.0035] |
| measured on | 1,500 tokens of 8 texts (prose.txt), SHA-256 of the tokens abababababab |

KL says how far the probabilities of the next token are from the source's: 0 if they are equal, `same` if as near as \
bfloat16's own noise, `close` up to 0.01 nats, `similar` up to 0.1, `changed` up to 0.5, `broken` above. Intervals are \
of 95 %, over texts.

<details><summary>The beginning of an answer of each</summary>

Prompt:

> Once upon a time

The source answers:

> there was a fox that lived in a wood.

The output answers:

> there was a fox that slept all day.

They differ from token 7 on.

</details>

To check it with openquant, and to measure it on openquant's own texts:

```
openquant verify user/name --source org/tiny --full
openquant eval user/name --source org/tiny --samples 8 --length 512
```
"""


TEXTS = [
    ({"builtin": "openquant texts for evaluation"}, " (openquant texts for evaluation)"),
    ({"dataset": "org/name:sub:test"}, " (org/name&#58;sub&#58;test)"),
    ({"dataset": "../name:test"}, " (name&#58;test)"),
    ({"files": ["a|b.txt", "c.txt"]}, " (a&#124;b.txt, c.txt)"),
    ({}, ""),
]


def test_a_card_names_the_texts_of_an_evaluation(subtests: pytest.Subtests) -> None:
    for origin, words in TEXTS:
        with subtests.test(origin=origin, words=words):
            found = evaluation()
            del found["text"]["files"]
            found["text"] |= origin
            assert (
                f"| measured on | 1,500 tokens of 8 texts{words}, SHA-256 of the tokens abababababab |"
                in evaluated_card("", "o/n", found)
            )

    # The option has an empty subset.
    found = evaluation()
    found["text"]["dataset"] = "org/name:test"
    assert " --dataset org/name::test " in evaluated_card("", "o/n", found)


def test_a_card_with_the_figures_of_an_evaluation(tmp_path: Path) -> None:
    text = card(tmp_path, "# A model\n\n## Measured against the source\n\n## How it was made\n")
    before, heading, after = text.partition("## Model card of the source\n")
    expected = f"{before}{EVALUATED}\n{heading}{after}"
    assert evaluated_card(text, "user/name", evaluation(), "eval.png") == expected
    earlier = evaluated_card(text, "user/other", {**evaluation(), "texts": [], "suspects": ["layer.1"]})
    assert "| suspect layers | layer.1 |" in earlier and "eval.png" not in earlier
    assert evaluated_card(earlier, "user/name", evaluation(), "eval.png") == expected
    assert evaluated_card(expected, "user/name", evaluation(), "eval.png") == expected
    # As in other cards of quantized models.
    assert re.findall("^## .*", expected.partition("Model card of")[0], re.MULTILINE) == [
        "## Use", "## How it was made", "## Measured against the source", "## "
    ]  # fmt: skip


def test_nothing_in_an_evaluation_is_more_than_text_in_a_card() -> None:
    evil = "<script>x</script>\n\n# A | heading\n```\n[link](javascript:x) ![](https://x) \x1b[31m www.evil.example"
    found = evaluation()
    for name in ("prompt", "source", "output"):
        found["texts"][0][name] = evil
    found["verdict"] = found["source"]["name"] = found["text"]["sha256"] = evil
    found["reasons"] = found["text"]["files"] = [evil]
    found["text"]["dataset"] = evil
    added = evaluated_card("", "user/name", found)
    ours = evaluated_card("", "user/name", evaluation())
    assert added.count("\n") == ours.count("\n")
    assert [line[:2] for line in added.splitlines()] == [line[:2] for line in ours.splitlines()]
    assert added.count("```") == 2 + 3, "inside of the commands, where it closes nothing"
    commands = ("openquant verify", "openquant eval")
    text = "\n".join(line for line in added.splitlines() if not line.startswith(commands))
    for mark in ("<script", "[link", "](", "www.", "\x1b", "# A", "x | h"):
        assert mark not in text
    assert "\x1b" not in added


def test_the_commands_of_a_card_name_the_commit_of_the_source() -> None:
    text = "# m-FP8\n\n## How it was made\n\n| | |\n|---|---|\n"
    text += "| source | [org/tiny](https://huggingface.co/org/tiny/tree/0123abcd) at `0123abcd` |\n"
    found = evaluation()
    shown = evaluated_card(text, "user/name@refs/pr/1", found)
    assert "\nopenquant verify user/name@refs/pr/1 --source org/tiny@0123abcd --full\n" in shown
    assert "\nopenquant eval user/name@refs/pr/1 --source org/tiny@0123abcd --samples " in shown
    found["source"]["name"] = "tiny"
    assert "\nopenquant verify user/name --source tiny --full\n" in evaluated_card(text, "user/name", found)


def test_a_card_says_what_its_source_lacked(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    small_checkpoints.change_weights(source, lambda weights: weights.pop("model.layers.1.input_layernorm.weight"))
    compress(source, tmp_path / "out", "channel")
    compress(source, tmp_path / "copied", "none", kv_cache="fp8")
    dequantize(tmp_path / "out", tmp_path / "plain")
    note = "> Note: the source lacks model.layers.1.input&#95;layernorm\n"
    for name in ("out", "copied", "plain"):
        assert (tmp_path / name / "README.md").read_text().count(note) == 1, name
        # Whoever publishes it is told once more.
        assert push_notes(tmp_path / name)[0] == "the source lacks model.layers.1.input_layernorm"


def test_an_evaluation_without_prompts_is_made_again_without_them() -> None:
    found = evaluation()
    shown = evaluated_card("", "user/name", found)
    assert "answer" in shown and "--no-prompts" not in shown
    shown = evaluated_card("", "user/name", {**found, "texts": []})
    assert "answer" not in shown and " --samples 8 --length 512 --no-prompts\n```\n" in shown


def test_a_long_answer_is_cut_in_a_card() -> None:
    found = evaluation()
    found["texts"][0]["source"] = "word " * 10_000
    assert len(evaluated_card("", "user/name", found)) < 2000
    found["texts"] = []
    assert "Prompt:" not in evaluated_card("", "user/name", found)

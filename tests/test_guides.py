"""Tutorials and how-to pages: their commands run, the errors they show exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import CodeType

import pytest
from safetensors.torch import load_file

from conftest import EXAMPLE, ROOT, change_json
from openquant import compress, explain, verify
from openquant.cli.arguments import verb_parser
from openquant.cli.commands import main
from support import small_checkpoints

PAGES = sorted([*ROOT.glob("docs/how-to/*.md"), *ROOT.glob("docs/tutorials/*.md"), ROOT / "docs" / "README.md"])
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# What openquant's commands stand beside.
OTHERS = ("git clone ", "vllm serve ", "python -m sglang.launch_server ", "pip install ", "hf auth login")
FEW = ("--samples", "4", "--length", "128")


def commands(page: Path) -> list[list[str]]:
    """The words of each command of openquant on a page, after `openquant`; fails at a line that is no command."""
    found = []
    # Blocks of output are marked as text.
    blocks = "".join(text for language, text in BLOCK.findall(page.read_text()) if not language)
    for line in re.sub(r"\\\n *", "", blocks).splitlines():
        words = shlex.split(line)
        starts = [at for at, word in enumerate(words) if word == "openquant"]
        if starts and not line.startswith(OTHERS):
            assert re.fullmatch(r"((OPENQUANT_VLLM=\S+|torchrun .* -m) )?openquant .+", line.strip()), line
            found.append(words[starts[0] + 1 :])
        else:
            assert line.strip().startswith(OTHERS), line
    return found


def test_the_commands_of_a_page_are_accepted(subtests, tmp_path, monkeypatch):
    """All options parse. What plans by headers alone plans the example instead of the model on the page."""
    for number, page in enumerate(PAGES):
        with subtests.test(page=page), monkeypatch.context() as patch:
            here = tmp_path / str(number)
            here.mkdir()
            patch.chdir(here)
            for words in commands(page):
                parsed = verb_parser(words).parse_args(words)
                given = {word for word in words if word.startswith("--")}
                # The example is on this disk, and has nothing to stream, no layer 63 and no codes to keep.
                if parsed.verb == "compress" and not given & {"--stream", "--fit"} and "keep" not in words:
                    words[words.index("-m") + 1 if "-m" in words else 1] = str(EXAMPLE)
                    words = [word.replace("layers.63.", "layers.3.") for word in words]
                    words = ["2" if word == "4" and "--tp" in words else word for word in words]
                    texts = {*words} & {"mine.jsonl", "chats.jsonl", "code.txt"}
                    for text in texts:
                        line = "a text of several words. " * 100
                        line = json.dumps({"text": line}) if text.endswith(".jsonl") else line
                        (here / text).write_text(f"{line}\n" * 8)
                    assert main([*words, *({"--dry-run", "-q"} - {*words}), *(FEW if texts else [])]) == 0, words
                elif parsed.verb in ("fit", "explain") and "--search" not in given:
                    words[1] = str(EXAMPLE)
                    assert main([word.replace("32k", "2k").replace("8k", "2k") for word in words]) == 0, words


def tutorial(name: str, directory: Path, **instead: str) -> list[list[str]]:
    """The commands of a tutorial, in a directory with the example and texts, with other words for some."""
    (directory / "examples").mkdir()
    shutil.copytree(EXAMPLE, directory / "examples" / "tiny-qwen3")
    write_texts(directory / "mine.jsonl")
    return [
        [instead.get(word, word) for word in words] for words in commands(ROOT / "docs" / "tutorials" / f"{name}.md")
    ]


def write_texts(path: Path) -> None:
    source = "".join((ROOT / "openquant" / name).read_text() for name in ("options.py", "fields.py"))
    path.write_text("".join(json.dumps({"text": source[at : at + 4000]}) + "\n" for at in range(0, 40000, 4000)))


@pytest.mark.usefixtures("short_answers")
def test_the_first_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = []
    for words in tutorial("first-checkpoint", tmp_path):
        if any("tiny-qwen3" in word for word in words):
            assert main([*words, *(FEW if words[0] == "eval" else [])]) == 0, words
            said.append(capsys.readouterr().out)
    plan, _, verified, evaluated, *_ = said
    assert "weights:  8.39 MB -> 5.25 MB" in plan
    assert verified.startswith("no problems: tiny-qwen3-FP8, FP8 with one scale per tensor (tensor), ")
    assert evaluated.startswith("tiny-qwen3-FP8: close: ")
    kl = {
        path.parent.name.removeprefix("tiny-qwen3-"): json.loads(path.read_text())["kl"]["mean"]
        for path in tmp_path.glob("*/eval.json")
    }
    assert kl["FP8"] == pytest.approx(0.0033, rel=0.25)
    assert kl["FP8"] < kl["INT4-GPTQ"] < kl["INT4"]


def test_python_on_the_pages_compiles_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "tiny-qwen3")
    monkeypatch.chdir(tmp_path)
    ran = 0
    for page in PAGES:
        for language, block in BLOCK.findall(page.read_text()):
            code = compile(block if language == "python" else "", page.name, "exec")
            if language == "python" and "tiny-qwen3" in block:
                exec(code, {})
                ran += 1
    assert ran == 2


def python_of(page: str) -> list[CodeType]:
    """The Python code of a page of docs, block by block."""
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
    return [compile(block, page, "exec") for language, block in blocks if language == "python"]


def test_tensors_of_a_wrapped_model_are_renamed(tmp_path, monkeypatch):
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    expected = small_checkpoints.write(tmp_path / "expected", weights=weights, shards=3)
    wrapped = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    small_checkpoints.write(tmp_path / "my-model", weights=wrapped, shards=3)
    monkeypatch.chdir(tmp_path)
    exec(python_of("how-to/check-a-checkpoint.md")[0], {})
    found = {path.name: path.read_bytes() for path in Path("my-model-renamed").iterdir()}
    assert found == {path.name: path.read_bytes() for path in expected.iterdir()}


def test_a_lost_tensor_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "model.layers.1.self_attn.v_proj.weight"
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    base = small_checkpoints.write(tmp_path / "base", weights=weights, shards=3)
    rest = {name: weight for name, weight in weights.items() if name != lost}
    small_checkpoints.write(tmp_path / "my-merge", weights=rest, shards=3)
    monkeypatch.chdir(tmp_path)
    exec(python_of("how-to/check-a-checkpoint.md")[1], {})
    assert compress("my-merge", dry_run=True).notes == compress(base, dry_run=True).notes
    compress("my-merge", "merged")
    assert verify("merged", "my-merge", full=True).problems == ()
    found = {
        name: weight for path in Path("my-merge").glob("*.safetensors") for name, weight in load_file(path).items()
    }
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)


def test_a_tied_model_is_copied_with_a_head_of_its_own(tmp_path, monkeypatch):
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    tied = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    source = small_checkpoints.write(tmp_path / "my-model", weights=tied, shards=3)
    change_json(source / "config.json", lambda config: config.update(tie_word_embeddings=True))
    monkeypatch.chdir(tmp_path)
    [code] = python_of("output-head.md")
    exec(code, {})
    compress("my-model-untied", "out", "channel", quantize_lm_head=True)
    assert verify("out", "my-model-untied", full=True).problems == ()
    assert [layer.scheme for layer in explain("out", "lm_head", "keep").layers] == ["channel"]


def test_errors_on_the_pages_are_messages_of_the_code() -> None:
    """Each has some words in a row that a text of the code has."""
    sources = "".join(path.read_text() for path in (ROOT / "openquant").rglob("*.py"))
    literals = re.findall(r'"((?:[^"\\\n]|\\.)+)"', sources)
    pieces = {piece for literal in literals for piece in re.split(r"\{[^}]*\}", literal)}
    known = {piece for piece in pieces if len(re.findall(r"[\w-]{2,}", piece)) > 2}
    shown = [
        (page.name, line)
        for page in PAGES
        for pair in re.findall(r"^error: (.+)\nhint: (.+)$", page.read_text(), re.MULTILINE)
        for line in pair
    ]
    assert len(shown) > 10
    assert [each for each in shown if not any(text in each[1] for text in known)] == []

"""Options are said once: signatures, docstrings, --help and completion agree with openquant/options.py."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import torch

import openquant
from conftest import EXAMPLE, ROOT
from openquant import __version__
from openquant.cli.commands import main
from openquant.errors import UsageError
from openquant.fields import Option, options_of
from openquant.formats import hardware
from openquant.formats.hardware import GGUF, KEPT, UNCHANGED
from openquant.formats.schemes import SCHEMES
from openquant.options import Check, Diagnose, Evaluate, Push, Recipe, Run, Texts
from stub import make_stub


def test_the_stub_is_what_the_signatures_are() -> None:
    written = ast.parse((ROOT / "openquant" / "__init__.pyi").read_text())
    assert ast.dump(written) == ast.dump(ast.parse(make_stub())), "run tools/stub.py, then ruff format"


LIMIT = """
    max_memory: Memory limit of this process, such as 2GB. A number is in bytes. If the limit is too low for one
        step, the run stops with an error before it starts. A conversion uses fewer threads to stay below the limit.
        A forward pass writes hidden states that do not fit to a temporary file.
"""


def test_docstrings_tell_of_every_argument() -> None:
    for name in ["compress", "dequantize", "diagnose", "calibrate", "evaluate", "explain", "fit_table", "verify"]:
        function = getattr(openquant, name)
        section = inspect.getdoc(function).split("Args:\n")[1].split("\n\n")[0]
        told = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
        assert sorted(told) == sorted(inspect.signature(function).parameters), name
        assert "max_memory" not in told or LIMIT in section, name
        assert max(map(len, section.splitlines())) <= 120, name
    assert re.findall(r"^    (\w+): \S", inspect.getdoc(Push) or "", re.MULTILINE) == [
        each.name for each in fields(Push)
    ]


def test_all_schemes_can_be_asked_for() -> None:
    assert options_of(Recipe)["scheme"].choices == (*SCHEMES, UNCHANGED, KEPT)


def openquant_prints(*words: str) -> str:
    """What a command prints, in 80 columns."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "80")
        try:
            code: object = main(list(words))
        except SystemExit as ended:
            code = ended.code or 0
    assert code == 0
    return shown.getvalue()


def test_openquant_alone_prints_its_help() -> None:
    shown = openquant_prints()
    assert shown == openquant_prints("--help")
    assert shown.startswith("usage: openquant VERB [options]\n")
    verbs = [
        "compress",
        "fit",
        "dequantize",
        "push",
        "diagnose",
        "explain",
        "calibrate",
        "eval",
        "verify",
        "web",
        "env",
        "completion",
    ]
    assert re.findall(r"^  (\w+)  +[A-Z]", shown, re.MULTILINE) == verbs


# What is typed before TAB, and the words that bash then offers.
TYPED = [
    ("openquant compress --quantize-l", ["--quantize-lm-head"]),
    ("openquant compress -m Qwen/Qwen3-8B --scheme ch", ["channel"]),
    ("openquant compress --dry-run -m mod", ["models"]),
    ("openquant verify x --source mod", ["models"]),
    ("compress-fp8 --format comp", ["compressed-tensors"]),
]


def test_bash_completes_verbs_options_choices_and_directories(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "module.txt").write_text("")
    (tmp_path / "script").write_text(openquant_prints("completion", "bash"))
    for typed, words in TYPED:
        with subtests.test(typed):
            name = typed.partition(" ")[0].replace("-", "_")
            call = f"COMP_WORDS=({typed}); COMP_CWORD={typed.count(' ')}; _shtab_{name}; echo ${{COMPREPLY[@]}}"
            done = subprocess.run(
                ["bash", "-c", f"source ./script; {call}"], capture_output=True, text=True, cwd=tmp_path
            )
            assert done.stdout.split() == words, done.stderr


def test_other_shells_have_a_script_for_both_commands(subtests: pytest.Subtests) -> None:
    for shell, registered in [("zsh", "compdef _shtab_{} -N {}"), ("fish", "complete -c {1} ")]:
        with subtests.test(shell=shell, registered=registered):
            shown = openquant_prints("completion", shell)
            for name in ("openquant", "compress-fp8"):
                assert registered.format(name.replace("-", "_"), name) in shown
            assert "compressed-tensors" in shown


def test_the_help_of_compress_begins_with_what_one_needs() -> None:
    shown = openquant_prints("compress", "--help")
    options = re.findall(r"^  (\[-m\] MODEL|-{1,2}[\w-]+)", shown, re.MULTILINE)
    assert options[0] == "[-m] MODEL"
    assert {"-o", "--scheme", "--fit", "--dry-run", "--help-all"} < set(options)
    assert len(options) < 16
    hidden = re.search(r"^(\d+) more options: openquant compress --help-all$", shown, re.MULTILINE)
    everything = openquant_prints("compress", "--help-all")
    assert hidden and len(re.findall(r"^  (?:\[|-)", everything, re.MULTILINE)) == len(options) + int(hidden[1])
    assert len(shown.splitlines()) < 35


def test_the_model_is_named_with_or_without_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for words in ([EXAMPLE, "--dry-run"], ["--dry-run", EXAMPLE], ["-m", EXAMPLE, "--dry-run"], [f"--model={EXAMPLE}", "--dry-run"]):  # fmt: skip
        assert main(["compress", *map(str, words), "--out", str(tmp_path / "made")]) == 0
        plans.append(capsys.readouterr().out)
    assert len(set(plans)) == 1
    assert main(["diagnose", "-m", str(EXAMPLE), "--json"]) == 0
    assert main(["calibrate", str(tmp_path / "none"), "--output", str(tmp_path / "c"), "--json"]) == 2
    assert "does not exist" in capsys.readouterr().out


def test_other_tools_words_are_answered_from_python_too() -> None:
    given = [{"scheme": "q4_k_m"}, {"scheme": "channel", "scheme_for": {"**": "gguf"}}]
    for options in given:
        with pytest.raises(UsageError) as caught:
            openquant.compress(EXAMPLE, dry_run=True, **options)
        assert caught.value.hint == GGUF
    with pytest.raises(UsageError) as caught:
        openquant.compress(EXAMPLE, dry_run=True, kv_cache="fp4")
    assert caught.value.hint == "choose one, or leave --kv-cache out"


def test_an_output_is_no_gguf_file(tmp_path: Path) -> None:
    for verb in (openquant.compress, openquant.dequantize):
        with pytest.raises(UsageError, match=r"out\.gguf would be a directory, and no GGUF file") as caught:
            verb(EXAMPLE, tmp_path / "out.gguf")
        assert caught.value.hint == GGUF and "for vLLM and SGLang" in GGUF


def test_a_hint_names_the_nearest_word(subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in [
        (["compres", "x"], "did you mean compress? see openquant --help"),
        (["eval", "x", "--sorce", "y"], "see openquant eval --help"),
        (["verify", "x", "--ful"], "did you mean --full? see openquant verify --help"),
        (["compress", "x", "--zzz"], "see openquant compress --help"),
        (["fit", "x", "--for", "vlm"], "did you mean vllm? see openquant fit --help"),
        # Words of other tools.
        (["quantize", "x"], "openquant compress MODEL does that"),
        (["convert", "x", "--outfile", "out.gguf"], GGUF),
        (["compress", "x", "-o", "out.gguf"], GGUF),
        (["compress", "x", "--scheme", "FP8_dynamic"], "fp8_dynamic is --scheme channel"),
        (["compress", "x", "--scheme", "w4a16"], "w4a16 is --scheme int4, best with --gptq"),
        (["compress", "x", "--scheme", "gptq"], "gptq is a method: --scheme int4 --gptq, or nvfp4 --gptq"),
        (["compress", "x", "--scheme", "Q4_K_M"], GGUF),
        (["compress", "x", "y", "Q4_K_M"], GGUF),
        (["compress", "x", "--scheme", "INT4"], "did you mean int4? see openquant compress --help"),
        (["compress", "x", "--scheme", "q4"], "four bits are --scheme int4 or nvfp4 here, best with --gptq"),
        (["compress", "x", "--quantize", "int4"], "--scheme names the format"),
        (
            ["compress", "x", "--gpu", "4090"],
            "--fit GPU chooses schemes for a GPU; openquant fit MODEL --gpu GPU shows what fits it",
        ),
        (["compress", "x", "--kv-cache", "fp4"], "did you mean fp8? see openquant compress --help"),
        (["compress", "x", "--scheme", "mlx"], "MLX is Apple's: convert with mlx_lm.convert of mlx-lm"),
    ]:
        with subtests.test(words=words, hint=hint):
            assert main(words) == 2
            assert capsys.readouterr().err.splitlines()[1] == f"hint: {hint}"


def test_env_is_for_bug_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    lines = dict(re.findall(r"^(\S+)  +(.+)$", shown, re.MULTILINE))
    assert lines["openquant"].startswith(__version__)
    assert (lines["torch"], lines["HF_HUB_OFFLINE"]) == (torch.__version__, "1")
    assert "hf_secret" not in shown and str(Path.home()) not in shown


def test_every_option_is_shown_or_for_python() -> None:
    for kind in (Push, Recipe, Run, Check, Diagnose, Texts):
        for name, option in options_of(kind).items():
            assert isinstance(option, Option)
            assert option.help.endswith(".")
            assert bool(option.group) != (name == "push")


def test_texts_that_make_no_sense(subtests: pytest.Subtests) -> None:
    for given, message in [
        ({"text": ["a.txt"], "dataset": "wikitext"}, "--text and --dataset are both given"),
        ({"samples": 0}, "0 samples"),
        ({"samples": 100_001}, "100001 samples"),
        ({"length": 1}, "samples of 1 tokens"),
        ({"length": 2_000_000}, "samples of 2000000 tokens"),
        ({"samples": 1, "text": ["a/b.txt", "c.txt"]}, "--samples 1 is fewer than the 2 texts: b.txt, c.txt"),
        ({"samples": 1, "text": ["a/b", "b"]}, "--samples 1 is fewer than the 2 texts: a/b, b"),
    ]:
        with subtests.test(message), pytest.raises(UsageError, match=f"^{re.escape(message)}"):
            Texts(**given)


FORMS_OF_VALUES = [
    ({"max_memory": "2GB"}, {"max_memory": 2_000_000_000}),
    ({"workers": "2"}, {"workers": 2}),
    ({"group_size": 64}, {"group_size": "64"}),
    ({"smooth": "0.5"}, {"smooth": 0.5}),
    ({"ignore": "lm_head"}, {"ignore": ("lm_head",)}),
    ({"scheme_for": {"a": "block"}}, {"scheme_for": {"a": "block"}}),
    ({"scheme_for": [("b", "block"), ("a", "int8"), ("b", "int4")]}, {"scheme_for": {"b": "block", "a": "int8"}}),
    ({"scheme_for": "a=block"}, {"scheme_for": {"a": "block"}}),
    ({"text": Path("a.txt")}, {"text": (Path("a.txt"),)}),
    ({"text": [Path("a.txt"), "b"]}, {"text": (Path("a.txt"), "b")}),
    ({"outputs": "a", "source": "b"}, {"outputs": ("a",)}),
]


def test_values_come_in_either_form(subtests: pytest.Subtests) -> None:
    for given, read in FORMS_OF_VALUES:
        with subtests.test(given=given, read=read):
            [(name, value)] = read.items()
            kind = next(each for each in (Recipe, Run, Texts, Evaluate) if name in options_of(each))
            options = kind(**({"model": "m"} if kind is Run else {}), **given)
            held = getattr(options, name)
            assert (held, type(held)) == (value, type(value))
            assert list(held) == list(value) if isinstance(value, dict) else True


def test_what_cannot_be_read_is_a_user_s_error(subtests: pytest.Subtests) -> None:
    for kind, given, message in [
        (Run, {"model": "m", "max_memory": "2XB"}, "--max-memory: 2XB is not a size such as 500MB or 2GB"),
        (Run, {"model": "m", "workers": "two"}, "--workers: 'two' is not a number"),
        (Recipe, {"architecture": ""}, "--architecture: it is empty"),
        (Texts, {"text": [""]}, "--text: it is empty"),
    ]:
        with subtests.test(message), pytest.raises(UsageError, match=f"^{re.escape(message)}"):
            kind(**given)


def test_literal_types_are_the_choices() -> None:
    def choices(name: str) -> set[object]:
        return set(options_of(Recipe)[name].choices or ())

    assert set(get_args(hardware.SchemeName)) == choices("scheme")
    assert set(get_args(hardware.FormatName)) == choices("format")
    assert set(get_args(hardware.ScaleFormat)) == choices("scale_format")
    assert set(get_args(hardware.ActivationScheme)) == choices("activation_scheme")
    assert (
        set(get_args(hardware.CacheScheme))
        == choices("kv_cache")
        == set(options_of(Evaluate)["kv_cache"].choices or ())
    )
    assert set(map(str, get_args(hardware.GroupSize))) == choices("group_size")


def test_a_size_of_groups_may_be_a_number() -> None:
    source = ROOT / "examples" / "tiny-qwen3"
    with pytest.raises(UsageError) as caught:
        openquant.compress(source, "out", "int4", group_size=48, dry_run=True)  # type: ignore[arg-type]
    assert caught.value.message == "--group-size: 48 is none of 32, 64, 128, channel"
    openquant.compress(source, "out", "int4", group_size=64, max_memory="2TB", dry_run=True)

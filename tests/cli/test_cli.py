"""The command as a user runs it: output, streams, exit codes, messages."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE, ROOT, Run, heed_ctrl_c, tree
from openquant import compress
from openquant.cli.commands import Call, compress_main, main
from openquant.cli.console import Interrupts, Terminal
from openquant.distributed import Ranks
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import TENSOR
from openquant.hub.source import Source
from openquant.plan.plan import make_plan
from openquant.version import BUILT
from support import small_checkpoints

KEYS = [
    "model", "revision", "output", "scheme", "schemes", "kv_cache", "folded", "architecture", "dry_run", "source_bytes", "output_bytes",
    "download_bytes", "disk_bytes", "repository", "pushed_to", "pushed_revision", "quantized_tensors", "decoded_tensors", "ignored_layers", "shards", "tensor_parallel", "serving", "seconds", "peak_rss_bytes", "resumed", "not_finite", "unread_shards", "notes", "engines", "fit",
]  # fmt: skip

SHOWN = "$ python compress_fp8.py -m examples/tiny-qwen3 --dry-run\n"
# What the documentation shows is what the command prints.
PLAN = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text().split(SHOWN)[1].split("```")[0]


def test_a_run_prints_plan_and_summary(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here" / "examples").symlink_to(EXAMPLE.parent)
    done = run("-m", "examples/tiny-qwen3", "--dry-run", COLUMNS="80")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", PLAN)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["examples"]
    done = run("-m", "examples/tiny-qwen3", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(PLAN)
    assert re.fullmatch(
        r"\ntiny-qwen3-FP8: 8\.39 MB -> 5\.25 MB, 74\.9 % of the bytes quantized, in \d+\.\d s,\n  peak memory \S+ MB\n"
        r"\n  vllm serve tiny-qwen3-FP8\n  python -m sglang\.launch_server --model-path tiny-qwen3-FP8\n",
        done.stdout.removeprefix(PLAN),
    )
    assert (tmp_path / "here" / "tiny-qwen3-FP8" / "config.json").exists()


def test_json_is_one_object_for_runs_and_dry_runs(run: Run, tmp_path: Path) -> None:
    dry = run("-m", EXAMPLE, "-w", "128", "--dry-run", "--json")
    wet = run("-m", EXAMPLE, "-w", "128", "--json")
    again = run("-m", EXAMPLE, "--scheme", "block", "--json")
    for done in (dry, wet, again):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\n") == 1
    found = json.loads(wet.stdout)
    assert list(found) == KEYS
    assert found["seconds"] > 0
    assert found["peak_rss_bytes"] > 1e7
    assert (found["serving"]["source"]["weights_bytes"], found["serving"]["output"]["weights_bytes"]) == (
        8394240,
        5249280,
    )
    # Config and card count as large as those of the source.
    index = tmp_path / "here" / "tiny-qwen3-FP8-W128" / "model.safetensors.index.json"
    others = [path for path in EXAMPLE.iterdir() if not path.name.startswith("model")]
    assert found["disk_bytes"] == 5249280 + sum(path.stat().st_size for path in (index, *others))
    assert (found["output"], found["schemes"], found["shards"]) == ("tiny-qwen3-FP8-W128", {"block": 28}, 3)
    assert (found["source_bytes"], found["output_bytes"], found["quantized_tensors"]) == (8394240, 5249280, 28)
    assert (found["ignored_layers"], found["tensor_parallel"]) == (["lm_head", "model.embed_tokens"], [1])
    of_each = ("seconds", "peak_rss_bytes", "dry_run")
    same = [{key: value for key, value in json.loads(done.stdout).items() if key not in of_each} for done in (dry, wet)]
    assert same[0] == same[1]
    assert json.loads(again.stdout)["resumed"] is True


ERRORS = [
    (["-m", "nowhere/at/all"], "nowhere/at/all does not exist, and is no Hub repository id either", "check the path"),
    (
        ["-m", EXAMPLE, "--max-memory", "-5GB"],
        "argument --max-memory: no value follows, or one that begins with -",
        "see compress_fp8.py --help",
    ),
    (["-m", ""], "argument -m/--model: it is empty", "see compress_fp8.py --help"),
    (["-m", EXAMPLE, "-w", "64"], "-w 64: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor"),
    (["-m", EXAMPLE, "--scheme", "fp8"], "argument --scheme: invalid choice: 'fp8' (choose from",
     "fp8 is --scheme tensor, the default, or channel"),
    (["-m", EXAMPLE, "-w", "128", "--scheme", "tensor"],
     "-w 128 asks for blocks, --scheme tensor for something else", "leave one of them out"),
    (["-m", EXAMPLE, "-w", "128", "--scheme-for", "**.o_proj=channel"],
     "--scheme-for does not go with --scheme block in the fp8 format: all layers are alike",
     "use --scheme channel, or --scheme tensor or block with --format compressed-tensors"),
    (["-m", EXAMPLE, "--workers", "0"], "0 workers cannot work", "give --workers 1 or more"),
    (["-m", EXAMPLE, "--max-memory", "much"], "argument --max-memory: much is not a size such as 500MB or 2GB",
     "see compress_fp8.py --help"),
    (["-m", EXAMPLE, "--device", "tpu"], "tpu is not a device", "choose auto, cpu, cuda or cuda:N"),
    (["-m", EXAMPLE, "--revision", "main"], f"{EXAMPLE} is a local directory, which has no revision main", "leave --revision out"),
    (["-m", "org/name@a", "--revision", "b"], "org/name@a and --revision b name two revisions", "give one of them"),
    (["-m", EXAMPLE, "-o", ""], "argument -o/--output/--out: it is empty", "see compress_fp8.py --help"),
    (["-m", EXAMPLE, "--ignore", "nothing.**"], "--ignore nothing.** matches no module",
     "modules are named like tensors, without .weight; ** is any part; compress --dry-run -v lists them"),
    (["-m", EXAMPLE, "--scheme", "channel", "--scheme-for", "**.o_proj"],
     "argument --scheme-for: **.o_proj is not PATTERN=SCHEME, such as **.self_attn.*=channel", "see compress_fp8.py --help"),
    (["-m", EXAMPLE, "--architecture", ""], "argument --architecture: it is empty", "see compress_fp8.py --help"),
    (["-m", EXAMPLE, "--dry"], "unrecognized arguments: --dry", "did you mean --dry-run? see compress_fp8.py --help"),
    (["-m", EXAMPLE, "-q", "-v"], "argument -v/--verbose: not allowed with argument -q/--quiet", "see compress_fp8.py --help"),
    ([], "the following arguments are required: MODEL", "see compress_fp8.py --help"),
    ([EXAMPLE, "-m", EXAMPLE], f"unrecognized arguments: {EXAMPLE}", "see compress_fp8.py --help"),
]  # fmt: skip


def test_errors_are_two_lines_and_exit_code_2(subtests, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compress_fp8.py"])
    for arguments, message, hint in ERRORS:
        with subtests.test(arguments=arguments):
            words = [str(word) for word in arguments]
            assert compress_main(words) == 2
            out, err = capfd.readouterr()
            assert out == ""
            error, advice = err.splitlines()
            assert error.startswith(f"error: {message}")
            assert advice == f"hint: {hint}"
            assert compress_main([*words, "--json"]) == 2
            assert json.loads(capfd.readouterr().out) == {"error": error.removeprefix("error: "), "hint": hint}
            assert not list(tmp_path.iterdir())


def test_model_dot_takes_the_directory_s_name_and_writes_beside_it(run: Run, tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "models" / "my-finetune")
    before = tree(source)
    done = run("-m", ".", cwd=source)
    assert done.returncode == 0, done.stderr
    assert tree(source) == before
    assert (tmp_path / "models" / "my-finetune-FP8" / "config.json").exists()


def test_of_a_second_plan_new_notes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(open_checkpoint(EXAMPLE), TENSOR)
    source = Source(EXAMPLE, "tiny-qwen3", None, None)
    terminal = Terminal(Call({}, Ranks(), Interrupts()))
    terminal.on_plan(plan, source, Path("out"))
    capsys.readouterr()

    after = replace(plan, notes=(*plan.notes, "no token was routed to 2 experts"))
    terminal.on_plan(after, source, Path("out"))
    assert capsys.readouterr().out == "note: no token was routed to 2 experts\n"


def test_how_much_is_said(run: Run, source: Path, tmp_path: Path) -> None:
    quiet = run("-m", EXAMPLE, "-q", "-o", "quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    tokenizer = "note: the source has no tokenizer, which engines need: copy its files into the output\n"
    damaged = small_checkpoints.changed_copy(
        source, tmp_path / "damaged", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")
    )
    quiet = run("-m", damaged, "-q", "-o", "lossy", "--scheme", "int8-weights")
    assert (quiet.stdout, quiet.stderr) == ("", f"note: the source lacks model.layers.1.mlp.up_proj\n{tokenizer}")
    # Before the commands that serve it, once more.
    said = run("-m", damaged, "-o", "said", "--scheme", "int8-weights").stdout
    assert f"\nnote: the source lacks model.layers.1.mlp.up_proj\n{tokenizer}\n  vllm serve said\n" in said
    assert "tokenizer" not in run("-m", EXAMPLE, "-o", "whole").stdout
    verbose = run("-m", source, "-v", "-o", "verbose", "--ignore", "**.layers.0.**")
    assert "\nnot quantized: model.layers.0.self_attn.q_proj\n" in verbose.stdout
    assert "\ncopied: generation_config.json\n" in verbose.stdout

    # Widening is said in the plan and beside JSON.
    arguments = ["-m", source, "--dry-run", "--ignore", "model.layers.1.mlp.up_proj"]
    note = "note: --ignore model.layers.1.mlp.up_proj also applies to the layers fused with it: model.layers.1.mlp.gate_proj\n"
    assert note in run(*arguments).stdout
    told = run(*arguments, "--json")
    assert told.stderr == note
    assert "model.layers.1.mlp.gate_proj" in json.loads(told.stdout)["ignored_layers"]

    # Files that are left out are named.
    (source / "optimizer.pt").write_text("")
    (source / "original").mkdir()
    assert "left out: optimizer.pt, original/\n" in run("-m", source, "--dry-run").stdout


def test_progress_is_a_bar_on_a_terminal_where_somebody_watches(tmp_path: Path, source: Path) -> None:
    for number, (name, drawn) in enumerate((("SOMETHING", True), ("CI", False), ("NO_COLOR", False))):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, ROOT / "compress_fp8.py", "-m", source, "-o", tmp_path / str(number)]
        environment = {**os.environ, name: "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=environment, timeout=60)
        os.write(follower, b"end")
        shown = os.read(leader, 1 << 16)
        os.close(follower)
        os.close(leader)
        assert done.returncode == 0
        assert (b"compressing:   0%" in shown) == drawn, name
        assert drawn or shown == b"end"


def test_streams_that_nobody_reads_do_not_stop_the_work(
    subtests: pytest.Subtests, source: Path, tmp_path: Path
) -> None:
    compress(source, tmp_path / "same")
    for streams in ("| head -1", "--json | true"):
        with subtests.test(streams):
            words = f"{sys.executable} {ROOT / 'compress_fp8.py'} -m {source} -o {tmp_path / 'out'} {streams}"
            command = ["bash", "-c", f"{words}; exit ${{PIPESTATUS[0]}}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            assert tree(tmp_path / "out") == tree(tmp_path / "same")
            shutil.rmtree(tmp_path / "out")


def test_an_answer_that_cannot_be_written_is_no_success(tmp_path: Path, source: Path) -> None:
    compress(source, tmp_path / "same")
    for words in (("verify", tmp_path / "same", "--json"), ("compress", "-m", source, "--dry-run"), ("--help",)):
        with open("/dev/full", "w") as full:
            asked = [sys.executable, "-m", "openquant", *map(str, words)]
            done = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (
            2,
            "error: stdout cannot be written: No space left on device\n"
            "hint: run the same command again where it can; what is converted is not converted twice\n",
        )


def test_a_memory_limit_turns_xet_off_but_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["compress", "-m", str(EXAMPLE), "--dry-run", "--max-memory", "4GB"]
    for said, expected in (("0", "0"), (None, "1")):
        monkeypatch.setenv("HF_HUB_DISABLE_XET", said or "")
        if said is None:
            monkeypatch.delenv("HF_HUB_DISABLE_XET")
        assert main(command) == 0
        assert os.environ["HF_HUB_DISABLE_XET"] == expected


def test_a_signal_ends_a_run_with_130(tmp_path):
    weights = {"model.layers.0.mlp.down_proj.weight": torch.ones(32768, 4096, dtype=torch.bfloat16)}
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "compress_fp8.py"), str(source), "-o", str(out), "--json", "-q"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command, **pipes, text=True, preexec_fn=heed_ctrl_c)
    while not (out / ".openquant").exists():
        assert started.poll() is None
        time.sleep(0.002)
    started.send_signal(signal.SIGINT)
    stdout, stderr = started.communicate(timeout=60)
    assert started.returncode == 130, stderr
    assert json.loads(stdout) == {"error": "interrupted", "hint": "run the same command again to continue"}
    assert stderr.endswith("error: interrupted\nhint: run the same command again to continue\n")


def test_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "openquant", "--version"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert shown.stdout == f"openquant {BUILT}\n"


def test_help_does_not_load_numpy_or_torch() -> None:
    code = (
        "import sys; from openquant.cli.commands import compress_main\n"
        "try: compress_main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'torch', 'huggingface_hub', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_bug_of_ours_keeps_its_traceback(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import openquant.plan.plan\ndef broken(*_): raise ZeroDivisionError('ours')\nopenquant.plan.plan.make_plan = broken\n"
    )
    done = run("-m", source, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: ours\n")


def test_missing_gpu(run: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run("-m", EXAMPLE, "--device", "cuda:1")
    assert done.returncode == 2
    assert done.stderr == f"error: there is no cuda:1: torch {torch.__version__} sees 0 GPUs\nhint: use --device cpu\n"


def test_names_beyond_the_terminal_s_encoding(tmp_path: Path, run: Run) -> None:
    source = small_checkpoints.write(tmp_path / "modèle 模型")
    done = run("-m", source, "-o", "out", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "mod\\xe8le" in done.stdout

"""The queue of runs: one at a time, and what is left when a server or a run ends."""

import json
import subprocess
import sys
import time

import pytest

from openquant.errors import OutputError, UsageError
from openquant.files.destination import write_atomic
from openquant.web.runs import DONE, FAILED, RUNNING, STOPPED, Runs, without_tokens


@pytest.fixture
def runs(tmp_path):
    queue = Runs(tmp_path)
    yield queue
    queue.close()


def wait(runs, run, *states):
    until = time.monotonic() + 120
    while (now := runs.find(run.owner, run.id)) is None or now.state not in states:
        assert time.monotonic() < until, now
        time.sleep(0.05)
    return now


def test_runs_wait_their_turn_and_belong_to_their_owner(runs, example):
    words = ["compress", "-m", str(example)]
    first, second = (runs.add(owner, "tiny", [words]) for owner in ("a", "b"))
    assert runs.status(second).place == 1
    assert runs.find("a", second.id) is None and runs.find("b", second.id) == second
    done = wait(runs, second, DONE)
    assert wait(runs, first, DONE).output == str(runs.root / "tiny-qwen3-FP8")
    # A name that is taken is not replaced.
    assert done.output == str(runs.root / "tiny-qwen3-FP8-2")
    assert runs.result(done, 0)["scheme"] == "tensor"
    runs.remove(done)
    assert runs.of("b") == [] and not (runs.folder / done.id).exists()
    assert (runs.root / "tiny-qwen3-FP8-2" / "config.json").exists()


def test_an_error_is_that_of_the_command(runs, tmp_path):
    run = runs.add("a", "none", [["compress", "-m", str(tmp_path / "none")]])
    failed = wait(runs, run, FAILED)
    assert str(tmp_path / "none") in failed.error[0] and failed.error[1]


def test_a_full_disk_ends_one_run_and_the_next_one_goes_on(runs, example, monkeypatch):
    kept, full = write_atomic, iter([True])

    def write(path, data):
        if next(full, False):
            raise OutputError("the journal cannot be written: No space left on device", "free some space")
        kept(path, data)

    with runs._changed:
        first, second = (runs.add("a", "tiny", [["compress", "-m", str(example), "--dry-run"]]) for _ in range(2))
        monkeypatch.setattr("openquant.web.runs.write_atomic", write)
    assert "No space left on device" in wait(runs, first, FAILED).error[0]
    assert wait(runs, second, DONE)


def test_a_later_server_finds_runs_and_one_server_holds_them(tmp_path, runs):
    with pytest.raises(UsageError, match="another openquant web serves"):
        Runs(tmp_path)
    run = runs.add("a", "none", [["compress", "-m", "x"]], token="hf_secretsecret")
    wait(runs, run, FAILED)
    assert b"secretsecret" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    runs.close()
    journal = runs.folder / run.id / "run.json"
    known = json.loads(journal.read_text())
    # As a killed machine leaves it.
    journal.write_text(json.dumps({**known, "state": RUNNING, "process": 0}))
    later = Runs(tmp_path)
    try:
        found = later.find("a", run.id)
        assert found.state == STOPPED
        with pytest.raises(UsageError, match="this run needs your token"):
            later.proceed(found, None)
    finally:
        later.close()


def test_what_looks_like_a_token_is_not_shown():
    assert without_tokens("Bearer hf_abcDEF123456, again") == "Bearer hf_..., again"


def test_only_the_verb_imports_gradio():
    code = "import sys, openquant.cli.commands as c; print({'gradio', 'openquant.web.server'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_without_the_extra_the_verb_names_it(tmp_path):
    (tmp_path / "gradio.py").write_text("raise ImportError('gone', name='gradio')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from openquant.cli.commands import main; sys.exit(main(['web']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: openquant web needs gradio, which is not installed\nhint: ")
    assert "pip install 'openquant-llm[web]'" in done.stderr

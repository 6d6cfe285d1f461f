"""The runs: one at a time, and what is left when a run or the server ends."""

import subprocess
import sys
import time

import pytest

from openquant.web.runs import DONE, FAILED, RUNNING, STOPPED, WAITING, PageRun, Runs, result_html, status_html


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    table = Runs(root)
    yield table
    table.close()


def wait(run, *states):
    until = time.monotonic() + 120
    while run.state not in states:
        assert time.monotonic() < until, (run, list(run.log))
        time.sleep(0.05)


def test_runs_wait_their_turn(runs, example):
    words = ["compress", "-m", str(example)]
    first, second = (runs.add("tiny", [words]) for _ in range(2))
    assert "Waiting for the runs before this one." in status_html(second)
    assert runs.find(second.id) is second and runs.newest_first() == [second, first]
    wait(second, DONE)
    assert first.state == DONE and first.output == second.output == str(runs.root / "tiny-qwen3-FP8")
    # The same command continues what is there, or finds it finished.
    assert (first.results[0]["resumed"], second.results[0]["resumed"]) == (False, True)
    assert [path.name for path in runs.root.iterdir()] == ["tiny-qwen3-FP8"]


def test_problems_that_verify_finds_stand_first_and_in_red():
    run = PageRun(
        "tiny", [["compress"], ["verify"]], results=[{"pushed_to": "https://hub/x"}, {"problems": ["<lost>"]}]
    )
    assert result_html(run).startswith(
        '<section class="oq"><div class="oq-problem" role="alert"><p>openquant verify: &lt;lost&gt;</p></div>'
    )
    run.results[1]["problems"] = []
    assert "oq-problem" not in result_html(run) and "openquant verify: no problems" in result_html(run)


def test_an_error_is_that_of_the_command_and_the_next_run_goes_on(runs, example, tmp_path):
    failed = runs.add("none", [["compress", "-m", str(tmp_path / "none")], ["eval", "{output}"]])
    wait(failed, FAILED)
    assert str(tmp_path / "none") in failed.error.message and failed.error.hint and failed.step == 0
    # As on a disk without space for a process or its directory.
    runs.root.rename(tmp_path / "gone")
    unstarted = runs.add("tiny", [["compress", "-m", str(example), "--dry-run"]])
    wait(unstarted, FAILED)
    assert unstarted.error.message.startswith("openquant cannot be started: ")
    (tmp_path / "gone").rename(runs.root)
    wait(runs.add("tiny", [["compress", "-m", str(example), "--dry-run"]]), DONE)


def test_a_command_that_is_killed_fails_its_run(runs, example):
    run = runs.add("tiny", [["compress", "-m", str(example)]])
    wait(run, RUNNING)
    while run.process is None:
        time.sleep(0.01)
    run.process.kill()
    wait(run, FAILED)
    assert run.error.message == "the command ended before it was done"


def test_stop_and_the_end_of_the_server_end_the_command(runs, example):
    words = ["compress", "-m", str(example)]
    first, second, third = (runs.add("tiny", [words]) for _ in range(3))
    runs.stop(third)
    assert third.state == STOPPED
    wait(first, RUNNING)
    runs.stop(first)
    wait(first, STOPPED)
    runs.close()
    assert second.state == STOPPED and WAITING not in {run.state for run in runs.newest_first()}
    assert all(run.process is None or run.process.poll() is not None for run in (first, second, third))


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

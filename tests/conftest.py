"""Fixtures shared by all tests."""

from __future__ import annotations

import os

# Before anything loads torch, and for all that is started: small products take longer where threads wait for each other,
# which burns processor time. Two of them spent a third more than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from openquant.machine import available_cpus
from support import starting

if TYPE_CHECKING:
    from support.conversions import Shelf

# How long an example takes says nothing about it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A plan of tens of thousands of tensors took a third longer, looking for garbage among objects that stay.
gc.set_threshold(50_000, 20, 20)

# Hundreds of commands run here as a user has them, who lets Python keep what it compiled: without that each compiles the
# whole program again, a third of its time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tiny-qwen3"

# Processor seconds of the tests so far, with all that they start, by the module they lie in.
seconds: dict[Path, float] = {}
# How many modules are named, of those that take most.
DEAREST = 12

# What is imported in functions is transformers or loads it: the process that hands tests out needs neither, and all wait for it.

Run = Callable[..., "subprocess.CompletedProcess[str]"]


# The tests marked quick: files, and of the walk through all architectures these.
QUICK = (
    "calibration/test_gptq_update.py", "cli/test_cli.py", "convert/test_copied.py", "evaluation/test_kl.py",
    "files/test_checkpoint.py", "files/test_output.py", "formats/test_kernels.py", "formats/test_schemes.py",
    "plan/test_plan.py", "plan/test_tensor_parallel.py", "test_house.py", "test_options.py",
    "weights/test_stacks.py",
)  # fmt: skip
WALKED_QUICKLY = re.compile(
    r"\[(Qwen3|Qwen3Moe|Gemma3|Llama4|Phi3|DeepseekV3|Qwen3Next|GraniteMoe)ForCausalLM\]|Gemma3ForConditionalGeneration"
)


# The files that take longest, which begin first: the last one to end has all processors but one for nothing.
LONGEST = (
    "serve/test_serve.py", "serve/test_sglang.py", "web/test_page.py", "registry/test_every_architecture.py",
    "hub/test_push.py", "serve/test_serve_four_bits.py", "serve/test_serve_pooled.py",
    "serve/test_serve_real_model.py", "test_real_models.py", "space/test_static_page.py", "convert/test_convert.py",
    "hub/test_stream.py", "test_distributed.py", "convert/test_fast.py", "registry/test_models.py",
    "weights/test_packed_columns.py", "calibration/test_sensitivity.py", "fit/test_fit_verb.py",
    "streaming/test_memory.py", "cli/test_cli.py", "weights/test_find.py", "gguf/test_gguf_source.py",
)  # fmt: skip

# Only `.ci/nightly` has these files, and these tests of others: schemes in a real vLLM whose kernels other files run
# too, and answers over HTTP but for one; launchers of ranks; scores of all architectures, and those of a run that goes on;
# single answers that lm-eval's own model gives, of which its accuracy follows; a mixture through a few shards of the Hub;
# a job on the Hub that is cancelled; how work grows; what is installed and what benchmarks print.
NIGHTLY = (
    "cli/test_start.py::test_threads_that_wait_sleep_unless_the_user_says_otherwise",
    "evaluation/test_eval_tasks.py::test_log_probabilities_are_those_of_lm_evals_own_model",
    "evaluation/test_eval_tasks.py::test_ranks_share_the_packs_and_write_what_one_process_writes",
    "fit/test_fit_verb.py::test_scoring_that_is_stopped_continues_and_gives_the_same_scores",
    "fit/test_scores.py::test_every_unit_has_a_score_in_every_scheme",
    "formats/test_compiled.py::test_without_a_cache_loops_are_compiled_again",
    "hub/test_other_verbs.py::test_a_mixture_is_chosen_and_published_through_a_few_shards",
    "serve/test_serve.py::test_two_ranks_serve_what_falls_back_for_them",
    "serve/test_serve_quantized.py",
    "serve/test_serve_text.py",
    "space/test_static_page.py::test_cancel_come_back_and_continue",
    "streaming/test_many_layers.py",
    "test_benchmarks.py::test_all_that_is_measured_of_a_gpu_runs_on_a_cpu",
    "test_distributed.py::test_ranks_do_not_outlive_torchrun",
    "test_packaging.py::test_every_verb_works_from_the_wheel",
)


def everything() -> bool:
    """Whether this run takes all architectures for every mechanism."""
    return os.environ.get("OPENQUANT_ALL") == "1"


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are CPUs: two fifths of the time tests wait, for servers, browsers and what was killed."""
    return available_cpus() + 1


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers share the process that starts commands."""
    if config.getoption("numprocesses", 0) and not hasattr(config, "workerinput"):
        starting.address()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `-m quick` runs, leave what is for the night to it, and begin with the longest files."""
    later = []
    files = {item: item.path.relative_to(ROOT / "tests").as_posix() for item in items}
    for item, file in files.items():
        walked = file == "registry/test_every_architecture.py" and WALKED_QUICKLY.search(item.name)
        if file in QUICK or walked:
            item.add_marker(pytest.mark.quick)
        test = f"{file}::{item.name.partition('[')[0]}"
        if not everything() and (file in NIGHTLY or test in NIGHTLY):
            later.append(item)
    config.hook.pytest_deselected(items=later)
    left = [item for item in items if item not in later]
    items[:] = sorted(left, key=lambda item: LONGEST.index(files[item]) if files[item] in LONGEST else len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count a test's processor seconds; those of a fixture count for the test that asked for it first."""
    before = processor_seconds()
    found = yield
    seconds[item.path] = seconds.get(item.path, 0.0) + processor_seconds() - before
    return found


def processor_seconds() -> float:
    total = sum(os.times()[:4]) + starting.seconds
    for process in starting.others:
        # Those that have ended are among its children's.
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of pytest-xdist counted; one that died counted for nothing."""
    for path, each in getattr(node, "workeroutput", {}).get("seconds", {}).items():
        seconds[Path(path)] = seconds.get(Path(path), 0.0) + each


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell pytest-xdist what was counted, where this is a worker of it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = {str(path): each for path, each in seconds.items()}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the suite costs, engines apart: it is to stay quick enough to be run often."""
    rooms: dict[str, float] = {}
    for path, each in seconds.items():
        rooms[path.parent.name] = rooms.get(path.parent.name, 0.0) + each
    without = sum(each for room, each in rooms.items() if room != "serve")
    told = ", ".join(f"{room} {each:.0f}" for room, each in sorted(rooms.items()) if each >= 1)
    terminalreporter.write_line(f"processor seconds without serving: {without:.0f} ({told})")
    dearest = sorted(seconds, key=lambda path: -seconds[path])[:DEAREST]
    told = ", ".join(f"{path.stem} {seconds[path]:.0f}" for path in dearest if seconds[path] >= 10)
    terminalreporter.write_line(f"most: {told or 'none takes ten'}")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results be as wide as they are, so that a test finds a sentence in one line (test_columns.py wraps them), and bars be drawn."""
    monkeypatch.setenv("COLUMNS", "500")
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def shorten_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take most of an evaluation's time: have one, of eight tokens."""
    # Not above: most tests load neither.
    from openquant.evaluation import as_served, compare

    monkeypatch.setattr(as_served, "BUILT_IN", 1)
    for module in (as_served, compare):
        monkeypatch.setattr(module, "TOKENS", 8)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_answers(monkeypatch)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are saved after every layer."""
    from openquant.streaming import pass_checkpoint

    monkeypatch.setattr(pass_checkpoint, "EVERY", 0)
    monkeypatch.setattr(pass_checkpoint, "TIMES", 0)


@pytest.fixture
def example() -> Path:
    """The trained model that ships with the repository."""
    return EXAMPLE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Qwen3 in three shards, joined layers spread over them."""
    from support import small_checkpoints

    return small_checkpoints.write(tmp_path / "source", shards=3)


@pytest.fixture(scope="session")
def all_converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    from support.conversions import Shelf

    shelf = Shelf(tmp_path_factory.mktemp("converted"))
    yield shelf
    shelf.clear()


@pytest.fixture
def shelf(all_converted: Shelf) -> Iterator[Shelf]:
    """Small models and what is made of them, for tests that only read them."""
    yield all_converted
    all_converted.check()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `python compress_fp8.py WORDS...` as a user does, in an empty working directory (see support/starting.py)."""
    here = tmp_path / "here"
    here.mkdir()

    def start(*arguments: object, cwd: Path = here, **environment: str) -> subprocess.CompletedProcess[str]:
        return starting.run([ROOT / "compress_fp8.py", *arguments], cwd=cwd, env={**os.environ, **environment})

    return start


def run_openquant(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `openquant WORDS...` as a user does, in the repository or another directory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return starting.run(["-m", "openquant", *arguments], cwd=cwd, env=environment)


def heed_ctrl_c() -> None:
    """For a child before it starts: a shell has its background jobs ignore SIGINT, and this run may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes; where its card's title and commands name the directory, it is DIR."""
    found = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    files = {name: path.read_bytes() for name, path in found.items()}
    if "README.md" in files:
        name = re.escape(root.name.encode())
        before = rb"(?m)^(#|vllm serve|python -m sglang\.launch_server --model-path) "
        files["README.md"] = re.sub(before + name + b"$", rb"\1 DIR", files["README.md"])
    return files


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))

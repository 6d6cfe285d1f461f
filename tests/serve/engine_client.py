"""Around engines: whether they can run, questions to engine.py and sglang_engine.py, and `vllm serve`."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chosen import CHOSEN
from safetensors.torch import save_file

import openquant
from conftest import EXAMPLE, ROOT
from openquant.models import MODELS
from support import small_checkpoints
from support.starting import others

HERE = Path(__file__).parent
MISSING = "{} does not name an interpreter with {} (tests/serve/install_{}.sh installs one)"
# A quantized model's missing parameters are no error to vLLM without this.
TRACKED = json.dumps({"enable_weights_track": True})
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 300, 900, 20
# Past any proxy of the environment.
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# Bounds on the mean divergence over 252 positions, in nats.
# Trained model: 0.0013 tensor, 0.0030 channel, 0.0012 block; all scales 1.25 times too large: 0.039, 0.042.
# Random ones: 0.0009 to 0.0037; two of Llama 4's four experts in each other's place: 0.0075.
TO_SOURCE = 0.005
# Trained: 0.00004, 0.00005. Random: up to 0.00001, but with experts 0.0005: some tokens are routed otherwise.
# Joined layers with separate scales: 0.0007.
# The kernel for one scale per row rounds activations to FP8 too, one scale for each token: 0.0020, random 0.0028.
TO_DEQUANTIZED = {"tensor": 0.0002, "channel": 0.003, "block": 0.0002}

LogProbs = npt.NDArray[np.float32]


class EngineError(Exception):
    """vLLM refused a directory, or died of it."""


class Answers(dict[str, "LogProbs | EngineError"]):
    """Log-probabilities by model; one that the engine refused fails the tests that ask for it, not the others."""

    def of(self, name: str) -> LogProbs:
        """Of one model."""
        answer = self[name]
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def between(self, reference: str, other: str) -> float:
        """The mean divergence of one model from another, in nats."""
        return float(divergence(self.of(reference), self.of(other)).mean())


@dataclass(frozen=True)
class Engine:
    """vLLM in an interpreter of its own."""

    python: Path

    def logprobs(self, models: Mapping[str, Path], output: Path, mode: str = "logprobs", **environment: str) -> Answers:
        """Log-probabilities of the same prompts by each model, [position, token].

        The prompts are random ones, with "text" those of text_prompts.json, with FILE.json those of a file.
        With "pooled" they are embeddings or scores, [prompt, value].
        """
        found = self._ask(mode, list(models.values()), output, **environment)
        answers = [answer if isinstance(answer, EngineError) else np.load(answer) for answer in found]
        return Answers(zip(models, answers, strict=True))

    def layers(self, directories: Sequence[Path], output: Path) -> list[dict[str, Any] | EngineError]:
        """What engine.py's `layers` says of each model."""
        return _objects(self._ask("layers", directories, output))

    def cache(self, directories: Sequence[Path], output: Path, dtype: str) -> list[dict[str, Any] | EngineError]:
        """What engine.py's `cache` says of each model, with a cache of that dtype: "auto" or "fp8"."""
        return _objects(self._ask(dtype, directories, output))

    def _ask(
        self, mode: str, directories: Sequence[Path], output: Path, **environment: str
    ) -> list[Path | EngineError]:
        output.mkdir()
        process, log = _started(self.python)
        assert process.stdin is not None
        process.stdin.write(json.dumps([mode, str(output), environment, *map(str, directories)]).encode() + b"\n")
        process.stdin.flush()

        deadline = time.monotonic() + ANSWER_SECONDS
        while not (output / "done").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"engine.py does not answer\n{_end(log)}")
            time.sleep(0.05)
        return _answers(output, len(directories), log)

    @contextmanager
    def serve(self, model: Path | str, log: Path, shim: bool, ranks: int = 1, **environment: str) -> Iterator[str]:
        """`vllm serve` of a model as its address, with the plugin of shim/ or, if the CPU has AMX, without.

        Each of several ranks of tensor parallelism gets a CPU.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [str(self.python.parent / "vllm"), "serve", str(model), "--model-loader-extra-config", TRACKED]
        command += ["--enforce-eager", "--max-model-len", "512", "--dtype", "bfloat16"]
        command += ["--kv-cache-memory-bytes", str(1 << 26)]
        command += ["--host", "127.0.0.1", "--port", port]
        if ranks > 1:
            cpus = sorted(os.sched_getaffinity(0))[:ranks]
            if len(cpus) < ranks:
                pytest.skip(f"vLLM needs a CPU for each of {ranks} ranks")
            command += ["--tensor-parallel-size", str(ranks)]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cpus))
        with _process_group(
            command, log, "metadata", *(["shim"] if shim or not has_amx() else []), **environment
        ) as server:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(server, address, log)
            yield address


@dataclass(frozen=True)
class Loader:
    """SGLang in an interpreter of its own."""

    python: Path

    def load(self, asked: Sequence[tuple[Path, Path, Path]], output: Path) -> list[dict[str, Any] | EngineError]:
        """What sglang_engine.py says of each directory, given beside the same model in bfloat16, and its source."""
        output.mkdir()
        named = [":".join(map(str, directories)) for directories in asked]
        command, log = [str(self.python), str(HERE / "sglang_engine.py"), str(output), *named], output / "log"
        with _process_group(command, log) as process:
            status = process.wait(ANSWER_SECONDS)
        if status:
            raise EngineError(f"sglang_engine.py exited with {status}\n{_end(log)}")
        return _objects(_answers(output, len(asked), log))


def has_amx() -> bool:
    """Whether vLLM's FP8 kernels for CPUs can run here."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text().split()


def find_engine() -> Engine:
    """The engine that OPENQUANT_VLLM names; skips the test where there is none, or fails it if that is asked."""
    return Engine(_find_interpreter("OPENQUANT_VLLM", "vLLM"))


def find_loader() -> Loader:
    """The same of OPENQUANT_SGLANG."""
    return Loader(_find_interpreter("OPENQUANT_SGLANG", "SGLang"))


def _find_interpreter(variable: str, engine: str) -> Path:
    package = engine.lower()
    missing = MISSING.format(variable, engine, package)
    named = os.environ.get(variable)
    if not named:
        if os.environ.get("OPENQUANT_REQUIRE_SERVE") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    # Not resolved: a virtual environment's interpreter is a link out of it.
    python = Path(named).absolute()
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if shutil.which(python) is None or subprocess.run([python, "-c", find]).returncode:
        pytest.fail(missing)
    return python


def table_cells() -> dict[str, list[str]]:
    """The tables of docs/architectures.md: the cells of each architecture, five of vLLM and five of SGLang."""
    text = (ROOT / "docs" / "architectures.md").read_text()
    wanted = {*CHOSEN, *(MODELS.keys() - small_checkpoints.ARCHITECTURES)}
    cells: dict[str, list[str]] = {}
    for engine in ("vLLM", "SGLang"):
        section = text.split(f"\n## {engine}\n")[1].split("\n## ")[0]
        for row in re.findall(r"^\| (.+) \|$", section, re.MULTILINE):
            *same, names = row.split(" | ")
            for name in wanted.intersection(re.findall(r"`(\w+)`", names)):
                cells.setdefault(name, []).extend(same)
    return cells


@cache
def _started(python: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """engine.py, which all tests of this process ask, and its log; it ends when this process does."""
    held = ExitStack()
    atexit.register(held.close)
    log = Path(held.enter_context(tempfile.TemporaryDirectory()), "log")
    command = [str(python), str(HERE / "engine.py")]
    process = held.enter_context(_process_group(command, log, "shim", "stub"))
    others.add(process.pid)
    return process, log


def _answers(output: Path, count: int, log: Path) -> list[Path | EngineError]:
    """The file with each answer, or what went wrong, of a program that wrote `output`/`number`.*."""
    answers: list[Path | EngineError] = []
    for number in range(count):
        found = next(output.glob(f"{number}.*"), None)
        if found is None:
            answers.append(EngineError(f"the engine died\n{_end(log)}"))
        else:
            answers.append(EngineError(found.read_text()) if found.suffix == ".error" else found)
    return answers


def _objects(answers: list[Path | EngineError]) -> list[dict[str, Any] | EngineError]:
    return [found if isinstance(found, EngineError) else json.loads(found.read_text()) for found in answers]


@contextmanager
def _process_group(command: Sequence[str], log: Path, *paths: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with subdirectories of this one on its import path, ended with all that it started.

    It has as many threads as it likes: of the small products that the other tests compute it has few.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        "PYTHONPATH": os.pathsep.join(str(HERE / path) for path in paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EngineError(f"vllm serve exited with {server.returncode}\n{_end(log)}")
        try:
            with LOCAL.open(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise EngineError(f"vllm serve is not healthy after {START_SECONDS} s\n{_end(log)}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def complete(address: str, model: Path | str, prompt: str) -> dict[str, Any]:
    """The answer of POST /v1/completions."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with LOCAL.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def divergence(reference: LogProbs, other: LogProbs) -> npt.NDArray[np.float64]:
    """KL(reference || other) in nats, over the whole vocabulary, at each position."""
    wide = reference.astype(np.float64)
    return (np.exp(wide) * (wide - other)).sum(1)


def rewrite(
    source: Path, target: Path, tensors: dict[str, torch.Tensor] | None, config: dict[str, Any] | None = None
) -> Path:
    """A model of these tensors (None: of its config only), else as `source`."""
    target.mkdir()
    config = config or json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def compressed_examples(
    root: Path, cases: Mapping[str, Mapping[str, Any]], plain: Collection[str] | None = None
) -> dict[str, Path]:
    """The example as `source`, what compress() makes of it with each case's options, and `<case>-plain`, that dequantized.

    Only cases of `plain` are dequantized; all of them if it is None.
    """
    models = {"source": EXAMPLE}
    for name, options in cases.items():
        models[name] = root / name
        openquant.compress(EXAMPLE, models[name], **options)
        if plain is None or name in plain:
            models[f"{name}-plain"] = root / f"{name}-plain"
            openquant.dequantize(models[name], models[f"{name}-plain"])
    return models


def write_cached(output: Path, architecture: str, scheme: str) -> Path:
    """An output of a small model whose scales of keys and values are all different."""
    source = small_checkpoints.write(output.with_name(f"{output.name}-source"), architecture)
    openquant.compress(source, output, scheme, kv_cache="fp8")

    def number(held: dict[str, torch.Tensor]) -> None:
        for at, key in enumerate(key for key in held if key.endswith((".k_scale", ".v_scale"))):
            held[key].fill_(0.5 + at)

    small_checkpoints.change_weights(output, number)
    return output

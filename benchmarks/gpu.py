"""Say in at most ten minutes what a GPU does for a conversion, an evaluation and GPTQ, and whether its codes are right.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --small

Models of random weights are made in the directory for temporary files (16 GB); no network is needed. The table has a
line for each figure, with the peaks of memory since the line before: of what torch allocates on the GPU, and of the
process (since its start, where the system does not let its peak be reset). Figures of whole runs hold loading; `eval`
and GPTQ are compared with transformers' own passes over as many tokens, loading included.

A part that fails is named with its error, and the others run in a new process: after an error of CUDA all calls of the
same process fail. Parts that would start after nine minutes are left out. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from make_checkpoint import MODELS, SHARD_BYTES, Shape, write

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "examples" / "tiny-qwen3"
VOCABULARY = 2048

# Seconds after which no part starts, and after which one that still runs is ended.
LAST_START, END = 540, 580
# Exit code of a process in which a part failed. Python's own is 1, as where there is no GPU.
PART_FAILED = 3

COLUMNS = ("part", "figure", "unit", "ratio", "compared with", "GPU MB", "process MB")


# Name, figure, unit, and the ratio to the figure of something else.
Line = tuple[str, float, str, float, str]

# Functions whose seconds are counted, by where they are called.
EVAL_STEPS = tuple(f"openquant.evaluation.compare.{name}" for name in ("stochastic_round", "compare_logits"))
GPTQ_STEPS = tuple(
    f"openquant.calibration.gptq_pass.{name}"
    for name in ("find_error_propagation", "kernels.choose_scales", "round_columns")
)


@dataclass(frozen=True)
class Bench:
    """The device that is measured, a directory for models and outputs, and what parts run on.

    `layer`, `experts` and `codes` have one decoder layer and few tokens.
    """

    device: str
    directory: Path
    model: Shape
    layer: Shape
    experts: Shape
    codes: Shape
    samples: int
    length: int

    @property
    def texts(self) -> dict[str, int]:
        return {"samples": self.samples, "length": self.length}

    def make_model(self, shape: Shape) -> Path:
        """The checkpoint of a shape, with a tokenizer."""
        path = self.directory / f"{shape.model_type}-{shape.hidden}-{shape.layers}"
        if not path.exists():
            write(path, shape, shape.layers, SHARD_BYTES, headers_only=False)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TOKENIZER / name, path)
        return path

    def clock(self) -> float:
        """Seconds, once the device has done all that was asked of it."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall time of a call."""
        begin = self.clock()
        call()
        return self.clock() - begin

    def compress(self, source: Path, output: str, scheme: str, device: str, **options: Any) -> float:
        """Wall time of a conversion."""
        import openquant

        target = self.directory / output
        shutil.rmtree(target, ignore_errors=True)
        return self.seconds(lambda: openquant.compress(source, target, scheme, device=device, **options))

    def run_plainly(self, source: Path, passes: int, head: bool) -> float:
        """Wall time of transformers alone: load a model, and run texts one by one. The first of two runs warms up."""
        import torch
        from transformers import AutoModelForCausalLM

        from openquant.streaming.model import products_in_float32

        texts = torch.randint(VOCABULARY, (passes * self.samples, 1, self.length)).to(self.device)

        def run() -> None:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, device_map=self.device)
            body = model if head else model.model
            with torch.inference_mode(), products_in_float32(self.device):
                for ids in texts:
                    body(input_ids=ids, use_cache=False)

        taken = [self.seconds(run) for _ in range(2)][1]
        gc.collect()
        return taken

    @contextmanager
    def watch(self, *functions: str) -> Iterator[dict[str, float]]:
        """Count the seconds that are spent in functions, which are named by where they are called."""
        spent = {function.rpartition(".")[2]: 0.0 for function in functions}

        def call(original: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
            results: list[Any] = []
            spent[name] += self.seconds(lambda: results.append(original(*args, **options)))
            return results[0]

        with ExitStack() as stack:
            for function, name in zip(functions, spent, strict=True):
                stack.enter_context(mock.patch(function, partial(call, resolve_name(function), name)))
            yield spent


def one_layer(model: str, **sizes: int) -> Shape:
    """One layer of a published model, with other sizes."""
    return replace(MODELS[model], layers=1, vocab=VOCABULARY, **sizes)


FULL = partial(
    Bench,
    model=MODELS["qwen3-1.7b"],
    layer=one_layer("qwen3-8b"),
    experts=one_layer("qwen3-30b-a3b", experts=64),
    codes=one_layer("qwen3-0.6b"),
    samples=32,
    length=512,
)
TINY = one_layer("qwen3-0.6b", hidden=256, mlp=256, heads=2, kv_heads=1)
TINY_EXPERTS = one_layer("qwen3-30b-a3b", hidden=256, heads=2, kv_heads=1, experts=8, expert_mlp=128)
SMALL = partial(Bench, model=TINY, layer=TINY, experts=TINY_EXPERTS, codes=TINY, samples=2, length=32)


def convert(bench: Bench) -> Iterator[Line]:
    """Convert a model. The second of two runs counts: loops are compiled and kernels loaded by then."""
    source = bench.make_model(bench.model)
    nbytes = sum(path.stat().st_size for path in source.iterdir())

    def copy(name: str) -> float:
        command = ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', source, bench.directory / name]
        return bench.seconds(lambda: subprocess.run(command, check=True))

    copied = [copy(name) for name in ("copy", "copy again")][1]
    yield ("convert, a copy", nbytes / copied / 1e9, "GB/s", 1, "itself")

    for scheme in ("tensor", "block", "int4"):
        for device in dict.fromkeys(("cpu", bench.device)):
            taken = [bench.compress(source, "output", scheme, device) for _ in range(2)][1]
            yield (f"convert, {scheme}, {device}", nbytes / taken / 1e9, "GB/s", copied / taken, "a copy")


def compare_codes(bench: Bench) -> Iterator[Line]:
    """Compare codes and scales with those that the CPU writes. GPTQ's may differ, as sums have another order."""
    from openquant.formats.schemes import SCHEMES

    source = bench.make_model(bench.codes)
    different = []

    def equal(scheme: str, **options: Any) -> float:
        bench.compress(source, "expected", scheme, "cpu", **options)
        bench.compress(source, "output", scheme, bench.device, **options)
        return equal_share(bench.directory / "expected", bench.directory / "output", source)

    for scheme in SCHEMES:
        share = equal(scheme)
        yield (f"codes, {scheme}", 100 * share, "% equal", share, "the CPU's")
        if share < 1:
            different.append(scheme)

    share = equal("int4", gptq=True, **bench.texts)
    yield ("codes, int4 by GPTQ", 100 * share, "% equal", share, "the CPU's")
    if different:
        raise ValueError(f"not the CPU's codes: {', '.join(different)}")


def equal_share(expected: Path, output: Path, source: Path) -> float:
    """The share of equal bytes in tensors that are not as in the source."""
    import torch
    from safetensors.torch import load_file

    def read(directory: Path) -> dict[str, Any]:
        return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}

    before, right, found = read(source), read(expected), read(output)
    changed = [name for name, tensor in right.items() if name not in before or tensor.dtype != before[name].dtype]
    same = [right[name].reshape(-1).view(torch.uint8) == found[name].reshape(-1).view(torch.uint8) for name in changed]
    return sum(int(equal.sum()) for equal in same) / sum(map(len, same))


def evaluate(bench: Bench) -> Iterator[Line]:
    """Evaluate an FP8 output: each text runs twice through the source, and twice through the output."""
    import openquant

    source = bench.make_model(bench.model)
    bench.compress(source, "output", "tensor", "cpu")
    options = {"device": bench.device, "out": bench.directory / "eval.json", "no_prompts": True, **bench.texts}

    tokens = 4 * bench.samples * bench.length
    plain = bench.run_plainly(source, passes=4, head=True)
    yield ("eval, transformers", tokens / plain, "tokens/s", 1, "itself")

    with bench.watch(*EVAL_STEPS) as spent:
        taken = bench.seconds(lambda: openquant.evaluate(bench.directory / "output", source, **options))

    yield ("eval", tokens / taken, "tokens/s", plain / taken, "transformers, four passes")
    for name, seconds in spent.items():
        yield (f"eval, {name}", seconds, "s", seconds / taken, "the whole eval")


def round_model(name: str, bench: Bench, shape: Shape) -> Iterator[Line]:
    """Convert a model to int4 by GPTQ."""
    source = bench.make_model(shape)
    tokens = bench.samples * bench.length
    plain = bench.run_plainly(source, passes=1, head=False)
    yield (f"{name}, transformers", tokens / plain, "tokens/s", 1, "itself")

    with bench.watch(*GPTQ_STEPS) as spent:
        taken = bench.compress(source, "output", "int4", bench.device, gptq=True, **bench.texts)

    yield (name, tokens / taken, "tokens/s", plain / taken, "transformers, one pass")
    for step, seconds in spent.items():
        yield (f"{name}, {step}", seconds, "s", seconds / taken, "the whole run")


PARTS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "codes": compare_codes,
    "GPTQ of a layer": lambda bench: round_model("GPTQ of a layer", bench, bench.layer),
    "GPTQ of experts": lambda bench: round_model("GPTQ of experts", bench, bench.experts),
    "convert": convert,
    "eval": evaluate,
    "GPTQ": lambda bench: round_model("GPTQ", bench, bench.model),
}


def print_row(*cells: str) -> None:
    """Print a row of the table."""
    missing = [""] * (len(COLUMNS) - len(cells))
    print(f"| {' | '.join((*cells, *missing))} |", flush=True)


def print_header(gpu: str) -> None:
    """Print what runs here, and the head of the table."""
    versions = (f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    print(", ".join([gpu, f"{os.cpu_count()} CPUs", *versions]), end="\n\n")
    print_row(*COLUMNS)
    print_row(*["---"] * len(COLUMNS))


def begun(directory: Path) -> list[str]:
    """The parts that a process has begun, in their order."""
    return [part for part in PARTS if (directory / part).exists()]


def run_parts(bench: Bench, begin: float) -> None:
    """Run the parts that no process has begun, up to the first that fails; `begin`: when the first one began."""
    # transformers would take kernels.py beside this file for the package of that name.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]
    import torch

    from openquant.machine import find_device, peak_rss

    on_gpu = find_device(bench.device, 0) != "cpu"
    if not begun(bench.directory):
        print_header(torch.cuda.get_device_name() if on_gpu else "no GPU")
    signal.alarm(max(1, int(begin + END - time.time())))

    def reset_peaks() -> None:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    for part in [part for part in PARTS if part not in begun(bench.directory)]:
        (bench.directory / part).touch()
        if time.time() > begin + LAST_START:
            print_row(part, "left out: no time")
            continue

        gc.collect()
        reset_peaks()
        try:
            for name, figure, unit, ratio, compared in PARTS[part](bench):
                peaks = (torch.cuda.max_memory_allocated() if on_gpu else 0, peak_rss())
                memory = (f"{peak / 1e6:.0f}" for peak in peaks)
                print_row(name, f"{figure:.4g}", unit, f"{ratio:.3g}", compared, *memory)
                reset_peaks()
        except Exception as error:
            print_row(part, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            sys.exit(PART_FAILED)


def main() -> None:
    """The command line; `--directory` and `--begin` are for the processes that run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="with models of a few megabytes, to try the parts")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        bench = (SMALL if options.small else FULL)(options.device, options.directory)
        return run_parts(bench, options.begin)

    failed = False
    with tempfile.TemporaryDirectory(prefix="openquant-gpu-") as directory:
        command = [sys.executable, *sys.argv, "--directory", directory, "--begin", str(options.begin)]
        for _ in PARTS:
            code = subprocess.run(command).returncode
            failed = failed or code != 0
            if code < 0:
                print_row(begun(Path(directory))[-1], f"failed: ended by signal {-code}")
            elif code != PART_FAILED:
                break
    sys.exit(failed)


if __name__ == "__main__":
    main()

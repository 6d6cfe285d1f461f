"""Time a calibrated compression, in turns with llm-compressor's `oneshot`: the whole job, saving included.

    python benchmarks/make_checkpoint.py qwen3-0.6b DIR/q06
    python -m venv DIR/peer && DIR/peer/bin/pip install llmcompressor==0.14.0.1 numpy torch
    python benchmarks/calibration.py DIR/q06 --peer DIR/peer/bin/python --method fp8

Both read the same texts and write FP8 with one static scale for the activations of each layer (`--method fp8`), or
INT4 in groups of 128 by AWQ or GPTQ (`--method awq`, `gptq`).
openquant is one command, `openquant compress` with its defaults on one worker. llm-compressor has the model in memory,
as it does by default; with `--offloaded` it keeps the weights on disk instead. A checkpoint without a tokenizer is
given that of examples/tiny-qwen3. One thread each: threads that wait for one another on a busy machine burn seconds.

On processors that do not multiply bfloat16, openquant computes products in float32. So does llm-compressor here, by
openquant's own means, unless `--as-it-is`; it takes some eight times as long without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "examples" / "tiny-qwen3"

# By method, what openquant is asked for.
OURS = {
    "fp8": ("--activation-scheme", "static"),
    "awq": ("--scheme", "int4", "--awq"),
    "gptq": ("--scheme", "int4", "--gptq"),
}


def recipe(method: str) -> list[Any]:
    """What llm-compressor is asked for, of the same method."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    made: dict[str, Callable[[], list[Any]]] = {
        "fp8": lambda: [QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])],
        "awq": lambda: [AWQModifier(), QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
        "gptq": lambda: [GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
    }
    return made[method]()


@dataclass(frozen=True)
class Measured:
    """One process.

    Attributes:
        cpu: processor seconds.
        wall: seconds.
        peak: bytes of memory.
        disk: most bytes of files beside the output.
    """

    cpu: float
    wall: float
    peak: int
    disk: int


def measure(command: list[str], scratch: Path, log: Path) -> Measured:
    """Run a command, with an empty directory for its temporary files."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    # transformers would take kernels.py beside this file for the package of that name.
    environment["PYTHONSAFEPATH"] = "1"
    begin, disk, reaped = time.monotonic(), 0, 0
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        while not reaped:
            time.sleep(0.5)
            disk = max(disk, size(scratch))
            reaped, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}; see {log}")
    return Measured(usage.ru_utime + usage.ru_stime, time.monotonic() - begin, usage.ru_maxrss * 1024, disk)


def size(directory: Path) -> int:
    """Bytes on disk."""
    total = 0
    for place, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def write_tokens(source: Path, into: Path, samples: int, length: int) -> None:
    """The tokens that openquant calibrates on, as JSON lists; the source has a tokenizer then."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (source / name).exists():
            shutil.copy(TOKENIZER / name, source / name)
    from openquant.data.corpus import read_corpus
    from openquant.files.checkpoint import open_checkpoint
    from openquant.hub.source import find_source
    from openquant.options import CalibrationTexts
    from openquant.streaming.session import find_tokenizer

    tokenizer = find_tokenizer(find_source(str(source)), open_checkpoint(source))
    corpus = read_corpus(CalibrationTexts(samples=samples, length=length), tokenizer, "calibration")
    into.write_text(json.dumps([list(document.ids) for document in corpus.documents]))


def peer(method: str, source: Path, output: Path, work: Path, offloaded: bool, as_it_is: bool) -> None:
    """llm-compressor's calibration and saving; run by its own interpreter."""
    from contextlib import nullcontext

    import torch
    from compressed_tensors.offload import load_offloaded_model
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from openquant.streaming.model import products_in_float32

    disk: dict[str, Any] = {
        "device_map": "auto_offload",
        "max_memory": {"cpu": 1 << 20},
        "offload_folder": str(work / "scratch"),
    }
    with load_offloaded_model() if offloaded else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **(disk if offloaded else {}))
    texts = [torch.tensor([ids]) for ids in json.loads((work / "tokens.json").read_text())]
    data = DataLoader(
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts],
        batch_size=None,
    )
    if method == "awq":
        # Its memory is pinned, which fails without an accelerator.
        IntermediatesCache.pin_memory = lambda *_: None
    with nullcontext() if as_it_is else products_in_float32():
        # It asks for a processor, and does not use it.
        oneshot(model=model, dataset=data, recipe=recipe(method), processor=object())
    model.save_pretrained(output)


def main() -> None:
    """The command line; `--run` is what it runs itself with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--method", choices=OURS, default="fp8")
    parser.add_argument("--peer", type=Path, help="an interpreter with llm-compressor")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--offloaded", action="store_true", help="keep llm-compressor's weights on disk")
    parser.add_argument("--as-it-is", action="store_true", help="leave llm-compressor's products in bfloat16")
    parser.add_argument("--only", choices=("openquant", "llm-compressor"), help="measure one of them")
    parser.add_argument("--run", choices=("tokens", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.source.with_name(f"{options.source.name}-{options.method}")
    output = work / "output"
    if options.run == "tokens":
        write_tokens(options.source, work / "tokens.json", options.samples, options.length)
        return
    if options.run == "peer":
        peer(options.method, options.source, output, work, options.offloaded, options.as_it_is)
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    itself = [__file__, *sys.argv[1:], "--run"]
    texts = ["--samples", str(options.samples), "--length", str(options.length)]
    asked = ["compress", "-m", str(options.source), "-o", str(output), "-q", "--workers", "1", *OURS[options.method]]
    commands = {"openquant": [sys.executable, "-m", "openquant", *asked, *texts]}
    if options.peer:
        commands["llm-compressor"] = [str(options.peer), *itself, "peer"]
    subprocess.run([sys.executable, *itself, "tokens"], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    runs: dict[str, list[Measured]] = {name: [] for name in commands if options.only in (None, name)}
    for turn in range(options.turns):
        for name, found in runs.items():
            shutil.rmtree(output, ignore_errors=True)
            for kept in work.glob("*.calibration.safetensors*"):
                kept.unlink()
            found.append(measure(commands[name], work / "scratch", work / "log"))
            print(f"turn {turn + 1} {name}: {found[-1]}", file=sys.stderr, flush=True)
    shutil.rmtree(work)
    columns = ("least of each", "CPU s", "wall s", "peak RSS MB", "disk beside the output MB")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    least = {name: best(found) for name, found in runs.items()}
    for name, found in least.items():
        print(f"| {name} | {found.cpu:.1f} | {found.wall:.1f} | {found.peak / 1e6:.0f} | {found.disk / 1e6:.0f} |")
    if len(least) == 2:
        ours, theirs = least.values()
        print(
            f"| ratio | {ours.cpu / theirs.cpu:.2f} | {ours.wall / theirs.wall:.2f} | {ours.peak / theirs.peak:.2f} | |"
        )


def best(found: list[Measured]) -> Measured:
    """The least of each figure: what others on the machine add is never less than nothing."""
    return Measured(
        min(run.cpu for run in found),
        min(run.wall for run in found),
        min(run.peak for run in found),
        min(run.disk for run in found),
    )


if __name__ == "__main__":
    main()

"""Time a calibration and the writing of its FP8 output, in turns with llm-compressor's sequential pass.

    python benchmarks/make_checkpoint.py qwen3-0.6b DIR/q06
    python -m venv DIR/peer && DIR/peer/bin/pip install llmcompressor==0.14.0.1 numpy torch
    python benchmarks/calibration.py DIR/q06 --peer DIR/peer/bin/python --turns 3

Both find the largest magnitude of what goes into each Linear of the decoder layers on the same random tokens, and
write FP8 with one scale per tensor. llm-compressor does it in one process, with the model's weights offloaded to disk,
and saves. openquant does it in two: the streamed pass, up to the last layer, and `openquant compress`; their seconds
are added, and the larger memory counts. One thread each: threads that wait for one another on a busy machine burn
seconds.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LARGEST_CODE = 448
TOKENS = 32_000


@dataclass(frozen=True)
class Measured:
    """One or several processes, one after the other.

    Attributes:
        cpu: processor seconds of all.
        wall: seconds.
        peak: bytes of memory, of the largest.
        disk: most bytes of files beside the output.
    """

    cpu: float
    wall: float
    peak: int
    disk: int

    def then(self, other: Measured) -> Measured:
        """Both, in order."""
        return Measured(
            self.cpu + other.cpu, self.wall + other.wall, max(self.peak, other.peak), max(self.disk, other.disk)
        )


def measure(command: list[str], scratch: Path, log: Path) -> Measured:
    """Run a command, with an empty directory for its temporary files."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
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


def token_ids(samples: int, length: int) -> Any:
    """The same tokens for both, shape (samples, length)."""
    import torch

    return torch.randint(4, TOKENS, (samples, length), generator=torch.Generator().manual_seed(0))


def calibrate(source: Path, into: Path, samples: int, length: int) -> None:
    """Write the input scale of each Linear of the decoder layers, found in a streamed pass."""
    import torch

    from openquant.files.checkpoint import open_checkpoint
    from openquant.forward.products import products_in_float32
    from openquant.forward.streamed import Pass, StreamedModel, run

    streamed = StreamedModel(open_checkpoint(source))
    largest: dict[str, torch.Tensor] = {}
    # Of the last input: q, k and v, gate and up take the same tensor.
    last: list[torch.Tensor] = []

    def observe(name: str) -> Any:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not (last and last[0] is args[0]):
                low, high = torch.aminmax(args[0])
                last[:] = [args[0], torch.maximum(high, -low)]
            largest[name] = torch.maximum(largest[name], last[1]) if name in largest else last[1]

        return hook

    layers = [name for name in streamed.units if name.rpartition(".")[2].isdigit()]
    for layer in layers:
        for name, module in streamed.units[layer].named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(observe(f"{layer}.{name}"))
    passes = [
        Pass(streamed, lambda ids=ids: streamed.model(input_ids=ids, use_cache=False), products_in_float32)
        for ids in token_ids(samples, length).split(1)
    ]
    run([[each] for each in passes], finished=lambda *_: None, until=layers[-1])
    into.write_text(json.dumps({name: float(value) / LARGEST_CODE for name, value in largest.items()}))


def peer(source: Path, output: Path, offload: Path, samples: int, length: int, as_it_is: bool) -> None:
    """llm-compressor's calibration with weights on disk, and its saving; run by its own interpreter."""
    from contextlib import nullcontext

    import torch
    from compressed_tensors.offload import load_offloaded_model
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from openquant.forward.products import products_in_float32

    with load_offloaded_model():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", device_map="auto_offload", max_memory={"cpu": 1 << 20}, offload_folder=str(offload)
        )
    data = DataLoader(
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in token_ids(samples, length)]
    )
    recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
    with nullcontext() if as_it_is else products_in_float32():
        # It asks for a processor, and does not use it.
        oneshot(model=model, dataset=data, recipe=recipe, pipeline="sequential", processor=object())
    model.save_pretrained(output)


def main() -> None:
    """The command line; `--run` is what it runs itself with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--peer", type=Path, help="an interpreter with llm-compressor")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--as-it-is", action="store_true", help="leave llm-compressor's products in bfloat16")
    parser.add_argument("--run", choices=("openquant", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.source.with_name(f"{options.source.name}-calibration")
    scratch, output, scales = work / "scratch", work / "output", work / "scales.json"
    if options.run == "openquant":
        calibrate(options.source, scales, options.samples, options.length)
        return
    if options.run == "peer":
        peer(options.source, output, scratch, options.samples, options.length, options.as_it_is)
        return
    work.mkdir(exist_ok=True)
    itself = [__file__, *sys.argv[1:], "--run"]
    compress = [sys.executable, "-m", "openquant", "compress", "-m", str(options.source), "-o", str(output), "-q"]
    runs: dict[str, list[Measured]] = {"openquant": [], "llm-compressor": []}
    for turn in range(options.turns):
        for name, found in runs.items():
            shutil.rmtree(output, ignore_errors=True)
            if name == "openquant":
                calibration = measure([sys.executable, *itself, "openquant"], scratch, work / "log")
                found.append(calibration.then(measure([*compress, "--workers", "1"], scratch, work / "log")))
            elif options.peer:
                found.append(measure([str(options.peer), *itself, "peer"], scratch, work / "log"))
            print(f"turn {turn + 1} {name}: {found[-1:]}", file=sys.stderr, flush=True)
    shutil.rmtree(work)
    columns = ("least of each", "CPU s", "wall s", "peak RSS MB", "disk beside the output MB")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    least = {name: best(found) for name, found in runs.items() if found}
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

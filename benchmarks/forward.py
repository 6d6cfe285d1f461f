"""A model's forward pass, streamed and ordinary: processor time with loading left out, and the largest resident memory.

    python benchmarks/make_checkpoint.py qwen3-1.7b DIR/q1.7 && python benchmarks/forward.py DIR/q1.7
    python benchmarks/make_checkpoint.py qwen3-8b --layers 8 DIR/q8b8 && python benchmarks/forward.py DIR/q8b8

Each in a process of its own, on one thread, without the output head: `--samples` random texts of `--length` tokens,
`--batch` at a time; one by default, as an evaluation runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

WAYS = ("streamed", "ordinary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--scratch", type=Path, help="directory for all hidden states")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return
    print("| turn | forward pass | CPU s | loading, CPU s | wall s | peak RSS MB |\n|---|---|---|---|---|---|")
    for turn in range(options.turns):
        for way in options.ways:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            found = json.loads(done.stdout)
            figures = f"{found['cpu']:.1f} | {found['load']:.1f} | {found['wall']:.1f} | {found['rss']:.0f}"
            print(f"| {turn + 1} | {way} | {figures} |", flush=True)


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from openquant.machine import peak_rss

    torch.set_num_threads(1)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    shape = options.samples // options.batch, options.batch, options.length
    batches = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    cpu, load = (streamed if options.only == "streamed" else ordinary)(options, batches)
    return {"cpu": cpu, "load": load, "wall": time.perf_counter() - began, "rss": peak_rss() / 1e6}


def streamed(options: argparse.Namespace, batches: Any) -> tuple[float, float]:
    """Processor seconds of the pass, and of loading."""
    from openquant.files.checkpoint import open_checkpoint
    from openquant.streaming.interleaved import ForwardPass, run_interleaved
    from openquant.streaming.model import StreamedModel, products_in_float32
    from openquant.streaming.offload import OffloadFile

    model = StreamedModel(open_checkpoint(options.model))
    loading = 0.0
    original = model.load

    def timed(unit: str) -> None:
        nonlocal loading
        began = time.process_time()
        original(unit)
        loading += time.process_time() - began

    model.load = timed  # type: ignore[method-assign]
    groups = []
    for ids in batches:
        body = partial(model.model, input_ids=ids, use_cache=False)
        groups.append([ForwardPass(model, body, products_in_float32)])
    scratch = OffloadFile(options.scratch, 0, may_be_in_memory=True) if options.scratch else None
    began = time.process_time()
    run_interleaved(groups, finished=lambda *_: None, until=list(model.units)[-2], scratch=scratch)
    return time.process_time() - began - loading, loading


def ordinary(options: argparse.Namespace, batches: Any) -> tuple[float, float]:
    """Processor seconds of the pass, and of loading."""
    import torch
    from transformers import AutoModelForCausalLM

    from openquant.streaming.model import products_in_float32

    began = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval().model
    loading = time.process_time() - began
    began = time.process_time()
    with torch.inference_mode(), products_in_float32():
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    return time.process_time() - began, loading


if __name__ == "__main__":
    main()

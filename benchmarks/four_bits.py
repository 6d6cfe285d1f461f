"""Four bits beside llm-compressor's `model_free_ptq`: time and memory on one checkpoint, what is lost on another.

    python benchmarks/make_checkpoint.py qwen3-1.7b DIR/q1.7
    python -m venv DIR/peer && DIR/peer/bin/pip install llmcompressor==0.14.0.1 numpy torch
    python benchmarks/four_bits.py DIR/q1.7 --peer DIR/peer/bin/python

Whole processes in turns, each given as many threads; the source is read once before each. Both leave the embedding and
the head as they are. Then both compress the example, and openquant evaluates all in one pass: KL on the built-in
texts, and the squared error of the quantized weights as a share of their squares. `--turns 0` does that alone.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path

from compare import ROOT, Measured, back_memory, measure, warm_cache

# By name: the scheme that openquant or the peer is asked for, and more of what openquant is.
OURS = {
    "openquant, int4": ("int4",),
    "openquant, int4 `--no-search`": ("int4", "--no-search"),
    "openquant, nvfp4": ("nvfp4",),
}
PEERS = {"model_free_ptq, W4A16": "W4A16", "model_free_ptq, NVFP4A16": "NVFP4A16"}
PEER = (
    "import sys; from llmcompressor import model_free_ptq; model_free_ptq(*sys.argv[1:3], scheme=sys.argv[3], "
    "ignore=['lm_head', 're:.*embed_tokens$'], device='cpu')"
)


def commands(source: Path, root: Path, peer: Path | None) -> dict[str, tuple[Path, list[str]]]:
    """Where each puts its output, and the command."""
    found = {}
    for name, (scheme, *more) in OURS.items():
        output = root / "".join(letter for letter in name if letter.isalnum())
        command = [sys.executable, "-m", "openquant", "compress", "-m", str(source), "-o", str(output), "-q"]
        found[name] = output, [*command, "--scheme", scheme, *more]
    for name, scheme in PEERS.items() if peer else ():
        output = root / scheme
        found[name] = output, [str(peer), "-c", PEER, str(source), str(output), scheme]
    return found


def weight_error(source: Path, output: Path, scratch: Path) -> float:
    """The squared error of the quantized weights of an output over the sum of their squares."""
    import torch
    from safetensors.torch import load_file

    import openquant

    openquant.dequantize(output, scratch)
    first, second = (
        {k: v for each in root.glob("*.safetensors") for k, v in load_file(each).items()} for root in (source, scratch)
    )
    shutil.rmtree(scratch)
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    error = sum(float((first[name].double() - second[name].double()).square().sum()) for name in changed)
    return error / sum(float(first[name].double().square().sum()) for name in changed)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--peer", type=Path, help="an interpreter with llm-compressor")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--example", type=Path, default=ROOT / "examples" / "tiny-qwen3")
    options = parser.parse_args()
    work = options.source.with_name(f"{options.source.name}-four-bits")
    work.mkdir()
    log = work / "log"
    timed = commands(options.source, work, options.peer)
    runs: dict[str, list[Measured]] = {name: [] for name in timed}
    for turn in range(options.turns):
        for name, (output, command) in timed.items():
            warm_cache(options.source)
            back_memory(1 << 30)
            runs[name].append(measure(command, log))
            shutil.rmtree(output)
            print(f"turn {turn + 1} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    print("| command | wall s | CPU s | peak RSS MB |\n|---|---|---|---|")
    for name, each in runs.items() if options.turns else ():
        wall, cpu, peak = (statistics.median(getattr(run, field) for run in each) for field in ("wall", "cpu", "peak"))
        print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak / 1e6:.0f} |")

    import openquant

    made = commands(options.example, work, options.peer)
    for _, command in made.values():
        measure(command, log)
    outputs = [output for output, _ in made.values()]
    found = openquant.evaluate(outputs, options.example, samples=16, length=512)
    print("\n| | size MB | squared error of weights | KL, nats |\n|---|---|---|---|")
    for name, output, each in zip(made, outputs, found.outputs, strict=True):
        low, high = each["kl"]["interval"]
        error = weight_error(options.example, output, work / "plain")
        size = each["sizes"]["output"] / 1e6
        print(f"| {name} | {size:.2f} | {error:.5f} | {each['kl']['mean']:.5f} [{low:.5f}, {high:.5f}] |")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

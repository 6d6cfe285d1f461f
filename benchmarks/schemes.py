"""What every scheme costs on one model: bytes, KL, tokens, perplexity, and what it answers to a prompt.

    python benchmarks/schemes.py examples/tiny-qwen3

prints the table of docs/evaluation.md. The model is converted once in each scheme, and all of them are evaluated in one
pass on the built-in texts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import openquant
from openquant.formats.names import SCHEME_NAMES


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scratch", type=Path, help="where outputs go (default: beside the source)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch or options.source.parent) as scratch:
        outputs = [Path(scratch) / scheme for scheme in SCHEME_NAMES]
        for output in outputs:
            openquant.compress(options.source, output, output.name)
        found = openquant.evaluate(
            outputs,
            options.source,
            samples=options.samples,
            length=options.length,
            begun=lambda line: print(line, file=sys.stderr),
        )
    floor, first = found.floor, found.outputs[0]
    print(
        "| | bytes | KL, nats | 95 % | weights alone | 99th | same token | perplexity | verdict | texts part at token |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    size, perplexity = first["sizes"]["source"], first["perplexity"]["source"]
    print(f"| source | {size / 1e6:.2f} MB | | | | | | {perplexity:.3f} | | |")
    print(
        f"| floor | | {spread(floor['kl'], floor['interval'])} | | {floor['p99']:.2g} | {floor['top1']:.2%} "
        f"| {floor['perplexity']:.3f} | | |"
    )
    for output, each in zip(outputs, found.outputs, strict=True):
        parted = ", ".join("-" if text["differs_at"] is None else str(text["differs_at"]) for text in each["texts"])
        kl = each["kl"]
        print(
            f"| `{output.name}` | {each['sizes']['output'] / 1e6:.2f} MB | {spread(kl['mean'], kl['interval'])} "
            f"| {each['weights_only']['kl']:.3g} | {kl['p99']:.2g} | {each['top1']:.2%} "
            f"| {each['perplexity']['output']:.3f} | {each['verdict']} | {parted} |"
        )
    text = first["text"]
    print(f"\n{text['positions']:,} positions of {text['documents']} texts, SHA-256 {text['sha256'][:16]}")


def spread(mean: float, interval: list[float]) -> str:
    """A mean KL and its interval, two cells."""
    return f"{mean:.3g} | {interval[0]:.3g} to {interval[1]:.3g}"


if __name__ == "__main__":
    main()

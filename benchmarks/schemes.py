"""What every scheme costs on one model: bytes, KL, tokens, perplexity, and what it answers to a prompt.

    python benchmarks/schemes.py examples/tiny-qwen3

prints the table of docs/results.md. The model is converted once in each scheme, and all of them are evaluated in one
pass on the built-in texts. --scheme NAME measures that scheme alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import openquant
from openquant.formats.hardware import SCHEME_NAMES


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "--scheme", action="append", choices=list(SCHEME_NAMES), help="measure this scheme (repeatable; default: all)"
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompts", type=Path, help="a file of prompts; built-in ones if there is none")
    parser.add_argument("--scratch", type=Path, help="where outputs go (default: beside the source)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch or options.source.parent) as scratch:
        outputs = [Path(scratch) / scheme for scheme in dict.fromkeys(options.scheme or SCHEME_NAMES)]
        for output in outputs:
            openquant.compress(options.source, output, output.name)
        found = openquant.evaluate(
            outputs,
            options.source,
            samples=options.samples,
            length=options.length,
            prompts=options.prompts,
        )
    print("| scheme | size | KL, nats | weights alone | same token | perplexity (ratio) | verdict | texts differ at |")
    print("|---|---|---|---|---|---|---|---|")
    for output, each in zip(outputs, found.outputs, strict=True):
        low, high = each["kl"]["interval"]
        perplexity = each["perplexity"]
        differ = ("never" if text["differs_at"] is None else str(1 + text["differs_at"]) for text in each["texts"])
        print(
            f"| `{output.name}` | {each['sizes']['output'] / 1e6:.2f} MB "
            f"| {each['kl']['mean']:.5f} [{low:.5f}, {high:.5f}] | {each['weights_only']['kl']:.5f} "
            f"| {100 * each['top1']:.2f} % | {perplexity['output']:.3f} ({perplexity['ratio']:.4f}) "
            f"| {each['verdict']} | {', '.join(differ)} |"
        )
    first, floor = found.outputs[0], found.floor
    print(
        f"\nThe source: {first['sizes']['source'] / 1e6:.2f} MB, perplexity {first['perplexity']['source']:.3f}. "
        f"The floor: {floor['kl']:.6f} nats, {100 * floor['top1']:.2f} %. {first['text']['positions']:,} positions."
    )


if __name__ == "__main__":
    main()

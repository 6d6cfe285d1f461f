"""What a quantized output head or embedding costs on one model: bytes and KL, all else in 16 bits.

    python benchmarks/head.py ~/.cache/openquant/real/smollm2-135m --samples 6 --length 128 --scheme int8-weights

prints the table of docs/output-head.md. Where the head is the embedding, it measures a copy in which they are separate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

import openquant
from openquant.formats.schemes import SCHEMES

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "--scheme", action="append", choices=list(SCHEMES), help="measure this scheme (repeatable; default: all)"
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = untied(options.source, Path(scratch) / "untied")
        outputs = {}
        for scheme in dict.fromkeys(options.scheme or SCHEMES):
            format = "compressed-tensors" if scheme in ("tensor", "block") else None
            sizes = {"group_size": "64"} if SCHEMES[scheme].group_size else {}
            for part in ("head", *(["embedding"] if SCHEMES[scheme].embedding else [])):
                output = Path(scratch) / f"{scheme}-{part}"
                tables = {"quantize_lm_head": part == "head", "quantize_embeddings": part == "embedding"}
                openquant.compress(source, output, scheme, format=format, ignore="model.layers.**", **sizes, **tables)
                outputs[output] = part, scheme
        found = openquant.evaluate(
            list(outputs),
            source,
            samples=options.samples,
            length=options.length,
        )
    print("| part | scheme | bytes | KL, nats |")
    print("|---|---|---|---|")
    rows = zip(outputs.values(), found.outputs, strict=True)
    for (part, scheme), each in sorted(rows, key=lambda row: row[0][0], reverse=True):
        saved = each["sizes"]["source"] - each["sizes"]["output"]
        low, high = each["kl"]["interval"]
        print(f"| {part} | `{scheme}` | -{saved / 1e6:.1f} MB | {each['kl']['mean']:.5f} [{low:.5f}, {high:.5f}] |")
    first = found.outputs[0]
    print(f"\nThe source: {first['sizes']['source'] / 1e6:.1f} MB. {first['text']['positions']:,} positions.")


def untied(source: Path, copy: Path) -> Path:
    """Copy a model of one shard whose head is its embedding so that both are separate; return others as they are."""
    config = json.loads((source / "config.json").read_text())
    if not config.get("tie_word_embeddings"):
        return source
    shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return copy


if __name__ == "__main__":
    main()

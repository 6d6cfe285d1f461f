"""Which outputs mlx-lm reads, and how far what it computes is from the source: "Other libraries" of docs/engines.md.

    python -m venv DIR/mlx && DIR/mlx/bin/pip install 'mlx[cpu]' mlx-lm==0.32.2
    python benchmarks/mlx_reads.py WORK --mlx DIR/mlx/bin/python

The models are examples/tiny-qwen3 and a random one of DeepSeek V3's class. Dequantized outputs are asked about too. It
needs no GPU of Apple's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMES = {
    **{name: {} for name in ("tensor", "channel", "block", "int8", "int8-weights", "nvfp4", "mxfp4")},
    **{f"int{bits}": {} for bits in (7, 6, 5, 4, 3, 2)},
    "int4-groups-of-32": {"group_size": 32},
}
TOKENS = [50, 61, 72, 100, 200, 300, 401, 7, 9, 15, 30, 44]


def main() -> None:
    """Make the outputs that are missing, and print what mlx-lm says of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="where outputs are kept")
    parser.add_argument("--mlx", type=Path, help="an interpreter with mlx-lm")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        for root in sorted(options.work.iterdir()):
            ask(root)
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from openquant import compress, dequantize
    from support import small_checkpoints

    deepseek, qwen = options.work / "deepseek", options.work / "qwen3"
    # mlx-lm knows draft layers by a number that this model has not.
    weights = {
        name: each
        for name, each in small_checkpoints.tensors("DeepseekV3ForCausalLM").items()
        if ".layers.2." not in name
    }
    small_checkpoints.write(deepseek / "source", "DeepseekV3ForCausalLM", weights=weights)
    config = json.loads((deepseek / "source" / "config.json").read_text())
    (deepseek / "source" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    qwen.mkdir(exist_ok=True)
    if not (qwen / "source").exists():
        (qwen / "source").symlink_to(ROOT / "examples" / "tiny-qwen3")
    for root in (deepseek, qwen):
        for name, given in SCHEMES.items():
            if not (root / name).exists():
                compress(root / "source", root / name, name.split("-groups")[0], **given)
                dequantize(root / name, root / f"{name}-plain")
    subprocess.run([str(options.mlx), __file__, str(options.work), "--run"], check=True)


def ask(root: Path) -> None:
    """Print what mlx-lm makes of each output below a directory; run by its own interpreter."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)

    def logprobs(path: Path) -> np.ndarray:
        model = load_model(path)[0]
        # Products of experts on a CPU are in float32 alone.
        model.set_dtype(mx.float32)
        found = model(mx.array([TOKENS]))
        return np.array(found - mx.logsumexp(found, axis=-1, keepdims=True))[0]

    source = logprobs(root / "source")
    for path in sorted(path for path in root.iterdir() if path.name != "source"):
        try:
            found = logprobs(path)
        except ValueError as error:
            print(f"{root.name} {path.name}: refused: {str(error)[:100]!r}")
            continue
        print(f"{root.name} {path.name}: KL {(np.exp(source) * (source - found)).sum(-1).mean():.4f}")


if __name__ == "__main__":
    main()

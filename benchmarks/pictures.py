"""The pictures of docs/explanation, from a layer of a model that somebody else trained.

    python benchmarks/real_models.py DIR && pip install -e '.[report]'
    python benchmarks/pictures.py DIR/smollm2-135m docs/explanation

It compresses the model twice, into a temporary directory, to count the codes of four bits. A minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from safetensors import safe_open

LAYER = "model.layers.10.mlp.down_proj"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLUE, ORANGE = "#0072b2", "#e69f00"
STYLE: Any = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="SmolLM2-135M, which real_models.py fetched")
    parser.add_argument("out", type=Path, help="where grids.png, scales.png and codes.png are written")
    options = parser.parse_args()
    weight = read(options.model, f"{LAYER}.weight").float().numpy()
    with tempfile.TemporaryDirectory() as work, matplotlib.rc_context(STYLE):
        draw_grids(weight).savefig(options.out / "grids.png", dpi=160)
        draw_scales(weight).savefig(options.out / "scales.png", dpi=160)
        draw_codes(options.model, Path(work)).savefig(options.out / "codes.png", dpi=160)


def read(directory: Path, name: str) -> torch.Tensor:
    """Read a tensor of a checkpoint of one shard."""
    with safe_open(directory / "model.safetensors", "pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(name)
    return tensor


def grids() -> dict[str, np.ndarray[Any, Any]]:
    """The values of each number, as parts of the largest."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    e4m3 = e4m3[np.isfinite(e4m3)]
    e2m1 = np.array([sign * value for sign in (-1, 1) for value in E2M1])
    return {
        "INT8": np.arange(-127, 128) / 127,
        "FP8 (E4M3)": e4m3 / 448,
        "FP4 (E2M1)": e2m1 / 6,
        # The scale is the largest weight divided by 7.5.
        "INT4": np.arange(-8, 8) / 7.5,
    }


def draw_grids(weight: np.ndarray[Any, Any]) -> Figure:
    """Weights of a layer in groups of 128, each divided by its largest, above the values that codes stand for."""
    groups = weight.reshape(-1, 128)
    parts = (groups / np.abs(groups).max(1, keepdims=True)).ravel()
    figure = Figure((8.0, 4.0), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1.0))
    above.hist(parts, bins=np.linspace(-1, 1, 161), color=BLUE, density=True)
    above.set_ylabel("share of weights")
    above.set_yticks([])
    rows = grids()
    below.eventplot(list(rows.values()), colors=BLUE, linelengths=0.7, linewidths=0.7)
    below.set_yticks(range(len(rows)), list(rows))
    below.invert_yaxis()
    below.set_xlabel("weight, divided by the largest of its group of 128")
    below.set_xlim(-1.09, 1.09)
    for axes in (above, below):
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
    return figure


def draw_scales(weight: np.ndarray[Any, Any]) -> Figure:
    """The largest weight of what shares a scale: of the layer, each row, each block, each group of 16."""
    # SmolLM2's 576 rows are no multiple of 128: the picture has as many whole blocks as there are.
    part = np.abs(weight[:512, :512])
    blocks = part.reshape(4, 128, 4, 128).max((1, 3))
    shown = {
        "tensor: one": np.full((1, 1), part.max()),
        "channel: one a row": part.max(1, keepdims=True),
        "block: one a 128x128": blocks,
        "nvfp4: one a 16 inputs": part.reshape(512, 32, 16).max(2),
    }
    figure = Figure((8.0, 2.6), layout="constrained", facecolor="white")
    norm = LogNorm(float(shown["nvfp4: one a 16 inputs"].min()), float(part.max()))
    panels = figure.subplots(1, len(shown))
    for axes, (title, values) in zip(panels, shown.items(), strict=True):
        picture = axes.imshow(values, norm=norm, extent=(0, 512, 512, 0), interpolation="nearest", aspect="equal")
        axes.set_title(title, fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("512 rows")
    panels[0].set_xlabel("512 inputs")
    bar = figure.colorbar(picture, ax=panels, shrink=0.66, ticks=(0.25, 0.5, 1, 2, 4), format="%g")
    bar.minorticks_off()
    bar.set_label("largest magnitude")
    return figure


def draw_codes(model: Path, work: Path) -> Figure:
    """How often a layer has each code of four bits."""
    figure = Figure((8.0, 2.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for axes, scheme in zip(panels, ("int4", "nvfp4"), strict=True):
        output = work / scheme
        command = [sys.executable, "-m", "openquant", "compress", str(model), "-o", str(output), "--scheme", scheme]
        subprocess.run([*command, "-q"], check=True)
        packed = read(output, f"{LAYER}.weight_packed").numpy().view(np.uint8)
        codes = np.bincount(np.concatenate([(packed & 15).ravel(), (packed >> 4).ravel()]), minlength=16)
        if scheme == "int4":
            names = [str(code - 8) for code in range(16)]
        else:
            # The sign is the highest bit, and -0 is 0.
            codes = np.concatenate([codes[15:8:-1], codes[:1] + codes[8:9], codes[1:8]])
            names = [f"{value:g}" for value in (*(-value for value in E2M1[:0:-1]), *E2M1)]
        axes.bar(range(len(codes)), 100 * codes / codes.sum(), color=BLUE, width=0.8)
        axes.set_xticks(range(len(codes)), names, fontsize=8)
        axes.set_title(f"{scheme}: 16 values" if scheme == "int4" else f"{scheme}: 15 values", fontsize=10)
        axes.set_ylabel("per cent of codes")
    return figure


if __name__ == "__main__":
    main()

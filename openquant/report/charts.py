"""Charts of the report, as SVG that stands inside of the page.

Drawn by matplotlib, without its state and without a display. In SVG what is ink takes the colour of the page's text, so
one chart serves light and dark; the colours beside it are Okabe and Ito's, which the colour-blind tell apart, and never
the only difference. The same figures give the same bytes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .escape import terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's blue, orange and green.
OUTPUT, FLOOR, ROUTED = "#0072b2", "#e69f00", "#009e73"
# Stands for the page's own ink until the SVG is written.
_INK = "#010203"
# Inches: on a phone a chart is as wide as the page, and its letters are still read.
_SIZE = (4.4, 2.9)
STYLE: Any = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "openquant",
    # A dollar in a name is no formula.
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Letters of a name in a chart.
_NAME = 24
NOISE = "floor: the source with bfloat16's noise"

Draw = Callable[["Axes"], None]


def _chart(draw: Draw, size: tuple[float, float] = _SIZE) -> str:
    """A chart as an SVG element."""
    ink: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context({**STYLE, **dict.fromkeys(ink, _INK)}):
        figure = Figure(size, layout="constrained")
        target = io.StringIO()
        with quiet_fonts():
            draw(figure.add_subplot())
            figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


@contextmanager
def quiet_fonts() -> Iterator[None]:
    """No word of letters that the font has not (a page is shown in another, a picture has boxes for them), nor of axes
    that are as long as nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def distribution(evaluation: Mapping[str, Any]) -> str:
    """The share of positions by their KL, beside the floor's."""
    return _chart(lambda axes: draw_distribution(axes, evaluation["kl_histogram"]))


def draw_distribution(axes: Axes, histogram: Mapping[str, Any]) -> None:
    """The share of positions by their KL, and the floor's."""
    edges = histogram["edges"]
    shares = [[100 * share for share in histogram[name]] for name in ("floor", "output")]
    axes.stairs(shares[0], edges, facecolor=f"{FLOOR}66", edgecolor=FLOOR, fill=True, hatch="///", label=NOISE)
    axes.stairs(shares[1], edges, color=OUTPUT, linewidth=2.0, label="output")
    largest = [max(pair) for pair in zip(*shares, strict=True)]
    used = [number for number, share in enumerate(largest) if share > 0.005]
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_plain)
    axes.xaxis.set_minor_formatter(_nothing)
    if used:
        axes.set_xlim(edges[used[0]], edges[used[-1] + 1])
    # Room for the legend.
    axes.set_ylim(0, 1.3 * max(largest, default=1) or 1)
    axes.set_xlabel("KL of a position, nats")
    axes.set_ylabel("share of positions, %")
    axes.legend(frameon=False, loc="upper left", fontsize=8)


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _nothing(value: float, _: float) -> str:
    del value
    return ""


def by_confidence(evaluation: Mapping[str, Any]) -> str:
    """The mean KL by how sure the source is."""
    bins = [each for each in evaluation["kl_by_confidence"] if each["kl"] is not None]

    def draw(axes: Axes) -> None:
        names = [f"{each['from']:g} to {each['to']:g}\n{each['positions']:,}" for each in bins]
        axes.bar(range(len(bins)), [each["kl"] for each in bins], color=OUTPUT, width=0.7)
        axes.axhline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor, all positions")
        axes.set_xticks(range(len(bins)), names, fontsize=7.5)
        axes.set_xlabel("the source's largest probability; positions")
        axes.set_ylabel("mean KL, nats")
        axes.legend(frameon=False, fontsize=8)

    return _chart(draw)


def by_domain(evaluation: Mapping[str, Any]) -> str:
    """The mean KL of each domain, with its interval."""
    domains = evaluation["kl_by_domain"][:20]

    def draw(axes: Axes) -> None:
        for number, each in enumerate(domains):
            low, high = each["interval"] or (each["kl"], each["kl"])
            axes.plot([low, high], [number, number], color=OUTPUT, linewidth=3, alpha=0.5, solid_capstyle="butt")
            axes.plot(each["kl"], number, "o", color=OUTPUT)
        axes.axvline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor")
        axes.set_yticks(range(len(domains)), [chart_name(each["domain"]) for each in domains])
        axes.set_ylim(len(domains) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("mean KL, nats, with its 95 % interval")
        axes.legend(frameon=False, fontsize=8)

    return _chart(draw, (_SIZE[0], max(1.6, 0.9 + 0.3 * len(domains))))


def by_position(evaluation: Mapping[str, Any]) -> str:
    """The mean KL along a text."""
    spans = [each for each in evaluation["kl_by_position"] if each["kl"] is not None]

    def draw(axes: Axes) -> None:
        edges = [*(each["from"] for each in spans), spans[-1]["to"]] if spans else [0, 1]
        axes.stairs([each["kl"] for each in spans] or [0], edges, color=OUTPUT, linewidth=2.0)
        axes.axhline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor, all positions")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel("mean KL, nats")
        axes.legend(frameon=False, fontsize=8)

    return _chart(draw)


def by_depth(evaluation: Mapping[str, Any]) -> str:
    """How far the hidden states are from the source's after each layer, and the share of tokens routed otherwise."""
    layers = evaluation["layers"]

    def draw(axes: Axes) -> None:
        numbers = range(len(layers))
        axes.plot(numbers, [each["distance"] for each in layers], color=OUTPUT, marker=".", label="output")
        floor = [(at, each["floor"]) for at, each in enumerate(layers) if each.get("floor") is not None]
        if floor:
            axes.plot(*zip(*floor, strict=True), color=FLOOR, linestyle="--", label="floor")
        routed = [
            (at, each["routed_otherwise"]) for at, each in enumerate(layers) if each.get("routed_otherwise") is not None
        ]
        if routed:
            axes.plot(
                *zip(*routed, strict=True), color=ROUTED, linestyle=":", marker="x", label="share routed otherwise"
            )
        if any(each["distance"] > 0 for each in layers):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_plain)
            axes.yaxis.set_minor_formatter(_nothing)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel("relative distance")
        axes.legend(frameon=False, fontsize=8)

    return _chart(draw)


def shades(values: Sequence[float | None]) -> list[tuple[str, str] | None]:
    """For each value the colour of a cell and that of its text, "#00204c" and "#ffffff", along one scale of all.

    The scale is logarithmic; None and zero have no colour.
    """
    known = [value for value in values if value is not None and value > 0]
    low, high = (math.log(min(known)), math.log(max(known))) if known else (0.0, 0.0)
    # Layers that are alike should look it.
    span = max(high - low, math.log(2))
    scale = matplotlib.colormaps["cividis"]
    found: list[tuple[str, str] | None] = []
    for value in values:
        if value is None or value <= 0:
            found.append(None)
            continue
        red, green, blue, _ = scale((math.log(value) - low) / span)
        dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45
        rgb = "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
        found.append((f"#{rgb}", "#ffffff" if dark else "#000000"))
    return found


def chart_name(text: str, most: int = _NAME) -> str:
    """A name in a chart: on one line, and not longer than fits."""
    text = terminal(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."

"""Charts of the HTML report, as SVG elements inside of the page.

matplotlib draws them without global state and without a display. Text and axes take the colour of the page's text, so
a chart fits light and dark pages. Curves have colours of Okabe and Ito, which colour-blind people can tell apart, and
also differ in line style. A dark page gives them lighter colours by variables of its style sheet. The same figures give
the same bytes.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .cells import terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's blue, orange and green.
OUTPUT = "#0072b2"
FLOOR = "#e69f00"
ROUTED = "#009e73"
# Placeholder for the colour of the page's text, replaced in the SVG.
_INK = "#010203"
# In inches: text is still legible when a chart fills the width of a phone.
_SIZE = (4.4, 2.9)
STYLE: Any = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "openquant",
    # A dollar sign in a name does not begin a formula.
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Most characters of a name in a chart.
_NAME_LENGTH = 24
NOISE = "floor: the source with bfloat16's noise"

Draw = Callable[["Axes"], None]


def draw_svg(draw: Draw, size: tuple[float, float] = _SIZE, number: int = 0) -> str:
    """Draw a chart and return it as an SVG element.

    Args:
        draw: draws into matplotlib's axes.
        size: width and height in inches.
        number: goes into the element's ids. Charts of a page that may be hidden apart from each other need different
            numbers: what is hidden lends no pattern to others.
    """
    ink: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    salt: Any = {"svg.hashsalt": f"{STYLE['svg.hashsalt']} {number}"}
    with matplotlib.rc_context({**STYLE, **dict.fromkeys(ink, _INK), **salt}):
        figure = Figure(size, layout="constrained")
        target = io.StringIO()
        with quiet_fonts():
            draw(figure.add_subplot())
            figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    for name, colour in (("output", OUTPUT), ("floor", FLOOR), ("routed", ROUTED)):
        svg = svg.replace(f": {colour}", f": var(--{name}, {colour})")
    return svg


@contextmanager
def quiet_fonts() -> Iterator[None]:
    """In the `with` block, suppress matplotlib's warnings of missing glyphs and of axes without extent.

    A browser has other fonts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def distribution(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the histogram of the positions' KL, of the output and of the noise floor.

    Args:
        evaluation: the content of an eval.json.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    return draw_svg(lambda axes: draw_distribution(axes, evaluation["kl_histogram"]), number=number)


def draw_distribution(axes: Axes, histogram: Mapping[str, Any]) -> None:
    """Draw the histograms of the positions' KL, of the output and of the noise floor, into axes.

    Args:
        axes: matplotlib's axes.
        histogram: `kl_histogram` of an eval.json: `edges` of the bins in nats, and for `output` and `floor` the share
            of positions (of 1) in each bin.
    """
    edges = histogram["edges"]
    shares = [[100 * share for share in histogram[name]] for name in ("floor", "output")]

    # Twice, because in an SVG a hatch in a filled patch has the colour of the patch.
    filled = axes.stairs(shares[0], edges, color=f"{FLOOR}66", fill=True)
    hatched = axes.stairs(shares[0], edges, facecolor="none", edgecolor=FLOOR, hatch="///", baseline=None)

    # From the first bin with a share to the last: a curve along zero, or down to it at its ends, shows nothing.
    drawn = [number for number, share in enumerate(shares[1]) if share > 0] or [0]
    first = drawn[0]
    last = drawn[-1] + 1
    curve = axes.stairs(shares[1][first:last], edges[first : last + 1], baseline=None, color=OUTPUT, linewidth=2.0)

    largest = [max(pair) for pair in zip(*shares, strict=True)]
    visible = [number for number, share in enumerate(largest) if share > 0.005]

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain_label)
    axes.xaxis.set_minor_formatter(no_label)

    if visible:
        axes.set_xlim(edges[visible[0]], edges[visible[-1] + 1])
    # Leave room for the legend.
    axes.set_ylim(0, 1.3 * max(largest, default=1) or 1)

    axes.set_xlabel("KL of a position, nats")
    axes.set_ylabel("share of positions, %")
    axes.legend([(filled, hatched), curve], [NOISE, "output"], frameon=False, loc="upper left", fontsize=8)


def plain_label(value: float, _: float) -> str:
    """Format a tick of a logarithmic axis; for `set_major_formatter`."""
    return f"{value:g}"


def no_label(value: float, _: float) -> str:
    """Leave a tick of a logarithmic axis without a label; for `set_minor_formatter`."""
    del value
    return ""


def by_confidence(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the mean KL by the source's largest probability.

    Args:
        evaluation: the content of an eval.json.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    bins = [entry for entry in evaluation["kl_by_confidence"] if entry["kl"] is not None]

    def draw(axes: Axes) -> None:
        names = [f"{entry['from']:g} to {entry['to']:g}\n{entry['positions']:,}" for entry in bins]
        axes.bar(range(len(bins)), [entry["kl"] for entry in bins], color=OUTPUT, width=0.7)
        axes.axhline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor, all positions")
        axes.set_xticks(range(len(bins)), names, fontsize=7.5)
        axes.set_xlabel("the source's largest probability; positions")
        axes.set_ylabel("mean KL, nats")
        axes.legend(frameon=False, fontsize=8)

    return draw_svg(draw, number=number)


def by_domain(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the mean KL of each domain (a file or dataset subset) with its interval, of the first twenty.

    Args:
        evaluation: the content of an eval.json.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    domains = evaluation["kl_by_domain"][:20]

    def draw(axes: Axes) -> None:
        for number, domain in enumerate(domains):
            low, high = domain["interval"] or (domain["kl"], domain["kl"])
            axes.plot([low, high], [number, number], color=OUTPUT, linewidth=3, alpha=0.5, solid_capstyle="butt")
            axes.plot(domain["kl"], number, "o", color=OUTPUT)
        axes.axvline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor")
        axes.set_yticks(range(len(domains)), [chart_name(domain["domain"]) for domain in domains])
        axes.set_ylim(len(domains) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("mean KL, nats, with its 95 % interval")
        # Above the axes, because points may lie anywhere in them.
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)

    return draw_svg(draw, (_SIZE[0], max(1.6, 0.9 + 0.3 * len(domains))), number)


def by_position(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the mean KL by position in the text.

    Args:
        evaluation: the content of an eval.json.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    bins = [entry for entry in evaluation["kl_by_position"] if entry["kl"] is not None]

    def draw(axes: Axes) -> None:
        edges = [*(entry["from"] for entry in bins), bins[-1]["to"]] if bins else [0, 1]
        axes.stairs([entry["kl"] for entry in bins] or [0], edges, baseline=None, color=OUTPUT, linewidth=2.0)
        axes.axhline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--", label="floor, all positions")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel("mean KL, nats")
        axes.legend(frameon=False, fontsize=8)

    return draw_svg(draw, number=number)


def by_depth(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw, by decoder layer, the distance of hidden states and the share of tokens that are routed to other experts.

    Args:
        evaluation: the content of an eval.json.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    layers = evaluation["layers"]

    def draw(axes: Axes) -> None:
        numbers = range(len(layers))
        axes.plot(numbers, [layer["distance"] for layer in layers], color=OUTPUT, marker=".", label="output")

        floor = [(number, layer["floor"]) for number, layer in enumerate(layers) if layer.get("floor") is not None]
        if floor:
            axes.plot(*zip(*floor, strict=True), color=FLOOR, linestyle="--", label="floor")

        routed = [
            (number, layer["routed_otherwise"])
            for number, layer in enumerate(layers)
            if layer.get("routed_otherwise") is not None
        ]
        if routed:
            axes.plot(
                *zip(*routed, strict=True), color=ROUTED, linestyle=":", marker="x", label="share routed otherwise"
            )

        if any(layer["distance"] > 0 for layer in layers):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(plain_label)
            axes.yaxis.set_minor_formatter(no_label)

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel("relative distance")
        axes.legend(frameon=False, fontsize=8)

    return draw_svg(draw, number=number)


def chart_name(text: str, most: int = _NAME_LENGTH) -> str:
    """Return a name as a chart shows it: control characters escaped, on one line, and cut if it is long.

    Args:
        text: the name.
        most: the most characters of the result, with three dots at the end if it is cut.
    """
    text = terminal(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."

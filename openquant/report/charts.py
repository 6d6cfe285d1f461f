"""Charts of the HTML report, as SVG elements inside of the page.

matplotlib draws them without global state and without a display. Text and axes take the colour of the page's text, so
a chart fits light and dark pages. Curves have colours of Okabe and Ito, which colour-blind people can tell apart, and
also differ in line style. A dark page gives them lighter colours by variables of its style sheet. The same figures give
the same bytes.

The picture that compares several outputs has size against KL, on a logarithmic axis. Each output is a point with its
name beside it. The frontier joins the outputs than which no other is both smaller and closer to the source. Below the
floor a KL means nothing, because rounding noise alone causes as much.

    figure = Figure((8.0, 4.2), layout="constrained")
    draw_comparison(figure.add_subplot(), evaluations)

Pictures of evaluations: the picture for a model card, and the recovery of tasks.

Recovery is the output's accuracy as a share of the source's. Each row has the mean as a diamond with its 95 % interval,
and a small circle for each task. The line at 100 % is the source.

    figure = Figure((8.0, 2.4), layout="constrained")
    draw_recovery(figure.add_subplot(), recovery_rows(evaluations))
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import LogLocator, MaxNLocator

from ..evaluation.types import kl_text
from ..files.cards import evaluation_digest
from ..version import __version__
from .cells import gigabytes, per_cent, terminal
from .words import recovery_text, texts_origin

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


# Names up to this length are drawn whole. Longer ones lose the beginning that all share, and then their middle.
_WHOLE_NAME = 16
_LONGEST_NAME = 24
# A KL up to this is shown as zero.
_LEAST_KL = 1e-15
FRONTIER = "frontier: no other output is smaller and closer"
# Width and height in inches: the text is legible when the first fills a screen, and the second the width of a phone.
_ON_SCREEN = (10.5, 4.8)
_ON_PHONE = (4.4, 4.4)
# Radius of a marker, and distances of a name from its point, in points (1/72 inch).
_MARKER = 4.5
_DISTANCES = (6.0, 12.0, 20.0, 30.0, 44.0, 60.0, 80.0, 110.0, 150.0)
# A name farther away than this has a line to its point, and so has one to which another point is nearly as close.
_NEAR = 12.0
_NEARLY = 1.4
# Directions in which a name may lie, the best first: right, left, above, below, and those between.
_DEGREES = (0, 180, 90, 270, 35, 325, 145, 215, 60, 300, 120, 240, 15, 345, 165, 195)
_ANGLES = tuple(map(math.radians, _DEGREES))


def by_kl(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort evaluations by mean KL, the closest to the source first.

    Args:
        evaluations: for each output the content of its eval.json.
    """
    return sorted(evaluations, key=lambda evaluation: evaluation["kl"]["mean"])


def on_frontier(evaluations: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Tell which outputs are on the frontier of size and KL.

    Args:
        evaluations: for each output the content of its eval.json.

    Returns:
        For each output whether no other is at most as large and at most as far from the source, and better in one.
    """
    figures = [(evaluation["sizes"]["output"], evaluation["kl"]["mean"]) for evaluation in evaluations]
    return [
        not any(size <= own_size and kl <= own_kl and (size, kl) != (own_size, own_kl) for size, kl in figures)
        for own_size, own_kl in figures
    ]


def names_in_picture(names: Sequence[str]) -> tuple[list[str], str]:
    """Shorten names so that they fit beside points, and still differ.

    Args:
        names: names of outputs, such as "SmolLM2-135M-FP8" and "SmolLM2-135M-INT4".

    Returns:
        The names as they are drawn ("FP8", "INT4"), and the beginning that was left out ("SmolLM2-135M-"); it is empty
        if all names are short.
    """
    names = [terminal(name) for name in names]
    beginning = ""
    if len(names) > 1 and max(map(len, names)) > _WHOLE_NAME:
        # Up to the last separator, so that words stay whole.
        letters = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
        match = re.match(r".*[-_./ ]", "".join(column[0] for column in letters))
        beginning = match[0] if match and all(len(name) > len(match[0]) for name in names) else ""
    return [_without_middle(name[len(beginning) :]) for name in names], beginning


def _without_middle(name: str) -> str:
    half = (_LONGEST_NAME - 3) // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}...{name[-half:]}"


def comparison(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Draw size against KL of several outputs of one source.

    Args:
        evaluations: for each output the content of its eval.json.

    Returns:
        Two SVG elements with the same content, for a screen and for a phone.
    """

    def draw(axes: Axes) -> None:
        draw_comparison(axes, evaluations)

    return draw_svg(draw, _ON_SCREEN, -1), draw_svg(draw, _ON_PHONE, -2)


def points_as_outputs(frontier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what `comparison` needs to draw points of a search, whose noise floor is not known.

    Args:
        frontier: what `fit --search --json` prints.
    """
    return [
        {
            "output": {"name": point["name"]},
            "sizes": {"output": point["bytes"], "source": frontier["source_bytes"]},
            "kl": {"mean": point["kl"], "interval": point["interval"]},
            "floor": {"kl": 0.0},
        }
        for point in frontier["points"]
    ]


def draw_comparison(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draw size against KL of several outputs of one source.

    Args:
        axes: matplotlib's axes, in a figure whose other parts are complete: its layout is fixed here.
        evaluations: for each output the content of its eval.json.
    """
    evaluations = by_kl(evaluations)
    floor = evaluations[0]["floor"]["kl"]
    source = evaluations[0]["sizes"]["source"]
    kls = [evaluation["kl"]["mean"] for evaluation in evaluations]
    sizes = [float(evaluation["sizes"]["output"]) for evaluation in evaluations]
    low, high = _kl_limits([*kls, floor])
    # A KL of zero has no place on the axis. Its point lies near the bottom, and its name says it.
    heights = [max(kl, low * (high / low) ** 0.04) for kl in kls]
    names, _ = names_in_picture([evaluation["output"]["name"] for evaluation in evaluations])
    names = [
        name if kl == height else f"{name}: KL {kl:.2g}" for name, kl, height in zip(names, kls, heights, strict=True)
    ]
    best = on_frontier(evaluations)

    axes.set_yscale("log")
    axes.set_ylim(low, high)
    # Room for a name beside the first and the last point; a letter takes about 5 points.
    share = min(0.35, 0.05 + 5 * max(map(len, names)) / (72 * axes.get_figure().get_figwidth()))  # type: ignore[union-attr]
    margin = share * (max(sizes) - min(sizes)) or 0.1 * max(sizes) or 1.0
    axes.set_xlim(min(sizes) - margin, max(sizes) + margin)
    handles: list[Any] = []
    labels = []
    if floor > low:
        # Twice, because in an SVG a hatch in a filled patch has the colour of the patch.
        filled = axes.axhspan(low, floor, facecolor=f"{FLOOR}44")
        hatched = axes.axhspan(low, floor, facecolor="none", edgecolor=FLOOR, hatch="///", linewidth=0.8)
        handles.append((filled, hatched))
        labels.append(NOISE)
    line = sorted((size, height) for size, height, good in zip(sizes, heights, best, strict=True) if good)
    steps = [corner for (_, before), (size, height) in pairwise(line) for corner in ((size, before), (size, height))]
    curves = [[line[0], *steps]]
    handles += axes.step(*zip(*line, strict=True), where="post", color=OUTPUT, linewidth=1.2, alpha=0.7)
    labels.append(FRONTIER)
    for evaluation, size, height, good in zip(evaluations, sizes, heights, best, strict=True):
        interval = evaluation["kl"]["interval"]
        if interval:
            curves.append([(size, max(edge, low)) for edge in interval])
            axes.plot(*zip(*curves[-1], strict=True), color=OUTPUT, linewidth=2, alpha=0.5)
        axes.plot(size, height, "o", markersize=7, color=OUTPUT, markerfacecolor=OUTPUT if good else "none")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda size, _: _size_label(size, source))
    if high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(plain_label)
    axes.yaxis.set_minor_formatter(no_label)
    axes.set_xlabel("size, and per cent of the source's" if source else "size")
    axes.set_ylabel("mean KL, nats (logarithmic)")
    axes.legend(handles, labels, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, borderaxespad=0.2)
    place_names(axes, list(zip(sizes, heights, strict=True)), names, curves)


def _kl_limits(kls: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis for values of KL, of which some may be zero or too small to show."""
    high = max([kl for kl in kls if kl > _LEAST_KL], default=1.0)
    low = min([kl for kl in kls if kl > max(_LEAST_KL, 1e-9 * high)], default=high)
    return low / 2.5, high * 2.5


def _size_label(size: float, source: int) -> str:
    if size < 0:
        return ""
    nbytes = round(size)
    return f"{gigabytes(nbytes)}\n{per_cent(nbytes, source)}" if source else gigabytes(nbytes)


@dataclass(frozen=True)
class _Box:
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def holds(self, other: _Box) -> bool:
        return (
            self.left <= other.left
            and self.bottom <= other.bottom
            and other.right <= self.right
            and other.top <= self.top
        )

    def distance(self, spot: tuple[float, float]) -> float:
        """Return the distance of a point from the nearest edge; 0 if it is inside."""
        across = max(self.left - spot[0], 0.0, spot[0] - self.right)
        return math.hypot(across, max(self.bottom - spot[1], 0.0, spot[1] - self.top))

    def crossed_by(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Tell whether a straight line runs through the rectangle."""
        first = 0.0
        last = 1.0
        for at, to, least, most in (
            (start[0], end[0], self.left, self.right),
            (start[1], end[1], self.bottom, self.top),
        ):
            if at == to:
                if not least < at < most:
                    return False
                continue
            edges = sorted(((least - at) / (to - at), (most - at) / (to - at)))
            first = max(first, edges[0])
            last = min(last, edges[1])
        return first < last


@dataclass(frozen=True)
class _Place:
    """Where a name lies: its rectangle, and the line from its point, whose length is a part of the cost."""

    box: _Box
    start: tuple[float, float]
    end: tuple[float, float]
    cost: float


def place_names(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    curves: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write a name beside each point, so that no name covers a point or another name.

    Each name is as near to its point as possible. If it is not beside the point, a line joins the two.

    Args:
        axes: matplotlib's axes, complete but for the names. The layout of their figure is fixed here.
        points: the points, in units of the axes.
        names: a name for each point.
        curves: corners of curves that names should rather not cover, in units of the axes.
    """
    figure: Any = axes.figure
    canvas: Any = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    scale = 72 / figure.dpi

    def in_points(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(scale * x, scale * y) for x, y in axes.transData.transform(corners)]

    font = FontProperties(size=8.5)
    measure = canvas.get_renderer().get_text_width_height_descent
    extents = [tuple(scale * side for side in measure(name, font, False)[:2]) for name in names]
    sizes = [(width + 2.0, height + 2.0) for width, height in extents]
    corners = axes.get_window_extent()
    inside = _Box(*(scale * edge for edge in (corners.x0, corners.y0, corners.x1, corners.y1)))
    spots = in_points(points)
    lines = [in_points(curve) for curve in curves]
    # What fits depends on the order in which names are placed, so several are tried.
    orders = [
        sorted(range(len(points)), key=lambda at, axis=axis, sign=sign: sign * spots[at][axis])  # type: ignore[misc]
        for axis in (1, 0)
        for sign in (1, -1)
    ]
    trials = [_place_all(spots, sizes, inside, lines, order) for order in orders]
    places = min(trials, key=lambda trial: sum(place.cost for place in trial))
    for name, point, spot, place in zip(names, points, spots, places, strict=True):
        middle = (place.box.left + place.box.right) / 2, (place.box.bottom + place.box.top) / 2
        axes.annotate(
            name,
            point,
            (middle[0] - spot[0], middle[1] - spot[1]),
            textcoords="offset points",
            ha="center",
            va="center",
            fontproperties=font,
            annotation_clip=False,
        )
        length = place.box.distance(spot)
        rivals = [other for other in spots if other != spot and place.box.distance(other) < _NEARLY * length]
        if length > _NEAR or rivals:
            ends = axes.transData.inverted().transform([(x / scale, y / scale) for x, y in (place.start, place.end)])
            axes.plot(*zip(*ends, strict=True), color=matplotlib.rcParams["text.color"], linewidth=0.6, alpha=0.6)


def _place_all(
    spots: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: _Box,
    curves: Sequence[Sequence[tuple[float, float]]],
    order: Sequence[int],
) -> list[_Place]:
    """Place names one after another, in `order`, each where it costs least. Lengths are in points."""
    markers = [_Box(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in spots]

    placed: dict[int, _Place] = {}

    for number in order:
        best: _Place | None = None
        for distance in _DISTANCES:
            if best is not None and best.cost <= distance:
                break

            for preference, angle in enumerate(_ANGLES):
                place = _candidate(spots[number], sizes[number], distance, angle)
                cost = distance + 0.1 * preference + (0.0 if inside.holds(place.box) else 5000.0)
                cost += 1000.0 * sum(place.box.overlaps(other.box) for other in placed.values())
                cost += 1000.0 * sum(place.box.overlaps(marker) for marker in markers)

                if best is not None and cost >= best.cost:
                    continue

                others = [at for at in range(len(spots)) if at != number]
                cost += _crossings(place, placed.values(), [markers[at] for at in others], curves)
                cost += _doubt(place.box, spots[number], [spots[at] for at in others])
                if best is None or cost < best.cost:
                    best = _Place(place.box, place.start, place.end, cost)

        assert best is not None
        placed[number] = best

    return [placed[number] for number in range(len(spots))]


def _crossings(
    place: _Place, placed: Iterable[_Place], markers: Sequence[_Box], curves: Sequence[Sequence[tuple[float, float]]]
) -> float:
    """Return what it costs that lines cross a name, or a name's line other names and other points."""
    cost = 0.0
    for other in placed:
        cost += 200.0 * other.box.crossed_by(place.start, place.end)
        cost += 200.0 * place.box.crossed_by(other.start, other.end)
    cost += 150.0 * sum(marker.crossed_by(place.start, place.end) for marker in markers)
    return cost + 100.0 * sum(place.box.crossed_by(*ends) for curve in curves for ends in pairwise(curve))


def _doubt(box: _Box, spot: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Return what it costs that a reader may take a name for that of another point, which is as near or nearer."""
    length = box.distance(spot)
    lengths = [box.distance(other) for other in others]
    return sum(15.0 * (other < _NEARLY * length) + 40.0 * (other < length) for other in lengths)


def _candidate(spot: tuple[float, float], size: tuple[float, float], distance: float, angle: float) -> _Place:
    """Place a name in a direction from its point, with that distance between the point and the nearest edge."""
    (x, y) = spot
    (width, height) = size
    across = math.cos(angle)
    up = math.sin(angle)
    # The nearest corner or the middle of the nearest edge lies at `distance`.
    near_x = x + distance * across
    near_y = y + distance * up
    middle_x = near_x + width / 2 * (0 if abs(across) < 0.2 else math.copysign(1, across))
    middle_y = near_y + height / 2 * (0 if abs(up) < 0.2 else math.copysign(1, up))
    box = _Box(middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2)
    return _Place(box, spot, (near_x, near_y), 0.0)


# Colour of what is not a figure, size of the small print, and characters of the names of texts.
_FAINT = "#444444"
_SMALL = 8.5
_LONGEST_ORIGIN = 60


def draw_picture(evaluations: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw evaluations as a PNG, 1600 pixels wide and legible at 800.

    Args:
        evaluations: for each output the checked content of its eval.json. Of one output the picture shows the KL of
            its positions and a table of figures; of several it shows size against KL, and recovery if they were asked
            tasks.

    Returns:
        The bytes of the PNG. Its metadata name the evaluations by their digests (`evaluation_digest`).
    """
    with matplotlib.rc_context({**STYLE, "font.size": 10.5}):
        rows = recovery_rows(by_kl(evaluations)) if len(evaluations) > 1 else []
        heights = [4.2, recovery_height(rows)] if rows else [4.2]

        figure = Figure((8.0, sum(heights)), layout="constrained", facecolor="white")
        target = io.BytesIO()
        metadata: dict[str, Any] = {
            "Software": f"openquant {__version__}",
            "Description": " ".join(evaluation_digest(evaluation) for evaluation in evaluations),
        }

        with quiet_fonts():
            if len(evaluations) == 1:
                _draw_one(figure, evaluations[0])
            else:
                name = chart_name(evaluations[0]["source"]["name"], 60)
                _set_title(figure, f"{len(evaluations)} outputs of {name}")
                _set_caption(figure, evaluations[0], "bars are 95 % intervals; ")
                axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
                if rows:
                    draw_recovery(axes[1], rows)
                # Last, since it fixes the layout.
                draw_comparison(axes[0], evaluations)
            figure.savefig(target, format="png", dpi=200, metadata=metadata)

    return target.getvalue()


def _draw_one(figure: Figure, evaluation: Mapping[str, Any]) -> None:
    kl = evaluation["kl"]
    sizes = evaluation["sizes"]
    perplexity = evaluation["perplexity"]

    _set_title(figure, f"{chart_name(evaluation['output']['name'], 60)}: {chart_name(evaluation['verdict'])}")
    _set_caption(figure, evaluation, f"compared with {chart_name(evaluation['source']['name'], 60)}\n")

    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1.0))
    draw_distribution(left, evaluation["kl_histogram"])
    right.set_axis_off()

    interval = kl["interval"]
    floor = evaluation["floor"]
    share = per_cent(sizes["output"], sizes["source"])

    # Name, value, and what stands below them.
    rows = [
        ("size", gigabytes(sizes["output"]), f"{share} of the source's {gigabytes(sizes['source'])}"),
        (
            "mean KL",
            f"{kl_text(kl['mean'], floor['kl'])} nats",
            f"95 % interval: {interval[0]:.3g} to {interval[1]:.3g}"
            if interval
            else "of one text, so without interval",
        ),
        ("floor", f"{floor['kl']:.3g} nats", "the source with bfloat16's noise"),
        ("same top token", f"{100 * evaluation['top1']:.2f} %", f"floor: {100 * floor['top1']:.2f} %"),
        ("perplexity", f"{perplexity['output']:.4g}", f"source: {perplexity['source']:.4g}"),
    ]

    if "tasks" in evaluation:
        rows.append(("recovery in tasks", recovery_text(evaluation["tasks"]["mean"][0]), "of the source's accuracy"))

    for number, (name, value, below) in enumerate(rows):
        height = 0.95 - 0.95 * number / (len(rows) - 0.4)
        right.text(0.0, height, name, color=_FAINT)
        right.text(1.0, height, value, ha="right", fontweight="bold")
        right.text(1.0, height - 0.055, below, ha="right", color=_FAINT, fontsize=_SMALL)


def _set_caption(figure: Figure, evaluation: Mapping[str, Any], start: str) -> None:
    """Write below a figure which texts the outputs were compared on."""
    text = evaluation["text"]
    origin = chart_name(texts_origin(text), _LONGEST_ORIGIN)
    texts = f"{text['positions']:,} tokens of {text['documents']:,} texts{f' ({origin})' if origin else ''}"
    figure.supxlabel(f"{start}measured on {texts}", fontsize=_SMALL, color=_FAINT)


def _set_title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=15, fontweight="bold")


# Marks beyond these limits lie at the edge: of a source with one right answer a recovery may be 500 %.
LEAST = 0.0
MOST = 2.0
# Tasks that a picture shows in rows of their own.
MOST_TASKS = 40
# Width in inches on a screen, on a phone, and beside other charts; height of a row, and of all else.
_WIDE = 10.5
_NARROW = 4.4
_IN_DETAILS = 4.4
_ROW = 0.42
_REST = 1.15
# Where the mean lies in a row, and the first and the last task, from the row's middle downward.
_MEAN = -0.18
_FIRST = 0.06
_LAST = 0.36


@dataclass(frozen=True)
class RecoveryRow:
    """A row of the picture. Recoveries are fractions of 1, and None if the source has no right answer.

    Attributes:
        name: name of the output, or of the task.
        recovery: of the mean over tasks, or of the task.
        interval: its 95 % interval.
        tasks: the recovery of each task.
    """

    name: str
    recovery: float | None
    interval: Sequence[float] | None
    tasks: Sequence[float | None] = ()


def recovery_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[RecoveryRow]:
    """Make a row for each output that was asked tasks.

    Args:
        evaluations: for each output the content of its eval.json.
    """
    names, _ = names_in_picture([evaluation["output"]["name"] for evaluation in evaluations])
    rows = []
    for name, evaluation in zip(names, evaluations, strict=True):
        if "tasks" in evaluation:
            tasks = evaluation["tasks"]
            mean = tasks["mean"][0]
            of_tasks = [figures["metrics"][0]["recovery"] for figures in tasks["tasks"]]
            dots = of_tasks if len(of_tasks) > 1 else ()
            rows.append(RecoveryRow(name, mean["recovery"], mean["recovery_interval"], dots))
    return rows


def draw_recovery(axes: Axes, rows: Sequence[RecoveryRow]) -> None:
    """Draw recoveries into axes, the first row at the top.

    Args:
        axes: matplotlib's axes.
        rows: the rows.
    """
    drawn = [1.0]
    beyond = False

    def at(recovery: float) -> float:
        nonlocal beyond
        limited = min(max(recovery, LEAST), MOST)
        beyond = beyond or limited != recovery
        drawn.append(limited)
        return 100 * limited

    color: Any = matplotlib.rcParams["text.color"]
    handles: dict[str, Any] = {}
    for number, row in enumerate(rows):
        step = (_LAST - _FIRST) / max(1, len(row.tasks) - 1)
        dots = [(at(one), number + _FIRST + step * place) for place, one in enumerate(row.tasks) if one is not None]
        if dots:
            [handles["a task"]] = axes.plot(
                *zip(*dots, strict=True), "o", markersize=4, color=OUTPUT, markerfacecolor="none"
            )
        height = number + (_MEAN if row.tasks else 0)
        if row.interval:
            axes.plot([at(edge) for edge in row.interval], [height] * 2, color=OUTPUT, linewidth=2.5, alpha=0.5)
        if row.recovery is not None:
            [mark] = axes.plot(at(row.recovery), height, "D", markersize=7, color=OUTPUT)
            if row.tasks:
                handles["mean of the tasks, 95 % interval"] = mark
    axes.axvline(100, color=color, linestyle="--", linewidth=1)
    margin = 5 * (max(drawn) - min(drawn)) or 5.0
    axes.set_xlim(100 * min(drawn) - margin, 100 * max(drawn) + margin)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.set_xlabel("recovery, % of the source's accuracy" + ("\n(beyond 200: at the edge)" if beyond else ""))
    if handles:
        axes.legend(
            handles.values(), handles, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, ncols=2
        )


def recovery_of_outputs(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Draw the recovery of several outputs.

    Args:
        evaluations: for each output the content of its eval.json, in the order of the rows.

    Returns:
        Two SVG elements with the same content, for a screen and for a phone.
    """
    rows = recovery_rows(evaluations)
    return _svg(rows, _WIDE, -3), _svg(rows, _NARROW, -4)


def recovery_of_tasks(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the recovery of one output in each task, and the mean of all.

    Args:
        evaluation: the content of an eval.json, with tasks.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    tasks = evaluation["tasks"]
    named = [(chart_name(figures["task"]), figures["metrics"][0]) for figures in tasks["tasks"]]
    if len(named) > 1:
        named = [("mean of tasks", tasks["mean"][0]), *named[:MOST_TASKS]]
    rows = [RecoveryRow(name, metric["recovery"], metric["recovery_interval"]) for name, metric in named]
    return _svg(rows, _IN_DETAILS, number)


def _svg(rows: Sequence[RecoveryRow], width: float, number: int) -> str:
    return draw_svg(lambda axes: draw_recovery(axes, rows), (width, recovery_height(rows)), number)


def recovery_height(rows: Sequence[RecoveryRow]) -> float:
    """Return the height in inches that a picture of these rows needs."""
    return _REST + _ROW * max(1, len(rows)) * (1.4 if any(row.tasks for row in rows) else 1.0)

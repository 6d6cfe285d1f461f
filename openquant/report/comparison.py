"""The picture that compares several outputs: size against KL, on a logarithmic axis.

Each output is a point with its name beside it. The frontier joins the outputs than which no other is both smaller and
closer to the source. Below the floor a KL means nothing, because rounding noise alone causes as much.

    figure = Figure((8.0, 4.2), layout="constrained")
    draw_comparison(figure.add_subplot(), evaluations)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import LogLocator, MaxNLocator

from .cells import gigabytes, per_cent, terminal
from .charts import FLOOR, NOISE, OUTPUT, draw_svg, no_label, plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

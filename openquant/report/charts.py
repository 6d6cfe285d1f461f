"""Charts of the HTML report, as SVG elements inside of the page, and the picture for a model card.

matplotlib draws them without global state and without a display. Text and axes take the colour of the page's text, so
a chart fits light and dark pages. Curves have colours of Okabe and Ito, which colour-blind people can tell apart, and
also differ in line style. A dark page gives them lighter colours by variables of its style sheet. The same figures give
the same bytes.

The picture that compares several outputs has size against KL, on a logarithmic axis. Each output is a point with a
number, and the legend has its name. The frontier joins the outputs than which no other is both smaller and closer to
the source. Below the floor a KL means nothing, because rounding noise alone causes as much.

    figure = Figure((8.0, 4.2), layout="constrained")
    draw_comparison(figure.add_subplot(), evaluations)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..files.cards import evaluation_digest
from ..version import __version__
from .cells import gigabytes, per_cent, share_text, terminal, texts_origin

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's blue, orange and green.
OUTPUT = "#0072b2"
FLOOR = "#e69f00"
# Placeholder for the colour of the page's text, replaced in the SVG.
_INK = "#010203"
# In inches: text is still legible when a chart fills the width of a phone.
_SIZE = (4.4, 2.9)
# Of what compares several outputs.
_WIDE = 6.0
STYLE: Any = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    # A dollar sign in a name does not begin a formula.
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
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
    salt: Any = {"svg.hashsalt": f"openquant {number}"}
    with matplotlib.rc_context({**STYLE, **dict.fromkeys(ink, _INK), **salt}):
        figure = Figure(size, layout="constrained")
        target = io.StringIO()
        with quiet_fonts():
            draw(figure.add_subplot())
            figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    for name, colour in (("output", OUTPUT), ("floor", FLOOR)):
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
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())

    if visible:
        axes.set_xlim(edges[visible[0]], edges[visible[-1] + 1])
    # Leave room for the legend.
    axes.set_ylim(0, 1.3 * max(largest, default=1) or 1)

    axes.set_xlabel("KL of a position, nats")
    axes.set_ylabel("share of positions, %")
    axes.legend([(filled, hatched), curve], [NOISE, "output"], frameon=False, loc="upper left", fontsize=8)


def by_part(evaluation: Mapping[str, Any], parts: str, number: int = 0) -> str:
    """Draw the mean KL of each part of the positions, of the first twenty.

    Args:
        evaluation: an eval.json.
        parts: how the positions are divided: "confidence", "domain" or "position".
        number: that of the evaluation on the page.

    Returns:
        The SVG element.
    """
    entries = [entry for entry in evaluation[f"kl_by_{parts}"] if entry["kl"] is not None][:20]

    def draw(axes: Axes) -> None:
        for row, entry in enumerate(entries):
            if entry.get("interval"):
                axes.plot(entry["interval"], [row] * 2, color=OUTPUT, linewidth=3, alpha=0.5, solid_capstyle="butt")
            axes.plot(entry["kl"], row, "o", color=OUTPUT)

        axes.axvline(evaluation["floor"]["kl"], color=FLOOR, linestyle="--")
        names = [entry.get("domain") or f"{entry['from']:g} to {entry['to']:g}" for entry in entries]
        axes.set_yticks(range(len(entries)), map(chart_name, names))
        axes.set_ylim(len(entries) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("mean KL, nats (dashed: the floor)")
        axes.set_xlim(left=0)

    return draw_svg(draw, (_SIZE[0], max(1.6, 0.9 + 0.3 * len(entries))), number)


def chart_name(text: str, most: int = 24) -> str:
    """Return a name as a chart shows it: control characters escaped, on one line, and without its middle if it is long.

    Args:
        text: the name.
        most: the most characters of the result, with three dots in the middle if it is cut.
    """
    text = terminal(text)
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


# A KL up to this is shown as zero.
_LEAST_KL = 1e-15
FRONTIER = "frontier: no other output is smaller and closer"


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


def comparison(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Draw size against KL of several outputs of one source.

    Args:
        evaluations: the eval.json of each output.

    Returns:
        The SVG element.
    """
    return draw_svg(lambda axes: draw_comparison(axes, evaluations), (_WIDE, _comparison_height(evaluations)), -1)


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


def _comparison_height(evaluations: Sequence[Mapping[str, Any]]) -> float:
    """The height in inches of a picture of size against KL, with a line of the legend for each output."""
    return 4.0 + 0.17 * len(evaluations)


def draw_comparison(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draw size against KL of several outputs of one source.

    Args:
        axes: matplotlib's axes.
        evaluations: for each output the content of its eval.json.
    """
    evaluations = by_kl(evaluations)
    floor = evaluations[0]["floor"]["kl"]
    source = evaluations[0]["sizes"]["source"]
    kls = [evaluation["kl"]["mean"] for evaluation in evaluations]
    sizes = [float(evaluation["sizes"]["output"]) for evaluation in evaluations]
    low, high = _kl_limits([*kls, floor])
    # A KL of zero has no place on the axis. Its point lies near the bottom, and the legend says it.
    heights = [max(kl, low * (high / low) ** 0.04) for kl in kls]
    best = on_frontier(evaluations)

    axes.set_yscale("log")
    axes.set_ylim(low, high)
    margin = 0.1 * (max(sizes) - min(sizes)) or 0.1 * max(sizes) or 1.0
    axes.set_xlim(min(sizes) - margin, max(sizes) + margin)

    if floor > low:
        axes.axhspan(low, floor, facecolor=f"{FLOOR}44", edgecolor=FLOOR, label=NOISE)
    line = sorted((size, height) for size, height, good in zip(sizes, heights, best, strict=True) if good)
    axes.step(*zip(*line, strict=True), where="post", color=OUTPUT, linewidth=1.2, alpha=0.7, label=FRONTIER)

    for number, evaluation in enumerate(evaluations):
        spot = (sizes[number], heights[number])
        interval = evaluation["kl"]["interval"]
        if interval:
            axes.plot([spot[0]] * 2, [max(edge, low) for edge in interval], color=OUTPUT, linewidth=2, alpha=0.5)

        name = f"{number + 1}: {chart_name(evaluation['output']['name'], 40)}"
        if heights[number] != kls[number]:
            name += f", KL {kls[number]:.2g}"
        fill = OUTPUT if best[number] else "none"
        axes.plot(*spot, "o", markersize=7, color=OUTPUT, markerfacecolor=fill, linestyle="none", label=name)

        # Neighbours in KL have their numbers on different sides.
        side = 1 if number % 2 else -1
        where: Any = {"textcoords": "offset points", "ha": "center", "va": "center"}
        axes.annotate(str(number + 1), spot, (side * 9.0, 4.0), fontsize=8.5, **where)

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda size, _: _size_label(size, source))
    if high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size, and per cent of the source's" if source else "size")
    axes.set_ylabel("mean KL, nats (logarithmic)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, borderaxespad=0.2)


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


# Colour of what is not a figure, size of the small print, and characters of the names of texts.
_FAINT = "#444444"
_SMALL = 8.5
_LONGEST_ORIGIN = 60


def draw_picture(evaluations: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw evaluations as a PNG, 1600 pixels wide and legible at 800.

    Args:
        evaluations: for each output the checked content of its eval.json. Of one output the picture shows the KL of
            its positions and a table of figures; of several it shows size against KL.

    Returns:
        The bytes of the PNG. Its metadata name the evaluations by their digests (`evaluation_digest`).
    """
    with matplotlib.rc_context({**STYLE, "font.size": 10.5}):
        height = 4.2
        if len(evaluations) > 1:
            height = _comparison_height(evaluations)

        figure = Figure((8.0, height), layout="constrained", facecolor="white")
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
                draw_comparison(figure.subplots(), evaluations)
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
    certainty = "of one text, so without interval"
    if interval:
        certainty = f"95 % interval: {interval[0]:.3g} to {interval[1]:.3g}"

    # Name, value, and what stands below them.
    rows = [
        ("size", gigabytes(sizes["output"]), f"{share} of the source's {gigabytes(sizes['source'])}"),
        ("mean KL", f"{kl['mean']:.3g} nats", certainty),
        ("floor", f"{floor['kl']:.3g} nats", "the source with bfloat16's noise"),
        ("same top token", f"{100 * evaluation['top1']:.2f} %", f"floor: {100 * floor['top1']:.2f} %"),
        ("perplexity", f"{perplexity['output']:.4g}", f"source: {perplexity['source']:.4g}"),
    ]

    if "tasks" in evaluation:
        rows.append(("recovery in tasks", *_recovery_and_basis(evaluation["tasks"])))

    for number, (name, value, below) in enumerate(rows):
        height = 0.95 - 0.95 * number / (len(rows) - 0.4)
        right.text(0.0, height, name, color=_FAINT)
        right.text(1.0, height, value, ha="right", fontweight="bold")
        right.text(1.0, height - 0.055, below, ha="right", color=_FAINT, fontsize=_SMALL)


def _recovery_and_basis(tasks: Mapping[str, Any]) -> tuple[str, str]:
    """Return the recovery and what it is of; no figure in large letters if chance alone may give it."""
    metric = tasks["mean"][0]
    recovery = share_text(metric["recovery"])
    low, high = metric["recovery_interval"] or (0.0, 0.0)
    if low <= 1 <= high:
        return "within chance", f"{recovery} of {tasks['pooled']['questions']:,} questions"
    return recovery, "of the source's accuracy"


def _set_caption(figure: Figure, evaluation: Mapping[str, Any], start: str) -> None:
    """Write below a figure which texts the outputs were compared on."""
    text = evaluation["text"]
    origin = chart_name(texts_origin(text), _LONGEST_ORIGIN)
    texts = f"{text['positions']:,} tokens of {text['documents']:,} texts{f' ({origin})' if origin else ''}"
    figure.supxlabel(f"{start}measured on {texts}", fontsize=_SMALL, color=_FAINT)


def _set_title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=15, fontweight="bold")

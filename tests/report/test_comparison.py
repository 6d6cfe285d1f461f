"""The picture of several outputs: where points lie, which are on the frontier, and that every name can be read."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from openquant.report.charts import (
    STYLE,
    by_kl,
    comparison,
    draw_comparison,
    draw_picture,
    names_in_picture,
    on_frontier,
)
from support.evaluation_files import EVIL, evaluation, several

SIZES = [(10.5, 4.8), (8.0, 4.2), (4.4, 4.4)]
# Bytes and KL as measured on a model of 135 million weights: two groups in which points nearly lie on each other.
MEASURED = {
    "mxfp4": (113e6, 0.608), "int4": (115e6, 0.581), "int4-gptq": (115e6, 0.295), "nvfp4": (116.4e6, 0.189),
    "nvfp4-w4a4": (116.4e6, 0.375), "int4-g32": (116.4e6, 0.368), "tensor": (162.8e6, 0.0411),
    "channel": (163.4e6, 0.0427), "int8": (163.4e6, 0.0471), "int8-weights": (163.1e6, 0.00625),
    "mxfp8": (166e6, 0.0403),
}  # fmt: skip


def evaluations(figures: dict[str, tuple[float, float]], floor: float = 0.003) -> list[dict[str, Any]]:
    found = []
    for name, (nbytes, kl) in figures.items():
        one = evaluation()
        one["kl"] |= {"mean": kl, "interval": [0.9 * kl, 1.1 * kl]}
        one["sizes"] = {"source": 269_000_000, "output": int(nbytes)}
        one["floor"]["kl"], one["output"]["name"] = floor, name
        found.append(one)
    return found


def drawn(of: list[dict[str, Any]], size: tuple[float, float] = SIZES[0]) -> Axes:
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        axes = figure.add_subplot()
        draw_comparison(axes, of)
    return axes


def points(axes: Axes) -> list[tuple[float, float]]:
    """The markers, in pixels from the left and from the bottom."""
    marked = [line for line in axes.lines if line.get_marker() == "o"]
    return [tuple(axes.transData.transform(line.get_xydata()[0])) for line in marked]


def names(axes: Axes) -> dict[str, Any]:
    """The names in the picture, and their rectangles in pixels."""
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    found = [text for text in axes.texts if isinstance(text, Annotation)]
    return {text.get_text(): text.get_window_extent(renderer) for text in found}


def test_points_lie_farther_right_the_larger_and_higher_the_farther_from_the_source() -> None:
    of = by_kl(evaluations(MEASURED))
    axes = drawn(list(reversed(of)))  # type: ignore[arg-type]
    found = points(axes)
    assert len(found) == len(MEASURED)
    figures = [(one["sizes"]["output"], one["kl"]["mean"]) for one in of]
    for (one, at), (other, there) in itertools.combinations(zip(figures, found, strict=True), 2):
        for axis in (0, 1):
            assert (one[axis] < other[axis]) == (at[axis] < there[axis] - 1e-6)
    # Equal factors are equal lengths.
    assert axes.get_yscale() == "log"
    low, high = axes.transData.transform([(1e8, 0.01), (1e8, 0.1)])[:, 1]
    assert axes.transData.transform((1e8, 1.0))[1] - high == pytest.approx(high - low)


def test_the_floor_is_a_band_below_which_nothing_is_told_apart() -> None:
    axes = drawn(evaluations(MEASURED))
    assert axes.patches
    for band in axes.patches:
        assert isinstance(band, Rectangle)
        assert band.get_y() == axes.get_ylim()[0]
        assert band.get_y() + band.get_height() == pytest.approx(0.003)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "floor: the source with bfloat16's noise",
        "frontier: no other output is smaller and closer",
    ]
    assert not drawn(evaluations(MEASURED, 0.0)).patches


def test_the_frontier_joins_outputs_than_which_none_is_smaller_and_closer() -> None:
    of = evaluations(MEASURED)
    best = {one["output"]["name"] for one, good in zip(of, on_frontier(of), strict=True) if good}
    assert best == {"mxfp4", "int4-gptq", "nvfp4", "tensor", "int8-weights"}
    axes = drawn(of)
    [line] = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    corners = [tuple(corner) for corner in line.get_xydata()]
    assert corners == sorted(corners)
    assert [kl for _, kl in corners] == [0.608, 0.295, 0.189, 0.0411, 0.00625]
    # Points of the same figures do not rule each other out.
    assert on_frontier(evaluations({"a": (5, 0.1), "b": (5, 0.1), "c": (5, 0.2), "d": (6, 0.1)})) == [
        True, True, False, False,
    ]  # fmt: skip


def crowded() -> dict[str, tuple[float, float]]:
    """Twenty outputs, which lie in four groups."""
    rng = random.Random(0)
    return {
        f"scheme-{number}": (rng.choice([110e6, 112e6, 160e6, 165e6]) + 1e6 * rng.random(), 10 ** rng.uniform(-2, 0))
        for number in range(20)
    }


def test_every_name_can_be_read(subtests: pytest.Subtests) -> None:
    for size, figures in itertools.product(SIZES, [MEASURED, crowded()]):
        with subtests.test(figures=figures, size=size):
            axes = drawn(evaluations(figures), size)
            found = names(axes)
            assert set(found) == set(figures)
            inside = axes.get_window_extent()
            for box in found.values():
                assert inside.x0 <= box.x0 < box.x1 <= inside.x1
                assert inside.y0 <= box.y0 < box.y1 <= inside.y1
                assert not [spot for spot in points(axes) if box.contains(*spot)]
            for one, other in itertools.combinations(found.values(), 2):
                assert not one.overlaps(other)


def test_no_line_runs_through_a_name(subtests: pytest.Subtests) -> None:
    """Neither the frontier nor an interval."""
    for size, of in itertools.product(SIZES, [several(), evaluations(MEASURED)]):
        with subtests.test(of=of, size=size):
            axes = drawn(of, size)
            lines = [line for line in axes.lines if line.get_drawstyle() == "steps-post" or line.get_alpha() == 0.5]
            assert len(lines) == 1 + len(of)
            for line in lines:
                corners = list(line.get_xydata())
                if line.get_drawstyle() == "steps-post":
                    corners = [corner for (_, y), (x, z) in itertools.pairwise(corners) for corner in ((x, y), (x, z))]
                    corners.insert(0, line.get_xydata()[0])
                for (x, y), (end, z) in itertools.pairwise(axes.transData.transform(corners)):
                    for name, box in names(axes).items():
                        apart = (
                            max(x, end) <= box.x0 or min(x, end) >= box.x1 or max(y, z) <= box.y0 or min(y, z) >= box.y1
                        )
                        assert apart, name


def test_the_nearest_point_to_a_name_is_its_own_or_a_line_leads_there() -> None:
    axes = drawn(evaluations(MEASURED))
    of = by_kl(evaluations(MEASURED))
    spots = dict(zip([one["output"]["name"] for one in of], points(axes), strict=True))
    starts = [
        tuple(axes.transData.transform(line.get_xydata()[0]))
        for line in axes.lines
        if line.get_marker() == "None" and line.get_linewidth() == 0.6
    ]
    for name, box in names(axes).items():

        def distance(spot: tuple[float, float], box: Any = box) -> float:
            return math.hypot(max(box.x0 - spot[0], 0, spot[0] - box.x1), max(box.y0 - spot[1], 0, spot[1] - box.y1))

        nearest = min(spots.values(), key=distance)
        assert nearest == spots[name] or any(math.dist(start, spots[name]) < 1e-6 for start in starts), name


def test_outputs_that_are_alike_or_equal_to_the_source_are_in_the_picture() -> None:
    axes = drawn(evaluations({"one": (5, 0.0), "other": (5, 0.0), "third": (5, 0.1)}))
    assert set(names(axes)) == {"one: KL 0", "other: KL 0", "third"}
    low, high = axes.get_ylim()
    assert 0 < low < high
    for height in (line.get_xydata()[0][1] for line in axes.lines if line.get_marker() == "o"):
        assert low < height < high
    assert set(names(drawn(evaluations({"a": (0, 0.0), "b": (0, 0.0)}, 0.0)))) == {"a: KL 0", "b: KL 0"}


def test_figures_that_make_no_sense_are_drawn_all_the_same(subtests: pytest.Subtests) -> None:
    for size, kls in itertools.product([0, 2**63 - 1], [(9e99, -5.0), (5e-324, 0.0), (9e99, 1e-300), (-9e99, -1.0)]):
        with subtests.test(kls=kls, size=size):
            of = evaluations({"a": (size, kls[0]), "": (1, kls[1])}, kls[1])
            of[0]["sizes"]["source"] = of[1]["sizes"]["source"] = 0
            of[0]["kl"]["interval"] = None
            assert draw_picture(of)


def test_long_names_lose_what_all_of_them_begin_with() -> None:
    assert names_in_picture(["m-FP8", "m-INT8"]) == (["m-FP8", "m-INT8"], "")
    long = ["SmolLM2-135M-Instruct-FP8", "SmolLM2-135M-Instruct-FP8-KV8", "SmolLM2-135M-Instruct-INT4-g32"]
    assert names_in_picture(long) == (["FP8", "FP8-KV8", "INT4-g32"], "SmolLM2-135M-Instruct-")
    assert names_in_picture(["a" * 40 + "1", "a" * 40 + "2"])[0] == [
        "aaaaaaaaaa...aaaaaaaaa1",
        "aaaaaaaaaa...aaaaaaaaa2",
    ]
    assert names_in_picture([EVIL])[1] == ""


def test_a_screen_and_a_phone_have_a_picture_each() -> None:
    wide, narrow = comparison(several())
    assert 'viewBox="0 0 756 345.6"' in wide
    assert 'viewBox="0 0 316.8 316.8"' in narrow
    for svg in (wide, narrow):
        for name in ("tiny-INT4", "tiny-FP8", "tiny-INT8", "frontier", "floor"):
            assert name in svg
    # Neither borrows patterns or clips from the other, which is hidden.
    ids = [{part.split('"')[0] for part in svg.split(' id="')[1:]} for svg in (wide, narrow)]
    assert not {name for name in ids[0] & ids[1] if f"url(#{name})" in wide + narrow}
